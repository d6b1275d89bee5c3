//! A soak: processes under load for as long as one likes, with faults, signals, kills and reconnects, and what was survived.
//!
//! `tests/soak --minutes N [OPTIONS]` starts this program. One process listens and two dial; each channel carries operations of a table
//! both ways, several at once. Meanwhile processes are killed and started anew, stopped and woken, and their devices commit faults.
//! Time is cut into laps: at the end of each everything comes to rest, what the processes have said is compared (K1, K2), and
//! each must have back what it had (descriptors, mappings, blocks, tasks, threads). Every third lap is calm, so that processes live
//! long enough to be compared with themselves.
//!
//! ```text
//!   main.rs        arguments, and the report                          world.rs   processes, signals, laps
//!   worker.rs      a process's part of a lap                          link.rs    one channel in use, both ways
//!   operations.rs  what is done on it, by a table                     and the parts of tests/chaos_rounds that are the same
//! ```
//!
//! Without arguments, as `cargo test` starts it, it runs a few seconds.

#[path = "../chaos_rounds/arrivals.rs"]
mod arrivals;
#[path = "../chaos_rounds/content.rs"]
mod content;
#[path = "../chaos_rounds/faults.rs"]
mod faults;
#[path = "../chaos_rounds/levels.rs"]
mod levels;
mod link;
#[path = "../chaos_rounds/node.rs"]
mod node;
mod operations;
#[path = "../chaos_rounds/outcome.rs"]
mod outcome;
#[path = "../chaos_rounds/process.rs"]
mod process;
#[path = "../chaos_rounds/said.rs"]
mod said;
mod worker;
mod world;

use std::process::ExitCode;
use std::time::Duration;

use landfall::device::{Profile, SoftTransport};

use world::World;

/// What `tests/soak` says first: the rest are its options.
const RUN: &str = "run";
const USAGE: &str = "\
tests/soak [OPTIONS]

  --minutes N       how long (or --seconds N)
  --lap SECONDS     until everything has to come to rest (default 15)
  --profile P       of the soft devices; all of them in turn without it
  --transport T     tcp, shm or auto; all of them in turn without it
  --device          RDMA devices instead: RDMA_DEV0 dials, RDMA_DEV1 listens at RDMA_IP1
  --seed S          of what can be decided
  --verbose         every line of every process";

#[derive(Clone, Debug)]
pub struct Args {
    pub time: Duration,
    pub lap: Duration,
    pub profile: Option<Profile>,
    pub transport: Option<SoftTransport>,
    pub device: bool,
    pub seed: u64,
    pub verbose: bool,
}

impl Args {
    fn parse(words: &[String]) -> Result<Self, String> {
        let mut args = Self {
            time: Duration::from_secs(4),
            lap: Duration::from_secs(15),
            profile: None,
            transport: None,
            device: false,
            seed: 1,
            verbose: false,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} without a value\n{USAGE}"));
            let wrong = |v: &str| format!("{word} {v} is not valid\n{USAGE}");
            let seconds = |v: &String, unit: u64| match v.parse::<u64>() {
                Ok(n) if n > 0 => Ok(Duration::from_secs(n.saturating_mul(unit))),
                _ => Err(wrong(v)),
            };
            match word.as_str() {
                "--minutes" => args.time = seconds(value()?, 60)?,
                "--seconds" => args.time = seconds(value()?, 1)?,
                "--lap" => args.lap = seconds(value()?, 1)?,
                "--profile" => args.profile = Some(value().and_then(|v| v.parse().map_err(|_| wrong(v)))?),
                "--transport" => {
                    args.transport = Some(value().and_then(|v| v.parse().map_err(|_| wrong(v)))?);
                }
                "--device" => args.device = true,
                "--seed" => args.seed = value().and_then(|v| v.parse().map_err(|_| wrong(v)))?,
                "--verbose" => args.verbose = true,
                _ => return Err(format!("{word} is no option\n{USAGE}")),
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
        Ok(runtime) => runtime.block_on(soak(&args)),
        Err(error) => {
            eprintln!("no runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn soak(args: &Args) -> ExitCode {
    let mut world = World::new(args.clone());
    let ran = world.run().await;
    world.end().await;
    if let Err(what) = &ran {
        println!("FAILED: {what}");
    }
    let survived = world.survived();
    for what in survived.mismatches.iter().chain(&survived.leaks) {
        println!("FAILED: {what}");
    }
    println!("{survived}");
    println!("{}", survived.to_json(args, ran.is_ok()));
    if ran.is_ok() && survived.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
