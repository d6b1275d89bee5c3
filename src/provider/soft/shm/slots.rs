//! Slots of a connection: what its memory of GPUs is staged through, where the peer does not open that memory itself.
//!
//! They are one memfd that both processes have mapped and their drivers have pinned. The sender's GPU copies to a slot, a reference to it
//! travels when that is over, and the receiver's GPU copies from there: no processor copies, and the target's owner moves the
//! data, as ever. What the receiver says it is done with frees the slot.
//!
//! Only this side can write them (the memfd is sealed), and no other connection has them: a peer that says that it is done and is not
//! spoils what it is sent itself. They are made, off the workers, when a connection stages first, and freed with its end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::super::lock;
use super::super::tuning::{SHARED_SLOT_BYTES, SHARED_SLOTS};
use super::map::SharedMap;
use super::ring::is_past;
use crate::background;
use crate::cuda::{CudaError, Gpu, Pinned};
use crate::memory::next_name;

/// Bytes of all of them: what the peer maps.
pub(super) const SLOTS_BYTES: u64 = (SHARED_SLOT_BYTES * SHARED_SLOTS) as u64;

/// How often to look whether they are made.
const MAKING_LOOK: Duration = Duration::from_millis(1);

/// All slots of a connection.
#[derive(Debug)]
pub(in crate::provider::soft) struct Slots {
    /// Names the memfd, in the numbers of those of regions.
    name: u64,
    fd: OwnedFd,
    free: Mutex<Vec<usize>>,
    at: u64,
    /// Until they are let go, elsewhere.
    memory: Option<Memory>,
}

impl Slots {
    /// It takes milliseconds.
    fn make(gpu: &Arc<Gpu>) -> Result<Arc<Self>, CudaError> {
        let none = |e: io::Error| CudaError::NoSlots { bytes: SLOTS_BYTES, reason: e.to_string() };
        let (map, fd) = SharedMap::create_ours(SLOTS_BYTES as usize).map_err(none)?;
        let at = map.addr();
        // SAFETY: a mapping of whole pages, which is kept beside it and ends after it.
        let pinned = unsafe { Pinned::new(gpu, at, SLOTS_BYTES as usize, false)? };
        let free = Mutex::new((0..SHARED_SLOTS).rev().collect());
        Ok(Arc::new(Self { name: next_name(), fd, free, at, memory: Some(Memory { pinned, _map: map }) }))
    }

    pub(super) fn name(&self) -> u64 {
        self.name
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn take(self: &Arc<Self>) -> Option<SharedSlot> {
        let n = lock(&self.free).pop()?;
        Some(SharedSlot { n, slots: self.clone() })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let lane = memory.pinned.gpu().lane().clone();
            lane.run(move || drop(memory));
        }
    }
}

/// Their pages. They stay mapped while they are pinned: what is named first goes first.
#[derive(Debug)]
struct Memory {
    pinned: Pinned,
    _map: SharedMap,
}

/// One of them. Whoever has it, and the flights that name it, use it alone; so does the peer while it is lent.
#[derive(Debug)]
pub(in crate::provider::soft) struct SharedSlot {
    n: usize,
    slots: Arc<Slots>,
}

impl SharedSlot {
    /// Where it begins in this process.
    pub(in crate::provider::soft) fn addr(&self) -> u64 {
        self.slots.at + self.offset()
    }

    /// Where it begins in the memfd.
    pub(super) fn offset(&self) -> u64 {
        (self.n * SHARED_SLOT_BYTES) as u64
    }

    pub(super) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }
}

impl Drop for SharedSlot {
    fn drop(&mut self) {
        lock(&self.slots.free).push(self.n);
    }
}

/// What comes of making them.
type Made = Arc<OnceLock<Result<Arc<Slots>, CudaError>>>;

/// The slots of a queue pair, and which of them its peer may be reading.
#[derive(Debug, Default)]
pub(in crate::provider::soft) struct Lendable {
    made: Option<Made>,
    /// In the order in which they were lent: the slot, and the count of the ring at which the peer is done with it.
    lent: VecDeque<(u64, Arc<SharedSlot>)>,
    /// What is to be sent waits for one.
    waits: bool,
}

impl Lendable {
    /// A free slot. `None` where there is none now, or they are being made.
    pub(in crate::provider::soft) fn take(
        &mut self,
        gpu: &Arc<Gpu>,
    ) -> Result<Option<Arc<SharedSlot>>, CudaError> {
        let made = self.made.get_or_insert_with(|| {
            let made = Made::default();
            let (cell, gpu) = (made.clone(), gpu.clone());
            background::run_apart(move || {
                // Nobody waits for it any more.
                if Arc::strong_count(&cell) > 1 {
                    let slots = Slots::make(&gpu);
                    gpu.slots_made(slots.as_ref().err());
                    let _ = cell.set(slots);
                }
            });
            made
        });
        let slot = match made.get() {
            None => None,
            Some(Ok(slots)) => slots.take(),
            // The connection ends by it. Its GPU knows for a while, so that what is posted meanwhile on others is refused alone.
            Some(Err(error)) => return Err(error.clone()),
        };
        self.waits = slot.is_none();
        Ok(slot.map(Arc::new))
    }

    /// The peer reads `slot` until it is done with the first `end` bytes that were put into the ring.
    pub(in crate::provider::soft) fn lend(&mut self, slot: Arc<SharedSlot>, end: u64) {
        self.lent.push_back((end, slot));
    }

    /// The peer says that it is done with the first `done` bytes: its own word, which only its own payload depends on.
    pub(in crate::provider::soft) fn reclaim(&mut self, done: u64) {
        while self.lent.pop_front_if(|(end, _)| is_past(done, *end)).is_some() {
            self.waits = false;
        }
        // Nothing comes back that it could wait for: it is tried again, unless they are still being made.
        self.waits &= !self.lent.is_empty() || self.is_making();
    }

    /// Whether what is to be sent waits for a slot.
    pub(in crate::provider::soft) fn is_waiting(&self) -> bool {
        self.waits
    }

    /// At which count of the ring the peer is done with the first of them, for who waits for that.
    pub(in crate::provider::soft) fn awaited(&self) -> Option<u64> {
        self.lent.front().filter(|_| self.waits).map(|(end, _)| *end)
    }

    fn is_making(&self) -> bool {
        self.made.as_ref().is_some_and(|made| made.get().is_none())
    }

    /// The peer cannot be told of them now.
    pub(super) fn wait(&mut self) {
        self.waits = true;
    }

    /// When to try again, for who waits and is not told: while they are being made, above all.
    pub(in crate::provider::soft) fn next_look(&self) -> Option<Instant> {
        (self.waits && self.lent.is_empty()).then(|| Instant::now() + MAKING_LOOK)
    }
}
