//! KV channels between two devices, by RDMA_CM: also with a peer in another process, which is frozen or killed.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use landfall::connect::ConnectError;
use landfall::error::chain;
use landfall::kv::{
    ArrivalError, Bootstrap, Cause, Grant, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout,
    WriteError, WriteRequest,
};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::cm_harness::{Held, address};
use crate::harness::*;

const BLOCKS: u32 = 64;
/// Environment of the peer process: its bootstrap.
const PEER: &str = "LANDFALL_TEST_CM_KV";

fn layout() -> Layout {
    Layout::contiguous(2, BLOCKS, 5000).unwrap()
}

/// No heartbeat tells anything while a test runs.
fn by_cm() -> KvConfig {
    kv().bootstrap(Bootstrap::Cm).heartbeat(DEADLINE * 10).peer_timeout(DEADLINE * 30)
}

async fn endpoint(number: usize, config: KvConfig) -> KvEndpoint {
    endpoint_of(number, layout(), config).await
}

async fn endpoint_of(number: usize, layout: Layout, config: KvConfig) -> KvEndpoint {
    let pool = KvPool::new(&device(number).alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, config.require_rdma(true)).unwrap()
}

/// Listens on the address of its device, which the connection manager wants.
async fn listen(number: usize, endpoint: &KvEndpoint) -> KvListener {
    endpoint.listen((address(number), 0).into()).await.unwrap()
}

struct Channels {
    sender: KvChannel,
    receiver: KvChannel,
    _ends: (KvEndpoint, KvEndpoint, KvListener),
}

async fn channels(config: KvConfig) -> Channels {
    let (sending, receiving) = (endpoint(0, config.clone()).await, endpoint(1, config).await);
    let mut listener = listen(1, &receiving).await;
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Channels {
        sender: sender.unwrap_or_else(|e| panic!("{}", chain(&e))),
        receiver: receiver.unwrap(),
        _ends: (sending, receiving, listener),
    }
}

fn byte(tag: u64, layer: u32, position: u32, at: usize) -> u8 {
    (tag as usize * 31 + layer as usize * 7 + position as usize * 13 + at) as u8
}

fn filled(from: &KvChannel, count: u32, tag: u64) -> landfall::kv::Blocks {
    let mut source = from.pool().try_alloc(count).unwrap();
    for (layer, position) in (0..2).flat_map(|l| (0..count).map(move |p| (l, p))) {
        let bytes: Vec<u8> = (0..5000).map(|at| byte(tag, layer, position, at)).collect();
        source.copy_in(layer, position, 0, &bytes).unwrap();
    }
    source
}

