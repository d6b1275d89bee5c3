//! Reads, by READs and by WRITEs of the owner: K1, K4 to K6, K8, R1, and what a hostile peer may not say.

use super::*;

/// A grant of B for A to read.
fn lend(p: &mut Pair) -> GrantRef {
    let id = p.conns[1].issue_read_grant(1 << 30);
    GrantRef { id, owner_epoch: 2, bound_epoch: 1, max_bytes: 1 << 30 }
}

fn by_reads(bytes: u64, depth: u32, qps: usize) -> ReadBy {
    ReadBy::Rdma { plan: plan(1, bytes), depth, qps }
}

fn by_write(bytes: u64) -> ReadBy {
    ReadBy::Write { request: vec![7; 3000], bytes }
}

fn read(p: &mut Pair, grant: GrantRef, by: ReadBy) -> Result<ReadId, Refused> {
    let deadline = p.now + Duration::from_secs(1);
    p.conns[0].read(ReadRequest { grant, by, deadline }, p.now)
}

/// B answers what it was asked, with a plan of `bytes`; answers its other events.
fn serve(p: &mut Pair, answer: impl Fn() -> Result<u64, ReadRefusal>) -> Vec<Event> {
    let (now, mut others) = (p.now, Vec::new());
    while let Some(event) = p.conns[1].poll_event() {
        match event {
            Event::ReadAsked { grant, request, .. } => {
                assert_eq!(request, vec![7; 3000]);
                let deadline = now + Duration::from_secs(1);
                p.conns[1].serve(grant, answer().map(|bytes| (plan(1, bytes), deadline)), now);
            }
            other => others.push(other),
        }
    }
    others
}

fn read_done(events: &[Event]) -> Vec<Result<(), ReadEnd>> {
    let done = events.iter().filter_map(|e| match e {
        Event::ReadDone { result, .. } => Some(*result),
        _ => None,
    });
    done.collect()
}

#[test]
fn k1_a_read_is_done_when_every_read_has_completed_and_the_owner_hears_of_it() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let grant = lend(&mut p);
        let id = read(&mut p, grant, by_reads(40_960, 3, 64)).expect("taken");
        let posted = p.transmit(0);
        let reads: Vec<_> = posted.iter().filter(|w| matches!(w, Posted::Read(..))).cloned().collect();
        let qps = p.cfg.rails[0].qps;
        assert_eq!(reads.len(), (3 * qps).min(10), "k8: at most 3 in flight on each queue pair");
        for read in &reads {
            assert!(p.events(0).is_empty(), "k1: done before all have completed");
            p.complete(0, read);
        }
        p.settle();
        let events = p.events(0);
        let most = (3 * qps).min(10) as u32;
        assert_eq!(
            events,
            [Event::ReadDone { id, result: Ok(()), wrs: 10, most }, Event::ReadReleased { id }]
        );
        assert_eq!(p.events(1), [Event::Served { grant: grant.id, bytes: 40_960, by_write: false }]);
        let [a, b] = &p.conns;
        a.assert_at_rest(b);
    }
}

#[test]
fn k1_a_read_by_write_is_done_when_the_write_has_arrived() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let grant = lend(&mut p);
        let id = read(&mut p, grant, by_write(40_960)).expect("taken");
        p.settle();
        assert!(p.events(0).is_empty(), "done before it was served");
        assert!(serve(&mut p, || Ok(40_960)).is_empty());
        p.settle();
        let done = Event::ReadDone { id, result: Ok(()), wrs: 0, most: 0 };
        assert_eq!(p.events(0), [done, Event::ReadReleased { id }]);
        let served = Event::Served { grant: grant.id, bytes: 40_960, by_write: true };
        assert_eq!(p.events(1), [served], "neither the grant nor the transfer behind it is told");
        let [a, b] = &p.conns;
        a.assert_at_rest(b);
    }
}

