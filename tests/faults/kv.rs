//! K1 to K5 under each fault, over every profile, over TCP and in shared memory.

use std::sync::Arc;
use std::time::Duration;

use landfall::device::{Device, Profile};
use landfall::kv::{
    ArrivalError, Cause, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout, Reason, Resolution,
    WriteError, WriteRequest,
};
use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair};

use crate::common::{On, fill, on_soft_profiles, until, wrong};

const BLOCKS: u32 = 32;
const BLOCK_BYTES: u64 = 16 << 10;

on_soft_profiles!(
    k1_what_is_late_lands_whole,
    k2_a_connection_that_dies_at_any_byte_of_the_sender,
    k2_case_48_a_confirmation_that_is_lost_is_resolved_as_landed,
    k4_a_cancel_of_what_is_held_back_travels,
    k4_a_grant_on_a_channel_that_is_ending_ends_too,
    k5_a_reader_stalled_for_ever_is_a_lost_peer,
    k5_a_slow_rail_ends_at_the_users_deadline,
    r6_a_failed_request_ends_the_channel_and_every_write,
);

struct Ends {
    sender: KvChannel,
    receiver: KvChannel,
    sending: KvEndpoint,
    receiving: KvEndpoint,
    listener: KvListener,
}

fn config() -> KvConfig {
    KvConfig::default().heartbeat(Duration::from_millis(300)).peer_timeout(Duration::from_secs(3))
}

async fn endpoint(on: On, faults: &str, config: KvConfig) -> KvEndpoint {
    let pd = Device::soft(on.faulty(faults)).unwrap().alloc_pd().unwrap();
    let layout = Layout::contiguous(1, BLOCKS, BLOCK_BYTES).unwrap();
    KvEndpoint::new(KvPool::new(&pd, layout).await.unwrap(), config).unwrap()
}

async fn ends(on: On, sends: &str, receives: &str, config: KvConfig) -> Ends {
    let sending = endpoint(on, sends, config.clone()).await;
    let receiving = endpoint(on, receives, config).await;
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Ends { sender: sender.unwrap(), receiver: receiver.unwrap(), sending, receiving, listener }
}

fn request(ends: &Ends, blocks: u32, tag: u64) -> WriteRequest {
    try_request(ends, blocks, tag).expect("the channel lives")
}

/// `None` when the receiver's channel has ended.
fn try_request(ends: &Ends, blocks: u32, tag: u64) -> Option<WriteRequest> {
    let grant = ends.receiver.grant(ends.receiver.pool().try_alloc(blocks).unwrap()).ok()?;
    let mut source = ends.sender.pool().try_alloc(blocks).unwrap();
    fill(&mut source, tag);
    Some(WriteRequest::new(&grant, source).tag(tag))
}

async fn whole_again(ends: &Ends) {
    until("every block to come back", || {
        ends.sender.pool().free_blocks() == BLOCKS && ends.receiver.pool().free_blocks() == BLOCKS
    })
    .await;
}

async fn k1_what_is_late_lands_whole(on: On) {
    for faults in ["delay=5ms", "reorder=10ms", "rate=20000000", "stall=200ms,stall_after=100000"] {
        let e = ends(on, faults, faults, config().qps(2)).await;
        for round in 0..3 {
            let writes: Vec<_> = (0..4).map(|i| e.sender.write(request(&e, 8, round * 4 + i))).collect();
            for write in writes {
                write.await.0.unwrap_or_else(|error| panic!("{faults}: {error}"));
            }
            for _ in 0..4 {
                let arrival = e.receiver.next_arrival().await.unwrap();
                assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0, "{faults}");
            }
        }
        e.sender.close().await.unwrap();
    }
}

/// Takes every arrival until the channel has ended; the tags.
async fn arrivals(channel: &KvChannel) -> Vec<u64> {
    let mut tags = Vec::new();
    loop {
        match channel.next_arrival().await {
            Ok(arrival) => {
                assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0, "torn");
                tags.push(arrival.tag());
            }
            Err(ArrivalError::Aborted { .. }) => {}
            Err(_) => return tags,
        }
    }
}

/// The place of a channel's first queue pair: a connection manager's handshake has one of its own, before it.
fn rail(on: On) -> u32 {
    if on.caps().oob { 0 } else { 1 }
}

/// Another connection of the same two endpoints, whose queue pairs commit no fault: others take the faulty places.
async fn again(e: &mut Ends) -> (KvChannel, Vec<(CompletionQueue, QueuePair)>) {
    e.sender.closed().await;
    e.receiver.closed().await;
    let mut places = Vec::new();
    for device in [e.sending.device(), e.receiving.device()] {
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(device, CqConfig::new(4)).unwrap();
        for _ in 0..2 {
            let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(1, 1)).unwrap();
            places.push((cq.clone(), qp));
        }
    }
    let (sender, receiver) = tokio::join!(e.sending.connect(e.listener.local_addr()), e.listener.accept());
    e.receiver = receiver.unwrap();
    (sender.unwrap(), places)
}

