//! Completion channels, and progress: the engine has no thread of its own, it runs when a queue is polled.
//!
//! The channel's descriptor is an epoll instance that holds the sockets of its queue pairs, an event counter for
//! armed queues and for work that became possible without an edge, and a timer. Sockets are edge-triggered; an edge is
//! kept in [`QpShared::edges`] until the queue pair has been served.
//!
//! A queue pair over shared memory is looked at, which costs no system call. Its peer signals by the socket beside the rings,
//! when it has been told that this side sleeps; that is told, and the rings are looked at again, where somebody declares that it
//! will wait for the descriptor, and after each turn of a queue pair while somebody does.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};
use std::time::Instant;

use super::cq::{CqShared, SoftCq};
use super::member::{Phase, QpShared};
use super::sys::{Epoll, EventFd, TimerFd};
use super::tuning::{DIRECT_QPS, LOOKS_A_SYSTEM_CALL, SLICE_BYTES};
use super::{SoftDevice, lock};
use crate::error::DeviceError;
use crate::provider::events::ObjectId;

const EVENT: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// A completion channel.
#[derive(Debug)]
pub(crate) struct SoftChannel {
    pub(super) device: Arc<SoftDevice>,
    epoll: Epoll,
    event: EventFd,
    timer: TimerFd,
    /// The queue pairs, by the low half of their token. Held for reading during a slice.
    members: RwLock<Vec<Option<Arc<QpShared>>>>,
    generation: AtomicUsize,
    /// Where the next slice starts. One thread at a time makes progress.
    slice: Mutex<usize>,
    /// Slices that have looked at shared memory only.
    looks: AtomicUsize,
    /// Somebody relies on the descriptor: work that shows up without an edge signals it. Set by arming, cleared by the
    /// signal or by whoever takes the events, not by a poll: another thread may poll while that one sleeps.
    relied_on: AtomicBool,
    /// Nobody has polled with success since it was armed, so that nobody may come again soon: acknowledgements that are
    /// due do not wait for company.
    sleeping: AtomicBool,
}

impl SoftDevice {
    pub(crate) fn create_channel(self: &Arc<Self>) -> Result<Arc<SoftChannel>, DeviceError> {
        let make = || -> io::Result<SoftChannel> {
            let (epoll, event, timer) = (Epoll::new()?, EventFd::new()?, TimerFd::new()?);
            epoll.add_readable(event.fd(), EVENT)?;
            epoll.add_readable(timer.fd(), TIMER)?;
            Ok(SoftChannel {
                device: self.clone(),
                epoll,
                event,
                timer,
                members: RwLock::default(),
                generation: AtomicUsize::new(0),
                slice: Mutex::new(0),
                looks: AtomicUsize::new(0),
                relied_on: AtomicBool::new(false),
                sleeping: AtomicBool::new(false),
            })
        };
        make()
            .map(Arc::new)
            .map_err(|source| DeviceError::Os { what: "creating a completion channel", source })
    }
}

