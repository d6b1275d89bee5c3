//! The decode worker: `POST /v1/decode` goes on from what has landed, an event a line; `DELETE /v1/attempts/{attempt}` frees what
//! an attempt has here.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use landfall::kv::{KvPool, PoolAccess};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, timeout_at};

use super::decode_engine::DecodeEngine;
use super::reservations::Reservations;
use super::{Identity, WorkerArgs, WorkerError, bind, load, memory, serve};
use crate::model::Model;
use crate::protocol::{DecodeEvent, DecodeRequest, Fault, Load, Refusal, Role, Worker};

/// From the confirmation that a sender has to the arrival here, at most.
const LANDING: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Decode {
    identity: Arc<Identity>,
    model: Arc<Model>,
    engine: DecodeEngine,
    context: u32,
    reservations: Arc<Reservations>,
    pool: KvPool,
}

/// Runs a decode worker until it is asked to stop. Its endpoint listens on the address that it takes requests on, at a port of
/// its own.
///
/// # Errors
/// [`WorkerError`].
pub async fn run(args: WorkerArgs) -> Result<(), WorkerError> {
    let model = load(&args).await?;
    let (sizes, loaded) = ((args.slots, args.context, args.threads), model.clone());
    let started = tokio::task::spawn_blocking(move || DecodeEngine::start(loaded, sizes)).await;
    let engine = started.map_err(|_| WorkerError::Panicked)??;
    let endpoint = memory::endpoint(&args, PoolAccess::Target).await?;
    memory::fits(&args, endpoint.pool(), engine.state_bytes(args.context as usize))?;
    let (listener, http) = bind(args.listen).await?;
    let kv = endpoint.listen((http.ip(), 0).into()).await?;
    let pool = endpoint.pool().clone();
    let identity = Identity::new(Worker {
        name: args.name.clone(),
        role: Role::Decode,
        http,
        kv: Some(kv.local_addr()),
        epoch: endpoint.epoch(),
        model: model.id().to_owned(),
        context: args.context,
        slots: args.slots,
        blocks: pool.layout().blocks(),
        block_bytes: pool.layout().block_bytes(),
        draining: false,
    });
    let reservations = Reservations::new(identity.clone(), pool.clone(), args.slots);
    tokio::spawn(reservations.clone().accept(kv));
    let open = reservations.clone();
    let state = Arc::new(Decode {
        identity: identity.clone(),
        model,
        engine,
        context: args.context,
        reservations,
        pool,
    });
    let router = Router::new()
        .route("/v1/worker", get(|State(s): State<Arc<Decode>>| async move { Json(s.identity.worker()) }))
        .route("/v1/load", get(|State(s): State<Arc<Decode>>| async move { Json(s.load()) }))
        .route("/v1/decode", post(decode))
        .route("/v1/attempts/{attempt}", delete(release))
        .with_state(state);
    serve(&args, listener, router, identity, move || open.len()).await
}

async fn release(State(state): State<Arc<Decode>>, Path(attempt): Path<u64>) -> StatusCode {
    state.reservations.release(attempt);
    StatusCode::NO_CONTENT
}

async fn decode(
    State(state): State<Arc<Decode>>,
    Json(request): Json<DecodeRequest>,
) -> Result<Response, Refusal> {
    let busy = state.identity.busy();
    let deadline = Instant::now() + Duration::from_millis(request.timeout_ms);
    if !(0..state.model.vocabulary()).contains(&request.first) {
        let message = format!("token {} is not in the vocabulary", request.first);
        return Err(Refusal::of(Fault::Peer, message));
    }
    let tokens = request.prompt_tokens.saturating_add(request.max_tokens);
    if tokens > state.context {
        let message = format!("{tokens} tokens are asked for, the limit is {}", state.context);
        return Err(Refusal { tokens: Some(tokens), ..Refusal::of(Fault::TooLong, message) });
    }
    // Who asks says that it has landed: what is not here soon is not on its way.
    let patience = deadline.min(Instant::now() + LANDING);
    let taken = match timeout_at(patience, state.reservations.take(request.attempt)).await {
        Ok(taken) => taken.map_err(|error| Refusal::new(Fault::Peer, &error))?,
        Err(_) => return Err(Refusal::of(Fault::Peer, "its KV cache has not landed here")),
    };
    let (events, mut lines) = unbounded_channel();
    state.engine.generate(request, taken, events).map_err(|error| Refusal::new(Fault::Worker, &error))?;
    // Dropped when the gateway hangs up, and with it the receiver: the engine frees the sequence before its next token.
    let body = async_stream::stream! {
        let _busy = busy;
        loop {
            let event = match timeout_at(deadline, lines.recv()).await {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => DecodeEvent::Failed { fault: Fault::Deadline, why: "the time was over".to_owned() },
            };
            let last = !matches!(event, DecodeEvent::Token { .. });
            let mut line = serde_json::to_vec(&event)?;
            line.push(b'\n');
            yield Ok::<_, serde_json::Error>(Bytes::from(line));
            if last {
                break;
            }
        }
    };
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response())
}

impl Decode {
    fn load(&self) -> Load {
        Load {
            free_blocks: self.pool.free_blocks(),
            free_slots: self.reservations.free_slots(),
            computing: self.engine.active(),
            reserved: self.reservations.len() as u32,
            abandoned: self.engine.abandoned(),
        }
    }
}
