//! What is not allowed fails with the right status, once, and the rest is flushed (R6).

use super::*;
use crate::error::QpError;

over_both_transports! {
    r6_bounds_keys_domains_and_access_are_checked_and_no_byte_is_written,
    r6_a_read_without_access_is_refused,
    r6_a_large_write_out_of_bounds_is_refused_before_its_first_byte,
    r6_a_message_longer_than_its_receive_fails_on_both_sides,
    r6_a_local_key_that_does_not_cover_its_element_fails_locally,
    k7_no_receive_in_time_is_an_rnr_error_and_one_in_time_is_not,
    r6_a_peer_that_goes_away_gives_retry_exceeded_to_the_oldest,
    r6_what_was_executed_before_the_peer_left_is_a_success,
    r6_a_dial_that_nobody_answers_is_retry_exceeded,
    r5_destroying_a_queue_pair_leaves_its_completions_and_its_number_comes_back,
    r7_destroy_and_error_with_work_in_flight_in_every_order,
    r4_full_queues_refuse_with_the_index,
}

/// Posts three WRITEs of which the second is wrong, with a receive on each side.
fn refused(p: &mut Pair, good: SendOp, bad: SendOp, at: Sge) {
    recv(p.qa(), 50, None);
    recv(p.qb(), 60, None);
    let mut chain = WrChain::default();
    for (id, op) in [(1, good), (2, bad), (3, good), (4, good)] {
        chain.push(id, op, &[at], true, false);
    }
    p.qa().post_send(&chain).unwrap();
    let (a, b) = p.wait(5, 1);
    assert_eq!(a[0].status, WcStatus::Success);
    assert_eq!(a[1].status, WcStatus::RemoteAccess);
    let mut flushed = ids(&a[2..]);
    flushed.sort_by_key(|f| f.0);
    assert_eq!(flushed, [(3, WcStatus::Flushed), (4, WcStatus::Flushed), (50, WcStatus::Flushed)]);
    assert_eq!(ids(&b), [(60, WcStatus::Flushed)]);
    assert_eq!((p.qa().state(), p.qb().state()), (QpState::Err, QpState::Err));
    p.quiet();
}

fn r6_bounds_keys_domains_and_access_are_checked_and_no_byte_is_written(on: SoftTransport) {
    let no_write = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_READ);
    for case in ["past the end", "before the start", "wraps", "key", "domain", "read-only", "local", "gone"] {
        let mut p = Pair::new(on, Profile::Default);
        let (from, to) = (p.a.region(4096, ALL), p.b.region(8192, ALL));
        let good = write_to(&to, 0, None);
        let remote = to.remote();
        let (addr, rkey) = (remote.addr, remote.rkey);
        let other_pd = p.b.device.alloc_pd().unwrap();
        let foreign =
            Region::<Exposed>::register(&other_pd, Memory::anonymous(4096).map().unwrap(), ALL).unwrap();
        let read_only = p.b.region(4096, no_write);
        let local = p.b.region(4096, AccessFlags::LOCAL_WRITE);
        let gone = p.b.region(4096, ALL);
        let bad = match case {
            "past the end" => SendOp::Write { remote_addr: addr + 8192 - 99, rkey, imm: None },
            "before the start" => SendOp::Write { remote_addr: addr - 1, rkey, imm: None },
            "wraps" => SendOp::Write { remote_addr: u64::MAX - 50, rkey, imm: None },
            "key" => SendOp::Write { remote_addr: addr, rkey: rkey ^ 0x10, imm: None },
            "domain" => write_to(&foreign, 0, None),
            "read-only" => write_to(&read_only, 0, None),
            "local" => write_to(&local, 0, None),
            _ => write_to(&gone, 0, None),
        };
        drop(gone);
        fill(&from, 0, &[7; 100]);
        refused(&mut p, good, bad, sge(&from, 0, 100));
        assert!(contents(&to, 100, 8092).iter().all(|&b| b == 0), "{case}");
        assert!(contents(&read_only, 0, 4096).iter().all(|&b| b == 0), "{case}");
        assert!(contents(&foreign, 0, 4096).iter().all(|&b| b == 0), "{case}");
    }
}

