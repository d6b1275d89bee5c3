//! A pool of blocks in the simulation: the bytes, and who may touch which block now.

use super::super::{Part, PoolSeams, Seams};
use super::rails::RAILS;
use crate::kv::layout::Layout;

pub(super) const BLOCKS: u32 = 48;
pub(super) const BLOCK_BYTES: u64 = 40;

/// Whose a block is: the peer's index, and the number of a grant (targets) or of a transfer (sources).
pub(super) type Owner = (usize, u64);

/// The user's view and the device's.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) layout: Layout,
    pub(super) bytes: Vec<u8>,
    /// As the device of each rail sees it.
    pub(super) parts: Vec<Vec<Part>>,
    pub(super) owner: Vec<Option<Owner>>,
}

impl Pool {
    /// Memory in three regions with gaps between their addresses.
    pub(super) fn new(layout: Layout, base: u64, key: u32) -> Self {
        let total = layout.required_bytes();
        let parts = (0..RAILS as u64).map(|rail| {
            let (a, b) = (total / 3 + 1 + 5 * rail, total / 2 + 7 + 11 * rail);
            let cuts = [(0, a), (a, b), (b, total)];
            let parts = cuts.iter().enumerate().map(|(i, &(s, e))| Part {
                addr: base + s + 4096 * i as u64 + (rail << 40),
                len: e - s,
                key: key + i as u32 + 100 * rail as u32,
            });
            parts.collect()
        });
        let owner = vec![None; layout.blocks() as usize];
        Self { layout, bytes: vec![0xee; total as usize], parts: parts.collect(), owner }
    }

    /// For a channel of so many rails.
    pub(super) fn seams(&self, rails: usize) -> PoolSeams {
        let seams = self.parts[..rails].iter().map(|p| Seams::new(p.clone()).expect("parts are valid"));
        PoolSeams::new(seams.collect())
    }

    /// Offset of an access that the device of a rail would allow.
    pub(super) fn offset(&self, addr: u64, len: u32, key: u32, rail: usize) -> usize {
        let mut start = 0;
        for p in &self.parts[rail] {
            if p.key == key {
                assert!(
                    addr >= p.addr && addr + u64::from(len) <= p.addr + p.len,
                    "r10, k8: outside of the region"
                );
                return (start + addr - p.addr) as usize;
            }
            start += p.len;
        }
        panic!("r10: no region of rail {rail} has key {key}");
    }

    /// Blocks that a range of bytes touches, perhaps repeatedly.
    pub(super) fn blocks_at(&self, offset: usize, len: usize) -> impl Iterator<Item = u32> + use<> {
        let (start, end) = (offset as u64, (offset + len) as u64);
        let first = self.layout.offset(0, 0).expect("inside");
        let stride = self.layout.offset(0, 1).expect("inside") - first;
        let (layers, blocks) = (u64::from(self.layout.layers()), u64::from(self.layout.blocks()));
        let layer = match layers {
            1 => u64::MAX,
            _ => self.layout.offset(1, 0).expect("inside") - first,
        };
        (0..layers)
            .flat_map(move |l| {
                let base = first + if l == 0 { 0 } else { l * layer };
                let low = start.saturating_sub(base) / stride;
                let high = end.saturating_sub(base).div_ceil(stride).min(blocks);
                (low..high).filter(move |b| {
                    let at = base + b * stride;
                    at < end && start < at + BLOCK_BYTES
                })
            })
            .map(|b| b as u32)
    }

    pub(super) fn free_blocks(&self) -> Vec<u32> {
        (0..self.layout.blocks()).filter(|&b| self.owner[b as usize].is_none()).collect()
    }

    pub(super) fn take(&mut self, blocks: &[u32], owner: Owner) {
        for &b in blocks {
            let before = self.owner[b as usize].replace(owner);
            assert_eq!(before, None, "r1: block {b} is handed out twice");
        }
    }

    fn for_each_byte(&mut self, blocks: &[u32], mut f: impl FnMut(usize, u64, u64, &mut u8)) {
        for (i, &block) in blocks.iter().enumerate() {
            for layer in 0..self.layout.layers() {
                let at = self.layout.offset(layer, block).expect("inside") as usize;
                let bytes = &mut self.bytes[at..at + BLOCK_BYTES as usize];
                for (byte, v) in bytes.iter_mut().enumerate() {
                    f(i, u64::from(layer), byte as u64, v);
                }
            }
        }
    }

    /// Content that depends on transfer, position, layer and byte, so that a misplaced block shows.
    pub(super) fn fill(&mut self, blocks: &[u32], tag: u64) {
        self.for_each_byte(blocks, |i, layer, byte, v| *v = pattern(tag, i as u64, layer, byte));
    }

    pub(super) fn check(&mut self, blocks: &[u32], tag: u64) {
        self.for_each_byte(blocks, |i, layer, byte, v| {
            assert_eq!(
                *v,
                pattern(tag, i as u64, layer, byte),
                "k1, k3: block {i}, layer {layer}, byte {byte} is torn"
            );
        });
    }

    /// The blocks are free again, and their content is gone.
    pub(super) fn release(&mut self, blocks: &[u32], owner: Owner) {
        for &b in blocks {
            assert_eq!(self.owner[b as usize].take(), Some(owner), "r1: block {b} was somebody else's");
        }
        self.for_each_byte(blocks, |_, _, _, v| *v = 0xee);
    }

    /// The process that had it is gone.
    pub(super) fn reset(&mut self) {
        self.owner.fill(None);
        self.bytes.fill(0xee);
    }
}

fn pattern(tag: u64, i: u64, layer: u64, byte: u64) -> u8 {
    (tag.wrapping_mul(31) ^ i.wrapping_mul(97) ^ layer.wrapping_mul(7) ^ byte).wrapping_mul(0x9e37_79b1) as u8
}
