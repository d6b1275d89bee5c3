//! Bytes that can be recognised: each word of a block says which transfer, which layer and which place it belongs to.

use landfall::kv::{Blocks, Heads, LayerView, Layout, LayoutError, Mapping, Order, Shape, ShapeError};

/// Layers of a pool, and the size of a block in each of them.
pub const LAYERS: u32 = 3;
pub const BLOCK_BYTES: u64 = 8 << 10;

/// What blocks hold that no peer may write to: never granted, and those that have come back from a transfer.
pub const GUARD: u64 = 0x6775_6172_6400_0000;

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

/// Of so many blocks of one size, whose heads and tokens are in this order.
pub fn layout(blocks: u32, order: Order) -> Result<Layout, LayoutError> {
    let shape = || -> Result<Shape, ShapeError> { Shape::dense(2, 2, Heads::all(2)?, 1024, order) };
    let shape = shape().expect("a shape of 8 KiB");
    debug_assert_eq!(shape.bytes(), BLOCK_BYTES);
    Layout::contiguous(LAYERS, blocks, BLOCK_BYTES)?.with_shape(shape)
}

/// The block at `position` of the transfer `tag`, in a layer.
pub fn block(tag: u64, layer: u32, position: u32) -> Vec<u8> {
    let place = u64::from(layer) << 32 | u64::from(position);
    let base = mix(tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place);
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for (word, out) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
        out.copy_from_slice(&(base ^ word.wrapping_mul(0x2545_f491_4f6c_dd1d)).to_le_bytes());
    }
    bytes
}

pub fn fill(blocks: &mut Blocks, tag: u64) {
    fill_for(blocks, tag, |position| position);
}

/// The block at each position gets what belongs at `to` of it.
pub fn fill_for(blocks: &mut Blocks, tag: u64, to: impl Fn(u32) -> u32) {
    for layer in 0..LAYERS {
        for position in 0..blocks.len() {
            let bytes = block(tag, layer, to(position));
            blocks.copy_in(layer, position, 0, &bytes).expect("positions of the claim");
        }
    }
}

/// Each block gets what becomes, by the mapping, what belongs there.
pub fn fill_mapped(blocks: &mut Blocks, tag: u64, mapping: &Mapping) {
    for layer in 0..LAYERS {
        for position in 0..blocks.len() {
            let bytes = unmapped(mapping, &block(tag, layer, position));
            blocks.copy_in(layer, position, 0, &bytes).expect("positions of the claim");
        }
    }
}

/// What becomes `wanted` by the mapping, of which the shapes differ in their order only.
pub fn unmapped(mapping: &Mapping, wanted: &[u8]) -> Vec<u8> {
    let (source, target) = (mapping.source(), mapping.target());
    let piece = source.head_bytes() as usize;
    let mut bytes = vec![0; wanted.len()];
    for plane in 0..source.planes() {
        for token in 0..source.tokens() {
            for head in mapping.heads() {
                let at = |shape: &Shape| shape.offset(plane, token, head).expect("it is there") as usize;
                let (from, to) = (at(source), at(target));
                bytes[from..from + piece].copy_from_slice(&wanted[to..to + piece]);
            }
        }
    }
    bytes
}

/// What of `blocks` is not as [`fill`] leaves it: the place, and how many of its words are others.
pub fn differs(blocks: &Blocks, tag: u64) -> Option<String> {
    differs_from(blocks, tag, |position| position)
}

/// The same, where each position has what belongs at `from` of it.
pub fn differs_from(blocks: &Blocks, tag: u64, from: impl Fn(u32) -> u32) -> Option<String> {
    let mut got = vec![0; BLOCK_BYTES as usize];
    (0..LAYERS).flat_map(|layer| (0..blocks.len()).map(move |position| (layer, position))).find_map(
        |(layer, position)| {
            blocks.copy_out(layer, position, 0, &mut got).expect("positions of the claim");
            let id = blocks.id(position).unwrap_or(u32::MAX);
            other(&got, tag, layer, from(position)).map(|what| format!("{what}, block {id} at {position}"))
        },
    )
}

/// The same of one layer.
pub fn layer_differs(layer: LayerView<'_>, tag: u64) -> Option<String> {
    let mut got = vec![0; BLOCK_BYTES as usize];
    (0..layer.len()).find_map(|position| {
        layer.copy_out(position, 0, &mut got).expect("positions of the claim");
        other(&got, tag, layer.layer(), position)
    })
}

fn other(got: &[u8], tag: u64, layer: u32, position: u32) -> Option<String> {
    let expected = block(tag, layer, position);
    if got == expected {
        return None;
    }
    let other = got.chunks(8).zip(expected.chunks(8)).filter(|(a, b)| a != b).count();
    Some(format!("{other} of {} words of position {position} in layer {layer} of {tag:#x}", BLOCK_BYTES / 8))
}
