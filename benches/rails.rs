//! What several rails bring: bulk over one, two and four soft devices, each of which sends at a limited rate, and over two of
//! which one is slow.
//!
//! ```text
//!   rails.CASE.landed      GB/s, to the landing: median of the repetitions
//!   rails.CASE.share.N     per cent of the bytes that rail N carried
//!   rails.CASE.of_limit    the speed over the sum of the limits
//! ```
//!
//! `cargo bench --bench rails [-- --rate BYTES_PER_SECOND --mib N --reps N]`. Two processes, over TCP; the limit stands for a port
//! of that speed, and is far below what this machine's processors move, so that it is the rails which count.

#[path = "common/mod.rs"]
mod common;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use landfall::device::{Device, Faults, SoftConfig, SoftTransport};
use landfall::kv::{Grant, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, WriteRequest};
use landfall::memory::Memory;

use common::{Error, Peer, Samples, line};

const USAGE: &str = "cargo bench --bench rails -- [--rate BYTES_PER_SECOND] [--mib N] [--reps N]";
const BLOCK: u64 = 1 << 20;

/// The rails of a case, by how many times slower than the limit each is.
const CASES: [(&str, &[u64]); 4] =
    [("one", &[1]), ("two", &[1, 1]), ("four", &[1, 1, 1, 1]), ("one_slow", &[1, 10])];

#[derive(Clone, Debug)]
struct Args {
    rate: u64,
    mib: u32,
    reps: usize,
    /// The far process, with so many rails.
    far: Option<usize>,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let mut args = Args { rate: 100_000_000, mib: 64, reps: 5, far: None };
    let mut measures = false;
    while let Some(word) = words.next() {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let mut value = || inline.clone().or_else(|| words.next()).ok_or(format!("{flag} needs a value"));
        let wrong = |e: &dyn std::fmt::Display| format!("{flag}: {e}");
        match flag.as_str() {
            "--bench" => measures = true,
            "--help" | "-h" => return Ok(None),
            "--rate" => args.rate = value()?.parse().map_err(|e| wrong(&e))?,
            "--mib" => args.mib = value()?.parse().map_err(|e| wrong(&e))?,
            "--reps" => args.reps = value()?.parse().map_err(|e| wrong(&e))?,
            "--far" => args.far = Some(value()?.parse().map_err(|e| wrong(&e))?),
            _ => return Err(format!("{flag}: no such option; {USAGE}")),
        }
    }
    // Cargo says `--bench` when it measures. Without it, it is enough that everything works.
    if !measures && args.far.is_none() {
        args = Args { rate: 100_000_000, mib: 4, reps: 1, far: None };
    }
    Ok(Some(args))
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("rails: {why}");
            return ExitCode::from(2);
        }
    };
    let done = common::runtime().and_then(|runtime| match args.far {
        Some(rails) => runtime.block_on(far(&args, rails)),
        None => CASES.iter().try_for_each(|(name, rails)| runtime.block_on(near(&args, name, rails))),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("rails: {why}");
            ExitCode::FAILURE
        }
    }
}

/// An endpoint with a rail for each of `rates`, in bytes a second; `None` sends as fast as it can.
async fn endpoint(args: &Args, rates: &[Option<u64>]) -> Result<KvEndpoint, Error> {
    let mut pds = Vec::new();
    for rate in rates {
        let faults = rate.map_or(Faults::new(), |rate| Faults::new().rate(rate));
        let config = SoftConfig::new().transport(SoftTransport::Tcp).faults(faults);
        pds.push(Device::soft(config)?.alloc_pd()?);
    }
    let layout = Layout::contiguous(1, args.mib, BLOCK)?;
    let memory = Memory::anonymous(layout.required_bytes());
    let pds: Vec<_> = pds.iter().collect();
    let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Target).await?;
    Ok(KvEndpoint::new(pool, KvConfig::default().strict_rails(true))?)
}

/// Grants all of its blocks whenever it is asked, until the channel ends.
async fn far(args: &Args, rails: usize) -> Result<(), Error> {
    let mut listener = endpoint(args, &vec![None; rails]).await?.listen(([127, 0, 0, 1], 0).into()).await?;
    println!("{}", listener.local_addr());
    std::io::stdout().flush()?;
    let channel = listener.accept().await?;
    while channel.recv_message().await.is_ok() {
        let blocks = channel.pool().alloc(args.mib).await?;
        channel.send_message(channel.grant(blocks)?.to_bytes()).await?;
        drop(channel.next_arrival().await?);
    }
    Ok(())
}

async fn near(args: &Args, name: &str, rails: &[u64]) -> Result<(), Error> {
    let limits: Vec<_> = rails.iter().map(|slower| args.rate / slower).collect();
    let peer = Peer::start([format!("--far={}", rails.len()), format!("--mib={}", args.mib)])?;
    let rates: Vec<_> = limits.iter().copied().map(Some).collect();
    let channel = endpoint(args, &rates).await?.connect(peer.hello.trim()).await?;
    println!("# {name}: {}", channel.path());
    // What a rail achieves has to be known first.
    write(args, &channel).await?;
    let before = channel.path();
    let mut speed = Samples::default();
    for _ in 0..args.reps {
        speed.push(write(args, &channel).await?);
    }
    line(&format!("rails.{name}.landed"), speed.median() / 1e9, "GB/s");
    line(&format!("rails.{name}.of_limit"), speed.median() / limits.iter().sum::<u64>() as f64, "times");
    let after = channel.path();
    let carried = |n: usize| after.rails[n].bytes_written - before.rails[n].bytes_written;
    let all: u64 = (0..rails.len()).map(carried).sum();
    for n in 0..rails.len() {
        line(&format!("rails.{name}.share.{n}"), 100.0 * carried(n) as f64 / all as f64, "%");
    }
    channel.close().await?;
    peer.finish()
}

/// Writes all blocks, and says how fast they landed, in bytes a second.
async fn write(args: &Args, channel: &KvChannel) -> Result<f64, Error> {
    channel.send_message(b"grant".to_vec()).await?;
    let grant = Grant::from_bytes(&channel.recv_message().await?)?;
    let source = channel.pool().alloc(args.mib).await?;
    let start = Instant::now();
    let landed = channel.write(WriteRequest::new(&grant, source)).await.0?;
    Ok(landed.bytes as f64 / start.elapsed().as_secs_f64())
}
