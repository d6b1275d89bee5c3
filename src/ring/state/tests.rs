//! The ring's state against a device that is a list of ids.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use super::super::completion::Opcode;
use super::super::slots::WrKind;
use super::*;
use crate::provider::{Cqe, SendOp, Sge, WcStatus};

type TestRing = Ring<u32, Vec<u8>>;
type TestFx = Effects<u32, Vec<u8>>;

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn counter() -> (std::sync::Arc<Count>, Waker) {
    let count = std::sync::Arc::new(Count(AtomicUsize::new(0)));
    (count.clone(), Waker::from(count))
}

fn tie(generation: u32) -> Arc<Tie> {
    Arc::new(Tie {
        qp_num: 7,
        generation,
        cause: FirstCause::new(),
        closing: AtomicBool::new(false),
        shared: false,
    })
}

fn wr() -> Wr {
    let op = SendOp::Write { remote_addr: 0, rkey: 0, imm: None };
    Wr { kind: WrKind::Send(op), sge: Some(Sge { addr: 0, len: 3, lkey: 0 }), device: false }
}

fn cqe(wr_id: u64, status: WcStatus) -> Cqe {
    Cqe { wr_id, status, ..Cqe::default() }
}

fn ring(depth: u32) -> (TestRing, HalfId, Arc<Tie>) {
    let (mut ring, tie) = (TestRing::new(64), tie(1));
    let half = ring.reserve(false, depth).unwrap();
    ring.bind(half, 0, tie.clone());
    (ring, half, tie)
}

fn submit(ring: &mut TestRing, half: HalfId, tie: &Tie, n: u8) -> Submitted {
    ring.submit(half, tie, wr(), Owner::Future(None), Some(vec![n]), WhenFull::Wait).unwrap()
}

fn posted(submitted: Submitted) -> (Key, u64) {
    match submitted {
        Submitted::Post(key, id) => (key, id),
        Submitted::Queued(key) => panic!("{key:?} was queued"),
    }
}

#[test]
fn r1_a_dropped_future_leaves_the_buffer_until_the_completion() {
    let (mut ring, half, tie) = ring(4);
    let mut fx = TestFx::default();
    let (key, id) = posted(submit(&mut ring, half, &tie, 1));
    ring.abandon_op(key, &mut fx);
    assert!(fx.bufs.is_empty(), "the device still has it");
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    assert_eq!(fx.bufs, [[1]]);
    // The slot is free: the same id again is stale.
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    assert_eq!((ring.stats.completions, ring.stats.stale), (1, 1));
}

#[test]
fn r2_a_future_gets_its_result_and_its_buffer_once() {
    let (mut ring, half, tie) = ring(4);
    let mut fx = TestFx::default();
    let (count, waker) = counter();
    let (key, id) = posted(submit(&mut ring, half, &tie, 9));
    assert!(ring.poll_op(key, &waker, &mut fx).is_none());
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    assert_eq!(count.0.load(Ordering::SeqCst), 0, "wakers fire after the lock");
    fx.fire();
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    let (result, buf) = ring.poll_op(key, &waker, &mut fx).unwrap();
    assert_eq!(result.unwrap(), Completed { opcode: Opcode::Write, bytes: 3, imm: None, qp_num: 0 });
    assert_eq!(buf.unwrap(), [9]);
}

