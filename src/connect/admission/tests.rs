//! Admission over real sockets: who is let in, and what becomes of what was changed, repeated, reflected or cut on the way.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::deadline::Deadline;
use super::super::error::{Fault, Stage};
use super::super::frame::{self, HEADER_LEN, Kind};
use super::super::framed::Framed;
use super::super::gate::Gate;
use super::super::handshake::{Expect, authenticate, client};
use super::super::hello::Hello;
use super::super::hello::tests::sample;
use super::super::oob::{OobListener, dial};
use super::super::reject::Reject;
use super::super::tests::{open_descriptors, passes_alone};
use super::*;

/// Far more than any step needs.
const LONG: Duration = Duration::from_secs(60);
const SERVER_EPOCH: u64 = 0x5e;

fn far() -> Deadline {
    Deadline::after(LONG)
}

fn key(id: &str, byte: u8) -> Psk {
    Psk::new(id, &[byte; 32]).unwrap()
}

fn psk() -> Admission {
    Admission::Psk(key("a", 7))
}

async fn listener() -> OobListener {
    OobListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
}

/// Takes one connection through the whole handshake. Answers who the peer is.
async fn serve(l: &OobListener, admission: &Admission, limit: Duration) -> Result<PeerAuth, ConnectError> {
    let offer = l.accept(limit).await?.hello(SERVER_EPOCH, admission).await?;
    let id = offer.hello.connection_id;
    let reply = Hello { epoch: SERVER_EPOCH, name: "server".into(), connection_id: id, ..sample() };
    let identity = offer.identity().clone();
    offer.accept(&reply).await?.finish().await?;
    Ok(identity)
}

/// The whole handshake of the other side. Answers who that is.
async fn connect(to: SocketAddr, admission: &Admission) -> Result<PeerAuth, ConnectError> {
    let stream = dial(&to.to_string(), far()).await?;
    let framed = authenticate(Framed::plain(stream), admission, sample().epoch, far()).await?;
    let identity = framed.identity().clone();
    client(framed, &sample(), &Expect::default(), far()).await?.ready(&[]).await?;
    Ok(identity)
}

/// Both ends, each with its own idea of who may connect.
async fn both(
    theirs: &Admission,
    ours: &Admission,
) -> (Result<PeerAuth, ConnectError>, Result<PeerAuth, ConnectError>) {
    let l = listener().await;
    tokio::join!(serve(&l, theirs, LONG), connect(l.local_addr(), ours))
}

