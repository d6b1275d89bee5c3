//! Connects by RDMA_CM that fail, each with its error, and what is left of them: nothing.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use landfall::connect::cm::{CmConnection, CmListener, CmOptions, CmRequest};
use landfall::connect::{ConnectError, Stage};
use landfall::error::chain;

use crate::cm_harness::*;
use crate::harness::*;

fn side(number: usize) -> Side {
    Side::new(number, 4, Duration::ZERO)
}

/// A port on which nobody ever listened: below those that are given out. One that was closed may go on for a while.
fn nobody() -> SocketAddr {
    SocketAddr::new(address(1), 1)
}

#[test]
#[ignore = "needs RDMA devices"]
fn b4_nobody_listens() {
    on_both_runtimes(async || {
        let a = side(0);
        let to = nobody();
        let error = CmConnection::connect(&a.qp, to, options()).await.unwrap_err();
        assert!(matches!(error, ConnectError::Refused { addr } if addr == to), "{}", chain(&error));
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b4_a_rejected_request_says_so_and_why() {
    on_both_runtimes(async || {
        let listener = listener().await;
        let to = listener.local_addr();
        for by_drop in [false, true] {
            let a = side(0);
            let reject = async {
                let request = listener.accept().await.unwrap();
                match by_drop {
                    true => drop(request),
                    false => request.reject(b"full house"),
                }
            };
            let ((), client) = tokio::join!(reject, CmConnection::connect(&a.qp, to, options()));
            let Err(ConnectError::PeerRejected { addr, private_data, reason }) = client else {
                panic!("{client:?}")
            };
            assert_eq!(addr, to);
            assert!(reason.contains("program"), "{reason}");
            assert_eq!(private_data.starts_with(b"full house"), !by_drop, "{private_data:?}");
        }
        // The listener goes on.
        let (a, b) = (side(0), side(1));
        let serve = async { listener.accept().await.unwrap().accept(&b.qp, options()).await };
        let (server, client) = tokio::join!(serve, CmConnection::connect(&a.qp, to, options()));
        assert!(server.is_ok() && client.is_ok(), "{server:?} {client:?}");
    });
}

/// CASES 46.
#[test]
#[ignore = "needs RDMA devices"]
fn b1_what_is_too_long_or_in_use_or_elsewhere_is_refused_at_once() {
    run(false, async {
        let a = side(0);
        let listener = listener().await;
        let to = listener.local_addr();
        let error = CmConnection::connect(&a.qp, to, options().private_data([0; 57])).await.unwrap_err();
        assert!(matches!(error, ConnectError::PrivateDataTooLong { len: 57, limit: 56, .. }), "{error:?}");
        let error = CmListener::bind(&device(1), to).await.unwrap_err();
        assert!(matches!(error, ConnectError::AddrInUse { addr } if addr == to), "{}", chain(&error));
        // An address of the other device, and one of no device: the error names what was found.
        let error = CmListener::bind(&device(0), SocketAddr::new(address(1), 0)).await.unwrap_err();
        let ConnectError::OtherDevice { device: ours, found, .. } = &error else {
            panic!("{}", chain(&error))
        };
        assert!(ours.contains(&name(0)) && found.contains(&name(1)), "{error}");
        let error = CmListener::bind(&device(0), "192.0.2.1:0".parse().unwrap()).await.unwrap_err();
        assert!(matches!(error, ConnectError::OtherDevice { .. }), "{}", chain(&error));
        // A family that the device has no address of.
        let error = CmConnection::connect(&a.qp, "[2001:db8::1]:7".parse().unwrap(), options()).await;
        let error = error.unwrap_err();
        assert!(
            matches!(error, ConnectError::NoLocalAddress { .. } | ConnectError::Unreachable { .. }),
            "{}",
            chain(&error)
        );
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b4_an_address_that_nobody_has() {
    run(false, async {
        let a = side(0);
        let mut octets = match address(0) {
            std::net::IpAddr::V4(v4) => v4.octets(),
            v6 => panic!("{v6}"),
        };
        octets[3] = 77;
        let to = SocketAddr::from((octets, 4791));
        // With the time that a connect has by default: RDMA_CM says so before it is over.
        let error = CmConnection::connect(&a.qp, to, CmOptions::new()).await.unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { addr, .. } if addr == to), "{}", chain(&error));
        assert!(error.to_string().contains(&name(0)), "{error}");
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b4_a_peer_that_does_not_answer_costs_no_more_than_the_deadline() {
    run(false, async {
        let (a, b) = (side(0), side(1));
        let listener = listener().await;
        let short = options().deadline(Duration::from_millis(500));
        // It takes no requests.
        let error = CmConnection::connect(&a.qp, listener.local_addr(), short.clone()).await.unwrap_err();
        assert!(matches!(error, ConnectError::Timeout { stage: Stage::Reply, .. }), "{}", chain(&error));
        assert!(error.to_string().contains(&listener.local_addr().to_string()), "{error}");
        // A client that is gone when its request is accepted.
        let request = listener.accept().await.unwrap();
        match request.accept(&b.qp, short).await {
            // iWARP sends its reply and is connected; then it sees the end.
            Ok(connection) => connection.disconnected().await,
            Err(ConnectError::Timeout { .. } | ConnectError::Closed { .. }) => {}
            Err(error) => panic!("{}", chain(&error)),
        }
    });
}

/// Polls `connect` `polls` times, or until it has ended, and drops it.
async fn drop_midway(connect: impl Future, polls: usize) {
    let mut connect = pin!(connect);
    for _ in 0..polls {
        let mut polled = false;
        let pending = std::future::poll_fn(|cx| {
            if polled {
                return std::task::Poll::Ready(true);
            }
            polled = true;
            match connect.as_mut().poll(cx) {
                std::task::Poll::Ready(_) => std::task::Poll::Ready(false),
                // Again when there is something new.
                std::task::Poll::Pending => std::task::Poll::Pending,
            }
        });
        if !pending.await {
            return;
        }
    }
}

/// Runs `background` for as long as `main` takes.
async fn beside<T>(main: impl Future<Output = T>, background: impl Future<Output = ()>) -> T {
    let (mut main, mut background) = (pin!(main), pin!(background));
    let mut over = false;
    std::future::poll_fn(|cx| {
        over = over || background.as_mut().poll(cx).is_ready();
        main.as_mut().poll(cx)
    })
    .await
}

/// One connect that fails, in one of five ways.
async fn fail(kind: usize, listener: &CmListener, closed: SocketAddr) {
    let (a, b) = (side(0), side(1));
    let to = listener.local_addr();
    // Requests that nobody waits for any more come too.
    let each = async |take: &dyn Fn(CmRequest)| {
        loop {
            take(listener.accept().await.unwrap());
        }
    };
    match kind % 5 {
        0 => {
            CmConnection::connect(&a.qp, closed, options()).await.unwrap_err();
        }
        1 => {
            let reject = |request: CmRequest| request.reject(b"no");
            let client = beside(CmConnection::connect(&a.qp, to, options()), each(&reject)).await;
            assert!(matches!(client, Err(ConnectError::PeerRejected { .. })), "{client:?}");
        }
        // The client drops it at each of its steps, or where it waits for the answer.
        2 => {
            let midway = drop_midway(CmConnection::connect(&a.qp, to, options()), kind / 5 % 7);
            let _ = tokio::time::timeout(Duration::from_millis(50), midway).await;
        }
        // The server drops it at each of its steps.
        3 => {
            let serve = async {
                loop {
                    let request = listener.accept().await.unwrap();
                    drop_midway(request.accept(&b.qp, options()), kind / 5 % 4).await;
                }
            };
            let client = async {
                if let Ok(client) = CmConnection::connect(&a.qp, to, options()).await {
                    client.disconnected().await;
                }
            };
            beside(client, serve).await;
        }
        // The deadline passes.
        _ => {
            let short = options().deadline(Duration::from_millis(30));
            CmConnection::connect(&a.qp, to, short).await.unwrap_err();
        }
    }
    for side in [a, b] {
        side.qp.close().await;
        side.cq.close().await;
    }
}

/// CASES 34: a hundred failed connects (or as many as `LANDFALL_FAILED_CONNECTS` says), and the kernel's objects and our descriptors are as many as before.
#[test]
#[ignore = "needs RDMA devices"]
fn b4_a_hundred_failed_connects_leave_nothing() {
    run(true, async {
        let closed = nobody();
        let listener = listener().await;
        // What the libraries keep for devices in use, they keep for this one.
        let kept = CmPair::new().await;
        let before = Held::now();
        let count = std::env::var("LANDFALL_FAILED_CONNECTS").map_or(100, |n| n.parse().unwrap());
        for kind in 0..count {
            fail(kind, &listener, closed).await;
        }
        // Requests of clients that are gone.
        let take = async {
            loop {
                drop(listener.accept().await.unwrap());
            }
        };
        beside(before.is_back(), take).await;
        drop(kept);
    });
}
