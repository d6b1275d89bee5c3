//! Each fault, as the two queue pairs see it. Times are checked from below only: nothing comes before it may.

use super::*;
use crate::provider::soft::faults::{Posted, QpFaults};

over_both_transports! {
    k5_a_delayed_request_leaves_later_and_arrives_whole,
    r3_a_sleeper_is_woken_when_a_delay_ends,
    k3_random_delays_keep_the_order_of_a_queue_pair_where_there_is_one,
    r6_a_dropped_connection_ends_every_request_once,
    r6_a_connection_is_dropped_at_the_byte_that_was_asked_for,
    r2_a_refused_post_names_its_place_and_the_others_are_done,
    r6_a_request_that_fails_is_the_cause_of_the_flushes,
    k7_a_stalled_reader_holds_the_sender_and_then_takes_everything,
    r7_a_reader_stalled_for_ever_is_destroyed_like_any_other,
    r3_a_stalled_reader_that_cannot_send_any_more_fails,
    k7_a_slow_rail_takes_its_time_and_the_other_does_not_wait,
    r6_a_cut_link_ends_every_connection_and_lets_none_be_made,
    r2_what_cannot_be_created_is_one_of_many,
    a_queue_pair_without_faults_carries_none,
}

const LEN: u64 = 60_000;

/// `n` writes of [`LEN`] bytes with an immediate each, from `a` to `b`. The target, and the source to keep.
fn write_all(p: &mut Pair, n: u64) -> (Region<Exposed>, Region<Exposed>) {
    let (from, to) = (p.a.region(n * LEN, ALL), p.b.region(n * LEN, ALL));
    for i in 0..n {
        fill(&from, i * LEN, &pattern(LEN as usize, i));
        recv(p.qb(), i, None);
    }
    let mut chain = WrChain::default();
    for i in 0..n {
        chain.push(i, write_to(&to, i * LEN, Some(i as u32)), &[sge(&from, i * LEN, LEN)], true, false);
    }
    p.qa().post_send(&chain).unwrap();
    (to, from)
}

fn whole(to: &Region<Exposed>, i: u64) -> bool {
    contents(to, i * LEN, LEN as usize) == pattern(LEN as usize, i)
}

fn k5_a_delayed_request_leaves_later_and_arrives_whole(on: SoftTransport) {
    for profile in Profile::ALL.into_iter().filter(|p| p.capabilities().immediate) {
        let mut p = Pair::of(on, &format!("profile={profile},delay=50ms"), &format!("profile={profile}"));
        let start = Instant::now();
        let (to, _from) = write_all(&mut p, 4);
        let (a, b) = p.wait(4, 4);
        assert!(start.elapsed() >= Duration::from_millis(50), "{profile}: after {:?}", start.elapsed());
        assert!(a.iter().chain(&b).all(|c| c.status == WcStatus::Success), "{profile}: {a:?} {b:?}");
        assert!((0..4).all(|i| whole(&to, i)), "{profile}");
    }
}

