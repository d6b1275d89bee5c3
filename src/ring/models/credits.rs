//! Credits of a half: never more posted than the queue holds, and nothing waits for ever.

use loom::thread;

use super::super::slots::Owner;
use super::super::state::WhenFull;
use super::{Model, explore};
use crate::error::OpError;
use crate::sync::Arc;

fn tagged(user_data: u64) -> Owner {
    Owner::Tagged { user_data, submitter: None }
}

fn ends(m: &Arc<Model>) -> Vec<(u64, bool)> {
    let mut ends = Vec::new();
    loop {
        let next = m.ring.lock().take_ready();
        match next {
            Some((user_data, result, _buf)) => ends.push((user_data, result.is_ok())),
            None => return ends,
        }
    }
}

/// Three operations, of two threads, share a queue of one while the driver completes.
#[test]
fn r4_submitters_share_one_credit() {
    explore(|| {
        let m = Model::new(1);
        m.submit(tagged(0)).expect("open");
        let others: Vec<_> = (1..3)
            .map(|n| {
                let m = m.clone();
                thread::spawn(move || m.submit(tagged(n)).expect("open"))
            })
            .collect();
        // The driver, while they submit.
        if let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        for other in others {
            other.join().unwrap();
        }
        while let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        let mut ended = ends(&m);
        ended.sort_unstable();
        assert_eq!(ended, [(0, true), (1, true), (2, true)], "r2: not each once");
        assert!(m.ring.lock().is_drained(m.half), "r4: a credit is missing");
        assert_eq!(m.ring.lock().room(m.half), 1);
        assert_eq!(m.dropped(), 3);
    });
}

/// An operation is submitted while its queue pair is closed: it is refused, or it ends; and the queue pair is destroyed
/// after it.
#[test]
fn r7_what_is_submitted_during_a_close_ends_before_the_destruction() {
    explore(|| {
        let m = Model::new(1);
        let submitter = {
            let m = m.clone();
            thread::spawn(move || {
                let results = [m.submit(tagged(0)), m.submit(tagged(1))];
                results.map(|result| match result {
                    Ok(_) => true,
                    Err(OpError::Closed { .. }) => false,
                    Err(e) => panic!("{e}"),
                })
            })
        };
        m.close();
        let accepted = submitter.join().unwrap();
        while let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        let mut ended: Vec<u64> = ends(&m).iter().map(|e| e.0).collect();
        ended.sort_unstable();
        let want: Vec<u64> = (0..2).filter(|&n| accepted[n as usize]).collect();
        assert_eq!(ended, want, "r2: not each once");
        assert!(m.device.lock().unwrap().destroyed, "r7: never destroyed");
    });
}

/// Two threads that do not wait ask for one credit: one has it, the other is refused, and neither is queued.
#[test]
fn r4_of_two_that_do_not_wait_one_is_refused() {
    explore(|| {
        let m = Model::new(1);
        let now = |m: &Model, n| match m.submit_or(tagged(n), WhenFull::Refuse) {
            Ok(_) => true,
            Err(OpError::Full { .. }) => false,
            Err(e) => panic!("{e}"),
        };
        let other = {
            let m = m.clone();
            thread::spawn(move || now(&m, 0))
        };
        let accepted = [now(&m, 1), other.join().unwrap()];
        assert!(accepted[0] != accepted[1], "r4: {accepted:?}");
        assert_eq!(m.device.lock().unwrap().posted.len(), 1, "r4: queued");
        let cqe = m.finish_one().expect("posted");
        m.complete(&cqe);
        assert_eq!((ends(&m).len(), m.dropped()), (1, 2));
        assert!(m.ring.lock().is_drained(m.half));
    });
}

/// A waiter is cancelled while the driver gives it its turn: it is posted and ends, or it is not; the one behind it has its
/// turn either way.
#[test]
fn r4_a_waiter_that_leaves_holds_nobody_up() {
    explore(|| {
        let m = Model::new(1);
        m.submit(tagged(0)).expect("open");
        let leaves = m.submit(Owner::Future(None)).expect("open");
        m.submit(tagged(2)).expect("open");
        let leaver = {
            let m = m.clone();
            thread::spawn(move || m.abandon(leaves))
        };
        if let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        leaver.join().unwrap();
        while let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        assert_eq!(ends(&m), [(0, true), (2, true)]);
        assert_eq!(m.dropped(), 3, "r1: leaked, or dropped twice");
        assert!(m.ring.lock().is_drained(m.half), "r4: a credit is missing");
    });
}
