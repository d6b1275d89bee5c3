//! What travels on a connection: a preamble, then frames.
//!
//! ```text
//!   preamble  magic 8 · target QPN u32 · own QPN u32 · the target's key u64 · zero u64            32 bytes
//!   frame     header, descriptors, then the payloads of the descriptors in their order
//!   header    magic u8 · version u8 · descriptors u16 · acknowledged MSN u32 · payload bytes u32 · zero u32   16 bytes
//!   descriptor  opcode u8 · flags u8 · status u16 · MSN u32 · immediate (big-endian) · rkey u32 ·
//!               address u64 · total u32 · offset u32 · length u32                                 36 bytes
//! ```
//! Over shared memory ([`FLAG_REFERENCES`]) a descriptor can say instead where its payload is: in the payload's place are then
//! `status` references of 24 bytes (`shm/reference.rs`). Where that is memory of a GPU ([`FLAG_FAR`]), it does not count in the
//! frame's payload. A WRITE of pages ([`FLAG_PAGES`]) has a table of `status` pairs there (`shm/pages.rs`), whose bytes count in the
//! frame's payload instead of its own.
//!
//! Integers are little-endian, but an immediate is in network order, as in the BTH's ImmDt. A message sequence
//! number (MSN) counts the requests of one direction from 0. Acknowledgements are of executed messages: RC's are
//! cumulative, in every header; without order they travel as descriptors, 64 messages each.

use subtle::ConstantTimeEq;

use super::shm::{MAX_REFERENCES, table_bytes};
use super::tuning::{FRAME_BYTES, MAX_DESCS};
use crate::pages::MAX_PAIRS;
use crate::provider::WcStatus;

pub(super) const PREAMBLE: usize = 32;
pub(super) const HEADER: usize = 16;
pub(super) const DESC: usize = 36;

const MAGIC: &[u8; 8] = b"landfal1";
const FRAME_MAGIC: u8 = 0x4c;
const VERSION: u8 = 1;

/// The first bytes of each side: whom it means, who it is, and the secret that only the real peer was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Preamble {
    pub(super) target: u32,
    pub(super) own: u32,
    pub(super) key: u64,
}

impl Preamble {
    pub(super) fn encode(&self) -> [u8; PREAMBLE] {
        let mut out = [0; PREAMBLE];
        out[..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&self.target.to_le_bytes());
        out[12..16].copy_from_slice(&self.own.to_le_bytes());
        out[16..24].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    pub(super) fn decode(b: &[u8; PREAMBLE]) -> Option<Self> {
        (b[..8] == *MAGIC).then(|| Self { target: u32_at(b, 8), own: u32_at(b, 12), key: u64_at(b, 16) })
    }

    /// Whether `said` is what the peer has to show. In the same time, whichever bit differs: a stranger learns nothing of the key.
    pub(super) fn admits(&self, said: &Self) -> bool {
        let is = |a: u32, b: u32| a.ct_eq(&b);
        (is(self.target, said.target) & is(self.own, said.own) & self.key.ct_eq(&said.key)).into()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) descs: u16,
    pub(super) ack: u32,
    pub(super) payload: u32,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0] = FRAME_MAGIC;
        out[1] = VERSION;
        out[2..4].copy_from_slice(&self.descs.to_le_bytes());
        out[4..8].copy_from_slice(&self.ack.to_le_bytes());
        out[8..12].copy_from_slice(&self.payload.to_le_bytes());
        out
    }

    /// `None` for anything that no peer of ours sends.
    pub(super) fn decode(b: &[u8; HEADER]) -> Option<Self> {
        let this = Self { descs: u16::from_le_bytes([b[2], b[3]]), ack: u32_at(b, 4), payload: u32_at(b, 8) };
        let sane = b[0] == FRAME_MAGIC
            && b[1] == VERSION
            && usize::from(this.descs) <= MAX_DESCS
            && this.payload as usize <= FRAME_BYTES;
        sane.then_some(this)
    }
}

/// What a descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opcode {
    /// A segment of a message into the receive at the head of the peer's queue.
    Send,
    /// A segment of a message to memory of the peer.
    Write,
    /// Asks for `total` bytes at `addr`.
    ReadRequest,
    /// A segment of the answer to the READ with this MSN.
    ReadResponse,
    /// On the eight bytes at `addr`. Its payload is the operands: two numbers of 64 bits, or one.
    CompareSwap,
    FetchAdd,
    /// The answer to one: `addr` is what was there before.
    AtomicResponse,
    /// Executed: `msn`, and `msn + 1 + n` for each bit n of `addr`. Without order only.
    Ack,
    /// Failed: `msn`, with `status`. The last descriptor of a connection.
    Nak,
}

impl Opcode {
    /// A request that the peer answers with more than an acknowledgement.
    pub(super) fn has_answer(self) -> bool {
        matches!(self, Self::ReadRequest | Self::CompareSwap | Self::FetchAdd)
    }
}

