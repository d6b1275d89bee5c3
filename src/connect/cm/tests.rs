//! The connection manager on the soft provider: good peers, bad peers, and what is left of a failed connect.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::error::Stage;
use super::super::frame::{self, Kind};
use super::super::reject::Reject;
use super::*;
use crate::device::{Profile, ProtectionDomain, SoftConfig};
use crate::provider::{Cq, Qp, QpInit, QpState};

/// Far more than any step needs.
const LONG: Duration = Duration::from_secs(60);
/// Of what is to run out.
const SHORT: Duration = Duration::from_millis(50);

pub(super) const ATTR: CmAttr = CmAttr {
    max_rd_atomic: 16,
    max_dest_rd_atomic: 8,
    timeout: 14,
    retry_cnt: 6,
    rnr_retry: 6,
    min_rnr_timer: 12,
};

fn far() -> Deadline {
    Deadline::after(LONG)
}

fn soft(profile: Profile) -> Device {
    Device::soft(SoftConfig::default().profile(profile)).unwrap()
}

/// A queue pair, and what it needs.
struct Side {
    qp: Qp,
    _cq: Cq,
    device: Device,
    _pd: ProtectionDomain,
}

impl Side {
    fn of(device: &Device) -> Self {
        let channel = device.provider().create_channel().unwrap();
        let cq = channel.create_cq(16).unwrap();
        let pd = device.alloc_pd().unwrap();
        let init = QpInit { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
        let qp = pd.provider().create_qp(&cq, &cq, init).unwrap();
        Self { qp, _cq: cq, device: device.clone(), _pd: pd }
    }

    fn new() -> Self {
        Self::of(&soft(Profile::Default))
    }

    async fn connect(&self, to: SocketAddr, private: &[u8]) -> Result<Connection, ConnectError> {
        connect(&self.device, &self.qp, to, &ATTR, private, |_| Ok(()), far()).await
    }
}

async fn listener(side: &Side) -> Listener {
    Listener::bind(&side.device, SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
}

async fn serve(l: &Listener, side: &Side, private: &[u8]) -> Result<Connection, ConnectError> {
    l.accept().await?.accept(&side.qp, &ATTR, private, far()).await
}

async fn connected() -> ((Side, Connection), (Side, Connection)) {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let (server, client) = tokio::join!(serve(&l, &b, b"pong"), a.connect(l.local_addr(), b"ping"));
    ((a, client.unwrap()), (b, server.unwrap()))
}

fn now<T>(f: impl Future<Output = T>) -> Poll<T> {
    pin!(f).poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn b5_a_request_is_accepted_and_private_data_arrives_padded() {
    let ((a, client), (b, server)) = connected().await;
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Rts, QpState::Rts));
    assert_eq!(&client.private_data()[..5], b"pong\0");
    assert_eq!(client.private_data().len(), 196);
    assert_eq!(&server.private_data()[..5], b"ping\0");
    assert_eq!(server.private_data().len(), 56);
    assert_eq!((client.local_addr(), client.peer_addr()), (server.peer_addr(), server.local_addr()));
    assert!(now(client.disconnected()).is_pending() && now(server.disconnected()).is_pending());
}

#[tokio::test]
async fn b5_every_profile_is_connected_by_the_manager() {
    for profile in Profile::ALL {
        let device = soft(profile);
        let (a, b) = (Side::of(&device), Side::of(&device));
        let l = listener(&b).await;
        let (server, client) = tokio::join!(serve(&l, &b, &[]), a.connect(l.local_addr(), &[]));
        server.unwrap();
        client.unwrap();
    }
}

/// CASES 46.
#[tokio::test]
async fn b1_private_data_of_57_bytes_is_too_long_before_anything_is_dialled() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let e = a.connect(l.local_addr(), &[1; 57]).await.unwrap_err();
    assert!(matches!(e, ConnectError::PrivateDataTooLong { len: 57, limit: 56, .. }), "{e:?}");
    // 56 are not; and the queue pair is as it was.
    let (server, client) = tokio::join!(serve(&l, &b, &[2; 196]), a.connect(l.local_addr(), &[1; 56]));
    assert_eq!(server.unwrap().private_data(), [1; 56]);
    assert_eq!(client.unwrap().private_data(), [2; 196]);
    let (a, b) = (Side::new(), Side::new());
    let (server, client) = tokio::join!(serve(&l, &b, &[2; 197]), a.connect(l.local_addr(), &[]));
    let e = server.unwrap_err();
    assert!(matches!(e, ConnectError::PrivateDataTooLong { len: 197, limit: 196, .. }), "{e:?}");
    assert!(matches!(client, Err(ConnectError::PeerRejected { .. })), "{client:?}");
}

