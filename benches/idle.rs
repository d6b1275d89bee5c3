//! What a channel costs while nothing is to be done on it: memory and descriptors each, and CPU time of all together (R8).
//!
//! Two processes with one pool each. Between two endpoints there is one channel, so that the near process has as many endpoints
//! as channels. No heartbeats while it measures: those are work, and their price is that of a small message.

#[path = "common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::time::Duration;

use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::kv::{KvChannel, KvConfig, KvEndpoint, KvPool, Layout};
use tokio::task::JoinSet;

use common::{Error, Options, Peer, line};

const USAGE: &str = "\
cargo bench --bench idle -- [OPTIONS]

  --transport NAME   tcp, shm or auto (default: tcp, and then shm)
  --channels N       so many channels (default 10000 over tcp, 1000 over shm)
  --seconds N        how long they idle (default 10)
";

/// Handshakes at once: fewer than a listener takes.
const AT_ONCE: usize = 64;
/// Longer than the bench.
const LONG: Duration = Duration::from_secs(6 * 3600);

#[derive(Clone, Debug)]
struct Args {
    transport: Option<SoftTransport>,
    channels: Option<usize>,
    seconds: f64,
    /// The far process.
    far: bool,
}

fn parse(options: &mut Options) -> Result<Args, String> {
    let mut args = Args { transport: None, channels: None, seconds: 10.0, far: false };
    while let Some(flag) = options.flag()? {
        match flag.as_str() {
            "--far" => args.far = true,
            "--transport" => args.transport = Some(options.value()?),
            "--channels" => args.channels = Some(options.value()?),
            "--seconds" => args.seconds = options.value()?,
            _ => return Err(options.unknown()),
        }
    }
    if !options.measures() && !args.far {
        (args.channels, args.seconds) = (Some(8), 0.1);
    }
    Ok(args)
}

fn main() -> ExitCode {
    common::program("idle", USAGE, parse, |args| {
        common::allow_descriptors()?;
        let transports = args.transport.map_or(vec![SoftTransport::Tcp, SoftTransport::Shm], |t| vec![t]);
        for transport in transports {
            let runtime = common::runtime()?;
            match args.far {
                true => runtime.block_on(far(transport))?,
                false => runtime.block_on(near(&args, transport))?,
            }
        }
        Ok(())
    })
}

/// What this process has.
#[derive(Clone, Copy)]
struct Level {
    /// Proportional set size: what is shared counts for each of those who share it.
    kib: f64,
    descriptors: f64,
}

/// User and system time of this process so far. Apart from its [`Level`], whose reading takes time.
fn cpu() -> Result<Duration, Error> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole rusage, for the call to write.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: zeroed is a valid rusage, and the call has succeeded.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    Ok(time(usage.ru_utime) + time(usage.ru_stime))
}

impl Level {
    fn now() -> Result<Self, Error> {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
        let pss = rollup.lines().find_map(|l| l.strip_prefix("Pss:")).ok_or("no Pss in smaps_rollup")?;
        let kib = pss.trim().trim_end_matches(" kB").parse()?;
        Ok(Self { kib, descriptors: std::fs::read_dir("/proc/self/fd")?.count() as f64 })
    }

    fn to_bytes(self) -> Vec<u8> {
        format!("{} {}", self.kib, self.descriptors).into_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let (kib, descriptors) =
            std::str::from_utf8(bytes)?.split_once(' ').ok_or("two numbers were expected")?;
        Ok(Self { kib: kib.parse()?, descriptors: descriptors.parse()? })
    }
}

async fn pool(transport: SoftTransport) -> Result<KvPool, Error> {
    let device = Device::soft(SoftConfig::new().transport(transport))?;
    Ok(KvPool::new(&device.alloc_pd()?, Layout::contiguous(1, 64, 4096)?).await?)
}

fn endpoint(pool: &KvPool) -> Result<KvEndpoint, Error> {
    // A day is the most.
    let config = KvConfig::default().heartbeat(LONG).peer_timeout(LONG * 3).connect_timeout(LONG);
    Ok(KvEndpoint::new(pool.clone(), config)?)
}

/// The questions to the far process.
const LEVEL: &[u8] = b"level";
const CPU: &[u8] = b"cpu";

/// The far process: answers on the first channel.
async fn far(transport: SoftTransport) -> Result<(), Error> {
    let mut listener = common::listen(&endpoint(&pool(transport).await?)?).await?;
    let first = listener.accept().await?;
    let others = tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok(channel) = listener.accept().await {
            kept.push(channel);
        }
    });
    while let Ok(asked) = first.recv_message().await {
        let answer = match &asked[..] {
            LEVEL => Level::now()?.to_bytes(),
            _ => cpu()?.as_micros().to_string().into_bytes(),
        };
        first.send_message(answer).await?;
    }
    others.abort();
    Ok(())
}

/// Of both sides: the near one, and the far one at the other end of `first`.
async fn levels(first: &KvChannel) -> Result<[Level; 2], Error> {
    first.send_message(LEVEL.to_vec()).await?;
    Ok([Level::now()?, Level::from_bytes(&first.recv_message().await?)?])
}

async fn cpus(first: &KvChannel) -> Result<[Duration; 2], Error> {
    first.send_message(CPU.to_vec()).await?;
    let micros = String::from_utf8(first.recv_message().await?)?.parse()?;
    Ok([cpu()?, Duration::from_micros(micros)])
}

async fn near(args: &Args, transport: SoftTransport) -> Result<(), Error> {
    let channels = args.channels.unwrap_or(if transport == SoftTransport::Tcp { 10_000 } else { 1000 });
    let peer = Peer::start(["--far".to_owned(), format!("--transport={transport}")])?;
    let to = peer.hello.trim().to_owned();
    let pool = pool(transport).await?;
    let first = endpoint(&pool)?.connect(&to).await?;
    println!("# {}", first.path());
    let before = levels(&first).await?;

    let (mut kept, mut dialling) = (Vec::with_capacity(channels), JoinSet::new());
    for _ in 0..channels {
        if dialling.len() == AT_ONCE
            && let Some(channel) = dialling.join_next().await
        {
            kept.push(channel??);
        }
        let (endpoint, to) = (endpoint(&pool)?, to.clone());
        // A channel keeps what it needs of its endpoint.
        dialling.spawn(async move { endpoint.connect(to).await });
    }
    while let Some(channel) = dialling.join_next().await {
        kept.push(channel??);
    }
    // What connecting still has to do belongs to that.
    tokio::time::sleep(Duration::from_secs_f64(args.seconds / 10.0)).await;
    let connected = levels(&first).await?;
    let start = cpus(&first).await?;
    tokio::time::sleep(Duration::from_secs_f64(args.seconds)).await;
    let end = cpus(&first).await?;

    for (at, side) in ["near", "far"].into_iter().enumerate() {
        let name = |what: &str| format!("idle.{transport}.{channels}.{side}.{what}");
        let each = |more: f64| more / channels as f64;
        line(&name("memory"), each(connected[at].kib - before[at].kib), "KiB");
        line(&name("descriptors"), each(connected[at].descriptors - before[at].descriptors), "each");
        let used = end[at].saturating_sub(start[at]);
        line(&name("cpu"), used.as_secs_f64() * 1e3 / args.seconds, "ms/s");
    }
    drop(kept);
    first.close().await?;
    peer.finish()
}
