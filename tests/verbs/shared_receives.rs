//! Shared receive queues, as far as that needs no connection: all devices that have them.

use landfall::error::{OpError, QpError};
use landfall::memory::Memory;
use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair, SharedReceiveQueue};

use crate::harness::*;
use crate::lab_events::{Lab, is_gone};

#[test]
#[ignore = "needs RDMA devices"]
fn r2_shared_receives_end_once_with_their_queue_and_after_its_queue_pairs() {
    on_both_runtimes(async || {
        let device = device(0);
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(64)).unwrap();
        let srq = match SharedReceiveQueue::new(&pd, &cq, 16) {
            Ok(srq) => srq,
            Err(error) => {
                assert!(matches!(error, QpError::Unsupported { .. }), "{error}");
                assert_eq!(device.capabilities().max_srq, 0);
                return;
            }
        };
        let qps: Vec<_> = (0..3)
            .map(|_| QueuePair::with_shared_receives(&pd, &cq, &srq, QpConfig::new(8, 0)).unwrap())
            .collect();
        let mut recvs = Vec::new();
        let mut memory = pd.register_local(Memory::anonymous(40)).await.unwrap().into_slice();
        for i in 0..40 {
            let mut part = memory.split_to(1).unwrap();
            part.fill(i);
            recvs.push(srq.recv(part));
        }
        let closing = tokio::spawn(srq.close());
        for (i, qp) in qps.into_iter().enumerate() {
            if i == 1 { qp.kill() } else { qp.close().await }
        }
        within(closing).await.unwrap();
        for (i, recv) in recvs.into_iter().enumerate() {
            let (result, buf) = recv.await;
            assert!(matches!(result, Err(OpError::SrqClosed)), "{result:?}");
            assert_eq!(buf[0], i as u8);
        }
        cq.close().await;
    });
}

#[test]
#[ignore = "needs the lab"]
fn r7_removal_ends_shared_receives() {
    run(true, async {
        let _lab = Lab;
        let device = device(0);
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(64)).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &cq, 16).unwrap();
        let qp = QueuePair::with_shared_receives(&pd, &cq, &srq, QpConfig::new(8, 0)).unwrap();
        let recvs: Vec<_> = (0..40).map(|_| srq.recv(())).collect();
        let removal = Lab::remove(0);
        for recv in recvs {
            let error = recv.await.0.unwrap_err();
            assert!(is_gone(&error), "{error:?}");
        }
        let error = srq.recv(()).await.0.unwrap_err();
        assert!(is_gone(&error), "{error:?}");
        drop((srq, qp, cq, pd, device));
        Lab::removed(removal).await;
    });
}
