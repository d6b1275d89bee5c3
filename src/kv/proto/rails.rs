//! Rails: the queue pairs of one device, that fail together and come back together (K10).
//!
//! ```text
//!             rail_failed, or the peer's RAIL_DOWN          rail_fenced              the peer's FENCED
//!   Up ────────────────────────────────────────▶ Failing ──────────────▶ Fencing ──────────────▶ Down
//!    ◀───────────────────────────────────────────────────────── rail_up ──────────────────────────┘
//! ```
//!
//! Only in `Down` it is certain that neither side's device touches memory of the other by that rail, and what each has
//! received of it: then control is sent again (`resend`) and transfers begin again (`reopen`), on the rails that are
//! left. A rail that does not come there in time ends the connection, and so does the failure of the last one.
//!
//! One that was left out at the start begins in `Down`: it comes up for the first time as any other comes up again.
//!
//! The two words travel in any order, so that each names the *generation* of the rail, which counts how often it has come up.
//! A peer may have the next one up before we have, and see it fail: then it is fenced here without having been up.

use std::ops::Range;
use std::time::Instant;

use super::codec::TALK_OVERHEAD;
use super::config::{Config, RailConfig};
use super::outbox::Queued;
use super::pace::Pace;
use super::{Cause, Connection, Event, ProtocolViolation, State, Token};

type Result<T = ()> = std::result::Result<T, ProtocolViolation>;

/// Most messages about rails that wait to be sent.
const TALKS: usize = 64;

/// How far the failure of a rail has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RailState {
    /// It is used.
    Up,
    /// It has failed, and our queue pairs are not destroyed yet.
    Failing,
    /// Ours are destroyed, and the peer's may not be.
    Fencing,
    /// Fenced on both sides: it may come up again.
    Down,
}

/// Something about a rail that was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TalkRefused {
    #[error("rail {rail} is not down on both sides; wait until it is")]
    NotDown { rail: usize },
    #[error("{asked} bytes about a rail, one message takes {limit}; split them")]
    TooLong { asked: usize, limit: usize },
    #[error("{limit} messages about rails are waiting to be sent; try again later")]
    Full { limit: usize },
    #[error("the connection is lost")]
    Closed,
}

/// One rail.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) qps: Range<usize>,
    /// Where its next data work request is tried first.
    pub(super) data_qp: usize,
    /// Of WRITEs, and of READs.
    pub(super) pace: Pace,
    pub(super) reading: Pace,
    pub(super) state: RailState,
    /// When it failed.
    pub(super) since: Instant,
    /// How often it has come up again.
    pub(super) generation: u32,
    /// Generations below this are fenced at the peer.
    peer_fenced: u32,
    /// Work requests that have been posted and have not completed.
    pub(super) outstanding: u64,
}

impl Rail {
    /// The rails of a connection.
    pub(super) fn all(cfg: &Config, now: Instant) -> Vec<Self> {
        let mut start = 0;
        let rail = |cfg: &RailConfig| {
            let qps = start..start + cfg.qps;
            start = qps.end;
            Self {
                data_qp: qps.start,
                qps,
                pace: Pace::default(),
                reading: Pace::default(),
                state: if cfg.absent { RailState::Down } else { RailState::Up },
                since: now,
                generation: 0,
                // Of one that is not there, the generation that never was is over.
                peer_fenced: cfg.absent.into(),
                outstanding: 0,
            }
        };
        cfg.rails.iter().map(rail).collect()
    }

    pub(super) fn is_up(&self) -> bool {
        self.state == RailState::Up
    }

    /// Gives a fence that has not come its whole time once more.
    pub(super) fn wait_again(&mut self, now: Instant) {
        self.since = self.since.max(now);
    }

    /// Its queue pairs, as a mask.
    pub(super) fn mask(&self) -> u64 {
        self.qps.clone().fold(0, |mask, qp| mask | 1 << qp)
    }

    /// Its queue pairs, each once, the one whose turn it is first.
    pub(super) fn turn(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        (self.data_qp..self.qps.end).chain(self.qps.start..self.data_qp)
    }

    /// `qp` was used: the one after it is next.
    pub(super) fn used(&mut self, qp: usize) {
        self.data_qp = if qp + 1 == self.qps.end { self.qps.start } else { qp + 1 };
    }

    /// Our queue pairs of this generation are destroyed.
    pub(super) fn is_fenced(&self) -> bool {
        matches!(self.state, RailState::Fencing | RailState::Down)
    }
}

