//! Many channels at one endpoint, and small writes beside large ones.
//!
//! ```text
//!   many.TRANSPORT.one                     GB/s   a stream of landed writes on one channel
//!   many.TRANSPORT.CHANNELS.total          GB/s   the same on all channels at once, in turn with that
//!   many.TRANSPORT.CHANNELS.total_to_one   times  their ratio
//!   many.TRANSPORT.CHANNELS.least_to_fair  times  the least of the channels over a CHANNELS-th of the total
//!   many.TRANSPORT.small.MODE.BESIDE.QUANTITY     a landed write of 4 KiB, one after the other: p50, p99, p999 in us
//!     MODE     event or spin: how the two ends wait. A future that polls holds its thread, and here two run on it: so each polls for
//!              50 µs, and then sleeps
//!     BESIDE   idle; same (a stream on the same channel); other (a stream on another channel)
//!   many.TRANSPORT.small.MODE.BESIDE.stream  GB/s what the stream has landed meanwhile
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

use common::{Error, Mode, Options};

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
  --only NAME        streams (of one channel and of all) or small (the small writes; two channels do); both without it
  --mode MODE        how the two ends wait: event or spin (default event)
  --no-pin           do not pin the far process to cpu 0 and the near one to cpu 1
";

/// Bytes of a block: of a small write.
const BLOCK: u64 = 4 << 10;
/// How long a future of the mode `spin` polls. It holds its thread for that long, on which others of them have to run.
const SPIN: Duration = Duration::from_micros(50);
/// Blocks for small writes, beside those of the streams.
const SMALL: u32 = 64;

/// One of the two things that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Streams,
    Small,
}

impl std::str::FromStr for What {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "streams" => Ok(Self::Streams),
            "small" => Ok(Self::Small),
            _ => Err("streams or small"),
        }
    }
}

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
    only: Option<What>,
    mode: Mode,
    pin: bool,
    /// The far process.
    far: bool,
}

impl Args {
    fn parse(options: &mut Options) -> Result<Self, String> {
        let mut args = Self {
            channels: 100,
            size: 1 << 20,
            stream: 16 << 20,
            in_flight: 2,
            seconds: 2.0,
            rounds: 5,
            transport: SoftTransport::Tcp,
            profile: Profile::Default,
            only: None,
            mode: Mode::Event,
            pin: true,
            far: false,
        };
        while let Some(flag) = options.flag()? {
            match flag.as_str() {
                "--far" => args.far = true,
                "--no-pin" => args.pin = false,
                "--channels" => args.channels = options.number(2, 10_000)?,
                "--size" => args.size = options.value()?,
                "--stream" => args.stream = options.value()?,
                "--in-flight" => args.in_flight = options.number(1, 1000)?,
                "--seconds" => args.seconds = options.number(0.01, 3600.0)?,
                "--rounds" => args.rounds = options.number(1, 1000)?,
                "--transport" => args.transport = options.value()?,
                "--profile" => args.profile = options.value()?,
                "--only" => args.only = Some(options.value()?),
                "--mode" => args.mode = options.value()?,
                _ => return Err(options.unknown()),
            }
        }
        if !options.measures() && !args.far {
            (args.channels, args.size, args.stream) = (4, 64 << 10, 256 << 10);
            (args.seconds, args.rounds, args.pin) = (0.1, 1, false);
        }
        if args.only == Some(What::Small) && !args.far {
            args.channels = 2;
        }
        for (what, bytes) in [("--size", args.size), ("--stream", args.stream)] {
            if bytes == 0 || bytes % BLOCK != 0 || bytes / BLOCK > u64::from(u32::MAX >> 8) {
                return Err(format!("{what} {bytes}: a multiple of {BLOCK} is wanted"));
            }
        }
        Ok(args)
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
            format!("--mode={}", self.mode.name()),
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

fn endpoint(pool: &KvPool, mode: Mode) -> Result<KvEndpoint, Error> {
    let spin = if mode == Mode::Spin { SPIN } else { Duration::ZERO };
    let config = KvConfig::default().spin(spin).connect_timeout(Duration::from_secs(60));
    Ok(KvEndpoint::new(pool.clone(), config)?)
}

fn main() -> ExitCode {
    common::program("many", USAGE, Args::parse, |args| {
        common::allow_descriptors()?;
        common::pin_as(args.far, args.pin)?;
        let runtime = common::runtime()?;
        match args.far {
            true => runtime.block_on(far::serve(&args)),
            false => runtime.block_on(near::measure(&args)),
        }
    })
}
