//! K4 aborts travel, K5 deadlines and death, R7 any drop order, through the channel.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_core::Stream;
use landfall::device::Profile;
use landfall::error::DeviceError;
use landfall::kv::{
    AbortReason, ArrivalError, Cause, KvChannel, KvConfig, KvEndpoint, KvPool, Reason, WriteError,
    WriteRequest,
};

use crate::common::{
    On, PATIENCE, Pair, config, fill, layout, on_every_profile, pair, pair_with, until, wrong,
};

on_every_profile!(
    k4_a_dropped_write_aborts_and_the_channel_lives_on,
    k4_a_detached_write_finishes,
    k4_a_revoked_grant_is_aborted_and_its_blocks_come_back,
    k5_a_deadline_that_has_passed_gives_the_blocks_back,
    k5_a_killed_channel_ends_everything_with_a_cause,
    r7_handles_dropped_in_any_order,
    r1_forgotten_futures_keep_their_blocks,
    k5_close_lets_what_is_in_flight_finish,
    k5_durations_beyond_the_clock_are_no_deadline,
    r1_a_waker_may_call_the_channel_when_it_is_dropped,
    r7_a_future_that_gives_up_waiting_leaves_nothing,
);

async fn k4_a_dropped_write_aborts_and_the_channel_lives_on(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 200_000)).await;
    for round in 0..on.rounds(10) {
        let mut source = sender.pool().alloc(32).await.unwrap();
        fill(&mut source, round);
        let grant = receiver.grant(receiver.pool().alloc(32).await.unwrap()).unwrap();
        let write = sender.write(WriteRequest::new(&grant, source));
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        drop(write);
        match receiver.next_arrival().await {
            // It was quicker than the drop.
            Ok(arrival) => assert_eq!(wrong(arrival.blocks(), round, |p| p), 0),
            Err(ArrivalError::Aborted { grant: id, reason }) => {
                assert_eq!(id, grant.id());
                assert!(matches!(reason, AbortReason::Sender(_)), "{reason:?}");
            }
            Err(other) => panic!("{other}"),
        }
        until("both pools to be whole again", || {
            sender.pool().free_blocks() == 64 && receiver.pool().free_blocks() == 64
        })
        .await;
    }
    let mut source = sender.pool().try_alloc(64).unwrap();
    fill(&mut source, 77);
    let grant = receiver.grant(receiver.pool().try_alloc(64).unwrap()).unwrap();
    sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 77, |p| p), 0);
}

async fn k4_a_detached_write_finishes(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 16, 100_000)).await;
    let mut source = sender.pool().try_alloc(16).unwrap();
    fill(&mut source, 3);
    let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
    sender.write(WriteRequest::new(&grant, source)).detach();
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 3, |p| p), 0);
    until("the source to come back", || sender.pool().free_blocks() == 16).await;
}

async fn k4_a_revoked_grant_is_aborted_and_its_blocks_come_back(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 16, 100_000)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
    receiver.revoke(&grant);
    match receiver.next_arrival().await {
        Err(ArrivalError::Aborted { grant: id, reason: AbortReason::Revoked }) => assert_eq!(id, grant.id()),
        other => panic!("{other:?}"),
    }
    until("the granted blocks to come back", || receiver.pool().free_blocks() == 16).await;
    let (refused, _) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(16).unwrap())).await;
    assert!(matches!(refused, Err(WriteError::StaleGrant { .. })), "{refused:?}");
}

async fn k5_a_deadline_that_has_passed_gives_the_blocks_back(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 1 << 20)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(64).unwrap()).unwrap();
    let source = sender.pool().try_alloc(64).unwrap();
    let request = WriteRequest::new(&grant, source).deadline(Duration::from_nanos(1));
    let (ended, source) = sender.write(request).await;
    assert_eq!(Arc::try_unwrap(source).unwrap().len(), 64);
    // What had been posted before the first look at the clock may have landed; then it is not denied.
    match (ended, receiver.next_arrival().await) {
        (Ok(_), Ok(_))
        | (Err(WriteError::NotDelivered(Reason::Deadline)), Err(ArrivalError::Aborted { .. })) => {}
        (ended, arrival) => panic!("{ended:?} and {arrival:?}"),
    }
    until("both pools to be whole again", || {
        sender.pool().free_blocks() == 64 && receiver.pool().free_blocks() == 64
    })
    .await;
    // A healthy queue pair has survived.
    let grant = receiver.grant(receiver.pool().try_alloc(1).unwrap()).unwrap();
    sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(1).unwrap())).await.0.unwrap();
}

