//! The checksum of memory: a stated 64-bit hash of the bytes and their number, whatever their address.
//!
//! Four lanes take little-endian 64-bit words in turn, `lane = (rotl(lane, 29) ^ word) * P`; the last stripe of 32
//! bytes is padded with zeros; the lanes and the length are then folded and mixed. Not cryptographic: it finds
//! torn, stale and misplaced data, not an adversary's.

const P: u64 = 0x9e37_79b9_7f4a_7c15;
const SEEDS: [u64; 4] =
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
const STRIPE: usize = 32;

/// A checksum in progress. Pieces before the last one must be multiples of 32 bytes.
pub(super) struct Checksum {
    lanes: [u64; 4],
    len: u64,
}

impl Checksum {
    pub(super) fn new() -> Self {
        Self { lanes: SEEDS, len: 0 }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        debug_assert!(
            self.len.is_multiple_of(STRIPE as u64),
            "a piece before the last one was not whole stripes"
        );
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        for s in stripes {
            self.stripe(s);
        }
        if !rest.is_empty() {
            let mut last = [0; STRIPE];
            last[..rest.len()].copy_from_slice(rest);
            self.stripe(&last);
        }
        self.len += bytes.len() as u64;
    }

    fn stripe(&mut self, s: &[u8; STRIPE]) {
        for (lane, word) in self.lanes.iter_mut().zip(s.as_chunks::<8>().0) {
            *lane = (lane.rotate_left(29) ^ u64::from_le_bytes(*word)).wrapping_mul(P);
        }
    }

    pub(super) fn finish(self) -> u64 {
        let mut h = self.len.wrapping_mul(P);
        for lane in self.lanes {
            h = mix(h ^ lane);
        }
        h
    }
}

fn mix(mut h: u64) -> u64 {
    h ^= h >> 32;
    h = h.wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^= h >> 32;
    h = h.wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^ (h >> 32)
}

/// The checksum of bytes of this process: the same function as `Slice::<Exposed>::checksum`.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut c = Checksum::new();
    c.update(bytes);
    c.finish()
}