impl SoftChannel {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.fd()
    }

    /// Takes the pending events. Sockets that they name are served by the next polls.
    pub(crate) fn drain_events(&self) -> io::Result<()> {
        #[cfg(test)]
        if self.device.channels_fail.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.relied_on.store(false, Ordering::SeqCst);
        self.sleeping.store(false, Ordering::SeqCst);
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.iter().flatten().for_each(|qp| qp.wake_up());
        // Level-triggered: these stay until they are cleared here, whoever looks in between.
        self.take_edges(&members, |other| match other {
            EVENT => self.event.clear(),
            _ => self.timer.clear(),
        })
    }

    pub(crate) fn create_cq(self: &Arc<Self>, capacity: u32) -> Result<SoftCq, DeviceError> {
        let limit = self.device.caps.max_cqe;
        if capacity == 0 || capacity > limit {
            return Err(DeviceError::Limit {
                what: "entries of a completion queue",
                asked: capacity.into(),
                limit: limit.into(),
                fix: "ask for 1 entry up to that many, and spread queue pairs over several completion queues",
            });
        }
        if self.device.fails_cq() {
            let source = io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(DeviceError::Os { what: "creating a completion queue", source });
        }
        Ok(SoftCq { shared: Arc::new(CqShared::new(self.clone(), capacity)), id: ObjectId::next() })
    }

    pub(super) fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    /// Makes the descriptor readable.
    pub(super) fn signal(&self) {
        self.event.signal();
    }

    /// Somebody waits for the descriptor, or is about to.
    pub(super) fn is_relied_on(&self) -> bool {
        self.relied_on.load(Ordering::SeqCst)
    }

    /// Whoever polls has got something, and will come again.
    pub(super) fn awake(&self) {
        if self.sleeping.load(Ordering::Relaxed) {
            self.sleeping.store(false, Ordering::SeqCst);
        }
    }

    /// There is work to do that no edge will announce.
    pub(super) fn kick(&self) {
        if self.relied_on.load(Ordering::SeqCst) && self.relied_on.swap(false, Ordering::SeqCst) {
            self.event.signal();
        }
    }

    /// Adds a queue pair, made with its token.
    pub(super) fn join(&self, make: impl FnOnce(u64) -> Arc<QpShared>) -> Arc<QpShared> {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) as u64 & 0x3fff_ffff;
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let at = members.iter().position(Option::is_none).unwrap_or(members.len());
        let qp = make(generation << 32 | at as u64);
        match members.get_mut(at) {
            Some(slot) => *slot = Some(qp.clone()),
            None => members.push(Some(qp.clone())),
        }
        qp
    }

    /// Removes a queue pair. Call it without the queue pair's lock.
    pub(super) fn leave(&self, token: u64) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let at = token as u32 as usize;
        if members.get(at).and_then(Option::as_ref).is_some_and(|qp| qp.token == token) {
            members[at] = None;
        }
        while let Some(None) = members.last() {
            members.pop();
        }
    }

    fn take_edges(&self, members: &[Option<Arc<QpShared>>], other: impl Fn(u64)) -> io::Result<()> {
        self.epoll.drain(|token, ready| match token {
            EVENT | TIMER => other(token),
            token => {
                // Events of a queue pair that has left name a slot that is empty, or taken by another token.
                if let Some(Some(qp)) = members.get(token as u32 as usize)
                    && qp.token == token
                {
                    qp.add_edges(ready);
                }
            }
        })
    }

    /// One bounded slice of I/O over the queue pairs, in turn.
    pub(super) fn progress(&self) -> io::Result<()> {
        let mut start = match self.slice.try_lock() {
            Ok(start) => start,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            // Another thread is at it.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let eager = self.sleeping.load(Ordering::SeqCst);
        let (mut connected, mut shared, mut ask_epoll, mut timed) = (0, false, false, false);
        for qp in members.iter().flatten() {
            match qp.phase() {
                Phase::Idle => {}
                Phase::Flowing => connected += 1,
                Phase::Shared => shared = true,
                // Waits for an edge: of a listener, a dial, room in a socket buffer, or the end of a connection.
                Phase::Waiting => ask_epoll = true,
            }
            timed |= qp.due(eager).is_some();
        }
        let direct = connected <= DIRECT_QPS;
        // By a process that has died nothing changes in the shared memory.
        let overdue = shared
            && self.looks.fetch_add(1, Ordering::Relaxed) % LOOKS_A_SYSTEM_CALL == LOOKS_A_SYSTEM_CALL - 1;
        if ask_epoll || !direct || overdue {
            self.take_edges(&members, |_| ())?;
        }
        let now = timed.then(Instant::now);
        let (count, mut left) = (members.len(), SLICE_BYTES);
        for step in 0..count {
            let at = (*start + step) % count;
            let Some(qp) = &members[at] else { continue };
            let due = now.is_some_and(|now| qp.due(eager).is_some_and(|d| d <= now));
            if due || qp.has_work() || (direct && qp.phase() == Phase::Flowing) {
                left = left.saturating_sub(qp.serve(self, direct, due, eager));
                if left == 0 {
                    *start = (at + 1) % count;
                    // The others have their turns in the next slice, and their edges are used up: when this thread does not
                    // come again, whoever sleeps has to.
                    if members.iter().flatten().any(|qp| qp.has_work()) {
                        self.kick();
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Declares that somebody will wait for the descriptor, and says whether there is work at hand instead.
    pub(super) fn about_to_sleep(&self) -> io::Result<bool> {
        self.relied_on.store(true, Ordering::SeqCst);
        self.sleeping.store(true, Ordering::SeqCst);
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.iter().flatten().for_each(|qp| qp.fall_asleep());
        if members.iter().flatten().any(|qp| qp.has_work()) {
            self.relied_on.store(false, Ordering::SeqCst);
            self.sleeping.store(false, Ordering::SeqCst);
            members.iter().flatten().for_each(|qp| qp.wake_up());
            return Ok(true);
        }
        if let Some(first) = members.iter().flatten().filter_map(|qp| qp.deadline()).min() {
            self.timer.arm(first.saturating_duration_since(Instant::now()))?;
        }
        Ok(false)
    }
}

/// The number of the first queue pair: 0 and 1 are the management queue pairs.
pub(super) const FIRST_QP: u32 = 2;

/// Numbers of queue pairs: the one freed last is given out first, so that reuse is common.
#[derive(Debug, Default)]
pub(super) struct QpNumbers(Mutex<(u32, Vec<u32>)>);

impl QpNumbers {
    /// `None` when all 24-bit numbers are in use.
    pub(super) fn take(&self) -> Option<u32> {
        let mut numbers = lock(&self.0);
        if let Some(n) = numbers.1.pop() {
            return Some(n);
        }
        let n = numbers.0.max(FIRST_QP);
        (n < 1 << 24).then(|| {
            numbers.0 = n + 1;
            n
        })
    }

    pub(super) fn give_back(&self, n: u32) {
        lock(&self.0).1.push(n);
    }
}
