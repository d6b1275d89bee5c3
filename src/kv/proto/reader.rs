//! The reading half: reads of ours, from the request to the data in our memory, by either of two ways.
//!
//! ```text
//!   by READ    waiting ── READs posted, some at a time ──▶ all have completed ──▶ done ── READ_DONE ──▶ the owner
//!   by WRITE   waiting ── READ_ASK {grant, target} ──▶ the owner writes under `target`, which arrives ──▶ done
//! ```
//!
//! A READ needs nobody at the other end: it is done when its device says so, and the owner is told that its blocks are
//! not read any more. By WRITE the owner's library starts an ordinary transfer under a grant that was issued for the
//! purpose, so that landing, aborting and fencing are those of any write (K1 to K6); what the receiving half tells of
//! that grant comes here. The owner's half is in `lender`.
//!
//! A read is over when its outcome is told and no device writes to its targets any more. It ends with its connection:
//! nothing of it is remembered (the grants of reads are not in the ledger).

use std::collections::VecDeque;
use std::time::Instant;

use super::config::Config;
use super::control::{ASK_OVERHEAD, Record};
use super::event::{
    AbortReason, Cause, Event, GrantRef, ProtocolViolation, ReadEnd, ReadId, ReadRefusal, Reason,
    SenderReason,
};
use super::message::MAX_MESSAGE;
use super::outbox::{Outbox, Queued};
use super::plan::{Cursor, Piece, Plan};
use super::receiver::Receiver;

/// Bytes of requests that have not come completely, at the owner. More is an offence.
pub(super) const ASK_WINDOW: usize = 4 * MAX_MESSAGE;
/// Bytes of requests whose reads have not ended, at the reader: far less, since parts of one may come late.
const OWN_WINDOW: usize = MAX_MESSAGE;
/// Parts of a request smaller than this are not worth a record.
const MIN_PART: usize = 64;
/// An owner that was asked to stop writing, and does not say that it has, is given up after so many times `peer_timeout`:
/// its send queues are deep, and may drain slowly.
const PATIENCE: u32 = 4;

/// A read to be started.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    pub(crate) grant: GrantRef,
    pub(crate) by: ReadBy,
    pub(crate) deadline: Instant,
}

/// Who moves the data.
#[derive(Debug)]
pub(crate) enum ReadBy {
    /// We, by RDMA READs. The plan's source side is our memory, which is written to, and its target side the owner's.
    Rdma {
        plan: Plan,
        /// Most READs in flight on a queue pair. The configuration's limit holds as well.
        depth: u32,
        /// Queue pairs to use: the first so many.
        qps: usize,
    },
    /// The owner, by an ordinary write of `bytes` to the blocks that `request` names, in the caller's own words.
    Write { request: Vec<u8>, bytes: u64 },
}

#[derive(Debug)]
enum By {
    Rdma {
        plan: Plan,
        cursor: Cursor,
        depth: u32,
        qps: usize,
        /// READs that have not completed.
        outstanding: u32,
        /// Pieces whose READs have failed with their rail, by where the plan was cut for them and with their bytes: those
        /// whose rail is not fenced yet, with its queue pair, and those that can be read again.
        failed: Vec<(usize, Cursor, u32)>,
        again: Vec<(Cursor, u32)>,
    },
    Write {
        target: u64,
        /// Until it is sent.
        request: Option<Vec<u8>>,
        /// Bytes of it.
        len: usize,
    },
}

/// A request that is being sent. It is sent to its end, also when its read is over by then: the owner waits for it.
#[derive(Debug)]
struct Asking {
    grant: u64,
    target: u64,
    request: Vec<u8>,
    sent: usize,
}

#[derive(Debug)]
struct Read {
    grant: u64,
    bytes: u64,
    deadline: Instant,
    by: By,
    abort: Option<(SenderReason, Instant)>,
    done_told: bool,
    released_told: bool,
    /// READs that were posted, and how many of them were in flight at most.
    wrs: u64,
    most: u32,
}

