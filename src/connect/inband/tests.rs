//! The stream over soft queue pairs that the test connects by hand: the handshake as over a socket, and peers that vanish,
//! say too much, or break the format.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::error::Stage;
use super::super::frame::{self, Kind, MAX_BODY};
use super::super::gate::Gate;
use super::super::handshake::{Expect, Incoming, client};
use super::super::hello::Hello;
use super::super::hello::tests::sample;
use super::super::reject::Reject;
use super::super::{Admission, Deadline, Framed, agree};
use super::*;
use crate::device::{Device, Profile, SoftConfig};
use crate::provider::QpConnect;

const LONG: Duration = Duration::from_secs(60);
const SERVER: u64 = 0x5e;
const PROFILES: [Profile; 3] = [Profile::Default, Profile::ErdmaCompat, Profile::Tiny];

fn far() -> Deadline {
    Deadline::after(LONG)
}

async fn open(profile: Profile) -> Inband {
    let device = Device::soft(SoftConfig::new().profile(profile)).unwrap();
    Inband::open(&device.alloc_pd().unwrap()).await.unwrap()
}

fn join(from: &Inband, to: &Inband, active: bool) {
    let attr = QpConnect {
        remote: to.qp.address(),
        path_mtu: 1024,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        timeout: 18,
        retry_cnt: 6,
        rnr_retry: 6,
        min_rnr_timer: 14,
        active,
    };
    from.qp.connect(&attr).unwrap();
}

/// Two connected streams: the first dials.
async fn pair(profile: Profile) -> (Inband, Inband) {
    let (a, b) = (open(profile).await, open(profile).await);
    join(&b, &a, false);
    join(&a, &b, true);
    (a, b)
}

fn incoming(stream: Inband) -> Incoming<Inband> {
    Incoming::new(stream, SocketAddr::from(([127, 0, 0, 1], 1)), Gate::new().enter(), far())
}

fn reply_to(hello: &Hello) -> Hello {
    Hello { epoch: SERVER, connection_id: hello.connection_id, ..sample() }
}

async fn serve(stream: Inband) -> Result<Inband, ConnectError> {
    let offer = incoming(stream).hello(SERVER, &Admission::Open).await?;
    let reply = reply_to(&offer.hello);
    match agree(&reply, &offer.hello, crate::connect::Role::Server) {
        Ok(_) => offer.accept(&reply).await?.finish().await,
        Err(reject) => Err(offer.reject(reject).await),
    }
}

async fn connect(stream: Inband, hello: &Hello) -> Result<Inband, ConnectError> {
    client(Framed::plain(stream), hello, &Expect::default(), far()).await?.ready(&[]).await
}

#[tokio::test]
async fn b5_the_handshake_runs_over_a_queue_pair_and_both_ends_close_in_order() {
    for profile in PROFILES {
        let (a, b) = pair(profile).await;
        let hello = sample();
        let (client, server) = tokio::join!(connect(a, &hello), serve(b));
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        // Whoever speaks last says so; the other destroys its queue pair then, which may be before it has acknowledged.
        let rest = async move { server.read_to_end(&mut Vec::new()).await };
        let (end, rest) = tokio::join!(client.shutdown(), rest);
        assert!(end.is_ok() || end.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset));
        assert_eq!(rest.unwrap(), 0);
    }
}

/// Far more than the window, each way, with the window of `tiny` too.
#[tokio::test]
async fn b5_a_frame_of_the_limit_passes() {
    for profile in PROFILES {
        let (mut a, mut b) = pair(profile).await;
        let bytes = frame::encode(Kind::Hello, 7, |v| {
            v.extend((0..MAX_BODY).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8))
        })
        .unwrap();
        for _ in 0..2 {
            let send = frame::write(&mut a, &bytes, Stage::Hello, far());
            let (sent, got) = tokio::join!(send, frame::read(&mut b, Stage::Hello, far()));
            sent.unwrap();
            assert_eq!(got.unwrap().body, &bytes[frame::HEADER_LEN..]);
            (a, b) = (b, a);
        }
    }
}

