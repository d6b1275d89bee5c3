//! Claims: who holds which blocks of a pool, and how their bytes are reached.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::pool::{KvPool, PoolError};
use crate::error::MemoryError;
use crate::memory::{Checksum, Exposed, Region};

/// An exclusive claim on a list of blocks of a pool. Positions `0..len()` name them in the order of the claim.
///
/// Peers may be writing to granted blocks, so the bytes are reached by copying; a claim that moved into a grant is
/// not reachable at all until its arrival gives it back. Dropping returns the blocks to the pool.
pub struct Blocks {
    pool: KvPool,
    /// `(first block, count)`, in order of position. Plans of writes share them.
    runs: Arc<Vec<(u32, u32)>>,
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
    pub(super) fn new(pool: KvPool, runs: Vec<(u32, u32)>) -> Self {
        let mut len = 0;
        let ends = runs
            .iter()
            .map(|run| {
                len += run.1;
                len
            })
            .collect();
        Self { pool, runs: Arc::new(runs), ends, len }
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

    pub(super) fn shared_runs(&self) -> &Arc<Vec<(u32, u32)>> {
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
        self.run_at(position).map(|(id, _)| id).ok_or(PoolError::OutOfRange {
            what: "position",
            index: position.into(),
            limit: self.len.into(),
        })
    }

    /// The block id at a position, and how many neighbours from it on follow in sequence.
    pub(super) fn run_at(&self, position: u32) -> Option<(u32, u32)> {
        // `ends` is sorted: the first run that ends behind the position holds it.
        let run = self.ends.partition_point(|&end| end <= position);
        let &(start, len) = self.runs.get(run)?;
        let into = position - (self.ends[run] - len);
        Some((start + into, len - into))
    }

    fn locate(&self, layer: u32, position: u32, at: u64, len: u64) -> Result<u64, PoolError> {
        self.pool.locate(layer, self.id(position)?, at, len)
    }

    /// Copies `bytes` into the block at `position`, in `layer`, from byte `at` of the block on.
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`], with nothing copied, when a number is beyond the claim, the layout or the block;
    /// [`PoolError::Copy`] of memory of a GPU.
    pub fn copy_in(&mut self, layer: u32, position: u32, at: u64, bytes: &[u8]) -> Result<(), PoolError> {
        self.copy_into(layer, position, at, bytes)
    }

    /// [`Blocks::copy_in`] for who knows that nobody else reads these bytes: the memory is exposed, so that a copy that meets
    /// another is never more than a mixture of both.
    pub(super) fn copy_into(
        &self,
        layer: u32,
        position: u32,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), PoolError> {
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
    /// [`PoolError::OutOfRange`], with nothing copied; [`PoolError::Copy`] of memory of a GPU.
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
    /// [`PoolError::OutOfRange`]; [`PoolError::Copy`] of memory of a GPU.
    pub fn checksum(&self, layer: u32, position: u32) -> Result<u64, PoolError> {
        let size = self.pool.layout().block_bytes();
        let mut offset = self.locate(layer, position, 0, size)?;
        let mut sum = Checksum::new();
        let mut left = size;
        while left > 0 {
            let (region, within, room) = self.piece(offset);
            let now = left.min(room as u64);
            region
                .slice(within..within + now)
                .and_then(|slice| slice.checksum_into(&mut sum))
                .map_err(out_of_region)?;
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
        let (mut freed, runs) = (Vec::new(), Arc::make_mut(&mut self.runs));
        while self.len > len {
            let Some((start, count)) = runs.pop() else { break };
            self.ends.pop();
            let first = self.len - count;
            let keep = len.saturating_sub(first);
            if keep > 0 {
                runs.push((start, keep));
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
    if let MemoryError::Gpu(error) = &error {
        return PoolError::Copy { reason: error.to_string() };
    }
    // `locate` has checked against the layout, and the pool is at least as large as the layout.
    debug_assert!(false, "{error}");
    PoolError::OutOfRange { what: "byte", index: 0, limit: 0 }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.pool.put(&self.runs);
    }
}
