//! The codec of control messages: what travels in SENDs beside the data. Bytes in, records out; no state.
//!
//! A message is a fixed head and records, each a field of `wire`: `{tag u16, length u32, body}`. Records with an
//! unknown tag are skipped, and so are bytes at the end of a known body, so that a newer peer can say more.
//! Several records share a message where they fit.

use super::event::{ProtocolViolation, ReadRefusal, SenderReason};
use crate::wire::{Malformed, Reader, Writer};

/// Versions of the head: without and with a number.
const VERSION: u8 = 1;
const NUMBERED: u8 = 2;
/// Bytes of the head without a number, and of the number.
pub(super) const HEAD: usize = 42;
pub(super) const NUMBER: usize = 8;
/// Tag and length before a record's body.
pub(super) const FIELD: usize = 6;

/// The credit that a message has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Control,
    /// A notification by SEND.
    Data,
}

/// At the start of every message. The counters are cumulative, so that their order of arrival does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) class: Class,
    /// Epoch of the sender.
    pub(super) epoch: u64,
    /// Every transfer of the sender below this is resolved: the receiver may forget it.
    pub(super) resolved_below: u64,
    /// Receives of this queue pair that were consumed and have been posted again.
    pub(super) data_returned: u64,
    pub(super) control_returned: u64,
    /// Messages that were delivered to the application.
    pub(super) messages: u64,
    /// Bytes of records that were sent on this queue pair before those of this message, in all its generations. Where
    /// there is more than one rail: by that it is known what has to be sent again, and what was received before.
    pub(super) number: Option<u64>,
}

