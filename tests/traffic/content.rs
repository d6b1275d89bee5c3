//! Bytes that can be recognised: each word of a block says which transfer and which place it belongs to.

use landfall::kv::Blocks;

/// Blocks of a pool, and their size: 1 MiB in all, the most that the `tiny` profile registers.
pub const BLOCKS: u32 = 64;
pub const BLOCK_BYTES: u64 = 16 << 10;

/// A small seeded generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x6a09_e667_f3bc_c908)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The block at `position` of the transfer `tag`.
fn block(tag: u64, position: u32) -> Vec<u8> {
    let base = mix(tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(position));
    (0..BLOCK_BYTES / 8)
        .flat_map(|word| (base ^ word.wrapping_mul(0x2545_f491_4f6c_dd1d)).to_le_bytes())
        .collect()
}

pub fn fill(blocks: &mut Blocks, tag: u64) {
    fill_for(blocks, tag, |position| position);
}

/// The block at each position gets what belongs at `to` of it.
pub fn fill_for(blocks: &mut Blocks, tag: u64, to: impl Fn(u32) -> u32) {
    for position in 0..blocks.len() {
        blocks.copy_in(0, position, 0, &block(tag, to(position))).expect("positions of the claim");
    }
}

/// What of `blocks` is not as [`fill`] leaves it: the position, and how many of its words are others.
pub fn differs(blocks: &Blocks, tag: u64) -> Option<String> {
    let mut got = vec![0; BLOCK_BYTES as usize];
    (0..blocks.len()).find_map(|position| {
        blocks.copy_out(0, position, 0, &mut got).expect("positions of the claim");
        let expected = block(tag, position);
        let other = got.chunks(8).zip(expected.chunks(8)).filter(|(a, b)| a != b).count();
        (other > 0).then(|| {
            let id = blocks.id(position).unwrap_or(u32::MAX);
            format!("{other} of {} words of block {id} (position {position}) of {tag:#x}", BLOCK_BYTES / 8)
        })
    })
}
