//! What a transfer copies: runs of blocks × layers, and a cursor that cuts the next WRITE from it on demand (K8).
//!
//! A plan is 12 bytes a run, whatever the number of layers, and is never expanded into a list of work requests.
//! [`Cursor::next`] merges neighbours (contiguous in the source and in the target) into one piece, and cuts at
//! `max_write` and at the seams of both sides: the borders between the memory regions that make up a pool.
//!
//! A plan that would be many small WRITEs can be cut into WRITEs of pages instead ([`Cursor::next_pages`]), where the connection takes
//! those: some blocks, with all of their layers. What was begun so goes on by blocks: where pages cannot go any more, the layers of a
//! block follow each other as WRITEs of their own.
//!
//! The runs of a plain plan are of blocks, each copied as it is. Those of a mapped plan are of tokens: a [`Mapping`] says
//! which bytes of a token go where, in blocks of another size, order or set of heads.

use std::sync::Arc;

use super::runs::{Run, RunList, Runs};
use super::seams::PoolSeams;
use crate::kv::layout::{Dtype, Layout};
use crate::kv::mapping::Mapping;
use crate::pages::{Checked, MAX_PAIRS, Pages, Strides, pair};

/// A plan of so many WRITEs, or more, may be cut into pages: what one call of `transmit` posts is left as it is.
const MANY: u64 = 256;
/// Pairs of the first WRITE of pages: those of the next are being made while it is checked and copied. Each has as many as all before it.
const FIRST_PAIRS: usize = 1024;
/// Of so many bytes a WRITE is worth a request of its own.
const LARGE: u64 = 1 << 20;

/// One WRITE. 0 bytes only as a bare notification, which has no source and no target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Piece {
    pub(crate) src_addr: u64,
    pub(crate) lkey: u32,
    pub(crate) dst_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) len: u32,
}

/// A plan that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("{what}: {got} at the source, {want} at the target; both ends must use one layout")]
    Layouts { what: &'static str, got: u64, want: u64 },
    #[error("dtype: {got:?} at the source, {want:?} at the target; both ends must use one layout")]
    Dtypes { got: Dtype, want: Dtype },
    #[error("the two pools' blocks have different shapes; a mapping says what goes where")]
    Shapes,
    #[error("the mapping is for another shape than the {side}'s")]
    OtherShape { side: &'static str },
    #[error("{side} {unit} {block} + {count} is outside of a pool of {blocks} {unit}s")]
    OutOfRange { side: &'static str, unit: &'static str, block: u32, count: u32, blocks: u32 },
    #[error("the {side} layout needs {needed} bytes, its memory has {have}")]
    PoolTooSmall { side: &'static str, needed: u64, have: u64 },
    #[error(
        "the source is seen by {source_rails} rails, the target by {target_rails}; a plan needs both on each rail"
    )]
    Rails { source_rails: usize, target_rails: usize },
    #[error("part {index} of a pool is empty or reaches beyond 64-bit addresses")]
    BadPart { index: usize },
    #[error("the transfer has more than 2^64 bytes")]
    TooLarge,
}

/// One side of a plan.
#[derive(Clone, Debug)]
struct Side {
    seams: PoolSeams,
    layer_stride: u64,
    block_stride: u64,
}

impl Side {
    fn offset(&self, layer: u32, block: u32) -> u64 {
        // Within `Layout::required_bytes`, which has been checked to fit.
        u64::from(layer) * self.layer_stride + u64::from(block) * self.block_stride
    }
}

/// Collects runs and makes a [`Plan`] of them.
#[derive(Debug)]
pub(crate) struct PlanBuilder {
    runs: RunList,
    /// Instead of `runs`.
    alike: Option<Runs>,
    /// Blocks, or tokens, in all; and those of the pools.
    units: u64,
    src_units: u32,
    dst_units: u32,
    plan: Plan,
}

/// Runs of blocks of a pool, `(first, count)`, which are all below `limit`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List<'a> {
    pub(crate) runs: &'a Arc<Vec<(u32, u32)>>,
    pub(crate) limit: u32,
}

/// Everything that a transfer copies. Immutable; all bounds have been checked.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    runs: Runs,
    first_layer: u32,
    layers: u32,
    block_bytes: u64,
    src: Side,
    dst: Side,
    /// The runs are of tokens.
    mapping: Option<Mapping>,
    bytes: u64,
    descriptors: u64,
}

