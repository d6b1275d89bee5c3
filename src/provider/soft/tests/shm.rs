//! Over shared memory: the rendezvous, who is let in, what is told of the path, and whose memory it is when.

use std::any::Any;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd;

use socket2::{Domain, SockAddr, Socket, Type};

use super::*;
use crate::error::QpError;
use crate::provider::soft::frame::Preamble;
use crate::provider::soft::shm::address;
use crate::provider::soft::shm::inspect::{lent_to_us, streamed, wakes};
use crate::provider::soft::shm::raw::RawPeer;
use crate::provider::{Armed, QpAddress};

pub(super) fn name(local: u64) -> SockAddr {
    address(local).unwrap()
}

fn dial(local: u64) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.cloexec(), None).unwrap();
    socket.connect(&name(local)).map(|()| socket)
}

/// A connection to a listening queue pair, by somebody who says nothing.
pub(super) fn knock(on: SoftTransport, at: &QpAddress) -> Box<dyn Any> {
    match on {
        SoftTransport::Shm => Box::new(dial(at.soft_local).unwrap()),
        _ => Box::new(TcpStream::connect((Ipv4Addr::LOCALHOST, at.soft_port)).unwrap()),
    }
}

/// The sides' transports, and what both say of the path when they have met.
#[test]
fn k9_the_path_and_the_reason_for_it_are_told_by_both_sides() {
    use SoftTransport::{Auto, Shm, Tcp};
    for (a, b, expected) in [
        (Shm, Shm, "shm"),
        (Auto, Auto, "shm"),
        (Auto, Shm, "shm"),
        (Shm, Auto, "shm"),
        (Auto, Tcp, "tcp"),
        (Tcp, Auto, "tcp"),
        (Tcp, Tcp, "tcp"),
    ] {
        let mut p = Pair::join(Side::new(a, Profile::Default), Side::new(b, Profile::Default), |_| {});
        p.meet();
        for (on, qp, other) in [(a, p.qa(), b), (b, p.qb(), a)] {
            let (transport, why) = qp.path();
            assert_eq!(transport, expected, "{a} and {b}: {why}");
            let reason = match (on, other) {
                (Auto, Tcp) => "TCP only",
                (Auto, _) => "both ends are on this host",
                _ => "asked for",
            };
            assert!(why.contains(reason), "{on}, the peer takes {other}: {why}");
        }
    }
}

#[test]
fn k9_a_required_transport_that_does_not_reach_the_peer_is_a_typed_error() {
    use SoftTransport::{Auto, Shm, Tcp};
    let side = |on| Side::new(on, Profile::Default);
    for (ours, theirs, named) in [(Shm, Tcp, "TCP only"), (Tcp, Shm, "shared memory only")] {
        let (a, b) = (side(ours), side(theirs));
        let (qa, qb) = (a.qp(), b.qp());
        for active in [true, false] {
            let error = qa.connect(&attributes(&qb, active)).unwrap_err();
            assert!(matches!(error, QpError::NoPath { .. }) && error.to_string().contains(named), "{error}");
        }
        assert_eq!(qa.state(), QpState::Init);
    }
    // A name that nobody has in this network namespace, as of a peer on another host.
    let (a, b, auto) = (side(Shm), side(Auto), side(Auto));
    let (qa, qb, q_auto) = (a.qp(), b.qp(), auto.qp());
    let elsewhere = QpAddress { soft_local: 77, ..qb.address() };
    let error = qa.connect(&QpConnect { remote: elsewhere, ..attributes(&qb, true) }).unwrap_err();
    assert!(error.to_string().contains("network namespace"), "{error}");
    // Where TCP is allowed it is taken, and the reason is kept.
    q_auto.connect(&QpConnect { remote: elsewhere, ..attributes(&qb, true) }).unwrap();
    qb.connect(&attributes(&q_auto, false)).unwrap();
    let (transport, why) = q_auto.path();
    assert_eq!(transport, "tcp");
    assert!(why.contains("network namespace"), "{why}");
    let mut p = Pair { qa: Some(q_auto), qb: Some(qb), a: auto, b };
    p.meet();
    assert_eq!(p.qb().path().0, "tcp");
}