async fn transfer(from: &KvChannel, to: &KvChannel, count: u32, tag: u64) {
    let grant = to.grant(to.pool().alloc(count).await.unwrap()).unwrap();
    let (landed, _) = from.write(WriteRequest::new(&grant, filled(from, count, tag)).tag(tag)).await;
    assert_eq!(landed.unwrap().bytes, 2 * u64::from(count) * 5000);
    let arrival = to.next_arrival().await.unwrap();
    assert_eq!(arrival.tag(), tag);
    let mut bytes = vec![0; 5000];
    for (layer, position) in (0..2).flat_map(|l| (0..count).map(move |p| (l, p))) {
        arrival.blocks().copy_out(layer, position, 0, &mut bytes).unwrap();
        let right = bytes.iter().enumerate().all(|(at, &b)| b == byte(tag, layer, position, at));
        assert!(right, "layer {layer}, block {position}");
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_landed_means_that_every_byte_is_there() {
    on_both_runtimes(async || {
        let Channels { sender, receiver, .. } = channels(by_cm()).await;
        // The side that has listened is the first to write: it may send nothing before the other has.
        transfer(&receiver, &sender, 16, 1).await;
        for (tag, count) in [1, BLOCKS, 17].into_iter().enumerate() {
            transfer(&sender, &receiver, count, tag as u64).await;
            transfer(&receiver, &sender, count, 100 + tag as u64).await;
        }
        let (path, peer) = (sender.path(), receiver.path());
        assert_eq!((path.transport, path.bootstrap), ("verbs", "cm"));
        assert_eq!((&path.device, &peer.device), (&name(0), &name(1)));
        let expected = if device(0).capabilities().immediate { "imm" } else { "send" };
        assert_eq!((path.notify, peer.notify), (expected, expected));
        sender.close().await.unwrap();
        assert!(receiver.closed().await.is_graceful());
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn k3_several_queue_pairs_each_by_a_request_of_its_own() {
    run(true, async {
        let Channels { sender, receiver, .. } = channels(by_cm().qps(4)).await;
        let (ours, theirs) = (sender.path().qps, receiver.path().qps);
        assert_eq!((ours.len(), theirs.len()), (4, 4));
        for (a, b) in ours.iter().zip(&theirs) {
            assert_eq!((a.qp_num, a.peer_qp_num), (b.peer_qp_num, b.qp_num));
        }
        for tag in 0..100 {
            transfer(&sender, &receiver, 8, tag).await;
        }
        let (a, b) = tokio::join!(sender.close(), receiver.close());
        a.unwrap();
        b.unwrap();
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b5_auto_says_which_way_it_took() {
    run(false, async {
        let Channels { sender, receiver, .. } = channels(kv()).await;
        transfer(&sender, &receiver, 8, 0).await;
        let way = if device(0).capabilities().oob { "oob" } else { "cm" };
        for path in [sender.path(), receiver.path()] {
            assert_eq!(path.bootstrap, way);
            assert!(path.bootstrap_reason.contains("out of band"), "{}", path.bootstrap_reason);
        }
    });
}

/// A cancelled write does no harm to the channel.
#[test]
#[ignore = "needs RDMA devices"]
fn k4_a_cancelled_write_leaves_the_channel_well() {
    run(true, async {
        let Channels { sender, receiver, .. } = channels(by_cm()).await;
        for tag in 0..20 {
            let grant = receiver.grant(receiver.pool().alloc(16).await.unwrap()).unwrap();
            drop(sender.write(WriteRequest::new(&grant, filled(&sender, 16, tag)).tag(tag)));
            match receiver.next_arrival().await {
                // It was quicker than the cancellation.
                Ok(arrival) => assert_eq!(arrival.tag(), tag),
                Err(ArrivalError::Aborted { grant: ended, .. }) => assert_eq!(ended, grant.id()),
                Err(other) => panic!("{other}"),
            }
            transfer(&sender, &receiver, 4, 1000 + tag).await;
        }
        sender.close().await.unwrap();
    });
}

/// Nobody listens; the layouts differ; given up on the way, at ever later points.
#[test]
#[ignore = "needs RDMA devices"]
fn b4_failed_connects_of_endpoints_leave_nothing() {
    run(true, async {
        let Channels { _ends: (sending, _receiving, mut listener), .. } = channels(by_cm()).await;
        // Below the ports that are given out: nobody ever listened there.
        let nobody = SocketAddr::new(address(1), 1);
        let other = endpoint_of(0, Layout::contiguous(2, BLOCKS, 600).unwrap(), by_cm()).await;
        let to = listener.local_addr();
        let accepting = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
        let before = Held::now();
        for n in 0..30 {
            match n % 3 {
                0 => {
                    let error = sending.connect(nobody).await.unwrap_err();
                    assert!(matches!(error, ConnectError::Refused { .. }), "{}", chain(&error));
                }
                1 => {
                    let error = other.connect(to).await.unwrap_err();
                    assert!(matches!(error, ConnectError::LayoutMismatch { .. }), "{}", chain(&error));
                }
                _ => {
                    let given_up = Duration::from_millis(n * n / 4);
                    if let Ok(Ok(channel)) = tokio::time::timeout(given_up, sending.connect(to)).await {
                        channel.kill();
                    }
                }
            }
        }
        before.is_back().await;
        accepting.abort();
    });
}

/// The peer, on the second device in a process of its own: grants blocks when asked.
#[test]
#[ignore = "a peer process of the other tests, not a test"]
fn peer_process() {
    let bootstrap = std::env::var(PEER).expect("started by the test that it is the peer of");
    run(false, async {
        let endpoint = endpoint(1, by_cm().bootstrap(bootstrap.parse().unwrap())).await;
        let mut listener = listen(1, &endpoint).await;
        println!("\n@@ {}", listener.local_addr());
        let channel = listener.accept().await.unwrap();
        while channel.recv_message().await.is_ok() {
            let grant = channel.grant(channel.pool().alloc(16).await.unwrap()).unwrap();
            channel.send_message(grant.to_bytes()).await.unwrap();
            if channel.next_arrival().await.is_err() {
                break;
            }
        }
        channel.closed().await;
    });
}

struct Peer {
    child: Child,
    channel: KvChannel,
    _endpoint: KvEndpoint,
}

impl Peer {
    async fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cm_kv::peer_process", "--ignored", "--nocapture"])
            .env(PEER, "cm")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = loop {
            let line = lines.next_line().await.unwrap().expect("the peer has ended");
            if let Some(address) = line.strip_prefix("@@ ") {
                break address.to_owned();
            }
        };
        // Whatever else the runner prints.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let endpoint = endpoint(0, by_cm()).await;
        let channel = endpoint.connect(&address).await.unwrap_or_else(|e| panic!("{}", chain(&e)));
        Self { child, channel, _endpoint: endpoint }
    }

    async fn ask(&self) -> Grant {
        self.channel.send_message(Vec::new()).await.unwrap();
        Grant::from_bytes(&self.channel.recv_message().await.unwrap()).unwrap()
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = self.child.id().expect("the peer runs") as libc::pid_t;
        // SAFETY: no memory is involved; the child has not been waited for, so that the id is still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

/// Nobody asks for a sign of life: RDMA_CM tells.
#[test]
#[ignore = "needs RDMA devices"]
fn k5_a_killed_peer_is_noticed_at_once() {
    run(false, async {
        let mut peer = Peer::start().await;
        let grant = peer.ask().await;
        let first = filled(&peer.channel, 16, 3);
        peer.channel.write(WriteRequest::new(&grant, first)).await.0.unwrap();
        let grant = peer.ask().await;
        let start = Instant::now();
        peer.child.kill().await.unwrap();
        let closed = peer.channel.closed().await;
        eprintln!("noticed after {:?}: {closed}", start.elapsed());
        assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
        let source = peer.channel.pool().try_alloc(16).unwrap();
        let (refused, _) = peer.channel.write(WriteRequest::new(&grant, source)).await;
        assert!(matches!(refused, Err(WriteError::Closed { .. })), "{refused:?}");
        assert_eq!(peer.channel.pool().free_blocks(), BLOCKS);
    });
}

/// The kernel still acknowledges for a frozen process (and siw completes a WRITE at its hand-off): that is no landing.
#[test]
#[ignore = "needs RDMA devices"]
fn k5_a_write_to_a_frozen_peer_ends_at_its_deadline() {
    run(false, async {
        let peer = Peer::start().await;
        let grant = peer.ask().await;
        peer.signal(libc::SIGSTOP);
        let source = filled(&peer.channel, 16, 4);
        let request = WriteRequest::new(&grant, source).deadline(Duration::from_secs(1));
        let (ended, source) = peer.channel.write(request).await;
        let error = ended.unwrap_err();
        eprintln!("{}", chain(&error));
        assert!(matches!(error, WriteError::NotDelivered(_) | WriteError::InDoubt { .. }), "{error:?}");
        drop(source);
        assert_eq!(peer.channel.pool().free_blocks(), BLOCKS);
    });
}
