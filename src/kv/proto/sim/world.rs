//! Two endpoints, their users, and the loop that makes things happen in order of time.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::super::{
    AbortReason, Config, Connection, Credits, Event, Ledger, Notify, Opening, Outcome, Received, Resolution,
    Transmitted,
};
use super::Rng;
use super::model::{BLOCK_BYTES, BLOCKS, Context, Grant, GrantState, Life, Model, Pool, Transfer};
use super::wire::{Happening, Item, Posted, Queue, Timing};
use crate::kv::layout::Layout;

/// What a run, or many, have come to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) landed: u64,
    pub(super) not_delivered: u64,
    pub(super) in_doubt: u64,
    pub(super) resolved_landed: u64,
    pub(super) resolved_not: u64,
    pub(super) revoked: u64,
    pub(super) lost: u64,
    pub(super) reconnects: u64,
    pub(super) restarts: u64,
    pub(super) messages: u64,
    pub(super) closed: u64,
    pub(super) work_requests: u64,
    pub(super) micros: u64,
}

impl Summary {
    pub(super) fn add(&mut self, o: &Self) {
        self.landed += o.landed;
        self.not_delivered += o.not_delivered;
        self.in_doubt += o.in_doubt;
        self.resolved_landed += o.resolved_landed;
        self.resolved_not += o.resolved_not;
        self.revoked += o.revoked;
        self.lost += o.lost;
        self.reconnects += o.reconnects;
        self.restarts += o.restarts;
        self.messages += o.messages;
        self.closed += o.closed;
        self.work_requests += o.work_requests;
        self.micros += o.micros;
    }
}

/// One endpoint with its device and its user.
pub(super) struct Endpoint {
    pub(super) conn: Option<Connection>,
    pub(super) ledger: Option<Ledger>,
    pub(super) life: u32,
    pub(super) queues: Vec<Queue>,
    pub(super) cq: VecDeque<Item>,
    pub(super) wake: Option<u64>,
    pub(super) frozen: bool,
    /// It was frozen at some time: its own deadlines may be late.
    pub(super) was_frozen: bool,
    /// The queue pairs are destroyed.
    pub(super) fenced: bool,
    pub(super) sources: Pool,
    pub(super) targets: Pool,
    /// Grants of the peer: its life and the grant's number.
    pub(super) usable: Vec<(Life, u64)>,
    /// Messages that were accepted on this connection and not yet delivered to the peer.
    pub(super) messages: VecDeque<Vec<u8>>,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) start: Instant,
    pub(super) now: u64,
    pub(super) order: u64,
    pub(super) agenda: BTreeMap<(u64, u64), Happening>,
    pub(super) cfg: Config,
    /// Receives that each end posts on a queue pair.
    pub(super) credits: [Credits; 2],
    pub(super) depth: usize,
    /// A connection manager connects the queue pairs: one end speaks first.
    pub(super) by_cm: bool,
    pub(super) timing: Timing,
    pub(super) ends: [Endpoint; 2],
    pub(super) incarnation: u32,
    pub(super) model: Model,
    pub(super) actions: u32,
    pub(super) tags: u64,
    pub(super) faults: bool,
    pub(super) kills: u32,
    pub(super) closing: bool,
    pub(super) summary: Summary,
}

/// No run takes so long, in simulated microseconds.
const LIMIT: u64 = 600_000_000;
/// A transfer with so much time lands, if nothing goes wrong.
pub(super) const AMPLE: u64 = 60_000_000;

