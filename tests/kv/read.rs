//! Reads, by READs and by WRITEs of the owner: K1 the data is here, K4 cancelled and revoked, K5 deadlines and ends, K6 grants,
//! K8 limits, K9 which way, R1 and R10.

use std::sync::Arc;
use std::time::Duration;

use landfall::kv::{
    AbortReason, Blocks, GrantKind, GrantRefusal, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool,
    Layout, PoolAccess, ReadError, ReadMethod, ReadRequest, ReadStrategy, Reason, ServedBy, WriteError,
    WriteRequest,
};
use landfall::memory::Memory;

use crate::common::{On, PATIENCE, config, fill, layout, on_every_profile, qps, until, wrong};

on_every_profile!(
    k1_a_read_brings_every_byte_whichever_way,
    k1_pairs_are_read_to_their_places,
    k1_nothing_is_a_read_too,
    k8_reads_are_coalesced_sliced_and_as_many_in_flight_as_asked,
    k6_a_grant_to_read_is_used_once_and_for_reading_only,
    k6_grants_to_read_of_another_life_or_connection_are_refused,
    r10_positions_to_read_out_of_range_are_refused,
    k4_a_dropped_read_ends_alone,
    k4_a_revoked_grant_to_read_comes_back,
    k5_a_read_whose_deadline_has_passed_gives_its_blocks_back,
    k5_a_killed_channel_ends_every_read,
    k5_close_lets_reads_finish,
    k9_what_the_pools_allow_decides,
    k7_reads_and_writes_in_both_directions_at_once,
    r9_every_count_of_reads_completes,
);

const BY_READS: ReadStrategy = ReadStrategy::RdmaRead { depth: 16, qps: 64 };

/// Each way that can be asked for.
const WAYS: [ReadStrategy; 5] = [
    ReadStrategy::Auto,
    ReadStrategy::RdmaRead { depth: 1, qps: 1 },
    BY_READS,
    ReadStrategy::RemoteWrite,
    ReadStrategy::Measured,
];

struct Reading {
    reader: KvChannel,
    owner: KvChannel,
    reading: KvEndpoint,
    owning: KvEndpoint,
    listener: KvListener,
}

async fn endpoint(on: On, near: bool, layout: Layout, config: KvConfig, access: PoolAccess) -> KvEndpoint {
    let (a, b) = on.devices();
    let device = if near { a } else { b };
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&device.alloc_pd().unwrap(), layout, memory, access).await.unwrap();
    KvEndpoint::new(pool, on.admit(config.require_rdma(on == On::Devices))).unwrap()
}

async fn reading_with(on: On, layout: Layout, config: KvConfig, access: [PoolAccess; 2]) -> Reading {
    let reading = endpoint(on, true, layout, config.clone(), access[0]).await;
    let owning = endpoint(on, false, layout, config, access[1]).await;
    let mut listener = owning.listen(on.any_port_of(1)).await.unwrap();
    let (reader, owner) = tokio::join!(reading.connect(listener.local_addr()), listener.accept());
    Reading { reader: reader.unwrap(), owner: owner.unwrap(), reading, owning, listener }
}

async fn reading(on: On, layout: Layout) -> Reading {
    reading_with(on, layout, config(), [PoolAccess::Both; 2]).await
}

fn posted(channel: &KvChannel) -> u64 {
    channel.path().qps.iter().map(|qp| qp.writes + qp.reads).sum()
}

fn filled(channel: &KvChannel, count: u32, seed: u64) -> Blocks {
    let mut blocks = channel.pool().try_alloc(count).unwrap();
    fill(&mut blocks, seed);
    blocks
}

