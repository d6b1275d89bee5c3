//! One queue pair of a connection: whether something may be sent on it, and what waits to be.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::config::{Opening, RailConfig};
use super::credits::{QpCredits, Urgency};
use super::liveness::Liveness;
use super::ranges::RangeSet;
use super::resend::Kept;

/// One queue pair.
#[derive(Debug)]
pub(super) struct Link {
    /// The rail that it belongs to.
    pub(super) rail: usize,
    /// Its rail is up.
    pub(super) up: bool,
    pub(super) credits: QpCredits,
    pub(super) live: Liveness,
    /// We may send: the peer has, or needs not be the first.
    pub(super) open: bool,
    /// The peer's is there, too: after its rail has come back, something was heard. Before that it is only asked.
    pub(super) proven: bool,
    pub(super) ping: bool,
    pub(super) pong: bool,
    /// Aborted transfers whose last word is to be said here.
    pub(super) abort_done: VecDeque<u64>,
    /// Bytes of records that were sent here, in all generations of the rail, and those of messages that may not have been
    /// received; where there is more than one rail.
    pub(super) number: u64,
    pub(super) kept: VecDeque<Kept>,
    /// The numbers of the peer's that came here, or were sent again.
    pub(super) heard: RangeSet,
    /// Lengths of data work requests that are in flight, the oldest first.
    pub(super) lengths: VecDeque<u32>,
    /// Work requests that have not completed; and when the last one did, or was posted after a time without any.
    outstanding: u64,
    progress: Instant,
}

impl Link {
    pub(super) fn new(rail: usize, cfg: &RailConfig, now: Instant) -> Self {
        Self {
            rail,
            up: !cfg.absent,
            credits: QpCredits::new(cfg),
            live: Liveness::new(now),
            open: cfg.opening != Opening::Listen,
            proven: true,
            // Whoever has to speak first asks for a sign of life.
            ping: cfg.opening == Opening::Speak && !cfg.absent,
            pong: false,
            abort_done: VecDeque::new(),
            number: 0,
            kept: VecDeque::new(),
            heard: RangeSet::default(),
            lengths: VecDeque::new(),
            outstanding: 0,
            progress: now,
        }
    }

    /// Its rail has failed.
    pub(super) fn take_down(&mut self) {
        self.up = false;
        self.ping = false;
        self.pong = false;
        self.abort_done.clear();
    }

    /// Its rail is used again, with a new queue pair: numbers go on, everything else begins anew.
    pub(super) fn bring_up(&mut self, cfg: &RailConfig, now: Instant) {
        let (number, heard) = (self.number, std::mem::take(&mut self.heard));
        *self = Self { number, heard, up: true, ping: true, proven: false, ..Self::new(self.rail, cfg, now) };
    }

    /// Before anything is posted: what has had nothing to do is not behind.
    pub(super) fn look(&mut self, now: Instant) {
        if self.outstanding == 0 {
            self.progress = now;
        }
    }

    pub(super) fn posted(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn completed(&mut self, now: Instant) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.progress = now;
    }

    pub(super) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// It has something to do, and nothing of that has completed for so long.
    pub(super) fn is_still(&self, now: Instant, grace: Duration) -> bool {
        self.is_busy() && now.saturating_duration_since(self.progress) >= grace
    }

    /// What it has to do gets its whole time once more; so does a peer that was asked for a sign of life, which is asked again.
    pub(super) fn wait_again(&mut self, now: Instant) {
        self.progress = self.progress.max(now);
        self.ping |= self.live.ask_again(now);
    }

    /// Something waits that must travel on this queue pair.
    pub(super) fn is_due(&self) -> bool {
        self.up && (self.ping || self.pong || !self.abort_done.is_empty() || self.credits.must_report())
    }

    /// It takes what any queue pair could carry.
    pub(super) fn may_carry(&self) -> bool {
        self.open && self.up && self.proven
    }

    pub(super) fn may_send_data(&self) -> bool {
        self.may_carry() && self.credits.may_send_data()
    }

    pub(super) fn may_send_own(&self) -> bool {
        self.open && self.up && self.credits.may_send_control(Urgency::Urgent)
    }

    pub(super) fn may_send_control(&self, urgency: Urgency) -> bool {
        self.may_carry() && self.credits.may_send_control(urgency)
    }
}
