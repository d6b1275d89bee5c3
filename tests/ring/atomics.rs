//! FETCH_ADD and CMP_SWAP through the ring: values, sums, and what is refused before it is posted (R10).

use landfall::device::Profile;
use landfall::error::{MemoryError, OpError, WcStatus};
use landfall::memory::{Access, Exposed, Local, Memory, Region, RemoteSlice, Slice};
use landfall::ring::{CompletionQueue, CqConfig, Op, Opcode, QpConfig, QueuePair};

use crate::harness::*;

on_every_profile!(
    r2_atomics_give_the_old_number_in_their_buffer,
    r2_a_thousand_additions_of_each_of_two_queue_pairs_are_all_counted,
);

async fn counters(side: &Side, len: u64) -> Region<Exposed> {
    side.pd.register_exposed(Memory::anonymous(len), Access::READ.with_atomics()).await.unwrap()
}

fn number(region: &Region<Exposed>, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    region.slice(offset..offset + 8).unwrap().copy_out(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn old(buf: &Slice<Local>) -> u64 {
    u64::from_ne_bytes(buf[..].try_into().unwrap())
}

async fn r2_atomics_give_the_old_number_in_their_buffer(on: On) {
    if !device(on).capabilities().atomics {
        return;
    }
    let Pair { a, b } = Pair::new(on, 16).await;
    let region = counters(&b, 4096).await;
    let at = region.remote().slice(64, 8).unwrap();
    let buf = a.local(8).await;
    let (done, buf) = a.qp.fetch_add(buf, at, 40).await;
    let done = done.unwrap();
    assert_eq!((done.opcode, done.bytes, old(&buf)), (Opcode::FetchAdd, 8, 0));
    let (done, buf) = a.qp.fetch_add(buf, at, 2).await;
    assert_eq!((done.is_ok(), old(&buf), number(&region, 64)), (true, 40, 42));
    let (done, buf) = a.qp.compare_swap(buf, at, 41, 7).await;
    assert_eq!((done.unwrap().opcode, old(&buf), number(&region, 64)), (Opcode::CompareSwap, 42, 42));
    let (done, buf) = a.qp.compare_swap(buf, at, 42, u64::MAX).await;
    assert_eq!((done.is_ok(), old(&buf), number(&region, 64)), (true, 42, u64::MAX));
    // Wraps. In a batch, where the number comes back with the completion.
    let mut batch = a.qp.batch();
    batch.push(Op::fetch_add(buf, at, 3).user_data(9)).unwrap();
    batch.submit();
    let done = a.cq.next().await.unwrap();
    assert_eq!((done.user_data, done.result.unwrap().opcode), (9, Opcode::FetchAdd));
    let buf = done.buf.and_then(|buf| buf.into_local()).unwrap();
    assert_eq!((old(&buf), number(&region, 64)), (u64::MAX, 2));
}

/// Two queue pairs, each with a peer of its own, add to one number at the same time.
async fn r2_a_thousand_additions_of_each_of_two_queue_pairs_are_all_counted(on: On) {
    const N: u64 = 1000;
    let (near, far) = on.devices();
    if !near.capabilities().atomics {
        return;
    }
    let depth = depth(on, 16);
    let owner = Side::new(&far, depth, Default::default());
    let region = counters(&owner, 4096).await;
    let tasks: Vec<_> = (0..2)
        .map(|_| {
            let (near, far, region, pd) = (near.clone(), far.clone(), region.clone(), owner.pd.clone());
            tokio::spawn(async move {
                let a = Side::new(&near, depth, Default::default());
                // In the domain of the region.
                let cq = CompletionQueue::new(&far, CqConfig::new(2 * depth)).unwrap();
                let peer = QueuePair::new(&pd, &cq, &cq, QpConfig::new(depth, depth)).unwrap();
                connect(&a.qp, &peer).await;
                let mut whole = a.local(8 * N).await;
                let ops: Vec<_> = (0..N)
                    .map(|_| {
                        let buf = whole.split_to(8).unwrap();
                        a.qp.fetch_add(buf, region.remote().slice(8, 8).unwrap(), 1)
                    })
                    .collect();
                let mut seen = Vec::new();
                for op in ops {
                    let (done, buf) = op.await;
                    done.unwrap();
                    seen.push(old(&buf));
                }
                seen
            })
        })
        .collect();
    let mut seen = Vec::new();
    for task in tasks {
        seen.extend(task.await.unwrap());
    }
    assert_eq!(number(&region, 8), 2 * N, "{on:?}");
    // Each addition has found another number.
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..2 * N), "{on:?}");
}

