//! What control messages are made of: records. How each is written is in `codec`.

use super::event::{ReadRefusal, Resolution, SenderReason};

/// Which notifications name a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// 12 bits.
    pub(super) index: u16,
    /// 20 bits.
    pub(super) generation: u32,
}

impl Slot {
    pub(super) fn imm(self) -> u32 {
        u32::from(self.index) << 20 | self.generation
    }

    pub(super) fn from_imm(imm: u32) -> Self {
        Self { index: (imm >> 20) as u16, generation: imm & 0xf_ffff }
    }

    /// The generation after this one.
    pub(super) fn next_generation(generation: u32) -> u32 {
        (generation + 1) & 0xf_ffff
    }
}

/// The counts of a header, by queue pair of its mask: little-endian u32, empty on an ordered transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts<'a>(pub(super) &'a [u8]);

impl Counts<'_> {
    pub(super) fn len(&self) -> usize {
        self.0.len() / 4
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]))
    }
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    /// What a transfer consists of, so that the receiver knows when it has all of it.
    Header {
        transfer: u64,
        attempt: u16,
        slot: Slot,
        grant: u64,
        bytes: u64,
        tag: u64,
        /// Queue pairs that notify.
        mask: u64,
        counts: Counts<'a>,
    },
    /// The last thing of a transfer on a queue pair, where there is no immediate data.
    Notify {
        transfer: u64,
        attempt: u16,
        slot: Slot,
    },
    /// The receiver's word: delivered, or (`landed` false) complete and refused, because it was revoked.
    Confirm {
        transfer: u64,
        attempt: u16,
        landed: bool,
    },
    /// The transfer will not be completed. `slot` is `None` if nothing was ever posted for it.
    Abort {
        transfer: u64,
        attempt: u16,
        grant: u64,
        reason: SenderReason,
        slot: Option<Slot>,
    },
    /// Nothing more comes on this queue pair, where `posted` notifications were posted.
    AbortDone {
        transfer: u64,
        attempt: u16,
        grant: u64,
        reason: SenderReason,
        slot: Slot,
        /// Queue pairs that send this record.
        mask: u64,
        posted: u32,
        /// The header was posted, too.
        header: bool,
    },
    /// The receiver is done with an aborted transfer.
    AbortAck {
        transfer: u64,
    },
    /// What became of a transfer of an earlier connection?
    Query {
        transfer: u64,
        grant: u64,
    },
    Answer {
        transfer: u64,
        resolution: Resolution,
    },
    /// Do not use this grant any more.
    Revoke {
        grant: u64,
    },
    /// It was unused and is burned.
    Revoked {
        grant: u64,
    },
    /// A part of a message of the application.
    Fragment {
        message: u64,
        total: u32,
        offset: u32,
        bytes: &'a [u8],
    },
    Ping,
    Pong,
    /// The sender of this has nothing left to send but answers. `messages` counts all it ever sent, and `reads` the
    /// READ_DONE and READ_ASK.
    Close {
        messages: u64,
        reads: u64,
    },
    /// A grant to read is not used any more: by READs everything was read, or why not.
    ReadDone {
        grant: u64,
        bytes: u64,
        reason: Option<SenderReason>,
    },
    /// A part of a request to write the blocks of `grant` under the grant `target`.
    ReadAsk {
        grant: u64,
        target: u64,
        total: u32,
        offset: u32,
        bytes: &'a [u8],
    },
    /// Nothing was written under `target`, and nothing will be.
    ReadRefused {
        target: u64,
        why: ReadRefusal,
    },
    /// The sender of this uses a rail no more, which had come up `generation` times before.
    RailDown {
        rail: u16,
        generation: u32,
    },
    /// The sender of this has destroyed its queue pairs of the rail, and has taken all that had come on them.
    Fenced {
        rail: u16,
        generation: u32,
    },
    /// Records that were sent on a queue pair that failed, `covered` bytes of them from number `start` on; without those
    /// that concerned that queue pair only.
    Resent {
        qp: u16,
        start: u64,
        covered: u32,
        bytes: &'a [u8],
    },
    /// The transfer begins again, since a rail that carried a part of it has failed. What came on the queue pairs of
    /// `reset` counts for nothing.
    Reopen {
        transfer: u64,
        attempt: u16,
        slot: Slot,
        grant: u64,
        reset: u64,
    },
    /// It has not been delivered, and will not be by what an earlier attempt has sent.
    Reopened {
        transfer: u64,
        attempt: u16,
    },
    /// What the two sides have to tell each other to bring a rail up again.
    RailTalk {
        rail: u16,
        bytes: &'a [u8],
    },
}
