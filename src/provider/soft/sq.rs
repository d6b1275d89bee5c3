//! The send queue of a queue pair: requests from post to completion, and the choice of what is sent next.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::rng::Rng;
use super::tuning::{HOLD_ONE_IN, HOLD_SLICES, PAUSE_BYTES, PICK_WINDOW};
use crate::pages::Checked;
use crate::provider::{Cqe, SendOp, Sge, WcStatus};

/// A posted request.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) wr_id: u64,
    pub(super) op: SendOp,
    signaled: bool,
    inline: bool,
    /// First element in `sges`, or first byte in `inline`, counted since the queue was made.
    data_at: u64,
    sge_len: u16,
    /// Bytes of the message; of what comes back.
    pub(super) total: u32,
    /// Bytes put into frames.
    pub(super) sent: u32,
    /// All of it, if only its descriptor, was put into frames.
    pub(super) gone: bool,
    /// Some of its payload does not travel: the peer copies it from where it is.
    referred: bool,
    /// READ: bytes of answers that were checked. Those of them that a GPU copies count as received later.
    planned: u32,
    /// READ, atomic: bytes that have come back.
    pub(super) received: u32,
    done: bool,
    /// A WRITE of pages, of which its element only says where the first one is.
    pub(super) pages: Option<Arc<Checked>>,
    /// Held back until this slice: where there is no order, and (`NEVER`) by a fault, which ends by time.
    release: u64,
}

const NEVER: u64 = u64::MAX;

impl Entry {
    fn cqe(&self, qp_num: u32, status: WcStatus, vendor_err: u32) -> Cqe {
        let opcode = self.op.opcode();
        Cqe { wr_id: self.wr_id, qp_num, status, vendor_err, opcode, byte_len: self.total, imm: None }
    }
}

/// Where a piece of a message comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    /// Registered memory.
    Memory { addr: u64, len: u32, key: u32 },
    /// Bytes of this number from a buffer of copies.
    Copied { len: u32 },
}

#[derive(Debug)]
pub(super) struct SendQueue {
    ordered: bool,
    depth: u32,
    /// Requests in the order of their posts. The front one may be done already only without order.
    entries: VecDeque<Entry>,
    /// The MSN of the front entry.
    first: u32,
    /// Entries that are not done.
    outstanding: u32,
    /// Bytes of all entries, and of those that were posted since there was last little of them.
    bytes: u64,
    burst: u64,
    /// Elements and inline bytes of the entries, first in first out, and how many have gone.
    sges: VecDeque<Sge>,
    sges_gone: u64,
    inline: VecDeque<u8>,
    inline_gone: u64,
    /// RC: the MSN of the next request to put into a frame.
    next: u32,
    /// Unordered: MSNs of the requests that are not all in frames.
    unsent: VecDeque<u32>,
    rng: Rng,
    slice: u64,
    /// What faults hold back, the next to be released first.
    held: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Where there is order: a request that cannot be executed. It fails when it comes to it, after those before it.
    broken: Option<Cause>,
    reads: u32,
    max_reads: u32,
}

impl SendQueue {
    pub(super) fn new(ordered: bool, depth: u32, seed: u64) -> Self {
        Self {
            ordered,
            depth,
            entries: VecDeque::with_capacity(depth.min(1024) as usize),
            first: 0,
            outstanding: 0,
            bytes: 0,
            burst: 0,
            sges: VecDeque::new(),
            sges_gone: 0,
            inline: VecDeque::new(),
            inline_gone: 0,
            next: 0,
            unsent: VecDeque::new(),
            rng: Rng::new(seed),
            slice: 0,
            held: BinaryHeap::new(),
            broken: None,
            reads: 0,
            max_reads: 1,
        }
    }

    pub(super) fn set_max_reads(&mut self, n: u8) {
        self.max_reads = u32::from(n).max(1);
    }

    pub(super) fn is_full(&self) -> bool {
        self.outstanding >= self.depth
    }

    /// Bytes that were posted without a pause in which little was under way.
    pub(super) fn burst(&self) -> u64 {
        self.burst
    }

    pub(super) fn is_idle(&self) -> bool {
        self.outstanding == 0
    }

    /// The MSN that the next post gets.
    fn end(&self) -> u32 {
        self.first.wrapping_add(self.entries.len() as u32)
    }

