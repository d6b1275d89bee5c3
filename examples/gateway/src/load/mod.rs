//! The load generator: requests at a rate, through as many connections as are allowed, and a report. It can start its own
//! processes, kill workers at random meanwhile, and compare each answer with that of one process.

mod one;
pub mod prompts;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::{Cluster, ClusterConfig, ClusterError};
use crate::model::{Model, ModelError, generate};
use crate::protocol::Sampling;
use crate::worker::memory::Transport;
use crate::worker::text::Text;
pub use one::{Outcome, sse};
use prompts::Prompts;
pub use report::Report;

/// The options of the load generator.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// A gateway that runs already [default: everything is started here]
    #[arg(long)]
    pub url: Option<String>,
    /// Requests a second; 0: as fast as answers come
    #[arg(long, default_value_t = 0.0)]
    pub rate: f64,
    /// Requests at once
    #[arg(long, default_value_t = 8)]
    pub concurrency: usize,
    #[arg(long, default_value_t = 30.0)]
    pub seconds: f64,
    /// Lengths of prompts, tokens, roughly; they take turns
    #[arg(long, value_delimiter = ',', default_value = "24,80,200")]
    pub prompt_tokens: Vec<usize>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 16)]
    pub max_tokens: u32,
    /// Deadline of each request, seconds
    #[arg(long, default_value_t = 60.0)]
    pub timeout: f64,
    /// Kill a worker, or freeze and then kill it, every so many seconds, at random; it is started again
    #[arg(long, conflicts_with = "url")]
    pub kill_every: Option<f64>,
    /// What is random is so by this
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Prefill workers that are started here
    #[arg(long, default_value_t = 2)]
    pub prefill: usize,
    /// Decode workers that are started here
    #[arg(long, default_value_t = 2)]
    pub decode: usize,
    /// What carries the KV cache: auto, shm, tcp, or verbs:DEVICE
    #[arg(long, default_value = "auto")]
    pub transport: Transport,
    /// The report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Why there is no report, or a bad one.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("--{what}: {expected}")]
    Argument { what: &'static str, expected: &'static str },
    #[error("{0} requests were neither answered nor refused as they should be")]
    Bad(u64),
    #[error("none of {0} requests was answered")]
    Unanswered(u64),
    #[error("--kill-every {every}: no worker was killed in {seconds:.0} s; give it more --seconds")]
    NoKills { every: f64, seconds: f64 },
    #[error("this program's own path is not known")]
    Program(#[source] std::io::Error),
    #[error("a thread has panicked")]
    Panicked,
}

/// Sends requests, and prints the report.
///
/// # Errors
/// [`LoadError`]; those of [`Report::verdict`] after the report.
pub async fn run(args: LoadArgs) -> Result<(), LoadError> {
    let (json, kill_every) = (args.json, args.kill_every);
    let report = measure(args).await?;
    if json {
        println!("{}", report.json())
    } else {
        print!("{report}")
    }
    report.verdict(kill_every)
}

