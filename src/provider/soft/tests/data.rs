//! Data arrives: every operation, sizes, chains, elements.

use super::*;
use crate::provider::WcOpcode;

over_both_transports! {
    r2_every_operation_moves_its_bytes_and_completes_once_on_every_profile,
    r2_thousands_of_small_writes_in_chains_land_with_one_completion,
    r2_elements_are_gathered_and_scattered_in_their_order,
    r1_inline_payload_is_copied_at_the_post,
    r4_more_reads_than_rd_atomic_wait_their_turn,
    r2_both_directions_at_once_with_the_socket_full,
    r2_many_queue_pairs_of_one_channel_all_progress,
    r2_one_thread_posts_while_another_polls,
    r1_memory_at_a_reused_address_is_reached_by_its_own_key_only,
}

const SIZES: [usize; 9] = [0, 1, 1023, 1024, 1025, 4097, 65_536, 300_000, 3 << 20];

fn sizes(profile: Profile) -> impl Iterator<Item = usize> {
    let max = profile.capabilities().max_msg_size.min(profile.capabilities().max_mr_size / 2) as usize;
    SIZES.into_iter().filter(move |&s| s <= max)
}

fn r2_every_operation_moves_its_bytes_and_completes_once_on_every_profile(on: SoftTransport) {
    for profile in Profile::ALL {
        let mut p = Pair::new(on, profile);
        let room = profile.capabilities().max_mr_size.min(4 << 20);
        let (from, to) = (p.a.region(room, ALL), p.b.region(room, ALL));
        for (n, size) in sizes(profile).enumerate() {
            let salt = n as u64 * 10;
            let zeros = vec![0; size + 1];
            let here = if size == 0 { vec![] } else { vec![sge(&from, 1, size as u64)] };

            // SEND, without and with an immediate.
            let has_imm = profile.capabilities().immediate;
            for imm in [None, Some(0x89ab_cdef), Some(1)].into_iter().filter(|i| has_imm || i.is_none()) {
                let data = pattern(size, salt + u64::from(imm.unwrap_or(0)));
                fill(&from, 1, &data);
                fill(&to, 3, &zeros);
                recv(p.qb(), 5, (size > 0).then(|| sge(&to, 3, size as u64)));
                post(p.qa(), 6, SendOp::Send { imm }, &here);
                let (a, b) = p.wait(1, 1);
                assert_eq!((a[0].wr_id, a[0].status, a[0].opcode), (6, WcStatus::Success, WcOpcode::Send));
                assert_eq!((b[0].wr_id, b[0].status, b[0].opcode), (5, WcStatus::Success, WcOpcode::Recv));
                assert_eq!((b[0].imm, b[0].byte_len, b[0].qp_num), (imm, size as u32, p.qb().qp_num()));
                assert_eq!(contents(&to, 3, size), data, "{profile} SEND of {size}");
                assert_eq!(contents(&to, 3 + size as u64, 1), [0]);
            }

            // WRITE, without and with.
            for imm in [None, Some(0x89ab_cdef)].into_iter().filter(|i| has_imm || i.is_none()) {
                let data = pattern(size, salt + 3);
                fill(&from, 1, &data);
                fill(&to, 9, &zeros);
                if imm.is_some() {
                    recv(p.qb(), 7, None);
                }
                post(p.qa(), 8, write_to(&to, 9, imm), &here);
                let (a, b) = p.wait(1, usize::from(imm.is_some()));
                if profile.completes_at_hand_off() {
                    // That completion says nothing of the peer. The arrival of a SEND behind the WRITE does.
                    recv(p.qb(), 17, None);
                    post(p.qa(), 16, SendOp::Send { imm: None }, &[]);
                    p.wait(1, 1);
                }
                assert_eq!((a[0].wr_id, a[0].status, a[0].opcode), (8, WcStatus::Success, WcOpcode::Write));
                if let Some(b) = b.first() {
                    assert_eq!((b.wr_id, b.opcode, b.imm), (7, WcOpcode::RecvWriteWithImm, imm));
                    assert_eq!(b.byte_len, size as u32);
                }
                assert_eq!(contents(&to, 9, size), data, "{profile} WRITE of {size}");
            }

            // READ.
            let data = pattern(size, salt + 4);
            fill(&to, 2, &data);
            fill(&from, 1, &zeros);
            post(p.qa(), 9, read_from(&to, 2), &here);
            let (a, _) = p.wait(1, 0);
            assert_eq!((a[0].wr_id, a[0].status, a[0].opcode), (9, WcStatus::Success, WcOpcode::Read));
            assert_eq!(contents(&from, 1, size), data, "{profile} READ of {size}");
        }
        p.quiet();
    }
}

