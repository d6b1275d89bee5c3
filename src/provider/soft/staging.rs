//! Memory of GPUs that is staged: it passes through slots of pinned host memory, so that copies run while the connection is served.
//!
//! Over TCP, out: the payload of a frame is copied to a slot when the frame is put together, some frames ahead of their turn; a frame is sent
//! when its copies are over. In: the socket is read into a slot, from which `landings.rs` has the payload copied while the next is
//! read. Nothing waits for the GPU: where nothing else is to be done, the queue pair has a deadline after which to look again.
//!
//! A queue pair has at most a slot for each frame ahead, and some for each flight of its landings. They go back when it ends.
//!
//! Over shared memory the slots are the connection's own (`shm/slots.rs`), and references to them travel: out as over TCP, but that a slot
//! is lent to the peer when its frame has been put; in, they are copied from as other mapped memory is (`shm/receive.rs`).

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::Desc;
use super::landings::{FIRST_LOOK, LAST_LOOK, Landings, SHORT_LOOKS};
use super::mr::MemRange;
use super::qp::QpInner;
use super::rx::{Stop, memory_of};
use super::shm::{Lendable, SharedSlot};
use super::tuning::{FRAME_BYTES, SHARED_SLOT_BYTES};
use crate::cuda::{Copier, CudaError, Flight, Gpu, SLOT_BYTES, Slot};
use crate::memory::Mapping;

// The payload of a frame fits into a slot.
const _: () = assert!(SLOT_BYTES >= FRAME_BYTES);

/// Where parts of a slot begin that are filled one after the other.
const ALIGNED: usize = 256;

/// A slot, and where the free part of it begins.
pub(super) type Room = OnceCell<Result<(Arc<Slot>, usize), CudaError>>;

/// What a queue pair stages.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// One for each GPU that was sent from.
    out: Vec<Copier>,
    /// What comes next is read into it, from so many bytes on.
    slot: Option<Arc<Slot>>,
    filled: usize,
    /// Over shared memory.
    pub(super) shared: Lendable,
}

/// What a frame's payload is copied to.
#[derive(Debug)]
enum Home {
    Own(Arc<Slot>),
    Shared(Arc<SharedSlot>),
}

/// The payload of a frame, on its way to a slot or there.
#[derive(Debug)]
pub(super) struct Staged {
    home: Home,
    filled: usize,
    flights: Vec<Arc<Flight>>,
    /// Held until the copies are over.
    sources: Vec<Arc<Mapping>>,
    /// The first request that some of it is of.
    request: Option<u32>,
    /// Bytes of memory of GPUs, and their pieces: they count when the frame has left.
    sent: (u64, u64),
}

impl Staging {
    /// Adds a copy of `range`, which is memory of a GPU, to the frame of `staged`. Where in the slot it goes to.
    pub(super) fn copy_out(
        &mut self,
        staged: &mut Option<Staged>,
        range: MemRange<'_>,
        request: Option<u32>,
    ) -> Result<u32, CudaError> {
        let Some(memory) = range.device() else { return Ok(0) };
        let gpu = memory.gpu();
        let copier = match self.out.iter().position(|copier| Arc::ptr_eq(copier.gpu(), gpu)) {
            Some(at) => &mut self.out[at],
            None => {
                self.out.push(Copier::new(gpu.clone())?);
                let last = self.out.len() - 1;
                &mut self.out[last]
            }
        };
        if staged.is_none() {
            *staged = Some(Staged::new(Home::Own(Slot::take(gpu)?)));
        }
        let Some(staged) = staged else { return Ok(0) };
        let at = staged.filled;
        assert!(at + range.len() <= staged.size(), "a frame's payload fits into a slot");
        staged.filled += range.len();
        staged.sent = (staged.sent.0 + range.len() as u64, staged.sent.1 + 1);
        staged.request = staged.request.or(request);
        let to = staged.addr() + at as u64;
        if staged.sources.last().is_some_and(|last| Arc::ptr_eq(last, range.mapping())) {
            copier.push(to, range.addr(), range.len() as u64);
        } else {
            staged.sources.push(range.mapping().clone());
            copier.push_apart(to, range.addr(), range.len() as u64);
        }
        Ok(at as u32)
    }

