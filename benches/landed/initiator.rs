//! The writing process: every write is timed by its own clock, from the call to the confirmed landing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use landfall::kv::{Blocks, Grant, KvChannel, Landed, WriteRequest};

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::common::{Error, Peer, Samples, line};
use crate::endpoint;
use crate::placement::{End, Order};
use crate::reading;
use crate::receiver::{Ask, digest};

/// Longer than a write of any case takes, on any profile and a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How often a kind has its turn in a case.
const TURNS: usize = 3;

pub async fn measure(args: &Args, case: &Case, mode: Mode) -> Result<(), Error> {
    let options = [format!("--receiver={}", case.name), format!("--mode={}", mode.name())];
    let peer = Peer::start(args.shared().into_iter().chain(options))?;
    let endpoint = endpoint(args, case, mode).await?;
    let channel = endpoint.connect(peer.hello.trim()).await?;
    println!("# {}", channel.path());

    let mut orders = vec![(case.order, Series::default())];
    if case.order != Order::Flat {
        orders.push((Order::Flat, Series::default()));
    }
    let mut reads = reading::series(args, case);
    for (order, _) in &orders {
        let digest = verify(&channel, case, *order).await?;
        if *order == case.order && !reads.is_empty() {
            reading::verify(&channel, case, digest, &reads).await?;
        }
    }
    let reps = args.reps(case.reps);
    // In turn, each several times, so that all but the first of a turn find in the caches what the same kind has left there.
    for turn in parts(reps, TURNS) {
        for (order, series) in &mut orders {
            for grants in parts(turn, turn.div_ceil(case.ahead())) {
                round(&channel, case, *order, grants, series).await?;
            }
        }
        for series in &mut reads {
            for grants in parts(turn, turn.div_ceil(case.ahead())) {
                reading::round(&channel, case, grants, series).await?;
            }
        }
    }
    for (order, series) in &orders {
        series.print(case, *order, mode);
    }
    for series in &reads {
        series.print(case, mode);
    }
    channel.close().await?;
    peer.finish()
}

/// `n` in `parts` parts that are about as large as each other, and not empty.
fn parts(n: usize, parts: usize) -> impl Iterator<Item = usize> {
    let parts = parts.clamp(1, n.max(1));
    (0..parts).map(move |part| (part + 1) * n / parts - part * n / parts)
}

/// Warms up with a write whose blocks are compared at the far end. The target has never held this data before.
/// Answers the digest.
async fn verify(channel: &KvChannel, case: &Case, order: Order) -> Result<u64, Error> {
    let mut source = order.claim(channel.pool(), case.blocks, End::Source)?;
    fill(&mut source, if order == Order::Flat { 1 } else { 2 })?;
    let expected = digest(&source)?;
    let mut grants = ask(channel, &Ask { grants: 1, order, digest: true, read: false }).await?;
    let grant = Grant::from_bytes(&grants.pop().ok_or("the receiver gave no grant")?)?;
    channel.write(WriteRequest::new(&grant, source).deadline(PATIENCE)).await.0?;
    if channel.recv_message().await? != expected.to_le_bytes() {
        return Err(format!("{}: the data that landed is not what was written", case.name).into());
    }
    Ok(expected)
}

async fn round(
    channel: &KvChannel,
    case: &Case,
    order: Order,
    grants: usize,
    series: &mut Series,
) -> Result<(), Error> {
    let asked = ask(channel, &Ask { grants, order, digest: false, read: false }).await?;
    let mut source = None;
    for bytes in asked {
        // From lists of block ids to a plan: the source's claim, the grant as it came, the request, the plan.
        let start = Instant::now();
        let claimed = match source.take() {
            Some(claimed) => claimed,
            None => Arc::new(order.claim(channel.pool(), case.blocks, End::Source)?),
        };
        let grant = Grant::from_bytes(&bytes)?;
        let prepared = start.elapsed();

        let start = Instant::now();
        let mut request = WriteRequest::new(&grant, claimed).deadline(PATIENCE);
        if case.pairs && order == case.order {
            request = request.pairs((0..case.blocks).map(|position| (position, position)));
        }
        let built = start.elapsed();
        let write = channel.write(request);
        let returned = start.elapsed();
        let (result, back) = write.await;
        let total = start.elapsed();
        // Claimed again for each write of many blocks, so that this is measured, too.
        source = (case.blocks == 1).then_some(back);
        series.add(Times { prepared, built, returned, total }, &result?);
    }
    Ok(())
}

