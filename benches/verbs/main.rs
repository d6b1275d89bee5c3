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
use common::{Error, INITIATOR_CPU, Options, Peer, RECEIVER_CPU};
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
    device: Option<String>,
    cases: Vec<Case>,
    responder: bool,
}

fn main() -> ExitCode {
    common::program("verbs", USAGE, parse, |args| match &args.device {
        // Cargo starts every bench, and asks nothing of this one.
        None => {
            print!("{USAGE}");
            Ok(())
        }
        Some(device) if args.responder => respond(&args, device),
        Some(device) => initiate(&args, device),
    })
}

fn parse(options: &mut Options) -> Result<Args, String> {
    let mut args = Args { device: None, cases: Vec::new(), responder: false };
    while let Some(flag) = options.flag()? {
        match flag.as_str() {
            "--device" => args.device = Some(options.value()?),
            "--responder" => args.responder = true,
            case => args.cases.push(case.parse()?),
        }
    }
    if args.device.is_none() && !args.cases.is_empty() {
        return Err("--device NAME says on which RDMA device".to_owned());
    }
    Ok(args)
}

fn initiate(args: &Args, device: &str) -> Result<(), Error> {
    common::pin(INITIATOR_CPU)?;
    let again = ["--responder".to_owned(), "--device".to_owned(), device.to_owned()];
    let peer = Peer::start(again.into_iter().chain(args.cases.iter().map(Case::to_string)))?;
    common::runtime()?.block_on(async {
        let mut control = Control::dial(peer.hello.trim()).await?;
        let device = Device::open(device)?;
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

fn respond(args: &Args, device: &str) -> Result<(), Error> {
    common::pin(RECEIVER_CPU)?;
    common::runtime()?.block_on(async {
        let mut control = Control::accept().await?;
        let device = Device::open(device)?;
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
