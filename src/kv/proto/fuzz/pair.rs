//! What the fuzz target `pair` runs: two sound connections and a wire, by a list of operations.
//!
//! The input says who posts, what is executed or completed next (in any order, where there is none), who writes, cancels,
//! revokes or closes, when time passes and when a connection dies. Unlike the simulation it follows no plan, and the
//! fuzzer looks for inputs that reach new code. Checked: a sound peer never breaks the protocol; a receive is posted for
//! each message (K7); outcomes are told once and are true (K1, K2); no WRITE is executed after its grant was freed, and no
//! READ (K4); after the last connection everything has ended, and a reconnect resolves every doubt.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::super::*;
use super::{Input, plan};

/// A posted work request.
#[derive(Debug)]
struct Wr {
    qp: usize,
    token: Token,
    /// Payload is written.
    data: bool,
    /// It is read.
    read: bool,
    /// What a receive gets of it.
    message: Option<Message>,
    executed: bool,
}

#[derive(Debug)]
enum Message {
    Imm(u32),
    Bytes(Vec<u8>),
}

/// What one side has posted, the oldest first.
#[derive(Debug, Default)]
struct Wire {
    posted: VecDeque<Wr>,
    /// Receives that the peer has posted, by queue pair.
    receives: Vec<u32>,
    /// Queue pairs of ours that are destroyed.
    gone: u64,
}

impl Sink for Wire {
    fn room(&self, qp: usize) -> usize {
        8usize.saturating_sub(self.posted.iter().filter(|wr| wr.qp == qp).count())
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        let message = imm.map(Message::Imm);
        self.posted.push_back(Wr { qp, token, data: piece.len > 0, read: false, message, executed: false });
    }

    fn read(&mut self, qp: usize, _piece: &Piece, token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        let (message, executed) = (None, false);
        self.posted.push_back(Wr { qp, token, data: false, read: true, message, executed });
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        let message = Some(Message::Bytes(bytes.to_vec()));
        self.posted.push_back(Wr { qp, token, data: false, read: false, message, executed: false });
    }
}

#[derive(Debug, Default)]
struct Transfer {
    grant: u64,
    delivered: bool,
    done: Option<Outcome>,
    resolution: Option<Resolution>,
}

/// A read, and the grant of the peer that it uses.
#[derive(Debug)]
struct Read {
    loan: u64,
    /// The grant that was issued for it, once the peer has been asked to write.
    target: Option<u64>,
    done: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grant {
    Open,
    Aborted,
    Over,
}

/// One side: what it sends, and what it has granted.
#[derive(Default)]
struct Side {
    conn: Option<Connection>,
    wire: Wire,
    transfers: BTreeMap<u64, Transfer>,
    grants: BTreeMap<u64, Grant>,
    /// Grants to read, those that the peer says to have read, and reads whose blocks have not come back.
    loans: BTreeMap<u64, Grant>,
    read: Vec<u64>,
    reads: BTreeMap<u64, Read>,
    /// Transfers that serve the peer's reads, with the grants that were issued for those.
    serves: BTreeMap<u64, u64>,
}

struct Pair {
    cfg: Config,
    now: Instant,
    sides: [Side; 2],
}

/// Runs the operations of `data`.
pub(crate) fn pair(data: &[u8]) {
    let mut input = Input(data);
    let Some(flags) = input.byte() else { return };
    let ordered = flags & 1 != 0;
    let credits = Credits { data: 1 + u32::from(flags >> 4 & 3), control: 4 };
    // Several rails, which may differ.
    let rails = usize::from(flags >> 2 & 3) + 1;
    let rail = RailConfig {
        ordered,
        absent: false,
        qps: usize::from(flags >> 6) + 1,
        notify: if ordered && flags & 2 != 0 { Notify::Send } else { Notify::Imm },
        opening: Opening::Free,
        tx_credits: credits,
        rx_credits: credits,
        max_write: 100,
        max_reads: 2,
    };
    let other = RailConfig { ordered: true, notify: Notify::Imm, max_write: 64, ..rail };
    let cfg = Config {
        rails: (0..rails).map(|n| if n % 2 == 0 { rail } else { other }).collect(),
        local_epoch: 1,
        peer_epoch: 2,
        max_control: 256,
        max_transfers: 2,
        heartbeat: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(500),
        abort_grace: Duration::from_millis(200),
    };
    let mut p = Pair { cfg, now: Instant::now(), sides: Default::default() };
    p.connect([Ledger::new(1, 2), Ledger::new(2, 1)]);
    while let Some(op) = input.byte() {
        let Some(arg) = input.byte() else { break };
        let (ep, arg) = (usize::from(op >> 7), usize::from(arg));
        match op & 0x7f {
            0..24 => p.transmit(ep),
            24..48 => p.execute(ep, arg),
            48..72 => p.complete(ep, arg),
            72..76 => p.settle(),
            120..128 => p.act_rail(op, ep, arg),
            other => p.act(other % 13, ep, arg),
        }
        p.events();
    }
    p.finish();
}

impl Pair {
    fn connect(&mut self, ledgers: [Ledger; 2]) {
        for (ep, ledger) in ledgers.into_iter().enumerate() {
            let (local_epoch, peer_epoch) = (ep as u64 + 1, 2 - ep as u64);
            let cfg = Config { local_epoch, peer_epoch, ..self.cfg.clone() };
            let posted = |rail: &RailConfig| rail.rx_credits.data + rail.rx_credits.control;
            let receives = cfg.rails.iter().flat_map(|r| vec![posted(r); r.qps]).collect();
            let side = &mut self.sides[ep];
            side.wire = Wire { posted: VecDeque::new(), receives, gone: 0 };
            side.conn = Some(Connection::new(cfg, ledger, self.now).expect("a valid configuration"));
        }
        self.events();
    }

