//! Chaos: processes that write to each other under seeded faults and real signals, and what must hold all the same.
//!
//! `tests/chaos --rounds N [--seed S] [--profile P] [--transport T]` starts this program. Each round has a seed of its own, which
//! decides everything that can be decided: the profile, the transport, the number of processes, the faults of each one's device,
//! the signals and the moments for them, and what the senders do. A round that fails prints the line that repeats it.
//!
//! ```text
//!   main.rs         arguments; rounds, one after the other; what they found
//!   plan.rs         a round, drawn from its seed
//!   coordinator.rs  the processes of a round, and its signals                   node.rs  one worker process, from outside
//!   said.rs         what they said of their transfers, and the verdict          faults.rs  faults of a device, drawn
//!   worker.rs       a worker's part of a round                                  process.rs  a worker process: commands in, lines out
//!                                                                               levels.rs  what must be back at its level
//!   receiver.rs     grants blocks                                               arrivals.rs  checks what comes, and what must not
//!   sender.rs       writes, cancels, reconnects                                 outcome.rs  what became of a write
//!                                                                               content.rs  bytes that can be recognised
//! ```
//!
//! The right column is shared with tests/soak.
//!
//! Without arguments, as `cargo test` starts it, it runs a round of each profile.

mod arrivals;
mod content;
mod coordinator;
mod faults;
mod levels;
mod node;
mod outcome;
mod plan;
mod process;
mod receiver;
mod said;
mod sender;
mod worker;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use landfall::device::{Profile, SoftTransport};

use coordinator::Coordinator;
use plan::Plan;

/// What `tests/chaos` says first: the rest are its options.
const RUN: &str = "run";
const USAGE: &str = "tests/chaos [--rounds N] [--seed S] [--profile P] [--transport T] [--minutes M] [--keep-going] [--verbose]";

struct Args {
    rounds: u64,
    seed: u64,
    profile: Option<Profile>,
    transport: Option<SoftTransport>,
    limit: Option<Duration>,
    keep_going: bool,
    verbose: bool,
}

impl Args {
    fn parse(words: &[String]) -> Result<Self, String> {
        let mut args = Self {
            rounds: Profile::ALL.len() as u64,
            seed: 1,
            profile: None,
            transport: None,
            limit: None,
            keep_going: false,
            verbose: false,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} without a value: {USAGE}"));
            let wrong = |v: &str| format!("{word} {v} is not valid: {USAGE}");
            match word.as_str() {
                "--rounds" => args.rounds = value().and_then(|v| v.parse().map_err(|_| wrong(v)))?,
                "--seed" => args.seed = value().and_then(|v| v.parse().map_err(|_| wrong(v)))?,
                "--profile" => args.profile = Some(value().and_then(|v| v.parse().map_err(|_| wrong(v)))?),
                "--transport" => {
                    args.transport = Some(value().and_then(|v| v.parse().map_err(|_| wrong(v)))?);
                }
                "--minutes" => {
                    let minutes: u64 = value().and_then(|v| v.parse().map_err(|_| wrong(v)))?;
                    args.limit = Some(Duration::from_secs(minutes.saturating_mul(60)));
                }
                "--keep-going" => args.keep_going = true,
                "--verbose" => args.verbose = true,
                _ => return Err(format!("{word} is no option: {USAGE}")),
            }
        }
        Ok(args)
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|w| w == process::ARGUMENT) {
        return process::run(worker::part);
    }
    let args = match words.split_first() {
        Some((first, options)) if first == RUN => Args::parse(options),
        None => Args::parse(&[]),
        // A test runner's, who wants to list or to choose tests.
        Some(_) => return ExitCode::SUCCESS,
    };
    let args = match args {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(rounds(&args)),
        Err(error) => {
            eprintln!("no runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn rounds(args: &Args) -> ExitCode {
    let start = Instant::now();
    let mut coordinator = Coordinator::new(args.verbose);
    let (mut done, mut failed) = (0u64, 0u64);
    for seed in (args.seed..).take(usize::try_from(args.rounds).unwrap_or(usize::MAX)) {
        if args.limit.is_some_and(|limit| start.elapsed() >= limit) {
            break;
        }
        let plan = Plan::draw(seed, args.profile, args.transport);
        done += 1;
        if let Err(found) = coordinator.round(&plan).await {
            failed += 1;
            let profile = args.profile.map_or(String::new(), |p| format!(" --profile {p}"));
            println!("FAILED round {seed}: {found}");
            println!("{plan}");
            let transport = args.transport.map_or(String::new(), |t| format!(" --transport {t}"));
            println!("repeat it: tests/chaos --rounds 1 --seed {seed}{profile}{transport}");
            if !args.keep_going {
                break;
            }
            // The processes of a round that went wrong are not asked anything more.
            coordinator = Coordinator::new(args.verbose);
        }
    }
    coordinator.end().await;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{done} rounds in {seconds:.0} s, {:.0} an hour, {failed} failed; {}",
        done as f64 * 3600.0 / seconds.max(0.001),
        coordinator.totals()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
