//! The API over HTTP: handlers that check a request, have it served, and write what comes of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{StatusCode, header};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::Gateway;
use super::drive::{self, Event};
use crate::api::{ApiError, ChatRequest, Head, TextRequest, Wanted};

pub(super) fn router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(gateway)
}

type Body<T> = Result<Json<T>, JsonRejection>;

async fn chat(State(gateway): State<Arc<Gateway>>, body: Body<ChatRequest>) -> Response {
    respond(gateway, checked(body).and_then(Wanted::chat)).await
}

async fn text(State(gateway): State<Arc<Gateway>>, body: Body<TextRequest>) -> Response {
    respond(gateway, checked(body).and_then(Wanted::text)).await
}

fn checked<T>(body: Body<T>) -> Result<T, ApiError> {
    body.map(|Json(body)| body).map_err(|rejection| ApiError::bad(rejection.body_text()))
}

async fn respond(gateway: Arc<Gateway>, wanted: Result<Wanted, ApiError>) -> Response {
    let answer = async {
        let wanted = wanted?;
        let head = head(&gateway, &wanted)?;
        let (sender, mut events) = unbounded_channel();
        tokio::spawn(drive::run(gateway.clone(), wanted.clone(), sender));
        // The status is that of the first event: nothing is promised before there is a token.
        match events.recv().await {
            Some(Event::Failed(error)) => Err(error),
            Some(first) if wanted.stream => Ok(stream(head, wanted.include_usage, first, events)),
            Some(first) => whole(&head, first, events).await,
            None => Err(cut_off()),
        }
    };
    answer.await.unwrap_or_else(|error: ApiError| {
        gateway.metrics.status(error.status);
        error.into_response()
    })
}

fn head(gateway: &Gateway, wanted: &Wanted) -> Result<Head, ApiError> {
    let number = getrandom::u64().map_err(|error| ApiError::lost(format!("no random numbers: {error}")))?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let model = gateway.fleet.models().into_iter().next().unwrap_or_default();
    Ok(Head { id: format!("landfall-{number:016x}"), model, created, style: wanted.style })
}

fn cut_off() -> ApiError {
    ApiError::lost("the gateway's own task has ended without an answer")
}

/// The whole answer: an error in its middle is an error of the request.
async fn whole(
    head: &Head,
    first: Event,
    mut events: UnboundedReceiver<Event>,
) -> Result<Response, ApiError> {
    let (mut text, mut next) = (String::new(), Some(first));
    loop {
        match next {
            Some(Event::Text(part)) => text.push_str(&part),
            Some(Event::Done(finish, usage)) => {
                return Ok(Json(head.whole(&text, finish, &usage)).into_response());
            }
            Some(Event::Failed(error)) => return Err(error),
            None => return Err(cut_off()),
        }
        next = events.recv().await;
    }
}

/// Server-sent events. One that ends well ends with `[DONE]`; one that does not ends with an error, and without it.
fn stream(head: Head, include_usage: bool, first: Event, mut events: UnboundedReceiver<Event>) -> Response {
    let body = async_stream::stream! {
        let (mut next, mut is_first) = (Some(first), true);
        loop {
            match next {
                Some(Event::Text(text)) => {
                    yield sse(&head.chunk(&text, is_first, None));
                    is_first = false;
                }
                Some(Event::Done(finish, usage)) => {
                    yield sse(&head.chunk("", is_first, Some(finish)));
                    if include_usage {
                        yield sse(&head.usage(&usage));
                    }
                    yield Ok(Sse::default().data("[DONE]"));
                    break;
                }
                Some(Event::Failed(error)) => {
                    yield sse(&error.body());
                    break;
                }
                None => {
                    yield sse(&cut_off().body());
                    break;
                }
            }
            next = events.recv().await;
        }
    };
    axum::response::Sse::new(body).keep_alive(KeepAlive::default()).into_response()
}

fn sse(value: &Value) -> Result<Sse, Infallible> {
    Ok(Sse::default().data(value.to_string()))
}

async fn models(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let models = gateway.fleet.models();
    let data: Vec<Value> = models.iter().map(|id| json!({ "id": id, "object": "model" })).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// 200 as long as a request could be served.
async fn health(State(gateway): State<Arc<Gateway>>) -> Response {
    let levels = gateway.fleet.levels();
    let healthy = levels.prefill_workers > 0 && levels.decode_workers > 0 && !gateway.is_draining();
    let body = json!({
        "prefill_workers": levels.prefill_workers,
        "decode_workers": levels.decode_workers,
        "waiting": levels.waiting,
        "draining": gateway.is_draining(),
    });
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let text = gateway.metrics.render(&gateway.fleet.levels());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
