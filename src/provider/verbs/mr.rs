//! Memory regions: pinned, keyed memory.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::calls::{check, object};
use super::context::RawPd;
use super::gpudirect;
use super::sys::ibv_mr;
use crate::error::MemoryError;
use crate::memory::Mapping;
use crate::provider::{AccessFlags, limits};

/// The last user of a region may be dropped on a runtime's worker: memory is unpinned elsewhere (R9), and from this size on,
/// where that takes milliseconds, by a thread of its own.
const LARGE: usize = 64 << 20;

/// How long a registration that found no memory waits for those that are ending.
const PATIENCE: Duration = Duration::from_secs(5);

/// Registrations of this process that were dropped and have not ended yet.
static ENDING: Endings = Endings::new();

/// A registered region. Deregisters on drop.
pub(crate) struct VerbsMr {
    /// `None` in `drop` only.
    pinned: Option<Pinned>,
    lkey: u32,
    rkey: u32,
}

/// The registration itself.
struct Pinned {
    pd: Arc<RawPd>,
    raw: NonNull<ibv_mr>,
    length: usize,
    // After the registration.
    mapping: Arc<Mapping>,
}

// SAFETY: the object is only passed to `ibv_dereg_mr`, by its owner, which may be any thread.
unsafe impl Send for Pinned {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for Pinned {}

impl std::fmt::Debug for VerbsMr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapping = self.pinned.as_ref().map(|p| &p.mapping);
        f.debug_struct("VerbsMr").field("mapping", &mapping).finish_non_exhaustive()
    }
}

impl VerbsMr {
    /// Registers `offset..offset + len` of `mapping`. Blocks: it pins the pages.
    pub(super) fn register(
        pd: &Arc<RawPd>,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let size = mapping.len();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(MemoryError::OutOfRange { offset, len, size });
        }
        let length = usize::try_from(len)
            .map_err(|_| MemoryError::Length { asked: len, fix: "no address space is that large" })?;
        // Verbs demands local write access with remote write and remote atomic access.
        let remote_writes =
            access.contains(AccessFlags::REMOTE_WRITE) || access.contains(AccessFlags::REMOTE_ATOMIC);
        let access = if remote_writes { access.union(AccessFlags::LOCAL_WRITE) } else { access };
        if let Some(memory) = mapping.device_memory() {
            let calls = gpudirect::Calls::of(pd.context.lib);
            let range = (mapping.addr() + offset, len);
            // SAFETY: a live domain; the mapping, which the range was checked to be in, outlives `Pinned`'s deregistration.
            let raw = unsafe { calls.register(pd.raw(), memory, range, access) }?;
            return Ok(Self::of(pd, raw, length, mapping));
        }
        let addr = std::ptr::with_exposed_provenance_mut((mapping.addr() + offset) as usize);
        let with = |access: AccessFlags| {
            // SAFETY: the range is inside of the mapping, by the check above, and stays mapped until `Pinned`'s drop
            // has deregistered it. The access flags are bits of enum ibv_access_flags.
            object(unsafe { pd.context.lib.ibv_reg_mr(pd.raw(), addr, length, access.0 as i32) })
        };
        let register = || gpudirect::relaxed(access, with);
        let no_memory = |e: &io::Error| e.raw_os_error() == Some(libc::ENOMEM);
        let raw = match register() {
            // Regions that were dropped may not have been unpinned yet, and count against the limit until then.
            Err(error) if no_memory(&error) && ENDING.wait(PATIENCE) => register(),
            registered => registered,
        };
        let raw = raw.map_err(|source| match no_memory(&source) {
            true => MemoryError::Register { len, memlock: memlock(), source },
            false => MemoryError::Os { what: "registering memory", len, source },
        })?;
        Ok(Self::of(pd, raw, length, mapping))
    }

    /// What was registered just now.
    fn of(pd: &Arc<RawPd>, raw: NonNull<ibv_mr>, length: usize, mapping: Arc<Mapping>) -> Self {
        // SAFETY: a live region.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Self { pinned: Some(Pinned { pd: pd.clone(), raw, length, mapping }), lkey, rkey }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Its `ibv_mr`.
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        self.pinned.as_ref().map(|pinned| pinned.raw.as_ptr().cast())
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        let Some(pinned) = self.pinned.take() else { return };
        let large = pinned.length >= LARGE;
        let lane = pinned.pd.context.lane.clone();
        let counted = Ending { number: ENDING.begin(), pinned: Some(pinned) };
        if large {
            // When no thread can be had, the closure is dropped, and this thread does it.
            let _ =
                std::thread::Builder::new().name("landfall-unpin".to_owned()).spawn(move || drop(counted));
        } else {
            lane.run(move || drop(counted));
        }
    }
}

/// A registration that is counted in [`ENDING`].
struct Ending {
    number: u64,
    pinned: Option<Pinned>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        drop(self.pinned.take());
        ENDING.end(self.number);
    }
}

/// What is ending, by numbers in the order in which it began.
struct Endings {
    state: Mutex<Numbers>,
    changed: Condvar,
}

struct Numbers {
    next: u64,
    ending: BTreeSet<u64>,
}

impl Numbers {
    /// One that began before `number` has not ended.
    fn any_before(&self, number: u64) -> bool {
        self.ending.first().is_some_and(|&first| first < number)
    }
}

impl Endings {
    const fn new() -> Self {
        Self { state: Mutex::new(Numbers { next: 0, ending: BTreeSet::new() }), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, Numbers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) -> u64 {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.ending.insert(number);
        number
    }

    fn end(&self, number: u64) {
        self.state().ending.remove(&number);
        self.changed.notify_all();
    }

    /// Waits for those that are ending now, and not for what others drop meanwhile. Whether there was any.
    fn wait(&self, patience: Duration) -> bool {
        let now = self.state().next;
        self.wait_before(now, patience)
    }

    /// Waits for those that began before `number`, for so long at most. Whether there was any.
    fn wait_before(&self, number: u64, patience: Duration) -> bool {
        let state = self.state();
        let waited = state.any_before(number);
        drop(self.changed.wait_timeout_while(state, patience, |state| state.any_before(number)));
        waited
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered by `register`, deregistered only here.
        if let Err(error) = check(unsafe { self.pd.context.lib.ibv_dereg_mr(self.raw.as_ptr()) })
            && !self.pd.context.took(&error)
        {
            tracing::error!(%error, "deregistering memory failed: it stays mapped until the process ends");
            std::mem::forget((self.pd.clone(), self.mapping.clone()));
        }
    }
}

/// The soft `RLIMIT_MEMLOCK`, as `ulimit -l` prints it: in KiB.
fn memlock() -> String {
    match limits::locked_memory() {
        Ok(None) => "unlimited".to_owned(),
        Ok(Some(bytes)) => format!("{} KiB", bytes / 1024),
        Err(error) => format!("unknown: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r10_a_registration_waits_for_the_endings_before_it_and_no_longer() {
        let endings = Endings::new();
        assert!(!endings.wait(Duration::MAX), "there is none");
        let (first, second) = (endings.begin(), endings.begin());
        let now = endings.state().next;
        let later = endings.begin();
        std::thread::scope(|s| {
            let waiting = s.spawn(|| endings.wait_before(now, Duration::MAX));
            // In any order; the one that began later goes on.
            endings.end(second);
            endings.end(first);
            waiting.join().unwrap();
        });
        assert!(!endings.wait_before(now, Duration::MAX));
        // One that never ends.
        assert!(endings.wait(Duration::ZERO));
        endings.end(later);
    }
}
