//! Tests by contract, on two connections and a wire that the test holds in its hands.

use super::*;
use crate::kv::layout::Layout;
use std::time::Duration;

pub(super) fn config() -> Config {
    Config {
        qps: 2,
        notify: Notify::Imm,
        ordered: true,
        local_epoch: 1,
        peer_epoch: 2,
        tx_credits: Credits { data: 8, control: 8 },
        rx_credits: Credits { data: 8, control: 8 },
        max_control: 512,
        max_write: 4096,
        max_transfers: 16,
        heartbeat: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(500),
        abort_grace: Duration::from_millis(200),
    }
}

/// A posted work request.
#[derive(Debug, Clone)]
enum Posted {
    Write(usize, Piece, Option<u32>, Token),
    Send(usize, Vec<u8>, Token),
}

impl Posted {
    fn token(&self) -> Token {
        match self {
            Self::Write(.., t) | Self::Send(.., t) => *t,
        }
    }

    fn qp(&self) -> usize {
        match self {
            Self::Write(q, ..) | Self::Send(q, ..) => *q,
        }
    }

    fn is_write(&self) -> bool {
        matches!(self, Self::Write(..))
    }
}

struct Wire {
    room: usize,
    posted: Vec<Posted>,
}

impl Sink for Wire {
    fn room(&self, qp: usize) -> usize {
        self.room - self.posted.iter().filter(|p| p.qp() == qp).count()
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        self.posted.push(Posted::Write(qp, *piece, imm, token));
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        self.posted.push(Posted::Send(qp, bytes.to_vec(), token));
    }
}

/// Two connections, A (0) and B (1).
struct Pair {
    conns: [Connection; 2],
    cfg: Config,
    now: Instant,
    room: usize,
}

impl Pair {
    fn new(cfg: Config) -> Self {
        let ledgers = [Ledger::new(1, 2), Ledger::new(2, 1)];
        Self::with(cfg, ledgers)
    }

    fn with(cfg: Config, ledgers: [Ledger; 2]) -> Self {
        let now = Instant::now();
        let [a, b] = ledgers;
        let b_cfg = Config { local_epoch: b.local_epoch, peer_epoch: a.local_epoch, ..cfg.clone() };
        let a_cfg = Config { local_epoch: a.local_epoch, peer_epoch: b.local_epoch, ..cfg.clone() };
        let conns =
            [Connection::new(a_cfg, a, now).expect("valid"), Connection::new(b_cfg, b, now).expect("valid")];
        Self { conns, cfg, now, room: 64 }
    }

    fn transmit(&mut self, ep: usize) -> Vec<Posted> {
        let mut wire = Wire { room: self.room, posted: Vec::new() };
        while self.conns[ep].poll_transmit(self.now, &mut wire) == Transmitted::More {}
        wire.posted
    }

    fn receive(&mut self, ep: usize, p: &Posted) -> Result<(), ProtocolViolation> {
        let now = self.now;
        match p {
            Posted::Write(qp, _, Some(imm), _) => self.conns[ep].handle_recv(*qp, Received::Imm(*imm), now),
            Posted::Write(.., None, _) => Ok(()),
            Posted::Send(qp, bytes, _) => self.conns[ep].handle_recv(*qp, Received::Bytes(bytes), now),
        }
    }

    /// From `ep` to the other, and the completion back.
    fn pass(&mut self, ep: usize, p: &Posted) {
        self.receive(1 - ep, p).expect("sound");
        self.complete(ep, p);
    }

    fn complete(&mut self, ep: usize, p: &Posted) {
        self.conns[ep].handle_sent(p.token(), true, self.now);
    }

    /// Passes everything until both are quiet; answers the number of work requests.
    fn settle(&mut self) -> usize {
        let mut count = 0;
        loop {
            let mut quiet = true;
            for ep in 0..2 {
                for p in self.transmit(ep) {
                    self.pass(ep, &p);
                    quiet = false;
                    count += 1;
                }
            }
            assert!(count < 100_000, "r8: it never comes to rest");
            if quiet {
                return count;
            }
        }
    }

