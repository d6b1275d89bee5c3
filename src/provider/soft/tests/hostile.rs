//! Bytes that no peer of ours sends.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use super::*;
use crate::provider::QpAddress;
use crate::provider::soft::frame::{Desc, HEADER, Header, Opcode, Preamble};
use crate::provider::soft::rng::Rng;

#[test]
fn b1_strangers_at_a_listener_cost_the_peer_nothing() {
    let (a, b) =
        (Side::new(SoftTransport::Tcp, Profile::Default), Side::new(SoftTransport::Tcp, Profile::Default));
    let (qa, qb) = (a.qp(), b.qp());
    let port = qb.address().soft_port;
    let knock = |bytes: &[u8]| {
        let mut s = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        s.write_all(bytes).unwrap();
        s
    };
    // Silent ones, garbage, the right words with the wrong key, half a preamble: before and after the peer's turn.
    let wrong = Preamble { target: qb.qp_num(), own: qa.qp_num(), key: qb.address().soft_key ^ 1 };
    let mut strangers = Vec::new();
    for i in 0..10u8 {
        strangers.push(knock(&[]));
        strangers.push(knock(&[i; 200]));
    }
    qb.connect(&attributes(&qa, false)).unwrap();
    strangers.push(knock(&wrong.encode()));
    strangers.push(knock(&wrong.encode()[..31]));
    drop(knock(&[1; 31]));
    qa.connect(&attributes(&qb, true)).unwrap();
    let mut p = Pair { qa: Some(qa), qb: Some(qb), a, b };
    recv(p.qb(), 60, None);
    post(p.qa(), 1, SendOp::Send { imm: Some(3) }, &[]);
    let (a, b) = p.wait(1, 1);
    assert_eq!((ids(&a), ids(&b)), (vec![(1, WcStatus::Success)], vec![(60, WcStatus::Success)]));
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), "the listener is closed");
}

/// A queue pair whose peer is this test, with a raw socket.
pub(super) fn raw_peer(side: &Side) -> (Qp, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let qp = side.qp();
    let remote = QpAddress {
        qp_num: 77,
        soft_port: listener.local_addr().unwrap().port(),
        soft_key: 5,
        gid: qp.address().gid,
        ..QpAddress::default()
    };
    qp.connect(&QpConnect { remote, ..attributes(&qp, true) }).unwrap();
    let (stream, _) = listener.accept().unwrap();
    (qp, stream)
}

pub(super) fn frame(descs: &[Desc], payload: &[u8], ack: u32) -> Vec<u8> {
    let header = Header { descs: descs.len() as u16, ack, payload: payload.len() as u32 };
    let mut out = header.encode().to_vec();
    descs.iter().for_each(|d| out.extend_from_slice(&d.encode()));
    out.extend_from_slice(payload);
    out
}

pub(super) fn ends_in_error(mut side: Side, qp: &Qp, what: &str) {
    let deadline = Instant::now() + DEADLINE;
    while qp.state() != QpState::Err {
        side.poll();
        assert!(Instant::now() < deadline, "{what}");
    }
}

#[test]
fn b1_nonsense_on_a_connection_ends_it_without_a_panic() {
    let desc = |opcode, msn, total, offset, len| Desc { total, offset, len, ..Desc::new(opcode, msn) };
    let write = desc(Opcode::Write, 0, 0, 0, 0);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0x5a; 100]),
        ("too many descriptors", Header { descs: 65, ack: 0, payload: 0 }.encode().to_vec()),
        ("payload that no descriptor has", frame(&[write], &[1, 2, 3], 0)),
        ("acknowledges what was not sent", frame(&[], &[], 9)),
        ("a number out of order", frame(&[desc(Opcode::Write, 5, 0, 0, 0)], &[], 0)),
        ("an answer to nothing", frame(&[desc(Opcode::ReadResponse, 0, 4, 0, 4)], &[0; 4], 0)),
        ("an unordered acknowledgement", frame(&[desc(Opcode::Ack, 0, 0, 0, 0)], &[], 0)),
        ("a refusal of nothing, then payload", {
            frame(&[desc(Opcode::Nak, 3, 0, 0, 0), write, desc(Opcode::Write, 1, 4, 0, 4)], &[0; 4], 0)
        }),
    ];
    for (what, bytes) in cases {
        let side = Side::new(SoftTransport::Tcp, Profile::Default);
        let (qp, mut peer) = raw_peer(&side);
        let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
        peer.write_all(&hello.encode()).unwrap();
        peer.write_all(&bytes).unwrap();
        ends_in_error(side, &qp, what);
    }
    // And somebody else answers the dial.
    let side = Side::new(SoftTransport::Tcp, Profile::Default);
    let (qp, mut peer) = raw_peer(&side);
    peer.write_all(&Preamble { target: qp.qp_num(), own: 78, key: 1 }.encode()).unwrap();
    ends_in_error(side, &qp, "an impostor");
}

