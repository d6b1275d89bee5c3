//! Over shared memory: the rendezvous, who is let in, what is told of the path, and a peer that breaks every rule.

use std::any::Any;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use socket2::{Domain, SockAddr, Socket, Type};

use super::*;
use crate::error::QpError;
use crate::provider::QpAddress;
use crate::provider::soft::frame::{Desc, Header, Opcode, Preamble};
use crate::provider::soft::rng::Rng;
use crate::provider::soft::shm::raw::{RawPeer, after_next_copy, lent_to_us, wakes};

fn name(local: u64) -> SockAddr {
    SockAddr::unix(Path::new(OsStr::from_bytes(format!("\0landfall-{local:016x}").as_bytes()))).unwrap()
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

/// A queue pair whose peer is this test: it has answered the dial.
fn raw_peer(side: &Side) -> (Qp, RawPeer) {
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET.cloexec(), None).unwrap();
    let local = crate::random::random_u64().unwrap() | 1;
    listener.bind(&name(local)).unwrap();
    listener.listen(1).unwrap();
    let qp = side.qp();
    let gid = qp.address().gid;
    let remote = QpAddress { qp_num: 77, soft_local: local, soft_key: 5, gid, ..QpAddress::default() };
    let attr = QpConnect { remote, rnr_retry: 0, min_rnr_timer: 12, ..attributes(&qp, true) };
    match &qp {
        Qp::Soft(qp) => qp.for_cm().connect(&attr).unwrap(),
        #[cfg(feature = "verbs")]
        Qp::Verbs(_) => unreachable!("these tests open soft devices"),
    }
    let peer = RawPeer::accept(listener.accept().unwrap().0);
    peer.put(&Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key }.encode());
    (qp, peer)
}

fn frame(descs: &[Desc], payload: &[u8]) -> Vec<u8> {
    let total = descs.iter().map(|d| d.len).sum();
    let header = Header { descs: descs.len() as u16, ack: 0, payload: total };
    let mut out = header.encode().to_vec();
    descs.iter().for_each(|d| out.extend_from_slice(&d.encode()));
    out.extend_from_slice(payload);
    out
}

/// A WRITE of `len` bytes to the start of `to`, whose payload is where `references` say: memfd, offset, length.
fn referring(to: &Region<Exposed>, msn: u32, imm: Option<u32>, references: &[(u64, u64, u32)]) -> Vec<u8> {
    let len = references.iter().map(|r| r.2).fold(0, u32::wrapping_add);
    let remote = to.remote();
    let mut desc = Desc { total: len, len, ..Desc::new(Opcode::Write, msn) };
    (desc.addr, desc.rkey) = (remote.addr, remote.rkey);
    desc.set_imm(imm);
    desc.set_references(references.len());
    let mut payload = Vec::new();
    for &(memfd, offset, len) in references {
        payload.extend(memfd.to_le_bytes());
        payload.extend(offset.to_le_bytes());
        payload.extend(len.to_le_bytes());
        payload.extend([0; 4]);
    }
    frame(&[desc], &payload)
}

fn until(side: &mut Side, what: &str, mut done: impl FnMut(&mut Side) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done(side) {
        side.poll();
        assert!(Instant::now() < deadline, "not in time: {what}; {:?}", side.seen);
    }
}

fn shm_side() -> Side {
    Side::new(SoftTransport::Shm, Profile::Default)
}

#[test]
fn r2_a_reference_to_lent_memory_is_copied_from_where_it_is() {
    let mut side = shm_side();
    let (qp, peer) = raw_peer(&side);
    let to = side.region(8192, ALL);
    let data = pattern(5000, 4);
    let memory = peer.lend(9, 65_536);
    memory.write(100, &data);
    recv(&qp, 1, None);
    peer.put(&referring(&to, 0, Some(3), &[(9, 100, 2000), (9, 2100, 3000)]));
    until(&mut side, "the message", |s| !s.seen.is_empty());
    assert_eq!((ids(&side.take()), contents(&to, 0, 5000)), (vec![(1, WcStatus::Success)], data));
}