impl Head {
    /// Its bytes.
    pub(super) fn size(&self) -> usize {
        HEAD + if self.number.is_some() { NUMBER } else { 0 }
    }
}

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

    fn write(self, w: &mut Writer<'_>) {
        w.u32(self.imm());
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.u32().map(Self::from_imm)
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
        landed: bool,
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

mod tag {
    pub(super) const HEADER: u16 = 1;
    pub(super) const NOTIFY: u16 = 2;
    pub(super) const CONFIRM: u16 = 3;
    pub(super) const ABORT: u16 = 4;
    pub(super) const ABORT_DONE: u16 = 5;
    pub(super) const ABORT_ACK: u16 = 6;
    pub(super) const QUERY: u16 = 7;
    pub(super) const ANSWER: u16 = 8;
    pub(super) const REVOKE: u16 = 9;
    pub(super) const REVOKED: u16 = 10;
    pub(super) const FRAGMENT: u16 = 11;
    pub(super) const PING: u16 = 12;
    pub(super) const PONG: u16 = 13;
    pub(super) const CLOSE: u16 = 14;
    pub(super) const RAIL_DOWN: u16 = 15;
    pub(super) const FENCED: u16 = 16;
    pub(super) const RESENT: u16 = 17;
    pub(super) const REOPEN: u16 = 18;
    pub(super) const REOPENED: u16 = 19;
    pub(super) const RAIL_TALK: u16 = 20;
    pub(super) const READ_DONE: u16 = 32;
    pub(super) const READ_ASK: u16 = 33;
    pub(super) const READ_REFUSED: u16 = 34;
}

/// Bytes of a fragment record without its payload.
pub(super) const FRAGMENT_OVERHEAD: usize = FIELD + 16;
/// Bytes of a part of a request to write without its payload.
pub(super) const ASK_OVERHEAD: usize = FIELD + 24;
/// Bytes of a record with what is sent again, without that.
pub(super) const RESENT_OVERHEAD: usize = FIELD + 14;
/// Bytes of what two drivers say about a rail, without that.
pub(super) const TALK_OVERHEAD: usize = FIELD + 2;

impl Record<'_> {
    /// Bytes in a message.
    pub(super) fn size(&self) -> usize {
        FIELD
            + match self {
                Self::Header { counts, .. } => 46 + counts.0.len(),
                Self::Notify { .. } => 14,
                Self::Confirm { .. } => 11,
                Self::Abort { slot, .. } => 20 + if slot.is_some() { 4 } else { 0 },
                Self::AbortDone { .. } => 36,
                Self::AbortAck { .. } | Self::Revoke { .. } | Self::Revoked { .. } => 8,
                Self::Query { .. } | Self::Close { .. } => 16,
                Self::Answer { .. } | Self::ReadRefused { .. } => 9,
                Self::ReadDone { .. } => 17,
                Self::ReadAsk { bytes, .. } => 24 + bytes.len(),
                Self::Fragment { bytes, .. } => 16 + bytes.len(),
                Self::Ping | Self::Pong => 0,
                Self::RailDown { .. } | Self::Fenced { .. } => 6,
                Self::Resent { bytes, .. } => 14 + bytes.len(),
                Self::Reopen { .. } => 30,
                Self::Reopened { .. } => 10,
                Self::RailTalk { bytes, .. } => 2 + bytes.len(),
            }
    }

    /// Appends it to a message.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match *self {
            Self::Header { transfer, attempt, slot, grant, bytes, tag, mask, counts } => {
                w.field(tag::HEADER, |w| {
                    slot.write(w.u64(transfer).u16(attempt));
                    w.u64(grant).u64(bytes).u64(tag).u64(mask).raw(counts.0);
                })
            }
            Self::Notify { transfer, attempt, slot } => w.field(tag::NOTIFY, |w| {
                slot.write(w.u64(transfer).u16(attempt));
            }),
            Self::Confirm { transfer, attempt, landed } => w.field(tag::CONFIRM, |w| {
                w.u64(transfer).u16(attempt).u8(u8::from(landed));
            }),
            Self::Abort { transfer, attempt, grant, reason, slot } => w.field(tag::ABORT, |w| {
                w.u64(transfer).u16(attempt).u64(grant).u8(reason.code()).u8(u8::from(slot.is_some()));
                if let Some(slot) = slot {
                    slot.write(w);
                }
            }),
            Self::AbortDone { transfer, attempt, grant, reason, slot, mask, posted, header } => {
                w.field(tag::ABORT_DONE, |w| {
                    slot.write(w.u64(transfer).u16(attempt));
                    w.u64(grant).u64(mask).u32(posted).u8(reason.code()).u8(u8::from(header));
                })
            }
            Self::AbortAck { transfer } => w.field(tag::ABORT_ACK, |w| {
                w.u64(transfer);
            }),
            Self::Query { transfer, grant } => w.field(tag::QUERY, |w| {
                w.u64(transfer).u64(grant);
            }),
            Self::Answer { transfer, landed } => w.field(tag::ANSWER, |w| {
                w.u64(transfer).u8(u8::from(landed));
            }),
            Self::Revoke { grant } => w.field(tag::REVOKE, |w| {
                w.u64(grant);
            }),
            Self::Revoked { grant } => w.field(tag::REVOKED, |w| {
                w.u64(grant);
            }),
            Self::Fragment { message, total, offset, bytes } => w.field(tag::FRAGMENT, |w| {
                w.u64(message).u32(total).u32(offset).raw(bytes);
            }),
            Self::Ping => w.field(tag::PING, |_| {}),
            Self::Pong => w.field(tag::PONG, |_| {}),
            Self::Close { messages, reads } => w.field(tag::CLOSE, |w| {
                w.u64(messages).u64(reads);
            }),
            Self::ReadDone { grant, bytes, reason } => w.field(tag::READ_DONE, |w| {
                w.u64(grant).u64(bytes).u8(reason.map_or(READ_ALL, SenderReason::code));
            }),
            Self::ReadAsk { grant, target, total, offset, bytes } => w.field(tag::READ_ASK, |w| {
                w.u64(grant).u64(target).u32(total).u32(offset).raw(bytes);
            }),
            Self::ReadRefused { target, why } => w.field(tag::READ_REFUSED, |w| {
                w.u64(target).u8(why.code());
            }),
            Self::RailDown { rail, generation } => w.field(tag::RAIL_DOWN, |w| {
                w.u16(rail).u32(generation);
            }),
            Self::Fenced { rail, generation } => w.field(tag::FENCED, |w| {
                w.u16(rail).u32(generation);
            }),
            Self::Resent { qp, start, covered, bytes } => w.field(tag::RESENT, |w| {
                w.u16(qp).u64(start).u32(covered).raw(bytes);
            }),
            Self::Reopen { transfer, attempt, slot, grant, reset } => w.field(tag::REOPEN, |w| {
                slot.write(w.u64(transfer).u16(attempt));
                w.u64(grant).u64(reset);
            }),
            Self::Reopened { transfer, attempt } => w.field(tag::REOPENED, |w| {
                w.u64(transfer).u16(attempt);
            }),
            Self::RailTalk { rail, bytes } => w.field(tag::RAIL_TALK, |w| {
                w.u16(rail).raw(bytes);
            }),
        };
    }
}

