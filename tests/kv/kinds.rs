//! The kinds of the cases in CASES.md by other inputs: where the case has one device and a write, here are several rails, some of
//! which fail or are not there, and reads both ways.

use std::time::Duration;

use landfall::device::{Device, Profile};
use landfall::kv::{
    Blocks, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, ReadError, ReadRequest,
    ReadStrategy, Resolution, WriteError, WriteRequest,
};
use landfall::memory::Memory;

use crate::common::{On, config, fill, layout, on_soft_profiles, until, wrong};
use crate::rails::up;

on_soft_profiles!(
    k2_every_rail_dies_at_once_and_a_reconnect_tells,
    b3_both_dial_at_once_with_rails_that_fail,
    r7_everything_is_dropped_while_rails_come_and_go,
    r4_more_blocks_than_any_queue_holds_on_several_rails_each_way,
    r5_what_a_rail_had_under_way_is_not_taken_for_what_its_next_life_has,
    k6_a_grant_whose_rail_has_died_is_used_once_all_the_same,
);

/// The ways to read.
const WAYS: [ReadStrategy; 2] = [ReadStrategy::RdmaRead { depth: 8, qps: 64 }, ReadStrategy::RemoteWrite];

fn quick() -> KvConfig {
    config().max_write(16 << 10).rail_probe(Duration::from_millis(2), Duration::from_millis(20))
}

/// An endpoint over these devices, to be written to and read.
async fn endpoint(devices: &[Device], layout: Layout, config: KvConfig) -> KvEndpoint {
    let pds: Vec<_> = devices.iter().map(|device| device.alloc_pd().unwrap()).collect();
    let (pds, memory) = (pds.iter().collect::<Vec<_>>(), Memory::anonymous(layout.required_bytes()));
    let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, config).unwrap()
}

/// So many devices, each with what `faults` says of it, as `LANDFALL_SOFT` has it.
fn devices(on: On, count: usize, faults: impl Fn(usize) -> &'static str) -> Vec<Device> {
    let device = |n| match faults(n) {
        "" => Device::soft(on.soft().unwrap().seed(7)),
        faults => Device::soft(on.faulty(faults)),
    };
    (0..count).map(|n| device(n).unwrap()).collect()
}

