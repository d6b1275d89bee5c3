//! An order of no pattern. The tests of the library that need a GPU have it, too.

/// Each number below `n` once, in an order of no pattern.
pub(crate) fn shuffled(n: u32, seed: u64) -> Vec<u32> {
    let mut all: Vec<u32> = (0..n).collect();
    let mut state = seed | 1;
    for i in (1..all.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.swap(i, (state % (i as u64 + 1)) as usize);
    }
    all
}
