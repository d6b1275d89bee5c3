//! What the two sides say over their socket, beside the rings: the hello of the side that dials, and then what needs a
//! descriptor or has to wake somebody.
//!
//! ```text
//!   hello    preamble 32 bytes · ring bytes u32 · zero u32 · probe    with the memfd of the rings
//!   wake     1                                                        look at the rings
//!   lend     2 · name u64 · bytes u64                                 with a memfd
//!   forget   3 · name u64                                             it is not referred to any more
//!   memory   5 · name u64 · bytes u64 · address u64 · GPU 16 bytes · handle 64 bytes     an allocation of a GPU is lent
//!   returned 6 · name u64                                             it is not open here any more
//!   slots    7 · name u64 · bytes u64                                 with a memfd: what is staged of GPUs comes in it
//!   reads    4 · verdict u8 · probe                                   whether the sender can read the receiver's memory
//!   probe    address u64 · what is there, 16 bytes
//! ```
//! Integers are little-endian, and each is one message of the socket.

use super::super::frame::{PREAMBLE, Preamble};
use super::super::tuning::RING_BYTES;
use crate::cuda::Told;

/// Bytes of the longest.
pub(super) const MAX_WORD: usize = MEMORY;
const MEMORY: usize = 1 + 24 + 16 + 64;

pub(super) const HELLO: usize = PREAMBLE + 8 + PROBE;
const PROBE: usize = 8 + TOKEN;
pub(super) const TOKEN: usize = 16;

/// Where a side has put random bytes, for the other to try whether it can read them there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) at: u64,
    pub(super) token: [u8; TOKEN],
}

impl Probe {
    fn encode(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&self.at.to_le_bytes());
        out[8..PROBE].copy_from_slice(&self.token);
    }

    fn decode(b: &[u8]) -> Option<Self> {
        let (at, token) = b.split_first_chunk()?;
        Some(Self { at: u64::from_le_bytes(*at), token: token.try_into().ok()? })
    }
}

/// Whether a side can read memory of the other that it was not lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Yes,
    /// The process is in another pid namespace.
    NotVisible,
    /// The system does not permit it.
    NotPermitted,
    /// It failed otherwise.
    Failed,
}

impl Verdict {
    const ALL: [Self; 4] = [Self::Yes, Self::NotVisible, Self::NotPermitted, Self::Failed];

    /// Why it is not "yes", for the side whose memory it is.
    pub(super) fn why_not(self) -> Option<&'static str> {
        match self {
            Self::Yes => None,
            Self::NotVisible => Some("the peer is in a pid namespace that does not show this process"),
            Self::NotPermitted => Some(
                "the system does not permit the peer to read this process (its uid, kernel.yama.ptrace_scope, CAP_SYS_PTRACE, PR_SET_DUMPABLE here)",
            ),
            Self::Failed => Some("the peer failed to read this process"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) preamble: Preamble,
    pub(super) probe: Probe,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..PREAMBLE].copy_from_slice(&self.preamble.encode());
        out[PREAMBLE..PREAMBLE + 4].copy_from_slice(&(RING_BYTES as u32).to_le_bytes());
        self.probe.encode(&mut out[PREAMBLE + 8..]);
        out
    }

    /// `None` for anything that no peer of ours sends, and for rings of another size.
    pub(super) fn decode(b: &[u8]) -> Option<Self> {
        let b: &[u8; HELLO] = b.try_into().ok()?;
        let (preamble, rest) = b.split_first_chunk()?;
        let (ring, rest) = rest.split_first_chunk()?;
        let (_, probe) = rest.split_first_chunk::<4>()?;
        let ours = u32::from_le_bytes(*ring) == RING_BYTES as u32;
        let preamble = Preamble::decode(preamble).filter(|_| ours)?;
        Some(Self { preamble, probe: Probe::decode(probe)? })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    Wake,
    Lend { name: u64, bytes: u64 },
    Forget { name: u64 },
    Reads { verdict: Verdict, probe: Probe },
    Memory(Told),
    Returned { name: u64 },
    Slots { name: u64, bytes: u64 },
}