async fn k5_a_killed_channel_ends_everything_with_a_cause(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 1 << 20)).await;
    let writes: Vec<_> = (0..32)
        .map(|_| {
            let grant = receiver.grant(receiver.pool().try_alloc(2).unwrap()).unwrap();
            sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(2).unwrap()))
        })
        .collect();
    receiver.kill();
    for write in writes {
        let (ended, source) = write.await;
        match ended {
            Ok(_) | Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(Arc::try_unwrap(source).unwrap().len(), 2);
    }
    assert!(!sender.closed().await.is_graceful());
    assert_eq!(receiver.closed().await.cause(), Cause::Local);
    while receiver.next_arrival().await.is_ok() {}
    assert!(receiver.recv_message().await.is_err());
    until("all blocks to come back", || {
        sender.pool().free_blocks() == 64 && receiver.pool().free_blocks() == 64
    })
    .await;
    let grant = receiver.grant(receiver.pool().try_alloc(1).unwrap());
    assert!(grant.is_err());
}

async fn r7_handles_dropped_in_any_order(on: On) {
    for order in 0..6 {
        let Pair { sender, receiver, sending, receiving, listener } = pair(on, layout(1, 64, 50_000)).await;
        let (pool, target) = (sender.pool().clone(), receiver.pool().clone());
        let writes: Vec<_> = (0..8)
            .map(|_| {
                let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
                sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(8).unwrap()))
            })
            .collect();
        match order {
            0 => drop((writes, sender, receiver, sending, receiving, listener)),
            1 => drop((receiver, writes, sender, sending, receiving, listener)),
            2 => drop((sender, receiver, writes, listener, receiving, sending)),
            3 => drop((sending, receiving, listener, sender, receiver, writes)),
            4 => {
                writes.into_iter().for_each(landfall::kv::Write::detach);
                drop((sender, receiver, sending, receiving, listener));
            }
            _ => {
                sender.kill();
                drop((writes, listener, receiver, sender, receiving, sending));
            }
        }
        until("every block to be free", || pool.free_blocks() == 64 && target.free_blocks() == 64).await;
    }
}

/// CASES 50: `mem::forget` of a future.
async fn r1_forgotten_futures_keep_their_blocks(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 50_000)).await;
    let mut source = sender.pool().try_alloc(8).unwrap();
    fill(&mut source, 9);
    let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
    std::mem::forget(sender.write(WriteRequest::new(&grant, source)));
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 9, |p| p), 0);
    sender.close().await.unwrap();
    // The forgotten write's result was never taken: its blocks are with the channel, not with the pool.
    assert_eq!(sender.pool().free_blocks(), 56);
}

async fn k5_close_lets_what_is_in_flight_finish(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 200_000)).await;
    let mut source = sender.pool().try_alloc(64).unwrap();
    fill(&mut source, 4);
    let grant = receiver.grant(receiver.pool().try_alloc(64).unwrap()).unwrap();
    let write = sender.write(WriteRequest::new(&grant, source));
    let (closed, (landed, source)) = tokio::join!(sender.close(), write);
    closed.unwrap();
    landed.unwrap();
    drop(source);
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 4, |p| p), 0);
    assert!(receiver.closed().await.is_graceful());
    let (refused, _) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(1).unwrap())).await;
    assert!(matches!(refused, Err(WriteError::Closed { .. } | WriteError::StaleGrant { .. })), "{refused:?}");
}

/// R7: the runtime goes away with writes in flight; the reaper finishes, and every future ends.
#[test]
fn r7_a_runtime_that_disappears_ends_every_write() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (pool, target, write) = runtime.block_on(async {
        let Pair { sender, receiver, .. } = pair(Profile::Default, layout(1, 64, 1 << 20)).await;
        let grant = receiver.grant(receiver.pool().try_alloc(64).unwrap()).unwrap();
        let write = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(64).unwrap()));
        (sender.pool().clone(), receiver.pool().clone(), write)
    });
    drop(runtime);
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        let (ended, source) = tokio::time::timeout(PATIENCE, write).await.expect("the write hangs");
        assert!(
            matches!(ended, Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. }) | Ok(_)),
            "{ended:?}"
        );
        drop(source);
        until("every block to be free", || pool.free_blocks() == 64 && target.free_blocks() == 64).await;
    });
}