pub async fn ask(channel: &KvChannel, ask: &Ask) -> Result<Vec<Vec<u8>>, Error> {
    channel.send_message(ask.to_bytes()).await?;
    let mut grants = Vec::with_capacity(ask.grants);
    for _ in 0..ask.grants {
        grants.push(channel.recv_message().await?);
    }
    Ok(grants)
}

/// Every eight bytes tell their layer, position and offset.
pub fn fill(blocks: &mut Blocks, seed: u64) -> Result<(), Error> {
    const PIECE: u64 = 64 << 10;
    let layout = *blocks.pool().layout();
    let mut piece = Vec::with_capacity(PIECE as usize);
    for layer in 0..layout.layers() {
        for position in 0..blocks.len() {
            let mut at = 0;
            while at < layout.block_bytes() {
                let len = PIECE.min(layout.block_bytes() - at);
                piece.clear();
                for word in 0..len / 8 {
                    let place = (u64::from(layer) << 50) | (u64::from(position) << 32) | (at / 8 + word);
                    piece
                        .extend_from_slice(&(place ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes());
                }
                piece.resize(len as usize, 0);
                blocks.copy_in(layer, position, at, &piece)?;
                at += len;
            }
        }
    }
    Ok(())
}

/// What the clock said around one write.
struct Times {
    prepared: Duration,
    built: Duration,
    returned: Duration,
    total: Duration,
}

/// The samples of one case in one order, in seconds.
#[derive(Default)]
struct Series {
    prepared: Samples,
    built: Samples,
    planned: Samples,
    planning: Samples,
    returned: Samples,
    local: Samples,
    total: Samples,
    last: Option<Landed>,
}

impl Series {
    fn add(&mut self, times: Times, landed: &Landed) {
        let Times { prepared, built, returned, total } = times;
        self.prepared.push(prepared.as_secs_f64());
        self.built.push(built.as_secs_f64());
        self.planned.push(landed.planned.as_secs_f64());
        self.planning.push((prepared + built + landed.planned).as_secs_f64());
        self.returned.push((returned - built).as_secs_f64());
        self.local.push((built + landed.local).as_secs_f64());
        self.total.push(total.as_secs_f64());
        self.last = Some(*landed);
    }

    fn print(&self, case: &Case, order: Order, mode: Mode) {
        let flat = if order == case.order { "" } else { ".flat" };
        let name = |what: &str| format!("landfall.{}.{}{flat}.{what}", mode.name(), case.name);
        if let Some(landed) = &self.last {
            let Landed { descriptors, wrs, .. } = landed;
            println!("# {} descriptors in {} work requests, {} bytes", descriptors, wrs, landed.bytes);
        }
        let bytes = case.bytes() as f64;
        if case.bytes() <= 64 << 10 {
            line(&name("landed_p50"), self.total.median() * 1e6, "us");
            line(&name("landed_p99"), self.total.quantile(0.99) * 1e6, "us");
            line(&name("local_p50"), self.local.median() * 1e6, "us");
        } else {
            line(&name("landed_ms"), self.total.median() * 1e3, "ms");
        }
        line(&name("landed"), bytes / self.total.median() / 1e9, "GB/s");
        line(&name("local"), bytes / self.local.median() / 1e9, "GB/s");
        if case.order != Order::Flat {
            line(&name("planning"), self.planning.median() * 1e3, "ms");
            line(&name("prepare"), self.prepared.median() * 1e3, "ms");
            line(&name("request"), self.built.median() * 1e3, "ms");
            line(&name("plan"), self.planned.median() * 1e3, "ms");
            line(&name("call"), self.returned.median() * 1e3, "ms");
        }
    }
}
