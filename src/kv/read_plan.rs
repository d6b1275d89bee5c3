//! From a request to read to a plan, at either end: to the READs that we post, or to the WRITEs of the owner, whom a
//! message in a codec of its own tells what to write where.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::Blocks;
use super::grant::{Binding, Grant};
use super::mapping::Mapping;
use super::pool::KvPool;
use super::proto::{Plan, PlanBuilder, PlanError, ReadRefusal};
use super::read::{ReadError, ReadRequest};
use super::spans::{self, Mapped, SpanError, Stretch, TokenSpan};
use super::targets::{self, PeerPool, Taken, whole};
use super::write::{WriteError, WriteRequest};
use crate::wire::{Malformed, Reader, Writer};

/// What a request comes to, checked: whoever moves the data.
pub(crate) struct Extent {
    pub(crate) bytes: u64,
    /// Pairs of blocks × layers.
    pub(crate) descriptors: u64,
}

/// Checks the positions of `request` (R10), and that blocks are the same at both ends, whoever moves the data; counts what it
/// asks for.
pub(crate) fn check(request: &ReadRequest, pool: &KvPool, peer: &PeerPool) -> Result<Extent, ReadError> {
    if let Some(mapped) = &request.mapped {
        return check_mapped(request, mapped, pool, peer);
    }
    if let (Some(ours), Some(theirs)) = (pool.layout().shape(), peer.layout.shape())
        && (ours != theirs || pool.layout().block_bytes() != peer.layout.block_bytes())
    {
        return Err(ReadError::Shapes { ours: Box::new(*ours), theirs: Box::new(*theirs) });
    }
    let (grant, target) = (&request.grant, &request.target);
    let count = match &request.pairs {
        None => {
            if grant.len() > target.len() {
                let (index, limit) = (u64::from(grant.len()) - 1, target.len().into());
                return Err(ReadError::OutOfRange { what: "position in our blocks", index, limit });
            }
            u64::from(grant.len())
        }
        Some(pairs) => {
            let mut taken = Taken::of(target.len());
            for &(from, to) in pairs {
                for (what, index, limit) in [
                    ("position in the grant", from, grant.len()),
                    ("position in our blocks", to, target.len()),
                ] {
                    if index >= limit {
                        return Err(ReadError::OutOfRange { what, index: index.into(), limit: limit.into() });
                    }
                }
                if !taken.take(to) {
                    return Err(ReadError::Duplicate { position: to });
                }
            }
            pairs.len() as u64
        }
    };
    let layout = pool.layout();
    // Each of our blocks at most once: within the size of our pool.
    let descriptors = count * u64::from(layout.layers());
    Ok(Extent { bytes: descriptors * layout.block_bytes(), descriptors })
}

/// The same of a mapped one: how many tokens it asks for, and in how many pairs of blocks they are.
fn check_mapped(
    request: &ReadRequest,
    mapped: &Mapped,
    pool: &KvPool,
    peer: &PeerPool,
) -> Result<Extent, ReadError> {
    let mapping = &mapped.mapping;
    mapping.check(peer.layout.shape(), pool.layout().shape())?;
    let spans = spans::spans_of_read(&request.grant, &request.target, mapped).map_err(span_error)?;
    // No token of ours is in two of them: within the size of our pool.
    let tokens: u64 = spans.iter().map(|span| u64::from(span.tokens)).sum();
    let chunks: u64 = spans.iter().map(|span| mapping.chunks(span.source, span.target, span.tokens)).sum();
    let layers = u64::from(pool.layout().layers());
    Ok(Extent { bytes: tokens * mapping.bytes_per_token() * layers, descriptors: chunks * layers })
}

fn span_error(error: SpanError) -> ReadError {
    match error {
        SpanError::OutOfRange { what, index, limit } => ReadError::OutOfRange { what, index, limit },
        SpanError::Twice { token } => ReadError::TokenTwice { token },
        SpanError::Plan(error) => refused(&error),
    }
}

/// The plan of READs: its source side is our memory, and its target side the owner's. `request` has been checked.
pub(crate) fn by_reads(request: &ReadRequest, pool: &KvPool, peer: &PeerPool) -> Result<Plan, ReadError> {
    let (grant, target) = (&request.grant, &request.target);
    if let Some(mapped) = &request.mapped {
        let builder = spans::runs_of_read(grant, target, mapped, pool, peer).map_err(span_error)?;
        return builder.build().map_err(|error| refused(&error));
    }
    let mut builder = PlanBuilder::new((pool.layout(), &peer.ours), (&peer.layout, &peer.seams))
        .map_err(|error| refused(&error))?;
    match &request.pairs {
        None => {
            let push = |theirs, ours, count| builder.push(ours, theirs, count);
            whole(grant.runs(), target.runs().iter().copied(), push).map_err(|error| refused(&error))?;
        }
        Some(pairs) => {
            for &(from, to) in pairs {
                let theirs = grant.block_at(from).ok_or(ReadError::OutOfRange {
                    what: "position in the grant",
                    index: from.into(),
                    limit: grant.len().into(),
                })?;
                let ours = target.id(to).map_err(|_| ReadError::OutOfRange {
                    what: "position in our blocks",
                    index: to.into(),
                    limit: target.len().into(),
                })?;
                builder.push(ours, theirs, 1).map_err(|error| refused(&error))?;
            }
        }
    }
    builder.build().map_err(|error| refused(&error))
}