    /// Queues the copies of a frame.
    pub(super) fn launch(&mut self, staged: &mut Staged) -> Result<(), CudaError> {
        for copier in self.out.iter_mut().filter(|copier| !copier.is_empty()) {
            // SAFETY: sources are parts of registered mappings, which `staged` holds and a deregistration waits for; the target is a
            // part of its slot that nobody else has. Both are held until the flight is over. A kernel reaches pinned memory.
            let flight = Arc::new(unsafe { copier.launch(true)? });
            staged.sources.iter().for_each(|mapping| mapping.read_by(&flight));
            staged.flights.push(flight);
        }
        Ok(())
    }

    /// Nothing more is sent or received.
    pub(super) fn abandon(&mut self) {
        *self = Self::default();
    }

    /// The slot that is read into next.
    fn room(&mut self, gpu: &Arc<Gpu>) -> Result<(Arc<Slot>, usize), CudaError> {
        if let Some(slot) = &self.slot {
            // Nobody copies from it any more: it is used again while caches know it.
            let filled = if Arc::strong_count(slot) == 1 { 0 } else { self.filled };
            self.filled = filled.next_multiple_of(ALIGNED);
            if self.filled < SLOT_BYTES {
                return Ok((slot.clone(), self.filled));
            }
        }
        let slot = Slot::take(gpu)?;
        (self.slot, self.filled) = (Some(slot.clone()), 0);
        Ok((slot, 0))
    }

    /// Copies `bytes`, which came with a frame, to `range`, which is memory of a GPU, by way of a slot.
    pub(super) fn copy_in(
        &mut self,
        landings: &mut Landings,
        range: MemRange<'_>,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        let Some(memory) = range.device() else { return Ok(()) };
        let mut done = 0;
        while done < bytes.len() {
            let (slot, at) = self.room(memory.gpu())?;
            let part = &bytes[done..bytes.len().min(done + SLOT_BYTES - at)];
            let to = std::ptr::with_exposed_provenance_mut::<u8>(slot.addr() as usize + at);
            // SAFETY: `part` ends before the slot does, and nobody else has what is free of it.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            landings.collect_staged(range.part(done, part.len()), &slot, at)?;
            self.filled = at + part.len();
            done += part.len();
        }
        Ok(())
    }
}

impl Staged {
    fn new(home: Home) -> Self {
        Self { home, filled: 0, flights: Vec::new(), sources: Vec::new(), request: None, sent: (0, 0) }
    }

    /// In a slot that the peer maps.
    pub(super) fn shared(slot: Arc<SharedSlot>) -> Self {
        Self::new(Home::Shared(slot))
    }

    fn addr(&self) -> u64 {
        match &self.home {
            Home::Own(slot) => slot.addr(),
            Home::Shared(slot) => slot.addr(),
        }
    }

    fn size(&self) -> usize {
        match self.home {
            Home::Own(_) => SLOT_BYTES,
            Home::Shared(_) => SHARED_SLOT_BYTES,
        }
    }

    /// Bytes of the slot that are free, from the next place on where a message begins.
    pub(super) fn room(&mut self) -> usize {
        self.filled = self.filled.next_multiple_of(ALIGNED);
        self.size() - self.filled
    }

    /// Where the payload is that travels in the frame. Nothing copies into it any more once `is_over` has said so.
    pub(super) fn slot(&self) -> Option<&Slot> {
        match &self.home {
            Home::Own(slot) => Some(slot),
            Home::Shared(_) => None,
        }
    }

    /// Where the payload is that the peer copies from.
    pub(super) fn shared_slot(&self) -> Option<&Arc<SharedSlot>> {
        match &self.home {
            Home::Own(_) => None,
            Home::Shared(slot) => Some(slot),
        }
    }

    /// Bytes and pieces of memory of GPUs in it.
    pub(super) fn sent(&self) -> (u64, u64) {
        self.sent
    }

    pub(super) fn request(&self) -> Option<u32> {
        self.request
    }