async fn k1_a_read_brings_every_byte_whichever_way(on: On) {
    let config = config().qps(qps(on, 3));
    let all = reading_with(on, layout(3, 64, 5000), config, [PoolAccess::Both; 2]).await;
    for (seed, way) in (1..).zip(WAYS) {
        // Neither the source's nor the target's blocks lie in the order in which they are named.
        let order: Vec<u32> = (0..32).map(|i| (i * 13) % 64).collect();
        let mut source = all.owner.pool().claim(&order).unwrap();
        fill(&mut source, seed);
        let back: Vec<u32> = (0..32).map(|i| (i * 29 + 7) % 64).collect();
        let target = all.reader.pool().claim(&back).unwrap();
        let grant = all.owner.grant_read(source).unwrap();
        assert_eq!(grant.kind(), GrantKind::Read);
        let (done, target) = all.reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
        let done = done.unwrap_or_else(|e| panic!("{way:?}: {e}"));
        assert_eq!(wrong(&target, seed, |p| p), 0, "{way:?}");
        assert_eq!(target.ids().collect::<Vec<_>>(), back);
        assert_eq!((done.bytes, done.descriptors), (3 * 32 * 5000, 3 * 32));
        assert!(!done.why.is_empty() && done.planned <= done.took, "{done:?}");
        let served = all.owner.next_served().await.unwrap();
        assert_eq!((served.grant(), served.bytes()), (grant.id(), 3 * 32 * 5000));
        let by = served.result().unwrap();
        match done.method {
            ReadMethod::RdmaRead { .. } => {
                assert!(by == ServedBy::RdmaRead && done.wrs >= 1 && done.most_in_flight >= 1, "{done:?}");
            }
            _ => assert!(by == ServedBy::RemoteWrite && done.wrs == 0, "{done:?}"),
        }
        match way {
            ReadStrategy::RemoteWrite => assert_eq!(done.method, ReadMethod::RemoteWrite),
            ReadStrategy::RdmaRead { .. } => assert_eq!(done.method.name(), "rdma-read"),
            _ => {}
        }
        assert_eq!(served.blocks().ids().collect::<Vec<_>>(), order);
        assert_eq!(wrong(served.blocks(), seed, |p| p), 0, "the source was changed");
    }
    let (ours, theirs) = (all.reader.stats(), all.owner.stats());
    let n = WAYS.len() as u64;
    assert_eq!((ours.reads, ours.read_bytes, ours.arrived), (n, n * 3 * 32 * 5000, 0));
    assert_eq!((theirs.served, theirs.served_bytes, theirs.landed), (n, n * 3 * 32 * 5000, 0));
    all.reader.close().await.unwrap();
}

async fn k1_pairs_are_read_to_their_places(on: On) {
    let all = reading(on, layout(2, 32, 3000)).await;
    for (seed, way) in (1..).zip(WAYS) {
        let grant = all.owner.grant_read(filled(&all.owner, 8, seed)).unwrap();
        let target = filled(&all.reader, 16, 99);
        // Backwards, to every other block; position 3 twice.
        let pairs = [(7, 0), (6, 2), (5, 4), (3, 6), (3, 8)];
        let request = ReadRequest::new(&grant, target).pairs(pairs).strategy(way);
        let (done, target) = all.reader.read(request).await;
        assert_eq!(done.unwrap().bytes, 5 * 2 * 3000);
        let from = |p: u32| pairs.iter().find(|pair| pair.1 == p).map(|pair| pair.0);
        let (mut got, mut want) = (vec![0; 3000], vec![0; 3000]);
        let served = all.owner.next_served().await.unwrap();
        for layer in 0..2 {
            for position in 0..16 {
                target.copy_out(layer, position, 0, &mut got).unwrap();
                match from(position) {
                    Some(source) => served.blocks().copy_out(layer, source, 0, &mut want).unwrap(),
                    None => continue,
                }
                assert!(got == want, "{way:?}: layer {layer}, position {position}");
            }
        }
        // What was not named is untouched.
        let untouched = wrong(&target, 99, |p| p);
        assert_eq!(untouched, 2 * pairs.len());
    }
}

async fn k1_nothing_is_a_read_too(on: On) {
    let all = reading(on, layout(1, 8, 100)).await;
    for way in WAYS {
        let grant = all.owner.grant_read(all.owner.pool().try_alloc(0).unwrap()).unwrap();
        let target = all.reader.pool().try_alloc(0).unwrap();
        let (done, _) = all.reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
        assert_eq!(done.unwrap().bytes, 0);
        all.owner.next_served().await.unwrap().result().unwrap();
    }
}

