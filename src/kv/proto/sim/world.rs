//! Two endpoints, their users, and the loop that makes things happen in order of time.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::super::{
    AbortReason, Cause, Config, Connection, Credits, Event, GrantRef, Ledger, Notify, Outcome, PlanBuilder,
    Received, Refused, Resolution, Token, TransferId, Transmitted, WriteRequest,
};
use super::Rng;
use super::model::{BLOCK_BYTES, BLOCKS, Context, Grant, GrantState, Life, Model, Pool, Transfer};
use super::wire::{Happening, Item, Op, Posted, Queue, Timing, Wr};
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
struct Endpoint {
    conn: Option<Connection>,
    ledger: Option<Ledger>,
    life: u32,
    queues: Vec<Queue>,
    cq: VecDeque<Item>,
    wake: Option<u64>,
    frozen: bool,
    /// It was frozen at some time: its own deadlines may be late.
    was_frozen: bool,
    /// The queue pairs are destroyed.
    fenced: bool,
    sources: Pool,
    targets: Pool,
    /// Grants of the peer: its life and the grant's number.
    usable: Vec<(Life, u64)>,
    /// Messages that were accepted on this connection and not yet delivered to the peer.
    messages: VecDeque<Vec<u8>>,
}

pub(super) struct World {
    rng: Rng,
    start: Instant,
    now: u64,
    order: u64,
    agenda: BTreeMap<(u64, u64), Happening>,
    cfg: Config,
    depth: usize,
    timing: Timing,
    ends: [Endpoint; 2],
    incarnation: u32,
    model: Model,
    actions: u32,
    tags: u64,
    faults: bool,
    kills: u32,
    closing: bool,
    summary: Summary,
}

/// No run takes so long, in simulated microseconds.
const LIMIT: u64 = 600_000_000;
/// A transfer with so much time lands, if nothing goes wrong.
const AMPLE: u64 = 60_000_000;

