//! The thread that waits for a device's events: one an opened device, asleep until there is one.
//!
//! A thread, and not a task: a device belongs to no runtime, and what its events end must end whichever runtime still
//! runs. Its descriptors have this one waiter. They are edge-triggered: behind one edge everything is taken, until the
//! source would block, and tokio's cached readiness is cleared only after that (R3).

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak, mpsc};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
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
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let (tell, told) = mpsc::channel();
    let thread = std::thread::Builder::new().name("landfall-events".to_owned());
    // The runtime lives and ends on its thread: a worker of another one may not drop it, on the ways of errors neither.
    thread.spawn(move || match prepare(source, descriptors) {
        Ok(runtime) => {
            let _ = tell.send(Ok(()));
            runtime.block_on(stopped.notified());
        }
        Err(error) => {
            let _ = tell.send(Err(error));
        }
    })?;
    match told.recv() {
        Ok(ready) => ready.map(|()| Watch { stop }),
        Err(_) => Err(io::Error::other("the thread that waits for a device's events has panicked")),
    }
}

fn prepare(source: Weak<dyn EventSource>, descriptors: Vec<OwnedFd>) -> io::Result<Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    for descriptor in descriptors {
        // SAFETY: the descriptor is owned by the `AsyncFd`, which gives it to nobody.
        let io = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
        runtime.spawn(wait(io, source.clone()));
    }
    drop(_entered);
    Ok(runtime)
}

async fn wait(io: AsyncFd<OwnedFd>, source: Weak<dyn EventSource>) {
    // The registration reports what was there before it.
    loop {
        let Ok(mut guard) = io.readable().await else { return };
        let Some(source) = source.upgrade() else { return };
        // Wakers and the drops of buffers are the user's code: a panic of one does not end this waiter.
        if catch_unwind(AssertUnwindSafe(|| source.drain())).is_err() {
            tracing::error!("a waker or a buffer's owner panicked while a device's events were passed on");
            // What the source still had is taken now: it may be behind the same edge.
            continue;
        }
        guard.clear_ready();
    }
}