#[test]
fn r4_a_queue_never_has_more_than_its_depth_and_serves_in_order() {
    let (mut ring, half, tie) = ring(2);
    let mut fx = TestFx::default();
    let first: Vec<u64> = (0..2).map(|n| posted(submit(&mut ring, half, &tie, n)).1).collect();
    let queued: Vec<Key> = (2..6)
        .map(|n| match submit(&mut ring, half, &tie, n) {
            Submitted::Queued(key) => key,
            Submitted::Post(..) => panic!("posted above the depth"),
        })
        .collect();
    assert_eq!(ring.room(half), 0);
    assert!(ring.next_queued(half, &mut fx).is_none());
    // A dropped waiter holds nobody up, and its buffer is free at once.
    ring.abandon_op(queued[0], &mut fx);
    assert_eq!(fx.bufs.pop().unwrap(), [2]);
    ring.complete(&cqe(first[0], WcStatus::Success), &mut fx);
    assert_eq!(fx.attention, [(0, false)]);
    ring.served(half);
    assert_eq!(ring.next_queued(half, &mut fx).unwrap().0, queued[1]);
    assert!(ring.next_queued(half, &mut fx).is_none());
    ring.complete(&cqe(first[1], WcStatus::Success), &mut fx);
    assert_eq!(ring.next_queued(half, &mut fx).unwrap().0, queued[2]);
    assert_eq!(ring.stats.peak_outstanding, 2);
}

#[test]
fn r4_a_small_completion_queue_refuses_and_says_what_there_is() {
    let mut ring = TestRing::new(16);
    let a = ring.reserve(false, 8).unwrap();
    ring.reserve(true, 8).unwrap();
    assert_eq!(ring.reserve(false, 1).unwrap_err(), NoEntries::TooSmall { capacity: 16, committed: 16 });
    ring.release(a, false);
    ring.reserve(false, 8).unwrap();
    assert!(ring.reserve(false, u32::MAX).is_err());
}

#[test]
fn r4_entries_of_a_killed_queue_pair_come_back_after_an_empty_poll() {
    let mut ring = TestRing::new(8);
    let a = ring.reserve(false, 8).unwrap();
    ring.release(a, true);
    assert!(ring.reserve(false, 8).is_err(), "stale completions may still be in the queue");
    ring.polled_empty();
    ring.reserve(false, 8).unwrap();
}

#[test]
fn r5_a_completion_of_a_destroyed_queue_pair_is_stale() {
    let (mut ring, half, first) = ring(8);
    let mut fx = TestFx::default();
    let ops: Vec<(Key, u64)> = (0..8).map(|n| posted(submit(&mut ring, half, &first, n))).collect();
    ring.fail_posted(half, &OpError::Closed { qp_num: 7 }, &mut fx);
    ring.release(half, true);
    // The next queue pair has the same number, the same half and the same slots.
    let second = tie(2);
    let next = ring.reserve(false, 8).unwrap();
    ring.bind(next, 1, second.clone());
    assert_ne!(half, next);
    let waker = Waker::noop();
    ops.iter().for_each(|(key, _)| assert!(ring.poll_op(*key, waker, &mut fx).unwrap().0.is_err()));
    let live: Vec<(Key, u64)> = (0..8).map(|n| posted(submit(&mut ring, next, &second, n))).collect();
    ops.iter().for_each(|(_, id)| ring.complete(&cqe(*id, WcStatus::Success), &mut fx));
    assert_eq!((ring.stats.stale, ring.stats.completions), (8, 0));
    assert!(live.iter().all(|(key, _)| !ring.is_done(*key)));
    // Calls with the old half reach nothing.
    assert!(ring.next_queued(half, &mut fx).is_none() && ring.release(half, false).is_none());
}

#[test]
fn r5_the_queue_pair_generation_counts() {
    let (mut ring, half, tie) = ring(8);
    let mut fx = TestFx::default();
    let (key, id) = posted(submit(&mut ring, half, &tie, 0));
    let foreign = WrId { qp_generation: 2, ..WrId::decode(id) };
    ring.complete(&cqe(foreign.encode(), WcStatus::Success), &mut fx);
    assert_eq!((ring.stats.stale, ring.is_done(key)), (1, false));
}

