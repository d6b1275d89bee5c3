//! What lies in a block: tokens × heads, for K and for V. Arithmetic only; touches no memory.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The arrangement of one block in one layer: `planes` × `tokens` × `heads` of `head_bytes` each, at strides.
///
/// ```text
///   byte b of head h of token t in plane p   is at   p · plane stride + t · token stride + h · head stride + b
///
///   2 planes (K, V), 4 tokens, 2 heads:
///
///   Order::TokensHeads   K: t0 h0 h1 │ t1 h0 h1 │ t2 h0 h1 │ t3 h0 h1   V: t0 h0 h1 │ t1 h0 h1 │ …
///   Order::HeadsTokens   K: h0 t0 t1 t2 t3 │ h1 t0 t1 t2 t3             V: h0 t0 t1 t2 t3 │ h1 …
///   Strides, K and V beside each other in each token:
///                        t0 K h0 h1 V h0 h1 │ t1 K h0 h1 V h0 h1 │ …
/// ```
///
/// A pool declares it by [`Layout::with_shape`](super::Layout::with_shape). Two pools that both declare one may differ in
/// all of it but the model's own numbers (planes, bytes of a head, heads in all): a [`Mapping`](super::Mapping) says what goes
/// where. Without one, a block is so many bytes, and both ends must agree on how many.
///
/// A `Shape` that exists is valid: no two heads overlap and no offset overflows. That also holds for one that was
/// deserialised.
///
/// ```
/// use landfall::kv::{Heads, Order, Shape};
/// // 16 tokens, the second of two ranks of a model with 8 heads of 128 × 2 bytes, K before V.
/// let shape = Shape::dense(2, 16, Heads::of_rank(8, 1, 2)?, 256, Order::TokensHeads)?;
/// assert_eq!(shape.bytes(), 2 * 16 * 4 * 256);
/// assert_eq!(shape.offset(1, 3, 5), Some(16 * 1024 + 3 * 1024 + 256)); // V, token 3, the model's head 5
/// # Ok::<(), landfall::kv::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct Shape {
    planes: u32,
    tokens: u32,
    heads: Heads,
    head_bytes: u32,
    strides: Strides,
    bytes: u64,
}

/// Which of a model's heads are here: `count` of them from `first` on, of `total`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "(u32, u32, u32)", into = "(u32, u32, u32)")]
pub struct Heads {
    first: u32,
    count: u32,
    total: u32,
}

/// What comes first within a plane of a dense block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Token after token, in each all heads ("NHD").
    TokensHeads,
    /// Head after head, in each all tokens ("HND").
    HeadsTokens,
}

/// Bytes from one to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strides {
    /// From a plane to the next.
    pub plane: u64,
    /// From a token to the next.
    pub token: u64,
    /// From a head to the next.
    pub head: u64,
}

/// A shape that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A dimension of zero.
    #[error("shape: {what} is 0; it must be at least 1")]
    Zero {
        /// The dimension.
        what: &'static str,
    },
    /// Heads that the model does not have.
    #[error("shape: {count} heads from {first} on, the model has {total}; name heads below {total}")]
    Heads {
        /// The first head.
        first: u32,
        /// Their number.
        count: u32,
        /// Heads of the model.
        total: u32,
    },
    /// Ranks among which heads cannot be split evenly.
    #[error(
        "shape: {total} heads cannot be split over {ranks} ranks, of which this is number {rank}: one number must divide \
         the other, and ranks count from 0"
    )]
    Ranks {
        /// Heads of the model.
        total: u32,
        /// The rank.
        rank: u32,
        /// Ranks.
        ranks: u32,
    },
    /// The strides make heads overlap.
    #[error(
        "shape: {planes} planes × {tokens} tokens × {heads} heads of {head_bytes} bytes overlap with strides of {} (plane), \
         {} (token) and {} (head) bytes; use Shape::dense, or larger strides",
        .strides.plane,
        .strides.token,
        .strides.head
    )]
    Overlap {
        /// Planes.
        planes: u32,
        /// Tokens.
        tokens: u32,
        /// Heads.
        heads: u32,
        /// Bytes a head.
        head_bytes: u32,
        /// The strides.
        strides: Strides,
    },
    /// The last byte is beyond what 64 bits can address.
    #[error(
        "shape: {planes} planes × {tokens} tokens × {heads} heads of {head_bytes} bytes do not fit in 64-bit offsets"
    )]
    TooLarge {
        /// Planes.
        planes: u32,
        /// Tokens.
        tokens: u32,
        /// Heads.
        heads: u32,
        /// Bytes a head.
        head_bytes: u32,
    },
}

impl Heads {
    /// `count` heads from `first` on, of `total`.
    ///
    /// # Errors
    /// [`ShapeError::Zero`], and [`ShapeError::Heads`] for heads that the model does not have.
    pub fn new(first: u32, count: u32, total: u32) -> Result<Self, ShapeError> {
        if count == 0 {
            return Err(ShapeError::Zero { what: "heads" });
        }
        if first.checked_add(count).is_none_or(|end| end > total) {
            return Err(ShapeError::Heads { first, count, total });
        }
        Ok(Self { first, count, total })
    }

