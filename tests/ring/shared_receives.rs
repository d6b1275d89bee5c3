//! Shared receive queues: on the profiles that have them, and refused on the others.

use landfall::device::{Device, Profile};
use landfall::error::{OpError, QpError, WcStatus};
use landfall::ring::{CompletionQueue, CqConfig, Op, QpConfig, QueuePair, SharedReceiveQueue};

use crate::harness::*;

fn with_srq() -> impl Iterator<Item = Profile> {
    Profile::ALL.into_iter().filter(|&p| device(p).capabilities().max_srq > 0 && device(p).capabilities().oob)
}

/// A queue of 16 receives, and three queue pairs that receive by it from a peer each.
struct Shared {
    device: Device,
    pd: landfall::device::ProtectionDomain,
    cq: CompletionQueue,
    srq: SharedReceiveQueue,
    qps: Vec<QueuePair>,
    peers: Vec<Side>,
}

impl Shared {
    async fn new(profile: Profile) -> Self {
        let device = device(profile);
        let pd = device.alloc_pd().unwrap();
        // 16 receives once, 4 sends a queue pair.
        let cq = CompletionQueue::new(&device, CqConfig::new(28)).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &cq, 16).unwrap();
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let qp = QueuePair::with_shared_receives(&pd, &cq, &srq, QpConfig::new(4, 0)).unwrap();
            let peer = Side::new(&device, 16, Default::default());
            connect(&peer.qp, &qp).await;
            qps.push(qp);
            peers.push(peer);
        }
        Self { device, pd, cq, srq, qps, peers }
    }
}

fn every_srq(test: impl AsyncFn(Profile)) {
    for profile in with_srq() {
        for multi_thread in [false, true] {
            run(multi_thread, test(profile));
        }
    }
}

#[test]
fn r2_a_message_takes_the_oldest_receive_and_says_by_whom_it_came() {
    assert!(with_srq().count() > 0);
    every_srq(async |profile| {
        let Shared { srq, qps, peers, cq, pd, device: _device } = Shared::new(profile).await;
        // More than it holds: the others wait in the ring.
        let memory =
            pd.register_local(landfall::memory::Memory::anonymous(60 * 8)).await.unwrap().into_slice();
        let recvs: Vec<_> = split(memory, 60, 8).into_iter().map(|part| srq.recv(part)).collect();
        let mut sends = Vec::new();
        for _ in 0..20 {
            for (i, peer) in peers.iter().enumerate() {
                let mut part = peer.local(8).await;
                part.fill(100 + i as u8);
                sends.push(peer.qp.send(part));
            }
        }
        let mut by = [0; 3];
        for recv in recvs {
            let (done, buf) = recv.await;
            let done = done.unwrap();
            let from = usize::from(buf[0] - 100);
            assert_eq!((done.qp_num, done.bytes), (qps[from].qp_num(), 8));
            assert!(buf.iter().all(|&b| b == buf[0]));
            by[from] += 1;
        }
        assert_eq!(by, [20; 3]);
        for send in sends {
            send.await.0.unwrap();
        }
        assert_eq!(cq.stats().peak_outstanding, 16);
    });
}

#[test]
fn r3_a_message_that_found_no_receive_takes_one_that_comes_later() {
    every_srq(async |profile| {
        let Shared { srq, peers, .. } = &Shared::new(profile).await;
        let sends: Vec<_> = peers.iter().map(|peer| peer.qp.send(())).collect();
        // They are there before a receive is.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            srq.recv(()).await.0.unwrap();
        }
        for send in sends {
            send.await.0.unwrap();
        }
    });
}

#[test]
fn r7_a_queue_pair_that_ends_leaves_its_receives_to_the_others() {
    every_srq(async |profile| {
        for kill in [false, true] {
            let Shared { srq, mut qps, peers, .. } = Shared::new(profile).await;
            let recvs: Vec<_> = (0..16).map(|_| srq.recv(())).collect();
            peers[0].qp.send(()).await.0.unwrap();
            let gone = qps.remove(0);
            if kill {
                gone.kill()
            } else {
                gone.close().await
            }
            // All that are left are there for the second.
            for _ in 0..15 {
                peers[1].qp.send(()).await.0.unwrap();
            }
            let mut by = Vec::new();
            for recv in recvs {
                by.push(recv.await.0.unwrap().qp_num);
            }
            assert_eq!(by.iter().filter(|&&n| n == qps[0].qp_num()).count(), 15);
        }
    });
}

