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
