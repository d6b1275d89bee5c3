//! A transfer begins again after a rail that carried a part of it has failed (K10): both halves.
//!
//! ```text
//!   sender                                                 receiver
//!     rail fails: nothing more is posted
//!     both sides fenced: REOPEN {attempt + 1} ──────────▶  delivered? its CONFIRM is on its way
//!                                                          else: forgets the header, and what had come by that rail
//!     begins from the start ◀────────────────── REOPENED
//!     the same bytes to the same blocks, in the same slot
//! ```
//!
//! From REOPENED on the receiver cannot deliver by an old header, so that one which comes late is nothing. What was posted on
//! other rails before may still come: it is counted on, over all attempts, and the new header counts it too, so that a
//! delivery is still after the last write (K1, K3). Control is sent again, if it was lost, so that nothing here is.

use std::time::Instant;

use super::event::ProtocolViolation;
use super::outbox::{Outbox, Queued};
use super::plan::Cursor;
use super::receiver::Receiver;
use super::record::Slot;
use super::sender::{Sender, over};
use super::transfer::HeaderState;

type Result<T = ()> = std::result::Result<T, ProtocolViolation>;

impl Sender {
    /// A rail has failed: transfers that have posted on its queue pairs wait for the fences.
    pub(super) fn stall(&mut self, mask: u64) {
        self.broken |= mask;
        let mut active = std::mem::take(&mut self.active);
        active.retain(|&id| self.get(id).is_some_and(|t| t.took_part & mask == 0));
        self.active = active;
    }

    /// The queue pairs of `mask` are fenced on both sides. Answers the aborted transfers whose last word is to be said again,
    /// and the queue pairs for it.
    pub(super) fn recover(&mut self, mask: u64, now: Instant, out: &mut Outbox) -> Vec<(u64, u64)> {
        self.broken &= !mask;
        let broken = self.broken;
        let mut last_words = Vec::new();
        for id in self.ids() {
            let Some(t) = self.get_mut(id) else { continue };
            if let Some(abort) = t.abort.as_mut().filter(|_| t.outstanding == 0) {
                // What was said of it, or the answer, may have been lost, and is said again now.
                abort.put_off(now);
            }
            if t.took_part & mask == 0 {
                continue;
            }
            let lost = t.took_part & mask;
            t.took_part &= !lost;
            t.notified &= !lost;
            t.reset |= lost;
            let Some(slot) = t.slot else { continue };
            if t.resolved {
                continue;
            }
            if t.abort.is_some() {
                t.abort_done = false;
            } else {
                t.exposed |= t.deliverable();
                (t.cursor, t.cut, t.tail, t.header) = (Cursor::default(), false, 0, HeaderState::Open);
                // One that has posted on another rail, which is not fenced, has to wait for that one, too.
                t.reopening = true;
                if t.took_part & broken == 0 {
                    t.attempt = t.attempt.saturating_add(1);
                    out.queue(Queued::Reopen { transfer: id });
                }
            }
            self.slots.forget_posted(slot, lost);
            last_words.extend(self.settle(id, out).map(|mask| (id, mask)));
        }
        last_words
    }

    /// The receiver will not deliver by an earlier attempt. True when it has taken the grant back, so that there is no other one.
    pub(super) fn on_reopened(&mut self, id: u64, attempt: u16) -> Result<bool> {
        let (next, broken) = (self.ledger.next, self.broken);
        let Some(t) = self.get_mut(id) else {
            return over(id, next, "a transfer reopened that never was").map(|()| false);
        };
        if attempt < t.attempt || t.abort.is_some() {
            return Ok(false);
        }
        if attempt > t.attempt || !t.reopening || t.resolved {
            return Err(ProtocolViolation::Rule("a transfer reopened that was not to be"));
        }
        t.exposed = false;
        if t.revoked {
            return Ok(true);
        }
        // Another rail may have failed meanwhile: then it will be asked again.
        if t.took_part & broken == 0 {
            t.reopening = false;
            t.reset = 0;
            self.active.push_back(id);
        }
        Ok(false)
    }
}

impl Receiver {
    /// The sender begins a transfer again.
    pub(super) fn on_reopen(
        &mut self,
        transfer: u64,
        attempt: u16,
        slot: Slot,
        grant: u64,
        reset: u64,
        out: &mut Outbox,
    ) -> Result {
        if reset & !self.fenced != 0 || attempt == 0 {
            return Err(ProtocolViolation::Rule("a transfer begun again though no rail has failed"));
        }
        if self.is_over(transfer)? {
            // What it has come to is on its way.
            return Ok(());
        }
        let Some(state) = self.reopen(transfer, attempt, slot, grant)? else { return Ok(()) };
        state.header = None;
        for (qp, count) in state.counts.iter_mut().enumerate() {
            if reset >> qp & 1 == 1 {
                *count = 0;
            }
        }
        out.queue(Queued::Reopened { transfer, attempt });
        Ok(())
    }
}
