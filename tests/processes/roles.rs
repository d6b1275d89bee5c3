//! What a peer process does. The entry is an ignored test, which `harness::Peer` runs by name.

use std::collections::VecDeque;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use landfall::kv::{ArrivalError, Grant, KvChannel, KvConfig, KvEndpoint, WriteRequest};
use tokio::task::JoinHandle;

use crate::blocks::{fill, wrong};
use crate::harness::{
    ADDRESS, BLOCKS, BOOTSTRAP, LIVENESS, MARK, On, PROFILE, Peer, ROLE, SOON, any_port, endpoint, named,
    soon, within,
};
use crate::{idle, orphans, runtime};

#[test]
#[ignore = "a peer process of the other tests, not a test"]
fn peer() {
    let role = variable(ROLE).expect("started by a test, with a role");
    if role == "runtime-dropped" {
        return runtime::dropped();
    }
    let on = named(&variable(PROFILE).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if role == orphans::ROLE {
        return runtime.block_on(orphans::parent());
    }
    runtime.block_on(async {
        let endpoint = endpoint(on, config()).await;
        match role.as_str() {
            "receiver" => receiver(&endpoint).await,
            "sender" => sender(&endpoint).await,
            "idle-receiver" => idle::receiver(&endpoint).await,
            "idle-sender" => idle::sender(&endpoint).await,
            "pending-sender" => idle::pending(&endpoint).await,
            other => panic!("no role {other}"),
        }
    });
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn config() -> KvConfig {
    let mut config = KvConfig::default();
    if let Some(bootstrap) = variable(BOOTSTRAP) {
        config = config.bootstrap(bootstrap.parse().unwrap());
    }
    let Some(liveness) = variable(LIVENESS) else { return config };
    let (heartbeat, timeout) = liveness.split_once(' ').unwrap();
    let ms = |text: &str| Duration::from_millis(text.parse().unwrap());
    config.heartbeat(ms(heartbeat)).peer_timeout(ms(timeout))
}

/// Says a line to the test that started this process.
pub(crate) fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // The runner may have begun a line.
    writeln!(out, "\n{MARK}{line}").unwrap();
    out.flush().unwrap();
}

/// The next command of the test; `None` at the end of standard input. Blocks: nothing else runs meanwhile.
pub(crate) fn command() -> Option<String> {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(line.trim().to_owned()),
    }
}

/// The channel that the other process dials.
pub(crate) async fn accepted(endpoint: &KvEndpoint) -> KvChannel {
    let address: SocketAddr = match variable(ADDRESS) {
        Some(address) => address.parse().unwrap(),
        None => any_port(named(&variable(PROFILE).unwrap())),
    };
    let mut listener = endpoint.listen(address).await.unwrap();
    say(format_args!("listening {}", listener.local_addr()));
    listener.accept().await.unwrap()
}

pub(crate) async fn dialled(endpoint: &KvEndpoint) -> KvChannel {
    endpoint.connect(variable(ADDRESS).expect("an address to dial")).await.unwrap()
}

/// Grants what is asked for; takes arrivals; says how it ended, when it has.
async fn receiver(endpoint: &KvEndpoint) {
    let channel = accepted(endpoint).await;
    let taking = async {
        loop {
            match channel.next_arrival().await {
                Ok(arrival) => say(format_args!("arrived {}", arrival.tag())),
                Err(ArrivalError::Aborted { .. }) => {}
                Err(_) => return,
            }
        }
    };
    tokio::join!(grant_all(channel.clone(), Arc::default()), taking);
    finish(&channel).await;
}

/// Answers each message of a number by a grant of so many blocks, until the channel ends.
async fn grant_all(channel: KvChannel, granted: Arc<AtomicU64>) {
    while let Ok(wanted) = channel.recv_message().await {
        let count = u32::from_le_bytes(wanted.try_into().unwrap());
        let blocks = channel.pool().alloc(count).await.unwrap();
        let Ok(grant) = channel.grant(blocks) else { return };
        if channel.send_message(grant.to_bytes()).await.is_err() {
            return;
        }
        granted.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes of eight blocks each, three at a time, which is more than sockets hold, for as long as the channel lives.
async fn sender(endpoint: &KvEndpoint) {
    let channel = dialled(endpoint).await;
    let mut writes = VecDeque::new();
    for tag in 0.. {
        let Ok(grant) = ask(&channel, 8).await else { break };
        let mut source = channel.pool().alloc(8).await.unwrap();
        fill(&mut source, tag);
        writes.push_back(channel.write(WriteRequest::new(&grant, source).tag(tag)));
        if writes.len() > 2
            && let Some(oldest) = writes.pop_front()
        {
            let _ = oldest.await;
        }
    }
    for write in writes {
        let _ = write.await;
    }
    finish(&channel).await;
}

/// A `sender` in full stream to a channel of ours.
pub(crate) struct Stream {
    pub(crate) peer: Peer,
    pub(crate) channel: KvChannel,
    /// Grants that the sender was sent, and the task that does so.
    pub(crate) granted: Arc<AtomicU64>,
    pub(crate) granting: JoinHandle<()>,
    /// Arrivals that were taken.
    pub(crate) arrived: u64,
}

impl Stream {
    pub(crate) async fn start(on: On) -> Self {
        let receiving = endpoint(on, soon()).await;
        let mut listener = receiving.listen(any_port(on)).await.unwrap();
        let address = listener.local_addr().to_string();
        let peer = Peer::start("sender", on, &[(ADDRESS, &address), SOON]);
        let channel = within("the sender", listener.accept()).await.unwrap();
        let granted = Arc::new(AtomicU64::new(0));
        let granting = tokio::spawn(grant_all(channel.clone(), granted.clone()));
        for _ in 0..4 {
            let arrival = within("an arrival", channel.next_arrival()).await.unwrap();
            assert_eq!(wrong(arrival.blocks(), arrival.tag()), 0);
        }
        Self { peer, channel, granted, granting, arrived: 4 }
    }
}

/// Has the peer grant `count` blocks.
pub(crate) async fn ask(channel: &KvChannel, count: u32) -> Result<Grant, landfall::kv::ChannelClosed> {
    // A channel that ends says so at the next message.
    let _ = channel.send_message(count.to_le_bytes().to_vec()).await;
    Ok(Grant::from_bytes(&channel.recv_message().await?).unwrap())
}

/// The channel has ended: its cause, and that every block has come back; then waits to be let go.
async fn finish(channel: &KvChannel) {
    let closed = channel.closed().await;
    while channel.pool().free_blocks() < BLOCKS {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    say(format_args!("ended {closed}"));
    while command().is_some() {}
}
