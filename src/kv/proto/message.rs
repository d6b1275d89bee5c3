//! The application's messages: cut into fragments, put together again in any order, delivered in theirs.
//!
//! Fragments are reliable while the connection lives. Memory is bounded on both sides: a sender starts a message
//! only if everything that the receiver has not acknowledged stays within a window.

use std::collections::{BTreeMap, VecDeque};

use super::codec::FRAGMENT_OVERHEAD;
use super::event::{MessageRefused, ProtocolViolation};
use super::ranges::{MAX_GAPS, RangeSet};
use super::record::Record;

/// Largest message.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;
/// Bytes that may be on their way to the peer's application.
const WINDOW_BYTES: usize = 2 * MAX_MESSAGE;
/// Messages that may be on their way to the peer's application.
const WINDOW_MESSAGES: u64 = 256;
/// Bytes that wait on our side, beyond which `send` refuses.
const QUEUE_BYTES: usize = 2 * MAX_MESSAGE;
/// Messages that wait on our side, beyond which `send` refuses.
const QUEUE_MESSAGES: usize = 4096;
/// Fragments smaller than this are not worth a record.
const MIN_FRAGMENT: usize = 64;

const RULE_WINDOW: ProtocolViolation = ProtocolViolation::Rule("a message outside of the window");
const RULE_GAPS: ProtocolViolation = ProtocolViolation::Rule("fragments with too many gaps");
const RULE_FRAGMENT: ProtocolViolation = ProtocolViolation::Rule("a fragment that does not fit its message");

/// Messages to the peer.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    queue: VecDeque<Vec<u8>>,
    queued_bytes: usize,
    /// Bytes of the front message that have been sent. `None` before its first fragment.
    offset: Option<usize>,
    /// Messages whose last fragment has been sent.
    sent: u64,
    /// Lengths of messages that were started and not acknowledged, the oldest first.
    unacked: VecDeque<usize>,
    unacked_bytes: usize,
    acked: u64,
}

impl Outgoing {
    /// Queues `message`, or gives it back.
    pub(super) fn send(&mut self, message: Vec<u8>) -> Result<(), (MessageRefused, Vec<u8>)> {
        if message.len() > MAX_MESSAGE {
            return Err((MessageRefused::TooLong { asked: message.len(), limit: MAX_MESSAGE }, message));
        }
        if self.queued_bytes + message.len() > QUEUE_BYTES || self.queue.len() >= QUEUE_MESSAGES {
            return Err((MessageRefused::Full { queued: self.queued_bytes }, message));
        }
        self.queued_bytes += message.len();
        self.queue.push_back(message);
        Ok(())
    }

    /// A fragment can be sent now.
    pub(super) fn has_fragment(&self) -> bool {
        match (self.queue.front(), self.offset) {
            (None, _) => false,
            (Some(_), Some(_)) => true,
            (Some(front), None) => {
                self.unacked_bytes + front.len() <= WINDOW_BYTES
                    && (self.unacked.len() as u64) < WINDOW_MESSAGES
            }
        }
    }

    /// Nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Messages that have been sent completely.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Shows the next fragment that fits in `room` bytes; if `push` takes it, it is sent.
    pub(super) fn next_fragment(&mut self, room: usize, push: impl FnOnce(&Record<'_>) -> bool) -> bool {
        if !self.has_fragment() {
            return false;
        }
        let Some(front) = self.queue.front() else { return false };
        let at = self.offset.unwrap_or(0);
        let space = room.saturating_sub(FRAGMENT_OVERHEAD);
        let len = space.min(front.len() - at);
        if len < (front.len() - at).min(MIN_FRAGMENT) || room < FRAGMENT_OVERHEAD {
            return false;
        }
        let record = Record::Fragment {
            message: self.sent,
            // At most MAX_MESSAGE, both.
            total: front.len() as u32,
            offset: at as u32,
            bytes: &front[at..at + len],
        };
        if !push(&record) {
            return false;
        }
        let total = front.len();
        if self.offset.is_none() {
            self.unacked.push_back(total);
            self.unacked_bytes += total;
        }
        if at + len == total {
            self.queue.pop_front();
            self.queued_bytes -= total;
            self.offset = None;
            self.sent += 1;
        } else {
            self.offset = Some(at + len);
        }
        true
    }

    /// The peer's application has been given `count` messages in all.
    pub(super) fn on_acked(&mut self, count: u64) -> Result<(), ProtocolViolation> {
        if count > self.sent {
            return Err(ProtocolViolation::Rule("a message acknowledged that was never sent"));
        }
        while self.acked < count {
            self.acked += 1;
            self.unacked_bytes -= self.unacked.pop_front().unwrap_or(0);
        }
        Ok(())
    }
}

/// Ranges that have come of messages beyond their first gaps: of all that have begun and are not complete.
#[derive(Debug, Default)]
pub(super) struct Gaps(usize);

impl Gaps {
    /// One that is not complete comes no more.
    pub(super) fn forget(&mut self, partial: &Partial) {
        self.0 -= partial.received.ranges();
    }
}

/// A message that comes in parts, in any order.
#[derive(Debug)]
pub(super) struct Partial {
    bytes: Vec<u8>,
    received: RangeSet,
    missing: usize,
}

impl Partial {
    /// Of `len` bytes, which the caller has checked.
    pub(super) fn new(len: usize) -> Self {
        Self { bytes: vec![0; len], received: RangeSet::default(), missing: len }
    }

