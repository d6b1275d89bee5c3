//! Queue pairs between two devices, connected by RDMA_CM: on every kind of device.

use std::time::Duration;

use landfall::connect::cm::{CmConnection, CmListener, CmOptions};
use landfall::error::OpError;
use landfall::ring::Opcode;

use crate::cm_harness::*;
use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn r2_every_operation_ends_once_with_its_value() {
    on_both_runtimes(async || {
        let CmPair { a, b, client: _client, server: _server } = CmPair::new().await;
        // The client's side is the first to send (iWARP).
        for len in [3, 8192] {
            let received = b.qp.recv(b.local(len).await);
            let mut buf = a.local(len).await;
            buf.fill(0x11);
            let (sent, received) = tokio::join!(a.qp.send(buf), received);
            assert_eq!((sent.0.unwrap().opcode, received.0.unwrap().bytes), (Opcode::Send, len));
            assert!(received.1.iter().all(|&byte| byte == 0x11));
        }
        for (from, to) in [(&a, &b), (&b, &a)] {
            let target = to.exposed(8192).await;
            let mut buf = from.local(8192).await;
            buf.fill(0x22);
            let (written, mut buf) = from.qp.write(buf, target.remote().whole()).await;
            assert_eq!(written.unwrap().bytes, 8192);
            buf.fill(0);
            // After the write, also where that completes at the hand-off (iWARP).
            let (read, buf) = from.qp.read(buf, target.remote().whole()).await;
            assert_eq!((read.unwrap().opcode, buf.iter().all(|&byte| byte == 0x22)), (Opcode::Read, true));
            let received = to.qp.recv(to.local(8192).await);
            let (sent, received) = tokio::join!(from.qp.send(buf), received);
            assert_eq!((sent.0.unwrap().bytes, received.0.unwrap().bytes), (8192, 8192));
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b5_both_sides_see_who_it_is_and_what_was_sent_along() {
    on_both_runtimes(async || {
        let (a, b) = (Side::new(0, 16, Duration::ZERO), Side::new(1, 16, Duration::ZERO));
        let listener = listener().await;
        let to = listener.local_addr();
        assert_eq!(to.ip(), address(1));
        let serve = async {
            let request = listener.accept().await.unwrap();
            assert!(request.private_data().starts_with(b"ping"), "{:?}", request.private_data());
            assert!(request.private_data()[4..].iter().all(|&b| b == 0));
            assert_eq!((request.peer_addr().ip(), request.local_addr().ip()), (address(0), address(1)));
            request.accept(&b.qp, options().private_data(*b"pong")).await.unwrap()
        };
        let client = CmConnection::connect(&a.qp, to, options().private_data(*b"ping"));
        let (server, client) = tokio::join!(serve, client);
        let client = client.unwrap();
        assert!(client.private_data().starts_with(b"pong"), "{:?}", client.private_data());
        assert!(client.private_data()[4..].iter().all(|&b| b == 0));
        assert_eq!((client.peer_addr(), client.local_addr().ip()), (to, address(0)));
        assert_eq!(server.peer_addr().ip(), address(0));
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r6_a_disconnect_ends_the_operations_of_both_sides() {
    on_both_runtimes(async || {
        for by_drop in [false, true] {
            let CmPair { a, b, client, server } = CmPair::new().await;
            let waiting = [a.qp.recv(a.local(16).await), b.qp.recv(b.local(16).await)];
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
            let late = a.qp.send(a.local(16).await).await.0.unwrap_err();
            let OpError::Flushed { cause: Some(cause), .. } = late else { panic!("{late:?}") };
            assert!(matches!(*cause, OpError::Disconnected { .. }), "{cause:?}");
        }
    });
}

/// Several at once, of one listener, whose requests are accepted in any order.
#[test]
#[ignore = "needs RDMA devices"]
fn r3_many_are_connected_at_once() {
    on_both_runtimes(async || {
        let listener = listener().await;
        let to = listener.local_addr();
        let ours: Vec<_> = (0..8).map(|_| Side::new(0, 4, Duration::ZERO)).collect();
        let theirs: Vec<_> = (0..8).map(|_| Side::new(1, 4, Duration::ZERO)).collect();
        let serve = async {
            let mut served = Vec::new();
            let mut requests = Vec::new();
            for _ in 0..8 {
                requests.push(listener.accept().await.unwrap());
            }
            for (request, side) in requests.into_iter().rev().zip(&theirs) {
                served.push(request.accept(&side.qp, options()).await.unwrap());
            }
            served
        };
        let connect = async {
            let mut connecting = Vec::new();
            for side in &ours {
                connecting.push(CmConnection::connect(&side.qp, to, options()));
            }
            all(connecting).await
        };
        let (served, connected) = tokio::join!(serve, connect);
        let connected: Vec<_> = connected.into_iter().map(Result::unwrap).collect();
        let mut received = Vec::new();
        for side in &theirs {
            received.push(side.qp.recv(side.local(16).await));
        }
        for side in &ours {
            side.qp.send(side.local(16).await).await.0.unwrap();
        }
        for recv in received {
            assert_eq!(recv.await.0.unwrap().bytes, 16);
        }
        drop((served, connected));
    });
}

/// SIGKILL of the peer's process: a queue pair of its own stays as it is, the manager tells.
#[test]
#[ignore = "needs RDMA devices"]
fn k5_the_death_of_the_peers_process_disconnects() {
    run(false, async {
        let b = Side::new(1, 16, Duration::ZERO);
        let listener = listener().await;
        let mut peer = Peer::start(listener.local_addr());
        let server = listener.accept().await.unwrap().accept(&b.qp, options()).await.unwrap();
        // It is connected, and knows it.
        b.qp.recv(b.local(16).await).await.0.unwrap();
        let waiting = b.qp.recv(b.local(16).await);
        peer.kill();
        server.disconnected().await;
        let error = waiting.await.0.unwrap_err();
        assert!(matches!(error, OpError::Flushed { cause: Some(_), .. }), "{error:?}");
        b.qp.close().await;
    });
}

#[test]
#[ignore = "the process that another test kills, not a test"]
fn peer_process() {
    let to = Peer::told();
    run(false, async {
        let a = Side::new(0, 16, Duration::ZERO);
        let connection = CmConnection::connect(&a.qp, to, options()).await.unwrap();
        a.qp.send(a.local(16).await).await.0.unwrap();
        connection.disconnected().await;
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_everything_is_dropped_in_any_order() {
    on_both_runtimes(async || {
        for order in 0..4 {
            let CmPair { a, b, client, server } = CmPair::new().await;
            let (recv, send) = (b.qp.recv(b.local(16).await), a.qp.send(a.local(16).await));
            match order {
                0 => drop((a, b, client, server)),
                1 => drop((server, client, b, a)),
                2 => {
                    a.qp.kill();
                    drop((b.qp, b.cq, server, client, a.cq));
                }
                _ => {
                    drop(client);
                    a.qp.close().await;
                    drop((b, server));
                }
            }
            let _ = (recv.await, send.await);
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_a_runtime_that_goes_away_takes_its_connections_along() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (pair, recv) = runtime.block_on(within(async {
        let pair = CmPair::new().await;
        let recv = pair.b.qp.recv(pair.b.local(16).await);
        (pair, recv)
    }));
    drop(runtime);
    run(false, async {
        recv.await.0.unwrap_err();
    });
    drop(pair);
}

/// For `CmOptions` of a listener on an unspecified address, requests to other devices are not taken.
#[test]
#[ignore = "needs RDMA devices"]
fn b5_a_listener_on_any_address_serves_its_own_device() {
    run(false, async {
        let (a, b) = (Side::new(0, 16, Duration::ZERO), Side::new(1, 16, Duration::ZERO));
        let listener = CmListener::bind(&device(1), "0.0.0.0:0".parse().unwrap()).await.unwrap();
        let to = std::net::SocketAddr::new(address(1), listener.local_addr().port());
        let serve = async { listener.accept().await.unwrap().accept(&b.qp, CmOptions::new()).await };
        let (server, client) = tokio::join!(serve, CmConnection::connect(&a.qp, to, options()));
        assert!(server.is_ok() && client.is_ok(), "{server:?} {client:?}");
    });
}
