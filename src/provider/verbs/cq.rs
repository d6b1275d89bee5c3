//! Completion channels and completion queues.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::calls::{self, object};
use super::context::{Context, Ended, user_pointer};
use super::map;
use super::qp::ERR;
use super::sys::{ibv_comp_channel, ibv_cq, ibv_wc};
use crate::error::DeviceError;
use crate::provider::events::ObjectId;
use crate::provider::{Armed, Cqe, WcStatus};

/// Completions of one call to the provider.
const BATCH: usize = 64;

/// A completion channel: a descriptor that becomes readable with events of its queues.
pub(crate) struct VerbsChannel {
    context: Arc<Context>,
    raw: NonNull<ibv_comp_channel>,
    fd: c_int,
}

// SAFETY: libibverbs' calls on a channel may come from any thread and at the same time; no call but the one in `drop`
// ends its life. The descriptor is a copy of a field that does not change.
unsafe impl Send for VerbsChannel {}
// SAFETY: as above.
unsafe impl Sync for VerbsChannel {}

impl std::fmt::Debug for VerbsChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsChannel").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl VerbsChannel {
    pub(super) fn create(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = object(unsafe { context.lib.ibv_create_comp_channel(context.raw()) })?;
        // SAFETY: a channel that was created just now.
        let fd = unsafe { raw.as_ref().fd };
        let this = Self { context: context.clone(), raw, fd };
        // SAFETY: plain calls on a descriptor that the channel owns.
        let rc = unsafe {
            match libc::fcntl(fd, libc::F_GETFL) {
                -1 => -1,
                flags => libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK),
            }
        };
        if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(this) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the channel lives, and the result borrows the channel.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Takes every event until the descriptor would block, and acknowledges each at once: destroying a queue waits
    /// for the acknowledgement of what was taken of it.
    pub(crate) fn drain_events(&self) -> io::Result<()> {
        loop {
            let mut cq = std::ptr::null_mut();
            let mut cookie = std::ptr::null_mut();
            // SAFETY: the channel is live; the call writes both pointers when it succeeds.
            let rc = unsafe { self.context.lib.ibv_get_cq_event(self.raw.as_ptr(), &mut cq, &mut cookie) };
            if rc == 0 {
                // SAFETY: a queue whose event has been taken is not freed before the event is acknowledged: until
                // then `ibv_destroy_cq` waits.
                unsafe { self.context.lib.ibv_ack_cq_events(cq, 1) };
                continue;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(()),
                io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            }
        }
    }

    pub(crate) fn create_cq(self: &Arc<Self>, capacity: u32) -> Result<VerbsCq, DeviceError> {
        let raw = RawCq::create(&self.context, Some(self.clone()), capacity)
            .map_err(|source| DeviceError::Os { what: "creating a completion queue", source })?;
        Ok(VerbsCq { raw: Arc::new(raw) })
    }
}

impl Drop for VerbsChannel {
    fn drop(&mut self) {
        let ended = Ended { context: self.context.clone(), raw: self.raw, keep: () };
        self.context.lane.run(move || {
            ended.destroy("a completion channel", |lib, channel| {
                // SAFETY: created by `create`, destroyed only here; its queues held an `Arc` of it and are gone.
                unsafe { lib.ibv_destroy_comp_channel(channel) }
            });
        });
    }
}

/// A completion queue, shared by its handle and its queue pairs.
pub(super) struct RawCq {
    pub(super) context: Arc<Context>,
    raw: NonNull<ibv_cq>,
    id: ObjectId,
    channel: Option<Arc<VerbsChannel>>,
    /// The states of its queue pairs: a completion that failed says that its queue pair has. (Asking the driver is
    /// not enough: siw never tells.)
    states: Mutex<States>,
    /// Queue pairs whose destruction has returned, so far.
    destroyed: AtomicU64,
    /// There may be stale completions.
    has_stale: AtomicBool,
}

/// The queue pairs of a completion queue, by numbers that the driver gives out again.
#[derive(Default)]
struct States {
    live: Vec<(u32, Weak<AtomicU8>)>,
    /// Numbers of destroyed queue pairs, of which the queue may still have completions, and how many had been destroyed
    /// by then; `None` while the destruction runs. A completion of such a number says nothing about another queue pair that
    /// has it now.
    stale: Vec<(u32, Option<u64>)>,
}

impl States {
    fn watch(&mut self, qp_num: u32, state: &Arc<AtomicU8>) {
        self.live.retain(|(_, state)| state.strong_count() > 0);
        self.live.push((qp_num, Arc::downgrade(state)));
    }

    fn forget(&mut self, qp_num: u32, state: &Arc<AtomicU8>) {
        self.live.retain(|(_, other)| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(state)));
        self.stale.push((qp_num, None));
    }

    /// The destruction of one of that number has returned, as the one of number `count`.
    fn destroyed(&mut self, qp_num: u32, count: u64) {
        if let Some(entry) = self.stale.iter_mut().find(|(n, at)| *n == qp_num && at.is_none()) {
            entry.1 = Some(count);
        }
    }

    fn failed(&self, qp_num: u32) {
        if self.stale.iter().any(|(n, _)| *n == qp_num) {
            return;
        }
        let of_it = self.live.iter().filter(|(n, _)| *n == qp_num);
        of_it.filter_map(|(_, state)| state.upgrade()).for_each(|state| state.store(ERR, Ordering::Release));
    }

    /// The queue was polled empty, by a poll before which `count` had been destroyed. Whether others are left.
    fn emptied(&mut self, count: u64) -> bool {
        self.stale.retain(|(_, at)| at.is_none_or(|at| at > count));
        !self.stale.is_empty()
    }
}