    fn events(&mut self, ep: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.conns[ep].poll_event()).collect()
    }

    /// A grant of B for A.
    fn grant(&mut self) -> GrantRef {
        let id = self.conns[1].issue_grant(1 << 30);
        GrantRef { id, owner_epoch: 2, bound_epoch: 1, max_bytes: 1 << 30 }
    }

    fn write(&mut self, grant: GrantRef, bytes: u64) -> Result<TransferId, Refused> {
        let deadline = self.now + Duration::from_secs(1);
        self.conns[0].write(WriteRequest { grant, plan: plan(bytes), tag: 5, deadline }, self.now)
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        for c in &mut self.conns {
            c.handle_timeout(self.now);
        }
    }

    /// Both connections die and are fenced; a new pair takes their ledgers.
    fn reconnect(self) -> Self {
        let [mut a, mut b] = self.conns;
        a.fenced();
        b.fenced();
        Self::with(self.cfg, [a.into_ledger(), b.into_ledger()])
    }
}

/// A plan of `bytes` bytes in one run.
fn plan(bytes: u64) -> Plan {
    let layout = Layout::contiguous(1, 1 << 16, 4096, 0).expect("valid");
    let seams = |addr, key| Seams::new(vec![Part { addr, len: 1 << 28, key }]).expect("valid");
    let mut b = PlanBuilder::new((&layout, &seams(0, 1)), (&layout, &seams(1 << 40, 2))).expect("alike");
    b.push(0, 0, (bytes / 4096) as u32).expect("in range");
    b.build().expect("small")
}

fn done(events: &[Event]) -> Vec<Outcome> {
    events
        .iter()
        .filter_map(|e| if let Event::Done { outcome, .. } = e { Some(*outcome) } else { None })
        .collect()
}

fn arrivals(events: &[Event]) -> usize {
    events.iter().filter(|e| matches!(e, Event::Arrived { .. })).count()
}

fn all_modes() -> Vec<Config> {
    let mut v = Vec::new();
    for (notify, ordered) in [(Notify::Imm, true), (Notify::Send, true), (Notify::Imm, false)] {
        for qps in [1, 2, 4] {
            v.push(Config { notify, ordered, qps, ..config() });
        }
    }
    v
}

#[test]
fn k1_a_small_write_is_two_work_requests_and_one_confirmation() {
    let mut p = Pair::new(config());
    let g = p.grant();
    let id = p.write(g, 4096).expect("fresh");
    let out = p.transmit(0);
    assert_eq!(out.len(), 2, "{out:?}");
    assert!(matches!(out[0], Posted::Write(_, Piece { len: 4096, .. }, Some(_), _)), "{out:?}");
    for wr in &out {
        p.receive(1, wr).expect("sound");
    }
    assert_eq!(p.events(1), [Event::Arrived { transfer: id, grant: g.id, bytes: 4096, tag: 5 }]);
    assert_eq!(p.events(0), [], "nothing is known before the peer has spoken");
    for wr in &out {
        p.complete(0, wr);
    }
    assert_eq!(p.events(0), [Event::Sent { id }, Event::Released { id }], "local completion is not landing");
    let back = p.transmit(1);
    assert_eq!(back.len(), 1);
    p.pass(1, &back[0]);
    assert_eq!(p.events(0), [Event::Done { id, outcome: Outcome::Landed }]);
    assert_eq!(p.settle(), 0, "and then there is silence");
    assert_eq!(p.conns[0].stats().landed, 1);
}

#[test]
fn k3_any_order_of_arrival_lands_once_and_only_when_complete() {
    for cfg in all_modes().into_iter().filter(|c| !c.ordered) {
        for seed in 0..50u64 {
            let mut p = Pair::new(Config { max_write: 4096, ..cfg.clone() });
            let g = p.grant();
            p.write(g, 6 * 4096).expect("fresh");
            let mut out = p.transmit(0);
            let mut rng = sim::Rng::new(seed);
            for i in (1..out.len()).rev() {
                out.swap(i, rng.below(i as u64 + 1) as usize);
            }
            for (i, wr) in out.iter().enumerate() {
                assert_eq!(arrivals(&p.events(1)), 0, "before {i} of {}", out.len());
                p.receive(1, wr).expect("sound");
            }
            assert_eq!(arrivals(&p.events(1)), 1);
        }
    }
}