    fn conn(&mut self, ep: usize) -> &mut Connection {
        self.sides[ep].conn.as_mut().expect("between two connections nothing is done")
    }

    fn ordered(&self, qp: usize) -> bool {
        self.cfg.ordered_mask() >> qp & 1 == 1
    }

    fn transmit(&mut self, ep: usize) {
        let Side { conn, wire, .. } = &mut self.sides[ep];
        if let Some(conn) = conn {
            let _ = conn.poll_transmit(self.now, wire);
            // A read of nothing is done here, before the peer can hear of it.
            self.events();
        }
    }

    /// The position of something that may be next: with order, of the first of a queue pair only.
    fn choose(&self, ep: usize, arg: usize, may: impl Fn(&Wr) -> bool) -> Option<usize> {
        let posted = &self.sides[ep].wire.posted;
        let first = |i: usize| !posted.iter().take(i).any(|wr| wr.qp == posted[i].qp && may(wr));
        let free: Vec<usize> = (0..posted.len())
            .filter(|&i| may(&posted[i]) && (!self.ordered(posted[i].qp) || first(i)))
            .collect();
        (!free.is_empty()).then(|| free[arg % free.len()])
    }

    fn execute(&mut self, ep: usize, arg: usize) {
        let Some(at) = self.choose(ep, arg, |wr| !wr.executed) else { return };
        let gone = self.sides[1 - ep].wire.gone;
        let wire = &mut self.sides[ep].wire;
        if gone >> wire.posted[at].qp & 1 == 1 {
            let wr = wire.posted.remove(at).expect("just seen");
            let now = self.now;
            return self.conn(ep).handle_sent(wr.token, false, now);
        }
        let wr = &mut wire.posted[at];
        wr.executed = true;
        let (qp, message, data, read, token) = (wr.qp, wr.message.take(), wr.data, wr.read, wr.token);
        if read {
            // Those under way are of reads that have not given their blocks back; so their loans are not over either.
            let reading = self.sides[ep].reads.values().any(|r| {
                let state = self.sides[1 - ep].loans.get(&r.loan);
                state.is_some_and(|s| *s != Grant::Over)
            });
            let open = self.sides[1 - ep].conn.as_ref().is_some_and(|c| c.poll_timeout().is_some());
            assert!(reading || !open, "k4: a late READ");
        }
        if message.is_some() {
            let open = self.sides[1 - ep].conn.as_ref().is_some_and(|c| c.poll_timeout().is_some());
            let receives = &mut self.sides[ep].wire.receives[qp];
            if *receives == 0 {
                assert!(!open, "k7: no receive is posted on queue pair {qp}");
                return;
            }
            *receives -= 1;
        }
        if let (true, Some(TransferId(id))) = (data, token.transfer()) {
            if let Some(target) = self.sides[ep].serves.get(&id) {
                let known = self.sides[1 - ep].reads.values().any(|r| r.target == Some(*target));
                assert!(known, "k4: a late WRITE for a read, under grant {target}");
            } else {
                let grant = self.sides[ep].transfers[&id].grant;
                let state = self.sides[1 - ep].grants[&grant];
                assert_ne!(state, Grant::Over, "k4: a late WRITE under grant {grant}");
            }
        }
        let now = self.now;
        let conn = self.conn(1 - ep);
        let received = match &message {
            None => return,
            Some(Message::Imm(imm)) => Received::Imm(*imm),
            Some(Message::Bytes(bytes)) => Received::Bytes(bytes),
        };
        conn.handle_recv(qp, received, now).expect("a sound peer");
        self.sides[ep].wire.receives[qp] += 1;
    }

