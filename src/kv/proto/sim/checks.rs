//! What must be true after each step, when a channel is quiet, and at the end.

use super::super::{Connection, Outcome, State};
use super::model::{GrantState, Transfer, TransferKey};
use super::setup::{Channel, Side};
use super::world::World;

/// The slowest wire, the polls at both ends and a full send queue: what may be added to a time-out, in microseconds.
const TRANSIT: u64 = 150_000;

impl World {
    /// After a step that has touched `ch`, or a user.
    pub(super) fn check_step(&mut self, touched: Option<usize>) {
        if let Some(ch) = touched {
            let channel = &self.channels[ch];
            if let [Some(a), Some(b)] = [&channel.sides[0].conn, &channel.sides[1].conn] {
                check_credits(a, b);
                check_credits(b, a);
            }
            self.check_silence(ch);
            self.check_aborts();
        }
        for ch in 0..self.channels.len() {
            self.finish_if_quiet(ch);
        }
    }

    /// K5: a peer that is frozen or gone is lost within the time-out.
    fn check_silence(&self, ch: usize) {
        let c = &self.channels[ch];
        for side in 0..2 {
            let me = &self.ends[c.ends[side]];
            let (Some(conn), Some(since)) = (&c.sides[side].conn, c.sides[1 - side].silent_since) else {
                continue;
            };
            if conn.state != State::Open || me.frozen {
                continue;
            }
            let since = since.max(c.connected_at).max(me.awake_since).max(c.sides[side].revived_at);
            let limit = since + (c.cfg.heartbeat + c.cfg.peer_timeout).as_micros() as u64 + TRANSIT;
            assert!(self.now <= limit, "k5: silent since {since}, and at {} not lost", self.now);
        }
    }

    /// K4: where nothing goes wrong, a receiver hears of an abort in bounded time.
    fn check_aborts(&mut self) {
        if self.faults {
            return self.model.aborts.clear();
        }
        let (model, now) = (&mut self.model, self.now);
        let bound = 1_000_000;
        model.aborts.retain(|(at, grant)| {
            let open = model.grants.get(grant).is_some_and(|g| g.state == GrantState::Open);
            assert!(!open || now <= at + bound, "k4: the receiver of {grant:?} was not told");
            open
        });
    }

    /// With no move to come and nothing under way on a channel: it must be at rest. Then it is closed.
    fn finish_if_quiet(&mut self, ch: usize) {
        let c = &self.channels[ch];
        if !self.acts.is_empty() || c.pending > 0 || c.closing || c.last {
            return;
        }
        let quiet = |s: &Side| s.cq.is_empty() && s.wake.is_some_and(|w| w > self.now);
        let [Some(a), Some(b)] = [&c.sides[0].conn, &c.sides[1].conn] else { return };
        // A fence that is waited for comes, or ends the connection.
        let open = |c: &Connection| c.state == State::Open && !c.is_recovering();
        if c.sides.iter().any(|s| s.queues.iter().any(|q| !q.ring.is_empty())) {
            return;
        }
        if !c.sides.iter().all(quiet) || !open(a) || !open(b) || c.ends.iter().any(|&e| self.ends[e].frozen) {
            return;
        }
        if self.of(c).any(|(_, t)| t.done.is_none() || !t.released) {
            return;
        }
        if c.sides.iter().any(|s| !s.reads.is_empty()) {
            return;
        }
        for side in 0..2 {
            let (me, peer) = (c.lives[side], c.lives[1 - side].0);
            if self.model.loans.range((me, peer, 0)..=(me, peer, u64::MAX)).any(|(_, l)| l.is_ending()) {
                return;
            }
            for (_, g) in self.model.grants.range((me, peer, 0)..=(me, peer, u64::MAX)) {
                if g.state == GrantState::Aborted {
                    return;
                }
            }
        }
        for (_, t) in self.of(c).filter(|(_, t)| matches!(t.done, Some(Outcome::NotDelivered(_)))) {
            let open = self.model.grants.get(&t.grant).is_some_and(|g| g.state == GrantState::Open);
            assert!(!open, "k4: the receiver was never told of {t:?}");
        }
        for (key, t) in self.of(c).filter(|(_, t)| matches!(t.done, Some(Outcome::InDoubt(_)))) {
            assert!(t.resolution.is_some(), "k2: {key:?} is in doubt for ever");
        }
        a.assert_at_rest(b);
        b.assert_at_rest(a);
        self.close_last(ch);
    }

