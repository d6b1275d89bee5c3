//! Completion queues. Polling one is also what moves data: see `channel.rs`.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{SoftChannel, lock};
use crate::provider::events::ObjectId;
use crate::provider::{Armed, Cqe};

/// A completion queue of a channel.
#[derive(Debug)]
pub(crate) struct SoftCq {
    pub(super) shared: Arc<CqShared>,
    pub(super) id: ObjectId,
}

#[derive(Debug)]
pub(super) struct CqShared {
    pub(super) channel: Arc<SoftChannel>,
    capacity: usize,
    queue: Mutex<Queue>,
    armed: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    cqes: VecDeque<Cqe>,
    overrun: bool,
}

impl CqShared {
    pub(super) fn new(channel: Arc<SoftChannel>, capacity: u32) -> Self {
        let queue = Queue { cqes: VecDeque::with_capacity(capacity.min(4096) as usize), overrun: false };
        Self { channel, capacity: capacity as usize, queue: Mutex::new(queue), armed: AtomicBool::new(false) }
    }

    /// Adds a completion. An armed queue raises its event, once.
    pub(super) fn push(&self, cqe: Cqe) {
        {
            let mut queue = lock(&self.queue);
            if queue.cqes.len() < self.capacity {
                queue.cqes.push_back(cqe);
            } else {
                // The layer above sizes queues so that this cannot happen (R4). If it does, it is told.
                queue.overrun = true;
            }
        }
        self.raise();
    }

    /// Adds a completion of a queue pair that is being destroyed: nobody is owed it, so a full queue drops it.
    pub(super) fn push_stale(&self, cqe: Cqe) {
        let mut queue = lock(&self.queue);
        if queue.cqes.len() < self.capacity {
            queue.cqes.push_back(cqe);
            drop(queue);
            self.raise();
        }
    }

    fn raise(&self) {
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            self.channel.signal();
        }
    }

    fn pop(&self, out: &mut [Cqe]) -> io::Result<usize> {
        let mut queue = lock(&self.queue);
        let n = out.len().min(queue.cqes.len());
        for (slot, cqe) in out.iter_mut().zip(queue.cqes.drain(..n)) {
            *slot = cqe;
        }
        if n == 0 && queue.overrun {
            return Err(io::Error::other("completion queue overrun"));
        }
        Ok(n)
    }

    fn is_empty(&self) -> bool {
        let queue = lock(&self.queue);
        queue.cqes.is_empty() && !queue.overrun
    }
}

impl SoftCq {
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Takes queued completions; when there are none, moves data for one slice and looks again.
    pub(crate) fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        let cq = &self.shared;
        let n = cq.pop(out)?;
        if n > 0 || out.is_empty() {
            cq.channel.awake();
            return Ok(n);
        }
        // What this slice completes is handed out below, so it needs no event.
        let armed = cq.armed.swap(false, Ordering::SeqCst);
        let progress = cq.channel.progress();
        let popped = cq.pop(out);
        if armed {
            cq.armed.store(true, Ordering::SeqCst);
            // Something was left over, or came from another thread while the queue was not armed.
            if !cq.is_empty() {
                cq.raise();
            }
        }
        progress?;
        let n = popped?;
        if n > 0 {
            cq.channel.awake();
        }
        Ok(n)
    }

    pub(crate) fn arm(&self) -> io::Result<Armed> {
        let cq = &self.shared;
        cq.armed.store(true, Ordering::SeqCst);
        if cq.channel.about_to_sleep()? || !cq.is_empty() {
            return Ok(Armed::More);
        }
        Ok(Armed::Armed)
    }
}