#[test]
fn k3_counts_are_per_queue_pair_never_a_sum() {
    let mut p = Pair::new(Config { ordered: false, ..config() });
    let g = p.grant();
    p.write(g, 4 * 4096).expect("fresh");
    let out = p.transmit(0);
    let (writes, rest): (Vec<_>, Vec<_>) = out.into_iter().partition(Posted::is_write);
    assert_eq!(writes.iter().filter(|w| w.qp() == 0).count(), 2);
    for wr in rest.iter().chain(writes.iter().filter(|w| w.qp() == 0)) {
        p.receive(1, wr).expect("sound");
    }
    // Two more on queue pair 0 would make the sum right.
    let again = writes.iter().find(|w| w.qp() == 0).expect("two");
    assert!(p.receive(1, again).is_err());
    assert_eq!(arrivals(&p.events(1)), 0);
}

#[test]
fn k3_one_notification_too_many_ends_the_connection() {
    for ordered in [true, false] {
        let mut p = Pair::new(Config { ordered, qps: 1, ..config() });
        let g = p.grant();
        p.write(g, 4096).expect("fresh");
        let out = p.transmit(0);
        for wr in &out {
            p.receive(1, wr).expect("sound");
        }
        p.events(1);
        assert!(p.receive(1, &out[0]).is_err(), "after the landing");
        assert!(matches!(p.events(1)[..], [Event::Lost(Cause::Violation(_))]));
    }
}

#[test]
fn k8_zero_bytes_arrive_once() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        p.write(g, 0).expect("fresh");
        p.settle();
        assert_eq!(arrivals(&p.events(1)), 1);
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

#[test]
fn k7_large_transfers_pass_through_tiny_queues_and_credits() {
    for cfg in all_modes() {
        for (data, control) in [(1, 4), (8, 8)] {
            let credits = Credits { data, control };
            let cfg = Config { tx_credits: credits, rx_credits: credits, max_write: 4096, ..cfg.clone() };
            let mut p = Pair::new(cfg);
            p.room = 6;
            for _ in 0..3 {
                let g = p.grant();
                p.write(g, 200 * 4096).expect("fresh");
            }
            p.settle();
            assert_eq!(arrivals(&p.events(1)), 3, "{data} {control}");
            assert_eq!(done(&p.events(0)), [Outcome::Landed; 3]);
        }
    }
}

/// Both sides spend control credits as fast as they can, before they hear of each other.
#[test]
fn k7_control_credits_never_lock_up() {
    for control in 4..9 {
        let credits = Credits { data: 1, control };
        let mut p = Pair::new(Config { qps: 1, tx_credits: credits, rx_credits: credits, ..config() });
        let mut revoked = 0;
        for round in 0..200 {
            let mut out = [Vec::new(), Vec::new()];
            for _ in 0..10 {
                for (ep, out) in out.iter_mut().enumerate() {
                    if round < 100 {
                        let id = p.conns[ep].issue_grant(1);
                        p.conns[ep].revoke_grant(id, p.now);
                        revoked += 1;
                    }
                    out.extend(p.transmit(ep));
                }
            }
            for (ep, out) in out.iter().enumerate() {
                for wr in out {
                    p.pass(ep, wr);
                }
            }
        }
        let freed = (0..2).flat_map(|ep| p.events(ep)).filter(|e| matches!(e, Event::Freed { .. })).count();
        assert_eq!(freed, revoked, "control {control}");
    }
}

#[test]
fn r9_a_call_posts_a_bounded_number_of_work_requests() {
    let mut p = Pair::new(Config { max_write: 4096, ..config() });
    let g = p.grant();
    p.write(g, 20_000 * 4096).expect("fresh");
    let mut wire = Wire { room: 100_000, posted: Vec::new() };
    assert_eq!(p.conns[0].poll_transmit(p.now, &mut wire), Transmitted::More);
    assert!(wire.posted.len() <= 256);
}

#[test]
fn k6_a_grant_is_used_once_and_every_refusal_is_counted() {
    let mut p = Pair::new(config());
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    assert_eq!(p.write(g, 4096), Err(Refused::StaleGrant { grant: g.id }), "while it is in use");
    p.settle();
    assert_eq!(p.write(g, 4096), Err(Refused::StaleGrant { grant: g.id }), "after it has landed");
    let g = p.grant();
    let old = GrantRef { owner_epoch: 77, ..g };
    assert_eq!(p.write(old, 4096), Err(Refused::PeerRestarted { grant: 77, peer: 2 }));
    let foreign = GrantRef { bound_epoch: 77, ..g };
    assert_eq!(p.write(foreign, 4096), Err(Refused::WrongPeer { bound: 77, local: 1 }));
    let small = GrantRef { max_bytes: 4095, ..g };
    assert_eq!(p.write(small, 4096), Err(Refused::OutOfRange { asked: 4096, granted: 4095 }));
    assert_eq!(p.transmit(0).len(), 0, "nothing is posted for a refused write");
    assert_eq!(p.conns[0].stats().refused, 5);
    p.write(g, 4096).expect("a refusal does not use a grant up");
}

