//! The layout of a KV pool: layers × blocks of equal size, at any stride. Arithmetic only; touches no memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::shape::Shape;

/// Where the blocks of a pool lie: block `b` of layer `l` is at `l * layer_stride + b * block_stride`.
///
/// Both ends of a channel declare their layout; they must agree on `layers`, `block_bytes` and `dtype`, and may
/// differ in strides and in the number of blocks. Where both also say what is in a block ([`Layout::with_shape`]), `block_bytes`
/// may differ, too. A `Layout` that exists is valid: no two blocks overlap and no
/// offset overflows. That also holds for one that was deserialised.
///
/// ```
/// use landfall::kv::layout::Layout;
/// // 27 layers of 8,192 blocks of 1,152 bytes, one layer after the other.
/// let layout = Layout::contiguous(27, 8192, 1152)?;
/// assert_eq!(layout.required_bytes(), 254_803_968);
/// assert_eq!(layout.offset(1, 2), Some((8192 + 2) * 1152));
/// # Ok::<(), landfall::kv::layout::LayoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct Layout {
    layers: u32,
    blocks: u32,
    block_bytes: u64,
    layer_stride: u64,
    block_stride: u64,
    dtype: Dtype,
    shape: Option<Shape>,
    required: u64,
}

/// The name of an element type, up to 16 bytes: both ends must use the same. landfall does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Dtype {
    bytes: [u8; 16],
    len: u8,
}

impl Dtype {
    /// `name` is, for instance, `"bf16"`.
    ///
    /// # Errors
    /// [`LayoutError::Dtype`] for a name of more than 16 bytes.
    pub fn new(name: &str) -> Result<Self, LayoutError> {
        let mut bytes = [0; 16];
        match bytes.get_mut(..name.len()) {
            Some(to) => to.copy_from_slice(name.as_bytes()),
            None => return Err(LayoutError::Dtype { len: name.len() }),
        }
        Ok(Self { bytes, len: name.len() as u8 })
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        // Made of a whole `str` in `new`.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

impl TryFrom<String> for Dtype {
    type Error = LayoutError;

    fn try_from(name: String) -> Result<Self, LayoutError> {
        Self::new(&name)
    }
}

impl From<Dtype> for String {
    fn from(dtype: Dtype) -> Self {
        dtype.as_str().to_owned()
    }
}

/// A layout that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension of zero.
    #[error("layout: {what} is 0; it must be at least 1")]
    Zero {
        /// The dimension.
        what: &'static str,
    },
    /// The strides make blocks overlap.
    #[error(
        "layout: {layers} layers × {blocks} blocks of {block_bytes} bytes overlap with layer stride {layer_stride} and block stride {block_stride}; use Layout::contiguous, or larger strides"
    )]
    Overlap {
        /// Layers.
        layers: u32,
        /// Blocks a layer.
        blocks: u32,
        /// Bytes a block.
        block_bytes: u64,
        /// Bytes from a layer to the next.
        layer_stride: u64,
        /// Bytes from a block to the next.
        block_stride: u64,
    },
    /// A type name that is too long.
    #[error("layout: a dtype of {len} bytes; its name may have 16")]
    Dtype {
        /// Its length.
        len: usize,
    },
    /// A shape that does not fit into a block.
    #[error("layout: the shape takes {shape_bytes} bytes, a block has {block_bytes}; make the blocks larger")]
    Shape {
        /// Bytes of the shape.
        shape_bytes: u64,
        /// Bytes a block.
        block_bytes: u64,
    },
    /// More tokens than can be counted in 32 bits.
    #[error("layout: {blocks} blocks of {tokens} tokens are more than 2^32 - 1 tokens; use several pools")]
    Tokens {
        /// Blocks a layer.
        blocks: u32,
        /// Tokens a block.
        tokens: u32,
    },
    /// The last byte is beyond what 64 bits can address.
    #[error("layout: {layers} layers × {blocks} blocks do not fit in 64-bit offsets; use smaller strides")]
    TooLarge {
        /// Layers.
        layers: u32,
        /// Blocks a layer.
        blocks: u32,
    },
}