#[test]
fn r6_what_is_queued_and_what_comes_later_ends_with_the_first_cause() {
    let (mut ring, half, tie) = ring(1);
    let mut fx = TestFx::default();
    let waker = Waker::noop();
    let (key, id) = posted(submit(&mut ring, half, &tie, 0));
    let Submitted::Queued(queued) = submit(&mut ring, half, &tie, 1) else {
        panic!("posted above the depth")
    };
    ring.complete(&cqe(id, WcStatus::RemoteAccess), &mut fx);
    ring.end_queued(half, &mut fx);
    let failed = ring.poll_op(key, waker, &mut fx).unwrap().0.unwrap_err();
    assert!(matches!(failed, OpError::Status { status: WcStatus::RemoteAccess, .. }), "{failed:?}");
    let (flushed, buf) = ring.poll_op(queued, waker, &mut fx).unwrap();
    assert!(matches!(flushed, Err(OpError::Flushed { cause: Some(_), .. })), "{flushed:?}");
    assert_eq!(buf.unwrap(), [1]);
    let refused =
        ring.submit(half, &tie, wr(), Owner::Future(None), Some(vec![2]), WhenFull::Wait).unwrap_err();
    assert!(matches!(refused, (OpError::Flushed { cause: Some(_), .. }, Some(_))));
}

#[test]
fn r2_tagged_operations_end_in_the_completions_and_keep_their_room() {
    let (mut ring, half, tie) = ring(4);
    let mut fx = TestFx::default();
    let (count, waker) = counter();
    ring.wait_ready(&waker);
    ring.wait_ready(&waker);
    let owner = Owner::Tagged { user_data: 42, submitter: None };
    let (_, id) = posted(ring.submit(half, &tie, wr(), owner, Some(vec![5]), WhenFull::Wait).unwrap());
    assert_eq!(ring.tagged_room(), 63);
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    fx.fire();
    assert_eq!((count.0.load(Ordering::SeqCst), ring.tagged_room()), (1, 63));
    ring.closed = true;
    assert!(!ring.is_over(), "a completion is left");
    let (user_data, result, buf) = ring.take_ready().unwrap();
    assert_eq!((user_data, result.is_ok(), buf), (42, true, Some(vec![5])));
    assert!(ring.is_over());
}

#[test]
fn r2_a_cancelled_submitter_is_never_posted() {
    let (mut ring, half, tie) = ring(1);
    let mut fx = TestFx::default();
    let (_, id) = posted(submit(&mut ring, half, &tie, 0));
    let owner = Owner::Tagged { user_data: 1, submitter: None };
    let Ok(Submitted::Queued(key)) = ring.submit(half, &tie, wr(), owner, Some(vec![1]), WhenFull::Wait)
    else {
        panic!("not queued")
    };
    assert!(!ring.poll_posted(key, Waker::noop(), &mut fx));
    ring.cancel_queued(key, &mut fx);
    assert_eq!(fx.bufs.len(), 1);
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    assert!(ring.next_queued(half, &mut fx).is_none());
    assert!(ring.is_drained(half) && ring.take_ready().is_none());
    assert_eq!(ring.tagged_room(), 64);
}

#[test]
fn r7_a_closing_half_asks_for_attention_until_it_is_drained() {
    let (mut ring, half, tie) = ring(2);
    let mut fx = TestFx::default();
    let ids: Vec<u64> = (0..2).map(|n| posted(submit(&mut ring, half, &tie, n)).1).collect();
    tie.closing.store(true, Ordering::SeqCst);
    ring.complete(&cqe(ids[0], WcStatus::Success), &mut fx);
    assert!(!ring.is_drained(half));
    assert_eq!(fx.attention.len(), 1);
    ring.served(half);
    ring.complete(&cqe(ids[1], WcStatus::Flushed), &mut fx);
    assert!(ring.is_drained(half) && ring.all_drained());
    assert_eq!(fx.attention.len(), 2);
}