#[test]
fn b1_references_to_what_was_not_lent_end_the_connection() {
    type Case = (&'static str, &'static [(u64, u64, u32)]);
    const PAGE: u32 = 4096;
    let cases: &[Case] = &[
        ("a name that was never said", &[(8, 0, PAGE)]),
        ("beyond the end", &[(9, 65_536 - 100, PAGE)]),
        ("around the end of the numbers", &[(9, u64::MAX - 10, PAGE)]),
        ("one of two beyond the end", &[(9, 0, PAGE), (9, 65_536, 1)]),
        ("an empty one", &[(9, 0, PAGE), (9, 0, 0)]),
        ("an address that is not mapped", &[(0, 8, PAGE)]),
    ];
    for (what, references) in cases {
        let mut side = shm_side();
        let (qp, peer) = raw_peer(&side);
        let to = side.region(8192, ALL);
        let _memory = peer.lend(9, 65_536);
        post(&qp, 5, SendOp::Send { imm: None }, &[]);
        peer.put(&referring(&to, 0, None, references));
        until(&mut side, what, |_| qp.state() == QpState::Err);
        assert_eq!(ids(&side.take()), [(5, WcStatus::BadResponse)], "{what}");
    }
}

#[test]
fn b1_descriptors_that_are_no_sealed_memory_end_the_connection() {
    let unsealed = RawPeer::memfd(65_536, false);
    let null = std::fs::File::open("/dev/null").unwrap();
    for (what, fd, bytes) in [
        ("no memfd", null.as_fd(), 65_536),
        ("a memfd that could shrink", unsealed.as_fd(), 65_536),
        ("shorter than it was said to be", RawPeer::memfd(4096, true).as_fd(), 65_536),
    ] {
        let mut side = shm_side();
        let (qp, peer) = raw_peer(&side);
        post(&qp, 5, SendOp::Send { imm: None }, &[]);
        peer.lend_fd(9, bytes, fd);
        until(&mut side, what, |_| qp.state() == QpState::Err);
        assert_eq!(ids(&side.take()), [(5, WcStatus::BadResponse)], "{what}");
    }
}

/// Nonsense in every place that a peer can write: bytes, counts, words over the socket.
#[test]
fn b1_nonsense_in_shared_memory_is_a_bad_response_and_never_a_panic() {
    type Break = fn(&RawPeer);
    let cases: &[(&str, Break)] = &[
        ("garbage", |p| p.put(&[0x5a; 100])),
        ("more bytes than the ring has", |p| p.set_head(u64::MAX / 2)),
        ("done with more than was put", |p| p.set_tail(u64::MAX / 2)),
        ("an unknown word", |p| p.say(&[9, 9, 9])),
        ("a word that is too long", |p| p.say(&[1; 300])),
        ("a wake-up with a descriptor", |p| p.say_with(&[1], RawPeer::memfd(4096, true).as_fd())),
        ("a name twice", |p| {
            p.lend(9, 4096);
            p.lend(9, 4096);
        }),
        ("the name of no memory", |p| drop(p.lend(0, 4096))),
        ("a verdict that does not exist", |p| p.say(&[4; 26])),
        ("payload that no descriptor has", |p| {
            p.put(&Header { descs: 0, ack: 0, payload: 3 }.encode());
        }),
        ("acknowledges what was not sent", |p| p.put(&Header { descs: 0, ack: 9, payload: 0 }.encode())),
    ];
    for (what, spoil) in cases {
        let mut side = shm_side();
        let (qp, peer) = raw_peer(&side);
        post(&qp, 5, SendOp::Send { imm: None }, &[]);
        side.poll();
        spoil(&peer);
        // What is wrong with the room is found when it is needed.
        let mut n = 0;
        until(&mut side, what, |side| {
            n += 1;
            if n < 1000 && qp.state() == QpState::Rts {
                let mut chain = WrChain::default();
                chain.push(6, SendOp::Send { imm: None }, &[], false, false);
                let _ = qp.post_send(&chain);
            }
            qp.state() == QpState::Err && !side.seen.is_empty()
        });
        let seen = side.take();
        assert_eq!((seen[0].wr_id, seen[0].status), (5, WcStatus::BadResponse), "{what}");
    }
    // And somebody else answers the dial: nothing was told, and nothing lent to it.
    let mut side = shm_side();
    let (qp, peer) = raw_peer(&side);
    peer.put(&[1; 100]);
    until(&mut side, "an impostor", |_| qp.state() == QpState::Err);
}

