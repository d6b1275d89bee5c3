//! The two agreements by words that both processes see: the end of a side, and its sleep.
//!
//! **The end.** A side that ends gives its sources back to their owner, who may write them at once, while the peer may be in the
//! middle of copying from them. So it says so first ([`close`]), and the peer looks after every copy ([`is_sound`]): a copy that
//! may have seen bytes written after the end is not executed. If the copy read one of those bytes, the fence behind [`close`]
//! came before the fence in front of the look, which then finds the word set.
//!
//! **The sleep** (R3). Who is about to sleep says for what it wants to be woken ([`fall_asleep`]) and then looks again; who has
//! changed something that may be waited for looks whether it has to wake ([`must_wake`]). Of a change and a sleep at the same
//! time at least one sees the other. The word is taken back by who wakes, so that one sleep costs at most one wake-up.
//!
//! Knows no memory and no system call: models of it run under loom, see `models.rs`.

use std::sync::atomic::{self, Ordering};

#[cfg(landfall_loom)]
use loom::sync::atomic::fence;
#[cfg(not(landfall_loom))]
use std::sync::atomic::fence;

/// A word that both sides see.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
}

macro_rules! word {
    ($of:ty) => {
        impl Word for $of {
            fn load(&self, order: Ordering) -> u32 {
                self.load(order)
            }

            fn store(&self, value: u32, order: Ordering) {
                self.store(value, order);
            }

            fn swap(&self, value: u32, order: Ordering) -> u32 {
                self.swap(value, order)
            }
        }
    };
}

word!(atomic::AtomicU32);
#[cfg(landfall_loom)]
word!(loom::sync::atomic::AtomicU32);

/// This side ends. When this has returned, what its peer was referred to may be written.
pub(super) fn close(closed: &impl Word) {
    closed.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Whether what was copied before this call is what the peer meant: it had not ended by then.
pub(super) fn is_sound(closed: &impl Word) -> bool {
    fence(Ordering::SeqCst);
    closed.load(Ordering::Relaxed) == 0
}

/// Declares what this side is to be woken for, as bits. Look for it again before sleeping.
pub(super) fn fall_asleep(sleeping: &impl Word, bits: u32) {
    sleeping.store(bits, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Whether the peer, that sleeps, has to be told of the change that was published before this call. Once a sleep.
pub(super) fn must_wake(sleeping: &impl Word, bit: u32) -> bool {
    fence(Ordering::SeqCst);
    sleeping.load(Ordering::Relaxed) & bit != 0 && sleeping.swap(0, Ordering::AcqRel) & bit != 0
}