/// Sends requests.
///
/// # Errors
/// [`LoadError`].
pub async fn measure(args: LoadArgs) -> Result<Report, LoadError> {
    let wrong = |what, expected| Err(LoadError::Argument { what, expected });
    if args.prompt_tokens.is_empty() || args.prompt_tokens.contains(&0) {
        return wrong("prompt-tokens", "lengths above 0");
    }
    let a_day = |seconds: f64| seconds > 0.0 && seconds <= 86_400.0;
    if !a_day(args.seconds) || !a_day(args.timeout) {
        return wrong("seconds and --timeout", "above 0, and at most a day");
    }
    if args.concurrency == 0 {
        return wrong("concurrency", "at least 1");
    }
    if !(args.rate >= 0.0 && args.rate.is_finite())
        || args.kill_every.is_some_and(|s| !(s >= 0.1 && s.is_finite()))
    {
        return wrong("rate and --kill-every", "a rate of at least 0, and at least 0.1 s");
    }
    let mut prompts = Prompts::new(&args.prompt_tokens, args.seed);
    let cluster = match &args.url {
        Some(_) => None,
        None => {
            let max = args.max_tokens;
            let expected = tokio::task::spawn_blocking(move || {
                let model = Model::load(None)?;
                prompts.expect(|text| {
                    let tokens = generate(&model, &model.tokens(text), max, &Sampling::GREEDY)?;
                    let bytes: Vec<u8> = tokens
                        .into_iter()
                        .take_while(|&token| !model.is_end(token))
                        .flat_map(|token| model.piece(token))
                        .collect();
                    Ok::<_, ModelError>(Text::of(&bytes))
                })?;
                Ok::<_, ModelError>(prompts)
            });
            prompts = expected.await.map_err(|_| LoadError::Panicked)??;
            Some(Mutex::new(start(&args).await?))
        }
    };
    let url = match (&args.url, &cluster) {
        (Some(url), _) => url.trim_end_matches('/').to_owned(),
        (None, Some(cluster)) => cluster.lock().await.url(),
        (None, None) => unreachable!("one of them is there"),
    };
    let begun = Instant::now();
    let end = begun + Duration::from_secs_f64(args.seconds);
    let shared = Arc::new((args.clone(), prompts, url, AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..args.concurrency {
        clients.spawn(client(shared.clone(), begun, end));
    }
    let mut report = Report::new(&args);
    let gather = async {
        while let Some(outcomes) = clients.join_next().await {
            match outcomes {
                Ok(outcomes) => report.add(outcomes),
                Err(_) => return Err(LoadError::Panicked),
            }
        }
        Ok(())
    };
    let kills = match (&cluster, args.kill_every) {
        (Some(cluster), Some(every)) => {
            // The last requests end after the last kill: the killing is not to be cut off with a worker down.
            let (gathered, kills) = tokio::join!(gather, kill(cluster, every, args.seed, end));
            gathered?;
            kills?
        }
        _ => {
            gather.await?;
            Kills::default()
        }
    };
    report.finish(begun.elapsed(), kills);
    Ok(report)
}

async fn start(args: &LoadArgs) -> Result<Cluster, LoadError> {
    Ok(Cluster::start(ClusterConfig {
        program: std::env::current_exe().map_err(LoadError::Program)?,
        prefill: args.prefill,
        decode: args.decode,
        worker: vec![format!("--transport={}", args.transport)],
        gateway: Vec::new(),
        directory: None,
    })
    .await?)
}

/// One connection's requests, one after the other.
async fn client(
    shared: Arc<(LoadArgs, Prompts, String, AtomicU64)>,
    begun: Instant,
    end: Instant,
) -> Vec<Outcome> {
    let (args, prompts, url, next) = &*shared;
    let client = crate::http_client();
    let mut outcomes = Vec::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if args.rate > 0.0 {
            // Its turn may be after the end.
            let turn = Duration::from_secs_f64((number as f64 / args.rate).min(args.seconds));
            tokio::time::sleep_until(end.min(begun + turn)).await;
        }
        if Instant::now() >= end {
            return outcomes;
        }
        outcomes.push(one::request(&client, url, args, prompts, number).await);
        if let Some(Outcome::Refused { retry_after, .. }) = outcomes.last() {
            // As a client should that is told so; no longer than the run.
            let pause = Duration::from_secs((*retry_after).min(5));
            tokio::time::sleep_until(end.min(Instant::now() + pause)).await;
        }
    }
}

/// What was done to workers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kills {
    pub killed: u64,
    pub frozen: u64,
}

/// Kills a worker now and then, of which every third is frozen before, and starts it again.
async fn kill(cluster: &Mutex<Cluster>, every: f64, seed: u64, end: Instant) -> Result<Kills, LoadError> {
    let (mut kills, mut random) = (Kills::default(), prompts::Random::new(seed ^ 0x6b69_6c6c));
    loop {
        let pause = Duration::from_secs_f64(every * (0.5 + random.below(1000) as f64 / 1000.0));
        if Instant::now() + pause >= end {
            return Ok(kills);
        }
        tokio::time::sleep(pause).await;
        let mut cluster = cluster.lock().await;
        let n = random.below(cluster.workers.len() as u64) as usize;
        let worker = &mut cluster.workers[n].1;
        if random.below(3) == 0 {
            // Longer than its lease: it must be found out, and what it does when it wakes up does not come to that.
            freeze(worker.pid()).await;
            tokio::time::sleep(2 * crate::directory::LEASE).await;
            kills.frozen += 1;
        } else {
            kills.killed += 1;
        }
        worker.kill().await;
        tokio::time::sleep(Duration::from_millis(random.below(2000))).await;
        cluster.restart(n).await?;
    }
}

async fn freeze(pid: Option<u32>) {
    if let Some(pid) = pid {
        // Of a child that was not waited for: the number is its own. If it has died by itself there is nothing to freeze.
        let _ = tokio::process::Command::new("kill").args(["-STOP", &pid.to_string()]).status().await;
    }
}