async fn k8_reads_are_coalesced_sliced_and_as_many_in_flight_as_asked(on: On) {
    let queue_pairs = qps(on, 2);
    let config = config().qps(queue_pairs).max_write(1 << 16);
    let all = reading_with(on, layout(1, 64, 4096), config, [PoolAccess::Both; 2]).await;
    let most = on.caps().max_rd_atomic;
    let piece = on.caps().max_msg_size.min(1 << 16);
    for depth in [1, 4] {
        let grant = all.owner.grant_read(filled(&all.owner, 64, 5)).unwrap();
        let strategy = ReadStrategy::RdmaRead { depth, qps: queue_pairs };
        let target = all.reader.pool().try_alloc(64).unwrap();
        let (done, target) = all.reader.read(ReadRequest::new(&grant, target).strategy(strategy)).await;
        let done = done.unwrap();
        assert_eq!(wrong(&target, 5, |p| p), 0);
        // Neighbours travel together, as far as the limit lets them; a pool of several regions has seams.
        let regions = (64 * 4096u64).div_ceil(on.caps().max_mr_size);
        let wrs = (64 * 4096u64).div_ceil(piece);
        assert!(done.wrs >= wrs && done.wrs <= wrs + 2 * regions, "{done:?}: {wrs} were enough");
        let limit = depth.min(u32::from(most)) * queue_pairs as u32;
        assert!(done.most_in_flight >= 1 && done.most_in_flight <= limit, "{done:?}, limit {limit}");
        if done.wrs >= u64::from(limit) {
            assert_eq!(done.most_in_flight, limit, "{done:?}");
        }
        assert_eq!(all.owner.next_served().await.unwrap().result(), Ok(ServedBy::RdmaRead));
    }
}

async fn k6_a_grant_to_read_is_used_once_and_for_reading_only(on: On) {
    let all = reading(on, layout(1, 16, 1000)).await;
    let grant = all.owner.grant_read(filled(&all.owner, 4, 1)).unwrap();
    // It is not one to write, and is as it was after the attempt.
    let (refused, source) =
        all.reader.write(WriteRequest::new(&grant, all.reader.pool().try_alloc(4).unwrap())).await;
    assert!(
        matches!(refused, Err(WriteError::WrongKind { grant: id, .. }) if id == grant.id()),
        "{refused:?}"
    );
    drop(source);
    let (done, target) =
        all.reader.read(ReadRequest::new(&grant, all.reader.pool().try_alloc(4).unwrap())).await;
    done.unwrap();
    let before = posted(&all.reader);
    for way in WAYS {
        let copy = landfall::kv::Grant::from_bytes(&grant.to_bytes()).unwrap();
        let target = all.reader.pool().try_alloc(4).unwrap();
        let (refused, _) = all.reader.read(ReadRequest::new(&copy, target).strategy(way)).await;
        assert!(
            matches!(refused, Err(ReadError::StaleGrant { grant: id }) if id == grant.id()),
            "{refused:?}"
        );
    }
    // And the other way round.
    let to_write = all.owner.grant(all.owner.pool().try_alloc(4).unwrap()).unwrap();
    let (refused, target) = all.reader.read(ReadRequest::new(&to_write, target)).await;
    assert!(matches!(refused, Err(ReadError::WrongKind { .. })), "{refused:?}");
    assert_eq!(posted(&all.reader), before);
    all.reader.write(WriteRequest::new(&to_write, target)).await.0.unwrap();
    // One endpoint's blocks cannot be granted by another.
    let foreign = all.reader.pool().try_alloc(1).unwrap();
    let refused = all.owner.grant_read(foreign).unwrap_err();
    assert!(matches!(refused.why, GrantRefusal::ForeignBlocks), "{refused:?}");
}

