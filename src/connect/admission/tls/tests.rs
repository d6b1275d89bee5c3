//! TLS over real sockets, with the certificates of `tests/tls/certs`: who is let in, and what both ends say where one is not.

use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::super::framed::Framed;
use super::super::super::handshake::{Expect, authenticate, client};
use super::super::super::hello::Hello;
use super::super::super::hello::tests::sample;
use super::super::super::oob::{OobListener, dial};
use super::super::{Admission, Psk};
use super::*;

const LONG: Duration = Duration::from_secs(60);
const SERVER_EPOCH: u64 = 0x5e;

fn far() -> Deadline {
    Deadline::after(LONG)
}

fn certs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls/certs")
}

/// A directory with files of one peer, whose key nobody else has access to, as a checkout cannot have it. Removed at the end.
struct Files(PathBuf);

impl Files {
    fn of(name: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("landfall-tls-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let files = Self(dir);
        files.become_(name);
        files
    }

    /// Puts the files of `name` in their place.
    fn become_(&self, name: &str) {
        let read = |file: String| std::fs::read(certs().join(file)).unwrap();
        std::fs::write(self.0.join("cert"), read(format!("{name}.pem"))).unwrap();
        std::fs::write(self.0.join("roots"), read("ca.pem".into())).unwrap();
        let mut options = std::fs::OpenOptions::new();
        let mut key =
            options.write(true).create(true).truncate(true).mode(0o600).open(self.0.join("key")).unwrap();
        io::Write::write_all(&mut key, &read(format!("{name}.key"))).unwrap();
    }

    fn load(&self) -> Result<Tls, TlsError> {
        Tls::from_files(self.0.join("cert"), self.0.join("key"), self.0.join("roots"))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What a peer of this name has.
fn tls(name: &str) -> Tls {
    Files::of(name).load().unwrap()
}

type Ended = Result<PeerAuth, ConnectError>;

async fn serve(l: &OobListener, admission: &Admission) -> Ended {
    let incoming = l.accept(LONG).await?;
    match admission {
        Admission::Tls(tls) => answer(incoming.secure(tls, SERVER_EPOCH).await?, admission).await,
        _ => answer(incoming, admission).await,
    }
}

async fn answer<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    incoming: super::super::super::handshake::Incoming<S>,
    admission: &Admission,
) -> Ended {
    let offer = incoming.hello(SERVER_EPOCH, admission).await?;
    let id = offer.hello.connection_id;
    let reply = Hello { epoch: SERVER_EPOCH, name: "server".into(), connection_id: id, ..sample() };
    let identity = offer.identity().clone();
    offer.accept(&reply).await?.finish().await?;
    Ok(identity)
}

async fn connect(to: &str, admission: &Admission) -> Ended {
    let stream = dial(to, far()).await?;
    match admission {
        Admission::Tls(tls) => {
            let (stream, identity) = tls.connect(stream, to, far()).await?;
            ask(Framed::known(stream, identity), admission).await
        }
        _ => ask(Framed::plain(stream), admission).await,
    }
}

async fn ask<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    framed: Framed<S>,
    admission: &Admission,
) -> Ended {
    let framed = authenticate(framed, admission, sample().epoch, far()).await?;
    let identity = framed.identity().clone();
    client(framed, &sample(), &Expect::default(), far()).await?.ready(&[]).await?;
    Ok(identity)
}

async fn listener() -> OobListener {
    OobListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
}

async fn both(theirs: &Admission, ours: &Admission) -> (Ended, Ended) {
    let l = listener().await;
    let to = l.local_addr().to_string();
    tokio::join!(serve(&l, theirs), connect(&to, ours))
}

fn named(names: &[&str]) -> PeerAuth {
    PeerAuth::Certificate(names.iter().map(|name| (*name).to_owned()).collect())
}

#[tokio::test]
async fn b1_peers_know_each_other_by_the_names_in_their_certificates() {
    let (prefill, decode) = (tls("prefill"), tls("decode"));
    let names = (named(&["prefill", "spiffe://cluster/prefill"]), named(&["decode", "localhost"]));
    let (server, client) = both(&Admission::Tls(decode.clone()), &Admission::Tls(prefill.clone())).await;
    assert_eq!((server.unwrap(), client.unwrap()), names);
    // By a name that is none of the address, and only those that were named.
    let prefill = prefill.server_name("decode").unwrap().peers(["Decode"]);
    let decode = decode.peers(["somebody", "spiffe://cluster/prefill"]);
    let (server, client) = both(&Admission::Tls(decode), &Admission::Tls(prefill)).await;
    assert_eq!((server.unwrap(), client.unwrap()), names);
}

/// Two certificates for one address, and no other name: two peers.
#[tokio::test]
async fn k6_certificates_without_names_are_known_by_themselves() {
    let decode = Admission::Tls(tls("decode"));
    let mut met = Vec::new();
    for name in ["nameless", "nameless-2", "nameless"] {
        let files = Files::of(name);
        let (server, client) = both(&decode, &Admission::Tls(files.load().unwrap())).await;
        client.unwrap();
        met.push(server.unwrap());
        // As `openssl x509 -fingerprint -sha256` has it.
        let pem = std::fs::read(files.0.join("cert")).unwrap();
        let expected = fingerprint(&CertificateDer::from_pem_slice(&pem).unwrap());
        assert_eq!(met.last(), Some(&named(&[&expected])));
        // It can be asked for by that.
        let only = Admission::Tls(tls("decode").peers([expected]));
        let (server, _) = both(&only, &Admission::Tls(files.load().unwrap())).await;
        server.unwrap();
    }
    assert!(met[0].may_be(&met[2]) && !met[0].may_be(&met[1]), "{met:?}");
}

#[test]
fn b1_the_case_of_a_uri_matters_behind_its_host() {
    for (given, same) in [
        ("DECODE-0.Example", "decode-0.example"),
        ("SPIFFE://Cluster.Local/ns/Prod/sa/A", "spiffe://cluster.local/ns/Prod/sa/A"),
        ("spiffe://Cluster", "spiffe://cluster"),
        ("https://User@Host:80/P?Q#F", "https://User@host:80/P?Q#F"),
        ("https://Host?A@B", "https://host?A@B"),
        ("URN:example:A", "urn:example:A"),
    ] {
        assert_eq!(canonical(given), same);
        assert_eq!(canonical(same), same);
    }
    let prefill = |peer: &str| tls("decode").peers([peer]).identity(chain("prefill").as_deref());
    assert!(prefill("SPIFFE://CLUSTER/prefill").is_ok());
    let refused = prefill("spiffe://cluster/Prefill");
    assert!(matches!(refused, Err(ConnectError::NotAdmitted { .. })), "{refused:?}");
}

fn chain(name: &str) -> Option<Vec<CertificateDer<'static>>> {
    Some(certificates(&certs().join(format!("{name}.pem"))).unwrap())
}

