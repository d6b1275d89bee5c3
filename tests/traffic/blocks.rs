//! What the blocks of a process are like, drawn: how many tokens and which heads, in which order, with which gaps.

use std::fmt;
use std::str::FromStr;

use landfall::kv::{Heads, Layout, LayoutError, Shape, ShapeError, Strides};

use super::content::{LAYERS, Rng};

/// Of the model: K and V, so many heads, so many bytes of each.
const PLANES: u32 = 2;
const HEADS: u32 = 4;
const HEAD_BYTES: u32 = 512;

/// What comes after what in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Plane after plane, in each token after token.
    Tokens,
    /// Plane after plane, in each head after head.
    Heads,
    /// Token after token, in each K and V beside each other.
    Beside,
}

/// The blocks of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    tokens: u32,
    /// The first of its heads, and how many.
    heads: (u32, u32),
    arrangement: Arrangement,
    /// Bytes after each plane, or each token, that belong to nothing.
    gap: u64,
    /// The layers of a block lie beside each other, and not the blocks of a layer.
    together: bool,
}

const NAMES: [(&str, Arrangement); 3] =
    [("nhd", Arrangement::Tokens), ("hnd", Arrangement::Heads), ("beside", Arrangement::Beside)];

impl Held {
    /// Blocks of 8 KiB with all heads.
    pub fn usual(rng: &mut Rng) -> Self {
        let arrangement = NAMES[rng.range(0, 1) as usize].1;
        Self { tokens: 2, heads: (0, HEADS), arrangement, gap: 0, together: rng.one_in(4) }
    }

    /// Whatever can be mapped from and to any other: every rank has the head in the middle.
    pub fn any(rng: &mut Rng) -> Self {
        let first = rng.range(0, u64::from(HEADS) / 2) as u32;
        let count = rng.range(u64::from(HEADS / 2 + 1 - first), u64::from(HEADS - first)) as u32;
        Self {
            tokens: rng.range(1, 6) as u32,
            heads: (first, count),
            arrangement: NAMES[rng.range(0, 2) as usize].1,
            gap: if rng.one_in(2) { 0 } else { rng.range(1, 100) },
            together: rng.one_in(2),
        }
    }

    fn shape(&self) -> Result<Shape, ShapeError> {
        let (first, count) = self.heads;
        let (tokens, heads, head) = (u64::from(self.tokens), u64::from(count), u64::from(HEAD_BYTES));
        let plane = tokens * heads * head + self.gap;
        let strides = match self.arrangement {
            Arrangement::Tokens => Strides { plane, token: heads * head, head },
            Arrangement::Heads => Strides { plane, token: head, head: tokens * head },
            Arrangement::Beside => {
                let plane = heads * head;
                Strides { plane, token: plane * u64::from(PLANES) + self.gap, head }
            }
        };
        Shape::strided(PLANES, self.tokens, Heads::new(first, count, HEADS)?, HEAD_BYTES, strides)
    }

    /// A pool of so many blocks.
    pub fn layout(&self, blocks: u32) -> Result<Layout, LayoutError> {
        let shape = self.shape().expect("dimensions above zero, and strides around all that they step over");
        let bytes = shape.bytes() + self.gap;
        let layout = if self.together {
            Layout::new(LAYERS, blocks, bytes, bytes, bytes * u64::from(LAYERS))
        } else {
            Layout::contiguous(LAYERS, blocks, bytes)
        };
        layout?.with_shape(shape)
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, heads: (first, count), arrangement, gap, together } = self;
        let name = NAMES.iter().find(|(_, other)| other == arrangement).map_or("", |(name, _)| name);
        write!(f, "{name},{tokens},{first},{count},{gap},{together}")
    }
}

impl FromStr for Held {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let mut words = text.split(',');
            let name = words.next()?;
            let mut number = || words.next()?.parse::<u32>().ok();
            let held = Self {
                arrangement: NAMES.iter().find(|(other, _)| *other == name)?.1,
                tokens: number()?,
                heads: (number()?, number()?),
                gap: number()?.into(),
                together: words.next()?.parse().ok()?,
            };
            words.next().is_none().then_some(held)
        };
        read().ok_or_else(|| format!("no blocks {text:?}"))
    }
}