#[tokio::test]
async fn b1_a_refusal_arrives_with_both_values() {
    let (a, b) = pair(Profile::Default).await;
    let mut hello = sample();
    hello.layout.as_mut().unwrap().block_bytes = 32768;
    let (client, server) = tokio::join!(connect(a, &hello), serve(b));
    assert!(matches!(client, Err(ConnectError::LayoutMismatch { ours: 32768, theirs: 1152, .. })));
    assert!(matches!(server, Err(ConnectError::LayoutMismatch { ours: 1152, theirs: 32768, .. })));
}

/// The client dies before its hello, inside it, and after it.
#[tokio::test]
async fn k5_a_client_that_vanishes_ends_the_handshake_at_every_stage() {
    let hello = sample();
    let bytes = frame::encode(Kind::Hello, hello.epoch, |b| hello.encode(b)).unwrap();
    for cut in [0, 1, frame::HEADER_LEN, bytes.len() - 1, bytes.len()] {
        let (mut a, b) = pair(Profile::Default).await;
        let server = tokio::spawn(serve(b));
        if cut == 0 {
            // So that the server's queue pair has met its peer at all.
            a.post(DATA, &[]).unwrap();
        } else {
            a.write_all(&bytes[..cut]).await.unwrap();
        }
        while a.free.len() < a.send.len() {
            std::future::poll_fn(|cx| a.poll_progress(cx)).await;
        }
        drop(a);
        let error = server.await.unwrap().unwrap_err();
        let stage = if cut == bytes.len() { Stage::Ready } else { Stage::Hello };
        assert!(matches!(error, ConnectError::Closed { stage: s } if s == stage), "cut at {cut}: {error:?}");
    }
}

/// The server dies before it has read the hello, and after each of its answers.
#[tokio::test]
async fn k5_a_server_that_vanishes_ends_the_handshake_at_every_stage() {
    for answers in 0..2 {
        let (a, b) = pair(Profile::Default).await;
        let hello = sample();
        let server = async {
            let offer = incoming(b).hello(SERVER, &Admission::Open).await.unwrap();
            if answers == 1 {
                let reply = reply_to(&offer.hello);
                drop(offer.accept(&reply).await.unwrap());
            }
        };
        let (client, ()) = tokio::join!(connect(a, &hello), server);
        let stage = if answers == 0 { Stage::HelloReply } else { Stage::ReadyAck };
        assert!(matches!(client, Err(ConnectError::Closed { stage: s }) if s == stage), "{client:?}");
    }
}

