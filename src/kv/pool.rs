//! A registered pool of KV blocks and who holds which of them.
//!
//! A pool is one mapping, registered as one memory region or, where `max_mr_size` is small, as several. Blocks are
//! handed out as [`Blocks`]: an exclusive claim on a list of block ids, which goes back to the pool when it is
//! dropped. A claim moves into a grant or a write and comes back with its result, so a block cannot be reused while
//! a device may still touch it (R1, K4).

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;

use super::layout::Layout;
use super::lock;
use super::proto::{Part, Seams};
use crate::device::ProtectionDomain;
use crate::error::MemoryError;
use crate::memory::{Checksum, Exposed, Memory, Region};
use crate::provider::AccessFlags;

/// What the peers of a pool's owner may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PoolAccess {
    /// Source of writes only: no peer is given any access.
    Source,
    /// Blocks of this pool can be granted: the region is registered with REMOTE_WRITE.
    #[default]
    Target,
}

/// Why blocks could not be taken from a pool, or addressed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Not enough free blocks now; `KvPool::alloc` waits instead.
    #[error(
        "{asked} blocks were asked for, {free} of {total} are free; wait for some to come back, or make the pool larger"
    )]
    Exhausted {
        /// Blocks asked for.
        asked: u64,
        /// Blocks free now.
        free: u64,
        /// Blocks of the pool.
        total: u64,
    },
    /// The pool will never have so many.
    #[error("{asked} blocks were asked for, the pool has {total} in all; make the pool larger")]
    TooMany {
        /// Blocks asked for.
        asked: u64,
        /// Blocks of the pool.
        total: u64,
    },
    /// A block that somebody else holds, or that was named twice.
    #[error("block {block} is in use; each block has one holder at a time")]
    InUse {
        /// The block id.
        block: u32,
    },
    /// An id, layer, position or byte range that does not exist.
    #[error("{what} {index} is out of range: there are {limit}")]
    OutOfRange {
        /// What was indexed.
        what: &'static str,
        /// The index asked for.
        index: u64,
        /// The number that there is.
        limit: u64,
    },
}

/// A registered pool of blocks. Cloning gives another handle to the same pool.
#[derive(Clone)]
pub struct KvPool {
    inner: Arc<Inner>,
}

struct Inner {
    pd: ProtectionDomain,
    layout: Layout,
    access: PoolAccess,
    /// The whole pool, in order of address. More than one where the device's `max_mr_size` asks for it.
    regions: Vec<Region<Exposed>>,
    seams: Seams,
    /// As many permits as there are free blocks. A permit is held (forgotten) by each claimed block.
    permits: Semaphore,
    free: Mutex<FreeRuns>,
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvPool")
            .field("layout", &self.inner.layout)
            .field("regions", &self.inner.regions.len())
            .field("free", &self.free_blocks())
            .finish()
    }
}

impl KvPool {
    /// Allocates and registers a pool for `layout` in anonymous memory, faulted in, that peers may write to under
    /// grants.
    ///
    /// # Errors
    /// [`MemoryError`]: memory that cannot be had or registered, or no tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future releases everything.
    pub async fn new(pd: &ProtectionDomain, layout: Layout) -> Result<Self, MemoryError> {
        let memory = Memory::anonymous(layout.required_bytes());
        Self::with_memory(pd, layout, memory, PoolAccess::Target).await
    }