#[test]
fn b1_random_frames_never_panic_and_never_write_outside_of_a_region() {
    let mut rng = Rng::new(11);
    for profile in [Profile::Default, Profile::Srd] {
        for round in 0..60 {
            let mut side = Side::new(SoftTransport::Tcp, profile);
            let (qp, mut peer) = raw_peer(&side);
            peer.set_nonblocking(true).unwrap();
            let region = side.region(8192, ALL.union(AccessFlags::REMOTE_ATOMIC));
            let target = region.remote();
            for i in 0..4 {
                recv(&qp, i, Some(sge(&region, 1024 * i, 1024)));
                if profile.capabilities().atomics && i == 3 {
                    let (remote_addr, rkey) = (target.addr, target.rkey);
                    let op = SendOp::FetchAdd { remote_addr, rkey, add: 1 };
                    post(&qp, i, op, &[sge(&region, 4096, 8)]);
                } else {
                    post(&qp, i, read_from(&region, 0), &[sge(&region, 4096, 512)]);
                }
            }
            let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
            let mut bytes = hello.encode().to_vec();
            for _ in 0..6 {
                let mut payload = 0;
                let descs: Vec<Desc> = (0..rng.below(8) as u32)
                    .map(|i| {
                        use Opcode::*;
                        let all = [
                            Send,
                            Write,
                            ReadRequest,
                            ReadResponse,
                            Ack,
                            Nak,
                            FetchAdd,
                            CompareSwap,
                            AtomicResponse,
                        ];
                        let opcode = all[rng.below(all.len() as u64) as usize];
                        let total = match opcode {
                            FetchAdd => 8,
                            CompareSwap => 16,
                            _ => rng.below(1200) as u32,
                        };
                        let atomic = matches!(opcode, FetchAdd | CompareSwap);
                        let carries = atomic || matches!(opcode, Send | Write | ReadResponse);
                        let offset = if carries && !atomic && rng.below(3) == 0 {
                            rng.below(u64::from(total) + 1) as u32
                        } else {
                            0
                        };
                        let len = if carries { total - offset } else { 0 };
                        payload += len as usize;
                        Desc {
                            flags: rng.below(2) as u8,
                            rkey: target.rkey,
                            addr: target.addr.wrapping_add(rng.below(9000)).wrapping_sub(400)
                                & if atomic && rng.below(2) == 0 { !7 } else { !0 },
                            total: if !atomic && rng.below(4) == 0 { 512 } else { total }.max(offset + len),
                            offset,
                            len,
                            ..Desc::new(opcode, rng.below(3) as u32 + i)
                        }
                    })
                    .collect();
                bytes.extend(frame(&descs, &vec![0xee; payload], rng.below(4) as u32));
                if rng.below(3) == 0 {
                    let at = hello.encode().len() + rng.below((bytes.len() - HEADER) as u64) as usize;
                    if let Some(b) = bytes.get_mut(at) {
                        *b ^= 1 << rng.below(8);
                    }
                }
            }
            let _ = peer.write_all(&bytes);
            for _ in 0..40 {
                side.poll();
                let mut sink = [0; 4096];
                let _ = peer.read(&mut sink);
            }
            drop(peer);
            ends_in_error(side, &qp, &format!("{profile} round {round}"));
        }
    }
}

#[test]
fn r2_a_receive_that_a_refused_message_has_taken_completes_when_the_connection_dies_first() {
    let mut side = Side::new(SoftTransport::Tcp, Profile::Default);
    let (qp, mut peer) = raw_peer(&side);
    let region = side.region(4096, ALL);
    let remote = region.remote();
    recv(&qp, 60, Some(sge(&region, 0, 10)));
    recv(&qp, 61, Some(sge(&region, 0, 10)));
    let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
    // Part of a WRITE, then a SEND that is too long for its receive: the refusal has to wait for the WRITE's rest.
    let mut write = Desc { total: 100, len: 100, ..Desc::new(Opcode::Write, 0) };
    (write.addr, write.rkey) = (remote.addr + 2048, remote.rkey);
    let send = Desc { total: 50, len: 50, ..Desc::new(Opcode::Send, 1) };
    let bytes = frame(&[write, send], &[7; 150], 0);
    peer.write_all(&hello.encode()).unwrap();
    peer.write_all(&bytes[..bytes.len() - 100]).unwrap();
    drop(peer);
    let deadline = Instant::now() + DEADLINE;
    while side.seen.len() < 2 {
        side.poll();
        assert!(Instant::now() < deadline, "{:?}", side.seen);
    }
    assert_eq!(ids(&side.take()), [(60, WcStatus::LocalLength), (61, WcStatus::Flushed)]);
    assert_eq!(contents(&region, 0, 10), [0; 10]);
}

