//! A peer in shared memory that breaks every rule: what it puts into the rings, says over the socket, and lends.

use std::os::fd::AsFd;

use socket2::{Domain, Socket, Type};

use super::shm::name;
use super::*;
use crate::pages::{Pages, Strides, pair};
use crate::provider::QpAddress;
use crate::provider::soft::frame::{Desc, Header, Opcode, Preamble};
use crate::provider::soft::rng::Rng;
use crate::provider::soft::shm::inspect::after_next_copy;
use crate::provider::soft::shm::raw::RawPeer;
use crate::provider::soft::shm::{encode_table, fuzz};

/// A queue pair whose peer is this test: it has answered the dial.
pub(super) fn raw_peer(side: &Side) -> (Qp, RawPeer) {
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

fn frame(descs: &[Desc], payload: &[u8], ack: u32) -> Vec<u8> {
    let total = descs.iter().map(Desc::counted).sum();
    let header = Header { descs: descs.len() as u16, ack, payload: total };
    let mut out = header.encode().to_vec();
    descs.iter().for_each(|d| out.extend_from_slice(&d.encode()));
    out.extend_from_slice(payload);
    out
}

/// A WRITE of `len` bytes to the start of `to`, whose payload is where `references` say: memfd, offset, length.
pub(super) fn referring(
    to: &Region<Exposed>,
    msn: u32,
    imm: Option<u32>,
    references: &[(u64, u64, u32)],
) -> Vec<u8> {
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
    frame(&[desc], &payload, 0)
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

/// A WRITE of 3 layers of pieces of 64 bytes, whose pairs are these, to `to`, where a layer has 8 blocks; from lent memory 9, where it
/// has 16.
fn paged(
    to: &Region<Exposed>,
    pairs: &[(u32, u32)],
    spoil: fn(&mut Desc, &mut Pages, &mut (u64, u64)),
) -> Vec<u8> {
    let (source, target) = (Strides { layer: 1024, block: 64 }, Strides { layer: 512, block: 64 });
    let pairs: Vec<u64> = pairs.iter().map(|&(s, t)| pair(s, t)).collect();
    let mut pages = Pages { piece: 64, layers: 3, source, target, pairs };
    let mut from = (9, 1000);
    let mut desc = Desc::new(Opcode::Write, 0);
    (desc.addr, desc.rkey) = (to.remote().addr, to.remote().rkey);
    desc.total = pages.bytes().unwrap();
    desc.set_imm(Some(3));
    spoil(&mut desc, &mut pages, &mut from);
    desc.len = desc.total;
    desc.set_pages(pages.pairs.len());
    let mut table = Vec::new();
    encode_table(&pages, from.0, from.1, &mut table);
    frame(&[desc], &table, 0)
}

/// A WRITE of pieces of one byte: `layers` of 2048, side by side in memory 9, and at every `apart`-th byte of `to`.
pub(super) fn tiny_pieces(to: &Region<Exposed>, layers: u32, apart: u64) -> Vec<u8> {
    let pairs = (0..2048).map(|n| pair(n, n)).collect();
    let strides = |apart| Strides { layer: 2048 * apart, block: apart };
    let pages = Pages { piece: 1, layers, source: strides(1), target: strides(apart), pairs };
    let mut desc = Desc::new(Opcode::Write, 0);
    (desc.addr, desc.rkey) = (to.remote().addr, to.remote().rkey);
    desc.total = pages.bytes().unwrap();
    desc.len = desc.total;
    desc.set_imm(Some(3));
    desc.set_pages(pages.pairs.len());
    let mut table = Vec::new();
    encode_table(&pages, 9, 0, &mut table);
    frame(&[desc], &table, 0)
}

#[test]
fn r9_a_table_of_tiny_pieces_takes_some_of_them_in_a_turn() {
    const ALL_OF_IT: usize = 512 << 10;
    let mut side = shm_side();
    let (qp, peer) = raw_peer(&side);
    let to = side.region(ALL_OF_IT as u64, ALL);
    let memory = peer.lend(9, ALL_OF_IT);
    memory.write(0, &vec![1; ALL_OF_IT]);
    recv(&qp, 1, None);
    peer.put(&tiny_pieces(&to, 256, 1));
    let (deadline, mut most, mut before) = (Instant::now() + DEADLINE, 0, 0);
    while side.seen.is_empty() {
        side.poll();
        let copied = contents(&to, 0, ALL_OF_IT).iter().map(|&b| usize::from(b)).sum();
        most = most.max(copied - before);
        before = copied;
        assert!(Instant::now() < deadline, "not in time");
    }
    assert_eq!((before, ids(&side.take())), (ALL_OF_IT, vec![(1, WcStatus::Success)]));
    assert!(most <= 16 << 10, "{most} pieces in a turn");
}

/// K8: nothing is promised that cannot be kept. The peer's socket is full for a moment.
#[test]
fn k8_pages_are_taken_only_from_memory_that_the_peer_has_been_lent() {
    let side = shm_side();
    let (qp, peer) = raw_peer(&side);
    let regions = (0..4096).map(|_| side.region(4096, ALL));
    let mut lent = Vec::new();
    let refused = regions.into_iter().find_map(|region| {
        let key = sge(&region, 0, 1).lkey;
        if qp.takes_pages(key) == 0 {
            return Some(region);
        }
        lent.push(region);
        None
    });
    let refused = refused.expect("there is no room for so many words");
    let all = |region: &Region<Exposed>| qp.takes_pages(sge(region, 0, 1).lkey) > 0;
    assert!(!lent.is_empty() && lent.iter().all(all), "asked twice, told once");
    assert!(!all(&refused));
    assert_eq!(qp.state(), QpState::Rts);
    peer.hear_all();
    assert!(all(&refused), "it was for a moment");
}

#[test]
fn b1_pages_land_where_the_table_says_and_tables_of_anything_else_touch_nothing() {
    type Spoil = fn(&mut Desc, &mut Pages, &mut (u64, u64));
    type Pairs = &'static [(u32, u32)];
    let cases: &[(&str, Pairs, Spoil)] = &[
        ("sane", &[(2, 7), (15, 0), (9, 3)], |_, _, _| ()),
        ("a target beyond the region", &[(2, 7), (15, 0), (9, 8)], |_, p, _| p.target.layer = 576),
        ("a target far beyond", &[(2, u32::MAX), (15, 0)], |_, _, _| ()),
        ("a block twice", &[(2, 7), (15, 0), (9, 7)], |_, _, _| ()),
        ("layers that meet", &[(2, 7), (15, 0)], |_, p, _| p.target.layer = 64),
        ("another length", &[(2, 7), (15, 0)], |d, _, _| d.total += 64),
        ("before the region", &[(2, 7), (15, 0)], |d, _, _| d.addr -= 1),
        ("another key", &[(2, 7), (15, 0)], |d, _, _| d.rkey ^= 1),
        ("no layers", &[(2, 7)], |_, p, _| p.layers = 0),
        ("around the end of the numbers", &[(2, 7), (3, 1)], |_, p, _| p.target.block = u64::MAX / 2),
        ("memory that was not lent", &[(2, 7)], |_, _, from| from.0 = 8),
        ("a source beyond its end", &[(2, 7), (15, 0)], |_, _, from| from.1 = 65_536 - 2900),
        ("a source around the end of the numbers", &[(2, 7)], |_, _, from| from.1 = u64::MAX - 60),
        ("a SEND", &[(2, 7)], |d, _, _| d.opcode = Opcode::Send),
    ];
    for &(what, pairs, spoil) in cases {
        let mut side = shm_side();
        let (qp, peer) = raw_peer(&side);
        let to = side.region(1536, ALL);
        let memory = peer.lend(9, 65_536);
        let data = pattern(65_536, 8);
        memory.write(0, &data);
        recv(&qp, 1, None);
        peer.put(&paged(&to, pairs, spoil));
        if what == "sane" {
            until(&mut side, what, |s| !s.seen.is_empty());
            assert_eq!(ids(&side.take()), [(1, WcStatus::Success)]);
            let mut expected = vec![0; 1536];
            for (layer, &(s, t)) in (0..3).flat_map(|layer| pairs.iter().map(move |pair| (layer, pair))) {
                // The lowest piece, of block 2, begins at 1000.
                let (from, to) = (1000 - 128 + layer * 1024 + s as usize * 64, layer * 512 + t as usize * 64);
                expected[to..to + 64].copy_from_slice(&data[from..from + 64]);
            }
            assert!(contents(&to, 0, 1536) == expected);
            continue;
        }
        for _ in 0..50 {
            side.poll();
        }
        drop(peer);
        until(&mut side, what, |s| qp.state() == QpState::Err && !s.seen.is_empty());
        assert!(side.take().iter().all(|cqe| cqe.status != WcStatus::Success), "{what}");
        assert!(contents(&to, 0, 1536) == [0; 1536], "{what}");
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
        ("more than a connection may be lent", |p| {
            (1..=5).for_each(|name| p.lend_fd(name, 1 << 40, RawPeer::memfd(1 << 40, true).as_fd()));
        }),
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

/// Operations of a peer at random, a few of which make sense. `fuzz/` looks further.
#[test]
fn b1_a_peer_that_does_anything_never_makes_us_panic_or_write_outside_of_a_region() {
    let mut rng = Rng::new(23);
    for _ in 0..150 {
        let data: Vec<u8> = (0..rng.below(400)).map(|_| rng.below(256) as u8).collect();
        fuzz::queue(&data);
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

/// R6: what the peer had executed before it ended is a success, also behind payload of its own that nobody has copied.
#[test]
fn r6_answers_behind_what_was_not_copied_still_count() {
    for (profile, answer) in
        [(Profile::Default, frame(&[], &[], 1)), (Profile::Srd, frame(&[Desc::new(Opcode::Ack, 0)], &[], 0))]
    {
        for meanwhile in [true, false] {
            let mut side = Side::new(SoftTransport::Shm, profile);
            let (qp, peer) = raw_peer(&side);
            let to = side.region(8192, ALL);
            let _memory = peer.lend(9, 65_536);
            recv(&qp, 1, None);
            side.poll();
            post(&qp, 5, SendOp::Send { imm: None }, &[]);
            side.poll();
            peer.put(&referring(&to, 0, Some(3), &[(9, 0, 4096)]));
            // A part of it in the next turn: payload of other messages, small and large.
            let mut small = Desc { total: 900, len: 900, ..Desc::new(Opcode::Write, 1) };
            (small.addr, small.rkey) = (to.remote().addr, to.remote().rkey);
            peer.put(&frame(&[small, small, small], &[7; 2700], 0));
            (1..20).for_each(|msn| peer.put(&referring(&to, msn, None, &[(9, 0, 2048), (9, 0, 2048)])));
            peer.put(&answer);
            let peer = if meanwhile {
                let given = after_next_copy(move || {
                    peer.close();
                    peer
                });
                side.poll();
                given.take().expect("there was a copy")
            } else {
                peer.close();
                peer
            };
            until(&mut side, "the end", |s| s.seen.len() == 2);
            assert_eq!(ids(&side.take()), [(5, WcStatus::Success), (1, WcStatus::Flushed)], "{profile}");
            assert_eq!(contents(&to, 0, 900), [0; 900], "{profile}: small payload behind it");
            drop(peer);
        }
    }
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
