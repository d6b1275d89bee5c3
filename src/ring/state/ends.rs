//! How operations end, and what their owners see: completions in, results out.

use std::task::Waker;

use super::super::completion::{Completed, Opcode};
use super::super::slots::{NIL, Owner, Phase, Wr, WrKind};
use super::super::wr_id::{Key, WrId};
use super::{Effects, HalfId, Ring, Tie};
use crate::error::OpError;
use crate::provider::{Cqe, SendOp, WcOpcode, WcStatus};
use crate::sync::Arc;

impl<Q: Clone, B> Ring<Q, B> {
    /// A completion of the device.
    pub(crate) fn complete(&mut self, cqe: &Cqe, fx: &mut Effects<Q, B>) {
        let id = WrId::decode(cqe.wr_id);
        let Some((half, wr)) =
            self.slots.get(id.key).filter(|s| matches!(s.phase, Phase::Posted)).map(|s| (s.half, s.wr))
        else {
            self.stats.stale += 1;
            return;
        };
        let gone = self.gone;
        let tie = match self.halves[half as usize].as_ref().and_then(|h| h.tie.clone()) {
            Some(tie) if tie.generation == id.qp_generation => tie,
            _ => {
                self.stats.stale += 1;
                return;
            }
        };
        self.stats.completions += 1;
        let result = match self.receiver(cqe, tie) {
            Ok(tie) => outcome(&tie, cqe, &wr, gone),
            Err(error) => error.map_or_else(|| Ok(completed(cqe, &wr)), Err),
        };
        self.retire(id.key, half, result, fx);
    }

    /// The queue pair that a completion came by: that of `tie`, or the one that took a receive from the shared queue
    /// of `tie`. Where that one is gone, or cannot be told from another, the end without its cause.
    ///
    /// The number that the completion names is used for nothing else (R5).
    fn receiver(&self, cqe: &Cqe, tie: Arc<Tie>) -> Result<Arc<Tie>, Option<OpError>> {
        if !tie.shared {
            return Ok(tie);
        }
        let qp_num = cqe.qp_num;
        let half = self.receivers.find(qp_num).and_then(|half| self.find(half));
        match half.and_then(|half| half.tie.as_ref()) {
            Some(tie) => Ok(tie.clone()),
            None => Err(match cqe.status {
                WcStatus::Success => None,
                WcStatus::Flushed if self.gone => Some(OpError::RuntimeGone),
                WcStatus::Flushed => Some(OpError::Closed { qp_num }),
                status => Some(OpError::Status { qp_num, status, vendor_err: cqe.vendor_err }),
            }),
        }
    }

    /// Ends an operation that [`submit`](Self::submit) or [`next_queued`](Self::next_queued) said to post and that
    /// was not posted, or whose queue pair is destroyed.
    pub(crate) fn fail(&mut self, key: Key, error: OpError, fx: &mut Effects<Q, B>) {
        if let Some(half) = self.slots.get(key).filter(|s| matches!(s.phase, Phase::Posted)).map(|s| s.half) {
            self.retire(key, half, Err(error), fx);
        }
    }

    /// Ends every posted operation of a half: its queue pair is destroyed, so that no device touches its buffers.
    pub(crate) fn fail_posted(&mut self, id: HalfId, error: &OpError, fx: &mut Effects<Q, B>) {
        if self.find(id).is_none() {
            return;
        }
        for key in self.slots.posted_of(id.index) {
            self.retire(key, id.index, Err(error.clone()), fx);
        }
    }

    /// Gives the credit back, then ends the operation.
    fn retire(&mut self, key: Key, half: u32, result: Result<Completed, OpError>, fx: &mut Effects<Q, B>) {
        self.outstanding -= 1;
        let h = self.half(half);
        h.outstanding -= 1;
        let waiting = h.head != NIL || h.tie.as_ref().is_some_and(|t| t.is_closing());
        if waiting && !h.noted {
            h.noted = true;
            let recv = h.recv;
            fx.attention.extend(h.qp.clone().map(|qp| (qp, recv)));
        }
        self.end(key, result, fx);
    }

    /// The half is being served: note it again at the next completion.
    pub(crate) fn served(&mut self, id: HalfId) {
        if self.find(id).is_some() {
            self.half(id.index).noted = false;
        }
    }

    pub(super) fn end(&mut self, key: Key, result: Result<Completed, OpError>, fx: &mut Effects<Q, B>) {
        let slot = self.slots.at(key.index);
        match &mut slot.owner {
            Owner::Future(waker) => {
                fx.wakers.extend(waker.take());
                slot.phase = Phase::Done(result);
            }
            Owner::Ignored => self.discard(key, fx),
            Owner::Tagged { user_data, submitter } => {
                let user_data = *user_data;
                fx.wakers.extend(submitter.take());
                let (_, _, buf) = self.slots.remove(key).expect("the slot is in use");
                self.tagged -= 1;
                self.push_ready(user_data, result, buf, fx);
            }
        }
    }