/// The message has an immediate.
pub(super) const FLAG_IMM: u8 = 1;
/// The payload does not travel: `status` references to it do.
pub(super) const FLAG_REFERENCES: u8 = 2;
/// Those are to memory of a GPU, and their bytes are none of the frame's: no bound of it holds for them.
pub(super) const FLAG_FAR: u8 = 4;
/// A WRITE of many pieces: a table of `status` pairs of blocks travels, and no payload.
pub(super) const FLAG_PAGES: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Desc {
    pub(super) opcode: Opcode,
    pub(super) flags: u8,
    pub(super) status: u16,
    pub(super) msn: u32,
    pub(super) imm: u32,
    pub(super) rkey: u32,
    pub(super) addr: u64,
    /// Bytes of the whole message.
    pub(super) total: u32,
    /// Where in the message this segment starts.
    pub(super) offset: u32,
    /// Payload bytes of this descriptor.
    pub(super) len: u32,
}

impl Desc {
    pub(super) fn new(opcode: Opcode, msn: u32) -> Self {
        Self { opcode, flags: 0, status: 0, msn, imm: 0, rkey: 0, addr: 0, total: 0, offset: 0, len: 0 }
    }

    pub(super) fn imm(&self) -> Option<u32> {
        (self.flags & FLAG_IMM != 0).then_some(self.imm)
    }

    /// How many references travel instead of the payload, where they do.
    pub(super) fn references(&self) -> Option<usize> {
        (self.flags & FLAG_REFERENCES != 0).then_some(usize::from(self.status))
    }

    /// Its payload is not counted in the frame's.
    pub(super) fn is_far(&self) -> bool {
        self.flags & FLAG_FAR != 0
    }

    pub(super) fn set_far(&mut self) {
        self.flags |= FLAG_FAR;
    }

    /// Bytes of the table that travels, where one does.
    pub(super) fn table(&self) -> Option<usize> {
        (self.flags & FLAG_PAGES != 0).then(|| table_bytes(self.status.into()))
    }

    /// Bytes that count in the frame's payload.
    pub(super) fn counted(&self) -> u32 {
        match self.table() {
            Some(table) => table as u32,
            None if self.is_far() => 0,
            None => self.len,
        }
    }

    pub(super) fn set_pages(&mut self, pairs: usize) {
        self.flags |= FLAG_PAGES;
        self.status = pairs as u16;
    }

    pub(super) fn set_references(&mut self, n: usize) {
        self.flags |= FLAG_REFERENCES;
        self.status = n as u16;
    }

    pub(super) fn set_imm(&mut self, imm: Option<u32>) {
        if let Some(imm) = imm {
            self.flags |= FLAG_IMM;
            self.imm = imm;
        }
    }

    pub(super) fn encode(&self) -> [u8; DESC] {
        let mut out = [0; DESC];
        out[0] = match self.opcode {
            Opcode::Send => 1,
            Opcode::Write => 2,
            Opcode::ReadRequest => 3,
            Opcode::ReadResponse => 4,
            Opcode::Ack => 5,
            Opcode::Nak => 6,
            Opcode::CompareSwap => 7,
            Opcode::FetchAdd => 8,
            Opcode::AtomicResponse => 9,
        };
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.status.to_le_bytes());
        out[4..8].copy_from_slice(&self.msn.to_le_bytes());
        out[8..12].copy_from_slice(&self.imm.to_be_bytes());
        out[12..16].copy_from_slice(&self.rkey.to_le_bytes());
        out[16..24].copy_from_slice(&self.addr.to_le_bytes());
        out[24..28].copy_from_slice(&self.total.to_le_bytes());
        out[28..32].copy_from_slice(&self.offset.to_le_bytes());
        out[32..36].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// `None` for an unknown opcode, a segment outside of its message, or payload or references where none belong.
    pub(super) fn decode(b: &[u8; DESC]) -> Option<Self> {
        let opcode = match b[0] {
            1 => Opcode::Send,
            2 => Opcode::Write,
            3 => Opcode::ReadRequest,
            4 => Opcode::ReadResponse,
            5 => Opcode::Ack,
            6 => Opcode::Nak,
            7 => Opcode::CompareSwap,
            8 => Opcode::FetchAdd,
            9 => Opcode::AtomicResponse,
            _ => return None,
        };
        let this = Self {
            opcode,
            flags: b[1],
            status: u16::from_le_bytes([b[2], b[3]]),
            msn: u32_at(b, 4),
            imm: u32::from_be_bytes([b[8], b[9], b[10], b[11]]),
            rkey: u32_at(b, 12),
            addr: u64_at(b, 16),
            total: u32_at(b, 24),
            offset: u32_at(b, 28),
            len: u32_at(b, 32),
        };
        let referable = match this.references() {
            None => !this.is_far(),
            Some(n) => {
                let carries = matches!(opcode, Opcode::Send | Opcode::Write | Opcode::ReadResponse);
                carries && this.len > 0 && (1..=MAX_REFERENCES).contains(&n)
            }
        };
        let sane = match opcode {
            Opcode::Send | Opcode::Write | Opcode::ReadResponse => {
                // Only an empty message has an empty segment: a descriptor always makes progress.
                this.offset.checked_add(this.len).is_some_and(|end| end <= this.total)
                    && (this.len > 0 || this.total == 0)
            }
            Opcode::CompareSwap => (this.total, this.offset, this.len) == (16, 0, 16),
            Opcode::FetchAdd => (this.total, this.offset, this.len) == (8, 0, 8),
            Opcode::ReadRequest | Opcode::AtomicResponse | Opcode::Ack | Opcode::Nak => this.len == 0,
        };
        let one = this.offset == 0 && this.len == this.total && this.len > 0;
        let whole = opcode == Opcode::Write && one && this.references().is_none();
        let paged = this.table().is_none() || (whole && (1..=MAX_PAIRS).contains(&this.status.into()));
        (sane && referable && paged).then_some(this)
    }
}

