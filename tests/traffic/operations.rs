//! What is done on a channel, by a table: a new operation is a function and a line.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use landfall::kv::{WriteError, WriteRequest};

use crate::content::{Rng, fill_for};
use crate::link::Link;
use crate::outcome::end;
use crate::process::{bad, say};

/// The most blocks of a write.
const MOST: u64 = 32;

/// `None` when the channel has ended.
type Running<'a> = Pin<Box<dyn Future<Output = Option<()>> + 'a>>;

struct Operation {
    name: &'static str,
    /// How often it is chosen, beside the others.
    weight: u64,
    run: for<'a> fn(&'a Link, &'a mut Rng) -> Running<'a>,
}

/// The names are keys of the report.
const OPERATIONS: &[Operation] = &[
    Operation { name: "write_block", weight: 300, run: |l, _| Box::pin(write(l, 1, false)) },
    Operation { name: "write_run", weight: 250, run: |l, r| Box::pin(write(l, r.range(2, MOST), false)) },
    Operation {
        name: "write_scattered",
        weight: 120,
        run: |l, r| Box::pin(write(l, r.range(2, MOST), true)),
    },
    Operation { name: "write_cancelled", weight: 50, run: |l, r| Box::pin(cancelled(l, r)) },
    Operation { name: "write_short_deadline", weight: 50, run: |l, r| Box::pin(short_deadline(l, r)) },
    Operation { name: "write_detached", weight: 50, run: |l, r| Box::pin(detached(l, r)) },
    Operation { name: "write_refused", weight: 30, run: |l, _| Box::pin(refused(l)) },
    Operation { name: "message", weight: 200, run: |l, r| Box::pin(l.text(r.range(0, 3000))) },
    Operation { name: "message_large", weight: 40, run: |l, r| Box::pin(l.text(r.range(3000, 300_000))) },
    Operation { name: "messages", weight: 20, run: |l, r| Box::pin(messages(l, r)) },
    Operation { name: "close", weight: 1, run: |l, _| Box::pin(close(l)) },
    Operation { name: "kill", weight: 1, run: |l, _| Box::pin(kill(l)) },
];

/// One operation of the table. `None` when the channel has ended.
pub async fn operate(link: &Link, rng: &mut Rng) -> Option<()> {
    let mut at = rng.range(0, OPERATIONS.iter().map(|o| o.weight).sum::<u64>() - 1);
    let chosen = OPERATIONS.iter().find(|operation| {
        let here = at < operation.weight;
        at = at.saturating_sub(operation.weight);
        here
    });
    let operation = chosen?;
    let ended = (operation.run)(link, rng).await;
    say(format_args!("did {}", operation.name));
    ended
}

/// A request for a grant of so many blocks, filled, and its tag. Scattered blocks are one work request each.
async fn request(link: &Link, blocks: u64, scattered: bool) -> Option<(u64, WriteRequest)> {
    let count = blocks as u32;
    let grant = link.ask(count).await?;
    let mut source = link.channel.pool().alloc(count).await.ok()?;
    let tag = link.next_tag(count);
    let to = |position: u32| if scattered { count - 1 - position } else { position };
    fill_for(&mut source, tag, to);
    let pairs = (0..count).map(|position| (position, to(position)));
    Some((tag, WriteRequest::new(&grant, source).pairs(pairs).tag(tag)))
}

async fn write(link: &Link, blocks: u64, scattered: bool) -> Option<()> {
    let (tag, request) = request(link, blocks, scattered).await?;
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

/// It may arrive or not.
async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, rng.range(1, MOST), rng.one_in(2)).await?;
    let write = link.channel.write(request);
    for _ in 0..rng.range(0, 10) {
        tokio::task::yield_now().await;
    }
    drop(write);
    Some(())
}

async fn short_deadline(link: &Link, rng: &mut Rng) -> Option<()> {
    let (tag, request) = request(link, rng.range(1, MOST), rng.one_in(2)).await?;
    let request = request.deadline(Duration::from_micros(rng.range(1, 20_000)));
    link.doubt(end(tag, link.channel.write(request)).await);
    Some(())
}

async fn detached(link: &Link, rng: &mut Rng) -> Option<()> {
    let (_, request) = request(link, rng.range(1, MOST), false).await?;
    link.channel.write(request).detach();
    Some(())
}

/// A block that the grant does not have, which posts nothing and leaves the grant as it is (R10); its use; and its use again (K6).
async fn refused(link: &Link) -> Option<()> {
    let grant = link.ask(2).await?;
    let mut source = link.channel.pool().alloc(2).await.ok()?;
    let tag = link.next_tag(2);
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

async fn messages(link: &Link, rng: &mut Rng) -> Option<()> {
    for _ in 0..rng.range(10, 60) {
        link.text(rng.range(0, 2000)).await?;
    }
    Some(())
}

/// Everything in flight finishes, on both sides.
async fn close(link: &Link) -> Option<()> {
    let _ = link.channel.close().await;
    None
}

async fn kill(link: &Link) -> Option<()> {
    link.channel.kill();
    None
}
