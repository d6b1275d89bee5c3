//! What the ring costs an operation.
//!
//! ```text
//!   ring.state         slots, credits, matching, wake, result: without device or I/O     (landfall::ring::bench_api)
//!   ring.soft.batch    64 WRITEs of 8 bytes, one doorbell, 64 completions, all of it     (public API, soft device)
//!   ring.soft.single   one WRITE of 8 bytes as a future, submitted and awaited           (public API, soft device)
//! ```
//!
//! `ring.state` is the ring's own cost: no system call, no memory of a peer, a waker that only counts. The soft lines
//! have both ends in one thread, so each includes the whole path over a loopback socket, there and back: system calls,
//! frames, copies, the reactor's polls. They bound the cost from above; they are not the ring's own.
//!
//! `cargo bench --bench ring [-- --no-pin]`

#[path = "common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{Error, INITIATOR_CPU, Samples, line};
use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::memory::{Access, Exposed, Memory, RemoteSlice, Slice};
use landfall::ring::bench_api::Idle;
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, Op, QpConfig, QueuePair, Role};

const BATCH: u32 = 64;
const BYTES: u64 = 8;

fn main() -> ExitCode {
    let mut pin = true;
    let mut measures = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--bench" => measures = true,
            "--no-pin" => pin = false,
            other => {
                eprintln!("ring: {other}: no such option; there is --no-pin");
                return ExitCode::from(2);
            }
        }
    }
    match run(pin, if measures { 2000 } else { 2 }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("ring: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(pin: bool, rounds: u32) -> Result<(), Error> {
    if pin {
        common::pin(INITIATOR_CPU)?;
    }
    state(rounds)?;
    common::runtime()?.block_on(soft(rounds))
}

fn state(rounds: u32) -> Result<(), Error> {
    let mut ring = Idle::new(BATCH).ok_or("no ring of that depth")?;
    let mut samples = Samples::default();
    for round in 0..rounds + rounds / 10 {
        let start = Instant::now();
        let ended = ring.round(BATCH);
        let elapsed = start.elapsed();
        if ended != BATCH {
            return Err(format!("{ended} of {BATCH} operations ended well").into());
        }
        // A tenth warms up.
        if round >= rounds / 10 {
            samples.push(elapsed.as_secs_f64() / f64::from(BATCH));
        }
    }
    print("ring.state", &samples);
    Ok(())
}

async fn soft(rounds: u32) -> Result<(), Error> {
    let device = Device::soft(SoftConfig::new().transport(SoftTransport::Tcp))?;
    let pd = device.alloc_pd()?;
    // One queue for both ends: whoever spins on it drives both.
    let cq = CompletionQueue::new(&device, CqConfig::new(4 * BATCH).spin(Duration::from_secs(5)))?;
    let qp = || QueuePair::new(&pd, &cq, &cq, QpConfig::new(BATCH, 1));
    let (a, b) = (qp()?, qp()?);
    let (to_a, to_b) = (a.endpoint()?, b.endpoint()?);
    let passive = b.connect(&to_a, Role::Passive, ConnectOptions::default());
    let active = a.connect(&to_b, Role::Active, ConnectOptions::default());
    let (passive, active) = tokio::join!(passive, active);
    passive?;
    active?;
    let target = pd.register_exposed(Memory::anonymous(4096), Access::READ_WRITE).await?;
    let source = pd.register_exposed(Memory::anonymous(4096), Access::READ).await?;
    let to = target.remote().slice(0, BYTES)?;
    let buf = source.slice(..BYTES)?;

    let mut samples = Samples::default();
    for round in 0..rounds + rounds / 10 {
        let start = Instant::now();
        batch(&a, &cq, &buf, to).await?;
        if round >= rounds / 10 {
            samples.push(start.elapsed().as_secs_f64() / f64::from(BATCH));
        }
    }
    print("ring.soft.batch", &samples);

    let mut samples = Samples::default();
    let mut buf = buf;
    for round in 0..rounds + rounds / 10 {
        let start = Instant::now();
        let (result, back) = a.write(buf, to).await;
        if round >= rounds / 10 {
            samples.push(start.elapsed().as_secs_f64());
        }
        result?;
        buf = back;
    }
    print("ring.soft.single", &samples);
    Ok(())
}

async fn batch(
    qp: &QueuePair,
    cq: &CompletionQueue,
    buf: &Slice<Exposed>,
    to: RemoteSlice,
) -> Result<(), Error> {
    let mut batch = qp.batch();
    for n in 0..BATCH {
        batch.push(Op::write(buf.clone(), to).user_data(n.into())).map_err(|r| r.error)?;
    }
    batch.submit();
    for _ in 0..BATCH {
        cq.next().await.ok_or("the queue ended")?.result?;
    }
    Ok(())
}

fn print(name: &str, samples: &Samples) {
    line(&format!("{name}.p50"), samples.median() * 1e9, "ns/op");
    line(&format!("{name}.p99"), samples.quantile(0.99) * 1e9, "ns/op");
}
