//! Reads: by each strategy, to places of their own, cancelled, late.

use std::time::Duration;

use landfall::kv::{ReadError, ReadMethod, ReadRequest, ReadStrategy};

use super::content::{BLOCK_BYTES, GUARD, LAYERS, Rng, differs_from, fill};
use super::grants::Want;
use super::link::Link;
use super::operations::some;
use super::outcome::end_read;
use super::process::{bad, say};

pub async fn read(link: &Link, rng: &mut Rng, strategy: ReadStrategy) -> Option<()> {
    run(link, rng, strategy, None).await
}

/// Few at once, or many; on one queue pair of each rail, or on all.
pub async fn by_reads(link: &Link, rng: &mut Rng) -> Option<()> {
    let strategy = ReadStrategy::RdmaRead { depth: rng.range(1, 16) as u32, qps: rng.range(1, 4) as usize };
    run(link, rng, strategy, None).await
}

pub async fn short_deadline(link: &Link, rng: &mut Rng) -> Option<()> {
    let deadline = Duration::from_micros(rng.range(1, 20_000));
    let strategy = any(rng);
    run(link, rng, strategy, Some(deadline)).await
}

/// It may be read or not, and its blocks are back some time later.
pub async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    if !link.is_alike() {
        return unlike(link, any(rng)).await;
    }
    let (_, request) = request(link, some(link, rng), rng.one_in(2)).await?;
    let read = link.channel.read(request.strategy(any(rng)));
    for _ in 0..rng.range(0, 10) {
        tokio::task::yield_now().await;
    }
    drop(read);
    Some(())
}

fn any(rng: &mut Rng) -> ReadStrategy {
    let depth = rng.range(1, 16) as u32;
    if rng.one_in(2) { ReadStrategy::RemoteWrite } else { ReadStrategy::RdmaRead { depth, qps: 64 } }
}

/// So many blocks, each to its own position or to those from behind.
async fn request(link: &Link, blocks: u64, scattered: bool) -> Option<(u64, ReadRequest)> {
    let (tag, grant) = link.ask(Want::Read, blocks).await?;
    let mut target = link.channel.pool().alloc(blocks as u32).await.ok()?;
    fill(&mut target, GUARD);
    let request = ReadRequest::new(&grant, target);
    let last = blocks as u32 - 1;
    let pairs = (0..=last).map(|position| (position, last - position));
    Some((tag, if scattered { request.pairs(pairs) } else { request }))
}

async fn run(link: &Link, rng: &mut Rng, strategy: ReadStrategy, deadline: Option<Duration>) -> Option<()> {
    if !link.is_alike() {
        return unlike(link, strategy).await;
    }
    let (blocks, scattered) = (some(link, rng), rng.one_in(2));
    let (tag, request) = request(link, blocks, scattered).await?;
    let mut request = request.strategy(strategy);
    if let Some(deadline) = deadline {
        request = request.deadline(deadline);
    }
    let (done, target) = end_read(tag, link.channel.read(request)).await?;
    if let Some(done) = done {
        let last = blocks as u32 - 1;
        let from = |position: u32| if scattered { last - position } else { position };
        if let Some(what) = differs_from(&target, tag, from) {
            bad(format_args!("what was read by {} is not what was there (K1): {what}", done.method));
        }
        if done.bytes != blocks * u64::from(LAYERS) * BLOCK_BYTES {
            bad(format_args!("a read of {blocks} blocks of {tag:#x} says {} bytes", done.bytes));
        }
        let as_asked = match strategy {
            ReadStrategy::RemoteWrite => done.method == ReadMethod::RemoteWrite,
            ReadStrategy::RdmaRead { .. } => done.method != ReadMethod::RemoteWrite,
            _ => true,
        };
        if !as_asked {
            bad(format_args!("{strategy:?} was asked for, and it was read by {} (K9)", done.method));
        }
        say(format_args!("read {tag}"));
    }
    link.watched.push(target);
    Some(())
}

/// Blocks of another order, as they are: nothing is posted, and the owner hears of nothing.
async fn unlike(link: &Link, strategy: ReadStrategy) -> Option<()> {
    let (_, request) = request(link, 1, false).await?;
    let (refused, _) = link.channel.read(request.strategy(strategy)).await;
    let refusals = |e: &ReadError| {
        matches!(e, ReadError::Shapes { .. } | ReadError::Closed { .. } | ReadError::StaleGrant { .. })
    };
    if !refused.as_ref().is_err_and(refusals) {
        bad(format_args!("a read of blocks of another order, as they are (R10): {refused:?}"));
    }
    Some(())
}
