//! Rows of the list of reported accidents that a queue pair alone shows.

use landfall::error::{MemoryError, OpError};
use landfall::memory::{Access, Memory, Prefault};
use landfall::ring::{ConnectOptions, Op, Opcode, QpConfig, QueuePair, Role};

use crate::harness::*;

on_every_profile!(
    r10_case_11_places_and_lengths_above_four_gib,
    r7_case_23_a_reconnect_ends_what_was_in_flight_with_its_cause,
    r1_case_50_forgotten_batches_slices_and_completions,
    r1_case_14_notifications_keep_their_own_payload,
    r2_case_15_immediates_arrive_as_they_were_sent,
);

/// Row 11: places and lengths above 4 GiB. Only pages that are written to are ever there.
async fn r10_case_11_places_and_lengths_above_four_gib(on: On) {
    const GIB: u64 = 1 << 30;
    if on == On::Devices {
        // A driver pins every page of a region, there or not: 6 GiB are not sparse any more.
        return;
    }
    let Pair { a, b } = Pair::new(on, 16).await;
    let sparse = || Memory::anonymous(6 * GIB).prefault(Prefault::No);
    let caps = device(on).capabilities().clone();
    if caps.max_mr_size < 6 * GIB {
        let refused = b.pd.register_exposed(sparse(), Access::READ_WRITE).await.unwrap_err();
        assert!(matches!(refused, MemoryError::TooLarge { .. }), "{refused:?}");
        return;
    }
    let target = b.pd.register_exposed(sparse(), Access::READ_WRITE).await.unwrap();
    let at = 4 * GIB + 8192;
    let mut source = a.local(4096).await;
    source.fill(7);
    a.qp.write(source, target.remote().slice(at, 4096).unwrap()).await.0.unwrap();
    let mut bytes = [1; 4096];
    target.slice(at..).unwrap().copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
    target.slice(8192..).unwrap().copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096], "the same place, 4 GiB before");
    let source = a.pd.register_exposed(sparse(), Access::READ).await.unwrap();
    for len in [(1 << 32) - 1, 1 << 32, (1 << 32) + 1] {
        // Where the device takes such a message, it would move: refused lengths are what is looked at here.
        if len <= caps.max_msg_size {
            continue;
        }
        let op = || a.qp.write(source.slice(..len).unwrap(), target.remote().slice(0, len).unwrap());
        match op().await.0.unwrap_err() {
            OpError::Refused { asked, limit, .. } => assert_eq!((asked, limit), (len, caps.max_msg_size)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(a.cq.stats().completions, 1, "a refused operation was posted");
}

/// Row 23: a queue pair with 32 operations in flight is replaced.
async fn r7_case_23_a_reconnect_ends_what_was_in_flight_with_its_cause(on: On) {
    if !on.by_hand() {
        return;
    }
    let ((near, far), depth) = (on.devices(), depth(on, 32));
    let (a, b) = (Side::new(&near, depth, Default::default()), Side::new(&far, depth, Default::default()));
    let (target, source) = (b.exposed(64).await, a.exposed(64).await);
    // The peer never connects: nothing completes.
    let to_b = b.qp.endpoint().unwrap();
    a.qp.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap();
    let number = a.qp.qp_num();
    let ops: Vec<_> =
        (0..32).map(|_| a.qp.write(source.slice(..).unwrap(), target.remote().whole())).collect();
    tokio::join!(a.qp.close(), b.qp.close());
    for op in ops {
        match op.await.0.unwrap_err() {
            OpError::Closed { qp_num } => assert_eq!(qp_num, number),
            other => panic!("{other:?}"),
        }
    }
    let make = |pd, cq| QueuePair::new(pd, cq, cq, QpConfig::new(depth, depth)).unwrap();
    let (qa, qb) = (make(&a.pd, &a.cq), make(&b.pd, &b.cq));
    connect(&qa, &qb).await;
    let before = a.cq.stats();
    let ops: Vec<_> = (0..32).map(|_| qa.write(source.slice(..).unwrap(), target.remote().whole())).collect();
    for op in ops {
        op.await.0.unwrap();
    }
    let after = a.cq.stats();
    assert_eq!((after.completions - before.completions, after.stale), (32, before.stale));
}

/// Row 50: whatever is forgotten costs what it holds, and nothing else. (Futures: see `r1_ownership`.)
async fn r1_case_50_forgotten_batches_slices_and_completions(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    let target = b.exposed(64).await;
    let source = a.exposed(64).await;
    let op = |i| Op::write(source.slice(..).unwrap(), target.remote().whole()).user_data(i);
    let mut parts = split(a.local(256).await, 4, 64).into_iter();
    std::mem::forget(parts.next());
    std::mem::forget(source.slice(..).unwrap());
    for _ in 0..20 {
        let mut batch = a.qp.batch();
        for i in 0..16 {
            batch.push(op(i)).unwrap();
        }
        // None of it was submitted, so none of it takes room.
        std::mem::forget(batch);
    }
    for round in 0..20 {
        let mut batch = a.qp.batch();
        for i in 0..16 {
            batch.push(op(round * 16 + i)).unwrap();
        }
        batch.submit();
        for _ in 0..16 {
            let done = a.cq.next().await.unwrap();
            done.result.as_ref().unwrap();
            std::mem::forget(done);
        }
    }
    for part in parts {
        a.qp.write(part, target.remote().whole()).await.0.unwrap();
    }
    assert_eq!((a.cq.stats().completions, a.cq.stats().peak_outstanding), (323, 16));
    a.qp.close().await;
    a.cq.close().await;
}

/// Row 14: many notifications at once, each with a payload of its own, while the receiver is late.
async fn r1_case_14_notifications_keep_their_own_payload(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    if !on.waits_for_receives() {
        return;
    }
    let sends: Vec<_> =
        split(a.local(64 * 32).await, 64, 32).into_iter().map(|part| a.qp.send(part)).collect();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let recvs: Vec<_> =
        split(b.local(64 * 32).await, 64, 32).into_iter().map(|part| b.qp.recv(part)).collect();
    let mut payloads = Vec::new();
    for recv in recvs {
        let (result, buf) = recv.await;
        assert_eq!(result.unwrap().bytes, 32);
        assert!(buf.iter().all(|&byte| byte == buf[0]), "a torn payload");
        payloads.push(buf[0]);
    }
    payloads.sort_unstable();
    assert!(payloads.into_iter().eq(0..64));
    for send in sends {
        send.await.0.unwrap();
    }
}

/// Row 15: the immediate is the same `u32` at the peer.
async fn r2_case_15_immediates_arrive_as_they_were_sent(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    let target = b.exposed(64).await;
    if !a.pd.device().capabilities().immediate {
        // siw has none: see `cm_only` of the tests on verbs.
        return;
    }
    for imm in [0x89AB_CDEF, 1, 0, u32::MAX] {
        let recv = b.qp.recv(b.local(64).await);
        a.qp.send_imm((), imm).await.0.unwrap();
        let got = recv.await.0.unwrap();
        assert_eq!((got.opcode, got.imm, got.bytes), (Opcode::Recv, Some(imm), 0));
        let recv = b.qp.recv(());
        a.qp.write_imm(a.local(24).await, target.remote().whole(), imm).await.0.unwrap();
        let got = recv.await.0.unwrap();
        assert_eq!((got.opcode, got.imm, got.bytes), (Opcode::RecvWrite, Some(imm), 24));
    }
}
