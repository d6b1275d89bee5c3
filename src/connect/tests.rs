//! The bootstrap over real sockets: good peers, bad peers, and what is left of a failed connect.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::error::{ConnectError, Fault, Stage};
use super::frame::{self, Kind};
use super::gate::Gate;
use super::handshake::{Expect, client};
use super::hello::Hello;
use super::hello::tests::sample;
use super::oob::{OobListener, dial};
use super::reject::Reject;
use super::*;

/// Far more than any step needs.
const LONG: Duration = Duration::from_secs(60);
const SERVER_EPOCH: u64 = 0x5e;

fn far() -> Deadline {
    Deadline::after(LONG)
}

async fn listener() -> OobListener {
    OobListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
}

fn server_hello(to: &Hello) -> Hello {
    Hello { epoch: SERVER_EPOCH, name: "server".into(), connection_id: to.connection_id, ..sample() }
}

/// Takes one connection through the whole handshake.
async fn serve_one(l: &OobListener) -> Result<TcpStream, ConnectError> {
    let offer = l.accept(LONG).await?.hello(SERVER_EPOCH, &Admission::Open).await?;
    let reply = server_hello(&offer.hello);
    match agree(&reply, &offer.hello, Role::Server) {
        Ok(_) => offer.accept(&reply).await?.finish().await,
        Err(reject) => Err(offer.reject(reject).await),
    }
}

async fn connect_with(
    l: &OobListener,
    hello: Hello,
    expect: Expect,
) -> Result<(Hello, TcpStream), ConnectError> {
    let stream = dial(&l.local_addr().to_string(), far()).await?;
    let got = client(Framed::plain(stream), &hello, &expect, far()).await?;
    let reply = got.reply.clone();
    Ok((reply, got.ready(&[]).await?))
}

#[tokio::test]
async fn b1_two_endpoints_shake_hands_and_keep_the_stream() {
    let l = listener().await;
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, sample(), Expect::default()));
    let (mut server, (reply, mut client)) = (server.unwrap(), client.unwrap());
    assert_eq!((reply.epoch, reply.name.as_str()), (SERVER_EPOCH, "server"));
    server.write_all(b"x").await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), b'x');
}

#[tokio::test]
async fn b1_case_16_block_sizes_and_dtypes_that_differ_are_refused_naming_both_values() {
    let l = listener().await;
    let mut hello = sample();
    hello.layout.as_mut().unwrap().block_bytes = 32768;
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, hello, Expect::default()));
    assert!(
        matches!(server, Err(ConnectError::LayoutMismatch { ours: 1152, theirs: 32768, .. })),
        "{server:?}"
    );
    let e = client.unwrap_err();
    assert!(matches!(e, ConnectError::LayoutMismatch { ours: 32768, theirs: 1152, .. }), "{e:?}");
    assert_eq!(e.fault(), Fault::Incompatible);

    let mut hello = sample();
    hello.layout.as_mut().unwrap().dtype = "fp8".into();
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, hello, Expect::default()));
    assert!(matches!(server, Err(ConnectError::DtypeMismatch { .. })));
    assert_eq!(
        client.unwrap_err().to_string(),
        r#"dtype differs: "fp8" on this side, "bf16" on the peer's; configure both pools alike"#
    );
}

#[tokio::test]
async fn k9_sides_without_a_transport_in_common_are_refused_naming_both() {
    let l = listener().await;
    let with = |transport: &str| Hello { transport: transport.into(), ..sample() };
    // The server of these tests takes TCP only.
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, with("soft-shm"), Expect::default()));
    for (end, named) in [
        (server.unwrap_err(), "soft-tcp on this side, soft-shm on the peer's"),
        (client.unwrap_err(), "soft-shm on this side, soft-tcp on the peer's"),
    ] {
        assert!(matches!(end, ConnectError::TransportMismatch { .. }), "{end:?}");
        assert!(end.to_string().contains(named), "{end}");
        assert_eq!(end.fault(), Fault::Incompatible);
    }
    let (server, client) =
        tokio::join!(serve_one(&l), connect_with(&l, with("soft-auto"), Expect::default()));
    assert!(server.is_ok() && client.is_ok());
}

#[tokio::test]
async fn b1_case_46_the_wrong_peer_answers() {
    let l = listener().await;
    for expect in [
        Expect { epoch: Some(SERVER_EPOCH + 1), name: None },
        Expect { epoch: None, name: Some("decode-7".into()) },
    ] {
        let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, sample(), expect));
        assert!(matches!(client, Err(ConnectError::IdentityMismatch { .. })), "{client:?}");
        assert!(matches!(server, Err(ConnectError::Closed { stage: Stage::Ready })), "{server:?}");
    }
    let right = Expect { epoch: Some(SERVER_EPOCH), name: Some("server".into()) };
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, sample(), right));
    assert!(server.is_ok() && client.is_ok());
}