/// Whichever is large, and however little room there is in the send queue: each has its turn.
#[test]
fn k7_bulk_reads_and_small_writes_do_not_wait_for_each_other() {
    const BULK: u64 = 128 << 20;
    let rail = RailConfig { qps: 1, max_write: 2 << 20, max_reads: 16, ..rail() };
    let cases = [1, 2].into_iter().flat_map(|rails| [2, 60].map(|room| (rails, room)));
    for ((rails, room), bulk_reads) in cases.flat_map(|case| [(case, true), (case, false)]) {
        let what = format!("{rails} rails, room for {room}, bulk by READs: {bulk_reads}");
        let mut p = Pair::new(Config { rails: vec![rail; rails], ..config() });
        let start = |p: &mut Pair, by_read: bool, bytes| {
            let grant = if by_read { lend(p) } else { p.grant() };
            if by_read {
                let by = ReadBy::Rdma { plan: plan(rails, bytes), depth: 16, qps: 64 };
                read(p, grant, by).expect("fresh");
            } else {
                p.write(grant, bytes).expect("fresh");
            }
        };
        let mut wire = Wire { room: SQ_RESERVE + room, posted: Vec::new() };
        let turn = |p: &mut Pair, wire: &mut Wire| {
            let first = wire.posted.iter().position(|wr| wr.is_read() || wr.is_write()).expect("under way");
            let first = wire.posted.remove(first);
            p.now += Duration::from_micros(150);
            p.pass(0, &first);
            assert_eq!(p.conns[0].poll_transmit(p.now, wire), Transmitted::Idle);
        };
        start(&mut p, bulk_reads, BULK);
        assert_eq!(p.conns[0].poll_transmit(p.now, &mut wire), Transmitted::Idle);
        (0..8).for_each(|_| turn(&mut p, &mut wire));
        start(&mut p, !bulk_reads, 4096);
        assert_eq!(p.conns[0].poll_transmit(p.now, &mut wire), Transmitted::Idle);
        let is_small = |wr: &Posted| if bulk_reads { wr.is_write() } else { wr.is_read() };
        let mut turns = 0;
        while !wire.posted.iter().any(is_small) {
            turns += 1;
            // With room it leaves at once; without, it has the second place that comes free.
            assert!(turns <= 2 && room == 2, "{what}: it waits behind the bulk");
            turn(&mut p, &mut wire);
        }
        // The bulk goes on.
        (0..8).for_each(|_| turn(&mut p, &mut wire));
        let is_bulk = |wr: &Posted| if bulk_reads { wr.is_read() } else { wr.is_write() };
        assert!(wire.posted.iter().any(is_bulk), "{what}");
    }
}

#[test]
fn k6_a_grant_is_for_one_use_only() {
    let mut p = Pair::new(config());
    let grant = lend(&mut p);
    read(&mut p, grant, by_reads(4096, 1, 1)).expect("taken");
    assert_eq!(read(&mut p, grant, by_write(1)), Err(Refused::StaleGrant { grant: grant.id }));
    assert!(matches!(p.write(grant, 4096), Err(Refused::StaleGrant { .. })));
    let old = GrantRef { owner_epoch: 1, id: 77, ..grant };
    assert!(matches!(read(&mut p, old, by_write(1)), Err(Refused::PeerRestarted { .. })));
    let short = GrantRef { max_bytes: 4095, id: 78, ..grant };
    assert!(matches!(read(&mut p, short, by_reads(4096, 1, 1)), Err(Refused::OutOfRange { .. })));
    p.settle();
    assert_ne!(p.conns[1].issue_grant(1), grant.id, "no two grants have one number");
}

#[test]
fn k4_a_cancelled_read_gives_its_blocks_back_when_the_last_read_has_completed() {
    let mut p = Pair::new(config());
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_reads(1 << 20, 4, 2)).expect("taken");
    let posted = p.transmit(0);
    let reads: Vec<_> = posted.iter().filter(|w| matches!(w, Posted::Read(..))).cloned().collect();
    p.conns[0].abort_read(id, p.now);
    let told = p.events(0);
    assert_eq!(read_done(&told), [Err(ReadEnd::Failed(Reason::Cancelled))]);
    assert_eq!(told.len(), 1, "r1: READs are in flight");
    assert_eq!(p.transmit(0).len(), 0, "nothing more is posted");
    for read in &reads {
        p.complete(0, read);
    }
    assert_eq!(p.events(0), [Event::ReadReleased { id }]);
    p.settle();
    let reason = AbortReason::Reader(SenderReason::Cancelled);
    assert_eq!(p.events(1), [Event::Aborted { grant: grant.id, reason }, Event::Freed { grant: grant.id }]);
}

