//! Bytes that can be recognised: each word of a block says which transfer, which layer, which token and head it belongs to.

use landfall::kv::{Blocks, LayerView, Layout, Mapping, TokenSpan};

use super::mapped::copied;

/// Layers of a pool.
pub const LAYERS: u32 = 3;

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

/// So many bytes that belong at `place` of the transfer `tag`, in a layer.
fn words(tag: u64, layer: u32, place: u64, len: usize) -> Vec<u8> {
    let base = mix(mix(tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(layer)) ^ place);
    let words = (0u64..).map(|word| (base ^ word.wrapping_mul(0x2545_f491_4f6c_dd1d)).to_le_bytes());
    words.take(len.div_ceil(8)).flatten().take(len).collect()
}

/// A head of a token, counted over all blocks of the transfer.
pub fn head(tag: u64, layer: u32, plane: u32, token: u32, head: u32, bytes: u32) -> Vec<u8> {
    let place = 1 << 63 | u64::from(plane) << 48 | u64::from(head) << 32 | u64::from(token);
    words(tag, layer, place, bytes as usize)
}

/// The block at `position` of the transfer `tag`, in a layer: its heads, and what lies in their gaps.
pub fn block(layout: &Layout, tag: u64, layer: u32, position: u32) -> Vec<u8> {
    let mut bytes = words(tag, layer, position.into(), layout.block_bytes() as usize);
    let shape = layout.shape().expect("every pool has one");
    for plane in 0..shape.planes() {
        for token in 0..shape.tokens() {
            for number in shape.heads().range() {
                let at = shape.offset(plane, token, number).expect("it is there") as usize;
                let of_all = position * shape.tokens() + token;
                let head = head(tag, layer, plane, of_all, number, shape.head_bytes());
                bytes[at..at + head.len()].copy_from_slice(&head);
            }
        }
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
            let bytes = block(blocks.pool().layout(), tag, layer, to(position));
            blocks.copy_in(layer, position, 0, &bytes).expect("positions of the claim");
        }
    }
}

/// What blocks must hold.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// What [`fill`] leaves for the tag.
    Filled(u64),
    /// The same, from behind.
    Turned(u64),
    /// What belongs to the tag at these tokens, by the mapping, and [`GUARD`] elsewhere.
    Mapped(u64, &'a Mapping, &'a [TokenSpan]),
}

impl Wanted<'_> {
    fn tag(&self) -> u64 {
        let (Self::Filled(tag) | Self::Turned(tag) | Self::Mapped(tag, ..)) = *self;
        tag
    }

    /// The block at a position of `len`.
    fn block(&self, layout: &Layout, layer: u32, position: u32, len: u32) -> Vec<u8> {
        match *self {
            Self::Filled(tag) => block(layout, tag, layer, position),
            Self::Turned(tag) => block(layout, tag, layer, len - 1 - position),
            Self::Mapped(tag, mapping, spans) => copied(tag, mapping, spans, layout, layer, position),
        }
    }

    /// What of `blocks` is not so: the place, and how many of its bytes are others.
    pub fn differs(&self, blocks: &Blocks) -> Option<String> {
        let layout = blocks.pool().layout();
        let mut got = vec![0; layout.block_bytes() as usize];
        (0..LAYERS).flat_map(|layer| (0..blocks.len()).map(move |position| (layer, position))).find_map(
            |(layer, position)| {
                blocks.copy_out(layer, position, 0, &mut got).expect("positions of the claim");
                let id = blocks.id(position).unwrap_or(u32::MAX);
                let what = self.other(&got, layout, layer, position, blocks.len());
                what.map(|what| format!("{what}, block {id} at {position}"))
            },
        )
    }

    /// The same of one layer.
    pub fn layer_differs(&self, view: LayerView<'_>, layout: &Layout) -> Option<String> {
        let mut got = vec![0; layout.block_bytes() as usize];
        (0..view.len()).find_map(|position| {
            view.copy_out(position, 0, &mut got).expect("positions of the claim");
            self.other(&got, layout, view.layer(), position, view.len())
        })
    }

    fn other(&self, got: &[u8], layout: &Layout, layer: u32, position: u32, len: u32) -> Option<String> {
        let expected = self.block(layout, layer, position, len);
        if got == expected {
            return None;
        }
        let other = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
        let (of, tag) = (got.len(), self.tag());
        Some(format!("{other} of {of} bytes of position {position} in layer {layer} of {tag:#x}"))
    }
}