async fn k6_grants_to_read_of_another_life_or_connection_are_refused(on: On) {
    let mut first = reading(on, layout(1, 16, 1000)).await;
    let second = reading(on, layout(1, 16, 1000)).await;
    let grant = first.owner.grant_read(filled(&first.owner, 4, 1)).unwrap();
    let request = |on: &KvChannel| ReadRequest::new(&grant, on.pool().try_alloc(4).unwrap());
    let (refused, _) = second.reader.read(request(&second.reader)).await;
    assert!(
        matches!(refused, Err(ReadError::PeerRestarted { grant, peer })
            if grant == first.owning.epoch() && peer == second.owning.epoch()),
        "{refused:?}"
    );
    let third = endpoint(on, true, layout(1, 16, 1000), config(), PoolAccess::Both).await;
    let third = third.connect(first.listener.local_addr()).await.unwrap();
    let (refused, _) = third.read(request(&third)).await;
    assert!(matches!(refused, Err(ReadError::NotOurs { .. })), "{refused:?}");
    first.listener.accept().await.unwrap();
    // The two connect again: what was granted before has come back to its owner, and is not readable any more.
    first.reader.kill();
    first.owner.closed().await;
    first.reader.closed().await;
    let served = first.owner.next_served().await.unwrap();
    assert_eq!(served.result(), Err(AbortReason::ConnectionLost));
    assert!(first.owner.next_served().await.is_err());
    let (again, owner) =
        tokio::join!(first.reading.connect(first.listener.local_addr()), first.listener.accept());
    let (again, owner) = (again.unwrap(), owner.unwrap());
    let (refused, _) = again.read(request(&again)).await;
    assert!(matches!(refused, Err(ReadError::StaleGrant { .. })), "{refused:?}");
    let grant = owner.grant_read(served.into_blocks()).unwrap();
    let target = again.pool().try_alloc(4).unwrap();
    let (done, target) = again.read(ReadRequest::new(&grant, target)).await;
    done.unwrap();
    assert_eq!(wrong(&target, 1, |p| p), 0);
}

async fn r10_positions_to_read_out_of_range_are_refused(on: On) {
    let all = reading(on, layout(2, 16, 1000)).await;
    let grant = all.owner.grant_read(filled(&all.owner, 4, 1)).unwrap();
    let before = posted(&all.reader);
    for way in WAYS {
        let refusal = async |blocks: u32, pairs: Option<Vec<(u32, u32)>>| {
            let mut request = ReadRequest::new(&grant, all.reader.pool().try_alloc(blocks).unwrap());
            request = match pairs {
                Some(pairs) => request.pairs(pairs),
                None => request,
            };
            let (refused, target) = all.reader.read(request.strategy(way)).await;
            assert_eq!(target.len(), blocks);
            refused.unwrap_err()
        };
        assert!(matches!(refusal(3, None).await, ReadError::OutOfRange { index: 3, limit: 3, .. }));
        assert!(matches!(
            refusal(3, Some(vec![(4, 0)])).await,
            ReadError::OutOfRange { what: "position in the grant", index: 4, limit: 4 }
        ));
        assert!(matches!(
            refusal(3, Some(vec![(0, 3)])).await,
            ReadError::OutOfRange { index: 3, limit: 3, .. }
        ));
        assert!(matches!(refusal(3, Some(vec![(0, 1), (1, 1)])).await, ReadError::Duplicate { position: 1 }));
    }
    let shallow = ReadStrategy::RdmaRead { depth: 0, qps: 1 };
    let target = all.reader.pool().try_alloc(4).unwrap();
    let (refused, target) = all.reader.read(ReadRequest::new(&grant, target).strategy(shallow)).await;
    assert!(matches!(refused, Err(ReadError::Strategy { what: "depth", .. })), "{refused:?}");
    assert_eq!(posted(&all.reader), before, "nothing is posted");
    // The grant is as it was.
    all.reader.read(ReadRequest::new(&grant, target)).await.0.unwrap();
}

