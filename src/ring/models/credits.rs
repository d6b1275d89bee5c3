//! Credits of a half: never more posted than the queue holds, and nothing waits for ever.

use std::sync::atomic::Ordering;

use loom::thread;

use super::super::slots::Owner;
use super::{Fx, Model, explore};
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

/// Two threads submit to a queue of one while the driver completes.
#[test]
fn r4_two_submitters_share_one_credit() {
    explore(2, || {
        let m = Model::new(1);
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
        assert_eq!(ended, [(1, true), (2, true)], "r2: not each once");
        assert!(m.ring.lock().is_drained(m.half), "r4: a credit is missing");
        assert_eq!(m.ring.lock().room(m.half), 1);
        assert_eq!(m.dropped(), 2);
    });
}

/// An operation is submitted while its queue pair is closed: it is refused, or it ends.
#[test]
fn r2_what_is_submitted_during_a_close_ends() {
    explore(3, || {
        let m = Model::new(1);
        m.submit(tagged(0)).expect("open");
        let submitter = {
            let m = m.clone();
            thread::spawn(move || match m.submit(tagged(1)) {
                Ok(_) => true,
                Err(OpError::Closed { .. }) => false,
                Err(e) => panic!("{e}"),
            })
        };
        // `QpCore::close`.
        m.tie.closing.store(true, Ordering::Release);
        let mut fx = Fx::default();
        m.ring.lock().end_queued(m.half, &mut fx);
        m.settle(&mut fx);
        let accepted = submitter.join().unwrap();
        while let Some(cqe) = m.finish_one() {
            m.complete(&cqe);
        }
        let mut ended = ends(&m);
        ended.sort_unstable();
        let others: Vec<u64> = ended.iter().map(|e| e.0).collect();
        assert_eq!(others, if accepted { vec![0, 1] } else { vec![0] }, "r2: it never ended");
        assert!(m.ring.lock().is_drained(m.half));
    });
}