#[test]
fn b1_strangers_at_the_local_door_cost_the_peer_nothing() {
    let (a, b) =
        (Side::new(SoftTransport::Shm, Profile::Default), Side::new(SoftTransport::Shm, Profile::Default));
    let (qa, qb) = (a.qp(), b.qp());
    let at = qb.address();
    let right = Preamble { target: at.qp_num, own: qa.qp_num(), key: at.soft_key };
    let wrong = Preamble { key: at.soft_key ^ 1, ..right };
    let mut strangers: Vec<Box<dyn Any>> = Vec::new();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    for _ in 0..10 {
        strangers.push(knock(SoftTransport::Shm, &at));
        let garbage = dial(at.soft_local).unwrap();
        garbage.send(&[7; 200]).unwrap();
        strangers.push(Box::new(garbage));
    }
    qb.connect(&attributes(&qa, false)).unwrap();
    strangers.push(Box::new(RawPeer::dial(dial(at.soft_local).unwrap(), wrong, None)));
    // The right words, with something else than rings.
    strangers.push(Box::new(RawPeer::dial(dial(at.soft_local).unwrap(), right, Some(file.as_fd()))));
    drop(dial(at.soft_local).unwrap());
    qa.connect(&attributes(&qb, true)).unwrap();
    let mut p = Pair { qa: Some(qa), qb: Some(qb), a, b };
    recv(p.qb(), 60, None);
    post(p.qa(), 1, SendOp::Send { imm: Some(3) }, &[]);
    let (a, b) = p.wait(1, 1);
    assert_eq!((ids(&a), ids(&b)), (vec![(1, WcStatus::Success)], vec![(60, WcStatus::Success)]));
    assert!(dial(at.soft_local).is_err(), "the listener is closed");
}

/// R1: a large message is copied in several turns; its sender ends in the middle.
#[test]
fn r1_a_sender_that_ends_in_the_middle_of_a_message_has_not_sent_it() {
    const LEN: u64 = 8 << 20;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let (from, to) = (p.a.region(LEN, ALL), p.b.region(LEN, ALL));
    p.meet();
    fill(&from, 0, &vec![1; LEN as usize]);
    recv(p.qb(), 1, None);
    post(p.qa(), 1, write_to(&to, 0, Some(1)), &[sge(&from, 0, LEN)]);
    p.until("some of it", |p| contents(&to, 0, 1) == [1] || !p.b.seen.is_empty());
    assert!(p.b.seen.is_empty(), "not in one turn");
    p.qa().set_error().unwrap();
    // It is the owner's again.
    fill(&from, 0, &vec![2; LEN as usize]);
    let (a, b) = p.wait(1, 1);
    assert_eq!((ids(&a), ids(&b)), (vec![(1, WcStatus::Flushed)], vec![(1, WcStatus::Flushed)]));
}

/// What a region's deregistration means elsewhere: when it has returned, nothing succeeds any more with what it had.
#[test]
fn r1_a_region_that_goes_while_a_peer_may_be_copying_it_ends_the_connection() {
    const LEN: u64 = 4 << 20;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let (to, from) = (p.a.region(LEN, ALL), p.b.region(LEN, ALL));
    p.meet();
    fill(&from, 0, &vec![1; LEN as usize]);
    post(p.qa(), 1, read_from(&from, 0), &[sge(&to, 0, LEN)]);
    p.until("some of it", |p| contents(&to, 0, 1) == [1] || !p.a.seen.is_empty());
    assert!(p.a.seen.is_empty(), "not in one turn");
    drop(from);
    let (a, _) = p.wait(1, 0);
    assert_ne!(a[0].status, WcStatus::Success);
}

/// And one that nobody copies any more goes quietly: the connection stays, and the peer lets go of it.
#[test]
fn r7_regions_come_and_go_and_the_peer_keeps_none_of_them() {
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let to = p.b.region(16_384, ALL);
    p.meet();
    for round in 0..300u64 {
        let from = p.a.region(16_384, ALL);
        fill(&from, 0, &pattern(16_384, round));
        post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 16_384)]);
        p.wait(1, 0);
        let back = p.a.region(16_384, ALL);
        post(p.qb(), 1, read_from(&from, 0), &[sge(&to, 0, 16_384)]);
        post(p.qa(), 2, read_from(&to, 0), &[sge(&back, 0, 16_384)]);
        p.wait(1, 1);
        assert_eq!(contents(&back, 0, 16_384), pattern(16_384, round));
        drop((from, back));
        p.quiet();
        let kept = lent_to_us(p.qb());
        assert!(kept <= 2, "{kept} in round {round}");
    }
}

