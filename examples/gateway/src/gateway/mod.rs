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
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use reqwest::Client;

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
}

impl Gateway {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The time that a request has.
    fn seconds(&self, asked: Option<f64>) -> f64 {
        asked.unwrap_or(self.args.timeout).min(self.args.max_timeout)
    }
}

/// Runs the gateway until it is asked to stop (SIGTERM, SIGINT): then it takes nothing new and finishes what it has.
///
/// # Errors
/// [`GatewayError`].
pub async fn run(args: GatewayArgs) -> Result<(), GatewayError> {
    run_with(args, Box::new(ByPrefix)).await
}

/// As [`run`], with another way to choose workers.
///
/// # Errors
/// [`GatewayError`].
pub async fn run_with(args: GatewayArgs, route: Box<dyn Route>) -> Result<(), GatewayError> {
    for (name, seconds) in
        [("timeout", args.timeout), ("max-timeout", args.max_timeout), ("drain", args.drain)]
    {
        if !(seconds > 0.0 && seconds <= 86_400.0) {
            return Err(GatewayError::Seconds(name));
        }
    }
    let mut watch = args.directory.watch().await?;
    let (listener, address) = bind(args.listen).await?;
    let drain = Duration::from_secs_f64(args.drain);
    let gateway = Arc::new(Gateway {
        client: crate::http_client(),
        fleet: Fleet::new(route, args.queue),
        metrics: Metrics::default(),
        draining: AtomicBool::new(false),
        args,
    });
    gateway.fleet.update(&watch.now());
    let fleet = gateway.fleet.clone();
    tokio::spawn(async move {
        loop {
            match tokio::time::timeout(Duration::from_millis(500), watch.changed()).await {
                Ok(workers) => fleet.update(&workers),
                // Suspicions end by themselves.
                Err(_) => fleet.tick(),
            }
        }
    });
    println!("gateway listening on {address}");
    let stopping = gateway.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let router = http::router(gateway);
    let served = axum::serve(listener, router).with_graceful_shutdown(async move {
        stop_signal().await;
        stopping.draining.store(true, Ordering::Relaxed);
        tracing::info!("draining");
        let _ = stop.send(());
    });
    let late = async {
        if stopped.await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        served = served.into_future() => served.map_err(GatewayError::Serve),
        () = late => {
            tracing::warn!("what was in progress was not finished in time");
            Ok(())
        }
    }
}