#[tokio::test]
async fn b4_a_rejected_request_says_so_and_why() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let to = l.local_addr();
    for by_drop in [false, true] {
        let reject = async {
            let request = l.accept().await.unwrap();
            if !by_drop {
                request.reject(b"full house");
            }
        };
        let ((), client) = tokio::join!(reject, a.connect(to, b"may I"));
        let Err(ConnectError::PeerRejected { addr, private_data, .. }) = client else { panic!("{client:?}") };
        assert_eq!((addr, private_data.len()), (to, 148));
        assert_eq!(private_data.starts_with(b"full house"), !by_drop);
        // The queue pair can be connected all the same.
        assert_eq!(a.qp.state(), QpState::Init);
    }
    let (server, client) = tokio::join!(serve(&l, &b, &[]), a.connect(to, &[]));
    assert!(server.is_ok() && client.is_ok());
}

#[tokio::test]
async fn b4_nobody_listens() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let to = l.local_addr();
    let e = Listener::bind(&b.device, to).await.unwrap_err();
    assert!(matches!(e, ConnectError::AddrInUse { addr } if addr == to), "{e:?}");
    drop(l);
    let e = a.connect(to, &[]).await.unwrap_err();
    assert!(matches!(e, ConnectError::Refused { addr } if addr == to), "{e:?}");
    // The port is free at once.
    Listener::bind(&b.device, to).await.unwrap();
}

#[tokio::test]
async fn b1_the_order_of_messages_must_be_the_same() {
    let (a, b) = (Side::of(&soft(Profile::Srd)), Side::new());
    let l = listener(&b).await;
    let (server, client) = tokio::join!(serve(&l, &b, &[]), a.connect(l.local_addr(), &[]));
    for e in [server.unwrap_err(), client.unwrap_err()] {
        assert!(matches!(e, ConnectError::Unsupported { .. }), "{e:?}");
        assert!(e.to_string().contains("SRD"), "{e}");
    }
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Init, QpState::Init));
}

#[tokio::test]
async fn b1_bad_peers_cost_the_others_nothing() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let mut silent = Vec::new();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 300], b"", b"LFLL\x01\0"] {
        let mut stream = TcpStream::connect(l.local_addr()).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        silent.push(stream);
    }
    // A frame that is longer than any of the manager's, and one of the other bootstrap's.
    for (kind, len) in [(Kind::CmRequest, 5000), (Kind::Hello, 100)] {
        let mut stream = TcpStream::connect(l.local_addr()).await.unwrap();
        let frame = frame::encode(kind, 0, |b| b.resize(b.len() + len, 0)).unwrap();
        stream.write_all(&frame).await.unwrap();
        silent.push(stream);
    }
    let (server, client) = tokio::join!(serve(&l, &b, &[]), a.connect(l.local_addr(), &[]));
    assert!(server.is_ok() && client.is_ok(), "{server:?} {client:?}");
}

#[tokio::test]
async fn b1_the_wrong_peer_answers() {
    let a = Side::new();
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = other.local_addr().unwrap();
    let answer = |bytes: Vec<u8>| {
        let other = &other;
        async move {
            let (mut stream, _) = other.accept().await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            let mut said = Vec::new();
            stream.shutdown().await.unwrap();
            let _ = stream.read_to_end(&mut said).await;
        }
    };
    let ((), e) = tokio::join!(answer(b"220 mail.example ESMTP service".to_vec()), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::NotLandfall { .. })), "{e:?}");
    let reply = |kind, len: usize| frame::encode(kind, 0, |b| b.resize(b.len() + len, 0)).unwrap();
    let ((), e) = tokio::join!(answer(reply(Kind::HelloReply, 8)), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::Unexpected { stage: Stage::Reply, .. })), "{e:?}");
    let ((), e) = tokio::join!(answer(reply(Kind::CmReply, 8)), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::Malformed { stage: Stage::Reply, .. })), "{e:?}");
    let ((), e) = tokio::join!(answer(reply(Kind::CmReply, 5000)), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::TooLarge { .. })), "{e:?}");
    // Nobody is asked who it is here: no channel of ours is named, and given to the user instead.
    let named = frame::encode(Kind::Reject, 0, |b| Reject::Duplicate { winner: 7 }.encode(b)).unwrap();
    let ((), e) = tokio::join!(answer(named), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::Unexpected { stage: Stage::Reply, .. })), "{e:?}");
    let ((), e) = tokio::join!(answer(Vec::new()), a.connect(to, &[]));
    assert!(matches!(e, Err(ConnectError::Closed { stage: Stage::Reply })), "{e:?}");
    assert_eq!(a.qp.state(), QpState::Init);
}