impl Connection {
    pub(crate) fn rail_state(&self, rail: usize) -> RailState {
        self.rails[rail].state
    }

    /// A rail has failed: a device says so, or one of its queue pairs. If it is the last one, the connection is lost with
    /// that cause. Does nothing if it has failed before.
    pub(crate) fn rail_failed(&mut self, rail: usize, cause: Cause, now: Instant) {
        if self.state != State::Open || !self.rails[rail].is_up() {
            return;
        }
        if self.rails.iter().filter(|r| r.is_up()).count() == 1 {
            return self.lost(cause);
        }
        let r = &mut self.rails[rail];
        r.state = RailState::Failing;
        r.since = now;
        self.sender.stall(r.mask());
        for link in &mut self.links[r.qps.clone()] {
            link.take_down();
        }
        self.out.event(Event::RailDown { rail, cause });
        if self.both_closed() {
            // The peer may have ended all of them, as it may: each is asked at once, rather than one after the other.
            self.links.iter_mut().filter(|link| link.up).for_each(|link| link.ping = true);
        }
        // Whatever was said of others may have been lost with this one, and their fences need not wait for this one's.
        for n in 0..self.rails.len() {
            self.say_rail_state(n);
        }
    }

    /// There is reason to believe that a rail is dead: each of its queue pairs is asked for a sign of life.
    pub(crate) fn ask_for_life(&mut self, rail: usize) {
        let r = &self.rails[rail];
        if self.state == State::Open && r.is_up() {
            self.links[r.qps.clone()].iter_mut().for_each(|link| link.ping = true);
        }
    }

    /// The queue pairs of a rail that failed are destroyed, and everything that they had received, and every work request,
    /// was handed in: no device of ours uses memory by that rail.
    pub(crate) fn rail_fenced(&mut self, rail: usize, now: Instant) {
        let r = &mut self.rails[rail];
        if self.state != State::Open || r.state != RailState::Failing {
            return;
        }
        debug_assert_eq!(r.outstanding, 0, "a work request that was not handed in");
        r.state = RailState::Fencing;
        self.receiver.fenced |= r.mask();
        self.say_rail_state(rail);
        self.recover_if_fenced(rail, now);
        self.finish_closing();
    }

    /// New queue pairs are connected in place of a rail's old ones. Only from `RailState::Down`: answers false, and does
    /// nothing, otherwise.
    pub(crate) fn rail_up(&mut self, rail: usize, now: Instant) -> bool {
        let r = &mut self.rails[rail];
        if self.state != State::Open || r.state != RailState::Down {
            return false;
        }
        r.state = RailState::Up;
        r.generation += 1;
        (r.pace, r.reading) = Default::default();
        let cfg = &self.cfg.rails[rail];
        for link in &mut self.links[r.qps.clone()] {
            link.bring_up(cfg, now);
        }
        self.out.event(Event::RailUp { rail });
        true
    }

    /// Tells the peer something about a rail that is to come back, by another one. It comes out there as
    /// `Event::RailTalk`: once, but not always in order.
    pub(crate) fn rail_talk(&mut self, rail: usize, bytes: Vec<u8>) -> std::result::Result<(), TalkRefused> {
        let limit = self.talk_limit();
        if self.state != State::Open {
            return Err(TalkRefused::Closed);
        }
        if self.rails[rail].state != RailState::Down {
            return Err(TalkRefused::NotDown { rail });
        }
        if bytes.len() > limit {
            return Err(TalkRefused::TooLong { asked: bytes.len(), limit });
        }
        if self.talks.len() >= TALKS {
            return Err(TalkRefused::Full { limit: TALKS });
        }
        self.talks.push_back((rail, bytes));
        Ok(())
    }

    /// The most bytes of one `rail_talk`.
    pub(crate) fn talk_limit(&self) -> usize {
        self.resend.room() - TALK_OVERHEAD
    }

    /// Queues what the peer must know of a rail that is not up: again, if it was said before.
    fn say_rail_state(&mut self, rail: usize) {
        let Rail { state, generation, .. } = self.rails[rail];
        let rail = rail as u16; // at most 64
        match state {
            RailState::Up | RailState::Down => {}
            RailState::Failing => self.out.queue(Queued::RailDown { rail, generation }),
            RailState::Fencing => self.out.queue(Queued::Fenced { rail, generation }),
        }
    }

