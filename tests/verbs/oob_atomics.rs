//! Atomics between two devices that have them.

use std::time::Duration;

use landfall::error::{OpError, WcStatus};
use landfall::memory::{Access, Exposed, Local, Memory, Region, Slice};
use landfall::ring::{CompletionQueue, CqConfig, Opcode, QpConfig, QueuePair, Role};

use crate::harness::*;

async fn counters(side: &Side) -> Region<Exposed> {
    let access = Access::READ_WRITE.with_atomics();
    side.pd.register_exposed(Memory::anonymous(4096), access).await.unwrap()
}

fn number(region: &Region<Exposed>, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    region.slice(offset..offset + 8).unwrap().copy_out(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn old(buf: &Slice<Local>) -> u64 {
    u64::from_ne_bytes(buf[..].try_into().unwrap())
}

#[test]
#[ignore = "needs RDMA devices"]
fn r2_atomics_give_the_old_number_in_their_buffer() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(16).await;
        assert!(a.pd.device().capabilities().atomics, "{}", a.pd.device().name());
        let region = counters(&b).await;
        let at = region.remote().slice(64, 8).unwrap();
        let (done, buf) = a.qp.fetch_add(a.local(8).await, at, 40).await;
        let done = done.unwrap();
        assert_eq!((done.opcode, done.bytes, old(&buf)), (Opcode::FetchAdd, 8, 0));
        let (done, buf) = a.qp.fetch_add(buf, at, 2).await;
        assert_eq!((done.is_ok(), old(&buf), number(&region, 64)), (true, 40, 42));
        let (done, buf) = a.qp.compare_swap(buf, at, 41, 7).await;
        assert_eq!((done.unwrap().opcode, old(&buf), number(&region, 64)), (Opcode::CompareSwap, 42, 42));
        let (done, buf) = a.qp.compare_swap(buf, at, 42, u64::MAX).await;
        assert_eq!((done.is_ok(), old(&buf), number(&region, 64)), (true, 42, u64::MAX));
        let (done, buf) = a.qp.fetch_add(buf, at, 3).await;
        assert_eq!((done.is_ok(), old(&buf), number(&region, 64)), (true, u64::MAX, 2));
        assert_eq!((number(&region, 56), number(&region, 72)), (0, 0), "its neighbours");
    });
}

/// Two queue pairs of the owner, whose peers add to one number at the same time.
#[test]
#[ignore = "needs RDMA devices"]
fn r2_a_thousand_additions_of_each_of_two_queue_pairs_are_all_counted() {
    const N: u64 = 1000;
    on_both_runtimes(async || {
        let owner = Side::new(1, 16, Duration::ZERO);
        let region = counters(&owner).await;
        let device = owner.pd.device().clone();
        let add = || async {
            let a = Side::new(0, 16, Duration::ZERO);
            // In the domain of the region.
            let cq = CompletionQueue::new(&device, CqConfig::new(32)).unwrap();
            let peer = QueuePair::new(&owner.pd, &cq, &cq, QpConfig::new(16, 16)).unwrap();
            let (to_a, to_peer) = (a.qp.endpoint().unwrap(), peer.endpoint().unwrap());
            peer.connect(&to_a, Role::Passive, patient()).await.unwrap();
            a.qp.connect(&to_peer, Role::Active, patient()).await.unwrap();
            let mut whole = a.local(8 * N).await;
            let at = region.remote().slice(8, 8).unwrap();
            let ops: Vec<_> = (0..N).map(|_| a.qp.fetch_add(whole.split_to(8).unwrap(), at, 1)).collect();
            let mut seen = Vec::new();
            for op in ops {
                let (done, buf) = op.await;
                done.unwrap();
                seen.push(old(&buf));
            }
            seen
        };
        let (mut seen, more) = tokio::join!(add(), add());
        seen.extend(more);
        assert_eq!(number(&region, 8), 2 * N);
        // Each addition has found another number.
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..2 * N));
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r6_an_atomic_without_access_fails_with_the_peers_status() {
    run(false, async {
        let Pair { a, b } = Pair::new(16).await;
        let region = b.exposed(4096).await;
        let at = region.remote().slice(0, 8).unwrap();
        let error = a.qp.fetch_add(a.local(8).await, at, 1).await.0.unwrap_err();
        assert!(matches!(error, OpError::Status { status: WcStatus::RemoteAccess, .. }), "{error}");
        assert_eq!(number(&region, 0), 0);
    });
}

/// It does not come to the device.
#[test]
#[ignore = "needs RDMA devices"]
fn r10_a_misaligned_atomic_is_refused_and_the_queue_pair_goes_on() {
    run(false, async {
        let Pair { a, b } = Pair::new(16).await;
        let region = counters(&b).await;
        let refused = a.qp.fetch_add(a.local(8).await, region.remote().slice(4, 8).unwrap(), 1).await.0;
        assert!(matches!(refused, Err(OpError::Refused { .. })), "{refused:?}");
        a.qp.fetch_add(a.local(8).await, region.remote().slice(8, 8).unwrap(), 1).await.0.unwrap();
    });
}
