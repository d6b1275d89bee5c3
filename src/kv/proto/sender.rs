//! The sending half: transfers from the request to the receiver's word.
//!
//! ```text
//!   waiting ── a slot is free ──▶ active ── plan cut, notifications posted ──▶ posted ── confirmed ──▶ over
//!      └────────── abort ───────────┴──────────────────── abort ─────────────────┘  (aborting, acknowledged) ─▶ over
//! ```
//!
//! A transfer is over when the peer has spoken and no work request is outstanding; only then its slot is used again.
//! Transfers are numbered without gaps, so that a ring buffer holds them: no allocation in steady state.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Instant;

use super::config::Config;
use super::event::{
    Cause, Event, GrantRef, Outcome, ProtocolViolation, Reason, Refused, Resolution, SenderReason,
    TransferId, WriteRequest,
};
use super::ledger::TxLedger;
use super::numbered::Numbered;
use super::outbox::{Outbox, Queued};
use super::plan::Cursor;
use super::slots::Slots;
use super::transfer::{Aborting, HeaderState, Transfer};

/// Unresolved transfers that may exist, counted from the oldest. Bounds what the receiver must remember.
pub(super) const WINDOW: u64 = 65_536;
/// Ranges of used grants that are remembered; beyond, the oldest unused grants are burned.
const USED_RANGES: usize = 65_536;

#[derive(Debug)]
pub(super) struct Sender {
    pub(super) ledger: TxLedger,
    transfers: Numbered<Transfer>,
    /// Those that are alive, by their grants.
    by_grant: HashMap<u64, u64>,
    /// Grants of what the ledger has in doubt or untold, of earlier connections.
    earlier: HashSet<u64>,
    /// Accepted, no slot yet.
    waiting: VecDeque<u64>,
    /// With a slot, and something to post.
    pub(super) active: VecDeque<u64>,
    /// Whose header can be sent.
    pub(super) headers: VecDeque<u64>,
    pub(super) slots: Slots,
    /// More than one rail: a transfer may have to begin again.
    several: bool,
    /// Queue pairs of rails that have failed and are not fenced on both sides.
    pub(super) broken: u64,
    /// No transfer has a time-out before this.
    pub(super) timeout: Option<Instant>,
    pub(super) landed: u64,
    pub(super) not_delivered: u64,
    pub(super) in_doubt: u64,
}

impl Sender {
    /// Asks about what the ledger has in doubt, and tells of what the peer does not know.
    pub(super) fn new(cfg: &Config, ledger: TxLedger, out: &mut Outbox) -> Self {
        for (&transfer, &grant) in &ledger.in_doubt {
            out.queue(Queued::Query { transfer, grant });
        }
        for (&transfer, &grant) in &ledger.untold {
            out.queue(Queued::AbortEarlier { transfer, grant });
        }
        Self {
            transfers: Numbered::from(ledger.next),
            by_grant: HashMap::new(),
            earlier: ledger.in_doubt.values().chain(ledger.untold.values()).copied().collect(),
            ledger,
            waiting: VecDeque::new(),
            active: VecDeque::new(),
            headers: VecDeque::new(),
            slots: Slots::new(cfg),
            several: cfg.rails.len() > 1,
            broken: 0,
            timeout: None,
            landed: 0,
            not_delivered: 0,
            in_doubt: 0,
        }
    }

    /// Every transfer below this is resolved.
    pub(super) fn resolved_below(&self) -> u64 {
        [&self.ledger.in_doubt, &self.ledger.untold]
            .into_iter()
            .filter_map(|m| m.first_key_value().map(|(&t, _)| t))
            .fold(self.ids().start, u64::min)
    }

    /// Checks a request (K6, R10) and takes it. The grant is used from here on, whatever becomes of the transfer.
    pub(super) fn write(&mut self, cfg: &Config, req: WriteRequest) -> Result<TransferId, Refused> {
        let grant = req.grant.id;
        check_grant(cfg, &req.grant, req.plan.bytes())?;
        if self.is_full() {
            return Err(Refused::Full { limit: WINDOW });
        }
        self.use_grant(grant)?;
        self.ledger.next += 1;
        let id = self.transfers.push(Transfer {
            grant,
            // Until `ungate`.
            gated: true,
            tag: req.tag,
            attempt: 0,
            plan: req.plan,
            cursor: Cursor::default(),
            deadline: req.deadline,
            slot: None,
            took_part: 0,
            reset: 0,
            reopening: false,
            exposed: false,
            revoked: false,
            notified: 0,
            tail: 0,
            cut: false,
            header: HeaderState::Open,
            outstanding: 0,
            wrs: 0,
            abort: None,
            abort_done: false,
            resolved: false,
            sent_told: false,
            done_told: false,
            released_told: false,
        });
        debug_assert_eq!(id + 1, self.ledger.next);
        self.by_grant.insert(grant, id);
        self.timeout = Some(self.timeout.map_or(req.deadline, |t| t.min(req.deadline)));
        Ok(TransferId(id))
    }