#[test]
fn b1_random_frames_and_counts_never_panic_and_never_write_outside_of_a_region() {
    let mut rng = Rng::new(23);
    for round in 0..120 {
        let profile = if round % 2 == 0 { Profile::Default } else { Profile::Srd };
        let mut side = Side::new(SoftTransport::Shm, profile);
        let (qp, peer) = raw_peer(&side);
        let memory = peer.lend(1, 16_384);
        memory.write(0, &[0xee; 16_384]);
        let whole = side.region(3 * 8192, ALL);
        let region = side.region(8192, ALL);
        for i in 0..4 {
            recv(&qp, i, Some(sge(&region, 1024 * i, 1024)));
            post(&qp, i, read_from(&region, 0), &[sge(&region, 4096, 2048)]);
        }
        let remote = region.remote();
        for msn in 0..6u32 {
            let mut body = Vec::new();
            let descs: Vec<Desc> = (0..rng.below(4) as u32)
                .map(|i| {
                    use Opcode::*;
                    let opcode = [Send, Write, ReadResponse, ReadRequest, Ack, Nak][rng.below(6) as usize];
                    let carries = matches!(opcode, Send | Write | ReadResponse);
                    let total = if carries { rng.below(3000) as u32 } else { rng.below(300) as u32 };
                    let len = if carries { total } else { 0 };
                    let mut desc = Desc { total, len, ..Desc::new(opcode, msn * rng.below(2) as u32 + i) };
                    desc.rkey = remote.rkey;
                    desc.addr = remote.addr + rng.below(9000) - rng.below(400);
                    if carries && len > 0 && rng.below(2) == 0 {
                        let n = 1 + rng.below(3) as usize;
                        desc.set_references(n);
                        let mut left = len;
                        for k in 0..n {
                            let piece = if k + 1 == n { left } else { rng.below(u64::from(left) + 1) as u32 };
                            left -= piece;
                            body.extend(rng.below(3).to_le_bytes());
                            body.extend(rng.below(17_000).to_le_bytes());
                            body.extend(piece.to_le_bytes());
                            body.extend([0; 4]);
                        }
                    } else {
                        body.extend(vec![0xee; len as usize]);
                    }
                    desc
                })
                .collect();
            let mut bytes = frame(&descs, &body);
            if rng.below(4) == 0 {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << rng.below(8);
            }
            peer.put(&bytes);
            if rng.below(12) == 0 {
                peer.set_tail(rng.below(u64::MAX));
            }
            side.poll();
        }
        drop(peer);
        until(&mut side, "the end", |_| qp.state() == QpState::Err);
        assert!(contents(&whole, 0, 3 * 8192).iter().all(|&b| b == 0), "round {round}");
    }
}

