//! R4: no queue is overrun. R5: a completion reaches its own operation or none.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use landfall::device::Profile;
use landfall::error::{OpError, QpError};
use landfall::ring::{CompletionQueue, CqConfig, Op, QpConfig, QueuePair};

use crate::harness::*;

on_every_profile!(
    r4_a_thousand_operations_wait_for_room_in_a_queue_of_sixteen,
    r4_push_wait_waits_for_room_and_push_says_full,
    r1_a_push_wait_that_is_dropped_before_its_turn_submits_nothing,
    r2_a_push_wait_that_is_dropped_after_its_turn_has_its_completion,
    r4_a_completion_queue_that_is_too_small_is_refused_with_the_sizes,
    r5_completions_of_a_destroyed_queue_pair_match_nothing,
);

async fn r4_a_thousand_operations_wait_for_room_in_a_queue_of_sixteen(on: On) {
    let pair = Pair::new(on, 16).await;
    let target = pair.b.exposed(64).await;
    let source = pair.a.exposed(64).await;
    let writes: Vec<_> =
        (0..1000).map(|_| pair.a.qp.write(source.slice(..).unwrap(), target.remote().whole())).collect();
    for write in writes {
        assert_eq!(write.await.0.unwrap().bytes, 64);
    }
    let stats = pair.a.cq.stats();
    assert_eq!((stats.completions, stats.stale), (1000, 0));
    // Where another thread takes completions meanwhile, and they come at once, fewer may be outstanding.
    assert!((1..=16).contains(&stats.peak_outstanding), "{stats:?}");
}

async fn r4_push_wait_waits_for_room_and_push_says_full(on: On) {
    let pair = Pair::new(on, 16).await;
    let target = pair.b.exposed(64).await;
    let source = pair.a.exposed(64).await;
    let op = |i| Op::write(source.slice(..).unwrap(), target.remote().whole()).user_data(i);
    let mut batch = pair.a.qp.batch();
    for i in 0..16 {
        batch.push(op(i)).unwrap();
    }
    let full = batch.push(op(99)).unwrap_err();
    assert!(matches!(full.error, OpError::Full { queue: "send", depth: 16, .. }), "{}", full.error);
    assert!(full.op.into_buf().is_some());
    // 32 entries: 32 completions can be left untaken.
    for i in 16..32 {
        batch.push_wait(op(i)).await.unwrap();
    }
    let full = batch.push_wait(op(99)).await.unwrap_err();
    assert!(matches!(full.error, OpError::Full { queue: "completion", depth: 32, .. }), "{}", full.error);
    batch.submit();
    let mut sum = 0;
    for _ in 0..32 {
        let done = pair.a.cq.next().await.unwrap();
        done.result.unwrap();
        sum += done.user_data;
    }
    assert_eq!(sum, (0..32).sum::<u64>());
    assert_eq!(pair.a.cq.stats().peak_outstanding, 16);
    for i in 0..16 {
        drop(pair.a.qp.try_submit(op(i)).unwrap());
    }
}

