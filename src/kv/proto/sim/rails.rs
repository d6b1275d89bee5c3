//! Rails of a channel: what a seed draws of them, how one fails, is fenced on each side by itself, and comes back.
//!
//! Half of the runs have one rail, and are as they would be without this. The others have two to four, equal or not, in every
//! mixture of order and notification, and rails fail: told to one side or both, or silently, in one direction or both, one
//! while another is being fenced. In some, rails are left out at the start, and come later, or never. As long as the run leaves one rail whole at each time (where nothing else goes wrong
//! it does), the connection must not be lost, and what has time enough must land (K10).

use super::super::{Cause, Connection, Credits, Notify, RailConfig, RailState, State, Token};
use super::Rng;
use super::Script;
use super::setup::Channel;
use super::wire::{Happening, Item, Line};
use super::world::World;

/// The number of the generator that draws it, so that everything else is drawn as without.
const DRAW: u64 = 3000;
/// Most rails of a channel.
pub(super) const RAILS: usize = 4;

/// How the rails of one channel fare, by rail.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Health {
    /// It has failed, and has not come up again on both sides.
    pub(super) ill: bool,
    /// The generation for which each side has said that it is ready, and has heard that the other is.
    pub(super) said: [u32; 2],
    pub(super) heard: [u32; 2],
}

/// How many moves of rails there are.
pub(super) fn draw(script: &Script, channels: &mut [Channel]) -> u32 {
    let mut rng = Rng::nth(script.seed, DRAW);
    if rng.one_in(2) {
        return 0;
    }
    for channel in channels.iter_mut() {
        let count = rng.range(2, RAILS as u64) as usize;
        let equal = rng.one_in(3);
        let base = channel.cfg.rails[0];
        let latency = channel.timing.lines[0].latency;
        channel.cfg.rails.clear();
        channel.timing.lines.clear();
        let most = if count == 2 { 3 } else { 2 };
        for n in 0..count {
            let mut rail = RailConfig { qps: base.qps.min(most), ..base };
            let mut line = Line { ordered: rail.ordered, early_completion: false, latency };
            if n > 0 && !equal {
                rail.qps = rng.range(1, most as u64) as usize;
                rail.ordered = rng.one_in(2);
                rail.notify = if rail.ordered && rng.one_in(2) { Notify::Send } else { Notify::Imm };
                rail.max_write = rng.pick(&[16, 64, 100, 4096]);
                rail.max_reads = rng.range(1, 4) as u32;
                line.latency = rng.pick(&[1, 20, 200, 1000]);
                line.ordered = rail.ordered;
            }
            line.early_completion = rail.notify == Notify::Send && rng.one_in(2);
            channel.timing.lines.extend(std::iter::repeat_n(line, rail.qps));
            channel.cfg.rails.push(rail);
        }
        channel.timing.slow.0 = rng.below(channel.cfg.qps() as u64) as usize;
        channel.health = vec![Health::default(); count];
    }
    leave_out(script, channels);
    rng.range(0, 6) as u32
}

/// Some rails are not there when their channel is connected. One is.
fn leave_out(script: &Script, channels: &mut [Channel]) {
    let mut rng = Rng::nth(script.seed, DRAW + 1);
    if rng.one_in(2) {
        return;
    }
    for channel in channels {
        let there = rng.below(channel.cfg.rails.len() as u64) as usize;
        for (n, rail) in channel.cfg.rails.iter_mut().enumerate() {
            rail.absent = n != there && rng.one_in(2);
        }
    }
}

impl Channel {
    pub(super) fn rail_of(&self, qp: usize) -> usize {
        let mut end = 0;
        let ends = self.cfg.rails.iter().map(|r| {
            end += r.qps;
            end
        });
        ends.take_while(|&e| e <= qp).count()
    }

    pub(super) fn qps_of(&self, rail: usize) -> std::ops::Range<usize> {
        let start = self.cfg.rails[..rail].iter().map(|r| r.qps).sum();
        start..start + self.cfg.rails[rail].qps
    }

    pub(super) fn has_rails(&self) -> bool {
        self.cfg.rails.len() > 1
    }
}

/// What a receive queue has posted at its start.
pub(super) fn receives(credits: Credits) -> u32 {
    credits.data + credits.control
}