    /// Adds a request with elements, and says its MSN. `inline` has the payload instead, when it was copied.
    pub(super) fn push(
        &mut self,
        wr_id: u64,
        op: SendOp,
        signaled: bool,
        total: u32,
        sges: &[Sge],
        inline: Option<&[u8]>,
    ) -> u32 {
        let data_at = match inline {
            Some(bytes) => {
                self.inline.extend(bytes);
                self.inline_gone + (self.inline.len() - bytes.len()) as u64
            }
            None => {
                self.sges.extend(sges);
                self.sges_gone + (self.sges.len() - sges.len()) as u64
            }
        };
        let msn = self.end();
        let mut release = 0;
        if !self.ordered {
            self.unsent.push_back(msn);
            if self.rng.below(HOLD_ONE_IN) == 0 {
                release = self.slice + 1 + self.rng.below(HOLD_SLICES);
            }
        }
        self.entries.push_back(Entry {
            wr_id,
            op,
            signaled,
            inline: inline.is_some(),
            data_at,
            sge_len: if inline.is_some() { 0 } else { sges.len() as u16 },
            total,
            sent: 0,
            gone: false,
            referred: false,
            planned: 0,
            received: 0,
            done: false,
            pages: None,
            release,
        });
        if self.bytes < PAUSE_BYTES {
            self.burst = 0;
        }
        self.outstanding += 1;
        self.bytes += u64::from(total);
        self.burst = self.burst.saturating_add(total.into());
        msn
    }

    /// A progress slice begins: what is held back comes nearer.
    pub(super) fn begin_slice(&mut self) {
        self.slice += 1;
    }

    /// A fault: the request `msn` does not leave before `until`.
    pub(super) fn hold(&mut self, msn: u32, until: Instant) {
        if let Some(i) = self.index(msn) {
            self.entries[i].release = NEVER;
            self.held.push(Reverse((until, msn)));
        }
    }

    /// The request of `cause` cannot be executed. True when it fails at once: it is the next, or there is no order.
    #[must_use]
    pub(super) fn break_off(&mut self, cause: Cause) -> bool {
        if !self.ordered || cause.msn == Some(self.first) {
            return true;
        }
        if let Some(i) = cause.msn.and_then(|msn| self.index(msn)) {
            self.entries[i].release = NEVER;
        }
        self.broken.get_or_insert(cause);
        false
    }

    /// The failure of a request that cannot be executed, when everything before it has ended.
    pub(super) fn due_failure(&self) -> Option<Cause> {
        self.broken.filter(|cause| cause.msn == Some(self.first))
    }

    /// What was held back until now may go.
    pub(super) fn release(&mut self, now: Instant) {
        while let Some(&Reverse((until, msn))) = self.held.peek()
            && until <= now
        {
            self.held.pop();
            if let Some(i) = self.index(msn) {
                self.entries[i].release = 0;
            }
        }
    }

    pub(super) fn next_release(&self) -> Option<Instant> {
        self.held.peek().map(|Reverse((until, _))| *until)
    }

    /// Whether there is something to put into a frame, if only in a later slice.
    pub(super) fn wants_to_send(&self) -> bool {
        let blocked = |e: &Entry| e.release == NEVER || (e.op.has_answer() && self.reads >= self.max_reads);
        if self.ordered {
            self.index(self.next).is_some_and(|i| !blocked(&self.entries[i]))
        } else if self.reads < self.max_reads && self.held.is_empty() {
            !self.unsent.is_empty()
        } else {
            self.unsent.iter().any(|&m| self.index(m).is_some_and(|i| !blocked(&self.entries[i])))
        }
    }

    /// The request to take a segment from, by its MSN.
    pub(super) fn pick(&mut self) -> Option<u32> {
        if self.ordered {
            let e = &self.entries[self.index(self.next)?];
            let may = e.release != NEVER && (!e.op.has_answer() || self.reads < self.max_reads);
            return may.then_some(self.next);
        }
        let window = self.unsent.len().min(PICK_WINDOW);
        let start = self.rng.below(window as u64) as usize;
        // A random one of the oldest; when it may not go, the first one after it that may, in all of the queue.
        (0..self.unsent.len()).map(|k| self.unsent[(start + k) % self.unsent.len()]).find(|&msn| {
            self.index(msn).is_some_and(|i| {
                let e = &self.entries[i];
                e.release <= self.slice && (!e.op.has_answer() || self.reads < self.max_reads)
            })
        })
    }

