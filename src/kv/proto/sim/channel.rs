//! What a driver does with a connection: hands in completions, posts, takes events.

use std::time::Instant;

use super::super::{AbortReason, Connection, Event, Outcome, Received, Resolution, Transmitted};
use super::model::Context;
use super::setup::Channel;
use super::wire::{Happening, Item, Posted};
use super::world::World;

/// What a user may take to react, beyond the grace of the protocol.
const REACTION: u64 = 5_000;

impl Channel {
    /// By how much an end may be later than its deadline. What is stuck on one of several rails waits until that one has failed and
    /// is fenced, and so may what is behind it on another.
    pub(super) fn slack(&self) -> u64 {
        let (grace, fence) = (self.cfg.abort_grace, self.cfg.abort_grace + self.cfg.peer_timeout);
        let longest = if self.cfg.rails.len() > 1 { (grace + fence) * 2 } else { grace };
        longest.as_micros() as u64 + REACTION
    }
}

impl World {
    /// Puts a completion into the queue of a side, which polls soon.
    pub(super) fn show(&mut self, ch: usize, side: usize, mut item: Item) {
        if let Item::Sent(qp, _, ok) = &mut item {
            let queue = &mut self.channels[ch].sides[side].queues[*qp];
            let lost = queue.failed || (queue.dead && self.rng.one_in(2));
            *ok &= !lost;
            queue.failed |= !*ok;
            if !*ok {
                self.show_received(ch, side);
            }
        }
        self.channels[ch].sides[side].cq.push_back(item);
        let at = self.now + self.rng.below(50);
        self.wake(ch, side, at);
    }

    pub(super) fn on_wake(&mut self, ch: usize, side: usize) {
        let s = &mut self.channels[ch].sides[side];
        s.wake = None;
        let Some(mut conn) = s.conn.take() else { return };
        let now = self.instant(self.now);
        while let Some(item) = self.channels[ch].sides[side].cq.pop_front() {
            self.feed(ch, side, &mut conn, item, now);
            self.events(ch, side, &mut conn);
        }
        if conn.poll_timeout().is_some_and(|t| t <= now) {
            conn.handle_timeout(now);
        }
        self.transmit(ch, side, &mut conn, now);
        self.put_back(ch, side, conn);
    }

    /// After a call into a connection: its events, and when it is to be called again.
    pub(super) fn put_back(&mut self, ch: usize, side: usize, mut conn: Connection) {
        self.events(ch, side, &mut conn);
        if let Some(t) = conn.poll_timeout() {
            let at = self.micros(t).max(self.now);
            self.wake(ch, side, at);
        }
        if conn.is_closed() {
            self.summary.closed += 1;
            let unheard = &self.channels[ch].sides[1 - side].messages;
            assert!(unheard.is_empty(), "k3: closed, and {} messages were not delivered", unheard.len());
            self.ended(ch, side, conn);
        } else {
            self.channels[ch].sides[side].conn = Some(conn);
        }
    }

    /// The queue pairs of a side are destroyed and its connection is over. When both are, there may be another.
    pub(super) fn ended(&mut self, ch: usize, side: usize, conn: Connection) {
        self.end_loans(ch, side);
        let s = &mut self.channels[ch].sides[side];
        s.ledger = Some(conn.into_ledger());
        s.fenced = true;
        s.closed = true;
        s.wake = None;
        s.silent_since = Some(self.now);
        self.reconnect(ch);
    }

    pub(super) fn reconnect(&mut self, ch: usize) {
        let channel = &mut self.channels[ch];
        let over = channel.sides.iter().all(|s| s.conn.is_none());
        let finished = channel.last && channel.sides.iter().all(|s| s.ledger.is_some());
        if over && !finished && !channel.reconnecting && !self.rng.one_in(6) {
            channel.reconnecting = true;
            channel.last = false;
            let delay = self.rng.below(3000);
            self.at(delay, Happening::Reconnect { ch });
        }
    }

    pub(super) fn feed(&mut self, ch: usize, side: usize, conn: &mut Connection, item: Item, now: Instant) {
        let queues = &mut self.channels[ch].sides[side].queues;
        match item {
            Item::Sent(qp, token, ok) => {
                let outstanding = &mut queues[qp].outstanding;
                let at = outstanding.iter().position(|t| *t == token).expect("completed what was posted");
                outstanding.remove(at);
                conn.handle_sent(token, ok, now);
            }
            Item::Imm(qp, imm) => {
                conn.handle_recv(qp, Received::Imm(imm), now).expect("the peer is sound");
                queues[qp].took_receive();
            }
            Item::Bytes(qp, bytes) => {
                conn.handle_recv(qp, Received::Bytes(&bytes), now).expect("the peer is sound");
                queues[qp].took_receive();
            }
        }
    }