    /// Adds a completion for `next()`.
    pub(crate) fn push_ready(
        &mut self,
        user_data: u64,
        result: Result<Completed, OpError>,
        buf: Option<B>,
        fx: &mut Effects<Q, B>,
    ) {
        self.ready.push_back((user_data, result, buf));
        fx.wakers.append(&mut self.waiters);
    }

    pub(super) fn discard(&mut self, key: Key, fx: &mut Effects<Q, B>) {
        if let Some((_, _, buf)) = self.slots.remove(key) {
            fx.bufs.extend(buf);
        }
    }

    // The owners' side.

    /// The result of a future's operation, which frees the slot; or `None` and the waker is kept.
    #[allow(clippy::type_complexity)]
    pub(crate) fn poll_op(
        &mut self,
        key: Key,
        waker: &Waker,
        fx: &mut Effects<Q, B>,
    ) -> Option<(Result<Completed, OpError>, Option<B>)> {
        let slot = self.slots.get(key).expect("a future's slot lives until the future has its result");
        if matches!(slot.phase, Phase::Done(_)) {
            return match self.slots.remove(key) {
                Some((Phase::Done(result), _, buf)) => Some((result, buf)),
                _ => None,
            };
        }
        if let Owner::Future(kept) = &mut slot.owner
            && !kept.as_ref().is_some_and(|w| w.will_wake(waker))
        {
            // A waker is the user's code: not dropped under the lock.
            fx.replaced.extend(kept.replace(waker.clone()));
        }
        None
    }

    pub(crate) fn is_done(&mut self, key: Key) -> bool {
        self.slots.get(key).is_none_or(|s| matches!(s.phase, Phase::Done(_)))
    }

    /// The future is dropped. A queued operation is never posted; a posted one keeps its buffer until it completes.
    pub(crate) fn abandon_op(&mut self, key: Key, fx: &mut Effects<Q, B>) {
        let Some(slot) = self.slots.get(key) else { return };
        match slot.phase {
            Phase::Done(_) => self.discard(key, fx),
            Phase::Queued => self.cancel_queued(key, fx),
            Phase::Posted => {
                if let Owner::Future(Some(waker)) = std::mem::replace(&mut slot.owner, Owner::Ignored) {
                    fx.replaced.push(waker);
                }
            }
            Phase::Free => {}
        }
    }

    #[allow(clippy::type_complexity)]
    pub(crate) fn take_ready(&mut self) -> Option<(u64, Result<Completed, OpError>, Option<B>)> {
        self.ready.pop_front()
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Nothing is ready and nothing will be: closed or without a runtime, and no tagged operation is left.
    pub(crate) fn is_over(&self) -> bool {
        (self.closed || self.gone) && self.tagged == 0 && self.ready.is_empty()
    }

    pub(crate) fn wait_ready(&mut self, waker: &Waker) {
        if !self.waiters.iter().any(|w| w.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
    }

    /// Wakes every task in `next()`.
    pub(crate) fn wake_waiters(&mut self, fx: &mut Effects<Q, B>) {
        fx.wakers.append(&mut self.waiters);
    }
}

/// What a completion by the queue pair of `tie` says.
fn outcome(tie: &Tie, cqe: &Cqe, wr: &Wr, gone: bool) -> Result<Completed, OpError> {
    match tie.cause.outcome(tie.qp_num, cqe.status, cqe.vendor_err) {
        Ok(()) => Ok(completed(cqe, wr)),
        Err(_) if cqe.status == WcStatus::Flushed && gone => Err(OpError::RuntimeGone),
        Err(OpError::Flushed { cause: None, .. }) if tie.is_closing() => Err(tie.closed()),
        Err(OpError::Flushed { cause: None, .. }) => Err(tie.cause.flushed_alone(tie.qp_num)),
        Err(error) => Err(error),
    }
}

fn completed(cqe: &Cqe, wr: &Wr) -> Completed {
    // The length is valid for receives only (verbs); we know what we posted.
    let qp_num = cqe.qp_num;
    let posted = wr.sge.map_or(0, |s| u64::from(s.len));
    match wr.kind {
        WrKind::Recv => {
            let opcode =
                if cqe.opcode == WcOpcode::RecvWriteWithImm { Opcode::RecvWrite } else { Opcode::Recv };
            Completed { opcode, bytes: u64::from(cqe.byte_len), imm: cqe.imm, qp_num }
        }
        WrKind::Send(op) => {
            let opcode = match op {
                SendOp::Send { .. } => Opcode::Send,
                SendOp::Write { .. } => Opcode::Write,
                SendOp::Read { .. } => Opcode::Read,
                SendOp::FetchAdd { .. } => Opcode::FetchAdd,
                SendOp::CompareSwap { .. } => Opcode::CompareSwap,
            };
            Completed { opcode, bytes: posted, imm: None, qp_num }
        }
    }
}
