//! The part of a completion queue that its driver, its queue pairs and its futures share: polling and waking.
//!
//! Two locks. `poller` is the driver's: whoever holds it polls the device's queue; it is never held while a waker
//! fires, a buffer drops or a queue pair posts. `ring` protects the state and is held for a batch of completions, or
//! for one submission. `poller` before `ring`; neither across an await. Being driven, and the end, is in `ends`.

mod ends;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::completion::Completion;
use super::gate::Gate;
use super::poll::{Found, Polled, poll_and_arm};
use super::qp_core::{QpCore, settle};
use super::state::{Effects, Ring};
use crate::clock::later;
use crate::device::Device;
use crate::error::{DeviceError, OpError};
use crate::memory::AnySlice;
use crate::provider::events::Enrolled;
use crate::provider::{self, Armed, Cqe, WcStatus};
use crate::reactor::{self, Drive, DriverHandle, Step};
use crate::sync::{Arc, Mutex, MutexGuard};

pub(crate) type Fx = Effects<Arc<QpCore>, AnySlice>;

/// Completions taken from the device at once.
const BATCH: usize = 64;
/// Batches of one slice; then the driver yields (R9).
const BATCHES: usize = 4;
/// Looks at the queue between two looks at the clock.
const LOOKS: usize = 8;

pub(crate) struct CqCore {
    pub(crate) ring: Mutex<Ring<Arc<QpCore>, AnySlice>>,
    /// How often a half was released. Changes under the lock of `ring`.
    releases: AtomicU64,
    poller: Mutex<Poller>,
    /// Queue pairs that are closing, and when they are destroyed at the latest.
    closing: Mutex<Vec<(Instant, Arc<QpCore>)>>,
    has_closing: AtomicBool,
    cq: provider::Cq,
    pub(crate) device: Device,
    pub(crate) capacity: u32,
    spin: Duration,
    driver: OnceLock<DriverHandle>,
    drained: Gate,
    /// The device's queue is of no use any more.
    failed: AtomicBool,
    /// Its place among those who hear of the device's events.
    enrolled: OnceLock<Enrolled>,
}

/// Short: its queue pairs know it, and it knows them.
impl fmt::Debug for CqCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

struct Poller {
    cqes: Box<[Cqe]>,
    fx: Fx,
    /// Of `releases`: those before the last poll that found nothing.
    settled: u64,
}

