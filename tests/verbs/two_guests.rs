//! A machine dies in the middle of transfers. In the lab only, with a guest on each side of the wire: guest 1 grants, guest 0
//! writes, has the other killed, and learns nothing by any packet. See the lab's README for the variables and files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::error::chain;
use landfall::kv::{
    Bootstrap, Cause, Grant, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, Write, WriteError, WriteRequest,
};

use crate::cm_harness::address;
use crate::harness::*;

/// 128 MiB on each side: more than these devices move in the time that the kill takes.
const BLOCKS: u32 = 128;
const PORT: u16 = 7472;

fn config(bootstrap: Bootstrap) -> KvConfig {
    kv().bootstrap(bootstrap)
        .heartbeat(Duration::from_secs(1))
        .peer_timeout(Duration::from_secs(5))
        .connect_timeout(DEADLINE / 2)
        .deadline(DEADLINE)
        .require_rdma(true)
}

fn guest() -> u32 {
    std::env::var("LAB_GUEST").expect("LAB_GUEST: this runs in the lab").parse().unwrap()
}

fn shared(file: &str) -> PathBuf {
    Path::new(&std::env::var_os("LAB_SHARED").expect("LAB_SHARED: this runs in the lab")).join(file)
}

/// Files are how guests and host speak; there is nothing to wait on but their names.
async fn appears(file: &str) {
    while !shared(file).exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn endpoint(bootstrap: Bootstrap) -> KvEndpoint {
    let layout = Layout::contiguous(1, BLOCKS, 1 << 20).unwrap();
    let pool = KvPool::new(&device(0).alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, config(bootstrap)).unwrap()
}

/// Grants all of its blocks, one by one, and after the first arrival asks for its own death.
async fn dies(bootstrap: Bootstrap) {
    let endpoint = endpoint(bootstrap).await;
    let mut listener = endpoint.listen((address(0), PORT).into()).await.unwrap();
    std::fs::write(shared("kv_listening"), "").unwrap();
    let channel = listener.accept().await.unwrap();
    for _ in 0..BLOCKS {
        let grant = channel.grant(channel.pool().try_alloc(1).unwrap()).unwrap();
        channel.send_message(grant.to_bytes()).await.unwrap();
    }
    let mut first = true;
    while channel.next_arrival().await.is_ok() {
        if std::mem::take(&mut first) {
            std::fs::write(shared("kill.1"), "").unwrap();
        }
    }
    channel.closed().await;
    panic!("this guest should have been killed");
}

async fn ask(channel: &KvChannel) -> Grant {
    Grant::from_bytes(&channel.recv_message().await.unwrap()).unwrap()
}

async fn survives(bootstrap: Bootstrap) {
    appears("kv_listening").await;
    let endpoint = endpoint(bootstrap).await;
    let to = std::net::SocketAddr::new(address(1), PORT);
    let channel = endpoint.connect(to).await.unwrap_or_else(|e| panic!("{}", chain(&e)));
    let start = |grant: Grant| channel.write(WriteRequest::new(&grant, channel.pool().try_alloc(1).unwrap()));
    let mut grants = Vec::new();
    for _ in 0..BLOCKS {
        grants.push(ask(&channel).await);
    }
    let last = grants.pop().unwrap();
    let mut writes: Vec<Write> = grants.into_iter().map(start).collect();
    appears("killed.1").await;
    // Of the writes before the kill some may have landed; this one cannot.
    writes.push(start(last));
    let (mut landed, mut lost) = (0, 0);
    let mut ends = Vec::new();
    for write in writes {
        let (ended, source) = write.await;
        match &ended {
            Ok(_) => landed += 1,
            Err(WriteError::NotDelivered(_) | WriteError::InDoubt { .. } | WriteError::Closed { .. }) => {
                lost += 1
            }
            Err(other) => panic!("{}", chain(other)),
        }
        ends.push(ended.is_ok());
        drop(source);
    }
    let closed = channel.closed().await;
    eprintln!("{landed} landed, {lost} lost: {closed}");
    assert!(landed >= 1 && ends.last() == Some(&false), "{ends:?}");
    // Silence, or the device that gives up: nothing else can tell.
    assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
    assert_eq!(channel.pool().free_blocks(), BLOCKS);
    assert!(channel.grant(channel.pool().try_alloc(1).unwrap()).is_err());
    // Nor does a dial hang.
    let soon = config(bootstrap).connect_timeout(Duration::from_secs(3));
    let other = KvEndpoint::new(channel.pool().clone(), soon).unwrap();
    let again = other.connect(to).await.unwrap_err();
    let text = chain(&again);
    eprintln!("{text}");
    assert!(matches!(again, ConnectError::Timeout { .. } | ConnectError::Unreachable { .. }), "{text}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn two_guests_k5_a_machine_that_dies_is_lost_and_the_blocks_come_back() {
    run(true, async {
        let bootstrap = Bootstrap::Auto;
        if guest() == 1 { dies(bootstrap).await } else { survives(bootstrap).await }
    });
}
