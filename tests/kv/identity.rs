//! K6 epochs and grants, K2 in doubt and resolved, K9 the path is known, R10 refused before anything is posted.

use landfall::device::Profile;
use landfall::kv::{
    GrantRefusal, KvChannel, KvConfig, KvEndpoint, KvPool, PeerIdentity, PoolAccess, PoolError, Resolution,
    WriteError, WriteRequest,
};
use landfall::memory::Memory;

use crate::common::{On, Pair, config, device, endpoint, fill, layout, on_every_profile, pair, until, wrong};

on_every_profile!(
    k6_a_grant_is_used_once,
    k6_grants_of_another_life_are_refused,
    k6_a_channel_revokes_its_own_grants_only,
    r10_positions_out_of_range_are_refused,
    k9_the_path_counts_every_byte,
    k2_a_reconnect_resolves_what_was_in_doubt,
);

fn posted(channel: &KvChannel) -> u64 {
    channel.path().qps.iter().map(|qp| qp.writes).sum()
}

/// CASES 4: replay a consumed grant.
async fn k6_a_grant_is_used_once(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 8, 1000)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
    let (landed, source) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(4).unwrap())).await;
    landed.unwrap();
    let before = posted(&sender);
    let (refused, source) = sender.write(WriteRequest::new(&grant, source)).await;
    assert!(matches!(refused, Err(WriteError::StaleGrant { grant: id }) if id == grant.id()), "{refused:?}");
    assert_eq!(posted(&sender), before);
    // Also as a copy that has travelled.
    let copy = landfall::kv::Grant::from_bytes(&grant.to_bytes()).unwrap();
    let (refused, _) = sender.write(WriteRequest::new(&copy, source)).await;
    assert!(matches!(refused, Err(WriteError::StaleGrant { .. })), "{refused:?}");
    let stats = sender.stats();
    assert_eq!((stats.landed, stats.refused, stats.not_delivered), (1, 2, 0));
    receiver.next_arrival().await.unwrap();
    assert_eq!(receiver.stats().arrived, 1);
}

async fn k6_grants_of_another_life_are_refused(on: On) {
    let first = pair(on, layout(1, 8, 1000)).await;
    let second = pair(on, layout(1, 8, 1000)).await;
    let grant = first.receiver.grant(first.receiver.pool().try_alloc(4).unwrap()).unwrap();
    let source = second.sender.pool().try_alloc(4).unwrap();
    let (refused, source) = second.sender.write(WriteRequest::new(&grant, source)).await;
    assert!(
        matches!(refused, Err(WriteError::PeerRestarted { grant, peer })
            if grant == first.receiving.epoch() && peer == second.receiving.epoch()),
        "{refused:?}"
    );
    assert_eq!(posted(&second.sender), 0);
    // A third endpoint connects to the same receiver: the grant of the first is not for it.
    let third = endpoint(on, layout(1, 8, 1000), config()).await;
    let third = third.connect(first.listener.local_addr()).await.unwrap();
    let (refused, _) = third.write(WriteRequest::new(&grant, third.pool().try_alloc(4).unwrap())).await;
    assert!(matches!(refused, Err(WriteError::NotOurs { .. })), "{refused:?}");
    // Nor are another pool's blocks.
    let (refused, _) = first.sender.write(WriteRequest::new(&grant, source)).await;
    assert!(matches!(refused, Err(WriteError::ForeignBlocks)), "{refused:?}");
    let (landed, _) =
        first.sender.write(WriteRequest::new(&grant, first.sender.pool().try_alloc(4).unwrap())).await;
    landed.unwrap();
}