fn r6_a_read_without_access_is_refused(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let from = p.a.region(4096, ALL);
    let to = p.b.region(4096, AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE));
    post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    post(p.qa(), 2, read_from(&to, 0), &[sge(&from, 0, 64)]);
    let (a, _) = p.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)]);
}

fn r6_a_large_write_out_of_bounds_is_refused_before_its_first_byte(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(8 << 20, ALL), p.b.region(8 << 20, ALL));
    fill(&from, 0, &vec![7; 8 << 20]);
    // Its first 8 MiB - 1 byte would fit; the sender has much under way when it is refused.
    post(p.qa(), 1, write_to(&to, 1, None), &[sge(&from, 0, 8 << 20)]);
    post(p.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, 8 << 20)]);
    let (a, _) = p.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::RemoteAccess), (2, WcStatus::Flushed)]);
    assert!(contents(&to, 0, 8 << 20).iter().all(|&b| b == 0));
}

fn r6_a_message_longer_than_its_receive_fails_on_both_sides(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    recv(p.qb(), 60, Some(sge(&to, 0, 99)));
    recv(p.qb(), 61, Some(sge(&to, 0, 99)));
    post(p.qa(), 1, SendOp::Send { imm: None }, &[sge(&from, 0, 100)]);
    let (a, b) = p.wait(1, 2);
    assert_eq!(ids(&a), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(ids(&b), [(60, WcStatus::LocalLength), (61, WcStatus::Flushed)]);
}

fn r6_a_local_key_that_does_not_cover_its_element_fails_locally(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    let mut at = sge(&from, 0, 4096);
    at.addr += 1;
    post(p.qa(), 1, write_to(&to, 0, None), &[at]);
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(1, WcStatus::LocalProtection)]);
    // As in verbs, posts are still taken, and are flushed.
    post(p.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, 1)]);
    recv(p.qa(), 3, None);
    let (a, _) = p.wait(2, 0);
    assert_eq!(ids(&a), [(2, WcStatus::Flushed), (3, WcStatus::Flushed)]);
}

fn k7_no_receive_in_time_is_an_rnr_error_and_one_in_time_is_not(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    fill(&from, 0, &[5; 64]);
    post(p.qa(), 1, SendOp::Send { imm: Some(9) }, &[sge(&from, 0, 64)]);
    for _ in 0..100 {
        p.a.poll();
        p.b.poll();
    }
    recv(p.qb(), 60, Some(sge(&to, 0, 64)));
    let (a, b) = p.wait(1, 1);
    assert_eq!((ids(&a), ids(&b)), (vec![(1, WcStatus::Success)], vec![(60, WcStatus::Success)]));

    let mut p = Pair::with(on, Profile::Default, |c| (c.rnr_retry, c.min_rnr_timer) = (2, 12));
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    post(p.qa(), 2, SendOp::Send { imm: None }, &[sge(&from, 0, 64)]);
    post(p.qa(), 3, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    let (a, _) = p.wait(3, 0);
    assert_eq!(ids(&a), [(1, WcStatus::Success), (2, WcStatus::RnrRetryExceeded), (3, WcStatus::Flushed)]);
}

fn r6_a_peer_that_goes_away_gives_retry_exceeded_to_the_oldest(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(32 << 20, ALL), p.b.region(32 << 20, ALL));
    recv(p.qa(), 50, None);
    for i in 0..4 {
        post(p.qa(), i, write_to(&to, 0, None), &[sge(&from, 0, 32 << 20)]);
    }
    p.b.poll();
    p.qb = None;
    let (a, _) = p.wait(5, 0);
    assert_eq!(a[0].status, WcStatus::RetryExceeded);
    assert!(a[1..].iter().all(|c| c.status == WcStatus::Flushed));
    assert_eq!(p.qa().state(), QpState::Err);
}

fn r6_what_was_executed_before_the_peer_left_is_a_success(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    recv(p.qb(), 60, None);
    p.meet();
    post(p.qa(), 1, write_to(&to, 0, Some(4)), &[sge(&from, 0, 4096)]);
    // Only b polls; it leaves without another turn for its acknowledgement.
    let deadline = Instant::now() + DEADLINE;
    while p.b.seen.is_empty() {
        p.b.poll();
        assert!(Instant::now() < deadline);
    }
    p.qb = None;
    let (a, _) = p.wait(1, 1);
    assert_eq!(ids(&a), [(1, WcStatus::Success)]);
}