/// Bytes that a peer posts by itself, and what the reader makes of them.
async fn hostile(message: &[u8], room: usize) -> io::Error {
    let (mut a, mut b) = pair(Profile::Default).await;
    let at = a.send[0].sge();
    // The buffers are neighbours, so that one element spans several.
    let sge = Sge { addr: at.addr, len: room as u32, lkey: at.lkey };
    a.send[0][..message.len()].copy_from_slice(message);
    let mut chain = WrChain::default();
    chain.push(0, SendOp::Send { imm: None }, &[sge], true, false);
    a.qp.post_send(&chain).unwrap();
    let mut buf = [0; 16];
    let read = async {
        loop {
            match b.read(&mut buf).await {
                Ok(0) => panic!("the end, where an error is due"),
                Ok(_) => {}
                Err(error) => return error,
            }
        }
    };
    let sending = async {
        loop {
            std::future::poll_fn(|cx| a.poll_progress(cx)).await;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! { error = read => error, () = sending => unreachable!() }
}

#[tokio::test]
async fn b1_messages_that_break_the_format_are_errors_of_the_peer() {
    for (what, message, room) in [
        ("longer than the receive", &head(DATA, 0)[..], MESSAGE + 1),
        ("without a head", &[DATA][..], 1),
        ("of an unknown kind", &head(9, 0)[..], HEAD),
        ("that gives back what was never used", &head(DATA, 1)[..], HEAD),
        ("that gives back nearly everything", &head(END, u32::MAX)[..], HEAD),
    ] {
        let error = hostile(message, room).await;
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{what}: {error}");
    }
}

#[tokio::test]
async fn b1_nothing_follows_the_end() {
    let (mut a, mut b) = pair(Profile::Default).await;
    a.shutdown_half();
    a.post(DATA, b"more").unwrap();
    let mut buf = [0; 16];
    let read = async {
        // The end is told first; the stream is over for the reader, and its own direction fails.
        assert_eq!(b.read(&mut buf).await.unwrap(), 0);
        while b.failure.is_none() {
            std::future::poll_fn(|cx| b.poll_progress(cx)).await;
        }
        b.write(b"x").await.unwrap_err()
    };
    let sending = async {
        loop {
            std::future::poll_fn(|cx| a.poll_progress(cx)).await;
        }
    };
    let error = tokio::select! { error = read => error, () = sending => unreachable!() };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

impl Inband {
    /// Says that nothing follows.
    fn shutdown_half(&mut self) {
        self.post(END, &[]).unwrap();
        self.sent_end = true;
    }
}

/// Who is refused while it sends reads the refusal, and what it still sends is taken.
#[tokio::test]
async fn b1_a_refusal_reaches_a_peer_that_is_still_sending() {
    let (a, mut b) = pair(Profile::Default).await;
    let hello = Hello { regions: vec![sample().regions[0]; 30_000], ..sample() };
    let server = async {
        let mut first = [0; 8];
        b.read_exact(&mut first).await.unwrap();
        let bytes = frame::encode(Kind::Reject, SERVER, |v| Reject::Busy.encode(v)).unwrap();
        frame::write(&mut b, &bytes, Stage::HelloReply, far()).await.unwrap();
        b.shutdown().await.unwrap();
        let _ = b.read_to_end(&mut Vec::new()).await;
    };
    let (client, ()) = tokio::join!(connect(a, &hello), server);
    assert!(matches!(client, Err(ConnectError::Busy)), "{client:?}");
}

#[tokio::test]
async fn k5_an_end_that_nobody_takes_meets_the_deadline() {
    let (mut a, _b) = pair(Profile::Default).await;
    let after = Duration::from_millis(50);
    let deadline = Deadline::after(after);
    let ended = deadline.io(Stage::Ready, a.shutdown()).await;
    assert!(matches!(ended, Err(ConnectError::Timeout { stage: Stage::Ready, .. })), "{ended:?}");
}

/// A peer that sends as fast as its device goes, from a runtime of its own: messages that carry nothing, or one byte.
/// The deadline is met, and other tasks of the reader's thread run.
#[tokio::test]
async fn r9_a_flood_holds_no_thread() {
    for payload in [&b""[..], b"x"] {
        let (mut a, mut b) = pair(Profile::Default).await;
        let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let until = over.clone();
        let flood = std::thread::spawn(move || {
            while !until.load(std::sync::atomic::Ordering::Relaxed) && a.failure.is_none() {
                Inband::take(&mut a);
                if a.may_send() && a.post(DATA, payload).is_err() {
                    break;
                }
            }
            a
        });
        let mut turns = 0;
        let other = async {
            while turns < 100 {
                tokio::task::yield_now().await;
                turns += 1;
            }
        };
        let mut all = Vec::new();
        tokio::select! {
            end = b.read_to_end(&mut all) => panic!("{end:?}"),
            () = other => {}
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        drop(flood.join().unwrap());
        assert_eq!(turns, 100);
    }
}

impl Inband {
    /// What becomes of a one-sided operation by way of this queue pair.
    pub(crate) async fn reach(&self, op: SendOp) -> WcStatus {
        const MARK: u64 = u64::MAX;
        let at = self.send[0].sge();
        let mut chain = WrChain::default();
        chain.push(MARK, op, &[Sge { addr: at.addr, len: 8, lkey: at.lkey }], true, false);
        self.qp.post_send(&chain).unwrap();
        let mut cqes = [Cqe::default(); 8];
        loop {
            let got = self.cq.poll(&mut cqes).unwrap();
            if let Some(cqe) = cqes[..got].iter().find(|cqe| cqe.wr_id == MARK) {
                return cqe.status;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
