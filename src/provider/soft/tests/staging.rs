//! Staging over TCP, by a recorded driver: what is copied while what is sent, who may have a source back when, what an end leaves.

use super::cuda::{Gpus, MIB, traffic};
use super::*;
use crate::provider::soft::tuning::FRAMES_AHEAD;

fn over_tcp() -> Gpus {
    Gpus::over(SoftTransport::Tcp, Profile::Default)
}

#[test]
fn r8_copies_for_the_next_frames_are_queued_while_the_first_waits_and_nobody_is_blocked() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, 8 * MIB, true), g.region(false, 8 * MIB, true));
    fill(&from, 0, &pattern(8 << 20, 3));
    let waits = g.fake.count("cuStreamSynchronize") + g.fake.count("cuEventSynchronize");
    g.fake.hold_on(0, true);
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 8 * MIB)]);
    g.pair.quiet();
    assert_eq!(g.fake.queued(), FRAMES_AHEAD, "a copy for each frame ahead, and no more");
    let (a, b) = (traffic(g.pair.qa()).staged, traffic(g.pair.qb()).staged);
    assert_eq!(
        (a.bytes_out, b.bytes_in),
        (0, 0),
        "nothing is sent that is not copied, and nothing counts so"
    );
    assert_eq!(g.fake.count("cuStreamSynchronize") + g.fake.count("cuEventSynchronize"), waits);
    g.fake.hold_on(0, false);
    g.pair.wait(1, 0);
    assert_eq!(contents(&to, 0, 8 << 20), pattern(8 << 20, 3));
    let (a, b) = (traffic(g.pair.qa()).staged, traffic(g.pair.qb()).staged);
    assert_eq!((a.bytes_out, b.bytes_in), (8 * MIB, 8 * MIB));
}

#[test]
fn k1_over_tcp_nobody_hears_of_a_message_before_it_is_on_the_gpu() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    fill(&from, 0, &pattern(1 << 20, 4));
    g.fake.hold_on(1, true);
    recv(g.pair.qb(), 1, None);
    recv(g.pair.qb(), 2, None);
    post(g.pair.qa(), 3, write_to(&to, 0, Some(7)), &[sge(&from, 0, MIB)]);
    post(g.pair.qa(), 4, write_to(&to, 0, Some(8)), &[]);
    g.pair.until("all of it to be here", |p| traffic(p.qb()).staged.bytes_in == MIB);
    g.pair.quiet();
    assert!(g.fake.queued() > 0);
    g.fake.hold_on(1, false);
    let (a, b) = g.pair.wait(2, 2);
    assert_eq!((b[0].imm, b[1].imm), (Some(7), Some(8)));
    assert_eq!(ids(&a), [(3, WcStatus::Success), (4, WcStatus::Success)]);
    assert_eq!(contents(&to, 0, 1 << 20), pattern(1 << 20, 4));
}

/// The slots of the receiver are used again: never before what is in them is copied.
#[test]
fn k1_slots_are_used_again_only_when_they_are_copied() {
    let mut g = over_tcp();
    g.fake.lag(7);
    let (from, to) = (g.region(true, 8 * MIB, true), g.region(false, 8 * MIB, true));
    for round in 0..3 {
        fill(&from, 0, &pattern(8 << 20, round));
        for n in 0..64 {
            let at = n * (MIB / 8);
            post(g.pair.qa(), n, write_to(&to, at, None), &[sge(&from, at, MIB / 8)]);
        }
        g.pair.wait(64, 0);
        assert!(contents(&to, 0, 8 << 20) == pattern(8 << 20, round), "round {round}");
        // The other way round, by READs.
        fill(&from, 0, &[0; 8 << 20]);
        post(g.pair.qa(), 1, read_from(&to, 0), &[sge(&from, 0, 8 * MIB)]);
        g.pair.wait(1, 0);
        assert!(contents(&from, 0, 8 << 20) == pattern(8 << 20, round), "round {round}, back");
    }
    let most = 4 * FRAMES_AHEAD + 16;
    assert!(g.fake.pinned() <= most, "{} slots for two queue pairs", g.fake.pinned());
}

#[test]
fn r1_a_deregistered_source_is_not_read_any_more() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    g.waits_for_copies(from, &to);
}

#[test]
fn r6_a_copy_that_is_refused_fails_its_request_and_flushes_those_behind_it() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, 4 * MIB, true), g.region(false, 4 * MIB, true));
    let host = g.region(true, MIB, false);
    // Held, so that all three are there when the copy for the third frame is refused.
    g.fake.hold_on(0, true);
    let copies = g.fake.count("cuMemcpyAsync");
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    assert_eq!(g.fake.count("cuMemcpyAsync"), copies + 2);
    g.fake.refuse("cuMemcpyAsync", 1);
    let mut chain = WrChain::default();
    chain.push(2, write_to(&to, 0, None), &[sge(&from, 0, 4 * MIB)], true, false);
    chain.push(3, write_to(&to, 0, None), &[sge(&host, 0, 8)], true, false);
    g.pair.qa().post_send(&chain).unwrap();
    let (a, _) = g.pair.wait(3, 0);
    let flushed = WcStatus::Flushed;
    assert_eq!(ids(&a), [(1, flushed), (2, WcStatus::LocalQpOperation), (3, flushed)]);
    assert_eq!(g.fake.queued(), 0, "what was queued has ended before");
    g.fake.hold_on(0, false);
}

#[test]
fn r6_a_copy_that_fails_at_the_receiver_refuses_its_message() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, MIB, false), g.region(false, MIB, true));
    g.fake.refuse("cuMemcpyAsync", 1);
    for n in 1..=2 {
        post(g.pair.qa(), n, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    }
    let (a, _) = g.pair.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::RemoteOperation), (2, WcStatus::Flushed)]);
}

/// In the middle of it, on either side.
#[test]
fn r7_pinned_memory_is_given_back_with_the_last_registration_and_queue_pair() {
    for killed in [None, Some(true), Some(false)] {
        let mut g = over_tcp();
        let (from, to) = (g.region(true, 4 * MIB, true), g.region(false, 4 * MIB, true));
        assert!(g.fake.pinned() > 0, "registering makes slots");
        g.fake.lag(5);
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 4 * MIB)]);
        match killed {
            None => _ = g.pair.wait(1, 0),
            Some(true) => {
                g.pair.a.poll();
                g.pair.qa = None;
            }
            Some(false) => {
                g.pair.until("some of it to come", |p| traffic(p.qb()).staged.bytes_in > 0);
                g.pair.qb = None;
            }
        }
        drop((from, to));
        (g.pair.qa, g.pair.qb) = (None, None);
        assert_eq!((g.fake.pinned(), g.fake.queued()), (0, 0), "{killed:?}");
    }
}

/// Its last acknowledgement is in front of what is still being copied.
#[test]
fn r2_a_queue_pair_that_ends_acknowledges_what_has_landed() {
    let mut g = over_tcp();
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    let (here, there) = (g.region(true, 64, false), g.region(false, 64, false));
    g.fake.hold_on(1, true);
    // B has something to send, which is being copied.
    post(g.pair.qb(), 1, write_to(&from, 0, None), &[sge(&to, 0, MIB)]);
    post(g.pair.qa(), 2, write_to(&there, 0, None), &[sge(&here, 0, 64)]);
    for _ in 0..200 {
        g.pair.b.poll();
    }
    g.pair.qb = None;
    g.pair.until("the end", |p| !p.a.seen.is_empty());
    assert_eq!(ids(&g.pair.a.take()), [(2, WcStatus::Success)]);
    g.fake.hold_on(1, false);
}