#[test]
fn k4_a_read_by_write_is_cancelled_before_it_is_asked_for_and_after() {
    // Before anything was said of it.
    let mut p = Pair::new(config());
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_write(4096)).expect("taken");
    p.conns[0].abort_read(id, p.now);
    assert!(matches!(p.events(0)[..], [Event::ReadDone { .. }, Event::ReadReleased { .. }]));
    p.settle();
    assert!(matches!(p.events(1)[..], [Event::Aborted { .. }, Event::Freed { .. }]));
    // While the request is at the owner: the answer is that it was taken back.
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_write(4096)).expect("taken");
    p.settle();
    p.conns[0].abort_read(id, p.now);
    p.settle();
    let ends = serve(&mut p, || Ok(4096));
    let (reason, lent) = (AbortReason::ReadRefused(ReadRefusal::Cancelled), grant.id);
    assert_eq!(ends, [Event::Aborted { grant: lent, reason }, Event::Freed { grant: lent }]);
    p.settle();
    let ends = p.events(0);
    assert_eq!(read_done(&ends), [Err(ReadEnd::Failed(Reason::Cancelled))]);
    assert_eq!(ends.len(), 2);
    // While the owner writes.
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_write(1 << 20)).expect("taken");
    p.settle();
    serve(&mut p, || Ok(1 << 20));
    let posted = p.transmit(1);
    p.conns[0].abort_read(id, p.now);
    assert!(!p.events(0).iter().any(|e| matches!(e, Event::ReadReleased { .. })), "r1: WRITEs are in flight");
    for wr in &posted {
        p.pass(1, wr);
    }
    p.settle();
    let ends = p.events(0);
    assert!(ends.contains(&Event::ReadReleased { id }), "{ends:?}");
    assert!(matches!(p.events(1).last(), Some(Event::Freed { .. })));
    let [a, b] = &p.conns;
    a.assert_at_rest(b);
}

#[test]
fn k4_a_revoked_grant_is_free_when_no_read_can_touch_it() {
    let mut p = Pair::new(config());
    // Unused.
    let grant = lend(&mut p);
    p.conns[1].revoke_grant(grant.id, p.now);
    p.settle();
    assert!(matches!(p.events(1)[..], [Event::Aborted { .. }, Event::Freed { .. }]));
    assert!(matches!(read(&mut p, grant, by_reads(4096, 1, 1)), Err(Refused::StaleGrant { .. })));
    // In use by READs.
    let grant = lend(&mut p);
    read(&mut p, grant, by_reads(1 << 20, 1, 1)).expect("taken");
    let in_flight = p.transmit(0);
    p.conns[1].revoke_grant(grant.id, p.now);
    for wr in p.transmit(1) {
        p.pass(1, &wr);
    }
    assert!(matches!(p.events(1)[..], [Event::Aborted { reason: AbortReason::Revoked, .. }]));
    assert_eq!(read_done(&p.events(0)), [Err(ReadEnd::Failed(Reason::Revoked))]);
    in_flight.iter().for_each(|wr| p.pass(0, wr));
    p.settle();
    assert_eq!(p.events(1), [Event::Freed { grant: grant.id }]);
    // While we write for it.
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_write(1 << 20)).expect("taken");
    p.settle();
    serve(&mut p, || Ok(1 << 20));
    let posted = p.transmit(1);
    p.conns[1].revoke_grant(grant.id, p.now);
    posted.iter().for_each(|wr| p.pass(1, wr));
    p.settle();
    let ends = p.events(0);
    assert_eq!(read_done(&ends), [Err(ReadEnd::Failed(Reason::Revoked))]);
    assert!(ends.contains(&Event::ReadReleased { id }));
    assert_eq!(p.events(1).last(), Some(&Event::Freed { grant: grant.id }));
}