    fn is_over(&mut self) -> Result<bool, CudaError> {
        while let Some(last) = self.flights.last() {
            if !last.is_done()? {
                return Ok(false);
            }
            self.flights.pop();
        }
        self.sources.clear();
        Ok(true)
    }

    /// Waits until it is over. An error is found by the look.
    pub(super) fn wait(&self) {
        self.flights.iter().for_each(|flight| _ = flight.wait());
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Before the slot is another's. Who drops a flight does not wait for it while somebody else has it, too.
        self.wait();
    }
}

/// When to ask whether the copies of the first frame are over: soon at first, and then ever later.
#[derive(Debug, Default)]
pub(super) struct Look {
    since: Option<Instant>,
    next: Option<Instant>,
}

impl Look {
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether the copies of `staged` are over. `alone`: nothing else is to be sent meanwhile, so that it is worth some looks.
    pub(super) fn at(&mut self, staged: &mut Staged, alone: bool) -> Result<bool, CudaError> {
        loop {
            if staged.is_over()? {
                *self = Self::default();
                return Ok(true);
            }
            let now = Instant::now();
            let age: Duration = now - *self.since.get_or_insert(now);
            if !alone || age >= SHORT_LOOKS {
                self.next = Some(now + (age / 16).clamp(FIRST_LOOK, LAST_LOOK));
                return Ok(false);
            }
        }
    }
}

impl QpInner {
    /// Room for payload that goes to memory of `gpu`, found when it is asked for first.
    pub(super) fn room<'r>(
        staging: &mut Staging,
        room: &'r Room,
        gpu: &Arc<Gpu>,
    ) -> Option<(&'r Arc<Slot>, usize)> {
        match room.get_or_init(|| staging.room(gpu)) {
            Ok((slot, at)) => Some((slot, *at)),
            Err(error) => {
                tracing::warn!(%error, "there is no slot to receive payload for memory of a GPU");
                None
            }
        }
    }

    /// The next `n` bytes of the payload of the current descriptor are in `slot` where they go to memory of a GPU, from `at` on: they
    /// are collected. Where the rest of the slot begins.
    pub(super) fn collect_staged(&mut self, slot: &Arc<Slot>, mut at: usize, n: u32) -> Result<usize, Stop> {
        let rx = &self.rx;
        let desc: Desc = rx.descs[rx.at];
        let (landings, mut collected) = (&mut self.landings, Ok(()));
        let guard = self.device.mrs.read();
        memory_of((&guard, &self.reach), &self.sq, &desc, &rx.targets[rx.at], rx.off, n, |range| {
            if range.device().is_some() && collected.is_ok() {
                collected = landings.collect_staged(range, slot, at);
                at += range.len();
            }
        })?;
        drop(guard);
        self.staging.filled = at;
        match collected {
            Ok(()) => Ok(at),
            Err(error) => {
                tracing::warn!(%error, "payload could not be copied to memory of a GPU");
                Err(Stop::unable(&desc))
            }
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::cuda::SlotPool;
    use crate::cuda::fake::Fake;
    use crate::device::{Device, SoftConfig};
    use crate::memory::Memory;

    /// A deregistration that waits for the copies has them for a moment, too.
    #[test]
    fn r1_a_slot_is_given_back_after_the_copies_into_it_whoever_else_has_them() {
        let (cuda, fake) = Fake::new(1);
        let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
        let mapping = Memory::cuda_of(&cuda, 0, 4096).map_for(pd.provider()).unwrap();
        let memory = mapping.device_memory().unwrap();
        // As a registration has it: the slot is given back, and not freed.
        let _pool = SlotPool::of(memory.gpu());
        let mut staged = Staged::new(Home::Own(Slot::take(memory.gpu()).unwrap()));
        let mut copier = Copier::new(memory.gpu().clone()).unwrap();
        fake.hold(true);
        copier.push(staged.addr(), memory.addr(), 4096);
        // SAFETY: the mapping and the slot are there until the end of the test, and all is over before.
        let flight = Arc::new(unsafe { copier.launch(true) }.unwrap());
        staged.flights.push(flight.clone());
        assert_eq!(fake.queued(), 1);
        drop(staged);
        assert_eq!(fake.queued(), 0);
        drop(flight);
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }
}
