//! Peers that come by the connection manager and then do as they like: each ends its own handshake, with a typed cause, and
//! the next peer is served as if nothing had been.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::{PATIENCE, all_free, check, endpoint, hello, server};
use super::*;
use crate::connect::cm::{self, CmAttr, private};
use crate::connect::{
    self, Admission, ConnectError, Deadline, Expect, Framed, Hello, Inband, client, dial_cm,
};
use crate::device::{Device, ProtectionDomain, SoftConfig};
use crate::provider::{self, QpInit, SendOp, WcStatus};

const ATTR: CmAttr = CmAttr {
    max_rd_atomic: 1,
    max_dest_rd_atomic: 1,
    timeout: 16,
    retry_cnt: 6,
    rnr_retry: 6,
    min_rnr_timer: 14,
};

fn by_cm() -> KvConfig {
    KvConfig::default().bootstrap(Bootstrap::Cm)
}

fn far() -> Deadline {
    Deadline::after(PATIENCE)
}

fn domain() -> ProtectionDomain {
    Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap()
}

/// A bare queue pair, and what it needs.
struct Bare {
    qp: provider::Qp,
    _cq: provider::Cq,
}

impl Bare {
    fn new(pd: &ProtectionDomain) -> Self {
        let channel = pd.device().provider().create_channel().unwrap();
        let cq = channel.create_cq(8).unwrap();
        let init = QpInit { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
        Self { qp: pd.provider().create_qp(&cq, &cq, init).unwrap(), _cq: cq }
    }

    async fn connect(
        &self,
        pd: &ProtectionDomain,
        to: SocketAddr,
        private: &[u8],
    ) -> Result<cm::Connection, ConnectError> {
        cm::connect(pd.device(), &self.qp, to, &ATTR, private, |_| Ok(()), far()).await
    }
}

/// A hello that offers `qps` queue pairs, and its stream.
async fn begin(to: SocketAddr, epoch: u64, qps: usize) -> (ProtectionDomain, Inband, Hello) {
    let pd = domain();
    let (stream, _) = dial_cm(&pd, &to.to_string(), epoch, far()).await.unwrap();
    let mut hello = hello(epoch);
    hello.qps = (0..qps).map(|n| provider::QpAddress { qp_num: n as u32 + 2, ..hello.qps[0] }).collect();
    (pd, stream, hello)
}

#[tokio::test]
async fn b5_private_data_of_strangers_is_rejected() {
    let (server, mut listener) = server(by_cm()).await;
    let to = listener.local_addr();
    let mut future = private::encode(7);
    future[4] = 9;
    for private in [&[][..], b"hello", &[0; 56], &future] {
        let pd = domain();
        let refused = Bare::new(&pd).connect(&pd, to, private).await;
        assert!(matches!(refused, Err(ConnectError::PeerRejected { .. })), "{private:?}: {refused:?}");
    }
    check_managed(&mut listener).await;
    all_free(&server).await;
}

async fn check_managed(listener: &mut KvListener) {
    check(listener, by_cm()).await;
}

#[tokio::test]
async fn b1_a_bootstrap_that_breaks_off_or_breaks_the_rules_costs_nobody_else() {
    let (server, mut listener) = server(by_cm()).await;
    let to = listener.local_addr();
    let mut silent = Vec::new();
    for epoch in 1..=30 {
        let (pd, mut stream, hello) = begin(to, epoch, 1).await;
        match epoch % 5 {
            // Connected, and nothing said.
            0 => silent.push((pd, stream)),
            1 => drop(stream),
            2 => {
                stream.write_all(b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n").await.unwrap();
                // The server goes: what it answers is nothing.
                assert_eq!(stream.read_to_end(&mut Vec::new()).await.unwrap_or(0), 0);
            }
            3 => {
                let reply = client(Framed::plain(stream), &hello, &Expect::default(), far()).await.unwrap();
                assert_ne!(reply.reply.cm_port, 0);
                drop(reply);
            }
            _ => {
                stream.write_all(b"LFLL").await.unwrap();
                silent.push((pd, stream));
            }
        }
    }
    check_managed(&mut listener).await;
    all_free(&server).await;
}

/// Whoever knows the keys of the pool reaches nothing by the queue pair of a handshake, which anybody is given.
#[tokio::test]
async fn k6_the_queue_pair_of_a_handshake_opens_nothing_of_the_pool() {
    let (_server, mut listener) = server(by_cm()).await;
    let to = listener.local_addr();
    let (_pd, stream, mine) = begin(to, 5, 1).await;
    let reply = client(Framed::plain(stream), &mine, &Expect::default(), far()).await.unwrap();
    let region = &reply.reply.regions[0];
    let (remote_addr, rkey) = (region.addr, region.rkey);
    for op in [SendOp::Write { remote_addr, rkey, imm: None }, SendOp::Read { remote_addr, rkey }] {
        let (_pd, stream, _) = begin(to, 6, 1).await;
        let status = tokio::time::timeout(PATIENCE, stream.reach(op)).await.unwrap();
        assert_eq!(status, WcStatus::RemoteAccess, "{op:?}");
    }
    drop(reply);
    check_managed(&mut listener).await;
}

/// A landfall of another version rejects us, and is known by what it says.
#[tokio::test]
async fn b1_a_peer_of_another_version_is_named() {
    let pd = domain();
    let listener = cm::Listener::bind(pd.device(), "127.0.0.1:0".parse().unwrap()).await.unwrap();
    let mut future = private::encode(7);
    future[4] = 9;
    let reject = async { listener.accept().await.unwrap().reject(&future) };
    let to = listener.local_addr().to_string();
    let (refused, ()) = tokio::join!(dial_cm(&pd, &to, 5, far()), reject);
    assert!(matches!(refused, Err(ConnectError::Version { theirs: 9, .. })), "{refused:?}");
}

/// The channel's own port is for the one that has shaken hands.
#[tokio::test]
async fn b5_queue_pairs_are_given_to_the_epoch_that_has_shaken_hands() {
    let (server, mut listener) = server(by_cm()).await;
    let (pd, stream, hello) = begin(listener.local_addr(), 5, 2).await;
    let reply = client(Framed::plain(stream), &hello, &Expect::default(), far()).await.unwrap();
    let theirs = reply.reply.clone();
    let at = SocketAddr::new(listener.local_addr().ip(), theirs.cm_port);
    for stranger in [private::encode(6), Vec::new(), vec![0xff; 56]] {
        let other = domain();
        let refused = Bare::new(&other).connect(&other, at, &stranger).await;
        assert!(matches!(refused, Err(ConnectError::PeerRejected { .. })), "{refused:?}");
    }
    let (first, second) = (Bare::new(&pd), Bare::new(&pd));
    let lines = [
        first.connect(&pd, at, &private::encode(5)).await.unwrap(),
        second.connect(&pd, at, &private::encode(5)).await.unwrap(),
    ];
    let stream = reply.ready(&[]).await.unwrap();
    drop(stream);
    let channel = listener.accept().await.unwrap();
    assert_eq!(channel.path().qps.len(), 2);
    // The peer is gone when any of its connections is, whatever becomes of its queue pairs.
    let grant = channel.grant(channel.pool().try_alloc(3).unwrap()).unwrap();
    let [_of_first, of_second] = lines;
    drop(of_second);
    let closed = tokio::time::timeout(PATIENCE, channel.closed()).await.expect("it ends");
    assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
    assert!(closed.to_string().contains("connection manager"), "{closed}");
    let aborted = channel.next_arrival().await;
    assert!(matches!(aborted, Err(ArrivalError::Aborted { grant: id, .. }) if id == grant.id()));
    drop((first, second));
    check_managed(&mut listener).await;
    all_free(&server).await;
}

/// Half of the queue pairs, or none and the word that they are ready: it ends at the deadline, or with the peer.
#[tokio::test]
async fn k5_queue_pairs_that_never_come_end_the_handshake() {
    let (server, mut listener) = server(by_cm().connect_timeout(std::time::Duration::from_millis(500))).await;
    for (epoch, comes, ready) in [(1, 1, false), (2, 0, true), (3, 1, true)] {
        let (pd, stream, hello) = begin(listener.local_addr(), epoch, 2).await;
        let reply = client(Framed::plain(stream), &hello, &Expect::default(), far()).await.unwrap();
        let at = SocketAddr::new(listener.local_addr().ip(), reply.reply.cm_port);
        let bare = Bare::new(&pd);
        let line = match comes {
            0 => None,
            _ => Some(bare.connect(&pd, at, &private::encode(epoch)).await.unwrap()),
        };
        if ready {
            let refused = reply.ready(&[]).await.unwrap_err();
            assert!(matches!(refused, ConnectError::Closed { .. }), "{refused:?}");
        } else {
            drop(reply);
        }
        // What was connected ends with the handshake.
        if let Some(line) = line {
            tokio::time::timeout(PATIENCE, line.disconnected()).await.expect("it is given up");
        }
    }
    check_managed(&mut listener).await;
    all_free(&server).await;
}

/// K5: the bootstrap's last word has come, and nothing is ever said on the queue pair.
#[tokio::test]
async fn k5_a_client_that_never_speaks_first_is_lost() {
    let config = by_cm()
        .heartbeat(std::time::Duration::from_millis(50))
        .peer_timeout(std::time::Duration::from_millis(200));
    let (server, mut listener) = server(config).await;
    let (pd, stream, hello) = begin(listener.local_addr(), 5, 1).await;
    let reply = client(Framed::plain(stream), &hello, &Expect::default(), far()).await.unwrap();
    let at = SocketAddr::new(listener.local_addr().ip(), reply.reply.cm_port);
    let bare = Bare::new(&pd);
    let _line = bare.connect(&pd, at, &private::encode(5)).await.unwrap();
    drop(reply.ready(&[]).await.unwrap());
    let channel = listener.accept().await.unwrap();
    let closed = tokio::time::timeout(PATIENCE, channel.closed()).await.expect("it ends");
    assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
    all_free(&server).await;
}

/// K6: a server whose queue pairs answer as another epoch than its hello, at the first one and at a later one. Ours is not
/// connected to it.
#[tokio::test]
async fn k6_queue_pairs_that_answer_as_another_epoch_are_refused() {
    let any = SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 0));
    for wrong_at in 0..2 {
        let pd = domain();
        let front = connect::CmListener::bind(pd.device(), any).await.unwrap();
        let client = endpoint(by_cm().qps(2)).await;
        let server = async {
            let incoming = front.accept(PATIENCE).await.unwrap().open(&pd, 7).await.unwrap();
            let offer = incoming.hello(7, &Admission::Open).await.unwrap();
            let entrance = cm::Listener::bind(pd.device(), any).await.unwrap();
            let mut reply = hello(7);
            reply.connection_id = offer.hello.connection_id;
            reply.qps = offer.hello.qps.clone();
            reply.cm_port = entrance.local_addr().port();
            let admit = async {
                let mut held = Vec::new();
                for n in 0..=wrong_at {
                    let bare = Bare::new(&pd);
                    let request = entrance.accept().await.unwrap();
                    let epoch = private::encode(if n == wrong_at { 8 } else { 7 });
                    let line = request.accept(&bare.qp, &ATTR, &epoch, far()).await;
                    if n < wrong_at {
                        held.push((line.unwrap(), bare));
                        continue;
                    }
                    // The client has looked at the answer first, and was never there.
                    let stage = connect::Stage::Established;
                    assert!(matches!(line, Err(ConnectError::Closed { stage: s }) if s == stage), "{line:?}");
                }
                // The client gives up, and what was connected with it.
                for (line, _) in &held {
                    tokio::time::timeout(PATIENCE, line.disconnected()).await.expect("it is given up");
                }
            };
            let (accepted, ()) = tokio::join!(offer.accept(&reply), admit);
            assert!(matches!(accepted, Err(ConnectError::Closed { stage: connect::Stage::Ready })));
        };
        let (refused, ()) = tokio::join!(client.connect(front.local_addr()), server);
        let Err(ConnectError::IdentityMismatch { expected, got }) = refused else { panic!("{refused:?}") };
        assert!(expected.ends_with('7') && got.ends_with('8'), "{expected}, {got}");
        all_free(&client).await;
    }
}