fn r6_a_dial_that_nobody_answers_is_retry_exceeded(on: SoftTransport) {
    let a = Side::new(on, Profile::Default);
    let gone = a.qp();
    let (qa, attributes) = (a.qp(), attributes(&gone, true));
    drop(gone);
    let mut a = a;
    let from = a.region(4096, ALL);
    if on == SoftTransport::Shm {
        // Nobody listens under that name: there is no other way, and that is known at once.
        let error = qa.connect(&attributes).unwrap_err();
        assert!(matches!(error, QpError::NoPath { transport: "shm", .. }), "{error}");
        return;
    }
    qa.connect(&attributes).unwrap();
    post(&qa, 1, SendOp::Send { imm: None }, &[sge(&from, 0, 1)]);
    let deadline = Instant::now() + DEADLINE;
    while a.seen.is_empty() {
        a.poll();
        assert!(Instant::now() < deadline);
    }
    // Refused at the dial already: then the post is flushed.
    assert!(matches!(a.seen[0].status, WcStatus::RetryExceeded | WcStatus::Flushed));
    assert_eq!(qa.state(), QpState::Err);
    assert!(matches!(qa.connect(&attributes), Err(QpError::State { state: "ERR", .. })));
}

fn r5_destroying_a_queue_pair_leaves_its_completions_and_its_number_comes_back(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(1 << 20, ALL), p.b.region(1 << 20, ALL));
    let old = p.qa().qp_num();
    for i in 0..8 {
        // Receives that nothing consumes: in flight for certain.
        recv(p.qa(), 100 + i, None);
    }
    p.qa = None;
    let (qa, qb) = (p.a.qp(), p.b.qp());
    assert_eq!(qa.qp_num(), old);
    qb.connect(&attributes(&qa, false)).unwrap();
    qa.connect(&attributes(&qb, true)).unwrap();
    post(&qa, 1, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    let (a, _) = p.wait(9, 0);
    assert_eq!(ids(&a[..8]), (100..108).map(|i| (i, WcStatus::Flushed)).collect::<Vec<_>>());
    assert_eq!(ids(&a[8..]), [(1, WcStatus::Success)]);
}

fn r7_destroy_and_error_with_work_in_flight_in_every_order(on: SoftTransport) {
    for order in 0..6 {
        let mut p = Pair::new(on, Profile::Default);
        let (from, to) = (p.a.region(4 << 20, ALL), p.b.region(4 << 20, ALL));
        for i in 0..32 {
            post(p.qa(), i, write_to(&to, 0, None), &[sge(&from, 0, 4 << 20)]);
            post(p.qb(), i, read_from(&from, 0), &[sge(&to, 0, 4 << 20)]);
        }
        p.a.poll();
        p.b.poll();
        match order {
            0 => p.qa = None,
            1 => p.qb = None,
            2 => p.qa().set_error().unwrap(),
            3 => drop(to),
            4 => drop(from),
            _ => (p.qa, p.qb) = (None, None),
        }
        // Every request of both sides ends, whatever happened.
        let (a, b) = p.wait(32, 32);
        assert!(a.iter().chain(&b).any(|c| c.status != WcStatus::Success), "order {order}");
    }
}

fn r4_full_queues_refuse_with_the_index(on: SoftTransport) {
    let p = Pair::new(on, Profile::Tiny);
    let from = p.a.region(4096, ALL);
    let mut chain = WrChain::default();
    for i in 0..17 {
        chain.push(i, SendOp::Send { imm: None }, &[sge(&from, 0, 1)], true, false);
    }
    let e = p.qa().post_send(&chain).unwrap_err();
    assert_eq!((e.index, e.source.raw_os_error()), (16, Some(libc::ENOMEM)));
    let wrs: Vec<RecvWr> = (0..17).map(|wr_id| RecvWr { wr_id, sge: None }).collect();
    assert_eq!(p.qa().post_recv(&wrs).unwrap_err().index, 16);
}
