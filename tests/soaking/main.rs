//! A soak: processes under load for as long as one likes, with faults, signals, kills and reconnects, and what was survived.
//!
//! `tests/soak --minutes N [OPTIONS]` starts this program. One process listens and two dial; each channel carries operations of a table
//! both ways, several at once. Meanwhile processes are killed and started anew, stopped and woken, their devices commit faults, and
//! links are cut and mended. Time is cut into laps: at the end of each everything comes to rest, what the processes have said is
//! compared (K1, K2), and each must have back what it had (descriptors, mappings, blocks, tasks, threads). Every third lap is calm, so
//! that processes live long enough to be compared with themselves.
//!
//! ```text
//!   main.rs       arguments                        world.rs   processes, signals, laps
//!   waits.rs      of one that does not come to rest
//!   survived.rs   the report                       ../traffic a worker process and what it does, which tests/chaos has too
//! ```
//!
//! Without arguments, as `cargo test` starts it, it runs a few seconds.

mod survived;
#[path = "../traffic/mod.rs"]
mod traffic;
mod waits;
mod world;

use std::process::ExitCode;
use std::time::Duration;

use traffic::args::{self, Common, Options, Value};
use world::World;

#[derive(Clone, Debug)]
pub struct Args {
    pub common: Common,
    pub time: Duration,
    pub lap: Duration,
    pub device: bool,
}

impl Options for Args {
    const USAGE: &str = "\
tests/soak [OPTIONS]

  --minutes N       how long (or --seconds N)
  --lap SECONDS     until everything has to come to rest (default 15)
  --profile P       of the soft devices; all of them in turn without it
  --transport T     tcp, shm or auto; all of them in turn without it
  --device          RDMA devices instead: RDMA_DEV0 dials, RDMA_DEV1 listens at RDMA_IP1; some laps have both as rails
  --seed S          of what can be decided
  --verbose         every line of every process";

    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn set(&mut self, word: &str, value: &mut Value<'_>) -> Result<bool, String> {
        match word {
            "--minutes" => self.time = Duration::from_secs(value.positive()?.saturating_mul(60)),
            "--seconds" => self.time = Duration::from_secs(value.positive()?),
            "--lap" => self.lap = Duration::from_secs(value.positive()?),
            "--device" => self.device = true,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn main() -> ExitCode {
    let (time, lap) = (Duration::from_secs(4), Duration::from_secs(15));
    args::main(Args { common: Common::new(), time, lap, device: false }, soak)
}

async fn soak(args: Args) -> ExitCode {
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
    println!("{}", survived.to_json(&args, ran.is_ok()));
    if ran.is_ok() && survived.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