fn r2_thousands_of_small_writes_in_chains_land_with_one_completion(on: SoftTransport) {
    const N: u64 = 5000;
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(N * 64, ALL), p.b.region(N * 128, ALL));
    let data = pattern(N as usize * 64, 1);
    fill(&from, 0, &data);
    let mut chain = WrChain::default();
    for i in 0..N {
        // Every other slot of the target: the gaps must stay.
        chain.push(i, write_to(&to, i * 128, None), &[sge(&from, i * 64, 64)], i == N - 1, false);
    }
    p.qa().post_send(&chain).unwrap();
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(N - 1, WcStatus::Success)]);
    let landed = contents(&to, 0, N as usize * 128);
    for i in 0..N as usize {
        assert_eq!(landed[i * 128..][..64], data[i * 64..][..64], "write {i}");
        assert!(landed[i * 128 + 64..][..64].iter().all(|&b| b == 0), "gap {i}");
    }
}

fn r2_elements_are_gathered_and_scattered_in_their_order(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(1 << 20, ALL), p.b.region(1 << 20, ALL));
    let data = pattern(1 << 20, 3);
    fill(&from, 0, &data);
    let parts = [(5u64, 1u64), (900_000, 70_000), (100, 0), (200, 300_000), (700_000, 13)];
    let sges: Vec<Sge> = parts.iter().map(|&(at, len)| sge(&from, at, len)).collect();
    let whole: Vec<u8> =
        parts.iter().flat_map(|&(at, len)| &data[at as usize..][..len as usize]).copied().collect();
    post(p.qa(), 1, write_to(&to, 77, None), &sges);
    p.wait(1, 0);
    assert_eq!(contents(&to, 77, whole.len()), whole);
    // And back, by READ, into elements.
    fill(&from, 0, &vec![0; 1 << 20]);
    post(p.qa(), 2, read_from(&to, 77), &sges);
    p.wait(1, 0);
    for (at, len) in parts {
        assert_eq!(contents(&from, at, len as usize), data[at as usize..][..len as usize]);
    }
}

fn r1_inline_payload_is_copied_at_the_post(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let to = p.b.region(4096, ALL);
    let mut mine = pattern(200, 9);
    let expected = mine.clone();
    let mut chain = WrChain::default();
    for i in 0..3u64 {
        let at = Sge { addr: mine.as_ptr().expose_provenance() as u64 + i * 50, len: 50, lkey: 0 };
        chain.push(i, write_to(&to, i * 50, None), &[at], true, true);
    }
    p.qa().post_send(&chain).unwrap();
    mine.fill(0);
    p.wait(3, 0);
    assert_eq!(contents(&to, 0, 150), expected[..150]);
}

fn r4_more_reads_than_rd_atomic_wait_their_turn(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(1 << 20, ALL), p.b.region(1 << 20, ALL));
    let data = pattern(1 << 20, 5);
    fill(&to, 0, &data);
    for i in 0..64 {
        post(p.qa(), i, read_from(&to, i * 16_384), &[sge(&from, i * 16_384, 16_384)]);
    }
    let (a, _) = p.wait(64, 0);
    assert_eq!(ids(&a), (0..64).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    assert_eq!(contents(&from, 0, 1 << 20), data);
}

