//! The state of one ring: slots, credits, ready completions. What every lock of a completion queue protects.
//!
//! A **half** is one side of a queue pair (its send queue or its receive queue) at the completion queue that serves
//! it. A half has `depth` credits; an operation takes one when it is posted and gives it back when it completes, so
//! that a queue is never overrun (R4). Operations without a credit wait in the half's queue, first come first served,
//! and belong to the ring while they wait: a future that is dropped, or forgotten, holds nobody up.
//!
//! Deterministic: nothing here blocks, posts, wakes or drops a buffer. What follows from a call is collected in
//! [`Effects`], which the caller carries out after it has released the lock. Imports no tokio and no provider object;
//! generic over the queue pair `Q` and the buffer `B`.

mod ends;
mod queue;
mod receivers;

use std::collections::VecDeque;
use std::task::Waker;

use self::receivers::Receivers;
use super::cause::FirstCause;
use super::completion::Completed;
use super::slots::{NIL, Owner, Phase, Slots, Wr};
use super::wr_id::{Key, WrId};
use crate::error::OpError;
use crate::sync::{Arc, guarded};

/// What both halves of a queue pair know of each other.
#[derive(Debug)]
pub(crate) struct Tie {
    pub(crate) qp_num: u32,
    pub(crate) generation: u32,
    pub(crate) cause: FirstCause,
    /// Closed or dropped by us. Set before either half's lock is taken to end what is queued.
    pub(crate) closing: std::sync::atomic::AtomicBool,
    /// A shared receive queue, and no queue pair.
    pub(crate) shared: bool,
}

impl Tie {
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(std::sync::atomic::Ordering::Acquire)
    }

    /// What operations say that end because it was closed.
    pub(crate) fn closed(&self) -> OpError {
        match self.shared {
            true => OpError::SrqClosed,
            false => OpError::Closed { qp_num: self.qp_num },
        }
    }
}

/// What is to be done after the lock is released. Reused.
#[derive(Debug)]
pub(crate) struct Effects<Q, B> {
    pub(crate) wakers: Vec<Waker>,
    /// Wakers that were replaced: only dropped.
    replaced: Vec<Waker>,
    pub(crate) bufs: Vec<B>,
    /// Halves (queue pair, is the receive side) that may have queued work to post, or be drained.
    pub(crate) attention: Vec<(Q, bool)>,
}

impl<Q, B> Default for Effects<Q, B> {
    fn default() -> Self {
        Self { wakers: Vec::new(), replaced: Vec::new(), bufs: Vec::new(), attention: Vec::new() }
    }
}

impl<Q, B> Effects<Q, B> {
    /// Nothing is to be done.
    pub(crate) fn is_empty(&self) -> bool {
        self.wakers.is_empty()
            && self.replaced.is_empty()
            && self.bufs.is_empty()
            && self.attention.is_empty()
    }

    /// Wakes and drops, all of it, whichever panics. `attention` is the caller's to serve.
    pub(crate) fn fire(&mut self) {
        self.wakers.drain(..).for_each(|waker| guarded(|| waker.wake()));
        self.replaced.drain(..).for_each(|waker| guarded(|| drop(waker)));
        self.bufs.drain(..).for_each(|buf| guarded(|| drop(buf)));
    }
}

/// A half of this ring: indices are used again, the tag is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HalfId {
    index: u32,
    tag: u32,
}

#[derive(Debug)]
struct Half<Q> {
    tag: u32,
    /// `None` between reservation and the queue pair's creation.
    qp: Option<Q>,
    tie: Option<Arc<Tie>>,
    recv: bool,
    depth: u32,
    outstanding: u32,
    head: u32,
    tail: u32,
    /// Already in `Effects::attention`.
    noted: bool,
}

impl<Q> Half<Q> {
    /// The receive side of a queue pair that receives by a shared queue: it has no receives of its own.
    fn is_by_shared(&self) -> bool {
        self.recv && self.depth == 0
    }
}

/// What becomes of an operation that finds no credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WhenFull {
    /// It waits in the half's queue.
    Wait,
    /// It comes back, with [`OpError::Full`].
    Refuse,
}

/// Where a submitted operation went.
#[derive(Debug)]
pub(crate) enum Submitted {
    /// The caller posts it with this id, and calls [`Ring::fail`] if it cannot.
    Post(Key, u64),
    /// Queued: the driver posts it.
    Queued(Key),
}