/// A READ in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    read: u64,
    qp: usize,
    cursor: Cursor,
    len: u32,
}

#[derive(Debug)]
pub(super) struct Reader {
    /// Number of `reads[0]`.
    base: u64,
    reads: VecDeque<Option<Read>>,
    /// By READ, with something to post.
    pub(super) active: VecDeque<u64>,
    /// By WRITE, whose requests have not been sent, and the one that is being sent.
    asks: VecDeque<u64>,
    asking: Option<Asking>,
    /// Bytes of requests of reads that have begun to ask and not ended.
    asked: usize,
    /// READs in flight by the number in their token, and numbers that are free.
    flights: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// READs in flight on each queue pair.
    pub(super) in_flight: Vec<u32>,
    /// Records that the owner waits for before it closes: READ_DONE that were queued, and READ_ASK that were sent.
    pub(super) said: u64,
    /// No read has a time-out before this.
    pub(super) timeout: Option<Instant>,
}

/// A piece of a read that can be posted now.
pub(super) struct Next {
    pub(super) piece: Piece,
    rail: usize,
    before: Cursor,
    after: Option<Cursor>,
}

impl Reader {
    pub(super) fn new(cfg: &Config) -> Self {
        Self {
            base: 0,
            reads: VecDeque::new(),
            active: VecDeque::new(),
            asks: VecDeque::new(),
            asking: None,
            asked: 0,
            flights: Vec::new(),
            free: Vec::new(),
            in_flight: vec![0; cfg.qps()],
            said: 0,
            timeout: None,
        }
    }

    /// Takes a read whose grant has been checked and used up.
    pub(super) fn read(&mut self, req: ReadRequest, receiver: &mut Receiver, out: &mut Outbox) -> ReadId {
        let id = self.base + self.reads.len() as u64;
        let (bytes, by) = match req.by {
            ReadBy::Rdma { plan, depth, qps } => {
                self.active.push_back(id);
                let (depth, qps, bytes) = (depth.max(1), qps.max(1), plan.bytes());
                let (failed, again) = (Vec::new(), Vec::new());
                let cursor = Cursor::default();
                (bytes, By::Rdma { plan, cursor, depth, qps, outstanding: 0, failed, again })
            }
            ReadBy::Write { request, bytes } => {
                let target = receiver.issue_grant(bytes);
                out.targets.insert(target, id);
                self.asks.push_back(id);
                let len = request.len();
                (bytes, By::Write { target, request: Some(request), len })
            }
        };
        let (grant, deadline) = (req.grant.id, req.deadline);
        let (abort, done_told, released_told, wrs, most) = (None, false, false, 0, 0);
        let read = Read { grant, bytes, deadline, by, abort, done_told, released_told, wrs, most };
        self.reads.push_back(Some(read));
        self.timeout = Some(self.timeout.map_or(deadline, |t| t.min(deadline)));
        ReadId(id)
    }

    fn get(&self, id: u64) -> Option<&Read> {
        let index = usize::try_from(id.checked_sub(self.base)?).ok()?;
        self.reads.get(index)?.as_ref()
    }

    fn get_mut(&mut self, id: u64) -> Option<&mut Read> {
        let index = usize::try_from(id.checked_sub(self.base)?).ok()?;
        self.reads.get_mut(index)?.as_mut()
    }

    fn ids(&self) -> std::ops::Range<u64> {
        self.base..self.base + self.reads.len() as u64
    }

