//! What is written: sizes and repetitions. As in landfall's `landed`, and as in the peers' own scripts.

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A WRITE is one message, and that is at most so large on rxe.
pub(crate) const MAX_WRITE: usize = 8 * MIB;
/// WRITEs of one case that are in flight at once: below the crate's default of 10 send requests.
pub(crate) const DEPTH: usize = 8;

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Bytes of one block.
    pub(crate) block: usize,
    pub(crate) blocks: usize,
    pub(crate) reps: usize,
}

const fn case(name: &'static str, block: usize, blocks: usize, reps: usize) -> Case {
    Case { name, block, blocks, reps }
}

pub(crate) const CASES: [Case; 6] = [
    case("4KiB", 4 * KIB, 1, 300),
    case("64KiB", 64 * KIB, 1, 300),
    case("1MiB", MIB, 1, 30),
    case("8MiB", 8 * MIB, 1, 7),
    case("256MiB", 256 * MIB, 1, 5),
    case("4096x16KiB", 16 * KIB, 4096, 5),
];

impl Case {
    pub(crate) fn bytes(&self) -> usize {
        self.block * self.blocks
    }

    /// The ranges of its WRITEs: blocks, cut where they are too large for one.
    pub(crate) fn writes(&self) -> Vec<std::ops::Range<usize>> {
        let step = self.block.min(MAX_WRITE);
        (0..self.bytes()).step_by(step).map(|at| at..(at + step).min(self.bytes())).collect()
    }
}