/// A channel over two rails, its devices at the one end and at the other, and its two ends.
async fn on_two_rails(on: On) -> (Vec<Device>, Vec<Device>, KvChannel, KvChannel) {
    let layout = layout(2, 64, 8 << 10);
    let (near, far) = (devices(on, 2, |_| ""), devices(on, 2, |_| ""));
    let (a, b) = (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
    let mut listener = b.listen(on.any_port_of(1)).await.unwrap();
    let (ab, ba) = tokio::join!(a.connect(listener.local_addr()), listener.accept());
    let (ab, ba) = (ab.unwrap(), ba.unwrap());
    (near, far, ab, ba)
}

fn cut(devices: &[Device]) {
    devices.iter().for_each(|device| device.soft_link().unwrap().cut());
}

fn mend(devices: &[Device]) {
    devices.iter().for_each(|device| device.soft_link().unwrap().mend());
}

fn filled(channel: &KvChannel, count: u32, seed: u64) -> Blocks {
    let mut blocks = channel.pool().try_alloc(count).unwrap();
    fill(&mut blocks, seed);
    blocks
}

/// Writes `count` blocks, and compares them.
async fn write(from: &KvChannel, to: &KvChannel, count: u32, seed: u64) {
    let grant = to.grant(to.pool().try_alloc(count).unwrap()).unwrap();
    let request = WriteRequest::new(&grant, filled(from, count, seed)).tag(seed);
    let ((landed, _), arrival) = tokio::join!(from.write(request), to.next_arrival());
    landed.unwrap();
    let arrival = arrival.unwrap();
    assert_eq!((arrival.tag(), wrong(arrival.blocks(), seed, |p| p)), (seed, 0));
}

/// Reads `count` blocks, and compares them.
async fn read(reader: &KvChannel, owner: &KvChannel, count: u32, seed: u64, way: ReadStrategy) {
    let grant = owner.grant_read(filled(owner, count, seed)).unwrap();
    let target = reader.pool().try_alloc(count).unwrap();
    let (done, target) = reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
    done.unwrap_or_else(|e| panic!("{way:?}: {e}"));
    assert_eq!(wrong(&target, seed, |p| p), 0, "{way:?}");
    let served = owner.next_served().await.unwrap();
    assert!(served.grant() == grant.id() && served.result().is_ok(), "{way:?}: {served:?}");
}

/// Of case 48: not one connection dies between landing and confirmation, but all rails, one after the other, at any moment.
async fn k2_every_rail_dies_at_once_and_a_reconnect_tells(on: On) {
    let layout = layout(2, 64, 8 << 10);
    let (near, far) = (devices(on, 3, |_| ""), devices(on, 3, |_| ""));
    let (sending, receiving) =
        (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let mut outcomes = [0; 3];
    for round in 0..24u64 {
        let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        let writes: Vec<_> = (0..4)
            .map(|n| {
                let tag = round * 4 + n;
                let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
                let request = WriteRequest::new(&grant, filled(&sender, 16, tag)).tag(tag);
                (tag, tokio::spawn(sender.write(request)))
            })
            .collect();
        for _ in 0..round * 3 % 40 {
            tokio::task::yield_now().await;
        }
        let dies = if round % 2 == 0 { &near } else { &far };
        // In an order of its own: the last one takes the channel along.
        (0..3).for_each(|n| cut(&dies[(n + round as usize) % 3..][..1]));
        let mut arrived = Vec::new();
        while let Ok(arrival) = receiver.next_arrival().await {
            assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0);
            arrived.push(arrival.tag());
        }
        sender.closed().await;
        mend(dies);
        let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        for (tag, write) in writes {
            let times = arrived.iter().filter(|other| **other == tag).count();
            match write.await.unwrap().0 {
                Ok(_) => {
                    assert_eq!(times, 1, "{tag} landed");
                    outcomes[0] += 1;
                }
                Err(WriteError::InDoubt { transfer, .. }) => {
                    let known = sender.resolve(transfer).await;
                    let expected = if times == 1 { Resolution::Landed } else { Resolution::NotDelivered };
                    assert_eq!((known, times <= 1), (Some(expected), true), "{tag}");
                    outcomes[1] += 1;
                }
                Err(WriteError::NotDelivered(_)) => {
                    assert_eq!(times, 0, "{tag} was not delivered");
                    outcomes[2] += 1;
                }
                Err(other) => panic!("{tag}: {other}"),
            }
        }
        sender.close().await.unwrap();
        receiver.closed().await;
    }
    println!("{on:?}: {outcomes:?} landed, in doubt and resolved, not delivered");
    let free = || (sending.pool().free_blocks(), receiving.pool().free_blocks());
    until("every block to come back", || free() == (64, 64)).await;
}

/// Of case 24: both dial, and at each end another rail is not there at first.
async fn b3_both_dial_at_once_with_rails_that_fail(on: On) {
    for round in 0..12u64 {
        let layout = layout(1, 32, 16 << 10);
        let near = devices(on, 3, |n| if n == 1 { "fail_cq=1" } else { "" });
        let far = devices(on, 3, |n| if n == 2 { "fail_qp=1" } else { "" });
        let (a, b) = (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
        let to_a = a.listen(on.any_port_of(0)).await.unwrap();
        let to_b = b.listen(on.any_port_of(1)).await.unwrap();
        let (ab, ba) = tokio::join!(a.connect(to_b.local_addr()), b.connect(to_a.local_addr()));
        let (ab, ba) = (ab.unwrap(), ba.unwrap());
        write(&ab, &ba, 32, round).await;
        write(&ba, &ab, 32, round + 1000).await;
        let all_up = |channel: &KvChannel| up(&channel.path()) == 3;
        until("every rail comes", || all_up(&ab) && all_up(&ba)).await;
        write(&ab, &ba, 32, round + 2000).await;
        assert!(a.connect(to_b.local_addr()).await.unwrap().same(&ab), "one channel a pair");
        read(&ba, &ab, 32, round + 3000, WAYS[round as usize % 2]).await;
        ab.close().await.unwrap();
    }
}

/// Of case 33: dropped in any order, with writes and reads in flight, while a rail is cut, comes back, or is yet to come.
async fn r7_everything_is_dropped_while_rails_come_and_go(on: On) {
    for order in 0..12u64 {
        let layout = layout(1, 64, 16 << 10);
        let near = devices(on, 3, |n| if n == 1 { "fail_cq=1" } else { "" });
        let far = devices(on, 3, |_| "");
        let (a, b) = (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
        let mut listener = b.listen(on.any_port_of(1)).await.unwrap();
        let (ab, ba) = tokio::join!(a.connect(listener.local_addr()), listener.accept());
        let (ab, ba) = (ab.unwrap(), ba.unwrap());
        let (pool, target) = (a.pool().clone(), b.pool().clone());
        let writes: Vec<_> = (0..4)
            .map(|n| {
                let grant = ba.grant(target.try_alloc(8).unwrap()).unwrap();
                ab.write(WriteRequest::new(&grant, filled(&ab, 8, n)))
            })
            .collect();
        let reads: Vec<_> = (0..4)
            .map(|n| {
                let grant = ba.grant_read(filled(&ba, 4, n)).unwrap();
                let request = ReadRequest::new(&grant, pool.try_alloc(4).unwrap());
                ab.read(request.strategy(WAYS[n as usize % 2]))
            })
            .collect();
        let flaps = far[(order as usize) % 3].soft_link().unwrap();
        flaps.cut();
        for _ in 0..order * 5 {
            tokio::task::yield_now().await;
        }
        flaps.mend();
        for _ in 0..order {
            tokio::task::yield_now().await;
        }
        match order % 6 {
            0 => drop((writes, reads, ab, ba, a, b, listener, near, far)),
            1 => drop((near, far, ba, reads, writes, ab, a, b, listener)),
            2 => drop((ab, ba, listener, b, a, reads, writes, near, far)),
            3 => drop((a, b, listener, reads, ba, ab, writes, near, far)),
            4 => {
                writes.into_iter().for_each(landfall::kv::Write::detach);
                drop((far, reads, ab, ba, near, a, b, listener));
            }
            _ => {
                ba.kill();
                drop((writes, listener, near, ba, ab, far, b, a, reads));
            }
        }
        until("every block to be free", || pool.free_blocks() == 64 && target.free_blocks() == 64).await;
    }
}

/// Of case 28: a queue of sixteen (in the profile `tiny`), thousands of blocks that are nobody's neighbours, three rails of which
/// one dies meanwhile, and each way.
async fn r4_more_blocks_than_any_queue_holds_on_several_rails_each_way(on: On) {
    const BLOCKS: u32 = 4_096;
    let layout = layout(1, BLOCKS, 512);
    let (near, far) = (devices(on, 3, |_| ""), devices(on, 3, |_| ""));
    let (a, b) = (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
    let mut listener = b.listen(on.any_port_of(1)).await.unwrap();
    let (ab, ba) = tokio::join!(a.connect(listener.local_addr()), listener.accept());
    let (ab, ba) = (ab.unwrap(), ba.unwrap());
    let ids: Vec<u32> = (0..BLOCKS).map(|i| (i * 1201) % BLOCKS).collect();
    for (round, way) in (0u64..).zip([None, Some(WAYS[0]), Some(WAYS[1])]) {
        let flaps = far[round as usize].soft_link().unwrap();
        let cutting = tokio::spawn(async move {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            flaps.cut();
            flaps.mend();
        });
        match way {
            None => {
                let mut source = ab.pool().claim(&ids).unwrap();
                fill(&mut source, round);
                let grant = ba.grant(ba.pool().try_alloc(BLOCKS).unwrap()).unwrap();
                let (landed, _) = ab.write(WriteRequest::new(&grant, source)).await;
                let least = if on.has_tables() { BLOCKS / 2_048 } else { BLOCKS };
                assert!(landed.unwrap().wrs >= u64::from(least));
                assert_eq!(wrong(ba.next_arrival().await.unwrap().blocks(), round, |p| p), 0);
            }
            Some(way) => {
                let mut source = ba.pool().claim(&ids).unwrap();
                fill(&mut source, round);
                let grant = ba.grant_read(source).unwrap();
                let target = ab.pool().try_alloc(BLOCKS).unwrap();
                let (done, target) = ab.read(ReadRequest::new(&grant, target).strategy(way)).await;
                assert_eq!(done.unwrap().descriptors, u64::from(BLOCKS));
                assert_eq!(wrong(&target, round, |p| p), 0, "{way:?}");
                ba.next_served().await.unwrap();
            }
        }
        cutting.await.unwrap();
    }
    ab.close().await.unwrap();
}

/// Of case 12: the queue pairs of a rail are destroyed with operations under way, again and again, and new ones come in their places,
/// with their numbers where the device gives them out again. Each operation has its own bytes.
async fn r5_what_a_rail_had_under_way_is_not_taken_for_what_its_next_life_has(on: On) {
    let (near, far, ab, ba) = on_two_rails(on).await;
    let all_up = |channel: &KvChannel| up(&channel.path()) == 2;
    for round in 0..12u64 {
        until("both rails are up", || all_up(&ab) && all_up(&ba)).await;
        let flaps = if round % 2 == 0 { &near[1] } else { &far[1] }.soft_link().unwrap();
        let cutting = async {
            for _ in 0..round * 2 {
                tokio::task::yield_now().await;
            }
            flaps.cut();
            flaps.mend();
        };
        let (seed, way) = (round * 10, WAYS[round as usize / 2 % 2]);
        let ((), (), (), ()) = tokio::join!(
            cutting,
            write(&ab, &ba, 16, seed),
            read(&ab, &ba, 16, seed + 1, way),
            write(&ba, &ab, 16, seed + 2)
        );
        let failed = |channel: &KvChannel| u64::from(channel.path().rails[1].failures) > round;
        until("both know that it has failed", || failed(&ab) && failed(&ba)).await;
    }
    assert!(ab.path().rails[0].failures == 0, "{}", ab.path());
    ab.close().await.unwrap();
}

/// Of case 4: a grant whose transfer was begun again on another rail is used up as any other, for writing and for reading.
async fn k6_a_grant_whose_rail_has_died_is_used_once_all_the_same(on: On) {
    let (_near, far, ab, ba) = on_two_rails(on).await;
    let posted = || {
        let qps = ab.path().qps;
        qps.iter().map(|qp| qp.writes + qp.reads).sum::<u64>()
    };
    let all_up = |channel: &KvChannel| up(&channel.path()) == 2;
    for round in 0..6u64 {
        until("both rails are up", || all_up(&ab) && all_up(&ba)).await;
        let cutting = async {
            for _ in 0..round * 2 {
                tokio::task::yield_now().await;
            }
            let link = far[1].soft_link().unwrap();
            link.cut();
            link.mend();
        };
        let grant = ba.grant(ba.pool().try_alloc(32).unwrap()).unwrap();
        let request = WriteRequest::new(&grant, filled(&ab, 32, round)).tag(round);
        let ((landed, source), arrival, ()) = tokio::join!(ab.write(request), ba.next_arrival(), cutting);
        assert!(landed.unwrap().attempts >= 1);
        assert_eq!(wrong(arrival.unwrap().blocks(), round, |p| p), 0);
        let lent = ba.grant_read(filled(&ba, 32, round + 100)).unwrap();
        let target = ab.pool().try_alloc(32).unwrap();
        let way = WAYS[round as usize % 2];
        let (done, target) = ab.read(ReadRequest::new(&lent, target).strategy(way)).await;
        done.unwrap();
        assert_eq!(wrong(&target, round + 100, |p| p), 0);
        ba.next_served().await.unwrap();
        // Everything that is on its way has come, before what was posted is counted.
        until("both rails are up", || all_up(&ab) && all_up(&ba)).await;
        let before = posted();
        let refused = ab.write(WriteRequest::new(&grant, source)).await.0.unwrap_err();
        assert!(matches!(refused, WriteError::StaleGrant { grant: id } if id == grant.id()), "{refused}");
        for way in WAYS {
            let target = ab.pool().try_alloc(1).unwrap();
            let refused = ab.read(ReadRequest::new(&lent, target).pairs([(0, 0)]).strategy(way)).await.0;
            let refused = refused.unwrap_err();
            assert!(matches!(refused, ReadError::StaleGrant { grant: id } if id == lent.id()), "{refused}");
        }
        // A position that is not there, and one that is used twice, leave a grant as it was.
        let grant = ba.grant(ba.pool().try_alloc(2).unwrap()).unwrap();
        for pairs in [vec![(0, 2)], vec![(0, 0), (1, 0)], vec![(u32::MAX, 0)]] {
            let request = WriteRequest::new(&grant, ab.pool().try_alloc(2).unwrap()).pairs(pairs);
            ab.write(request).await.0.unwrap_err();
        }
        assert_eq!(posted(), before, "something was posted");
        let request = WriteRequest::new(&grant, filled(&ab, 2, round));
        let ((landed, _), arrival) = tokio::join!(ab.write(request), ba.next_arrival());
        landed.unwrap();
        assert_eq!(wrong(arrival.unwrap().blocks(), round, |p| p), 0);
    }
    ab.close().await.unwrap();
}

/// Of case 8: what comes without order, over several rails that reorder differently, by writes and by reads of both ways at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k3_small_transfers_of_every_kind_are_never_torn_on_rails_without_order() {
    for on in [On::Soft(Profile::Srd), On::Shm(Profile::Srd)] {
        let layout = layout(3, 64, 700);
        let faults = |n| ["reorder=3ms", "reorder=1ms", ""][n];
        let (near, far) = (devices(on, 3, faults), devices(on, 3, faults));
        let (a, b) = (endpoint(&near, layout, quick()).await, endpoint(&far, layout, quick()).await);
        let mut listener = b.listen(on.any_port_of(1)).await.unwrap();
        let (ab, ba) = tokio::join!(a.connect(listener.local_addr()), listener.accept());
        let (ab, ba) = (ab.unwrap(), ba.unwrap());
        let writing = async {
            for seed in 0..150 {
                write(&ab, &ba, 5, seed).await;
            }
        };
        let reading = async {
            for seed in 0..150 {
                read(&ab, &ba, 7, 1000 + seed, WAYS[seed as usize % 2]).await;
            }
        };
        let back = async {
            for seed in 0..150 {
                write(&ba, &ab, 3, 2000 + seed).await;
            }
        };
        tokio::join!(writing, reading, back);
        assert_eq!((up(&ab.path()), ab.stats().landed), (3, 150));
        ab.close().await.unwrap();
    }
}

/// Of case 30: a rail that is patient for minutes, a read that is not; both ways, and the other rail carries on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k5_a_read_over_a_rail_that_stands_still_ends_at_the_users_deadline() {
    for on in [On::Soft(Profile::Default), On::Shm(Profile::ErdmaCompat)] {
        let layout = layout(1, 64, 64 << 10);
        // A byte in a while: nothing that is on its way there comes in this test's time.
        let slow = |n| if n == 1 { "rate=1024" } else { "" };
        for way in WAYS {
            let (near, far) = (devices(on, 2, |_| ""), devices(on, 2, slow));
            let patient = quick().peer_timeout(Duration::from_secs(600)).heartbeat(Duration::from_secs(300));
            let patient = patient.abort_grace(Duration::from_secs(1));
            let (a, b) =
                (endpoint(&near, layout, patient.clone()).await, endpoint(&far, layout, patient).await);
            let mut listener = b.listen(on.any_port_of(1)).await.unwrap();
            let (ab, ba) = tokio::join!(a.connect(listener.local_addr()), listener.accept());
            let (ab, ba) = (ab.unwrap(), ba.unwrap());
            let grant = ba.grant_read(filled(&ba, 64, 1)).unwrap();
            let target = ab.pool().try_alloc(64).unwrap();
            let request = ReadRequest::new(&grant, target).strategy(way).deadline(Duration::from_secs(1));
            let (result, target) = ab.read(request).await;
            assert!(matches!(result, Err(ReadError::Failed(_))), "{way:?}: {result:?}");
            drop(target);
            assert_eq!(ab.pool().free_blocks(), 64, "{way:?}");
            ab.kill();
            ba.next_served().await.unwrap().result().unwrap_err();
        }
    }
}
