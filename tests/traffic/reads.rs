//! Reads: by each strategy, to places of their own, by tokens, cancelled, late.

use std::time::Duration;

use landfall::kv::{Blocks, Grant, ReadMethod, ReadRequest, ReadStrategy};

use super::content::{GUARD, LAYERS, Rng, Wanted, fill};
use super::grants::Want;
use super::link::Link;
use super::mapped::Stretches;
use super::operations::{few, some};
use super::outcome::end_read;
use super::process::{bad, say};

/// Which of the owner's blocks, or tokens, come to which of ours.
pub enum What {
    Blocks(u64),
    /// From behind, which is one work request for each.
    Turned(u64),
    Tokens(Stretches),
}

impl What {
    /// Blocks, where both ends' are alike.
    pub fn any(link: &Link, rng: &mut Rng) -> Self {
        if !link.is_alike() {
            return Self::tokens(link, rng);
        }
        let blocks = some(link, rng);
        if rng.one_in(2) { Self::Turned(blocks) } else { Self::Blocks(blocks) }
    }

    fn tokens(link: &Link, rng: &mut Rng) -> Self {
        Self::Tokens(Stretches::draw(&link.from_peer, few(link, rng), rng))
    }

    /// At the owner, and at our end.
    pub fn blocks(&self) -> (u32, u32) {
        match self {
            Self::Blocks(blocks) | Self::Turned(blocks) => (*blocks as u32, *blocks as u32),
            Self::Tokens(what) => (what.source_blocks, what.target_blocks),
        }
    }

    pub fn request(&self, link: &Link, grant: &Grant, target: Blocks) -> ReadRequest {
        let ours = target.len();
        let request = ReadRequest::new(grant, target);
        let mapping = &link.from_peer;
        match self {
            Self::Blocks(_) => request,
            Self::Turned(_) => request.pairs((0..ours).map(|position| (position, ours - 1 - position))),
            Self::Tokens(what) => match what.beginning() {
                Some(tokens) if tokens == what.source_blocks * mapping.source().tokens() => {
                    request.mapped(mapping)
                }
                Some(tokens) => request.mapped_tokens(mapping, tokens),
                None => request.mapped_spans(mapping, what.spans.iter().copied()),
            },
        }
    }

    fn wanted<'a>(&'a self, link: &'a Link, tag: u64) -> Wanted<'a> {
        match self {
            Self::Blocks(_) => Wanted::Filled(tag),
            Self::Turned(_) => Wanted::Turned(tag),
            Self::Tokens(what) => Wanted::Mapped(tag, &link.from_peer, &what.spans),
        }
    }

    fn bytes(&self, link: &Link) -> u64 {
        let of_a_layer = match self {
            Self::Blocks(blocks) | Self::Turned(blocks) => {
                blocks * link.channel.pool().layout().block_bytes()
            }
            Self::Tokens(what) => what.tokens() * link.from_peer.bytes_per_token(),
        };
        of_a_layer * u64::from(LAYERS)
    }
}

pub async fn read(link: &Link, strategy: ReadStrategy, rng: &mut Rng) -> Option<()> {
    run(link, What::any(link, rng), strategy, None).await
}

/// By tokens, also where blocks are alike.
pub async fn mapped(link: &Link, rng: &mut Rng) -> Option<()> {
    run(link, What::tokens(link, rng), strategy(rng), None).await
}

/// Few at once, or many; on one queue pair of each rail, or on all.
pub async fn by_reads(link: &Link, rng: &mut Rng) -> Option<()> {
    let strategy = ReadStrategy::RdmaRead { depth: rng.range(1, 16) as u32, qps: rng.range(1, 4) as usize };
    run(link, What::any(link, rng), strategy, None).await
}

pub async fn short_deadline(link: &Link, rng: &mut Rng) -> Option<()> {
    let deadline = Duration::from_micros(rng.range(1, 20_000));
    let strategy = strategy(rng);
    run(link, What::any(link, rng), strategy, Some(deadline)).await
}

/// It may be read or not, and its blocks are back some time later.
pub async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, &What::any(link, rng)).await?;
    let read = link.channel.read(request.strategy(strategy(rng)));
    for _ in 0..rng.range(0, 10) {
        tokio::task::yield_now().await;
    }
    drop(read);
    Some(())
}

pub fn strategy(rng: &mut Rng) -> ReadStrategy {
    let depth = rng.range(1, 16) as u32;
    if rng.one_in(2) { ReadStrategy::RemoteWrite } else { ReadStrategy::RdmaRead { depth, qps: 64 } }
}

/// To blocks that hold something else.
async fn request(link: &Link, what: &What) -> Option<(u64, ReadRequest)> {
    let (theirs, ours) = what.blocks();
    let (tag, grant) = link.ask(Want::Read, theirs.into()).await?;
    let mut target = link.channel.pool().alloc(ours).await.ok()?;
    fill(&mut target, GUARD);
    Some((tag, what.request(link, &grant, target)))
}

async fn run(link: &Link, what: What, strategy: ReadStrategy, deadline: Option<Duration>) -> Option<()> {
    let (tag, mut request) = request(link, &what).await?;
    if let Some(deadline) = deadline {
        request = request.deadline(deadline);
    }
    finish(link, tag, &what, strategy, request).await
}

/// Reads, and compares what has come.
pub async fn finish(
    link: &Link,
    tag: u64,
    what: &What,
    strategy: ReadStrategy,
    request: ReadRequest,
) -> Option<()> {
    let (done, target) = end_read(tag, link.channel.read(request.strategy(strategy))).await?;
    if let Some(done) = done {
        if let Some(what) = what.wanted(link, tag).differs(&target) {
            bad(format_args!("what was read by {} is not what was there (K1): {what}", done.method));
        }
        let bytes = what.bytes(link);
        if done.bytes != bytes {
            bad(format_args!("a read of {bytes} bytes of {tag:#x} says {} bytes", done.bytes));
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
