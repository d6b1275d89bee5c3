//! K1 landed, K2 at most once, K3 order-free, K7 backpressure, K8 limits are sliced, R4 and R9 through the channel.

use landfall::device::Profile;
use landfall::kv::{ArrivalError, KvConfig, WriteError, WriteRequest};

use crate::common::{
    On, Pair, config, endpoint, far_endpoint, fill, layout, on_every_profile, pair, pair_with, qps, until,
    wrong,
};

on_every_profile!(
    k1_landed_means_that_every_byte_is_there,
    k1_local_completion_comes_before_landing,
    k2_one_arrival_for_each_write,
    k3_many_small_transfers_are_never_torn,
    k7_both_directions_at_once,
    k7_messages_that_nobody_takes_hold_the_sender_back,
    k7_a_receiver_that_does_not_run_holds_the_sender_back,
    k8_sizes_around_every_limit,
    k8_one_byte_above_the_limit_is_two_work_requests_and_one_arrival,
    k8_blocks_are_coalesced,
    r4_more_blocks_than_any_queue_holds,
    r9_every_count_of_writes_completes,
    k1_messages_arrive_in_order_and_whole,
    k1_nothing_is_a_transfer_too,
);

async fn k1_landed_means_that_every_byte_is_there(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(3, 64, 5000)).await;
    // Neither the source's nor the target's blocks lie in the order in which they are named.
    let order: Vec<u32> = (0..32).map(|i| (i * 13) % 64).collect();
    let mut source = sender.pool().claim(&order).unwrap();
    fill(&mut source, 1);
    let back: Vec<u32> = (0..32).map(|i| (i * 29 + 7) % 64).collect();
    let grant = receiver.grant(receiver.pool().claim(&back).unwrap()).unwrap();
    let (landed, source) = sender.write(WriteRequest::new(&grant, source).tag(99)).await;
    let landed = landed.unwrap();
    assert_eq!((landed.bytes, landed.descriptors), (3 * 32 * 5000, 3 * 32));
    assert!(landed.wrs >= 1);
    assert_eq!(source.ids().collect::<Vec<_>>(), order);
    let arrival = receiver.next_arrival().await.unwrap();
    assert_eq!((arrival.tag(), arrival.bytes(), arrival.grant()), (99, 3 * 32 * 5000, grant.id()));
    assert_eq!(arrival.blocks().ids().collect::<Vec<_>>(), back);
    assert_eq!(wrong(arrival.blocks(), 1, |p| p), 0);
}

async fn k1_local_completion_comes_before_landing(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 8, 100_000)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
    let (landed, _) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(8).unwrap())).await;
    let landed = landed.unwrap();
    assert!(landed.local <= landed.landed, "{landed:?}");
}

async fn k2_one_arrival_for_each_write(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(2, 128, 700)).await;
    for round in 0..on.rounds(20) {
        let mut writes = Vec::new();
        for tag in 0..4 {
            let mut source = sender.pool().try_alloc(16).unwrap();
            fill(&mut source, round * 4 + tag);
            let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
            writes.push(sender.write(WriteRequest::new(&grant, source).tag(round * 4 + tag)));
        }
        for write in writes {
            write.await.0.unwrap();
        }
        let mut tags = Vec::new();
        for _ in 0..4 {
            let arrival = receiver.next_arrival().await.unwrap();
            assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0);
            tags.push(arrival.tag());
        }
        tags.sort_unstable();
        assert_eq!(tags, (round * 4..round * 4 + 4).collect::<Vec<_>>());
    }
    assert_eq!(receiver.pool().free_blocks(), 128);
    assert_eq!(sender.pool().free_blocks(), 128);
    sender.close().await.unwrap();
    assert!(matches!(receiver.next_arrival().await, Err(ArrivalError::Closed { .. })));
}

