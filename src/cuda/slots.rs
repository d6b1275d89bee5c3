//! Slots: pieces of pinned host memory that what is staged passes through, of one size, made once and used again.
//!
//! Copies to and from pinned memory run beside the program. A GPU's slots are in one pool, which lives as long as somebody has memory
//! of that GPU registered, or a slot; with it they are freed. A slot that nobody has any more is back in it.

use std::sync::{Arc, Mutex};

use super::SLOT_BYTES;
use super::context::{Gpu, lock};
use super::error::CudaError;

/// Slots that a pool keeps while nobody uses them.
const KEPT: usize = 32;

/// The slots of a GPU that are not in use.
#[derive(Debug)]
pub(crate) struct SlotPool {
    gpu: Arc<Gpu>,
    free: Mutex<Vec<u64>>,
}

impl SlotPool {
    /// The pool of `gpu`, which is made when it is asked for first.
    pub(crate) fn of(gpu: &Arc<Gpu>) -> Arc<Self> {
        let mut known = lock(&gpu.slots);
        known.upgrade().unwrap_or_else(|| {
            let this = Arc::new(Self { gpu: gpu.clone(), free: Mutex::default() });
            *known = Arc::downgrade(&this);
            this
        })
    }

    /// Makes slots until so many are free. It takes a good part of a millisecond a slot.
    pub(crate) fn prepare(&self, count: usize) -> Result<(), CudaError> {
        while lock(&self.free).len() < count.min(KEPT) {
            let at = self.make()?;
            lock(&self.free).push(at);
        }
        Ok(())
    }

    fn make(&self) -> Result<u64, CudaError> {
        self.gpu.enter()?.driver().host_alloc(SLOT_BYTES)
    }

    fn unmake(&self, slots: impl IntoIterator<Item = u64>) {
        let Ok(current) = self.gpu.enter() else { return };
        slots.into_iter().for_each(|at| current.driver().host_free(at));
    }
}

impl Drop for SlotPool {
    fn drop(&mut self) {
        let free = std::mem::take(&mut *lock(&self.free));
        self.unmake(free);
    }
}

/// `SLOT_BYTES` of pinned host memory. Whoever has it, and the flights that name it, use it alone.
#[derive(Debug)]
pub(crate) struct Slot {
    at: u64,
    pool: Arc<SlotPool>,
}

impl Slot {
    /// One of the pool of `gpu`, or a new one.
    pub(crate) fn take(gpu: &Arc<Gpu>) -> Result<Arc<Self>, CudaError> {
        let pool = SlotPool::of(gpu);
        let free = lock(&pool.free).pop();
        let at = match free {
            Some(at) => at,
            None => pool.make()?,
        };
        Ok(Arc::new(Self { at, pool }))
    }

    /// Where it begins.
    pub(crate) fn addr(&self) -> u64 {
        self.at
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut free = lock(&self.pool.free);
            if free.len() < KEPT {
                return free.push(self.at);
            }
        }
        self.pool.unmake([self.at]);
    }
}
