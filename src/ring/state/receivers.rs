//! Which queue pair a message of a shared receive queue came by.
//!
//! Its completion names a number, which is all that there is to go by, and numbers are given out again (R5): one that may
//! mean two queue pairs means none, until the completions of the first are known to be gone.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};

use super::HalfId;

/// The halves that receive by a shared queue, by the numbers of their queue pairs.
#[derive(Debug, Default)]
pub(super) struct Receivers {
    halves: HashMap<u32, HalfId>,
    /// Numbers whose last queue pair has ended since the queue was seen empty.
    ambiguous: HashSet<u32>,
}

impl Receivers {
    pub(super) fn add(&mut self, qp_num: u32, half: HalfId) {
        if self.halves.insert(qp_num, half).is_some() {
            // That one is destroyed, or its number would not be free; its half is still to be released.
            self.ambiguous.insert(qp_num);
        }
    }

    pub(super) fn remove(&mut self, qp_num: u32, half: HalfId) {
        self.ambiguous.insert(qp_num);
        if let Entry::Occupied(entry) = self.halves.entry(qp_num)
            && *entry.get() == half
        {
            entry.remove();
        }
    }

    /// The half of the queue pair that a completion of this number is of, when there is no doubt.
    pub(super) fn find(&self, qp_num: u32) -> Option<HalfId> {
        self.halves.get(&qp_num).filter(|_| !self.ambiguous.contains(&qp_num)).copied()
    }

    /// Completions of those that have ended are gone.
    pub(super) fn polled_empty(&mut self) {
        self.ambiguous.clear();
    }
}
