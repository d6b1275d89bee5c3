//! The checksum of memory: a stated 64-bit hash of the bytes and their number, whatever their address.
//!
//! Four lanes take little-endian 64-bit words in turn, `lane = (rotl(lane, 29) ^ word) * P`; the last stripe of 32
//! bytes is padded with zeros; the lanes and the length are then folded and mixed. Not cryptographic: it finds
//! torn, stale and misplaced data, not an adversary's.

const P: u64 = 0x9e37_79b9_7f4a_7c15;
const SEEDS: [u64; 4] =
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
const STRIPE: usize = 32;

/// A checksum in progress: the pieces may be cut anywhere.
pub(crate) struct Checksum {
    lanes: [u64; 4],
    len: u64,
    /// The bytes behind the last whole stripe: `len % STRIPE` of them.
    partial: [u8; STRIPE],
}

impl Checksum {
    pub(crate) fn new() -> Self {
        Self { lanes: SEEDS, len: 0, partial: [0; STRIPE] }
    }

    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        let held = (self.len % STRIPE as u64) as usize;
        self.len += bytes.len() as u64;
        if held > 0 {
            let (first, rest) = bytes.split_at(bytes.len().min(STRIPE - held));
            self.partial[held..held + first.len()].copy_from_slice(first);
            if held + first.len() < STRIPE {
                return;
            }
            bytes = rest;
            let stripe = self.partial;
            self.stripe(&stripe);
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        for s in stripes {
            self.stripe(s);
        }
        self.partial[..rest.len()].copy_from_slice(rest);
    }

    fn stripe(&mut self, s: &[u8; STRIPE]) {
        for (lane, word) in self.lanes.iter_mut().zip(s.as_chunks::<8>().0) {
            *lane = (lane.rotate_left(29) ^ u64::from_le_bytes(*word)).wrapping_mul(P);
        }
    }

    pub(crate) fn finish(mut self) -> u64 {
        let held = (self.len % STRIPE as u64) as usize;
        if held > 0 {
            let mut last = [0; STRIPE];
            last[..held].copy_from_slice(&self.partial[..held]);
            self.stripe(&last);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r1_a_checksum_does_not_depend_on_how_the_bytes_were_cut() {
        let bytes: Vec<u8> = (0..300u32).map(|i| (i * 7 + i / 31) as u8).collect();
        for len in [0, 1, 31, 32, 33, 64, 95, 300] {
            let whole = checksum(&bytes[..len]);
            for cut in 0..=len {
                for second in [cut, (cut + len) / 2, len] {
                    let mut sum = Checksum::new();
                    sum.update(&bytes[..cut]);
                    sum.update(&bytes[cut..second]);
                    sum.update(&bytes[second..len]);
                    assert_eq!(sum.finish(), whole, "{len} bytes cut at {cut} and {second}");
                }
            }
        }
    }
}
