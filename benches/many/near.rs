//! The writing process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use landfall::kv::{Blocks, Grant, KvChannel, KvPool, Write, WriteRequest};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

use crate::common::{Error, Peer, Samples};
use crate::far::{Ask, STOP};
use crate::{Args, SMALL, What, endpoint};

/// Tags of a stream's writes, and of small ones.
const STREAM: u8 = 1;
const LITTLE: u8 = 2;
/// Small writes before the clock counts.
const WARM_UP: usize = 20;

/// A channel, with the grants that come on it by their kind.
struct Lane {
    channel: KvChannel,
    stream: mpsc::UnboundedReceiver<Grant>,
    little: mpsc::UnboundedReceiver<Grant>,
    stopped: mpsc::UnboundedReceiver<()>,
    hearing: JoinHandle<()>,
}

impl Lane {
    fn new(channel: KvChannel) -> Self {
        let (to_stream, stream) = mpsc::unbounded_channel();
        let (to_little, little) = mpsc::unbounded_channel();
        let (to_stopped, stopped) = mpsc::unbounded_channel();
        let from = channel.clone();
        let hearing = tokio::spawn(async move {
            while let Ok(message) = from.recv_message().await {
                if message == STOP {
                    let _ = to_stopped.send(());
                } else if let Some((kind, grant)) = message.split_first()
                    && let Ok(grant) = Grant::from_bytes(grant)
                {
                    let _ = if *kind == STREAM { to_stream.send(grant) } else { to_little.send(grant) };
                }
            }
        });
        Self { channel, stream, little, stopped, hearing }
    }

    async fn ask(&self, kind: u8, open: usize, places: usize, blocks: u32) -> Result<(), Error> {
        Ok(self.channel.send_message(Ask { kind, open, places, blocks }.to_bytes()).await?)
    }

    /// Nothing is under way. Grants that were not used are forgotten, and the blocks of all are free again.
    async fn stop(&mut self) -> Result<(), Error> {
        self.channel.send_message(STOP.to_vec()).await?;
        self.stopped.recv().await.ok_or("the far process has ended")?;
        while self.stream.try_recv().is_ok() {}
        while self.little.try_recv().is_ok() {}
        Ok(())
    }

    /// Writes to every grant that comes, `in_flight` at once, until `end`; the bytes that have landed by then.
    async fn stream(
        mut self,
        sources: Vec<Arc<Blocks>>,
        in_flight: usize,
        end: Instant,
    ) -> Result<(Self, u64), Error> {
        let mut under_way: VecDeque<Write> = VecDeque::new();
        let mut turn = sources.iter().cycle();
        let mut bytes = 0;
        while Instant::now() < end {
            let grant = self.stream.recv().await.ok_or("the far process has ended")?;
            let Some(source) = turn.next() else { break };
            let request = WriteRequest::new(&grant, source.clone()).tag(STREAM.into());
            under_way.push_back(self.channel.write(request));
            if under_way.len() == in_flight
                && let Some(oldest) = under_way.pop_front()
            {
                let landed = oldest.await.0?;
                if Instant::now() < end {
                    bytes += landed.bytes;
                }
            }
        }
        for write in under_way {
            write.await.0?;
        }
        Ok((self, bytes))
    }

    /// Small writes, one after the other, until `end`: the seconds of each.
    async fn small(mut self, source: Arc<Blocks>, end: Instant) -> Result<(Self, Samples), Error> {
        let mut samples = Samples::default();
        let mut n = 0;
        while Instant::now() < end {
            let grant = self.little.recv().await.ok_or("the far process has ended")?;
            let start = Instant::now();
            self.channel.write(WriteRequest::new(&grant, source.clone()).tag(LITTLE.into())).await.0?;
            n += 1;
            if n > WARM_UP {
                samples.push(start.elapsed().as_secs_f64());
            }
        }
        Ok((self, samples))
    }
}

pub async fn measure(args: &Args) -> Result<(), Error> {
    let peer = Peer::start(args.for_far())?;
    let pool = args.pool().await?;
    let mut dialling = JoinSet::new();
    for _ in 0..args.channels {
        let (endpoint, to) = (endpoint(&pool, args.mode)?, peer.hello.trim().to_owned());
        dialling.spawn(async move { endpoint.connect(to).await });
    }
    let mut lanes = Vec::with_capacity(args.channels);
    while let Some(channel) = dialling.join_next().await {
        lanes.push(Lane::new(channel??));
    }
    println!("# {}", lanes[0].channel.path());

    let mut shares = Shares::default();
    let mut small: [Small; 3] = Default::default();
    for round in 0..args.rounds {
        if args.only != Some(What::Small) {
            let (one, all);
            (lanes, one) = streams(args, &pool, lanes, true).await?;
            (lanes, all) = streams(args, &pool, lanes, false).await?;
            shares.add(args, &one, &all);
        }
        if args.only != Some(What::Streams) {
            for beside in BESIDE {
                let (samples, bytes);
                (lanes, samples, bytes) = latency(args, &pool, lanes, beside).await?;
                small[beside as usize].add(args, &samples, bytes);
            }
        }
        eprintln!("many: round {} of {}", round + 1, args.rounds);
    }
    if args.only != Some(What::Small) {
        shares.print(args);
    }
    if args.only != Some(What::Streams) {
        for beside in BESIDE {
            small[beside as usize].print(args, beside);
        }
    }
    for lane in &lanes {
        lane.channel.close().await?;
    }
    for lane in lanes {
        lane.hearing.await?;
    }
    peer.finish()
}

