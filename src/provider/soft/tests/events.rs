//! The descriptor: an armed queue never misses a completion (R3), and nothing happens without a reason (R8).

use std::os::fd::AsRawFd;

use super::*;
use crate::provider::Armed;

over_both_transports! {
    r3_two_drivers_that_only_wait_for_events_pass_a_message_back_and_forth,
    r3_a_poll_by_another_thread_that_stops_at_its_budget_wakes_who_sleeps,
    r3_a_completion_after_the_last_poll_and_before_the_arm_is_seen,
    r8_an_idle_channel_stays_silent_after_traffic_and_with_strangers,
    k7_a_driver_asleep_is_woken_by_the_rnr_timer_and_by_a_late_receive,
    r4_an_overrun_is_an_error_and_never_a_silent_loss,
    r3_the_descriptor_wakes_tokio,
}

fn readable(side: &Side, wait_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: side.channel.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one initialised element, which lives for the call.
    unsafe { libc::poll(&mut poll, 1, wait_ms) == 1 }
}

/// What a driver does: poll until empty, arm, poll again, wait for the descriptor.
fn next(side: &mut Side) {
    loop {
        if side.poll() > 0 {
            return;
        }
        if side.cq.arm().unwrap() == Armed::More {
            continue;
        }
        if side.poll() > 0 {
            return;
        }
        assert!(readable(side, DEADLINE.as_millis() as i32), "no event");
        side.channel.drain_events().unwrap();
    }
}

/// Turns of a driver until it would wait.
fn settle(side: &mut Side) {
    loop {
        side.channel.drain_events().unwrap();
        while side.poll() > 0 {}
        if side.cq.arm().unwrap() == Armed::Armed && side.poll() == 0 && !readable(side, 0) {
            return;
        }
    }
}

fn r3_two_drivers_that_only_wait_for_events_pass_a_message_back_and_forth(on: SoftTransport) {
    let p = Pair::new(on, Profile::Default);
    let region_a = p.a.region(1 << 20, ALL);
    let region_b = p.b.region(1 << 20, ALL);
    let Pair { qa, qb, mut a, mut b } = p;
    let (qa, qb) = (qa.unwrap(), qb.unwrap());
    const ROUNDS: usize = 300;
    recv(&qb, 0, None);
    std::thread::scope(|s| {
        let (ra, rb) = (&region_a, &region_b);
        s.spawn(move || {
            for i in 0..ROUNDS {
                // Small ones, and ones that do not fit into the doorbell.
                let len = if i % 10 == 0 { 1 << 20 } else { 100 };
                recv(&qa, 0, None);
                post(&qa, 1, write_to(rb, 0, Some(i as u32)), &[sge(ra, 0, len)]);
                while a.seen.len() < 2 {
                    next(&mut a);
                }
                assert!(a.take().iter().all(|c| c.status == WcStatus::Success));
            }
        });
        s.spawn(move || {
            for i in 0..ROUNDS {
                while !b.seen.iter().any(|c| c.imm == Some(i as u32)) {
                    next(&mut b);
                }
                b.seen.clear();
                recv(&qb, 0, None);
                post(&qb, 2, SendOp::Send { imm: Some(0) }, &[]);
            }
            // Its last acknowledgement.
            while b.seen.is_empty() {
                next(&mut b);
            }
        });
    });
}

/// A spinning thread polls once and goes away, in the middle of more than one slice: who sleeps must go on.
fn r3_a_poll_by_another_thread_that_stops_at_its_budget_wakes_who_sleeps(on: SoftTransport) {
    const QPS: usize = 14;
    const EACH: u64 = 96 << 10;
    let (mut a, mut b) = (Side::new(on, Profile::Default), Side::new(on, Profile::Default));
    let (from, to) = (a.region(EACH, ALL), b.region(EACH, ALL));
    let pairs: Vec<(Qp, Qp)> = (0..QPS)
        .map(|_| {
            let (qa, qb) = (a.qp(), b.qp());
            qb.connect(&attributes(&qa, false)).unwrap();
            qa.connect(&attributes(&qb, true)).unwrap();
            (qa, qb)
        })
        .collect();
    for (qa, _) in &pairs {
        post(qa, 0, write_to(&to, 0, None), &[sge(&from, 0, 8)]);
    }
    let deadline = Instant::now() + DEADLINE;
    while a.seen.len() < QPS {
        a.poll();
        b.poll();
        assert!(Instant::now() < deadline, "not connected");
    }
    a.seen.clear();
    let (last, others) = pairs.split_last().unwrap();
    recv(&last.1, 60, None);
    settle(&mut a);
    settle(&mut b);
    // More than a slice moves, then a small message on the last one.
    others.iter().for_each(|(qa, _)| post(qa, 1, write_to(&to, 0, None), &[sge(&from, 0, EACH)]));
    post(&last.0, 2, write_to(&to, 0, Some(5)), &[sge(&from, 0, 8)]);
    for _ in 0..20 {
        a.poll();
    }
    // The other thread.
    b.poll();
    while b.seen.is_empty() {
        assert!(readable(&b, DEADLINE.as_millis() as i32), "no event");
        settle(&mut b);
        a.poll();
    }
    assert_eq!(ids(&b.take()), [(60, WcStatus::Success)]);
}

