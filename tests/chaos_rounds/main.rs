//! Chaos: processes that use channels under seeded faults and real signals, and what must hold all the same.
//!
//! `tests/chaos --rounds N [--seed S] [--profile P] [--transport T]` starts this program. Each round has a seed of its own, which
//! decides everything that can be decided: the profile, the transport, the rails, the number of processes, the faults of each
//! one's devices, what their blocks are like, the links that are cut, the signals and the moments for them, and what the processes
//! do: writes, writes by layer, reads, messages; by tokens where the blocks of two processes are unlike. A round that fails prints the
//! line that repeats it.
//!
//! ```text
//!   main.rs         arguments; rounds, one after the other; what they found
//!   plan.rs         a round, drawn from its seed
//!   coordinator.rs  the processes of a round, and its signals
//!   ../traffic      a worker process and what it does, which tests/soak has too
//! ```
//!
//! Without arguments, as `cargo test` starts it, it runs a round of each profile.

mod coordinator;
mod plan;
#[path = "../traffic/mod.rs"]
mod traffic;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use landfall::device::Profile;
use tokio::signal::unix::{SignalKind, signal};

use coordinator::Coordinator;
use plan::Plan;
use traffic::args::{self, Common, Options, Value};

struct Args {
    common: Common,
    rounds: u64,
    limit: Option<Duration>,
    keep_going: bool,
}

impl Options for Args {
    const USAGE: &str = "tests/chaos [--rounds N] [--seed S] [--profile P] [--transport T] [--minutes M] [--keep-going] [--verbose]";

    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn set(&mut self, word: &str, value: &mut Value<'_>) -> Result<bool, String> {
        match word {
            "--rounds" => self.rounds = value.parse()?,
            "--minutes" => self.limit = Some(Duration::from_secs(value.positive()?.saturating_mul(60))),
            "--keep-going" => self.keep_going = true,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn main() -> ExitCode {
    let rounds_of_each = Profile::ALL.len() as u64;
    let own = Args { common: Common::new(), rounds: rounds_of_each, limit: None, keep_going: false };
    args::main(own, rounds)
}

async fn rounds(args: Args) -> ExitCode {
    let Common { seed, profile, transport, verbose } = args.common;
    let start = Instant::now();
    let mut coordinator = Coordinator::new(verbose);
    let (mut done, mut failed) = (0u64, 0u64);
    // A long campaign that is ended early still says what it has done, after its round.
    let asked_to_end = tokio::spawn(async {
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => drop(terminate.recv().await),
            Err(_) => std::future::pending().await,
        }
    });
    for seed in (seed..).take(usize::try_from(args.rounds).unwrap_or(usize::MAX)) {
        if args.limit.is_some_and(|limit| start.elapsed() >= limit) || asked_to_end.is_finished() {
            break;
        }
        let plan = Plan::draw(seed, profile, transport);
        done += 1;
        if let Err(found) = coordinator.round(&plan).await {
            failed += 1;
            println!("FAILED round {seed}: {found}");
            println!("{plan}");
            println!("repeat it: tests/chaos --rounds 1 --seed {seed}{}", args.common.chosen());
            if !args.keep_going {
                break;
            }
            // The processes of a round that went wrong are not asked anything more.
            coordinator.renew();
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
