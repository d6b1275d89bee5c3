//! The prefill worker: `POST /v1/prefill` computes a prompt and answers when its KV cache has landed at the decode worker.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use landfall::kv::{KvPool, PoolAccess};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::links::Links;
use super::prefill_engine::{EngineError, PrefillEngine};
use super::{Identity, WorkerArgs, WorkerError, bind, memory, serve};
use crate::model::{Model, ModelError};
use crate::protocol::{
    Fault, Load, PrefillEvent, PrefillReply, PrefillRequest, Prompt, Refusal, Role, Token, Transfer, Worker,
};

#[derive(Debug)]
struct Prefill {
    identity: Arc<Identity>,
    model: Arc<Model>,
    engine: PrefillEngine,
    links: Arc<Links>,
    pool: KvPool,
    slots: Semaphore,
    context: u32,
}

/// Runs a prefill worker until it is asked to stop.
///
/// # Errors
/// [`WorkerError`].
pub async fn run(args: WorkerArgs) -> Result<(), WorkerError> {
    let (model, engine) = load_engine(&args).await?;
    let endpoint = memory::endpoint(&args, PoolAccess::Source).await?;
    memory::fits(&args, endpoint.pool(), engine.state_bytes(args.context as usize))?;
    let (listener, http) = bind(args.listen).await?;
    let pool = endpoint.pool().clone();
    let identity = Identity::new(Worker {
        name: args.name.clone(),
        role: Role::Prefill,
        http,
        kv: None,
        epoch: endpoint.epoch(),
        model: model.id().to_owned(),
        context: args.context,
        slots: args.slots,
        blocks: pool.layout().blocks(),
        block_bytes: pool.layout().block_bytes(),
        draining: false,
    });
    let state = Arc::new(Prefill {
        identity: identity.clone(),
        model,
        engine,
        links: Links::new(endpoint),
        pool,
        slots: Semaphore::new(args.slots as usize),
        context: args.context,
    });
    let router = Router::new()
        .route("/v1/worker", get(|State(s): State<Arc<Prefill>>| async move { Json(s.identity.worker()) }))
        .route("/v1/load", get(|State(s): State<Arc<Prefill>>| async move { Json(s.load()) }))
        .route("/v1/prefill", post(prefill))
        .with_state(state);
    serve(&args, listener, router, identity, || 0).await
}

async fn load_engine(args: &WorkerArgs) -> Result<(Arc<Model>, PrefillEngine), WorkerError> {
    let model = super::load(args).await?;
    let (context, threads, loaded) = (args.context, args.threads, model.clone());
    let started = tokio::task::spawn_blocking(move || PrefillEngine::start(loaded, context, threads)).await;
    Ok((model, started.map_err(|_| WorkerError::Panicked)??))
}

/// How often the gateway hears that the engine gets on.
const PULSE: Duration = Duration::from_secs(1);

/// The body is dropped when the gateway hangs up: what was begun is then undone at both ends.
async fn prefill(State(state): State<Arc<Prefill>>, Json(request): Json<PrefillRequest>) -> Response {
    let busy = state.identity.busy();
    let deadline = Instant::now() + Duration::from_millis(request.timeout_ms);
    let body = async_stream::stream! {
        let _busy = busy;
        let mut served = std::pin::pin!(timeout_at(deadline, state.serve(request, deadline)));
        let mut before = state.engine.chunks();
        loop {
            tokio::select! {
                end = &mut served => {
                    yield line(&match end {
                        Ok(Ok(reply)) => PrefillEvent::Done(reply),
                        Ok(Err(refusal)) => PrefillEvent::Failed(refusal),
                        Err(_) => {
                            let message = "the prompt was not computed and moved in time";
                            PrefillEvent::Failed(Refusal::of(Fault::Deadline, message))
                        }
                    });
                    break;
                }
                () = tokio::time::sleep(PULSE) => {
                    let chunks = state.engine.chunks();
                    if chunks != before {
                        before = chunks;
                        yield line(&PrefillEvent::Working);
                    }
                }
            }
        }
    };
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}

