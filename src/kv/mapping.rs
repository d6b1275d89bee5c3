//! What of one shape goes where in another: planned once, for every request between two pools. Arithmetic only.
//!
//! Blocks are seen as a row of tokens: token `t` of a claim is at position `t / tokens` of it, `t % tokens` into that block.
//! So pages of 16 meet pages of 64 at any phase, and a request may begin and end in the middle of a block. Two blocks meet
//! in a *chunk*: the tokens that are in one block on both sides. In each layer, a chunk is copied in *rows*: the longest
//! stretches that are contiguous on both sides whatever blocks meet. Which dimensions a row takes in, and at which strides the
//! rows lie, follows from the two shapes alone, so that a mapping is a few numbers, and a plan needs no list of extents.
//!
//! ```text
//!   source, pages of 2:   │ t0 t1 │ t2 t3 │ t4 t5 │          chunks: t0..2, t2..4, t4..6
//!   target, pages of 4:   │ t0 t1 t2 t3 │ t4 t5 t6 t7 │
//!
//!   TokensHeads → TokensHeads, all heads:        a row is a plane's tokens of the chunk
//!   TokensHeads → TokensHeads, half the heads:   a row is the heads in common of one token
//!   TokensHeads → HeadsTokens:                   a row is one head of one token
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::shape::{Heads, Shape};

/// Where each byte of a source shape goes in a target shape: the heads that both have, of every token, in every plane.
///
/// Made once for two pools, by [`KvChannel::mapping_to_peer`](super::KvChannel::mapping_to_peer) or from two shapes; cheap to
/// clone; used by each [`WriteRequest::mapped`](super::WriteRequest::mapped) and
/// [`ReadRequest::mapped`](super::ReadRequest::mapped).
///
/// ```
/// use landfall::kv::{Heads, Mapping, Order, Shape};
/// // Rank 0 of 2, in pages of 16, to rank 1 of 4, in pages of 64: the heads 2 and 3 of 8.
/// let source = Shape::dense(2, 16, Heads::of_rank(8, 0, 2)?, 256, Order::TokensHeads)?;
/// let target = Shape::dense(2, 64, Heads::of_rank(8, 1, 4)?, 256, Order::HeadsTokens)?;
/// let mapping = Mapping::new(&source, &target)?;
/// assert_eq!((mapping.heads(), mapping.bytes_per_token()), (2..4, 2 * 2 * 256));
/// assert_eq!((mapping.source_blocks(100), mapping.target_blocks(100)), (7, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mapping {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    source: Shape,
    target: Shape,
    heads: Range<u32>,
    /// Offset of the first common head of the first token, in a block.
    src_base: u64,
    dst_base: u64,
    /// Bytes of a row; of one token of it, where rows take tokens in.
    row: u64,
    tokens_in_row: bool,
    /// What rows do not take in, outermost first.
    outer: Vec<Dim>,
    token_bytes: u64,
}

/// A dimension over which rows repeat.
#[derive(Clone, Copy, Debug)]
struct Dim {
    /// `None`: as many as the chunk has tokens.
    count: Option<u32>,
    src: u64,
    dst: u64,
}

/// Tokens that lie in one block on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) src_block: u32,
    pub(crate) dst_block: u32,
    /// Where the first token is in its blocks.
    src_at: u32,
    dst_at: u32,
    pub(crate) tokens: u32,
}

/// Two shapes between which nothing can be mapped, or a mapping that is not of these pools.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// A pool whose layout says nothing of what is in its blocks.
    #[error("the {side}'s pool declares no shape; give its layout one by Layout::with_shape, on both sides")]
    NoShape {
        /// `"source"` or `"target"`.
        side: &'static str,
    },
    /// The pools are of different models.
    #[error(
        "{what}: {source_value} at the source, {target_value} at the target; both must hold the same model's cache"
    )]
    Model {
        /// What differs: planes, bytes of a head, heads of the model.
        what: &'static str,
        /// The source's value.
        source_value: u64,
        /// The target's value.
        target_value: u64,
    },
    /// No head is in both.
    #[error(
        "the source has the heads {source_heads:?}, the target {target_heads:?}: none is in both; pair the ranks that share heads"
    )]
    NoHeads {
        /// The source's heads.
        source_heads: Heads,
        /// The target's heads.
        target_heads: Heads,
    },
    /// The mapping was made for another shape than the pool's.
    #[error(
        "the mapping's {side} is {mapping:?}, the pool's shape is {pool:?}; make the mapping of the pools' own shapes"
    )]
    OtherShape {
        /// `"source"` or `"target"`.
        side: &'static str,
        /// The shape in the mapping.
        mapping: Box<Shape>,
        /// The shape that the pool declares.
        pool: Box<Shape>,
    },
}