#[tokio::test]
async fn b1_case_46_a_busy_port_is_refused_at_once_and_port_0_is_reported() {
    let l = OobListener::bind("[::1]:0".parse().unwrap()).await.unwrap();
    let addr = l.local_addr();
    assert!(addr.is_ipv6() && addr.port() != 0);
    let again = OobListener::bind(addr).await.unwrap_err();
    assert!(matches!(again, ConnectError::AddrInUse { addr: a } if a == addr));
    assert_eq!(again.fault(), Fault::Local);
    let to = addr.to_string();
    let (server, stream) = tokio::join!(l.accept(LONG), dial(&to, far()));
    assert!(server.is_ok() && stream.is_ok());
}

#[tokio::test]
async fn b1_nobody_listens_and_addresses_that_are_none() {
    let gone = listener().await.local_addr();
    let e = dial(&gone.to_string(), far()).await.unwrap_err();
    assert!(matches!(e, ConnectError::Refused { addr } if addr == gone), "{e:?}");
    for given in ["", "host", "host:", ":1", "host:70000", "a b:1", "::1:5", "[x]:1", "http://host:1"] {
        let e = dial(given, far()).await.unwrap_err();
        assert!(matches!(&e, ConnectError::Address { given: g } if g == given), "{given}: {e:?}");
    }
    let e = dial("no-such-host.invalid:1", far()).await.unwrap_err();
    assert!(matches!(e, ConnectError::Resolve { .. }), "{e:?}");
}

#[tokio::test]
async fn b1_names_are_looked_up() {
    let l = listener().await;
    let target = format!("localhost:{}", l.local_addr().port());
    let (server, stream) = tokio::join!(l.accept(LONG), dial(&target, far()));
    assert_eq!(server.unwrap().peer(), stream.unwrap().local_addr().unwrap());
}

/// Sends raw bytes to a fresh server, and returns what the server made of it and what it answered.
async fn feed(bytes: &[u8], close: bool) -> (Result<(), ConnectError>, Vec<u8>) {
    let l = listener().await;
    let server = async {
        let incoming = l.accept(LONG).await?;
        incoming.hello(SERVER_EPOCH, &Admission::Open).await.map(|_| ())
    };
    let peer = async {
        let mut s = dial(&l.local_addr().to_string(), far()).await.unwrap();
        s.write_all(bytes).await.unwrap();
        if close {
            s.shutdown().await.unwrap();
        }
        let mut answer = Vec::new();
        // A reset is an answer too.
        let _ = s.read_to_end(&mut answer).await;
        answer
    };
    tokio::join!(server, peer)
}

async fn answered(bytes: &[u8]) -> Reject {
    let mut rest = bytes;
    let frame = frame::read(&mut rest, Stage::HelloReply, far()).await.unwrap();
    assert_eq!((frame.kind, frame.epoch), (Kind::Reject, SERVER_EPOCH));
    Reject::decode(&frame.body).unwrap()
}

#[tokio::test]
async fn b1_bad_peers_get_a_typed_error_and_an_answer_when_they_can_read_it() {
    let hello = sample();
    let good = frame::encode(Kind::Hello, hello.epoch, |b| hello.encode(b)).unwrap();
    assert!(feed(&good, true).await.0.is_ok());

    let (got, answer) = feed(b"GET / HTTP/1.1\r\n\r\n.......", false).await;
    assert!(matches!(got, Err(ConnectError::NotLandfall { .. })) && answer.is_empty(), "{got:?}");

    let mut v = good.clone();
    v[4] = 2;
    let (got, answer) = feed(&v, false).await;
    assert!(matches!(got, Err(ConnectError::Version { ours: 1, theirs: 2 })), "{got:?}");
    assert_eq!(answered(&answer).await, Reject::Version { ours: 1, theirs: 2 });

    let mut v = good.clone();
    v[8..12].copy_from_slice(&(frame::MAX_BODY + 1).to_le_bytes());
    let (got, answer) = feed(&v, false).await;
    assert!(matches!(got, Err(ConnectError::TooLarge { .. })), "{got:?}");
    assert!(matches!(answered(&answer).await, Reject::Malformed { what } if what.contains("1048577")));

    let ready = frame::encode(Kind::Ready, 1, |_| {}).unwrap();
    let (got, answer) = feed(&ready, false).await;
    assert!(matches!(got, Err(ConnectError::Unexpected { kind: 4, .. })), "{got:?}");
    assert!(matches!(answered(&answer).await, Reject::Malformed { .. }));

    let empty = frame::encode(Kind::Hello, 1, |_| {}).unwrap();
    let (got, answer) = feed(&empty, false).await;
    assert!(matches!(&got, Err(ConnectError::Malformed { .. })), "{got:?}");
    assert_eq!(got.unwrap_err().fault(), Fault::Peer);
    assert_eq!(answered(&answer).await, Reject::Malformed { what: "no path".into() });

    for cut in (0..good.len()).step_by(7) {
        let (got, _) = feed(&good[..cut], true).await;
        assert!(
            matches!(got, Err(ConnectError::Truncated { .. } | ConnectError::Closed { .. })),
            "cut at {cut}: {got:?}"
        );
    }
}

