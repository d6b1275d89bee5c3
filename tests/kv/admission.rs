//! B1: who may connect to an endpoint, over every profile and every bootstrap.

use landfall::connect::{Admission, ConnectError, PeerAuth, Psk};
use landfall::device::Profile;
use landfall::kv::{GrantRefusal, KvConfig, KvEndpoint, KvPool, PeerLimits, WriteRequest};

use crate::common::{On, config, device, fill, layout, on_every_profile, wrong};

on_every_profile!(b1_holders_of_a_key_are_let_in_and_nobody_else);

fn psk(id: &str, byte: u8) -> Psk {
    Psk::new(id, &[byte; 32]).unwrap()
}

async fn endpoint(on: On, end: usize, config: KvConfig) -> KvEndpoint {
    let (near, far) = on.devices();
    let pd = [near, far][end].alloc_pd().unwrap();
    let pool = KvPool::new(&pd, layout(2, 8, 1000)).await.unwrap();
    KvEndpoint::new(pool, config.require_rdma(on == On::Devices)).unwrap()
}

async fn b1_holders_of_a_key_are_let_in_and_nobody_else(on: On) {
    let with = |key: Psk| config().admission(Admission::Psk(key));
    let receiving = endpoint(on, 1, with(psk("new", 2).and("old", &[1; 32]).unwrap())).await;
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let at = listener.local_addr();

    let no_key = endpoint(on, 0, config()).await.connect(at).await.unwrap_err();
    assert!(matches!(no_key, ConnectError::AdmissionMismatch { .. }), "{no_key:?}");
    let wrong_key = endpoint(on, 0, with(psk("new", 9))).await.connect(at).await.unwrap_err();
    assert!(matches!(wrong_key, ConnectError::NotAuthentic { .. }), "{wrong_key:?}");
    let unknown = endpoint(on, 0, with(psk("newer", 2))).await.connect(at).await.unwrap_err();
    assert!(matches!(unknown, ConnectError::UnknownKey { .. }), "{unknown:?}");

    for (key, byte) in [("old", 1), ("new", 2)] {
        let sending = endpoint(on, 0, with(psk(key, byte))).await;
        let (sender, receiver) = tokio::join!(sending.connect(at), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        assert_eq!(*sender.peer_auth(), PeerAuth::Key(key.into()));
        assert_eq!(*receiver.peer_auth(), PeerAuth::Key(key.into()));
        for (from, to) in [(&sender, &receiver), (&receiver, &sender)] {
            let mut source = from.pool().try_alloc(3).unwrap();
            fill(&mut source, 5);
            let grant = to.grant(to.pool().try_alloc(3).unwrap()).unwrap();
            from.write(WriteRequest::new(&grant, source)).await.0.unwrap();
            assert_eq!(wrong(to.next_arrival().await.unwrap().blocks(), 5, |p| p), 0);
        }
        sender.close().await.unwrap();
    }
}

/// Keys of a file are replaced while a listener runs: who comes now is asked for the new ones, and who is connected stays.
#[tokio::test]
async fn b1_a_key_is_replaced_while_a_listener_runs() {
    use std::os::unix::fs::OpenOptionsExt;
    let path = std::env::temp_dir().join(format!("landfall-reload-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let mut options = std::fs::OpenOptions::new();
    drop(options.write(true).create_new(true).mode(0o600).open(&path).unwrap());
    std::fs::write(&path, format!("first {}", "01".repeat(32))).unwrap();
    let keys = Psk::from_file(&path).unwrap();
    let on = On::Soft(Profile::Default);
    let with = |key: Psk| config().admission(Admission::Psk(key));
    let receiving = endpoint(on, 1, with(keys.clone())).await;
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let at = listener.local_addr();
    let first = endpoint(on, 0, with(psk("first", 1))).await;
    let (one, other) = tokio::join!(first.connect(at), listener.accept());
    let (one, other) = (one.unwrap(), other.unwrap());

    std::fs::write(&path, format!("second {}", "02".repeat(32))).unwrap();
    keys.reload().unwrap();
    std::fs::remove_file(&path).unwrap();
    let late = endpoint(on, 0, with(psk("first", 1))).await.connect(at).await.unwrap_err();
    assert!(matches!(late, ConnectError::UnknownKey { .. }), "{late:?}");
    let second = endpoint(on, 0, with(psk("second", 2))).await;
    let (new, accepted) = tokio::join!(second.connect(at), listener.accept());
    assert_eq!(*accepted.unwrap().peer_auth(), PeerAuth::Key("second".into()));
    new.unwrap().close().await.unwrap();

    let grant = other.grant(other.pool().try_alloc(1).unwrap()).unwrap();
    one.write(WriteRequest::new(&grant, one.pool().try_alloc(1).unwrap())).await.0.unwrap();
}

/// Addresses beyond this host, over either bootstrap, before anything is bound.
#[tokio::test]
async fn b1_a_listener_beyond_this_host_is_asked_for_by_name() {
    for profile in [Profile::Default, Profile::Siw] {
        let pd = device(profile).alloc_pd().unwrap();
        let pool = KvPool::new(&pd, layout(1, 1, 64)).await.unwrap();
        for at in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
            let at = at.parse().unwrap();
            let refused = KvEndpoint::new(pool.clone(), config()).unwrap().listen(at).await.unwrap_err();
            assert!(matches!(refused, ConnectError::AdmissionRequired { addr } if addr == at), "{refused:?}");
            assert!(refused.to_string().contains("Admission::Open"), "{refused}");
        }
        for admission in [Admission::Open, Admission::Psk(psk("a", 1))] {
            let endpoint = KvEndpoint::new(pool.clone(), config().admission(admission)).unwrap();
            assert!(endpoint.listen("0.0.0.0:0".parse().unwrap()).await.is_ok());
        }
    }
}

/// Two connects at once from one address, and the third is told why it is refused, with a key and without.
#[tokio::test]
async fn b1_a_peer_that_comes_too_often_is_refused() {
    let on = On::Soft(Profile::Default);
    for admission in [Admission::Local, Admission::Psk(psk("a", 1))] {
        let config = || config().admission(admission.clone());
        let limits = PeerLimits::default().connects_per_second(2);
        let receiving = endpoint(on, 1, config().limits(limits)).await;
        let listener = receiving.listen(on.any_port_of(1)).await.unwrap();
        let mut refused = 0;
        // Until a moment comes in which three are quicker than a second, however busy the machine is.
        for _ in 0..100 {
            let (one, two, three) = (
                endpoint(on, 0, config()).await,
                endpoint(on, 0, config()).await,
                endpoint(on, 0, config()).await,
            );
            let at = listener.local_addr();
            let all = tokio::join!(one.connect(at), two.connect(at), three.connect(at));
            for error in [all.0, all.1, all.2].into_iter().filter_map(Result::err) {
                assert!(matches!(error, ConnectError::TooOften { limit: 2 }), "{error:?}");
                refused += 1;
            }
            if refused > 0 {
                break;
            }
        }
        assert!(refused > 0);
    }
    let error = KvEndpoint::new(
        KvPool::new(&device(on).alloc_pd().unwrap(), layout(1, 1, 64)).await.unwrap(),
        config().limits(PeerLimits::default().connects_per_second(0)),
    );
    assert!(error.unwrap_err().to_string().contains("connects_per_second"));
}

/// Grants and bytes of a peer are bounded, and free again when they have ended.
#[tokio::test]
async fn k7_what_a_peer_may_have_of_us_is_bounded() {
    let on = On::Soft(Profile::Default);
    let block = 2 * 1000;
    let limits = PeerLimits::default().grants(3).granted_bytes(5 * block);
    let receiving = endpoint(on, 1, config().limits(limits)).await;
    let sending = endpoint(on, 0, config()).await;
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
    let pool = receiver.pool().clone();
    let blocks = |n| pool.try_alloc(n).unwrap();
    let first = receiver.grant(blocks(3)).unwrap();
    let refused = receiver.grant(blocks(3)).unwrap_err();
    assert!(
        matches!(refused.why, GrantRefusal::TooLarge { asked, held, limit }
            if (asked, held, limit) == (3 * block, 3 * block, 5 * block)),
        "{refused:?}"
    );
    drop(refused);
    // What is granted to be read counts, too, and so does every layer.
    let _second = receiver.grant_read(blocks(1)).unwrap();
    let refused = receiver.grant_layers(blocks(1)).unwrap_err();
    assert!(matches!(refused.why, GrantRefusal::TooMany { open: 2, limit: 3 }), "{refused:?}");
    drop(refused);
    let third = receiver.grant(blocks(1)).unwrap();
    let refused = receiver.grant(blocks(1)).unwrap_err();
    assert!(matches!(refused.why, GrantRefusal::TooMany { open: 3, limit: 3 }), "{refused:?}");
    drop(refused);
    // One that has arrived makes room.
    sender.write(WriteRequest::new(&first, sender.pool().try_alloc(3).unwrap())).await.0.unwrap();
    drop(receiver.next_arrival().await.unwrap());
    let _ = third;
    receiver.grant(blocks(3)).unwrap();
}
