//! What of a pool the peer of one channel may reach, on devices that ask: blocks under a grant of that channel, for as long as it is
//! open, or they are in quarantine. Only the soft provider asks; see `SECURITY.md` for the others.
//!
//! It is asked for every piece of payload, without a lock, and for neighbours at once: a piece may be a whole layer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::layout::Layout;
use super::lock;
use super::pool::KvPool;
use crate::pages::Pages;
use crate::provider::{self, AccessFlags};

/// The blocks of a pool that are exposed to one peer.
#[derive(Debug)]
pub(super) struct PoolExposure {
    /// Where the pool begins.
    base: u64,
    layout: Layout,
    /// It is memory of a GPU, which copies beside the program: what was asked about may be copied later.
    on_gpu: bool,
    written: Open,
    read: Open,
}

/// Blocks that may be reached.
#[derive(Debug)]
struct Open {
    /// By block: how many grants expose it.
    counts: Mutex<Box<[u32]>>,
    /// A bit a block: whether one does. Changed under the lock of the counts.
    bits: Box<[AtomicU64]>,
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
        let region = pool.regions().first()?;
        asked.then(|| {
            Arc::new(Self { on_gpu: region.is_device(), ..Self::new(region.addr(), *pool.layout()) })
        })
    }

    fn new(base: u64, layout: Layout) -> Self {
        let open = || Open::new(layout.blocks());
        Self { base, layout, on_gpu: false, written: open(), read: open() }
    }

    /// Exposes blocks of the pool, by their runs.
    pub(super) fn expose(self: &Arc<Self>, runs: &[(u32, u32)], to: To) -> Exposed {
        self.open(to).add(runs);
        Exposed { of: self.clone(), runs: runs.into(), to }
    }

    fn open(&self, to: To) -> &Open {
        match to {
            To::Write => &self.written,
            To::Read => &self.read,
        }
    }

    /// Whether every one of these bytes of the pool is in a block that is exposed.
    fn has(&self, mut at: u64, mut len: u64, to: To) -> bool {
        let (layout, open) = (&self.layout, self.open(to));
        let (blocks, layers) = (u64::from(layout.blocks()), u64::from(layout.layers()));
        let (bytes, stride) = (layout.block_bytes(), layout.block_stride());
        // Layers are outside of blocks, or inside.
        let outside = layers == 1 || blocks == 1 || layout.layer_stride() >= stride;
        // What of a block is in one piece: all of its layers, where these are inside and have no gaps.
        let unit = if !outside && layout.layer_stride() == bytes { bytes * layers } else { bytes };
        while len > 0 {
            let (layer, block, within) = if outside {
                let (layer, rest) = split(at, layout.layer_stride(), layers);
                let (block, within) = split(rest, stride, blocks);
                (layer, block, within)
            } else {
                let (block, rest) = split(at, stride, blocks);
                let (layer, within) =
                    if unit == bytes { split(rest, layout.layer_stride(), layers) } else { (0, rest) };
                (layer, block, within)
            };
            if layer >= layers || block >= blocks || within >= unit {
                return false;
            }
            // With those that follow without a gap.
            let row = if unit == stride { blocks - block } else { 1 };
            let n = within.saturating_add(len).div_ceil(unit).min(row);
            // Fewer blocks than there are u32s.
            if !open.has_all(block as usize, n as usize) {
                return false;
            }
            let step = len.min(n * unit - within);
            // Beyond what can be addressed there is nothing more.
            let Some(next) = at.checked_add(step) else { return len == step };
            (at, len) = (next, len - step);
        }
        true
    }
}

impl Exposed {
    /// Of memory of a GPU: when this is dropped, a copy that was asked about before may still be under way.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.of.on_gpu
    }
}