#[test]
fn r2_the_queue_ends_what_nobody_took_once_and_after_its_queue_pairs() {
    every_srq(async |profile| {
        let Shared { srq, qps, peers, cq, pd, .. } = Shared::new(profile).await;
        let mut batch = srq.batch();
        for i in 0..4 {
            batch.push(Op::recv(()).user_data(i)).unwrap();
        }
        batch.submit();
        let memory = pd.register_local(landfall::memory::Memory::anonymous(20)).await.unwrap().into_slice();
        let recvs: Vec<_> = split(memory, 20, 1).into_iter().map(|part| srq.recv(part)).collect();
        // The queue is closed, and serves on.
        let closing = tokio::spawn(srq.close());
        tokio::task::yield_now().await;
        peers[2].qp.send(()).await.0.unwrap();
        let first = cq.next().await.unwrap();
        assert_eq!((first.user_data, first.result.unwrap().qp_num), (0, qps[2].qp_num()));
        for qp in qps {
            qp.close().await;
        }
        within(closing).await.unwrap();
        for (i, recv) in recvs.into_iter().enumerate() {
            let (result, buf) = recv.await;
            assert!(matches!(result, Err(OpError::SrqClosed)), "{result:?}");
            assert_eq!(buf[0], i as u8);
        }
        for i in 1..4 {
            let next = cq.next().await.unwrap();
            assert_eq!(next.user_data, i);
            assert!(matches!(next.result, Err(OpError::SrqClosed)));
        }
        // Its entries are free again.
        let config = QpConfig::new(14, 14);
        within(async {
            while QueuePair::new(&pd, &cq, &cq, config.clone()).is_err() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        cq.close().await;
        assert!(cq.next().await.is_none());
    });
}

#[test]
fn r7_the_completion_queue_takes_the_shared_queue_along() {
    every_srq(async |profile| {
        let Shared { srq, qps, cq, .. } = Shared::new(profile).await;
        let recvs: Vec<_> = (0..20).map(|_| srq.recv(())).collect();
        cq.close().await;
        for recv in recvs {
            recv.await.0.unwrap_err();
        }
        assert!(matches!(srq.recv(()).await.0, Err(OpError::SrqClosed)));
        drop((srq, qps));
    });
}

#[test]
fn r7_a_runtime_that_goes_away_ends_shared_receives() {
    for profile in with_srq() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (shared, recvs) = runtime.block_on(within(async {
            let shared = Shared::new(profile).await;
            let recvs: Vec<_> = (0..20).map(|_| shared.srq.recv(())).collect();
            (shared, recvs)
        }));
        drop(runtime);
        run(false, async {
            for recv in recvs {
                let result = recv.await.0;
                assert!(matches!(result, Err(OpError::RuntimeGone)), "{result:?}");
            }
        });
        drop(shared);
    }
}

#[test]
fn r6_a_message_that_does_not_fit_fails_the_queue_pair_that_it_came_by_and_no_other() {
    every_srq(async |profile| {
        let Shared { srq, qps, peers, pd, .. } = Shared::new(profile).await;
        let memory = pd.register_local(landfall::memory::Memory::anonymous(4)).await.unwrap().into_slice();
        let (small, rest) = (srq.recv(memory), [srq.recv(()), srq.recv(())]);
        let long = peers[0].local(8).await;
        peers[0].qp.send(long).await.0.unwrap_err();
        let error = small.await.0.unwrap_err();
        let expected = qps[0].qp_num();
        assert!(
            matches!(error, OpError::Status { qp_num, status: WcStatus::LocalLength, .. } if qp_num == expected),
            "{error:?}"
        );
        assert!(matches!(qps[0].failure(), Some(OpError::Status { status: WcStatus::LocalLength, .. })));
        assert!(qps[1].failure().is_none());
        for (peer, recv) in peers[1..].iter().zip(rest) {
            peer.qp.send(()).await.0.unwrap();
            recv.await.0.unwrap();
        }
    });
}

#[test]
fn r4_r10_what_does_not_fit_or_belong_is_refused() {
    every_srq(async |profile| {
        let Shared { device, srq, qps, cq, pd, .. } = Shared::new(profile).await;
        let error = QueuePair::with_shared_receives(&pd, &cq, &srq, QpConfig::new(4, 9)).unwrap_err();
        assert!(
            matches!(error, QpError::CqTooSmall { committed: 28, send: 4, recv: 0, needed: 32, .. }),
            "{error}"
        );
        let error = SharedReceiveQueue::new(&pd, &cq, 5).unwrap_err();
        assert!(matches!(error, QpError::CqTooSmall { committed: 28, asked: 5, .. }), "{error}");
        assert!(matches!(SharedReceiveQueue::new(&pd, &cq, 0), Err(QpError::Limit { .. })));
        let other = device.alloc_pd().unwrap();
        let error = QueuePair::with_shared_receives(&other, &cq, &srq, QpConfig::new(1, 0)).unwrap_err();
        assert!(matches!(error, QpError::ForeignResource { .. }), "{error}");
        let refused = |error: OpError| assert!(matches!(error, OpError::Refused { .. }), "{error:?}");
        refused(qps[0].recv(()).await.0.unwrap_err());
        refused(srq.try_submit(Op::send(())).unwrap_err().error);
        refused(srq.batch().push(Op::send(())).unwrap_err().error);
        refused(qps[0].batch().push(Op::recv(())).unwrap_err().error);
        // None of those that were refused is waited for.
        drop(qps);
        srq.close().await;
        cq.close().await;
    });
}

/// CASES 44.
#[test]
fn k8_a_device_without_shared_receive_queues_says_so() {
    run(false, async {
        for profile in Profile::ALL.into_iter().filter(|&p| device(p).capabilities().max_srq == 0) {
            let device = device(profile);
            let cq = CompletionQueue::new(&device, CqConfig::new(8)).unwrap();
            let error = SharedReceiveQueue::new(&device.alloc_pd().unwrap(), &cq, 4).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, QpError::Unsupported { .. }), "{text}");
            assert!(text.contains("srq") && text.contains(device.name()), "{text}");
        }
    });
}
