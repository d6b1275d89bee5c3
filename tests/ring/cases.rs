//! Rows of the list of reported accidents that a queue pair alone shows.

use landfall::ring::Opcode;

use crate::harness::*;

/// Row 14: many notifications at once, each with a payload of its own, while the receiver is late.
#[test]
fn r1_case_14_notifications_keep_their_own_payload() {
    every_profile(async |profile| {
        let Pair { a, b } = Pair::new(profile, 16).await;
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
    });
}

/// Row 15: the immediate is the same `u32` at the peer.
#[test]
fn r2_case_15_immediates_arrive_as_they_were_sent() {
    every_profile(async |profile| {
        let Pair { a, b } = Pair::new(profile, 16).await;
        let target = b.exposed(64).await;
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
    });
}
