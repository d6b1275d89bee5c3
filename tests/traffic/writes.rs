//! Writes: in order and not, by tokens, cancelled, late, detached.

use std::time::Duration;

use landfall::kv::{Mapping, WriteRequest};

use super::content::{Rng, fill, fill_for};
use super::grants::Want;
use super::link::Link;
use super::mapped::Stretches;
use super::operations::some;
use super::outcome::end;

/// A request for a grant of so many blocks, filled, and its tag. Scattered blocks are one work request each. Where the peer's are
/// unlike ours, it is by tokens.
async fn request(link: &Link, blocks: u64, scattered: bool, rng: &mut Rng) -> Option<(u64, WriteRequest)> {
    if !link.is_alike() {
        return mapped_request(link, blocks, rng).await;
    }
    let (tag, grant) = link.ask(Want::Write, blocks).await?;
    let count = blocks as u32;
    let mut source = link.channel.pool().alloc(count).await.ok()?;
    let to = |position: u32| if scattered { count - 1 - position } else { position };
    fill_for(&mut source, tag, to);
    let pairs = (0..count).map(|position| (position, to(position)));
    Some((tag, WriteRequest::new(&grant, source).pairs(pairs).tag(tag)))
}

async fn mapped_request(link: &Link, blocks: u64, rng: &mut Rng) -> Option<(u64, WriteRequest)> {
    let what = Stretches::draw(&link.to_peer, blocks, rng);
    let (tag, grant) = link.ask_mapped(Want::Write, &what).await?;
    let mut source = link.channel.pool().alloc(what.source_blocks).await.ok()?;
    fill(&mut source, tag);
    Some((tag, by_tokens(WriteRequest::new(&grant, source).tag(tag), &link.to_peer, &what)))
}

/// By the call that says it with the fewest words.
pub fn by_tokens(request: WriteRequest, mapping: &Mapping, what: &Stretches) -> WriteRequest {
    match what.beginning() {
        Some(tokens) if tokens == what.source_blocks * mapping.source().tokens() => request.mapped(mapping),
        Some(tokens) => request.mapped_tokens(mapping, tokens),
        None => request.mapped_spans(mapping, what.spans.iter().copied()),
    }
}

pub async fn write(link: &Link, blocks: u64, scattered: bool, rng: &mut Rng) -> Option<()> {
    let (tag, request) = request(link, blocks, scattered, rng).await?;
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

pub async fn mapped(link: &Link, blocks: u64, rng: &mut Rng) -> Option<()> {
    let (tag, request) = mapped_request(link, blocks, rng).await?;
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

/// It may arrive or not.
pub async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, some(link, rng), rng.one_in(2), rng).await?;
    let write = link.channel.write(request);
    for _ in 0..rng.range(0, 10) {
        tokio::task::yield_now().await;
    }
    drop(write);
    Some(())
}

pub async fn short_deadline(link: &Link, rng: &mut Rng) -> Option<()> {
    let (tag, request) = request(link, some(link, rng), rng.one_in(2), rng).await?;
    let request = request.deadline(Duration::from_micros(rng.range(1, 20_000)));
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

pub async fn detached(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, some(link, rng), false, rng).await?;
    link.channel.write(request).detach();
    Some(())
}
