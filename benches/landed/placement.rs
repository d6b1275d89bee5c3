//! In which order the blocks of a write lie in the two pools. Both processes compute the same.

use landfall::kv::{Blocks, KvPool, PoolError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In order on both sides.
    Flat,
    /// In order at the source, each target somewhere else.
    Targets,
    /// In runs of so many neighbours on both sides, whose order differs between the sides.
    Runs(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Source,
    Target,
}

impl Order {
    /// Takes the `count` blocks of one write at one end.
    pub fn claim(self, pool: &KvPool, count: u32, end: End) -> Result<Blocks, PoolError> {
        match (self, end) {
            (Self::Flat, _) | (Self::Targets, End::Source) => pool.try_alloc(count),
            (Self::Targets, End::Target) => pool.claim(&shuffled_runs(count, 1, 1)),
            (Self::Runs(run), End::Source) => pool.claim(&shuffled_runs(count, run, 2)),
            (Self::Runs(run), End::Target) => pool.claim(&shuffled_runs(count, run, 3)),
        }
    }

    /// As it is said to the receiver.
    pub fn to_word(self) -> String {
        match self {
            Self::Flat => "flat".to_owned(),
            Self::Targets => "targets".to_owned(),
            Self::Runs(run) => format!("runs{run}"),
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "flat" => Some(Self::Flat),
            "targets" => Some(Self::Targets),
            _ => word.strip_prefix("runs")?.parse().ok().filter(|&run| run > 0).map(Self::Runs),
        }
    }
}

/// The ids `0..count` with runs of `run` kept together, each run at a place of its own: for each run of positions, the
/// ids where it lies.
fn shuffled_runs(count: u32, run: u32, seed: u64) -> Vec<u32> {
    let runs = count.div_ceil(run);
    let mut order: Vec<u32> = (0..runs).collect();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for i in (1..order.len()).rev() {
        // xorshift64 (Marsaglia 2003): fixed, so that both processes and all rounds do the same.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(i, (state % (i as u64 + 1)) as usize);
    }
    // Positions are in runs as they come; ids are handed out to the runs in the shuffled order.
    let mut ids = vec![0; count as usize];
    let mut id = 0;
    for r in order {
        for position in r * run..count.min((r + 1) * run) {
            ids[position as usize] = id;
            id += 1;
        }
    }
    ids
}