/// In the place of a reason: none, for all was read.
const READ_ALL: u8 = u8::MAX;

impl SenderReason {
    fn code(self) -> u8 {
        match self {
            Self::Cancelled => 0,
            Self::Deadline => 1,
            Self::Revoked => 2,
            Self::ConnectionLost => 3,
        }
    }

    /// A code that a newer peer has added reads as `Cancelled`.
    fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Deadline,
            2 => Self::Revoked,
            3 => Self::ConnectionLost,
            _ => Self::Cancelled,
        }
    }
}

/// Builds messages in a buffer that is reused.
#[derive(Debug)]
pub(super) struct Builder {
    buf: Vec<u8>,
    max: usize,
    /// Bytes of the head.
    head: usize,
}

impl Builder {
    /// `max` is `max_control`.
    pub(super) fn new(max: usize) -> Self {
        Self { buf: Vec::with_capacity(max), max, head: 0 }
    }

    pub(super) fn begin(&mut self, head: &Head) {
        self.buf.clear();
        let class = match head.class {
            Class::Control => 0,
            Class::Data => 1,
        };
        let mut w = Writer(&mut self.buf);
        w.u8(if head.number.is_some() { NUMBERED } else { VERSION })
            .u8(class)
            .u64(head.epoch)
            .u64(head.resolved_below)
            .u64(head.data_returned)
            .u64(head.control_returned)
            .u64(head.messages);
        if let Some(number) = head.number {
            w.u64(number);
        }
        debug_assert_eq!(self.buf.len(), head.size());
        self.head = self.buf.len();
    }

    /// Bytes that are left.
    pub(super) fn room(&self) -> usize {
        self.max - self.buf.len()
    }

    /// Appends a record, or answers false if it does not fit.
    pub(super) fn push(&mut self, record: &Record<'_>) -> bool {
        let fits = record.size() <= self.room();
        if fits {
            let before = self.buf.len();
            record.write(&mut self.buf);
            debug_assert_eq!(self.buf.len() - before, record.size());
        }
        fits
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buf
    }

    /// What follows the head.
    pub(super) fn records(&self) -> &[u8] {
        &self.buf[self.head..]
    }
}

/// A message being read.
#[derive(Debug, Clone)]
pub(super) struct Records<'a>(Reader<'a>);

/// Reads the head of a message.
pub(super) fn parse(bytes: &[u8]) -> Result<(Head, Records<'_>), ProtocolViolation> {
    let mut r = Reader::new(bytes, "control message");
    let numbered = match r.u8()? {
        VERSION => false,
        NUMBERED => true,
        _ => return Err(ProtocolViolation::Rule("unknown version of a control message")),
    };
    let class = match r.u8()? {
        0 => Class::Control,
        1 => Class::Data,
        _ => return Err(r.malformed().into()),
    };
    let head = Head {
        class,
        epoch: r.u64()?,
        resolved_below: r.u64()?,
        data_returned: r.u64()?,
        control_returned: r.u64()?,
        messages: r.u64()?,
        number: if numbered { Some(r.u64()?) } else { None },
    };
    Ok((head, Records(r)))
}

impl<'a> Records<'a> {
    /// Those of a message without its head.
    pub(super) fn of(bytes: &'a [u8]) -> Self {
        Self(Reader::new(bytes, "records that were sent again"))
    }

    /// Bytes that have not been read.
    pub(super) fn remaining(&self) -> usize {
        self.0.remaining()
    }