    /// All heads of a model.
    ///
    /// # Errors
    /// [`ShapeError::Zero`].
    pub fn all(total: u32) -> Result<Self, ShapeError> {
        Self::new(0, total, total)
    }

    /// The heads of rank `rank` of `ranks` in tensor parallelism: an equal share; or, where there are more ranks than
    /// heads, one head that several ranks hold.
    ///
    /// # Errors
    /// [`ShapeError::Ranks`] for a rank that does not exist, or heads that do not divide evenly.
    pub fn of_rank(total: u32, rank: u32, ranks: u32) -> Result<Self, ShapeError> {
        let uneven = ShapeError::Ranks { total, rank, ranks };
        if total == 0 || rank >= ranks {
            return Err(uneven);
        }
        if total.is_multiple_of(ranks) {
            let count = total / ranks;
            Self::new(rank * count, count, total)
        } else if ranks.is_multiple_of(total) {
            Self::new(rank / (ranks / total), 1, total)
        } else {
            Err(uneven)
        }
    }

    /// The number of the first.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Heads of the model.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Their numbers.
    pub fn range(&self) -> Range<u32> {
        // `new` has checked the sum.
        self.first..self.first + self.count
    }
}

impl fmt::Debug for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.range(), self.total)
    }
}

impl From<Heads> for (u32, u32, u32) {
    fn from(h: Heads) -> Self {
        (h.first, h.count, h.total)
    }
}

impl TryFrom<(u32, u32, u32)> for Heads {
    type Error = ShapeError;

    fn try_from((first, count, total): (u32, u32, u32)) -> Result<Self, ShapeError> {
        Self::new(first, count, total)
    }
}

impl Shape {
    /// A block without gaps: plane after plane, each in `order`. `planes` is 2 where a block holds K and V, 1 where it holds
    /// one of them, or a latent of both.
    ///
    /// # Errors
    /// [`ShapeError::Zero`], [`ShapeError::TooLarge`].
    pub fn dense(
        planes: u32,
        tokens: u32,
        heads: Heads,
        head_bytes: u32,
        order: Order,
    ) -> Result<Self, ShapeError> {
        let (t, h, b) = (u64::from(tokens), u64::from(heads.count), u64::from(head_bytes));
        let product = |a: u64| a.checked_mul(b);
        let too_large = ShapeError::TooLarge { planes, tokens, heads: heads.count, head_bytes };
        let plane = t.checked_mul(h).and_then(product).ok_or(too_large)?;
        // One dimension times 32 bits: fits.
        let strides = match order {
            Order::TokensHeads => Strides { plane, token: h * b, head: b },
            Order::HeadsTokens => Strides { plane, token: b, head: t * b },
        };
        Self::strided(planes, tokens, heads, head_bytes, strides)
    }

    /// A block with explicit strides, in whatever order they make.
    ///
    /// # Errors
    /// [`ShapeError::Zero`], [`ShapeError::Overlap`], [`ShapeError::TooLarge`].
    pub fn strided(
        planes: u32,
        tokens: u32,
        heads: Heads,
        head_bytes: u32,
        strides: Strides,
    ) -> Result<Self, ShapeError> {
        for (what, n) in [("planes", planes), ("tokens", tokens), ("head_bytes", head_bytes)] {
            if n == 0 {
                return Err(ShapeError::Zero { what });
            }
        }
        let mut dims = [(planes, strides.plane), (tokens, strides.token), (heads.count, strides.head)];
        dims.sort_by_key(|&(_, stride)| stride);
        // From the inside out: each dimension steps over all that is inside of it.
        let mut bytes = u64::from(head_bytes);
        for (n, stride) in dims.into_iter().filter(|&(n, _)| n > 1) {
            if stride < bytes {
                return Err(ShapeError::Overlap { planes, tokens, heads: heads.count, head_bytes, strides });
            }
            let too_large = ShapeError::TooLarge { planes, tokens, heads: heads.count, head_bytes };
            bytes =
                stride.checked_mul(u64::from(n) - 1).and_then(|s| s.checked_add(bytes)).ok_or(too_large)?;
        }
        Ok(Self { planes, tokens, heads, head_bytes, strides, bytes })
    }

    /// Planes: 2 where K and V are both in a block.
    pub fn planes(&self) -> u32 {
        self.planes
    }

    /// Tokens of a block.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The heads.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Bytes of one head of one token, in one plane.
    pub fn head_bytes(&self) -> u32 {
        self.head_bytes
    }

    /// The strides.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// Bytes from the block's start to the end of its last head: what a block must hold.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Byte offset in the block of `head` (by its number in the model) of `token` in `plane`; `None` where that is not in
    /// this shape.
    pub fn offset(&self, plane: u32, token: u32, head: u32) -> Option<u64> {
        let s = self.strides;
        (plane < self.planes && token < self.tokens && self.heads.range().contains(&head)).then(|| {
            // Below `bytes`, which has been checked.
            u64::from(plane) * s.plane
                + u64::from(token) * s.token
                + u64::from(head - self.heads.first) * s.head
        })
    }
}