/// K5 and R9 on a `current_thread` runtime.
#[test]
fn r9_a_current_thread_runtime_is_enough() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for spin in [Duration::ZERO, Duration::from_micros(200)] {
            let config: KvConfig = config().spin(spin);
            let pair = pair_with(Profile::Default, layout(1, 64, 1 << 20), config.clone(), config).await;
            let mut source = pair.sender.pool().try_alloc(64).unwrap();
            fill(&mut source, 6);
            let grant = pair.receiver.grant(pair.receiver.pool().try_alloc(64).unwrap()).unwrap();
            pair.sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
            assert_eq!(wrong(pair.receiver.next_arrival().await.unwrap().blocks(), 6, |p| p), 0);
            pair.sender.close().await.unwrap();
        }
    });
}

async fn k5_durations_beyond_the_clock_are_no_deadline(on: On) {
    let config = || config().deadline(Duration::MAX).connect_timeout(Duration::MAX);
    let Pair { sender, receiver, .. } = pair_with(on, layout(1, 4, 4096), config(), config()).await;
    for deadline in [None, Some(Duration::MAX), Some(Duration::from_secs(u64::MAX / 3))] {
        let grant = receiver.grant(receiver.pool().alloc(2).await.unwrap()).unwrap();
        let mut request = WriteRequest::new(&grant, sender.pool().alloc(2).await.unwrap());
        if let Some(deadline) = deadline {
            request = request.deadline(deadline);
        }
        assert_eq!(sender.write(request).await.0.unwrap().bytes, 8192);
        receiver.next_arrival().await.unwrap();
    }
    let pd = crate::common::device(on).alloc_pd().unwrap();
    let pool = KvPool::new(&pd, layout(1, 4, 4096)).await.unwrap();
    let wrong = [
        KvConfig::default().heartbeat(Duration::MAX),
        KvConfig::default().peer_timeout(Duration::MAX),
        KvConfig::default().abort_grace(Duration::MAX),
    ];
    for config in wrong {
        let error = KvEndpoint::new(pool.clone(), config).unwrap_err();
        assert!(matches!(error, DeviceError::Config { .. }), "{error}");
    }
}

/// A waker that asks the channel something when it is dropped, as a task that owns a channel may.
struct Asks(KvChannel);

impl Wake for Asks {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Asks {
    fn drop(&mut self) {
        assert!(!self.0.path().qps.is_empty());
    }
}

async fn r1_a_waker_may_call_the_channel_when_it_is_dropped(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 200_000)).await;
    let grant = receiver.grant(receiver.pool().alloc(64).await.unwrap()).unwrap();
    let asks = |channel: &KvChannel| Waker::from(Arc::new(Asks(channel.clone())));
    let mut write = pin!(sender.write(WriteRequest::new(&grant, sender.pool().alloc(64).await.unwrap())));
    let mut arrival = pin!(receiver.next_arrival());
    for _ in 0..3 {
        let (of_write, of_arrival) = (asks(&sender), asks(&receiver));
        if write.as_mut().poll(&mut Context::from_waker(&of_write)).is_ready()
            || arrival.as_mut().poll(&mut Context::from_waker(&of_arrival)).is_ready()
        {
            return;
        }
    }
    arrival.await.unwrap();
    write.await.0.unwrap();
}

async fn r7_a_future_that_gives_up_waiting_leaves_nothing(on: On) {
    struct Nothing;
    impl Wake for Nothing {
        fn wake(self: Arc<Self>) {}
    }
    let pair = pair(on, layout(1, 4, 4096)).await;
    let channel = &pair.sender;
    let task = Arc::new(Nothing);
    let waker = Waker::from(task.clone());
    let cx = &mut Context::from_waker(&waker);
    let before = Arc::strong_count(&task);
    for _ in 0..10 {
        assert!(pin!(channel.next_arrival()).poll(cx).is_pending());
        assert!(pin!(channel.recv_message()).poll(cx).is_pending());
        assert!(pin!(channel.closed()).poll(cx).is_pending());
        assert!(pin!(channel.arrivals()).poll_next(cx).is_pending());
    }
    assert_eq!(Arc::strong_count(&task), before, "wakers of futures that are gone");
}