/// Whatever else it waits for: a call that has not returned has added nothing to its batch.
async fn r1_a_push_wait_that_is_dropped_before_its_turn_submits_nothing(on: On) {
    let pair = Pair::new(on, 16).await;
    let target = pair.b.exposed(64).await;
    let source = pair.a.exposed(64).await;
    let op = |i| Op::write(source.slice(..).unwrap(), target.remote().whole()).user_data(i);
    let mut batch = pair.a.qp.batch();
    // A task that has used up its share of this turn.
    poll_fn(|cx| {
        while let Poll::Ready(share) = tokio::task::coop::poll_proceed(cx) {
            share.made_progress();
        }
        assert!(pin!(batch.push_wait(op(1))).poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    assert!(batch.is_empty());
    batch.push(op(2)).unwrap();
    assert_eq!(batch.submit(), 1);
    assert_eq!(pair.a.cq.next().await.unwrap().user_data, 2);
    assert_eq!(pair.a.cq.stats().completions, 1);
}

/// It has got room while its task did something else, and then the call is dropped.
async fn r2_a_push_wait_that_is_dropped_after_its_turn_has_its_completion(on: On) {
    let pair = Pair::new(on, 16).await;
    let target = pair.b.exposed(64).await;
    let source = pair.a.exposed(64).await;
    let op = |i| Op::write(source.slice(..).unwrap(), target.remote().whole()).user_data(i);
    let mut batch = pair.a.qp.batch();
    for i in 0..16 {
        batch.push(op(i)).unwrap();
    }
    {
        let mut waits = pin!(batch.push_wait(op(16)));
        let first = poll_fn(|cx| Poll::Ready(waits.as_mut().poll(cx))).await;
        assert!(first.is_pending());
        while pair.a.cq.stats().completions < 17 {
            tokio::task::yield_now().await;
        }
    }
    let mut ended = Vec::new();
    for _ in 0..17 {
        ended.push(pair.a.cq.next().await.unwrap().user_data);
    }
    ended.sort_unstable();
    assert!(ended.into_iter().eq(0..17));
}

async fn r4_a_completion_queue_that_is_too_small_is_refused_with_the_sizes(on: On) {
    let device = device(on);
    let pd = device.alloc_pd().unwrap();
    let cq = CompletionQueue::new(&device, CqConfig::new(40)).unwrap();
    let config = || QpConfig::new(8, 8);
    let first = QueuePair::new(&pd, &cq, &cq, config()).unwrap();
    let _second = QueuePair::new(&pd, &cq, &cq, config()).unwrap();
    match QueuePair::new(&pd, &cq, &cq, config()).unwrap_err() {
        QpError::CqTooSmall { capacity: 40, committed: 32, asked: 16, send: 8, recv: 8, needed: 48 } => {}
        other => panic!("{other:?}"),
    }
    first.close().await;
    QueuePair::new(&pd, &cq, &cq, config()).unwrap();
    let too_deep = QpConfig::new(device.capabilities().max_qp_wr + 1, 1);
    assert!(matches!(QueuePair::new(&pd, &cq, &cq, too_deep).unwrap_err(), QpError::Limit { .. }));
}

/// Eight queue pairs on a queue that is just large enough, while nobody polls: submitters wait, nothing is lost.
#[test]
fn r4_a_queue_that_is_just_large_enough_is_never_overrun() {
    run(false, async {
        let device = device(Profile::ErdmaCompat);
        let (pa, pb) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
        let cq = || CompletionQueue::new(&device, CqConfig::new(8 * 8)).unwrap();
        let (ca, cb) = (cq(), cq());
        let target = pb
            .register_exposed(landfall::memory::Memory::anonymous(64), landfall::memory::Access::WRITE)
            .await
            .unwrap();
        let source = pa
            .register_exposed(landfall::memory::Memory::anonymous(64), landfall::memory::Access::READ)
            .await
            .unwrap();
        let mut pairs = Vec::new();
        for _ in 0..8 {
            let a = QueuePair::new(&pa, &ca, &ca, QpConfig::new(4, 4)).unwrap();
            let b = QueuePair::new(&pb, &cb, &cb, QpConfig::new(4, 4)).unwrap();
            connect(&a, &b).await;
            pairs.push((a, b));
        }
        // The only thread is here: no driver runs until the first await.
        let mut writes = Vec::new();
        for _ in 0..100 {
            for (a, _) in &pairs {
                writes.push(a.write(source.slice(..).unwrap(), target.remote().whole()));
            }
        }
        for write in writes {
            write.await.0.unwrap();
        }
        assert_eq!((ca.stats().completions, ca.stats().peak_outstanding), (800, 32));
    });
}

async fn r5_completions_of_a_destroyed_queue_pair_match_nothing(on: On) {
    let device = device(on);
    let a = Side::new(&device, 8, Default::default());
    let Side { pd, cq, qp, .. } = a;
    let number = qp.qp_num();
    // Eight receives are in flight when the queue pair is destroyed.
    let source = pd.register_local(landfall::memory::Memory::anonymous(64)).await.unwrap().into_slice();
    let old: Vec<_> = split(source, 8, 8).into_iter().map(|part| qp.recv(part)).collect();
    qp.kill();
    for (i, op) in old.into_iter().enumerate() {
        let (result, buf) = op.await;
        assert!(matches!(result, Err(OpError::Closed { .. })), "{result:?}");
        assert_eq!(buf[..], [i as u8; 8]);
    }
    let next = loop {
        match QueuePair::new(&pd, &cq, &cq, QpConfig::new(8, 8)) {
            Ok(qp) => break qp,
            // Until the stale completions have been taken, their entries are not given out again.
            Err(QpError::CqTooSmall { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other:?}"),
        }
    };
    let new: Vec<_> = (0..8).map(|_| next.recv(())).collect();
    // A driver may give another number, and may drop what it has of a destroyed queue pair.
    if on.profile().is_some() {
        assert_eq!(next.qp_num(), number, "the soft provider hands the number out again");
        // With one thread no driver ran between the flush and the destruction: all eight are stale. With several it
        // may have taken some in time.
        until(|| cq.stats().stale + cq.stats().completions >= 8).await;
        let (stats, flavor) = (cq.stats(), tokio::runtime::Handle::current().runtime_flavor());
        if flavor == tokio::runtime::RuntimeFlavor::CurrentThread {
            assert_eq!((stats.stale, stats.completions), (8, 0));
        }
        assert_eq!(stats.stale + stats.completions, 8, "a foreign completion was matched");
    }
    next.close().await;
    for op in new {
        assert!(matches!(op.await.0, Err(OpError::Closed { .. })));
    }
}
