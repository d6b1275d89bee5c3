//! GPUs of this process, and their contexts: every call runs with the right one current, on whatever thread it happens.
//!
//! [`Gpu::enter`] makes a context current and gives a [`Current`], through which alone memory, streams and events are reached; its drop
//! restores what was current before. Debug builds ask the driver at each call whether it is so.

use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::driver::{DeviceFacts, Driver};
use super::error::CudaError;
use super::gather::Kernel;
use super::ipc::Opened;
use super::memory::DeviceMemory;
use super::sys::Opaque;
use crate::background::Lane;

/// How long it counts that host memory could not be had to stage through: what is posted meanwhile is refused, and then it is tried
/// again.
const NO_SLOTS: Duration = Duration::from_secs(10);

/// What names memory of a GPU to peers. Memfds have the same numbers, see `memory/mapping.rs`.
type Name = u64;

/// A context, and the handle that an allocation was opened by in it.
type OpenKey = (Opaque, [u8; 64]);

/// The driver, and what this process has of it.
pub(crate) struct Cuda {
    pub(super) driver: Driver,
    gpus: Mutex<BTreeMap<(u32, Opaque), Arc<Gpu>>>,
    /// Allocations that are registered: their names, by the driver's own.
    pub(super) names: Mutex<HashMap<u64, (Name, Weak<()>)>>,
    /// Memory by the name of its allocation, for peers in this process.
    pub(super) live: Mutex<BTreeMap<Name, Vec<Weak<DeviceMemory>>>>,
    /// Allocations of other processes that are open here.
    pub(super) opened: Mutex<HashMap<OpenKey, Weak<Opened>>>,
    /// How often one was opened.
    pub(super) opens: AtomicU64,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cuda")
    }
}

impl Cuda {
    pub(super) fn of(driver: Driver) -> Arc<Self> {
        Arc::new(Self {
            driver,
            gpus: Mutex::default(),
            names: Mutex::default(),
            live: Mutex::default(),
            opened: Mutex::default(),
            opens: AtomicU64::new(0),
        })
    }

    /// The machine's driver, loaded when it is asked for first.
    pub(crate) fn system() -> Result<Arc<Self>, CudaError> {
        static LOADED: OnceLock<Result<Arc<Cuda>, CudaError>> = OnceLock::new();
        LOADED.get_or_init(|| Driver::load().map(Self::of)).clone()
    }

    /// The GPU of that ordinal, with its primary context, which frameworks use too.
    pub(crate) fn gpu(self: &Arc<Self>, ordinal: u32) -> Result<Arc<Gpu>, CudaError> {
        self.gpu_with(ordinal, None)
    }

    /// The same with a context of the caller's, where memory is of one.
    pub(super) fn gpu_with(
        self: &Arc<Self>,
        ordinal: u32,
        context: Option<Opaque>,
    ) -> Result<Arc<Gpu>, CudaError> {
        let count = self.driver.device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { device: ordinal, count });
        }
        let mut gpus = lock(&self.gpus);
        if context.is_none()
            && let Some(gpu) = gpus.values().find(|gpu| gpu.ordinal == ordinal && gpu.primary)
        {
            return Ok(gpu.clone());
        }
        let facts = self.driver.device(ordinal)?;
        // Retained for as long as the process lives: it costs a good part of a second to make.
        let primary = self.driver.primary_context(facts.handle)?;
        let context = context.unwrap_or(primary);
        let gpu = gpus.entry((ordinal, context)).or_insert_with(|| {
            let primary = context == primary;
            let (cuda, lane, no_slots) = (self.clone(), Arc::new(Lane::new()), Mutex::default());
            let (kernel, stream, slots) = (Kernel::default(), OnceLock::new(), Mutex::default());
            Arc::new(Gpu { cuda, ordinal, facts, context, primary, kernel, stream, slots, lane, no_slots })
        });
        Ok(gpu.clone())
    }

    fn by_uuid(self: &Arc<Self>, uuid: [u8; 16]) -> Option<Arc<Gpu>> {
        let count = self.driver.device_count().ok()?;
        let ordinal = (0..count).find(|&n| self.driver.device(n).is_ok_and(|facts| facts.uuid == uuid))?;
        self.gpu(ordinal).ok()
    }

    /// The GPU of this process that has that identity.
    pub(super) fn that_has(uuid: [u8; 16]) -> Option<Arc<Gpu>> {
        #[cfg(test)]
        if let Some(gpu) = super::fake::recorded().iter().find_map(|cuda| cuda.by_uuid(uuid)) {
            return Some(gpu);
        }
        Self::system().ok()?.by_uuid(uuid)
    }

    pub(super) fn driver_version(&self) -> Result<(u32, u32), CudaError> {
        self.driver.version()
    }

    pub(super) fn count(&self) -> Result<u32, CudaError> {
        self.driver.device_count()
    }

    /// How often an allocation of another process was opened.
    #[cfg(test)]
    pub(crate) fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    pub(super) fn count_open(&self) {
        self.opens.fetch_add(1, Ordering::Relaxed);
    }
}