    fn complete(&mut self, ep: usize, arg: usize) {
        // With order, what is before it has been executed, and completes first.
        let Some(at) = self.choose(ep, arg, |_| true) else { return };
        if self.sides[ep].wire.posted[at].executed {
            let wr = self.sides[ep].wire.posted.remove(at).expect("just seen");
            let now = self.now;
            self.conn(ep).handle_sent(wr.token, true, now);
        }
    }

    fn act(&mut self, what: u8, ep: usize, arg: usize) {
        let now = self.now;
        match what {
            0..3 => {
                let id = self.conn(ep).issue_grant(16 * 2 * 64);
                self.sides[ep].grants.insert(id, Grant::Open);
            }
            3..5 => {
                let Some(id) =
                    (arg < 16).then_some(arg as u64).or(self.sides[1 - ep].grants.keys().last().copied())
                else {
                    return;
                };
                if !self.sides[1 - ep].grants.contains_key(&id) {
                    return;
                }
                let (owner_epoch, bound_epoch) = (2 - ep as u64, ep as u64 + 1);
                let grant = GrantRef { id, owner_epoch, bound_epoch, max_bytes: 16 * 2 * 64 };
                let deadline = now + Duration::from_millis(arg as u64 * 8);
                let request = WriteRequest {
                    grant,
                    plan: plan(self.cfg.rails.len(), arg as u32 % 17),
                    tag: 0,
                    deadline,
                };
                let conn = self.conn(ep);
                // Of some the data is ready later.
                let taken =
                    if arg % 5 == 4 { conn.write_gated(request, now) } else { conn.write(request, now) };
                if let Ok(TransferId(t)) = taken {
                    let fresh =
                        self.sides[ep].transfers.insert(t, Transfer { grant: id, ..Transfer::default() });
                    assert!(fresh.is_none(), "k2: a transfer number used twice");
                }
            }
            5 => {
                let last = self.sides[ep].transfers.keys().next_back().copied().unwrap_or(0);
                self.conn(ep).abort(TransferId(last.saturating_sub(arg as u64 % 4)), now);
            }
            6 => {
                let last = self.sides[ep].grants.keys().next_back().copied().unwrap_or(0);
                self.conn(ep).revoke_grant(last.saturating_sub(arg as u64 % 4), now);
            }
            7 => {
                self.now += Duration::from_millis(arg as u64);
                let now = self.now;
                (0..2).for_each(|ep| self.conn(ep).handle_timeout(now));
            }
            8 => {
                let _ = self.conn(ep).send_message(vec![arg as u8; arg * 4]);
            }
            10 => {
                let id = self.conn(ep).issue_read_grant(1 << 40);
                self.sides[ep].loans.insert(id, Grant::Open);
            }
            11 => {
                // Those of an earlier connection are refused by the caller.
                let mut open = self.sides[1 - ep].loans.iter().filter(|(_, state)| **state != Grant::Over);
                let Some((&loan, _)) = open.next_back() else { return };
                let (owner_epoch, bound_epoch) = (2 - ep as u64, ep as u64 + 1);
                let grant = GrantRef { id: loan, owner_epoch, bound_epoch, max_bytes: 1 << 20 };
                let (blocks, bytes) = (arg as u32 % 17, (arg as u64 % 17) * 128);
                let by = match arg & 32 {
                    0 => ReadBy::Rdma { plan: plan(self.cfg.rails.len(), blocks), depth: 2, qps: 4 },
                    _ => ReadBy::Write { request: vec![blocks as u8; 1 + arg * 4], bytes },
                };
                let deadline = now + Duration::from_millis(arg as u64 * 8);
                if let Ok(ReadId(id)) = self.conn(ep).read(ReadRequest { grant, by, deadline }, now) {
                    let fresh = self.sides[ep].reads.insert(id, Read { loan, target: None, done: false });
                    assert!(fresh.is_none(), "r2: a read's number used twice");
                }
            }
            12 => {
                let last = self.sides[ep].reads.keys().next_back().copied().unwrap_or(0);
                self.conn(ep).abort_read(ReadId(last.saturating_sub(arg as u64 % 3)), now);
            }
            _ if arg < 32 => self.conn(ep).close(now + Duration::from_secs(5), now),
            _ if arg < 128 => self.reconnect(),
            _ => {
                let last = self.sides[ep].transfers.keys().next_back().copied().unwrap_or(0);
                self.conn(ep).ungate(TransferId(last.saturating_sub(arg as u64 % 4)));
            }
        }
    }