async fn k4_a_dropped_read_ends_alone(on: On) {
    let all = reading(on, layout(1, 64, 100_000)).await;
    for round in 0..on.rounds(8) {
        let way = [BY_READS, ReadStrategy::RemoteWrite][round as usize % 2];
        let grant = all.owner.grant_read(filled(&all.owner, 32, round)).unwrap();
        let target = all.reader.pool().alloc(32).await.unwrap();
        let read = all.reader.read(ReadRequest::new(&grant, target).strategy(way));
        if round % 4 < 2 {
            tokio::task::yield_now().await;
        }
        drop(read);
        let served = all.owner.next_served().await.unwrap();
        match served.result() {
            // It was quicker than the drop.
            Ok(_) => {}
            Err(AbortReason::Reader(_) | AbortReason::ReadRefused(_)) => {}
            Err(other) => panic!("{way:?}: {other}"),
        }
        assert_eq!(wrong(served.blocks(), round, |p| p), 0);
        drop(served);
        until("both pools to be whole again", || {
            all.reader.pool().free_blocks() == 64 && all.owner.pool().free_blocks() == 64
        })
        .await;
    }
    let grant = all.owner.grant_read(filled(&all.owner, 64, 77)).unwrap();
    let target = all.reader.pool().try_alloc(64).unwrap();
    let (done, target) = all.reader.read(ReadRequest::new(&grant, target)).await;
    done.unwrap();
    assert_eq!(wrong(&target, 77, |p| p), 0);
}

async fn k4_a_revoked_grant_to_read_comes_back(on: On) {
    let all = reading(on, layout(1, 64, 100_000)).await;
    // Before it is used.
    let grant = all.owner.grant_read(filled(&all.owner, 16, 1)).unwrap();
    all.owner.revoke(&grant);
    let served = all.owner.next_served().await.unwrap();
    assert_eq!((served.grant(), served.result()), (grant.id(), Err(AbortReason::Revoked)));
    let target = all.reader.pool().try_alloc(16).unwrap();
    let (refused, _) = all.reader.read(ReadRequest::new(&grant, target)).await;
    assert!(matches!(refused, Err(ReadError::StaleGrant { .. })), "{refused:?}");
    drop(served);
    // While it is used.
    for way in [BY_READS, ReadStrategy::RemoteWrite] {
        let grant = all.owner.grant_read(filled(&all.owner, 64, 2)).unwrap();
        let target = all.reader.pool().alloc(64).await.unwrap();
        let read = all.reader.read(ReadRequest::new(&grant, target).strategy(way));
        all.owner.revoke(&grant);
        let (ended, target) = read.await;
        let served = all.owner.next_served().await.unwrap();
        // The read may have been over when it heard of it, or when the owner's word came to be said.
        match (ended, served.result()) {
            (Ok(_), Ok(_) | Err(AbortReason::Revoked)) => assert_eq!(wrong(&target, 2, |p| p), 0),
            (Err(ReadError::Failed(Reason::Revoked) | ReadError::Refused(_)), Err(AbortReason::Revoked)) => {}
            (ended, served) => panic!("{way:?}: {ended:?} and {served:?}"),
        }
    }
    assert_eq!(all.owner.pool().free_blocks(), 64);
}

async fn k5_a_read_whose_deadline_has_passed_gives_its_blocks_back(on: On) {
    let all = reading(on, layout(1, 64, 1 << 20)).await;
    for way in [BY_READS, ReadStrategy::RemoteWrite] {
        let grant = all.owner.grant_read(all.owner.pool().try_alloc(64).unwrap()).unwrap();
        let target = all.reader.pool().try_alloc(64).unwrap();
        let request = ReadRequest::new(&grant, target).strategy(way).deadline(Duration::from_nanos(1));
        let (ended, target) = all.reader.read(request).await;
        assert_eq!(target.len(), 64);
        let served = all.owner.next_served().await.unwrap();
        match (ended, served.result()) {
            (Ok(_), Ok(_)) => {}
            (
                Err(ReadError::Failed(Reason::Deadline)),
                Err(AbortReason::Reader(_) | AbortReason::ReadRefused(_)),
            ) => {}
            (ended, served) => panic!("{way:?}: {ended:?} and {served:?}"),
        }
    }
    // A healthy queue pair has survived.
    let grant = all.owner.grant_read(filled(&all.owner, 1, 3)).unwrap();
    let (done, target) =
        all.reader.read(ReadRequest::new(&grant, all.reader.pool().try_alloc(1).unwrap())).await;
    done.unwrap();
    assert_eq!(wrong(&target, 3, |p| p), 0);
}