#[test]
fn k5_a_read_ends_at_its_deadline_and_reads_that_do_not_complete_end_the_connection() {
    let mut p = Pair::new(config());
    let grant = lend(&mut p);
    read(&mut p, grant, by_reads(1 << 20, 1, 1)).expect("taken");
    let _lost = p.transmit(0);
    let mut lost = false;
    for _ in 0..200 {
        p.advance(Duration::from_millis(10));
        // The READ alone does not end.
        for ep in 0..2 {
            for wr in p.transmit(ep) {
                p.pass(ep, &wr);
            }
        }
        lost |= p.events(0).contains(&Event::Lost(Cause::AbortStuck));
    }
    assert!(lost, "nothing ended it");
}

#[test]
fn r1_after_a_loss_blocks_come_back_when_their_reads_have_been_flushed() {
    let mut p = Pair::new(config());
    let grant = lend(&mut p);
    let id = read(&mut p, grant, by_reads(1 << 20, 1, 1)).expect("taken");
    let posted = p.transmit(0);
    let other = lend(&mut p);
    let asking = read(&mut p, other, by_write(4096)).expect("taken");
    p.conns[0].connection_lost(Cause::Transport, p.now);
    let events = p.events(0);
    assert_eq!(read_done(&events).len(), 2);
    assert!(!events.iter().any(|e| matches!(e, Event::ReadReleased { .. })));
    for wr in &posted {
        p.conns[0].handle_sent(wr.token(), false, p.now);
    }
    assert_eq!(p.events(0), [Event::ReadReleased { id }]);
    p.conns[0].fenced();
    assert_eq!(p.events(0), [Event::ReadReleased { id: asking }]);
    p.conns[1].fenced();
    let ends: Vec<_> = p.events(1).into_iter().filter(|e| matches!(e, Event::Freed { .. })).collect();
    assert_eq!(ends.len(), 2, "the owner has its blocks back");
    // Neither the reads nor what was behind them is known to the next connection.
    let mut p = p.reconnect();
    p.settle();
    assert!(p.events(0).is_empty() && p.events(1).is_empty());
}

#[test]
fn k10_reads_that_failed_with_their_rail_are_read_again_once_it_is_fenced() {
    let one = RailConfig { qps: 1, max_write: 1024, ..rail() };
    let mut p = Pair::new(Config { rails: vec![one; 2], ..config() });
    let grant = lend(&mut p);
    let plan = plan(2, 16_384);
    let id = read(&mut p, grant, ReadBy::Rdma { plan, depth: 4, qps: 1 }).expect("taken");
    let posted = p.transmit(0);
    let of = |posted: &[Posted], qp| -> Vec<Posted> {
        posted.iter().filter(|wr| wr.qp() == qp && wr.is_read()).cloned().collect()
    };
    assert!(!of(&posted, 0).is_empty() && !of(&posted, 1).is_empty(), "both rails read");
    for wr in of(&posted, 1) {
        p.conns[0].handle_sent(wr.token(), false, p.now);
    }
    for wr in of(&posted, 0) {
        p.complete(0, &wr);
    }
    // Each side hears of it, destroys its queue pairs, and says so.
    let mut again = Vec::new();
    for step in 0..6 {
        for ep in 0..2 {
            for event in p.events(ep) {
                match event {
                    Event::RailDown { rail, .. } => p.conns[ep].rail_fenced(rail, p.now),
                    Event::Lost(cause) => panic!("k10: {cause}"),
                    Event::ReadDone { .. } => panic!("k1: done before all was read, in step {step}"),
                    _ => {}
                }
            }
            for wr in p.transmit(ep) {
                assert_eq!(wr.qp(), 0, "the other rail is down");
                match wr.is_read() {
                    true => again.push(wr),
                    false => p.pass(ep, &wr),
                }
            }
        }
        if p.conns[1].rail_state(1) != RailState::Down {
            assert!(again.is_empty(), "read again before both fences");
        }
    }
    assert!(!again.is_empty(), "what was lost is not read again");
    while !again.is_empty() {
        again.drain(..).for_each(|wr| p.complete(0, &wr));
        for wr in p.transmit(0) {
            match wr.is_read() {
                true => again.push(wr),
                false => p.pass(0, &wr),
            }
        }
    }
    let ends = p.events(0);
    assert!(read_done(&ends) == [Ok(())] && ends.contains(&Event::ReadReleased { id }), "{ends:?}");
    p.settle();
    assert_eq!(p.events(1).last(), Some(&Event::Served { grant: grant.id, bytes: 16_384, by_write: false }));
}