fn r3_a_sleeper_is_woken_when_a_delay_ends(on: SoftTransport) {
    let mut p = Pair::of(on, "delay=20ms", "");
    // Connected, so that nothing but the delay is waited for.
    recv(p.qb(), 9, None);
    post(p.qa(), 9, SendOp::Send { imm: None }, &[]);
    p.wait(1, 1);
    recv(p.qb(), 1, None);
    post(p.qa(), 1, SendOp::Send { imm: None }, &[]);
    p.until("the descriptor of the delaying side", |p| {
        p.a.cq.arm().unwrap();
        let mut poll = libc::pollfd {
            fd: std::os::fd::AsRawFd::as_raw_fd(&p.a.channel.fd()),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid `pollfd` for the call.
        unsafe { libc::poll(&mut poll, 1, 10_000) };
        p.a.channel.drain_events().unwrap();
        p.a.poll();
        p.b.poll();
        p.b.seen.len() == 1
    });
}

fn k3_random_delays_keep_the_order_of_a_queue_pair_where_there_is_one(on: SoftTransport) {
    const N: u64 = 40;
    for (profile, ordered) in [("default", true), ("srd", false)] {
        let mut p = Pair::of(on, &format!("profile={profile},reorder=5ms"), &format!("profile={profile}"));
        let (to, _from) = write_all(&mut p, N);
        let (_, b) = p.wait(N as usize, N as usize);
        let order: Vec<u64> = b.iter().map(|c| u64::from(c.imm.unwrap())).collect();
        assert_eq!(order.is_sorted(), ordered, "{profile}: {order:?}");
        assert!((0..N).all(|i| whole(&to, i)), "{profile}");
    }
}

/// R2, R6: the request that was being sent has the cause, and every other one is flushed; no message that was cut arrives.
fn r6_a_dropped_connection_ends_every_request_once(on: SoftTransport) {
    for profile in Profile::ALL.into_iter().filter(|p| p.capabilities().immediate) {
        // In the middle of a frame.
        let mut p =
            Pair::of(on, &format!("profile={profile},drop_after=90000"), &format!("profile={profile}"));
        let (to, _from) = write_all(&mut p, 4);
        let (a, b) = p.wait(4, 4);
        let failed: Vec<_> = a.iter().filter(|c| c.status == WcStatus::RetryExceeded).collect();
        assert_eq!(failed.len(), 1, "{profile}: {a:?}");
        assert!(a.iter().all(|c| c.status != WcStatus::Success || whole(&to, c.wr_id)), "{profile}: {a:?}");
        for c in b {
            match c.status {
                WcStatus::Success => assert!(whole(&to, c.imm.unwrap().into()), "{profile}: {c:?}"),
                status => assert_eq!(status, WcStatus::Flushed, "{profile}"),
            }
        }
        p.quiet();
    }
}

/// The cut is at the byte that was asked for: what lies behind it in the target was never written.
fn r6_a_connection_is_dropped_at_the_byte_that_was_asked_for(on: SoftTransport) {
    let mut p = Pair::of(on, "drop_after=40000", "");
    let (to, _from) = write_all(&mut p, 1);
    p.wait(1, 1);
    let got = contents(&to, 0, LEN as usize);
    let written = got.iter().zip(pattern(LEN as usize, 0)).take_while(|(a, b)| **a == *b).count();
    // What was only referred to when the connection ended is not taken any more.
    let least = if on == SoftTransport::Shm { 0 } else { 30_000 };
    assert!((least..40_000).contains(&written), "{written} bytes, with headers 40000");
    assert!(got[written + 8..].iter().all(|&b| b == 0));
}

fn r2_a_refused_post_names_its_place_and_the_others_are_done(on: SoftTransport) {
    let mut p = Pair::of(on, "fail_post=3", "");
    for i in 0..5 {
        recv(p.qb(), i, None);
    }
    let mut chain = WrChain::default();
    for i in 0..5 {
        chain.push(i, SendOp::Send { imm: Some(i as u32) }, &[], true, false);
    }
    let refused = p.qa().post_send(&chain).unwrap_err();
    assert_eq!((refused.index, refused.source.raw_os_error()), (2, Some(libc::EIO)));
    let (a, _) = p.wait(2, 2);
    assert_eq!(ids(&a), [(0, WcStatus::Success), (1, WcStatus::Success)]);
    // Once: the next post is accepted.
    post(p.qa(), 7, SendOp::Send { imm: None }, &[]);
    p.wait(1, 1);
}

fn r6_a_request_that_fails_is_the_cause_of_the_flushes(on: SoftTransport) {
    let mut p = Pair::of(on, "fail_wr=3", "");
    let _regions = write_all(&mut p, 5);
    let (a, _) = p.wait(5, 5);
    assert!(a.is_sorted_by_key(|c| c.wr_id), "{a:?}");
    for c in a {
        match c.wr_id {
            2 => assert_eq!(c.status, WcStatus::LocalQpOperation),
            0 | 1 => assert_eq!(c.status, WcStatus::Success, "what was posted before ends first"),
            _ => assert_eq!(c.status, WcStatus::Flushed),
        }
    }
    assert_eq!(p.qa().state(), QpState::Err);
}

fn k7_a_stalled_reader_holds_the_sender_and_then_takes_everything(on: SoftTransport) {
    const N: u64 = 100;
    let mut p = Pair::of(on, "", "stall=50ms,stall_after=100000");
    let start = Instant::now();
    let (to, _from) = write_all(&mut p, N);
    let (_, b) = p.wait(N as usize, N as usize);
    assert!(start.elapsed() >= Duration::from_millis(50), "after {:?}", start.elapsed());
    assert!(b.iter().all(|c| c.status == WcStatus::Success), "{b:?}");
    assert!((0..N).all(|i| whole(&to, i)));
}

fn r7_a_reader_stalled_for_ever_is_destroyed_like_any_other(on: SoftTransport) {
    let mut p = Pair::of(on, "", "stall=3000000000s");
    let _regions = write_all(&mut p, 4);
    p.quiet();
    drop(p.qb.take());
    // Its receives were flushed when it went.
    let (a, b) = p.wait(4, 4);
    assert!(a.iter().chain(&b).all(|c| c.status != WcStatus::Success), "{a:?} {b:?}");
}

/// A stalled reader does not see the peer's end in what it reads; what it sends says so.
fn r3_a_stalled_reader_that_cannot_send_any_more_fails(on: SoftTransport) {
    let mut p = Pair::of(on, "", "stall=3000000000s");
    // Connected.
    let _regions = write_all(&mut p, 1);
    p.quiet();
    drop(p.qa.take());
    p.until("the end", |p| {
        if p.qb().state() != QpState::Err {
            let mut chain = WrChain::default();
            chain.push(1, SendOp::Send { imm: None }, &[], false, false);
            let _ = p.qb().post_send(&chain);
        }
        p.b.seen.iter().any(|c| c.status == WcStatus::RetryExceeded)
    });
}

fn k7_a_slow_rail_takes_its_time_and_the_other_does_not_wait(on: SoftTransport) {
    let mut p = Pair::of(on, "rail0.rate=1000000", "");
    let start = Instant::now();
    let (to, _from) = write_all(&mut p, 2);
    // A second queue pair of the same two sides.
    let (qa, qb) = (p.a.qp(), p.b.qp());
    bring_up(&qb, &attributes(&qa, false));
    bring_up(&qa, &attributes(&qb, true));
    recv(&qb, 77, None);
    post(&qa, 77, SendOp::Send { imm: None }, &[]);
    p.until("the other queue pair", |p| p.b.seen.iter().any(|c| c.wr_id == 77));
    assert!(p.b.seen.iter().all(|c| c.wr_id == 77), "the slow one came first: {:?}", p.b.seen);
    let (a, b) = p.wait(3, 3);
    // 120 kB at 1 MB/s, less the last piece of 10 kB.
    assert!(start.elapsed() >= Duration::from_millis(100), "after {:?}", start.elapsed());
    assert!(a.iter().chain(&b).all(|c| c.status == WcStatus::Success));
    assert!((0..2).all(|i| whole(&to, i)));
}

#[test]
fn faults_of_one_seed_are_the_same_ones() {
    let draws = |seed| {
        let plan = crate::device::Faults::new().reorder(Duration::from_secs(1000));
        let mut faults = QpFaults::new(plan, seed);
        let mut held: Vec<(Instant, usize)> = (0..50)
            .map(|i| match faults.post() {
                Posted::Accepted(Some(until)) => (until, i),
                _ => panic!("every post is held"),
            })
            .collect();
        held.sort_unstable();
        held.into_iter().map(|(_, i)| i).collect::<Vec<_>>()
    };
    assert_eq!(draws(7), draws(7));
    assert_ne!(draws(7), draws(8));
}

fn a_queue_pair_without_faults_carries_none(on: SoftTransport) {
    let side = Side::of(on, &"rail1.delay=1ms".parse().unwrap());
    let Device::Soft(device) = &side.device else { unreachable!("a soft device") };
    assert!(device.faults_of(2).is_none() && device.faults_of(3).is_some());
    let Device::Soft(plain) = &Side::new(on, Profile::Default).device else { unreachable!("a soft device") };
    assert!(plain.faults_of(2).is_none());
}

fn r6_a_cut_link_ends_every_connection_and_lets_none_be_made(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    p.meet();
    recv(p.qa(), 1, None);
    recv(p.qb(), 2, None);
    let cable = |side: &Side| match &side.device {
        Device::Soft(device) => device.cable().clone(),
        #[cfg(feature = "verbs")]
        Device::Verbs(_) => unreachable!("these tests open soft devices"),
    };
    let link = cable(&p.a);
    link.cut();
    assert!(link.is_cut() && !cable(&p.b).is_cut());
    let (a, b) = p.wait(1, 1);
    assert_eq!((ids(&a), ids(&b)), (vec![(1, WcStatus::Flushed)], vec![(2, WcStatus::Flushed)]));
    // Neither as the side that dials nor as the other.
    let (qa, qb) = (p.a.qp(), p.b.qp());
    for active in [true, false] {
        let refused = match &qa {
            Qp::Soft(qa) => qa.for_cm().connect(&attributes(&qb, active)).unwrap_err(),
            #[cfg(feature = "verbs")]
            Qp::Verbs(_) => unreachable!("these tests open soft devices"),
        };
        assert!(matches!(refused, crate::error::QpError::Os { .. }), "{refused:?}");
    }
    link.mend();
    bring_up(&qb, &attributes(&qa, false));
    bring_up(&qa, &attributes(&qb, true));
    (p.qa, p.qb) = (Some(qa), Some(qb));
    p.meet();
}

fn r2_what_cannot_be_created_is_one_of_many(on: SoftTransport) {
    let config: SoftConfig = "fail_cq=2,fail_qp=3,fail_mr=2".parse().unwrap();
    let side = Side::of(on, &config);
    let refused = side.channel.create_cq(16).unwrap_err();
    assert!(matches!(refused, crate::error::DeviceError::Os { .. }), "{refused:?}");
    assert!(side.channel.create_cq(16).is_ok());
    let init = QpInit { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let made = (0..4).map(|_| side.pd.create_qp(&side.cq, &side.cq, init).is_ok());
    assert_eq!(made.collect::<Vec<_>>(), [true, true, false, true]);
    let memory = || Memory::anonymous(4096).prefault(Prefault::No).map_for(&side.pd).unwrap();
    let registered = (0..3).map(|_| Region::<Exposed>::register(&side.pd, memory(), ALL).is_ok());
    assert_eq!(registered.collect::<Vec<_>>(), [true, false, true]);
}