/// What travels.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Raw {
    layers: u32,
    blocks: u32,
    block_bytes: u64,
    layer_stride: u64,
    block_stride: u64,
    dtype: Dtype,
    #[serde(default)]
    shape: Option<Shape>,
}

impl TryFrom<Raw> for Layout {
    type Error = LayoutError;

    fn try_from(r: Raw) -> Result<Self, LayoutError> {
        let layout = Self::new(r.layers, r.blocks, r.block_bytes, r.layer_stride, r.block_stride)?;
        let layout = layout.with_dtype(r.dtype);
        match r.shape {
            Some(shape) => layout.with_shape(shape),
            None => Ok(layout),
        }
    }
}

impl From<Layout> for Raw {
    fn from(l: Layout) -> Self {
        Self {
            layers: l.layers,
            blocks: l.blocks,
            block_bytes: l.block_bytes,
            layer_stride: l.layer_stride,
            block_stride: l.block_stride,
            dtype: l.dtype,
            shape: l.shape,
        }
    }
}

impl Layout {
    /// A layout with explicit strides, in bytes. Layers may be outside of blocks (`layer_stride` steps over all blocks of
    /// a layer) or inside (`block_stride` steps over all layers of a block).
    ///
    /// # Errors
    /// [`LayoutError::Zero`], [`LayoutError::Overlap`], [`LayoutError::TooLarge`].
    pub fn new(
        layers: u32,
        blocks: u32,
        block_bytes: u64,
        layer_stride: u64,
        block_stride: u64,
    ) -> Result<Self, LayoutError> {
        for (what, zero) in
            [("layers", layers == 0), ("blocks", blocks == 0), ("block_bytes", block_bytes == 0)]
        {
            if zero {
                return Err(LayoutError::Zero { what });
            }
        }
        // Bytes from the first to the end of the last block along one dimension.
        let span = |n: u32, stride: u64, unit: u64| (u64::from(n) - 1).checked_mul(stride)?.checked_add(unit);
        let too_large = LayoutError::TooLarge { layers, blocks };
        let one_layer = span(blocks, block_stride, block_bytes).ok_or(too_large)?;
        let one_block = span(layers, layer_stride, block_bytes).ok_or(too_large)?;
        let required = span(layers, layer_stride, one_layer).ok_or(too_large)?;
        // One dimension is the inner one: its elements do not overlap, and the outer stride steps over all of it.
        let blocks_inside =
            (blocks == 1 || block_stride >= block_bytes) && (layers == 1 || layer_stride >= one_layer);
        let layers_inside =
            (layers == 1 || layer_stride >= block_bytes) && (blocks == 1 || block_stride >= one_block);
        if !blocks_inside && !layers_inside {
            return Err(LayoutError::Overlap { layers, blocks, block_bytes, layer_stride, block_stride });
        }
        Ok(Self {
            layers,
            blocks,
            block_bytes,
            layer_stride,
            block_stride,
            dtype: Dtype::default(),
            shape: None,
            required,
        })
    }

    /// Names the element type.
    pub fn with_dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Says what is in a block, so that blocks of another shape can be written to it and from it
    /// ([`WriteRequest::mapped`](super::WriteRequest::mapped)). The shape begins at the block's first byte and may leave bytes at
    /// its end.
    ///
    /// # Errors
    /// [`LayoutError::Shape`] when it takes more bytes than a block has; [`LayoutError::Tokens`].
    pub fn with_shape(mut self, shape: Shape) -> Result<Self, LayoutError> {
        let (shape_bytes, block_bytes) = (shape.bytes(), self.block_bytes);
        if shape_bytes > block_bytes {
            return Err(LayoutError::Shape { shape_bytes, block_bytes });
        }
        if shape.tokens().checked_mul(self.blocks).is_none() {
            return Err(LayoutError::Tokens { blocks: self.blocks, tokens: shape.tokens() });
        }
        self.shape = Some(shape);
        Ok(self)
    }