    /// Registers `memory` (at least [`Layout::required_bytes`]) as a pool: as one region, or as several where the device's
    /// `max_mr_size` asks for it.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when `memory` is shorter than the layout; else as [`KvPool::new`].
    ///
    /// # Cancel safety
    /// As [`KvPool::new`].
    pub async fn with_memory(
        pd: &ProtectionDomain,
        layout: Layout,
        memory: Memory,
        access: PoolAccess,
    ) -> Result<Self, MemoryError> {
        let need = layout.required_bytes();
        if memory.len() < need {
            return Err(MemoryError::OutOfRange { offset: 0, len: need, size: memory.len() });
        }
        let remote = match access {
            PoolAccess::Source => AccessFlags::LOCAL_WRITE,
            PoolAccess::Target => AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE),
        };
        let regions = pd.register_pieces(memory, remote).await?;
        let parts = regions.iter().map(|r| Part { addr: r.addr(), len: r.len(), key: r.lkey() }).collect();
        let seams = Seams::new(parts).expect("a mapping has bytes and does not wrap around");
        let blocks = layout.blocks();
        Ok(Self {
            inner: Arc::new(Inner {
                pd: pd.clone(),
                layout,
                access,
                regions,
                seams,
                permits: Semaphore::new(blocks as usize),
                free: Mutex::new(FreeRuns::all(blocks)),
            }),
        })
    }

    /// The layout of the pool.
    pub fn layout(&self) -> &Layout {
        &self.inner.layout
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// What peers may do.
    pub fn access(&self) -> PoolAccess {
        self.inner.access
    }

    pub(crate) fn regions(&self) -> &[Region<Exposed>] {
        &self.inner.regions
    }

    pub(crate) fn seams(&self) -> &Seams {
        &self.inner.seams
    }

    /// Whether two handles are of the same pool.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Blocks that nobody holds now: neither claims, nor grants, nor the quarantine of aborted transfers.
    pub fn free_blocks(&self) -> u32 {
        self.inner.permits.available_permits() as u32
    }

    /// Takes `count` blocks, from the first contiguous run that holds them all, else from several, or says that they are
    /// not there now.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] when so many are not free now; [`PoolError::TooMany`] when they never will be.
    pub fn try_alloc(&self, count: u32) -> Result<Blocks, PoolError> {
        self.check_total(count)?;
        let Ok(permit) = self.inner.permits.try_acquire_many(count) else {
            return Err(PoolError::Exhausted {
                asked: count.into(),
                free: self.free_blocks().into(),
                total: self.inner.layout.blocks().into(),
            });
        };
        permit.forget();
        Ok(self.take_first_fit(count))
    }

    /// Takes `count` blocks as [`KvPool::try_alloc`] does, waiting for them in turn: nobody who came later is served
    /// before.
    ///
    /// # Errors
    /// [`PoolError::TooMany`] at once, when the pool will never have so many.
    ///
    /// # Cancel safety
    /// A dropped wait holds nothing.
    pub async fn alloc(&self, count: u32) -> Result<Blocks, PoolError> {
        self.check_total(count)?;
        // The semaphore is never closed, so the only outcome is the permit.
        if let Ok(permit) = self.inner.permits.acquire_many(count).await {
            permit.forget();
        }
        Ok(self.take_first_fit(count))
    }

    /// Claims exactly these blocks, in this order: for engines that have a block allocator of their own.
    ///
    /// # Errors
    /// All or nothing: [`PoolError::OutOfRange`], [`PoolError::InUse`] (also for an id that is named twice), and
    /// [`PoolError::Exhausted`] when the blocks are promised to somebody who waits in [`KvPool::alloc`].
    pub fn claim(&self, ids: &[u32]) -> Result<Blocks, PoolError> {
        let total = self.inner.layout.blocks();
        let count = u32::try_from(ids.len())
            .map_err(|_| PoolError::TooMany { asked: ids.len() as u64, total: total.into() })?;
        if let Some(&id) = ids.iter().find(|&&id| id >= total) {
            return Err(PoolError::OutOfRange { what: "block", index: id.into(), limit: total.into() });
        }
        self.check_total(count)?;
        let mut runs = Vec::new();
        for &id in ids {
            push_run(&mut runs, (id, 1));
        }
        let mut free = lock(&self.inner.free);
        for (i, &(start, len)) in runs.iter().enumerate() {
            if let Err(block) = free.take(start, len) {
                for &(start, len) in &runs[..i] {
                    free.put(start, len);
                }
                return Err(PoolError::InUse { block });
            }
        }
        // The free list and the permits change under different locks: `alloc` may hold permits for blocks that it
        // has not taken yet. Those are spoken for, so without enough permits the claim is refused.
        match self.inner.permits.try_acquire_many(count) {
            Ok(permit) => permit.forget(),
            Err(_) => {
                for &(start, len) in &runs {
                    free.put(start, len);
                }
                return Err(PoolError::Exhausted {
                    asked: count.into(),
                    free: self.free_blocks().into(),
                    total: total.into(),
                });
            }
        }
        drop(free);
        Ok(Blocks::new(self.clone(), runs))
    }

    fn check_total(&self, count: u32) -> Result<(), PoolError> {
        let total = self.inner.layout.blocks();
        if count > total {
            return Err(PoolError::TooMany { asked: count.into(), total: total.into() });
        }
        Ok(())
    }

    /// The caller has forgotten `count` permits, so that many blocks are free.
    fn take_first_fit(&self, count: u32) -> Blocks {
        let runs = lock(&self.inner.free).take_any(count);
        Blocks::new(self.clone(), runs)
    }

    /// Takes back runs that were claimed.
    fn put(&self, runs: &[(u32, u32)]) {
        let mut free = lock(&self.inner.free);
        let mut blocks = 0;
        for &(start, len) in runs {
            free.put(start, len);
            blocks += len as usize;
        }
        drop(free);
        self.inner.permits.add_permits(blocks);
    }

    fn locate(&self, layer: u32, block: u32, at: u64, len: u64) -> Result<u64, PoolError> {
        let layout = &self.inner.layout;
        if layer >= layout.layers() {
            return Err(PoolError::OutOfRange {
                what: "layer",
                index: layer.into(),
                limit: layout.layers().into(),
            });
        }
        let end = at.saturating_add(len);
        if end > layout.block_bytes() {
            return Err(PoolError::OutOfRange { what: "byte", index: end, limit: layout.block_bytes() });
        }
        match layout.offset(layer, block) {
            Some(offset) => Ok(offset + at),
            None => Err(PoolError::OutOfRange {
                what: "block",
                index: block.into(),
                limit: layout.blocks().into(),
            }),
        }
    }
}

