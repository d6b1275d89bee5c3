//! Completion channels and completion queues.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::calls::{self, object};
use super::context::{Context, Ended, user_pointer};
use super::map;
use super::qp::ERR;
use super::sys::{ibv_comp_channel, ibv_cq, ibv_wc};
use crate::background;
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
        background::run(move || {
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
    states: Mutex<Vec<(u32, Weak<AtomicU8>)>>,
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
        Ok(Self { context: context.clone(), raw: object(raw)?, id, channel, states: Mutex::default() })
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(super) fn watch(&self, qp_num: u32, state: &Arc<AtomicU8>) {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states.retain(|(_, state)| state.strong_count() > 0);
        states.push((qp_num, Arc::downgrade(state)));
    }

    fn failed(&self, qp_num: u32) {
        let states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let of_it = states.iter().filter(|(n, _)| *n == qp_num);
        of_it.filter_map(|(_, state)| state.upgrade()).for_each(|state| state.store(ERR, Ordering::Release));
    }

    fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        let mut wcs = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        let mut taken = 0;
        for chunk in out.chunks_mut(BATCH) {
            // SAFETY: the queue is live.
            let n = unsafe { calls::poll_cq(self.raw(), &mut wcs[..chunk.len()]) }?;
            for (slot, wc) in chunk.iter_mut().zip(&wcs[..n]) {
                // SAFETY: the first `n` entries were written by the call.
                *slot = map::cqe(unsafe { wc.assume_init_ref() });
                if slot.status != WcStatus::Success {
                    self.failed(slot.qp_num);
                }
            }
            taken += n;
            if n < chunk.len() {
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
        background::run(move || {
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
