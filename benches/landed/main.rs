//! What a write costs until it has landed, and a read until its data is here, between two processes, beside the floors of the same machine.
//!
//! `cargo bench --bench landed -- --help` lists the options; `benches/README.md` says what each line means. The program
//! starts its peer by running itself again. It prints `name value unit` lines and `#` remarks, and nothing else.
//!
//! ```text
//!   main ─ args                 cases     what is written: sizes, layouts, repetitions
//!     ├── initiator ⇄ receiver            a KvChannel between the two processes, measured at the initiator
//!     │     └── reading                   the same cases, read
//!     └── floors                          the same shapes over bare sockets: spinning, tokio, a flat stream
//! ```

mod args;
mod cases;
#[path = "../common/mod.rs"]
mod common;
mod floors;
mod initiator;
mod placement;
mod reading;
mod receiver;
#[cfg(feature = "metrics")]
#[path = "../common/recorder.rs"]
#[allow(dead_code, reason = "here it only counts")]
mod recorder;

use std::process::ExitCode;

use args::{Args, Mode, Side};
use cases::{CASES, Case};
use common::{Error, INITIATOR_CPU, RECEIVER_CPU};

fn main() -> ExitCode {
    // So that what is measured is told as an exporter would have it told.
    #[cfg(feature = "metrics")]
    if let Err(why) = metrics::set_global_recorder(recorder::Numbers::default()) {
        eprintln!("landed: {why}");
        return ExitCode::FAILURE;
    }
    common::program("landed", args::USAGE, args::parse, |args| match &args.side {
        Side::Initiator => initiate(&args),
        Side::Receiver(name) => receive(&args, name),
        Side::Floor(name) => floors::peer(&args, name),
    })
}

fn initiate(args: &Args) -> Result<(), Error> {
    if args.pin {
        common::pin(INITIATOR_CPU)?;
    }
    for floor in floors::NAMES {
        if args.wants(floor) {
            floors::measure(args, floor)?;
        }
    }
    for case in CASES {
        for mode in [Mode::Event, Mode::Spin] {
            if args.wants(case.name)
                && args.mode.is_none_or(|only| only == mode)
                && !(args.quick && case.long)
            {
                common::runtime()?.block_on(initiator::measure(args, case, mode))?;
            }
        }
    }
    Ok(())
}

fn receive(args: &Args, name: &str) -> Result<(), Error> {
    if args.pin {
        common::pin(RECEIVER_CPU)?;
    }
    let case = CASES.iter().find(|c| c.name == name).ok_or("no such case")?;
    common::runtime()?.block_on(receiver::serve(args, case, args.mode.unwrap_or(Mode::Event)))
}

/// A device, a pool that is faulted in, and an endpoint: the same on both sides.
async fn endpoint(args: &Args, case: &Case, mode: Mode) -> Result<landfall::kv::KvEndpoint, Error> {
    use landfall::device::{Device, SoftConfig};
    use landfall::kv::{KvConfig, KvEndpoint, KvPool, PoolAccess};
    use landfall::memory::Memory;

    let device = match &args.device {
        Some(name) => Device::open(name)?,
        None => Device::soft(SoftConfig::new().profile(args.profile).transport(args.transport))?,
    };
    let layout = case.layout()?;
    let memory = Memory::anonymous(layout.required_bytes());
    // Read as well as written to.
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, PoolAccess::Both).await?;
    let config = KvConfig::default().qps(args.qps).spin(mode.budget());
    Ok(KvEndpoint::new(pool, config)?)
}