#[test]
fn b1_a_peer_that_breaks_the_rules_of_reads_is_found_out() {
    type Break = fn(&mut Builder, u64, u64);
    let cases: &[(&str, Break)] = &[
        ("done under a grant that was never issued", |b, _, _| {
            b.push(&record::Record::ReadDone { grant: 99, bytes: 1, reason: None });
        }),
        ("done under a grant to write", |b, write, _| {
            b.push(&record::Record::ReadDone { grant: write, bytes: 1, reason: None });
        }),
        ("asked under a grant to write", |b, write, _| {
            b.push(&record::Record::ReadAsk { grant: write, target: 1, total: 1, offset: 0, bytes: b"x" });
        }),
        ("asked twice", |b, _, lent| {
            for _ in 0..2 {
                b.push(&record::Record::ReadAsk { grant: lent, target: 1, total: 1, offset: 0, bytes: b"x" });
            }
        }),
        ("asked beyond the limit", |b, _, lent| {
            let (total, offset) = (u32::MAX, 0);
            b.push(&record::Record::ReadAsk { grant: lent, target: 1, total, offset, bytes: b"x" });
        }),
        ("asked, and done by READs", |b, _, lent| {
            b.push(&record::Record::ReadAsk { grant: lent, target: 1, total: 1, offset: 0, bytes: b"x" });
            b.push(&record::Record::ReadDone { grant: lent, bytes: 1, reason: None });
        }),
        ("burned without being revoked", |b, _, lent| {
            b.push(&record::Record::Revoked { grant: lent });
        }),
        ("refused what was not asked for", |b, _, _| {
            b.push(&record::Record::ReadRefused { target: 99, why: ReadRefusal::Busy });
        }),
    ];
    for (what, say) in cases {
        let mut p = Pair::new(config());
        let write = p.conns[1].issue_grant(1 << 20);
        let lent = lend(&mut p).id;
        let mut b = Builder::new(512);
        b.begin(&control::Head {
            class: control::Class::Control,
            epoch: 1,
            resolved_below: 0,
            data_returned: 0,
            control_returned: 0,
            messages: 0,
            number: None,
        });
        say(&mut b, write, lent);
        let got = p.conns[1].handle_recv(0, Received::Bytes(b.bytes()), p.now);
        assert!(matches!(got, Err(ProtocolViolation::Rule(_))), "{what}: {got:?}");
    }
}

#[test]
fn k2_both_sides_close_with_every_read_told() {
    for cfg in all_modes() {
        let mut p = Pair::new(cfg);
        let grants = [lend(&mut p), lend(&mut p)];
        read(&mut p, grants[0], by_reads(40_960, 2, 2)).expect("taken");
        read(&mut p, grants[1], by_write(40_960)).expect("taken");
        let until = p.now + Duration::from_secs(5);
        p.conns[0].close(until, p.now);
        let late = lend(&mut p);
        assert!(matches!(read(&mut p, late, by_write(1)), Err(Refused::Closed)));
        p.settle();
        let mut told = serve(&mut p, || Ok(40_960));
        p.settle();
        told.extend(p.events(1));
        assert_eq!(told.iter().filter(|e| matches!(e, Event::Served { .. })).count(), 2, "{told:?}");
        assert!(told.contains(&Event::Closed) && p.events(0).contains(&Event::Closed));
    }
}