/// Counters of a completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CqStats {
    /// Completions that were matched to an operation.
    pub completions: u64,
    /// Completions of operations that had ended before: their queue pair was destroyed with them in flight (R5).
    pub stale: u64,
    /// The most work requests that were outstanding at once, over all queue pairs.
    pub peak_outstanding: u32,
}

/// A refused reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoEntries {
    /// Closed, or without a runtime.
    Shut,
    /// It would overrun (R4).
    TooSmall { capacity: u32, committed: u32 },
}

#[derive(Debug)]
pub(crate) struct Ring<Q, B> {
    slots: Slots<B>,
    halves: Vec<Option<Half<Q>>>,
    /// Of `halves`: those that are in use.
    in_use: u32,
    receivers: Receivers,
    next_tag: u32,
    ready: VecDeque<(u64, Result<Completed, OpError>, Option<B>)>,
    /// Tasks in `next()`.
    waiters: Vec<Waker>,
    /// Tagged operations that have not ended.
    tagged: u32,
    outstanding: u32,
    capacity: u32,
    committed: u32,
    /// Of `committed`: entries of destroyed queue pairs whose completions may still be in the queue.
    lingering: u32,
    pub(crate) closed: bool,
    pub(crate) gone: bool,
    pub(crate) stats: CqStats,
}

impl<Q: Clone, B> Ring<Q, B> {
    pub(crate) fn new(capacity: u32) -> Self {
        let reserve = (capacity as usize).min(1024);
        Self {
            slots: Slots::with_capacity(reserve),
            halves: Vec::new(),
            in_use: 0,
            receivers: Receivers::default(),
            next_tag: 0,
            ready: VecDeque::with_capacity(reserve),
            waiters: Vec::new(),
            tagged: 0,
            outstanding: 0,
            capacity,
            committed: 0,
            lingering: 0,
            closed: false,
            gone: false,
            stats: CqStats::default(),
        }
    }

    // Halves.

    /// Reserves `depth` entries for a half.
    pub(crate) fn reserve(&mut self, recv: bool, depth: u32) -> Result<HalfId, NoEntries> {
        if self.is_shut() {
            return Err(NoEntries::Shut);
        }
        let committed = self.committed;
        let total = committed.checked_add(depth).filter(|&n| n <= self.capacity);
        self.committed = total.ok_or(NoEntries::TooSmall { capacity: self.capacity, committed })?;
        self.next_tag = self.next_tag.wrapping_add(1);
        let tag = self.next_tag;
        let half = Half {
            tag,
            qp: None,
            tie: None,
            recv,
            depth,
            outstanding: 0,
            head: NIL,
            tail: NIL,
            noted: false,
        };
        self.in_use += 1;
        let index = match self.halves.iter().position(Option::is_none) {
            Some(free) => {
                self.halves[free] = Some(half);
                free
            }
            None => {
                self.halves.push(Some(half));
                self.halves.len() - 1
            }
        };
        Ok(HalfId { index: index as u32, tag })
    }

    pub(crate) fn bind(&mut self, id: HalfId, qp: Q, tie: Arc<Tie>) {
        let half = self.half(id.index);
        let by_shared = half.is_by_shared();
        half.qp = Some(qp);
        let qp_num = half.tie.insert(tie).qp_num;
        if by_shared {
            self.receivers.add(qp_num, id);
        }
    }

    /// Ends a half: nothing of it is outstanding or queued. When `linger`, its completions may still be in the queue,
    /// and its entries are given back after the queue was seen empty.
    pub(crate) fn release(&mut self, id: HalfId, linger: bool) -> Option<Q> {
        self.find(id)?;
        let half = self.halves[id.index as usize].take()?;
        self.in_use -= 1;
        if half.is_by_shared()
            && let Some(tie) = &half.tie
        {
            self.receivers.remove(tie.qp_num, id);
        }
        debug_assert!(half.outstanding == 0 && half.head == NIL, "a half is released when it is drained");
        if linger {
            self.lingering += half.depth;
        } else {
            self.committed -= half.depth;
        }
        half.qp
    }