impl World {
    /// One rail of a channel fails, in some way: mostly while a transfer is under way, if there will be one.
    pub(super) fn rail_fault(&mut self, n: u32, rng: &mut Rng) {
        let mostly = !rng.one_in(4);
        let busy = |ch: &usize| self.model.is_busy(self.channels[*ch].lives);
        let busy: Vec<usize> = (0..self.channels.len()).filter(busy).collect();
        if mostly && busy.is_empty() && !self.acts.is_empty() {
            return self.at(1 + self.rng.clone().below(100), Happening::RailFault(n));
        }
        let among: Vec<usize> = if busy.is_empty() { (0..self.channels.len()).collect() } else { busy };
        let ch = rng.pick(&among);
        let rail = rng.below(self.channels[ch].cfg.rails.len() as u64) as usize;
        let (how, one) = (rng.below(6), rng.below(2) as usize);
        let deaf = rng.next();
        let c = &mut self.channels[ch];
        let whole = c.health.iter().filter(|h| !h.ill).count();
        if c.health[rail].ill || (whole == 1 && !self.faults) || c.sides.iter().any(|s| s.conn.is_none()) {
            return;
        }
        c.health[rail].ill = true;
        self.summary.rail_faults += 1;
        for side in 0..2 {
            // Both, or one direction, or some queue pairs of it; or nothing but that it is told.
            let dies = how < 2 || (how < 4 && side == one);
            for qp in self.channels[ch].qps_of(rail) {
                let all = how % 2 == 0 || deaf >> qp & 1 == 1;
                self.channels[ch].sides[side].queues[qp].dead |= dies && all;
            }
        }
        for side in 0..2 {
            let told = how == 4 || (how == 5 && side == one) || (how < 4 && deaf >> (8 + side) & 1 == 1);
            if told && !self.ends[self.channels[ch].ends[side]].frozen {
                self.tell_rail_lost(ch, side, rail);
            }
        }
        // What dies without a sound on a queue pair that nothing is posted on is heard of by silence.
        let told = how >= 4 || (0..2).any(|side| deaf >> (8 + side) & 1 == 1);
        if !told && how % 2 == 1 {
            let first = self.channels[ch].qps_of(rail).start;
            self.channels[ch].sides[one].queues[first].dead = true;
        }
    }

    /// A channel has been connected without some of its rails: both sides look for them, or one, or nobody.
    pub(super) fn without_rails(&mut self, ch: usize) {
        let incarnation = self.channels[ch].incarnation;
        for rail in 0..self.channels[ch].cfg.rails.len() {
            if !self.channels[ch].cfg.rails[rail].absent {
                continue;
            }
            self.summary.rails_left_out += 1;
            self.channels[ch].health[rail].ill = true;
            for side in 0..2 {
                for qp in self.channels[ch].qps_of(rail) {
                    self.channels[ch].sides[side].queues[qp].gone = true;
                }
                if !self.rng.one_in(3) {
                    let delay = self.rng.below(20_000);
                    self.at(delay, Happening::RailProbe { ch, side, rail, incarnation });
                }
            }
        }
    }

    /// The driver of a side learns that a rail is dead.
    pub(super) fn tell_rail_lost(&mut self, ch: usize, side: usize, rail: usize) {
        let now = self.instant(self.now);
        if let Some(mut conn) = self.channels[ch].sides[side].conn.take() {
            conn.rail_failed(rail, Cause::Transport, now);
            self.put_back(ch, side, conn);
            self.wake(ch, side, self.now);
        }
    }

    /// The protocol says that a rail is down: its queue pairs are destroyed, some time later.
    pub(super) fn on_rail_down(&mut self, ch: usize, side: usize, rail: usize) {
        self.summary.rails_down += 1;
        self.channels[ch].health[rail].ill = true;
        // The longest is longer than the grace of an abort, and shorter than a fence may take.
        let most = self.rng.pick(&[10, 2000, 60_000, 340_000]);
        let delay = self.rng.below(most);
        let incarnation = self.channels[ch].incarnation;
        self.at(delay, Happening::RailFence { ch, side, rail, incarnation });
        let lives = self.channels[ch].lives;
        self.model.disturb(lives);
    }

    /// What a caller does after `RailDown`: flush, destroy, tell.
    pub(super) fn rail_fence(&mut self, ch: usize, side: usize, rail: usize, incarnation: u32) {
        if incarnation != self.channels[ch].incarnation {
            return;
        }
        if self.ends[self.channels[ch].ends[side]].frozen {
            return self.at(1000, Happening::RailFence { ch, side, rail, incarnation });
        }
        if self.channels[ch].sides[side]
            .conn
            .as_ref()
            .is_none_or(|c| c.rail_state(rail) != RailState::Failing)
        {
            return;
        }
        self.show_received(ch, side);
        let Some(mut conn) = self.channels[ch].sides[side].conn.take() else { return };
        let now = self.instant(self.now);
        while let Some(item) = self.channels[ch].sides[side].cq.pop_front() {
            self.feed(ch, side, &mut conn, item, now);
        }
        let qps = self.channels[ch].qps_of(rail);
        // What was posted may still go through on the other side, or not.
        let dies = if self.channels[ch].shared.is_some() { 8 } else { 2 };
        for qp in qps.clone() {
            self.channels[ch].sides[side].queues[qp].dead |= self.rng.one_in(dies);
        }
        self.stop_reading_of(ch, side, qps.clone());
        for qp in qps {
            let by_device = self.channels[ch].shared.is_none();
            let queue = &mut self.channels[ch].sides[side].queues[qp];
            queue.gone = true;
            if by_device {
                queue.ring.clear();
            }
            for token in std::mem::take(&mut queue.outstanding) {
                conn.handle_sent(token, false, now);
            }
        }
        conn.rail_fenced(rail, now);
        if !self.rng.one_in(4) {
            let delay = self.rng.below(20_000);
            self.at(delay, Happening::RailProbe { ch, side, rail, incarnation });
        }
        self.put_back(ch, side, conn);
        self.wake(ch, side, self.now);
    }

