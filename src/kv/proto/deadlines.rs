//! What is overdue (K5): silent queue pairs, transfers and reads past their deadlines, aborts that do not come to rest, fences, and
//! last words of the peer.
//!
//! A rail goes down alone for what is stuck on it (K10). The connection ends with its last rail, with a fence that does not come, and
//! with a peer that lives and does not say what it owes.
//!
//! Whoever has overslept is no judge: what the peer was asked for meanwhile may never have left, and a peer that was stopped together
//! with us, as the processes of a container are, answers as soon as it runs. So every wait for the peer begins anew, once; users'
//! deadlines stay as they are.

use std::time::Instant;

use super::config::Config;
use super::event::{Cause, SenderReason};
use super::link::Link;
use super::liveness::Tick;
use super::reader::{By, Reader};
use super::sender::Sender;
use super::word::{Word, patience};
use super::{Connection, RailState, State};

/// What has to be done about what is overdue.
#[derive(Debug, Default)]
struct Overdue {
    /// To be aborted.
    late: Vec<u64>,
    /// Queue pairs on which an aborted one has work that does not complete; and those of them whose work may be on no other, which
    /// has failed already.
    stuck: u64,
    alone: u64,
    /// When to look again.
    next: Option<Instant>,
}

/// What rails that have failed are still waited for.
#[derive(Clone, Copy, Debug)]
struct Fences {
    /// Queue pairs whose fence has not come: it has a time of its own.
    broken: u64,
    /// What was said may have been lost, and is said again after them.
    recovering: bool,
}

impl Overdue {
    fn is_stuck(&mut self, mask: u64, fences: Fences) {
        self.stuck |= mask & !fences.broken;
        if mask & fences.broken == 0 {
            self.alone |= mask;
        }
    }

    fn look_again(&mut self, at: Instant) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }
}

impl Connection {
    /// When `handle_timeout` is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        if self.state != State::Open {
            return None;
        }
        let links = self.links.iter().filter(|l| l.up).map(|l| l.live.timeout(&self.cfg));
        let halves =
            [self.sender.timeout, self.reader.timeout, self.receiver.timeout(), self.lender.timeout()];
        let others = [self.close_deadline, self.hear_timeout(), self.fence_timeout()];
        let others = halves.into_iter().chain(others);
        links.chain(others.flatten()).min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.state != State::Open {
            return;
        }
        self.excuse(now);
        let mut silent = 0u64;
        for link in self.links.iter_mut().filter(|l| l.up) {
            match link.live.on_timeout(&self.cfg, now) {
                Tick::Quiet => {}
                Tick::Probe => link.ping = true,
                Tick::Lost => silent |= 1 << link.rail,
            }
        }
        if silent != 0 {
            self.on_silence(silent, now);
        }
        if let Some(cause) = self.fence_overdue(now) {
            return self.lost(cause);
        }
        if self.state != State::Open {
            return;
        }
        self.settle_reads();
        if let Err(cause) = self.overdue(now) {
            return self.lost(cause);
        }
        let recovering = self.excuses_words(now);
        let unheard = !self.has_heard_all();
        let hear = self.hear_by.as_mut().filter(|_| unheard);
        let heard = hear.is_none_or(|word| word.look(&self.cfg, recovering, now).is_some());
        if !heard || self.close_deadline.is_some_and(|d| d <= now) {
            self.lost(Cause::CloseTimeout);
        }
    }

    /// When what the peer had said before it closed must have come.
    fn hear_timeout(&self) -> Option<Instant> {
        self.hear_by.filter(|_| !self.has_heard_all()).map(|word| word.at())
    }

    /// Writes and reads that are late are aborted; for aborts that are stuck their rails go down.
    fn overdue(&mut self, now: Instant) -> Result<(), Cause> {
        let fences = Fences { broken: self.sender.broken, recovering: self.is_recovering() };
        let writes = self.sender.overdue(&self.cfg, fences, now)?;
        let reads = self.reader.overdue(&self.cfg, fences, now)?;
        let (cfg, recovering) = (&self.cfg, self.excuses_words(now));
        if !self.receiver.is_in_time(cfg, recovering, now) || !self.lender.is_in_time(cfg, recovering, now) {
            return Err(Cause::PeerLost);
        }
        for id in writes.late {
            self.abort_for(id, SenderReason::Deadline, now);
        }
        for id in reads.late {
            self.abort_read_for(id, SenderReason::Deadline, now);
        }
        self.fail_stuck(writes.stuck | reads.stuck, writes.alone | reads.alone, now);
        Ok(())
    }

    /// To give buffers back, the queue pairs that hold them are killed, with their rails: of `stuck` those that do not get on; of
    /// `alone` all, if every one does, since then the work waits behind the rest.
    fn fail_stuck(&mut self, stuck: u64, alone: u64, now: Instant) {
        let grace = self.cfg.abort_grace;
        let rails_of = |mask: u64, holds: &dyn Fn(&Link) -> bool| {
            let links = self.links.iter().enumerate();
            let own = links.filter(|(qp, link)| mask >> qp & 1 == 1 && link.up && holds(link));
            own.fold(0u64, |rails, (_, link)| rails | 1 << link.rail)
        };
        let mut rails = rails_of(stuck, &|link| link.is_still(now, grace));
        if rails == 0 {
            rails = rails_of(alone, &Link::is_busy);
        }
        for rail in (0..self.rails.len()).filter(|rail| rails >> rail & 1 == 1) {
            self.rail_failed(rail, Cause::AbortStuck, now);
        }
    }

    /// When we come later than we were due, by more than a heartbeat: once, until we were in time again.
    fn excuse(&mut self, now: Instant) {
        let due = self.poll_timeout().unwrap_or(now);
        let overslept = now.saturating_duration_since(due) > self.cfg.heartbeat;
        if !overslept || std::mem::replace(&mut self.excused, true) {
            self.excused = overslept;
            return;
        }
        self.links.iter_mut().filter(|link| link.up).for_each(|link| link.wait_again(now));
        self.rails.iter_mut().for_each(|rail| rail.wait_again(now));
        self.sender.wait_again(&self.cfg, now);
        self.reader.wait_again(&self.cfg, now);
        self.receiver.wait_again(&self.cfg, now);
        self.lender.wait_again(&self.cfg, now);
        self.hear_by = self.hear_by.map(|_| Word::new(&self.cfg, now));
    }

    /// When the fence of a rail is given up.
    fn fence_timeout(&self) -> Option<Instant> {
        let open = self.rails.iter().filter(|r| !r.is_up() && r.state != RailState::Down);
        open.map(|r| r.since + self.cfg.abort_grace + self.cfg.peer_timeout).min()
    }

    /// Why a fence that is overdue is: ours, or the peer's.
    fn fence_overdue(&self, now: Instant) -> Option<Cause> {
        self.fence_timeout().filter(|&at| at <= now)?;
        let ours = self.rails.iter().any(|r| r.state == RailState::Failing);
        Some(if ours { Cause::AbortStuck } else { Cause::PeerLost })
    }
}