/// CASES 8: notifications overtake the payload of other messages.
async fn k3_many_small_transfers_are_never_torn(on: On) {
    let config = KvConfig::default().qps(qps(on, 4));
    let Pair { sender, receiver, .. } = pair_with(on, layout(1, 64, 4096), config.clone(), config).await;
    let transfers = on.rounds(1000);
    let checks = tokio::spawn(async move {
        let mut torn = 0;
        for n in 0..transfers {
            let grant = receiver.grant(receiver.pool().alloc(8).await.unwrap()).unwrap();
            receiver.send_message(grant.to_bytes()).await.unwrap();
            let arrival = receiver.next_arrival().await.unwrap();
            assert_eq!(arrival.tag(), n);
            torn += wrong(arrival.blocks(), n, |p| p);
        }
        (torn, receiver)
    });
    for n in 0..transfers {
        let grant = landfall::kv::Grant::from_bytes(&sender.recv_message().await.unwrap()).unwrap();
        let mut source = sender.pool().try_alloc(8).unwrap();
        fill(&mut source, n);
        sender.write(WriteRequest::new(&grant, source).tag(n)).await.0.unwrap();
    }
    assert_eq!(checks.await.unwrap().0, 0);
}

async fn k7_both_directions_at_once(on: On) {
    let Pair { sender: a, receiver: b, .. } = pair(on, layout(2, 32, 20_000)).await;
    let one_way = |from: landfall::kv::KvChannel, to: landfall::kv::KvChannel, seed: u64| async move {
        for n in 0..30 {
            let grant = to.grant(to.pool().alloc(8).await.unwrap()).unwrap();
            let mut source = from.pool().alloc(8).await.unwrap();
            fill(&mut source, seed + n);
            let (landed, _) = from.write(WriteRequest::new(&grant, source).tag(seed + n)).await;
            landed.unwrap();
            let arrival = to.next_arrival().await.unwrap();
            assert_eq!(wrong(arrival.blocks(), seed + n, |p| p), 0);
        }
    };
    let there = tokio::spawn(one_way(a.clone(), b.clone(), 1000));
    let back = tokio::spawn(one_way(b, a, 2000));
    there.await.unwrap();
    back.await.unwrap();
}

/// A receiver that takes no messages keeps at most a window of them, and the sender waits.
async fn k7_messages_that_nobody_takes_hold_the_sender_back(on: On) {
    const EACH: usize = 1 << 20;
    if on == On::Devices {
        // 80 MiB of messages take minutes in an emulator. What is at stake below the windows is in
        // `k7_a_receiver_that_does_not_run_holds_the_sender_back`.
        return;
    }
    let Pair { sender, receiver, .. } = pair(on, layout(1, 1, 64)).await;
    // More than the windows of both sides hold: 32 MiB are kept by the receiver, 32 MiB queued by the sender.
    let sending = tokio::spawn(async move {
        for n in 0..80u8 {
            sender.send_message(vec![n; EACH]).await.unwrap();
        }
        sender
    });
    for n in 0..80u8 {
        if n == 0 {
            // Nothing is taken: by and by the sender comes to a halt, with some of its messages unsent.
            for _ in 0..2000 {
                tokio::task::yield_now().await;
            }
            assert!(!sending.is_finished(), "80 MiB were accepted although nobody took any");
        }
        let message = receiver.recv_message().await.unwrap();
        assert_eq!((message.len(), message[0], message[EACH - 1]), (EACH, n, n));
    }
    sending.await.unwrap();
}

