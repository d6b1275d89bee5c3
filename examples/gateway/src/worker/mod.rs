//! The workers: what is common to both. Each serves HTTP, has an endpoint on registered memory, and an engine on a thread.
//!
//! A worker that is asked to stop (SIGTERM, SIGINT) says that it drains, takes nothing new, finishes what it has, and ends.

pub mod decode;
pub mod decode_engine;
pub mod links;
pub mod memory;
pub mod prefill;
pub mod prefill_engine;
pub mod reservations;
pub mod text;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use clap::Args;
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::directory::{Directory, DirectoryError, DirectoryUri};
use crate::model::{Model, ModelError};
use crate::protocol::{Fault, Refusal, Worker};
use memory::{SetupError, Transport};
use prefill_engine::EngineError;

/// The options of a worker.
#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    /// Its name in the directory, of letters, digits, dots, dashes and underscores: the same after a restart
    #[arg(long, value_parser = name)]
    pub name: String,
    /// Where it takes requests, as others reach it
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Workers have to hold a key of this file, lines of `ID HEX`, to exchange KV cache; `openssl rand -hex 32` makes one
    #[arg(long, conflicts_with = "insecure")]
    pub psk: Option<PathBuf>,
    /// Let anybody exchange KV cache: without it or a key, addresses are loopback ones
    #[arg(long)]
    pub insecure: bool,
    /// A GGUF file [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// What carries the KV cache: auto, shm, tcp, or verbs:DEVICE
    #[arg(long, default_value = "auto")]
    pub transport: Transport,
    /// Tokens of a sequence, prompt and answer together
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: u32,
    /// Requests at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub slots: u32,
    /// Registered memory, MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub pool_mib: u32,
    /// Threads that compute
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: u32,
    /// Where it makes itself known: static (whoever has its address asks it), or etcd://HOST:PORT
    #[arg(long, default_value = "static")]
    pub directory: DirectoryUri,
    /// How long what is in progress may take when it is asked to stop, seconds
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    pub drain: f64,
}

/// A time that a day is enough for.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "a number of seconds from 0 to 86400, a day".to_owned())
}

/// What is to be found again in a directory, in logs and in a metric's label.
fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if (1..=64).contains(&text.len()) && text.chars().all(plain) {
        return Ok(text.to_owned());
    }
    Err("a name has 1 to 64 letters, digits, dots, dashes and underscores".to_owned())
}

/// Why a worker does not run.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error("the endpoint cannot listen")]
    Listen(#[from] landfall::connect::ConnectError),
    #[error("--listen {address}: {source}")]
    Http {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("--listen {0}: name the address that others reach this worker at, not all of them")]
    Unspecified(SocketAddr),
    #[error("--context {asked}: the model has {limit} at most")]
    Context { asked: u32, limit: u32 },
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("a thread has panicked")]
    Panicked,
}

/// What a worker says of itself, and whether it drains.
#[derive(Debug)]
pub(crate) struct Identity {
    worker: Worker,
    draining: AtomicBool,
    /// Requests that are being served.
    busy: AtomicU32,
}

impl Identity {
    fn new(worker: Worker) -> Arc<Self> {
        Arc::new(Self { worker, draining: false.into(), busy: 0.into() })
    }

    pub(crate) fn worker(&self) -> Worker {
        Worker { draining: self.is_draining(), ..self.worker.clone() }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    pub(crate) fn count(&self) -> u32 {
        self.busy.load(Ordering::Relaxed)
    }
}

/// A request that is being served.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Identity>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Loads the model on a thread of its own.
pub(crate) async fn load(args: &WorkerArgs) -> Result<Arc<Model>, WorkerError> {
    if args.listen.ip().is_unspecified() {
        return Err(WorkerError::Unspecified(args.listen));
    }
    let path = args.model.clone();
    let loaded = tokio::task::spawn_blocking(move || Model::load(path.as_deref())).await;
    let model = loaded.map_err(|_| WorkerError::Panicked)??;
    if args.context > model.context_limit() {
        return Err(WorkerError::Context { asked: args.context, limit: model.context_limit() });
    }
    Ok(Arc::new(model))
}

/// The HTTP listener of a worker or gateway, with the real port.
pub(crate) async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), WorkerError> {
    let at = |source| WorkerError::Http { address, source };
    let listener = TcpListener::bind(address).await.map_err(at)?;
    let local = listener.local_addr().map_err(at)?;
    Ok((listener, local))
}

/// Bytes of a request, at most: more than the gateway takes, since it adds to what it passes on.
const BODY: usize = 8 << 20;

/// Serves until it is asked to stop and has finished what it had, or its time to do so is over.
pub(crate) async fn serve(
    args: &WorkerArgs,
    listener: TcpListener,
    router: axum::Router,
    identity: Arc<Identity>,
    reserved: impl Fn() -> usize,
) -> Result<(), WorkerError> {
    let registration = args.directory.register(identity.worker()).await?;
    let worker = identity.worker();
    // For whoever has started this process.
    println!("{} {} listening on {} epoch {:#018x}", worker.role, worker.name, worker.http, worker.epoch);
    let drained = async {
        stop_signal().await;
        identity.draining.store(true, Ordering::Relaxed);
        tracing::info!("draining");
        let end = Instant::now() + Duration::from_secs_f64(args.drain);
        // It stays known: a worker that is out has its requests ended.
        registration.drain().await;
        while (identity.count() > 0 || reserved() > 0) && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        registration.leave().await;
    };
    tokio::select! {
        served = async { axum::serve(listener, router.layer(DefaultBodyLimit::max(BODY))).await } => {
            served.map_err(|source| WorkerError::Http { address: worker.http, source })
        }
        () = drained => Ok(()),
    }
}

/// SIGTERM or SIGINT.
pub(crate) async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Then the signal does what it does by itself.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self.fault {
            Fault::Request | Fault::TooLong => StatusCode::BAD_REQUEST,
            Fault::Busy | Fault::PeerBusy => StatusCode::SERVICE_UNAVAILABLE,
            Fault::Peer => StatusCode::BAD_GATEWAY,
            Fault::Worker => StatusCode::INTERNAL_SERVER_ERROR,
            Fault::Deadline => StatusCode::GATEWAY_TIMEOUT,
        };
        (status, Json(self)).into_response()
    }
}