#[tokio::test]
async fn b1_certificates_that_are_not_trusted_are_refused_and_both_ends_say_so() {
    // The server does not take the client's.
    for name in ["stranger", "expired"] {
        let (server, client) = both(&Admission::Tls(tls("decode")), &Admission::Tls(tls(name))).await;
        let (server, client) = (server.unwrap_err(), client.unwrap_err());
        assert!(matches!(server, ConnectError::Tls { stage: Stage::Tls, .. }), "{name}: {server:?}");
        assert!(matches!(client, ConnectError::RefusedByTls { .. }), "{name}: {client:?}");
        // The client does not take the server's.
        let ours = tls("prefill").server_name("prefill").unwrap();
        let (server, client) = both(&Admission::Tls(tls(name)), &Admission::Tls(ours)).await;
        let (server, client) = (server.unwrap_err(), client.unwrap_err());
        assert!(matches!(server, ConnectError::RefusedByTls { .. }), "{name}: {server:?}");
        assert!(matches!(client, ConnectError::Tls { stage: Stage::Tls, .. }), "{name}: {client:?}");
    }
    // It is good, and of another one than was dialled.
    let (server, client) = both(&Admission::Tls(tls("prefill-2")), &Admission::Tls(tls("prefill"))).await;
    assert!(matches!(server.unwrap_err(), ConnectError::RefusedByTls { .. }));
    let client = client.unwrap_err();
    assert!(matches!(client, ConnectError::Tls { stage: Stage::Tls, .. }), "{client:?}");
}

#[tokio::test]
async fn b1_a_good_certificate_of_somebody_else_is_refused() {
    let decode = Admission::Tls(tls("decode").peers(["prefill"]));
    let (server, client) = both(&decode, &Admission::Tls(tls("prefill-2"))).await;
    for (end, side) in [(server.unwrap_err(), "this side"), (client.unwrap_err(), "the peer")] {
        assert!(
            matches!(&end, ConnectError::NotAdmitted { peer, by } if peer == "prefill-2" && *by == side),
            "{end:?}"
        );
    }
    let prefill = Admission::Tls(tls("prefill").peers(["decode-7"]));
    let (server, client) = both(&Admission::Tls(tls("decode")), &prefill).await;
    assert!(server.is_err());
    let client = client.unwrap_err();
    assert!(matches!(&client, ConnectError::NotAdmitted { by: "this side", .. }), "{client:?}");
}

