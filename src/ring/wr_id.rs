//! The 64-bit work request id: which slot, which use of the slot, which queue pair (R5).
//!
//! ```text
//!   63     62..41      40..20            19..0
//!   recv   index (22)  generation (21)   queue pair generation (20)
//! ```
//!
//! A completion is matched by all of it. A queue pair number plays no part: drivers hand numbers out again.

/// Bits of a slot index: a completion queue has at most 2^22 entries (the largest `max_cqe` of the drivers in use).
pub(crate) const INDEX_BITS: u32 = 22;
/// Bits of a slot's generation.
pub(crate) const GENERATION_BITS: u32 = 21;
/// Bits of a queue pair's generation.
pub(crate) const QP_GENERATION_BITS: u32 = 20;

const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;
const QP_GENERATION_MASK: u32 = (1 << QP_GENERATION_BITS) - 1;

/// A slot, in one of its uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Key {
    /// The generation that follows `generation`.
    pub(crate) fn next_generation(generation: u32) -> u32 {
        generation.wrapping_add(1) & GENERATION_MASK
    }
}

/// What a work request id says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId {
    pub(crate) recv: bool,
    pub(crate) key: Key,
    pub(crate) qp_generation: u32,
}

impl WrId {
    pub(crate) fn encode(self) -> u64 {
        debug_assert!(self.key.index <= INDEX_MASK && self.key.generation <= GENERATION_MASK);
        u64::from(self.recv) << 63
            | u64::from(self.key.index & INDEX_MASK) << (GENERATION_BITS + QP_GENERATION_BITS)
            | u64::from(self.key.generation & GENERATION_MASK) << QP_GENERATION_BITS
            | u64::from(self.qp_generation & QP_GENERATION_MASK)
    }

    pub(crate) fn decode(raw: u64) -> Self {
        let field = |shift: u32, mask: u32| (raw >> shift) as u32 & mask;
        Self {
            recv: raw >> 63 == 1,
            key: Key {
                index: field(GENERATION_BITS + QP_GENERATION_BITS, INDEX_MASK),
                generation: field(QP_GENERATION_BITS, GENERATION_MASK),
            },
            qp_generation: field(0, QP_GENERATION_MASK),
        }
    }
}

/// A generation for a new queue pair: unique in this process until it wraps after a million.
pub(crate) fn next_qp_generation() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) & QP_GENERATION_MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r5_every_field_survives_at_its_bounds() {
        assert_eq!(1 + INDEX_BITS + GENERATION_BITS + QP_GENERATION_BITS, 64);
        for recv in [false, true] {
            for index in [0, 1, INDEX_MASK] {
                for generation in [0, 1, GENERATION_MASK] {
                    for qp_generation in [0, 1, QP_GENERATION_MASK] {
                        let id = WrId { recv, key: Key { index, generation }, qp_generation };
                        assert_eq!(WrId::decode(id.encode()), id);
                    }
                }
            }
        }
    }

    #[test]
    fn r5_generations_wrap_inside_their_bits() {
        assert_eq!(Key::next_generation(GENERATION_MASK), 0);
        assert_eq!(Key::next_generation(7), 8);
    }
}
