//! K9: what carries a channel. What was asked for meets what the peer takes, or is refused by name; the path says which, and why.

use landfall::connect::{ConnectError, Fault};
use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::error::DeviceError;
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, PathReport, WriteRequest};

use crate::common::{On, PATIENCE, Pair, config, fill, layout, on_every_profile, pair_with, qps, wrong};

on_every_profile!(k9_every_queue_pair_says_what_carries_it);

async fn endpoint(profile: Profile, transport: SoftTransport, config: KvConfig) -> KvEndpoint {
    let device = Device::soft(SoftConfig::new().profile(profile).transport(transport)).unwrap();
    let pool = KvPool::new(&device.alloc_pd().unwrap(), layout(1, 8, 5000)).await.unwrap();
    KvEndpoint::new(pool, config).unwrap()
}

/// What two sides on one host take, when each was asked for one of these.
fn expected(dials: SoftTransport, listens: SoftTransport) -> Option<&'static str> {
    use SoftTransport::{Auto, Shm, Tcp};
    match (dials, listens) {
        (Auto | Shm, Auto | Shm) => Some("shm"),
        (Auto | Tcp, Auto | Tcp) => Some("tcp"),
        _ => None,
    }
}

/// Where there was a choice, both ends say what decided it; where there was none, that it was asked for.
fn says_why(path: &PathReport, ours: SoftTransport, theirs: SoftTransport) {
    let why = &path.transport_reason;
    let about = match (ours, theirs) {
        (SoftTransport::Auto, SoftTransport::Tcp) => "TCP only",
        (SoftTransport::Auto, _) => "on this host",
        _ => "asked for",
    };
    assert!(why.contains(about), "{ours} with {theirs}: {path}");
    assert!(path.to_string().contains(why.as_str()), "{path}");
}

#[tokio::test]
async fn k9_what_both_sides_take_is_taken_and_the_rest_is_refused_by_name() {
    for bootstrap in [Bootstrap::Oob, Bootstrap::Cm] {
        for dials in SoftTransport::ALL {
            for listens in SoftTransport::ALL {
                let config = config().bootstrap(bootstrap);
                let receiving = endpoint(Profile::Default, listens, config.clone()).await;
                let sending = endpoint(Profile::Default, dials, config).await;
                let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
                let dial = sending.connect(listener.local_addr());
                let Some(transport) = expected(dials, listens) else {
                    let error = dial.await.unwrap_err();
                    let named = format!("soft-{dials} on this side, soft-{listens} on the peer's");
                    assert!(matches!(error, ConnectError::TransportMismatch { .. }), "{error:?}");
                    assert!(error.to_string().contains(&named), "{error}");
                    assert_eq!(error.fault(), Fault::Incompatible);
                    continue;
                };
                let (sender, receiver) = tokio::try_join!(dial, listener.accept()).unwrap();
                // At once: nothing has been sent yet.
                for (path, ours, theirs) in
                    [(sender.path(), dials, listens), (receiver.path(), listens, dials)]
                {
                    assert_eq!(path.transport, transport, "{bootstrap} {dials} to {listens}: {path}");
                    says_why(&path, ours, theirs);
                }
                let mut source = sender.pool().try_alloc(4).unwrap();
                fill(&mut source, 5);
                let grant = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
                sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
                assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 5, |p| p), 0);
            }
        }
    }
}

async fn k9_every_queue_pair_says_what_carries_it(on: On) {
    let qps = qps(on, 4);
    let Pair { sender, receiver, .. } =
        pair_with(on, layout(1, 8, 500), config().qps(qps), config().qps(qps)).await;
    for channel in [&sender, &receiver] {
        let path = channel.path();
        assert_eq!((path.transport, path.qps.len()), (on.transport(), qps), "{path}");
        assert!(path.qps.iter().all(|qp| qp.transport == on.transport()), "{path}");
    }
    // After the end, too: it is what carried the bytes.
    sender.kill();
    tokio::time::timeout(PATIENCE, sender.closed()).await.unwrap();
    let path = sender.path();
    assert_eq!(path.transport, on.transport(), "{path}");
    assert!(!path.transport_reason.is_empty());
}

/// A device that takes shared memory and nothing else meets the requirement; one that could take TCP does not.
#[tokio::test]
async fn k9_shared_memory_can_be_required() {
    let required = || config().require_shared_memory(true);
    for transport in [SoftTransport::Auto, SoftTransport::Tcp] {
        let device = Device::soft(SoftConfig::new().transport(transport)).unwrap();
        let pool = KvPool::new(&device.alloc_pd().unwrap(), layout(1, 8, 5000)).await.unwrap();
        let error = KvEndpoint::new(pool, required()).unwrap_err();
        assert!(matches!(error, DeviceError::Unsupported { .. }), "{error:?}");
        let error = error.to_string();
        assert!(
            [device.transport(), "SoftTransport::Shm"].iter().all(|named| error.contains(named)),
            "{error}"
        );
    }
    let a = endpoint(Profile::Default, SoftTransport::Shm, required()).await;
    let b = endpoint(Profile::Default, SoftTransport::Auto, config()).await;
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (a, b) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
    assert_eq!((a.path().transport, b.path().transport), ("shm", "shm"));
}
