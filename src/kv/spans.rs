//! Mapped writes and reads: the mapping between a channel's two pools, and from a request to a plan. Stretches of tokens, counted
//! over our blocks and over granted ones, become runs of tokens of the two pools.

use super::blocks::Blocks;
use super::channel::KvChannel;
use super::grant::Grant;
use super::mapping::{Mapping, MappingError};
use super::pool::KvPool;
use super::proto::{PlanBuilder, PlanError};
use super::shape::Shape;
use super::targets::{PeerPool, refused};
use super::write::{WriteError, WriteRequest};

/// Neighbouring tokens of the source that go to neighbouring tokens of the target.
///
/// Tokens are counted over the positions of each side: token `t` is in the block at position `t / tokens of a block`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSpan {
    /// The first token, in the source's blocks.
    pub source: u32,
    /// The first token, in the target's blocks.
    pub target: u32,
    /// How many.
    pub tokens: u32,
}

/// What a mapped request copies.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) mapping: Mapping,
    pub(crate) what: Stretch,
}

#[derive(Clone, Debug)]
pub(crate) enum Stretch {
    /// Every token of the source's blocks.
    All,
    Spans(Vec<TokenSpan>),
}

impl KvChannel {
    /// What is in the peer's blocks, where its pool says so.
    pub fn peer_shape(&self) -> Option<&Shape> {
        self.inner.driver.peer_layout().shape()
    }

    /// What goes where when blocks of ours are written to the peer's: for [`WriteRequest::mapped`]. Plan it once and use it for
    /// every request.
    ///
    /// # Errors
    /// [`MappingError::NoShape`] when one of the pools does not say what is in its blocks, and [`MappingError::NoHeads`] when
    /// they hold different heads.
    pub fn mapping_to_peer(&self) -> Result<Mapping, MappingError> {
        self.mapping(false)
    }

    /// The same the other way: from the peer's blocks to ours, for [`ReadRequest::mapped`](super::ReadRequest::mapped).
    ///
    /// # Errors
    /// As [`mapping_to_peer`](Self::mapping_to_peer).
    pub fn mapping_from_peer(&self) -> Result<Mapping, MappingError> {
        self.mapping(true)
    }

    fn mapping(&self, from_peer: bool) -> Result<Mapping, MappingError> {
        let (ours, theirs) = (self.pool().layout().shape(), self.peer_shape());
        let (source, target) = if from_peer { (theirs, ours) } else { (ours, theirs) };
        let declared = |shape: Option<&Shape>, side| shape.copied().ok_or(MappingError::NoShape { side });
        Mapping::new(&declared(source, "source")?, &declared(target, "target")?)
    }
}

/// A list of blocks by position.
trait Positions {
    /// The block at a position, and how many neighbours from it on follow in sequence.
    fn run_at(&self, position: u32) -> Option<(u32, u32)>;
}

impl Positions for Blocks {
    fn run_at(&self, position: u32) -> Option<(u32, u32)> {
        Self::run_at(self, position)
    }
}

impl Positions for Grant {
    fn run_at(&self, position: u32) -> Option<(u32, u32)> {
        Self::run_at(self, position)
    }
}

/// One side of the spans: blocks by position, how many tokens each has, and how many there are in all.
struct Row<'a, P> {
    blocks: &'a P,
    page: u32,
    tokens: u32,
    /// What an error calls a token of it.
    name: &'static str,
}

impl<'a, P: Positions> Row<'a, P> {
    fn new(blocks: &'a P, len: u32, page: u32, name: &'static str) -> Self {
        // A claim holds each block once, so that it has no more tokens than its pool. A grant may say what it likes.
        Self { blocks, page, tokens: len.saturating_mul(page), name }
    }
}

/// What is wrong with the spans of a request.
pub(super) enum SpanError {
    OutOfRange {
        what: &'static str,
        index: u64,
        limit: u64,
    },
    /// Two spans bring something to this token.
    Twice {
        token: u32,
    },
    Plan(PlanError),
}

/// The runs of a write: from our blocks to granted ones.
pub(super) fn runs(
    request: &WriteRequest,
    mapped: &Mapped,
    pool: &KvPool,
    peer: &PeerPool,
) -> Result<PlanBuilder, WriteError> {
    let (ours, theirs) = ((pool.layout(), &peer.ours), (&peer.layout, &peer.seams));
    let mapping = &mapped.mapping;
    mapping.check(ours.0.shape(), theirs.0.shape())?;
    let (source, grant) = (&*request.source, &request.grant);
    let source = Row::new(source, source.len(), mapping.source().tokens(), "token of the source");
    let target = Row::new(grant, grant.len(), mapping.target().tokens(), "token of the grant");
    let mut builder = PlanBuilder::mapped(ours, theirs, mapping).map_err(|e| refused(e, pool, peer))?;
    let push = |src, dst, count| builder.push(src, dst, count);
    each_run(&mapped.what, &source, &target, push).map_err(|error| match error {
        SpanError::OutOfRange { what, index, limit } => WriteError::OutOfRange { what, index, limit },
        SpanError::Twice { token } => WriteError::TokenTwice { token },
        SpanError::Plan(error) => refused(error, pool, peer),
    })?;
    Ok(builder)
}