    /// The queue was polled and empty: stale completions are gone.
    pub(crate) fn polled_empty(&mut self) {
        self.committed -= std::mem::take(&mut self.lingering);
        self.receivers.polled_empty();
    }

    pub(crate) fn has_halves(&self) -> bool {
        self.in_use > 0
    }

    pub(crate) fn queue_pairs(&self) -> Vec<Q> {
        self.halves.iter().flatten().filter_map(|h| h.qp.clone()).collect()
    }

    pub(crate) fn is_drained(&self, half: HalfId) -> bool {
        self.find(half).is_none_or(|h| h.outstanding == 0 && h.head == NIL)
    }

    pub(crate) fn all_drained(&self) -> bool {
        self.halves.iter().flatten().all(|h| h.outstanding == 0 && h.head == NIL)
    }

    /// Operations that a half takes now without queueing them.
    pub(crate) fn room(&self, half: HalfId) -> u32 {
        self.find(half).map_or(0, |h| if h.head == NIL { h.depth - h.outstanding } else { 0 })
    }

    pub(crate) fn depth(&self, half: HalfId) -> u32 {
        self.find(half).map_or(0, |h| h.depth)
    }

    /// Takes no more queue pairs.
    pub(crate) fn is_shut(&self) -> bool {
        self.closed || self.gone
    }

    /// Whether a queue pair's operations are taken at all.
    pub(crate) fn check_open(&self, tie: &Tie) -> Result<(), OpError> {
        refusal(tie, self.gone).map_or(Ok(()), Err)
    }

    /// Tagged operations that can be submitted before completions are taken with `next()`.
    pub(crate) fn tagged_room(&self) -> u32 {
        self.capacity
            .saturating_sub(self.tagged)
            .saturating_sub(self.ready.len().min(u32::MAX as usize) as u32)
    }

    fn find(&self, id: HalfId) -> Option<&Half<Q>> {
        self.halves.get(id.index as usize)?.as_ref().filter(|h| h.tag == id.tag)
    }

    fn half(&mut self, half: u32) -> &mut Half<Q> {
        self.halves[half as usize].as_mut().expect("a half lives as long as its queue pair")
    }

    // Submission.

    /// Takes an operation. An error gives the buffer back; nothing was queued then.
    pub(crate) fn submit(
        &mut self,
        id: HalfId,
        tie: &Tie,
        wr: Wr,
        owner: Owner,
        buf: Option<B>,
        when_full: WhenFull,
    ) -> Result<Submitted, (OpError, Option<B>)> {
        if let Some(error) = refusal(tie, self.gone) {
            return Err((error, buf));
        }
        let Some(h) = self.find(id) else { return Err((tie.closed(), buf)) };
        let half = id.index;
        let (post, recv, depth) = (h.head == NIL && h.outstanding < h.depth, h.recv, h.depth);
        let full = || {
            let queue = if recv { "receive" } else { "send" };
            OpError::Full { qp_num: tie.qp_num, queue, depth }
        };
        if !post && when_full == WhenFull::Refuse {
            return Err((full(), buf));
        }
        let is_tagged = matches!(owner, Owner::Tagged { .. });
        let key = self.slots.insert(half, wr, owner, buf).map_err(|buf| (full(), buf))?;
        self.tagged += u32::from(is_tagged);
        if post {
            self.mark_posted(key, half);
            let id = WrId { recv, key, qp_generation: tie.generation };
            return Ok(Submitted::Post(key, id.encode()));
        }
        self.enqueue(key, half);
        Ok(Submitted::Queued(key))
    }

    fn mark_posted(&mut self, key: Key, half: u32) {
        self.slots.at(key.index).phase = Phase::Posted;
        self.half(half).outstanding += 1;
        self.outstanding += 1;
        self.stats.peak_outstanding = self.stats.peak_outstanding.max(self.outstanding);
    }
}

/// Why a half takes nothing more, if so.
fn refusal(tie: &Tie, gone: bool) -> Option<OpError> {
    if gone {
        Some(OpError::RuntimeGone)
    } else if tie.cause.is_device_gone() {
        Some(tie.cause.flushed(tie.qp_num))
    } else if tie.is_closing() {
        Some(tie.closed())
    } else {
        tie.cause.get().map(|_| tie.cause.flushed(tie.qp_num))
    }
}

#[cfg(test)]
mod tests;