    fn act_rail(&mut self, op: u8, ep: usize, arg: usize) {
        let (now, rail) = (self.now, arg % self.cfg.rails.len());
        match op % 8 {
            0..3 => self.conn(ep).rail_failed(rail, Cause::Transport, now),
            3..6 => self.fence_rail(ep, rail),
            _ => {
                (0..2).for_each(|ep| self.fence_rail(ep, rail));
                let down =
                    |conn: &Connection| conn.state == State::Open && conn.rail_state(rail) == RailState::Down;
                if (0..2).all(|ep| down(self.conn(ep))) {
                    (0..2).for_each(|ep| self.bring_up(ep, rail));
                }
            }
        }
    }

    /// What a driver does after `RailDown`: flushes, destroys, tells. What was executed has been handed in.
    fn fence_rail(&mut self, ep: usize, rail: usize) {
        let now = self.now;
        if self.conn(ep).rail_state(rail) != RailState::Failing {
            return;
        }
        let mask = self.conn(ep).rails[rail].mask();
        let posted = std::mem::take(&mut self.sides[ep].wire.posted);
        let (lost, left) = posted.into_iter().partition::<VecDeque<_>, _>(|wr| mask >> wr.qp & 1 == 1);
        self.sides[ep].wire.posted = left;
        self.sides[ep].wire.gone |= mask;
        for wr in lost {
            self.conn(ep).handle_sent(wr.token, false, now);
        }
        self.conn(ep).rail_fenced(rail, now);
    }

    fn bring_up(&mut self, ep: usize, rail: usize) {
        let now = self.now;
        let conn = self.conn(ep);
        let (mask, credits) = (conn.rails[rail].mask(), conn.cfg.rails[rail].rx_credits);
        assert!(conn.rail_up(rail, now), "k10: down on both sides");
        let wire = &mut self.sides[ep].wire;
        wire.gone &= !mask;
        let receives = wire.receives.iter_mut().enumerate().filter(|(qp, _)| mask >> qp & 1 == 1);
        receives.for_each(|(_, n)| *n = credits.data + credits.control);
    }

    /// Posts, executes and completes until nothing more happens.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            (0..2).for_each(|ep| self.transmit(ep));
            if self.sides.iter().all(|s| s.wire.posted.is_empty()) {
                return;
            }
            for ep in 0..2 {
                while self.choose(ep, 0, |wr| !wr.executed).is_some() {
                    self.execute(ep, 0);
                    self.events();
                }
                while !self.sides[ep].wire.posted.is_empty() {
                    self.complete(ep, 0);
                    self.events();
                }
            }
        }
        panic!("r8: it never comes to rest");
    }

    /// The connection dies on both sides, one after the other; another takes its place.
    fn reconnect(&mut self) {
        let now = self.now;
        let ledgers = [0, 1].map(|ep| {
            self.conn(ep).connection_lost(Cause::Transport, now);
            for wr in std::mem::take(&mut self.sides[ep].wire.posted) {
                self.conn(ep).handle_sent(wr.token, false, now);
            }
            self.conn(ep).fenced();
            self.events();
            if self.conn(ep).is_closed() {
                // Nobody can read any more what was lent and not read.
                self.sides[ep].loans.values_mut().for_each(|state| *state = Grant::Over);
            }
            self.sides[ep].conn.take().expect("there is one").into_ledger()
        });
        self.connect(ledgers);
    }

    fn events(&mut self) {
        for ep in 0..2 {
            let Some(mut conn) = self.sides[ep].conn.take() else { continue };
            while let Some(event) = conn.poll_event() {
                let [a, b] = &mut self.sides;
                let (me, peer) = if ep == 0 { (a, b) } else { (b, a) };
                on_event(me, peer, &mut conn, event, self.now);
            }
            self.sides[ep].conn = Some(conn);
        }
    }

    /// A last reconnect, on which everything comes to its end.
    fn finish(mut self) {
        self.reconnect();
        self.settle();
        self.events();
        for side in &self.sides {
            for (id, t) in &side.transfers {
                let resolved = !matches!(t.done, Some(Outcome::InDoubt(_))) || t.resolution.is_some();
                assert!(t.done.is_some() && resolved, "k2: {id} has no end: {t:?}");
            }
            assert!(side.reads.is_empty(), "r1: reads have no end: {:?}", side.reads);
            for (id, l) in &side.loans {
                assert_ne!(*l, Grant::Aborted, "k4: grant {id} to read is never freed");
            }
            for (id, g) in &side.grants {
                assert_ne!(*g, Grant::Aborted, "k4: grant {id} is never freed");
            }
        }
    }
}

