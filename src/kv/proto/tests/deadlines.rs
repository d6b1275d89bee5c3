//! K5 beside K10: what is stuck on one rail ends that rail, not the channel; and whoever has overslept is no judge.

use super::rails::{by_rail, mixtures};
use super::*;

fn is_lost(events: &[Event]) -> bool {
    events.iter().any(|e| matches!(e, Event::Lost(_)))
}

impl Pair {
    /// Time passes for A, which is awake, and B answers. What has become of A.
    fn pass_time(&mut self, time: Duration) -> Vec<Event> {
        let (until, mut events) = (self.now + time, Vec::new());
        while self.now < until {
            self.advance(Duration::from_millis(10));
            self.settle();
            events.extend(self.events(0));
        }
        events
    }
}

#[test]
fn k10_a_cancelled_write_that_is_stuck_on_a_rail_takes_that_rail_only() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        p.room = 6;
        let g = p.grant();
        let id = p.write(g, 40 * 4096).expect("fresh");
        let posted = p.transmit(0);
        // Rail 0 completes nothing any more, and has not failed.
        let (stuck, left) = by_rail(&p, posted);
        assert!(stuck.iter().any(Posted::is_write) && left.iter().any(Posted::is_write));
        p.room = 64;
        p.conns[0].abort(id, p.now);
        left.iter().for_each(|wr| p.pass(0, wr));
        let grace = p.cfg.abort_grace + Duration::from_millis(20);
        let events = p.pass_time(grace);
        let down: Vec<_> =
            events.iter().filter(|e| matches!(e, Event::RailDown { .. } | Event::Lost(_))).collect();
        assert_eq!(down, [&Event::RailDown { rail: 0, cause: Cause::AbortStuck }], "{events:?}");
        p.fence(0, 0, &stuck);
        p.fence(1, 0, &[]);
        p.settle();
        let events = [events, p.events(0)].concat();
        assert_eq!(done(&events), [Outcome::NotDelivered(Reason::Cancelled)]);
        assert!(events.contains(&Event::Released { id }));
        assert!(p.events(1).contains(&Event::Freed { grant: g.id }));
        // And it goes on.
        let g = p.grant();
        p.write(g, 4 * 4096).expect("fresh");
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k10_a_rail_that_gets_on_is_not_given_up_for_an_abort() {
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    let g = p.grant();
    let id = p.write(g, 12 * 4096).expect("fresh");
    let posted = p.transmit(0);
    let (stuck, mut busy) = by_rail(&p, posted);
    assert!(stuck.iter().any(Posted::is_write) && busy.iter().any(Posted::is_write));
    p.conns[0].abort(id, p.now);
    let t0 = p.now;
    // Rail 1 is never without something to do, and none of it takes long.
    let down = loop {
        let g = p.grant();
        p.write(g, 4 * 4096).expect("fresh");
        let posted = p.transmit(0);
        busy.iter().for_each(|wr| p.pass(0, wr));
        busy = by_rail(&p, posted).1;
        p.advance(p.cfg.abort_grace / 4);
        for wr in p.transmit(1) {
            p.pass(1, &wr);
        }
        let events = p.events(0);
        assert!(!is_lost(&events), "{events:?}");
        if let Some(down) = events.into_iter().find(|e| matches!(e, Event::RailDown { .. })) {
            break down;
        }
        assert!(p.now < t0 + p.cfg.abort_grace * 2, "it waits for ever (K5)");
    };
    assert_eq!(down, Event::RailDown { rail: 0, cause: Cause::AbortStuck });
    assert_eq!(p.conns[0].rail_state(1), RailState::Up);
}

