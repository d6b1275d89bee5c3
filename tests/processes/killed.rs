//! K5 and K6: a peer that is killed by SIGKILL, and its next life.

use std::sync::Arc;

use landfall::kv::{ArrivalError, Bootstrap, KvChannel, KvConfig, WriteError, WriteRequest};

use crate::blocks::{fill, wrong};
use crate::harness::{
    ADDRESS, BLOCKS, BOOTSTRAP, LIVENESS, On, PATIENCE, Peer, SOON, endpoint, on_every_profile, soon, until,
    within,
};
use crate::roles::{Stream, ask};

on_every_profile!(
    k5_a_receiver_killed_in_the_middle_of_writes_and_its_next_life,
    k5_a_sender_killed_in_the_middle_of_writes,
    k5_an_idle_peer_killed,
    k5_the_manager_tells_of_a_killed_peer_at_once,
);

/// Nothing hangs on a channel whose peer is gone, and it says what happened.
async fn is_dead(channel: &KvChannel) {
    let closed = within("the channel's end", channel.closed()).await;
    assert!(!closed.is_graceful(), "{closed}");
    while !matches!(
        within("the arrivals' end", channel.next_arrival()).await,
        Err(ArrivalError::Closed { .. })
    ) {}
    assert!(within("the messages' end", channel.recv_message()).await.is_err());
    assert!(within("a send", channel.send_message(vec![0])).await.is_err());
    assert!(within("a close", channel.close()).await.is_err());
    until("every block", || channel.pool().free_blocks() == BLOCKS).await;
}

/// K6 too: the next process at the same address is another life, in which the old grants are dead.
async fn k5_a_receiver_killed_in_the_middle_of_writes_and_its_next_life(on: On) {
    let mut peer = Peer::start("receiver", on, &[SOON]);
    let address = peer.hear("listening").await;
    let sending = endpoint(on, soon()).await;
    let channel = sending.connect(&address).await.unwrap();
    let first_life = channel.peer_epoch();
    let (used, unused) = (ask(&channel, 16).await.unwrap(), ask(&channel, 8).await.unwrap());
    let write = channel.write(WriteRequest::new(&used, channel.pool().try_alloc(16).unwrap()));
    peer.kill().await;
    let (ended, source) = within("the write's end", write).await;
    match ended {
        // Its last act may have been to confirm.
        Ok(_) | Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(Arc::try_unwrap(source).expect("nobody else holds the source").len(), 16);
    is_dead(&channel).await;

    let mut peer = Peer::start("receiver", on, &[SOON, (ADDRESS, &address)]);
    assert_eq!(peer.hear("listening").await, address);
    let channel = within("the next life", sending.connect(&address)).await.unwrap();
    assert_ne!(channel.peer_epoch(), first_life);
    for old in [&used, &unused] {
        let (refused, _) = channel.write(WriteRequest::new(old, channel.pool().try_alloc(8).unwrap())).await;
        assert!(
            matches!(refused, Err(WriteError::PeerRestarted { grant, peer })
                if grant == first_life && peer == channel.peer_epoch()),
            "{refused:?}"
        );
    }
    let posted: u64 = channel.path().qps.iter().map(|qp| qp.writes).sum();
    assert_eq!(posted, 0, "refused before anything was posted");
    let grant = ask(&channel, 4).await.unwrap();
    let write = channel.write(WriteRequest::new(&grant, channel.pool().try_alloc(4).unwrap()).tag(7));
    within("a write in the next life", write).await.0.unwrap();
    assert_eq!(peer.hear("arrived").await, "7");
    channel.close().await.unwrap();
    peer.hear("ended").await;
    assert!(peer.end().await.success());
}

async fn k5_a_sender_killed_in_the_middle_of_writes(on: On) {
    let Stream { mut peer, channel, granting, .. } = Stream::start(on).await;
    peer.kill().await;
    // What arrived whole before that is whole; the others end.
    loop {
        match within("the arrivals' end", channel.next_arrival()).await {
            Ok(arrival) => assert_eq!(wrong(arrival.blocks(), arrival.tag()), 0),
            Err(ArrivalError::Aborted { .. }) => {}
            Err(_) => break,
        }
    }
    within("the granting task", granting).await.unwrap();
    is_dead(&channel).await;
}

async fn k5_an_idle_peer_killed(on: On) {
    let mut peer = Peer::start("receiver", on, &[SOON]);
    let address = peer.hear("listening").await;
    let channel = endpoint(on, soon()).await.connect(&address).await.unwrap();
    // Once used, so that both sides are up; then idle, and somebody waits for what will not come.
    let grant = ask(&channel, 1).await.unwrap();
    let mut source = channel.pool().try_alloc(1).unwrap();
    fill(&mut source, 3);
    channel.write(WriteRequest::new(&grant, source)).await.0.unwrap();
    let waiting = channel.clone();
    let waiting = tokio::spawn(async move { waiting.recv_message().await });
    peer.kill().await;
    assert!(within("a waiting message", waiting).await.unwrap().is_err());
    is_dead(&channel).await;
}

/// The heartbeat is far beyond the test's patience: it has no part in this.
async fn k5_the_manager_tells_of_a_killed_peer_at_once(on: On) {
    let mut peer = Peer::start("receiver", on, &[(BOOTSTRAP, "cm"), (LIVENESS, "600000 3000000")]);
    let address = peer.hear("listening").await;
    let config =
        KvConfig::default().bootstrap(Bootstrap::Cm).heartbeat(PATIENCE * 20).peer_timeout(PATIENCE * 100);
    let channel = endpoint(on, config).await.connect(&address).await.unwrap();
    assert_eq!(channel.path().bootstrap, "cm");
    let grant = ask(&channel, 16).await.unwrap();
    let write = channel.write(WriteRequest::new(&grant, channel.pool().try_alloc(16).unwrap()));
    peer.kill().await;
    let (ended, source) = within("the write's end", write).await;
    assert!(
        matches!(ended, Ok(_) | Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. })),
        "{ended:?}"
    );
    drop(source);
    is_dead(&channel).await;
}