#[test]
fn k5_a_queue_pair_that_is_dialled_answers_at_once() {
    let mut side = Side::new(SoftTransport::Tcp, Profile::Default);
    let qp = side.qp();
    let remote = QpAddress { qp_num: 77, soft_key: 5, gid: qp.address().gid, ..QpAddress::default() };
    qp.connect(&QpConnect { remote, ..attributes(&qp, false) }).unwrap();
    let mut peer = TcpStream::connect((Ipv4Addr::LOCALHOST, qp.address().soft_port)).unwrap();
    let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
    peer.write_all(&hello.encode()).unwrap();
    peer.set_nonblocking(true).unwrap();
    // It has nothing to ask and nothing to acknowledge.
    let (mut got, deadline) = (Vec::new(), Instant::now() + DEADLINE);
    while got.len() < 32 {
        side.poll();
        let mut bytes = [0; 64];
        let n = peer.read(&mut bytes).unwrap_or(0);
        got.extend_from_slice(&bytes[..n]);
        assert!(Instant::now() < deadline, "no answer");
    }
    assert_eq!(got[..32], Preamble { target: 77, own: qp.qp_num(), key: 5 }.encode());
}

/// Operands that come in pieces, in the middle of a frame: executed once, when all of them are here.
#[test]
fn r2_an_atomic_whose_operands_come_byte_by_byte_is_executed_once() {
    let mut side = Side::new(SoftTransport::Tcp, Profile::Default);
    let (qp, mut peer) = raw_peer(&side);
    peer.set_nodelay(true).unwrap();
    let region = side.region(4096, ALL.union(AccessFlags::REMOTE_ATOMIC));
    let remote = region.remote();
    let at = |opcode, msn, addr, len| {
        let mut desc = Desc::new(opcode, msn);
        (desc.addr, desc.rkey, desc.total, desc.len) = (remote.addr + addr, remote.rkey, len, len);
        desc
    };
    let descs = [
        at(Opcode::Write, 0, 64, 3),
        at(Opcode::FetchAdd, 1, 0, 8),
        at(Opcode::CompareSwap, 2, 0, 16),
        at(Opcode::Write, 3, 128, 3),
    ];
    let mut payload = vec![7; 3];
    for operand in [5u64, 5, 9] {
        payload.extend(operand.to_le_bytes());
    }
    payload.extend([8; 3]);
    let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
    peer.write_all(&hello.encode()).unwrap();
    for byte in frame(&descs, &payload, 0) {
        peer.write_all(&[byte]).unwrap();
        side.poll();
    }
    let deadline = Instant::now() + DEADLINE;
    while contents(&region, 128, 3) != [8; 3] {
        side.poll();
        assert!(Instant::now() < deadline);
    }
    assert_eq!(contents(&region, 0, 8), 9u64.to_ne_bytes());
    assert_eq!(contents(&region, 64, 3), [7; 3]);
    drop(peer);
    ends_in_error(side, &qp, "the peer has left");
}

/// Without order nobody keeps which numbers were used: a message that uses one again must not hurt.
#[test]
fn b1_a_number_that_is_used_twice_without_order_does_no_harm() {
    let mut side = Side::new(SoftTransport::Tcp, Profile::Srd);
    let (qp, mut peer) = raw_peer(&side);
    let region = side.region(4096, ALL);
    let remote = region.remote();
    let mut write = Desc { total: 1, len: 1, ..Desc::new(Opcode::Write, 0) };
    (write.addr, write.rkey) = (remote.addr, remote.rkey);
    let last = Desc { addr: remote.addr + 1, ..write };
    let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
    // In one read, so that both are acknowledged together.
    let frames = [hello.encode().to_vec(), frame(&[write], &[7], 0), frame(&[last], &[7], 0)];
    peer.write_all(&frames.concat()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while contents(&region, 1, 1) != [7] {
        side.poll();
        assert!(Instant::now() < deadline);
    }
    drop(peer);
    ends_in_error(side, &qp, "the peer has left");
}