    /// The next record with a tag that we know, or `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Record<'a>>, Malformed> {
        loop {
            let Some((tag, mut r)) = self.0.field()? else { return Ok(None) };
            return Ok(Some(match tag {
                tag::HEADER => {
                    let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(&mut r)?);
                    let (grant, bytes, tag, mask) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
                    let rest = r.take(r.remaining())?;
                    if !rest.len().is_multiple_of(4) {
                        return Err(r.malformed());
                    }
                    Record::Header { transfer, attempt, slot, grant, bytes, tag, mask, counts: Counts(rest) }
                }
                tag::NOTIFY => {
                    Record::Notify { transfer: r.u64()?, attempt: r.u16()?, slot: Slot::read(&mut r)? }
                }
                tag::CONFIRM => {
                    Record::Confirm { transfer: r.u64()?, attempt: r.u16()?, landed: flag(&mut r)? }
                }
                tag::ABORT => {
                    let (transfer, attempt, grant) = (r.u64()?, r.u16()?, r.u64()?);
                    let reason = SenderReason::from_code(r.u8()?);
                    let slot = if flag(&mut r)? { Some(Slot::read(&mut r)?) } else { None };
                    Record::Abort { transfer, attempt, grant, reason, slot }
                }
                tag::ABORT_DONE => {
                    let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(&mut r)?);
                    let (grant, mask, posted) = (r.u64()?, r.u64()?, r.u32()?);
                    let (reason, header) = (SenderReason::from_code(r.u8()?), flag(&mut r)?);
                    Record::AbortDone { transfer, attempt, grant, reason, slot, mask, posted, header }
                }
                tag::ABORT_ACK => Record::AbortAck { transfer: r.u64()? },
                tag::QUERY => Record::Query { transfer: r.u64()?, grant: r.u64()? },
                tag::ANSWER => Record::Answer { transfer: r.u64()?, landed: flag(&mut r)? },
                tag::REVOKE => Record::Revoke { grant: r.u64()? },
                tag::REVOKED => Record::Revoked { grant: r.u64()? },
                tag::FRAGMENT => {
                    let (message, total, offset) = (r.u64()?, r.u32()?, r.u32()?);
                    Record::Fragment { message, total, offset, bytes: r.take(r.remaining())? }
                }
                tag::PING => Record::Ping,
                tag::PONG => Record::Pong,
                tag::CLOSE => Record::Close { messages: r.u64()?, reads: r.u64()? },
                tag::READ_DONE => {
                    let (grant, bytes, code) = (r.u64()?, r.u64()?, r.u8()?);
                    let reason = (code != READ_ALL).then(|| SenderReason::from_code(code));
                    Record::ReadDone { grant, bytes, reason }
                }
                tag::READ_ASK => {
                    let (grant, target, total, offset) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?);
                    Record::ReadAsk { grant, target, total, offset, bytes: r.take(r.remaining())? }
                }
                tag::READ_REFUSED => {
                    Record::ReadRefused { target: r.u64()?, why: ReadRefusal::from_code(r.u8()?) }
                }
                tag::RAIL_DOWN => Record::RailDown { rail: r.u16()?, generation: r.u32()? },
                tag::FENCED => Record::Fenced { rail: r.u16()?, generation: r.u32()? },
                tag::RESENT => {
                    let (qp, start, covered) = (r.u16()?, r.u64()?, r.u32()?);
                    Record::Resent { qp, start, covered, bytes: r.take(r.remaining())? }
                }
                tag::REOPEN => {
                    let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(&mut r)?);
                    Record::Reopen { transfer, attempt, slot, grant: r.u64()?, reset: r.u64()? }
                }
                tag::REOPENED => Record::Reopened { transfer: r.u64()?, attempt: r.u16()? },
                tag::RAIL_TALK => {
                    let rail = r.u16()?;
                    Record::RailTalk { rail, bytes: r.take(r.remaining())? }
                }
                _ => continue,
            }));
        }
    }
}