/// What travels.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Raw {
    planes: u32,
    tokens: u32,
    heads: Heads,
    head_bytes: u32,
    strides: Strides,
}

impl From<Shape> for Raw {
    fn from(s: Shape) -> Self {
        let Shape { planes, tokens, heads, head_bytes, strides, bytes: _ } = s;
        Self { planes, tokens, heads, head_bytes, strides }
    }
}

impl TryFrom<Raw> for Shape {
    type Error = ShapeError;

    fn try_from(r: Raw) -> Result<Self, ShapeError> {
        Self::strided(r.planes, r.tokens, r.heads, r.head_bytes, r.strides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(n: u32) -> Heads {
        Heads::all(n).expect("not zero")
    }

    #[test]
    fn r10_shapes_are_checked() {
        let zero = |what| Err(ShapeError::Zero { what });
        assert_eq!(Shape::dense(0, 1, all(1), 1, Order::TokensHeads), zero("planes"));
        assert_eq!(Shape::dense(1, 0, all(1), 1, Order::TokensHeads), zero("tokens"));
        assert_eq!(Shape::dense(1, 1, all(1), 0, Order::HeadsTokens), zero("head_bytes"));
        assert_eq!(Heads::all(0), Err(ShapeError::Zero { what: "heads" }));
        let strided = |plane, token, head| Shape::strided(2, 4, all(2), 8, Strides { plane, token, head });
        for (plane, token, head, bytes) in [
            (64, 16, 8, Some(128)),
            (64, 8, 32, Some(128)),
            // K and V beside each other in each token; gaps; the planes inside of the heads.
            (16, 32, 8, Some(128)),
            (100, 20, 9, Some(100 + 60 + 9 + 8)),
            (8, 32, 16, Some(128)),
            (63, 16, 8, None),
            (64, 15, 8, None),
            (64, 16, 7, None),
            (0, 16, 8, None),
        ] {
            let shape = strided(plane, token, head);
            assert_eq!(shape.ok().map(|s| s.bytes()), bytes, "{plane} {token} {head}: {shape:?}");
        }
        assert!(matches!(strided(u64::MAX, 16, 8), Err(ShapeError::TooLarge { .. })));
        let most = u32::MAX;
        assert!(matches!(
            Shape::dense(1, most, all(most), most, Order::TokensHeads),
            Err(ShapeError::TooLarge { .. })
        ));
        // A stride of a dimension of one does not count.
        assert_eq!(
            Shape::strided(1, 1, all(1), 8, Strides { plane: 0, token: 0, head: 0 }).expect("one").bytes(),
            8
        );
    }

    #[test]
    fn r10_heads_of_ranks_are_even_shares_or_one() {
        let range = |total, rank, ranks| Heads::of_rank(total, rank, ranks).map(|h| h.range());
        assert_eq!(range(8, 1, 4), Ok(2..4));
        assert_eq!(range(8, 0, 1), Ok(0..8));
        assert_eq!(range(2, 5, 8), Ok(1..2));
        assert_eq!(range(8, 7, 8), Ok(7..8));
        for (total, rank, ranks) in [(8, 2, 2), (8, 0, 3), (0, 0, 1), (4, 0, 0), (6, 0, 4)] {
            assert_eq!(range(total, rank, ranks), Err(ShapeError::Ranks { total, rank, ranks }));
        }
        assert!(matches!(Heads::new(7, 2, 8), Err(ShapeError::Heads { .. })));
        assert!(matches!(Heads::new(u32::MAX, 1, 8), Err(ShapeError::Heads { .. })));
    }

    #[test]
    fn r10_offsets_are_of_what_is_there() {
        let heads = Heads::new(4, 2, 8).expect("valid");
        let s = Shape::dense(2, 4, heads, 8, Order::HeadsTokens).expect("valid");
        assert_eq!(s.offset(0, 0, 4), Some(0));
        assert_eq!(s.offset(1, 3, 5), Some(64 + 32 + 24));
        for (p, t, h) in [(2, 0, 4), (0, 4, 4), (0, 0, 3), (0, 0, 6)] {
            assert_eq!(s.offset(p, t, h), None);
        }
    }

    #[test]
    fn r10_a_deserialised_shape_is_checked_too() {
        let s = Shape::dense(2, 4, all(2), 8, Order::TokensHeads).expect("valid");
        let text = serde_json::to_string(&s).expect("serialises");
        assert_eq!(serde_json::from_str::<Shape>(&text).expect("valid"), s);
        for (from, to) in
            [("\"token\":16", "\"token\":15"), ("[0,2,2]", "[1,2,2]"), ("\"planes\":2", "\"planes\":0")]
        {
            let bad = text.replace(from, to);
            assert_ne!(bad, text);
            assert!(serde_json::from_str::<Shape>(&bad).is_err(), "{bad}");
        }
    }
}
