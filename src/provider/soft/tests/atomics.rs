//! FETCH_ADD and CMP_SWAP on the provider's boundary.

use super::*;
use crate::provider::WcOpcode;

over_both_transports! {
    r2_atomics_change_the_peers_number_and_bring_the_old_one_on_every_profile_that_has_them,
    r2_atomics_keep_their_place_between_writes_and_the_limit_of_reads,
    r6_a_misaligned_atomic_is_invalid_and_one_without_access_or_beyond_the_region_is_refused,
    r10_what_cannot_hold_the_answer_is_not_posted,
    r10_a_profile_without_atomics_refuses_the_post_and_what_comes_from_a_peer,
    r2_additions_of_two_queue_pairs_and_of_the_owner_are_all_counted,
    k8_operands_that_do_not_fit_into_a_frame_wait_for_the_next,
}

const ATOMIC: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_ATOMIC);

fn add(region: &Region<Exposed>, offset: u64, add: u64) -> SendOp {
    let remote = region.remote();
    SendOp::FetchAdd { remote_addr: remote.addr + offset, rkey: remote.rkey, add }
}

fn swap(region: &Region<Exposed>, offset: u64, compare: u64, swap: u64) -> SendOp {
    let remote = region.remote();
    SendOp::CompareSwap { remote_addr: remote.addr + offset, rkey: remote.rkey, compare, swap }
}

fn number(region: &Region<Exposed>, offset: u64) -> u64 {
    u64::from_ne_bytes(contents(region, offset, 8).try_into().unwrap())
}

fn set(region: &Region<Exposed>, offset: u64, to: u64) {
    fill(region, offset, &to.to_ne_bytes());
}

fn with_atomics() -> impl Iterator<Item = Profile> {
    Profile::ALL.into_iter().filter(|p| p.capabilities().atomics)
}

fn r2_atomics_change_the_peers_number_and_bring_the_old_one_on_every_profile_that_has_them(
    on: SoftTransport,
) {
    for profile in with_atomics() {
        let mut p = Pair::new(on, profile);
        let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ATOMIC));
        set(&to, 16, u64::MAX);
        let far = 0x89ab_cdef_0123_4567;
        let steps = [
            (add(&to, 16, 2), WcOpcode::FetchAdd, u64::MAX, 1),
            (add(&to, 16, far), WcOpcode::FetchAdd, 1, far + 1),
            (swap(&to, 16, far, 5), WcOpcode::CompareSwap, far + 1, far + 1),
            (swap(&to, 16, far + 1, 5), WcOpcode::CompareSwap, far + 1, 5),
            (add(&to, 16, 0), WcOpcode::FetchAdd, 5, 5),
        ];
        for (op, opcode, old, new) in steps {
            // Ours need not be aligned.
            post(p.qa(), 1, op, &[sge(&from, 3, 8)]);
            let (a, _) = p.wait(1, 0);
            assert_eq!((a[0].wr_id, a[0].status, a[0].opcode), (1, WcStatus::Success, opcode), "{profile}");
            assert_eq!((number(&from, 3), number(&to, 16)), (old, new), "{profile}");
        }
        assert_eq!((number(&to, 8), number(&to, 24)), (0, 0), "{profile}: its neighbours");
        p.quiet();
    }
}

/// In one chain with WRITEs: executed in the order of their posts, however few may be outstanding at once.
fn r2_atomics_keep_their_place_between_writes_and_the_limit_of_reads(on: SoftTransport) {
    const N: u64 = 500;
    let mut p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(16 * N, ALL), p.b.region(4096, ALL.union(ATOMIC)));
    set(&from, 0, 1000);
    let mut chain = WrChain::default();
    chain.push(0, add(&to, 0, 1), &[sge(&from, 8, 8)], false, false);
    chain.push(0, write_to(&to, 0, None), &[sge(&from, 0, 8)], false, false);
    for i in 0..N {
        // More than the four that were agreed on, and elements that are cut.
        let parts = [sge(&from, 16 + 8 * i, 3), sge(&from, 19 + 8 * i, 5)];
        chain.push(i, add(&to, 0, 1), &parts, i + 1 == N, false);
    }
    p.qa().post_send(&chain).unwrap();
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(N - 1, WcStatus::Success)]);
    assert_eq!((number(&from, 8), number(&to, 0)), (0, 1000 + N));
    for i in 0..N {
        assert_eq!(number(&from, 16 + 8 * i), 1000 + i);
    }
}

