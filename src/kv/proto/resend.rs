//! Control messages that a rail has lost, sent again on another one (K10).
//!
//! Where there is more than one rail, the records of a queue pair are numbered, by their bytes. The sender keeps those of
//! each message until it knows that it was received: with order, by the credits that came back; without, by its
//! completion. After the fence what is left travels in RESENT records, and the receiver, which knows the numbers that it
//! had, takes each once. Records do not depend on their order, so that they may come late.

use std::collections::VecDeque;

use super::codec::{FIELD, FRAGMENT_OVERHEAD, RESENT_OVERHEAD};
use super::control::{HEAD, NUMBER, Records};
use super::ranges::MAX_GAPS;
use super::record::Record;
use super::{Connection, ProtocolViolation};

/// A message that may not have been received: its records.
#[derive(Debug)]
pub(super) struct Kept {
    /// Its place among the control messages of its queue pair and generation.
    pub(super) count: u64,
    number: u64,
    bytes: Vec<u8>,
}

/// Records for one RESENT.
#[derive(Debug)]
struct Chunk {
    qp: u16,
    start: u64,
    covered: u32,
    bytes: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Resend {
    queue: VecDeque<Chunk>,
    /// Buffers of messages that were received.
    spare: Vec<Vec<u8>>,
    room: usize,
}

impl Resend {
    /// `max_control` is at least 256.
    pub(super) fn new(max_control: usize) -> Self {
        let room = max_control.saturating_sub(HEAD + NUMBER + RESENT_OVERHEAD);
        Self { queue: VecDeque::new(), spare: Vec::new(), room }
    }

    /// Bytes of the largest record that can be sent again as it is.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// A message is sent: its records are kept.
    pub(super) fn keep(&mut self, kept: &mut VecDeque<Kept>, count: u64, number: u64, records: &[u8]) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.extend_from_slice(records);
        kept.push_back(Kept { count, number, bytes });
    }

    /// The first `taken` messages of a queue pair with order were received.
    pub(super) fn taken(&mut self, kept: &mut VecDeque<Kept>, taken: u64) {
        while kept.front().is_some_and(|k| k.count < taken)
            && let Some(first) = kept.pop_front()
        {
            self.recycle(first.bytes);
        }
    }

    /// One message of a queue pair without order was received.
    pub(super) fn completed(&mut self, kept: &mut VecDeque<Kept>, count: u64) {
        let at = kept.iter().position(|k| k.count == count);
        if let Some(k) = at.and_then(|at| kept.remove(at)) {
            self.recycle(k.bytes);
        }
    }

    fn recycle(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        self.spare.push(bytes);
    }

    /// The queue pair is fenced on both sides: queues what it may have lost.
    pub(super) fn again(&mut self, qp: usize, kept: &mut VecDeque<Kept>) {
        for k in kept.drain(..) {
            self.cut(qp as u16, &k);
            self.recycle(k.bytes);
        }
    }

    /// Cuts a message into chunks that cover all of it.
    fn cut(&mut self, qp: u16, kept: &Kept) {
        let mut records = Records::of(&kept.bytes);
        let mut chunk = Chunk { qp, start: kept.number, covered: 0, bytes: Vec::new() };
        // All lengths are below max_control.
        loop {
            let at = kept.bytes.len() - records.remaining();
            let Ok(Some(record)) = records.next() else { break };
            let end = kept.bytes.len() - records.remaining();
            let (raw, len) = (&kept.bytes[at..end], (end - at) as u32);
            match record {
                // What concerned the queue pair only, or is said anew.
                Record::Ping | Record::Pong => {}
                Record::AbortDone { mask, .. } if mask != 0 => {}
                // From a queue pair that had failed before: that one's numbers tell whether it was received.
                Record::Resent { qp, start, covered, bytes } => {
                    self.queue.push_back(Chunk { qp, start, covered, bytes: bytes.to_vec() });
                }
                Record::Fragment { message, total, offset, bytes } if raw.len() > self.room => {
                    let (head, tail) = bytes.split_at(self.room - FRAGMENT_OVERHEAD);
                    self.flush(&mut chunk);
                    let first = Record::Fragment { message, total, offset, bytes: head };
                    first.write(&mut chunk.bytes);
                    chunk.covered = (FIELD + head.len()) as u32;
                    let (left, offset) = (len - chunk.covered, offset + head.len() as u32);
                    self.flush(&mut chunk);
                    Record::Fragment { message, total, offset, bytes: tail }.write(&mut chunk.bytes);
                    chunk.covered = left;
                    continue;
                }
                _ => {
                    if chunk.bytes.len() + raw.len() > self.room {
                        self.flush(&mut chunk);
                    }
                    chunk.bytes.extend_from_slice(raw);
                }
            }
            chunk.covered += len;
        }
        self.flush(&mut chunk);
    }

    /// Queues a chunk, and leaves the next one in its place.
    fn flush(&mut self, chunk: &mut Chunk) {
        debug_assert!(chunk.bytes.len() <= self.room, "a record that cannot be sent again");
        if chunk.covered > 0 {
            let start = chunk.start + u64::from(chunk.covered);
            let next = Chunk { qp: chunk.qp, start, covered: 0, bytes: Vec::new() };
            self.queue.push_back(std::mem::replace(chunk, next));
        }
    }

    /// Shows the next chunk; if `push` takes it, it is sent.
    pub(super) fn next(&mut self, push: impl FnOnce(&Record<'_>) -> bool) -> bool {
        let Some(c) = self.queue.front() else { return false };
        let record = Record::Resent { qp: c.qp, start: c.start, covered: c.covered, bytes: &c.bytes };
        if !push(&record) {
            return false;
        }
        self.queue.pop_front();
        true
    }
}

impl Connection {
    /// Takes the numbers of records that have come on a queue pair, or were sent again for one. False if it had them before.
    pub(super) fn take_numbers(
        &mut self,
        qp: usize,
        start: u64,
        len: u64,
    ) -> Result<bool, ProtocolViolation> {
        let heard = &mut self.links[qp].heard;
        let end = start.checked_add(len).ok_or(ProtocolViolation::Rule("a number that is too large"))?;
        let fresh = heard.insert_range(start, end);
        match heard.ranges() > MAX_GAPS {
            true => Err(ProtocolViolation::Rule("numbers with too many gaps")),
            false => Ok(fresh),
        }
    }

    /// Records that were lost with a queue pair, or that may have been.
    pub(super) fn on_resent(
        &mut self,
        qp: u16,
        start: u64,
        covered: u32,
        bytes: &[u8],
        now: std::time::Instant,
    ) -> Result<(), ProtocolViolation> {
        let qp = usize::from(qp);
        if qp >= self.links.len() || self.receiver.fenced >> qp & 1 == 0 || covered == 0 {
            return Err(ProtocolViolation::Rule("sent again for a queue pair that has not failed"));
        }
        if !self.take_numbers(qp, start, covered.into())? {
            return Ok(());
        }
        let mut records = Records::of(bytes);
        while let Some(record) = records.next()? {
            match record {
                // That queue pair is no more.
                Record::Ping | Record::Pong => {}
                Record::AbortDone { mask, .. } if mask != 0 => {}
                Record::Notify { .. } | Record::Resent { .. } => {
                    return Err(ProtocolViolation::Rule("a record that is never sent again"));
                }
                _ => self.on_record(qp, record, now)?,
            }
        }
        Ok(())
    }
}
