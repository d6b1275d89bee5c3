//! Credits of a half: never more posted than the queue holds, and nothing waits for ever.

use loom::thread;

use super::super::slots::Owner;
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