fn r6_a_misaligned_atomic_is_invalid_and_one_without_access_or_beyond_the_region_is_refused(
    on: SoftTransport,
) {
    for (case, status) in [
        ("misaligned", WcStatus::RemoteInvalidRequest),
        ("no access", WcStatus::RemoteAccess),
        ("beyond", WcStatus::RemoteAccess),
        ("half beyond", WcStatus::RemoteAccess),
        ("gone", WcStatus::RemoteAccess),
    ] {
        let mut p = Pair::new(on, Profile::Default);
        let from = p.a.region(4096, ALL);
        let (to, plain, gone) = (p.b.region(4092, ATOMIC), p.b.region(4096, ALL), p.b.region(4096, ATOMIC));
        let bad = match case {
            "misaligned" => add(&to, 4, 1),
            "no access" => add(&plain, 0, 1),
            "beyond" => add(&to, 1 << 20, 1),
            "half beyond" => swap(&to, 4088, 0, 1),
            _ => swap(&gone, 0, 0, 1),
        };
        drop(gone);
        fill(&from, 0, &[7; 24]);
        post(p.qa(), 1, add(&to, 0, 3), &[sge(&from, 0, 8)]);
        post(p.qa(), 2, bad, &[sge(&from, 8, 8)]);
        post(p.qa(), 3, add(&to, 0, 3), &[sge(&from, 16, 8)]);
        let (a, _) = p.wait(3, 0);
        let expected = [(1, WcStatus::Success), (2, status), (3, WcStatus::Flushed)];
        assert_eq!(ids(&a), expected, "{case}");
        assert_eq!((number(&to, 0), number(&from, 0)), (3, 0), "{case}");
        assert_eq!(contents(&from, 8, 16), [7; 16], "{case}");
        assert!(contents(&to, 8, 4084).iter().chain(&contents(&plain, 0, 4096)).all(|&b| b == 0), "{case}");
    }
}

/// The elements of ours are eight bytes that may be written.
fn r10_what_cannot_hold_the_answer_is_not_posted(on: SoftTransport) {
    let p = Pair::new(on, Profile::Default);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ATOMIC));
    for (len, inline) in [(0, false), (4, false), (16, false), (8, true)] {
        let mut chain = WrChain::default();
        chain.push(1, add(&to, 0, 1), &[sge(&from, 0, len)], true, inline);
        let refused = p.qa().post_send(&chain).unwrap_err();
        assert_eq!((refused.index, refused.source.raw_os_error()), (0, Some(libc::EINVAL)), "{len} {inline}");
    }
    assert_eq!(p.qa().state(), QpState::Rts);
}

fn r10_a_profile_without_atomics_refuses_the_post_and_what_comes_from_a_peer(on: SoftTransport) {
    for profile in Profile::ALL.into_iter().filter(|p| !p.capabilities().atomics) {
        let p = Pair::new(on, profile);
        let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ATOMIC));
        let mut chain = WrChain::default();
        chain.push(1, add(&to, 0, 1), &[sge(&from, 0, 8)], true, false);
        let refused = p.qa().post_send(&chain).unwrap_err();
        assert_eq!((refused.index, refused.source.raw_os_error()), (0, Some(libc::EOPNOTSUPP)), "{profile}");
    }
    // RC both, and the peer has atomics.
    let (a, b) = (Side::new(on, Profile::Default), Side::new(on, Profile::Siw));
    let (qa, qb) = (a.qp(), b.qp());
    bring_up(&qb, &attributes(&qa, false));
    bring_up(&qa, &attributes(&qb, true));
    let (from, to) = (a.region(4096, ALL), b.region(4096, ATOMIC));
    let mut p = Pair { qa: Some(qa), qb: Some(qb), a, b };
    post(p.qa(), 1, add(&to, 0, 1), &[sge(&from, 0, 8)]);
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(number(&to, 0), 0);
}