/// Memory that the program brought, in both directions: read where it is, since this process may read itself.
#[test]
fn r2_memory_of_the_program_is_read_from_its_process() {
    const LEN: usize = 100_000;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let brought = |side: &Side, salt| {
        let mut bytes = pattern(LEN, salt).into_boxed_slice();
        let at = bytes.as_mut_ptr();
        // SAFETY: the box is the owner, and nobody uses it otherwise.
        let memory = unsafe { Memory::from_raw(at, LEN as u64, Box::new(bytes)) };
        Region::<Exposed>::register(&side.pd, memory.map().unwrap(), ALL).unwrap()
    };
    let (ra, rb) = (brought(&p.a, 1), brought(&p.b, 2));
    p.meet();
    post(p.qa(), 1, write_to(&rb, 0, None), &[sge(&ra, 0, 50_000)]);
    p.wait(1, 0);
    assert_eq!(contents(&rb, 0, 50_000), pattern(LEN, 1)[..50_000]);
    post(p.qa(), 2, read_from(&rb, 50_000), &[sge(&ra, 50_000, 50_000)]);
    p.wait(1, 0);
    assert_eq!(contents(&ra, 50_000, 50_000), pattern(LEN, 2)[50_000..]);
    assert_eq!(p.qa().path(), ("shm", "it was asked for".to_owned()));
}

/// Polling sides tell each other nothing: not for bytes, not for room.
#[test]
fn r8_sides_that_poll_send_no_wake_ups() {
    const LEN: u64 = 1 << 20;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let (ra, rb) = (p.a.region(LEN, ALL), p.b.region(LEN, ALL));
    p.meet();
    let before = (wakes(p.qa()), wakes(p.qb()));
    for i in 0..50 {
        // Some fill the ring.
        for at in 0..64 {
            post(p.qa(), at, write_to(&rb, at * 16_000, None), &[sge(&ra, at * 16_000, 1 + at * 16)]);
        }
        recv(p.qb(), 0, None);
        post(p.qa(), i, write_to(&rb, 0, Some(1)), &[sge(&ra, 0, 64)]);
        p.wait(65, 1);
        recv(p.qa(), 0, None);
        post(p.qb(), i, SendOp::Send { imm: None }, &[]);
        p.wait(1, 1);
    }
    assert_eq!((wakes(p.qa()), wakes(p.qb())), before);
}

/// Who has posted much and sleeps is not woken for each part of it that has been copied.
#[test]
fn r8_a_sleeping_sender_is_woken_seldom_while_there_is_more_to_copy() {
    const LEN: u64 = 64 << 10;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let (ra, rb) = (p.a.region(LEN, ALL), p.b.region(LEN, ALL));
    p.meet();
    p.quiet();
    let before = wakes(p.qb());
    // 3 MiB, of which a slice copies a part.
    for id in 0..48 {
        post(p.qa(), id, write_to(&rb, 0, None), &[sge(&ra, 0, LEN)]);
    }
    let (mut completed, mut slices) = (0, 0);
    while completed < 48 {
        // It sleeps again each time that it has been woken.
        while p.a.cq.arm().unwrap() == Armed::More {
            p.a.poll();
        }
        p.b.poll();
        slices += 1;
        completed += p.a.take().len();
        assert!(slices < 1000, "{completed} of 48 have completed");
    }
    assert!(slices > 2, "all was copied in {slices} slices: nothing has been tested");
    assert!(wakes(p.qb()) - before <= 2, "{} wake-ups in {slices} slices", wakes(p.qb()) - before);
}

/// What decides is how much comes without a pause, in however many messages; for an answer, how much was asked for.
#[test]
fn k8_much_in_many_messages_is_copied_past_the_caches_and_little_is_not() {
    const LEN: u64 = 256 << 10;
    let mut p = Pair::new(SoftTransport::Shm, Profile::Default);
    let (ra, rb) = (p.a.region(LEN, ALL), p.b.region(LEN, ALL));
    p.meet();
    p.quiet();
    for (op, what) in [(write_to(&rb, 0, None), "written"), (read_from(&rb, 0), "read")] {
        streamed();
        for id in 0..40 {
            post(p.qa(), id, op, &[sge(&ra, 0, LEN)]);
            p.wait(1, 0);
        }
        assert_eq!(streamed(), 0, "{what} one at a time");
        for id in 0..40 {
            post(p.qa(), id, op, &[sge(&ra, 0, LEN)]);
        }
        p.wait(40, 0);
        let bytes = streamed();
        assert!((20 * LEN..=40 * LEN).contains(&bytes), "{what} together: {bytes} bytes");
    }
}