#[tokio::test]
async fn b1_sides_that_admit_in_different_ways_say_so() {
    let key = || Admission::Psk(Psk::new("a", &[7; 32]).unwrap());
    let tls = || Admission::Tls(tls("decode"));
    for (theirs, ours) in [(tls(), Admission::Open), (tls(), key()), (Admission::Open, tls()), (key(), tls())]
    {
        let (server, client) = both(&theirs, &ours).await;
        for (end, side) in [(server.unwrap_err(), &theirs), (client.unwrap_err(), &ours)] {
            assert!(
                matches!(&end, ConnectError::AdmissionMismatch { ours, .. } if ours == side.name()),
                "{theirs:?}, {ours:?}: {end:?}"
            );
        }
    }
}

#[tokio::test]
async fn b1_certificates_are_replaced_without_a_restart() {
    let files = Files::of("prefill-2");
    let ours = files.load().unwrap();
    let admission = Admission::Tls(ours.clone());
    let decode = Admission::Tls(tls("decode"));
    assert_eq!(both(&decode, &admission).await.0.unwrap(), named(&["prefill-2"]));
    files.become_("prefill");
    ours.reload().unwrap();
    assert_eq!(both(&decode, &admission).await.0.unwrap(), named(&["prefill", "spiffe://cluster/prefill"]));
    // What cannot be used changes nothing: a key that is not the certificate's.
    std::fs::write(files.0.join("cert"), std::fs::read(certs().join("decode.pem")).unwrap()).unwrap();
    assert!(matches!(ours.reload(), Err(TlsError::Unusable { .. })));
    assert!(both(&decode, &admission).await.0.is_ok());
}

#[test]
fn b1_files_that_are_wrong_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let files = Files::of("decode");
    let key = files.0.join("key");
    let mode = |mode| std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    assert!(
        matches!(files.load(), Err(TlsError::Key(SecretFileError::Exposed { mode: 0o644, path, .. })) if path == key)
    );
    mode(0o600);
    assert!(files.load().is_ok());
    std::fs::write(&key, "no key").unwrap();
    let error = files.load().unwrap_err();
    assert!(matches!(&error, TlsError::Pem { wanted: "a private key", .. }), "{error:?}");
    std::fs::write(files.0.join("roots"), "").unwrap();
    assert!(matches!(files.load(), Err(TlsError::Pem { wanted: "certificates", .. })));
    std::fs::remove_file(files.0.join("roots")).unwrap();
    assert!(matches!(files.load(), Err(TlsError::File { .. })));
    assert!(matches!(tls("decode").server_name("not a name"), Err(TlsError::Name { .. })));
    let shown = format!("{:?}", tls("decode"));
    assert!(!shown.contains("PRIVATE") && shown.contains("cert"), "{shown}");
}

#[test]
fn b1_tls_that_does_not_say_that_it_is_landfall_is_refused() {
    assert!(speaks_landfall(Some(ALPN)).is_ok());
    for other in [None, Some(&b"h2"[..]), Some(b"")] {
        assert!(matches!(speaks_landfall(other), Err(ConnectError::AdmissionMismatch { .. })), "{other:?}");
    }
}

/// Nothing, garbage, half of a handshake: each ends by itself or at its deadline, and nobody else notices.
#[tokio::test]
async fn b1_whoever_breaks_tls_costs_nobody_else() {
    let l = listener().await;
    let (server, good) = (Admission::Tls(tls("decode")), Admission::Tls(tls("prefill")));
    let limit = Duration::from_millis(300);
    for (first, found) in [
        (&b""[..], "Timeout"),
        (b"\x16", "Timeout"),
        (b"\x16\x03\x01\x00\x05hello", "Tls"),
        (b"\x16\x03\x01\xff\xff", "T"),
        (b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n", "NotLandfall"),
    ] {
        let (stream, incoming) = tokio::join!(TcpStream::connect(l.local_addr()), l.accept(limit));
        let (mut stream, incoming) = (stream.unwrap(), incoming.unwrap());
        stream.write_all(first).await.unwrap();
        let Admission::Tls(tls) = &server else { unreachable!() };
        let handshake = incoming.secure(tls, SERVER_EPOCH);
        let to = l.local_addr().to_string();
        let others = async { tokio::join!(serve(&l, &server), connect(&to, &good)) };
        let (ended, (one, other)) = tokio::join!(handshake, others);
        assert!(one.is_ok() && other.is_ok(), "{one:?} {other:?}");
        let error = format!("{:?}", ended.unwrap_err());
        assert!(error.starts_with(found), "{first:?}: {error}");
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
}
