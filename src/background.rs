//! A thread for what blocks and nobody waits for: destroying and deregistering, and compiling for a GPU (R9).
//!
//! A driver may wait in the kernel until a device has let go, and the last user of an object may be dropped on a
//! runtime's worker, or after its runtime has gone. The thread starts with the first job and ends with the last, so that
//! idle costs nothing (R8). Jobs run in the order in which they came.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::Mutex;

type Job = Box<dyn FnOnce() + Send>;

struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
}

#[cfg(not(landfall_loom))]
static QUEUE: Mutex<Queue> = Mutex::new(Queue { jobs: VecDeque::new(), running: false });
// No model runs this: a lock of the model checker cannot be static.
#[cfg(landfall_loom)]
static QUEUE: std::sync::LazyLock<Mutex<Queue>> =
    std::sync::LazyLock::new(|| Mutex::new(Queue { jobs: VecDeque::new(), running: false }));

/// Runs `job` soon, on the thread; on this one when there can be no thread.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    let mut queue = QUEUE.lock();
    queue.jobs.push_back(Box::new(job));
    if queue.running {
        return;
    }
    match std::thread::Builder::new().name("landfall-destroy".to_owned()).spawn(work) {
        Ok(_) => queue.running = true,
        Err(error) => {
            let jobs = std::mem::take(&mut queue.jobs);
            drop(queue);
            tracing::error!(%error, "no thread to destroy resources on: it is done in place, and blocks");
            jobs.into_iter().for_each(guarded);
        }
    }
}

fn work() {
    loop {
        let job = {
            let mut queue = QUEUE.lock();
            let Some(job) = queue.jobs.pop_front() else {
                queue.running = false;
                return;
            };
            job
        };
        guarded(job);
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
}
