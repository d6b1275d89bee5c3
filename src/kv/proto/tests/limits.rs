//! K6 to K8, R9, R10 and B1: grants, credits, bounds and hostile input.

use super::*;

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
            let cfg = each(cfg.clone(), |rail| (rail.tx_credits, rail.rx_credits) = (credits, credits));
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

/// A full queue is looked at again and again, and makes room for one piece at a time: however often, each transfer has its turn.
#[test]
fn k7_a_small_transfer_beside_a_large_one_is_next_when_there_is_room() {
    for (before, between) in (0..3).flat_map(|before| (0..3).map(move |between| (before, between))) {
        let mut p = Pair::new(on(RailConfig { qps: 1, ..rail() }));
        let mut wire = Wire { room: SQ_RESERVE + 2, posted: Vec::new() };
        let look = |p: &mut Pair, wire: &mut Wire, times: usize| {
            for _ in 0..times {
                assert_eq!(p.conns[0].poll_transmit(p.now, wire), Transmitted::Idle);
            }
        };
        let g = p.grant();
        p.write(g, 100 * 4096).expect("fresh");
        look(&mut p, &mut wire, 1);
        let g = p.grant();
        let small = p.write(g, 4096).expect("fresh");
        look(&mut p, &mut wire, before);
        let mut turns = 0;
        while !wire.posted.iter().any(|posted| posted.token().transfer() == Some(small)) {
            turns += 1;
            assert!(turns <= 2, "after {before} looks, and {between} looks before each turn");
            look(&mut p, &mut wire, between);
            let first = wire.posted.remove(0);
            p.pass(0, &first);
            look(&mut p, &mut wire, 1);
        }
    }
}

/// Both sides spend control credits as fast as they can, before they hear of each other.
#[test]
fn k7_control_credits_never_lock_up() {
    for control in 4..9 {
        let credits = Credits { data: 1, control };
        let mut p = Pair::new(on(RailConfig { qps: 1, tx_credits: credits, rx_credits: credits, ..rail() }));
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
    let mut p = Pair::new(config());
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
    let want = [
        Event::Done { id, outcome: Outcome::NotDelivered(Reason::Cancelled), wrs: 0, attempts: 1 },
        Event::Released { id },
    ];
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
fn k6_a_revoked_grant_never_arrives() {
    // Before it is used, while its data is under way, and when only the notification is missing.
    for stage in 0..3 {
        let mut p = Pair::new(config());
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
        on(RailConfig { qps: 0, ..rail() }),
        on(RailConfig { qps: 65, ..rail() }),
        on(RailConfig { notify: Notify::Send, ordered: false, ..rail() }),
        Config { max_control: 255, ..config() },
        Config { max_control: 256, ..on(RailConfig { ordered: false, qps: 64, ..rail() }) },
        Config { max_control: 256, rails: vec![RailConfig { qps: 13, ..rail() }; 2], ..config() },
        Config { rails: Vec::new(), ..config() },
        Config { rails: vec![RailConfig { qps: 22, ..rail() }; 3], ..config() },
        on(RailConfig { max_write: 0, ..rail() }),
        Config { max_transfers: 0, ..config() },
        Config { max_transfers: 4097, ..config() },
        Config { heartbeat: Duration::from_secs(1), ..config() },
        Config { peer_timeout: Duration::MAX, ..config() },
        Config { abort_grace: Duration::ZERO, ..config() },
        on(RailConfig { rx_credits: Credits { data: 0, control: 8 }, ..rail() }),
        on(RailConfig { tx_credits: Credits { data: 1, control: 3 }, ..rail() }),
        Config { local_epoch: 3, ..config() },
    ];
    for cfg in bad {
        assert!(try_it(cfg.clone()).is_err(), "{cfg:?}");
    }
}