#[test]
fn k6_a_cancelled_write_has_used_its_grant_and_frees_it() {
    let mut p = Pair::new(config());
    let g = p.grant();
    let id = p.write(g, 4096).expect("fresh");
    p.conns[0].abort(id, p.now);
    let want =
        [Event::Done { id, outcome: Outcome::NotDelivered(Reason::Cancelled) }, Event::Released { id }];
    assert_eq!(p.events(0), want, "at once: nothing was posted");
    for wr in p.transmit(0) {
        assert!(!wr.is_write(), "nothing is written");
        p.pass(0, &wr);
    }
    let reason = AbortReason::Sender(SenderReason::Cancelled);
    assert_eq!(p.events(1), [Event::Aborted { grant: g.id, reason }, Event::Freed { grant: g.id }]);
    assert_eq!(p.write(g, 4096), Err(Refused::StaleGrant { grant: g.id }));
}

#[test]
fn k4_blocks_stay_in_quarantine_until_nothing_can_arrive() {
    for cfg in all_modes() {
        let mut p = Pair::new(Config { max_write: 4096, ..cfg.clone() });
        p.room = 6;
        let g = p.grant();
        let id = p.write(g, 100 * 4096).expect("fresh");
        let posted = p.transmit(0);
        assert!(posted.iter().all(Posted::is_write) && posted.len() == 2 * cfg.qps);
        p.conns[0].abort(id, p.now);
        assert_eq!(p.events(0), [Event::Done { id, outcome: Outcome::NotDelivered(Reason::Cancelled) }]);
        // The ABORT goes ahead; the receiver hears of it at once.
        let abort = p.transmit(0);
        assert_eq!(abort.len(), 1);
        p.pass(0, &abort[0]);
        assert!(matches!(p.events(1)[..], [Event::Aborted { .. }]));
        // What was posted arrives late.
        for wr in &posted {
            assert_eq!(p.events(0), [], "the sources are in use");
            p.pass(0, wr);
        }
        assert_eq!(p.events(0), [Event::Released { id }]);
        assert_eq!(p.events(1), [], "no last word has been said");
        let last = p.transmit(0);
        assert_eq!(last.len(), cfg.qps);
        for wr in &last {
            assert_eq!(p.events(1), []);
            p.pass(0, wr);
        }
        assert_eq!(p.events(1), [Event::Freed { grant: g.id }]);
        // A healthy connection survives it.
        let g = p.grant();
        p.write(g, 4096).expect("fresh");
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

#[test]
fn k4_without_order_the_counted_notifications_are_awaited() {
    let mut p = Pair::new(Config { ordered: false, qps: 1, max_write: 4096, ..config() });
    p.room = 6;
    let g = p.grant();
    let id = p.write(g, 100 * 4096).expect("fresh");
    let posted = p.transmit(0);
    for wr in &posted {
        p.complete(0, wr);
    }
    p.conns[0].abort(id, p.now);
    for wr in p.transmit(0) {
        p.pass(0, &wr);
    }
    assert!(
        matches!(p.events(1)[..], [Event::Aborted { .. }]),
        "quiet only when all that were posted have come"
    );
    p.receive(1, &posted[0]).expect("sound");
    assert_eq!(p.events(1), []);
    p.receive(1, &posted[1]).expect("sound");
    assert_eq!(p.events(1), [Event::Freed { grant: g.id }]);
}

#[test]
fn k4_a_cancel_after_delivery_is_a_landing() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        let id = p.write(g, 4096).expect("fresh");
        for wr in p.transmit(0) {
            p.pass(0, &wr);
        }
        assert_eq!(arrivals(&p.events(1)), 1);
        p.conns[0].abort(id, p.now);
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
        assert_eq!(p.events(1), []);
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k6_a_revoked_grant_never_arrives() {
    // Before it is used, while its data is under way, and when only the notification is missing.
    for stage in 0..3 {
        let mut p = Pair::new(Config { max_write: 4096, ..config() });
        p.room = 6;
        let g = p.grant();
        let mut posted = Vec::new();
        if stage > 0 {
            p.write(g, if stage == 1 { 100 * 4096 } else { 4096 }).expect("fresh");
            posted = p.transmit(0);
        }
        p.conns[1].revoke_grant(g.id, p.now);
        assert_eq!(p.events(1), [Event::Aborted { grant: g.id, reason: AbortReason::Revoked }]);
        for wr in &posted {
            p.pass(0, wr);
        }
        p.settle();
        assert_eq!(p.events(1), [Event::Freed { grant: g.id }], "stage {stage}");
        if stage > 0 {
            assert_eq!(done(&p.events(0)), [Outcome::NotDelivered(Reason::Revoked)]);
        }
        assert_eq!(p.write(g, 4096), Err(Refused::StaleGrant { grant: g.id }));
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k2_in_doubt_after_the_data_landed_resolves_to_landed() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        let id = p.write(g, 4096).expect("fresh");
        for wr in p.transmit(0) {
            p.receive(1, &wr).expect("sound");
        }
        assert_eq!(arrivals(&p.events(1)), 1);
        // The confirmation is lost with the connection.
        p.conns[0].connection_lost(Cause::Transport, p.now);
        assert_eq!(done(&p.events(0)), [Outcome::InDoubt(Reason::Lost(Cause::Transport))]);
        let mut p = p.reconnect();
        p.settle();
        assert_eq!(p.events(0), [Event::Resolved { id, resolution: Resolution::Landed }]);
        assert_eq!(p.events(1), [], "delivered once");
    }
}

#[test]
fn k2_in_doubt_that_never_arrived_resolves_to_not_delivered() {
    let mut p = Pair::new(config());
    let g = p.grant();
    let id = p.write(g, 4096).expect("fresh");
    assert_eq!(p.transmit(0).len(), 2);
    p.conns[0].connection_lost(Cause::Transport, p.now);
    assert_eq!(done(&p.events(0)), [Outcome::InDoubt(Reason::Lost(Cause::Transport))]);
    // The answer is lost with a second connection, too.
    let mut p = p.reconnect().reconnect();
    p.settle();
    assert_eq!(p.events(0), [Event::Resolved { id, resolution: Resolution::NotDelivered }]);
    let aborted = Event::Aborted { grant: g.id, reason: AbortReason::ConnectionLost };
    assert_eq!(p.events(1), [aborted, Event::Freed { grant: g.id }]);
    assert_eq!(p.write(g, 4096), Err(Refused::StaleGrant { grant: g.id }));
}

#[test]
fn k2_what_was_not_sent_entirely_is_not_delivered_and_the_receiver_is_told() {
    let mut cases = Vec::new();
    for room in [5, 6] {
        let mut p = Pair::new(Config { max_write: 4096, ..config() });
        p.room = room;
        let g = p.grant();
        p.write(g, 100 * 4096).expect("fresh");
        p.transmit(0);
        cases.push((p, g));
    }
    // Everything but the header: the credits for it are spent.
    let mut p = Pair::new(Config { qps: 1, ..config() });
    let credits = &mut p.conns[0].links[0].credits;
    while credits.may_send_control(credits::Urgency::Urgent) {
        credits.on_sent_control();
    }
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    assert!(p.transmit(0).iter().all(Posted::is_write));
    cases.push((p, g));
    for (mut p, g) in cases {
        p.conns[0].connection_lost(Cause::Transport, p.now);
        assert_eq!(done(&p.events(0)), [Outcome::NotDelivered(Reason::Lost(Cause::Transport))]);
        let mut p = p.reconnect();
        p.settle();
        assert!(
            matches!(p.events(1)[..], [Event::Aborted { grant, .. }, Event::Freed { .. }] if grant == g.id)
        );
    }
}

#[test]
fn k2_a_restarted_peer_leaves_doubt_and_ends_its_grants() {
    let mut p = Pair::new(config());
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    let own = p.conns[0].issue_grant(1);
    p.transmit(0);
    p.conns[0].connection_lost(Cause::PeerLost, p.now);
    p.events(0);
    let [mut a, _] = p.conns;
    a.fenced();
    let mut p = Pair::with(p.cfg, [a.into_ledger(), Ledger::new(99, 1)]);
    let events = p.events(0);
    assert!(events.contains(&Event::Resolved { id: TransferId(0), resolution: Resolution::Unknown }));
    assert!(events.contains(&Event::Aborted { grant: own, reason: AbortReason::PeerRestarted }));
    assert!(events.contains(&Event::Freed { grant: own }));
    assert_eq!(p.write(g, 4096), Err(Refused::PeerRestarted { grant: 2, peer: 99 }));
    let fresh = GrantRef { id: p.conns[1].issue_grant(1 << 20), owner_epoch: 99, ..g };
    p.write(fresh, 4096).expect("the same number under a new epoch");
    p.settle();
    assert_eq!(done(&p.events(0)), [Outcome::Landed]);
}

#[test]
fn k2_repeated_confirmations_are_harmless() {
    let mut p = Pair::new(config());
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    for wr in p.transmit(0) {
        p.pass(0, &wr);
    }
    let confirm = p.transmit(1);
    p.receive(0, &confirm[0]).expect("sound");
    p.receive(0, &confirm[0]).expect("idempotent");
    assert_eq!(done(&p.events(0)).len(), 1);
}

#[test]
fn k5_a_silent_peer_is_lost_within_its_time() {
    let mut p = Pair::new(config());
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    let t0 = p.now;
    let (mut pings, mut lost) = (0, None);
    while lost.is_none() {
        let due = p.conns[0].poll_timeout().expect("there is always a time-out");
        assert!(due > p.now || p.now == t0, "r8: a time-out that does not move is a busy loop");
        p.now = due;
        p.conns[0].handle_timeout(due);
        // The device goes on to complete what a frozen peer will never answer.
        for wr in p.transmit(0) {
            pings += usize::from(!wr.is_write());
            p.complete(0, &wr);
        }
        lost =
            p.events(0).into_iter().find_map(|e| if let Event::Lost(c) = e { Some((c, due)) } else { None });
    }
    let (cause, at) = lost.expect("the loop has ended");
    assert_eq!(cause, Cause::PeerLost);
    assert_eq!(at - t0, p.cfg.peer_timeout);
    assert!(pings >= 2, "a question on each queue pair");
}

#[test]
fn k5_heartbeats_are_all_that_an_idle_connection_sends() {
    let mut p = Pair::new(config());
    p.settle();
    let mut sent = 0;
    for _ in 0..100 {
        p.advance(p.cfg.heartbeat);
        sent += p.settle();
    }
    // A question and an answer for each queue pair and side, at most.
    assert!(sent <= 100 * 2 * 2 * 2, "{sent}");
    assert!((0..2).all(|ep| p.events(ep).is_empty()));
}

#[test]
fn k5_a_deadline_gives_the_buffers_back_even_if_the_device_does_not() {
    let mut p = Pair::new(Config { max_write: 4096, ..config() });
    p.room = 6;
    let g = p.grant();
    let id = p.write(g, 100 * 4096).expect("fresh");
    let stuck = p.transmit(0);
    assert_eq!(stuck.len(), 4);
    let t0 = p.now;
    // The four stay where they are; what is left is for control.
    p.room = SQ_RESERVE;
    let mut events = Vec::new();
    while p.now < t0 + Duration::from_secs(2) && !events.contains(&Event::Lost(Cause::AbortStuck)) {
        p.advance(Duration::from_millis(10));
        // The peer is alive all the time.
        for ep in 0..2 {
            for wr in p.transmit(ep) {
                p.pass(ep, &wr);
            }
        }
        events.extend(p.events(0));
    }
    assert!(events.contains(&Event::Done { id, outcome: Outcome::NotDelivered(Reason::Deadline) }));
    assert!(!events.contains(&Event::Released { id }));
    assert_eq!(p.now - t0, Duration::from_millis(1200), "the deadline and the grace");
    // The caller kills the queue pairs; the flushes give the sources back.
    for wr in &stuck {
        p.conns[0].handle_sent(wr.token(), false, p.now);
    }
    assert_eq!(p.events(0), [Event::Released { id }]);
}

#[test]
fn k5_close_drains_both_ways_or_ends_at_its_deadline() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        p.write(g, 40 * 4096).expect("fresh");
        p.conns[0].send_message(b"last words".to_vec()).expect("open");
        let deadline = p.now + Duration::from_secs(5);
        p.conns[0].close(deadline, p.now);
        assert_eq!(p.write(g, 4096), Err(Refused::Closed));
        p.settle();
        let (a, b) = (p.events(0), p.events(1));
        assert_eq!(done(&a), [Outcome::Landed]);
        assert_eq!(a.last(), Some(&Event::Closed));
        assert!(b.contains(&Event::PeerClosed) && b.contains(&Event::Message(b"last words".to_vec())));
        assert_eq!(b.last(), Some(&Event::Closed));
    }
    let mut p = Pair::new(config());
    let deadline = p.now + Duration::from_millis(50);
    p.conns[0].close(deadline, p.now);
    p.transmit(0);
    p.conns[0].handle_timeout(deadline);
    assert_eq!(p.events(0), [Event::Lost(Cause::CloseTimeout)]);
}

