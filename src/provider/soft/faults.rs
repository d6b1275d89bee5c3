//! Faults that the configuration of a device asks for, one state a queue pair. A queue pair without faults has none of this,
//! and asks so once a post, a read and a write.
//!
//! Nothing here touches a socket or memory: it says how much may move and when, and the engine obeys. Waits become deadlines
//! of the queue pair, so that a sleeping poller is woken as for its own.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::SoftDevice;
use super::channel::FIRST_QP;
use super::qp::QpInner;
use super::rng::Rng;
use super::sys;
use super::tuning::PACED_SENDS_A_SECOND;
use crate::device::Faults;

/// What is to become of a post.
pub(super) enum Posted {
    /// Accepted; held back until then.
    Accepted(Option<Instant>),
    /// Refused, as by a driver that has failed.
    Refused,
    /// Accepted, and fails when it is executed.
    Fails,
}

/// The faults of a queue pair, and how far it has come.
#[derive(Debug)]
pub(super) struct QpFaults {
    plan: Faults,
    rng: Rng,
    /// Requests posted; bytes sent and received.
    posts: u64,
    sent: u64,
    received: u64,
    /// Nothing is sent before.
    paced: Option<Instant>,
    stall: Stall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stall {
    /// Not yet, or there is none.
    Ahead,
    /// `None` is for ever: a time beyond the clock.
    Until(Option<Instant>),
    Over,
}

impl SoftDevice {
    /// One more completion queue is asked for, and it is one that cannot be had; so with a queue pair, and a registration.
    pub(super) fn fails_cq(&self) -> bool {
        self.faulty.as_ref().and_then(|c| c.fail_cq) == Some(self.cqs.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(super) fn fails_qp(&self) -> bool {
        self.faulty.as_ref().and_then(|c| c.fail_qp) == Some(self.qps.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(super) fn fails_mr(&self) -> bool {
        self.faulty.as_ref().and_then(|c| c.fail_mr) == Some(self.regs.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(super) fn faults_of(&self, qp_num: u32) -> Option<Box<QpFaults>> {
        let config = self.faulty.as_deref()?;
        let rail = qp_num.wrapping_sub(FIRST_QP);
        let plan = config.faults_of(rail);
        let seed = self.seed ^ u64::from(rail + 1).wrapping_mul(0x9fb2_1c65_1e98_df25);
        (!plan.is_none()).then(|| Box::new(QpFaults::new(plan, seed)))
    }
}

impl QpFaults {
    pub(super) fn new(plan: Faults, seed: u64) -> Self {
        let rng = Rng::new(seed);
        Self { plan, rng, posts: 0, sent: 0, received: 0, paced: None, stall: Stall::Ahead }
    }

    /// One more send request is posted.
    pub(super) fn post(&mut self) -> Posted {
        self.posts += 1;
        let this = Some(self.posts);
        if self.plan.fail_post == this {
            return Posted::Refused;
        }
        if self.plan.fail_wr == this {
            return Posted::Fails;
        }
        if self.plan.delay.is_none() && self.plan.reorder.is_none() {
            return Posted::Accepted(None);
        }
        let extra = self.plan.reorder.map_or(0, |most| {
            let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
            self.rng.below(most.saturating_add(1))
        });
        let hold = self.plan.delay.unwrap_or_default().saturating_add(Duration::from_nanos(extra));
        // Beyond the clock there is no later moment to wait for than this.
        const FAR: Duration = Duration::from_secs(365 * 86_400);
        Posted::Accepted(Instant::now().checked_add(hold.min(FAR)))
    }

    /// How many bytes may be sent now.
    pub(super) fn may_send(&self) -> usize {
        if self.paced.is_some() {
            return 0;
        }
        let pace = self.plan.rate.map_or(u64::MAX, |rate| (rate / PACED_SENDS_A_SECOND).max(1));
        let end = self.end().map_or(u64::MAX, |end| end.saturating_sub(self.sent));
        usize::try_from(pace.min(end)).unwrap_or(usize::MAX)
    }

    /// `n` bytes were sent. True when the connection has to end here; a process that has to does.
    pub(super) fn sent(&mut self, n: usize) -> bool {
        self.sent += n as u64;
        if self.plan.kill_after.is_some_and(|bytes| self.sent >= bytes) {
            sys::kill_this_process();
        }
        if let Some(rate) = self.plan.rate
            && n > 0
        {
            let nanos = n as u128 * 1_000_000_000 / u128::from(rate);
            let pause = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            self.paced = Instant::now().checked_add(pause);
        }
        self.plan.drop_after.is_some_and(|bytes| self.sent >= bytes)
    }

    fn end(&self) -> Option<u64> {
        [self.plan.drop_after, self.plan.kill_after].into_iter().flatten().min()
    }

    /// Whether sending has to wait; receiving.
    pub(super) fn is_paced(&self) -> bool {
        self.paced.is_some()
    }

    pub(super) fn is_stalled(&self) -> bool {
        matches!(self.stall, Stall::Until(_))
    }

    /// How many bytes may be read now. At the beginning of a stall, none.
    pub(super) fn may_receive(&mut self) -> usize {
        let (Some(length), Stall::Ahead) = (self.plan.stall, self.stall) else {
            return if self.is_stalled() { 0 } else { usize::MAX };
        };
        let left = self.plan.stall_after.unwrap_or(0).saturating_sub(self.received);
        if left == 0 {
            self.stall = Stall::Until(Instant::now().checked_add(length));
        }
        usize::try_from(left).unwrap_or(usize::MAX)
    }

    pub(super) fn received(&mut self, n: usize) {
        self.received += n as u64;
    }

    /// When to look again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let stall = if let Stall::Until(until) = self.stall { until } else { None };
        [self.paced, stall].into_iter().flatten().min()
    }

    /// Ends the waits that are over.
    pub(super) fn tick(&mut self, now: Instant) {
        self.paced = self.paced.filter(|&until| until > now);
        if let Stall::Until(Some(until)) = self.stall
            && until <= now
        {
            self.stall = Stall::Over;
        }
    }
}

impl QpInner {
    /// What faults hold back now: sending, receiving.
    pub(super) fn held(&self) -> (bool, bool) {
        self.faults.as_deref().map_or((false, false), |f| (f.is_paced(), f.is_stalled()))
    }

    /// A turn of the queue pair begins.
    pub(super) fn tick_faults(&mut self) {
        if let Some(faults) = self.faults.as_deref_mut() {
            let now = Instant::now();
            faults.tick(now);
            self.sq.release(now);
        }
    }

    /// When a fault ends a wait.
    pub(super) fn fault_deadline(&self) -> Option<Instant> {
        let faults = self.faults.as_deref()?;
        [faults.deadline(), self.sq.next_release()].into_iter().flatten().min()
    }
}
