//! What several rails bring: writes over one, two and four soft devices, each of which sends at a limited rate, over two of which one is
//! slow, and over two of which one is cut in mid-transfer.
//!
//! ```text
//!   rails.CASE.landed           GB/s   a large write, to the landing
//!   rails.CASE.of_rails         times  that over the sum of what its rails carry alone (`one` and `slow`), in neighbouring seconds
//!   rails.CASE.share.N          %      of the bytes of the large writes, those that rail N carried
//!   rails.CASE.SIZE.landed_ms   ms     smaller writes
//!     CASE   one; slow (one rail of a tenth of the rate); two, four (equal ones); one_slow (one of each kind)
//!   rails.cut.undisturbed_ms    ms     a large write over two equal rails
//!   rails.cut.landed_ms         ms     the same, when half-way through one of them loses its connections
//!   rails.cut.of_least          times  that over the least there is: half of the first, and all of it again on one rail
//!   rails.cut.back_ms           ms     from the moment at which the rail can be had again until it is up again
//! ```
//!
//! Medians. Two processes a case, over TCP. The limit stands for a port of that speed, and is far below what the processors of this
//! machine move, so that it is the rails which count. A limited rail sends a burst (10 ms worth of bytes, or what is in flight if that
//! is less) and then rests for as long as those bytes take: so a write seems faster than the limit by the last of its rests.

#[path = "../common/mod.rs"]
mod common;
mod far;
mod near;

use std::process::ExitCode;
use std::time::Duration;

use landfall::device::{Device, Faults, SoftConfig, SoftTransport};
use landfall::kv::{KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;

use common::{Error, Options};

const USAGE: &str = "\
cargo bench --bench rails -- [OPTIONS]

  --rate BYTES   bytes a second of a rail (default 100000000)
  --mib N        MiB of a large write (default 64)
  --reps N       repetitions of every case, in turn (default 5)
  --no-pin       do not pin the far processes to cpu 0 and the near one to cpu 1
";

/// Bytes of a block.
const BLOCK: u64 = 1 << 20;

/// How many times slower than `--rate` the slow rail is.
const SLOWER: u64 = 10;

/// A channel of its own between the two processes.
#[derive(Debug)]
struct Case {
    name: &'static str,
    /// How many times slower than `--rate` each of its rails is.
    slower: &'static [u64],
    /// The large write is of so many times fewer bytes.
    less: u32,
    /// Smaller writes as well, of so many MiB.
    small: &'static [u32],
}

const CASES: &[Case] = &[
    Case { name: "one", slower: &[1], less: 1, small: &[4, 16] },
    Case { name: "slow", slower: &[SLOWER], less: SLOWER as u32, small: &[] },
    Case { name: "two", slower: &[1, 1], less: 1, small: &[4, 16] },
    Case { name: "four", slower: &[1, 1, 1, 1], less: 1, small: &[] },
    Case { name: "one_slow", slower: &[1, SLOWER], less: 1, small: &[4, 16] },
];

/// The rails of the channel that loses one of them.
const CUT: &[u64] = &[1, 1];

#[derive(Clone, Debug)]
struct Args {
    rate: u64,
    mib: u32,
    reps: usize,
    pin: bool,
    /// The far process, with so many rails.
    far: Option<usize>,
}

fn parse(options: &mut Options) -> Result<Args, String> {
    let mut args = Args { rate: 100_000_000, mib: 64, reps: 5, pin: true, far: None };
    while let Some(flag) = options.flag()? {
        match flag.as_str() {
            "--rate" => args.rate = options.number(1 << 20, 1 << 40)?,
            "--mib" => args.mib = options.number(1, 4096)?,
            "--reps" => args.reps = options.number(1, 1000)?,
            "--no-pin" => args.pin = false,
            "--far" => args.far = Some(options.number(1, 16)?),
            _ => return Err(options.unknown()),
        }
    }
    if !options.measures() && args.far.is_none() {
        (args.mib, args.reps, args.pin) = (4, 1, false);
    }
    Ok(args)
}

impl Args {
    /// As the far process of a channel with so many rails is told.
    fn for_far(&self, rails: usize) -> Vec<String> {
        let mut words = vec![format!("--far={rails}"), format!("--mib={}", self.mib)];
        words.extend((!self.pin).then(|| "--no-pin".to_owned()));
        words
    }
}

fn main() -> ExitCode {
    common::program("rails", USAGE, parse, |args| {
        common::pin_as(args.far.is_some(), args.pin)?;
        let runtime = common::runtime()?;
        match args.far {
            Some(rails) => runtime.block_on(far::serve(&args, rails)),
            None => runtime.block_on(near::measure(&args)),
        }
    })
}

/// A device that sends as many bytes a second; `None` as fast as it can.
fn device(rate: Option<u64>) -> Result<Device, Error> {
    let faults = rate.map_or(Faults::new(), |rate| Faults::new().rate(rate));
    Ok(Device::soft(SoftConfig::new().transport(SoftTransport::Tcp).faults(faults))?)
}

/// An endpoint with a rail on each of `devices`.
async fn endpoint(args: &Args, devices: &[Device]) -> Result<KvEndpoint, Error> {
    let pds: Result<Vec<_>, _> = devices.iter().map(Device::alloc_pd).collect();
    let (pds, layout) = (pds?, Layout::contiguous(1, args.mib, BLOCK)?);
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::on_rails(&pds.iter().collect::<Vec<_>>(), layout, memory, PoolAccess::Target).await?;
    // A rail that has been cut is there again as soon as it can be.
    let config = KvConfig::default().rail_probe(Duration::from_millis(20), Duration::from_millis(20));
    Ok(KvEndpoint::new(pool, config)?)
}