#[test]
fn k4_a_lost_connection_aborts_at_once_and_frees_when_fenced() {
    let mut p = Pair::new(Config { max_write: 4096, ..config() });
    let g = p.grant();
    p.write(g, 4 * 4096).expect("fresh");
    let out = p.transmit(0);
    for wr in out.iter().filter(|wr| !wr.is_write()) {
        p.receive(1, wr).expect("sound");
    }
    p.conns[1].connection_lost(Cause::Transport, p.now);
    let aborted = Event::Aborted { grant: g.id, reason: AbortReason::ConnectionLost };
    assert_eq!(p.events(1), [Event::Lost(Cause::Transport), aborted]);
    p.conns[1].fenced();
    assert_eq!(p.events(1), [Event::Freed { grant: g.id }]);
}

#[test]
fn b1_garbage_costs_the_connection_and_nothing_else() {
    let mut p = Pair::new(config());
    let g = p.grant();
    p.write(g, 4096).expect("fresh");
    p.conns[0].send_message(vec![7; 100]).expect("open");
    let good: Vec<Posted> = p.transmit(0);
    let mut rng = sim::Rng::new(1);
    let (mut refused, mut taken) = (0, 0);
    for _ in 0..5000 {
        let mut p = Pair::new(config());
        p.grant();
        for _ in 0..4 {
            let result = match rng.pick(&[0, 1, 2]) {
                0 => {
                    let imm = if rng.one_in(2) { rng.next() as u32 } else { rng.below(3) as u32 };
                    p.conns[1].handle_recv(rng.below(3) as usize, Received::Imm(imm), p.now)
                }
                n => {
                    let sends = good
                        .iter()
                        .find_map(|wr| if let Posted::Send(_, b, _) = wr { Some(b) } else { None });
                    let mut bytes = sends.expect("a header").clone();
                    for _ in 0..n - 1 + rng.below(3) {
                        let at = rng.below(bytes.len() as u64) as usize;
                        bytes[at] = rng.next() as u8;
                    }
                    if rng.one_in(4) {
                        bytes.truncate(rng.below(bytes.len() as u64) as usize);
                    }
                    p.conns[1].handle_recv(0, Received::Bytes(&bytes), p.now)
                }
            };
            match result {
                Ok(()) => taken += 1,
                Err(_) => refused += 1,
            }
            p.transmit(1);
        }
        p.conns[1].fenced();
        p.events(1);
    }
    assert!(refused > 1000 && taken > 1000, "{refused} {taken}");
}

#[test]
fn r10_impossible_configurations_are_refused() {
    let try_it = |cfg: Config| Connection::new(cfg, Ledger::new(1, 2), Instant::now()).map(|_| ());
    assert!(try_it(config()).is_ok());
    let bad = [
        Config { qps: 0, ..config() },
        Config { qps: 65, ..config() },
        Config { notify: Notify::Send, ordered: false, ..config() },
        Config { max_control: 255, ..config() },
        Config { max_control: 256, ordered: false, qps: 64, ..config() },
        Config { max_write: 0, ..config() },
        Config { max_transfers: 0, ..config() },
        Config { max_transfers: 4097, ..config() },
        Config { heartbeat: Duration::from_secs(1), ..config() },
        Config { peer_timeout: Duration::MAX, ..config() },
        Config { abort_grace: Duration::ZERO, ..config() },
        Config { rx_credits: Credits { data: 0, control: 8 }, ..config() },
        Config { tx_credits: Credits { data: 1, control: 3 }, ..config() },
        Config { local_epoch: 3, ..config() },
    ];
    for cfg in bad {
        assert!(try_it(cfg.clone()).is_err(), "{cfg:?}");
    }
}
