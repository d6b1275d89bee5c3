//! Queue pairs on a real RDMA device, between two processes: what `ib_write_bw`, `ib_write_lat`, `ib_read_bw` and
//! `ib_send_lat` measure, through the ring's public API and in the same shape.
//!
//! `benches/rdma` runs it beside them in the lab. It starts its peer by running itself again, and prints
//! `name value unit` lines.
//!
//! ```text
//!   main        the command line, the two roles
//!     ├── case       what is measured: operation, size, queue pairs, how the two ends wait
//!     ├── link       the control connection, and the queue pairs of one case
//!     ├── bandwidth  a window of operations kept full
//!     └── latency    one message there and back
//! ```

mod bandwidth;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod latency;
mod link;

use std::process::ExitCode;

use case::{Case, Op};
use common::{Error, INITIATOR_CPU, Peer, RECEIVER_CPU};
use landfall::device::Device;
use link::{Control, Link};

const USAGE: &str = "\
cargo bench --bench verbs -- --device NAME CASE…

A case is OPERATION:BYTES:QPS:MODE:ITERATIONS[:DEPTH], for instance write_bw:65536:16:spin:5000
  OPERATION   write_bw, read_bw, write_lat or send_lat; latencies are half a round trip, on one queue pair
  MODE        spin or event: how the two ends wait (write_lat polls the payload: spin)
  DEPTH       of read_bw: READs in flight on a queue pair, as ib_read_bw's -o; without, as many as the device allows
";

/// The command line.
struct Args {
    device: String,
    cases: Vec<Case>,
    responder: bool,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("verbs: {why}");
            return ExitCode::from(2);
        }
    };
    let run = if args.responder { respond(&args) } else { initiate(&args) };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("verbs: {why}");
            ExitCode::FAILURE
        }
    }
}

/// `None`: there is nothing to run. Cargo starts every bench with `--bench`, or with nothing when it only tries them.
fn parse(args: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let (mut device, mut cases, mut responder) = (None, Vec::new(), false);
    let mut args = args;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--help" | "-h" => return Ok(None),
            "--device" => device = Some(args.next().ok_or("--device needs a name")?),
            "--responder" => responder = true,
            case => cases.push(case.parse()?),
        }
    }
    match device {
        Some(device) => Ok(Some(Args { device, cases, responder })),
        None if cases.is_empty() => Ok(None),
        None => Err("--device NAME says on which RDMA device".to_owned()),
    }
}

fn initiate(args: &Args) -> Result<(), Error> {
    common::pin(INITIATOR_CPU)?;
    let again = ["--responder".to_owned(), "--device".to_owned(), args.device.clone()];
    let peer = Peer::start(again.into_iter().chain(args.cases.iter().map(Case::to_string)))?;
    common::runtime()?.block_on(async {
        let mut control = Control::dial(peer.hello.trim()).await?;
        let device = Device::open(&args.device)?;
        for case in &args.cases {
            let link = Link::new(&device, case, &mut control, true).await?;
            match case.op {
                Op::WriteBw | Op::ReadBw => bandwidth::measure(case, &link).await?,
                Op::WriteLat => latency::write(case, &link, true).await?,
                Op::SendLat => latency::send(case, &link, true).await?,
            }
            // The peer's memory and queue pairs stay until here.
            control.meet().await?;
            link.close().await;
        }
        Ok::<_, Error>(())
    })?;
    peer.finish()
}

fn respond(args: &Args) -> Result<(), Error> {
    common::pin(RECEIVER_CPU)?;
    common::runtime()?.block_on(async {
        let mut control = Control::accept().await?;
        let device = Device::open(&args.device)?;
        for case in &args.cases {
            let link = Link::new(&device, case, &mut control, false).await?;
            match case.op {
                // One-sided: this side has nothing to do.
                Op::WriteBw | Op::ReadBw => {}
                Op::WriteLat => latency::write(case, &link, false).await?,
                Op::SendLat => latency::send(case, &link, false).await?,
            }
            control.meet().await?;
            link.close().await;
        }
        Ok(())
    })
}
