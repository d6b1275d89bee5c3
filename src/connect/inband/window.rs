//! How many messages may be under way in each direction.
//!
//! The last receive of the peer is only used by a message that gives receives back. So two sides that have used up all
//! cannot both wait: each one's last message gave some back, and so was sent after the other's had come, which cannot be
//! true of both.

/// Counts of messages from the beginning on. They wrap; differences are what counts, and those are at most `size`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Receives that each side keeps.
    size: u32,
    sent: u32,
    /// Receives that the peer has posted again, as far as it has said.
    returned: u32,
    /// Receives that we have posted again, and how many of them the peer was told of.
    reposted: u32,
    reported: u32,
}

impl Window {
    pub(super) fn new(size: u32) -> Self {
        Self { size, sent: 0, returned: 0, reposted: 0, reported: 0 }
    }

    fn available(&self) -> u32 {
        self.size - self.sent.wrapping_sub(self.returned)
    }

    fn unreported(&self) -> u32 {
        self.reposted.wrapping_sub(self.reported)
    }

    pub(super) fn may_send(&self) -> bool {
        self.available() > u32::from(self.unreported() == 0)
    }

    /// The peer may be waiting for what it has not been told, and can be told now.
    pub(super) fn must_report(&self) -> bool {
        self.unreported() >= self.size / 2 && self.available() > 0
    }

    pub(super) fn on_sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    pub(super) fn on_reposted(&mut self) {
        self.reposted = self.reposted.wrapping_add(1);
    }

    /// The count for a message that is about to be sent.
    pub(super) fn report(&mut self) -> u32 {
        self.reported = self.reposted;
        self.reposted
    }

    /// The peer's count. Messages of a queue pair come in order, so that it never goes back.
    pub(super) fn on_returned(&mut self, count: u32) -> Result<(), &'static str> {
        if count.wrapping_sub(self.returned) > self.sent.wrapping_sub(self.returned) {
            return Err("receives given back that were never used");
        }
        self.returned = count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k7_the_last_receive_is_for_giving_receives_back() {
        let mut w = Window::new(4);
        for _ in 0..3 {
            assert!(w.may_send());
            w.on_sent();
        }
        assert!(!w.may_send() && !w.must_report());
        w.on_reposted();
        assert!(w.may_send() && !w.must_report());
        w.on_reposted();
        assert!(w.must_report());
        assert_eq!(w.report(), 2);
        w.on_sent();
        w.on_reposted();
        assert!(!w.may_send(), "the peer has no receive");
        assert_eq!(w.on_returned(5), Err("receives given back that were never used"));
        w.on_returned(4).unwrap();
        assert!(w.may_send());
        assert!(w.on_returned(3).is_err(), "a count that goes back");
    }

    #[test]
    fn k7_counts_may_wrap() {
        let at = u32::MAX - 1;
        let mut w = Window { size: 4, sent: at, returned: at, reposted: at, reported: at };
        for n in 1..=8u32 {
            w.on_sent();
            w.on_reposted();
            assert_eq!(w.report(), at.wrapping_add(n));
            w.on_returned(at.wrapping_add(n)).unwrap();
            assert!(w.may_send());
        }
    }
}
