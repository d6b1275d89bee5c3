//! Hundreds of channels at one endpoint, as they are used, as they reconnect, and as they end.

use landfall::device::Profile;
use landfall::kv::{ArrivalError, Cause, WriteError, WriteRequest};
use tokio::task::JoinSet;

use crate::common::{Client, On, Server, fill, lands, run, wrong};

/// Channels of one endpoint.
const CHANNELS: usize = 200;

macro_rules! on_several_profiles {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use super::{On, Profile, run};
            #[test]
            fn tcp() { run(super::$name(On::Soft(Profile::Default))) }
            #[test]
            fn shm() { run(super::$name(On::Shm(Profile::Default))) }
            #[test]
            fn srd() { run(super::$name(On::Soft(Profile::Srd))) }
            #[test]
            fn by_the_manager() { run(super::$name(On::Soft(Profile::ErdmaStandard))) }
        }
    )+};
}

on_several_profiles!(
    k1_two_hundred_channels_land_all_they_write,
    k6_clients_come_back_under_new_epochs_and_the_endpoint_goes_on,
    k5_all_channels_close_with_writes_in_flight,
);

/// Both ways at once on each, round after round.
async fn k1_two_hundred_channels_land_all_they_write(on: On) {
    const ROUNDS: u64 = 3;
    let mut server = Server::start(on).await;
    let clients = server.clients(CHANNELS).await;
    let mut running = JoinSet::new();
    for (n, client) in (0u64..).zip(clients) {
        running.spawn(async move {
            for round in 0..ROUNDS {
                let tag = n << 8 | round;
                tokio::join!(
                    lands(&client.near, &client.far, 1, tag),
                    lands(&client.far, &client.near, 1, tag | 1 << 63)
                );
            }
            client
        });
    }
    let mut clients = Vec::new();
    while let Some(client) = running.join_next().await {
        clients.push(client.unwrap());
    }
    assert_eq!(clients.len(), CHANNELS);
    for Client { near, far, .. } in &clients {
        for stats in [near.stats(), far.stats()] {
            assert_eq!((stats.landed, stats.arrived, stats.aborted), (ROUNDS, ROUNDS, 0));
        }
    }
    server.is_whole_again().await;
}

/// Some clients restart, some reconnect in the same life, most stay. Nothing of the server's is restarted.
async fn k6_clients_come_back_under_new_epochs_and_the_endpoint_goes_on(on: On) {
    const ALL: usize = 40;
    let mut server = Server::start(on).await;
    let mut clients = server.clients(ALL).await;
    for round in 0..4u64 {
        let mut again = Vec::new();
        let mut old_grants = Vec::new();
        for n in (0..ALL).filter(|n| n % 4 == 0) {
            let Client { endpoint, near, far } = clients.remove(n - again.len());
            let old_epoch = endpoint.epoch();
            let grant = near.grant(near.pool().alloc(1).await.unwrap()).unwrap();
            old_grants.push((n, old_epoch, grant));
            // One ends in order, one is killed, one is only let go of.
            match n % 12 {
                0 => near.close().await.unwrap(),
                4 => near.kill(),
                _ => {}
            }
            drop(near);
            assert!(matches!(far.closed().await.cause(), Cause::Closed | Cause::Transport | Cause::PeerLost));
            // Every other one in the same life, which needs the end of the channel before.
            again.push(if n % 8 == 0 { server.endpoint(n) } else { endpoint });
        }
        // Those that stay are not disturbed meanwhile.
        let staying = async {
            for client in &clients {
                lands(&client.near, &client.far, 1, round).await;
            }
        };
        let serving = server.serving.epoch();
        let ((), back) = tokio::join!(staying, server.connect(again));
        assert_eq!(server.serving.epoch(), serving);
        for ((n, old_epoch, old), client) in old_grants.iter().zip(&back) {
            let source = server.serving.pool().alloc(1).await.unwrap();
            let (refused, _) = client.far.write(WriteRequest::new(old, source)).await;
            match refused {
                Err(WriteError::PeerRestarted { grant, peer }) => {
                    assert_eq!((grant, peer, n % 8), (*old_epoch, client.endpoint.epoch(), 0));
                }
                Err(WriteError::StaleGrant { .. }) => assert_ne!(n % 8, 0),
                other => panic!("{other:?}"),
            }
            lands(&client.far, &client.near, 1, round).await;
            lands(&client.near, &client.far, 1, round).await;
        }
        clients.extend(back);
        clients.sort_by_key(|client| client.far.peer_name().parse::<usize>().unwrap());
    }
    server.is_whole_again().await;
}

/// What is in flight finishes, on all of them at once, and every block is back.
async fn k5_all_channels_close_with_writes_in_flight(on: On) {
    let mut server = Server::start(on).await;
    let clients = server.clients(CHANNELS).await;
    let mut running = JoinSet::new();
    for (tag, client) in (0u64..).zip(clients) {
        let grant = client.far.grant(client.far.pool().try_alloc(2).unwrap()).unwrap();
        let mut source = client.near.pool().try_alloc(2).unwrap();
        fill(&mut source, tag);
        let write = client.near.write(WriteRequest::new(&grant, source).tag(tag));
        running.spawn(async move {
            // Either side may be the one that asks.
            let closing = if tag % 2 == 0 { &client.near } else { &client.far };
            let (closed, (landed, source)) = tokio::join!(closing.close(), write);
            drop(source);
            (closed.map_err(|e| e.to_string()), landed.map(drop).map_err(|e| e.to_string()), client, tag)
        });
    }
    while let Some(ended) = running.join_next().await {
        let (closed, landed, client, tag) = ended.unwrap();
        assert_eq!((closed, landed), (Ok(()), Ok(())), "channel {tag}");
        let arrival = client.far.next_arrival().await.unwrap();
        assert_eq!((arrival.tag(), wrong(arrival.blocks(), tag)), (tag, 0));
        assert!(matches!(client.far.next_arrival().await, Err(ArrivalError::Closed(_))));
        assert!(client.near.closed().await.is_graceful() && client.far.closed().await.is_graceful());
    }
    server.is_whole_again().await;
}