fn r2_both_directions_at_once_with_the_socket_full(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let len = 24 << 20;
    let (ra, rb) = (p.a.region(2 * len, ALL), p.b.region(2 * len, ALL));
    let (da, db) = (pattern(len as usize, 1), pattern(len as usize, 2));
    fill(&ra, 0, &da);
    fill(&rb, 0, &db);
    for i in 0..8 {
        let (at, n) = (i * len / 8, len / 8);
        post(p.qa(), i, write_to(&rb, len + at, None), &[sge(&ra, at, n)]);
        post(p.qb(), i, write_to(&ra, len + at, None), &[sge(&rb, at, n)]);
    }
    let (a, b) = p.wait(8, 8);
    let all: Vec<_> = (0..8).map(|i| (i, WcStatus::Success)).collect();
    assert_eq!((ids(&a), ids(&b)), (all.clone(), all));
    assert!(contents(&rb, len, len as usize) == da && contents(&ra, len, len as usize) == db);
}

fn r2_many_queue_pairs_of_one_channel_all_progress(on: SoftTransport) {
    // More than the number that a slice asks directly.
    const N: usize = 12;
    let (mut a, mut b) = (Side::new(on, Profile::Default), Side::new(on, Profile::Default));
    let (from, to) = (a.region(N as u64 * 100_000, ALL), b.region(N as u64 * 100_000, ALL));
    let data = pattern(N * 100_000, 4);
    fill(&from, 0, &data);
    let pairs: Vec<(Qp, Qp)> = (0..N).map(|_| (a.qp(), b.qp())).collect();
    for (i, (qa, qb)) in pairs.iter().enumerate() {
        // Each side dials half of the connections, and the dial may come first.
        let a_dials = i % 2 == 0;
        qa.connect(&attributes(qb, a_dials)).unwrap();
        qb.connect(&attributes(qa, !a_dials)).unwrap();
        recv(qb, i as u64, None);
        let at = i as u64 * 100_000;
        post(qa, i as u64, write_to(&to, at, Some(i as u32)), &[sge(&from, at, 100_000)]);
    }
    let deadline = Instant::now() + DEADLINE;
    while a.seen.len() < N || b.seen.len() < N {
        a.poll();
        b.poll();
        assert!(Instant::now() < deadline, "a {:?} b {:?}", a.seen, b.seen);
    }
    assert!(
        a.seen.iter().chain(&b.seen).all(|c| c.status == WcStatus::Success),
        "a {:?} b {:?}",
        a.seen,
        b.seen
    );
    assert!(contents(&to, 0, N * 100_000) == data);
}

fn r2_one_thread_posts_while_another_polls(on: SoftTransport) {
    const N: u64 = 2048;
    let p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(1 << 20, ALL), p.b.region(1 << 20, ALL));
    let data = pattern(1 << 20, 8);
    fill(&from, 0, &data);
    let Pair { qa, qb, mut a, mut b } = p;
    let (qa, _qb) = (qa.unwrap(), qb);
    std::thread::scope(|s| {
        let (from, to, qa) = (&from, &to, &qa);
        s.spawn(move || {
            for i in 0..N {
                let at = (i * 512) % (1 << 20);
                post(qa, i, write_to(to, at, None), &[sge(from, at, 512)]);
            }
        });
        let deadline = Instant::now() + DEADLINE;
        while a.seen.len() < N as usize {
            a.poll();
            b.poll();
            assert!(Instant::now() < deadline);
        }
    });
    assert_eq!(ids(&a.take()), (0..N).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    assert!(contents(&to, 0, 1 << 20) == data);
}

fn r1_memory_at_a_reused_address_is_reached_by_its_own_key_only(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Default);
    let from = p.a.region(4096, ALL);
    fill(&from, 0, &[7; 4096]);
    // The kernel reuses an address range readily, unless another thread is given it first; the test needs it to have happened once.
    let reused = (0..1000).find_map(|_| {
        let old = p.b.region(1 << 20, ALL);
        let old_remote = old.remote();
        drop(old);
        let again = p.b.region(1 << 20, ALL);
        (again.remote().addr == old_remote.addr).then_some((old_remote, again))
    });
    let (old_remote, to) = reused.expect("no address was given out again");
    post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 4096)]);
    p.wait(1, 0);
    assert_eq!(contents(&to, 0, 4096), [7; 4096]);
    let stale = SendOp::Write { remote_addr: old_remote.addr, rkey: old_remote.rkey, imm: None };
    post(p.qa(), 2, stale, &[sge(&from, 0, 4096)]);
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(2, WcStatus::RemoteAccess)]);
}