/// An exclusive claim on a list of blocks of a pool. Positions `0..len()` name them in the order of the claim.
///
/// Peers may be writing to granted blocks, so the bytes are reached by copying; a claim that moved into a grant is
/// not reachable at all until its arrival gives it back. Dropping returns the blocks to the pool.
pub struct Blocks {
    pool: KvPool,
    /// `(first block, count)`, in order of position.
    runs: Vec<(u32, u32)>,
    /// Position behind the last block of each run.
    ends: Vec<u32>,
    len: u32,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("len", &self.len).field("runs", &self.runs.len()).finish()
    }
}

impl Blocks {
    /// The runs have been taken from the pool's free list.
    fn new(pool: KvPool, runs: Vec<(u32, u32)>) -> Self {
        let mut len = 0;
        let ends = runs
            .iter()
            .map(|run| {
                len += run.1;
                len
            })
            .collect();
        Self { pool, runs, ends, len }
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pool.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Contiguous runs `(first block id, count)`, in order of position.
    pub fn runs(&self) -> &[(u32, u32)] {
        &self.runs
    }

    /// The block ids, in order of position.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|&(start, len)| start..start + len)
    }

    /// The block id at a position.
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`].
    pub fn id(&self, position: u32) -> Result<u32, PoolError> {
        // `ends` is sorted: the first run that ends behind the position holds it.
        let run = self.ends.partition_point(|&end| end <= position);
        match self.runs.get(run) {
            Some(&(start, len)) => Ok(start + (position - (self.ends[run] - len))),
            None => Err(PoolError::OutOfRange {
                what: "position",
                index: position.into(),
                limit: self.len.into(),
            }),
        }
    }

    fn locate(&self, layer: u32, position: u32, at: u64, len: u64) -> Result<u64, PoolError> {
        self.pool.locate(layer, self.id(position)?, at, len)
    }

    /// Copies `bytes` into the block at `position`, in `layer`, from byte `at` of the block on.
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`], with nothing copied, when a number is beyond the claim, the layout or the block.
    pub fn copy_in(&mut self, layer: u32, position: u32, at: u64, bytes: &[u8]) -> Result<(), PoolError> {
        let mut offset = self.locate(layer, position, at, bytes.len() as u64)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (region, within, room) = self.piece(offset);
            let (now, later) = rest.split_at(rest.len().min(room));
            region
                .slice(within..within + now.len() as u64)
                .and_then(|s| s.copy_in(0, now))
                .map_err(out_of_region)?;
            offset += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Copies out of the block at `position`, in `layer`, from byte `at` of the block on; as many bytes as `bytes` has.
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`], with nothing copied.
    pub fn copy_out(&self, layer: u32, position: u32, at: u64, bytes: &mut [u8]) -> Result<(), PoolError> {
        let mut offset = self.locate(layer, position, at, bytes.len() as u64)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (region, within, room) = self.piece(offset);
            let (now, later) = rest.split_at_mut(rest.len().min(room));
            region
                .slice(within..within + now.len() as u64)
                .and_then(|s| s.copy_out(0, now))
                .map_err(out_of_region)?;
            offset += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// The [`checksum`](crate::memory::checksum) of the block at `position`, in `layer`.
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`].
    pub fn checksum(&self, layer: u32, position: u32) -> Result<u64, PoolError> {
        let size = self.pool.layout().block_bytes();
        let mut offset = self.locate(layer, position, 0, size)?;
        let mut sum = Checksum::new();
        let mut left = size;
        while left > 0 {
            let (region, within, room) = self.piece(offset);
            let now = left.min(room as u64);
            region.slice(within..within + now).map_err(out_of_region)?.checksum_into(&mut sum);
            offset += now;
            left -= now;
        }
        Ok(sum.finish())
    }

    /// Keeps the first `len` positions; the others return to the pool. Does nothing when there are no more than that.
    pub fn truncate(&mut self, len: u32) {
        if len >= self.len {
            return;
        }
        let mut freed = Vec::new();
        while self.len > len {
            let Some((start, count)) = self.runs.pop() else { break };
            self.ends.pop();
            let first = self.len - count;
            let keep = len.saturating_sub(first);
            if keep > 0 {
                self.runs.push((start, keep));
                self.ends.push(len);
            }
            freed.push((start + keep, count - keep));
            self.len = first + keep;
        }
        self.pool.put(&freed);
    }

    /// Writes the block at `position`, in `layer`, to a descriptor, straight from the registered memory.
    ///
    /// Blocks where the descriptor blocks: use `spawn_blocking` for files.
    ///
    /// # Errors
    /// The system's error, after which a part may have been written; one of kind `Other` with a [`PoolError`] inside when
    /// there is no such block.
    pub fn write_to(&self, layer: u32, position: u32, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        let size = self.pool.layout().block_bytes();
        let mut offset = self.locate(layer, position, 0, size).map_err(std::io::Error::other)?;
        let mut left = size;
        while left > 0 {
            let (region, within, room) = self.piece(offset);
            let now = left.min(room as u64);
            region.slice(within..within + now).map_err(std::io::Error::other)?.write_to_fd(fd)?;
            offset += now;
            left -= now;
        }
        Ok(())
    }

    /// The region that holds pool offset `offset`, the offset within it, and the bytes from there to its end.
    fn piece(&self, offset: u64) -> (&Region<Exposed>, u64, usize) {
        let regions = self.pool.regions();
        // All pieces but the last have one size.
        let size = regions[0].len();
        let index = ((offset / size) as usize).min(regions.len() - 1);
        let within = offset - index as u64 * size;
        (&regions[index], within, (regions[index].len() - within) as usize)
    }
}

