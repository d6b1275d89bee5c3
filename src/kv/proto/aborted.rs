//! The receiving half of an abort: told at once, and *quiet* (K4) when every queue pair that took part has said its last word
//! and as many notifications have come as were posted.
//!
//! After a rail has failed and is fenced on both sides, its queue pairs say nothing any more, and the others say their
//! last word again without them.

use super::event::{AbortReason, Event, SenderReason};
use super::outbox::{Outbox, Queued};
use super::receiver::{Bound, Receiver, Result, broken};
use super::record::Slot;

/// What an abort has said so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abort {
    /// Queue pairs that will say their last word; known with the first.
    mask: Option<u64>,
    done: u64,
    header_posted: bool,
}

impl Receiver {
    /// The sender will not complete the transfer.
    pub(super) fn on_abort(
        &mut self,
        transfer: u64,
        attempt: u16,
        grant: u64,
        reason: SenderReason,
        slot: Option<Slot>,
        out: &mut Outbox,
    ) -> Result {
        if self.is_over(transfer)? {
            // Delivered: the confirmation is on its way. Below the watermark: the sender knows. Otherwise it may wait.
            if transfer >= self.ledger.resolved_below && !self.ledger.delivered.contains(transfer) {
                out.queue(Queued::AbortAck { transfer });
            }
            return Ok(());
        }
        if grant >= self.ledger.next_grant {
            return broken("an abort under a grant that was never issued");
        }
        let Some(slot) = slot else {
            // Nothing was posted, or on an earlier connection that is fenced: quiet at once.
            self.end_unstarted(transfer, grant, AbortReason::Sender(reason), out)?;
            out.queue(Queued::AbortAck { transfer });
            return Ok(());
        };
        self.bind(slot, Bound { transfer, attempt, grant })?;
        self.begin_abort(slot.index, grant, reason, out);
        self.evaluate(slot.index, out)
    }

    /// Nothing more comes on a queue pair.
    #[expect(clippy::too_many_arguments, reason = "the fields of one record")]
    pub(super) fn on_abort_done(
        &mut self,
        qp: usize,
        transfer: u64,
        attempt: u16,
        grant: u64,
        reason: SenderReason,
        slot: Slot,
        mask: u64,
        posted: u32,
        header: bool,
        out: &mut Outbox,
    ) -> Result {
        if self.is_over(transfer)? {
            return Ok(());
        }
        // Where all that took part have failed, any queue pair will do.
        let all_failed = mask == 0 && self.fenced != 0;
        if !self.is_mask(mask) || (mask >> qp & 1 == 0 && !all_failed) {
            return broken("an abort of queue pairs that did not take part");
        }
        self.bind(slot, Bound { transfer, attempt, grant })?;
        // Where there is no order, this may overtake the ABORT.
        self.begin_abort(slot.index, grant, reason, out);
        let fenced = self.fenced;
        let state = &mut self.slots[usize::from(slot.index)];
        let Some(abort) = &mut state.abort else { return Ok(()) };
        // Said again after a rail has failed: without its queue pairs.
        let fits = abort.mask.is_none_or(|m| (m ^ mask) & !fenced == 0 && abort.header_posted == header);
        let again = !all_failed && abort.done >> qp & 1 == 1;
        if !fits || (again && (fenced == 0 || state.posted[qp] != posted)) {
            return broken("contradicting ends of an abort");
        }
        abort.mask = Some(abort.mask.unwrap_or(mask) & mask);
        abort.header_posted = header;
        if !all_failed {
            abort.done |= 1 << qp;
            state.posted[qp] = posted;
        }
        self.evaluate(slot.index, out)
    }

    fn begin_abort(&mut self, index: u16, grant: u64, reason: SenderReason, out: &mut Outbox) {
        let state = &mut self.slots[usize::from(index)];
        if state.abort.is_some() {
            return;
        }
        state.abort = Some(Abort { mask: None, done: 0, header_posted: false });
        if self.ledger.grants.get(&grant).is_some_and(|g| !g.revoking) {
            out.event(Event::Aborted { grant, reason: AbortReason::Sender(reason) });
        }
    }

    /// Looks whether the aborted transfer of a slot is quiet.
    pub(super) fn evaluate_aborted(&mut self, index: u16, out: &mut Outbox) -> Result {
        let state = &mut self.slots[usize::from(index)];
        let (Some(Bound { transfer, grant, .. }), Some(abort)) = (state.bound, state.abort) else {
            return Ok(());
        };
        let Some(mask) = abort.mask.filter(|&m| m & !abort.done == 0) else { return Ok(()) };
        // On a queue pair that has failed nothing comes any more, and what had come does not matter.
        let counted = |qp: &usize| (mask | !self.fenced) >> qp & 1 == 1;
        let posted = |qp: usize| if mask >> qp & 1 == 1 { state.posted[qp] } else { 0 };
        let mut qps = (0..self.qps).filter(counted);
        if qps.clone().any(|q| state.counts[q] > posted(q)) {
            return broken("more notifications than were posted before the abort");
        }
        if qps.any(|q| state.counts[q] < posted(q)) || (abort.header_posted && state.header.is_none()) {
            return Ok(());
        }
        state.busy = false;
        self.ledger.grants.remove(&grant);
        self.ledger.finished.insert(transfer);
        out.event(Event::Freed { grant });
        out.queue(Queued::AbortAck { transfer });
        Ok(())
    }
}
