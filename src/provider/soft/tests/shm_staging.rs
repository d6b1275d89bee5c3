//! Staging within one host, by a recorded driver: slots that both sides have mapped, who copies when, and what an end leaves.

use std::os::fd::AsFd;

use super::cuda::{Gpus, MIB, traffic};
use super::shm_hostile::{raw_peer, referring};
use super::*;
use crate::cuda::GpuWays;
use crate::provider::Armed;
use crate::provider::soft::shm::inspect::play_two_processes;
use crate::provider::soft::shm::raw::RawPeer;
use crate::provider::soft::tuning::{SHARED_SLOT_BYTES, SHARED_SLOTS};

const STAGED: GpuWays = GpuWays { ipc: false, staged: true };

/// Two sides of one host that may stage and nothing else.
fn staged(profile: Profile) -> Gpus {
    let g = Gpus::over(SoftTransport::Shm, profile);
    allow(&g, STAGED);
    g
}

fn allow(g: &Gpus, ways: GpuWays) {
    g.pair.qa().set_gpu_ways(ways);
    g.pair.qb().set_gpu_ways(ways);
}

/// Two more sides that may stage and nothing else.
fn another() -> Pair {
    let mut pair = Pair::new(SoftTransport::Shm, Profile::Default);
    pair.meet();
    pair.qa().set_gpu_ways(STAGED);
    pair.qb().set_gpu_ways(STAGED);
    pair
}

/// What was pinned of a connection is let go, elsewhere.
fn until_unpinned(g: &mut Gpus) {
    let fake = g.fake.clone();
    g.pair.until("the slots to be let go", |_| fake.pinned() == 0);
}

#[test]
fn r2_every_operation_is_staged_on_every_profile() {
    for here in [true, false] {
        if !here {
            play_two_processes();
        }
        for profile in Profile::ALL {
            for (from_gpu, to_gpu) in [(true, true), (true, false), (false, true)] {
                let mut g = staged(profile);
                g.fake.lag(2);
                let room = profile.capabilities().max_mr_size.min(8 << 20);
                let (from, to) = (g.region(true, room, from_gpu), g.region(false, room, to_gpu));
                for (n, size) in [1usize, 1000, 1025, 65_536, 300_000, 7 << 20].into_iter().enumerate() {
                    if size as u64 > profile.capabilities().max_msg_size.min(room - 16) {
                        continue;
                    }
                    g.carries(profile, (&from, &to), (n as u64, size));
                }
                let (a, b) = (traffic(g.pair.qa()), traffic(g.pair.qb()));
                assert_eq!((a.ipc, a.same_process, b.ipc, b.same_process), Default::default());
            }
        }
    }
}

#[test]
fn k9_what_is_staged_on_one_host_is_counted_at_both_ends_and_one_end_in_host_memory_as_such() {
    play_two_processes();
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, 4 * MIB, true), g.region(false, 4 * MIB, true));
    let (ours, theirs) = (g.region(true, MIB, false), g.region(false, MIB, false));
    let mut payload = 0;
    for (n, len) in [10, 1000, 70_000, MIB, 4 * MIB].into_iter().enumerate() {
        post(g.pair.qa(), n as u64, write_to(&to, 0, None), &[sge(&from, 0, len)]);
        payload += len;
    }
    g.pair.wait(5, 0);
    let (a, b) = (traffic(g.pair.qa()), traffic(g.pair.qb()));
    assert_eq!((a.staged.bytes_out, b.staged.bytes_in), (payload, payload));
    assert_eq!(a.staged.operations_out, b.staged.operations_in);
    assert_eq!((a.host, b.host, a.staged.bytes_in), Default::default());
    // From a slot to host memory the receiver copies by itself; from host memory to a GPU there is nothing to stage.
    post(g.pair.qa(), 1, write_to(&theirs, 0, None), &[sge(&from, 0, 5000)]);
    post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&ours, 0, 6000)]);
    g.pair.wait(2, 0);
    let (a, b) = (traffic(g.pair.qa()), traffic(g.pair.qb()));
    assert_eq!((a.staged.bytes_out, b.staged.bytes_in, b.host.bytes_in), (payload + 5000, payload, 6000));
}