#[test]
fn k10_an_abort_waits_for_the_fence_of_its_rail_not_for_its_own_grace() {
    for cfg in mixtures() {
        for deliverable in [false, true] {
            let mut p = Pair::new(cfg.clone());
            p.room = if deliverable { 64 } else { 6 };
            let g = p.grant();
            let id = p.write(g, 40 * 4096).expect("fresh");
            let posted = p.transmit(0);
            let (lost, left) = by_rail(&p, posted);
            p.room = 64;
            p.conns[0].rail_failed(0, Cause::Transport, p.now);
            p.conns[0].abort(id, p.now);
            left.iter().for_each(|wr| p.pass(0, wr));
            // Longer than the grace, shorter than a fence may take.
            let time = p.cfg.abort_grace * 2;
            assert!(time < p.cfg.abort_grace + p.cfg.peer_timeout);
            let mut events = p.pass_time(time);
            assert!(!is_lost(&events), "{events:?}");
            p.fence(0, 0, &lost);
            events.extend(p.pass_time(p.cfg.abort_grace / 2));
            assert!(!is_lost(&events), "{events:?}");
            p.fence(1, 0, &[]);
            p.settle();
            events.extend(p.events(0));
            assert_eq!(done(&events), [Outcome::NotDelivered(Reason::Cancelled)], "{events:?}");
            assert!(events.contains(&Event::Released { id }));
            p.conns[0].assert_at_rest(&p.conns[1]);
        }
    }
}

#[test]
fn k10_a_cancelled_read_that_is_stuck_on_a_rail_takes_that_rail_only() {
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    let id = p.conns[1].issue_read_grant(1 << 30);
    let grant = GrantRef { id, owner_epoch: 2, bound_epoch: 1, max_bytes: 1 << 30 };
    let by = ReadBy::Rdma { plan: plan(2, 12 * 4096), depth: 4, qps: 4 };
    let deadline = p.now + Duration::from_secs(1);
    let id = p.conns[0].read(ReadRequest { grant, by, deadline }, p.now).expect("fresh");
    let posted = p.transmit(0);
    let (stuck, left) = by_rail(&p, posted);
    assert!(stuck.iter().any(Posted::is_read) && left.iter().any(Posted::is_read));
    p.conns[0].abort_read(id, p.now);
    left.iter().for_each(|wr| p.pass(0, wr));
    let grace = p.cfg.abort_grace + Duration::from_millis(20);
    let events = p.pass_time(grace);
    assert!(events.contains(&Event::RailDown { rail: 0, cause: Cause::AbortStuck }), "{events:?}");
    assert!(!is_lost(&events), "{events:?}");
    p.fence(0, 0, &stuck);
    p.fence(1, 0, &[]);
    p.settle();
    let events = [events, p.events(0)].concat();
    assert!(!is_lost(&events) && events.contains(&Event::ReadReleased { id }), "{events:?}");
    p.conns[0].assert_at_rest(&p.conns[1]);
}

#[test]
fn k5_whoever_overslept_waits_for_a_fence_once_more() {
    for ours in [true, false] {
        let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
        let fence = p.cfg.abort_grace + p.cfg.peer_timeout;
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        if !ours {
            p.conns[0].rail_fenced(0, p.now);
        }
        p.settle();
        // A is stopped, and nobody else: B has had all the time to answer, and its answer waits.
        p.now += fence * 2;
        p.conns[0].handle_timeout(p.now);
        assert!(!is_lost(&p.events(0)), "{ours}");
        p.settle();
        if ours {
            p.conns[0].rail_fenced(0, p.now);
        }
        p.conns[1].rail_fenced(0, p.now);
        p.settle();
        assert_eq!(p.conns[0].rail_state(0), RailState::Down);
        assert!(!is_lost(&p.events(0)));
        // Not for ever.
        p.conns[0].rail_up(0, p.now);
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        p.now += fence * 2;
        p.conns[0].handle_timeout(p.now);
        let t0 = p.now;
        let events = p.pass_time(fence);
        assert!(is_lost(&events) && p.now <= t0 + fence + Duration::from_millis(10), "{events:?}");
    }
}