impl Mapping {
    /// Plans what goes from blocks of shape `source` to blocks of shape `target`.
    ///
    /// # Errors
    /// [`MappingError::Model`] for planes, bytes of a head or heads of the model that differ; [`MappingError::NoHeads`].
    pub fn new(source: &Shape, target: &Shape) -> Result<Self, MappingError> {
        check_model(source, target)?;
        let (s, t) = (source.heads(), target.heads());
        let heads = s.first().max(t.first())..s.range().end.min(t.range().end);
        if heads.is_empty() {
            return Err(MappingError::NoHeads { source_heads: s, target_heads: t });
        }
        let (ss, ts) = (source.strides(), target.strides());
        let common = heads.end - heads.start;
        // One head of one token; then, from the inside out, each dimension that continues it on both sides.
        let mut row = u64::from(source.head_bytes());
        let mut tokens_in_row = false;
        let mut outer = vec![
            Dim { count: Some(source.planes()), src: ss.plane, dst: ts.plane },
            Dim { count: Some(common), src: ss.head, dst: ts.head },
        ];
        outer.retain(|dim| dim.count != Some(1));
        // Where a block has one token, so has every chunk.
        if source.tokens() > 1 && target.tokens() > 1 {
            outer.push(Dim { count: None, src: ss.token, dst: ts.token });
        }
        while !tokens_in_row && let Some(at) = outer.iter().position(|dim| dim.src == row && dim.dst == row) {
            match outer.remove(at).count {
                // Within the bytes of either shape.
                Some(count) => row *= u64::from(count),
                None => tokens_in_row = true,
            }
        }
        outer.sort_by_key(|dim| std::cmp::Reverse(dim.src));
        let base = |shape: &Shape| shape.offset(0, 0, heads.start).unwrap_or(0);
        Ok(Self {
            inner: Arc::new(Inner {
                src_base: base(source),
                dst_base: base(target),
                token_bytes: u64::from(source.planes()) * u64::from(common) * u64::from(source.head_bytes()),
                source: *source,
                target: *target,
                heads,
                row,
                tokens_in_row,
                outer,
            }),
        })
    }

    /// The same bytes the other way: from the target's blocks to the source's.
    pub(crate) fn reversed(&self) -> Self {
        let Inner { row, tokens_in_row, token_bytes, .. } = *self.inner;
        let turned = self.inner.outer.iter().map(|dim| Dim { src: dim.dst, dst: dim.src, ..*dim });
        let mut outer: Vec<Dim> = turned.collect();
        outer.sort_by_key(|dim| std::cmp::Reverse(dim.src));
        Self {
            inner: Arc::new(Inner {
                source: self.inner.target,
                target: self.inner.source,
                heads: self.heads(),
                src_base: self.inner.dst_base,
                dst_base: self.inner.src_base,
                row,
                tokens_in_row,
                outer,
                token_bytes,
            }),
        }
    }

    /// The shape of the source's blocks.
    pub fn source(&self) -> &Shape {
        &self.inner.source
    }

    /// The shape of the target's blocks.
    pub fn target(&self) -> &Shape {
        &self.inner.target
    }

    /// The heads that both have, by their numbers in the model.
    pub fn heads(&self) -> Range<u32> {
        self.inner.heads.clone()
    }

    /// Bytes that are copied of each token, in each layer.
    pub fn bytes_per_token(&self) -> u64 {
        self.inner.token_bytes
    }

