//! Messages into shared receive queues, by queue pairs that were connected out of band.

use std::time::Duration;

use landfall::memory::Memory;
use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair, Role, SharedReceiveQueue};

use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn r2_a_message_takes_the_oldest_shared_receive_and_says_by_whom_it_came() {
    on_both_runtimes(async || {
        let device = device(0);
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(64)).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &cq, 16).unwrap();
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let qp = QueuePair::with_shared_receives(&pd, &cq, &srq, QpConfig::new(8, 0)).unwrap();
            let peer = Side::new(1, 64, Duration::ZERO);
            qp.connect(&peer.qp.endpoint().unwrap(), Role::Passive, patient()).await.unwrap();
            peer.qp.connect(&qp.endpoint().unwrap(), Role::Active, patient()).await.unwrap();
            qps.push(qp);
            peers.push(peer);
        }
        // More than it holds: the others wait in the ring.
        let mut memory = pd.register_local(Memory::anonymous(75 * 8)).await.unwrap().into_slice();
        let mut recvs = std::collections::VecDeque::new();
        for _ in 0..75 {
            recvs.push_back(srq.recv(memory.split_to(8).unwrap()));
        }
        let mut message = Vec::new();
        for (i, peer) in peers.iter().enumerate() {
            let source = peer.exposed(8).await.slice(..).unwrap();
            source.copy_in(0, &[100 + i as u8; 8]).unwrap();
            message.push(source);
        }
        let mut sends = Vec::new();
        for _ in 0..20 {
            for (peer, message) in peers.iter().zip(&message) {
                sends.push(peer.qp.send(message.clone()));
            }
        }
        let mut by = [0; 3];
        for _ in 0..60 {
            let (done, buf) = recvs.pop_front().unwrap().await;
            let (done, from) = (done.unwrap(), usize::from(buf[0] - 100));
            assert_eq!((done.qp_num, done.bytes), (qps[from].qp_num(), 8));
            by[from] += 1;
        }
        assert_eq!(by, [20; 3]);
        for send in sends {
            send.await.0.unwrap();
        }
        // One that ends leaves what is left to the others.
        qps.remove(0).close().await;
        for _ in 0..15 {
            peers[1].qp.send(message[1].clone()).await.0.unwrap();
        }
        for recv in recvs {
            assert_eq!(recv.await.0.unwrap().qp_num, qps[0].qp_num());
        }
    });
}