#[test]
fn k5_peers_that_were_stopped_together_find_each_other_again() {
    for rails in [1, 2] {
        let mut p = Pair::new(Config { rails: vec![rail(); rails], ..config() });
        // Both ask, and both are stopped before anything has left.
        p.advance(p.cfg.heartbeat);
        let asked = [0, 1].map(|ep| p.transmit(ep));
        p.now += p.cfg.peer_timeout * 10;
        for ep in 0..2 {
            p.conns[ep].handle_timeout(p.now);
            assert!(!is_lost(&p.events(ep)), "{rails}");
        }
        for (ep, asked) in asked.iter().enumerate() {
            asked.iter().for_each(|wr| p.pass(ep, wr));
        }
        p.settle();
        p.advance(p.cfg.heartbeat / 2);
        p.settle();
        let g = p.grant();
        p.write(g, 4096).expect("fresh");
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

impl Pair {
    /// Time passes for both while rail `dark` takes everything, completes it, and nothing of it comes. Rails that fail are fenced. What
    /// has become of A.
    fn pass_time_without(&mut self, dark: usize, time: Duration) -> Vec<Event> {
        let (until, mut events) = (self.now + time, Vec::new());
        while self.now < until {
            for ep in 0..2 {
                for wr in self.transmit(ep) {
                    let is_dark = self.conns[ep].links[wr.qp()].rail == dark;
                    if is_dark { self.complete(ep, &wr) } else { self.pass(ep, &wr) }
                }
                if self.conns[ep].rail_state(dark) == RailState::Failing {
                    self.fence(ep, dark, &[]);
                }
            }
            self.advance(Duration::from_millis(10));
            events.extend(self.events(0));
        }
        events
    }
}

/// The header, or the peer's confirmation, is on a rail that has gone silent and has not failed yet.
#[test]
fn k10_a_word_on_an_abort_that_a_silent_rail_has_swallowed_takes_that_rail_only() {
    let mut swallowed = 0;
    let each =
        |cfg: Config| [(0, true), (0, false), (1, true), (1, false)].map(|(dark, d)| (cfg.clone(), dark, d));
    // Where there is no order, what has completed has come.
    let swallows = |(cfg, dark, _): &(Config, usize, bool)| cfg.rails[*dark].ordered;
    for (cfg, dark, delivered) in mixtures().into_iter().flat_map(each).filter(swallows) {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        let id = p.write(g, 12 * 4096).expect("fresh");
        for wr in p.transmit(0) {
            let is_dark = p.conns[0].links[wr.qp()].rail == dark;
            let lost = !delivered && is_dark && matches!(wr, Posted::Send(..));
            swallowed += usize::from(lost);
            if lost { p.complete(0, &wr) } else { p.pass(0, &wr) }
        }
        p.conns[0].abort(id, p.now);
        let time = (p.cfg.abort_grace + p.cfg.peer_timeout) * 2;
        let events = p.pass_time_without(dark, time);
        let down: Vec<_> =
            events.iter().filter(|e| matches!(e, Event::RailDown { .. } | Event::Lost(_))).collect();
        assert_eq!(down, [&Event::RailDown { rail: dark, cause: Cause::PeerLost }], "{events:?}");
        let ends = done(&events);
        assert!(matches!(ends[..], [Outcome::Landed | Outcome::NotDelivered(Reason::Cancelled)]), "{ends:?}");
        assert!(!delivered || ends == [Outcome::Landed]);
        p.settle();
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
    assert!(swallowed > 0);
}

/// A hostile peer answers nothing but heartbeats, and brings a rail down that has not come up again, over and over.
#[test]
fn k5_a_peer_that_brings_rails_down_for_ever_does_not_put_an_abort_off_for_ever() {
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    let g = p.grant();
    let id = p.write(g, 12 * 4096).expect("fresh");
    for wr in p.transmit(0) {
        p.complete(0, &wr);
    }
    p.conns[0].abort(id, p.now);
    let (t0, limit) = (p.now, p.cfg.abort_limit() + p.cfg.word_grace());
    let mut generation = 0;
    let lost = loop {
        for fenced in [false, true] {
            p.conns[0].on_rail_word(0, generation, fenced, p.now).expect("sound");
        }
        p.conns[0].rail_fenced(0, p.now);
        generation += 1;
        p.transmit(0).iter().for_each(|wr| p.complete(0, wr));
        for qp in 2..4 {
            p.conns[0].links[qp].live.on_heard(p.now);
        }
        p.now += p.cfg.abort_grace / 4;
        p.conns[0].handle_timeout(p.now);
        if let Some(lost) = p.events(0).into_iter().find(|e| matches!(e, Event::Lost(_))) {
            break lost;
        }
        assert!(p.now < t0 + limit * 2, "it waits for ever");
    };
    assert_eq!(lost, Event::Lost(Cause::AbortStuck));
    assert!(generation > 4 && p.now <= t0 + limit, "{:?}", p.now - t0);
}
