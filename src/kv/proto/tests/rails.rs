//! K10 and K3: a rail fails alone, and comes back.

use super::super::control::{Builder, Class, Head};
use super::super::record::Record;
use super::*;

/// Two rails in every mixture of order and notification.
pub(super) fn mixtures() -> Vec<Config> {
    let kinds = [(Notify::Imm, true), (Notify::Send, true), (Notify::Imm, false)];
    let rail = |(notify, ordered)| RailConfig { notify, ordered, ..rail() };
    let pairs = kinds.iter().flat_map(|&a| kinds.iter().map(move |&b| vec![rail(a), rail(b)]));
    pairs.map(|rails| Config { rails, ..config() }).collect()
}

fn rail_of(p: &Pair, wr: &Posted) -> usize {
    p.conns[0].links[wr.qp()].rail
}

/// Of `posted`, what rail 0 has taken, and what rail 1 has.
pub(super) fn by_rail(p: &Pair, posted: Vec<Posted>) -> (Vec<Posted>, Vec<Posted>) {
    posted.into_iter().partition(|wr| rail_of(p, wr) == 0)
}

impl Pair {
    /// Flushes what `ep` had posted on a rail, and fences it.
    pub(super) fn fence(&mut self, ep: usize, rail: usize, lost: &[Posted]) {
        for wr in lost {
            self.conns[ep].handle_sent(wr.token(), false, self.now);
        }
        self.conns[ep].rail_fenced(rail, self.now);
    }

    /// Rail 0 of A fails with what it had posted; both sides go through it.
    fn lose_rail(&mut self, lost: &[Posted]) {
        self.conns[0].rail_failed(0, Cause::Transport, self.now);
        self.settle();
        self.fence(0, 0, lost);
        self.fence(1, 0, &[]);
        self.settle();
    }
}

#[test]
fn k10_the_work_of_a_rail_moves_to_the_others_after_both_fences() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        let id = p.write(g, 12 * 4096).expect("fresh");
        let (lost, left) = {
            let posted = p.transmit(0);
            by_rail(&p, posted)
        };
        assert!(lost.iter().any(Posted::is_write) && left.iter().any(Posted::is_write));
        left.iter().for_each(|wr| p.pass(0, wr));
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        assert!(p.events(0).contains(&Event::RailDown { rail: 0, cause: Cause::Transport }));
        p.settle();
        assert_eq!(
            p.events(1),
            [Event::RailDown { rail: 0, cause: Cause::PeerGaveUp }],
            "over the other rail"
        );
        p.fence(0, 0, &lost);
        let rest = p.transmit(0);
        assert!(!rest.iter().any(Posted::is_write), "nothing is written again before the peer's fence");
        rest.iter().for_each(|wr| p.pass(0, wr));
        p.settle();
        p.fence(1, 0, &[]);
        p.settle();
        let events: Vec<_> = std::iter::from_fn(|| p.conns[0].poll_event()).collect();
        assert!(
            events.iter().any(|e| matches!(e, Event::Done { outcome: Outcome::Landed, attempts: 2, .. })),
            "{events:?}"
        );
        assert_eq!(events.last(), Some(&Event::Released { id }), "the sources were needed until then");
        assert_eq!(arrivals(&p.events(1)), 1);
        assert_eq!(p.conns[0].rail_state(0), RailState::Down);
        p.conns[0].assert_at_rest(&p.conns[1]);
        // And it goes on.
        let g = p.grant();
        p.write(g, 4 * 4096).expect("fresh");
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

#[test]
fn k10_messages_survive_a_rail_once_and_in_order() {
    for cfg in mixtures() {
        for heard in 0..4 {
            let mut p = Pair::new(Config { max_control: 256, ..cfg.clone() });
            let messages: Vec<Vec<u8>> = (0..24u8).map(|n| vec![n; usize::from(n) * 37]).collect();
            for m in &messages {
                p.conns[0].send_message(m.clone()).expect("small");
            }
            // So much of rail 0 has come, and its completion has not.
            let (lost, left) = {
                let posted = p.transmit(0);
                by_rail(&p, posted)
            };
            assert!(lost.len() > 4, "{}", lost.len());
            lost.iter().take(heard).for_each(|wr| p.receive(1, wr).expect("sound"));
            left.iter().for_each(|wr| p.pass(0, wr));
            p.lose_rail(&lost);
            let got: Vec<_> = p
                .events(1)
                .into_iter()
                .filter_map(|e| if let Event::Message(m) = e { Some(m) } else { None })
                .collect();
            assert_eq!(got, messages, "{heard} had been heard");
        }
    }
}