#[test]
fn b1_a_listener_beyond_this_host_is_asked_for_by_name() {
    for (addr, local) in [
        ("127.0.0.1:1", true),
        ("127.9.9.9:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        ("0.0.0.0:1", false),
        ("[::]:1", false),
        ("10.0.0.1:1", false),
        ("[fe80::1]:1", false),
    ] {
        let addr: SocketAddr = addr.parse().unwrap();
        let refused = Admission::default().check_listener(addr);
        assert_eq!(refused.is_ok(), local, "{addr}");
        if let Err(error) = refused {
            assert_eq!(error.fault(), Fault::Local);
            assert!(error.to_string().contains("Admission::Open"), "{error}");
        }
        assert!(Admission::Open.check_listener(addr).is_ok());
        assert!(psk().check_listener(addr).is_ok());
    }
}

#[tokio::test]
async fn b1_holders_of_a_key_are_let_in_and_know_each_other_by_its_id() {
    let (server, client) = both(&psk(), &psk()).await;
    assert_eq!((server.unwrap(), client.unwrap()), (PeerAuth::Key("a".into()), PeerAuth::Key("a".into())));
    // While a key is replaced.
    let rotating = Admission::Psk(key("new", 9).and("a", &[7; 32]).unwrap());
    let (server, client) = both(&rotating, &psk()).await;
    assert_eq!((server.unwrap(), client.unwrap()), (PeerAuth::Key("a".into()), PeerAuth::Key("a".into())));
    let (server, client) = both(&Admission::Open, &Admission::Local).await;
    assert_eq!((server.unwrap(), client.unwrap()), (PeerAuth::Anonymous, PeerAuth::Anonymous));
}

#[tokio::test]
async fn b1_whoever_has_no_key_or_another_one_is_refused_and_both_ends_say_why() {
    for (theirs, ours, here, there) in [
        (psk(), Admission::Open, "psk on this side, open", "open on this side, psk"),
        (Admission::Open, psk(), "open on this side, psk", "psk on this side, open"),
    ] {
        let (server, client) = both(&theirs, &ours).await;
        for (end, words) in [(server.unwrap_err(), here), (client.unwrap_err(), there)] {
            assert!(matches!(end, ConnectError::AdmissionMismatch { .. }), "{end:?}");
            assert!(end.to_string().contains(words), "{end}");
            assert_eq!(end.fault(), Fault::Incompatible);
        }
    }

    let (server, client) = both(&Admission::Psk(key("b", 7)), &psk()).await;
    let (server, client) = (server.unwrap_err(), client.unwrap_err());
    assert!(matches!(&server, ConnectError::UnknownKey { id, by: "this side" } if id == "a"), "{server:?}");
    assert!(matches!(&client, ConnectError::UnknownKey { id, by: "the peer" } if id == "a"), "{client:?}");

    // The client finds out first, and has said nothing of itself by then.
    let (server, client) = both(&Admission::Psk(key("a", 8)), &psk()).await;
    let (server, client) = (server.unwrap_err(), client.unwrap_err());
    assert!(matches!(server, ConnectError::NotAuthentic { stage: Stage::Hello }), "{server:?}");
    assert!(matches!(client, ConnectError::NotAuthentic { stage: Stage::Challenge }), "{client:?}");
}

/// What one direction of a connection carried, or does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// What the attacker in the middle does to the bytes of one direction.
#[derive(Clone, Copy, Debug)]
enum Attack {
    Nothing,
    /// Changes bits of the byte at this place.
    Flip(usize, u8),
    /// Sends so many bytes, and then the end.
    Cut(usize),
    /// As `Flip`, and ends the direction after so many bytes: the length was changed, and one side would wait for more.
    FlipAndEnd(usize, u8, usize),
}

/// Copies one direction, and answers what it carried before it was changed.
async fn carry(
    from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    attack: Attack,
) -> io::Result<Vec<u8>> {
    let (mut from, mut seen, mut buf) = (from, Vec::new(), [0; 4096]);
    loop {
        let n = from.read(&mut buf).await?;
        if n == 0 {
            to.shutdown().await?;
            return Ok(seen);
        }
        let start = seen.len();
        seen.extend_from_slice(&buf[..n]);
        let mut bytes = buf[..n].to_vec();
        let end = match attack {
            Attack::Nothing => usize::MAX,
            Attack::Cut(end) => end,
            Attack::Flip(at, bits) | Attack::FlipAndEnd(at, bits, _) => {
                if let Some(byte) = at.checked_sub(start).and_then(|at| bytes.get_mut(at)) {
                    *byte ^= bits;
                }
                match attack {
                    Attack::FlipAndEnd(_, _, end) => end,
                    _ => usize::MAX,
                }
            }
        };
        bytes.truncate(end.saturating_sub(start));
        to.write_all(&bytes).await?;
        if start + n >= end {
            to.shutdown().await?;
            // The rest is taken, so that nothing is reset.
            tokio::io::copy(&mut from, &mut tokio::io::sink()).await?;
            return Ok(seen);
        }
    }
}

struct Outcome {
    server: Result<PeerAuth, ConnectError>,
    client: Result<PeerAuth, ConnectError>,
    to_server: Vec<u8>,
    to_client: Vec<u8>,
}

/// A handshake through an attacker in the middle.
async fn through(way: Way, attack: Attack) -> Outcome {
    let l = listener().await;
    let middle = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = middle.local_addr().unwrap();
    let admission = psk();
    let attacker = async {
        let (near, _) = middle.accept().await.unwrap();
        let far = TcpStream::connect(l.local_addr()).await.unwrap();
        let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
        let of = |this| if this == way { attack } else { Attack::Nothing };
        let (up, down) = tokio::join!(
            carry(near_in, far_out, of(Way::ToServer)),
            carry(far_in, near_out, of(Way::ToClient))
        );
        // A reset is an end, too.
        (up.unwrap_or_default(), down.unwrap_or_default())
    };
    let (server, client, (to_server, to_client)) =
        tokio::join!(serve(&l, &admission, LONG), connect(at, &admission), attacker);
    Outcome { server, client, to_server, to_client }
}

/// Where the frames of recorded bytes begin, with their kinds, and the end.
fn frames(bytes: &[u8]) -> (Vec<(usize, u16)>, usize) {
    let (mut at, mut out) = (0, Vec::new());
    while at < bytes.len() {
        let word = |o: usize| u32::from_le_bytes(bytes[at + o..at + o + 4].try_into().unwrap());
        out.push((at, u16::from_le_bytes([bytes[at + 6], bytes[at + 7]])));
        at += HEADER_LEN + word(8) as usize;
    }
    (out, at)
}

/// A good handshake, as somebody on the way would record it.
async fn recorded() -> (Vec<u8>, Vec<u8>) {
    let good = through(Way::ToServer, Attack::Nothing).await;
    assert!(good.server.is_ok() && good.client.is_ok(), "{:?} {:?}", good.server, good.client);
    let (up, end) = frames(&good.to_server);
    assert_eq!((up.iter().map(|f| f.1).collect::<Vec<_>>(), end), (vec![6, 1, 4], good.to_server.len()));
    let (down, end) = frames(&good.to_client);
    assert_eq!((down.iter().map(|f| f.1).collect::<Vec<_>>(), end), (vec![7, 2, 5], good.to_client.len()));
    (good.to_server, good.to_client)
}

/// An error that says what came, and not that nothing did.
fn is_found(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::NotAuthentic { .. }
            | ConnectError::RefusedAsNotAuthentic
            | ConnectError::UnknownKey { .. }
            | ConnectError::Malformed { .. }
            | ConnectError::RefusedAsMalformed { .. }
            | ConnectError::Unexpected { .. }
            | ConnectError::AdmissionMismatch { .. }
            | ConnectError::Unsupported { .. }
            | ConnectError::NotLandfall { .. }
            | ConnectError::Version { .. }
            | ConnectError::TooLarge { .. }
            | ConnectError::Truncated { .. }
    )
}