    fn transmit(&mut self, ch: usize, side: usize, conn: &mut Connection, now: Instant) {
        loop {
            let channel = &mut self.channels[ch];
            let mut sink = Posted {
                depth: channel.depth,
                max_control: channel.cfg.max_control,
                max_write: channel.cfg.rails.iter().flat_map(|r| vec![r.max_write; r.qps]).collect(),
                max_reads: channel.cfg.rails.iter().flat_map(|r| vec![r.max_reads; r.qps]).collect(),
                queues: &mut channel.sides[side].queues,
                posted: Vec::new(),
            };
            let more = conn.poll_transmit(now, &mut sink);
            for (qp, op, token) in sink.posted {
                self.post(ch, side, qp, op, token);
            }
            if more == Transmitted::Idle {
                return;
            }
        }
    }

    pub(super) fn events(&mut self, ch: usize, side: usize, conn: &mut Connection) {
        while let Some(event) = conn.poll_event() {
            self.trace(|| format!("channel {ch}, side {side}: {event:?}"));
            if self.on_read_event(ch, side, conn, &event) {
                continue;
            }
            let channel = &self.channels[ch];
            let (me, peer) = (channel.lives[side], channel.lives[1 - side]);
            let slack = channel.slack();
            let end = &mut self.ends[me.0];
            let mut cx = Context {
                me,
                peer,
                now: self.now,
                slack: (!end.was_frozen).then_some(slack),
                max_write: (!channel.has_rails()).then(|| channel.cfg.rails[0].max_write),
                sources: &mut end.sources,
                targets: &mut end.targets,
            };
            self.model.on_event(&mut cx, &event);
            let s = &mut self.summary;
            match event {
                Event::Done { outcome: Outcome::Landed, attempts, .. } => {
                    s.landed += 1;
                    s.again += u64::from(attempts > 1);
                }
                Event::Done { outcome: Outcome::NotDelivered(_), .. } => s.not_delivered += 1,
                Event::Done { outcome: Outcome::InDoubt(_), .. } => s.in_doubt += 1,
                Event::Resolved { resolution: Resolution::Landed, .. } => s.resolved_landed += 1,
                Event::Resolved { resolution: Resolution::NotDelivered, .. } => s.resolved_not += 1,
                Event::Resolved { resolution: Resolution::Unknown, .. } => s.resolved_unknown += 1,
                Event::Aborted { reason: AbortReason::Revoked, .. } => s.revoked += 1,
                Event::RailDown { rail, .. } => self.on_rail_down(ch, side, rail),
                Event::RailTalk { rail, bytes } => self.on_rail_talk(ch, side, conn, rail, &bytes),
                Event::Message(bytes) => self.on_message(ch, side, conn, &bytes),
                Event::Lost(cause) => {
                    s.lost += 1;
                    // Where a CLOSE completes at hand-off, it may be lost with the queue pairs that it ends.
                    let early = channel.timing.lines.iter().any(|l| l.early_completion);
                    let excused = channel.closing && early;
                    assert!(self.faults || excused, "lost without a fault: {cause}");
                    let delay = self.rng.below(2000);
                    let incarnation = self.channels[ch].incarnation;
                    self.at(delay, Happening::Fence { ch, side, incarnation });
                }
                _ => {}
            }
        }
    }

    fn on_message(&mut self, ch: usize, side: usize, conn: &mut Connection, bytes: &[u8]) {
        self.summary.messages += 1;
        let channel = &mut self.channels[ch];
        let peer = channel.lives[1 - side];
        // A process that is gone has taken its list with it.
        if self.ends[peer.0].life == peer.1 {
            let want = channel.sides[1 - side].messages.pop_front();
            assert_eq!(want.as_deref(), Some(bytes), "k3: messages out of order");
        }
        conn.message_taken(bytes.len());
        if let [b'g', id @ ..] = bytes
            && let Ok(id) = id.try_into()
        {
            let me = channel.lives[side].0;
            channel.sides[side].usable.push((peer, me, u64::from_le_bytes(id)));
        }
    }
}