/// Grants are numbered by each issuer, so that numbers alone would confuse them.
async fn k6_a_channel_revokes_its_own_grants_only(on: On) {
    let first = pair(on, layout(1, 8, 1000)).await;
    let second = pair(on, layout(1, 8, 1000)).await;
    let issue = |channel: &KvChannel| channel.grant(channel.pool().try_alloc(2).unwrap()).unwrap();
    let grants = [&first.receiver, &first.sender, &second.receiver].map(issue);
    assert!(grants.iter().all(|g| g.id() == grants[0].id()));
    // The peer's, and another channel's, under the same number.
    first.receiver.revoke(&grants[1]);
    first.receiver.revoke(&grants[2]);
    let source = first.sender.pool().try_alloc(2).unwrap();
    first.sender.write(WriteRequest::new(&grants[0], source)).await.0.unwrap();
    first.receiver.next_arrival().await.unwrap();
}

/// CASES 4: a block index out of range.
async fn r10_positions_out_of_range_are_refused(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(1, 8, 1000)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
    let mut source = sender.pool().try_alloc(4).unwrap();
    fill(&mut source, 1);
    let bad =
        |pairs: &[(u32, u32)], source| sender.write(WriteRequest::new(&grant, source).pairs(pairs.to_vec()));
    let (refused, source) = bad(&[(0, 0), (1, 4)], std::sync::Arc::new(source)).await;
    assert!(matches!(refused, Err(WriteError::OutOfRange { index: 4, limit: 4, .. })), "{refused:?}");
    let (refused, source) = bad(&[(4, 0)], source).await;
    assert!(matches!(refused, Err(WriteError::OutOfRange { index: 4, limit: 4, .. })), "{refused:?}");
    let (refused, source) = bad(&[(u32::MAX, 0)], source).await;
    assert!(matches!(refused, Err(WriteError::OutOfRange { .. })), "{refused:?}");
    let (refused, source) = bad(&[(0, 1), (1, 1)], source).await;
    assert!(matches!(refused, Err(WriteError::Duplicate { position: 1 })), "{refused:?}");
    assert_eq!((posted(&sender), sender.stats().refused), (0, 4));
    // None of these has used the grant up.
    let (landed, _) = bad(&[(3, 0), (0, 3)], source).await;
    assert_eq!(landed.unwrap().descriptors, 2);
    let arrival = receiver.next_arrival().await.unwrap();
    let swapped = arrival.into_blocks();
    assert_eq!(wrong(&swapped, 1, |p| 3 - p), 2, "positions 1 and 2 were not written");
    let whole = sender.pool().try_alloc(9);
    assert!(matches!(whole, Err(PoolError::TooMany { asked: 9, total: 8 })), "{whole:?}");
}

async fn k9_the_path_counts_every_byte(on: On) {
    let Pair { sender, receiver, .. } = pair(on, layout(2, 32, 5000)).await;
    let grant = receiver.grant(receiver.pool().try_alloc(32).unwrap()).unwrap();
    let (landed, _) = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(32).unwrap())).await;
    let landed = landed.unwrap();
    let path = sender.path();
    let transport = on.transport();
    assert_eq!(path.profile, on.profile().map(|p| p.to_string()));
    if on.profile().is_some() {
        assert_eq!(path.gid.to_string(), "127.0.0.1");
    }
    assert_eq!(path.transport, transport);
    assert_eq!(path.qps.iter().map(|qp| qp.bytes_written).sum::<u64>(), landed.bytes);
    assert!(path.qps.iter().map(|qp| qp.writes).sum::<u64>() >= landed.wrs);
    let far = receiver.path();
    for path in [&path, &far] {
        assert!(path.qps.iter().all(|qp| qp.transport == transport), "{path}");
        assert!(
            !path.transport_reason.is_empty() && path.to_string().contains(&path.transport_reason),
            "{path}"
        );
    }
    assert_eq!(far.qps[0].qp_num, path.qps[0].peer_qp_num);
    assert_eq!(far.qps.iter().map(|qp| qp.bytes_written).sum::<u64>(), 0);
    assert!(path.to_string().contains(transport));
}

