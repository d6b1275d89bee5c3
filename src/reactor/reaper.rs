//! The reaper: a thread that finishes what a vanished runtime left behind (R7).
//!
//! Work requests that were posted are still the device's; their memory can go only after they have completed. The
//! thread polls the channels that it was given and drives their owners until they are drained, within a patience; it
//! starts with the first channel and ends with the last, so that idle costs nothing (R8).

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Drive, Step};
use crate::provider::Channel;
use crate::sync::{Mutex, guarded};

/// How long a channel may take to drain before its queue pairs are destroyed as they are.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one wait may last: a channel that is given meanwhile is seen by then.
const NAP_MS: libc::c_int = 20;

struct Job {
    channel: Channel,
    drive: Arc<dyn Drive>,
    until: Instant,
}

struct Inbox {
    jobs: Vec<Job>,
    running: bool,
}

#[cfg(not(landfall_loom))]
static INBOX: Mutex<Inbox> = Mutex::new(Inbox { jobs: Vec::new(), running: false });
// No model runs this: a lock of the model checker cannot be static.
#[cfg(landfall_loom)]
static INBOX: std::sync::LazyLock<Mutex<Inbox>> =
    std::sync::LazyLock::new(|| Mutex::new(Inbox { jobs: Vec::new(), running: false }));

/// Takes over a channel whose driver task is gone.
pub(super) fn adopt(channel: Channel, drive: Arc<dyn Drive>) {
    let job = Job { channel, drive, until: Instant::now() + PATIENCE };
    let mut inbox = INBOX.lock();
    inbox.jobs.push(job);
    if inbox.running {
        return;
    }
    match std::thread::Builder::new().name("landfall-reaper".to_owned()).spawn(run) {
        Ok(_) => inbox.running = true,
        Err(error) => {
            let jobs = std::mem::take(&mut inbox.jobs);
            drop(inbox);
            tracing::error!(%error, "no reaper thread: queue pairs are destroyed without being drained");
            jobs.iter().for_each(|job| job.drive.abandon());
        }
    }
}

fn run() {
    let mut jobs: Vec<Job> = Vec::new();
    loop {
        {
            let mut inbox = INBOX.lock();
            jobs.append(&mut inbox.jobs);
            if jobs.is_empty() {
                inbox.running = false;
                return;
            }
        }
        let mut busy = false;
        let over = jobs.extract_if(.., |job| match job.guarded_slice() {
            Some(step) => {
                busy |= step == Step::More;
                false
            }
            None => true,
        });
        // Completions that nobody takes any more go with their queue, and their buffers.
        over.for_each(|job| guarded(|| drop(job)));
        if !busy && !jobs.is_empty() {
            sleep(&jobs);
        }
    }
}

impl Job {
    /// As [`slice`](Self::slice). Wakers and the drops of buffers are the user's code: a panic of one ends its own job, and
    /// not the thread that every other one relies on.
    fn guarded_slice(&self) -> Option<Step> {
        let caught = |f: &dyn Fn() -> Option<Step>| catch_unwind(AssertUnwindSafe(f));
        caught(&|| self.slice()).unwrap_or_else(|_| {
            tracing::error!(
                "a waker or a buffer's owner panicked while queue pairs drained: they are destroyed"
            );
            let _ = caught(&|| {
                self.drive.abandon();
                None
            });
            None
        })
    }

    /// One slice of work, or `None` when there is nothing left to do.
    fn slice(&self) -> Option<Step> {
        if let Err(error) = self.channel.drain_events() {
            tracing::error!(%error, "a completion channel failed: queue pairs are destroyed without being drained");
            self.drive.abandon();
            return None;
        }
        let now = Instant::now();
        let step = self.drive.drive(now);
        if step == Step::Done || self.drive.is_drained() {
            return None;
        }
        if now >= self.until {
            tracing::warn!("queue pairs did not drain within {PATIENCE:?}: destroyed as they are");
            self.drive.abandon();
            return None;
        }
        Some(step)
    }
}

fn sleep(jobs: &[Job]) {
    let mut fds: Vec<libc::pollfd> = jobs
        .iter()
        .map(|job| libc::pollfd { fd: job.channel.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    // SAFETY: the pointer and the length are of one live vector. An error (EINTR) only ends the nap early.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, NAP_MS) };
}