impl PlanBuilder {
    /// A plan of blocks. `src` and `dst` may differ in strides and number of blocks, not in layers, block size, shape or dtype.
    pub(crate) fn new(src: (&Layout, &PoolSeams), dst: (&Layout, &PoolSeams)) -> Result<Self, PlanError> {
        let (s, d) = (src.0.block_bytes(), dst.0.block_bytes());
        if let (Some(ours), Some(theirs)) = (src.0.shape(), dst.0.shape())
            && (ours != theirs || s != d)
        {
            return Err(PlanError::Shapes);
        }
        if s != d {
            return Err(PlanError::Layouts { what: "block bytes", got: s, want: d });
        }
        Self::with(src, dst, None, (src.0.blocks(), dst.0.blocks()))
    }

    /// A plan of tokens, whose bytes go from blocks of `mapping`'s source to blocks of its target. `src` and `dst` must have
    /// those shapes, and agree on layers and dtype.
    pub(crate) fn mapped(
        src: (&Layout, &PoolSeams),
        dst: (&Layout, &PoolSeams),
        mapping: &Mapping,
    ) -> Result<Self, PlanError> {
        for (side, layout, shape) in
            [("source", src.0, mapping.source()), ("target", dst.0, mapping.target())]
        {
            if layout.shape() != Some(shape) {
                return Err(PlanError::OtherShape { side });
            }
        }
        Self::with(src, dst, Some(mapping.clone()), (src.0.tokens(), dst.0.tokens()))
    }

    fn with(
        src: (&Layout, &PoolSeams),
        dst: (&Layout, &PoolSeams),
        mapping: Option<Mapping>,
        (src_units, dst_units): (u32, u32),
    ) -> Result<Self, PlanError> {
        let (s, d) = (src.0, dst.0);
        if s.layers() != d.layers() {
            let (got, want) = (s.layers().into(), d.layers().into());
            return Err(PlanError::Layouts { what: "layers", got, want });
        }
        if s.dtype() != d.dtype() {
            return Err(PlanError::Dtypes { got: s.dtype(), want: d.dtype() });
        }
        if src.1.rails() != dst.1.rails() {
            return Err(PlanError::Rails { source_rails: src.1.rails(), target_rails: dst.1.rails() });
        }
        for (side, layout, seams) in [("source", s, src.1), ("target", d, dst.1)] {
            if layout.required_bytes() > seams.total() {
                return Err(PlanError::PoolTooSmall {
                    side,
                    needed: layout.required_bytes(),
                    have: seams.total(),
                });
            }
        }
        let side = |layout: &Layout, seams: &PoolSeams| Side {
            seams: seams.clone(),
            layer_stride: layout.layer_stride(),
            block_stride: layout.block_stride(),
        };
        let plan = Plan {
            runs: Runs::default(),
            first_layer: 0,
            layers: s.layers(),
            block_bytes: s.block_bytes(),
            src: side(s, src.1),
            dst: side(d, dst.1),
            mapping,
            bytes: 0,
            descriptors: 0,
        };
        Ok(Self { runs: RunList::default(), alike: None, units: 0, src_units, dst_units, plan })
    }

    /// Copies the `blocks` of one list to those in their places of the other, which has as many or more: then they are all that is
    /// copied. Lists that are alike are used as they are.
    pub(crate) fn push_lists(&mut self, blocks: u32, src: List<'_>, dst: List<'_>) -> Result<(), PlanError> {
        debug_assert!(self.units == 0, "they are all that is copied");
        let runs = Runs::of_lists(src.runs, dst.runs);
        if src.limit > self.src_units || dst.limit > self.dst_units {
            // It may be one that is not used.
            runs.iter().try_for_each(|run| self.check(run.src, run.dst, run.count))?;
        }
        self.units = blocks.into();
        self.alike = Some(runs);
        Ok(())
    }

    fn check(&self, src: u32, dst: u32, count: u32) -> Result<(), PlanError> {
        for (side, block, blocks) in [("source", src, self.src_units), ("target", dst, self.dst_units)] {
            if block.checked_add(count).is_none_or(|end| end > blocks) {
                let unit = if self.plan.mapping.is_some() { "token" } else { "block" };
                return Err(PlanError::OutOfRange { side, unit, block, count, blocks });
            }
        }
        Ok(())
    }