/// CASES 48, as far as it goes without injected faults: connections die at random points of a write, and after a
/// reconnect each transfer that was in doubt is resolved as the receiver saw it.
async fn k2_a_reconnect_resolves_what_was_in_doubt(on: On) {
    let Pair { mut sender, mut receiver, sending, receiving, mut listener } =
        pair(on, layout(1, 64, 4000)).await;
    let (mut doubts, mut landed) = (0, 0);
    for round in 0..on.rounds(60) {
        let mut source = sender.pool().alloc(8).await.unwrap();
        fill(&mut source, round);
        let grant = receiver.grant(receiver.pool().alloc(8).await.unwrap()).unwrap();
        let write = tokio::spawn(sender.write(WriteRequest::new(&grant, source).tag(round)));
        let killer = if round % 2 == 0 { sender.clone() } else { receiver.clone() };
        for _ in 0..round % 7 {
            tokio::task::yield_now().await;
        }
        killer.kill();
        let (ended, _) = write.await.unwrap();
        let mut arrived = 0;
        while let Ok(arrival) = receiver.next_arrival().await {
            assert_eq!(arrival.tag(), round);
            assert_eq!(wrong(arrival.blocks(), round, |p| p), 0);
            arrived += 1;
        }
        assert!(arrived <= 1, "delivered twice");
        sender.closed().await;
        receiver.closed().await;
        let (again, accepted) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
        (sender, receiver) = (again.unwrap(), accepted.unwrap());
        match ended {
            Ok(_) => {
                assert_eq!(arrived, 1);
                landed += 1;
            }
            Err(WriteError::NotDelivered(_)) => assert_eq!(arrived, 0, "not delivered, and there it was"),
            Err(WriteError::InDoubt { transfer, .. }) => {
                doubts += 1;
                let expected = if arrived == 1 { Resolution::Landed } else { Resolution::NotDelivered };
                assert_eq!(sender.resolve(transfer).await, Some(expected));
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(sender.peer_epoch(), receiving.epoch());
    until("every block to come back", || {
        sender.pool().free_blocks() == 64 && receiver.pool().free_blocks() == 64
    })
    .await;
    println!("{on:?}: {doubts} in doubt and resolved, {landed} landed");
}

#[tokio::test]
async fn k6_a_source_pool_grants_nothing() {
    let pd = device(Profile::Default).alloc_pd().unwrap();
    let layout = layout(1, 8, 1000);
    let pool = KvPool::with_memory(&pd, layout, Memory::anonymous(8000), PoolAccess::Source).await.unwrap();
    let sending = KvEndpoint::new(pool, KvConfig::default()).unwrap();
    let receiving = endpoint(Profile::Default, layout, config()).await;
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (sender, _receiver) = (sender.unwrap(), receiver.unwrap());
    let refused = sender.grant(sender.pool().try_alloc(1).unwrap()).unwrap_err();
    assert!(matches!(refused.why, GrantRefusal::SourceOnly));
    assert_eq!(refused.blocks.len(), 1);
}

/// K9: no fallback is silent.
#[tokio::test]
async fn k9_rdma_can_be_required() {
    let pd = device(Profile::Default).alloc_pd().unwrap();
    let pool = KvPool::new(&pd, layout(1, 8, 1000)).await.unwrap();
    let error = KvEndpoint::new(pool, config().require_rdma(true)).unwrap_err().to_string();
    assert!(error.contains("soft-default") && error.contains("RDMA"), "{error}");
}

/// CASES 46: the wrong peer answers.
#[tokio::test]
async fn k6_another_identity_is_refused() {
    let a = endpoint(Profile::Default, layout(1, 8, 1000), config()).await;
    let b = endpoint(Profile::Default, layout(1, 8, 1000), config()).await;
    let listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let want = PeerIdentity { epoch: Some(b.epoch() ^ 1), name: None };
    let error = a.connect_to(listener.local_addr(), &want).await.unwrap_err().to_string();
    assert!(error.contains(&format!("{:#018x}", b.epoch())), "{error}");
    let want = PeerIdentity { epoch: Some(b.epoch()), name: None };
    a.connect_to(listener.local_addr(), &want).await.unwrap();
}
