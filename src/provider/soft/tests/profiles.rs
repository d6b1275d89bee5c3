//! What sets the profiles `siw` and `erdma-standard` apart.

use super::*;
use crate::error::QpError;

over_both_transports! {
    b2_a_profile_that_rdma_cm_connects_refuses_a_connect_by_hand_and_names_the_fix,
    r10_an_immediate_where_there_is_none_fails_at_the_post_with_its_index,
    k1_on_siw_a_write_completes_before_the_peer_has_it_and_elsewhere_it_does_not,
    r2_on_siw_completions_keep_their_order_behind_a_read,
    r6_on_siw_a_refused_write_has_completed_and_what_follows_is_flushed,
}

/// Case 44: the refusal of a device in standard mode, and of an iWARP one.
fn b2_a_profile_that_rdma_cm_connects_refuses_a_connect_by_hand_and_names_the_fix(on: SoftTransport) {
    for (profile, named) in [
        (
            Profile::ErdmaStandard,
            &["moving a queue pair to RTS", "compat_mode", "RDMA_CM", "compat_mode=Y"][..],
        ),
        (Profile::Siw, &["moving a queue pair to RTS", "iWARP", "RDMA_CM"]),
    ] {
        let mut side = Side::new(on, profile);
        let (a, b) = (side.qp(), side.qp());
        recv(&a, 1, None);
        let error = a.connect(&attributes(&b, true)).unwrap_err();
        let text = error.to_string();
        assert!(named.iter().all(|n| text.contains(n)), "{profile}: {text}");
        let QpError::ManualConnect { source, .. } = &error else { panic!("{text}") };
        assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
        // It is as it was, and what was posted ends.
        assert_eq!(a.state(), QpState::Init);
        a.set_error().unwrap();
        side.poll();
        assert_eq!(ids(&side.take()), [(1, WcStatus::Flushed)]);
    }
}

/// As siw's driver: -EINVAL, the first such request, nothing of it in the queue.
fn r10_an_immediate_where_there_is_none_fails_at_the_post_with_its_index(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Siw);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    let here = [sge(&from, 0, 64)];
    for bad in [write_to(&to, 64, Some(7)), SendOp::Send { imm: Some(7) }] {
        let mut chain = WrChain::default();
        chain.push(1, write_to(&to, 0, None), &here, true, false);
        chain.push(2, bad, &here, true, false);
        chain.push(3, write_to(&to, 128, None), &here, true, false);
        let refused = p.qa().post_send(&chain).unwrap_err();
        assert_eq!((refused.index, refused.source.raw_os_error()), (1, Some(libc::EINVAL)));
        let (a, _) = p.wait(1, 0);
        assert_eq!(ids(&a), [(1, WcStatus::Success)]);
    }
    p.quiet();
    assert_eq!(p.qa().state(), QpState::Rts);
}

/// The plainest reason for a confirmation by the peer (K1): the peer has not looked at its socket, and the WRITE is done.
fn k1_on_siw_a_write_completes_before_the_peer_has_it_and_elsewhere_it_does_not(on: SoftTransport) {
    for profile in Profile::ALL {
        let mut p = Pair::new(on, profile);
        let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
        fill(&from, 0, &[7; 64]);
        // Both have met.
        recv(p.qb(), 9, None);
        post(p.qa(), 0, SendOp::Send { imm: None }, &[]);
        p.wait(1, 1);
        post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
        // From here on only the writer polls.
        for _ in 0..200 {
            p.a.poll();
        }
        assert_eq!(contents(&to, 0, 64), [0; 64], "{profile}");
        assert_eq!(p.a.take().len(), usize::from(profile == Profile::Siw), "{profile}");
        // It arrives all the same, and completes once.
        p.until("the bytes", |_| contents(&to, 0, 64) == [7; 64]);
        if profile == Profile::Siw {
            p.quiet();
        } else {
            assert_eq!(ids(&p.wait(1, 0).0), [(1, WcStatus::Success)], "{profile}");
        }
    }
}

/// A READ is answered by the peer, so that it completes when it is; what was posted behind it completes after it.
fn r2_on_siw_completions_keep_their_order_behind_a_read(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Siw);
    let (from, to) = (p.a.region(8192, ALL), p.b.region(8192, ALL));
    let data = pattern(4096, 3);
    fill(&to, 0, &data);
    post(p.qa(), 1, read_from(&to, 0), &[sge(&from, 0, 4096)]);
    post(p.qa(), 2, write_to(&to, 4096, None), &[sge(&from, 4096, 64)]);
    for _ in 0..100 {
        p.a.poll();
    }
    assert!(p.a.take().is_empty(), "the peer has not answered");
    let (a, _) = p.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(contents(&from, 0, 4096), data);
}

/// The peer's refusal of a WRITE that has completed ends the queue pair; only what was not done yet is flushed.
fn r6_on_siw_a_refused_write_has_completed_and_what_follows_is_flushed(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Siw);
    let from = p.a.region(4096, ALL);
    let to = p.b.region(4096, AccessFlags::LOCAL_WRITE);
    recv(p.qa(), 50, None);
    post(p.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    let (a, _) = p.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::Success), (50, WcStatus::Flushed)]);
    post(p.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, 64)]);
    let (a, _) = p.wait(1, 0);
    assert_eq!(ids(&a), [(2, WcStatus::Flushed)]);
}