/// A receive of a shared queue, which came by a queue pair of a number that was given out again.
#[test]
fn r5_a_failure_is_never_blamed_on_the_next_queue_pair_of_the_same_number() {
    let mut ring = TestRing::new(64);
    let mut fx = TestFx::default();
    let queue = Arc::new(Tie {
        qp_num: 0,
        generation: 1,
        cause: FirstCause::new(),
        closing: AtomicBool::new(false),
        shared: true,
    });
    let shared = ring.reserve(true, 8).unwrap();
    ring.bind(shared, 0, queue.clone());
    let recv = Wr { kind: WrKind::Recv, sge: None, device: false };
    let mut fails = |ring: &mut TestRing| {
        let (_, id) =
            posted(ring.submit(shared, &queue, recv, Owner::Future(None), None, WhenFull::Wait).unwrap());
        ring.complete(&Cqe { qp_num: 7, ..cqe(id, WcStatus::LocalLength) }, &mut fx);
    };
    let attached = |ring: &mut TestRing, generation| {
        let (half, tie) = (ring.reserve(true, 0).unwrap(), tie(generation));
        ring.bind(half, 1, tie.clone());
        (half, tie)
    };
    let (half, first) = attached(&mut ring, 2);
    ring.release(half, true);
    let (half, second) = attached(&mut ring, 3);
    fails(&mut ring);
    assert!(first.cause.get().is_none() && second.cause.get().is_none() && queue.cause.get().is_none());
    // Once the queue was seen empty it can be of the second only.
    ring.polled_empty();
    fails(&mut ring);
    assert!(second.cause.get().is_some() && queue.cause.get().is_none());
    ring.release(half, false);
    assert!(!ring.is_drained(shared) || ring.stats.stale == 0);
}

#[test]
fn r4_a_call_that_does_not_wait_is_refused_where_another_would_wait() {
    let (mut ring, half, tie) = ring(1);
    let mut fx = TestFx::default();
    let now = |ring: &mut TestRing| {
        ring.submit(half, &tie, wr(), Owner::Future(None), Some(vec![9]), WhenFull::Refuse)
    };
    let (_, id) = posted(now(&mut ring).unwrap());
    let (error, buf) = now(&mut ring).unwrap_err();
    assert!(matches!(error, OpError::Full { qp_num: 7, queue: "send", depth: 1 }), "{error}");
    assert_eq!(buf.unwrap(), [9]);
    // Those who wait are before it, also when the credit is back.
    let Submitted::Queued(waiting) = submit(&mut ring, half, &tie, 1) else {
        panic!("posted above the depth")
    };
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    assert!(matches!(now(&mut ring), Err((OpError::Full { .. }, Some(_)))));
    let (key, id, _) = ring.next_queued(half, &mut fx).unwrap();
    assert_eq!(key, waiting);
    ring.complete(&cqe(id, WcStatus::Success), &mut fx);
    posted(now(&mut ring).unwrap());
}

/// A peer that takes nothing, and a program that gives up on each receive and tries again.
#[test]
fn r4_waiters_that_give_up_hold_no_slots() {
    let (mut ring, half, tie) = ring(4);
    let mut fx = TestFx::default();
    for n in 0..4 {
        posted(submit(&mut ring, half, &tie, n));
    }
    for turn in 0..100_000 {
        let Submitted::Queued(key) = submit(&mut ring, half, &tie, 0) else {
            panic!("posted above the depth")
        };
        assert_eq!(key.index, 4, "turn {turn} takes another slot");
        ring.abandon_op(key, &mut fx);
        assert!(fx.bufs.pop().is_some() && fx.bufs.is_empty());
    }
}

