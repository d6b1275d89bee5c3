//! K1 to K3: what has landed, what is in doubt, and that order does not matter.

use super::*;

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
    assert_eq!(p.events(0), [Event::Done { id, outcome: Outcome::Landed, wrs: 0, attempts: 1 }]);
    assert_eq!(p.settle(), 0, "and then there is silence");
    assert_eq!(p.conns[0].stats().landed, 1);
}

#[test]
fn k3_any_order_of_arrival_lands_once_and_only_when_complete() {
    for cfg in all_modes().into_iter().filter(|c| !c.rails[0].ordered) {
        for seed in 0..50u64 {
            let mut p = Pair::new(each(cfg.clone(), |rail| rail.max_write = 4096));
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
    let mut p = Pair::new(on(RailConfig { ordered: false, ..rail() }));
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
        let mut p = Pair::new(on(RailConfig { ordered, qps: 1, ..rail() }));
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

/// As a driver keeps it between two connections.
#[test]
fn k2_an_ended_connection_leaves_what_resolves_its_doubts_and_no_grant() {
    for cfg in all_modes() {
        let cfg = each(cfg, |rail| rail.qps = 1);
        let mut p = Pair::new(cfg.clone());
        let grants: Vec<GrantRef> = (0..7).map(|_| p.grant()).collect();
        let ids: Vec<TransferId> = grants[..5].iter().map(|&g| p.write(g, 4096).expect("fresh")).collect();
        let posted = p.transmit(0);
        // What the first message tells of comes, and the rest does not.
        let header = posted.iter().position(|wr| matches!(wr, Posted::Send(..))).expect("a header");
        let (came, lost) = posted.split_at(header + 1);
        came.iter().for_each(|wr| p.receive(1, wr).expect("sound"));
        assert!(came.iter().chain(lost).filter(|wr| wr.is_write()).count() >= 5);
        let arrived = p.events(1);
        p.conns[0].connection_lost(Cause::Transport, p.now);
        let doubts = p.events(0).into_iter().filter_map(|e| match e {
            Event::Done { id, outcome: Outcome::InDoubt(_), .. } => Some(id),
            _ => None,
        });
        let doubts: Vec<TransferId> = doubts.collect();
        assert!(!doubts.is_empty() && doubts.iter().all(|id| ids.contains(id)));
        let mut ledgers = p.ledgers();
        ledgers.iter_mut().for_each(Ledger::end_connection);
        let mut p = Pair::with(cfg, ledgers);
        // A grant of the new connection is another one.
        let fresh = p.grant();
        p.write(fresh, 4096).expect("no grant of an earlier connection has its number");
        p.settle();
        for event in p.events(0) {
            if let Event::Resolved { id, resolution } = event {
                let landed =
                    arrived.iter().any(|e| matches!(e, Event::Arrived { transfer, .. } if *transfer == id));
                let want = if landed { Resolution::Landed } else { Resolution::NotDelivered };
                assert!(doubts.contains(&id) && resolution == want, "{id:?}");
            }
        }
        assert!(p.conns[0].sender.ledger.in_doubt.is_empty(), "each is resolved");
        assert_eq!(arrivals(&p.events(1)), 1);
    }
}

#[test]
fn k2_a_peer_that_has_forgotten_says_so_and_goes_on() {
    let mut p = Pair::new(config());
    let back = |p: &mut Pair, id: u64| {
        let grant = GrantRef { id, owner_epoch: 1, bound_epoch: 2, max_bytes: 1 << 30 };
        let deadline = p.now + Duration::from_secs(1);
        p.conns[1].write(WriteRequest { grant, plan: plan(1, 4096), tag: 5, deadline }, p.now).expect("fresh")
    };
    // Both ways, so that each remembers numbers of the other's.
    for _ in 0..3 {
        let g = p.grant();
        p.write(g, 4096).expect("fresh");
        let g = p.conns[0].issue_grant(4096);
        back(&mut p, g);
    }
    p.settle();
    let g = p.grant();
    let id = p.write(g, 4096).expect("fresh");
    for wr in p.transmit(0) {
        p.receive(1, &wr).expect("sound");
    }
    p.conns[0].connection_lost(Cause::Transport, p.now);
    let cfg = p.cfg.clone();
    let [mut a, b] = p.ledgers();
    a.end_connection();
    let mut first = Numbers::default();
    first.forget(&b);
    let mut p = Pair::with(cfg, [a, Ledger::from(2, 1, first)]);
    // Granted before the question has come: that is about another grant.
    let grants = [p.grant(), p.grant()];
    p.settle();
    assert_eq!(p.events(0), [Event::Resolved { id, resolution: Resolution::Unknown }]);
    assert_eq!(p.events(1), []);
    for g in grants {
        p.write(g, 4096).expect("behind all that it has used");
        let g = p.conns[0].issue_grant(4096);
        back(&mut p, g);
    }
    p.settle();
    for ep in 0..2 {
        let events = p.events(ep);
        assert_eq!((arrivals(&events), done(&events)), (2, vec![Outcome::Landed; 2]));
    }
    p.conns[0].assert_at_rest(&p.conns[1]);
}

#[test]
fn k2_what_was_not_sent_entirely_is_not_delivered_and_the_receiver_is_told() {
    let mut cases = Vec::new();
    for room in [5, 6] {
        let mut p = Pair::new(config());
        p.room = room;
        let g = p.grant();
        p.write(g, 100 * 4096).expect("fresh");
        p.transmit(0);
        cases.push((p, g));
    }
    // Everything but the header: the credits for it are spent.
    let mut p = Pair::new(on(RailConfig { qps: 1, ..rail() }));
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