#[test]
fn r10_atomics_that_cannot_be_are_refused_before_they_are_posted() {
    run(false, async {
        let Pair { a, b } = Pair::new(Profile::Default, 16).await;
        let region = counters(&b, 4096).await;
        let remote = region.remote();
        let word = remote.slice(8, 8).unwrap();
        for (len, at, named) in [
            (7, word, "the buffer of an atomic"),
            (16, word, "the buffer of an atomic"),
            (8, remote.slice(8, 7).unwrap(), "the remote range of an atomic"),
            (8, remote.whole(), "the remote range of an atomic"),
            (8, remote.slice(12, 8).unwrap(), "multiple of eight"),
        ] {
            for op in
                [Op::fetch_add(a.local(len).await, at, 1), Op::compare_swap(a.local(len).await, at, 0, 1)]
            {
                let rejected = a.qp.try_submit(op).unwrap_err();
                let text = rejected.error.to_string();
                assert!(matches!(rejected.error, OpError::Refused { .. }) && text.contains(named), "{text}");
            }
        }
        let (none, ()) = a.qp.fetch_add((), word, 1).await;
        assert!(matches!(none, Err(OpError::Refused { asked: 0, limit: 8, .. })));
        let imm = a.qp.try_submit(Op::fetch_add(a.local(8).await, word, 1).imm(1)).unwrap_err();
        assert!(matches!(imm.error, OpError::Refused { .. }), "{}", imm.error);
        // None of these has disturbed the queue pair.
        a.qp.fetch_add(a.local(8).await, word, 1).await.0.unwrap();
        assert_eq!(number(&region, 8), 1);
    });
}

#[test]
fn r6_an_atomic_without_access_fails_with_the_peers_status() {
    run(false, async {
        let Pair { a, b } = Pair::new(Profile::Default, 16).await;
        let region = b.exposed(4096).await;
        let error =
            a.qp.fetch_add(a.local(8).await, region.remote().slice(0, 8).unwrap(), 1).await.0.unwrap_err();
        assert!(matches!(error, OpError::Status { status: WcStatus::RemoteAccess, .. }), "{error}");
    });
}

/// Also on those that an exchange of addresses does not connect: it does not come to that.
#[test]
fn r10_a_device_without_atomics_says_so_with_its_name() {
    run(false, async {
        for profile in Profile::ALL {
            let device = device(profile);
            let side = Side::new(&device, 8, Default::default());
            let registered = side.pd.register_exposed(Memory::anonymous(64), Access::ATOMIC).await;
            let at = RemoteSlice { addr: 8, len: 8, rkey: 1 };
            let error = side.qp.fetch_add(side.local(8).await, at, 1).await.0.unwrap_err();
            if device.capabilities().atomics {
                registered.unwrap();
                assert!(matches!(error, OpError::NotConnected { .. }), "{error}");
                continue;
            }
            let refused = registered.unwrap_err();
            assert!(matches!(refused, MemoryError::Unsupported { .. }), "{refused}");
            assert!(matches!(error, OpError::Unsupported { .. }), "{error}");
            for text in [refused.to_string(), error.to_string()] {
                assert!(text.contains(device.name()) && text.contains("atomic"), "{text}");
            }
        }
    });
}
