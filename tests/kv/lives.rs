//! K6 and K5: what an endpoint's peers find when it has another life, and what a channel's ends find when it has ended.

use std::sync::Arc;

use landfall::connect::ConnectError;
use landfall::kv::{
    ArrivalError, Cause, GrantRefusal, KvChannel, MessageError, PoolAccess, Reason, WriteError, WriteRequest,
};
use tokio::task::JoinSet;

use crate::common::{
    On, Pair, config, endpoint, far_endpoint, fill, layout, on_every_profile, pair, until, wrong,
};

on_every_profile!(
    k6_a_restart_at_the_same_address_with_another_layout_is_another_peer,
    k6_a_channel_that_has_ended_refuses_all_and_disturbs_no_other,
    k5_close_under_load_leaves_nothing_undone,
    k5_both_ends_close_under_load_at_once,
);

/// One block there and checked.
async fn lands(from: &KvChannel, to: &KvChannel, tag: u64) {
    let grant = to.grant(to.pool().try_alloc(1).unwrap()).unwrap();
    let mut source = from.pool().try_alloc(1).unwrap();
    fill(&mut source, tag);
    from.write(WriteRequest::new(&grant, source).tag(tag)).await.0.unwrap();
    let arrival = to.next_arrival().await.unwrap();
    assert_eq!((arrival.tag(), wrong(arrival.blocks(), tag, |p| p)), (tag, 0));
}

/// The old address and the old grants lead to a peer that has other blocks: nothing of it is written by what was agreed before.
async fn k6_a_restart_at_the_same_address_with_another_layout_is_another_peer(on: On) {
    let Pair { sender, receiver, sending, receiving, listener } = pair(on, layout(2, 8, 1000)).await;
    lands(&sender, &receiver, 1).await;
    let address = listener.local_addr();
    let unused = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
    let first_life = receiving.epoch();
    // It dies, in the middle of a write, with everything that it had.
    let grant = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
    let write = sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(4).unwrap()));
    receiver.kill();
    drop((receiver, listener, receiving));
    let (ended, source) = write.await;
    assert!(
        matches!(ended, Ok(_) | Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. })),
        "{ended:?}"
    );
    drop(source);
    assert!(!sender.closed().await.is_graceful());
    assert_eq!(sender.pool().free_blocks(), 8);

    // Larger blocks, and then fewer layers, at the same address.
    for (other, field, values) in
        [(layout(2, 8, 2000), "block size", ["2000", "1000"]), (layout(1, 8, 1000), "layers", ["1", "2"])]
    {
        let restarted = far_endpoint(on, other, config()).await;
        let listener = listen_again(&restarted, address).await;
        let refused = sending.connect(listener.local_addr()).await.unwrap_err();
        let ConnectError::LayoutMismatch { ours, theirs, .. } = &refused else { panic!("{refused:?}") };
        assert_eq!([theirs.to_string(), ours.to_string()], values);
        let text = refused.to_string();
        assert!(text.contains(field), "{text}");
        assert_eq!(restarted.pool().free_blocks(), 8);
    }

    // Whoever has a pool of the new kind gets on with it; the grants of the first life are refused there too.
    let restarted = far_endpoint(on, layout(2, 8, 2000), config()).await;
    let mut listener = listen_again(&restarted, address).await;
    let sending = endpoint(on, layout(2, 8, 2000), config()).await;
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
    for old in [&grant, &unused] {
        let (refused, _) = sender.write(WriteRequest::new(old, sender.pool().try_alloc(4).unwrap())).await;
        assert!(
            matches!(refused, Err(WriteError::PeerRestarted { grant, peer })
                if grant == first_life && peer == restarted.epoch()),
            "{refused:?}"
        );
    }
    assert_eq!(sender.path().qps.iter().map(|qp| qp.writes).sum::<u64>(), 0);
    lands(&sender, &receiver, 2).await;
}

/// At the port of one that has just gone, whose last sockets may still hold it.
async fn listen_again(
    endpoint: &landfall::kv::KvEndpoint,
    address: std::net::SocketAddr,
) -> landfall::kv::KvListener {
    let again = tokio::time::timeout(crate::common::PATIENCE, async {
        loop {
            match endpoint.listen(address).await {
                Ok(listener) => return listener,
                Err(ConnectError::AddrInUse { .. }) => tokio::task::yield_now().await,
                Err(other) => panic!("{other:?}"),
            }
        }
    });
    again.await.expect("the address stays in use")
}

