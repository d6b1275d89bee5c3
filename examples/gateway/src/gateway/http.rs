//! The API over HTTP: handlers that check a request, have it served, and write what comes of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::drive::{self, Event};
use super::fleet::is_model;
use super::{Gateway, Open};
use crate::api::{ApiError, Head, Style, Wanted};

/// Bytes of a request, at most.
const BODY: usize = 1 << 20;

pub(super) fn router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(nowhere)
        .method_not_allowed_fallback(not_so)
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(gateway)
}

type Body = Result<Json<Value>, JsonRejection>;

async fn chat(State(gateway): State<Arc<Gateway>>, body: Body) -> Response {
    respond(gateway, body, Wanted::chat).await
}

async fn text(State(gateway): State<Arc<Gateway>>, body: Body) -> Response {
    respond(gateway, body, Wanted::text).await
}

async fn nowhere(State(gateway): State<Arc<Gateway>>, uri: Uri) -> Response {
    let message = format!("there is nothing at {}; see /v1/chat/completions and /v1/completions", uri.path());
    refuse(&gateway, ApiError::of(StatusCode::NOT_FOUND, "not_found", message))
}

async fn not_so(State(gateway): State<Arc<Gateway>>, method: Method, uri: Uri) -> Response {
    let message = format!("{method} is not for {}", uri.path());
    refuse(&gateway, ApiError::of(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message))
}

/// An error before anything was begun.
fn refuse(gateway: &Gateway, error: ApiError) -> Response {
    gateway.metrics.ended(error.code);
    gateway.metrics.status(error.status);
    error.into_response()
}

fn checked(
    gateway: &Gateway,
    body: Body,
    read: fn(Value, u64) -> Result<Wanted, ApiError>,
) -> Result<(Wanted, u64), ApiError> {
    if gateway.is_draining() {
        return Err(ApiError::unavailable("the gateway is shutting down", 1));
    }
    let Json(body) = body.map_err(|rejection| {
        let message = rejection.body_text();
        match rejection.status() {
            status @ StatusCode::PAYLOAD_TOO_LARGE => {
                ApiError::of(status, "payload_too_large", format!("{message}; {BODY} bytes are the limit"))
            }
            status @ StatusCode::UNSUPPORTED_MEDIA_TYPE => {
                ApiError::of(status, "unsupported_media_type", message)
            }
            _ => ApiError::bad(message),
        }
    })?;
    let chance = getrandom::u64().map_err(|error| ApiError::lost(format!("no random numbers: {error}")))?;
    let wanted = read(body, chance)?;
    let models = gateway.fleet.models();
    if let Some(asked) = &wanted.model
        && !models.is_empty()
        && !models.iter().any(|id| is_model(id, asked))
    {
        return Err(ApiError::no_model(asked, &models));
    }
    Ok((wanted, chance))
}

async fn respond(
    gateway: Arc<Gateway>,
    body: Body,
    read: fn(Value, u64) -> Result<Wanted, ApiError>,
) -> Response {
    let open = gateway.open();
    let (wanted, number) = match checked(&gateway, body, read) {
        Ok(checked) => checked,
        Err(error) => return refuse(&gateway, error),
    };
    let answer = async {
        let (sender, mut events) = unbounded_channel();
        tokio::spawn(drive::run(gateway.clone(), wanted.clone(), sender));
        // The status is that of the first event: nothing is promised before there is a token.
        match events.recv().await {
            Some(Event::Begun(model)) => {
                let head = head(number, model, wanted.style);
                if wanted.stream {
                    Ok(stream(head, wanted.include_usage, events, open))
                } else {
                    whole(&head, events).await
                }
            }
            Some(Event::Failed(error)) => Err(error),
            Some(Event::Text(_) | Event::Done(..)) | None => Err(cut_off()),
        }
    };
    answer.await.unwrap_or_else(|error: ApiError| {
        gateway.metrics.status(error.status);
        error.into_response()
    })
}

fn head(number: u64, model: String, style: Style) -> Head {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Head { id: format!("landfall-{number:016x}"), model, created, style }
}

fn cut_off() -> ApiError {
    ApiError::lost("the gateway's own task has ended without an answer")
}

/// The whole answer: an error in its middle is an error of the request.
async fn whole(head: &Head, mut events: UnboundedReceiver<Event>) -> Result<Response, ApiError> {
    let mut text = String::new();
    loop {
        match events.recv().await {
            Some(Event::Begun(_)) => {}
            Some(Event::Text(part)) => text.push_str(&part),
            Some(Event::Done(finish, usage)) => {
                return Ok(Json(head.whole(&text, finish, &usage)).into_response());
            }
            Some(Event::Failed(error)) => return Err(error),
            None => return Err(cut_off()),
        }
    }
}

/// Server-sent events. One that ends well ends with `[DONE]`; one that does not ends with an error, and without it.
fn stream(head: Head, include_usage: bool, mut events: UnboundedReceiver<Event>, open: Open) -> Response {
    let body = async_stream::stream! {
        // The request is served until this is at its end, or dropped.
        let _open = open;
        let mut is_first = true;
        loop {
            match events.recv().await {
                Some(Event::Begun(_)) => {}
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

/// 200 as long as a request could be served, now or when there is room.
async fn health(State(gateway): State<Arc<Gateway>>) -> Response {
    let levels = gateway.fleet.levels();
    let healthy = levels.prefill_workers > 0 && levels.decode_workers > 0 && !gateway.is_draining();
    let body = json!({
        "prefill_workers": levels.prefill_workers,
        "decode_workers": levels.decode_workers,
        "prefill_full": levels.prefill_full,
        "decode_full": levels.decode_full,
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
