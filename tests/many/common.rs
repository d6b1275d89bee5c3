//! An endpoint that serves, and clients of it in one process. Between two endpoints there is one channel, so that each client has
//! an endpoint of its own; they share a device and a pool unless they have faults.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use landfall::device::{Device, SoftConfig};
use landfall::kv::{Blocks, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout, WriteRequest};
use tokio::task::JoinSet;

pub(crate) use crate::on::On;

/// Longer than anything takes on a busy machine. A test that reaches it hangs, and says where.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// Handshakes at once: fewer than a listener takes.
const AT_ONCE: usize = 64;
/// Bytes of a block.
pub(crate) const BLOCK: u64 = 4 << 10;
/// Blocks of each pool: three for each of 200 channels, and those of a bad peer.
pub(crate) const BLOCKS: u32 = 1024;

pub(crate) fn run(test: impl Future<Output = ()>) {
    allow_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") });
}

/// The soft limit of open files.
pub(crate) fn limit_descriptors(to: u64) {
    // SAFETY: the pointers are to a live rlimit; the second call only reads it.
    unsafe {
        let mut limit = std::mem::zeroed::<libc::rlimit>();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = to.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// As many as the system lets this process have: both ends of all channels are in it.
pub(crate) fn allow_descriptors() {
    limit_descriptors(u64::MAX);
}

/// Failures come late enough for a busy machine with hundreds of channels.
pub(crate) fn config() -> KvConfig {
    KvConfig::default()
        .abort_grace(PATIENCE)
        .peer_timeout(PATIENCE)
        .connect_timeout(PATIENCE)
        .deadline(PATIENCE)
}

pub(crate) async fn pool(soft: SoftConfig) -> KvPool {
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    KvPool::new(&pd, Layout::contiguous(1, BLOCKS, BLOCK).unwrap()).await.unwrap()
}

/// An endpoint that listens, and the pool that its clients share.
pub(crate) struct Server {
    pub(crate) serving: KvEndpoint,
    pub(crate) listener: KvListener,
    pub(crate) near: KvPool,
    config: KvConfig,
}

/// A channel by both of its ends: `near` is the client's, `far` the server's.
pub(crate) struct Client {
    pub(crate) endpoint: KvEndpoint,
    pub(crate) near: KvChannel,
    pub(crate) far: KvChannel,
}

impl Server {
    pub(crate) async fn start(on: On) -> Self {
        Self::with(on, config()).await
    }

    pub(crate) async fn with(on: On, config: KvConfig) -> Self {
        let soft = || on.soft().expect("these tests are of the soft provider");
        let serving = KvEndpoint::named(pool(soft()).await, config.clone(), "server").unwrap();
        let listener = serving.listen(on.any_port_of(1)).await.unwrap();
        Self { serving, listener, near: pool(soft()).await, config }
    }

    /// A new life of the client of this number, with the clients' common pool.
    pub(crate) fn endpoint(&self, number: usize) -> KvEndpoint {
        self.endpoint_of(self.near.clone(), number)
    }

    pub(crate) fn endpoint_of(&self, pool: KvPool, number: usize) -> KvEndpoint {
        KvEndpoint::named(pool, self.config.clone(), &number.to_string()).unwrap()
    }

    /// Connects these endpoints, in whatever order they come; gives them back in their own.
    pub(crate) async fn connect(&mut self, endpoints: Vec<KvEndpoint>) -> Vec<Client> {
        let to = self.listener.local_addr();
        let (mut dialling, mut near, mut far) = (JoinSet::new(), HashMap::new(), HashMap::new());
        let count = endpoints.len();
        let mut waiting = endpoints.into_iter();
        while near.len() < count || far.len() < count {
            while dialling.len() < AT_ONCE
                && let Some(endpoint) = waiting.next()
            {
                dialling.spawn(async move { (endpoint.connect(to).await.unwrap(), endpoint) });
            }
            tokio::select! {
                Some(dialled) = dialling.join_next() => {
                    let (channel, endpoint) = dialled.unwrap();
                    near.insert(endpoint.epoch(), (channel, endpoint));
                }
                accepted = self.listener.accept() => {
                    let channel = accepted.unwrap();
                    far.insert(channel.peer_epoch(), channel);
                }
            }
        }
        let mut clients: Vec<_> = near
            .into_iter()
            .map(|(epoch, (near, endpoint))| Client { endpoint, near, far: far.remove(&epoch).unwrap() })
            .collect();
        clients.sort_by_key(|client| client.far.peer_name().parse::<usize>().unwrap());
        clients
    }

    /// `count` clients on the common pool.
    pub(crate) async fn clients(&mut self, count: usize) -> Vec<Client> {
        let endpoints = (0..count).map(|n| self.endpoint(n)).collect();
        self.connect(endpoints).await
    }

    /// One client on a device with faults, written as `LANDFALL_SOFT` has them.
    pub(crate) async fn faulty(&mut self, on: On, faults: &str) -> Client {
        let endpoint = self.endpoint_of(pool(on.faulty(faults)).await, 999);
        self.connect(vec![endpoint]).await.pop().unwrap()
    }

    /// R7, K5: no block is missing at either end.
    pub(crate) async fn is_whole_again(&self) {
        until("every block of the server", || self.serving.pool().free_blocks() == BLOCKS).await;
        until("every block of the clients", || self.near.free_blocks() == BLOCKS).await;
    }
}

/// A write of `blocks` from one end to the other, until it has landed and was found whole.
pub(crate) async fn lands(from: &KvChannel, to: &KvChannel, blocks: u32, tag: u64) {
    let grant = to.grant(to.pool().alloc(blocks).await.unwrap()).unwrap();
    let mut source = from.pool().alloc(blocks).await.unwrap();
    fill(&mut source, tag);
    let (landed, arrived) =
        tokio::join!(from.write(WriteRequest::new(&grant, source).tag(tag)), to.next_arrival());
    landed.0.unwrap_or_else(|e| panic!("transfer {tag:#x}: {e}"));
    let arrived = arrived.unwrap();
    assert_eq!((arrived.tag(), wrong(arrived.blocks(), tag)), (tag, 0));
}

fn content(tag: u64, position: u32) -> Vec<u8> {
    let word = |at: u64| (tag ^ (u64::from(position) << 32) ^ at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..BLOCK / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

pub(crate) fn fill(blocks: &mut Blocks, tag: u64) {
    for position in 0..blocks.len() {
        blocks.copy_in(0, position, 0, &content(tag, position)).unwrap();
    }
}

/// Blocks that are not as [`fill`] leaves them.
pub(crate) fn wrong(blocks: &Blocks, tag: u64) -> usize {
    let mut got = vec![0; BLOCK as usize];
    let is_wrong = |position: &u32| {
        blocks.copy_out(0, *position, 0, &mut got).unwrap();
        got != content(tag, *position)
    };
    (0..blocks.len()).filter(is_wrong).count()
}

/// Waits until `done`: yields to the runtime, and gives up at [`PATIENCE`].
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !done() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "still waiting for: {what}");
}