pub(super) fn epoch(life: Life) -> u64 {
    100 + life.0 as u64 + 10 * u64::from(life.1)
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let ordered = rng.one_in(2);
        let tiny = rng.one_in(2);
        let credits = |rng: &mut Rng| match tiny {
            true => Credits { data: rng.range(1, 8) as u32, control: rng.range(4, 8) as u32 },
            false => Credits { data: 64, control: 32 },
        };
        let credits = [credits(&mut rng), credits(&mut rng)];
        let cfg = Config {
            qps: rng.range(1, 4) as usize,
            notify: if ordered && rng.one_in(2) { Notify::Send } else { Notify::Imm },
            opening: Opening::Free,
            ordered,
            local_epoch: epoch((0, 0)),
            peer_epoch: epoch((1, 0)),
            tx_credits: credits[1],
            rx_credits: credits[0],
            max_control: if rng.one_in(2) { 256 } else { 1024 },
            max_write: rng.pick(&[16, 64, 100, 4096]),
            max_transfers: rng.pick(&[1, 2, 5, 16]),
            heartbeat: Duration::from_millis(30),
            peer_timeout: Duration::from_millis(400),
            abort_grace: Duration::from_millis(300),
        };
        let timing = Timing::new(&cfg, &mut rng);
        let layers = rng.range(1, 3) as u32;
        let end = |rng: &mut Rng, me: u64| {
            let mut pool = |base: u64, key: u32| {
                let gap = rng.pick(&[0, 0, 24]);
                let stride = BLOCK_BYTES + gap;
                let layout = Layout::new(layers, BLOCKS, BLOCK_BYTES, stride * u64::from(BLOCKS), stride);
                Pool::new(layout.expect("valid"), base, key)
            };
            Endpoint {
                conn: None,
                ledger: None,
                life: 0,
                queues: Vec::new(),
                cq: VecDeque::new(),
                wake: None,
                frozen: false,
                was_frozen: false,
                fenced: false,
                sources: pool(0x10_0000 * (me + 1), 10),
                targets: pool(0x1000_0000 * (me + 1), 20),
                usable: Vec::new(),
                messages: VecDeque::new(),
            }
        };
        let ends = [end(&mut rng, 0), end(&mut rng, 1)];
        let mut world = Self {
            start: Instant::now(),
            now: 0,
            order: 0,
            agenda: BTreeMap::new(),
            depth: if tiny { rng.range(6, 16) as usize } else { 128 },
            by_cm: rng.one_in(2),
            timing,
            ends,
            incarnation: 0,
            model: Model::default(),
            actions: rng.range(20, 120) as u32,
            tags: 0,
            faults: rng.one_in(2),
            kills: 0,
            closing: false,
            summary: Summary::default(),
            cfg,
            credits,
            rng,
        };
        world.kills = if world.faults { world.rng.range(1, 3) as u32 } else { 0 };
        world.connect();
        world.at(0, Happening::User);
        for _ in 0..world.kills {
            let when = world.rng.below(60_000);
            world.at(when, Happening::Kill);
        }
        world
    }

    pub(super) fn instant(&self, micros: u64) -> Instant {
        self.start + Duration::from_micros(micros)
    }

    pub(super) fn at(&mut self, delay: u64, what: Happening) {
        self.order += 1;
        self.agenda.insert((self.now + delay, self.order), what);
    }

    pub(super) fn life(&self, ep: usize) -> Life {
        (ep, self.ends[ep].life)
    }

    pub(super) fn wake(&mut self, ep: usize, at: u64) {
        let end = &mut self.ends[ep];
        end.wake = Some(end.wake.map_or(at, |w| w.min(at)));
    }

    pub(super) fn connect(&mut self) {
        self.incarnation += 1;
        self.closing = false;
        let lives = [self.life(0), self.life(1)];
        let now = self.instant(self.now);
        let dials = self.rng.below(2) as usize;
        for ep in 0..2 {
            let (local_epoch, peer_epoch) = (epoch(lives[ep]), epoch(lives[1 - ep]));
            let (ours, theirs) = (self.credits[ep], self.credits[1 - ep]);
            let mut cfg = Config { local_epoch, peer_epoch, ..self.cfg.clone() };
            (cfg.tx_credits, cfg.rx_credits) = (theirs, ours);
            cfg.opening = match self.by_cm {
                false => Opening::Free,
                true if ep == dials => Opening::Speak,
                true => Opening::Listen,
            };
            let listens = cfg.opening == Opening::Listen;
            let end = &mut self.ends[ep];
            let ledger = end.ledger.take().unwrap_or_else(|| Ledger::new(local_epoch, peer_epoch));
            let receives = cfg.rx_credits.data + cfg.rx_credits.control;
            end.conn = Some(Connection::new(cfg, ledger, now).expect("valid"));
            end.queues = vec![Queue { receives, listens, ..Queue::default() }; self.cfg.qps];
            end.cq.clear();
            end.messages.clear();
            end.fenced = false;
            self.wake(ep, self.now);
        }
    }

    pub(super) fn run(mut self) -> Summary {
        loop {
            assert!(self.now < LIMIT, "k5: something waits for ever: {}", self.waiting());
            let wakes =
                (0..2).filter(|&e| !self.ends[e].frozen).filter_map(|e| Some((self.ends[e].wake?, e))).min();
            let next = self.agenda.first_key_value().map(|(&k, _)| k);
            match (wakes, next) {
                (Some((w, ep)), n) if n.is_none_or(|(t, _)| w <= t) => {
                    self.now = self.now.max(w);
                    self.on_wake(ep);
                }
                (_, Some((t, _))) => {
                    self.now = self.now.max(t);
                    let (_, what) = self.agenda.pop_first().expect("just seen");
                    self.on_happening(what);
                }
                _ => break,
            }
            self.finish_if_quiet();
        }
        self.check_end();
        self.summary.micros = self.now;
        self.summary
    }

    /// What has not ended, for a failure's message.
    pub(super) fn waiting(&self) -> String {
        let mut out = format!("closing {}, {} on the agenda; ", self.closing, self.agenda.len());
        for (ep, e) in self.ends.iter().enumerate() {
            let state = e.conn.as_ref().map(|c| format!("{:?}", c.state));
            out += &format!("end {ep}: {state:?}, fenced {}, frozen {}; ", e.fenced, e.frozen);
        }
        for (key, t) in self.model.transfers.iter().filter(|(_, t)| t.done.is_none() || !t.released) {
            out += &format!("{key:?}: {t:?}; ");
        }
        for (key, g) in self.model.grants.iter().filter(|(_, g)| g.state == GrantState::Aborted) {
            out += &format!("{key:?}: {g:?}; ");
        }
        out
    }

    pub(super) fn on_happening(&mut self, what: Happening) {
        match what {
            Happening::Execute(wr) => self.execute(wr),
            Happening::Complete { ep, qp, token, mut ok, incarnation } => {
                if incarnation != self.incarnation || self.ends[ep].fenced {
                    return;
                }
                let queue = &mut self.ends[ep].queues[qp];
                let lost = queue.failed || (queue.dead && self.rng.one_in(2));
                ok &= !lost;
                queue.failed |= !ok;
                if !ok {
                    self.show_received(ep);
                }
                self.deliver(ep, Item::Sent(qp, token, ok));
            }
            Happening::Receive { ep, item, incarnation } => {
                if incarnation == self.incarnation && !self.ends[ep].fenced {
                    self.deliver(ep, item);
                }
            }
            Happening::User => {
                let ep = self.rng.below(2) as usize;
                self.act(ep);
                if self.actions > 0 {
                    self.actions -= 1;
                    let pause = self.rng.pick(&[1, 100, 2000]);
                    let pause = self.rng.below(pause);
                    self.at(pause, Happening::User);
                }
            }
            Happening::Kill => self.kill(),
            Happening::Thaw { ep } => {
                self.ends[ep].frozen = false;
                self.wake(ep, self.now);
            }
            Happening::Fence { ep, incarnation } => self.fence(ep, incarnation),
            Happening::Reconnect => {
                if self.rng.one_in(4) {
                    let ep = self.rng.below(2) as usize;
                    self.restart(ep);
                }
                self.summary.reconnects += 1;
                self.connect();
            }
        }
    }

    pub(super) fn deliver(&mut self, ep: usize, item: Item) {
        self.ends[ep].cq.push_back(item);
        let at = self.now + self.rng.below(50);
        self.wake(ep, at);
    }

    pub(super) fn on_wake(&mut self, ep: usize) {
        self.ends[ep].wake = None;
        let now = self.instant(self.now);
        let Some(mut conn) = self.ends[ep].conn.take() else { return };
        while let Some(item) = self.ends[ep].cq.pop_front() {
            self.feed(ep, &mut conn, item, now);
            self.events(ep, &mut conn);
        }
        if conn.poll_timeout().is_some_and(|t| t <= now) {
            conn.handle_timeout(now);
        }
        self.transmit(ep, &mut conn, now);
        self.events(ep, &mut conn);
        if let Some(t) = conn.poll_timeout() {
            let at = t.duration_since(self.start).as_nanos().div_ceil(1000) as u64;
            self.wake(ep, at.max(self.now));
        }
        self.ends[ep].conn = Some(conn);
    }

    pub(super) fn feed(&mut self, ep: usize, conn: &mut Connection, item: Item, now: Instant) {
        match item {
            Item::Sent(qp, token, ok) => {
                let outstanding = &mut self.ends[ep].queues[qp].outstanding;
                let at = outstanding.iter().position(|t| *t == token).expect("completed what was posted");
                outstanding.remove(at);
                conn.handle_sent(token, ok, now);
            }
            Item::Imm(qp, imm) => {
                conn.handle_recv(qp, Received::Imm(imm), now).expect("the peer is sound");
                self.ends[ep].queues[qp].took_receive();
            }
            Item::Bytes(qp, bytes) => {
                conn.handle_recv(qp, Received::Bytes(&bytes), now).expect("the peer is sound");
                self.ends[ep].queues[qp].took_receive();
            }
        }
    }

    pub(super) fn transmit(&mut self, ep: usize, conn: &mut Connection, now: Instant) {
        loop {
            let mut sink = Posted {
                depth: self.depth,
                max_control: self.cfg.max_control,
                max_write: self.cfg.max_write,
                queues: &mut self.ends[ep].queues,
                posted: Vec::new(),
            };
            let more = conn.poll_transmit(now, &mut sink);
            for (qp, op, token) in sink.posted {
                self.post(ep, qp, op, token);
            }
            if more == Transmitted::Idle {
                return;
            }
        }
    }

    pub(super) fn events(&mut self, ep: usize, conn: &mut Connection) {
        while let Some(event) = conn.poll_event() {
            let (me, peer) = (self.life(ep), self.life(1 - ep));
            let slack = self.cfg.abort_grace.as_micros() as u64 + 5_000;
            let end = &mut self.ends[ep];
            let mut cx = Context {
                me,
                peer,
                now: self.now,
                slack: (!end.was_frozen).then_some(slack),
                sources: &mut end.sources,
                targets: &mut end.targets,
            };
            self.model.on_event(&mut cx, &event);
            let s = &mut self.summary;
            match event {
                Event::Done { outcome: Outcome::Landed, .. } => s.landed += 1,
                Event::Done { outcome: Outcome::NotDelivered(_), .. } => s.not_delivered += 1,
                Event::Done { outcome: Outcome::InDoubt(_), .. } => s.in_doubt += 1,
                Event::Resolved { resolution: Resolution::Landed, .. } => s.resolved_landed += 1,
                Event::Resolved { resolution: Resolution::NotDelivered, .. } => s.resolved_not += 1,
                Event::Aborted { reason: AbortReason::Revoked, .. } => s.revoked += 1,
                Event::Message(bytes) => {
                    s.messages += 1;
                    let want = self.ends[1 - ep].messages.pop_front();
                    if let Some(conn) = &mut self.ends[ep].conn {
                        conn.message_taken(bytes.len());
                    }
                    assert_eq!(want.as_ref(), Some(&bytes), "k3: messages out of order");
                    if let [b'g', id @ ..] = bytes.as_slice()
                        && let Ok(id) = id.try_into()
                    {
                        self.ends[ep].usable.push((peer, u64::from_le_bytes(id)));
                    }
                }
                Event::Lost(cause) => {
                    s.lost += 1;
                    // Where a CLOSE completes at hand-off, it may be lost with the queue pairs that it ends.
                    let excused = self.closing && self.timing.early_completion;
                    assert!(self.faults || excused, "lost without a fault: {cause}");
                    let delay = self.rng.below(2000);
                    self.at(delay, Happening::Fence { ep, incarnation: self.incarnation });
                }
                Event::Closed => {
                    s.closed += 1;
                    self.ends[ep].fenced = true;
                    self.ends[ep].wake = None;
                }
                _ => {}
            }
        }
    }

    /// A process ends and a new one takes its place.
    pub(super) fn restart(&mut self, ep: usize) {
        self.summary.restarts += 1;
        let life = self.life(ep);
        self.model.forget(life);
        let end = &mut self.ends[ep];
        end.life += 1;
        end.ledger = None;
        end.usable.clear();
        for pool in [&mut end.sources, &mut end.targets] {
            pool.owner.fill(None);
            pool.bytes.fill(0xee);
        }
    }

    /// With nothing left to happen: everything must be at rest. Then both sides close.
    pub(super) fn finish_if_quiet(&mut self) {
        let busy = self.actions > 0 || self.closing || !self.agenda.is_empty();
        let pending =
            |e: &Endpoint| !e.cq.is_empty() || e.conn.is_none() || e.wake.is_some_and(|w| w <= self.now);
        if busy || self.ends.iter().any(pending) {
            return;
        }
        let over = |t: &Transfer| t.done.is_some() && t.released;
        let settled = |g: &Grant| g.state != GrantState::Aborted;
        if !self.model.transfers.values().all(over) || !self.model.grants.values().all(settled) {
            return;
        }
        for t in self.model.transfers.values().filter(|t| matches!(t.done, Some(Outcome::NotDelivered(_)))) {
            let open =
                self.model.grants.get(&(t.receiver, t.grant)).is_some_and(|g| g.state == GrantState::Open);
            assert!(!open, "k4: the receiver was never told of {t:?}");
        }
        let [Some(a), Some(b)] = [&self.ends[0].conn, &self.ends[1].conn] else { return };
        if [a, b].iter().any(|c| c.poll_timeout().is_none()) {
            // Lost, which its user has not noticed.
            return;
        }
        a.assert_at_rest(b);
        b.assert_at_rest(a);
        self.closing = true;
        let both = self.rng.one_in(2);
        for ep in 0..2 {
            if ep == 0 || both {
                let now = self.instant(self.now);
                let deadline = self.instant(self.now + 2_000_000);
                if let Some(conn) = &mut self.ends[ep].conn {
                    conn.close(deadline, now);
                }
                self.wake(ep, self.now);
            }
        }
    }

    pub(super) fn check_end(&self) {
        for ((life, id), t) in &self.model.transfers {
            assert!(t.done.is_some() && t.released, "k5: transfer {id} of {life:?} never ended: {t:?}");
        }
        let reconnected = self.ends.iter().all(|e| e.conn.is_some());
        for ((life, id), g) in &self.model.grants {
            let open = self.ends[life.0].ledger.as_ref().is_some_and(|l| l.open_grants().any(|g| g == *id));
            assert!(
                g.state != GrantState::Aborted || (!reconnected && open),
                "k4: grant {id} is never freed"
            );
        }
        for ((life, id), t) in &self.model.transfers {
            let in_doubt = matches!(t.done, Some(Outcome::InDoubt(_)));
            assert!(
                !reconnected || !in_doubt || t.resolution.is_some(),
                "k2: {id} of {life:?} is in doubt for ever"
            );
        }
        if reconnected {
            assert!(self.ends.iter().all(|e| e.fenced), "k5: a close never ends");
        }
    }
}
