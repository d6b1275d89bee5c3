//! The codec of records, each a field of `wire`: `{tag u16, length u32, body}`. Bytes in, a record out; no state.
//!
//! A record with an unknown tag is skipped, and so are bytes at the end of a known body, so that a newer peer can say more.

use super::event::{ReadRefusal, Resolution, SenderReason};
use super::record::{Counts, Record, Slot};
use crate::wire::{Malformed, Reader, Writer};

/// Tag and length before a record's body.
pub(super) const FIELD: usize = 6;

pub(super) mod tag {
    pub(in super::super) const HEADER: u16 = 1;
    pub(in super::super) const NOTIFY: u16 = 2;
    pub(in super::super) const CONFIRM: u16 = 3;
    pub(in super::super) const ABORT: u16 = 4;
    pub(in super::super) const ABORT_DONE: u16 = 5;
    pub(in super::super) const ABORT_ACK: u16 = 6;
    pub(in super::super) const QUERY: u16 = 7;
    pub(in super::super) const ANSWER: u16 = 8;
    pub(in super::super) const REVOKE: u16 = 9;
    pub(in super::super) const REVOKED: u16 = 10;
    pub(in super::super) const FRAGMENT: u16 = 11;
    pub(in super::super) const PING: u16 = 12;
    pub(in super::super) const PONG: u16 = 13;
    pub(in super::super) const CLOSE: u16 = 14;
    pub(in super::super) const RAIL_DOWN: u16 = 15;
    pub(in super::super) const FENCED: u16 = 16;
    pub(in super::super) const RESENT: u16 = 17;
    pub(in super::super) const REOPEN: u16 = 18;
    pub(in super::super) const REOPENED: u16 = 19;
    pub(in super::super) const RAIL_TALK: u16 = 20;
    pub(in super::super) const READ_DONE: u16 = 32;
    pub(in super::super) const READ_ASK: u16 = 33;
    pub(in super::super) const READ_REFUSED: u16 = 34;
}

/// Bytes of a fragment record without its payload.
pub(super) const FRAGMENT_OVERHEAD: usize = FIELD + 16;
/// Bytes of a part of a request to write without its payload.
pub(super) const ASK_OVERHEAD: usize = FIELD + 24;
/// Bytes of a record with what is sent again, without that.
pub(super) const RESENT_OVERHEAD: usize = FIELD + 14;
/// Bytes of what two drivers say about a rail, without that.
pub(super) const TALK_OVERHEAD: usize = FIELD + 2;

impl Slot {
    fn write(self, w: &mut Writer<'_>) {
        w.u32(self.imm());
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.u32().map(Self::from_imm)
    }
}

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
            Self::Answer { transfer, resolution } => w.field(tag::ANSWER, |w| {
                w.u64(transfer).u8(resolution.code());
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

impl<'a> Record<'a> {
    /// The record with this tag and body; `None` where we do not know the tag.
    pub(super) fn read(tag: u16, r: &mut Reader<'a>) -> Result<Option<Self>, Malformed> {
        Ok(Some(match tag {
            tag::HEADER => {
                let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(r)?);
                let (grant, bytes, tag, mask) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
                let rest = r.take(r.remaining())?;
                if !rest.len().is_multiple_of(4) {
                    return Err(r.malformed());
                }
                Record::Header { transfer, attempt, slot, grant, bytes, tag, mask, counts: Counts(rest) }
            }
            tag::NOTIFY => Record::Notify { transfer: r.u64()?, attempt: r.u16()?, slot: Slot::read(r)? },
            tag::CONFIRM => Record::Confirm { transfer: r.u64()?, attempt: r.u16()?, landed: flag(r)? },
            tag::ABORT => {
                let (transfer, attempt, grant) = (r.u64()?, r.u16()?, r.u64()?);
                let reason = SenderReason::from_code(r.u8()?);
                let slot = if flag(r)? { Some(Slot::read(r)?) } else { None };
                Record::Abort { transfer, attempt, grant, reason, slot }
            }
            tag::ABORT_DONE => {
                let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(r)?);
                let (grant, mask, posted) = (r.u64()?, r.u64()?, r.u32()?);
                let (reason, header) = (SenderReason::from_code(r.u8()?), flag(r)?);
                Record::AbortDone { transfer, attempt, grant, reason, slot, mask, posted, header }
            }
            tag::ABORT_ACK => Record::AbortAck { transfer: r.u64()? },
            tag::QUERY => Record::Query { transfer: r.u64()?, grant: r.u64()? },
            tag::ANSWER => Record::Answer { transfer: r.u64()?, resolution: Resolution::from_code(r.u8()?) },
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
                let (transfer, attempt, slot) = (r.u64()?, r.u16()?, Slot::read(r)?);
                Record::Reopen { transfer, attempt, slot, grant: r.u64()?, reset: r.u64()? }
            }
            tag::REOPENED => Record::Reopened { transfer: r.u64()?, attempt: r.u16()? },
            tag::RAIL_TALK => {
                let rail = r.u16()?;
                Record::RailTalk { rail, bytes: r.take(r.remaining())? }
            }
            _ => return Ok(None),
        }))
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

impl Resolution {
    fn code(self) -> u8 {
        match self {
            Self::NotDelivered => 0,
            Self::Landed => 1,
            Self::Unknown => 2,
        }
    }

    /// A code that a newer peer has added says nothing that we know.
    fn from_code(code: u8) -> Self {
        match code {
            0 => Self::NotDelivered,
            1 => Self::Landed,
            _ => Self::Unknown,
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
pub(super) mod tests {
    use super::*;

    const SLOT: Slot = Slot { index: 0xabc, generation: 0x12345 };

    /// Each of them, or two where there are two kinds.
    pub(in super::super) fn samples() -> Vec<Record<'static>> {
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
            Record::Answer { transfer, resolution: Resolution::Unknown },
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

    #[test]
    fn b1_a_record_is_as_long_as_it_says() {
        for record in samples() {
            let mut bytes = Vec::new();
            record.write(&mut bytes);
            assert_eq!(bytes.len(), record.size(), "{record:?}");
            let (tag, mut body) = Reader::new(&bytes, "test").field().expect("our own").expect("one");
            assert_eq!(Record::read(tag, &mut body), Ok(Some(record)));
            assert_eq!(body.remaining(), 0, "{record:?}");
        }
    }
}