    /// The peer has given a generation of a rail up, or (`fenced`) has destroyed its queue pairs, too.
    pub(super) fn on_rail_word(&mut self, rail: u16, generation: u32, fenced: bool, now: Instant) -> Result {
        let rail = usize::from(rail);
        let Some(r) = self.rails.get_mut(rail) else {
            return Err(ProtocolViolation::Rule("a word about a rail that there is not"));
        };
        if generation < r.generation {
            return Ok(());
        }
        // The peer's may be up again before ours is.
        let ahead = r.is_fenced() && Some(generation) == r.generation.checked_add(1);
        let Some(next) = generation.checked_add(1).filter(|_| generation == r.generation || ahead) else {
            return Err(ProtocolViolation::Rule("a word about a generation of a rail that there was not"));
        };
        // It comes up only after it was fenced.
        r.peer_fenced = r.peer_fenced.max(if fenced { next } else { generation });
        if ahead {
            self.recover_if_fenced(rail, now);
            // What was prepared for this generation may be in use by the peer's device: it is fenced, too.
            let r = &mut self.rails[rail];
            (r.state, r.since, r.generation) = (RailState::Failing, now, generation);
            self.out.event(Event::RailDown { rail, cause: Cause::PeerGaveUp });
        } else {
            self.rail_failed(rail, Cause::PeerGaveUp, now);
            self.recover_if_fenced(rail, now);
        }
        Ok(())
    }

    /// Once both sides are fenced: what the rail has lost is done again.
    fn recover_if_fenced(&mut self, rail: usize, now: Instant) {
        let r = &mut self.rails[rail];
        if self.state != State::Open || r.state != RailState::Fencing || r.peer_fenced <= r.generation {
            return;
        }
        r.state = RailState::Down;
        let mask = r.mask();
        for qp in r.qps.clone() {
            self.resend.again(qp, &mut self.links[qp].kept);
        }
        self.reader.on_rail_fenced(mask, &mut self.out);
        for (id, mask) in self.sender.recover(mask, now, &mut self.out) {
            self.queue_abort_done(id, Some(mask));
        }
        self.fenced_at = Some(now);
        // What heads alone had said is said again, too.
        self.links.iter_mut().filter(|link| link.up).for_each(|link| link.ping = true);
    }

    /// The peer's words may be late: some rail has failed, or what it had lost is being said again.
    pub(super) fn excuses_words(&self, now: Instant) -> bool {
        let again = self.cfg.abort_grace + self.cfg.peer_timeout;
        self.is_recovering() || self.fenced_at.is_some_and(|at| now < at + again)
    }

    /// Some rail has failed, and what it has lost is not done again yet.
    pub(super) fn is_recovering(&self) -> bool {
        self.rails.iter().any(|r| matches!(r.state, RailState::Failing | RailState::Fencing))
            || !self.resend.is_empty()
    }
}

impl Connection {
    /// What a completed work request says of its rail.
    pub(super) fn on_rail_sent(&mut self, token: Token, ok: bool, now: Instant) {
        let several = self.rails.len() > 1;
        let link = &mut self.links[token.qp()];
        let rail = link.rail;
        let r = &mut self.rails[rail];
        r.outstanding = r.outstanding.saturating_sub(1);
        link.completed(now);
        match token.control_count() {
            // By order a credit tells more: that the peer has taken it.
            Some(count) if several && ok && !self.cfg.rails[rail].ordered => {
                self.resend.completed(&mut link.kept, count)
            }
            Some(_) => {}
            None => {
                let (pace, len) = match token.read_number() {
                    Some(number) => (&mut r.reading, self.reader.len_of(number)),
                    None => (&mut r.pace, link.lengths.pop_front().unwrap_or(0)),
                };
                pace.completed(len.into(), ok, now);
            }
        }
        // Both sides have said all there is, and the peer may have destroyed its queue pairs.
        let over = !several && self.both_closed();
        if !ok && !over {
            self.rail_failed(rail, Cause::Transport, now);
        }
    }

    /// Rails on which nothing was heard for too long, as a mask. All of them: the peer itself is lost.
    pub(super) fn on_silence(&mut self, silent: u64, now: Instant) {
        let is_silent = |n: usize| silent >> n & 1 == 1;
        if self.rails.iter().enumerate().all(|(n, r)| is_silent(n) || !r.is_up()) {
            return self.lost(Cause::PeerLost);
        }
        for rail in (0..self.rails.len()).filter(|&n| is_silent(n)) {
            self.rail_failed(rail, Cause::PeerLost, now);
        }
    }
}
