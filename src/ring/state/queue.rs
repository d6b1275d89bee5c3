//! What waits for a credit: a half's queue, first come first served (R4).
//!
//! A list through the slots, linked both ways: a waiter that is cancelled leaves it at once, wherever it stands, and its slot
//! is free. So a program that gives up and tries again while its peer takes nothing holds no more than it waits for.

use std::task::Waker;

use super::super::slots::{NIL, Owner, Phase, Wr};
use super::super::wr_id::{Key, WrId};
use super::{Effects, HalfId, Ring, refusal};

impl<Q: Clone, B> Ring<Q, B> {
    /// Puts an operation at the end of its half's queue.
    pub(super) fn enqueue(&mut self, key: Key, half: u32) {
        let last = std::mem::replace(&mut self.half(half).tail, key.index);
        if last == NIL {
            self.half(half).head = key.index;
        } else {
            self.slots.at(last).next = key.index;
            self.slots.at(key.index).prev = last;
        }
    }

    /// Takes an operation out of its half's queue.
    fn unlink(&mut self, key: Key) {
        let slot = self.slots.at(key.index);
        let half = slot.half;
        let prev = std::mem::replace(&mut slot.prev, NIL);
        let next = std::mem::replace(&mut slot.next, NIL);
        match prev {
            NIL => self.half(half).head = next,
            prev => self.slots.at(prev).next = next,
        }
        match next {
            NIL => self.half(half).tail = prev,
            next => self.slots.at(next).prev = prev,
        }
    }

    /// Takes the first out of a half's queue.
    fn unqueue(&mut self, half: u32) -> Option<Key> {
        let head = self.half(half).head;
        let key = (head != NIL).then(|| self.slots.key_at(head))?;
        self.unlink(key);
        Some(key)
    }

    /// The next queued operation of a half that has a credit, now posted: the caller posts it.
    pub(crate) fn next_queued(&mut self, id: HalfId, fx: &mut Effects<Q, B>) -> Option<(Key, u64, Wr)> {
        let h = self.find(id).filter(|h| h.outstanding < h.depth)?;
        let (recv, qp_generation) = (h.recv, h.tie.as_ref()?.generation);
        let key = self.unqueue(id.index)?;
        let slot = self.slots.at(key.index);
        let wr = slot.wr;
        if let Owner::Tagged { submitter, .. } = &mut slot.owner {
            fx.wakers.extend(submitter.take());
        }
        self.mark_posted(key, id.index);
        Some((key, WrId { recv, key, qp_generation }.encode(), wr))
    }

    /// Ends everything that is queued and not posted, when the half takes nothing any more.
    pub(crate) fn end_queued(&mut self, id: HalfId, fx: &mut Effects<Q, B>) {
        let Some(tie) = self.find(id).and_then(|h| h.tie.clone()) else { return };
        if let Some(error) = refusal(&tie, self.gone) {
            while let Some(key) = self.unqueue(id.index) {
                self.end(key, Err(error.clone()), fx);
            }
        }
    }

    /// Cancels an operation that still waits for a credit: it is never posted. Nothing happens to one that has been posted.
    pub(crate) fn cancel_queued(&mut self, key: Key, fx: &mut Effects<Q, B>) {
        if self.slots.get(key).is_none_or(|s| !matches!(s.phase, Phase::Queued)) {
            return;
        }
        self.unlink(key);
        let Some((_, owner, buf)) = self.slots.remove(key) else { return };
        fx.bufs.extend(buf);
        match owner {
            Owner::Future(waker) => fx.replaced.extend(waker),
            Owner::Tagged { submitter, .. } => {
                fx.replaced.extend(submitter);
                self.tagged -= 1;
                if self.is_over() {
                    self.wake_waiters(fx);
                }
            }
            Owner::Ignored => {}
        }
    }

    /// Whether a tagged operation has been posted (or has ended); otherwise the waker is kept.
    pub(crate) fn poll_posted(&mut self, key: Key, waker: &Waker, fx: &mut Effects<Q, B>) -> bool {
        match self.slots.get(key) {
            Some(slot) if matches!(slot.phase, Phase::Queued) => {
                if let Owner::Tagged { submitter, .. } = &mut slot.owner
                    && !submitter.as_ref().is_some_and(|w| w.will_wake(waker))
                {
                    fx.replaced.extend(submitter.replace(waker.clone()));
                }
                false
            }
            _ => true,
        }
    }
}
