//! What of a pool the peer of one channel may reach, on devices that ask: blocks under a grant of that channel, for as long as it is
//! open, or they are in quarantine. Only the soft provider asks; see `SECURITY.md` for the others.
//!
//! It is asked for every piece of payload, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::Layout;
use super::pool::KvPool;
use crate::pages::Pages;
use crate::provider::{self, AccessFlags};

/// The blocks of a pool that are exposed to one peer.
#[derive(Debug)]
pub(super) struct PoolExposure {
    /// Where the pool begins.
    base: u64,
    layout: Layout,
    /// By block: how many grants expose it to be written, and to be read.
    written: Box<[AtomicU32]>,
    read: Box<[AtomicU32]>,
}

/// Nothing at all: of a queue pair that belongs to no channel yet.
#[derive(Debug)]
pub(super) struct Nothing;

impl provider::Exposure for Nothing {
    fn exposes(&self, _: u64, _: u64, _: AccessFlags) -> bool {
        false
    }
}

/// Blocks that are exposed for as long as this is there.
#[derive(Debug)]
pub(super) struct Exposed {
    of: Arc<PoolExposure>,
    runs: Box<[(u32, u32)]>,
    to: To,
}

/// What the peer does to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Write,
    Read,
}

impl PoolExposure {
    /// Of no block yet. None where no device of the pool asks.
    pub(super) fn of(pool: &KvPool) -> Option<Arc<Self>> {
        let asked = pool.devices().iter().any(|device| !device.pd.device().is_rdma());
        let base = pool.regions().first()?.addr();
        asked.then(|| Arc::new(Self::new(base, *pool.layout())))
    }

    fn new(base: u64, layout: Layout) -> Self {
        let none = || (0..layout.blocks()).map(|_| AtomicU32::new(0)).collect();
        Self { base, layout, written: none(), read: none() }
    }

    /// Exposes blocks of the pool, by their runs.
    pub(super) fn expose(self: &Arc<Self>, runs: &[(u32, u32)], to: To) -> Exposed {
        let exposed = Exposed { of: self.clone(), runs: runs.into(), to };
        exposed.each(|block| _ = block.fetch_add(1, Ordering::Release));
        exposed
    }

    fn counts(&self, to: To) -> &[AtomicU32] {
        match to {
            To::Write => &self.written,
            To::Read => &self.read,
        }
    }

    /// Whether every one of these bytes of the pool is in a block that is exposed.
    fn has(&self, mut at: u64, mut len: u64, to: To) -> bool {
        let (layout, counts) = (&self.layout, self.counts(to));
        let (blocks, layers) = (u64::from(layout.blocks()), u64::from(layout.layers()));
        // Layers are outside of blocks, or inside.
        let outside = layers == 1 || layout.layer_stride() >= layout.block_stride() && blocks > 1;
        while len > 0 {
            let (layer, block, within) = if outside || blocks == 1 {
                let (layer, rest) = split(at, layout.layer_stride(), layers);
                let (block, within) = split(rest, layout.block_stride(), blocks);
                (layer, block, within)
            } else {
                let (block, rest) = split(at, layout.block_stride(), blocks);
                let (layer, within) = split(rest, layout.layer_stride(), layers);
                (layer, block, within)
            };
            let in_block = layer < layers && block < blocks && within < layout.block_bytes();
            // Fewer blocks than there are u32s.
            if !in_block || counts[block as usize].load(Ordering::Acquire) == 0 {
                return false;
            }
            let step = len.min(layout.block_bytes() - within);
            // Beyond what can be addressed there is nothing more.
            let Some(next) = at.checked_add(step) else { return len == step };
            (at, len) = (next, len - step);
        }
        true
    }
}

/// Which of `count` elements, and where in it. A dimension of one has no stride to speak of.
fn split(at: u64, stride: u64, count: u64) -> (u64, u64) {
    if count == 1 { (0, at) } else { (at / stride, at % stride) }
}

impl provider::Exposure for PoolExposure {
    fn exposes(&self, addr: u64, len: u64, access: AccessFlags) -> bool {
        let to = match access {
            AccessFlags::REMOTE_WRITE => To::Write,
            AccessFlags::REMOTE_READ => To::Read,
            // A channel has no atomics.
            _ => return false,
        };
        addr.checked_sub(self.base).is_some_and(|at| self.has(at, len, to))
    }

    /// Whole blocks of some layers are looked up once for all of those.
    fn exposes_pages(&self, addr: u64, pages: &Pages, most: u64) -> Option<bool> {
        let layout = &self.layout;
        let first = addr.checked_sub(self.base).filter(|at| at.is_multiple_of(layout.layer_stride().max(1)));
        let first = first.map(|at| at / layout.layer_stride().max(1));
        let ours = (layout.layer_stride(), layout.block_stride(), layout.block_bytes())
            == (pages.target.layer, pages.target.block, u64::from(pages.piece));
        let inside = first.and_then(|first| first.checked_add(pages.layers.into()));
        if ours && inside.is_some_and(|end| end <= layout.layers().into()) {
            let block = |b: u32| self.written.get(b as usize).is_some_and(|n| n.load(Ordering::Acquire) > 0);
            return Some(pages.targets().all(block));
        }
        let exposes = |(at, len): (u64, u32)| self.exposes(at, len.into(), AccessFlags::REMOTE_WRITE);
        (pages.pieces() <= most).then(|| pages.targets_of(addr).all(exposes))
    }
}