impl Open {
    fn new(blocks: u32) -> Self {
        let blocks = blocks as usize;
        Self {
            counts: Mutex::new(vec![0; blocks].into()),
            bits: (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn add(&self, runs: &[(u32, u32)]) {
        let mut counts = lock(&self.counts);
        each(runs, |word, mask| {
            mask.for_each_block(word, |block| counts[block] += 1);
            self.bits[word].fetch_or(mask.0, Ordering::Release);
        });
    }

    fn remove(&self, runs: &[(u32, u32)]) {
        let mut counts = lock(&self.counts);
        each(runs, |word, mask| {
            let mut closed = 0;
            mask.for_each_block(word, |block| {
                counts[block] -= 1;
                closed |= u64::from(counts[block] == 0) << (block % 64);
            });
            self.bits[word].fetch_and(!closed, Ordering::Release);
        });
    }

    fn has(&self, block: u32) -> bool {
        let word = self.bits.get(block as usize / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (block % 64) & 1 == 1)
    }

    /// Of `n` blocks from `first` on, which there are.
    fn has_all(&self, first: usize, n: usize) -> bool {
        words(first, n).all(|(word, Mask(mask))| self.bits[word].load(Ordering::Acquire) & mask == mask)
    }
}

/// Some of the 64 blocks of a word.
#[derive(Clone, Copy)]
struct Mask(u64);

impl Mask {
    fn for_each_block(self, word: usize, mut f: impl FnMut(usize)) {
        let mut left = self.0;
        while left != 0 {
            f(word * 64 + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

/// `n` blocks from `first` on, by words.
fn words(first: usize, n: usize) -> impl Iterator<Item = (usize, Mask)> {
    let end = first + n;
    (first / 64..end.div_ceil(64)).map(move |word| {
        let (from, to) = (first.max(word * 64) - word * 64, end.min(word * 64 + 64) - word * 64);
        (word, Mask(u64::MAX >> (64 - (to - from)) << from))
    })
}

/// The blocks of runs, which are within their pool, by words.
fn each(runs: &[(u32, u32)], mut f: impl FnMut(usize, Mask)) {
    for &(first, n) in runs.iter().filter(|run| run.1 > 0) {
        words(first as usize, n as usize).for_each(|(word, mask)| f(word, mask));
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
            return Some(pages.targets().all(|block| self.written.has(block)));
        }
        let exposes = |(at, len): (u64, u32)| self.exposes(at, len.into(), AccessFlags::REMOTE_WRITE);
        (pages.pieces() <= most).then(|| pages.targets_of(addr).all(exposes))
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.of.open(self.to).remove(&self.runs);
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
            (2, 4, 8, 40, 8),
            (3, 4, 8, 8, 24),
            (3, 4, 8, 8, 25),
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

    /// Of more blocks than a word has bits: every range of them, with grants that overlap and end one after the other.
    #[test]
    fn k6_rows_of_blocks_are_exposed_as_each_of_them_is() {
        const BLOCKS: u32 = 200;
        let exposure = Arc::new(PoolExposure::new(BASE, Layout::contiguous(1, BLOCKS, 2).unwrap()));
        let grants: [&[(u32, u32)]; 5] = [
            &[(3, 70), (128, 64)],
            &[(73, 1), (0, 1)],
            &[(60, 140)],
            &[(63, 1), (64, 1), (127, 2)],
            &[(5, 0)],
        ];
        let mut counts = [0; BLOCKS as usize];
        let mut count = |runs: &[(u32, u32)], by: i32| {
            runs.iter().flat_map(|&(first, n)| first..first + n).for_each(|b| counts[b as usize] += by);
            for first in 0..u64::from(BLOCKS) {
                for n in 1..=u64::from(BLOCKS) - first {
                    let all = counts[first as usize..][..n as usize].iter().all(|&n| n > 0);
                    let (addr, len) = (BASE + first * 2 + 1, n * 2 - 1);
                    assert_eq!(
                        exposure.exposes(addr, len, AccessFlags::REMOTE_WRITE),
                        all,
                        "{n} from {first}"
                    );
                }
            }
        };
        let open: Vec<_> = grants
            .iter()
            .map(|runs| {
                let exposed = exposure.expose(runs, To::Write);
                count(runs, 1);
                exposed
            })
            .collect();
        for (exposed, runs) in open.into_iter().zip(grants) {
            drop(exposed);
            count(runs, -1);
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
