//! What is left to wait for after the last layer: a request that is written layer by layer while a model makes it, beside the same bytes
//! at once.
//!
//! ```text
//!   layers.TRANSPORT.MODE.tail       ms   from the last push to the last confirmation: what a model has to wait for when it is done
//!   layers.TRANSPORT.MODE.tail_most  ms   the longest of them
//!   layers.TRANSPORT.MODE.layer      ms   from a layer's push to its confirmation: the median of the request's
//!   layers.TRANSPORT.MODE.alone      ms   a write of as many bytes as a layer has, in as many pieces, with nothing beside it
//!   layers.TRANSPORT.MODE.request    ms   from the beginning to the last confirmation
//!   layers.TRANSPORT.MODE.at_once    ms   a write of the whole request, all of which is there
//!     MODE   event or spin: how the two ends wait
//! ```
//!
//! Medians over the repetitions, which go in turn. The model is a timer: a layer is there at each of its ticks. The receiver
//! looks at each layer as it lands and reads none of it, so that the tail is that of the channel.

#[path = "common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::kv::{
    Grant, KvChannel, KvConfig, KvEndpoint, KvPool, LayersLanded, Layout, PoolAccess, WriteRequest,
};
use landfall::memory::Memory;

use common::{Error, Mode, Options, Peer, Samples, line};

const USAGE: &str = "\
cargo bench --bench layers -- [OPTIONS]

  --transport NAME   tcp, shm or auto (default tcp)
  --mode MODE        event or spin; both without it
  --layers N         layers, and blocks of a request (default 32)
  --block BYTES      bytes of a block in one layer (default 32 KiB: a layer is 1 MiB)
  --every US         microseconds in which the model makes a layer (default 1000)
  --reps N           requests (default 30)
  --no-pin           do not pin the receiver to cpu 0 and the writer to cpu 1
";

#[derive(Clone, Debug)]
struct Args {
    transport: SoftTransport,
    mode: Option<Mode>,
    layers: u32,
    block: u64,
    every: Duration,
    reps: usize,
    pin: bool,
    /// The receiver.
    far: bool,
}

fn parse(options: &mut Options) -> Result<Args, String> {
    let mut args = Args {
        transport: SoftTransport::Tcp,
        mode: None,
        layers: 32,
        block: 32 << 10,
        every: Duration::from_millis(1),
        reps: 30,
        pin: true,
        far: false,
    };
    while let Some(flag) = options.flag()? {
        match flag.as_str() {
            "--transport" => args.transport = options.value()?,
            "--mode" => args.mode = Some(options.value()?),
            "--layers" => args.layers = options.number(2, 1000)?,
            "--block" => args.block = options.number(1, 1 << 24)?,
            "--every" => args.every = Duration::from_micros(options.number(1000, 1_000_000)?),
            "--reps" => args.reps = options.number(1, 100_000)?,
            "--no-pin" => args.pin = false,
            "--far" => args.far = true,
            _ => return Err(options.unknown()),
        }
    }
    if !options.measures() && !args.far {
        (args.layers, args.reps, args.pin) = (4, 2, false);
    }
    Ok(args)
}

fn main() -> ExitCode {
    common::program("layers", USAGE, parse, |args| {
        common::pin_as(args.far, args.pin)?;
        for mode in [Mode::Event, Mode::Spin] {
            if args.mode.is_none_or(|only| only == mode) {
                let runtime = common::runtime()?;
                match args.far {
                    true => runtime.block_on(far(&args, mode))?,
                    false => runtime.block_on(near(&args, mode))?,
                }
            }
        }
        Ok(())
    })
}

async fn endpoint(args: &Args, mode: Mode) -> Result<KvEndpoint, Error> {
    let device = Device::soft(SoftConfig::new().transport(args.transport))?;
    // As many blocks as layers: so one block in all of the layers is as much as one layer of all the blocks.
    let layout = Layout::contiguous(args.layers, args.layers, args.block)?;
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, PoolAccess::Target).await?;
    Ok(KvEndpoint::new(pool, KvConfig::default().spin(mode.budget()))?)
}

/// What the writer asks for: a grant of so many blocks, or a grant by layer of all of them.
const BY_LAYER: &[u8] = b"by layer";