    fn close_last(&mut self, ch: usize) {
        let both = self.rng.one_in(2);
        let (now, deadline) = (self.instant(self.now), self.instant(self.now + 2_000_000));
        let c = &mut self.channels[ch];
        c.closing = true;
        c.last = true;
        for side in 0..2 {
            if side == 0 || both {
                if let Some(conn) = &mut self.channels[ch].sides[side].conn {
                    conn.close(deadline, now);
                }
                self.wake(ch, side, self.now);
            }
        }
    }

    /// The transfers of the processes that a channel connects now.
    fn of<'a>(&'a self, c: &'a Channel) -> impl Iterator<Item = (&'a TransferKey, &'a Transfer)> {
        (0..2).flat_map(|side| {
            let (me, peer) = (c.lives[side], c.lives[1 - side].0);
            self.model.transfers.range((me, peer, 0)..=(me, peer, u64::MAX))
        })
    }

    pub(super) fn check_end(&self) {
        for (key, t) in self.model.transfers.iter().filter(|(_, t)| !t.gone) {
            assert!(t.done.is_some() && t.released, "k5: transfer {key:?} never ended: {t:?}");
        }
        let forgotten = self.model.loans.iter().find(|(_, l)| l.is_forgotten());
        assert!(forgotten.is_none(), "k4: a grant to read has no end: {forgotten:?}");
        for c in &self.channels {
            assert!(
                c.sides.iter().all(|s| s.conn.is_none()),
                "k5: a connection never ends: {}",
                self.waiting()
            );
        }
        for ((life, peer, id), g) in self.model.grants.iter().filter(|(_, g)| g.state == GrantState::Aborted)
        {
            let side = |c: &&Channel| c.ends.contains(&life.0) && c.ends.contains(peer);
            let c = self.channels.iter().find(side).expect("a channel between the two");
            let mine = &c.sides[usize::from(c.ends[1] == life.0)];
            let open = mine.ledger.as_ref().is_some_and(|l| l.open_grants().any(|g| g == *id));
            assert!(open && !c.last, "k4: grant {id} of {life:?} is never freed: {g:?}");
        }
    }

    /// What has not ended, for a failure's message.
    pub(super) fn waiting(&self) -> String {
        let mut out = String::new();
        for (ch, c) in self.channels.iter().enumerate() {
            for (s, ep) in c.sides.iter().zip(c.ends) {
                let state = s.conn.as_ref().map(|c| c.state);
                let frozen = self.ends[ep].frozen;
                out += &format!("channel {ch}, end {ep}: {state:?}, fenced {}, frozen {frozen}; ", s.fenced);
            }
        }
        for (key, t) in
            self.model.transfers.iter().filter(|(_, t)| !t.gone && (t.done.is_none() || !t.released))
        {
            out += &format!("{key:?}: {t:?}; ");
        }
        for (key, g) in self.model.grants.iter().filter(|(_, g)| g.state == GrantState::Aborted) {
            out += &format!("{key:?}: {g:?}; ");
        }
        out
    }
}

/// K7: a credit is with the sender, or on its way, or with the receiver, and nowhere twice.
fn check_credits(from: &Connection, to: &Connection) {
    for (ours, theirs) in from.links.iter().zip(&to.links) {
        let [a, b] = [from, to].map(|c| &c.rails[ours.rail]);
        if !a.is_up() || !b.is_up() || a.generation != b.generation {
            continue;
        }
        let (spent, held) = (ours.credits.outstanding(), theirs.credits.unreported());
        let limit = from.cfg.rails[ours.rail].tx_credits;
        assert!(spent.0 >= held.0 && spent.1 >= held.1, "k7: a credit came back twice: {spent:?} {held:?}");
        assert!(
            spent.0 <= limit.data.into() && spent.1 <= limit.control.into(),
            "k7: more credits spent than there are: {spent:?} of {limit:?}"
        );
    }
}