// SAFETY: as for `Context`; providers lock what a poll and an arm touch, and no call but the one in `drop` ends its
// life.
unsafe impl Send for RawCq {}
// SAFETY: as above.
unsafe impl Sync for RawCq {}

impl RawCq {
    pub(super) fn create(
        context: &Arc<Context>,
        channel: Option<Arc<VerbsChannel>>,
        capacity: u32,
    ) -> io::Result<Self> {
        let entries = c_int::try_from(capacity).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let events = channel.as_ref().map_or(std::ptr::null_mut(), |c| c.raw.as_ptr());
        let id = ObjectId::next();
        // SAFETY: context and channel are live, and of each other; the queue's `Arc`s keep them so. Its user pointer is a
        // number.
        let raw = unsafe { context.lib.ibv_create_cq(context.raw(), entries, user_pointer(id), events, 0) };
        Ok(Self {
            context: context.clone(),
            raw: object(raw)?,
            id,
            channel,
            states: Mutex::default(),
            destroyed: AtomicU64::new(0),
            has_stale: AtomicBool::new(false),
        })
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    fn states(&self) -> MutexGuard<'_, States> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has failed completions of `qp_num` change `state`, until it is forgotten.
    pub(super) fn watch(&self, qp_num: u32, state: &Arc<AtomicU8>) {
        self.states().watch(qp_num, state);
    }

    /// The queue pair is about to be destroyed. [`qp_destroyed`](Self::qp_destroyed) follows when it is.
    pub(super) fn forget(&self, qp_num: u32, state: &Arc<AtomicU8>) {
        self.states().forget(qp_num, state);
    }

    pub(super) fn qp_destroyed(&self, qp_num: u32) {
        let mut states = self.states();
        let count = self.destroyed.fetch_add(1, Ordering::AcqRel) + 1;
        states.destroyed(qp_num, count);
        self.has_stale.store(true, Ordering::Release);
    }

    fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        // Zero, and not as it comes: of a failed completion drivers write some members only.
        let mut wcs = [const { MaybeUninit::<ibv_wc>::zeroed() }; BATCH];
        let mut taken = 0;
        let destroyed = self.destroyed.load(Ordering::Acquire);
        for chunk in out.chunks_mut(BATCH) {
            // SAFETY: the queue is live.
            let n = unsafe { calls::poll_cq(self.raw(), &mut wcs[..chunk.len()]) }?;
            for (slot, wc) in chunk.iter_mut().zip(&wcs[..n]) {
                // SAFETY: plain integers and a union of them: zero before the call, or what it has written.
                *slot = map::cqe(unsafe { wc.assume_init_ref() });
                if slot.status != WcStatus::Success {
                    self.states().failed(slot.qp_num);
                }
            }
            taken += n;
            if n < chunk.len() {
                if self.has_stale.load(Ordering::Acquire) {
                    let mut states = self.states();
                    let left = states.emptied(destroyed);
                    self.has_stale.store(left, Ordering::Release);
                }
                break;
            }
        }
        Ok(taken)
    }
}

impl Drop for RawCq {
    /// Elsewhere: a driver may wait for the last event of the queue, and it may be a worker that drops it.
    fn drop(&mut self) {
        let ended = Ended { context: self.context.clone(), raw: self.raw, keep: self.channel.take() };
        self.context.lane.run(move || {
            ended.destroy("a completion queue", |lib, cq| {
                // SAFETY: created by `create`, destroyed only here; its queue pairs held an `Arc` of it and are gone.
                unsafe { lib.ibv_destroy_cq(cq) }
            });
        });
    }
}

/// The handle of a completion queue with events.
pub(crate) struct VerbsCq {
    pub(super) raw: Arc<RawCq>,
}

impl std::fmt::Debug for VerbsCq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VerbsCq")
    }
}

impl VerbsCq {
    /// Its `ibv_cq`.
    pub(crate) fn as_raw(&self) -> *mut c_void {
        self.raw.raw().cast()
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.raw.id
    }

    pub(crate) fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        self.raw.poll(out)
    }

    pub(crate) fn arm(&self) -> io::Result<Armed> {
        // SAFETY: the queue is live.
        unsafe { calls::req_notify_cq(self.raw.raw()) }?;
        Ok(Armed::Armed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::qp::RTS;
    use super::*;

    #[test]
    fn r5_a_stale_completion_does_not_fail_a_new_queue_pair_of_that_number() {
        let state = || Arc::new(AtomicU8::new(RTS));
        let is = |state: &Arc<AtomicU8>| state.load(Ordering::Acquire);
        let (mut states, old, new, other) = (States::default(), state(), state(), state());
        states.watch(17, &old);
        states.watch(18, &other);
        states.forget(17, &old);
        // The number is free before the destruction has returned.
        states.watch(17, &new);
        states.failed(17);
        assert!(states.emptied(0), "the destruction is not over");
        states.failed(17);
        states.destroyed(17, 1);
        assert!(states.emptied(0), "polled before the destruction was over");
        states.failed(17);
        assert_eq!((is(&old), is(&new)), (RTS, RTS));
        assert!(!states.emptied(1));
        // From now on a completion is of the new one.
        states.failed(17);
        assert_eq!((is(&old), is(&new), is(&other)), (RTS, ERR, RTS));
        states.failed(18);
        assert_eq!(is(&other), ERR);
    }
}
