//! From a request to a plan: positions of our blocks and of granted ones become runs of block ids, or of tokens.

use std::time::{Duration, Instant};

use super::layout::Layout;
use super::mapping::MappingError;
use super::pool::KvPool;
use super::proto::{List, Plan, PlanBuilder, PlanError, PoolSeams};
use super::setup::seams_of;
use super::spans;
use super::write::{WriteError, WriteRequest};
use crate::connect::HelloRegion;

/// The peer's pool, as its hello described it.
#[derive(Debug)]
pub(crate) struct PeerPool {
    pub(crate) layout: Layout,
    /// As each rail sees it.
    pub(crate) seams: PoolSeams,
    /// Our own pool, as each rail sees it.
    pub(crate) ours: PoolSeams,
    /// By READs.
    pub(crate) readable: bool,
    /// By WRITEs, under grants.
    pub(crate) writable: bool,
}

impl PeerPool {
    /// The peer's regions of a rail that it had none of when the channel was connected.
    pub(crate) fn learn(&self, rail: usize, regions: &[HelloRegion]) -> Result<(), PlanError> {
        if self.seams.is_known(rail) {
            return Ok(());
        }
        let seams = seams_of(regions)?;
        // As in a hello: all of the pool, or nothing of a pool of which no other rail has anything.
        let needed = self.layout.required_bytes().min(self.seams.total());
        if seams.total() < needed {
            return Err(PlanError::PoolTooSmall { side: "peer's", needed, have: seams.total() });
        }
        self.seams.set(rail, seams);
        Ok(())
    }
}

/// A plan, the number of bytes that its grant covers, and how long planning took.
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    pub(crate) granted_bytes: u64,
    pub(crate) took: Duration,
}

/// Plans `request`, as a whole or to be written by layer. Refuses what is out of range, or written twice; nothing has been
/// posted then (R10).
pub(crate) fn plan(
    request: &WriteRequest,
    by_layer: bool,
    pool: &KvPool,
    peer: &PeerPool,
) -> Result<Planned, WriteError> {
    let started = Instant::now();
    let builder = match &request.mapped {
        Some(mapped) => spans::runs(request, mapped, pool, peer)?,
        None => blocks(request, pool, peer)?,
    };
    let plan = if by_layer { builder.build_by_layer() } else { builder.build() };
    let plan = plan.map_err(|e| refused(e, pool, peer))?;
    // A product that does not fit is above anything that a transfer can have.
    let granted_bytes = u64::from(request.grant.len())
        .checked_mul(peer.layout.layers().into())
        .and_then(|n| n.checked_mul(peer.layout.block_bytes()))
        .unwrap_or(u64::MAX);
    Ok(Planned { plan, granted_bytes, took: started.elapsed() })
}

/// Whole blocks to whole blocks.
fn blocks(request: &WriteRequest, pool: &KvPool, peer: &PeerPool) -> Result<PlanBuilder, WriteError> {
    let (source, grant) = (&*request.source, &request.grant);
    let refused = |error| refused(error, pool, peer);
    let mut builder =
        PlanBuilder::new((pool.layout(), &peer.ours), (&peer.layout, &peer.seams)).map_err(refused)?;
    match &request.pairs {
        None => {
            if source.len() > grant.len() {
                return Err(WriteError::OutOfRange {
                    what: "position in the grant",
                    index: u64::from(source.len()) - 1,
                    limit: grant.len().into(),
                });
            }
            if source.runs().len().max(grant.runs().len()) > 1 {
                // What was claimed is of its pool.
                let limit = if source.pool().same(pool) { pool.layout().blocks() } else { u32::MAX };
                let from = List { runs: source.shared_runs(), limit };
                let to = List { runs: grant.shared_runs(), limit: grant.limit() };
                builder.push_lists(source.len(), from, to).map_err(refused)?;
            } else {
                let push = |src, dst, count| builder.push(src, dst, count);
                whole(source.runs().iter().copied(), grant.runs(), push).map_err(refused)?;
            }
        }
        Some(pairs) => {
            let mut taken = Taken::of(grant.len());
            for &(from, to) in pairs {
                let src = source.id(from).map_err(|_| WriteError::OutOfRange {
                    what: "position in the source",
                    index: from.into(),
                    limit: source.len().into(),
                })?;
                let dst = grant.block_at(to).ok_or(WriteError::OutOfRange {
                    what: "position in the grant",
                    index: to.into(),
                    limit: grant.len().into(),
                })?;
                if !taken.take(to) {
                    return Err(WriteError::Duplicate { position: to });
                }
                builder.push(src, dst, 1).map_err(refused)?;
            }
        }
    }
    Ok(builder)
}