#[test]
fn k10_what_was_delivered_is_not_delivered_again() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        p.write(g, 12 * 4096).expect("fresh");
        let out = p.transmit(0);
        out.iter().for_each(|wr| p.receive(1, wr).expect("sound"));
        assert_eq!(arrivals(&p.events(1)), 1);
        // The confirmation is under way, on one rail or the other; A's completions are lost with rail 0.
        let back = p.transmit(1);
        let (lost, left) = by_rail(&p, out);
        left.iter().for_each(|wr| p.complete(0, wr));
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        let (lost_back, left_back) = by_rail(&p, back);
        left_back.iter().for_each(|wr| p.pass(1, wr));
        p.settle();
        p.fence(0, 0, &lost);
        p.fence(1, 0, &lost_back);
        p.settle();
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
        assert_eq!(arrivals(&p.events(1)), 0, "twice");
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k3_what_an_earlier_attempt_has_posted_on_a_healthy_rail_is_awaited() {
    // With order, the second attempt's notification cannot be there before them.
    for cfg in mixtures().into_iter().filter(|cfg| !cfg.rails[1].ordered) {
        let mut p = Pair::new(cfg);
        p.room = 5;
        let g = p.grant();
        p.write(g, 40 * 4096).expect("fresh");
        let (lost, late) = {
            let posted = p.transmit(0);
            by_rail(&p, posted)
        };
        p.room = 64;
        p.lose_rail(&lost);
        assert_eq!(arrivals(&p.events(1)), 0, "before what the first attempt has posted on rail 1");
        for wr in &late {
            assert_eq!(arrivals(&p.events(1)), 0);
            p.pass(0, wr);
        }
        p.settle();
        assert_eq!(arrivals(&p.events(1)), 1);
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

#[test]
fn k3_a_header_of_an_earlier_attempt_is_nothing() {
    let rails = vec![RailConfig { ordered: false, ..rail() }; 2];
    let mut p = Pair::new(Config { rails, ..config() });
    let g = p.grant();
    p.write(g, 12 * 4096).expect("fresh");
    let posted = p.transmit(0);
    let (lost, left) = by_rail(&p, posted);
    // The header is on either rail: the test is about the one that travels on rail 1.
    let (headers, writes): (Vec<_>, Vec<_>) = left.into_iter().partition(|wr| !wr.is_write());
    writes.iter().for_each(|wr| p.pass(0, wr));
    p.lose_rail(&lost);
    let before = arrivals(&p.events(1));
    headers.iter().for_each(|wr| p.pass(0, wr));
    p.settle();
    assert_eq!(before + arrivals(&p.events(1)), 1);
    assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    p.conns[0].assert_at_rest(&p.conns[1]);
}

#[test]
fn k10_an_abort_is_quiet_on_the_rails_that_are_left_and_after_the_fence() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        p.room = 5;
        let g = p.grant();
        let id = p.write(g, 40 * 4096).expect("fresh");
        let (lost, left) = {
            let posted = p.transmit(0);
            by_rail(&p, posted)
        };
        p.room = 64;
        p.conns[0].abort(id, p.now);
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        left.iter().for_each(|wr| p.pass(0, wr));
        p.settle();
        assert!(p.events(1).iter().any(|e| matches!(e, Event::Aborted { .. })));
        p.fence(0, 0, &lost);
        p.settle();
        assert!(p.events(1).is_empty(), "rail 0 is not fenced on the side that it writes to");
        p.fence(1, 0, &[]);
        p.settle();
        assert_eq!(p.events(1), [Event::Freed { grant: g.id }]);
        let events = p.events(0);
        assert_eq!(done(&events), [Outcome::NotDelivered(Reason::Cancelled)]);
        assert!(events.contains(&Event::Released { id }));
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k10_an_abort_of_which_no_queue_pair_is_left_ends() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        // One piece: it is on the first rail alone.
        let id = p.write(g, 4096).expect("fresh");
        let posted = p.transmit(0);
        let (lost, left) = by_rail(&p, posted);
        assert!(lost.iter().any(Posted::is_write));
        p.conns[0].abort(id, p.now);
        left.iter().for_each(|wr| p.pass(0, wr));
        p.lose_rail(&lost);
        assert!(p.events(1).contains(&Event::Freed { grant: g.id }));
        assert_eq!(done(&p.events(0)), [Outcome::NotDelivered(Reason::Cancelled)]);
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

/// Everything was posted, so that only the receiver can tell; and then a rail takes it from the receiver.
#[test]
fn k4_a_grant_that_was_taken_back_is_not_written_to_again_after_a_rail() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        let g = p.grant();
        let id = p.write(g, 12 * 4096).expect("fresh");
        let posted = p.transmit(0);
        // What rail 0 carries is lost. The rest has come, which is not all of it.
        let (lost, left) = by_rail(&p, posted);
        assert!(lost.iter().any(Posted::is_write));
        left.iter().for_each(|wr| p.pass(0, wr));
        p.conns[1].revoke_grant(g.id, p.now);
        let word = p.transmit(1);
        word.iter().for_each(|wr| p.pass(1, wr));
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        p.settle();
        p.fence(0, 0, &lost);
        p.fence(1, 0, &[]);
        loop {
            let (there, back) = (p.transmit(0), p.transmit(1));
            assert!(!there.iter().any(Posted::is_write), "it is written again");
            there.iter().for_each(|wr| p.pass(0, wr));
            back.iter().for_each(|wr| p.pass(1, wr));
            if there.is_empty() && back.is_empty() {
                break;
            }
        }
        let (sender, receiver) = (p.events(0), p.events(1));
        assert_eq!(done(&sender), [Outcome::NotDelivered(Reason::Revoked)], "{sender:?}");
        assert!(sender.contains(&Event::Released { id }));
        assert_eq!(arrivals(&receiver), 0);
        assert!(receiver.contains(&Event::Freed { grant: g.id }), "{receiver:?}");
        p.conns[0].assert_at_rest(&p.conns[1]);
    }
}