#[tokio::test]
async fn b1_a_server_that_answers_garbage_fails_the_client_only() {
    for (answer, expected) in
        [(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "not a landfall endpoint"), (b"", "closed")]
    {
        let t = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = t.local_addr().unwrap().to_string();
        let server = async {
            let (mut s, _) = t.accept().await.unwrap();
            let mut hello = [0u8; 16];
            s.read_exact(&mut hello).await.unwrap();
            s.write_all(answer).await.unwrap();
        };
        let connect = async {
            let s = dial(&addr, far()).await?;
            client(Framed::plain(s), &sample(), &Expect::default(), far()).await.map(|_| ())
        };
        let ((), got) = tokio::join!(server, connect);
        let e = got.unwrap_err().to_string();
        assert!(e.contains(expected), "{e}");
    }
}

#[tokio::test]
async fn b1_silent_connections_do_not_keep_a_good_peer_out() {
    let l = listener().await.with_gate(Gate::with(8, Duration::ZERO));
    // More of them than there are places, none of which gets anywhere.
    let mut silent = Vec::new();
    let mut handshakes = tokio::task::JoinSet::new();
    for i in 0..20 {
        let to = l.local_addr().to_string();
        let (s, incoming) = tokio::join!(dial(&to, far()), l.accept(LONG));
        let mut s = s.unwrap();
        match i % 3 {
            0 => {}
            1 => s.write_all(b"L").await.unwrap(),
            // A whole hello, and then nothing.
            _ => {
                let v = frame::encode(Kind::Hello, 1, |b| sample().encode(b)).unwrap();
                s.write_all(&v).await.unwrap();
            }
        }
        silent.push(s);
        let incoming = incoming.unwrap();
        handshakes.spawn(async move {
            let offer = incoming.hello(SERVER_EPOCH, &Admission::Open).await?;
            let reply = server_hello(&offer.hello);
            offer.accept(&reply).await.map(|_| ())
        });
    }
    let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, sample(), Expect::default()));
    assert!(server.is_ok() && client.is_ok(), "{client:?}");
    // Of 20 and the good one, 8 have had a place at the end.
    for _ in 0..13 {
        let ended = handshakes.join_next().await.unwrap().unwrap();
        assert!(matches!(ended, Err(ConnectError::Evicted { .. })), "{ended:?}");
    }
    drop(silent);
    // The others end when their peers do.
    while let Some(ended) = handshakes.join_next().await {
        assert!(ended.unwrap().is_err());
    }
}

#[tokio::test]
async fn b1_a_reply_of_another_epoch_or_connection_is_refused() {
    let (a, mut b) = tokio::io::duplex(1 << 16);
    let server = async {
        let f = frame::read(&mut b, Stage::Hello, far()).await.unwrap();
        let hello = Hello::decode(f.epoch, &f.body).unwrap();
        let reply = Hello { connection_id: hello.connection_id + 1, ..server_hello(&hello) };
        let v = frame::encode(Kind::HelloReply, 1, |b| reply.encode(b)).unwrap();
        b.write_all(&v).await.unwrap();
    };
    let (hello, expect) = (sample(), Expect::default());
    let ((), got) = tokio::join!(server, client(Framed::plain(a), &hello, &expect, far()));
    assert!(matches!(got, Err(ConnectError::Malformed { .. })), "{:?}", got.err());

    let (a, mut b) = tokio::io::duplex(1 << 16);
    let server = async {
        let f = frame::read(&mut b, Stage::Hello, far()).await.unwrap();
        let hello = Hello::decode(f.epoch, &f.body).unwrap();
        let reply = server_hello(&hello);
        let v = frame::encode(Kind::HelloReply, reply.epoch, |b| reply.encode(b)).unwrap();
        b.write_all(&v).await.unwrap();
        let ack = frame::encode(Kind::ReadyAck, reply.epoch + 1, |_| {}).unwrap();
        b.write_all(&ack).await.unwrap();
    };
    let connect =
        async { client(Framed::plain(a), &sample(), &Expect::default(), far()).await?.ready(&[]).await };
    let ((), got) = tokio::join!(server, connect);
    assert!(matches!(got, Err(ConnectError::IdentityMismatch { .. })), "{:?}", got.err());
}