/// The runs of a read by READs: from granted blocks to ours. In the plan of a READ our memory is the source's side.
pub(super) fn runs_of_read(
    grant: &Grant,
    target: &Blocks,
    mapped: &Mapped,
    pool: &KvPool,
    peer: &PeerPool,
) -> Result<PlanBuilder, SpanError> {
    let (ours, theirs) = ((pool.layout(), &peer.ours), (&peer.layout, &peer.seams));
    let (source, target) = rows_of_read(grant, target, mapped);
    let mut builder =
        PlanBuilder::mapped(ours, theirs, &mapped.mapping.reversed()).map_err(SpanError::Plan)?;
    each_run(&mapped.what, &source, &target, |from, to, count| builder.push(to, from, count))?;
    Ok(builder)
}

fn rows_of_read<'a>(
    grant: &'a Grant,
    target: &'a Blocks,
    mapped: &Mapped,
) -> (Row<'a, Grant>, Row<'a, Blocks>) {
    let (page, target_page) = (mapped.mapping.source().tokens(), mapped.mapping.target().tokens());
    (
        Row::new(grant, grant.len(), page, "token of the grant"),
        Row::new(target, target.len(), target_page, "token of our blocks"),
    )
}

/// The spans of a read, checked, whoever moves the data.
pub(super) fn spans_of_read(
    grant: &Grant,
    target: &Blocks,
    mapped: &Mapped,
) -> Result<Vec<TokenSpan>, SpanError> {
    let (source, target) = rows_of_read(grant, target, mapped);
    checked(&mapped.what, &source, &target)
}

/// Those of a request, inside of what there is; none brings something to a token that another does.
fn checked<S: Positions, T: Positions>(
    what: &Stretch,
    source: &Row<'_, S>,
    target: &Row<'_, T>,
) -> Result<Vec<TokenSpan>, SpanError> {
    let spans = match what {
        Stretch::All => vec![TokenSpan { source: 0, target: 0, tokens: source.tokens }],
        Stretch::Spans(spans) => {
            check_overlap(spans)?;
            spans.clone()
        }
    };
    for span in &spans {
        end(source.name, span.source, span.tokens, source.tokens)?;
        end(target.name, span.target, span.tokens, target.tokens)?;
    }
    Ok(spans)
}

/// Gives every stretch of tokens that are neighbours in both pools to `push`: its first tokens there, and their number.
fn each_run<S: Positions, T: Positions>(
    what: &Stretch,
    source: &Row<'_, S>,
    target: &Row<'_, T>,
    mut push: impl FnMut(u32, u32, u32) -> Result<(), PlanError>,
) -> Result<(), SpanError> {
    for span in checked(what, source, target)? {
        let (mut src, mut dst, mut left) = (span.source, span.target, span.tokens);
        while left > 0 {
            // Both are inside, as has been checked.
            let from = run_of_tokens(source.blocks, src, source.page);
            let to = run_of_tokens(target.blocks, dst, target.page);
            let (Some((from, here)), Some((to, there))) = (from, to) else { break };
            let count = left.min(here).min(there);
            push(from, to, count).map_err(SpanError::Plan)?;
            (src, dst, left) = (src + count, dst + count, left - count);
        }
    }
    Ok(())
}

/// Token `token` of a list of blocks as a token of its pool, and how many follow in sequence, at least 1.
fn run_of_tokens(blocks: &impl Positions, token: u32, page: u32) -> Option<(u32, u32)> {
    let (block, neighbours) = blocks.run_at(token / page)?;
    let at = token % page;
    // A block of a grant that is far outside of the pool: `push` refuses it where it ends up.
    let first = block.saturating_mul(page).saturating_add(at);
    Some((first, neighbours.saturating_mul(page) - at))
}

/// Refuses a span that does not end by `limit`.
fn end(what: &'static str, first: u32, tokens: u32, limit: u32) -> Result<(), SpanError> {
    match first.checked_add(tokens) {
        Some(end) if end <= limit => Ok(()),
        _ => {
            let index = (u64::from(first) + u64::from(tokens)).saturating_sub(1);
            Err(SpanError::OutOfRange { what, index, limit: limit.into() })
        }
    }
}

/// Refuses two spans that bring something to one token.
fn check_overlap(spans: &[TokenSpan]) -> Result<(), SpanError> {
    let mut targets: Vec<(u32, u64)> = spans
        .iter()
        .filter(|span| span.tokens > 0)
        .map(|span| (span.target, u64::from(span.target) + u64::from(span.tokens)))
        .collect();
    targets.sort_unstable();
    match targets.windows(2).find(|pair| u64::from(pair[1].0) < pair[0].1) {
        Some(pair) => Err(SpanError::Twice { token: pair[1].0 }),
        None => Ok(()),
    }
}
