//! Transfers whose data is not ready when they are accepted: the layers of a write by layer.

use super::*;

fn gated(p: &mut Pair, grant: GrantRef, bytes: u64) -> TransferId {
    let deadline = p.now + Duration::from_secs(1);
    let request = WriteRequest { grant, plan: plan(p.cfg.rails.len(), bytes), tag: 5, deadline };
    p.conns[0].write_gated(request, p.now).expect("fresh")
}

fn not_delivered(id: TransferId, reason: Reason) -> [Event; 2] {
    [Event::Done { id, outcome: Outcome::NotDelivered(reason), wrs: 0, attempts: 1 }, Event::Released { id }]
}

#[test]
fn k1_gated_transfers_land_in_the_order_of_their_gates() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let ids: Vec<_> = (0..3)
            .map(|_| {
                let grant = p.grant();
                gated(&mut p, grant, 8192)
            })
            .collect();
        p.settle();
        assert_eq!((p.events(0), p.events(1)), (vec![], vec![]), "nothing is posted behind a gate");
        for &id in [&ids[2], &ids[0], &ids[1]] {
            p.conns[0].ungate(id);
            // A gate opens once.
            p.conns[0].ungate(id);
            p.settle();
            let ours = p.events(0);
            assert_eq!(done(&ours), [Outcome::Landed]);
            assert!(ours.iter().all(|e| matches!(e, Event::Sent { id: i } | Event::Done { id: i, .. } | Event::Released { id: i } if *i == id)));
            assert_eq!(arrivals(&p.events(1)), 1);
            p.conns[0].ungate(id);
        }
        p.settle();
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

/// 61 layers that nobody has pushed yet take no slot of the others.
#[test]
fn k7_gated_transfers_take_no_slot() {
    let mut p = Pair::new(config());
    for _ in 0..61 {
        let grant = p.grant();
        gated(&mut p, grant, 4096);
    }
    for _ in 0..40 {
        let grant = p.grant();
        p.write(grant, 4096).expect("fresh");
    }
    p.settle();
    assert_eq!(done(&p.events(0)).len(), 40);
    assert_eq!(arrivals(&p.events(1)), 40);
}

#[test]
fn k4_a_gated_transfer_that_is_cancelled_or_late_tells_the_receiver() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let grants = [p.grant(), p.grant()];
        let ids = grants.map(|grant| gated(&mut p, grant, 4096));
        p.conns[0].abort(ids[0], p.now);
        p.settle();
        assert_eq!(p.events(0), not_delivered(ids[0], Reason::Cancelled));
        let aborted = |grant: GrantRef, reason| {
            [
                Event::Aborted { grant: grant.id, reason: AbortReason::Sender(reason) },
                Event::Freed { grant: grant.id },
            ]
        };
        assert_eq!(p.events(1), aborted(grants[0], SenderReason::Cancelled));
        // The other one's deadline passes, and its gate opens too late.
        p.advance(Duration::from_millis(99));
        for _ in 0..10 {
            p.settle();
            p.advance(Duration::from_millis(99));
        }
        p.conns[0].ungate(ids[1]);
        p.settle();
        assert_eq!(p.events(0), not_delivered(ids[1], Reason::Deadline));
        assert_eq!(p.events(1), aborted(grants[1], SenderReason::Deadline));
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k4_a_revoked_grant_ends_its_gated_transfer() {
    let mut p = Pair::new(config());
    let grant = p.grant();
    let id = gated(&mut p, grant, 4096);
    p.conns[1].revoke_grant(grant.id, p.now);
    p.settle();
    assert_eq!(p.events(0), not_delivered(id, Reason::Revoked));
    let revoked = Event::Aborted { grant: grant.id, reason: AbortReason::Revoked };
    assert_eq!(p.events(1), [revoked, Event::Freed { grant: grant.id }]);
}

#[test]
fn k2_gated_transfers_are_not_delivered_when_the_connection_dies() {
    let mut p = Pair::new(config());
    let grant = p.grant();
    let id = gated(&mut p, grant, 4096);
    p.conns[0].connection_lost(Cause::Local, p.now);
    let mut p = p.reconnect();
    p.settle();
    // The receiver is told by the next connection.
    assert!(p.events(1).contains(&Event::Freed { grant: grant.id }));
    p.conns[0].ungate(id);
    p.settle();
    assert_eq!(p.events(0), []);
}

#[test]
fn k5_closing_waits_for_a_gate_until_its_deadline() {
    let mut p = Pair::new(config());
    let (early, late) = (p.grant(), p.grant());
    let id = gated(&mut p, early, 4096);
    let never = gated(&mut p, late, 4096);
    p.conns[0].close(p.now + Duration::from_secs(10), p.now);
    p.settle();
    p.conns[0].ungate(id);
    p.settle();
    assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    assert!(!p.conns[0].is_closed());
    p.conns[0].abort(never, p.now);
    p.settle();
    assert!(p.conns[0].is_closed() && p.conns[1].is_closed());
}