async fn far(args: &Args, mode: Mode) -> Result<(), Error> {
    let channel = common::listen(&endpoint(args, mode).await?).await?.accept().await?;
    while let Some(asked) = common::asked(&channel).await? {
        if asked == BY_LAYER {
            let (grant, mut arrivals) = channel.grant_layers(channel.pool().alloc(args.layers).await?)?;
            channel.send_message(grant.to_bytes()).await?;
            while arrivals.next().await?.is_some() {}
            drop(arrivals.finish().await?);
        } else {
            let blocks = channel.pool().alloc(String::from_utf8(asked)?.parse()?).await?;
            channel.send_message(channel.grant(blocks)?.to_bytes()).await?;
            drop(channel.next_arrival().await?);
        }
    }
    Ok(())
}

async fn near(args: &Args, mode: Mode) -> Result<(), Error> {
    let words = ["--far".to_owned(), format!("--transport={}", args.transport)];
    let more = [format!("--mode={}", mode.name()), format!("--layers={}", args.layers)];
    let last = [format!("--block={}", args.block)].into_iter().chain((!args.pin).then(|| "--no-pin".into()));
    let peer = Peer::start(words.into_iter().chain(more).chain(last))?;
    let channel = endpoint(args, mode).await?.connect(peer.hello.trim()).await?;
    println!("# {}", channel.path());
    // The first of each warms up.
    by_layer(args, &channel).await?;
    at_once(&channel, args.layers).await?;
    let mut series = Series::default();
    for _ in 0..args.reps {
        series.add(&by_layer(args, &channel).await?);
        series.alone.push(at_once(&channel, 1).await?.as_secs_f64());
        series.at_once.push(at_once(&channel, args.layers).await?.as_secs_f64());
    }
    series.print(args, mode);
    channel.close().await?;
    peer.finish()
}

async fn ask(channel: &KvChannel, what: &[u8]) -> Result<Grant, Error> {
    channel.send_message(what.to_vec()).await?;
    Ok(Grant::from_bytes(&channel.recv_message().await?)?)
}

/// Writes a request of which a layer is there at each tick.
async fn by_layer(args: &Args, channel: &KvChannel) -> Result<LayersLanded, Error> {
    let grant = ask(channel, BY_LAYER).await?;
    let source = channel.pool().alloc(args.layers).await?;
    let mut write = channel.write_layers(WriteRequest::new(&grant, source))?;
    let mut ticks = tokio::time::interval(args.every);
    // The first one is at once.
    ticks.tick().await;
    for layer in 0..write.layers() {
        ticks.tick().await;
        write.push(layer)?;
    }
    Ok(write.finish().await.0?)
}

/// Writes so many blocks, in all of their layers, at once.
async fn at_once(channel: &KvChannel, blocks: u32) -> Result<Duration, Error> {
    let grant = ask(channel, blocks.to_string().as_bytes()).await?;
    let source = channel.pool().alloc(blocks).await?;
    let start = Instant::now();
    channel.write(WriteRequest::new(&grant, source)).await.0?;
    Ok(start.elapsed())
}

/// Seconds.
#[derive(Default)]
struct Series {
    tail: Samples,
    layer: Samples,
    request: Samples,
    alone: Samples,
    at_once: Samples,
}

impl Series {
    fn add(&mut self, landed: &LayersLanded) {
        let mut layers = Samples::default();
        landed.layers.iter().for_each(|layer| layers.push(layer.landed.as_secs_f64()));
        self.tail.push(landed.tail.as_secs_f64());
        self.layer.push(layers.median());
        self.request.push(landed.landed.as_secs_f64());
    }

    fn print(&self, args: &Args, mode: Mode) {
        for (what, seconds) in [
            ("tail", self.tail.median()),
            ("tail_most", self.tail.quantile(1.0)),
            ("layer", self.layer.median()),
            ("alone", self.alone.median()),
            ("request", self.request.median()),
            ("at_once", self.at_once.median()),
        ] {
            line(&format!("layers.{}.{}.{what}", args.transport, mode.name()), seconds * 1e3, "ms");
        }
    }
}