/// Every byte of every frame, one bit at a time: nobody goes on with what was changed.
async fn tampered(way: Way, bytes: &[u8]) {
    let (starts, end) = frames(bytes);
    for at in 0..end {
        let frame = starts.iter().rposition(|(start, _)| *start <= at).unwrap();
        let (start, next) = (starts[frame].0, starts.get(frame + 1).map_or(end, |next| next.0));
        let bits = 1 << (at % 8);
        let attack = match at - start {
            8..12 => Attack::FlipAndEnd(at, bits, next),
            _ => Attack::Flip(at, bits),
        };
        let Outcome { server, client, .. } = through(way, attack).await;
        let place = format!("{way:?}, frame {frame}, byte {}: {server:?}, {client:?}", at - start);
        let client = client.expect_err(&place);
        match server {
            // After its last frame it knows nothing of what becomes of that.
            Ok(_) => assert_eq!((way, frame), (Way::ToClient, starts.len() - 1), "{place}"),
            Err(server) => assert!(is_found(&client) || is_found(&server), "{place}"),
        }
        assert!(!matches!(client, ConnectError::Timeout { .. }), "{place}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b1_a_handshake_changed_on_its_way_to_the_server_is_refused() {
    tampered(Way::ToServer, &recorded().await.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b1_a_handshake_changed_on_its_way_to_the_client_is_refused() {
    tampered(Way::ToClient, &recorded().await.1).await;
}

#[tokio::test]
async fn b1_a_handshake_cut_anywhere_is_refused() {
    let (up, down) = recorded().await;
    for (way, bytes) in [(Way::ToServer, &up), (Way::ToClient, &down)] {
        let (starts, end) = frames(bytes);
        for cut in (0..end).filter(|cut| cut % 11 == 0 || starts.iter().any(|f| f.0.abs_diff(*cut) < 2)) {
            let Outcome { server, client, .. } = through(way, Attack::Cut(cut)).await;
            let place = format!("{way:?}, cut at {cut}: {server:?}, {client:?}");
            let cut =
                |e: &ConnectError| matches!(e, ConnectError::Closed { .. } | ConnectError::Truncated { .. });
            assert!(cut(&client.expect_err(&place)), "{place}");
            assert!(server.as_ref().map_or_else(cut, |_| way == Way::ToClient), "{place}");
        }
    }
}

/// Sends bytes that were recorded to a fresh server, and answers what both made of it.
async fn replay_to_server(bytes: &[u8], wait: bool) -> (Result<PeerAuth, ConnectError>, Vec<u8>) {
    let l = listener().await;
    let admission = psk();
    let attacker = async {
        let mut stream = TcpStream::connect(l.local_addr()).await.unwrap();
        if wait {
            // Frame by frame, as the recorded client did.
            let (starts, end) = frames(bytes);
            let ends = starts.iter().skip(1).map(|f| f.0).chain([end]);
            let mut answered = Vec::new();
            for ((start, _), end) in starts.iter().zip(ends) {
                stream.write_all(&bytes[*start..end]).await.unwrap();
                let mut head = [0; HEADER_LEN];
                if stream.read_exact(&mut head).await.is_err() {
                    break;
                }
                let len = u32::from_le_bytes(head[8..12].try_into().unwrap()) as usize;
                let at = answered.len();
                answered.extend_from_slice(&head);
                answered.resize(at + HEADER_LEN + len, 0);
                stream.read_exact(&mut answered[at + HEADER_LEN..]).await.unwrap();
                if head[6] == Kind::Reject as u8 {
                    break;
                }
            }
            return answered;
        }
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answered = Vec::new();
        // A reset is an answer too.
        let _ = stream.read_to_end(&mut answered).await;
        answered
    };
    tokio::join!(serve(&l, &admission, LONG), attacker)
}

#[tokio::test]
async fn b1_a_recorded_handshake_played_again_is_refused_by_either_side() {
    let (up, down) = recorded().await;
    for wait in [false, true] {
        let (server, answered) = replay_to_server(&up, wait).await;
        assert!(matches!(server, Err(ConnectError::NotAuthentic { stage: Stage::Hello })), "{server:?}");
        let (starts, _) = frames(&answered);
        assert_eq!(starts.iter().map(|f| f.1).collect::<Vec<_>>(), [7, 3], "a challenge, and a refusal");
        // Sealed, since the one who asks may be somebody whose frames were changed on the way: the code, then the seal.
        let refusal = &answered[starts[1].0 + HEADER_LEN..];
        assert_eq!(Reject::decode(&refusal[..refusal.len() - seal::MAC]).unwrap(), Reject::NotAuthentic);
    }
    // All frames of a server, to a client that asks.
    let t = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = t.local_addr().unwrap();
    let server = async {
        let (mut stream, _) = t.accept().await.unwrap();
        stream.write_all(&down).await.unwrap();
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said).await;
        said
    };
    let (client, said) = tokio::join!(async { connect(at, &psk()).await }, server);
    assert!(matches!(client, Err(ConnectError::NotAuthentic { stage: Stage::Challenge })), "{client:?}");
    // No hello: nothing of what it would have said is known to the impostor.
    assert_eq!(frames(&said).0.iter().map(|f| f.1).collect::<Vec<_>>(), [6, 3]);
}

#[tokio::test]
async fn b1_what_is_reflected_proves_nothing() {
    // An echo.
    let t = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = t.local_addr().unwrap();
    let echo = async {
        let (stream, _) = t.accept().await.unwrap();
        let (mut from, mut to) = stream.into_split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    };
    let (client, ()) = tokio::join!(async { connect(at, &psk()).await }, echo);
    let kind = Kind::AuthStart as u16;
    assert!(
        matches!(client, Err(ConnectError::Unexpected { stage: Stage::Challenge, kind: k }) if k == kind),
        "{client:?}"
    );

    // A refusal that names a channel of ours, of somebody who has shown nothing.
    let t = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = t.local_addr().unwrap();
    let names = async {
        let (mut stream, _) = t.accept().await.unwrap();
        let reject =
            frame::encode(Kind::Reject, 9, |body| Reject::Duplicate { winner: 7 }.encode(body)).unwrap();
        stream.write_all(&reject).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let (client, ()) = tokio::join!(async { connect(at, &psk()).await }, names);
    assert!(matches!(client, Err(ConnectError::Unexpected { stage: Stage::Challenge, .. })), "{client:?}");

    // Its own listener, asked by way of the attacker: the endpoint meets itself, and finds out before it has said anything.
    let l = listener().await;
    let own = async { l.accept(LONG).await?.hello(sample().epoch, &psk()).await.map(|_| ()) };
    let admission = psk();
    let (server, client) = tokio::join!(own, connect(l.local_addr(), &admission));
    for end in [server.unwrap_err(), client.unwrap_err()] {
        assert!(matches!(&end, ConnectError::Unsupported { what } if what == TO_ITSELF), "{end:?}");
    }

    // The client's sealed hello, as if it were the server's answer.
    let l = listener().await;
    let middle = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = middle.local_addr().unwrap();
    let attacker = async {
        let (mut near, _) = middle.accept().await.unwrap();
        let mut server = TcpStream::connect(l.local_addr()).await.unwrap();
        let start = frame::read(&mut near, Stage::Hello, far()).await.unwrap();
        server.write_all(&start.bytes()).await.unwrap();
        let challenge = frame::read(&mut server, Stage::Hello, far()).await.unwrap();
        near.write_all(&challenge.bytes()).await.unwrap();
        let hello = frame::read(&mut near, Stage::Hello, far()).await.unwrap();
        let mut reflected = hello.bytes();
        reflected[6] = Kind::HelloReply as u8;
        reflected[12..20].copy_from_slice(&SERVER_EPOCH.to_le_bytes());
        near.write_all(&reflected).await.unwrap();
        drop(server);
        let _ = near.read_to_end(&mut Vec::new()).await;
    };
    let (server, client, ()) =
        tokio::join!(serve(&l, &admission, LONG), async { connect(at, &psk()).await }, attacker);
    assert!(matches!(server, Err(ConnectError::Closed { stage: Stage::Hello })), "{server:?}");
    assert!(matches!(client, Err(ConnectError::NotAuthentic { stage: Stage::HelloReply })), "{client:?}");
}

/// One byte after the other, slower than the handshake may take: it ends, and costs nobody else anything.
#[tokio::test]
async fn b1_a_peer_that_trickles_meets_the_deadline_while_others_are_served() {
    let l = listener().await;
    let (up, _) = recorded().await;
    let mut slow = TcpStream::connect(l.local_addr()).await.unwrap();
    let incoming = l.accept(Duration::from_millis(300)).await.unwrap();
    let handshake = tokio::spawn(async move { incoming.hello(SERVER_EPOCH, &psk()).await.map(|_| ()) });
    let trickle = async {
        for byte in up.iter().cycle() {
            if slow.write_all(&[*byte]).await.is_err() || handshake.is_finished() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let admission = psk();
    let served = async { tokio::join!(serve(&l, &admission, LONG), connect(l.local_addr(), &admission)) };
    let ((), (server, client)) = tokio::join!(trickle, served);
    assert!(server.is_ok() && client.is_ok(), "{server:?} {client:?}");
    let ended = handshake.await.unwrap();
    assert!(matches!(ended, Err(ConnectError::Timeout { stage: Stage::Challenge, .. })), "{ended:?}");
}

/// A first frame that is longer than one can be is refused by its header.
#[tokio::test]
async fn b1_little_is_read_of_a_peer_that_has_shown_nothing() {
    for (kind, len, found) in [
        (Kind::AuthStart, challenge::MAX_BODY + 1, "TooLarge"),
        (Kind::Hello, frame::MAX_BODY, "AdmissionMismatch"),
        (Kind::Ready, 0, "Unexpected"),
    ] {
        let mut head = frame::encode(kind, 1, |_| {}).unwrap();
        head[8..12].copy_from_slice(&len.to_le_bytes());
        let (server, answered) = replay_to_server(&head, false).await;
        let error = format!("{:?}", server.unwrap_err());
        assert!(error.starts_with(found), "{error}");
        assert_eq!(frames(&answered).0.len(), 1, "it is told");
    }
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// The body of `b4_refused_peers_leave_nothing`, in a process of its own, so that no other test opens descriptors meanwhile.
#[tokio::test]
#[ignore = "run by b4_refused_peers_leave_nothing"]
async fn b4_child() {
    let (up, _) = recorded().await;
    let before = (open_descriptors(), tasks());
    for round in 0..20 {
        assert!(both(&psk(), &Admission::Open).await.1.is_err());
        assert!(both(&Admission::Open, &psk()).await.1.is_err());
        assert!(both(&Admission::Psk(key("a", 8)), &psk()).await.1.is_err());
        assert!(both(&Admission::Psk(key("b", 7)), &psk()).await.1.is_err());
        assert!(replay_to_server(&up, round % 2 == 0).await.0.is_err());
        assert!(through(Way::ToServer, Attack::Flip(100 + round, 1)).await.server.is_err());
        assert!(through(Way::ToClient, Attack::Cut(50 + round)).await.client.is_err());
    }
    assert_eq!((open_descriptors(), tasks()), before);
}

#[test]
fn b4_refused_peers_leave_nothing() {
    passes_alone("connect::admission::tests::b4_child");
}

/// Strangers that say nothing take each other's places, and none of one who has shown a key and has more to do.
#[tokio::test]
async fn b1_strangers_push_out_nobody_who_holds_the_key() {
    let l = listener().await.with_gate(Gate::with(2, Duration::ZERO));
    let admission = psk();
    let hello = async {
        let stream = dial(&l.local_addr().to_string(), far()).await.unwrap();
        let framed = authenticate(Framed::plain(stream), &admission, sample().epoch, far()).await.unwrap();
        client(framed, &sample(), &Expect::default(), far()).await.unwrap().ready(&[]).await
    };
    let serve = async {
        let offer = l.accept(LONG).await.unwrap().hello(SERVER_EPOCH, &admission).await.unwrap();
        let (mut sockets, mut strangers) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            let (socket, incoming) = tokio::join!(TcpStream::connect(l.local_addr()), l.accept(LONG));
            sockets.push(socket.unwrap());
            let incoming = incoming.unwrap();
            let heard = async move { incoming.hello(SERVER_EPOCH, &psk()).await.map(drop) };
            strangers.push(tokio::spawn(heard));
        }
        let id = offer.hello.connection_id;
        let reply = Hello { epoch: SERVER_EPOCH, name: "server".into(), connection_id: id, ..sample() };
        offer.accept(&reply).await.unwrap().finish().await.unwrap();
        // All but two were evicted, by each other.
        for stranger in strangers.drain(..8) {
            let ended = stranger.await.unwrap();
            assert!(matches!(ended, Err(ConnectError::Evicted { stage: Stage::Hello })), "{ended:?}");
        }
        assert!(strangers.iter().all(|stranger| !stranger.is_finished()));
        strangers.iter().for_each(tokio::task::JoinHandle::abort);
    };
    let (client, ()) = tokio::join!(hello, serve);
    client.unwrap();
}
