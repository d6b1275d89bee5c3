//! Copies that run beside the program: collected, queued on a stream of their own, and over when an event says so.
//!
//! Completion is asked for ([`Flight::is_done`]), never called back: a callback may not come after an error of the context.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::context::{Gpu, lock};
use super::driver::{Driver, GatherArgs};
use super::error::CudaError;
use super::gather::{self, Kernel, Piece, Plan};
use super::sys::{DevicePtr, Opaque};
use crate::pages::Pages;

/// A stream of a GPU, and what is to be copied on it next.
#[derive(Debug)]
pub(crate) struct Copier {
    shared: Arc<Shared>,
    pieces: Vec<Piece>,
    list: Vec<u64>,
}

/// What flights use of their copier: it lives until the last of them is over.
#[derive(Debug)]
struct Shared {
    gpu: Arc<Gpu>,
    stream: Opaque,
    spare: Mutex<Spare>,
}

/// Events and lists that are not in use.
#[derive(Debug, Default)]
struct Spare {
    events: Vec<Opaque>,
    lists: Vec<List>,
}

/// Device memory for a list.
#[derive(Clone, Copy, Debug)]
struct List {
    at: DevicePtr,
    bytes: usize,
}

/// Lists are of this many bytes, or a power of two times it.
const LIST_BYTES: usize = 64 << 10;

/// Copies under way.
#[derive(Debug)]
pub(crate) struct Flight {
    shared: Arc<Shared>,
    event: Opaque,
    lists: Vec<List>,
    /// How many calls of the driver it took.
    calls: u32,
    /// It was seen to be over: the driver is not asked again.
    over: AtomicBool,
}

impl Copier {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Result<Self, CudaError> {
        let stream = gpu.enter()?.driver().stream()?;
        let shared = Arc::new(Shared { gpu, stream, spare: Mutex::default() });
        Ok(Self { shared, pieces: Vec::new(), list: Vec::new() })
    }

    /// Makes what copies on `gpu` need, which takes tens of milliseconds. What could not be made is asked for again when it is needed.
    pub(crate) fn prepare(gpu: &Gpu) -> Result<(), CudaError> {
        Kernel::make(gpu).map(drop)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.shared.gpu
    }

    /// Whether nothing waits to be queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a copy whose memory is of another allocation than that of the one before it: the driver makes none of both.
    pub(crate) fn push_apart(&mut self, to: u64, from: u64, len: u64) {
        self.pieces.push(Piece { to, from, len });
    }

    /// Adds a copy. Neighbours become one.
    pub(crate) fn push(&mut self, to: u64, from: u64, len: u64) {
        if let Some(last) = self.pieces.last_mut()
            && last.to + last.len == to
            && last.from + last.len == from
        {
            last.len += len;
            return;
        }
        self.pieces.push(Piece { to, from, len });
    }

    /// Queues what was added. `gathers`: all of it is memory of GPUs, so that a kernel may copy it.
    ///
    /// # Safety
    /// Each piece may be written and read as it was added, until the flight is over.
    pub(crate) unsafe fn launch(&mut self, gathers: bool) -> Result<Flight, CudaError> {
        let plan = if gathers { gather::plan(&self.pieces, &mut self.list) } else { None };
        let gathered = match plan {
            // SAFETY: the caller's promise. `plan` names the pieces alone.
            Some(plan) => unsafe { self.shared.gather(plan, &self.list) },
            None => Ok(None),
        };
        let flight = match gathered.transpose() {
            Some(flight) => flight,
            None => self.shared.fly(|driver, stream, flight| {
                self.pieces.iter().try_for_each(|piece| {
                    flight.calls += 1;
                    // SAFETY: the caller's promise.
                    unsafe { driver.copy(piece.to, piece.from, piece.len as usize, stream) }
                })
            }),
        };
        self.pieces.clear();
        flight
    }

    /// Whether a kernel may be for `pages`, wherever they are.
    pub(crate) fn takes(pages: &Pages) -> bool {
        gather::may_gather(pages)
    }

    /// Queues `pages`, whose first blocks are at `to` and `from`, in memory of GPUs. Nothing else waits to be queued. `None` where they are
    /// to be added piece by piece instead.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), of each of their pieces.
    pub(crate) unsafe fn launch_pages(
        &mut self,
        pages: &Pages,
        to: u64,
        from: u64,
    ) -> Result<Option<Flight>, CudaError> {
        match gather::plan_pages(pages, to, from) {
            // SAFETY: the caller's promise.
            Some(plan) => unsafe { self.shared.gather(plan, &pages.pairs) },
            None => Ok(None),
        }
    }
}

