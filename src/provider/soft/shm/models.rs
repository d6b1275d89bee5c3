//! Models of `fence.rs` under loom: every interleaving of the two sides.
//!
//! | contract | broken by |
//! |---|---|
//! | R1: a copy that saw bytes of after the end is not executed | `close` without its fence, or `is_sound` without |
//! | R3: a change beside a sleep is seen or told | `must_wake` or `fall_asleep` without its fence |

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

use super::fence::{close, fall_asleep, is_sound, must_wake};

/// The owner ends and uses its source for something else; the peer copies meanwhile.
#[test]
fn r1_a_copy_that_saw_the_reuse_of_its_source_is_not_sound() {
    loom::model(|| {
        let shared = Arc::new((AtomicU32::new(0), AtomicU32::new(1)));
        let owner = {
            let shared = shared.clone();
            thread::spawn(move || {
                close(&shared.0);
                shared.1.store(2, Ordering::Relaxed);
            })
        };
        let copied = shared.1.load(Ordering::Relaxed);
        let sound = is_sound(&shared.0);
        assert!(copied == 1 || !sound, "r1: executed with the bytes of another use");
        owner.join().unwrap();
    });
}

/// Two changes, each told if the peer sleeps; a sleeper that looks again before it sleeps.
#[test]
fn r3_a_change_beside_a_sleep_is_seen_or_told() {
    struct Shared {
        head: AtomicU32,
        sleeping: AtomicU32,
        event: Notify,
    }
    loom::model(|| {
        let (head, sleeping) = (AtomicU32::new(0), AtomicU32::new(0));
        let shared = Arc::new(Shared { head, sleeping, event: Notify::new() });
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || {
                for n in 1..=2 {
                    shared.head.store(n, Ordering::Release);
                    if must_wake(&shared.sleeping, 1) {
                        shared.event.notify();
                    }
                }
            })
        };
        // A wake-up that is not told leaves it in `wait` for ever, which loom reports.
        while shared.head.load(Ordering::Acquire) < 2 {
            fall_asleep(&shared.sleeping, 1);
            if shared.head.load(Ordering::Acquire) < 2 {
                shared.event.wait();
            }
        }
        writer.join().unwrap();
    });
}
