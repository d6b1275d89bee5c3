//! B5: who is the first to send on a queue pair that a connection manager has connected.

use super::*;

fn by_cm(opening: Opening) -> Vec<Config> {
    all_modes().into_iter().map(|cfg| each(cfg, |rail| rail.opening = opening)).collect()
}

/// Queue pairs that something was posted on.
fn used(posted: &[Posted]) -> Vec<usize> {
    let mut qps: Vec<usize> = posted.iter().map(Posted::qp).collect();
    qps.sort_unstable();
    qps.dedup();
    qps
}

#[test]
fn b5_the_side_that_connects_speaks_at_once_on_every_queue_pair() {
    for cfg in by_cm(Opening::Speak) {
        let mut p = Pair::new(cfg);
        let first = p.transmit(0);
        assert_eq!(used(&first), (0..p.cfg.qps()).collect::<Vec<_>>());
        assert!(p.transmit(1).is_empty());
        first.iter().for_each(|wr| p.pass(0, wr));
        p.settle();
        assert!(p.events(0).is_empty() && p.events(1).is_empty());
    }
}

#[test]
fn b5_the_other_side_sends_nothing_on_a_queue_pair_before_something_has_come_on_it() {
    for cfg in by_cm(Opening::Listen) {
        let mut p = Pair::new(cfg);
        let grant = p.grant();
        p.write(grant, 64 * 4096).expect("fresh");
        p.conns[0].send_message(vec![1; 5000]).expect("open");
        p.conns[0].close(p.now + Duration::from_secs(1), p.now);
        assert!(p.transmit(0).is_empty());
        // One queue pair after the other is opened by the peer.
        let mut open = Vec::new();
        for wr in p.transmit(1) {
            open.push(wr.qp());
            open.sort_unstable();
            p.pass(1, &wr);
            let sent = p.transmit(0);
            assert!(used(&sent).iter().all(|qp| open.contains(qp)), "{open:?}");
            sent.iter().for_each(|wr| p.pass(0, wr));
        }
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
        assert_eq!(arrivals(&p.events(1)), 1);
    }
}

/// K5: whoever waits for the peer's first word waits no longer than for any other.
#[test]
fn k5_a_peer_that_never_speaks_is_lost_at_its_time() {
    for cfg in by_cm(Opening::Listen) {
        let mut p = Pair::new(cfg);
        let grant = p.grant();
        p.write(grant, 4096).expect("fresh");
        let start = p.now;
        while let Some(at) = p.conns[0].poll_timeout() {
            p.now = at;
            p.conns[0].handle_timeout(at);
            assert!(p.transmit(0).is_empty());
        }
        assert!(p.now <= start + p.cfg.peer_timeout);
        let events = p.events(0);
        assert!(events.contains(&Event::Lost(Cause::PeerLost)), "{events:?}");
        assert!(matches!(done(&events)[..], [Outcome::NotDelivered(_)]));
    }
}

/// K4: a write that was cancelled before the peer has spoken is over, and the grant is free once it has.
#[test]
fn k4_a_write_cancelled_before_the_first_word_ends() {
    for cfg in by_cm(Opening::Listen) {
        let mut p = Pair::new(cfg);
        let grant = p.grant();
        let id = p.write(grant, 4096).expect("fresh");
        p.conns[0].abort(id, p.now);
        assert!(p.transmit(0).is_empty());
        p.settle();
        assert!(matches!(done(&p.events(0))[..], [Outcome::NotDelivered(_)]));
        assert!(p.events(1).iter().any(|e| matches!(e, Event::Freed { .. })));
    }
}