    /// One layer after the other, in each one block after the other, without gaps.
    ///
    /// # Errors
    /// [`LayoutError::Zero`], [`LayoutError::TooLarge`].
    pub fn contiguous(layers: u32, blocks: u32, block_bytes: u64) -> Result<Self, LayoutError> {
        let layer =
            block_bytes.checked_mul(u64::from(blocks)).ok_or(LayoutError::TooLarge { layers, blocks })?;
        Self::new(layers, blocks, block_bytes, layer, block_bytes)
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Blocks in each layer.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes of one block in one layer.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes from a block to the same block of the next layer.
    pub fn layer_stride(&self) -> u64 {
        self.layer_stride
    }

    /// Bytes from a block to the next of its layer.
    pub fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What is in a block, where the pool says so.
    pub fn shape(&self) -> Option<&Shape> {
        self.shape.as_ref()
    }

    /// Tokens of all blocks; 0 without a shape.
    pub(crate) fn tokens(&self) -> u32 {
        // `with_shape` has checked the product.
        self.shape.map_or(0, |shape| shape.tokens() * self.blocks)
    }

    /// Byte offset of a block in the pool, or `None` outside of the layout.
    pub fn offset(&self, layer: u32, block: u32) -> Option<u64> {
        (layer < self.layers && block < self.blocks)
            // Cannot overflow: `new` has checked the largest sum, `required`.
            .then(|| u64::from(layer) * self.layer_stride + u64::from(block) * self.block_stride)
    }

    /// Bytes from the pool's start to the end of its last block: what a pool of this layout must hold.
    pub fn required_bytes(&self) -> u64 {
        self.required
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Heads, Order};
    use super::*;

    #[test]
    fn r10_layouts_are_checked() {
        assert_eq!(Layout::new(1, 1, 0, 0, 0), Err(LayoutError::Zero { what: "block_bytes" }));
        assert!(matches!(Layout::new(2, 4, 100, 399, 100), Err(LayoutError::Overlap { .. })));
        assert!(matches!(Layout::new(1, 4, 100, 0, 99), Err(LayoutError::Overlap { .. })));
        assert!(matches!(Layout::new(2, 2, 8, u64::MAX, 8), Err(LayoutError::TooLarge { .. })));
        assert!(matches!(Layout::contiguous(2, 2, u64::MAX / 2 + 1), Err(LayoutError::TooLarge { .. })));
        // Block-major: the layers of a block lie together.
        let l = Layout::new(2, 4, 100, 100, 256).expect("valid");
        assert_eq!(l.required_bytes(), 3 * 256 + 200);
        assert_eq!(l.offset(1, 3), Some(100 + 3 * 256));
        assert_eq!(l.offset(2, 0), None);
        assert_eq!(l.offset(0, 4), None);
    }

    #[test]
    fn r10_a_deserialised_layout_is_checked_too() {
        let l = Layout::contiguous(2, 4, 100).expect("valid").with_dtype(Dtype::new("bf16").expect("short"));
        let text = serde_json::to_string(&l).expect("serialises");
        assert_eq!(serde_json::from_str::<Layout>(&text).expect("valid"), l);
        let bad = text.replace("\"block_stride\":100", "\"block_stride\":99");
        assert_ne!(bad, text);
        assert!(serde_json::from_str::<Layout>(&bad).is_err());
        let none = text.replace(",\"shape\":null", "");
        assert_ne!(none, text);
        assert_eq!(serde_json::from_str::<Layout>(&none).expect("as earlier versions wrote it"), l);
    }

    #[test]
    fn r10_a_shape_must_fit_into_the_block() {
        let shape = |tokens| {
            let heads = Heads::all(2).expect("not zero");
            Shape::dense(1, tokens, heads, 8, Order::TokensHeads).expect("valid")
        };
        let l = Layout::contiguous(2, 4, 100).expect("valid");
        let l = l.with_shape(shape(6)).expect("96 bytes");
        assert_eq!((l.shape(), l.tokens()), (Some(&shape(6)), 24));
        assert_eq!(l.with_shape(shape(7)), Err(LayoutError::Shape { shape_bytes: 112, block_bytes: 100 }));
        let text = serde_json::to_string(&l).expect("serialises");
        assert_eq!(serde_json::from_str::<Layout>(&text).expect("valid"), l);
        assert!(serde_json::from_str::<Layout>(&text.replace("100", "95")).is_err());
        let many = Layout::contiguous(1, 1 << 31, 100).expect("valid");
        assert!(matches!(many.with_shape(shape(2)), Err(LayoutError::Tokens { tokens: 2, .. })));
    }
}