    /// `bytes` of `msn` were put into a frame.
    pub(super) fn advance(&mut self, msn: u32, bytes: u32) {
        let Some(i) = self.index(msn) else { return };
        let e = &mut self.entries[i];
        e.sent += bytes;
        let answered = e.op.has_answer();
        if answered || e.sent == e.total {
            e.gone = true;
            self.reads += u32::from(answered);
            if self.ordered {
                self.next = msn.wrapping_add(1);
            } else if let Some(at) = self.unsent.iter().position(|&m| m == msn) {
                self.unsent.remove(at);
            }
        }
    }

    fn index(&self, msn: u32) -> Option<usize> {
        let i = msn.wrapping_sub(self.first) as usize;
        (i < self.entries.len()).then_some(i)
    }

    /// The request `msn`, unless it is done.
    pub(super) fn get(&self, msn: u32) -> Option<&Entry> {
        self.index(msn).map(|i| &self.entries[i]).filter(|e| !e.done)
    }

    /// The request `msn`, which was just posted, is of pages.
    pub(super) fn is_of(&mut self, msn: u32, pages: Arc<Checked>) {
        if let Some(i) = self.index(msn) {
            self.entries[i].pages = Some(pages);
        }
    }

    /// Its first element, when it has one.
    pub(super) fn first_element(&self, e: &Entry) -> Option<Sge> {
        let at = (e.data_at - self.sges_gone) as usize;
        (!e.inline && e.sge_len > 0).then(|| self.sges[at])
    }