impl Sender {
    /// Or the cause to give up for.
    fn overdue(&mut self, cfg: &Config, fences: Fences, now: Instant) -> Result<Overdue, Cause> {
        let mut overdue = Overdue::default();
        if self.timeout.is_none_or(|t| now < t) {
            return Ok(overdue);
        }
        for id in self.ids() {
            let Some(t) = self.get_mut(id) else { continue };
            let Some(at) = t.timeout(cfg) else { continue };
            if now < at {
                overdue.look_again(at);
                continue;
            }
            if t.abort.is_none() && !t.resolved {
                overdue.late.push(id);
                continue;
            }
            let in_time = t.abort.is_none_or(|abort| now < abort.limit);
            if t.outstanding > 0 {
                overdue.is_stuck(t.took_part, fences);
            } else if !(fences.recovering && in_time) {
                return Err(if t.done_told { Cause::PeerLost } else { Cause::AbortStuck });
            }
            if let Some(abort) = &mut t.abort {
                abort.put_off(now);
            }
            overdue.look_again(now + cfg.abort_grace);
        }
        self.timeout = overdue.next;
        Ok(overdue)
    }

    fn wait_again(&mut self, cfg: &Config, now: Instant) {
        for id in self.ids() {
            if let Some(abort) = self.get_mut(id).and_then(|t| t.abort.as_mut()) {
                abort.wait_again(now, cfg.abort_limit());
            }
        }
    }
}

impl Reader {
    /// Or the cause to give up for.
    fn overdue(&mut self, cfg: &Config, fences: Fences, now: Instant) -> Result<Overdue, Cause> {
        let mut overdue = Overdue::default();
        if self.timeout.is_none_or(|t| now < t) {
            return Ok(overdue);
        }
        for id in self.ids() {
            let Some(at) = self.get(id).and_then(|read| read.timeout(cfg)) else { continue };
            if now < at {
                overdue.look_again(at);
                continue;
            }
            let flying = self.flying(id);
            let Some(read) = self.get_mut(id) else { continue };
            if read.abort.is_none() && !read.done_told {
                overdue.late.push(id);
                continue;
            }
            if flying != 0 {
                overdue.is_stuck(flying, fences);
            } else if !(fences.recovering && read.is_in_time(cfg, now)) {
                let ours = matches!(read.by, By::Rdma { .. });
                return Err(if ours { Cause::AbortStuck } else { Cause::PeerLost });
            }
            if let Some(abort) = &mut read.abort {
                abort.put_off(now);
            }
            overdue.look_again(now + cfg.abort_grace);
        }
        self.timeout = overdue.next;
        Ok(overdue)
    }

    /// Queue pairs on which READs of one are in flight.
    fn flying(&self, id: u64) -> u64 {
        let own = self.flights.iter().flatten().filter(|flight| flight.read == id);
        own.fold(0, |mask, flight| mask | 1 << flight.qp)
    }

    fn wait_again(&mut self, cfg: &Config, now: Instant) {
        for id in self.ids() {
            if let Some(abort) = self.get_mut(id).and_then(|read| read.abort.as_mut()) {
                abort.wait_again(now, patience(cfg) + cfg.abort_limit());
            }
        }
    }
}