/// R1: between the end of a copy and the look at the peer, the peer ends and its memory gets another content. What was copied is
/// not executed, whichever of the two contents it is.
#[test]
fn r1_what_was_copied_from_a_peer_that_ended_meanwhile_is_not_executed() {
    let mut side = shm_side();
    let (qp, peer) = raw_peer(&side);
    let to = side.region(8192, ALL);
    let memory = peer.lend(9, 65_536);
    memory.write(0, &[1; 4096]);
    recv(&qp, 1, None);
    peer.put(&referring(&to, 0, Some(3), &[(9, 0, 4096)]));
    let ended = after_next_copy(move || {
        peer.close();
        memory.write(0, &[2; 4096]);
        peer
    });
    until(&mut side, "the end", |_| qp.state() == QpState::Err);
    drop(ended.take().expect("there was a copy"));
    assert_eq!(ids(&side.take()), [(1, WcStatus::Flushed)]);
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

/// The peer says that it cannot read this process: what it cannot get is refused at the post, with the reason, or travels.
#[test]
fn k9_memory_that_the_peer_cannot_read_is_refused_by_name_or_travels_where_that_is_allowed() {
    for on in [SoftTransport::Shm, SoftTransport::Auto] {
        let mut side = Side::new(on, Profile::Default);
        let (qp, peer) = raw_peer(&side);
        // Verdict 2: not permitted.
        peer.say(&[&[4, 2][..], &[0; 24]].concat());
        let bytes = vec![3; 8192].into_boxed_slice();
        let at = bytes.as_ptr().cast_mut();
        // SAFETY: the box is the owner, and nobody uses it otherwise.
        let memory = unsafe { Memory::from_raw(at, 8192, Box::new(bytes)) };
        let brought = Region::<Exposed>::register(&side.pd, memory.map().unwrap(), ALL).unwrap();
        until(&mut side, "the verdict", |_| qp.path().1.contains("ptrace_scope"));
        let mut chain = WrChain::default();
        let op = SendOp::Write { remote_addr: 4096, rkey: 1, imm: None };
        chain.push(1, op, &[sge(&brought, 0, 8192)], true, false);
        if on == SoftTransport::Shm {
            let refused = qp.post_send(&chain).unwrap_err();
            let text = refused.source.to_string();
            assert!(text.contains("ptrace_scope") && text.contains("transport=auto"), "{text}");
            // A little of it needs nobody's permission.
            post(&qp, 2, op, &[sge(&brought, 0, 64)]);
        } else {
            qp.post_send(&chain).unwrap();
        }
        let mut got = Vec::new();
        until(&mut side, "the bytes", |_| {
            got.extend(peer.take());
            got.windows(64).any(|w| w == [3; 64])
        });
    }
}

#[test]
fn k5_a_local_dial_that_is_never_answered_ends_by_its_deadline() {
    let mut side = shm_side();
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET.cloexec(), None).unwrap();
    let local = crate::random::random_u64().unwrap() | 1;
    listener.bind(&name(local)).unwrap();
    listener.listen(1).unwrap();
    let qp = side.qp();
    let remote = QpAddress { qp_num: 77, soft_local: local, ..QpAddress::default() };
    qp.connect(&QpConnect { remote, ..attributes(&qp, true) }).unwrap();
    post(&qp, 1, SendOp::Send { imm: None }, &[]);
    until(&mut side, "its deadline", |s| !s.seen.is_empty());
    assert_eq!(ids(&side.take()), [(1, WcStatus::RetryExceeded)]);
}

/// A process that is killed says nothing in the shared memory: a poller that never sleeps hears of it all the same.
#[test]
fn k5_a_peer_that_is_gone_without_a_word_is_noticed() {
    let mut side = shm_side();
    let (qp, peer) = raw_peer(&side);
    let to = side.region(8192, ALL);
    let memory = peer.lend(9, 65_536);
    memory.write(0, &[6; 4096]);
    recv(&qp, 1, None);
    recv(&qp, 2, None);
    // What it has said before stands: its memory stays as it was.
    peer.put(&referring(&to, 0, Some(3), &[(9, 0, 4096)]));
    drop((peer, memory));
    until(&mut side, "the end", |_| qp.state() == QpState::Err);
    assert_eq!(ids(&side.take()), [(1, WcStatus::Success), (2, WcStatus::Flushed)]);
    assert_eq!(contents(&to, 0, 4096), [6; 4096]);
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