    /// Copies `count` blocks (or tokens) from `src` on, of the source's pool, to `dst` on, of the target's, in every layer.
    pub(crate) fn push(&mut self, src: u32, dst: u32, count: u32) -> Result<(), PlanError> {
        debug_assert!(self.alike.is_none(), "nothing comes behind lists that are alike");
        self.check(src, dst, count)?;
        if count > 0 {
            self.units = self.units.checked_add(u64::from(count)).ok_or(PlanError::TooLarge)?;
            self.runs.push(Run { src, dst, count });
        }
        Ok(())
    }

    pub(crate) fn build(mut self) -> Result<Plan, PlanError> {
        let plan = &mut self.plan;
        // Where the layers of a block lie together on both sides, a block is one extent of all its layers.
        let together = |side: &Side| side.layer_stride == plan.block_bytes;
        if plan.layers > 1 && plan.mapping.is_none() && together(&plan.src) && together(&plan.dst) {
            plan.block_bytes *= u64::from(plan.layers);
            plan.layers = 1;
        }
        self.build_by_layer()
    }

    /// The same, of which [`Plan::layer`] gives the layers one by one.
    pub(crate) fn build_by_layer(self) -> Result<Plan, PlanError> {
        let mut plan = self.plan;
        plan.runs = self.alike.unwrap_or_else(|| self.runs.freeze());
        // Of one layer.
        let (bytes, extents) = match &plan.mapping {
            None => (plan.block_bytes, self.units),
            Some(mapping) => {
                let chunks = plan.runs.iter().map(|run| mapping.chunks(run.src, run.dst, run.count)).sum();
                (mapping.bytes_per_token(), chunks)
            }
        };
        let layers = u64::from(plan.layers);
        plan.descriptors = extents.checked_mul(layers).ok_or(PlanError::TooLarge)?;
        plan.bytes =
            self.units.checked_mul(layers).and_then(|n| n.checked_mul(bytes)).ok_or(PlanError::TooLarge)?;
        Ok(plan)
    }
}

impl Plan {
    /// Bytes that it copies.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Extents before merging: blocks × layers, or blocks where the layers of a block lie together. Where it is mapped: pairs
    /// of blocks that meet × layers.
    pub(crate) fn descriptors(&self) -> u64 {
        self.descriptors
    }

    /// Layers that [`Plan::layer`] knows.
    pub(crate) fn layers(&self) -> u32 {
        self.layers
    }

    /// It is many WRITEs, and small ones.
    fn is_scattered(&self) -> bool {
        let dense = self.src.block_stride == self.block_bytes && self.dst.block_stride == self.block_bytes;
        let writes = if dense { self.runs.len() as u64 * u64::from(self.layers) } else { self.descriptors };
        self.mapping.is_none() && writes >= MANY && self.bytes / writes < LARGE
    }

    /// What it copies in one layer, counted from its first. Shares the runs.
    pub(crate) fn layer(&self, layer: u32) -> Option<Self> {
        let layers = u64::from(self.layers);
        (layer < self.layers).then(|| Self {
            first_layer: self.first_layer + layer,
            layers: 1,
            bytes: self.bytes / layers,
            descriptors: self.descriptors / layers,
            ..self.clone()
        })
    }

    /// Runs, each 12 bytes of metadata.
    #[cfg(test)]
    pub(crate) fn runs(&self) -> usize {
        self.runs.len()
    }
}

/// How far a plan has been cut.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    layer: u32,
    run: usize,
    /// Blocks, or tokens, of the current run that are done.
    block: u32,
    /// Mapped: rows of the current chunk that are done.
    row: u64,
    /// Bytes of the current block, or row, that are done.
    byte: u64,
    /// It is being cut into pages: blocks with all their layers.
    paged: bool,
    /// Pairs of blocks that have been cut into pages.
    pairs: u32,
    src_hint: u32,
    dst_hint: u32,
}

impl Cursor {
    /// Everything has been cut.
    pub(crate) fn is_done(&self, plan: &Plan) -> bool {
        self.layer >= plan.layers || plan.runs.is_empty()
    }

