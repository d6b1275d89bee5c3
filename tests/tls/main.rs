//! Endpoints that admit by certificates: those of `certs`, which `make-certificates` makes.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use landfall::connect::{Admission, ConnectError, PeerAuth, Tls};
use landfall::device::{Device, Profile, SoftConfig};
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, Layout, WriteRequest};

/// A checkout's files can be read by others: the key is copied to where it cannot, under a name that no other test of this process
/// has. Removed by the test.
fn key(name: &str) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("landfall-tls-{}-{number}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &std::fs::read(cert(&format!("{name}.key"))).unwrap()).unwrap();
    path
}

fn cert(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls/certs").join(file)
}

fn tls(name: &str) -> Tls {
    let key = key(name);
    let tls = Tls::from_files(cert(&format!("{name}.pem")), &key, cert("ca.pem"));
    std::fs::remove_file(key).unwrap();
    tls.unwrap()
}

async fn endpoint(profile: Profile, config: KvConfig) -> KvEndpoint {
    let device = Device::soft(SoftConfig::new().profile(profile)).unwrap();
    let layout = Layout::contiguous(1, 8, 4096).unwrap();
    let pool = KvPool::new(&device.alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, config.connect_timeout(Duration::from_secs(30))).unwrap()
}

fn with(tls: Tls) -> KvConfig {
    KvConfig::default().admission(Admission::Tls(tls))
}

/// Every profile that is connected out of band. On every address, since there are certificates.
#[tokio::test]
async fn b1_endpoints_with_certificates_connect_and_know_each_other() {
    for profile in Profile::ALL {
        if !profile.capabilities().oob {
            continue;
        }
        let decode = endpoint(profile, with(tls("decode").peers(["prefill"]))).await;
        let mut listener = decode.listen("0.0.0.0:0".parse().unwrap()).await.unwrap();
        let prefill = endpoint(profile, with(tls("prefill"))).await;
        let to = format!("localhost:{}", listener.local_addr().port());
        let (sender, receiver) = tokio::join!(prefill.connect(to), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        let PeerAuth::Certificate(names) = receiver.peer_auth() else { panic!("{:?}", receiver.peer_auth()) };
        assert_eq!(names[..], ["prefill", "spiffe://cluster/prefill"]);
        assert_eq!(*sender.peer_auth(), PeerAuth::Certificate(vec!["decode".into(), "localhost".into()]));
        let grant = receiver.grant(receiver.pool().try_alloc(2).unwrap()).unwrap();
        let mut source = sender.pool().try_alloc(2).unwrap();
        source.copy_in(0, 1, 0, b"by certificate").unwrap();
        sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
        let (arrival, mut seen) = (receiver.next_arrival().await.unwrap(), [0; 14]);
        arrival.blocks().copy_out(0, 1, 0, &mut seen).unwrap();
        assert_eq!(&seen, b"by certificate");
        sender.close().await.unwrap();
    }
}

/// The listener goes on, and the next good peer is served.
#[tokio::test]
async fn b1_strangers_are_refused_and_cost_nobody_anything() {
    let profile = Profile::Default;
    let decode = endpoint(profile, with(tls("decode").peers(["prefill"]))).await;
    let mut listener = decode.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let to = listener.local_addr();
    let refused = async |config| endpoint(profile, config).await.connect(to).await.unwrap_err();
    let error = refused(with(tls("prefill-2"))).await;
    assert!(matches!(error, ConnectError::NotAdmitted { by: "the peer", .. }), "{error:?}");
    for name in ["stranger", "expired"] {
        let error = refused(with(tls(name))).await;
        assert!(matches!(error, ConnectError::RefusedByTls { .. }), "{name}: {error:?}");
    }
    let error = refused(KvConfig::default()).await;
    assert!(matches!(&error, ConnectError::AdmissionMismatch { theirs, .. } if theirs == "tls"), "{error:?}");
    let error = refused(with(tls("prefill").server_name("decode-7").unwrap())).await;
    assert!(matches!(error, ConnectError::Tls { .. }), "{error:?}");
    let prefill = endpoint(profile, with(tls("prefill"))).await;
    let (ours, theirs) = tokio::join!(prefill.connect(to), listener.accept());
    assert!(ours.is_ok() && theirs.is_ok());
}

/// A connection manager carries no TLS: found before anything is bound or dialled, with the fix.
#[tokio::test]
async fn b5_a_connection_manager_refuses_certificates() {
    for (profile, bootstrap) in [(Profile::Siw, Bootstrap::Auto), (Profile::Default, Bootstrap::Cm)] {
        let endpoint = endpoint(profile, with(tls("decode")).bootstrap(bootstrap)).await;
        let listened = endpoint.listen("127.0.0.1:0".parse().unwrap()).await.unwrap_err();
        let dialled = endpoint.connect("127.0.0.1:1").await.unwrap_err();
        for error in [listened, dialled] {
            assert!(matches!(error, ConnectError::TlsByManager { .. }), "{error:?}");
            assert!(error.to_string().contains("Admission::Psk"), "{error}");
        }
    }
}