/// Layouts, pools and rails were compared when the channel was set up: what is left is a block of the grant beyond the
/// owner's pool.
fn refused(error: &PlanError) -> ReadError {
    match *error {
        PlanError::OutOfRange { unit, block, count, blocks, .. } => ReadError::OutOfRange {
            what: if unit == "token" { "token of the owner's pool" } else { "block of the grant" },
            index: u64::from(block) + u64::from(count) - 1,
            limit: blocks.into(),
        },
        PlanError::PoolTooSmall { needed, have, .. } => {
            ReadError::OutOfRange { what: "byte of the owner's pool", index: needed, limit: have }
        }
        _ => ReadError::OutOfRange { what: "byte", index: u64::MAX, limit: u64::MAX },
    }
}

mod tag {
    pub(super) const TIME: u16 = 1;
    pub(super) const RUNS: u16 = 2;
    pub(super) const PAIRS: u16 = 3;
    /// Tokens, in the place of pairs of blocks.
    pub(super) const SPANS: u16 = 4;
    /// Runs of blocks that spans are of: an owner who knows of no spans finds no runs, and refuses.
    pub(super) const SPAN_RUNS: u16 = 5;
}

/// The message to the owner: our blocks in order of position, what goes to which of them, and the time that is left.
pub(crate) fn encode(request: &ReadRequest, time: Duration) -> Vec<u8> {
    let runs = request.target.runs().to_vec();
    let what = match (&request.mapped, &request.pairs) {
        (Some(Mapped { what: Stretch::Spans(spans), .. }), _) => What::Spans(spans.clone()),
        (Some(Mapped { mapping, what: Stretch::All }), _) => {
            // It has been checked that they fit.
            let tokens = request.grant.len().saturating_mul(mapping.source().tokens());
            What::Spans(vec![TokenSpan { source: 0, target: 0, tokens }])
        }
        (None, Some(pairs)) => What::Pairs(pairs.clone()),
        (None, None) => What::All,
    };
    Ask { time, runs, what }.encode()
}

/// What the peer asks for.
#[derive(Debug, PartialEq, Eq)]
struct Ask {
    time: Duration,
    /// Its blocks.
    runs: Vec<(u32, u32)>,
    what: What,
}

/// What is to go to which of them.
#[derive(Debug, PartialEq, Eq)]
enum What {
    /// Block after block.
    All,
    Pairs(Vec<(u32, u32)>),
    Spans(Vec<TokenSpan>),
}

impl Ask {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 8 * self.runs.len());
        let mut w = Writer(&mut out);
        w.field(tag::TIME, |w| {
            w.u64(u64::try_from(self.time.as_millis()).unwrap_or(u64::MAX));
        });
        let list = |w: &mut Writer<'_>, list: &[(u32, u32)]| {
            for &(a, b) in list {
                w.u32(a).u32(b);
            }
        };
        let of_spans = matches!(self.what, What::Spans(_));
        w.field(if of_spans { tag::SPAN_RUNS } else { tag::RUNS }, |w| list(w, &self.runs));
        match &self.what {
            What::All => {}
            What::Pairs(pairs) => _ = w.field(tag::PAIRS, |w| list(w, pairs)),
            What::Spans(spans) => {
                w.field(tag::SPANS, |w| {
                    for span in spans {
                        w.u32(span.source).u32(span.target).u32(span.tokens);
                    }
                });
            }
        }
        out
    }

    /// Fields that a later version has added are passed over (B1).
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (mut time, mut runs, mut pairs) = (None, None, None);
        let (mut spans, mut span_runs) = (None, None);
        let mut r = Reader::new(bytes, "request to write");
        while let Some((tag, mut f)) = r.field()? {
            match tag {
                tag::TIME => time = Some(Duration::from_millis(f.u64()?)),
                tag::RUNS => runs = Some(list(&mut f)?),
                tag::PAIRS => pairs = Some(list(&mut f)?),
                tag::SPANS => spans = Some(span_list(&mut f)?),
                tag::SPAN_RUNS => span_runs = Some(list(&mut f)?),
                _ => {}
            }
        }
        let what = match (pairs, spans) {
            (None, None) => What::All,
            (Some(pairs), None) => What::Pairs(pairs),
            (None, Some(spans)) => What::Spans(spans),
            (Some(_), Some(_)) => return Err(r.malformed()),
        };
        let runs = if matches!(what, What::Spans(_)) { span_runs } else { runs };
        match (time, runs) {
            (Some(time), Some(runs)) => Ok(Self { time, runs, what }),
            _ => Err(r.malformed()),
        }
    }
}

/// For the fuzz targets: any bytes, decoded; and what decodes is encoded and decoded again.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Ok(ask) = Ask::decode(bytes) {
        assert_eq!(Ask::decode(&ask.encode()).as_ref(), Ok(&ask));
    }
}

