//! What is written, and read: sizes, layouts and repetitions. Data only.

use landfall::kv::{Layout, LayoutError};

use crate::placement::Order;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// As many bytes as the peers register.
const POOL: u64 = 256 * MIB;

/// One line of the table: writes of `blocks` blocks in `layers` layers.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    pub layers: u32,
    pub block_bytes: u64,
    /// Blocks of one write.
    pub blocks: u32,
    /// Where they lie. When it is not flat, a flat write of the same bytes is measured in turn with it.
    pub order: Order,
    /// Whether the request names every block (position by position) instead of saying "all of them, in order".
    pub pairs: bool,
    /// Repetitions that count, as the peers' script has them.
    pub reps: usize,
    /// Left out of a quick run.
    pub long: bool,
    /// It is also read, in turn with the writes.
    pub reads: bool,
}

/// A write of one block of `bytes`.
const fn flat(name: &'static str, bytes: u64, reps: usize) -> Case {
    Case {
        name,
        layers: 1,
        block_bytes: bytes,
        blocks: 1,
        order: Order::Flat,
        pairs: false,
        reps,
        long: bytes > 8 * MIB,
        reads: true,
    }
}

/// Blocks in order at the source, to targets in an order of their own.
const fn many(name: &'static str, bytes: u64) -> Case {
    Case {
        name,
        layers: 1,
        block_bytes: bytes,
        blocks: 4096,
        order: Order::Targets,
        pairs: true,
        reps: 5,
        long: false,
        reads: true,
    }
}

pub const CASES: &[Case] = &[
    flat("4KiB", 4 * KIB, 300),
    flat("64KiB", 64 * KIB, 300),
    flat("1MiB", MIB, 30),
    flat("8MiB", 8 * MIB, 7),
    flat("256MiB", 256 * MIB, 5),
    many("4096x16KiB", 16 * KIB),
    many("4096x64KiB", 64 * KIB),
    // DeepSeek-V2-Lite's MLA cache: 27 layers of 8,192 tokens of 1,152 bytes, page 1, pages in runs of 47.
    Case {
        name: "pages221184",
        layers: 27,
        block_bytes: 1152,
        blocks: 8192,
        order: Order::Runs(47),
        pairs: true,
        reps: 5,
        long: true,
        reads: false,
    },
];

impl Case {
    /// Bytes of one write.
    pub fn bytes(&self) -> u64 {
        u64::from(self.layers) * self.block_bytes * u64::from(self.blocks)
    }

    /// A pool that is as large as the peers', and holds one write at least.
    pub fn layout(&self) -> Result<Layout, LayoutError> {
        let fit = POOL / (u64::from(self.layers) * self.block_bytes);
        // The pages fill the pool to the byte where they are neighbours: a spare block would keep layers apart.
        let blocks = if self.layers > 1 { self.blocks } else { (fit as u32).max(self.blocks) };
        Layout::contiguous(self.layers, blocks, self.block_bytes)
    }

    /// Grants that are asked for at once. The peers write one buffer again and again, which stays in the cache; so
    /// small writes go round in 1 MiB, and larger ones always to the same place.
    pub fn ahead(&self) -> usize {
        (MIB / self.bytes()).clamp(1, 64) as usize
    }
}
