//! The connection manager: every profile by it, what Auto chooses, who is refused, and how ends are noticed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use landfall::connect::{Admission, ConnectError};
use landfall::device::Profile;
use landfall::error::DeviceError;
use landfall::kv::{Bootstrap, Cause, KvConfig, WriteError, WriteRequest};

use crate::common::{
    On, PATIENCE, Pair, endpoint, fill, layout, on_every_profile, pair, pair_with, qps, wrong,
};

on_every_profile!(
    k1_writes_land_both_ways_by_the_manager,
    b5_several_queue_pairs_each_with_a_request_of_its_own,
    k5_a_killed_channel_is_noticed_at_once,
    k5_an_orderly_end_stays_orderly,
);

fn by_cm() -> KvConfig {
    // No heartbeat tells anything while a test runs.
    KvConfig::default().bootstrap(Bootstrap::Cm).heartbeat(PATIENCE).peer_timeout(PATIENCE * 3)
}

async fn managed(on: On, config: KvConfig) -> Pair {
    pair_with(on, layout(2, 32, 3000), config.clone(), config).await
}

async fn k1_writes_land_both_ways_by_the_manager(on: On) {
    let Pair { sender, receiver, .. } = managed(on, by_cm()).await;
    // The passive side first: it may send nothing before it has heard of the other.
    for (from, to, seed) in [(&receiver, &sender, 1), (&sender, &receiver, 2)] {
        let mut source = from.pool().try_alloc(16).unwrap();
        fill(&mut source, seed);
        let grant = to.grant(to.pool().try_alloc(16).unwrap()).unwrap();
        let (landed, _) = from.write(WriteRequest::new(&grant, source).tag(seed)).await;
        assert_eq!(landed.unwrap().bytes, 2 * 16 * 3000);
        let arrival = to.next_arrival().await.unwrap();
        assert_eq!((arrival.tag(), wrong(arrival.blocks(), seed, |p| p)), (seed, 0));
    }
    for channel in [&sender, &receiver] {
        let path = channel.path();
        assert_eq!((path.bootstrap, path.bootstrap_reason.as_str()), ("cm", "it was asked for"));
        assert_eq!(path.notify, if on.caps().immediate { "imm" } else { "send" });
        assert!(path.to_string().contains("bootstrap cm"), "{path}");
    }
}

async fn b5_several_queue_pairs_each_with_a_request_of_its_own(on: On) {
    let qps = qps(on, 8);
    let Pair { sender, receiver, .. } = managed(on, by_cm().qps(qps)).await;
    let (ours, theirs) = (sender.path().qps, receiver.path().qps);
    assert_eq!((ours.len(), theirs.len()), (qps, qps));
    for (a, b) in ours.iter().zip(&theirs) {
        assert_eq!((a.qp_num, a.peer_qp_num), (b.peer_qp_num, b.qp_num));
    }
    for n in 0..4 * qps as u64 {
        let mut source = sender.pool().try_alloc(8).unwrap();
        fill(&mut source, n);
        let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
        sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
        assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), n, |p| p), 0);
    }
}

/// The heartbeat is silent for minutes: only the connection, or the queue pair's end, tells.
async fn k5_a_killed_channel_is_noticed_at_once(on: On) {
    let Pair { sender, receiver, .. } = managed(on, by_cm()).await;
    let start = Instant::now();
    let grant = receiver.grant(receiver.pool().try_alloc(4).unwrap()).unwrap();
    receiver.kill();
    let closed = sender.closed().await;
    assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
    assert!(start.elapsed() < PATIENCE);
    let source = sender.pool().try_alloc(4).unwrap();
    let (refused, source) = sender.write(WriteRequest::new(&grant, source)).await;
    assert!(matches!(refused, Err(WriteError::Closed { .. })), "{refused:?}");
    drop(source);
    receiver.closed().await;
    assert_eq!((sender.pool().free_blocks(), receiver.pool().free_blocks()), (32, 32));
}