    /// Blocks that so many tokens take at the source.
    pub fn source_blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.inner.source.tokens())
    }

    /// Blocks that so many tokens take at the target: what must be granted.
    pub fn target_blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.inner.target.tokens())
    }

    /// The first chunk of `left` tokens, from these tokens on (counted over all blocks of each pool). `left` is above 0.
    pub(crate) fn chunk(&self, src_token: u32, dst_token: u32, left: u32) -> Chunk {
        let (s, d) = (self.inner.source.tokens(), self.inner.target.tokens());
        let (src_at, dst_at) = (src_token % s, dst_token % d);
        Chunk {
            src_block: src_token / s,
            dst_block: dst_token / d,
            src_at,
            dst_at,
            tokens: left.min(s - src_at).min(d - dst_at),
        }
    }

    /// Chunks of `count` tokens from these on.
    pub(crate) fn chunks(&self, src_token: u32, dst_token: u32, count: u32) -> u64 {
        let (mut done, mut chunks) = (0, 0);
        while done < count {
            done += self.chunk(src_token + done, dst_token + done, count - done).tokens;
            chunks += 1;
        }
        chunks
    }

    /// Rows of a chunk, in each layer.
    pub(crate) fn rows(&self, chunk: &Chunk) -> u64 {
        // Rows do not overlap, so that there are fewer than a block has bytes.
        self.inner.outer.iter().map(|dim| u64::from(dim.count.unwrap_or(chunk.tokens))).product()
    }

    /// Row `index` of a chunk: its offsets in the source's and in the target's block, and its bytes.
    pub(crate) fn row(&self, chunk: &Chunk, index: u64) -> (u64, u64, u64) {
        let inner = &*self.inner;
        // Below the bytes of a block, which fit (`Shape`).
        let mut src = inner.src_base + u64::from(chunk.src_at) * inner.source.strides().token;
        let mut dst = inner.dst_base + u64::from(chunk.dst_at) * inner.target.strides().token;
        let mut rest = index;
        for dim in inner.outer.iter().rev() {
            let count = u64::from(dim.count.unwrap_or(chunk.tokens));
            src += rest % count * dim.src;
            dst += rest % count * dim.dst;
            rest /= count;
        }
        let tokens = if inner.tokens_in_row { u64::from(chunk.tokens) } else { 1 };
        (src, dst, inner.row * tokens)
    }

    /// Whether it is made for these pools, as far as they declare what their blocks hold.
    pub(crate) fn check(&self, source: Option<&Shape>, target: Option<&Shape>) -> Result<(), MappingError> {
        for (side, own, pool) in [("source", self.source(), source), ("target", self.target(), target)] {
            match pool {
                None => return Err(MappingError::NoShape { side }),
                Some(pool) if pool != own => {
                    return Err(MappingError::OtherShape {
                        side,
                        mapping: Box::new(*own),
                        pool: Box::new(*pool),
                    });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// Whether both are of one model.
pub(crate) fn check_model(source: &Shape, target: &Shape) -> Result<(), MappingError> {
    for (what, s, t) in model(source, target) {
        if s != t {
            return Err(MappingError::Model { what, source_value: s.into(), target_value: t.into() });
        }
    }
    Ok(())
}

/// What two pools of one model have in common, with both values.
fn model(a: &Shape, b: &Shape) -> [(&'static str, u32, u32); 3] {
    [
        ("planes", a.planes(), b.planes()),
        ("bytes of a head", a.head_bytes(), b.head_bytes()),
        ("heads of the model", a.heads().total(), b.heads().total()),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Order, Strides};
    use super::*;

    fn shape(planes: u32, tokens: u32, heads: (u32, u32, u32), order: Order) -> Shape {
        let heads = Heads::new(heads.0, heads.1, heads.2).expect("valid");
        Shape::dense(planes, tokens, heads, 8, order).expect("valid")
    }

    fn rows(m: &Mapping, src: u32, dst: u32, left: u32) -> (u32, u64, u64) {
        let chunk = m.chunk(src, dst, left);
        (chunk.tokens, m.rows(&chunk), m.row(&chunk, 0).2)
    }

    #[test]
    fn k8_rows_are_as_long_as_both_shapes_allow() {
        use Order::{HeadsTokens, TokensHeads};
        let all = (0, 4, 4);
        // Tokens of a chunk, rows, bytes of a row: K and V, 8 bytes a head.
        for (source, target, want) in [
            // A plane's tokens are contiguous on both sides.
            ((16, all, TokensHeads), (64, all, TokensHeads), (16, 2, 16 * 4 * 8)),
            ((64, all, TokensHeads), (16, all, TokensHeads), (16, 2, 16 * 4 * 8)),
            // One head's are.
            ((16, all, HeadsTokens), (64, all, HeadsTokens), (16, 2 * 4, 16 * 8)),
            ((16, (0, 2, 4), HeadsTokens), (16, (1, 2, 4), HeadsTokens), (16, 2, 16 * 8)),
            // The heads in common of each token are.
            ((16, all, TokensHeads), (16, (2, 2, 4), TokensHeads), (16, 2 * 16, 2 * 8)),
            ((16, (2, 2, 4), TokensHeads), (64, all, TokensHeads), (16, 2 * 16, 2 * 8)),
            // Only a head of a token is.
            ((16, all, TokensHeads), (16, all, HeadsTokens), (16, 2 * 16 * 4, 8)),
            // A block of one token has no order.
            ((1, all, HeadsTokens), (16, all, TokensHeads), (1, 2, 4 * 8)),
        ] {
            let of = |(tokens, heads, order)| shape(2, tokens, heads, order);
            let m = Mapping::new(&of(source), &of(target)).expect("one model");
            assert_eq!(rows(&m, 0, 0, 1000), want, "{source:?} {target:?}");
        }
        // K and V beside each other in each token, on both sides: all of it is one row.
        let strides = Strides { plane: 32, token: 64, head: 8 };
        let beside =
            |tokens| Shape::strided(2, tokens, Heads::all(4).expect("valid"), 8, strides).expect("valid");
        let m = Mapping::new(&beside(16), &beside(64)).expect("one model");
        assert_eq!(rows(&m, 0, 0, 1000), (16, 1, 16 * 64));
    }

    #[test]
    fn k8_chunks_end_where_a_block_ends_on_either_side() {
        let of = |tokens| shape(1, tokens, (0, 1, 1), Order::TokensHeads);
        let m = Mapping::new(&of(6), &of(4)).expect("one model");
        let chunk = m.chunk(6 * 5 + 2, 4 * 9 + 3, 100);
        assert_eq!(
            (chunk.src_block, chunk.dst_block, chunk.src_at, chunk.dst_at, chunk.tokens),
            (5, 9, 2, 3, 1)
        );
        // Tokens 0..12 meet at 4, 6, 8.
        assert_eq!(m.chunks(0, 0, 12), 4);
        assert_eq!((m.chunks(0, 0, 1), m.chunks(3, 3, 0), m.chunks(5, 3, 2)), (1, 0, 2));
        assert_eq!((m.source_blocks(13), m.target_blocks(13), m.source_blocks(0)), (3, 4, 0));
    }

    #[test]
    fn r10_shapes_of_two_models_are_refused_naming_both_values() {
        let a = shape(2, 16, (0, 4, 8), Order::TokensHeads);
        let of = |planes, total| shape(planes, 16, (4, 4, total), Order::TokensHeads);
        let model =
            |what, source_value, target_value| MappingError::Model { what, source_value, target_value };
        assert_eq!(Mapping::new(&a, &of(1, 8)).unwrap_err(), model("planes", 2, 1));
        assert_eq!(Mapping::new(&a, &of(2, 16)).unwrap_err(), model("heads of the model", 8, 16));
        let wide = Shape::dense(2, 16, a.heads(), 16, Order::TokensHeads).expect("valid");
        assert_eq!(Mapping::new(&a, &wide).unwrap_err(), model("bytes of a head", 8, 16));
        let none = Mapping::new(&a, &of(2, 8)).unwrap_err();
        assert!(matches!(none, MappingError::NoHeads { .. }));
        assert!(none.to_string().contains("0..4 of 8") && none.to_string().contains("4..8 of 8"), "{none}");
        let m = Mapping::new(&a, &a).expect("the same");
        assert_eq!(m.check(Some(&a), Some(&a)), Ok(()));
        assert_eq!(m.check(Some(&a), None), Err(MappingError::NoShape { side: "target" }));
        assert!(matches!(
            m.check(Some(&wide), Some(&a)),
            Err(MappingError::OtherShape { side: "source", .. })
        ));
    }
}