/// What IPC does not export goes this way by default, and openly; where staging is forbidden it is refused as before.
#[test]
fn k9_memory_that_ipc_does_not_export_is_staged_to_another_process() {
    play_two_processes();
    for pooled in [true, false] {
        let mut g = Gpus::over(SoftTransport::Shm, Profile::Default);
        let at = if pooled { g.fake.foreign(0, 8192, true) } else { g.fake.mapped(0, 8192) };
        let memory = Memory::from_cuda_of(&g.cuda, at, 8192).unwrap();
        let from = Region::register(&g.pair.a.pd, memory.map_for(&g.pair.a.pd).unwrap(), ALL).unwrap();
        let (exported, to) = (g.region(true, 8192, true), g.region(false, 8192, true));
        fill(&from, 0, &pattern(8192, 3));
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 8192)]);
        g.pair.wait(1, 0);
        assert_eq!(contents(&to, 0, 8192), pattern(8192, 3));
        post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&exported, 0, 8192)]);
        // And the other way: the responder is its owner.
        post(g.pair.qb(), 3, read_from(&from, 0), &[sge(&to, 0, 8192)]);
        g.pair.wait(1, 1);
        let a = traffic(g.pair.qa());
        assert_eq!((a.staged.bytes_out, a.ipc.bytes_out), (16_384, 8192));

        allow(&g, GpuWays { ipc: true, staged: false });
        let mut chain = WrChain::default();
        chain.push(4, write_to(&to, 0, None), &[sge(&from, 0, 8192)], true, false);
        let refused = g.pair.qa().post_send(&chain).unwrap_err().source.to_string();
        assert!(refused.contains("CUDA IPC does not export"), "{refused}");
    }
}

/// The receiver's word counts, too: a way that it has forbidden brings nothing.
#[test]
fn k9_a_way_that_the_receiver_has_forbidden_is_refused_before_a_byte_moves() {
    play_two_processes();
    let only_ipc = GpuWays { ipc: true, staged: false };
    for (sender, receiver) in [(STAGED, only_ipc), (only_ipc, STAGED)] {
        let mut g = Gpus::over(SoftTransport::Shm, Profile::Default);
        g.pair.qa().set_gpu_ways(sender);
        g.pair.qb().set_gpu_ways(receiver);
        let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
        fill(&from, 0, &pattern(1 << 20, 3));
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
        let (a, _) = g.pair.wait(1, 0);
        assert_eq!(ids(&a), [(1, WcStatus::RemoteOperation)]);
        assert!(contents(&to, 0, 1 << 20) == vec![0; 1 << 20]);
        let b = traffic(g.pair.qb());
        assert_eq!((b.staged.bytes_in, b.ipc.bytes_in), (0, 0));
    }
}

#[test]
fn r4_copies_go_ahead_to_as_many_slots_as_there_are_and_nothing_is_sent_that_is_not_copied() {
    let mut g = staged(Profile::Default);
    let len = 2 * (SHARED_SLOTS * SHARED_SLOT_BYTES) as u64;
    let (from, to) = (g.region(true, len, true), g.region(false, len, true));
    let data = pattern(len as usize, 3);
    fill(&from, 0, &data);
    // So that the slots are there.
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 1)]);
    g.pair.wait(1, 0);
    let waits = g.fake.count("cuStreamSynchronize") + g.fake.count("cuEventSynchronize");
    g.fake.hold_on(0, true);
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, len)]);
    g.pair.quiet();
    assert_eq!(g.fake.queued(), SHARED_SLOTS, "a copy for each slot");
    let (a, b) = (traffic(g.pair.qa()).staged, traffic(g.pair.qb()).staged);
    assert_eq!((a.bytes_out, b.bytes_in), (1, 1), "what has not left does not count");
    g.fake.hold_on(0, false);
    // Now the receiver's GPU is the slow one: its slots do not come back.
    g.fake.hold_on(1, true);
    g.pair.quiet();
    let sent = traffic(g.pair.qa()).staged.bytes_out - 1;
    assert_eq!(sent, len / 2, "no slot is used again that may be read");
    assert_eq!(g.fake.count("cuStreamSynchronize") + g.fake.count("cuEventSynchronize"), waits);
    g.fake.hold_on(1, false);
    g.pair.wait(1, 0);
    assert!(contents(&to, 0, len as usize) == data);
}