async fn k5_an_orderly_end_stays_orderly(on: On) {
    for (closes, _) in [("sender", 0), ("receiver", 1), ("both", 2)] {
        let Pair { sender, receiver, .. } = managed(on, by_cm()).await;
        let mut source = sender.pool().try_alloc(16).unwrap();
        fill(&mut source, 3);
        let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
        // In flight while the channel closes.
        sender.write(WriteRequest::new(&grant, source)).detach();
        match closes {
            "sender" => sender.close().await.unwrap(),
            "receiver" => receiver.close().await.unwrap(),
            _ => {
                let (a, b) = tokio::join!(sender.close(), receiver.close());
                a.unwrap();
                b.unwrap();
            }
        }
        for channel in [&sender, &receiver] {
            let closed = channel.closed().await;
            assert!(closed.is_graceful(), "{closes} closes: {closed}");
        }
        assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 3, |p| p), 0);
    }
}

#[tokio::test]
async fn b5_auto_says_which_way_it_took_and_why() {
    for profile in Profile::ALL {
        let Pair { sender, receiver, .. } = pair(profile, layout(1, 4, 64)).await;
        let way = if profile.capabilities().oob { "oob" } else { "cm" };
        for path in [sender.path(), receiver.path()] {
            assert_eq!(path.bootstrap, way, "{profile}");
            assert!(path.bootstrap_reason.contains("out of band"), "{}", path.bootstrap_reason);
            assert_eq!(serde_json::to_value(&path).unwrap()["bootstrap"], way);
        }
        if profile == Profile::ErdmaStandard {
            assert!(sender.path().bootstrap_reason.contains("compat_mode"), "{:?}", sender.path());
        }
    }
}

/// CASES 44: the error names the cause, the module parameter's file, and the fix.
#[tokio::test]
async fn k9_out_of_band_is_refused_by_devices_that_cannot() {
    for profile in [Profile::ErdmaStandard, Profile::Siw] {
        let endpoint =
            endpoint(profile, layout(1, 1, 64), KvConfig::default().bootstrap(Bootstrap::Oob)).await;
        let listen = endpoint.listen("127.0.0.1:0".parse().unwrap()).await.map(drop);
        let dial = endpoint.connect("127.0.0.1:1").await.map(drop);
        for refused in [listen, dial] {
            let Err(ConnectError::Resources { source }) = refused else { panic!("{profile}: {refused:?}") };
            let source = source.downcast::<DeviceError>().unwrap();
            assert!(matches!(*source, DeviceError::NoManualConnect { .. }), "{source:?}");
            let words = source.to_string();
            assert!(words.contains("RTS") && words.contains("RDMA_CM"), "{words}");
            if profile == Profile::ErdmaStandard {
                let file = "/sys/module/erdma/parameters/compat_mode";
                assert!(words.contains(file) && words.contains("compat_mode=Y"), "{words}");
            }
        }
    }
}

/// The two bootstraps are two protocols: who meets the other is told so, and soon.
#[tokio::test]
async fn b1_sides_that_bootstrap_differently_are_refused() {
    let config = |bootstrap| KvConfig::default().bootstrap(bootstrap);
    for (listens, dials) in [(Bootstrap::Oob, Bootstrap::Cm), (Bootstrap::Cm, Bootstrap::Oob)] {
        let receiving = endpoint(Profile::Default, layout(1, 1, 64), config(listens)).await;
        let sending = endpoint(Profile::Default, layout(1, 1, 64), config(dials)).await;
        let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr();
        let refused = sending.connect(address).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Unsupported { .. }), "{dials} to {listens}: {refused:?}");
        assert!(refused.to_string().contains("the same bootstrap"), "{refused}");
        // The next one, of the right kind, is served.
        let right = endpoint(Profile::Default, layout(1, 1, 64), config(listens)).await;
        let (ours, theirs) = tokio::join!(right.connect(address), listener.accept());
        ours.unwrap();
        theirs.unwrap();
    }
}