/// Taken that something goes to.
pub(super) struct Taken(Vec<u64>);

impl Taken {
    /// None yet, of so many.
    pub(super) fn of(len: u32) -> Self {
        Self(vec![0; (len as usize).div_ceil(64)])
    }

    /// False when something goes there already. The position is one of them.
    pub(super) fn take(&mut self, position: u32) -> bool {
        let (word, bit) = (&mut self.0[position as usize / 64], 1 << (position % 64));
        let free = *word & bit == 0;
        *word |= bit;
        free
    }
}

/// Position *i* of the source to position *i* of the target, by common runs.
pub(super) fn whole<E>(
    source: impl Iterator<Item = (u32, u32)>,
    mut targets: impl Iterator<Item = (u32, u32)>,
    mut push: impl FnMut(u32, u32, u32) -> Result<(), E>,
) -> Result<(), E> {
    let mut target = (0, 0);
    for (mut src, mut left) in source {
        while left > 0 {
            while target.1 == 0 {
                match targets.next() {
                    Some(next) => target = next,
                    // Not reached: the target is at least as long.
                    None => return Ok(()),
                }
            }
            let count = left.min(target.1);
            push(src, target.0, count)?;
            src += count;
            left -= count;
            target = (target.0 + count, target.1 - count);
        }
    }
    Ok(())
}

pub(super) fn refused(error: PlanError, pool: &KvPool, peer: &PeerPool) -> WriteError {
    match error {
        PlanError::Shapes => WriteError::Shapes {
            ours: Box::new(pool.layout().shape().copied()),
            theirs: Box::new(peer.layout.shape().copied()),
        },
        // The mapping was compared with both before.
        PlanError::OtherShape { side } => WriteError::Mapping(MappingError::NoShape { side }),
        PlanError::OutOfRange { unit, block, count, blocks, .. } => WriteError::OutOfRange {
            what: unit,
            index: u64::from(block) + u64::from(count) - 1,
            limit: blocks.into(),
        },
        // Layouts and pool sizes were compared when the channel was set up.
        PlanError::Layouts { what, got, want } => WriteError::OutOfRange { what, index: got, limit: want },
        PlanError::Dtypes { .. } => WriteError::OutOfRange { what: "dtype", index: 1, limit: 0 },
        PlanError::PoolTooSmall { needed, have, .. } => {
            WriteError::OutOfRange { what: "pool byte", index: needed, limit: have }
        }
        PlanError::Rails { source_rails, target_rails } => {
            WriteError::OutOfRange { what: "rail", index: source_rails as u64, limit: target_rails as u64 }
        }
        PlanError::BadPart { index } => {
            WriteError::OutOfRange { what: "region", index: index as u64, limit: pool.regions().len() as u64 }
        }
        PlanError::TooLarge => WriteError::OutOfRange { what: "byte", index: u64::MAX, limit: u64::MAX },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer's pool with one rail whose regions come with it.
    fn pool(known: &[HelloRegion]) -> PeerPool {
        let seams = || PoolSeams::known([Some(seams_of(known).unwrap()), None].into_iter());
        let layout = Layout::contiguous(2, 4, 512).unwrap();
        PeerPool { layout, seams: seams(), ours: seams(), readable: true, writable: true }
    }

    #[test]
    fn k10_the_regions_of_a_rail_that_comes_are_all_of_the_pool_or_nothing_as_those_of_the_others() {
        let region = |len, rkey| HelloRegion { addr: 1 << 20, len, rkey };
        let peer = pool(&[region(4096, 1)]);
        let planned = peer.seams.clone();
        for wrong in [&[][..], &[region(4095, 2)], &[region(2048, 2), region(0, 3)]] {
            assert!(peer.learn(1, wrong).is_err() && !peer.seams.is_known(1), "{wrong:?}");
        }
        let words = peer.learn(1, &[region(4095, 2)]).unwrap_err().to_string();
        assert!(words.contains("peer") && words.contains("4096") && words.contains("4095"), "{words}");
        peer.learn(1, &[region(1024, 2), region(8192, 3)]).unwrap();
        assert_eq!(planned.total(), 4096, "and nothing of it was counted before");
        assert!(planned.is_known(1), "what was planned before knows it");
        // It was said once, and stays.
        peer.learn(1, &[]).unwrap();
        peer.learn(0, &[]).unwrap();
        assert_eq!(peer.seams.total(), 4096);

        let source_only = pool(&[]);
        source_only.learn(1, &[]).unwrap();
        assert_eq!((source_only.seams.total(), source_only.seams.is_known(1)), (0, true));
    }
}