#[test]
fn k1_nobody_hears_of_a_message_before_it_has_left_its_slots() {
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, 2 * MIB, true), g.region(false, 2 * MIB, true));
    fill(&from, 0, &pattern(2 << 20, 4));
    g.fake.hold_on(1, true);
    recv(g.pair.qb(), 1, None);
    recv(g.pair.qb(), 2, None);
    post(g.pair.qa(), 3, write_to(&to, 0, Some(7)), &[sge(&from, 0, 2 * MIB)]);
    post(g.pair.qa(), 4, write_to(&to, 0, Some(8)), &[]);
    g.pair.until("all of it to be referred to", |p| traffic(p.qb()).staged.bytes_in == 2 * MIB);
    g.pair.quiet();
    assert!(g.fake.queued() > 0);
    g.fake.hold_on(1, false);
    let (a, b) = g.pair.wait(2, 2);
    assert_eq!((b[0].imm, b[1].imm), (Some(7), Some(8)));
    assert_eq!(ids(&a), [(3, WcStatus::Success), (4, WcStatus::Success)]);
    assert!(contents(&to, 0, 2 << 20) == pattern(2 << 20, 4));
}

/// Small ones and large ones, both ways at once, with GPUs that lag: slots are used again many times.
#[test]
fn k1_slots_are_used_again_only_when_they_are_read() {
    let mut g = staged(Profile::Default);
    g.fake.lag(7);
    let room = 24 * MIB;
    let (from, to) = (g.region(true, 2 * room, true), g.region(false, 2 * room, true));
    for round in 0..4 {
        fill(&from, 0, &pattern(room as usize, round));
        fill(&to, room, &pattern(room as usize, round + 100));
        let sizes = [MIB / 8, 3 * MIB, 4096, MIB + 1, 100];
        let (mut at, mut n) = (0, 0);
        while at < room {
            let len = sizes[n % sizes.len()].min(room - at);
            post(g.pair.qa(), n as u64, write_to(&to, at, None), &[sge(&from, at, len)]);
            post(g.pair.qb(), n as u64, write_to(&from, room + at, None), &[sge(&to, room + at, len)]);
            (at, n) = (at + len, n + 1);
        }
        g.pair.wait(n, n);
        assert!(contents(&to, 0, room as usize) == pattern(room as usize, round), "round {round}");
        assert!(contents(&from, room, room as usize) == pattern(room as usize, round + 100), "round {round}");
    }
    assert_eq!(g.fake.pinned(), 4, "each side has its own slots and the other's");
}

/// On either side, in the middle of it, and by a deregistration.
#[test]
fn r7_slots_are_let_go_with_the_connection_and_copies_are_over_before() {
    play_two_processes();
    for killed in [None, Some(true), Some(false)] {
        let mut g = staged(Profile::Default);
        let (from, to) = (g.region(true, 8 * MIB, true), g.region(false, 8 * MIB, true));
        g.fake.lag(5);
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 8 * MIB)]);
        match killed {
            None => _ = g.pair.wait(1, 0),
            Some(true) => {
                g.pair.until("some of it to come", |p| traffic(p.qb()).staged.bytes_in > 0);
                g.pair.qa = None;
            }
            Some(false) => {
                g.pair.until("some of it to come", |p| traffic(p.qb()).staged.bytes_in > 0);
                g.pair.qb = None;
            }
        }
        drop((from, to));
        (g.pair.qa, g.pair.qb) = (None, None);
        assert_eq!(g.fake.queued(), 0, "{killed:?}");
        until_unpinned(&mut g);
    }
}

#[test]
fn r1_a_deregistered_source_is_not_read_any_more() {
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 1)]);
    g.pair.wait(1, 0);
    g.waits_for_copies(from, &to);
}