    /// Offsets of what comes next, and how long it is contiguous on both sides within its run.
    fn extent(&self, plan: &Plan) -> Option<(u64, u64, u64)> {
        if self.is_done(plan) {
            return None;
        }
        let run = plan.runs.get(self.run)?;
        let layer = plan.first_layer + self.layer;
        if let Some(mapping) = &plan.mapping {
            let chunk = mapping.chunk(run.src + self.block, run.dst + self.block, run.count - self.block);
            let (src, dst, len) = mapping.row(&chunk, self.row);
            let src = plan.src.offset(layer, chunk.src_block) + src + self.byte;
            let dst = plan.dst.offset(layer, chunk.dst_block) + dst + self.byte;
            return Some((src, dst, len - self.byte));
        }
        let src = plan.src.offset(layer, run.src + self.block) + self.byte;
        let dst = plan.dst.offset(layer, run.dst + self.block) + self.byte;
        let dense = plan.src.block_stride == plan.block_bytes && plan.dst.block_stride == plan.block_bytes;
        // By pages, the other layers of a block come before the next one.
        let blocks = if dense && !self.paged { u64::from(run.count - self.block) } else { 1 };
        Some((src, dst, blocks * plan.block_bytes - self.byte))
    }

    /// Moves on by `len` bytes, at most what `extent` has shown.
    fn advance(&mut self, plan: &Plan, len: u64) {
        let Some(run) = plan.runs.get(self.run) else { return };
        let done = self.byte + len;
        match &plan.mapping {
            None => {
                self.byte = done % plan.block_bytes;
                // At most the run's count, a u32.
                let mut blocks = (done / plan.block_bytes) as u32;
                if self.paged {
                    self.layer += blocks;
                    blocks = u32::from(self.layer == plan.layers);
                    self.layer *= 1 - blocks;
                }
                self.block += blocks;
            }
            Some(mapping) => {
                let chunk = mapping.chunk(run.src + self.block, run.dst + self.block, run.count - self.block);
                let row = mapping.row(&chunk, self.row).2;
                self.byte = if done < row { done } else { 0 };
                self.row += u64::from(done >= row);
                if self.row == mapping.rows(&chunk) {
                    self.row = 0;
                    self.block += chunk.tokens;
                }
            }
        }
        if self.block >= run.count {
            self.block = 0;
            self.run += 1;
            if self.run == plan.runs.len() {
                self.run = 0;
                self.layer = if self.paged { plan.layers } else { self.layer + 1 };
            }
        }
    }

    /// Whether blocks follow with all of their layers: of a plan that is cut into pages from the start.
    fn may_page(&self, plan: &Plan) -> bool {
        let whole = (self.layer, self.row, self.byte) == (0, 0, 0);
        let fresh = whole && (self.run, self.block) == (0, 0);
        (whole && self.paged) || (fresh && plan.is_scattered())
    }

    /// Cuts the next WRITE of pages, of at most as many bytes as `most` says for the key of the source. Once the plan is cut into pages,
    /// `pace` does not make that less than one block with its layers: a rate that has fallen would never rise again. Its piece is
    /// all of it, at the places of the first block of each end. `None` where the plan is not for that, or parts of a pool have
    /// different keys; then [`next`](Self::next) goes on from here.
    pub(crate) fn next_pages(
        &mut self,
        plan: &Plan,
        rail: usize,
        pace: u32,
        most: impl FnOnce(u32) -> u32,
    ) -> Option<(Piece, Checked)> {
        if self.is_done(plan) || !self.may_page(plan) {
            return None;
        }
        let ((src_addr, lkey), (dst_addr, rkey)) =
            (plan.src.seams.rail(rail).whole()?, plan.dst.seams.rail(rail).whole()?);
        let block = plan.block_bytes.checked_mul(plan.layers.into())?;
        let least = if self.paged { block } else { 0 };
        let most = u64::from(most(lkey)).min(u64::from(pace).max(least));
        let most =
            usize::try_from(most / block).ok()?.min(MAX_PAIRS).min(FIRST_PAIRS.max(self.pairs as usize));
        let (at, mut pairs) = (*self, Vec::with_capacity(most));
        while pairs.len() < most
            && let Some(run) = plan.runs.get(self.run)
        {
            let n = (run.count - self.block).min((most - pairs.len()) as u32);
            (self.block..self.block + n).for_each(|b| pairs.push(pair(run.src + b, run.dst + b)));
            self.block += n;
            if self.block == run.count {
                (self.run, self.block) = (self.run + 1, 0);
            }
        }
        let strides = |side: &Side| Strides { layer: side.layer_stride, block: side.block_stride };
        let (source, target) = (strides(&plan.src), strides(&plan.dst));
        let piece = u32::try_from(plan.block_bytes).ok();
        let pages = piece.map(|piece| Pages { piece, layers: plan.layers, source, target, pairs });
        // Targets that are not apart, and blocks larger than that: they are cut as usual.
        let checked = pages.and_then(Pages::check).and_then(|c| Some((c.pages.bytes()?, c)));
        let Some((len, pages)) = checked else {
            *self = at;
            return None;
        };
        self.paged = true;
        self.pairs = self.pairs.saturating_add(pages.pages.pairs.len() as u32);
        if self.run == plan.runs.len() {
            (self.run, self.layer) = (0, plan.layers);
        }
        let first = u64::from(plan.first_layer);
        let src_addr = src_addr + first * plan.src.layer_stride;
        let dst_addr = dst_addr + first * plan.dst.layer_stride;
        Some((Piece { src_addr, lkey, dst_addr, rkey, len }, pages))
    }