async fn k2_a_connection_that_dies_at_any_byte_of_the_sender(on: On) {
    let (mut lost, mut landed) = (0, 0);
    // The last one is more than there is to send: in shared memory, a cut may come before anything was copied.
    for bytes in [3_000, 20_000, 70_000, 140_000, 265_000, 400_000, u64::MAX] {
        let mut e = ends(on, &format!("rail{}.drop_after={bytes}", rail(on)), "", config()).await;
        let requests: Vec<_> = (0..4).map(|i| request(&e, 8, i)).collect();
        let writes: Vec<_> = requests.into_iter().map(|r| e.sender.write(r)).collect();
        let mut told = Vec::new();
        for (tag, write) in (0..4u64).zip(writes) {
            let (end, source) = write.await;
            assert_eq!(Arc::try_unwrap(source).unwrap().len(), 8);
            told.push((tag, end));
        }
        e.sender.kill();
        let arrived = arrivals(&e.receiver).await;
        let (sender, _places) = again(&mut e).await;
        for (tag, end) in told {
            let there = arrived.iter().filter(|t| **t == tag).count();
            let expected = match end {
                Ok(_) => 1,
                Err(WriteError::NotDelivered(_) | WriteError::Closed { .. }) => 0,
                Err(WriteError::InDoubt { transfer, .. }) => match sender.resolve(transfer).await {
                    Some(Resolution::Landed) => 1,
                    Some(Resolution::NotDelivered) => 0,
                    other => panic!("after {bytes} bytes: {other:?}"),
                },
                Err(other) => panic!("{other}"),
            };
            assert_eq!(there, expected, "after {bytes} bytes, transfer {tag}");
            lost += 1 - expected;
            landed += expected;
        }
        whole_again(&e).await;
    }
    assert!(
        lost > 0 && landed > 0,
        "{lost} lost, {landed} landed: the faults are out of the traffic's range"
    );
}

async fn k2_case_48_a_confirmation_that_is_lost_is_resolved_as_landed(on: On) {
    // What the receiver says before its confirmation differs between profiles: the connection dies at one byte after the other.
    for bytes in (100..6_000).step_by(12) {
        // Where the handshake is on the queue pair, its end is there too.
        let faults = format!("rail{}.drop_after={bytes}", rail(on));
        let accepted = tokio::time::timeout(Duration::from_secs(20), try_ends(on, &faults));
        let Ok(Some(mut e)) = accepted.await else { continue };
        let Some(request) = try_request(&e, 8, 1) else { continue };
        let (end, _) = e.sender.write(request).await;
        if end.is_ok() {
            // It had been confirmed.
            break;
        }
        let arrived = arrivals(&e.receiver).await;
        let Err(WriteError::InDoubt { transfer, .. }) = end else { continue };
        if arrived.is_empty() {
            continue;
        }
        assert_eq!(arrived, [1]);
        let (sender, _places) = again(&mut e).await;
        assert_eq!(sender.resolve(transfer).await, Some(Resolution::Landed), "after {bytes} bytes");
        // Delivered once: nothing comes on the new channel.
        sender.close().await.unwrap();
        assert_eq!(arrivals(&e.receiver).await, []);
        return whole_again(&e).await;
    }
    panic!("the connection never died between the landing and its confirmation");
}

async fn try_ends(on: On, receives: &str) -> Option<Ends> {
    let sending = endpoint(on, "", config().connect_timeout(Duration::from_secs(2))).await;
    let receiving = endpoint(on, receives, config()).await;
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let sender = sending.connect(listener.local_addr()).await.ok()?;
    let receiver = listener.accept().await.ok()?;
    Some(Ends { sender, receiver, sending, receiving, listener })
}

async fn k4_a_cancel_of_what_is_held_back_travels(on: On) {
    let e = ends(on, "delay=30ms", "", config()).await;
    for round in 0..3 {
        let write = e.sender.write(request(&e, 16, round));
        tokio::task::yield_now().await;
        drop(write);
        match e.receiver.next_arrival().await {
            Err(ArrivalError::Aborted { .. }) => {}
            Ok(arrival) => assert_eq!(wrong(arrival.blocks(), round, |p| p), 0),
            Err(other) => panic!("{other}"),
        }
        whole_again(&e).await;
    }
    // A healthy queue pair has survived.
    e.sender.write(request(&e, 16, 9)).await.0.unwrap();
    assert_eq!(wrong(e.receiver.next_arrival().await.unwrap().blocks(), 9, |p| p), 0);
}

