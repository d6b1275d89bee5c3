//! Writes: in order and not, mapped, cancelled, late, detached, refused.

use std::time::Duration;

use landfall::kv::{WriteError, WriteRequest};

use super::content::{Rng, fill_for, fill_mapped};
use super::grants::Want;
use super::link::Link;
use super::operations::some;
use super::outcome::end;
use super::process::bad;

/// A request for a grant of so many blocks, filled, and its tag. Scattered blocks are one work request each.
async fn request(link: &Link, blocks: u64, scattered: bool) -> Option<(u64, WriteRequest)> {
    let (tag, grant) = link.ask(Want::Write, blocks).await?;
    let count = blocks as u32;
    let mut source = link.channel.pool().alloc(count).await.ok()?;
    if !link.is_alike() {
        fill_mapped(&mut source, tag, &link.mapping);
        return Some((tag, WriteRequest::new(&grant, source).mapped(&link.mapping).tag(tag)));
    }
    let to = |position: u32| if scattered { count - 1 - position } else { position };
    fill_for(&mut source, tag, to);
    let pairs = (0..count).map(|position| (position, to(position)));
    Some((tag, WriteRequest::new(&grant, source).pairs(pairs).tag(tag)))
}

pub async fn write(link: &Link, blocks: u64, scattered: bool) -> Option<()> {
    let (tag, request) = request(link, blocks, scattered).await?;
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

/// From the order of tokens and heads that we have to the peer's.
pub async fn mapped(link: &Link, blocks: u64) -> Option<()> {
    let (tag, grant) = link.ask(Want::Write, blocks).await?;
    let mut source = link.channel.pool().alloc(blocks as u32).await.ok()?;
    fill_mapped(&mut source, tag, &link.mapping);
    let request = WriteRequest::new(&grant, source).mapped(&link.mapping).tag(tag);
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

/// It may arrive or not.
pub async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, some(link, rng), rng.one_in(2)).await?;
    let write = link.channel.write(request);
    for _ in 0..rng.range(0, 10) {
        tokio::task::yield_now().await;
    }
    drop(write);
    Some(())
}

pub async fn short_deadline(link: &Link, rng: &mut Rng) -> Option<()> {
    let (tag, request) = request(link, some(link, rng), rng.one_in(2)).await?;
    let request = request.deadline(Duration::from_micros(rng.range(1, 20_000)));
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

pub async fn detached(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, some(link, rng), false).await?;
    link.channel.write(request).detach();
    Some(())
}

/// A block that the grant does not have, which posts nothing and leaves the grant as it is (R10); its use; and its use again (K6).
pub async fn refused(link: &Link) -> Option<()> {
    if !link.is_alike() {
        return unlike(link).await;
    }
    let (tag, grant) = link.ask(Want::Write, 2).await?;
    let mut source = link.channel.pool().alloc(2).await.ok()?;
    fill_for(&mut source, tag, |position| position);
    let (outside, source) =
        link.channel.write(WriteRequest::new(&grant, source).pairs([(0, 0), (1, 2)])).await;
    // The peer takes some grants back.
    let refusals = |e: &WriteError| {
        matches!(e, WriteError::OutOfRange { .. } | WriteError::Closed { .. } | WriteError::StaleGrant { .. })
    };
    if !outside.as_ref().is_err_and(refusals) {
        bad(format_args!("a write to a block that was not granted (R10): {outside:?}"));
    }
    link.doubt(end(tag, link.channel.write(WriteRequest::new(&grant, source).tag(tag))).await);
    let source = link.channel.pool().alloc(2).await.ok()?;
    let (again, _) = link.channel.write(WriteRequest::new(&grant, source)).await;
    if !matches!(again, Err(WriteError::StaleGrant { .. } | WriteError::Closed { .. })) {
        bad(format_args!("a write under a grant that was used (K6): {again:?}"));
    }
    Some(())
}

/// Blocks of another order, as they are: a write posts nothing, and neither does a read.
async fn unlike(link: &Link) -> Option<()> {
    let (_, grant) = link.ask(Want::Write, 1).await?;
    let (refused, _) =
        link.channel.write(WriteRequest::new(&grant, link.channel.pool().alloc(1).await.ok()?)).await;
    let refusals = |e: &WriteError| {
        matches!(e, WriteError::Shapes { .. } | WriteError::Closed { .. } | WriteError::StaleGrant { .. })
    };
    if !refused.as_ref().is_err_and(refusals) {
        bad(format_args!("a write to blocks of another order, as they are (R10): {refused:?}"));
    }
    link.channel.revoke(&grant);
    Some(())
}