/// Streams on the first channel alone, or on all. Either goes through all of the memory. The bytes of each channel.
async fn streams(
    args: &Args,
    pool: &KvPool,
    lanes: Vec<Lane>,
    alone: bool,
) -> Result<(Vec<Lane>, Vec<u64>), Error> {
    let (blocks, in_flight) = (Args::blocks_of(args.size), args.in_flight);
    let places = if alone { args.open() * args.channels } else { args.open() };
    let running = if alone { 1 } else { lanes.len() };
    for lane in &lanes[..running] {
        lane.ask(STREAM, args.open(), places, blocks).await?;
    }
    let mut lanes = lanes.into_iter();
    let end = Instant::now() + args.time();
    let mut tasks = Vec::new();
    for lane in lanes.by_ref().take(running) {
        let sources: Result<Vec<_>, _> = (0..places).map(|_| pool.try_alloc(blocks).map(Arc::new)).collect();
        tasks.push(tokio::spawn(lane.stream(sources?, in_flight, end)));
    }
    let (mut back, mut bytes) = (Vec::new(), Vec::new());
    for task in tasks {
        let (mut lane, landed) = task.await??;
        lane.stop().await?;
        back.push(lane);
        bytes.push(landed);
    }
    back.extend(lanes);
    Ok((back, bytes))
}

const BESIDE: [Beside; 3] = [Beside::Idle, Beside::Same, Beside::Other];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Idle,
    Same,
    Other,
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Same => "same",
            Self::Other => "other",
        }
    }
}

/// Small writes on the first channel, beside a stream or nothing, and what the stream has landed.
async fn latency(
    args: &Args,
    pool: &KvPool,
    mut lanes: Vec<Lane>,
    beside: Beside,
) -> Result<(Vec<Lane>, Samples, u64), Error> {
    let (mut first, mut second) = (lanes.remove(0), lanes.remove(0));
    let blocks = Args::blocks_of(args.stream);
    let source = Arc::new(pool.try_alloc(1)?);
    first.ask(LITTLE, SMALL as usize / 2, SMALL as usize / 2, 1).await?;
    let end = Instant::now() + args.time();
    let claim = || -> Result<Vec<_>, Error> {
        let claims = (0..args.open()).map(|_| pool.try_alloc(blocks).map(Arc::new));
        Ok(claims.collect::<Result<_, _>>()?)
    };
    let samples;
    let mut bytes = 0;
    match beside {
        Beside::Idle => (first, samples) = first.small(source, end).await?,
        Beside::Same => {
            // The stream has the channel's grants of its own kind; the two halves share nothing else.
            first.ask(STREAM, args.open(), args.open(), blocks).await?;
            let (closed, nothing) = (mpsc::unbounded_channel().1, mpsc::unbounded_channel().1);
            let half = Lane {
                channel: first.channel.clone(),
                stream: std::mem::replace(&mut first.stream, closed),
                little: nothing,
                stopped: mpsc::unbounded_channel().1,
                hearing: tokio::spawn(async {}),
            };
            let streaming = tokio::spawn(half.stream(claim()?, args.in_flight, end));
            (first, samples) = first.small(source, end).await?;
            let half;
            (half, bytes) = streaming.await??;
            first.stream = half.stream;
        }
        Beside::Other => {
            second.ask(STREAM, args.open(), args.open(), blocks).await?;
            let streaming = tokio::spawn(second.stream(claim()?, args.in_flight, end));
            (first, samples) = first.small(source, end).await?;
            (second, bytes) = streaming.await??;
            second.stop().await?;
        }
    }
    first.stop().await?;
    lanes.insert(0, second);
    lanes.insert(0, first);
    Ok((lanes, samples, bytes))
}

/// What the rounds of small writes beside one thing have come to.
#[derive(Default)]
struct Small {
    /// Of each round: its p50, p99 and p999, in seconds; and what the stream beside them has landed, in bytes a second.
    quantiles: [Samples; 3],
    stream: Samples,
}

const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)];

impl Small {
    fn add(&mut self, args: &Args, samples: &Samples, bytes: u64) {
        for ((_, part), rounds) in QUANTILES.iter().zip(&mut self.quantiles) {
            rounds.push(samples.quantile(*part));
        }
        self.stream.push(bytes as f64 / args.time().as_secs_f64());
    }

    fn print(&self, args: &Args, beside: Beside) {
        let name = format!("many.{}.small.{}.{}", args.transport, args.mode.name(), beside.name());
        for ((what, _), rounds) in QUANTILES.iter().zip(&self.quantiles) {
            rounds.spread(&format!("{name}.{what}"), 1e6, "us");
        }
        if beside != Beside::Idle {
            self.stream.spread(&format!("{name}.stream"), 1e-9, "GB/s");
        }
    }
}

/// What the rounds of streams have come to.
#[derive(Default)]
struct Shares {
    one: Samples,
    total: Samples,
    total_to_one: Samples,
    least_to_fair: Samples,
}

impl Shares {
    fn add(&mut self, args: &Args, one: &[u64], all: &[u64]) {
        let rate = |bytes: u64| bytes as f64 / args.time().as_secs_f64();
        let (total, one): (u64, u64) = (all.iter().sum(), one.iter().sum());
        self.one.push(rate(one));
        self.total.push(rate(total));
        self.total_to_one.push(total as f64 / one as f64);
        let least = all.iter().min().copied().unwrap_or(0);
        self.least_to_fair.push(least as f64 * all.len() as f64 / total as f64);
    }

    fn print(&self, args: &Args) {
        let (transport, channels) = (args.transport, args.channels);
        self.one.spread(&format!("many.{transport}.one"), 1e-9, "GB/s");
        let name = |what: &str| format!("many.{transport}.{channels}.{what}");
        self.total.spread(&name("total"), 1e-9, "GB/s");
        self.total_to_one.spread(&name("total_to_one"), 1.0, "times");
        self.least_to_fair.spread(&name("least_to_fair"), 1.0, "times");
    }
}
