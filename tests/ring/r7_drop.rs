//! R7: any drop order, also without a runtime; nothing hangs and every future ends.

use landfall::device::Profile;
use landfall::error::{DeviceError, OpError};
use landfall::ring::{CompletionQueue, CqConfig, Role};

use crate::harness::*;

on_every_profile!(
    r7_everything_is_dropped_in_every_order_with_work_in_flight(own_runtime),
    r7_a_runtime_that_goes_away_ends_operations_with_runtime_gone(own_runtime),
    r7_closing_under_load_ends_every_operation(own_runtime),
    r7_a_queue_pair_can_be_made_again_and_again,
);

/// Every order of n things.
fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let mut all = Vec::new();
    for shorter in permutations(n - 1) {
        for at in 0..=shorter.len() {
            let mut order = shorter.clone();
            order.insert(at, n - 1);
            all.push(order);
        }
    }
    all
}

fn r7_everything_is_dropped_in_every_order_with_work_in_flight(on: On) {
    // In an emulator some orders must do; the soft profiles have them all.
    let every = if on == On::Devices { 7 } else { 1 };
    for (round, order) in permutations(5).into_iter().step_by(every).enumerate() {
        run(round % 2 == 0, async {
            let Pair { a, b } = Pair::new(on, 1000).await;
            let n = depth(on, 1000) as usize;
            let region = b.exposed(4096).await;
            let source = a.exposed(4096).await;
            let remote = region.remote().whole();
            let ops: Vec<_> = (0..n).map(|_| a.qp.write(source.slice(..).unwrap(), remote)).collect();
            let recvs: Vec<_> = (0..n).map(|_| b.qp.recv(())).collect();
            let (mut a_parts, mut b_parts) =
                ((Some(a.qp), Some(a.cq), Some(a.pd)), (Some(b.qp), Some(b.cq), Some(b.pd)));
            let (mut source, mut region) = (Some(source), Some(region));
            for step in order {
                match step {
                    0 => drop((a_parts.0.take(), a_parts.2.take())),
                    1 => drop(a_parts.1.take()),
                    2 => drop((b_parts.0.take(), b_parts.1.take())),
                    3 => drop((source.take(), region.take())),
                    _ => drop(b_parts.2.take()),
                }
                tokio::task::yield_now().await;
            }
            for op in ops {
                // Done before the drop, flushed by ours, or failed because the peer went away.
                let _ = op.await;
            }
            for recv in recvs {
                recv.await.0.unwrap_err();
            }
        });
    }
}

fn r7_a_runtime_that_goes_away_ends_operations_with_runtime_gone(on: On) {
    if !on.by_hand() {
        return;
    }
    for drop_handles_first in [false, true] {
        let (near, far) = on.devices();
        let side = |device| Side::new(device, depth(on, 16), Default::default());
        // Its end is not to be taken for the peer's.
        let of_peer = tokio::runtime::Runtime::new().unwrap();
        let b = of_peer.block_on(async { side(&far) });
        let (ops, rest) = {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let made = runtime.block_on(async {
                let a = side(&near);
                // The peer never connects: what is posted stays in flight.
                a.qp.connect(&b.qp.endpoint().unwrap(), Role::Active, Default::default()).await.unwrap();
                let target = b.exposed(64).await;
                let mut ops = Vec::new();
                for part in split(a.local(64 * 40).await, 40, 64) {
                    ops.push(a.qp.write(part, target.remote().whole()));
                }
                (ops, (a, b))
            });
            drop(runtime);
            made
        };
        let rest = (!drop_handles_first).then_some(rest);
        run(false, async {
            for (i, op) in ops.into_iter().enumerate() {
                let (result, buf) = op.await;
                assert!(matches!(result, Err(OpError::RuntimeGone | OpError::Closed { .. })), "{result:?}");
                assert!(buf.iter().all(|&b| b == i as u8));
            }
            if let Some((a, b)) = rest {
                assert!(matches!(a.qp.recv(()).await.0, Err(OpError::RuntimeGone)));
                assert!(a.cq.next().await.is_none());
                a.qp.close().await;
                a.cq.close().await;
                drop(b.cq);
                b.qp.close().await;
            }
        });
    }
}