    /// Cuts the next WRITE, of at most `max_write` bytes, as the devices of `rail` see it.
    pub(crate) fn next(&mut self, plan: &Plan, rail: usize, max_write: u32) -> Option<Piece> {
        let (src, dst, mut avail) = self.extent(plan)?;
        let (src_addr, lkey, src_left) = plan.src.seams.rail(rail).at(src, &mut self.src_hint);
        let (dst_addr, rkey, dst_left) = plan.dst.seams.rail(rail).at(dst, &mut self.dst_hint);
        let limit = u64::from(max_write).min(src_left).min(dst_left);
        let mut len = 0u64;
        loop {
            let step = avail.min(limit - len);
            self.advance(plan, step);
            len += step;
            if len == limit {
                break;
            }
            match self.extent(plan) {
                Some((s, d, more)) if s == src + len && d == dst + len => avail = more,
                _ => break,
            }
        }
        Some(Piece { src_addr, lkey, dst_addr, rkey, len: len as u32 })
    }
}

#[cfg(test)]
mod tests {
    use super::super::seams::{Part, Seams};
    use super::*;
    use std::time::{Duration, Instant};

    fn seams(parts: &[(u64, u64, u32)]) -> PoolSeams {
        let parts = parts.iter().map(|&(addr, len, key)| Part { addr, len, key }).collect();
        Seams::new(parts).expect("valid").into()
    }

    fn pieces(plan: &Plan, max: u32) -> Vec<Piece> {
        let mut c = Cursor::default();
        let mut out = Vec::new();
        while let Some(p) = c.next(plan, 0, max) {
            out.push(p);
        }
        assert!(c.is_done(plan));
        out
    }

    #[test]
    fn k8_4096_contiguous_blocks_of_4_kib_are_8_writes_of_2_mib() {
        let l = Layout::contiguous(1, 4096, 4096).expect("valid");
        let (s, d) = (seams(&[(1 << 20, 16 << 20, 1)]), seams(&[(1 << 30, 16 << 20, 2)]));
        let mut b = PlanBuilder::new((&l, &s), (&l, &d)).expect("same layout");
        for i in 0..4096 {
            b.push(i, i, 1).expect("in range");
        }
        let plan = b.build().expect("small");
        let got = pieces(&plan, 2 << 20);
        assert_eq!(got.len(), 8);
        assert!(got.iter().all(|p| p.len == 2 << 20 && p.lkey == 1 && p.rkey == 2));
        assert!(std::mem::size_of::<Run>() <= 16);
        assert_eq!(plan.runs(), 1);
    }

