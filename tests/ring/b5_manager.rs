//! Queue pairs that the connection manager connects, on every profile of the soft provider.

use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::connect::cm::{CmConnection, CmListener, CmOptions};
use landfall::device::Profile;
use landfall::error::{OpError, QpError};

use crate::harness::*;

fn options() -> CmOptions {
    CmOptions::new().attributes(patient()).deadline(DEADLINE)
}

/// Two queue pairs and their connections.
async fn connected(profile: Profile) -> (Side, Side, CmConnection, CmConnection) {
    let device = device(profile);
    let (a, b) = (Side::new(&device, 8, Duration::ZERO), Side::new(&device, 8, Duration::ZERO));
    let listener = CmListener::bind(&device, "127.0.0.1:0".parse().unwrap()).await.unwrap();
    let serve = async { listener.accept().await.unwrap().accept(&b.qp, options()).await };
    let (client, server) =
        tokio::join!(CmConnection::connect(&a.qp, listener.local_addr(), options()), serve);
    (a, b, client.unwrap(), server.unwrap())
}

#[test]
fn b5_queue_pairs_of_the_ring_are_connected_by_the_manager() {
    every_profile(async |profile| {
        let (a, b, client, server) = connected(profile).await;
        let received = b.qp.recv(b.local(64).await);
        let mut buf = a.local(64).await;
        buf.fill(7);
        a.qp.send(buf).await.0.unwrap();
        let (received, buf) = received.await;
        assert_eq!((received.unwrap().bytes, buf[63]), (64, 7));
        // Back, and one-sided.
        let target = a.exposed(64).await;
        let (written, buf) = b.qp.write(buf, target.remote().whole()).await;
        written.unwrap();
        b.qp.read(buf, target.remote().whole()).await.0.unwrap();
        assert_eq!(client.peer_addr(), server.local_addr());
        let again = CmConnection::connect(&a.qp, client.peer_addr(), options()).await;
        assert!(again.is_err(), "a queue pair connects once");
    });
}

#[test]
fn r6_a_disconnect_ends_operations_and_is_their_cause() {
    every_profile(async |profile| {
        for by_drop in [false, true] {
            let (a, b, client, server) = connected(profile).await;
            let waiting = [a.qp.recv(()), b.qp.recv(())];
            let kept = if by_drop {
                drop(client);
                None
            } else {
                client.disconnect();
                Some(client)
            };
            server.disconnected().await;
            if let Some(client) = &kept {
                client.disconnected().await;
            }
            for recv in waiting {
                let error = recv.await.0.unwrap_err();
                assert!(matches!(error, OpError::Flushed { cause: Some(_), .. }), "{error:?}");
            }
            let late = a.qp.send(()).await.0.unwrap_err();
            let OpError::Flushed { cause: Some(cause), .. } = late else { panic!("{late:?}") };
            assert!(matches!(*cause, OpError::Disconnected { .. }), "{cause:?}");
        }
    });
}

#[test]
fn b4_options_out_of_range_and_closed_queue_pairs_are_refused() {
    run(false, async {
        let device = device(Profile::Default);
        let a = Side::new(&device, 8, Duration::ZERO);
        let listener = CmListener::bind(&device, "127.0.0.1:0".parse().unwrap()).await.unwrap();
        let to = listener.local_addr();
        let mut forever = patient();
        forever.retry_cnt = 7;
        let error = CmConnection::connect(&a.qp, to, options().attributes(forever)).await.unwrap_err();
        let ConnectError::Resources { source } = &error else { panic!("{error:?}") };
        assert!(matches!(source.downcast_ref(), Some(QpError::Limit { limit: 6, .. })), "{source}");
        let error = CmConnection::connect(&a.qp, to, options().private_data([0; 57])).await.unwrap_err();
        assert!(matches!(error, ConnectError::PrivateDataTooLong { len: 57, limit: 56, .. }), "{error:?}");
        a.cq.close().await;
        let error = CmConnection::connect(&a.qp, to, options()).await.unwrap_err();
        let ConnectError::Resources { source } = &error else { panic!("{error:?}") };
        assert!(matches!(source.downcast_ref(), Some(QpError::State { state: "closed", .. })), "{source}");
    });
}
