//! One transfer, as its sender sees it.

use std::time::{Duration, Instant};

use super::config::Config;
use super::event::SenderReason;
use super::plan::{Cursor, Plan};
use super::record::Slot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderState {
    /// Its counts are not known.
    Open,
    Queued,
    Posted,
}

/// An end before its time, of a transfer or of a read, that has not come to rest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aborting {
    pub(super) reason: SenderReason,
    /// From when its grace counts.
    pub(super) at: Instant,
    /// Where what the rails go through puts that off no more.
    pub(super) limit: Instant,
}

/// One transfer.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) grant: u64,
    /// Its data is not ready: it does not ask for a slot.
    pub(super) gated: bool,
    pub(super) tag: u64,
    pub(super) attempt: u16,
    pub(super) plan: Plan,
    pub(super) cursor: Cursor,
    pub(super) deadline: Instant,
    /// From activation on.
    pub(super) slot: Option<Slot>,
    /// Queue pairs on which something was posted, in any attempt, but those that have failed.
    pub(super) took_part: u64,
    /// Those that have failed since the receiver has last agreed to begin again.
    pub(super) reset: u64,
    /// It is to begin again, and the receiver has not agreed yet.
    pub(super) reopening: bool,
    /// The receiver may have delivered it by an earlier attempt.
    pub(super) exposed: bool,
    /// The receiver has taken the grant back when it may have been delivered. If it was not, and is to begin again, it ends.
    pub(super) revoked: bool,
    /// Ordered: queue pairs whose notification has been posted, and nothing after it; and those where it is still to be.
    pub(super) notified: u64,
    pub(super) tail: u64,
    /// Everything has been cut, and `tail` is final.
    pub(super) cut: bool,
    pub(super) header: HeaderState,
    /// Data work requests that have not completed.
    pub(super) outstanding: u32,
    /// WRITEs of payload that have been posted.
    pub(super) wrs: u64,
    pub(super) abort: Option<Aborting>,
    /// ABORT_DONE has been queued on every queue pair that took part.
    pub(super) abort_done: bool,
    /// The peer has spoken.
    pub(super) resolved: bool,
    pub(super) sent_told: bool,
    pub(super) done_told: bool,
    pub(super) released_told: bool,
}

impl Aborting {
    /// `limit` from `now` on, nothing puts its end off any more.
    pub(super) fn new(reason: SenderReason, now: Instant, limit: Duration) -> Self {
        Self { reason, at: now, limit: now + limit }
    }

    /// Something of it has completed: its grace counts from there on, but not from after `deadline`.
    pub(super) fn got_on(&mut self, now: Instant, deadline: Instant) {
        self.at = self.at.max(now.min(deadline));
    }

    /// It gets its whole time once more.
    pub(super) fn wait_again(&mut self, now: Instant, limit: Duration) {
        *self = Self::new(self.reason, now.max(self.at), limit);
    }

    /// Its grace counts from `now` on.
    pub(super) fn put_off(&mut self, now: Instant) {
        self.at = self.at.max(now.min(self.limit));
    }
}

impl Transfer {
    /// All data and all notifications have been posted.
    pub(super) fn all_posted(&self) -> bool {
        self.cut && self.tail == 0
    }

    /// The receiver may have delivered it, or may do so.
    pub(super) fn deliverable(&self) -> bool {
        self.exposed || (self.all_posted() && self.header == HeaderState::Posted)
    }

    /// When something must have changed.
    pub(super) fn timeout(&self, cfg: &Config) -> Option<Instant> {
        match self.abort {
            Some(a) if self.outstanding > 0 => Some(a.at + cfg.abort_grace),
            Some(_) if self.resolved => None,
            Some(a) if !self.done_told => Some(a.at + cfg.word_grace()),
            Some(a) => Some(a.at + cfg.abort_grace + cfg.peer_timeout),
            None if self.resolved => self.deadline.checked_add(cfg.abort_grace),
            None => Some(self.deadline),
        }
    }
}