    /// Whatever is cut into pages is what would have been cut into pieces.
    #[test]
    fn k8_pages_are_the_same_bytes_as_pieces() {
        let (sl, dl) = (Layout::new(6, 300, 10, 3000, 10), Layout::new(6, 400, 10, 10, 60));
        let (sl, dl) = (sl.expect("valid"), dl.expect("valid"));
        let (s, d) = (seams(&[(0x1_0000, 18_000, 1)]), seams(&[(0x9_0000, 24_000, 2)]));
        let mut b = PlanBuilder::new((&sl, &s), (&dl, &d)).expect("same layout");
        for i in 0..100 {
            b.push((i * 37) % 300, 399 - (i * 3) % 400, 1).expect("in range");
        }
        b.push(290, 7, 10).expect("in range");
        let plan = b.build_by_layer().expect("small");
        let bytes_of = |piece: Piece, len: u32| {
            (0..u64::from(len)).map(move |i| (piece.dst_addr + i, piece.src_addr + i)).collect::<Vec<_>>()
        };
        for plan in [plan.clone(), plan.layer(3).expect("one of six")] {
            let mut want: Vec<_> = pieces(&plan, 1000).into_iter().flat_map(|p| bytes_of(p, p.len)).collect();
            if plan.layers == 1 {
                assert!(Cursor::default().next_pages(&plan, 0, u32::MAX, |_| 4096).is_none(), "few");
                continue;
            }
            let (mut c, mut got, mut writes) = (Cursor::default(), Vec::new(), 0);
            while let Some((all, pages)) = c.next_pages(&plan, 0, u32::MAX, |key| key * 1000) {
                assert!((all.lkey, all.rkey) == (1, 2) && all.len <= 1000);
                let mut done = 0;
                while let Some((from, to, left)) = pages.pages.at(done) {
                    let (src_addr, dst_addr) = (all.src_addr + from, all.dst_addr + to);
                    got.extend(bytes_of(Piece { src_addr, dst_addr, ..all }, left));
                    done += u64::from(left);
                }
                assert_eq!(done, u64::from(all.len));
                writes += 1;
            }
            assert!(c.is_done(&plan) && c.paged);
            assert_eq!(writes, 7, "110 blocks of 60 bytes, 16 of them in a thousand");
            want.sort_unstable();
            got.sort_unstable();
            assert_eq!(got, want);
        }
        // Pages and pieces in turns, and pieces that end anywhere.
        let (mut c, mut got, mut turn) = (Cursor::default(), Vec::new(), 0);
        while !c.is_done(&plan) {
            turn += 1;
            if turn % 5 != 0
                && let Some((all, pages)) = c.next_pages(&plan, 0, 0, |_| 200)
            {
                assert!(turn > 1 && all.len == 60, "no less than a block, and no more than the pace");
                for (at, len) in pages.pages.targets_of(all.dst_addr) {
                    got.push((at, len));
                }
            } else if turn == 1 {
                assert!(c.next_pages(&plan, 0, 0, |_| 200).is_none() && !c.paged, "not begun by pages");
                let (all, pages) = c.next_pages(&plan, 0, 60, |_| 200).expect("begun");
                got.extend(pages.pages.targets_of(all.dst_addr));
            } else {
                let piece = c.next(&plan, 0, 7 + turn % 30).expect("not done");
                got.push((piece.dst_addr, piece.len));
            }
        }
        let bytes = |list: &[(u64, u32)]| {
            let mut all: Vec<u64> = list.iter().flat_map(|&(at, len)| at..at + u64::from(len)).collect();
            all.sort_unstable();
            all
        };
        let want: Vec<_> = pieces(&plan, 1000).into_iter().map(|p| (p.dst_addr, p.len)).collect();
        assert_eq!(bytes(&got), bytes(&want));
        let mut begun = Cursor::default();
        begun.next(&plan, 0, 10).expect("not done");
        assert!(begun.next_pages(&plan, 0, u32::MAX, |_| 4096).is_none(), "begun by pieces");
        let mut c = Cursor::default();
        assert!(c.next_pages(&plan, 0, u32::MAX, |_| 0).is_none() && !c.paged, "not taken");
        assert!(c.next_pages(&plan, 0, u32::MAX, |_| 59).is_none() && !c.paged, "not a block");
    }

    /// DeepSeek-V2-Lite: 27 layers × 8,192 tokens of 1,152 bytes, in runs of 47.
    fn mla(run: u32) -> (PlanBuilder, Vec<(u32, u32, u32)>) {
        let l = Layout::contiguous(27, 8192, 1152).expect("valid");
        let s = seams(&[(4096, l.required_bytes(), 1)]);
        let b = PlanBuilder::new((&l, &s), (&l, &s)).expect("same layout");
        let runs = 8192u32.div_ceil(run);
        // The targets are the same runs in reverse order, so that no two runs are neighbours on both sides.
        let list =
            (0..runs).map(|r| (r * run, 8192 - (r * run + run).min(8192), run.min(8192 - r * run))).collect();
        (b, list)
    }