#[tokio::test]
async fn b5_the_answer_is_looked_at_before_the_queue_pair_is_connected() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    let check = |theirs: &[u8]| {
        assert_eq!(&theirs[..4], b"pong");
        Err(ConnectError::NotAuthentic { stage: Stage::Reply })
    };
    let asked = connect(&a.device, &a.qp, l.local_addr(), &ATTR, b"ping", check, far());
    let (server, client) = tokio::join!(serve(&l, &b, b"pong"), asked);
    assert!(matches!(client, Err(ConnectError::NotAuthentic { .. })), "{client:?}");
    assert!(matches!(server, Err(ConnectError::Closed { stage: Stage::Established })), "{server:?}");
    assert_eq!(a.qp.state(), QpState::Init);
}

#[tokio::test]
async fn b1_a_silent_peer_costs_no_more_than_the_deadline() {
    // A listener that never answers, and a client that never says that it is ready.
    let a = Side::new();
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = other.local_addr().unwrap();
    let e = connect(&a.device, &a.qp, to, &ATTR, &[], |_| Ok(()), Deadline::after(SHORT)).await.unwrap_err();
    assert!(matches!(e, ConnectError::Timeout { stage: Stage::Reply, after: SHORT, .. }), "{e:?}");

    let b = Side::new();
    let l = listener(&b).await;
    let mut client = TcpStream::connect(l.local_addr()).await.unwrap();
    let offer = offer::Offer {
        address: a.qp.address(),
        mtu: 4096,
        serves: 1,
        issues: 1,
        ordered: true,
        private: vec![7],
    };
    client.write_all(&frame::encode(Kind::CmRequest, 0, |b| offer.encode(b)).unwrap()).await.unwrap();
    let request = l.accept().await.unwrap();
    let e = request.accept(&b.qp, &ATTR, &[], Deadline::after(SHORT)).await.unwrap_err();
    assert!(matches!(e, ConnectError::Timeout { stage: Stage::Established, .. }), "{e:?}");
}

#[tokio::test]
async fn b4_the_end_of_a_side_disconnects_the_other() {
    // Said, dropped, and by the death of the process, which closes the socket as a drop does.
    for said in [true, false] {
        let ((a, client), (b, server)) = connected().await;
        if said {
            server.disconnect();
            // For oneself too.
            server.disconnected().await;
        } else {
            drop((b, server));
        }
        tokio::join!(client.disconnected(), client.disconnected());
        client.disconnected().await;
        drop(a);
    }
}

#[tokio::test]
async fn b4_a_connect_that_is_dropped_midway_leaves_nothing() {
    let (a, b) = (Side::new(), Side::new());
    let l = listener(&b).await;
    // Before the request is taken: it is read, and its answer finds nobody.
    for polls in 1..6 {
        {
            let mut connecting = pin!(a.connect(l.local_addr(), &[]));
            for _ in 0..polls {
                let mut cx = Context::from_waker(Waker::noop());
                assert!(connecting.as_mut().poll(&mut cx).is_pending());
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(a.qp.state(), QpState::Init);
    }
    // An accept that is dropped after the reply: the client is told by the end of the connection.
    let taken = async {
        loop {
            let request = l.accept().await.unwrap();
            if request.private_data()[0] == 9 {
                return request;
            }
        }
    };
    let client = async {
        let connection = a.connect(l.local_addr(), &[9]).await.unwrap();
        connection.disconnected().await;
    };
    let server = async {
        let request = taken.await;
        let accepting = request.accept(&b.qp, &ATTR, &[], far());
        assert!(now(accepting).is_pending());
    };
    tokio::join!(server, client);
}
