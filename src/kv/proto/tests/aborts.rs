//! K4 and K5: aborts, quarantine, deadlines, death and closing.

use super::*;

#[test]
fn k4_blocks_stay_in_quarantine_until_nothing_can_arrive() {
    for cfg in all_modes() {
        let mut p = Pair::new(each(cfg.clone(), |rail| rail.max_write = 4096));
        p.room = 6;
        let g = p.grant();
        let id = p.write(g, 100 * 4096).expect("fresh");
        let posted = p.transmit(0);
        assert!(posted.iter().all(Posted::is_write) && posted.len() == 2 * cfg.qps());
        p.conns[0].abort(id, p.now);
        assert_eq!(
            p.events(0),
            [Event::Done { id, outcome: Outcome::NotDelivered(Reason::Cancelled), wrs: 0, attempts: 1 }]
        );
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
        assert_eq!(last.len(), cfg.qps());
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
    let mut p = Pair::new(on(RailConfig { ordered: false, qps: 1, ..rail() }));
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
    let mut p = Pair::new(config());
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
    assert!(events.contains(&Event::Done {
        id,
        outcome: Outcome::NotDelivered(Reason::Deadline),
        wrs: 0,
        attempts: 1
    }));
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

/// Found by the simulation: the peer, which has nothing to wait for, may be gone before it hears of the revocation.
#[test]
fn k5_a_close_that_a_revocation_crosses_ends_as_a_close() {
    let mut p = Pair::new(config());
    let g = p.grant();
    for ep in 0..2 {
        let deadline = p.now + Duration::from_secs(1);
        p.conns[ep].close(deadline, p.now);
    }
    let (a, b) = (p.transmit(0), p.transmit(1));
    a.iter().for_each(|wr| p.pass(0, wr));
    b.iter().for_each(|wr| p.receive(0, wr).expect("sound"));
    assert_eq!(p.events(0).last(), Some(&Event::Closed));
    p.conns[1].revoke_grant(g.id, p.now);
    for wr in b.iter().chain(&p.transmit(1)) {
        p.conns[1].handle_sent(wr.token(), false, p.now);
    }
    let events = p.events(1);
    assert!(events.contains(&Event::Closed), "{events:?}");
    assert!(!events.iter().any(|e| matches!(e, Event::Lost(_))), "{events:?}");
}

#[test]
fn k4_a_lost_connection_aborts_at_once_and_frees_when_fenced() {
    let mut p = Pair::new(config());
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
