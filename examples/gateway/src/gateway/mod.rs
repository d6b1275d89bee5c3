//! The gateway: takes OpenAI-style requests, and serves each through a prefill and a decode worker. It has no model.
//!
//! ```text
//!   http     the API              drive    one request: attempts until it is answered
//!   fleet    workers, admission   attempt  one attempt: prefill, landing, decode
//!   route    which worker
//! ```

pub mod attempt;
pub mod drive;
pub mod fleet;
mod http;
pub mod route;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use reqwest::Client;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::directory::{Directory, DirectoryError, DirectoryUri};
use crate::metrics::Metrics;
use crate::worker::{WorkerError, bind, stop_signal};
use fleet::Fleet;
use route::{ByPrefix, Route};

/// The options of the gateway.
#[derive(Args, Clone, Debug)]
pub struct GatewayArgs {
    /// Where it takes requests
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Where the workers are: static://HOST:PORT,HOST:PORT,... or etcd://HOST:PORT
    #[arg(long)]
    pub directory: DirectoryUri,
    /// Requests that may wait for a place; what comes beyond is refused with 429
    #[arg(long, default_value_t = 32)]
    pub queue: usize,
    /// Deadline of a request that names none, seconds
    #[arg(long, default_value_t = 60.0)]
    pub timeout: f64,
    /// The longest that a request may name, seconds
    #[arg(long, default_value_t = 600.0)]
    pub max_timeout: f64,
    /// How long requests wait for a worker where there is none, seconds; then they are refused at once
    #[arg(long, default_value_t = 10.0)]
    pub grace: f64,
    /// A worker that is silent for so long in the middle of a request is stuck, seconds: the request goes elsewhere
    #[arg(long, default_value_t = 20.0)]
    pub stall: f64,
    /// How long what is in progress may take when it is asked to stop, seconds
    #[arg(long, default_value_t = 30.0)]
    pub drain: f64,
}

/// Why the gateway does not run.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Listen(#[from] WorkerError),
    #[error("--{0} is a number of seconds above 0, at most a day")]
    Seconds(&'static str),
    #[error("--stall {0}: {LEAST_STALL:?} at least; workers that work say so once a second")]
    Stall(f64),
    #[error("serving requests")]
    Serve(#[source] std::io::Error),
}

/// What its parts share.
#[derive(Debug)]
pub struct Gateway {
    args: GatewayArgs,
    client: Client,
    fleet: Arc<Fleet>,
    metrics: Metrics,
    draining: AtomicBool,
    /// Requests that are served, until the last byte of the answer is written or the client is gone.
    open: AtomicUsize,
    /// The time to drain is over: what is left ends.
    over: CancellationToken,
}

impl Gateway {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn stall(&self) -> Duration {
        Duration::from_secs_f64(self.args.stall)
    }

    /// Counts a request until the guard is dropped.
    fn open(self: &Arc<Self>) -> Open {
        self.open.fetch_add(1, Ordering::Relaxed);
        Open(self.clone())
    }

    /// The time that a request has.
    fn seconds(&self, asked: Option<f64>) -> f64 {
        asked.unwrap_or(self.args.timeout).min(self.args.max_timeout)
    }
}

/// A request that is served.
#[derive(Debug)]
struct Open(Arc<Gateway>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs the gateway until it is asked to stop (SIGTERM, SIGINT): then it takes nothing new and finishes what it has.
///
/// # Errors
/// [`GatewayError`].
pub async fn run(args: GatewayArgs) -> Result<(), GatewayError> {
    let server = Server::start(args, Box::new(ByPrefix)).await?;
    println!("gateway listening on {}", server.address);
    server.serve(stop_signal()).await
}

/// A gateway that listens.
#[derive(Debug)]
pub struct Server {
    /// Where, with the real port.
    pub address: SocketAddr,
    gateway: Arc<Gateway>,
    listener: TcpListener,
}

impl Server {
    /// Reads the directory, and listens. `route` chooses among workers.
    ///
    /// # Errors
    /// [`GatewayError`].
    pub async fn start(args: GatewayArgs, route: Box<dyn Route>) -> Result<Self, GatewayError> {
        for (name, seconds) in [
            ("timeout", args.timeout),
            ("max-timeout", args.max_timeout),
            ("grace", args.grace),
            ("stall", args.stall),
            ("drain", args.drain),
        ] {
            if !(seconds > 0.0 && seconds <= 86_400.0) {
                return Err(GatewayError::Seconds(name));
            }
        }
        if args.stall < LEAST_STALL.as_secs_f64() {
            return Err(GatewayError::Stall(args.stall));
        }
        let mut watch = args.directory.watch().await?;
        let (listener, address) = bind(args.listen).await?;
        let gateway = Arc::new(Gateway {
            client: crate::http_client(),
            fleet: Fleet::new(route, args.queue, Duration::from_secs_f64(args.grace)),
            metrics: Metrics::default(),
            draining: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            over: CancellationToken::new(),
            args,
        });
        let fleet = gateway.fleet.clone();
        fleet.update(&watch.now());
        tokio::spawn(async move {
            loop {
                match tokio::time::timeout(Duration::from_millis(500), watch.changed()).await {
                    Ok(workers) => fleet.update(&workers),
                    // Suspicions end by themselves, and so does patience.
                    Err(_) => fleet.tick(),
                }
            }
        });
        Ok(Self { address, gateway, listener })
    }

    /// Takes requests until `stop`; then it refuses them, finishes what it has, and ends. Until the end it says how it is.
    ///
    /// # Errors
    /// [`GatewayError::Serve`].
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<(), GatewayError> {
        let Self { gateway, listener, .. } = self;
        let (close, closed) = tokio::sync::oneshot::channel::<()>();
        let served = axum::serve(listener, http::router(gateway.clone()))
            .with_graceful_shutdown(async { _ = closed.await });
        let drained = async {
            stop.await;
            gateway.draining.store(true, Ordering::Relaxed);
            tracing::info!("draining");
            let end = Instant::now() + Duration::from_secs_f64(gateway.args.drain);
            while gateway.open.load(Ordering::Relaxed) > 0 && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // Whoever is still served is told why that ends.
            gateway.over.cancel();
            // What was answered last may still have to be written.
            let _ = close.send(());
            tokio::time::sleep(LAST_WORDS).await;
            tracing::warn!("some connections were not closed in time");
        };
        tokio::select! {
            served = served.into_future() => served.map_err(GatewayError::Serve),
            () = drained => Ok(()),
        }
    }
}

/// The shortest `--stall`.
const LEAST_STALL: Duration = Duration::from_secs(2);

/// What is in the last buffers is written in this time, to whoever reads.
const LAST_WORDS: Duration = Duration::from_secs(1);