impl Exposed {
    fn each(&self, mut change: impl FnMut(&AtomicU32)) {
        let counts = self.of.counts(self.to);
        for &(first, len) in &self.runs {
            // Runs of a claim are within its pool.
            counts[first as usize..][..len as usize].iter().for_each(&mut change);
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.each(|block| _ = block.fetch_sub(1, Ordering::Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{Strides, pair};
    use crate::provider::Exposure;

    #[test]
    fn k6_pages_are_exposed_when_each_of_their_pieces_is_however_they_are_described() {
        let layout = Layout::new(4, 8, 16, 160, 16).unwrap();
        let exposure = Arc::new(PoolExposure::new(1000, layout));
        let _written = exposure.expose(&[(1, 2), (5, 1)], To::Write);
        let of = |layer, block, piece, layers, targets: &[u32]| {
            let strides = Strides { layer, block };
            let pairs = targets.iter().map(|&t| pair(0, t)).collect();
            Pages { piece, layers, source: strides, target: strides, pairs }
        };
        for (what, at, pages, exposed) in [
            ("all layers", 1000, of(160, 16, 16, 4, &[1, 2, 5]), true),
            ("some layers", 1160, of(160, 16, 16, 3, &[5, 1]), true),
            ("a layer too many", 1160, of(160, 16, 16, 4, &[5, 1]), false),
            ("a block that is not", 1000, of(160, 16, 16, 4, &[1, 3]), false),
            ("no such block", 1000, of(160, 16, 16, 1, &[1, 10]), false),
            ("before the pool", 840, of(160, 16, 16, 1, &[1]), false),
            ("halves of blocks", 1000, of(160, 8, 8, 4, &[2, 3, 4, 5, 11]), true),
            ("halves of others", 1000, of(160, 8, 8, 4, &[2, 6]), false),
            ("strides that leave the blocks", 1000, of(170, 16, 16, 2, &[2]), false),
            ("from a block on", 1016, of(160, 16, 16, 4, &[0, 1, 4]), true),
            ("from a block on, too far", 1016, of(160, 16, 16, 4, &[0, 5]), false),
        ] {
            assert_eq!(exposure.exposes_pages(at, &pages, 20), Some(exposed), "{what}");
        }
        // Whole blocks are few things to look at, in however many layers, and others are not.
        assert_eq!(exposure.exposes_pages(1000, &of(160, 16, 16, 4, &[1, 2, 5]), 3), Some(true));
        assert_eq!(exposure.exposes_pages(1000, &of(160, 8, 8, 4, &[2, 3, 4, 5, 11]), 19), None);
    }

    const BASE: u64 = 0x7000;

    /// Byte by byte, in every nesting, with gaps and without: exactly the bytes of exposed blocks are.
    #[test]
    fn k6_exactly_the_bytes_of_granted_blocks_are_exposed() {
        for (layers, blocks, bytes, layer_stride, block_stride) in [
            (2, 4, 8, 32, 8),
            (2, 4, 8, 40, 9),
            (3, 4, 8, 8, 24),
            (3, 4, 8, 9, 30),
            (1, 4, 8, 0, 8),
            (1, 4, 8, 1, 11),
            (3, 1, 8, 8, 0),
            (3, 1, 8, 10, 1),
            (1, 1, 8, 0, 0),
        ] {
            let layout = Layout::new(layers, blocks, bytes, layer_stride, block_stride).unwrap();
            let exposure = Arc::new(PoolExposure::new(BASE, layout));
            let granted = |block: u32| block == 0 || block == 2;
            let _granted: Vec<_> = (0..blocks)
                .filter(|&block| granted(block))
                .map(|block| exposure.expose(&[(block, 1)], To::Write))
                .collect();
            let all = layout.required_bytes();
            let mut open = vec![false; all as usize + 1];
            for (layer, block) in (0..layers).flat_map(|l| (0..blocks).map(move |b| (l, b))) {
                let at = u64::from(layer) * layer_stride + u64::from(block) * block_stride;
                if granted(block) {
                    open[at as usize..][..bytes as usize].fill(true);
                }
            }
            for (at, len) in (0..all).flat_map(|at| (1..=all + 1 - at).map(move |len| (at, len))) {
                let expected = open[at as usize..][..len as usize].iter().all(|&open| open);
                let got = exposure.exposes(BASE + at, len, AccessFlags::REMOTE_WRITE);
                assert_eq!(got, expected, "{layout:?} {at} {len}");
                assert!(!exposure.exposes(BASE + at, len, AccessFlags::REMOTE_READ));
            }
        }
    }

    #[test]
    fn k6_a_block_is_exposed_until_its_last_grant_ends_and_nothing_outside_ever() {
        let exposure = Arc::new(PoolExposure::new(BASE, Layout::contiguous(2, 4, 8).unwrap()));
        let reads = |len| exposure.exposes(BASE + 8, len, AccessFlags::REMOTE_READ);
        let (one, other) = (exposure.expose(&[(1, 1)], To::Read), exposure.expose(&[(1, 2)], To::Read));
        assert!(reads(8) && reads(16) && !reads(17));
        drop(other);
        assert!(reads(8) && !reads(9));
        drop(one);
        assert!(!reads(1));
        let _all = exposure.expose(&[(0, 4)], To::Write);
        let writes = |addr, len| exposure.exposes(addr, len, AccessFlags::REMOTE_WRITE);
        assert!(writes(BASE, 64) && !writes(BASE, 65) && !writes(BASE - 1, 1) && !writes(u64::MAX, 1));
        assert!(!writes(BASE, u64::MAX) && !writes(BASE + 64, 1));
        assert!(!exposure.exposes(BASE, 8, AccessFlags::REMOTE_ATOMIC));
        assert!(!Nothing.exposes(BASE, 1, AccessFlags::REMOTE_WRITE));
    }
}
