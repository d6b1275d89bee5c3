//! The hand-off of wakers between tasks and the driver.

use std::sync::Arc as StdArc;
use std::task::{Poll, Wake, Waker};

use loom::future::block_on;
use loom::thread;

use super::super::slots::Owner;
use super::super::wr_id::Key;
use super::{Fx, Model, explore};
use crate::sync::Arc;

/// `OpFuture`: waits for the operation of `key` on the current task.
async fn wait(m: &Model, key: Key) {
    std::future::poll_fn(|cx| {
        let mut fx = Fx::default();
        let out = m.ring.lock().poll_op(key, cx.waker(), &mut fx);
        fx.fire();
        match out {
            Some((result, buf)) => {
                result.expect("it succeeded");
                assert!(buf.is_some(), "r1: the buffer comes back");
                Poll::Ready(())
            }
            None => Poll::Pending,
        }
    })
    .await
}

/// Two operations complete while one task waits for one after the other: it does not sleep for ever.
#[test]
fn r3_a_task_that_waits_is_woken() {
    explore(|| {
        let m = Model::new(2);
        let keys =
            [m.submit(Owner::Future(None)).expect("open"), m.submit(Owner::Future(None)).expect("open")];
        let driver = {
            let m = m.clone();
            thread::spawn(move || {
                while let Some(cqe) = m.finish_one() {
                    m.complete(&cqe);
                }
            })
        };
        block_on(async {
            for key in keys {
                wait(&m, key).await;
            }
        });
        driver.join().unwrap();
        assert_eq!(m.dropped(), 2);
    });
}

/// The future moves to another task while the operation completes: the task that polled last is woken.
#[test]
fn r3_the_last_task_that_polled_is_woken() {
    struct Nobody;
    impl Wake for Nobody {
        fn wake(self: StdArc<Self>) {}
    }
    explore(|| {
        let m = Model::new(1);
        let key = m.submit(Owner::Future(None)).expect("open");
        let driver = {
            let m = m.clone();
            thread::spawn(move || m.complete(&m.finish_one().expect("posted")))
        };
        let mut fx = Fx::default();
        let polled = m.ring.lock().poll_op(key, &Waker::from(StdArc::new(Nobody)), &mut fx);
        fx.fire();
        if polled.is_none() {
            block_on(wait(&m, key));
        }
        driver.join().unwrap();
    });
}

/// A waker is the user's code: it may come back into the ring when it fires, and when it is dropped.
#[test]
fn r3_wakers_fire_and_drop_outside_of_the_lock() {
    struct Reenters(Arc<Model>);
    impl Reenters {
        fn look(&self) {
            // Under the ring's lock: a deadlock.
            drop(self.0.ring.lock());
        }
    }
    impl Wake for Reenters {
        fn wake(self: StdArc<Self>) {
            self.look();
        }
    }
    impl Drop for Reenters {
        fn drop(&mut self) {
            self.look();
        }
    }
    explore(|| {
        let m = Model::new(1);
        let key = m.submit(Owner::Future(None)).expect("open");
        let driver = {
            let m = m.clone();
            thread::spawn(move || m.complete(&m.finish_one().expect("posted")))
        };
        // Two tasks poll, one after the other; then the future is dropped.
        let mut pending = true;
        for _ in 0..2 {
            let waker = Waker::from(StdArc::new(Reenters(m.clone())));
            let mut fx = Fx::default();
            let polled = pending.then(|| m.ring.lock().poll_op(key, &waker, &mut fx)).flatten();
            pending &= polled.is_none();
            fx.fire();
        }
        if pending {
            m.abandon(key);
        }
        driver.join().unwrap();
        assert_eq!(m.dropped(), 1);
    });
}
