//! How queue pairs that were connected out of band fail and end.

use std::time::Duration;

use landfall::error::{OpError, WcStatus};
use landfall::memory::RemoteSlice;
use landfall::ring::Role;

use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn r6_flushed_operations_carry_the_first_failure() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(16).await;
        let (target, source) = (b.exposed(64).await, a.exposed(64).await);
        let bad = RemoteSlice { rkey: !target.remote().rkey, ..target.remote().whole() };
        let recv = a.qp.recv(());
        let failed = a.qp.write(source.slice(..).unwrap(), bad);
        // 15 behind it in the queue, 10 that wait for room.
        let behind: Vec<_> =
            (0..25).map(|_| a.qp.write(source.slice(..).unwrap(), target.remote().whole())).collect();
        let is_cause = |error: &OpError| match error {
            OpError::Flushed { cause: Some(cause), .. } => {
                matches!(**cause, OpError::Status { status: WcStatus::RemoteAccess, .. })
            }
            _ => false,
        };
        let error = failed.await.0.unwrap_err();
        assert!(matches!(error, OpError::Status { status: WcStatus::RemoteAccess, .. }), "{error:?}");
        for op in behind {
            let error = op.await.0.unwrap_err();
            assert!(is_cause(&error), "{error:?}");
        }
        let error = recv.await.0.unwrap_err();
        assert!(is_cause(&error), "{error:?}");
        let late = a.qp.write(source.slice(..).unwrap(), target.remote().whole()).await.0.unwrap_err();
        assert!(is_cause(&late), "{late:?}");
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r6_operations_of_a_closed_queue_pair_say_so() {
    on_both_runtimes(async || {
        // Connected, and never connected.
        let Pair { a, b } = Pair::new(16).await;
        let lone = Side::new(0, 16, Duration::ZERO);
        for side in [b, lone] {
            let recvs: Vec<_> = (0..40).map(|_| side.qp.recv(())).collect();
            side.qp.close().await;
            for recv in recvs {
                let error = recv.await.0.unwrap_err();
                assert!(matches!(error, OpError::Closed { .. }), "{error:?}");
            }
        }
        drop(a);
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn k5_a_peer_that_is_gone_ends_operations() {
    on_both_runtimes(async || {
        let Pair { a, b } = Pair::new(16).await;
        let (target, source) = (b.exposed(64).await, a.exposed(64).await);
        b.qp.close().await;
        let error = a.qp.write(source.slice(..).unwrap(), target.remote().whole()).await.0.unwrap_err();
        // By time-out, or by what the peer's device says of a queue pair that it has not.
        assert!(matches!(error, OpError::Status { .. }), "{error:?}");
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_everything_is_dropped_with_work_in_flight() {
    on_both_runtimes(async || {
        for order in 0..4 {
            let Pair { a, b } = Pair::new(256).await;
            let (target, source) = (b.exposed(4096).await, a.exposed(4096).await);
            let write = || a.qp.write(source.slice(..).unwrap(), target.remote().whole());
            let writes: Vec<_> = (0..200).map(|_| write()).collect();
            let recvs: Vec<_> = (0..100).map(|_| b.qp.recv(())).collect();
            match order {
                0 => drop((a, b, source, target)),
                1 => drop((source, target, b, a)),
                2 => {
                    drop((b.qp, a.cq, source));
                    drop((a.qp, target, b.cq));
                }
                _ => {
                    a.qp.kill();
                    drop((b, source, a.cq, a.pd, target));
                }
            }
            for write in writes {
                // Done before the drop, flushed by ours, or failed because the peer went away.
                let _ = write.await;
            }
            for recv in recvs {
                recv.await.0.unwrap_err();
            }
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_a_runtime_that_goes_away_ends_operations() {
    for drop_handles_first in [false, true] {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (recvs, sides) = runtime.block_on(within(async {
            let Pair { a, b } = Pair::new(16).await;
            ((0..40).map(|_| b.qp.recv(())).collect::<Vec<_>>(), (a, b))
        }));
        drop(runtime);
        let sides = (!drop_handles_first).then_some(sides);
        run(false, async {
            for recv in recvs {
                let error = recv.await.0.unwrap_err();
                assert!(matches!(error, OpError::RuntimeGone | OpError::Closed { .. }), "{error:?}");
            }
        });
        drop(sides);
    }
}

/// CASES 22: completions whose event nobody has taken when everything is dropped.
#[test]
#[ignore = "needs RDMA devices"]
fn r3_a_queue_with_an_event_that_was_not_taken_can_be_dropped() {
    run(false, async {
        for _ in 0..20 {
            let Pair { a, b } = Pair::new(16).await;
            let target = b.exposed(64).await;
            let source = a.exposed(64).await;
            // The driver has armed the queue, and does not run again before the drop: there is no await.
            tokio::task::yield_now().await;
            let write = a.qp.write(source.slice(..).unwrap(), target.remote().whole());
            drop((a, b, write));
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b4_failed_connects_leave_nothing() {
    run(false, async {
        let device = device(0);
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut before = 0;
        for round in 0..30 {
            let side = Side::of(&device, 16, Duration::ZERO);
            let mut json = serde_json::to_value(side.qp.endpoint().unwrap()).unwrap();
            json["mtu"] = 1000.into();
            let error = side
                .qp
                .connect(&serde_json::from_value(json).unwrap(), Role::Active, patient())
                .await
                .unwrap_err();
            assert!(error.to_string().contains("MTU"), "{error}");
            side.qp.close().await;
            side.cq.close().await;
            drop(side.pd);
            if round == 4 {
                before = descriptors();
            }
        }
        // Driver tasks end at their own pace.
        within(async {
            while descriptors() > before {
                tokio::task::yield_now().await;
            }
        })
        .await;
    });
}
