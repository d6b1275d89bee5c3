//! K5 and K10 with a peer in another process: all rails fall silent at once, or are gone at once. That is the peer, and no rail.

use landfall::kv::{ArrivalError, KvChannel, Write, WriteRequest};

use crate::blocks::fill;
use crate::frozen::{end, is_peer_lost, wakes_and_ends};
use crate::harness::{
    BLOCKS, On, Peer, RAILS, SOON, endpoint_on_rails, on_every_profile, soon, until, within,
};
use crate::roles::ask;

on_every_profile!(k5_a_peer_that_is_frozen_on_every_rail_is_lost, k5_a_peer_that_is_killed_takes_every_rail);

const COUNT: usize = 3;

/// A receiver with three rails, and a channel to it over them.
async fn receiver(on: On) -> (Peer, KvChannel) {
    let mut peer = Peer::start("receiver", on, &[SOON, (RAILS, "3")]);
    let address = peer.hear("listening").await;
    let channel = endpoint_on_rails(on, soon(), COUNT).await.connect(address).await.unwrap();
    let path = channel.path();
    assert_eq!((path.rails.len(), path.warnings.len()), (COUNT, 0), "{path}");
    (peer, channel)
}

/// So many writes of eight blocks at once, more than the sockets hold.
async fn writes(channel: &KvChannel, count: u32) -> Vec<Write> {
    let mut grants = Vec::new();
    for _ in 0..count {
        let grant = ask(channel, 8).await.unwrap();
        let mut source = channel.pool().try_alloc(8).unwrap();
        fill(&mut source, 1);
        grants.push((grant, source));
    }
    grants.into_iter().map(|(grant, source)| channel.write(WriteRequest::new(&grant, source))).collect()
}

async fn k5_a_peer_that_is_frozen_on_every_rail_is_lost(on: On) {
    let (peer, channel) = receiver(on).await;
    let writes = writes(&channel, BLOCKS / 8).await;
    peer.freeze();
    let mut lost = 0;
    for write in writes {
        match end(write).await {
            Ok(_) => {}
            Err(error) if is_peer_lost(&error) => lost += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(lost > 0, "32 MiB went into a frozen process");
    let closed = within("the channel's end", channel.closed()).await;
    assert!(closed.to_string().contains("peer_timeout"), "{closed}");
    until("the source blocks", || channel.pool().free_blocks() == BLOCKS).await;
    wakes_and_ends(peer).await;
}

async fn k5_a_peer_that_is_killed_takes_every_rail(on: On) {
    let (mut peer, channel) = receiver(on).await;
    let grant = channel.grant(channel.pool().try_alloc(1).unwrap()).unwrap();
    let writes = writes(&channel, 3).await;
    peer.kill().await;
    for write in writes {
        // Its last act may have been to confirm.
        let _ = end(write).await;
    }
    let closed = within("the channel's end", channel.closed()).await;
    assert!(!closed.is_graceful(), "{closed}");
    let aborted = within("the open grant", channel.next_arrival()).await;
    assert!(
        matches!(aborted, Err(ArrivalError::Aborted { grant: id, .. }) if id == grant.id()),
        "{aborted:?}"
    );
    until("every block", || channel.pool().free_blocks() == BLOCKS).await;
}