fn out_of_region(error: MemoryError) -> PoolError {
    // `locate` has checked against the layout, and the pool is at least as large as the layout.
    debug_assert!(false, "{error}");
    PoolError::OutOfRange { what: "byte", index: 0, limit: 0 }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.pool.put(&self.runs);
    }
}

fn push_run(runs: &mut Vec<(u32, u32)>, (start, len): (u32, u32)) {
    match runs.last_mut() {
        Some((s, l)) if *s + *l == start => *l += len,
        _ => runs.push((start, len)),
    }
}

/// Free blocks as maximal runs: start → length.
#[derive(Debug)]
struct FreeRuns(BTreeMap<u32, u32>);

impl FreeRuns {
    fn all(blocks: u32) -> Self {
        let mut map = BTreeMap::new();
        if blocks > 0 {
            map.insert(0, blocks);
        }
        Self(map)
    }

    /// Takes `start..start + len`, or names the first block that is not free.
    fn take(&mut self, start: u32, len: u32) -> Result<(), u32> {
        let Some((&s, &l)) = self.0.range(..=start).next_back().filter(|&(&s, &l)| start - s < l) else {
            return Err(start);
        };
        let end = s + l;
        if start + len > end {
            return Err(end);
        }
        self.0.remove(&s);
        if s < start {
            self.0.insert(s, start - s);
        }
        if start + len < end {
            self.0.insert(start + len, end - start - len);
        }
        Ok(())
    }