    /// A side tries to bring a rail up again, if it may.
    pub(super) fn rail_probe(&mut self, ch: usize, side: usize, rail: usize, incarnation: u32) {
        if incarnation != self.channels[ch].incarnation {
            return;
        }
        let frozen = self.ends[self.channels[ch].ends[side]].frozen;
        let Some(mut conn) = self.channels[ch].sides[side].conn.take() else { return };
        let state = conn.rail_state(rail);
        if frozen || state == RailState::Fencing {
            self.channels[ch].sides[side].conn = Some(conn);
            return self.at(5000, Happening::RailProbe { ch, side, rail, incarnation });
        }
        let health = &mut self.channels[ch].health[rail];
        let next = conn.rails[rail].generation + 1;
        if state == RailState::Down && health.said[side] < next {
            health.said[side] = next;
            let told = conn.rail_talk(rail, next.to_le_bytes().to_vec());
            assert!(told.is_ok() || conn.state != State::Open, "k10: {told:?}");
        }
        self.rail_back(ch, side, rail, &mut conn);
        self.put_back(ch, side, conn);
        self.wake(ch, side, self.now);
    }

    /// The peer is ready to bring a rail up.
    pub(super) fn on_rail_talk(
        &mut self,
        ch: usize,
        side: usize,
        conn: &mut Connection,
        rail: usize,
        bytes: &[u8],
    ) {
        let generation = u32::from_le_bytes(bytes.try_into().expect("as it was said"));
        let heard = &mut self.channels[ch].health[rail].heard[side];
        assert_ne!(generation, *heard, "k10: a word about a rail twice");
        *heard = generation.max(*heard);
        self.rail_back(ch, side, rail, conn);
        // A side that had given it up tries again, since the other does.
        let delay = self.rng.below(3000);
        let incarnation = self.channels[ch].incarnation;
        self.at(delay, Happening::RailProbe { ch, side, rail, incarnation });
    }

    /// New queue pairs, if both sides are ready for them.
    fn rail_back(&mut self, ch: usize, side: usize, rail: usize, conn: &mut Connection) {
        let now = self.instant(self.now);
        let health = &mut self.channels[ch].health[rail];
        let next = conn.rails[rail].generation + 1;
        let ready = health.said[side] == next && health.heard[side] >= next;
        if !ready || conn.rail_state(rail) != RailState::Down || conn.state != State::Open {
            return;
        }
        let channel = &mut self.channels[ch];
        for qp in channel.qps_of(rail) {
            let receives = receives(channel.credits[side]);
            let listens = channel.listens[side];
            let fresh = super::wire::Queue { receives, listens, generation: next, ..Default::default() };
            channel.sides[side].queues[qp] = fresh;
        }
        channel.sides[side].revived_at = self.now;
        assert!(conn.rail_up(rail, now), "k10: a rail that is down on both sides does not come up");
        self.summary.rails_up += 1;
        let peer = self.channels[ch].sides[1 - side].conn.as_ref();
        let both = peer.is_some_and(|c| c.rails[rail].is_up() && c.rails[rail].generation == next);
        self.channels[ch].health[rail].ill = !both;
        // What the peer has posted meanwhile.
        for qp in self.channels[ch].qps_of(rail) {
            if self.channels[ch].shared.is_some() {
                self.serve(ch, 1 - side, qp);
                continue;
            }
            let held = std::mem::take(&mut self.channels[ch].sides[1 - side].queues[qp].ring);
            held.into_iter().for_each(|wr| self.execute(wr));
        }
    }

    /// A completion of a queue pair that is no more.
    pub(super) fn is_stale(&self, ch: usize, side: usize, item: &Item, generation: u32) -> bool {
        let qp = match item {
            Item::Imm(qp, _) | Item::Bytes(qp, _) | Item::Sent(qp, ..) => *qp,
        };
        let queue = &self.channels[ch].sides[side].queues[qp];
        queue.gone || queue.generation != generation
    }
}

/// Of a token that was posted on a queue pair: what is handed back must be of it.
pub(super) fn assert_of(qp: usize, token: Token) {
    assert_eq!(token.qp(), qp, "r5: a token of another queue pair");
}
