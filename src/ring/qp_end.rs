//! How queue pairs end: closed, failed, killed, or with their device; and when they are destroyed (R7).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::cq_core::{CqCore, Fx};
use super::qp_core::{Object, QpCore, settle};
use crate::error::OpError;
use crate::provider;
use crate::provider::events::{Affected, Harm};
use crate::sync::Arc;

/// How long a closing queue pair may take to flush before it is destroyed as it is.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

impl QpCore {
    /// Moves the queue pair to the error state and ends what is queued. What is posted completes by being flushed;
    /// the driver, or the reaper, destroys the queue pair after the last. Does not block.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.tie.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.set_error();
        let mut fx = Fx::default();
        for side in [&self.send, &self.recv] {
            side.cq.ring.lock().end_queued(side.half, &mut fx);
        }
        if self.tie.shared {
            // It lives as long as the queue pairs that receive by it; nothing flushes what it holds.
            self.try_finish();
            settle(&mut fx);
            return;
        }
        self.watch_closing();
        self.try_finish();
        settle(&mut fx);
    }

    /// Has it destroyed after the patience, if it has not ended by then. Both of its queues watch: the runtime of one may
    /// be gone.
    pub(crate) fn watch_closing(self: &Arc<Self>) {
        let until = Instant::now() + CLOSE_PATIENCE;
        for cq in self.queues() {
            cq.watch_closing(until, self.clone());
        }
        if self.finished.load(Ordering::Acquire) {
            // Whoever drives the queues, or closes it, may have finished it just before: then nobody would ever take it from
            // those lists, in which it holds the queues that it is held by.
            self.queues().for_each(|cq| cq.forget_closing(self));
        }
        self.queues().for_each(|cq| cq.nudge());
    }

    /// Its completion queues, each once.
    fn queues(&self) -> impl Iterator<Item = &Arc<CqCore>> {
        let (send, recv) = (&self.send.cq, &self.recv.cq);
        std::iter::once(send).chain((!Arc::ptr_eq(send, recv)).then_some(recv))
    }

    /// The device says that the queue pair has failed. What has completed by now comes first, since it may say why (R6).
    /// What does not come back flushed within the patience is ended by destroying the queue pair.
    fn fail(self: &Arc<Self>, event: &'static str) {
        self.send.cq.absorb_now();
        self.recv.cq.absorb_now();
        self.tie.cause.record(OpError::DeviceEvent { qp_num: self.tie.qp_num, event });
        if self.tie.shared {
            // Its queue pairs have no receives any more, and fail by what their peers send.
            return self.close();
        }
        self.set_error();
        self.end_queued();
        self.watch_closing();
    }

    /// The connection manager's connection has ended: to the error state, so that what is outstanding ends too, with what
    /// has failed first. Completions that came before are taken before. siw leaves requests that it was about to send as
    /// they are: what does not come back flushed within the patience is ended by destroying the queue pair.
    pub(crate) fn disconnected(self: &Arc<Self>) {
        if self.tie.is_closing() {
            return;
        }
        self.send.cq.absorb_now();
        self.recv.cq.absorb_now();
        self.tie.cause.record(OpError::Disconnected { qp_num: self.tie.qp_num });
        self.set_error();
        self.end_queued();
        self.watch_closing();
    }

    /// To the error state, without closing: what is queued or comes later ends with the reason that the rings know.
    pub(super) fn set_error(&self) {
        if let Some(Err(error)) = self.with_qp(provider::Qp::set_error) {
            tracing::warn!(qp_num = self.tie.qp_num, error = %error, "moving a queue pair to the error state failed");
        }
    }

    /// Ends the operations that are queued because of what the rings know by now.
    pub(super) fn end_queued(&self) {
        let mut fx = Fx::default();
        for side in [&self.send, &self.recv] {
            side.cq.ring.lock().end_queued(side.half, &mut fx);
        }
        settle(&mut fx);
    }

    /// Destroys the queue pair when it is closing and nothing of it is outstanding.
    pub(super) fn try_finish(self: &Arc<Self>) {
        if !self.tie.is_closing() || self.finished.load(Ordering::Acquire) {
            return;
        }
        let shared = self.tie.shared;
        let ready = if shared { self.attached.load(Ordering::Acquire) == 0 } else { self.is_drained() };
        if !ready || self.finished.swap(true, Ordering::AcqRel) {
            return;
        }
        match shared {
            true => self.destroy(|this| this.killed(None)),
            false => self.destroy(|this| this.release(false)),
        }
    }

    // Shared receive queues.

    /// Whether it is such a queue, or a queue pair that receives by one.
    pub(super) fn receives_shared(&self) -> bool {
        self.tie.shared || self.srq.is_some()
    }

    /// Counts one more queue pair that is to receive by this queue. False when it is closed.
    pub(crate) fn attach(self: &Arc<Self>) -> bool {
        self.attached.fetch_add(1, Ordering::AcqRel);
        let open = !self.tie.is_closing();
        if !open {
            self.detach();
        }
        open
    }

    /// A queue pair that received by it is destroyed, or was never made.
    pub(crate) fn detach(self: &Arc<Self>) {
        self.attached.fetch_sub(1, Ordering::AcqRel);
        self.try_finish();
    }

    // The end.

    /// Nothing of it is outstanding or queued.
    pub(super) fn is_drained(&self) -> bool {
        [&self.send, &self.recv].iter().all(|side| side.cq.ring.lock().is_drained(side.half))
    }

    /// Destroys the queue pair now, with operations in flight. No device touches their buffers afterwards, so that
    /// they end; completions of them that come later are stale. A device whose destroy blocks is waited for elsewhere.
    ///
    /// A shared receive queue waits for the queue pairs that receive by it; they are killed, too, by whoever kills it.
    pub(crate) fn kill(self: &Arc<Self>, error: Option<OpError>) {
        // Before the flushes, which somebody else may hand in first (R6).
        if let Some(error) = &error {
            self.tie.cause.record(error.clone());
        }
        if self.tie.shared {
            return self.close();
        }
        if error.is_some() {
            // What is queued ends for it, too, and not for being closed.
            self.end_queued();
        }
        self.tie.closing.store(true, Ordering::Release);
        if self.finished.swap(true, Ordering::AcqRel) {
            return;
        }
        self.set_error();
        self.destroy(|this| this.killed(error));
    }

    /// The queue pair is destroyed: ends what was in flight.
    fn killed(&self, error: Option<OpError>) {
        let mut fx = Fx::default();
        if self.tie.shared {
            // Messages that came before are not lost.
            self.recv.cq.absorb_now();
            self.recv.cq.settle_absorbed();
        }
        for side in [&self.send, &self.recv] {
            let mut ring = side.cq.ring.lock();
            let error = match &error {
                Some(error) => error.clone(),
                None if ring.gone => OpError::RuntimeGone,
                None => match self.tie.cause.get() {
                    Some(_) => self.tie.cause.flushed(self.tie.qp_num),
                    None => self.tie.closed(),
                },
            };
            ring.end_queued(side.half, &mut fx);
            ring.fail_posted(side.half, &error, &mut fx);
        }
        // Nothing is left to serve, and nobody else may see the halves.
        fx.attention.clear();
        self.release(true);
        fx.fire();
    }

    /// The one place where a queue pair is destroyed. `then` follows when it is: at once, or on a thread of the
    /// device where the destruction blocks (R9).
    ///
    /// Posts find no queue pair from then on. One that comes just before is of an operation that is in its slot, and ends
    /// with the others.
    fn destroy(self: &Arc<Self>, then: impl FnOnce(&Self) + Send + 'static) {
        let this = self.clone();
        let finish = move || {
            match this.object.write().unwrap_or_else(|e| e.into_inner()).take() {
                Some(Object::Pair(qp)) => qp.destroy(),
                Some(Object::Shared(srq)) => srq.destroy(),
                None => {}
            }
            then(&this);
            if let Some(srq) = &this.srq {
                srq.detach();
            }
        };
        let lane = match self.object.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
            Some(Object::Pair(qp)) => qp.lane(),
            Some(Object::Shared(srq)) => srq.lane(),
            None => None,
        };
        match lane {
            Some(lane) => lane.run(finish),
            None => finish(),
        }
    }

    fn release(&self, linger: bool) {
        for side in [&self.send, &self.recv] {
            let released = side.cq.release(side.half, linger);
            side.cq.forget_closing(self);
            drop(released);
        }
        for side in [&self.send, &self.recv] {
            side.cq.nudge();
        }
        self.destroyed.open();
    }

    /// Waits until the queue pair is destroyed.
    pub(crate) async fn destroyed(&self) {
        self.destroyed.wait().await;
    }
}

impl Affected for QpCore {
    /// Not by a completion: what is posted may have to be flushed first, or may never complete.
    fn harmed(self: Arc<Self>, harm: Harm) {
        match harm {
            Harm::Object { event, .. } => self.fail(event),
            Harm::DeviceGone => {
                let device = self.pd.device().provider().events().device();
                let gone = OpError::DeviceGone { device };
                self.tie.cause.record(gone.clone());
                self.kill(Some(gone));
            }
        }
    }
}
