//! A queue pair as its channel sees it, without its lock: what there is to do, and when; its turns in progress slices.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::qp::QpInner;
use super::shm::Rings;
use super::sys::Readiness;
use super::{SoftChannel, lock};

/// How a channel has to look after a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not at all: not connected yet, or over.
    Idle,
    /// By edges only.
    Waiting,
    /// Connected: by edges, or by asking its socket.
    Flowing,
    /// Connected over shared memory: by looking, which asks nobody.
    Shared,
}

/// What a channel sees of a queue pair without its lock.
#[derive(Debug)]
pub(super) struct QpShared {
    pub(super) token: u64,
    base: Instant,
    /// Readiness that epoll has reported since the last service.
    edges: AtomicU8,
    /// Work that needs no edge. With the next two, written under the lock.
    work: AtomicBool,
    phase: AtomicU8,
    /// Nanoseconds after `base`; 0 is none.
    deadline: AtomicU64,
    /// The same for who polls all the time, and does not sleep until then.
    glance: AtomicU64,
    /// From its connection on, when that is over shared memory: what its peer has done to it.
    rings: OnceLock<Arc<Rings>>,
    pub(super) inner: Mutex<QpInner>,
}

pub(super) const READABLE: u8 = 1;
pub(super) const WRITABLE: u8 = 2;
pub(super) const ENDED: u8 = 4;

impl QpShared {
    pub(super) fn new(token: u64, inner: QpInner) -> Self {
        Self {
            token,
            base: Instant::now(),
            edges: AtomicU8::new(0),
            work: AtomicBool::new(false),
            phase: AtomicU8::new(Phase::Idle as u8),
            deadline: AtomicU64::new(0),
            glance: AtomicU64::new(0),
            rings: OnceLock::new(),
            inner: Mutex::new(inner),
        }
    }

    pub(super) fn receive_posted(&self, channel: &SoftChannel) {
        self.with(channel, QpInner::receive_posted);
    }

    /// Works on the queue pair, then shows the channel what is left to do, and wakes who sleeps on it.
    pub(super) fn with<R>(&self, channel: &SoftChannel, f: impl FnOnce(&mut QpInner) -> R) -> R {
        let mut qp = lock(&self.inner);
        let r = f(&mut qp);
        self.publish(&qp);
        drop(qp);
        if self.has_work() || self.deadline().is_some() || self.stays_asleep(channel) {
            channel.kick();
        }
        r
    }

    /// Somebody sleeps on the channel, and may have been woken for what was done just now: the next change has to be told
    /// again. True when it has come already.
    fn stays_asleep(&self, channel: &SoftChannel) -> bool {
        self.rings.get().is_some_and(|rings| {
            channel.is_relied_on() && {
                rings.fall_asleep();
                rings.is_ready()
            }
        })
    }

    pub(super) fn publish(&self, qp: &QpInner) {
        let nanos = |at: Instant| (at.saturating_duration_since(self.base).as_nanos() as u64).max(1);
        self.work.store(qp.has_work(), Ordering::SeqCst);
        self.phase.store(qp.phase() as u8, Ordering::SeqCst);
        self.deadline.store(qp.deadline().map_or(0, nanos), Ordering::SeqCst);
        self.glance.store(qp.glance().map_or(0, nanos), Ordering::Relaxed);
        if let Some(link) = qp.link.shm() {
            self.rings.get_or_init(|| link.rings().clone());
        }
        if let Some(rings) = self.rings.get() {
            rings.set_wants(qp.wants());
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            p if p == Phase::Flowing as u8 => Phase::Flowing,
            p if p == Phase::Waiting as u8 => Phase::Waiting,
            p if p == Phase::Shared as u8 => Phase::Shared,
            _ => Phase::Idle,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        self.work.load(Ordering::SeqCst)
            || self.edges.load(Ordering::SeqCst) != 0
            || self.rings.get().is_some_and(|rings| rings.is_ready())
    }

    /// From now on its peer tells of what it waits for. Look at [`has_work`](Self::has_work) after it.
    pub(super) fn fall_asleep(&self) {
        if let Some(rings) = self.rings.get() {
            rings.fall_asleep();
        }
    }

    /// The channel looks by itself again.
    pub(super) fn wake_up(&self) {
        if let Some(rings) = self.rings.get() {
            rings.wake_up();
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.at(&self.deadline)
    }

    /// When somebody who polls should serve it without any other reason. With `eager` nobody may come again soon, and whoever sleeps would
    /// be woken for a glance.
    pub(super) fn due(&self, eager: bool) -> Option<Instant> {
        let glance = self.at(&self.glance).filter(|_| !eager);
        self.deadline().into_iter().chain(glance).min()
    }

    fn at(&self, nanos: &AtomicU64) -> Option<Instant> {
        match nanos.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(self.base + Duration::from_nanos(nanos)),
        }
    }

    pub(super) fn add_edges(&self, ready: Readiness) {
        let mut edges = 0;
        for (is, bit) in [(ready.readable(), READABLE), (ready.writable(), WRITABLE), (ready.ended(), ENDED)]
        {
            edges |= if is { bit } else { 0 };
        }
        self.edges.fetch_or(edges, Ordering::SeqCst);
    }

    /// A turn in a progress slice: `direct` asks the socket without an edge, `due` says that a deadline has passed,
    /// `eager` that nobody may come again soon. Returns the bytes moved.
    pub(super) fn serve(&self, channel: &SoftChannel, direct: bool, due: bool, eager: bool) -> usize {
        let mut qp = lock(&self.inner);
        // After the lock: an edge that comes later stays for the next turn.
        let edges = self.edges.swap(0, Ordering::SeqCst);
        let deadline = self.deadline();
        let moved = qp.serve(edges, direct, due, eager, channel, self.token);
        self.publish(&qp);
        drop(qp);
        // Found by a slice after the arm, which has set the timer for other deadlines.
        let new_deadline = self.deadline().is_some() && self.deadline() != deadline;
        if self.has_work() || new_deadline || self.stays_asleep(channel) {
            channel.kick();
        }
        moved
    }
}