    /// The peer remembers as much as it has to.
    pub(super) fn is_full(&self) -> bool {
        self.ledger.next - self.resolved_below() >= WINDOW
    }

    /// Uses a grant up: no other write or read takes it.
    pub(super) fn use_grant(&mut self, grant: u64) -> Result<(), Refused> {
        if !self.ledger.used.insert(grant) {
            return Err(Refused::StaleGrant { grant });
        }
        self.bound_used();
        Ok(())
    }

    /// Its data is ready: it waits for a slot.
    pub(super) fn ungate(&mut self, id: u64) {
        if let Some(t) = self.get_mut(id)
            && std::mem::replace(&mut t.gated, false)
            && t.abort.is_none()
        {
            self.waiting.push_back(id);
        }
    }

    fn bound_used(&mut self) {
        if self.ledger.used.ranges() > USED_RANGES {
            self.ledger.used.close_lowest_gap();
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<&Transfer> {
        self.transfers.get(id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Transfer> {
        self.transfers.get_mut(id)
    }

    pub(super) fn ids(&self) -> std::ops::Range<u64> {
        self.transfers.ids()
    }

    /// No transfer is alive, and nothing of an earlier connection is open.
    pub(super) fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.ledger.in_doubt.is_empty() && self.ledger.untold.is_empty()
    }

    /// A transfer's header can be sent.
    pub(super) fn is_header_due(&self, id: u64) -> bool {
        let due = |t: &Transfer| {
            t.header == HeaderState::Queued && t.abort.is_none() && t.took_part & self.broken == 0
        };
        self.get(id).is_some_and(due)
    }

    /// Gives free slots to waiting transfers.
    pub(super) fn activate(&mut self, cfg: &Config) {
        while self.slots.free() > 0 {
            let Some(id) = self.waiting.pop_front() else { break };
            if self.get(id).is_none_or(|t| t.abort.is_some()) {
                continue;
            }
            let slot = self.slots.take(cfg);
            if let Some(t) = self.get_mut(id) {
                t.slot = slot;
            }
            self.active.push_back(id);
        }
    }

    /// Ends a transfer early. Answers whether ABORT_DONE is to be queued on the queue pairs of its mask.
    pub(super) fn abort(
        &mut self,
        cfg: &Config,
        id: u64,
        reason: SenderReason,
        now: Instant,
        out: &mut Outbox,
    ) -> Option<u64> {
        let t = self.get_mut(id)?;
        if t.abort.is_some() || t.resolved {
            return None;
        }
        t.abort = Some(Aborting::new(reason, now, cfg.abort_limit()));
        out.queue(Queued::Abort { transfer: id });
        if !t.deliverable() {
            self.tell_done(id, Outcome::NotDelivered(reason.into()), out);
        }
        let unused = |t: &&mut Transfer| t.took_part == 0 && t.attempt == 0 && !t.reopening;
        let unused_slot = self.get_mut(id).filter(unused).and_then(|t| t.slot.take());
        if let Some(slot) = unused_slot {
            self.slots.give_back_unused(slot);
        }
        let mask = self.settle(id, out);
        let timeout = self.get(id).and_then(|t| t.timeout(cfg));
        self.timeout = [self.timeout, timeout].into_iter().flatten().min();
        mask
    }

    /// A data work request has completed. Answers as `abort` does.
    ///
    /// The grace of a cancelled transfer counts from its last completion, until its deadline: work that drains, if
    /// slowly, is no reason to kill a healthy queue pair (K4).
    pub(super) fn on_sent(&mut self, id: u64, now: Instant, out: &mut Outbox) -> Option<u64> {
        let t = self.get_mut(id)?;
        debug_assert!(t.outstanding > 0);
        t.outstanding = t.outstanding.saturating_sub(1);
        if let Some(abort) = &mut t.abort {
            abort.got_on(now, t.deadline);
        }
        self.settle(id, out)
    }

    /// Tells what can be told, and lets go of a transfer that is over.
    pub(super) fn settle(&mut self, id: u64, out: &mut Outbox) -> Option<u64> {
        let (several, broken) = (self.several, self.broken);
        let t = self.get_mut(id)?;
        if t.outstanding > 0 {
            return None;
        }
        if t.all_posted() && t.abort.is_none() && !t.sent_told {
            t.sent_told = true;
            out.event(Event::Sent { id: TransferId(id) });
        }
        // With several rails it may have to be posted again.
        let quiet = if several { t.resolved } else { t.all_posted() };
        if (quiet || t.abort.is_some()) && !t.released_told {
            t.released_told = true;
            out.event(Event::Released { id: TransferId(id) });
        }
        if t.resolved {
            self.remove(id);
            return None;
        }
        let (mask, slot) = (t.took_part, t.slot);
        t.abort?;
        // The last word waits for the fence of a rail that took part.
        if slot.is_none() || mask & broken != 0 || std::mem::replace(&mut t.abort_done, true) {
            return None;
        }
        if mask == 0 {
            out.queue(Queued::AbortQuiet { transfer: id });
        }
        (mask != 0).then_some(mask)
    }

    fn remove(&mut self, id: u64) {
        let Some(t) = self.transfers.remove(id) else { return };
        self.by_grant.remove(&t.grant);
        if let Some(slot) = t.slot {
            self.slots.give_back(slot);
        }
    }

    fn tell_done(&mut self, id: u64, outcome: Outcome, out: &mut Outbox) {
        let Some(t) = self.get_mut(id).filter(|t| !t.done_told) else { return };
        t.done_told = true;
        let (wrs, attempts) = (t.wrs, u32::from(t.attempt) + 1);
        match outcome {
            Outcome::Landed => self.landed += 1,
            Outcome::NotDelivered(_) => self.not_delivered += 1,
            Outcome::InDoubt(_) => self.in_doubt += 1,
        }
        out.event(Event::Done { id: TransferId(id), outcome, wrs, attempts });
    }

    /// The receiver's word. A repeated one is ignored.
    pub(super) fn on_confirm(
        &mut self,
        id: u64,
        attempt: u16,
        landed: bool,
        out: &mut Outbox,
    ) -> Result<(), ProtocolViolation> {
        let next = self.ledger.next;
        let Some(t) = self.get_mut(id) else {
            return over(id, next, "a transfer confirmed that never was");
        };
        // While it begins again, an earlier attempt may still be the one that is delivered.
        let fits = if t.exposed { attempt <= t.attempt } else { attempt == t.attempt };
        if !fits || !t.deliverable() {
            return Err(ProtocolViolation::Rule("a transfer confirmed that was not sent"));
        }
        if t.resolved {
            return Ok(());
        }
        t.resolved = true;
        t.reopening = false;
        let outcome = if landed { Outcome::Landed } else { Outcome::NotDelivered(Reason::Revoked) };
        self.tell_done(id, outcome, out);
        self.settle(id, out);
        Ok(())
    }

    /// The receiver is done with an aborted transfer, of this connection or an earlier one.
    pub(super) fn on_abort_ack(&mut self, id: u64, out: &mut Outbox) -> Result<(), ProtocolViolation> {
        if let Some(grant) = self.ledger.untold.remove(&id) {
            self.earlier.remove(&grant);
        }
        let next = self.ledger.next;
        let Some(t) = self.get_mut(id) else {
            return over(id, next, "an abort acknowledged that never was");
        };
        let Some(abort) = t.abort else {
            return Err(ProtocolViolation::Rule("an abort acknowledged that never was"));
        };
        t.resolved = true;
        self.tell_done(id, Outcome::NotDelivered(abort.reason.into()), out);
        self.settle(id, out);
        Ok(())
    }

    pub(super) fn on_answer(
        &mut self,
        id: u64,
        resolution: Resolution,
        out: &mut Outbox,
    ) -> Result<(), ProtocolViolation> {
        let Some(grant) = self.ledger.in_doubt.remove(&id) else {
            return Err(ProtocolViolation::Rule("an answer without a question"));
        };
        self.earlier.remove(&grant);
        out.event(Event::Resolved { id: TransferId(id), resolution });
        Ok(())
    }

    /// The receiver takes a grant back. Answers the transfer to abort, if there is one that can be.
    pub(super) fn on_revoke(&mut self, grant: u64, out: &mut Outbox) -> Option<u64> {
        if self.ledger.used.insert(grant) {
            self.bound_used();
            out.queue(Queued::Revoked { grant });
            return None;
        }
        let Some(&id) = self.by_grant.get(&grant) else {
            // Over, or burned by a request whose answer an earlier connection has lost. A question or an abort that
            // is still to be settled frees the grant by itself.
            if !self.earlier.contains(&grant) {
                out.queue(Queued::Revoked { grant });
            }
            return None;
        };
        let t = self.get_mut(id).filter(|t| t.abort.is_none())?;
        // One that is deliverable ends by the receiver's word, unless a rail takes that from it.
        t.revoked = true;
        (!t.deliverable()).then_some(id)
    }

    /// The connection is over: tells every outcome, and remembers what a reconnect must resolve.
    pub(super) fn on_lost(&mut self, cause: Cause, out: &mut Outbox) {
        self.waiting.clear();
        self.active.clear();
        self.headers.clear();
        self.timeout = None;
        for id in self.ids() {
            let Some(t) = self.get_mut(id) else { continue };
            let (grant, resolved, deliverable) = (t.grant, t.resolved, t.deliverable());
            let outstanding = t.outstanding;
            if !resolved && deliverable && !t.done_told {
                self.ledger.in_doubt.insert(id, grant);
                self.tell_done(id, Outcome::InDoubt(Reason::Lost(cause)), out);
            } else if !resolved {
                self.ledger.untold.insert(id, grant);
                self.tell_done(id, Outcome::NotDelivered(Reason::Lost(cause)), out);
            }
            if outstanding == 0 {
                self.release(id, out);
            }
        }
    }

    /// Forgets transfers that end with their connection, whatever became of them: those that serve reads.
    pub(super) fn end_with_connection(&mut self, ids: impl Iterator<Item = u64>) {
        for id in ids {
            self.ledger.in_doubt.remove(&id);
            self.ledger.untold.remove(&id);
        }
    }

    /// After the loss: a work request has completed or been flushed.
    pub(super) fn on_sent_lost(&mut self, id: u64, out: &mut Outbox) {
        let Some(t) = self.get_mut(id) else { return };
        t.outstanding = t.outstanding.saturating_sub(1);
        if t.outstanding == 0 {
            self.release(id, out);
        }
    }

    /// After the loss: no device can read any source.
    pub(super) fn on_fenced(&mut self, out: &mut Outbox) {
        for id in self.ids() {
            self.release(id, out);
        }
    }

    fn release(&mut self, id: u64, out: &mut Outbox) {
        let Some(t) = self.get_mut(id) else { return };
        if !std::mem::replace(&mut t.released_told, true) {
            out.event(Event::Released { id: TransferId(id) });
        }
        self.remove(id);
    }
}

/// Whether a grant of the peer's is one for us, by epoch, and for so many bytes (K6).
pub(super) fn check_grant(cfg: &Config, grant: &GrantRef, bytes: u64) -> Result<(), Refused> {
    let GrantRef { owner_epoch, bound_epoch, max_bytes, .. } = *grant;
    if owner_epoch != cfg.peer_epoch {
        return Err(Refused::PeerRestarted { grant: owner_epoch, peer: cfg.peer_epoch });
    }
    if bound_epoch != cfg.local_epoch {
        return Err(Refused::WrongPeer { bound: bound_epoch, local: cfg.local_epoch });
    }
    if bytes > max_bytes {
        return Err(Refused::OutOfRange { asked: bytes, granted: max_bytes });
    }
    Ok(())
}

impl From<SenderReason> for Reason {
    fn from(r: SenderReason) -> Self {
        match r {
            SenderReason::Cancelled => Self::Cancelled,
            SenderReason::Deadline => Self::Deadline,
            SenderReason::Revoked => Self::Revoked,
            SenderReason::ConnectionLost => Self::Lost(Cause::Local),
        }
    }
}

/// A word on a transfer that is not there: over long ago, when its number is below `next`; else it never was.
pub(super) fn over(id: u64, next: u64, rule: &'static str) -> Result<(), ProtocolViolation> {
    if id < next { Ok(()) } else { Err(ProtocolViolation::Rule(rule)) }
}
