//! Queue pairs between two devices, connected out of band: operations, batches, limits.

use std::time::Duration;

use landfall::error::QpError;
use landfall::ring::{Op, Opcode, Role};

use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn r2_every_operation_ends_once_with_its_value() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(16).await;
        let mut buf = a.local(8192).await;
        buf.fill(0x11);
        let into = b.local(8192).await;

        // SEND; twice, so that small (inline) and large payloads are seen.
        for len in [3, 8192] {
            let (sent, received) = tokio::join!(
                a.qp.send(a.exposed(len).await.slice(..).unwrap()),
                b.qp.recv(b.local(len).await)
            );
            assert_eq!((sent.0.unwrap().opcode, received.0.unwrap().bytes), (Opcode::Send, len));
        }
        let (sent, received) = tokio::join!(a.qp.send(buf), b.qp.recv(into));
        let (buf, into) = (sent.1, received.1);
        sent.0.unwrap();
        assert_eq!(received.0.unwrap().imm, None);
        assert!(into.iter().all(|&byte| byte == 0x11));

        // WRITE and READ.
        let target = b.exposed(8192).await;
        let (written, mut buf) = a.qp.write(buf, target.remote().whole()).await;
        assert_eq!(written.unwrap().bytes, 8192);
        buf.fill(0);
        let (read, buf) = a.qp.read(buf, target.remote().whole()).await;
        assert_eq!((read.unwrap().opcode, buf.iter().all(|&byte| byte == 0x11)), (Opcode::Read, true));
    });
}

/// CASES 15.
#[test]
#[ignore = "needs RDMA devices"]
fn r2_immediates_arrive_as_the_same_number() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(16).await;
        let target = b.exposed(64).await;
        for imm in [0x89AB_CDEF, 1, 0, u32::MAX] {
            let source = a.local(64).await;
            let (written, arrived) =
                tokio::join!(a.qp.write_imm(source, target.remote().whole(), imm), b.qp.recv(()));
            let (arrived, source) = (arrived.0.unwrap(), written.1);
            written.0.unwrap();
            assert_eq!((arrived.opcode, arrived.imm, arrived.bytes), (Opcode::RecvWrite, Some(imm), 64));
            let (sent, received) = tokio::join!(a.qp.send_imm(source, imm), b.qp.recv(b.local(64).await));
            sent.0.unwrap();
            assert_eq!((received.0.unwrap().imm, received.1.len()), (Some(imm), 64));
            // Empty messages.
            let (sent, received) = tokio::join!(a.qp.send_imm((), imm), b.qp.recv(()));
            sent.0.unwrap();
            assert_eq!(received.0.unwrap().imm, Some(imm));
        }
    });
}

/// CASES 28: more than the queue holds, and every completion seen though only doorbells and events are counted.
#[test]
#[ignore = "needs RDMA devices"]
fn r4_many_operations_wait_for_room() {
    for spin in [Duration::ZERO, Duration::from_micros(200)] {
        on_both_runtimes(async || {
            let Pair { a, b } = Pair::spinning(16, spin).await;
            let target = b.exposed(64 * 500).await;
            let mut source = a.local(64 * 500).await;
            let mut writes = Vec::new();
            for i in 0..500u64 {
                let mut part = source.split_to(64).unwrap();
                part.fill(i as u8);
                writes.push(a.qp.write(part, target.remote().slice(i * 64, 64).unwrap()));
            }
            for write in writes {
                assert_eq!(write.await.0.unwrap().bytes, 64);
            }
            let mut bytes = vec![0; 64 * 500];
            target.slice(..).unwrap().copy_out(0, &mut bytes).unwrap();
            assert!(bytes.chunks(64).enumerate().all(|(i, part)| part.iter().all(|&b| b == i as u8)));
        });
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn r3_a_batch_rings_once_and_every_completion_comes() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(256).await;
        let target = b.exposed(4096).await;
        let source = a.exposed(4096).await;
        for round in 0..4u64 {
            let mut batch = a.qp.batch();
            for i in 0..256 {
                let op = Op::write(
                    source.slice(..16).unwrap(),
                    target.remote().slice(16 * (i % 200), 16).unwrap(),
                );
                batch.push(op.user_data(round * 256 + i)).unwrap();
            }
            assert_eq!(batch.submit(), 256);
            let mut seen: Vec<u64> = Vec::new();
            while seen.len() < 256 {
                let completion = a.cq.next().await.unwrap();
                completion.result.unwrap();
                seen.push(completion.user_data);
            }
            // RC completes in order.
            assert_eq!(seen, (round * 256..(round + 1) * 256).collect::<Vec<_>>());
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b2_a_queue_pair_is_connected_once_and_with_valid_numbers() {
    run(false, async {
        let Pair { a, b } = Pair::new(16).await;
        let to_b = b.qp.endpoint().unwrap();
        let error = a.qp.connect(&to_b, Role::Active, patient()).await.unwrap_err();
        assert!(matches!(error, QpError::State { state: "RTS", .. }), "{error}");
        // A number that is the soft provider's, beyond the 24 bits of a device's.
        let mut json = serde_json::to_value(&to_b).unwrap();
        json["qp_num"] = (1u32 << 24).into();
        let c = Side::new(0, 16, Duration::ZERO);
        let error =
            c.qp.connect(&serde_json::from_value(json).unwrap(), Role::Active, patient()).await.unwrap_err();
        assert!(matches!(error, QpError::Limit { limit: 0xff_ffff, .. }), "{error}");
        // Nothing has happened to it.
        let d = Side::new(1, 16, Duration::ZERO);
        d.qp.connect(&c.qp.endpoint().unwrap(), Role::Passive, patient()).await.unwrap();
        c.qp.connect(&d.qp.endpoint().unwrap(), Role::Active, patient()).await.unwrap();
        let (sent, received) = tokio::join!(c.qp.send(()), d.qp.recv(()));
        assert!(sent.0.is_ok() && received.0.is_ok());
    });
}