async fn k5_a_killed_channel_ends_every_read(on: On) {
    for killer in 0..2 {
        let all = reading(on, layout(1, 64, 1 << 20)).await;
        let reads: Vec<_> = (0..16)
            .map(|n| {
                let grant = all.owner.grant_read(all.owner.pool().try_alloc(4).unwrap()).unwrap();
                let target = all.reader.pool().try_alloc(4).unwrap();
                let way = [BY_READS, ReadStrategy::RemoteWrite][n % 2];
                all.reader.read(ReadRequest::new(&grant, target).strategy(way))
            })
            .collect();
        [&all.reader, &all.owner][killer].kill();
        let mut done = 0;
        for read in reads {
            match read.await {
                (Ok(_), _) => done += 1,
                (Err(ReadError::Failed(Reason::Lost(_)) | ReadError::Refused(_)), target) => {
                    assert_eq!(target.len(), 4);
                }
                (Err(other), _) => panic!("{other}"),
            }
        }
        all.reader.closed().await;
        all.owner.closed().await;
        let mut served = 0;
        while let Ok(end) = all.owner.next_served().await {
            served += 1;
            match end.result() {
                Ok(_) | Err(AbortReason::ConnectionLost | AbortReason::ReadRefused(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(served, 16, "{done} were done");
        assert_eq!((all.reader.pool().free_blocks(), all.owner.pool().free_blocks()), (64, 64));
        let target = all.reader.pool().try_alloc(1).unwrap();
        let again = all.owner.grant_read(all.owner.pool().try_alloc(1).unwrap());
        assert!(matches!(again.unwrap_err().why, GrantRefusal::Closed(_)));
        drop(target);
    }
}

async fn k5_close_lets_reads_finish(on: On) {
    let all = reading(on, layout(1, 64, 100_000)).await;
    let mut reads = Vec::new();
    for (n, way) in (0..).zip([BY_READS, ReadStrategy::RemoteWrite, BY_READS, ReadStrategy::RemoteWrite]) {
        let grant = all.owner.grant_read(filled(&all.owner, 8, n)).unwrap();
        let target = all.reader.pool().try_alloc(8).unwrap();
        reads.push(all.reader.read(ReadRequest::new(&grant, target).strategy(way)));
    }
    let closing = tokio::spawn({
        let reader = all.reader.clone();
        async move { reader.close().await }
    });
    for (n, read) in (0..).zip(reads) {
        let (done, target) = read.await;
        done.unwrap();
        assert_eq!(wrong(&target, n, |p| p), 0);
    }
    closing.await.unwrap().unwrap();
    for _ in 0..4 {
        all.owner.next_served().await.unwrap().result().unwrap();
    }
    assert!(all.owner.next_served().await.unwrap_err().is_graceful());
    let grant = all.owner.grant_read(all.owner.pool().try_alloc(1).unwrap());
    assert!(grant.is_err());
}

async fn k9_what_the_pools_allow_decides(on: On) {
    use PoolAccess::{Both, Readable, Source, Target};
    // The reader's pool, the owner's, and which of the two ways there are.
    for (reader, owner, by_reads, by_write) in [
        (Target, Target, false, true),
        (Target, Source, false, true),
        (Source, Readable, true, false),
        (Readable, Both, true, false),
        (Both, Readable, true, true),
        (Source, Target, false, false),
    ] {
        let all = reading_with(on, layout(1, 16, 4096), config(), [reader, owner]).await;
        for (seed, way) in (1..).zip([ReadStrategy::Auto, BY_READS, ReadStrategy::RemoteWrite]) {
            let grant = all.owner.grant_read(filled(&all.owner, 4, seed)).unwrap();
            let target = all.reader.pool().try_alloc(4).unwrap();
            let (result, target) = all.reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
            let possible = match way {
                ReadStrategy::RemoteWrite => by_write,
                ReadStrategy::RdmaRead { .. } => by_reads,
                _ => by_reads || by_write,
            };
            let case = format!("{reader:?} from {owner:?} by {way:?}");
            match result {
                Ok(done) => {
                    assert!(possible, "{case}: {done:?}");
                    assert_eq!(wrong(&target, seed, |p| p), 0, "{case}");
                    let reads = done.method != ReadMethod::RemoteWrite;
                    assert!(if reads { by_reads } else { by_write }, "{case}: {done:?}");
                }
                Err(ReadError::NotReadable) => assert!(!possible && !by_reads, "{case}"),
                Err(ReadError::NotWritable) => assert!(!possible && !by_write, "{case}"),
                Err(other) => panic!("{case}: {other}"),
            }
        }
        let to_write = all.owner.grant(all.owner.pool().try_alloc(1).unwrap());
        assert_eq!(to_write.is_ok(), owner.peers_write());
    }
}

async fn k7_reads_and_writes_in_both_directions_at_once(on: On) {
    let all = reading(on, layout(2, 64, 20_000)).await;
    let pull = |reader: KvChannel, owner: KvChannel, seed: u64, way| async move {
        for n in 0..10 {
            let mut source = owner.pool().alloc(8).await.unwrap();
            fill(&mut source, seed + n);
            let grant = owner.grant_read(source).unwrap();
            let target = reader.pool().alloc(8).await.unwrap();
            let (done, target) = reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
            done.unwrap();
            assert_eq!(wrong(&target, seed + n, |p| p), 0);
        }
    };
    let push = |from: KvChannel, to: KvChannel, seed: u64| async move {
        for n in 0..10 {
            let grant = to.grant(to.pool().alloc(8).await.unwrap()).unwrap();
            let mut source = from.pool().alloc(8).await.unwrap();
            fill(&mut source, seed + n);
            from.write(WriteRequest::new(&grant, source).tag(seed + n)).await.0.unwrap();
            let arrival = to.next_arrival().await.unwrap();
            assert_eq!(wrong(arrival.blocks(), seed + n, |p| p), 0);
        }
    };
    // Their blocks go back as they come.
    let back = |channel: KvChannel| async move {
        for _ in 0..20 {
            channel.next_served().await.unwrap().result().unwrap();
        }
    };
    let (a, b) = (&all.reader, &all.owner);
    let tasks = [
        tokio::spawn(pull(a.clone(), b.clone(), 1000, BY_READS)),
        tokio::spawn(pull(a.clone(), b.clone(), 2000, ReadStrategy::RemoteWrite)),
        tokio::spawn(pull(b.clone(), a.clone(), 3000, ReadStrategy::RemoteWrite)),
        tokio::spawn(pull(b.clone(), a.clone(), 4000, BY_READS)),
    ];
    let pushes =
        [tokio::spawn(push(a.clone(), b.clone(), 5000)), tokio::spawn(push(b.clone(), a.clone(), 6000))];
    let backs = [tokio::spawn(back(a.clone())), tokio::spawn(back(b.clone()))];
    for task in tasks {
        task.await.unwrap();
    }
    for task in pushes {
        task.await.unwrap();
    }
    for task in backs {
        task.await.unwrap();
    }
    assert_eq!((a.pool().free_blocks(), b.pool().free_blocks()), (64, 64));
}

async fn r9_every_count_of_reads_completes(on: On) {
    let all = reading(on, layout(1, 64, 300)).await;
    // One source for all of them.
    let source = Arc::new(filled(&all.owner, 1, 9));
    for count in (1..=64).step_by(if on == On::Devices { 9 } else { 3 }) {
        let reads: Vec<_> = (0..count)
            .map(|n| {
                let grant = all.owner.grant_read(source.clone()).unwrap();
                let target = all.reader.pool().try_alloc(1).unwrap();
                let way = [BY_READS, ReadStrategy::RemoteWrite][n % 2];
                all.reader.read(ReadRequest::new(&grant, target).strategy(way).deadline(PATIENCE))
            })
            .collect();
        for read in reads {
            let (done, target) = read.await;
            done.unwrap();
            assert_eq!(wrong(&target, 9, |p| p), 0);
        }
        for _ in 0..count {
            all.owner.next_served().await.unwrap().result().unwrap();
        }
    }
    assert_eq!(Arc::strong_count(&source), 1, "every loan has come back");
}
