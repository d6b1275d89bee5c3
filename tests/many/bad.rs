//! One bad peer among good ones: while it stalls, crawls, floods or dies, everybody else's writes land.

use std::time::Duration;

use landfall::device::Profile;
use landfall::kv::{KvChannel, Write, WriteError, WriteRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::common::{Client, On, PATIENCE, Server, fill, lands, run, until};

/// Peers that do as they should.
const GOOD: usize = 20;
/// Blocks of a bad peer's transfers.
const MANY: u32 = 256;

macro_rules! on_both_transports {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use super::{On, Profile, run};
            #[test]
            fn tcp() { run(super::$name(On::Soft(Profile::Default))) }
            #[test]
            fn shm() { run(super::$name(On::Shm(Profile::Default))) }
            #[test]
            fn srd() { run(super::$name(On::Soft(Profile::Srd))) }
        }
    )+};
}

on_both_transports!(
    k5_a_peer_that_reads_nothing_hurts_no_other,
    k7_a_peer_that_crawls_hurts_no_other,
    k7_a_peer_that_floods_with_messages_hurts_no_other,
    k5_peers_that_die_in_the_middle_hurt_no_other,
);

/// Each good client writes and is written to, several times.
async fn everybody_lands(clients: Vec<Client>) -> Vec<Client> {
    let mut running = JoinSet::new();
    for (n, client) in (0u64..).zip(clients) {
        running.spawn(async move {
            for round in 0..10 {
                lands(&client.near, &client.far, 2, n << 8 | round).await;
                lands(&client.far, &client.near, 2, n << 8 | round | 1 << 63).await;
            }
            client
        });
    }
    let mut clients = Vec::new();
    while let Some(client) = running.join_next().await {
        clients.push(client.unwrap());
    }
    clients
}

/// A write of many blocks that nobody waits for. `None` on a channel that has ended by now.
async fn starts(from: &KvChannel, to: &KvChannel) -> Option<Write> {
    let grant = to.grant(to.pool().alloc(MANY).await.unwrap()).ok()?;
    let mut source = from.pool().alloc(MANY).await.unwrap();
    fill(&mut source, 7);
    Some(from.write(WriteRequest::new(&grant, source).tag(7)))
}

/// It has not landed by now, ends with its channel, and gives its blocks back.
async fn is_still_under_way_and_ends(write: Write, bad: &KvChannel) {
    let mut write = Box::pin(write);
    let early = tokio::time::timeout(Duration::ZERO, &mut write).await;
    assert!(early.is_err(), "the bad peer is not bad: {:?}", early.map(|(ended, _)| ended));
    bad.kill();
    let (ended, _) = write.await;
    assert!(matches!(ended, Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. })), "{ended:?}");
    bad.closed().await;
}

/// As a process that was stopped: its system takes what sockets hold, and nothing answers.
async fn k5_a_peer_that_reads_nothing_hurts_no_other(on: On) {
    let mut server = Server::start(on).await;
    let good = server.clients(GOOD).await;
    let bad = server.faulty(on, "stall=100000s,stall_after=40000").await;
    let write = starts(&bad.far, &bad.near).await.unwrap();
    let good = everybody_lands(good).await;
    is_still_under_way_and_ends(write, &bad.far).await;
    everybody_lands(good).await;
    server.is_whole_again().await;
}

async fn k7_a_peer_that_crawls_hurts_no_other(on: On) {
    let mut server = Server::start(on).await;
    let good = server.clients(GOOD).await;
    // A megabyte would take a quarter of an hour.
    let bad = server.faulty(on, "rate=1024").await;
    let write = starts(&bad.near, &bad.far).await.unwrap();
    let good = everybody_lands(good).await;
    is_still_under_way_and_ends(write, &bad.near).await;
    everybody_lands(good).await;
    server.is_whole_again().await;
}

/// Its messages are not taken: they fill what a channel keeps, and nothing else.
async fn k7_a_peer_that_floods_with_messages_hurts_no_other(on: On) {
    let mut server = Server::start(on).await;
    let mut clients = server.clients(GOOD + 1).await;
    let bad = clients.pop().unwrap();
    let flood = bad.near.clone();
    let flooding = tokio::spawn(async move {
        let mut sent = 0u64;
        while flood.send_message(vec![7; 1 << 20]).await.is_ok() {
            sent += 1;
        }
        sent
    });
    let good = everybody_lands(clients).await;
    // Its own channel takes writes all the same.
    lands(&bad.near, &bad.far, 1, 1).await;
    lands(&bad.far, &bad.near, 1, 2).await;
    bad.near.kill();
    let sent = flooding.await.unwrap();
    // 32 MiB wait at each end, and the queue pairs hold a little.
    assert!(sent < 256, "{sent} MiB were taken from a peer to which nobody listens");
    bad.far.closed().await;
    drop(bad);
    everybody_lands(good).await;
    server.is_whole_again().await;
}

async fn k5_peers_that_die_in_the_middle_hurt_no_other(on: On) {
    let mut server = Server::start(on).await;
    let mut good = server.clients(GOOD).await;
    for round in 0..8u64 {
        // By the fault its connection ends at some byte, or the peer ends it.
        let faults = format!("drop_after={}", 60_000 + round * 50_000);
        let bad = if round % 2 == 0 {
            server.faulty(on, &faults).await
        } else {
            let endpoint = server.endpoint(999);
            server.connect(vec![endpoint]).await.pop().unwrap()
        };
        let writes = [starts(&bad.near, &bad.far).await, starts(&bad.far, &bad.near).await];
        let dying = async {
            if round % 2 == 1 {
                tokio::task::yield_now().await;
                bad.near.kill();
            }
        };
        let ((), clients) = tokio::join!(dying, everybody_lands(good));
        good = clients;
        bad.near.kill();
        for write in writes.into_iter().flatten() {
            match write.await.0 {
                Ok(_) => {}
                Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. } | WriteError::Closed { .. }) => {
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        bad.near.closed().await;
        bad.far.closed().await;
        drop(bad);
        server.is_whole_again().await;
    }
}

/// More silent and talking strangers than the door has places, channels in use, and newcomers who come in all the same.
#[test]
fn b1_strangers_at_the_door_cost_the_others_nothing() {
    run(async {
        let mut server = Server::start(On::Soft(Profile::Default)).await;
        let good = server.clients(GOOD).await;
        let to = server.listener.local_addr();
        let mut strangers = JoinSet::new();
        for n in 0..300usize {
            strangers.spawn(async move {
                let Ok(mut stream) = TcpStream::connect(to).await else { return };
                let said: &[u8] = match n % 4 {
                    0 => b"",
                    1 => b"GET / HTTP/1.1\r\nHost: decode-7\r\n\r\n",
                    2 => &[0xff; 700],
                    // Something that begins well, for a moment.
                    _ => b"LF",
                };
                if stream.write_all(said).await.is_ok() {
                    // Until the door has had enough of it.
                    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
                }
            });
        }
        let endpoints = (0..GOOD).map(|n| server.endpoint(GOOD + n)).collect();
        let (good, newcomers) = tokio::join!(everybody_lands(good), server.connect(endpoints));
        assert_eq!(newcomers.len(), GOOD);
        everybody_lands(newcomers).await;
        drop(good);
        strangers.abort_all();
        server.is_whole_again().await;
        until("the strangers' end", || {
            while strangers.try_join_next().is_some() {}
            strangers.is_empty()
        })
        .await;
    });
}