impl CqCore {
    /// Creates the queue and starts its driver on the current runtime.
    pub(crate) fn start(device: &Device, capacity: u32, spin: Duration) -> Result<Arc<Self>, DeviceError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| DeviceError::NoRuntime)?;
        let channel = device.provider().create_channel()?;
        let cq = channel.create_cq(capacity)?;
        let this = Arc::new(Self {
            ring: Mutex::new(Ring::new(capacity)),
            releases: AtomicU64::new(0),
            poller: Mutex::new(Poller {
                cqes: vec![Cqe::default(); BATCH].into_boxed_slice(),
                fx: Fx::default(),
                settled: 0,
            }),
            closing: Mutex::new(Vec::new()),
            has_closing: AtomicBool::new(false),
            cq,
            device: device.clone(),
            capacity,
            spin,
            driver: OnceLock::new(),
            drained: Gate::new(),
            failed: AtomicBool::new(false),
            enrolled: OnceLock::new(),
        });
        let handle = reactor::spawn(&runtime, channel, this.clone())?;
        // Set once, here; a nudge before this would only repeat the driver's first slice.
        let _ = this.driver.set(handle);
        let _ = this.enrolled.set(device.provider().events().enrol(vec![this.cq.id()], &this));
        Ok(this)
    }

    pub(crate) fn provider(&self) -> &provider::Cq {
        &self.cq
    }

    pub(crate) fn nudge(&self) {
        if let Some(driver) = self.driver.get() {
            driver.nudge();
        }
    }

    // Polling.

    /// One bounded slice by whoever holds the poller. With `arm`, `Idle` means: armed, and empty after that.
    fn slice(&self, mut poller: MutexGuard<'_, Poller>, arm: bool) -> Step {
        let mut polling = Polling { core: self, poller: &mut poller, releases: 0 };
        let polled = poll_and_arm(&mut polling, BATCHES, arm);
        if let Ok(step) = polled
            && poller.fx.is_empty()
        {
            return step;
        }
        let mut fx = std::mem::take(&mut poller.fx);
        drop(poller);
        let step = match polled {
            // What is posted now may complete at once, without an event.
            Ok(Step::Idle) if !fx.attention.is_empty() => Step::More,
            Ok(step) => step,
            Err(error) => {
                self.device_failed(|qp_num| OpError::Queue { qp_num, reason: error.to_string() });
                // Its queue pairs are destroyed by now, or say so by a nudge.
                Step::Idle
            }
        };
        settle(&mut fx);
        // Give the vectors back, so that steady state allocates nothing.
        if let Some(mut poller) = self.poller.try_lock()
            && poller.fx.is_empty()
        {
            poller.fx = fx;
        }
        step
    }

    fn absorb(&self, cqes: &[Cqe], fx: &mut Fx) {
        let flushed = cqes.iter().any(|c| c.status == WcStatus::Flushed);
        if flushed {
            self.fetch_causes();
        }
        let mut ring = self.ring.lock();
        cqes.iter().for_each(|cqe| ring.complete(cqe, fx));
    }

    /// Before flushed completions are handed out: a queue pair whose other side is served by another queue may have
    /// failed there. Looks there first, so that the flushed ones can carry the cause (R6).
    fn fetch_causes(&self) {
        let queue_pairs = self.ring.lock().queue_pairs();
        for qp in queue_pairs {
            for other in [&qp.send.cq, &qp.recv.cq] {
                if !std::ptr::eq(&**other, self) && qp.tie.cause.get().is_none() && !qp.tie.is_closing() {
                    other.absorb_now();
                }
            }
        }
    }

    /// Takes the completions that are there, without waking anybody: the driver is nudged to do that. Takes no lock
    /// that a poster holds. Does nothing when somebody else is polling.
    pub(super) fn absorb_now(&self) {
        let Some(mut poller) = self.poller.try_lock() else { return };
        let Poller { cqes, fx, .. } = &mut *poller;
        for _ in 0..BATCHES {
            match self.cq.poll(cqes) {
                Ok(n) if n > 0 => {
                    let mut ring = self.ring.lock();
                    cqes[..n].iter().for_each(|cqe| ring.complete(cqe, fx));
                }
                _ => break,
            }
        }
        drop(poller);
        self.nudge();
    }

    /// Wakes whom [`absorb_now`](Self::absorb_now) has left to a driver that is about to end, or has. What is absorbed is in
    /// the poller's effects before its lock is released.
    pub(super) fn settle_absorbed(&self) {
        let mut fx = std::mem::take(&mut self.poller.lock().fx);
        settle(&mut fx);
    }

    /// Polls for as long as the spin budget lasts, until `done`. Then sleeping is for the driver, armed. Without a pause in
    /// between: a look at the queue takes longer than that.
    pub(super) fn spin_until(&self, mut done: impl FnMut() -> bool) {
        if self.spin.is_zero() || done() {
            return;
        }
        let mut until = None;
        loop {
            // The clock is read now and then: it costs as much as a look at the queue.
            for _ in 0..LOOKS {
                if let Some(poller) = self.poller.try_lock() {
                    self.slice(poller, false);
                }
                if done() {
                    return self.rearm();
                }
            }
            let now = Instant::now();
            if now >= *until.get_or_insert_with(|| later(now, self.spin)) {
                break;
            }
        }
        if self.drive(Instant::now()) != Step::Idle {
            self.nudge();
        }
    }

    /// After polling without arming: the driver may sleep, and rely on an arm that was used up. (What uses up a
    /// device's is its event, which wakes the driver.)
    fn rearm(&self) {
        if self.cq.poll_disarms() && !matches!(self.cq.arm(), Ok(Armed::Armed)) {
            self.nudge();
        }
    }

    // Tagged completions.

    pub(crate) fn try_next(&self) -> Option<Completion> {
        let mut fx = Fx::default();
        let next = {
            let mut ring = self.ring.lock();
            let next = ring.take_ready();
            if ring.is_over() {
                ring.wake_waiters(&mut fx);
            }
            next
        };
        fx.fire();
        next.map(|(user_data, result, buf)| Completion { user_data, result, buf })
    }

    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Completion>> {
        let coop = std::task::ready!(tokio::task::coop::poll_proceed(cx));
        self.spin_until(|| self.ring.lock().has_ready());
        let mut next = self.try_next();
        if next.is_none() {
            let mut ring = self.ring.lock();
            if !ring.has_ready() {
                if ring.is_over() {
                    return Poll::Ready(None);
                }
                ring.wait_ready(cx.waker());
                return Poll::Pending;
            }
            drop(ring);
            next = self.try_next();
        }
        if next.is_none() {
            // Another task took it in between.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        coop.made_progress();
        Poll::Ready(next)
    }
}

/// The queue, by whoever holds the poller.
struct Polling<'a> {
    core: &'a CqCore,
    poller: &'a mut Poller,
    /// How often a half had been released before the last poll.
    releases: u64,
}

impl Polled for Polling<'_> {
    fn poll(&mut self) -> io::Result<Found> {
        self.releases = self.core.releases.load(Ordering::Acquire);
        let n = self.core.cq.poll(&mut self.poller.cqes)?;
        if n == 0 {
            return Ok(Found::Nothing);
        }
        self.core.absorb(&self.poller.cqes[..n], &mut self.poller.fx);
        Ok(if n < BATCH { Found::Some } else { Found::Full })
    }

    /// Stale completions are gone, of halves that had been released before: one that was released during the poll may
    /// have left some behind it.
    fn was_empty(&mut self) {
        if self.poller.settled == self.releases {
            return;
        }
        let mut ring = self.core.ring.lock();
        if self.core.releases.load(Ordering::Relaxed) == self.releases {
            ring.polled_empty();
            self.poller.settled = self.releases;
        }
    }

    fn arm(&mut self) -> io::Result<Armed> {
        self.core.cq.arm()
    }
}