fn line(event: &PrefillEvent) -> Result<Bytes, serde_json::Error> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    Ok(Bytes::from(line))
}

impl Prefill {
    async fn serve(&self, request: PrefillRequest, deadline: Instant) -> Result<PrefillReply, Refusal> {
        if self.identity.is_draining() {
            return Err(Refusal::of(Fault::Busy, "this worker is draining"));
        }
        let Ok(_slot) = self.slots.try_acquire() else {
            return Err(Refusal::of(Fault::Busy, "every slot of this worker is taken"));
        };
        let (prompt, request) = self.tokens(request).await?;
        let prompt_tokens = prompt.len() as u32;
        // Room at the other end first: nothing is computed that has nowhere to go.
        let peer = |error: super::links::LinkError| Refusal::new(error.fault(), &error);
        let link = self.links.to(request.decode, request.decode_epoch).await.map_err(peer)?;
        let left = || deadline.saturating_duration_since(Instant::now());
        let bytes = self.engine.state_bytes(prompt.len());
        let reserved = link.reserve(request.attempt, bytes, left()).await.map_err(peer)?;
        let blocks = self.pool.alloc(memory::blocks_for(bytes)).await;
        let blocks = blocks.map_err(|error| Refusal::new(Fault::Worker, &error))?;
        let computed = self.engine.compute(prompt, request.sampling, blocks).await.map_err(engine)?;
        let landed = reserved.write(computed.blocks, left()).await.map_err(peer)?;
        let path = link.channel().path();
        Ok(PrefillReply {
            prompt_tokens,
            cached_tokens: computed.cached,
            first: computed.first,
            computed_us: computed.took.as_micros() as u64,
            transfer: Transfer {
                bytes: computed.bytes,
                wrs: landed.wrs,
                local_us: landed.local.as_micros() as u64,
                landed_us: landed.landed.as_micros() as u64,
                path: path.transport.to_owned(),
                path_detail: path.transport_reason.clone(),
            },
        })
    }

    /// On a thread of its own: a long prompt takes a while.
    async fn tokens(&self, request: PrefillRequest) -> Result<(Vec<Token>, PrefillRequest), Refusal> {
        let model = self.model.clone();
        let tokenised = tokio::task::spawn_blocking(move || {
            let tokens = match &request.prompt {
                Prompt::Text(text) => Ok(model.tokens(text)),
                Prompt::Chat(messages) => model.chat_tokens(messages),
            };
            (tokens, request)
        });
        let (tokens, request) =
            tokenised.await.map_err(|_| Refusal::of(Fault::Worker, "the tokeniser has panicked"))?;
        let tokens = tokens.map_err(|error| match error {
            ModelError::Nul => Refusal::new(Fault::Request, &error),
            error => Refusal::new(Fault::Worker, &error),
        })?;
        if tokens.is_empty() {
            return Err(Refusal::of(Fault::Request, "the prompt has no tokens"));
        }
        let asked = u32::try_from(tokens.len()).unwrap_or(u32::MAX).saturating_add(request.max_tokens);
        let limit = self.context.min(request.decode_context);
        if asked > limit {
            let message = format!("{asked} tokens are asked for, the limit is {limit}");
            return Err(Refusal { tokens: Some(asked), ..Refusal::of(Fault::TooLong, message) });
        }
        Ok((tokens, request))
    }

    fn load(&self) -> Load {
        Load {
            free_blocks: self.pool.free_blocks(),
            free_slots: self.slots.available_permits() as u32,
            computing: self.identity.count(),
            reserved: 0,
            abandoned: self.engine.abandoned(),
        }
    }
}

fn engine(error: EngineError) -> Refusal {
    Refusal::new(Fault::Worker, &error)
}
