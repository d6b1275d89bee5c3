//! Blocks with a content that can be recognised.

use landfall::kv::Blocks;

use crate::harness::BLOCK_BYTES;

/// Fills every block with bytes that depend on `seed` and the block's position.
pub(crate) fn fill(blocks: &mut Blocks, seed: u64) {
    for position in 0..blocks.len() {
        blocks.copy_in(0, position, 0, &block(seed, position)).unwrap();
    }
}

/// Number of blocks that do not have the content of [`fill`].
pub(crate) fn wrong(blocks: &Blocks, seed: u64) -> usize {
    let mut got = vec![0; BLOCK_BYTES as usize];
    let mut differs = |position| {
        blocks.copy_out(0, position, 0, &mut got).unwrap();
        got != block(seed, position)
    };
    (0..blocks.len()).filter(|&position| differs(position)).count()
}

fn block(seed: u64, position: u32) -> Vec<u8> {
    let word = (seed << 32 | u64::from(position)).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    word.repeat(BLOCK_BYTES as usize / word.len())
}
