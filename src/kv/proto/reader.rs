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

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::asking::Asking;
use super::config::Config;
use super::event::{Cause, Event, GrantRef, ReadEnd, ReadId, Reason, SenderReason};
use super::flights::InFlight;
use super::numbered::Numbered;
use super::outbox::{Outbox, Queued};
use super::plan::{Cursor, Plan};
use super::receiver::Receiver;
use super::word::patience;

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
pub(super) enum By {
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

#[derive(Debug)]
pub(super) struct Read {
    pub(super) grant: u64,
    pub(super) bytes: u64,
    pub(super) deadline: Instant,
    pub(super) by: By,
    pub(super) abort: Option<(SenderReason, Instant)>,
    /// Of one that was aborted: where what the rails go through puts its end off no more.
    pub(super) limit: Option<Instant>,
    pub(super) done_told: bool,
    pub(super) released_told: bool,
    /// READs that were posted, and how many of them were in flight at most.
    pub(super) wrs: u64,
    pub(super) most: u32,
}

#[derive(Debug)]
pub(super) struct Reader {
    reads: Numbered<Read>,
    /// Those that are alive, by their grants.
    by_grant: HashMap<u64, u64>,
    /// By READ, with something to post.
    pub(super) active: VecDeque<u64>,
    /// By WRITE, whose requests have not been sent, and the one that is being sent.
    pub(super) asks: VecDeque<u64>,
    pub(super) asking: Option<Asking>,
    /// Bytes of requests of reads that have begun to ask and not ended.
    pub(super) asked: usize,
    /// READs in flight by the number in their token, and numbers that are free.
    pub(super) flights: Vec<Option<InFlight>>,
    pub(super) free: Vec<usize>,
    /// READs in flight on each queue pair.
    pub(super) in_flight: Vec<u32>,
    /// Records that the owner waits for before it closes: READ_DONE that were queued, and READ_ASK that were sent.
    pub(super) said: u64,
    /// No read has a time-out before this.
    pub(super) timeout: Option<Instant>,
}

impl Reader {
    pub(super) fn new(cfg: &Config) -> Self {
        Self {
            reads: Numbered::from(0),
            by_grant: HashMap::new(),
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
        let id = self.ids().end;
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
        let (abort, limit, done_told, released_told, wrs, most) = (None, None, false, false, 0, 0);
        let read = Read { grant, bytes, deadline, by, abort, limit, done_told, released_told, wrs, most };
        self.reads.push(read);
        self.by_grant.insert(grant, id);
        self.timeout = Some(self.timeout.map_or(deadline, |t| t.min(deadline)));
        ReadId(id)
    }

    pub(super) fn get(&self, id: u64) -> Option<&Read> {
        self.reads.get(id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Read> {
        self.reads.get_mut(id)
    }

    pub(super) fn ids(&self) -> std::ops::Range<u64> {
        self.reads.ids()
    }

    /// No read is alive, and none is waited for.
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.asking.is_none()
    }

    /// The read that uses a grant.
    pub(super) fn of_grant(&self, grant: u64) -> Option<ReadId> {
        self.by_grant.get(&grant).copied().map(ReadId)
    }

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
        read.limit = Some(now + patience(cfg) + cfg.abort_limit());
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
            Some((target, true)) => receiver.revoke_grant(cfg, target, now, out),
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

    /// Tells the owner that its blocks are not read any more.
    pub(super) fn say_end(&mut self, id: u64, reason: Option<SenderReason>, out: &mut Outbox) {
        let Some(read) = self.get(id) else { return };
        out.queue(Queued::ReadDone { grant: read.grant, bytes: read.bytes, reason });
        self.said += 1;
    }

    pub(super) fn tell_done(&mut self, id: u64, result: Result<(), ReadEnd>, out: &mut Outbox) {
        let Some(read) = self.get_mut(id) else { return };
        if !std::mem::replace(&mut read.done_told, true) {
            let (wrs, most) = (read.wrs, read.most);
            out.event(Event::ReadDone { id: ReadId(id), result, wrs, most });
        }
    }

    /// No device writes to its targets any more.
    pub(super) fn tell_released(&mut self, id: u64, out: &mut Outbox) {
        let Some(read) = self.get_mut(id) else { return };
        if !std::mem::replace(&mut read.released_told, true) {
            out.event(Event::ReadReleased { id: ReadId(id) });
        }
    }

    /// It is over: its outcome is told, and no device writes to its targets any more.
    pub(super) fn release(&mut self, id: u64, out: &mut Outbox) {
        let Some(read) = self.reads.remove(id) else { return };
        self.by_grant.remove(&read.grant);
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
    /// It may wait for rails that have failed.
    pub(super) fn is_in_time(&self, cfg: &Config, now: Instant) -> bool {
        let limit = self.limit.or_else(|| self.deadline.checked_add(patience(cfg) + cfg.abort_limit()));
        limit.is_none_or(|limit| now < limit)
    }

    /// When something must have changed.
    pub(super) fn timeout(&self, cfg: &Config) -> Option<Instant> {
        let patience = patience(cfg);
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