fn on_event(me: &mut Side, peer: &mut Side, conn: &mut Connection, event: Event, now: Instant) {
    match event {
        Event::ReadAsked { grant, target, request } => {
            let answer = match request.len() % 5 {
                0 => Err(ReadRefusal::Busy),
                _ => Ok((plan(conn.rails.len(), request[0].into()), now + Duration::from_secs(1))),
            };
            if let Some(TransferId(id)) = conn.serve(grant, answer, now) {
                me.serves.insert(id, target);
                peer.reads.values_mut().filter(|r| r.loan == grant).for_each(|r| r.target = Some(target));
            }
        }
        Event::ReadDone { id, result, .. } => {
            let read = me.reads.get_mut(&id.0).expect("r2: done what was not accepted");
            assert!(!std::mem::replace(&mut read.done, true), "r2: a read done twice");
            if result.is_ok() {
                peer.read.push(read.loan);
            }
        }
        Event::ReadReleased { id } => {
            let read = me.reads.remove(&id.0).expect("r2: released twice");
            assert!(read.done, "r2: released before it was done");
        }
        Event::Served { grant, .. } => {
            assert!(me.read.contains(&grant), "k1: served, and the reader does not have it");
            assert_eq!(me.loans.insert(grant, Grant::Over), Some(Grant::Open), "k4: a loan has ended twice");
        }
        Event::Aborted { grant, .. } if me.loans.contains_key(&grant) => {
            assert_eq!(me.loans.insert(grant, Grant::Aborted), Some(Grant::Open), "k4: aborted twice");
        }
        Event::Freed { grant } if me.loans.contains_key(&grant) => {
            assert_eq!(me.loans.insert(grant, Grant::Over), Some(Grant::Aborted), "k4: freed twice");
        }
        Event::Done { id, outcome, .. } => {
            let t = me.transfers.get_mut(&id.0).expect("r2: done what was not accepted");
            assert!(t.done.replace(outcome).is_none(), "r2: done twice");
            match outcome {
                Outcome::Landed => assert!(t.delivered, "k1: landed, and was not delivered"),
                Outcome::NotDelivered(_) => assert!(!t.delivered, "k2: not delivered, yet it was"),
                Outcome::InDoubt(_) => {}
            }
        }
        Event::Resolved { id, resolution } => {
            let t = me.transfers.get_mut(&id.0).expect("k2: resolved what was not accepted");
            assert!(t.resolution.replace(resolution).is_none(), "k2: resolved twice");
            assert_eq!(resolution == Resolution::Landed, t.delivered, "k2: resolved wrongly");
        }
        Event::Arrived { transfer, grant, .. } => {
            let t = peer.transfers.get_mut(&transfer.0).expect("k2: nobody sent that");
            assert!(!std::mem::replace(&mut t.delivered, true), "k2: delivered twice");
            assert!(!matches!(t.done, Some(Outcome::NotDelivered(_))), "k2: delivered after its end");
            assert_eq!(
                me.grants.insert(grant, Grant::Over),
                Some(Grant::Open),
                "k4: under a grant that is over"
            );
        }
        Event::Aborted { grant, .. } => {
            assert_eq!(me.grants.insert(grant, Grant::Aborted), Some(Grant::Open), "k4: aborted twice");
        }
        Event::Freed { grant } => {
            assert_eq!(me.grants.insert(grant, Grant::Over), Some(Grant::Aborted), "k4: freed twice");
        }
        Event::Message(bytes) => conn.message_taken(bytes.len()),
        Event::Sent { .. } | Event::Released { .. } | Event::PeerClosed | Event::Lost(_) | Event::Closed => {}
        Event::RailDown { .. } | Event::RailUp { .. } | Event::RailTalk { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::sim::Rng;

    #[test]
    fn k2_random_operation_lists_end_well() {
        for seed in 0..600 {
            let mut rng = Rng::new(seed);
            let len = rng.below(600);
            let data: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
            super::pair(&data);
        }
    }
}