/// Why a responder refuses, on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nak {
    Access,
    InvalidRequest,
    RnrExceeded,
    Operation,
}

impl Nak {
    pub(super) fn code(self) -> u16 {
        match self {
            Self::Access => 1,
            Self::InvalidRequest => 2,
            Self::RnrExceeded => 3,
            Self::Operation => 4,
        }
    }

    /// The requester's status. A code of a newer peer is a failure all the same.
    pub(super) fn status(code: u16) -> WcStatus {
        match code {
            1 => WcStatus::RemoteAccess,
            2 => WcStatus::RemoteInvalidRequest,
            3 => WcStatus::RnrRetryExceeded,
            _ => WcStatus::RemoteOperation,
        }
    }
}

fn u32_at<const N: usize>(b: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at<const N: usize>(b: &[u8; N], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_immediate_is_big_endian_on_the_wire() {
        let mut d = Desc::new(Opcode::Send, 7);
        d.set_imm(Some(0x89ab_cdef));
        assert_eq!(d.encode()[8..12], [0x89, 0xab, 0xcd, 0xef]);
        assert_eq!(Desc::decode(&d.encode()).unwrap().imm(), Some(0x89ab_cdef));
        d.set_imm(Some(1));
        assert_eq!(d.encode()[8..12], [0, 0, 0, 1]);
    }

    #[test]
    fn b1_descriptors_that_make_no_sense_are_refused() {
        let mut d = Desc::new(Opcode::Write, 0);
        (d.total, d.offset, d.len) = (10, 4, 6);
        assert_eq!(Desc::decode(&d.encode()), Some(d));
        d.len = 7;
        assert_eq!(Desc::decode(&d.encode()), None);
        (d.offset, d.len) = (u32::MAX, 2);
        assert_eq!(Desc::decode(&d.encode()), None);
        (d.offset, d.len) = (0, 0);
        assert_eq!(Desc::decode(&d.encode()), None, "an empty segment of a message with bytes");
        let mut ack = Desc::new(Opcode::Ack, 0);
        ack.len = 1;
        assert_eq!(Desc::decode(&ack.encode()), None);
        for (opcode, len) in [(Opcode::CompareSwap, 16), (Opcode::FetchAdd, 8)] {
            let mut atomic = Desc::new(opcode, 0);
            (atomic.total, atomic.len) = (len, len);
            assert_eq!(Desc::decode(&atomic.encode()), Some(atomic));
            (atomic.total, atomic.len) = (24 - len, 24 - len);
            assert_eq!(Desc::decode(&atomic.encode()), None, "the other's operands");
            (atomic.total, atomic.offset, atomic.len) = (2 * len, len, len);
            assert_eq!(Desc::decode(&atomic.encode()), None, "a segment of operands");
        }
        for (opcode, len, n, sane) in [
            (Opcode::Write, 6, 1, true),
            (Opcode::ReadResponse, 6, MAX_REFERENCES, true),
            (Opcode::Send, 6, MAX_REFERENCES + 1, false),
            (Opcode::Send, 6, 0, false),
            (Opcode::Write, 0, 1, false),
            (Opcode::Ack, 0, 1, false),
            (Opcode::FetchAdd, 8, 1, false),
        ] {
            let mut referring = Desc { total: len, len, ..Desc::new(opcode, 0) };
            referring.set_references(n);
            let decoded = Desc::decode(&referring.encode());
            assert_eq!(decoded, sane.then_some(referring), "{opcode:?} of {len} bytes with {n} references");
        }
        let mut raw = d.encode();
        raw[0] = 77;
        assert_eq!(Desc::decode(&raw), None);
    }
}