    /// Takes `count` blocks: the first run that holds them all, else runs from the front.
    fn take_any(&mut self, count: u32) -> Vec<(u32, u32)> {
        if count == 0 {
            return Vec::new();
        }
        let fit = self.0.iter().find(|&(_, &l)| l >= count).map(|(&s, _)| s);
        let mut out = Vec::new();
        let mut left = count;
        while left > 0 {
            let Some((s, l)) =
                fit.map(|s| (s, count)).or_else(|| self.0.first_key_value().map(|(&s, &l)| (s, l)))
            else {
                unreachable!("permits promise that {left} more blocks are free");
            };
            let n = l.min(left);
            let taken = self.take(s, n);
            debug_assert!(taken.is_ok());
            push_run(&mut out, (s, n));
            left -= n;
        }
        out
    }

    fn put(&mut self, start: u32, len: u32) {
        let (mut s, mut l) = (start, len);
        if let Some((&ps, &pl)) = self.0.range(..start).next_back() {
            debug_assert!(ps + pl <= start, "block {start} freed twice");
            if ps + pl == start {
                self.0.remove(&ps);
                (s, l) = (ps, pl + len);
            }
        }
        if let Some(nl) = self.0.remove(&(start + len)) {
            l += nl;
        }
        self.0.insert(s, l);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_runs_merge_and_split() {
        let mut f = FreeRuns::all(100);
        assert_eq!(f.take(10, 5), Ok(()));
        assert_eq!(f.take(12, 1), Err(12));
        assert_eq!(f.take(8, 4), Err(10));
        assert_eq!(f.take(99, 2), Err(100));
        assert_eq!(f.take_any(85), vec![(15, 85)]);
        assert_eq!(f.take_any(10), vec![(0, 10)]);
        f.put(0, 10);
        f.put(15, 85);
        f.put(10, 5);
        assert_eq!(f.0.into_iter().collect::<Vec<_>>(), vec![(0, 100)]);
    }

    #[test]
    fn free_runs_gather_when_no_run_is_long_enough() {
        let mut f = FreeRuns::all(10);
        f.take(3, 1).unwrap();
        f.take(7, 1).unwrap();
        assert_eq!(f.take_any(8), vec![(0, 3), (4, 3), (8, 2)]);
        assert!(f.0.is_empty());
    }
}
