//! K5: a peer that is frozen by SIGSTOP, while its kernel still acknowledges what is sent to it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use landfall::kv::{
    AbortReason, ArrivalError, Cause, KvChannel, KvConfig, Landed, Reason, Write, WriteError, WriteRequest,
};

use crate::blocks::{fill, wrong};
use crate::harness::{BLOCKS, On, PATIENCE, Peer, SOON, endpoint, on_every_profile, soon, until, within};
use crate::roles::{Stream, ask};

on_every_profile!(
    k5_a_receiver_frozen_in_the_middle_of_writes,
    k5_a_receiver_frozen_before_a_write,
    k5_a_frozen_sender_never_reaches_reused_blocks,
    k5_the_users_deadline_holds_against_a_frozen_receiver,
);

async fn receiver(on: On, config: KvConfig, environment: &[(&str, &str)]) -> (Peer, KvChannel) {
    let mut peer = Peer::start("receiver", on, environment);
    let address = peer.hear("listening").await;
    let channel = endpoint(on, config).await.connect(address).await.unwrap();
    (peer, channel)
}

/// The write's end; its blocks are ours again.
pub(crate) async fn end(write: Write) -> Result<Landed, WriteError> {
    let (ended, source) = within("the write's end", write).await;
    Arc::try_unwrap(source).expect("nobody else holds the source");
    ended
}

pub(crate) fn is_peer_lost(error: &WriteError) -> bool {
    matches!(
        error,
        WriteError::NotDelivered(Reason::Lost(Cause::PeerLost))
            | WriteError::InDoubt { reason: Reason::Lost(Cause::PeerLost), .. }
    )
}

/// The woken peer finds its channel dead, its blocks back, and ends as it likes.
pub(crate) async fn wakes_and_ends(mut peer: Peer) {
    peer.wake();
    peer.hear("ended").await;
    assert!(peer.end().await.success());
}

/// CASES 49: the writes end by the peer's time-out, and the woken peer is none the worse.
async fn k5_a_receiver_frozen_in_the_middle_of_writes(on: On) {
    let (peer, channel) = receiver(on, soon(), &[SOON]).await;
    let mut writes = Vec::new();
    for _ in 0..BLOCKS / 8 {
        let grant = ask(&channel, 8).await.unwrap();
        let mut source = channel.pool().try_alloc(8).unwrap();
        fill(&mut source, 1);
        writes.push((grant, source));
    }
    // All at once, more than the sockets hold, and frozen before anything of ours has run again.
    let writes: Vec<_> =
        writes.into_iter().map(|(grant, source)| channel.write(WriteRequest::new(&grant, source))).collect();
    peer.freeze();
    let start = Instant::now();
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
    assert!(!closed.is_graceful());
    assert!(closed.to_string().contains("peer_timeout"), "{closed}");
    until("the source blocks", || channel.pool().free_blocks() == BLOCKS).await;
    assert!(start.elapsed() < PATIENCE);
    // Nothing hangs on a dead channel either.
    assert!(within("a message", channel.recv_message()).await.is_err());
    assert!(channel.next_arrival().await.is_err());
    wakes_and_ends(peer).await;
}

async fn k5_a_receiver_frozen_before_a_write(on: On) {
    let (peer, channel) = receiver(on, soon(), &[SOON]).await;
    let grant = ask(&channel, 1).await.unwrap();
    peer.freeze();
    let write = channel.write(WriteRequest::new(&grant, channel.pool().try_alloc(1).unwrap()));
    let ended = end(write).await;
    assert!(ended.as_ref().is_err_and(is_peer_lost), "{ended:?}");
    let closed = within("the channel's end", channel.closed()).await;
    assert!(closed.to_string().contains("peer_timeout"), "{closed}");
    // A write on the dead channel is refused at once, with its blocks.
    let late = channel.write(WriteRequest::new(&grant, channel.pool().try_alloc(1).unwrap()));
    let refused = end(late).await;
    assert!(matches!(refused, Err(WriteError::Closed { .. } | WriteError::StaleGrant { .. })), "{refused:?}");
    wakes_and_ends(peer).await;
}

/// The fence: blocks that came back from a frozen sender are reused, and it cannot reach them when it wakes up.
async fn k5_a_frozen_sender_never_reaches_reused_blocks(on: On) {
    let Stream { mut peer, channel, granted, granting, mut arrived } = Stream::start(on).await;
    peer.freeze();
    // A device may finish what the frozen process has posted. One more grant waits for the process, which writes once it is
    // awake: unless it has grants for all blocks already.
    let (receiver, count) = (channel.clone(), granted.clone());
    let one_more = tokio::spawn(async move {
        let blocks = receiver.pool().alloc(8).await.unwrap();
        if let Ok(grant) = receiver.grant(blocks)
            && receiver.send_message(grant.to_bytes()).await.is_ok()
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let end = loop {
        match within("the end of the arrivals", channel.next_arrival()).await {
            Ok(arrival) => assert_eq!(wrong(arrival.blocks(), arrival.tag()), 0),
            Err(ArrivalError::Aborted { reason, .. }) => {
                assert_eq!(reason, AbortReason::ConnectionLost);
                continue;
            }
            Err(closed) => break closed.to_string(),
        }
        arrived += 1;
    };
    assert!(end.contains("peer_timeout"), "{end}");
    let mut reused = within("every block", channel.pool().alloc(BLOCKS)).await.unwrap();
    fill(&mut reused, 0xA5);
    // The sender has its chance: it does what it can until it finds its channel dead.
    peer.wake();
    peer.hear("ended").await;
    assert!(peer.end().await.success());
    assert_eq!(wrong(&reused, 0xA5), 0, "a late write reached reused blocks");
    within("the granting task", granting).await.unwrap();
    within("the last grant", one_more).await.unwrap();
    assert!(granted.load(Ordering::Relaxed) > arrived, "the sender had nothing to write to");
}

/// CASES 30: the deadline of the write, not the patience of the transport, decides.
async fn k5_the_users_deadline_holds_against_a_frozen_receiver(on: On) {
    const LONG: Duration = Duration::from_secs(60);
    let config = KvConfig::default().peer_timeout(LONG);
    let (mut peer, channel) = receiver(on, config, &[(crate::harness::LIVENESS, "1000 60000")]).await;
    // One that fits into the sockets, and one that does not.
    let small = ask(&channel, 1).await.unwrap();
    let large = ask(&channel, 16).await.unwrap();
    peer.freeze();
    let start = Instant::now();
    let request = |grant, blocks| {
        let source = channel.pool().try_alloc(blocks).unwrap();
        channel.write(WriteRequest::new(grant, source).deadline(Duration::from_secs(1)))
    };
    for write in [request(&small, 1), request(&large, 16)] {
        match end(write).await {
            Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    until("the source blocks", || channel.pool().free_blocks() == BLOCKS).await;
    assert!(start.elapsed() < LONG / 2, "it waited {:?}", start.elapsed());
    peer.kill().await;
}
