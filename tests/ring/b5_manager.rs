//! Queue pairs that the connection manager connects, on every profile of the soft provider and on RDMA devices.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::connect::cm::{CmConnection, CmListener};
use landfall::device::Profile;
use landfall::error::{OpError, QpError};

use crate::harness::*;

on_every_profile!(
    b5_queue_pairs_of_the_ring_are_connected_by_the_manager,
    r6_a_disconnect_ends_operations_and_is_their_cause,
);

/// Two queue pairs and their connections.
async fn connected(on: On) -> (Side, Side, CmConnection, CmConnection) {
    let (near, far) = on.devices();
    let (a, b) = (Side::new(&near, 8, Duration::ZERO), Side::new(&far, 8, Duration::ZERO));
    let (client, server) = connect_managed(on, &a, &b).await;
    (a, b, client, server)
}

async fn b5_queue_pairs_of_the_ring_are_connected_by_the_manager(on: On) {
    let (a, b, client, server) = connected(on).await;
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
}

async fn r6_a_disconnect_ends_operations_and_is_their_cause(on: On) {
    for by_drop in [false, true] {
        let (a, b, client, server) = connected(on).await;
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
}

/// Where the process below connects to.
const TO: &str = "LANDFALL_TEST_TO";

/// SIGKILL of the peer's process.
#[test]
fn k5_the_death_of_the_peers_process_disconnects() {
    run(false, async {
        let device = device(Profile::Default);
        let b = Side::new(&device, 8, Duration::ZERO);
        let listener = CmListener::bind(&device, "127.0.0.1:0".parse().unwrap()).await.unwrap();
        let mut peer = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "b5_manager::peer_process", "--ignored", "--nocapture"])
            .env(TO, listener.local_addr().to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let server = listener.accept().await.unwrap().accept(&b.qp, options()).await.unwrap();
        b.qp.recv(b.local(16).await).await.0.unwrap();
        let waiting = b.qp.recv(());
        peer.kill().unwrap();
        peer.wait().unwrap();
        server.disconnected().await;
        let error = waiting.await.0.unwrap_err();
        assert!(matches!(error, OpError::Flushed { cause: Some(_), .. }), "{error:?}");
    });
}

#[test]
#[ignore = "the process that another test kills"]
fn peer_process() {
    let to = std::env::var(TO).expect("started by the test that kills it").parse().unwrap();
    run(false, async {
        let device = device(Profile::Default);
        let a = Side::new(&device, 8, Duration::ZERO);
        let connection = CmConnection::connect(&a.qp, to, options()).await.unwrap();
        a.qp.send(a.local(16).await).await.0.unwrap();
        connection.disconnected().await;
    });
}

/// CASES 34, on the soft provider: nobody listens, rejected, dropped at any step.
#[test]
fn b4_a_hundred_failed_connects_leave_no_descriptor() {
    alone("b5_manager::failed_connects");
}

#[test]
#[ignore = "counts the descriptors of its process"]
fn failed_connects() {
    run(false, async {
        let device = device(Profile::Default);
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        // Bound and never listening: the port is nobody else's.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&any.into()).unwrap();
        let closed = socket.local_addr().unwrap().as_socket().unwrap();
        let listener = CmListener::bind(&device, any).await.unwrap();
        let to = listener.local_addr();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        for kind in 0..100u32 {
            let a = Side::new(&device, 8, Duration::ZERO);
            match kind % 3 {
                0 => {
                    let error = CmConnection::connect(&a.qp, closed, options()).await.unwrap_err();
                    assert!(matches!(error, ConnectError::Refused { .. }), "{error:?}");
                }
                1 => {
                    let connect = CmConnection::connect(&a.qp, to, options());
                    let reject = async {
                        // Requests of those that were dropped come too.
                        loop {
                            listener.accept().await.unwrap().reject(b"no");
                        }
                    };
                    let error = beside(connect, reject).await.unwrap_err();
                    assert!(matches!(error, ConnectError::PeerRejected { .. }), "{error:?}");
                }
                _ => {
                    let mut connect = pin!(CmConnection::connect(&a.qp, to, options()));
                    for _ in 0..kind / 3 % 6 {
                        let polled = poll_fn(|cx| Poll::Ready(connect.as_mut().poll(cx))).await;
                        assert!(polled.is_pending());
                        tokio::task::yield_now().await;
                    }
                }
            }
            a.qp.close().await;
            a.cq.close().await;
        }
        let reject = async {
            loop {
                listener.accept().await.unwrap().reject(b"no");
            }
        };
        // Driver tasks end at their own pace, and requests of those that were dropped are still there.
        beside(until(|| descriptors() <= before), reject).await;
    });
}

/// Runs `background` for as long as `main` takes.
async fn beside<T>(main: impl Future<Output = T>, background: impl Future<Output = ()>) -> T {
    let (mut main, mut background) = (pin!(main), pin!(background));
    poll_fn(|cx| {
        assert!(background.as_mut().poll(cx).is_pending());
        main.as_mut().poll(cx)
    })
    .await
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