#[test]
fn r6_what_cannot_be_made_copied_or_pinned_fails_the_request_or_costs_speed_only() {
    // Slots cannot be made.
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    let mut has_slots = another();
    let (its, target) = (g.on(&has_slots.a, 0, MIB), has_slots.b.region(MIB, ALL));
    post(has_slots.qa(), 1, write_to(&target, 0, None), &[sge(&its, 0, MIB)]);
    has_slots.wait(1, 0);
    g.fake.refuse("cuMemHostRegister", 1);
    for n in 1..=2 {
        post(g.pair.qa(), n, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    }
    let (a, _) = g.pair.wait(2, 0);
    assert_eq!(ids(&a), [(1, WcStatus::LocalQpOperation), (2, WcStatus::Flushed)]);
    // For a while it is known, and a connection that would need some keeps what it can do without.
    let mut next = another();
    let (from, target) = (g.on(&next.a, 0, MIB), next.b.region(MIB, ALL));
    let mut chain = WrChain::default();
    chain.push(3, write_to(&target, 0, None), &[sge(&from, 0, MIB)], true, false);
    let refused = next.qa().post_send(&chain).unwrap_err().source;
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(refused.to_string().contains("cuMemHostRegister"), "{refused}");
    let host = next.a.region(MIB, ALL);
    post(next.qa(), 4, write_to(&target, 0, None), &[sge(&host, 0, MIB)]);
    assert_eq!(ids(&next.wait(1, 0).0), [(4, WcStatus::Success)]);
    // And one that has its own needs none.
    let target = has_slots.b.region(MIB, ALL);
    post(has_slots.qa(), 5, write_to(&target, 0, None), &[sge(&its, 0, MIB)]);
    assert_eq!(ids(&has_slots.wait(1, 0).0), [(5, WcStatus::Success)]);
    // A copy is refused, at the sender and at the receiver.
    for (refused, status) in [(0, WcStatus::LocalQpOperation), (1, WcStatus::RemoteOperation)] {
        let mut g = staged(Profile::Default);
        let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 1)]);
        g.pair.wait(1, 0);
        g.fake.hold_on(0, refused == 1);
        if refused == 1 {
            post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
        }
        g.fake.refuse("cuMemcpyAsync", 1);
        g.fake.hold_on(0, false);
        if refused == 0 {
            post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
        }
        let (a, _) = g.pair.wait(1, 0);
        assert_eq!(ids(&a), [(2, status)]);
    }
    // The receiver cannot pin them.
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    fill(&from, 0, &pattern(1 << 20, 8));
    let host = g.region(false, 64, false);
    post(g.pair.qa(), 1, write_to(&host, 0, None), &[sge(&from, 0, 64)]);
    assert_eq!(ids(&g.pair.wait(1, 0).0), [(1, WcStatus::Success)]);
    g.fake.refuse("cuMemHostRegister", 1);
    post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    assert_eq!(ids(&g.pair.wait(1, 0).0), [(2, WcStatus::Success)]);
    assert!(contents(&to, 0, 1 << 20) == pattern(1 << 20, 8));
    assert_eq!(g.fake.pinned(), 1);
}

/// The driver frees after all that is queued: a kernel of the program may wait for the very bytes that are to be staged.
#[test]
fn k5_memory_that_cannot_be_freed_yet_holds_up_no_slots() {
    play_two_processes();
    let mut g = Gpus::over(SoftTransport::Shm, Profile::Default);
    let (from, to) = (g.region(true, 8192, true), g.region(false, 8192, true));
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 8192)]);
    g.pair.wait(1, 0);
    assert_eq!(traffic(g.pair.qb()).ipc.bytes_in, 8192);
    g.fake.stop(Some("cuMemFree"));
    drop(from);
    // It is noted in a turn of the queue pair.
    let other = g.region(true, 4096, false);
    post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&other, 0, 4096)]);
    post(g.pair.qb(), 3, read_from(&other, 0), &[]);
    let fake = g.fake.clone();
    g.pair.until("the memory to come back, and to be freed", |_| fake.stopped() == 1);
    let mut pair = another();
    let (from, to) = (g.on(&pair.a, 0, MIB), g.on(&pair.b, 1, MIB));
    fill(&from, 0, &pattern(1 << 20, 6));
    post(pair.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    assert_eq!(ids(&pair.wait(1, 0).0), [(2, WcStatus::Success)]);
    assert!(contents(&to, 0, 1 << 20) == pattern(1 << 20, 6));
    // Unpinning waits behind it, on that GPU only.
    (pair.qa, pair.qb) = (None, None);
    let fake = g.fake.clone();
    g.pair.until("the other GPU's to be let go", |_| fake.pinned() == 1);
    assert_eq!(g.fake.stopped(), 1);
    g.fake.stop(None);
    until_unpinned(&mut g);
}