#[test]
fn k10_the_last_rail_takes_the_connection_with_it() {
    let mut p = Pair::new(Config { rails: vec![rail(); 3], ..config() });
    p.conns[0].rail_failed(2, Cause::Transport, p.now);
    p.conns[0].rail_failed(2, Cause::DeviceGone, p.now);
    p.conns[0].rail_failed(0, Cause::DeviceGone, p.now);
    let down = |rail, cause| Event::RailDown { rail, cause };
    assert_eq!(p.events(0), [down(2, Cause::Transport), down(0, Cause::DeviceGone)]);
    p.conns[0].rail_failed(1, Cause::Transport, p.now);
    assert_eq!(p.events(0), [Event::Lost(Cause::Transport)]);
}

#[test]
fn k10_a_rail_comes_back_with_new_queue_pairs() {
    for cfg in mixtures() {
        let mut p = Pair::new(cfg);
        assert_eq!(p.conns[0].rail_talk(0, vec![1]), Err(TalkRefused::NotDown { rail: 0 }));
        for generation in 0..3 {
            assert!(!p.conns[0].rail_up(0, p.now), "it is up, or not fenced");
            p.lose_rail(&[]);
            let limit = p.conns[0].talk_limit();
            let long = p.conns[0].rail_talk(0, vec![0; limit + 1]);
            assert_eq!(long, Err(TalkRefused::TooLong { asked: limit + 1, limit }));
            let bytes = vec![generation; limit];
            p.conns[0].rail_talk(0, bytes.clone()).expect("down");
            p.settle();
            assert!(p.events(1).contains(&Event::RailTalk { rail: 0, bytes }));
            p.events(0);
            for ep in 0..2 {
                assert!(p.conns[ep].rail_up(0, p.now));
                assert_eq!(p.events(ep), [Event::RailUp { rail: 0 }]);
            }
            p.settle();
            let g = p.grant();
            p.write(g, 12 * 4096).expect("fresh");
            let posted = p.transmit(0);
            let rails: Vec<usize> =
                posted.iter().filter(|wr| wr.is_write()).map(|wr| rail_of(&p, wr)).collect();
            assert!(rails.contains(&0) && rails.contains(&1));
            posted.iter().for_each(|wr| p.pass(0, wr));
            p.settle();
            assert_eq!(done(&p.events(0)), [Outcome::Landed]);
            assert_eq!(arrivals(&p.events(1)), 1);
            p.conns[0].assert_at_rest(&p.conns[1]);
        }
    }
}

/// It fails over there before it is up here.
#[test]
fn k10_a_rail_that_is_up_on_one_side_only_may_fail_again() {
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    p.lose_rail(&[]);
    assert!(p.conns[0].rail_up(0, p.now));
    p.conns[0].rail_failed(0, Cause::Transport, p.now);
    p.events(1);
    p.settle();
    assert_eq!(p.events(1), [Event::RailDown { rail: 0, cause: Cause::PeerGaveUp }]);
    assert!(!p.conns[1].rail_up(0, p.now), "that generation is over");
    p.fence(0, 0, &[]);
    p.fence(1, 0, &[]);
    p.settle();
    assert_eq!([0, 1].map(|ep| p.conns[ep].rail_state(0)), [RailState::Down; 2]);
}

#[test]
fn k10_a_fence_that_does_not_come_ends_the_connection() {
    for ours in [true, false] {
        let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
        p.conns[0].rail_failed(0, Cause::Transport, p.now);
        if !ours {
            p.conns[0].rail_fenced(0, p.now);
        }
        let (t0, mut lost) = (p.now, None);
        while lost.is_none() && p.now < t0 + Duration::from_secs(5) {
            p.advance(Duration::from_millis(10));
            p.settle();
            lost = p.events(0).into_iter().find_map(|e| if let Event::Lost(c) = e { Some(c) } else { None });
        }
        assert_eq!(lost, Some(if ours { Cause::AbortStuck } else { Cause::PeerLost }));
        assert_eq!(p.now, t0 + p.cfg.abort_grace + p.cfg.peer_timeout);
    }
}

