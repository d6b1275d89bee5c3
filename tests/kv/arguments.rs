//! R10: what an application may ask for is taken or refused with a typed error, and nothing panics.

use std::time::Duration;

use landfall::device::Profile;
use landfall::error::DeviceError;
use landfall::kv::{KvConfig, KvEndpoint, KvPool, WriteRequest};

use crate::common::{On, Pair, config, device, endpoint, fill, layout, on_every_profile, pair_with, wrong};

on_every_profile!(r10_a_duration_without_end_is_no_limit);

/// `Duration::MAX` is how one asks for no limit.
async fn r10_a_duration_without_end_is_no_limit(on: On) {
    let endless = config().deadline(Duration::MAX).connect_timeout(Duration::MAX);
    let Pair { sender, receiver, .. } = pair_with(on, layout(2, 8, 3000), endless.clone(), endless).await;
    for deadline in [None, Some(Duration::MAX), Some(Duration::from_secs(u64::MAX / 2))] {
        let mut source = sender.pool().try_alloc(8).unwrap();
        fill(&mut source, 8);
        let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
        let request = WriteRequest::new(&grant, source);
        let request = match deadline {
            Some(deadline) => request.deadline(deadline),
            None => request,
        };
        sender.write(request).await.0.unwrap();
        assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 8, |p| p), 0);
    }
    sender.close().await.unwrap();
}

#[tokio::test]
async fn r10_every_wrong_setting_is_named_before_anybody_connects() {
    let pd = device(Profile::Default).alloc_pd().unwrap();
    let pool = KvPool::new(&pd, layout(1, 1, 64)).await.unwrap();
    let cases: [(&str, KvConfig); 13] = [
        ("qps", config().qps(0)),
        ("qps", config().qps(65)),
        ("qps", config().qps(usize::MAX)),
        ("max_write", config().max_write(4095)),
        ("data_credits", config().data_credits(0)),
        ("heartbeat", config().heartbeat(Duration::ZERO)),
        ("heartbeat", config().heartbeat(Duration::MAX)),
        ("peer_timeout", config().peer_timeout(Duration::MAX)),
        ("peer_timeout", config().heartbeat(Duration::from_secs(3)).peer_timeout(Duration::from_secs(5))),
        ("abort_grace", config().abort_grace(Duration::MAX)),
        ("abort_grace", config().abort_grace(Duration::ZERO)),
        ("deadline", config().deadline(Duration::ZERO)),
        ("connect_timeout", config().connect_timeout(Duration::ZERO)),
    ];
    for (what, config) in cases {
        match KvEndpoint::new(pool.clone(), config).unwrap_err() {
            DeviceError::Config { what: named, .. } => assert_eq!(named, format!("KvConfig::{what}")),
            other => panic!("{what}: {other:?}"),
        }
    }
    let long = "n".repeat(65);
    let error = KvEndpoint::named(pool.clone(), config(), &long).unwrap_err().to_string();
    assert!(error.contains("64 bytes"), "{error}");
    KvEndpoint::new(pool, config().data_credits(u32::MAX).max_write(u32::MAX)).unwrap();
}

/// CASES 44: more queue pairs than a device's completion queue has room for.
#[tokio::test]
async fn k8_too_many_queue_pairs_for_the_device_are_refused_with_the_limit() {
    let pd = device(Profile::Tiny).alloc_pd().unwrap();
    let pool = KvPool::new(&pd, layout(1, 1, 64)).await.unwrap();
    match KvEndpoint::new(pool, config().qps(3)).unwrap_err() {
        DeviceError::Limit { asked: 3, limit: 2, .. } => {}
        other => panic!("{other:?}"),
    }
    // The accepting side gives as many as it can, the connecting one is told.
    let wide = endpoint(Profile::Default, layout(1, 1, 64), config().qps(4)).await;
    let narrow = endpoint(Profile::Tiny, layout(1, 1, 64), config()).await;
    let mut listener = narrow.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (a, b) = tokio::try_join!(wide.connect(listener.local_addr()), listener.accept()).unwrap();
    assert_eq!((a.path().qps.len(), b.path().qps.len()), (2, 2));
}
