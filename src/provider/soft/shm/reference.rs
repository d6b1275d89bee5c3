//! What travels instead of large payload: where it is.
//!
//! ```text
//!   reference   memfd u64 · offset u64 · length u32 · together u32     24 bytes
//! ```
//! Integers are little-endian. The memfd is one that the peer has been sent, by the name that came with it, and the offset is in
//! it. Memfd 0 is none: then the offset is an address in the sender's process. The last says in KiB how much the sender has
//! posted without a pause, and only decides how the copy is made.

/// Bytes of one.
pub(in crate::provider::soft) const REFERENCE: usize = 24;
/// Of one descriptor at most.
pub(in crate::provider::soft) const MAX_REFERENCES: usize = 64;

/// What [`Reference::memfd`] says of memory that is not lent.
pub(in crate::provider::soft) const NO_MEMFD: u64 = 0;

/// A piece of payload that stays where it is until the receiver copies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::provider::soft) struct Reference {
    pub(in crate::provider::soft) memfd: u64,
    pub(in crate::provider::soft) offset: u64,
    pub(in crate::provider::soft) len: u32,
    /// KiB of the messages that were posted one after the other until this one.
    pub(in crate::provider::soft) together: u32,
}

impl Reference {
    pub(in crate::provider::soft) fn encode(&self) -> [u8; REFERENCE] {
        let mut out = [0; REFERENCE];
        out[..8].copy_from_slice(&self.memfd.to_le_bytes());
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..20].copy_from_slice(&self.len.to_le_bytes());
        out[20..].copy_from_slice(&self.together.to_le_bytes());
        out
    }

    pub(in crate::provider::soft) fn decode(b: &[u8; REFERENCE]) -> Self {
        let [m0, m1, m2, m3, m4, m5, m6, m7, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, t0, t1, t2, t3] =
            *b;
        Self {
            memfd: u64::from_le_bytes([m0, m1, m2, m3, m4, m5, m6, m7]),
            offset: u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            together: u32::from_le_bytes([t0, t1, t2, t3]),
        }
    }

    /// Takes `next` up when it goes on where this one ends. False when it does not.
    pub(in crate::provider::soft) fn absorb(&mut self, next: &Self) -> bool {
        let goes_on =
            self.memfd == next.memfd && self.offset.checked_add(self.len.into()) == Some(next.offset);
        match self.len.checked_add(next.len) {
            Some(len) if goes_on => {
                self.len = len;
                true
            }
            _ => false,
        }
    }
}

/// The references of a descriptor of `len` bytes. `None` when they are not references to exactly that much.
pub(in crate::provider::soft) fn decode_all(
    bytes: &[u8],
    len: u32,
    out: &mut impl Extend<Reference>,
) -> Option<()> {
    let (references, []) = bytes.as_chunks::<REFERENCE>() else { return None };
    let mut total = 0u64;
    for bytes in references {
        let reference = Reference::decode(bytes);
        // An empty one would be progress that is none.
        if reference.len == 0 {
            return None;
        }
        total += u64::from(reference.len);
        out.extend([reference]);
    }
    (total == u64::from(len)).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_references_travel_as_they_are_and_neighbours_become_one() {
        let reference = |memfd, offset, len| Reference { memfd, offset, len, together: 0 };
        let one = Reference { together: 0x0102_0304, ..reference(3, u64::MAX - 5, 4) };
        assert_eq!(Reference::decode(&one.encode()), one);
        let mut whole = reference(3, 10, 4);
        assert!(whole.absorb(&reference(3, 14, 6)));
        assert_eq!(whole.len, 10);
        assert!(!whole.absorb(&reference(3, 21, 6)), "a gap");
        assert!(!whole.absorb(&reference(4, 20, 6)), "another memfd");
        assert!(!whole.absorb(&reference(3, 20, u32::MAX)), "too long for one");
        let mut last = one;
        assert!(!last.absorb(&reference(3, 0, 1)), "not around the end");
    }

    #[test]
    fn b1_references_to_another_length_are_refused() {
        let bytes: Vec<u8> = [(1, 3), (1, 4)]
            .iter()
            .flat_map(|&(memfd, len)| Reference { memfd, offset: 0, len, together: 0 }.encode())
            .collect();
        let decode = |bytes: &[u8], len| {
            let mut out = Vec::new();
            decode_all(bytes, len, &mut out).map(|()| out.len())
        };
        assert_eq!(decode(&bytes, 7), Some(2));
        assert_eq!(decode(&bytes, 8), None);
        assert_eq!(decode(&bytes[..47], 7), None);
        assert_eq!(decode(&Reference { memfd: 1, offset: 0, len: 0, together: 0 }.encode(), 0), None);
    }
}