#[test]
fn k10_a_silent_rail_fails_and_a_silent_peer_is_lost_in_its_time() {
    for frozen in [false, true] {
        let mut p = Pair::new(Config { rails: vec![rail(); 3], ..config() });
        let (t0, mut found) = (p.now, None);
        while found.is_none() {
            let due = p.conns[0].poll_timeout().expect("there is always a time-out");
            p.advance(due - p.now);
            for ep in 0..2 {
                for wr in p.transmit(ep) {
                    let silent = ep == 1 && (frozen || rail_of(&p, &wr) == 1);
                    if silent { p.complete(ep, &wr) } else { p.pass(ep, &wr) }
                }
            }
            found = p.events(0).into_iter().next();
        }
        let want = match frozen {
            false => Event::RailDown { rail: 1, cause: Cause::PeerLost },
            true => Event::Lost(Cause::PeerLost),
        };
        assert_eq!(found, Some(want));
        assert!(p.now <= t0 + p.cfg.peer_timeout + p.cfg.heartbeat);
    }
}

/// Found by random operations: what follows in the same message is of a connection that is no more.
#[test]
fn k10_nothing_is_heard_after_the_word_that_ends_the_last_rail() {
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    p.conns[1].rail_failed(0, Cause::Transport, p.now);
    p.events(1);
    let mut b = builder(Some(0));
    assert!(
        b.push(&Record::RailDown { rail: 1, generation: 0 })
            && b.push(&Record::Close { messages: 0, reads: 0 })
    );
    p.conns[1].handle_recv(3, Received::Bytes(b.bytes()), p.now).expect("sound");
    assert_eq!(p.events(1), [Event::Lost(Cause::PeerGaveUp)]);
}

/// Messages of a hostile peer, each a violation.
#[test]
fn b1_words_about_rails_are_checked() {
    let slot = record::Slot { index: 0, generation: 1 };
    let reopen = |attempt, reset| Record::Reopen { transfer: 0, attempt, slot, grant: 0, reset };
    let cases = [
        Record::RailDown { rail: 2, generation: 0 },
        Record::RailDown { rail: 0, generation: 1 },
        Record::Fenced { rail: 0, generation: u32::MAX },
        Record::Resent { qp: 0, start: 0, covered: 1, bytes: b"" },
        Record::Resent { qp: 64, start: 0, covered: 1, bytes: b"" },
        Record::RailTalk { rail: 2, bytes: b"" },
        Record::Reopened { transfer: 0, attempt: 1 },
        reopen(0, 0),
        reopen(1, 1),
    ];
    for record in cases {
        let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
        p.conns[1].issue_grant(1);
        assert!(say(&mut p, Some(0), &record).is_err(), "{record:?}");
    }
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    say(&mut p, Some(0), &Record::Ping).expect("sound");
    assert!(say(&mut p, Some(0), &Record::Ping).is_err(), "a number twice");
    let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
    assert!(say(&mut p, None, &Record::Ping).is_err(), "no number");
    // Within a record that is sent again.
    let inner = |record: &Record<'_>| {
        let mut v = Vec::new();
        record.write(&mut v);
        v
    };
    let notify = inner(&Record::Notify { transfer: 0, attempt: 0, slot });
    let nested = inner(&Record::Resent { qp: 0, start: 900, covered: 1, bytes: b"" });
    for bytes in [notify, nested, vec![0]] {
        let mut p = Pair::new(Config { rails: vec![rail(); 2], ..config() });
        p.lose_rail(&[]);
        let record = Record::Resent { qp: 0, start: 1000, covered: 9, bytes: &bytes };
        assert!(say(&mut p, Some(5000), &record).is_err(), "{bytes:?}");
    }
}

/// B hears a record of A's, on the last queue pair.
fn say(p: &mut Pair, number: Option<u64>, record: &Record<'_>) -> Result<(), ProtocolViolation> {
    let mut b = builder(number);
    assert!(b.push(record));
    p.conns[1].handle_recv(3, Received::Bytes(b.bytes()), p.now)
}

/// A message of A's.
fn builder(number: Option<u64>) -> Builder {
    let mut b = Builder::new(4096);
    let (class, epoch) = (Class::Control, 1);
    b.begin(&Head {
        class,
        epoch,
        resolved_below: 0,
        data_returned: 0,
        control_returned: 0,
        messages: 0,
        number,
    });
    b
}