async fn r7_a_queue_pair_can_be_made_again_and_again(on: On) {
    if !on.by_hand() {
        return;
    }
    let ((near, far), depth) = (on.devices(), depth(on, 32));
    let (a, b) = (Side::new(&near, depth, Default::default()), Side::new(&far, depth, Default::default()));
    let target = b.exposed(64).await;
    let source = a.exposed(64).await;
    let (mut qa, mut qb) = (a.qp, b.qp);
    for _ in 0..10 {
        connect(&qa, &qb).await;
        // A reconnect with a full queue: every operation ends.
        let ops: Vec<_> =
            (0..32).map(|_| qa.write(source.slice(..).unwrap(), target.remote().whole())).collect();
        tokio::join!(qa.close(), qb.close());
        for op in ops {
            if let Err(error) = op.await.0 {
                assert!(!matches!(error, OpError::RuntimeGone), "{error:?}");
            }
        }
        let make =
            |pd, cq| landfall::ring::QueuePair::new(pd, cq, cq, landfall::ring::QpConfig::new(depth, depth));
        qa = make(&a.pd, &a.cq).unwrap();
        qb = make(&b.pd, &b.cq).unwrap();
    }
    tokio::join!(a.cq.close(), b.cq.close());
}

#[test]
fn r7_a_completion_queue_needs_a_runtime_with_io() {
    let device = device(Profile::Default);
    let make = || CompletionQueue::new(&device, CqConfig::new(8)).map(drop);
    assert!(matches!(make(), Err(DeviceError::NoRuntime)));
    let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(matches!(bare.block_on(async { make() }), Err(DeviceError::NoRuntime)));
    run(false, async { make() }).unwrap();
}

/// Submitters in several tasks, futures dropped at random, and the queue pair closed or killed in the middle.
fn r7_closing_under_load_ends_every_operation(on: On) {
    for round in 0..6u64 {
        run(true, async {
            let Pair { a, b } = Pair::new(on, 16).await;
            let target = b.exposed(64).await;
            let source = a.exposed(64).await;
            let qp = std::sync::Arc::new(a.qp);
            let (cq, remote) = (a.cq, target.remote().whole());
            let tasks: Vec<_> = (0..4u64)
                .map(|task| {
                    let (qp, source) = (qp.clone(), source.clone());
                    tokio::spawn(async move {
                        let mut kept = Vec::new();
                        for i in 0..100 + round * 50 {
                            let write = qp.write(source.slice(..).unwrap(), remote);
                            match (i * 7 + task) % 5 {
                                0 => drop(write),
                                1 => drop(write.await),
                                2 => {
                                    let mut batch = qp.batch();
                                    let op = landfall::ring::Op::write(source.slice(..).unwrap(), remote);
                                    let _ = batch.push_wait(op).await;
                                    batch.submit();
                                    while qp.send_cq().try_next().is_some() {}
                                }
                                _ => kept.push(write),
                            }
                            if kept.len() > 20 {
                                drop(kept.remove(3).await);
                            }
                        }
                        for write in kept {
                            drop(write.await);
                        }
                    })
                })
                .collect();
            for _ in 0..round * 20 {
                tokio::task::yield_now().await;
            }
            match round % 3 {
                0 => b.qp.kill(),
                1 => cq.close().await,
                _ => b.qp.close().await,
            }
            for task in tasks {
                task.await.unwrap();
            }
            let stats = cq.stats();
            assert!(stats.peak_outstanding <= 16, "{stats:?}");
            drop(qp);
            while let Some(done) = {
                cq.close().await;
                cq.next().await
            } {
                drop(done);
            }
            assert!(format!("{cq:?}").len() < 200);
        });
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn reaper_runs() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.any(|name| name.trim() == "landfall-reaper")
}

#[test]
#[ignore = "started by r7_nothing_is_left_behind"]
fn r7_child() {
    let round = |profile, gone: bool| {
        let made = run(true, async {
            let pair = Pair::new(profile, 16).await;
            let (target, source) = (pair.b.exposed(4096).await, pair.a.exposed(4096).await);
            let ops: Vec<_> = (0..40)
                .map(|_| pair.a.qp.write(source.slice(..).unwrap(), target.remote().whole()))
                .collect();
            (ops, gone.then_some((pair, target, source)))
        });
        // The runtime is gone, with the handles of every second round still there.
        drop(made);
    };
    round(Profile::Default, true);
    // Without a runtime of its own, which would have files open, too. The last thread that lets go of a channel may be
    // one that is ending.
    let settled = |files: usize| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while (reaper_runs() || open_files() > files) && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        open_files()
    };
    let before = settled(usize::MAX);
    for i in 0..40 {
        round(profiles()[i % profiles().len()], i % 2 == 0);
    }
    let after = settled(before);
    assert!(after <= before, "{before} files were open before, {after} after");
}

#[test]
fn r7_nothing_is_left_behind() {
    alone("r7_drop::r7_child");
}
