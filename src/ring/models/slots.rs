//! The life of a slot and of the buffer in it.

use loom::thread;

use super::super::slots::Owner;
use super::{Model, explore};
use crate::provider::{Cqe, WcStatus};

/// A future is dropped while its operation completes: the buffer goes once, and not before the completion.
#[test]
fn r1_a_buffer_outlives_a_dropped_future() {
    explore(|| {
        let m = Model::new(2);
        let key = m.submit(Owner::Future(None)).expect("open");
        let dropper = {
            let m = m.clone();
            thread::spawn(move || m.abandon(key))
        };
        // Not before the device is done with it: this is where it can go wrong.
        let before = m.dropped();
        let cqe = m.finish_one().expect("posted");
        assert_eq!(before, 0, "r1: dropped while the device had it");
        m.complete(&cqe);
        dropper.join().unwrap();
        assert_eq!(m.dropped(), 1, "r1: leaked, or dropped twice");
        assert!(m.ring.lock().is_drained(m.half));
    });
}

/// A slot is used again while the completion of its earlier use is still about.
#[test]
fn r5_a_stale_completion_ends_nothing() {
    explore(|| {
        let m = Model::new(1);
        let first = m.submit(Owner::Future(None)).expect("open");
        m.abandon(first);
        let cqe = m.finish_one().expect("posted");
        m.complete(&cqe);
        // The same slot, in its second use, on another thread; a device that repeats itself on this one.
        let user = {
            let m = m.clone();
            thread::spawn(move || m.submit(Owner::Future(None)).expect("open"))
        };
        m.complete(&Cqe { wr_id: cqe.wr_id, status: WcStatus::Success, ..Cqe::default() });
        let second = user.join().unwrap();
        assert_eq!(first.index, second.index);
        assert!(!m.ring.lock().is_done(second), "r5: ended by a foreign completion");
        assert_eq!(m.ring.lock().stats.stale, 1);
        let cqe = m.finish_one().expect("posted");
        m.complete(&cqe);
        assert!(m.ring.lock().is_done(second));
        m.abandon(second);
        assert_eq!(m.dropped(), 2);
    });
}