fn r3_a_completion_after_the_last_poll_and_before_the_arm_is_seen(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    recv(p.qb(), 1, None);
    settle(&mut p.a);
    settle(&mut p.b);
    // Arrives at b, which has polled and not armed.
    post(p.qa(), 1, write_to(&to, 0, Some(1)), &[sge(&from, 0, 4096)]);
    next(&mut p.b);
    assert_eq!(p.b.take().len(), 1);
    // A completion that another thread's post causes on an armed queue.
    settle(&mut p.b);
    p.qb().set_error().unwrap();
    recv(p.qb(), 5, None);
    assert!(readable(&p.b, 0), "an armed queue got a completion");
    p.b.channel.drain_events().unwrap();
    p.b.poll();
    assert_eq!(ids(&p.b.take()), [(5, WcStatus::Flushed)]);
}

fn r8_an_idle_channel_stays_silent_after_traffic_and_with_strangers(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(8 << 20, ALL), p.b.region(8 << 20, ALL));
    let waiting = p.b.qp();
    post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 8 << 20)]);
    p.wait(1, 0);
    let _stranger = super::shm::knock(on, &waiting.address());
    settle(&mut p.a);
    settle(&mut p.b);
    assert!(!readable(&p.a, 50) && !readable(&p.b, 50));
}

fn k7_a_driver_asleep_is_woken_by_the_rnr_timer_and_by_a_late_receive(on: SoftTransport) {
    for late in [true, false] {
        let mut p = Pair::with(on, Profile::Default, |c| {
            (c.rnr_retry, c.min_rnr_timer) = (0, if late { 31 } else { 20 });
        });
        settle(&mut p.a);
        settle(&mut p.b);
        post(p.qa(), 1, SendOp::Send { imm: Some(1) }, &[]);
        settle(&mut p.b);
        if late {
            recv(p.qb(), 2, None);
            next(&mut p.b);
            assert_eq!(ids(&p.b.take()), [(2, WcStatus::Success)]);
        } else {
            // Nobody polls b until its own timer says so.
            while p.qb().state() != QpState::Err {
                assert!(readable(&p.b, DEADLINE.as_millis() as i32), "no event");
                settle(&mut p.b);
            }
            next(&mut p.a);
            assert_eq!(ids(&p.a.take()), [(1, WcStatus::RnrRetryExceeded)]);
        }
    }
}

fn r4_an_overrun_is_an_error_and_never_a_silent_loss(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let small = p.a.channel.create_cq(2).unwrap();
    let init = QpInit { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let qp = p.a.pd.create_qp(&p.a.cq, &small, init).unwrap();
    // Nobody credits this queue: three receives, two entries.
    (0..3).for_each(|i| recv(&qp, i, None));
    qp.set_error().unwrap();
    let mut out = [Cqe::default(); 4];
    assert_eq!(small.poll(&mut out).unwrap(), 2);
    assert!(small.poll(&mut out).is_err() && small.poll(&mut out).is_err());
    p.quiet();
    assert!(p.a.channel.create_cq(0).is_err() && p.a.channel.create_cq(u32::MAX).is_err());
}

/// The same as `next`, on tokio: the descriptor is an epoll instance inside of the runtime's own.
async fn next_async(side: &mut Side) {
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    let fd = side.channel.fd().try_clone_to_owned().unwrap();
    // SAFETY: the `AsyncFd` owns its descriptor, which is open until it is dropped.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(drop).unwrap();
    while side.poll() == 0 {
        if side.cq.arm().unwrap() == Armed::More {
            continue;
        }
        if side.poll() > 0 {
            return;
        }
        let mut ready = tokio::time::timeout(DEADLINE, fd.readable()).await.expect("no event").unwrap();
        ready.clear_ready();
        side.channel.drain_events().unwrap();
    }
}

fn r3_the_descriptor_wakes_tokio(on: SoftTransport) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(pass_messages(Pair::new(on, Profile::Default)));
}

async fn pass_messages(p: Pair) {
    let (from, to) = (p.a.region(4 << 20, ALL), p.b.region(4 << 20, ALL));
    let Pair { qa, qb, mut a, mut b } = p;
    let (qa, qb) = (qa.unwrap(), qb.unwrap());
    const ROUNDS: u32 = 50;
    for i in 0..ROUNDS {
        recv(&qb, 0, None);
        // Every fifth is larger than what a socket holds.
        let len = if i % 5 == 0 { 4 << 20 } else { 8 };
        post(&qa, 1, write_to(&to, 0, Some(i)), &[sge(&from, 0, len)]);
        // b is driven until a is done: its acknowledgement leaves in the turn after the completion.
        let drive_b = async {
            loop {
                next_async(&mut b).await;
            }
        };
        tokio::select! {
            () = next_async(&mut a) => {}
            () = drive_b => {}
        }
        assert_eq!((a.take()[0].status, b.take()[0].imm), (WcStatus::Success, Some(i)));
    }
}

#[test]
fn k5_a_dial_that_is_accepted_and_never_answered_ends_by_its_deadline() {
    let mut side = Side::new(SoftTransport::Tcp, Profile::Default);
    let (qp, _peer) = super::hostile::raw_peer(&side);
    let region = side.region(4096, ALL);
    post(&qp, 1, SendOp::Send { imm: None }, &[sge(&region, 0, 100)]);
    // Nobody polls before the timer says so.
    next(&mut side);
    assert_eq!(ids(&side.take()), [(1, WcStatus::RetryExceeded)]);
}