#[tokio::test]
async fn b1_what_the_peer_would_refuse_is_not_sent() {
    let (a, mut b) = tokio::io::duplex(1 << 16);
    let hello = Hello { name: "n".repeat(65), ..sample() };
    let e = client(Framed::plain(a), &hello, &Expect::default(), far()).await.unwrap_err();
    assert!(matches!(&e, ConnectError::Invalid { what } if what.contains("name")), "{e:?}");
    assert_eq!(e.fault(), Fault::Local);
    let mut sent = Vec::new();
    b.read_to_end(&mut sent).await.unwrap();
    assert!(sent.is_empty());
}

/// A listener whose backlog is full: the kernel drops further SYNs, as an address that swallows packets does.
fn black_hole() -> (socket2::Socket, Vec<socket2::Socket>, SocketAddr) {
    use socket2::{Domain, Socket, Type};
    let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    s.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    s.listen(0).unwrap();
    let addr = s.local_addr().unwrap();
    let fillers = (0..4)
        .map(|_| {
            let f = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            f.set_nonblocking(true).unwrap();
            let _ = f.connect(&addr);
            f
        })
        .collect();
    (s, fillers, addr.as_socket().unwrap())
}

#[tokio::test(flavor = "current_thread")]
async fn b1_case_26_an_address_that_swallows_packets_meets_the_deadline_while_others_go_on() {
    let (_listener, _fillers, addr) = black_hole();
    let l = listener().await;
    let after = Duration::from_millis(300);
    let mut swallowed = tokio::spawn(async move {
        let e = dial(&addr.to_string(), Deadline::after(after)).await.unwrap_err();
        assert!(
            matches!(e, ConnectError::Timeout { stage: Stage::Dial, to: Some(to), after: a } if a == after && to == addr),
            "{e:?}"
        );
        assert!(e.to_string().contains(&addr.to_string()), "{e}");
    });
    // On the same thread, connects go through until the dial has ended.
    let mut connects = 0u32;
    let ended = loop {
        let (server, client) = tokio::join!(serve_one(&l), connect_with(&l, sample(), Expect::default()));
        assert!(server.is_ok() && client.is_ok());
        connects += 1;
        if swallowed.is_finished() {
            break (&mut swallowed).await;
        }
    };
    ended.unwrap();
    assert!(connects > 1, "the dial held the thread");
}

pub(super) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs an ignored test of this program in a process of its own.
#[track_caller]
pub(super) fn passes_alone(test: &str) {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// The body of `b4_case_34_…`, in a process of its own, so that no other test opens descriptors meanwhile.
#[tokio::test]
#[ignore = "run by b4_case_34_failed_connects_leave_nothing"]
async fn b4_child() {
    let l = listener().await;
    let nobody = listener().await.local_addr().to_string();
    let mut hello = sample();
    hello.layout.as_mut().unwrap().layers += 1;
    let before = open_descriptors();
    for i in 0..300 {
        match i % 5 {
            0 => assert!(dial(&nobody, far()).await.is_err()),
            // Refused for its layout.
            1 => {
                let r = tokio::join!(serve_one(&l), connect_with(&l, hello.clone(), Expect::default()));
                assert!(r.0.is_err() && r.1.is_err());
            }
            // The wrong server.
            2 => {
                let expect = Expect { epoch: Some(1), name: None };
                let r = tokio::join!(serve_one(&l), connect_with(&l, sample(), expect));
                assert!(r.0.is_err() && r.1.is_err());
            }
            // Killed inside the hello.
            3 => {
                let to = l.local_addr().to_string();
                let die = async {
                    let mut s = dial(&to, far()).await.unwrap();
                    s.write_all(b"LFLL\x01").await.unwrap();
                };
                assert!(tokio::join!(serve_one(&l), die).0.is_err());
            }
            // The server gives up in the middle, its future dropped.
            _ => {
                let serve = async {
                    let offer =
                        l.accept(LONG).await.unwrap().hello(SERVER_EPOCH, &Admission::Open).await.unwrap();
                    let reply = server_hello(&offer.hello);
                    let _ = tokio::time::timeout(Duration::ZERO, offer.accept(&reply)).await;
                };
                let r = tokio::join!(serve, connect_with(&l, sample(), Expect::default()));
                assert!(matches!(r.1, Err(ConnectError::Closed { .. })), "{:?}", r.1);
            }
        }
    }
    assert_eq!(open_descriptors(), before);
}

#[test]
fn b4_case_34_failed_connects_leave_nothing() {
    passes_alone("connect::tests::b4_child");
}