    #[test]
    fn k8_221_184_descriptors_are_planned_in_174_runs() {
        let (mut b, list) = mla(47);
        assert_eq!(list.len(), 175);
        for &(s, d, n) in &list {
            for i in 0..n {
                b.push(s + i, d + i, 1).expect("in range");
            }
        }
        let plan = b.build().expect("small");
        assert_eq!((plan.descriptors(), plan.bytes(), plan.runs()), (221_184, 254_803_968, 175));
        let got = pieces(&plan, 2 << 20);
        assert_eq!(got.len(), 175 * 27);
        assert_eq!(got.iter().map(|p| u64::from(p.len)).sum::<u64>(), plan.bytes());
    }

    /// Reported, not asserted: `cargo test --release k8_plan_time -- --nocapture`.
    #[test]
    fn k8_plan_time() {
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let (mut b, list) = mla(47);
            let t = Instant::now();
            for &(s, d, n) in &list {
                for i in 0..n {
                    b.push(s + i, d + i, 1).expect("in range");
                }
            }
            assert_eq!(b.build().expect("small").descriptors(), 221_184);
            best = best.min(t.elapsed());
        }
        println!("221,184 descriptors planned in {best:?}");
    }

    /// Every byte of every block is copied once, to its place, whatever the seams, strides and limits.
    #[test]
    fn k8_slices_at_both_seams_and_at_max_write() {
        let src_layouts = [(100, 10), (10, 30), (64, 12)];
        let dst_layouts = [(100, 10), (10, 30), (200, 16)];
        for (si, &(sls, sbs)) in src_layouts.iter().enumerate() {
            for &(dls, dbs) in &dst_layouts {
                for max in [1u32, 3, 7, 10, 64, 1000] {
                    let sl = Layout::new(3, 5, 10, sls, sbs).expect("valid");
                    let dl = Layout::new(3, 7, 10, dls, dbs).expect("valid");
                    let s = seams(&[(0x1000, 7, 1), (0x2000, 33, 2), (0x3000, 400, 3)]);
                    let d = seams(&[(0x8000, 21, 8), (0x9000, 1, 9), (0xa000, 900, 10)]);
                    let mut b = PlanBuilder::new((&sl, &s), (&dl, &d)).expect("same layout");
                    let runs = [(0, 2, 2), (2, 4, 1), (4, 0, 1)];
                    for (a, z, n) in runs {
                        b.push(a, z, n).expect("in range");
                    }
                    let plan = b.build().expect("small");
                    assert_eq!(plan.runs(), 2, "neighbouring runs are merged");
                    let mut want = std::collections::BTreeMap::new();
                    for layer in 0..3 {
                        for (a, z, n) in runs {
                            for i in 0..n {
                                for byte in 0..10 {
                                    let from = sl.offset(layer, a + i).expect("inside") + byte;
                                    let to = dl.offset(layer, z + i).expect("inside") + byte;
                                    let (f, lkey, _) = s.rail(0).at(from, &mut 0);
                                    let (t, rkey, _) = d.rail(0).at(to, &mut 0);
                                    assert!(want.insert((t, rkey), (f, lkey)).is_none());
                                }
                            }
                        }
                    }
                    for p in pieces(&plan, max) {
                        assert!(p.len > 0 && p.len <= max);
                        for i in 0..u64::from(p.len) {
                            let got = want.remove(&(p.dst_addr + i, p.rkey));
                            assert_eq!(got, Some((p.src_addr + i, p.lkey)), "case {si} {dls} {max}");
                        }
                    }
                    assert!(want.is_empty());
                }
            }
        }
    }

    /// Lists of runs are planned in one go, whether they are alike or not: the same bytes as one run after the other, and the same errors.
    #[test]
    fn k8_lists_of_runs_are_planned_as_one_run_after_the_other() {
        let l = Layout::contiguous(2, 8, 16).expect("valid");
        let (s, d) = (seams(&[(0, 256, 1)]), seams(&[(4096, 256, 2)]));
        let builder = || PlanBuilder::new((&l, &s), (&l, &d)).expect("same layout");
        let push = |builder: &mut PlanBuilder, src: &[(u32, u32)], dst: &[(u32, u32)]| {
            let limit = |runs: &[(u32, u32)]| runs.iter().map(|run| run.0 + run.1).max().unwrap_or(0);
            let all = src.iter().map(|run| run.1).sum();
            let (from, to) = (Arc::new(src.to_vec()), Arc::new(dst.to_vec()));
            let (src, dst) = (List { runs: &from, limit: limit(src) }, List { runs: &to, limit: limit(dst) });
            builder.push_lists(all, src, dst)
        };
        let blocks = |runs: &[(u32, u32)]| {
            let runs = runs.to_vec();
            runs.into_iter().flat_map(|(first, count)| first..first + count)
        };
        for (what, src, dst) in [
            ("alike", &[(5, 1), (0, 2), (7, 1)][..], &[(2, 1), (6, 2), (0, 1), (4, 1)][..]),
            ("of other lengths", &[(0, 1), (2, 2)], &[(0, 2), (3, 1)]),
            ("one to many", &[(1, 6)], &[(7, 1), (0, 2), (4, 1), (5, 1), (2, 1)]),
            ("many to one", &[(7, 1), (0, 2), (4, 2), (2, 1)], &[(1, 7)]),
            ("unlike in the middle", &[(0, 1), (2, 2), (5, 1), (7, 1)], &[(6, 1), (4, 1), (1, 2), (3, 1)]),
            ("runs of nothing", &[(0, 0), (2, 1), (4, 0), (5, 1)], &[(0, 0), (3, 0), (2, 2)]),
            ("nothing", &[], &[(3, 1)]),
        ] {
            let (mut lists, mut own) = (builder(), builder());
            push(&mut lists, src, dst).expect("in range");
            blocks(src).zip(blocks(dst)).for_each(|(s, d)| own.push(s, d, 1).expect("in range"));
            let (lists, own) = (lists.build().expect("small"), own.build().expect("small"));
            assert_eq!((lists.bytes(), lists.descriptors()), (own.bytes(), own.descriptors()), "{what}");
            assert_eq!(pieces(&lists, 20), pieces(&own, 20), "{what}");
        }
        for (side, src, dst) in [("source", (7, 2), (0, 2)), ("target", (0, 2), (7, 2))] {
            let error = push(&mut builder(), &[(1, 1), src], &[(5, 1), dst]).unwrap_err();
            assert_eq!(error, PlanError::OutOfRange { side, unit: "block", block: 7, count: 2, blocks: 8 });
        }
        for (src, dst) in
            [(&[(u32::MAX - 1, 1)][..], &[(0, 1)][..]), (&[(u32::MAX - 4, 4)], &[(0, 1), (2, 3)])]
        {
            let far = push(&mut builder(), src, dst);
            assert!(matches!(far, Err(PlanError::OutOfRange { side: "source", .. })), "{far:?}");
        }
        // What a grant has beyond the source is not looked at.
        assert_eq!(push(&mut builder(), &[(1, 2)], &[(0, 1), (2, 1), (9, 1)]), Ok(()));
    }

    #[test]
    fn k8_layers_that_lie_together_are_one_extent() {
        let l = Layout::new(4, 8, 16, 16, 64).expect("valid");
        let s = seams(&[(0, 512, 1)]);
        let mut b = PlanBuilder::new((&l, &s), (&l, &s)).expect("same layout");
        b.push(2, 2, 4).expect("in range");
        let plan = b.build().expect("small");
        assert_eq!(pieces(&plan, 4096).len(), 1);
        assert_eq!(plan.bytes(), 256);
    }

    #[test]
    fn r10_plans_are_checked() {
        let l = Layout::contiguous(2, 8, 16).expect("valid");
        let big = seams(&[(0, 256, 1)]);
        assert!(matches!(
            PlanBuilder::new((&l, &seams(&[(0, 255, 1)])), (&l, &big)),
            Err(PlanError::PoolTooSmall { side: "source", .. })
        ));
        let other = Layout::contiguous(2, 8, 8).expect("valid");
        assert!(matches!(
            PlanBuilder::new((&l, &big), (&other, &big)),
            Err(PlanError::Layouts { got: 16, want: 8, .. })
        ));
        let mut b = PlanBuilder::new((&l, &big), (&l, &big)).expect("same layout");
        assert!(matches!(b.push(7, 0, 2), Err(PlanError::OutOfRange { side: "source", .. })));
        assert!(matches!(b.push(0, 8, 1), Err(PlanError::OutOfRange { side: "target", .. })));
        assert!(matches!(b.push(1, 0, u32::MAX), Err(PlanError::OutOfRange { .. })));
        let empty = b.build().expect("small");
        assert!(Cursor::default().is_done(&empty) && empty.bytes() == 0);
        assert!(Seams::new(vec![Part { addr: u64::MAX, len: 2, key: 0 }]).is_err());
        assert!(Seams::new(vec![Part { addr: 0, len: 0, key: 0 }]).is_err());
    }
}
