//! Many channels at one endpoint, and small writes beside large ones.
//!
//! ```text
//!   many.TRANSPORT.one                     GB/s   a stream of landed writes on one channel
//!   many.TRANSPORT.CHANNELS.total          GB/s   the same on all channels at once, in turn with that
//!   many.TRANSPORT.CHANNELS.total_to_one          their ratio
//!   many.TRANSPORT.CHANNELS.least_to_fair         the least of the channels over a CHANNELS-th of the total
//!   many.TRANSPORT.small.BESIDE.QUANTITY   us     a landed write of 4 KiB, one after the other: p50, p99, p999
//!     BESIDE   idle; same (a stream on the same channel); other (a stream on another channel)
//! ```
//!
//! Two processes: `far` has one endpoint and is written to, `near` has an endpoint for each channel, since between two endpoints
//! there is one. One channel alone goes through as much memory as all of them together do, so that the caches are as warm. Ratios
//! are of neighbouring seconds; of several rounds the median is printed, with the least and the greatest.

#[path = "../common/mod.rs"]
mod common;
mod far;
mod near;

use std::process::ExitCode;
use std::time::Duration;

use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::kv::{KvConfig, KvEndpoint, KvPool, Layout};

use common::{Error, INITIATOR_CPU, RECEIVER_CPU};

const USAGE: &str = "\
cargo bench --bench many -- [OPTIONS]

  --channels N       channels at the one endpoint (default 100)
  --size BYTES       bytes of a write of the streams of many channels (default 1 MiB)
  --stream BYTES     bytes of a write of the stream beside small ones (default 16 MiB)
  --in-flight N      writes of a stream under way at once, on each channel (default 2)
  --seconds S        of each measurement (default 2)
  --rounds N         of all measurements (default 5)
  --transport NAME   tcp, shm or auto (default tcp)
  --profile NAME     profile of the soft device (default: default)
  --no-pin           do not pin the far process to cpu 0 and the near one to cpu 1
";

/// Bytes of a block: of a small write.
const BLOCK: u64 = 4 << 10;
/// Blocks for small writes, beside those of the streams.
const SMALL: u32 = 64;

#[derive(Clone, Debug)]
struct Args {
    channels: usize,
    size: u64,
    stream: u64,
    in_flight: usize,
    seconds: f64,
    rounds: usize,
    transport: SoftTransport,
    profile: Profile,
    pin: bool,
    /// The far process.
    far: bool,
}

impl Args {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut args = Self {
            channels: 100,
            size: 1 << 20,
            stream: 16 << 20,
            in_flight: 2,
            seconds: 2.0,
            rounds: 5,
            transport: SoftTransport::Tcp,
            profile: Profile::Default,
            pin: true,
            far: false,
        };
        // Cargo says `--bench` when it measures. Without it, it is enough that everything works.
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
                "--far" => args.far = true,
                "--no-pin" => args.pin = false,
                "--channels" => args.channels = value()?.parse().map_err(|e| wrong(&e))?,
                "--size" => args.size = value()?.parse().map_err(|e| wrong(&e))?,
                "--stream" => args.stream = value()?.parse().map_err(|e| wrong(&e))?,
                "--in-flight" => args.in_flight = value()?.parse().map_err(|e| wrong(&e))?,
                "--seconds" => args.seconds = value()?.parse().map_err(|e| wrong(&e))?,
                "--rounds" => args.rounds = value()?.parse().map_err(|e| wrong(&e))?,
                "--transport" => args.transport = value()?.parse().map_err(|e| wrong(&e))?,
                "--profile" => args.profile = value()?.parse().map_err(|e| wrong(&e))?,
                _ => return Err(format!("{flag}: no such option; see --help")),
            }
        }
        if !measures && !args.far {
            (args.channels, args.size, args.stream) = (4, 64 << 10, 256 << 10);
            (args.seconds, args.rounds, args.pin) = (0.1, 1, false);
        }
        for (what, bytes) in [("--size", args.size), ("--stream", args.stream)] {
            if bytes == 0 || bytes % BLOCK != 0 || bytes / BLOCK > u64::from(u32::MAX >> 8) {
                return Err(format!("{what} {bytes}: a multiple of {BLOCK} is wanted"));
            }
        }
        if args.channels < 2 || args.in_flight == 0 || args.rounds == 0 {
            return Err("two channels, one write in flight and one round are the least".to_owned());
        }
        Ok(Some(args))
    }

    /// As the far process is told.
    fn for_far(&self) -> Vec<String> {
        let mut words = vec![
            "--far".to_owned(),
            format!("--channels={}", self.channels),
            format!("--size={}", self.size),
            format!("--stream={}", self.stream),
            format!("--in-flight={}", self.in_flight),
            format!("--transport={}", self.transport),
            format!("--profile={}", self.profile),
        ];
        if !self.pin {
            words.push("--no-pin".to_owned());
        }
        words
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Grants of a stream that are open: one more than are used, so that it does not wait for the way of a grant.
    fn open(&self) -> usize {
        self.in_flight + 1
    }

    fn blocks_of(bytes: u64) -> u32 {
        // `parse` has checked it.
        (bytes / BLOCK) as u32
    }

    /// What the streams of all channels take, or that beside small writes, whichever is more: they do not run together.
    fn blocks(&self) -> u32 {
        let many = (self.channels * self.open()) as u32 * Self::blocks_of(self.size);
        let one = self.open() as u32 * Self::blocks_of(self.stream);
        many.max(one) + SMALL
    }

    async fn pool(&self) -> Result<KvPool, Error> {
        let soft = SoftConfig::new().transport(self.transport).profile(self.profile);
        let device = Device::soft(soft)?;
        Ok(KvPool::new(&device.alloc_pd()?, Layout::contiguous(1, self.blocks(), BLOCK)?).await?)
    }
}

fn endpoint(pool: &KvPool) -> Result<KvEndpoint, Error> {
    Ok(KvEndpoint::new(pool.clone(), KvConfig::default().connect_timeout(Duration::from_secs(60)))?)
}

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("many: {why}");
            return ExitCode::from(2);
        }
    };
    let run = || -> Result<(), Error> {
        common::allow_descriptors()?;
        if args.pin {
            common::pin(if args.far { RECEIVER_CPU } else { INITIATOR_CPU })?;
        }
        let runtime = common::runtime()?;
        match args.far {
            true => runtime.block_on(far::serve(&args)),
            false => runtime.block_on(near::measure(&args)),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("many: {why}");
            ExitCode::FAILURE
        }
    }
}
