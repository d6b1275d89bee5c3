//! A driver that sleeps, and a device that completes meanwhile.

use std::io;

use loom::sync::Mutex;
use loom::sync::Notify;
use loom::thread;

use super::super::poll::{Found, Polled, poll_and_arm};
use super::explore;
use crate::provider::Armed;
use crate::reactor::Step;
use crate::sync::Arc;

/// A completion queue with its event, as verbs has them: an arm is for one event, and only for what comes after it.
struct Queue {
    cqes: Mutex<(u32, bool)>,
    event: Notify,
}

impl Queue {
    fn push(&self) {
        let mut state = self.cqes.lock().unwrap();
        state.0 += 1;
        let armed = std::mem::take(&mut state.1);
        drop(state);
        if armed {
            self.event.notify();
        }
    }
}

struct Driver {
    queue: Arc<Queue>,
    absorbed: u32,
}

impl Polled for Driver {
    fn poll(&mut self) -> io::Result<Found> {
        let taken = std::mem::take(&mut self.queue.cqes.lock().unwrap().0);
        self.absorbed += taken;
        Ok(if taken == 0 { Found::Nothing } else { Found::Some })
    }

    fn was_empty(&mut self) {}

    fn arm(&mut self) -> io::Result<Armed> {
        self.queue.cqes.lock().unwrap().1 = true;
        Ok(Armed::Armed)
    }
}

/// The reactor's rule: it sleeps after `Idle` only. Completions come one by one; none is left behind.
#[test]
fn r3_no_completion_is_left_behind_an_arm() {
    const CQES: u32 = 3;
    explore(|| {
        let queue = Arc::new(Queue { cqes: Mutex::new((0, false)), event: Notify::new() });
        let device = {
            let queue = queue.clone();
            thread::spawn(move || (0..CQES).for_each(|_| queue.push()))
        };
        let mut driver = Driver { queue, absorbed: 0 };
        while driver.absorbed < CQES {
            let step = poll_and_arm(&mut driver, 4, true).expect("it polls");
            if step == Step::Idle && driver.absorbed < CQES {
                driver.queue.event.wait();
            }
        }
        device.join().unwrap();
    });
}