/// Found by chaos: the queue pairs have failed and are not destroyed yet.
async fn k4_a_grant_on_a_channel_that_is_ending_ends_too(on: On) {
    let e = ends(on, "", "", config()).await;
    let before = e.receiver.grant(e.receiver.pool().try_alloc(2).unwrap()).unwrap();
    e.receiver.kill();
    let mut open = vec![before.id()];
    if let Ok(late) = e.receiver.grant(e.receiver.pool().try_alloc(2).unwrap()) {
        open.push(late.id());
    }
    while let Err(ArrivalError::Aborted { grant, .. }) = e.receiver.next_arrival().await {
        assert!(open.contains(&grant), "{grant} ended twice");
        open.retain(|&id| id != grant);
    }
    assert_eq!(open, [], "the channel has ended, and these grants have not");
    whole_again(&e).await;
}

async fn k5_a_reader_stalled_for_ever_is_a_lost_peer(on: On) {
    let config = config().heartbeat(Duration::from_millis(100)).peer_timeout(Duration::from_secs(1));
    let e = ends(on, "", "stall=100000s,stall_after=40000", config).await;
    let requests: Vec<_> = (0..4).map(|i| request(&e, 8, i)).collect();
    let writes: Vec<_> = requests.into_iter().map(|r| e.sender.write(r)).collect();
    for write in writes {
        match write.await.0 {
            Err(WriteError::NotDelivered(Reason::Lost(_)) | WriteError::InDoubt { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    // Whichever side finds it first; the other may see the connection end.
    let causes = [e.sender.closed().await.cause(), e.receiver.closed().await.cause()];
    assert!(causes.contains(&Cause::PeerLost), "{causes:?}");
    assert_eq!(arrivals(&e.receiver).await, []);
    whole_again(&e).await;
}

/// On one profile: it takes the five seconds that a close may take.
#[test]
fn k5_a_close_ends_by_its_limit_whatever_the_peer_does() {
    crate::common::run(async {
        tokio::join!(
            close_beside_a_peer_that_reads_nothing(On::Soft(Profile::Default)),
            close_beside_a_peer_that_reads_nothing(On::Shm(Profile::Default)),
        );
    });
}

/// The peer's time-out is a day away: it is the close that gives up, and gives everything back.
async fn close_beside_a_peer_that_reads_nothing(on: On) {
    let day = Duration::from_secs(86_400);
    let config = config().heartbeat(day / 4).peer_timeout(day).deadline(day).abort_grace(day);
    let e = ends(on, "", "stall=100000s,stall_after=40000", config).await;
    let requests: Vec<_> = (0..4).map(|i| request(&e, 8, i)).collect();
    let writes: Vec<_> = requests.into_iter().map(|r| e.sender.write(r)).collect();
    let closed = e.sender.close().await.unwrap_err();
    assert_eq!(closed.cause(), Cause::CloseTimeout, "{closed}");
    for write in writes {
        match write.await.0 {
            Err(WriteError::NotDelivered(Reason::Lost(_)) | WriteError::InDoubt { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    e.receiver.kill();
    assert_eq!(arrivals(&e.receiver).await, []);
    whole_again(&e).await;
}

/// CASES 30, with a transport that would take a minute.
async fn k5_a_slow_rail_ends_at_the_users_deadline(on: On) {
    let config = config().peer_timeout(Duration::from_secs(60)).abort_grace(Duration::from_millis(200));
    let e = ends(on, "rate=20000", "", config).await;
    let write = e.sender.write(request(&e, BLOCKS, 1).deadline(Duration::from_millis(300)));
    match write.await.0 {
        // All of it had been posted, so that it is not for the sender to say.
        Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(arrivals(&e.receiver).await, []);
    whole_again(&e).await;
}

async fn r6_a_failed_request_ends_the_channel_and_every_write(on: On) {
    for faults in ["fail_wr=3", "fail_post=3", "fail_wr=9", "fail_post=9"] {
        // Where the handshake is on the queue pair, the third request is of it.
        let sending = endpoint(on, faults, config().connect_timeout(Duration::from_secs(2))).await;
        let receiving = endpoint(on, "", config()).await;
        let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let Ok(sender) = sending.connect(listener.local_addr()).await else { continue };
        let receiver = listener.accept().await.unwrap();
        let e = Ends { sender, receiver, sending, receiving, listener };
        let mut failed = 0;
        for tag in 0..20 {
            let Ok(blocks) = e.receiver.pool().try_alloc(4) else { break };
            let Ok(grant) = e.receiver.grant(blocks) else { break };
            let Ok(mut source) = e.sender.pool().try_alloc(4) else { break };
            fill(&mut source, tag);
            let (end, _) = e.sender.write(WriteRequest::new(&grant, source).tag(tag)).await;
            match end {
                Ok(_) => {
                    let arrival = e.receiver.next_arrival().await.unwrap();
                    assert_eq!(wrong(arrival.blocks(), tag, |p| p), 0);
                }
                Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. } | WriteError::Closed { .. }) => {
                    failed += 1
                }
                Err(other) => panic!("{faults}: {other}"),
            }
        }
        assert!(failed > 0, "{faults}");
        assert_eq!(e.sender.closed().await.cause(), Cause::Transport, "{faults}");
        arrivals(&e.receiver).await;
        whole_again(&e).await;
    }
}
