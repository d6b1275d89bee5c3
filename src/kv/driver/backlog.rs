//! Whether all that had come is handed in, where completions come as fast as they are taken.
//!
//! What has failed, and what is overdue, waits for what had come before: it may say why, or that all is well. Once as many
//! completions were taken in a row as the queues hold, nothing of that is left in them, however full the next batch is; so a peer
//! that keeps every batch full holds neither back.

/// Completions that were taken in full batches, one after the other.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    taken: usize,
}

impl Backlog {
    /// A batch of `taken` completions, of at most `batch`, was taken from queues that hold `depth`. True while there may be some
    /// left that had come before the first of these.
    pub(super) fn may_be_left(&mut self, taken: usize, batch: usize, depth: usize) -> bool {
        self.taken = if taken < batch { 0 } else { self.taken + taken };
        if self.taken >= depth {
            self.taken = 0;
        }
        self.taken > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k5_batches_that_are_always_full_do_not_put_timeouts_off_for_ever() {
        let mut backlog = Backlog::default();
        let left: Vec<bool> = (0..8).map(|_| backlog.may_be_left(64, 64, 250)).collect();
        assert_eq!(left, [true, true, true, false, true, true, true, false]);
        assert!(backlog.may_be_left(64, 64, 250));
        assert!(!backlog.may_be_left(63, 64, 250), "it was the last");
        // From the beginning.
        assert_eq!((0..4).filter(|_| backlog.may_be_left(64, 64, 250)).count(), 3);
        assert!(!backlog.may_be_left(64, 64, 10), "more than there can be");
    }
}