impl Word {
    /// The message, and how much of the array it is.
    pub(super) fn encode(&self) -> ([u8; MAX_WORD], usize) {
        let mut out = [0; MAX_WORD];
        let len = match self {
            Self::Wake => {
                out[0] = 1;
                1
            }
            Self::Lend { name, bytes } | Self::Slots { name, bytes } => {
                out[0] = if matches!(self, Self::Lend { .. }) { 2 } else { 7 };
                out[1..9].copy_from_slice(&name.to_le_bytes());
                out[9..17].copy_from_slice(&bytes.to_le_bytes());
                17
            }
            Self::Forget { name } => {
                out[0] = 3;
                out[1..9].copy_from_slice(&name.to_le_bytes());
                9
            }
            Self::Reads { verdict, probe } => {
                out[0] = 4;
                out[1] = Verdict::ALL.iter().position(|v| v == verdict).unwrap_or_default() as u8;
                probe.encode(&mut out[2..]);
                2 + PROBE
            }
            Self::Memory(told) => {
                out[0] = 5;
                out[1..9].copy_from_slice(&told.name.to_le_bytes());
                out[9..17].copy_from_slice(&told.bytes.to_le_bytes());
                out[17..25].copy_from_slice(&told.base.to_le_bytes());
                out[25..41].copy_from_slice(&told.uuid);
                out[41..].copy_from_slice(&told.handle);
                MEMORY
            }
            Self::Returned { name } => {
                out[0] = 6;
                out[1..9].copy_from_slice(&name.to_le_bytes());
                9
            }
        };
        (out, len)
    }

    /// `None` for anything that no peer of ours sends.
    pub(super) fn decode(b: &[u8]) -> Option<Self> {
        let (&kind, rest) = b.split_first()?;
        match (kind, rest.len()) {
            (1, 0) => Some(Self::Wake),
            (2 | 7, 16) => {
                let (name, bytes) = rest.split_first_chunk()?;
                let (name, bytes) = (u64::from_le_bytes(*name), u64::from_le_bytes(bytes.try_into().ok()?));
                Some(if kind == 2 { Self::Lend { name, bytes } } else { Self::Slots { name, bytes } })
            }
            (3, 8) => Some(Self::Forget { name: u64::from_le_bytes(rest.try_into().ok()?) }),
            (4, 25) => {
                let verdict = *Verdict::ALL.get(usize::from(rest[0]))?;
                Some(Self::Reads { verdict, probe: Probe::decode(&rest[1..])? })
            }
            (5, 104) => {
                let (numbers, rest) = rest.split_first_chunk::<24>()?;
                let (uuid, handle) = rest.split_first_chunk()?;
                let number = |at: usize| numbers[at..].first_chunk().map(|b| u64::from_le_bytes(*b));
                let (name, bytes, base) = (number(0)?, number(8)?, number(16)?);
                Some(Self::Memory(Told { name, bytes, base, uuid: *uuid, handle: handle.try_into().ok()? }))
            }
            (6, 8) => Some(Self::Returned { name: u64::from_le_bytes(rest.try_into().ok()?) }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_words_travel_as_they_are_and_others_are_refused() {
        let probe = Probe { at: 1 << 40, token: [9; TOKEN] };
        let mut words = vec![Word::Wake, Word::Lend { name: 7, bytes: 1 << 33 }, Word::Forget { name: 1 }];
        words.extend([Word::Returned { name: 3 }, Word::Slots { name: 8, bytes: 1 << 24 }]);
        let (uuid, handle) = ([7; 16], [8; 64]);
        words.push(Word::Memory(Told { name: 2, bytes: 1 << 37, base: 1 << 46, uuid, handle }));
        words.extend(Verdict::ALL.map(|verdict| Word::Reads { verdict, probe }));
        for word in words {
            let (bytes, len) = word.encode();
            assert_eq!(Word::decode(&bytes[..len]), Some(word));
            assert_eq!(Word::decode(&bytes[..len - 1]), None);
            assert_eq!(Word::decode(&[&bytes[..len], &[0]].concat()), None);
        }
        assert_eq!(Word::decode(&[9]), None);
        let mut reads = Word::Reads { verdict: Verdict::Yes, probe }.encode().0;
        reads[1] = 4;
        assert_eq!(Word::decode(&reads[..26]), None, "no such verdict");
    }

    #[test]
    fn b1_a_hello_of_another_size_or_version_is_refused() {
        let preamble = Preamble { target: 1, own: 2, key: 3 };
        let hello = Hello { preamble, probe: Probe { at: 5, token: [1; TOKEN] } };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        assert_eq!(Hello::decode(&bytes[1..]), None);
        for at in [0, PREAMBLE] {
            let mut other = bytes;
            other[at] ^= 1;
            assert_eq!(Hello::decode(&other), None);
        }
    }
}
