//! The codec of control messages: what travels in SENDs beside the data. Bytes in, records out; no state.
//!
//! A message is a fixed head and records (see `record`). Several share a message where they fit.

use super::event::ProtocolViolation;
use super::record::Record;
use crate::wire::{Malformed, Reader, Writer};

/// Versions of the head: without and with a number.
const VERSION: u8 = 1;
const NUMBERED: u8 = 2;
/// Bytes of the head without a number, and of the number.
pub(super) const HEAD: usize = 42;
pub(super) const NUMBER: usize = 8;

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
        while let Some((tag, mut body)) = self.0.field()? {
            if let Some(record) = Record::read(tag, &mut body)? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::super::codec::{tag, tests::samples};
    use super::*;

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
