//! How a completion queue is driven, and how it ends: closed, failed, or without its runtime (R7).

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::qp_core::QpCore;
use super::super::state::HalfId;
use super::{CqCore, Fx};
use crate::error::OpError;
use crate::provider::events::{Affected, Harm};
use crate::reactor::{Drive, Step};
use crate::sync::Arc;

impl CqCore {
    /// Takes no more queue pairs; `close_queue_pairs` also closes those that there are.
    pub(crate) fn close(&self, close_queue_pairs: bool) {
        let (queue_pairs, mut fx) = {
            let mut ring = self.ring.lock();
            ring.closed = true;
            let mut fx = Fx::default();
            ring.wake_waiters(&mut fx);
            (if close_queue_pairs { ring.queue_pairs() } else { Vec::new() }, fx)
        };
        fx.fire();
        queue_pairs.iter().for_each(QpCore::close);
        self.nudge();
    }

    pub(crate) async fn drained(&self) {
        self.drained.wait().await;
    }

    pub(crate) fn watch_closing(&self, until: Instant, qp: Arc<QpCore>) {
        self.closing.lock().push((until, qp));
        self.has_closing.store(true, Ordering::Release);
    }

    pub(in crate::ring) fn forget_closing(&self, qp: &QpCore) {
        let mut closing = self.closing.lock();
        let gone: Vec<_> = closing.extract_if(.., |(_, q)| std::ptr::eq(&**q, qp)).collect();
        self.has_closing.store(!closing.is_empty(), Ordering::Release);
        drop(closing);
        drop(gone);
    }

    /// Ends a half, see [`Ring::release`](super::super::state::Ring::release).
    pub(crate) fn release(&self, half: HalfId, linger: bool) -> Option<Arc<QpCore>> {
        let (qp, is_last) = {
            let mut ring = self.ring.lock();
            self.releases.fetch_add(1, Ordering::Release);
            (ring.release(half, linger), ring.is_shut() && !ring.has_halves())
        };
        if is_last {
            self.open_if_gone();
            self.nudge();
        }
        qp
    }

    /// Lets those through who wait for the end, when there is no driver to do it and the last half is released.
    fn open_if_gone(&self) {
        let over = {
            let ring = self.ring.lock();
            ring.gone && !ring.has_halves()
        };
        if over {
            self.drained.open();
        }
    }

    /// Closed, and the last half is released: the driver may end, once it has woken whom
    /// [`absorb_now`](Self::absorb_now) left to it. Nothing completes any more.
    pub(super) fn is_over(&self) -> bool {
        let over = {
            let ring = self.ring.lock();
            ring.closed && !ring.has_halves()
        };
        if over {
            self.settle_absorbed();
            self.drained.open();
        }
        over
    }

    fn kill_overdue(&self, now: Instant) {
        if !self.has_closing.load(Ordering::Acquire) {
            return;
        }
        let overdue: Vec<Arc<QpCore>> =
            self.closing.lock().iter().filter(|(at, _)| *at <= now).map(|(_, qp)| qp.clone()).collect();
        for qp in overdue {
            // One that has failed, was flushed, and is still its owner's.
            if !qp.tie.is_closing() && qp.is_drained() {
                self.forget_closing(&qp);
                continue;
            }
            tracing::warn!(
                qp_num = qp.tie.qp_num,
                "a closing queue pair did not drain in time: destroyed as it is"
            );
            qp.kill(None);
            // Where its destruction blocks, it has not let go of itself yet.
            self.forget_closing(&qp);
        }
    }

    /// The device's queue cannot be polled any more: nothing that is outstanding will complete. The first call counts.
    pub(super) fn device_failed(&self, error: impl Fn(u32) -> OpError) {
        if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!("a completion queue has failed: its queue pairs are destroyed");
            self.end_all(|qp_num| Some(error(qp_num)));
        }
    }

    fn end_all(&self, error: impl Fn(u32) -> Option<OpError>) {
        self.close(false);
        let queue_pairs = self.ring.lock().queue_pairs();
        queue_pairs.iter().for_each(|qp| qp.kill(error(qp.tie.qp_num)));
        self.close(false);
    }
}

impl Affected for CqCore {
    /// When the device is gone, its queue pairs are told themselves.
    fn harmed(self: Arc<Self>, harm: Harm) {
        if let Harm::Object { event, .. } = harm {
            self.device_failed(|qp_num| OpError::DeviceEvent { qp_num, event });
        }
    }
}

impl Drive for CqCore {
    fn drive(&self, now: Instant) -> Step {
        self.kill_overdue(now);
        let step = self.slice(self.poller.lock(), true);
        if step == Step::Idle && self.is_over() { Step::Done } else { step }
    }

    fn next_timeout(&self) -> Option<Instant> {
        if !self.has_closing.load(Ordering::Acquire) {
            return None;
        }
        self.closing.lock().iter().map(|(at, _)| *at).min()
    }

    fn channel_failed(&self, error: &io::Error) {
        let events = self.device.provider().events();
        let gone = events.is_gone().then(|| events.device());
        self.device_failed(|qp_num| match &gone {
            Some(device) => OpError::DeviceGone { device: device.clone() },
            None => OpError::Queue { qp_num, reason: error.to_string() },
        });
    }

    fn runtime_gone(&self) {
        let mut fx = Fx::default();
        let queue_pairs = {
            let mut ring = self.ring.lock();
            ring.gone = true;
            ring.wake_waiters(&mut fx);
            ring.queue_pairs()
        };
        for qp in queue_pairs {
            if qp.receives_shared() {
                // Nothing flushes the receives of a shared queue: they end with it, and it goes after these.
                qp.kill(None);
            } else {
                qp.set_error();
                qp.end_queued();
            }
        }
        fx.fire();
    }

    fn is_drained(&self) -> bool {
        let drained = self.ring.lock().all_drained();
        if drained {
            self.settle_absorbed();
            self.open_if_gone();
        }
        drained
    }

    fn abandon(&self) {
        self.end_all(|_| None);
        self.settle_absorbed();
        self.open_if_gone();
    }
}