/// More notifications than the receiver has receives for, while its process stands still: the sender waits for credit. Without
/// it, the transport would run out of patience (RNR), or end the connection (iWARP).
async fn k7_a_receiver_that_does_not_run_holds_the_sender_back(on: On) {
    const WRITES: u32 = 128;
    let config = || config().data_credits(4);
    let apart = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let receiving = apart.spawn(far_endpoint(on, layout(1, WRITES, 3000), config())).await.unwrap();
    let mut listener =
        apart.spawn(async move { receiving.listen(on.any_port_of(1)).await }).await.unwrap().unwrap();
    let sending = endpoint(on, layout(1, WRITES, 3000), config()).await;
    let address = listener.local_addr();
    let accepting = apart.spawn(async move { (listener.accept().await, listener) });
    let sender = sending.connect(address).await.unwrap();
    let (receiver, listener) = accepting.await.unwrap();
    let receiver = receiver.unwrap();
    let grants: Vec<_> =
        (0..WRITES).map(|_| receiver.grant(receiver.pool().try_alloc(1).unwrap()).unwrap()).collect();

    // The only thread that drives the receiver is held.
    let (hold, held) = (std::sync::mpsc::channel::<()>(), tokio::sync::oneshot::channel());
    apart.spawn(async move {
        held.0.send(()).unwrap();
        let _ = hold.1.recv();
    });
    held.1.await.unwrap();
    let writes: Vec<_> = (0u64..)
        .zip(&grants)
        .map(|(tag, grant)| {
            let mut source = sender.pool().try_alloc(1).unwrap();
            fill(&mut source, tag);
            sender.write(WriteRequest::new(grant, source).tag(tag))
        })
        .collect();
    // Where a notification is a SEND of its own, the WRITEs before it need no receive.
    let notified = || {
        let path = sender.path();
        if path.notify == "imm" { path.qps[0].writes } else { path.qps[0].controls }
    };
    until("the sender to post what it has credit for", || notified() > 0).await;
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert!(
        notified() < WRITES.into(),
        "{} were sent to a receiver with room for 4, and 32 messages",
        notified()
    );
    drop(hold.0);
    for write in writes {
        write.await.0.unwrap();
    }
    for _ in 0..WRITES {
        let arrival = receiver.next_arrival().await.unwrap();
        assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0);
    }
    drop((sender, receiver, listener, sending));
    apart.shutdown_background();
}

/// CASES 43: messages around the MTU and the message limit.
async fn k8_sizes_around_every_limit(on: On) {
    for bytes in
        [1, 1023, 1024, 1025, 4097, 65_535, 65_536, 65_537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_001]
    {
        let Pair { sender, receiver, .. } = pair(on, layout(1, 2, bytes)).await;
        let mut source = sender.pool().try_alloc(2).unwrap();
        fill(&mut source, bytes);
        let grant = receiver.grant(receiver.pool().claim(&[1, 0]).unwrap()).unwrap();
        let (landed, _) = sender.write(WriteRequest::new(&grant, source)).await;
        assert_eq!(landed.unwrap().bytes, 2 * bytes);
        let arrival = receiver.next_arrival().await.unwrap();
        assert_eq!(wrong(arrival.blocks(), bytes, |p| p), 0, "{bytes} bytes");
    }
}

/// CASES 43: a message of the limit is one work request, one byte more are two, and either is one arrival.
async fn k8_one_byte_above_the_limit_is_two_work_requests_and_one_arrival(on: On) {
    // A limit that is asked for, and the device's own, where that is not too much to move (rxe has one of 8 MiB).
    for max_write in [1 << 20, u32::MAX] {
        let limit = u64::from(max_write).min(on.caps().max_msg_size);
        if limit > 8 << 20 {
            continue;
        }
        let config = KvConfig::default().max_write(max_write);
        for (bytes, wrs) in [(limit, 1), (limit + 1, 2)] {
            let Pair { sender, receiver, .. } =
                pair_with(on, layout(1, 1, bytes), config.clone(), config.clone()).await;
            let mut source = sender.pool().try_alloc(1).unwrap();
            fill(&mut source, bytes);
            let grant = receiver.grant(receiver.pool().try_alloc(1).unwrap()).unwrap();
            let (landed, _) = sender.write(WriteRequest::new(&grant, source)).await;
            assert_eq!(landed.unwrap().wrs, wrs, "{bytes} bytes, WRITEs of {limit}");
            assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), bytes, |p| p), 0);
            sender.close().await.unwrap();
            assert!(matches!(receiver.next_arrival().await, Err(ArrivalError::Closed { .. })));
        }
    }
}

/// CASES 40: 4,096 contiguous blocks of 4 KiB are at most 8 WRITEs of 2 MiB, where the device allows such.
async fn k8_blocks_are_coalesced(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 4096, 4096)).await;
    let source = sender.pool().try_alloc(4096).unwrap();
    let grant = receiver.grant(receiver.pool().try_alloc(4096).unwrap()).unwrap();
    let (landed, _) = sender.write(WriteRequest::new(&grant, source)).await;
    let landed = landed.unwrap();
    // `tiny` has messages of 64 KiB; its regions of 1 MiB end on multiples of that.
    let most = if on.caps().max_msg_size < 2 << 20 { 256 } else { 8 };
    assert!(landed.wrs <= most, "{} work requests", landed.wrs);
}