impl Shared {
    /// Queues what `queue` queues, and an event behind it.
    fn fly(
        self: &Arc<Self>,
        queue: impl FnOnce(&Driver, Opaque, &mut Flight) -> Result<(), CudaError>,
    ) -> Result<Flight, CudaError> {
        let current = self.gpu.enter()?;
        let driver = current.driver();
        let spare = lock(&self.spare).events.pop();
        let event = match spare {
            Some(event) => event,
            None => driver.event()?,
        };
        // From here on a failure drops it, which waits for what was queued.
        let mut flight =
            Flight { shared: self.clone(), event, lists: Vec::new(), calls: 0, over: AtomicBool::new(false) };
        let queued = queue(driver, self.stream, &mut flight);
        let recorded = driver.record(event, self.stream);
        if let Err(e) = queued.and(recorded) {
            // Whatever was queued ends before the flight does.
            let _ = driver.stream_synchronize(self.stream);
            return Err(e);
        }
        Ok(flight)
    }

    /// Queues a gathered copy. `None` where the kernel is not there yet, or room for its list cannot be had.
    ///
    /// # Safety
    /// Each piece of the plan may be written and read, until the flight is over.
    unsafe fn gather(self: &Arc<Self>, plan: Plan, list: &[u64]) -> Result<Option<Flight>, CudaError> {
        let Some(kernel) = Kernel::get(&self.gpu) else { return Ok(None) };
        let room = {
            let current = self.gpu.enter()?;
            self.list(current.driver(), size_of_val(list))
        };
        let room = match room {
            Ok(room) => room,
            Err(error) => {
                tracing::debug!(%error, "pieces are copied one by one");
                return Ok(None);
            }
        };
        let from = list.as_ptr().expose_provenance() as u64;
        let args = GatherArgs { list: room.at, plan };
        let flight = self.fly(|driver, stream, flight| {
            flight.lists.push(room);
            flight.calls += 2;
            // SAFETY: the list's memory is this flight's. The driver has taken a copy of ordinary host memory when it returns.
            // The pieces are the caller's promise.
            unsafe {
                driver
                    .copy(room.at, from, size_of_val(list), stream)
                    .and_then(|()| driver.gather(kernel, args, stream))
            }
        });
        flight.map(Some)
    }
}

#[cfg(test)]
impl Copier {
    /// The middle time of the kernel for what `fill` adds, over `rounds`, without its list.
    pub(super) fn kernel_micros(&mut self, fill: &dyn Fn(&mut Self), rounds: usize) -> f64 {
        fill(self);
        let plan = gather::plan(&self.pieces, &mut self.list).unwrap();
        self.pieces.clear();
        let shared = self.shared.clone();
        let current = shared.gpu.enter().unwrap();
        let (driver, stream) = (current.driver(), shared.stream);
        let bytes = size_of_val(&self.list[..]);
        let list = shared.list(driver, bytes).unwrap();
        let kernel = Kernel::make(&shared.gpu).unwrap();
        let args = GatherArgs { list: list.at, plan };
        let mut micros = Vec::new();
        // SAFETY: the test's memory; each launch is waited for.
        unsafe {
            driver.copy(list.at, self.list.as_ptr().expose_provenance() as u64, bytes, stream).unwrap();
            driver.stream_synchronize(stream).unwrap();
            for _ in 0..rounds {
                let start = std::time::Instant::now();
                driver.gather(kernel, args, stream).unwrap();
                driver.stream_synchronize(stream).unwrap();
                micros.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        micros.sort_by(f64::total_cmp);
        lock(&shared.spare).lists.push(list);
        micros[rounds / 2]
    }
}

impl Shared {
    fn list(&self, driver: &Driver, bytes: usize) -> Result<List, CudaError> {
        let mut spare = lock(&self.spare);
        if let Some(at) = spare.lists.iter().position(|list| list.bytes >= bytes) {
            return Ok(spare.lists.swap_remove(at));
        }
        let bytes = bytes.max(LIST_BYTES).next_power_of_two();
        Ok(List { at: driver.alloc(bytes)?, bytes })
    }
}

impl Flight {
    pub(crate) fn calls(&self) -> u32 {
        self.calls
    }

    /// Whether all of it is copied. An error is of the copies, or of the whole context.
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        if self.over.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let over = self.shared.gpu.enter()?.driver().is_done(self.event)?;
        self.over.store(over, Ordering::Relaxed);
        Ok(over)
    }

    /// Waits until all of it is copied.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        if self.over.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.shared.gpu.enter()?.driver().event_synchronize(self.event)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Over, as a rule. If not, what it uses may be gone when this returns.
        if !matches!(self.is_done(), Ok(true)) {
            let _ = self.wait();
        }
        let mut spare = lock(&self.shared.spare);
        spare.events.push(self.event);
        spare.lists.append(&mut self.lists);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let spare = std::mem::take(&mut *lock(&self.spare));
        let Ok(current) = self.gpu.enter() else { return };
        let driver = current.driver();
        driver.stream_destroy(self.stream);
        spare.events.iter().for_each(|&event| driver.event_destroy(event));
        for list in spare.lists {
            let _ = driver.free(list.at);
        }
    }
}