fn flag(r: &mut Reader<'_>) -> Result<bool, Malformed> {
    match r.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(r.malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: Slot = Slot { index: 0xabc, generation: 0x12345 };

    fn samples() -> Vec<Record<'static>> {
        let (transfer, attempt, grant) = (7, 3, 99);
        let reason = SenderReason::Deadline;
        let mut v = vec![
            Record::Notify { transfer, attempt, slot: SLOT },
            Record::Confirm { transfer, attempt, landed: true },
            Record::Abort { transfer, attempt, grant, reason, slot: Some(SLOT) },
            Record::Abort { transfer, attempt, grant, reason: SenderReason::Revoked, slot: None },
            Record::AbortDone {
                transfer,
                attempt,
                grant,
                reason,
                slot: SLOT,
                mask: 5,
                posted: 2,
                header: true,
            },
            Record::AbortAck { transfer },
            Record::Query { transfer, grant },
            Record::Answer { transfer, landed: false },
            Record::Revoke { grant },
            Record::Revoked { grant },
            Record::Fragment { message: 1, total: 10, offset: 3, bytes: b"hello" },
            Record::Ping,
            Record::Pong,
            Record::Close { messages: 12, reads: 3 },
            Record::ReadDone { grant, bytes: 77, reason: None },
            Record::ReadDone { grant, bytes: 77, reason: Some(reason) },
            Record::ReadAsk { grant, target: 100, total: 9, offset: 4, bytes: b"where" },
            Record::ReadRefused { target: 100, why: ReadRefusal::OutOfRange },
            Record::RailDown { rail: 3, generation: 4 },
            Record::Fenced { rail: 3, generation: 4 },
            Record::Resent { qp: 63, start: 1 << 40, covered: 20, bytes: b"records" },
            Record::Reopen { transfer, attempt, slot: SLOT, grant, reset: 12 },
            Record::Reopened { transfer, attempt },
            Record::RailTalk { rail: 1, bytes: b"an address" },
        ];
        for counts in [&[][..], &[1, 0, 0, 0, 0, 1, 0, 0]] {
            let counts = Counts(counts);
            v.push(Record::Header {
                transfer,
                attempt,
                slot: SLOT,
                grant,
                bytes: 5,
                tag: 6,
                mask: 3,
                counts,
            });
        }
        v
    }

    fn head(class: Class) -> Head {
        let number = (class == Class::Data).then_some(6);
        Head {
            class,
            epoch: 1,
            resolved_below: 2,
            data_returned: 3,
            control_returned: 4,
            messages: 5,
            number,
        }
    }

    #[test]
    fn b1_every_record_survives_a_round_trip() {
        for class in [Class::Control, Class::Data] {
            let mut b = Builder::new(4096);
            b.begin(&head(class));
            for r in samples() {
                assert!(b.push(&r), "{r:?}");
            }
            let bytes = b.bytes().to_vec();
            let (h, mut records) = parse(&bytes).expect("our own");
            assert_eq!(h, head(class));
            for want in samples() {
                assert_eq!(records.next().expect("our own"), Some(want));
            }
            assert_eq!(records.next(), Ok(None));
        }
    }

    #[test]
    fn b1_a_full_builder_takes_no_more() {
        let mut b = Builder::new(HEAD + 7);
        b.begin(&head(Class::Control));
        assert!(b.push(&Record::Ping) && !b.push(&Record::Pong));
        assert_eq!(b.room(), 1);
    }

    #[test]
    fn b1_unknown_records_and_longer_bodies_are_skipped() {
        let mut b = Builder::new(4096);
        b.begin(&head(Class::Control));
        let mut bytes = b.bytes().to_vec();
        Writer(&mut bytes).field(999, |w| {
            w.raw(&[1; 9]);
        });
        Writer(&mut bytes).field(tag::REVOKE, |w| {
            w.u64(4).u64(0);
        });
        let (_, mut records) = parse(&bytes).expect("valid");
        assert_eq!(records.next(), Ok(Some(Record::Revoke { grant: 4 })));
        assert_eq!(records.next(), Ok(None));
    }

    #[test]
    fn b1_garbage_is_an_error_and_never_a_panic() {
        let mut b = Builder::new(4096);
        b.begin(&head(Class::Control));
        for r in samples() {
            b.push(&r);
        }
        let good = b.bytes().to_vec();
        let read = |bytes: &[u8]| {
            let Ok((_, mut records)) = parse(bytes) else { return };
            while let Ok(Some(_)) = records.next() {}
        };
        for cut in 0..good.len() {
            read(&good[..cut]);
            assert!(cut >= HEAD || parse(&good[..cut]).is_err());
        }
        let mut seed = 1u64;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..3 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (seed >> 33) as usize % bad.len();
                bad[at] = (seed >> 24) as u8;
            }
            read(&bad);
        }
    }
}
