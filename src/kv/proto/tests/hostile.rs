//! Admitted peers that keep to the codec and to nothing else: what they cost is bounded, in memory (B1) and in time (K5).

use super::control::{self, Class, Head};
use super::record::{Record, Slot};
use super::*;

/// Speaks as A to B, by hand.
#[derive(Default)]
struct Stranger {
    sent: u64,
    /// Messages of B's that have come, and those of them whose credit it has given back.
    heard: u64,
    returned: u64,
    /// Credits that B has given back.
    back: u64,
}

impl Stranger {
    /// A credit of B's is left.
    fn may_say(&self, p: &Pair) -> bool {
        self.sent - self.back < u64::from(p.conns[1].cfg.rails[0].rx_credits.control)
    }

    /// One message of as many of these records as fit.
    fn say(&mut self, p: &mut Pair, records: &[Record<'_>]) -> Result<(), ProtocolViolation> {
        assert!(self.may_say(p), "it keeps to its credits");
        self.sent += 1;
        let mut message = Builder::new(p.cfg.max_control);
        message.begin(&Head {
            class: Class::Control,
            epoch: 1,
            resolved_below: 0,
            data_returned: 0,
            control_returned: self.returned,
            messages: 0,
            number: None,
        });
        let _all = records.iter().all(|record| message.push(record));
        p.conns[1].handle_recv(0, Received::Bytes(message.bytes()), p.now)
    }

    /// Takes what B has to say.
    fn listen(&mut self, p: &mut Pair) {
        for wr in p.transmit(1) {
            let Posted::Send(_, bytes, _) = &wr else { panic!("{wr:?}") };
            let (head, _) = control::parse(bytes).expect("B is sound");
            self.heard += 1;
            self.back = self.back.max(head.control_returned);
            p.complete(1, &wr);
        }
    }

    /// Time passes for B, while this answers heartbeats and does nothing else. What has become of B.
    fn play_alive(&mut self, p: &mut Pair, time: Duration) -> Vec<Event> {
        let (until, mut events) = (p.now + time, Vec::new());
        while p.now < until && !events.iter().any(|e| matches!(e, Event::Lost(_))) {
            p.now += Duration::from_millis(10);
            p.conns[1].handle_timeout(p.now);
            self.listen(p);
            self.returned = self.heard;
            if self.may_say(p) {
                self.say(p, &[Record::Pong]).expect("sound");
            }
            events.extend(p.events(1));
        }
        events
    }
}

/// A connection of one queue pair.
fn alone() -> Pair {
    Pair::new(Config { max_control: 1024, ..on(RailConfig { qps: 1, ..rail() }) })
}

#[test]
fn b1_a_peer_that_asks_and_takes_no_answers_ends_its_connection() {
    let reason = SenderReason::Cancelled;
    let questions = [
        ("revoked again and again", Record::Revoke { grant: 5 }),
        ("asked again and again", Record::Query { transfer: 0, grant: 0 }),
        ("aborted again and again", Record::Abort { transfer: 0, attempt: 0, grant: 0, reason, slot: None }),
    ];
    for (what, question) in questions {
        let mut p = alone();
        p.grant();
        let mut stranger = Stranger::default();
        let mut asked = 0;
        let end = loop {
            // A credit for each of B's messages, so that B gives credits back: many for one.
            stranger.returned = (stranger.returned + 1).min(stranger.heard);
            while stranger.may_say(&p) && p.conns[1].out.check_owed().is_ok() {
                asked += 1;
                if stranger.say(&mut p, &[question; 100]).is_err() {
                    break;
                }
            }
            stranger.listen(&mut p);
            if let Some(Event::Lost(cause)) = p.events(1).into_iter().find(|e| matches!(e, Event::Lost(_))) {
                break cause;
            }
            assert!(asked < 100_000, "{what}: it is kept for ever");
        };
        assert!(matches!(end, Cause::Violation(_)), "{what}: {end}");
    }
}

#[test]
fn k2_what_a_peer_has_said_takes_no_memory_once_its_connection_has_ended() {
    let (reason, slot) = (SenderReason::Cancelled, None);
    let mut p = alone();
    p.grant();
    let mut stranger = Stranger::default();
    for round in 0..500u64 {
        // Every second number, so that no two touch: as a sender, and as a receiver.
        let revoked = (0..30).map(|n| Record::Revoke { grant: (round * 30 + n) * 2 });
        let aborted = (0..30).map(|n| {
            let transfer = (round * 30 + n) * 2 + 1;
            Record::Abort { transfer, attempt: 0, grant: 0, reason, slot }
        });
        let said: Vec<Record<'_>> = if round % 2 == 0 { revoked.collect() } else { aborted.collect() };
        stranger.returned = stranger.heard;
        stranger.say(&mut p, &said).expect("sound");
        stranger.listen(&mut p);
    }
    let [_, mut ledger] = p.ledgers();
    assert!(ledger.ranges() > 10_000, "{}", ledger.ranges());
    ledger.end_connection();
    assert_eq!(ledger.ranges(), 0);
}

/// An honest one may take as many grants back as it likes.
#[test]
fn k7_any_number_of_grants_is_taken_back_at_once() {
    let mut p = alone();
    let grants: Vec<u64> = (0..200_000).map(|_| p.conns[1].issue_grant(1)).collect();
    grants.iter().for_each(|&grant| p.conns[1].revoke_grant(grant, p.now));
    p.settle();
    let events = p.events(1);
    assert_eq!(events.iter().filter(|e| matches!(e, Event::Freed { .. })).count(), grants.len());
    assert!(p.events(0).is_empty());
}

#[test]
fn k5_a_peer_that_lives_and_does_not_say_its_last_word_is_given_up() {
    type Begin = fn(&mut Pair, &mut Stranger) -> u64;
    let cases: [(&str, Begin); 4] = [
        ("a grant taken back", |p, _| {
            let grant = p.grant().id;
            p.conns[1].revoke_grant(grant, p.now);
            grant
        }),
        ("an abort without its end", |p, stranger| {
            let (grant, reason) = (p.grant().id, SenderReason::Cancelled);
            let slot = Some(Slot { index: 0, generation: 1 });
            stranger
                .say(p, &[Record::Abort { transfer: 0, attempt: 0, grant, reason, slot }])
                .expect("sound");
            grant
        }),
        ("a grant to read taken back", |p, _| {
            let grant = p.conns[1].issue_read_grant(4096);
            p.conns[1].revoke_grant(grant, p.now);
            grant
        }),
        ("half a request to write", |p, stranger| {
            let grant = p.conns[1].issue_read_grant(4096);
            let ask = Record::ReadAsk { grant, target: 0, total: 2, offset: 0, bytes: b"x" };
            stranger.say(p, &[ask]).expect("sound");
            p.conns[1].revoke_grant(grant, p.now);
            grant
        }),
    ];
    for (what, begin) in cases {
        let mut p = alone();
        let mut stranger = Stranger::default();
        let grant = begin(&mut p, &mut stranger);
        let (t0, patience) = (p.now, word::patience(&p.cfg));
        let events = stranger.play_alive(&mut p, patience * 2);
        assert!(events.contains(&Event::Lost(Cause::PeerLost)), "{what}: {events:?}");
        assert!(p.now - t0 <= patience + Duration::from_millis(20), "{what}: after {:?}", p.now - t0);
        let freed = Event::Freed { grant };
        assert!(!events.contains(&freed), "{what}: before the queue pairs are destroyed");
        p.conns[1].fenced();
        // A grant that nobody has used outlives the protocol's connection, and is the driver's to free.
        let open = p.conns[1].receiver.ledger.grants.contains_key(&grant);
        assert!(p.events(1).contains(&freed) || open, "{what}");
    }
}

/// The whole time for each, and no more: one that is answered is not waited for.
#[test]
fn k5_last_words_that_come_leave_nothing_to_wait_for() {
    let mut p = alone();
    for _ in 0..3 {
        let grants = [p.grant().id, p.conns[1].issue_read_grant(4096)];
        grants.iter().for_each(|&grant| p.conns[1].revoke_grant(grant, p.now));
        p.settle();
        let time = word::patience(&p.cfg) / 2 * 3;
        let until = p.now + time;
        while p.now < until {
            p.advance(Duration::from_millis(10));
            p.settle();
        }
        for ep in 0..2 {
            assert!(!p.events(ep).iter().any(|e| matches!(e, Event::Lost(_))));
        }
    }
}

#[test]
fn k5_a_peer_that_closes_and_has_said_more_than_comes_is_not_waited_for() {
    let half = Record::ReadAsk { grant: 0, target: 0, total: 2, offset: 0, bytes: b"x" };
    for (what, before, messages, reads, ends) in [
        ("messages", None, 7, 0, true),
        ("words on reads", None, 0, 7, true),
        ("half a request", Some(half), 0, 1, true),
        ("all of it came", None, 0, 0, false),
    ] {
        let mut p = alone();
        p.conns[1].issue_read_grant(4096);
        let mut stranger = Stranger::default();
        // B has something to do still: it does not answer with a CLOSE of its own.
        let (now, deadline) = (p.now, p.now + Duration::from_secs(3600));
        let grant = GrantRef { id: 0, owner_epoch: 1, bound_epoch: 2, max_bytes: 4096 };
        let request = WriteRequest { grant, plan: plan(1, 4096), tag: 0, deadline };
        p.conns[1].write_gated(request, now).expect("fresh");
        let close = Record::Close { messages, reads };
        let said: Vec<Record<'_>> = before.into_iter().chain([close]).collect();
        stranger.say(&mut p, &said).expect("sound");
        let patience = word::patience(&p.cfg);
        let events = stranger.play_alive(&mut p, patience * 2);
        assert_eq!(events.contains(&Event::Lost(Cause::CloseTimeout)), ends, "{what}: {events:?}");
        assert!(!ends || p.now - now <= patience + Duration::from_millis(20), "{what}: {:?}", p.now - now);
    }
}

#[test]
fn b1_a_reader_that_says_it_has_read_more_than_it_has_room_for_is_found_out() {
    for (bytes, fits) in [(0, true), (4096, true), (4097, false), (u64::MAX, false)] {
        for reason in [None, Some(SenderReason::Cancelled)] {
            let mut p = alone();
            let grant = p.conns[1].issue_read_grant(4096);
            let said = Stranger::default().say(&mut p, &[Record::ReadDone { grant, bytes, reason }]);
            assert_eq!(said.is_ok(), fits, "{bytes} {reason:?}: {said:?}");
        }
    }
}