/// A GPU, through one context.
pub(crate) struct Gpu {
    cuda: Arc<Cuda>,
    ordinal: u32,
    facts: DeviceFacts,
    context: Opaque,
    primary: bool,
    pub(super) kernel: Kernel,
    stream: OnceLock<Result<Opaque, CudaError>>,
    /// What `slots.rs` has made, while somebody uses it.
    pub(super) slots: Mutex<Weak<super::slots::SlotPool>>,
    lane: Arc<Lane>,
    /// The slots of a connection within one host could not be made: why, and since when.
    no_slots: Mutex<Option<(Instant, CudaError)>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.ordinal, self.facts.name)
    }
}

impl Gpu {
    pub(crate) fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(crate) fn name(&self) -> &str {
        &self.facts.name
    }

    pub(crate) fn pci(&self) -> &str {
        &self.facts.pci
    }

    /// For what waits until the GPU has let go: the driver frees and unpins after all that is queued, the program's own work too.
    pub(crate) fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    /// Slots of a connection within one host were made, or could not be.
    pub(crate) fn slots_made(&self, error: Option<&CudaError>) {
        *lock(&self.no_slots) = error.map(|error| (Instant::now(), error.clone()));
    }

    /// Why they could not be made a moment ago.
    pub(crate) fn why_no_slots(&self) -> Option<CudaError> {
        self.why_no_slots_at(Instant::now())
    }

    fn why_no_slots_at(&self, now: Instant) -> Option<CudaError> {
        let known = lock(&self.no_slots);
        known.as_ref().filter(|(since, _)| now < *since + NO_SLOTS).map(|(_, error)| error.clone())
    }

    /// The driver's own number of it.
    pub(super) fn handle(&self) -> std::ffi::c_int {
        self.facts.handle
    }

    /// The same in every process.
    pub(super) fn uuid(&self) -> [u8; 16] {
        self.facts.uuid
    }

    pub(super) fn context(&self) -> Opaque {
        self.context
    }

    /// Makes the context current on this thread, until the value is dropped.
    pub(super) fn enter(&self) -> Result<Current<'_>, CudaError> {
        self.cuda.driver.push(self.context)?;
        Ok(Current { gpu: self, here: PhantomData })
    }
}

/// The context of a GPU is current on this thread.
pub(super) struct Current<'g> {
    gpu: &'g Gpu,
    /// Of this thread.
    here: PhantomData<*const ()>,
}

impl<'g> Current<'g> {
    /// The driver, for a call in this context.
    pub(super) fn driver(&self) -> &'g Driver {
        let driver = &self.gpu.cuda.driver;
        debug_assert_eq!(driver.current(), Some(self.gpu.context), "another context is current");
        driver
    }

    /// A stream of this context for copies that are waited for.
    pub(super) fn stream(&self) -> Result<Opaque, CudaError> {
        self.gpu.stream.get_or_init(|| self.driver().stream()).clone()
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.gpu.cuda.driver.pop();
    }
}

/// Locks, also after a panic of another thread: what is behind our locks is consistent between statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    #[test]
    fn r10_that_slots_could_not_be_made_counts_for_a_while_or_until_they_are() {
        let (cuda, _fake) = Fake::new(1);
        let gpu = cuda.gpu(0).unwrap();
        let error = CudaError::NoSlots { bytes: 1, reason: "no memory".to_owned() };
        assert!(gpu.why_no_slots().is_none());
        gpu.slots_made(Some(&error));
        let now = Instant::now();
        assert_eq!(gpu.why_no_slots_at(now).map(|why| why.to_string()), Some(error.to_string()));
        assert!(gpu.why_no_slots_at(now + NO_SLOTS).is_none(), "then it is tried again");
        gpu.slots_made(Some(&error));
        gpu.slots_made(None);
        assert!(gpu.why_no_slots().is_none());
    }
}