    /// The keys of its elements.
    pub(super) fn keys(&self, e: &Entry) -> impl Iterator<Item = u32> + '_ {
        let from = if e.inline { 0 } else { (e.data_at - self.sges_gone) as usize };
        self.sges.range(from..from + usize::from(e.sge_len)).map(|sge| sge.lkey)
    }

    /// The pieces of `offset..+len` of the message.
    pub(super) fn pieces(&self, e: &Entry, offset: u32, len: u32, mut each: impl FnMut(Piece)) {
        if e.inline {
            each(Piece::Copied { len });
            return;
        }
        let (mut skip, mut left) = (offset, len);
        let from = (e.data_at - self.sges_gone) as usize;
        for sge in self.sges.range(from..from + usize::from(e.sge_len)) {
            if left == 0 {
                break;
            }
            if skip >= sge.len {
                skip -= sge.len;
                continue;
            }
            let take = (sge.len - skip).min(left);
            each(Piece::Memory { addr: sge.addr + u64::from(skip), len: take, key: sge.lkey });
            left -= take;
            skip = 0;
        }
    }

    /// Appends bytes `offset..+len` of the message to `out`, when it is inline.
    pub(super) fn copy_inline(&self, e: &Entry, offset: u32, len: u32, out: &mut Vec<u8>) {
        if !e.inline {
            return;
        }
        let from = (e.data_at - self.inline_gone) as usize + offset as usize;
        out.extend(self.inline.range(from..from + len as usize));
    }

    /// RC: everything before `msn` was executed. False when the peer cannot have done that.
    #[must_use]
    pub(super) fn acknowledge_until(&mut self, msn: u32) -> bool {
        // Entries before `first` have retired, so a header that is not news names at most `first`.
        let sent = self.next.wrapping_sub(self.first);
        let n = msn.wrapping_sub(self.first);
        if n > sent {
            // Not ahead: an older acknowledgement, from before a READ that has retired since.
            return self.first.wrapping_sub(msn) <= i32::MAX as u32;
        }
        for e in self.entries.iter_mut().take(n as usize) {
            if !e.op.has_answer() && !e.done {
                e.done = true;
                self.outstanding -= 1;
            }
        }
        true
    }

    /// Where requests complete at their hand-off (RC): the connection has all that was put into frames. What was only referred
    /// to is still ours, and completes as on other profiles: when the peer has copied it.
    pub(super) fn handed_off(&mut self) {
        let sent = self.next.wrapping_sub(self.first) as usize;
        for e in self.entries.iter_mut().take(sent) {
            if !e.op.has_answer() && !e.done && !e.referred {
                e.done = true;
                self.outstanding -= 1;
            }
        }
    }

    /// Payload of `msn` was referred to.
    pub(super) fn refer(&mut self, msn: u32) {
        if let Some(i) = self.index(msn) {
            self.entries[i].referred = true;
        }
    }

    /// Unordered: `msn` was executed. False when the peer cannot have done that.
    #[must_use]
    pub(super) fn acknowledge(&mut self, msn: u32) -> bool {
        let Some(i) = self.index(msn) else { return false };
        let e = &mut self.entries[i];
        if e.done || e.op.has_answer() || !e.gone {
            return false;
        }
        e.done = true;
        self.outstanding -= 1;
        true
    }

    /// The messages of one acknowledgement, 0 to 64, in an order of its own: completions have none either.
    pub(super) fn shuffled_ack(&mut self) -> impl Iterator<Item = u32> + use<> {
        let start = self.rng.below(65) as u32;
        (0..65).map(move |k| (start + k * 37) % 65)
    }

    /// `len` bytes of an answer to the READ `msn` are about to be taken. False when that is more than were asked for: what is
    /// taken twice could be written after the READ has completed.
    #[must_use]
    pub(super) fn plan_answer(&mut self, msn: u32, len: u32) -> bool {
        let Some(i) = self.index(msn) else { return false };
        let e = &mut self.entries[i];
        if e.done || e.total - e.planned < len {
            return false;
        }
        e.planned += len;
        true
    }

    /// `len` bytes of the answer to the READ or atomic `msn` have come. False when that is more than were asked for.
    #[must_use]
    pub(super) fn answer_arrived(&mut self, msn: u32, len: u32) -> bool {
        let Some(i) = self.index(msn) else { return false };
        let e = &mut self.entries[i];
        if e.done || !e.op.has_answer() || !e.gone || e.total - e.received < len {
            return false;
        }
        e.received += len;
        if e.received == e.total {
            e.done = true;
            self.outstanding -= 1;
            self.reads -= 1;
        }
        true
    }

    /// Unordered: completes `msn`, which is done, at once.
    pub(super) fn complete(&self, msn: u32, qp_num: u32, push: impl FnOnce(Cqe)) {
        if let Some(i) = self.index(msn) {
            let e = &self.entries[i];
            if e.done && e.signaled {
                push(e.cqe(qp_num, WcStatus::Success, 0));
            }
        }
    }

    /// Removes the done entries at the front. On RC this is what completes them.
    pub(super) fn retire(&mut self, qp_num: u32, mut push: impl FnMut(Cqe)) {
        while self.entries.front().is_some_and(|e| e.done) {
            let Some(e) = self.entries.pop_front() else { break };
            self.first = self.first.wrapping_add(1);
            self.bytes -= u64::from(e.total);
            if e.inline {
                self.inline.drain(..e.total as usize);
                self.inline_gone += u64::from(e.total);
            } else {
                self.sges.drain(..usize::from(e.sge_len));
                self.sges_gone += u64::from(e.sge_len);
            }
            if self.ordered && e.signaled {
                push(e.cqe(qp_num, WcStatus::Success, 0));
            }
        }
    }

    /// Ends every request: that of `cause` (an MSN, or the oldest one) with its status, the others flushed. Without order it is
    /// the first to end, so that whoever hears of a flush knows the cause.
    pub(super) fn fail(&mut self, qp_num: u32, cause: Option<Cause>, mut push: impl FnMut(Cqe)) {
        let mut cause = cause;
        // On RC a request that was executed behind an unfinished READ has not completed yet: it is flushed too.
        let ordered = self.ordered;
        if let (false, Some(Cause { msn: Some(msn), status, vendor_err })) = (ordered, cause)
            && let Some(i) = self.index(msn)
            && !self.entries[i].done
        {
            push(self.entries[i].cqe(qp_num, status, vendor_err));
            self.entries[i].done = true;
            cause = None;
        }
        for (i, e) in self.entries.iter().enumerate().filter(|(_, e)| ordered || !e.done) {
            let msn = self.first.wrapping_add(i as u32);
            let (status, vendor_err) = match cause {
                Some(c) if c.msn.is_none_or(|m| m == msn) => {
                    cause = None;
                    (c.status, c.vendor_err)
                }
                _ => (WcStatus::Flushed, 0),
            };
            push(e.cqe(qp_num, status, vendor_err));
        }
        self.first = self.end();
        self.next = self.first;
        self.entries.clear();
        self.unsent.clear();
        self.held.clear();
        self.broken = None;
        self.sges_gone += self.sges.len() as u64;
        self.sges.clear();
        self.inline_gone += self.inline.len() as u64;
        self.inline.clear();
        (self.outstanding, self.bytes, self.reads) = (0, 0, 0);
    }
}

/// Why a queue pair failed: which request (the oldest outstanding one, if none is named) and its status.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    pub(super) msn: Option<u32>,
    pub(super) status: WcStatus,
    pub(super) vendor_err: u32,
}

impl Cause {
    pub(super) fn oldest(status: WcStatus) -> Self {
        Self { msn: None, status, vendor_err: 0 }
    }
}