fn list(f: &mut Reader<'_>) -> Result<Vec<(u32, u32)>, Malformed> {
    if !f.remaining().is_multiple_of(8) {
        return Err(f.malformed());
    }
    // As many as were sent.
    let mut out = Vec::with_capacity(f.remaining() / 8);
    while f.remaining() > 0 {
        out.push((f.u32()?, f.u32()?));
    }
    Ok(out)
}

fn span_list(f: &mut Reader<'_>) -> Result<Vec<TokenSpan>, Malformed> {
    if !f.remaining().is_multiple_of(12) {
        return Err(f.malformed());
    }
    let mut out = Vec::with_capacity(f.remaining() / 12);
    while f.remaining() > 0 {
        out.push(TokenSpan { source: f.u32()?, target: f.u32()?, tokens: f.u32()? });
    }
    Ok(out)
}

/// The owner's plan for what the peer asks for in `bytes`, from the blocks that it granted to the peer's, under the
/// peer's grant that `binding` and `target` name; and the time that it has.
pub(crate) fn serve(
    bytes: &[u8],
    binding: Binding,
    target: u64,
    source: &Arc<Blocks>,
    pool: &KvPool,
    peer: &PeerPool,
) -> Result<(Plan, Duration), ReadRefusal> {
    let Ask { time, runs, what } = Ask::decode(bytes).map_err(|_| ReadRefusal::Malformed)?;
    if !peer.writable {
        return Err(ReadRefusal::OutOfRange);
    }
    // Checks that no block is in it twice.
    let grant = Grant::from_runs(binding, target, runs).map_err(|_| ReadRefusal::OutOfRange)?;
    let mut request = WriteRequest::new(&grant, source.clone());
    match what {
        What::All => {}
        What::Pairs(pairs) => request = request.pairs(pairs),
        What::Spans(spans) => {
            // By our own knowledge of the two shapes.
            let mapping = match (pool.layout().shape(), peer.layout.shape()) {
                (Some(ours), Some(theirs)) => Mapping::new(ours, theirs).ok(),
                _ => None,
            };
            request = request.mapped_spans(&mapping.ok_or(ReadRefusal::OutOfRange)?, spans);
        }
    }
    let planned = targets::plan(&request, false, pool, peer);
    let planned = planned.map_err(|_: WriteError| ReadRefusal::OutOfRange)?;
    Ok((planned.plan, time))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(fill: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        fill(&mut Writer(&mut out));
        out
    }

    #[test]
    fn b1_a_request_to_write_decodes_with_unknown_fields() {
        let bytes = asked(|w| {
            w.field(tag::TIME, |w| {
                w.u64(1500);
            });
            w.field(99, |w| {
                w.raw(b"later");
            });
            w.field(tag::RUNS, |w| {
                w.u32(4).u32(2);
            });
        });
        let want = Ask { time: Duration::from_millis(1500), runs: vec![(4, 2)], what: What::All };
        assert_eq!(Ask::decode(&bytes), Ok(want));
        let span = |source, target, tokens| TokenSpan { source, target, tokens };
        let pairs = What::Pairs(vec![(0, 1), (u32::MAX, 7)]);
        for what in [pairs, What::Spans(vec![span(1, 2, 3), span(u32::MAX, 0, 7)]), What::Spans(vec![])] {
            let full = Ask { what, ..Ask::decode(&bytes).unwrap() };
            assert_eq!(Ask::decode(&full.encode()).as_ref(), Ok(&full));
            fuzz(&full.encode());
        }
    }

    #[test]
    fn b1_a_hostile_request_to_write_is_an_error_and_never_a_panic() {
        assert!(Ask::decode(&[]).is_err());
        let odd = asked(|w| {
            w.field(tag::TIME, |w| {
                w.u64(1);
            });
            w.field(tag::RUNS, |w| {
                w.raw(&[0; 9]);
            });
        });
        assert!(Ask::decode(&odd).is_err());
        for cut in 0..odd.len() {
            let _ = Ask::decode(&odd[..cut]);
        }
        let spans = vec![TokenSpan { source: 0, target: 0, tokens: 1 }];
        let ask = Ask { time: Duration::ZERO, runs: vec![(0, 1)], what: What::Spans(spans) }.encode();
        let both = [&ask[..], &asked(|w| _ = w.field(tag::PAIRS, |_| {}))].concat();
        assert!(Ask::decode(&both).is_err(), "pairs and spans");
        let third = asked(|w| _ = w.field(tag::SPANS, |w| _ = w.u32(1)));
        assert!(Ask::decode(&[&ask[..], &third].concat()).is_err(), "a part of a span");
        // One who knows of no spans reads a request without blocks.
        let older = Ask::decode(
            &[
                &asked(|w| _ = w.field(tag::TIME, |w| _ = w.u64(1)))[..],
                &asked(|w| {
                    w.field(tag::SPAN_RUNS, |w| _ = w.u32(0).u32(1));
                }),
            ]
            .concat(),
        );
        assert!(older.is_err(), "blocks of spans are no blocks by themselves");
    }
}