/// CASES 28: one call with 18,880 blocks.
async fn r4_more_blocks_than_any_queue_holds(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 18_880, 64)).await;
    // No two neighbours stay neighbours, so that each block is a work request, or an entry of a table.
    let ids: Vec<u32> = (0..18_880).map(|i| (i * 7919) % 18_880).collect();
    let mut source = sender.pool().claim(&ids).unwrap();
    fill(&mut source, 5);
    let grant = receiver.grant(receiver.pool().try_alloc(18_880).unwrap()).unwrap();
    let (landed, _) = sender.write(WriteRequest::new(&grant, source)).await;
    let wrs = landed.unwrap().wrs;
    // A table has 2,048 entries at most; the first ones have fewer, since they travel while the others are made.
    let tables = 18_880_u64.div_ceil(2_048);
    let expected = if on.has_tables() { tables..=tables + 4 } else { 18_880..=18_880 };
    assert!(expected.contains(&wrs), "{wrs} work requests, not {expected:?}");
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 5, |p| p), 0);
}

/// CASES 27: every count from 1 to 64.
async fn r9_every_count_of_writes_completes(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 256)).await;
    for count in 1..=64 {
        let writes: Vec<_> = (0..count)
            .map(|_| {
                let grant = receiver.grant(receiver.pool().try_alloc(1).unwrap()).unwrap();
                sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(1).unwrap()))
            })
            .collect();
        for write in writes {
            write.await.0.unwrap();
        }
        for _ in 0..count {
            receiver.next_arrival().await.unwrap();
        }
    }
}

async fn k1_messages_arrive_in_order_and_whole(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 1, 64)).await;
    let sizes = [0usize, 1, 100, 1023, 1024, 5000, 300_000];
    let sending = tokio::spawn(async move {
        for (n, &size) in sizes.iter().enumerate() {
            sender.send_message((0..size).map(|i| (i + n) as u8).collect()).await.unwrap();
        }
        sender
    });
    for (n, &size) in sizes.iter().enumerate() {
        let message = receiver.recv_message().await.unwrap();
        assert_eq!(message.len(), size);
        assert!(message.iter().enumerate().all(|(i, &b)| b == (i + n) as u8));
    }
    let sender = sending.await.unwrap();
    let too_long = sender.send_message(vec![0; (16 << 20) + 1]).await.unwrap_err().to_string();
    assert!(too_long.contains("16777217") && too_long.contains("16777216"), "{too_long}");
}

/// CASES 43: 0 bytes are Ok, and one arrival.
async fn k1_nothing_is_a_transfer_too(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 4, 64)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(2).unwrap()).unwrap();
    let (landed, _) =
        sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(0).unwrap()).tag(4)).await;
    assert_eq!(landed.unwrap().bytes, 0);
    let arrival = receiver.next_arrival().await.unwrap();
    assert_eq!((arrival.bytes(), arrival.tag()), (0, 4));
    // Used all the same.
    let (again, _) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(0).unwrap())).await;
    assert!(matches!(again, Err(WriteError::StaleGrant { .. })), "{again:?}");
}

/// What a small write finds before it, beside a large one: a window, whatever the queues could hold.
#[tokio::test]
async fn k7_what_is_posted_ahead_of_a_small_write_is_bounded() {
    for on in [On::Soft(Profile::Default), On::Shm(Profile::Default)] {
        let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 1 << 20)).await;
        let grant = receiver.grant(receiver.pool().try_alloc(64).unwrap()).unwrap();
        let write = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(64).unwrap()));
        // Nothing else runs on this runtime before it is awaited.
        let ahead: u64 = sender.path().qps.iter().map(|qp| qp.bytes_written).sum();
        assert!((2 << 20..=6 << 20).contains(&ahead), "{ahead} bytes are posted at once");
        write.await.0.unwrap();
    }
}
