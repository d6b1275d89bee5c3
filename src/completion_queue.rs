//! Completion queues: the public handle. The work is in `ring` and `reactor`.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::error::DeviceError;
use crate::ring::{Completion, CqCore, CqStats};

/// How a completion queue is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CqConfig {
    /// Entries. At least the sum of the send and receive depths of the queue pairs that it is to serve.
    pub capacity: u32,
    /// How long an await polls the queue before it sleeps. Zero, the default, never spins. While it lasts the worker
    /// thread does nothing else: on a `current_thread` runtime that is everything.
    pub spin: Duration,
}

impl CqConfig {
    /// A queue of `capacity` entries that does not spin.
    pub fn new(capacity: u32) -> Self {
        Self { capacity, spin: Duration::ZERO }
    }

    /// Sets the spin budget.
    pub fn spin(mut self, budget: Duration) -> Self {
        self.spin = budget;
        self
    }
}

impl Default for CqConfig {
    fn default() -> Self {
        Self::new(1024)
    }
}

/// A completion queue, with the task that drives it. Cheap to clone; clones are the same queue.
///
/// It lives as long as a handle or a queue pair of it does. When its runtime goes away, its operations end with
/// [`OpError::RuntimeGone`](crate::error::OpError::RuntimeGone).
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    handle: Arc<Handle>,
}

/// The last handle closes the queue; its driver ends after the last queue pair.
#[derive(Debug)]
struct Handle {
    core: Arc<CqCore>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.close(false);
    }
}

impl CompletionQueue {
    /// Creates a queue and starts its driver task on the current runtime, which needs I/O and time enabled.
    ///
    /// It asks the driver, which takes microseconds, or milliseconds on a busy device: where a worker must not wait for
    /// that, call it in `spawn_blocking`.
    ///
    /// # Errors
    /// [`DeviceError::Limit`] for a capacity of zero or above the device's, [`DeviceError::NoRuntime`],
    /// [`DeviceError::DeviceGone`], and [`DeviceError::Os`].
    pub fn new(device: &Device, config: CqConfig) -> Result<Self, DeviceError> {
        let CqConfig { capacity, spin } = config;
        let limit = device.capabilities().max_cqe.min(crate::ring::MAX_CQ_ENTRIES);
        let refused = |fix| DeviceError::Limit {
            what: "the entries of a completion queue",
            asked: u64::from(capacity),
            limit: u64::from(limit),
            fix,
        };
        if capacity == 0 {
            return Err(refused("ask for at least one"));
        }
        if capacity > limit {
            return Err(refused("ask for fewer, and use more completion queues"));
        }
        let core = CqCore::start(device, capacity, spin)?;
        Ok(Self { handle: Arc::new(Handle { core }) })
    }

    /// The next completion of an operation that was submitted in a batch. `None` when there will be none: the queue
    /// is closed or its runtime is gone, and no such operation is left.
    ///
    /// Waits when nothing was submitted. Any number of tasks may call it; each completion goes to one of them.
    ///
    /// # Cancel safety
    /// A call that is dropped takes no completion.
    pub async fn next(&self) -> Option<Completion> {
        poll_fn(|cx| self.core().poll_next(cx)).await
    }

    /// The next completion, if one is ready. Does not poll the device: the driver does.
    pub fn try_next(&self) -> Option<Completion> {
        self.core().try_next()
    }

    /// Entries.
    pub fn capacity(&self) -> u32 {
        self.core().capacity
    }

    /// Its counters.
    pub fn stats(&self) -> CqStats {
        self.core().ring.lock().stats
    }

    /// Closes the queue and its queue pairs, and waits until they are destroyed. Their operations end with
    /// [`OpError::Closed`](crate::error::OpError::Closed) where they had not succeeded. Completions that are ready
    /// can still be taken.
    ///
    /// # Cancel safety
    /// It is closed at the first poll; dropping the future only stops waiting.
    pub async fn close(&self) {
        self.core().close(true);
        self.core().drained().await;
    }

    pub(crate) fn core(&self) -> &Arc<CqCore> {
        &self.handle.core
    }
}
