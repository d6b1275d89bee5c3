//! Requests that ask for what they cannot have (R10): nothing is posted, the peer hears of nothing, and the grant is as it was.

use std::fmt::Debug;
use std::sync::Arc;

use landfall::kv::{Mapping, ReadError, ReadRequest, TokenSpan, WriteError, WriteRequest};

use super::content::{GUARD, Rng, fill};
use super::grants::Want;
use super::link::Link;
use super::mapped::Stretches;
use super::operations::few;
use super::outcome::end;
use super::process::bad;
use super::reads::{What, finish, strategy};
use super::writes::by_tokens;

/// Of the request that is refused.
#[derive(Clone, Copy)]
enum Wrong {
    /// A block, or a token, that the target does not have.
    Outside,
    /// One that two come to.
    Twice,
    /// Blocks that are unlike the peer's, as they are.
    Unlike,
}

impl Wrong {
    fn draw(link: &Link, rng: &mut Rng) -> Self {
        match rng.range(0, 2) {
            0 => Self::Outside,
            1 if !link.is_alike() => Self::Unlike,
            _ => Self::Twice,
        }
    }

    fn pairs(self, target: u32) -> Option<[(u32, u32); 2]> {
        match self {
            Self::Outside => Some([(0, 0), (0, target)]),
            Self::Twice => Some([(0, 0), (0, 0)]),
            Self::Unlike => None,
        }
    }

    /// The same of tokens.
    fn spans(self, target_blocks: u32, mapping: &Mapping) -> Option<[TokenSpan; 2]> {
        let pairs = self.pairs(target_blocks * mapping.target().tokens())?;
        Some(pairs.map(|(source, target)| TokenSpan { source, target, tokens: 1 }))
    }
}

/// A refused write; then the grant's use as it should be, and its use again (K6).
pub async fn write(link: &Link, rng: &mut Rng) -> Option<()> {
    let what = (!link.is_alike()).then(|| Stretches::draw(&link.to_peer, few(link, rng), rng));
    let (asked, count) = match &what {
        Some(what) => (link.ask_mapped(Want::Write, what).await, what.source_blocks),
        None => (link.ask(Want::Write, 2).await, 2),
    };
    let (tag, grant) = asked?;
    let mut source = link.channel.pool().alloc(count).await.ok()?;
    fill(&mut source, tag);
    let wrong = Wrong::draw(link, rng);
    let request = WriteRequest::new(&grant, source);
    let request = match (wrong.pairs(grant.len()), wrong.spans(grant.len(), &link.to_peer)) {
        (Some(pairs), _) if what.is_none() => request.pairs(pairs),
        (_, Some(spans)) => request.mapped_spans(&link.to_peer, spans),
        _ => request,
    };
    let (ended, source) = link.channel.write(request).await;
    refused(&ended, |error| match error {
        // The peer takes some grants back.
        WriteError::Closed { .. } | WriteError::StaleGrant { .. } => true,
        WriteError::OutOfRange { .. } => matches!(wrong, Wrong::Outside),
        WriteError::Shapes { .. } => matches!(wrong, Wrong::Unlike),
        WriteError::Duplicate { .. } | WriteError::TokenTwice { .. } => matches!(wrong, Wrong::Twice),
        _ => false,
    });
    let right = |source| {
        let request = WriteRequest::new(&grant, source).tag(tag);
        match &what {
            Some(what) => by_tokens(request, &link.to_peer, what),
            None => request,
        }
    };
    link.doubt(end(tag, link.channel.write(right(source))).await);
    let source = link.channel.pool().alloc(count).await.ok()?;
    let (again, _) = link.channel.write(right(Arc::new(source))).await;
    // That it was used.
    refused(&again, |error| matches!(error, WriteError::StaleGrant { .. } | WriteError::Closed { .. }));
    Some(())
}

/// The same of a read.
pub async fn read(link: &Link, rng: &mut Rng) -> Option<()> {
    let (what, strategy) = (What::any(link, rng), strategy(rng));
    let (theirs, ours) = what.blocks();
    let (tag, grant) = link.ask(Want::Read, theirs.into()).await?;
    let mut target = link.channel.pool().alloc(ours).await.ok()?;
    fill(&mut target, GUARD);
    let wrong = Wrong::draw(link, rng);
    let request = ReadRequest::new(&grant, target).strategy(strategy);
    let request = match (wrong.pairs(ours), wrong.spans(ours, &link.from_peer)) {
        (Some(pairs), _) if link.is_alike() => request.pairs(pairs),
        (_, Some(spans)) => request.mapped_spans(&link.from_peer, spans),
        _ => request,
    };
    let (ended, target) = link.channel.read(request).await;
    refused(&ended, |error| match error {
        ReadError::Closed { .. } | ReadError::StaleGrant { .. } => true,
        ReadError::OutOfRange { .. } => matches!(wrong, Wrong::Outside),
        ReadError::Shapes { .. } => matches!(wrong, Wrong::Unlike),
        ReadError::Duplicate { .. } | ReadError::TokenTwice { .. } => matches!(wrong, Wrong::Twice),
        _ => false,
    });
    finish(link, tag, &what, strategy, what.request(link, &grant, target)).await
}

/// Whatever was to be refused, and how it ended.
fn refused<T: Debug, E: Debug>(ended: &Result<T, E>, usual: impl FnOnce(&E) -> bool) {
    if !ended.as_ref().is_err_and(usual) {
        bad(format_args!("a request that cannot be granted was not refused as such (R10, K6): {ended:?}"));
    }
}
