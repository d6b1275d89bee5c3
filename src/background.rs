//! Threads for what blocks and nobody waits for: destroying and deregistering, and compiling for a GPU (R9).
//!
//! A driver may wait in the kernel until a device has let go, and the last user of an object may be dropped on a
//! runtime's worker, or after its runtime has gone. What may have to wait for a device goes to a [`Lane`] of that device, so that one
//! that hangs holds up no other; the rest has one together. The thread of a lane starts with the first job and ends with the last, so
//! that idle costs nothing (R8). Jobs of a lane run in the order in which they came.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use crate::sync::{Arc, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// Jobs that run one after the other, on a thread that there is while there are any.
pub(crate) struct Lane {
    queue: Mutex<Queue>,
}

struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
}

static SHARED: LazyLock<Arc<Lane>> = LazyLock::new(|| Arc::new(Lane::new()));

/// Runs `job` soon, on the lane for what waits for no device.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    SHARED.run(job);
}

/// Runs `job` soon, on a lane of its own: what somebody waits for, and what takes its time.
pub(crate) fn run_apart(job: impl FnOnce() + Send + 'static) {
    Arc::new(Lane::new()).run(job);
}

impl Lane {
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::new(Queue { jobs: VecDeque::new(), running: false }) }
    }

    /// Runs `job` soon, on the thread; on this one when there can be no thread.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(Box::new(job));
        if queue.running {
            return;
        }
        let lane = self.clone();
        match std::thread::Builder::new().name("landfall-destroy".to_owned()).spawn(move || lane.work()) {
            Ok(_) => queue.running = true,
            Err(error) => {
                let jobs = std::mem::take(&mut queue.jobs);
                drop(queue);
                tracing::error!(%error, "no thread to destroy resources on: it is done in place, and blocks");
                jobs.into_iter().for_each(guarded);
            }
        }
    }

    fn work(&self) {
        loop {
            let job = {
                let mut queue = self.queue.lock();
                let Some(job) = queue.jobs.pop_front() else {
                    queue.running = false;
                    return;
                };
                job
            };
            guarded(job);
        }
    }
}

/// Wakers and the drops of buffers are the user's code: a panic of one does not end the thread that the others rely on.
fn guarded(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a waker or a buffer's owner panicked while resources were destroyed");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn r9_jobs_run_in_order_elsewhere_and_a_panic_harms_no_other() {
        let (tell, told) = mpsc::channel();
        for i in 0..100 {
            let tell = tell.clone();
            run(move || {
                tell.send((i, std::thread::current().id())).unwrap();
                assert!(i != 50, "a job that fails");
            });
        }
        drop(tell);
        let here = std::thread::current().id();
        for i in 0..100 {
            let (job, thread) = told.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(job, i);
            assert_ne!(thread, here);
        }
        told.recv_timeout(Duration::from_secs(60)).unwrap_err();
    }

    /// K5, K10: a device whose driver does not come back keeps nobody else's queue pairs from being destroyed.
    #[test]
    fn k10_a_lane_that_hangs_holds_up_no_other() {
        let (hung, fine) = (Arc::new(Lane::new()), Arc::new(Lane::new()));
        let (end, ended) = mpsc::channel::<()>();
        hung.run(move || {
            let _ = ended.recv();
        });
        let (tell, told) = mpsc::channel();
        let also = tell.clone();
        fine.run(move || tell.send("another device").unwrap());
        run(move || also.send("no device").unwrap());
        let mut heard = [0, 1].map(|_| told.recv_timeout(Duration::from_secs(60)).unwrap());
        heard.sort();
        assert_eq!(heard, ["another device", "no device"]);
        drop(end);
    }
}