    /// No read is alive, and none is waited for.
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.asking.is_none()
    }

    /// The read that uses a grant.
    pub(super) fn of_grant(&self, grant: u64) -> Option<ReadId> {
        self.ids().find(|&id| self.get(id).is_some_and(|r| r.grant == grant)).map(ReadId)
    }

    // --- by READ ---

    /// What a read may put in flight: READs on a queue pair, and the number of queue pairs. `None` when it has nothing
    /// to post.
    pub(super) fn wants(&self, id: u64) -> Option<(u32, usize)> {
        let read = self.get(id).filter(|r| r.abort.is_none())?;
        match &read.by {
            By::Rdma { plan, cursor, depth, qps, again, .. } => {
                (!cursor.is_done(plan) || !again.is_empty()).then_some((*depth, *qps))
            }
            By::Write { .. } => None,
        }
    }

    /// Cuts the next READ of `id` for `rail`, of at most `max` bytes, without taking it.
    pub(super) fn next(&self, id: u64, rail: usize, max: u32) -> Option<Next> {
        let By::Rdma { plan, cursor, again, .. } = &self.get(id)?.by else { return None };
        let (before, max) = match again.last() {
            Some(&(at, left)) => (at, left.min(max)),
            None => (*cursor, max),
        };
        let mut after = before;
        let piece = after.next(plan, rail, max)?;
        Some(Next { piece, rail, before, after: again.is_empty().then_some(after) })
    }

    /// The READ of `next` goes out on `qp`. Answers the number for its token.
    pub(super) fn posted(&mut self, id: u64, next: &Next, qp: usize) -> usize {
        let len = next.piece.len;
        if let Some(read) = self.get_mut(id)
            && let By::Rdma { plan, cursor, outstanding, again, .. } = &mut read.by
        {
            match (next.after, again.last_mut()) {
                (Some(after), _) => *cursor = after,
                (None, Some((at, left))) if *left > len => {
                    let _ = at.next(plan, next.rail, len);
                    *left -= len;
                }
                (None, _) => {
                    again.pop();
                }
            }
            *outstanding += 1;
            read.wrs += 1;
            read.most = read.most.max(*outstanding);
        }
        self.in_flight[qp] += 1;
        let flight = Some(InFlight { read: id, qp, cursor: next.before, len });
        match self.free.pop() {
            Some(number) => {
                self.flights[number] = flight;
                number
            }
            None => {
                self.flights.push(flight);
                self.flights.len() - 1
            }
        }
    }

    /// A READ has completed; or it has failed with its rail (`ok` is false), and others are left.
    ///
    /// The grace of a cancelled read counts from its last completion, as that of a write does.
    pub(super) fn on_sent(&mut self, number: usize, ok: bool, now: Instant, out: &mut Outbox) {
        let Some(flight) = self.land(number) else { return };
        let Some(read) = self.get_mut(flight.read) else { return };
        let until = now.min(read.deadline);
        if let Some((_, at)) = &mut read.abort {
            *at = (*at).max(until);
        }
        if let By::Rdma { outstanding, failed, .. } = &mut read.by {
            *outstanding = outstanding.saturating_sub(1);
            if !ok {
                failed.push((flight.qp, flight.cursor, flight.len));
            }
        }
        self.settle(flight.read, out);
    }

    /// The queue pairs of `mask` are destroyed at both ends: what was read there in vain is read again on others. Nothing that
    /// is on its way to them reaches our memory any more.
    pub(super) fn on_rail_fenced(&mut self, mask: u64, out: &mut Outbox) {
        for id in self.ids() {
            let Some(By::Rdma { failed, again, .. }) = self.get_mut(id).map(|r| &mut r.by) else { continue };
            let before = again.len();
            failed.retain(|&(qp, cursor, len)| {
                let fenced = mask >> qp & 1 == 1;
                if fenced {
                    again.push((cursor, len));
                }
                !fenced
            });
            if again.len() > before && !self.active.contains(&id) {
                self.active.push_back(id);
            }
            self.settle(id, out);
        }
    }

    /// Bytes of a READ in flight.
    pub(super) fn len_of(&self, number: usize) -> u32 {
        self.flights.get(number).copied().flatten().map_or(0, |flight| flight.len)
    }

    fn land(&mut self, number: usize) -> Option<InFlight> {
        let flight = self.flights.get_mut(number)?.take()?;
        self.free.push(number);
        self.in_flight[flight.qp] = self.in_flight[flight.qp].saturating_sub(1);
        Some(flight)
    }

    /// Lets go of a read by READ that is over, and tells its owner.
    pub(super) fn settle(&mut self, id: u64, out: &mut Outbox) {
        let Some(read) = self.get(id) else { return };
        let By::Rdma { plan, cursor, outstanding, failed, again, .. } = &read.by else { return };
        // What has failed with its rail may still be on its way to the owner's device: its blocks are in use until the fence,
        // and ours are not.
        let (quiet, complete) = (failed.is_empty(), cursor.is_done(plan) && again.is_empty());
        if *outstanding > 0 || !(complete && quiet || read.abort.is_some()) {
            return;
        }
        let reason = read.abort.map(|(reason, _)| reason);
        if reason.is_none() {
            self.tell_done(id, Ok(()), out);
        }
        self.tell_released(id, out);
        if quiet {
            self.say_end(id, reason, out);
            self.release(id, out);
        }
    }

    /// Tells the owner that its blocks are not read any more.
    fn say_end(&mut self, id: u64, reason: Option<SenderReason>, out: &mut Outbox) {
        let Some(read) = self.get(id) else { return };
        out.queue(Queued::ReadDone { grant: read.grant, bytes: read.bytes, reason });
        self.said += 1;
    }

    // --- by WRITE ---

    /// A part of a request can be sent now.
    pub(super) fn has_ask(&self) -> bool {
        let next = || match self.asks.front().and_then(|&id| self.get(id)).map(|r| &r.by) {
            Some(By::Write { len, .. }) => self.asked + len <= OWN_WINDOW,
            _ => false,
        };
        self.asking.is_some() || next()
    }

    /// Shows the next part of a request that fits in `room` bytes; if `push` takes it, it is sent.
    pub(super) fn next_ask(&mut self, room: usize, push: impl FnOnce(&Record<'_>) -> bool) -> bool {
        if !self.has_ask() || room < ASK_OVERHEAD {
            return false;
        }
        let front = self.asks.front().copied();
        // Shown from where it is, and moved when its first part has been taken.
        let (grant, target, request, at) = match (&self.asking, front.and_then(|id| self.get(id))) {
            (Some(a), _) => (a.grant, a.target, &a.request, a.sent),
            (None, Some(Read { grant, by: By::Write { target, request: Some(request), .. }, .. })) => {
                (*grant, *target, request, 0)
            }
            (None, _) => return false,
        };
        let len = (room - ASK_OVERHEAD).min(request.len() - at);
        if len < (request.len() - at).min(MIN_PART) {
            return false;
        }
        let record = Record::ReadAsk {
            grant,
            target,
            // At most MAX_MESSAGE, both: the caller has checked.
            total: request.len() as u32,
            offset: at as u32,
            bytes: &request[at..at + len],
        };
        if !push(&record) {
            return false;
        }
        self.said += 1;
        if self.asking.is_none() {
            let id = self.asks.pop_front().unwrap_or_default();
            let Some(By::Write { request, len, .. }) = self.get_mut(id).map(|r| &mut r.by) else {
                return true;
            };
            let (request, len) = (request.take().unwrap_or_default(), *len);
            self.asking = Some(Asking { grant, target, request, sent: 0 });
            self.asked += len;
        }
        if let Some(a) = &mut self.asking {
            a.sent += len;
            if a.sent == a.request.len() {
                self.asking = None;
            }
        }
        true
    }

    /// The grant that was issued for a read has been written to: the data is here.
    pub(super) fn on_target_arrived(&mut self, target: u64, out: &mut Outbox) {
        let Some(id) = out.targets.remove(&target) else { return };
        self.tell_done(id, Ok(()), out);
        self.release(id, out);
    }

    /// It will not be written to.
    pub(super) fn on_target_aborted(&mut self, target: u64, reason: AbortReason, out: &mut Outbox) {
        let Some(&id) = out.targets.get(&target) else { return };
        let own = self.get(id).and_then(|r| r.abort).map(|(reason, _)| reason.into());
        let reason = own.unwrap_or(match reason {
            AbortReason::Sender(reason) | AbortReason::Reader(reason) => reason.into(),
            AbortReason::ConnectionLost => Reason::Lost(Cause::PeerLost),
            AbortReason::PeerRestarted => Reason::PeerRestarted,
            AbortReason::Revoked | AbortReason::ReadRefused(_) => Reason::Revoked,
        });
        self.tell_done(id, Err(ReadEnd::Failed(reason)), out);
    }

    /// No write can reach its blocks any more.
    pub(super) fn on_target_freed(&mut self, target: u64, out: &mut Outbox) {
        if let Some(id) = out.targets.remove(&target) {
            self.release(id, out);
        }
    }

    /// The owner does not write, and never has under this grant.
    pub(super) fn on_refused(
        &mut self,
        target: u64,
        why: ReadRefusal,
        receiver: &mut Receiver,
        out: &mut Outbox,
    ) -> Result<(), ProtocolViolation> {
        let Some(&id) = out.targets.get(&target) else {
            // It was revoked meanwhile, and is over; or it never was.
            return receiver.was_issued(target);
        };
        if self.get(id).is_some_and(|r| matches!(r.by, By::Write { request: Some(_), .. })) {
            return Err(ProtocolViolation::Rule("a read refused that was not asked for"));
        }
        receiver.withdraw(target)?;
        let own = self.get(id).and_then(|r| r.abort);
        let end = own.map_or(ReadEnd::Refused(why), |(reason, _)| ReadEnd::Failed(reason.into()));
        self.tell_done(id, Err(end), out);
        out.targets.remove(&target);
        self.release(id, out);
        Ok(())
    }

    // --- ends ---

    /// Ends a read early. Unknown ones, and those that are done, are ignored.
    pub(super) fn abort(
        &mut self,
        cfg: &Config,
        id: u64,
        reason: SenderReason,
        now: Instant,
        receiver: &mut Receiver,
        out: &mut Outbox,
    ) {
        let Some(read) = self.get_mut(id).filter(|r| r.abort.is_none() && !r.done_told) else { return };
        read.abort = Some((reason, now));
        let at = read.timeout(cfg);
        self.timeout = [self.timeout, at].into_iter().flatten().min();
        let target = match &self.get(id).map(|r| &r.by) {
            Some(By::Write { target, request, .. }) => Some((*target, request.is_none())),
            _ => None,
        };
        match target {
            None => {
                self.tell_done(id, Err(ReadEnd::Failed(reason.into())), out);
                self.settle(id, out);
            }
            // From here on it is a revoked grant like any other, of which the receiving half tells.
            Some((target, true)) => receiver.revoke_grant(target, out),
            // Its owner has never heard of the request.
            Some((target, false)) => {
                let _ = receiver.withdraw(target);
                out.targets.remove(&target);
                self.tell_done(id, Err(ReadEnd::Failed(reason.into())), out);
                self.say_end(id, Some(reason), out);
                self.release(id, out);
            }
        }
    }

    /// The owner takes a grant back. Answers the read to abort, if there is one that it cannot end by itself: one by
    /// WRITE is aborted by the owner, whose transfer it is, as soon as it has been asked.
    pub(super) fn on_revoke(&self, grant: u64) -> Option<u64> {
        let ReadId(id) = self.of_grant(grant)?;
        let read = self.get(id).filter(|r| r.abort.is_none())?;
        matches!(read.by, By::Rdma { .. } | By::Write { request: Some(_), .. }).then_some(id)
    }

    /// Reads that must be aborted now, or the cause to give up for.
    pub(super) fn on_timeout(&mut self, cfg: &Config, now: Instant) -> Result<Vec<u64>, Cause> {
        let mut late = Vec::new();
        if self.timeout.is_none_or(|t| now < t) {
            return Ok(late);
        }
        let mut next: Option<Instant> = None;
        for id in self.ids() {
            let Some(read) = self.get(id) else { continue };
            let Some(at) = read.timeout(cfg) else { continue };
            if now < at {
                next = Some(next.map_or(at, |n| n.min(at)));
            } else if read.abort.is_none() && !read.done_told {
                late.push(id);
            } else if matches!(read.by, By::Rdma { .. }) {
                return Err(Cause::AbortStuck);
            } else {
                return Err(Cause::PeerLost);
            }
        }
        self.timeout = next;
        Ok(late)
    }

    fn tell_done(&mut self, id: u64, result: Result<(), ReadEnd>, out: &mut Outbox) {
        let Some(read) = self.get_mut(id) else { return };
        if !std::mem::replace(&mut read.done_told, true) {
            let (wrs, most) = (read.wrs, read.most);
            out.event(Event::ReadDone { id: ReadId(id), result, wrs, most });
        }
    }

    /// No device writes to its targets any more.
    fn tell_released(&mut self, id: u64, out: &mut Outbox) {
        let Some(read) = self.get_mut(id) else { return };
        if !std::mem::replace(&mut read.released_told, true) {
            out.event(Event::ReadReleased { id: ReadId(id) });
        }
    }

    /// It is over: its outcome is told, and no device writes to its targets any more.
    fn release(&mut self, id: u64, out: &mut Outbox) {
        let Some(index) = id.checked_sub(self.base).and_then(|i| usize::try_from(i).ok()) else { return };
        let Some(read) = self.reads.get_mut(index).and_then(Option::take) else { return };
        debug_assert!(read.done_told, "released without an outcome");
        if !read.released_told {
            out.event(Event::ReadReleased { id: ReadId(id) });
        }
        match read.by {
            By::Write { request: None, len, .. } => self.asked -= len,
            // It was never asked for.
            By::Write { .. } => self.asks.retain(|&ask| ask != id),
            By::Rdma { .. } => {}
        }
        while let Some(None) = self.reads.front() {
            self.reads.pop_front();
            self.base += 1;
        }
    }

    /// The connection is over: tells every outcome.
    pub(super) fn on_lost(&mut self, cause: Cause, out: &mut Outbox) {
        self.active.clear();
        self.asks.clear();
        self.asking = None;
        self.timeout = None;
        for id in self.ids() {
            self.tell_done(id, Err(ReadEnd::Failed(Reason::Lost(cause))), out);
            self.release_if_quiet(id, out);
        }
    }

    /// After the loss: a READ has completed or been flushed.
    pub(super) fn on_sent_lost(&mut self, number: usize, out: &mut Outbox) {
        let Some(flight) = self.land(number) else { return };
        if let Some(By::Rdma { outstanding, .. }) = self.get_mut(flight.read).map(|r| &mut r.by) {
            *outstanding = outstanding.saturating_sub(1);
        }
        self.release_if_quiet(flight.read, out);
    }

    fn release_if_quiet(&mut self, id: u64, out: &mut Outbox) {
        if let Some(By::Rdma { outstanding: 0, .. }) = self.get(id).map(|r| &r.by) {
            self.release(id, out);
        }
    }

    /// After the loss: no device can write to any target.
    pub(super) fn on_fenced(&mut self, receiver: &mut Receiver, out: &mut Outbox) {
        for target in std::mem::take(&mut out.targets).into_keys() {
            receiver.forget(target);
        }
        for id in self.ids() {
            self.release(id, out);
        }
    }
}

impl Read {
    /// When something must have changed.
    fn timeout(&self, cfg: &Config) -> Option<Instant> {
        let patience = cfg.abort_grace + cfg.peer_timeout * PATIENCE;
        match (self.abort, &self.by) {
            (None, _) if self.done_told => self.deadline.checked_add(patience),
            (None, _) => Some(self.deadline),
            // The fence of a rail has a time of its own.
            (Some(_), By::Rdma { outstanding: 0, .. }) => None,
            (Some((_, at)), By::Rdma { .. }) => at.checked_add(cfg.abort_grace),
            (Some((_, at)), By::Write { .. }) => at.checked_add(patience),
        }
    }
}