/// How long a driver takes to pin is its own affair.
#[test]
fn r8_who_waits_for_the_slots_of_a_peer_to_be_pinned_sleeps() {
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    let host = g.region(false, 64, false);
    fill(&from, 0, &pattern(1 << 20, 8));
    // So that the sender has its own.
    post(g.pair.qa(), 1, write_to(&host, 0, None), &[sge(&from, 0, 64)]);
    g.pair.wait(1, 0);
    g.fake.stop(Some("cuMemHostRegister"));
    post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&from, 0, MIB)]);
    let fake = g.fake.clone();
    g.pair.until("the peer to pin them", |_| fake.stopped() == 1);
    // What comes behind it waits in the ring.
    let small = g.region(true, 64, false);
    post(g.pair.qa(), 3, write_to(&host, 0, None), &[sge(&small, 0, 64)]);
    g.pair.quiet();
    g.pair.until("the peer to sleep", |p| p.b.cq.arm().unwrap() == Armed::Armed);
    assert_eq!(traffic(g.pair.qb()).staged.bytes_in, 0);
    g.fake.stop(None);
    assert_eq!(ids(&g.pair.wait(2, 0).0), [(2, WcStatus::Success), (3, WcStatus::Success)]);
    assert!(contents(&to, 0, 1 << 20) == pattern(1 << 20, 8));
}

/// Pieces that are no neighbours are one kernel on either side, and go by one slot.
#[test]
fn k8_many_small_pieces_are_gathered_to_a_slot_and_from_it() {
    const PIECE: u64 = 1152;
    const COUNT: u64 = 60;
    let mut g = staged(Profile::Default);
    let (from, to) = (g.region(true, MIB, true), g.region(false, MIB, true));
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 1)]);
    g.pair.wait(1, 0);
    let data = pattern((2 * COUNT * PIECE) as usize, 5);
    fill(&from, 0, &data);
    let (copies, kernels) = (g.fake.count("cuMemcpyAsync"), g.fake.count("cuLaunchKernel"));
    let mut chain = WrChain::default();
    for n in 0..COUNT {
        let at = (COUNT - 1 - n) * 2 * PIECE;
        chain.push(n, write_to(&to, n * 2 * PIECE, None), &[sge(&from, at, PIECE)], true, false);
    }
    g.pair.qa().post_send(&chain).unwrap();
    g.pair.wait(COUNT as usize, 0);
    let (copies, kernels) =
        (g.fake.count("cuMemcpyAsync") - copies, g.fake.count("cuLaunchKernel") - kernels);
    assert!(kernels == 2 && copies == 2, "{copies} copies and {kernels} kernels");
    for n in 0..COUNT {
        let at = ((COUNT - 1 - n) * 2 * PIECE) as usize;
        assert_eq!(contents(&to, n * 2 * PIECE, PIECE as usize), data[at..at + PIECE as usize], "{n}");
    }
}

/// They are pinned on the receiver's account: it says how many there are, and nobody can take them from under it.
#[test]
fn b1_slots_of_another_size_number_or_kind_end_the_connection() {
    const BYTES: u64 = (SHARED_SLOT_BYTES * SHARED_SLOTS) as u64;
    for (what, said, bytes, sealed, twice) in [
        ("none of that", BYTES, BYTES, true, false),
        ("fewer bytes", BYTES - 4096, BYTES - 4096, true, false),
        ("more bytes", 2 * BYTES, 2 * BYTES, true, false),
        ("more bytes than was said", BYTES, 2 * BYTES, true, false),
        ("less than was said", BYTES, BYTES - 4096, true, false),
        ("not sealed", BYTES, BYTES, false, false),
        ("two of them", BYTES, BYTES, true, true),
    ] {
        let mut side = Side::new(SoftTransport::Shm, Profile::Default);
        let (qp, peer) = raw_peer(&side);
        let to = side.region(8192, ALL);
        post(&qp, 5, SendOp::Send { imm: None }, &[]);
        recv(&qp, 1, None);
        peer.lend_slots(9, said, RawPeer::memfd(bytes, sealed).as_fd());
        if twice {
            peer.lend_slots(10, said, RawPeer::memfd(bytes, sealed).as_fd());
        }
        peer.put(&referring(&to, 0, Some(3), &[(9, BYTES - 100, 100)]));
        let deadline = Instant::now() + DEADLINE;
        while side.seen.is_empty() {
            side.poll();
            assert!(Instant::now() < deadline, "not in time: {what}");
        }
        let seen = ids(&side.take());
        if what == "none of that" {
            assert_eq!(seen, [(1, WcStatus::Success)]);
        } else {
            assert_eq!(seen[0], (5, WcStatus::BadResponse), "{what}");
            assert_eq!(qp.state(), QpState::Err, "{what}");
        }
    }
}