/// CASES 24: dials at once, in both directions, give one channel.
#[tokio::test]
async fn b3_simultaneous_dials_by_the_manager_give_one_channel() {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    for round in 0..20 {
        let (a, b) = (
            endpoint(Profile::Siw, layout(1, 4, 64), KvConfig::default()).await,
            endpoint(Profile::Siw, layout(1, 4, 64), KvConfig::default()).await,
        );
        let (mut at_a, mut at_b) = (a.listen(any).await.unwrap(), b.listen(any).await.unwrap());
        let (to_a, to_b) = (at_a.local_addr(), at_b.local_addr());
        let taking = async {
            tokio::select! { channel = at_a.accept() => (channel, true), channel = at_b.accept() => (channel, false) }
        };
        let (from_a, from_b, (accepted, by_a)) = tokio::join!(a.connect(to_b), b.connect(to_a), taking);
        let (from_a, from_b, accepted) = (from_a.unwrap(), from_b.unwrap(), accepted.unwrap());
        // One endpoint's two handles, and the other's, are the two ends of one channel.
        assert!(accepted.same(if by_a { &from_a } else { &from_b }), "round {round}");
        for (from, to) in [(&from_a, &from_b), (&from_b, &from_a)] {
            let grant = to.grant(to.pool().try_alloc(2).unwrap()).unwrap();
            let source = from.pool().try_alloc(2).unwrap();
            from.write(WriteRequest::new(&grant, source)).await.0.unwrap();
            to.next_arrival().await.unwrap();
        }
    }
}

/// siw completes a WRITE when it was handed to TCP. A peer that takes nothing then still gives no `Landed`.
#[tokio::test]
async fn k1_a_completion_at_hand_off_is_no_landing() {
    let config = || KvConfig::default().bootstrap(Bootstrap::Cm).abort_grace(Duration::from_secs(60));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let receiving = runtime.spawn(endpoint(Profile::Siw, layout(1, 16, 4096), config())).await.unwrap();
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr();
    let sending = endpoint(Profile::Siw, layout(1, 16, 4096), config()).await;
    let (sender, receiver) = tokio::join!(sending.connect(address), listener.accept());
    let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
    let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
    // The only thread that drives the receiver is held: its process is as good as frozen.
    let (hold, held) = (std::sync::mpsc::channel::<()>(), tokio::sync::oneshot::channel());
    runtime.spawn(async move {
        held.0.send(()).unwrap();
        let _ = hold.1.recv();
    });
    held.1.await.unwrap();
    let mut source = sender.pool().try_alloc(16).unwrap();
    fill(&mut source, 9);
    let mut write = std::pin::pin!(sender.write(WriteRequest::new(&grant, source)));
    while sender.path().qps[0].writes == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..1000 {
        tokio::select! {
            biased;
            (landed, _) = &mut write => panic!("landed in a process that does not run: {landed:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(hold.0);
    write.await.0.unwrap();
    assert_eq!(wrong(receiver.next_arrival().await.unwrap().blocks(), 9, |p| p), 0);
    drop((sender, receiver, listener, sending, receiving));
    runtime.shutdown_background();
}

/// CASES 46, by the manager.
#[tokio::test]
async fn b4_addresses_of_the_manager() {
    let a = endpoint(Profile::Siw, layout(1, 4, 64), KvConfig::default().admission(Admission::Open)).await;
    let first = a.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    assert_ne!(first.local_addr().port(), 0);
    let busy = a.listen(first.local_addr()).await.unwrap_err();
    assert!(matches!(busy, ConnectError::AddrInUse { addr } if addr == first.local_addr()), "{busy:?}");
    let nobody = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap()
    };
    let b = endpoint(Profile::Siw, layout(1, 4, 64), KvConfig::default()).await;
    let refused = b.connect(nobody).await.unwrap_err();
    assert!(matches!(refused, ConnectError::Refused { addr } if addr == nobody), "{refused:?}");
    // On every address, and by a name.
    let mut any = a.listen("[::]:0".parse().unwrap()).await.unwrap();
    let port = any.local_addr().port();
    let (ours, theirs) = tokio::join!(b.connect(format!("localhost:{port}")), any.accept());
    assert_eq!((ours.unwrap().path().bootstrap, theirs.unwrap().path().bootstrap), ("cm", "cm"));
}