    /// Takes a part, which says the length of the whole. `gaps` counts those of this one, too.
    pub(super) fn insert(
        &mut self,
        total: u32,
        offset: u32,
        part: &[u8],
        gaps: &mut Gaps,
    ) -> Result<(), ProtocolViolation> {
        let start = offset as usize;
        let end = start.checked_add(part.len()).filter(|&e| e <= self.bytes.len()).ok_or(RULE_FRAGMENT)?;
        let fits = self.bytes.len() == total as usize && part.is_empty() == (total == 0);
        let before = self.received.ranges();
        if !fits || !self.received.insert_range(start as u64, end as u64) {
            return Err(RULE_FRAGMENT);
        }
        gaps.0 = gaps.0 + self.received.ranges() - before;
        if gaps.0 > MAX_GAPS {
            return Err(RULE_GAPS);
        }
        self.bytes[start..end].copy_from_slice(part);
        self.missing -= part.len();
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Its bytes, once it is complete.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Messages of the peer.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// The next message to deliver, and so the count of those that were.
    next: u64,
    /// Delivered messages that the application has taken: only these are acknowledged, so that a slow one slows the
    /// sender (K7).
    taken: u64,
    partial: BTreeMap<u64, Partial>,
    gaps: Gaps,
    /// Bytes of messages that have been started and not taken.
    held: usize,
    /// Taken and not yet acknowledged.
    unreported: u64,
    unreported_bytes: usize,
}

impl Incoming {
    /// Takes a fragment. Complete messages come out by `next_message`.
    pub(super) fn on_fragment(
        &mut self,
        message: u64,
        total: u32,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), ProtocolViolation> {
        let size = total as usize;
        let inside = (offset as usize).checked_add(bytes.len()).is_some_and(|end| end <= size);
        if size > MAX_MESSAGE || !inside || bytes.is_empty() != (size == 0) {
            return Err(RULE_FRAGMENT);
        }
        if message < self.next || message - self.taken >= WINDOW_MESSAGES {
            return Err(RULE_WINDOW);
        }
        if !self.partial.contains_key(&message) {
            if self.held + size > WINDOW_BYTES {
                return Err(RULE_WINDOW);
            }
            self.held += size;
            self.partial.insert(message, Partial::new(size));
        } else if size == 0 {
            return Err(RULE_FRAGMENT);
        }
        let Some(p) = self.partial.get_mut(&message) else { return Err(RULE_FRAGMENT) };
        p.insert(total, offset, bytes, &mut self.gaps)
    }

    /// The next message in order, if it is complete.
    pub(super) fn next_message(&mut self) -> Option<Vec<u8>> {
        if !self.partial.get(&self.next)?.is_complete() {
            return None;
        }
        let mut p = self.partial.remove(&self.next)?;
        self.next += 1;
        Some(p.take())
    }

    /// The application has taken the oldest delivered message, of `len` bytes.
    pub(super) fn on_taken(&mut self, len: usize) {
        debug_assert!(self.taken < self.next, "taken before it was delivered");
        self.taken += 1;
        self.held = self.held.saturating_sub(len);
        self.unreported += 1;
        self.unreported_bytes += len;
    }

    pub(super) fn delivered(&self) -> u64 {
        self.next
    }

    /// The count of taken messages, for a head that is about to be sent.
    pub(super) fn report(&mut self) -> u64 {
        self.unreported = 0;
        self.unreported_bytes = 0;
        self.taken
    }