/// Old handles say that it is over, at once, and have no hold on the channel that has taken its place.
async fn k6_a_channel_that_has_ended_refuses_all_and_disturbs_no_other(on: On) {
    let Pair { sender, receiver, sending, mut listener, .. } = pair(on, layout(1, 16, 1000)).await;
    lands(&sender, &receiver, 1).await;
    let grant = |channel: &KvChannel| channel.grant(channel.pool().try_alloc(2).unwrap()).unwrap();
    let (there, here) = (grant(&receiver), grant(&sender));
    sender.kill();
    assert_eq!(sender.closed().await.cause(), Cause::Local);
    receiver.closed().await;
    let (again, accepted) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (again, accepted) = (again.unwrap(), accepted.unwrap());
    assert!(!again.same(&sender) && again.peer_epoch() == sender.peer_epoch());
    let (new_there, new_here) = (grant(&accepted), grant(&again));

    for old in [&sender, &receiver] {
        let refused = old.grant(old.pool().try_alloc(1).unwrap()).unwrap_err();
        assert!(matches!(refused.why, GrantRefusal::Closed(_)) && refused.blocks.len() == 1);
        assert!(matches!(old.send_message(vec![1]).await, Err(MessageError::Closed(_))));
        assert!(old.recv_message().await.is_err());
        while !matches!(old.next_arrival().await, Err(ArrivalError::Closed(_))) {}
        assert!(!old.closed().await.is_graceful());
        assert!(old.close().await.is_err());
        old.kill();
        // Neither its own grants nor those of the new channel, whose numbers may be the same.
        for grant in [&there, &here, &new_there, &new_here] {
            old.revoke(grant);
        }
    }
    for under in [&there, &new_there] {
        let (refused, source) =
            sender.write(WriteRequest::new(under, sender.pool().try_alloc(2).unwrap())).await;
        assert!(
            matches!(refused, Err(WriteError::Closed { .. } | WriteError::StaleGrant { .. })),
            "{refused:?}"
        );
        assert_eq!(Arc::try_unwrap(source).unwrap().len(), 2);
    }
    // The same two lives, another connection: the old grant is refused, and what is new is not disturbed.
    let (refused, source) = again.write(WriteRequest::new(&there, again.pool().try_alloc(2).unwrap())).await;
    assert!(matches!(refused, Err(WriteError::StaleGrant { grant }) if grant == there.id()), "{refused:?}");
    again.revoke(&there);
    accepted.revoke(&here);
    again.write(WriteRequest::new(&new_there, source)).await.0.unwrap();
    accepted.next_arrival().await.unwrap();
    let source = accepted.pool().try_alloc(2).unwrap();
    accepted.write(WriteRequest::new(&new_here, source)).await.0.unwrap();
    again.next_arrival().await.unwrap();
    until("both pools to be whole again", || {
        again.pool().free_blocks() == 16 && accepted.pool().free_blocks() == 16
    })
    .await;
    assert_eq!(again.pool().access(), PoolAccess::Target);
}

/// What became of the writes of one end.
#[derive(Default)]
struct Told {
    landed: Vec<u64>,
    refused: usize,
}

/// Tasks that write until they are refused; the tags begin with `base`. Each has its grants before it begins.
fn load(from: &KvChannel, to: &KvChannel, base: u64) -> JoinSet<Told> {
    let mut tasks = JoinSet::new();
    for task in 0..4u64 {
        let grants: Vec<_> = (0..4).map(|_| to.grant(to.pool().try_alloc(1).unwrap()).unwrap()).collect();
        let from = from.clone();
        tasks.spawn(async move {
            let mut told = Told::default();
            let mut source = Arc::new(from.pool().try_alloc(1).unwrap());
            for (n, grant) in (0u64..).zip(&grants) {
                let tag = base | task << 8 | n;
                let (ended, back) = from.write(WriteRequest::new(grant, source).tag(tag)).await;
                source = back;
                match ended {
                    Ok(_) => told.landed.push(tag),
                    // It had not begun when the channel was closing.
                    Err(WriteError::Closed { reason: Reason::Lost(Cause::Closed) }) => told.refused += 1,
                    // Taken by the channel before the other end's word came that it closes.
                    Err(WriteError::NotDelivered(Reason::Lost(Cause::Closed))) => told.refused += 1,
                    other => panic!("transfer {tag:#x}: {other:?}"),
                }
            }
            told
        });
    }
    tasks
}

async fn told(mut tasks: JoinSet<Told>) -> Told {
    let mut all = Told::default();
    while let Some(told) = tasks.join_next().await {
        let Told { landed, refused } = told.unwrap();
        all.landed.extend(landed);
        all.refused += refused;
    }
    all.landed.sort_unstable();
    all
}

/// The tags of what has arrived; what was granted and not used is aborted.
async fn arrived(channel: &KvChannel) -> Vec<u64> {
    let mut tags = Vec::new();
    loop {
        match channel.next_arrival().await {
            Ok(arrival) => tags.push(arrival.tag()),
            Err(ArrivalError::Aborted { .. }) => {}
            Err(_) => break,
        }
    }
    tags.sort_unstable();
    tags
}

/// The writing end closes while several tasks write: each write has landed, or has not begun.
async fn k5_close_under_load_leaves_nothing_undone(on: On) {
    for round in 0..on.rounds(12) {
        let Pair { sender, receiver, .. } = pair(on, layout(1, 32, 40_000)).await;
        let tasks = load(&sender, &receiver, 0);
        for _ in 0..round * 3 {
            tokio::task::yield_now().await;
        }
        sender.close().await.unwrap();
        let told = told(tasks).await;
        assert_eq!(told.landed.len() + told.refused, 16);
        assert_eq!(arrived(&receiver).await, told.landed, "round {round}");
        assert!(receiver.closed().await.is_graceful());
        until("both pools to be whole again", || {
            sender.pool().free_blocks() == 32 && receiver.pool().free_blocks() == 32
        })
        .await;
    }
}

async fn k5_both_ends_close_under_load_at_once(on: On) {
    for round in 0..on.rounds(12) {
        let Pair { sender, receiver, .. } = pair(on, layout(1, 64, 40_000)).await;
        let there = load(&sender, &receiver, 0);
        let back = load(&receiver, &sender, 1 << 32);
        for _ in 0..round * 3 {
            tokio::task::yield_now().await;
        }
        let (one, other) = tokio::join!(sender.close(), receiver.close());
        one.unwrap();
        other.unwrap();
        let (there, back) = (told(there).await, told(back).await);
        assert_eq!(arrived(&receiver).await, there.landed, "round {round}");
        assert_eq!(arrived(&sender).await, back.landed, "round {round}");
        until("both pools to be whole again", || {
            sender.pool().free_blocks() == 64 && receiver.pool().free_blocks() == 64
        })
        .await;
    }
}
