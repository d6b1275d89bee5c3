//! What of our memory a peer may be copying right now, by key: so that a deregistration is what it is elsewhere.
//!
//! When one has returned, nothing is executed any more with bytes of that memory. On a device it waits for the packets; here the
//! peer's process copies, which may be frozen, so that nobody can wait for it. Instead a connection that the peer was referred by,
//! and has not said that it is done, ends: as it does over TCP when memory goes in the middle of a frame.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::super::lock;
use super::ring::Rings;

/// The connections of a device that may refer to its memory.
#[derive(Debug, Default)]
pub(in crate::provider::soft) struct Lenders {
    links: Mutex<Vec<Weak<Rings>>>,
    withdrawals: AtomicU64,
}

impl Lenders {
    pub(in crate::provider::soft) fn join(&self, rings: &Arc<Rings>) {
        let mut links = lock(&self.links);
        links.retain(|rings| rings.strong_count() > 0);
        links.push(Arc::downgrade(rings));
    }

    /// The region of `key` was deregistered: no reference to it is made any more.
    pub(in crate::provider::soft) fn withdraw(&self, key: u32) {
        self.withdrawals.fetch_add(1, Ordering::Release);
        let links = lock(&self.links);
        for rings in links.iter().filter_map(Weak::upgrade) {
            if rings.lends(key) {
                rings.close();
            }
        }
    }

    /// How many there were.
    pub(in crate::provider::soft) fn withdrawals(&self) -> u64 {
        self.withdrawals.load(Ordering::Acquire)
    }
}

/// References that the peer may not be done with.
#[derive(Debug, Default)]
pub(super) struct Loans(Mutex<Vec<Loan>>);

#[derive(Clone, Copy, Debug)]
struct Loan {
    key: u32,
    /// The count of the ring behind the reference; `FRAME` and the piece, as long as its frame is not complete.
    end: u64,
}

/// Beyond every count.
const FRAME: u64 = 1 << 63;
/// Those that are over are taken out when there are more than this.
const MANY: usize = 256;

impl Loans {
    /// Memory of `key` is referred to in a piece of the frame that is being made. The key is registered until this has returned.
    pub(super) fn add(&self, key: u32, piece: usize) {
        let mut loans = lock(&self.0);
        let loan = Loan { key, end: FRAME + piece as u64 };
        // Elements of a message have a key in common, as a rule.
        if loans.last().is_none_or(|last| (last.key, last.end) != (loan.key, loan.end)) {
            loans.push(loan);
        }
    }

    /// That frame is complete: `end` says where each of its pieces ends. The peer is done with all before `done`.
    pub(super) fn settle(&self, done: u64, end: impl Fn(usize) -> u64) {
        let mut loans = lock(&self.0);
        for loan in loans.iter_mut().rev().take_while(|loan| loan.end >= FRAME) {
            loan.end = end((loan.end - FRAME) as usize);
        }
        if loans.len() > MANY {
            loans.retain(|loan| loan.end > done);
        }
    }

    /// Whether the peer, which is done with all before `done`, may still copy from memory of `key`.
    pub(super) fn has(&self, key: u32, done: u64) -> bool {
        let mut loans = lock(&self.0);
        loans.retain(|loan| loan.end > done);
        loans.iter().any(|loan| loan.key == key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r1_a_loan_lasts_until_the_peer_is_done_with_its_own_piece() {
        let loans = Loans::default();
        loans.add(7, 0);
        loans.add(8, 1);
        loans.add(8, 1);
        assert!(loans.has(7, 1 << 40) && loans.has(8, 1 << 40), "its frame is not complete");
        loans.settle(0, |piece| 100 + piece as u64 * 24);
        assert!(loans.has(7, 99) && !loans.has(9, 99));
        assert!(!loans.has(7, 100) && loans.has(8, 100), "each by its own end");
        assert!(!loans.has(8, 124));
        for n in 0..10 * MANY as u64 {
            loans.add(9, 0);
            loans.settle(n, |_| n + 1);
        }
        assert!(lock(&loans.0).len() <= MANY + 1, "those that are over go");
    }
}