/// Two queue pairs of the responder, each driven by a thread of its own, and the owner's own additions.
fn r2_additions_of_two_queue_pairs_and_of_the_owner_are_all_counted(on: SoftTransport) {
    use std::sync::atomic::{AtomicU64, Ordering};
    const N: u64 = 1000;
    let b = Side::new(on, Profile::Default);
    let to = b.region(4096, ATOMIC);
    let word = std::ptr::with_exposed_provenance_mut(to.remote().addr as usize);
    // SAFETY: eight aligned bytes of a region that outlives the threads below; everybody adds atomically.
    let word = unsafe { AtomicU64::from_ptr(word) };
    let done = AtomicU64::new(0);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                let a = Side::new(on, Profile::Default);
                let channel = b.device.create_channel().unwrap();
                let cq = channel.create_cq(64).unwrap();
                let init = QpInit {
                    max_send_wr: 8,
                    max_recv_wr: 8,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline: 0,
                };
                let (qa, qb) = (a.qp(), b.pd.create_qp(&cq, &cq, init).unwrap());
                bring_up(&qb, &attributes(&qa, false));
                bring_up(&qa, &attributes(&qb, true));
                let from = a.region(8 * N, ALL);
                let mut chain = WrChain::default();
                for i in 0..N {
                    chain.push(i, add(&to, 0, 1), &[sge(&from, 8 * i, 8)], i + 1 == N, false);
                }
                qa.post_send(&chain).unwrap();
                let deadline = Instant::now() + DEADLINE;
                let mut out = [Cqe::default(); 1];
                while a.cq.poll(&mut out).unwrap() == 0 {
                    cq.poll(&mut [Cqe::default(); 1]).unwrap();
                    assert!(Instant::now() < deadline);
                }
                assert_eq!(ids(&out), [(N - 1, WcStatus::Success)]);
                // Nobody else counts down, so that each sees the number grow.
                let seen: Vec<u64> = (0..N).map(|i| number(&from, 8 * i)).collect();
                assert!(seen.is_sorted_by(|a, b| a < b));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        for _ in 0..N {
            word.fetch_add(1, Ordering::Relaxed);
            std::thread::yield_now();
        }
    });
    assert_eq!((done.into_inner(), word.load(Ordering::SeqCst)), (2, 3 * N));
}

/// Operands are never cut: a frame with less room than they need goes without them.
fn k8_operands_that_do_not_fit_into_a_frame_wait_for_the_next(on: SoftTransport) {
    for rest in 0..20 {
        let mut p = Pair::new(on, Profile::Default);
        let (from, to) = (p.a.region(1 << 20, ALL), p.b.region(1 << 20, ALL.union(ATOMIC)));
        let mut chain = WrChain::default();
        // Two segments of the largest size fill a frame, but for the rest.
        chain.push(1, write_to(&to, 8, None), &[sge(&from, 0, 256 << 10)], false, false);
        chain.push(2, write_to(&to, 8, None), &[sge(&from, 0, (256 << 10) - rest)], false, false);
        chain.push(3, swap(&to, 0, 0, 9), &[sge(&from, 0, 8)], false, false);
        chain.push(4, add(&to, 0, 1), &[sge(&from, 8, 8)], true, false);
        p.qa().post_send(&chain).unwrap();
        let (a, _) = p.wait(1, 0);
        assert_eq!(ids(&a), [(4, WcStatus::Success)], "{rest}");
        assert_eq!((number(&from, 0), number(&from, 8), number(&to, 0)), (0, 9, 10), "{rest}");
    }
}