fn epoch(life: Life) -> u64 {
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
        // Credits are the same in both directions, so that one configuration serves both ends.
        let both = credits(&mut rng);
        let cfg = Config {
            qps: rng.range(1, 4) as usize,
            notify: if ordered && rng.one_in(2) { Notify::Send } else { Notify::Imm },
            ordered,
            local_epoch: epoch((0, 0)),
            peer_epoch: epoch((1, 0)),
            tx_credits: both,
            rx_credits: both,
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
                let layout = Layout::new(layers, BLOCKS, BLOCK_BYTES, stride * u64::from(BLOCKS), stride, 0);
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

    fn instant(&self, micros: u64) -> Instant {
        self.start + Duration::from_micros(micros)
    }

    fn at(&mut self, delay: u64, what: Happening) {
        self.order += 1;
        self.agenda.insert((self.now + delay, self.order), what);
    }

    fn life(&self, ep: usize) -> Life {
        (ep, self.ends[ep].life)
    }

    fn wake(&mut self, ep: usize, at: u64) {
        let end = &mut self.ends[ep];
        end.wake = Some(end.wake.map_or(at, |w| w.min(at)));
    }

    fn connect(&mut self) {
        self.incarnation += 1;
        self.closing = false;
        let lives = [self.life(0), self.life(1)];
        let now = self.instant(self.now);
        for ep in 0..2 {
            let (local_epoch, peer_epoch) = (epoch(lives[ep]), epoch(lives[1 - ep]));
            let cfg = Config { local_epoch, peer_epoch, ..self.cfg.clone() };
            let end = &mut self.ends[ep];
            let ledger = end.ledger.take().unwrap_or_else(|| Ledger::new(local_epoch, peer_epoch));
            let receives = cfg.rx_credits.data + cfg.rx_credits.control;
            end.conn = Some(Connection::new(cfg, ledger, now).expect("valid"));
            end.queues = vec![Queue { receives, ..Queue::default() }; self.cfg.qps];
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
    fn waiting(&self) -> String {
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

    fn on_happening(&mut self, what: Happening) {
        match what {
            Happening::Execute(wr) => self.execute(wr),
            Happening::Complete { ep, qp, token, mut ok, incarnation } => {
                if incarnation != self.incarnation || self.ends[ep].fenced {
                    return;
                }
                let queue = &mut self.ends[ep].queues[qp];
                ok &= !queue.failed && !(queue.dead && self.rng.one_in(2));
                queue.failed |= !ok;
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

    /// A connection dies on some queue pairs, or a process freezes.
    fn kill(&mut self) {
        if self.closing || self.ends.iter().any(|e| e.conn.is_none()) {
            return;
        }
        if self.rng.one_in(3) {
            let ep = self.rng.below(2) as usize;
            if !self.ends[ep].frozen {
                self.ends[ep].frozen = true;
                self.ends[ep].was_frozen = true;
                let longest = self.rng.pick(&[100_000, 2_000_000]);
                let time = self.rng.below(longest);
                self.at(time, Happening::Thaw { ep });
            }
            return;
        }
        for ep in 0..2 {
            for qp in 0..self.cfg.qps {
                self.ends[ep].queues[qp].dead |= !self.rng.one_in(4);
            }
            if self.rng.one_in(3) {
                // The driver tells; otherwise a failed work request or silence will.
                let now = self.instant(self.now);
                if let Some(conn) = &mut self.ends[ep].conn {
                    conn.connection_lost(Cause::Transport, now);
                }
                self.wake(ep, self.now);
            }
        }
    }

    fn deliver(&mut self, ep: usize, item: Item) {
        self.ends[ep].cq.push_back(item);
        let at = self.now + self.rng.below(50);
        self.wake(ep, at);
    }

    fn execute(&mut self, wr: Wr) {
        if wr.incarnation != self.incarnation {
            return;
        }
        let (from, to) = (wr.from, 1 - wr.from);
        let dead = self.ends[from].queues[wr.qp].dead || self.ends[to].fenced;
        if dead {
            // The device tries again for a while, then gives up.
            return self.fail(&wr);
        }
        let takes_receive = !matches!(wr.op, Op::Write { imm: None, .. });
        if takes_receive && self.ends[to].queues[wr.qp].receives == 0 {
            let open = self.ends[to].conn.as_ref().is_some_and(|c| c.poll_timeout().is_some());
            assert!(!open, "k7: a message with no receive posted, on queue pair {}", wr.qp);
            return self.fail(&wr);
        }
        self.summary.work_requests += 1;
        let item = match &wr.op {
            Op::Write { piece, imm } => {
                if piece.len > 0 {
                    self.place(&wr, piece);
                }
                imm.map(|imm| Item::Imm(wr.qp, imm))
            }
            Op::Send(bytes) => Some(Item::Bytes(wr.qp, bytes.clone())),
        };
        if let Some(item) = item {
            let queue = &mut self.ends[to].queues[wr.qp];
            queue.receives -= 1;
            let mut at = self.now + if self.rng.one_in(2) { 0 } else { self.timing.delay(&mut self.rng) };
            if self.timing.ordered {
                at = at.max(queue.shows);
                queue.shows = at;
            }
            self.at(at - self.now, Happening::Receive { ep: to, item, incarnation: wr.incarnation });
        }
        if !self.timing.early_completion {
            self.complete(&wr, 0, true);
        }
    }

    /// The source's device gives up on a work request, or, if that had completed early, on its queue pair.
    fn fail(&mut self, wr: &Wr) {
        self.ends[wr.from].queues[wr.qp].dead = true;
        if !self.timing.early_completion {
            return self.complete(wr, 5000, false);
        }
        let now = self.instant(self.now);
        if let Some(conn) = &mut self.ends[wr.from].conn {
            conn.connection_lost(Cause::Transport, now);
            self.wake(wr.from, self.now);
        }
    }

    fn place(&mut self, wr: &Wr, piece: &super::super::Piece) {
        let (from, to) = (wr.from, 1 - wr.from);
        let id = wr.token.0 >> 1;
        let (sender, receiver) = (self.life(from), self.life(to));
        let data = match &wr.data {
            Some(data) => data.clone(),
            None => self.read(from, id, piece),
        };
        let targets = &mut self.ends[to].targets;
        let offset = targets.offset(piece.dst_addr, piece.len, piece.rkey);
        self.model.on_placed(sender, receiver, id, offset, piece, targets);
        targets.bytes[offset..offset + data.len()].copy_from_slice(&data);
    }

    /// The source's device reads.
    fn read(&self, ep: usize, id: u64, piece: &super::super::Piece) -> Vec<u8> {
        let sources = &self.ends[ep].sources;
        let offset = sources.offset(piece.src_addr, piece.len, piece.lkey);
        for block in sources.blocks_at(offset, piece.len as usize) {
            assert_eq!(sources.owner[block as usize], Some(id), "r1: a released source is read");
        }
        sources.bytes[offset..offset + piece.len as usize].to_vec()
    }

    fn complete(&mut self, wr: &Wr, least: u64, ok: bool) {
        let queue_time = self.ends[wr.from].queues[wr.qp].completes;
        let mut at = self.now + least + self.timing.delay(&mut self.rng);
        if self.timing.ordered {
            at = at.max(queue_time);
            self.ends[wr.from].queues[wr.qp].completes = at;
        }
        let done =
            Happening::Complete { ep: wr.from, qp: wr.qp, token: wr.token, ok, incarnation: wr.incarnation };
        self.at(at - self.now, done);
    }

    fn on_wake(&mut self, ep: usize) {
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

    fn feed(&mut self, ep: usize, conn: &mut Connection, item: Item, now: Instant) {
        match item {
            Item::Sent(qp, token, ok) => {
                let outstanding = &mut self.ends[ep].queues[qp].outstanding;
                let at = outstanding.iter().position(|t| *t == token).expect("completed what was posted");
                outstanding.remove(at);
                conn.handle_sent(token, ok, now);
            }
            Item::Imm(qp, imm) => {
                conn.handle_recv(qp, Received::Imm(imm), now).expect("the peer is sound");
                self.ends[ep].queues[qp].receives += 1;
            }
            Item::Bytes(qp, bytes) => {
                conn.handle_recv(qp, Received::Bytes(&bytes), now).expect("the peer is sound");
                self.ends[ep].queues[qp].receives += 1;
            }
        }
    }

    fn transmit(&mut self, ep: usize, conn: &mut Connection, now: Instant) {
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

    fn post(&mut self, from: usize, qp: usize, op: Op, token: Token) {
        let mut at = self.now + self.timing.delay(&mut self.rng);
        if self.timing.ordered {
            at = at.max(self.ends[from].queues[qp].executes);
            self.ends[from].queues[qp].executes = at;
        }
        let mut wr = Wr { from, qp, op, token, incarnation: self.incarnation, data: None };
        if self.timing.early_completion {
            if let Op::Write { piece, .. } = &wr.op
                && piece.len > 0
            {
                wr.data = Some(self.read(from, token.0 >> 1, piece));
            }
            self.complete(&wr, 0, true);
        }
        self.at(at - self.now, Happening::Execute(wr));
    }

    fn events(&mut self, ep: usize, conn: &mut Connection) {
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
                    assert_eq!(want.as_ref(), Some(&bytes), "k3: messages out of order");
                    if let [b'g', id @ ..] = bytes.as_slice()
                        && let Ok(id) = id.try_into()
                    {
                        self.ends[ep].usable.push((peer, u64::from_le_bytes(id)));
                    }
                }
                Event::Lost(cause) => {
                    s.lost += 1;
                    assert!(self.faults, "lost without a fault: {cause}");
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

    /// The user of an endpoint does something.
    fn act(&mut self, ep: usize) {
        if self.ends[ep].frozen || self.closing {
            return;
        }
        let Some(mut conn) = self.ends[ep].conn.take() else { return };
        match self.rng.below(20) {
            0..8 => self.act_grant(ep, &mut conn),
            8..16 => self.act_write(ep, &mut conn),
            16 => {
                let me = self.life(ep);
                let live = self.model.transfers.iter().filter(|((l, _), t)| *l == me && t.done.is_none());
                let live: Vec<u64> = live.map(|((_, id), _)| *id).collect();
                if !live.is_empty() {
                    let id = self.rng.pick(&live);
                    self.model.transfers.get_mut(&(me, id)).expect("live").ample = false;
                    conn.abort(TransferId(id), self.instant(self.now));
                }
            }
            17 => {
                let me = self.life(ep);
                let open =
                    self.model.grants.iter().filter(|((l, _), g)| *l == me && g.state == GrantState::Open);
                let open: Vec<u64> = open.map(|((_, id), _)| *id).collect();
                if !open.is_empty() && conn.poll_timeout().is_some() {
                    let id = self.rng.pick(&open);
                    self.model.grants.get_mut(&(me, id)).expect("open").revoked = true;
                    conn.revoke_grant(id, self.instant(self.now));
                }
            }
            _ => {
                let most = self.rng.pick(&[1, 2, 300, 3000]);
                let len = self.rng.below(most);
                let message: Vec<u8> = (0..len).map(|i| i as u8).collect();
                if conn.send_message(message.clone()).is_ok() {
                    self.ends[ep].messages.push_back(message);
                }
            }
        }
        self.events(ep, &mut conn);
        self.ends[ep].conn = Some(conn);
        self.wake(ep, self.now);
    }

    fn act_grant(&mut self, ep: usize, conn: &mut Connection) {
        let me = self.life(ep);
        let mut blocks = self.ends[ep].targets.free_blocks();
        let want = self.rng.range(1, 6) as usize;
        if blocks.len() < want || conn.poll_timeout().is_none() {
            return;
        }
        // Mostly neighbours, sometimes not.
        let at = self.rng.below((blocks.len() - want + 1) as u64) as usize;
        blocks = blocks[at..at + want].to_vec();
        if self.rng.one_in(3) {
            blocks.reverse();
        }
        let id = conn.issue_grant(
            blocks.len() as u64 * BLOCK_BYTES * u64::from(self.ends[ep].targets.layout.layers()),
        );
        for &b in &blocks {
            self.ends[ep].targets.owner[b as usize] = Some(id);
        }
        let state = GrantState::Open;
        let fresh = self.model.grants.insert((me, id), Grant { blocks, state, revoked: false });
        assert!(fresh.is_none(), "k6: a grant number used twice");
        if self.rng.one_in(2) {
            let message = [b"g".as_slice(), &id.to_le_bytes()].concat();
            if conn.send_message(message.clone()).is_ok() {
                self.ends[ep].messages.push_back(message);
            }
        } else {
            self.ends[1 - ep].usable.push((me, id));
        }
    }

    fn act_write(&mut self, ep: usize, conn: &mut Connection) {
        if self.ends[ep].usable.is_empty() {
            return;
        }
        let (me, peer) = (self.life(ep), self.life(1 - ep));
        let at = self.rng.below(self.ends[ep].usable.len() as u64) as usize;
        let (owner, id) = self.ends[ep].usable[at];
        // Sometimes a grant is kept, to be used again.
        if !self.rng.one_in(8) {
            self.ends[ep].usable.remove(at);
        }
        let sources = self.ends[ep].sources.free_blocks();
        let (granted, revoked) = match self.model.grants.get(&(owner, id)) {
            Some(g) => (
                g.blocks.clone(),
                g.revoked || g.state == GrantState::Aborted || g.state == GrantState::Freed,
            ),
            None => ((0..3).collect(), false),
        };
        let count = self.rng.below(granted.len() as u64 + 1) as usize;
        if sources.len() < count {
            return;
        }
        let sources = sources[..count].to_vec();
        let tag = self.tags;
        self.tags += 1;
        let (from, to) = (&self.ends[ep].sources, &self.ends[1 - ep].targets);
        let mut plan =
            PlanBuilder::new((&from.layout, &from.seams()), (&to.layout, &to.seams())).expect("alike");
        for (s, t) in sources.iter().zip(&granted) {
            plan.push(*s, *t, 1).expect("in range");
        }
        let time = match self.rng.below(4) {
            0 => self.rng.below(1000),
            1 => self.rng.below(30_000),
            _ => AMPLE,
        };
        let deadline = self.now + time;
        let layers = u64::from(from.layout.layers());
        let grant = GrantRef {
            id,
            owner_epoch: epoch(owner),
            bound_epoch: epoch(me),
            max_bytes: granted.len() as u64 * BLOCK_BYTES * layers,
        };
        let request =
            WriteRequest { grant, plan: plan.build().expect("small"), tag, deadline: self.instant(deadline) };
        let used_before =
            self.model.transfers.iter().any(|((l, _), t)| *l == me && (t.receiver, t.grant) == (owner, id));
        match conn.write(request, self.instant(self.now)) {
            Ok(transfer) => {
                assert_eq!(owner, peer, "k6: a grant of an old epoch was accepted");
                assert!(!used_before, "k6: a grant was accepted twice");
                let end = &mut self.ends[ep];
                for &s in &sources {
                    end.sources.owner[s as usize] = Some(transfer.0);
                }
                end.sources.fill(&sources, tag);
                let transfer_model = Transfer {
                    grant: id,
                    receiver: owner,
                    blocks: count as u32,
                    sources,
                    deadline,
                    tag,
                    ample: time == AMPLE && !self.faults,
                    sent: false,
                    done: None,
                    released: false,
                    delivered: false,
                    resolution: None,
                };
                let before = self.model.transfers.insert((me, transfer.0), transfer_model);
                assert!(before.is_none(), "k2: a transfer number used twice");
            }
            Err(Refused::PeerRestarted { .. }) => assert_ne!(owner, peer),
            Err(Refused::StaleGrant { .. }) => {
                assert!(used_before || revoked, "k6: a fresh grant was refused")
            }
            Err(Refused::Closed) => {}
            Err(e) => panic!("refused: {e}"),
        }
    }

    /// What a caller does after `Lost`: flush, destroy, tell.
    fn fence(&mut self, ep: usize, incarnation: u32) {
        assert_eq!(incarnation, self.incarnation);
        let now = self.instant(self.now);
        let Some(mut conn) = self.ends[ep].conn.take() else { return };
        while let Some(item) = self.ends[ep].cq.pop_front() {
            self.feed(ep, &mut conn, item, now);
        }
        // What the device has read may still be on the wire; otherwise it will never be.
        for qp in 0..self.cfg.qps {
            self.ends[ep].queues[qp].dead |= self.rng.one_in(2);
        }
        let mut agenda = std::mem::take(&mut self.agenda);
        for what in agenda.values_mut() {
            if let Happening::Execute(wr) = what
                && wr.from == ep
                && wr.data.is_none()
                && let Op::Write { piece, .. } = &wr.op
                && piece.len > 0
            {
                wr.data = Some(self.read(ep, wr.token.0 >> 1, piece));
            }
        }
        self.agenda = agenda;
        for qp in 0..self.cfg.qps {
            for token in std::mem::take(&mut self.ends[ep].queues[qp].outstanding) {
                conn.handle_sent(token, false, now);
            }
        }
        self.events(ep, &mut conn);
        self.ends[ep].fenced = true;
        conn.fenced();
        self.events(ep, &mut conn);
        self.ends[ep].ledger = Some(conn.into_ledger());
        self.ends[ep].wake = None;
        if self.ends.iter().all(|e| e.conn.is_none()) && !self.rng.one_in(6) {
            let delay = self.rng.below(3000);
            self.at(delay, Happening::Reconnect);
        }
    }

    /// A process ends and a new one takes its place.
    fn restart(&mut self, ep: usize) {
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
    fn finish_if_quiet(&mut self) {
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

    fn check_end(&self) {
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