    /// So much is unacknowledged that the sender may be waiting for it.
    pub(super) fn must_report(&self) -> bool {
        self.unreported >= WINDOW_MESSAGES / 4 || self.unreported_bytes >= WINDOW_BYTES / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(out: &mut Outgoing, room: usize) -> Vec<(u64, u32, u32, Vec<u8>)> {
        let mut v = Vec::new();
        while out.next_fragment(room, |r| {
            let Record::Fragment { message, total, offset, bytes } = *r else { panic!("not a fragment") };
            v.push((message, total, offset, bytes.to_vec()));
            true
        }) {}
        v
    }

    #[test]
    fn k3_fragments_in_any_order_make_messages_in_order() {
        let mut out = Outgoing::default();
        let messages: Vec<Vec<u8>> =
            [0usize, 1, 1000, 0, 333].iter().map(|&n| (0..n).map(|i| i as u8).collect()).collect();
        for m in &messages {
            out.send(m.clone()).expect("small");
        }
        let mut fragments = cut(&mut out, 122);
        assert_eq!(out.sent(), 5);
        fragments.reverse();
        let mut inc = Incoming::default();
        let mut got = Vec::new();
        for (m, t, o, b) in &fragments {
            inc.on_fragment(*m, *t, *o, b).expect("our own");
            got.extend(std::iter::from_fn(|| inc.next_message()));
        }
        assert_eq!(got, messages);
        assert_eq!(inc.report(), 0, "acknowledged before it was taken");
        messages.iter().for_each(|m| inc.on_taken(m.len()));
        assert_eq!((inc.report(), inc.held), (5, 0));
        out.on_acked(5).expect("sent");
        assert!(out.on_acked(6).is_err());
        let (m, t, o, b) = &fragments[0];
        assert_eq!(inc.on_fragment(*m, *t, *o, b), Err(RULE_WINDOW), "delivered before");
    }

    #[test]
    fn b1_hostile_fragments_are_refused_within_bounded_memory() {
        let mut inc = Incoming::default();
        assert_eq!(inc.on_fragment(0, u32::MAX, 0, b"x"), Err(RULE_FRAGMENT));
        assert_eq!(inc.on_fragment(0, 4, u32::MAX, b"x"), Err(RULE_FRAGMENT));
        assert_eq!(inc.on_fragment(0, 4, 4, b"x"), Err(RULE_FRAGMENT));
        assert_eq!(inc.on_fragment(0, 4, 0, b""), Err(RULE_FRAGMENT));
        assert_eq!(inc.on_fragment(WINDOW_MESSAGES, 4, 0, b"x"), Err(RULE_WINDOW));
        inc.on_fragment(1, 4, 0, b"ab").expect("fits");
        assert_eq!(inc.on_fragment(1, 4, 1, b"b"), Err(RULE_FRAGMENT), "overlap");
        assert_eq!(inc.on_fragment(1, 5, 2, b"b"), Err(RULE_FRAGMENT), "another length");
        let big = MAX_MESSAGE as u32;
        inc.on_fragment(2, big, 0, b"x").expect("fits");
        assert_eq!(inc.on_fragment(3, big, 0, b"x"), Err(RULE_WINDOW), "more than the window");
    }

    #[test]
    fn b1_fragments_leave_a_bounded_number_of_gaps_however_many_messages_they_are_of() {
        for messages in [1, 2, 100] {
            let mut inc = Incoming::default();
            let size = WINDOW_BYTES as u32 / 256;
            let mut parts = (1..size).step_by(2).flat_map(|at| (0..messages).map(move |m| (m, at)));
            for (message, at) in parts.by_ref().take(MAX_GAPS) {
                inc.on_fragment(message, size, at, b"x").expect("as many as may be under way");
            }
            let (message, at) = parts.next().expect("longer than that");
            assert_eq!(inc.on_fragment(message, size, at, b"x"), Err(RULE_GAPS), "{messages}");
        }
        // What is closed again is no gap any more.
        let mut inc = Incoming::default();
        for round in 0..3 {
            let message = round * 2;
            let size = MAX_GAPS as u32 * 2;
            for at in (1..size).step_by(2).chain((0..size).step_by(2)) {
                inc.on_fragment(message, size, at, b"x").expect("few at a time");
            }
            inc.on_fragment(message + 1, 0, 0, b"").expect("nothing is in order, too");
            assert_eq!(std::iter::from_fn(|| inc.next_message()).count(), 2);
            (0..2).for_each(|n| inc.on_taken(if n == 0 { size as usize } else { 0 }));
            assert_eq!(inc.gaps.0, 0, "round {round}");
        }
    }

    #[test]
    fn k7_the_window_holds_a_sender_back_until_it_is_acknowledged() {
        let mut out = Outgoing::default();
        for _ in 0..300 {
            out.send(vec![1]).expect("small");
        }
        assert_eq!(cut(&mut out, 256).len(), 256);
        assert!(!out.has_fragment());
        out.on_acked(64).expect("sent");
        assert_eq!(cut(&mut out, 256).len(), 44);
        assert!(out.is_empty());
        assert!(matches!(out.send(vec![0; MAX_MESSAGE + 1]), Err((MessageRefused::TooLong { .. }, _))));
        out.send(vec![0; MAX_MESSAGE]).expect("fits");
        out.send(vec![0; MAX_MESSAGE]).expect("fits");
        assert!(matches!(out.send(vec![0; 1]), Err((MessageRefused::Full { .. }, _))));
    }
}