/// Waiters leave from the front, the middle and the end of the queue, among others that stay.
#[test]
fn r4_waiters_that_leave_keep_the_order_of_the_others() {
    for leaving in 0..1u32 << 5 {
        let (mut ring, half, tie) = ring(1);
        let mut fx = TestFx::default();
        let (_, mut id) = posted(submit(&mut ring, half, &tie, 0));
        let waiting: Vec<Key> = (0..5)
            .map(|n| match submit(&mut ring, half, &tie, n) {
                Submitted::Queued(key) => key,
                Submitted::Post(..) => panic!("posted above the depth"),
            })
            .collect();
        let (left, mut stay): (Vec<_>, Vec<_>) =
            waiting.into_iter().enumerate().partition(|(n, _)| leaving & 1 << n != 0);
        left.into_iter().rev().for_each(|(_, key)| ring.abandon_op(key, &mut fx));
        // One more comes behind them.
        let Submitted::Queued(last) = submit(&mut ring, half, &tie, 9) else { panic!("overtakes") };
        stay.push((9, last));
        for (n, key) in stay {
            ring.complete(&cqe(id, WcStatus::Success), &mut fx);
            let next = ring.next_queued(half, &mut fx).unwrap();
            assert_eq!(next.0, key, "leaving {leaving:05b}: not the turn of {n}");
            id = next.1;
        }
        ring.complete(&cqe(id, WcStatus::Success), &mut fx);
        assert!(ring.next_queued(half, &mut fx).is_none() && ring.is_drained(half));
    }
}

/// A buffer whose drop panics, unless it is a good one.
struct Owned {
    good: Option<std::sync::Arc<Count>>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        let good = self.good.as_ref().expect("an owner that panics");
        good.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct PanicsWhenWoken;

impl Wake for PanicsWhenWoken {
    fn wake(self: std::sync::Arc<Self>) {
        panic!("a waker that panics");
    }
}

struct PanicsWhenDropped;

impl Wake for PanicsWhenDropped {
    fn wake(self: std::sync::Arc<Self>) {}
}

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("a waker whose drop panics");
    }
}

#[test]
fn r3_a_waker_or_a_buffer_that_panics_keeps_nobody_from_being_woken() {
    let mut fx = Effects::<u32, Owned>::default();
    let ((woken, waker), (dropped, _)) = (counter(), counter());
    let woken_badly = || Waker::from(std::sync::Arc::new(PanicsWhenWoken));
    let dropped_badly = || Waker::from(std::sync::Arc::new(PanicsWhenDropped));
    fx.wakers.extend([woken_badly(), waker.clone(), dropped_badly(), waker]);
    fx.replaced.extend([dropped_badly(), dropped_badly()]);
    let good = || Owned { good: Some(dropped.clone()) };
    fx.bufs.extend([Owned { good: None }, good(), Owned { good: None }, good()]);
    fx.fire();
    assert_eq!((woken.0.load(Ordering::SeqCst), dropped.0.load(Ordering::SeqCst)), (2, 2));
    assert!(fx.is_empty());
}

/// The number is given out again as soon as the queue pair is destroyed, which is before its half is released.
#[test]
fn r5_a_number_that_comes_back_before_the_half_is_released_is_in_doubt_and_then_the_next_one_s() {
    let (mut ring, mut fx) = (TestRing::new(64), TestFx::default());
    let shared_tie = Arc::new(Tie { shared: true, ..Arc::into_inner(tie(1)).unwrap() });
    let shared = ring.reserve(true, 8).unwrap();
    ring.bind(shared, 0, shared_tie.clone());
    let recv = Wr { kind: WrKind::Recv, sge: None, device: false };
    let mut fails = |ring: &mut TestRing| {
        let submitted =
            ring.submit(shared, &shared_tie, recv, Owner::Future(None), None, WhenFull::Wait).unwrap();
        let failed = cqe(posted(submitted).1, WcStatus::LocalLength);
        ring.complete(&Cqe { qp_num: 7, ..failed }, &mut fx);
    };
    let [(first_half, first), (second_half, second)] = [2, 3].map(|generation| {
        let (half, tie) = (ring.reserve(true, 0).unwrap(), tie(generation));
        ring.bind(half, 1, tie.clone());
        (half, tie)
    });
    fails(&mut ring);
    ring.release(first_half, true);
    fails(&mut ring);
    assert!(first.cause.get().is_none() && second.cause.get().is_none());
    ring.polled_empty();
    fails(&mut ring);
    assert!(first.cause.get().is_none() && second.cause.get().is_some());
    ring.release(second_half, true);
    ring.polled_empty();
    fails(&mut ring);
    assert!(shared_tie.cause.get().is_none(), "of nobody");
}
