//! The thread that waits for a device's events: one an opened device, asleep until there is one.
//!
//! A thread, and not a task: a device belongs to no runtime, and what its events end must end whichever runtime still
//! runs. Its descriptors have this one waiter. They are edge-triggered: behind one edge everything is taken, until the
//! source would block, and tokio's cached readiness is cleared only after that (R3).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// Where events come from.
pub(crate) trait EventSource: Send + Sync + 'static {
    /// Takes every event that there is, until its descriptors would block, and passes it on. Does not block.
    fn drain(&self);
}

/// Ends the thread when dropped, without waiting for it.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<Notify>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.notify_one();
    }
}

/// Has `source` drained whenever one of `descriptors`, which are copies of its own, becomes readable. Does not keep it
/// alive.
pub(crate) fn watch(source: Weak<dyn EventSource>, descriptors: Vec<OwnedFd>) -> io::Result<Watch> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    {
        let _entered = runtime.enter();
        for descriptor in descriptors {
            // SAFETY: the descriptor is owned by the `AsyncFd`, which gives it to nobody.
            let io = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
            runtime.spawn(wait(io, source.clone()));
        }
    }
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let thread = std::thread::Builder::new().name("landfall-events".to_owned());
    thread.spawn(move || runtime.block_on(stopped.notified()))?;
    Ok(Watch { stop })
}

async fn wait(io: AsyncFd<OwnedFd>, source: Weak<dyn EventSource>) {
    // The registration reports what was there before it.
    loop {
        let Ok(mut guard) = io.readable().await else { return };
        let Some(source) = source.upgrade() else { return };
        source.drain();
        guard.clear_ready();
    }
}
