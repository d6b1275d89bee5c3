//! R8: idle is free. R9: a good tokio citizen.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use landfall::device::Profile;
use landfall::ring::Op;

use crate::harness::*;

on_every_profile!(
    r9_futures_are_awaited_on_another_runtime(own_runtime),
    r9_every_count_of_writes_completes_beside_a_busy_task,
);

fn cpu_time() -> Duration {
    // SAFETY: an all-zero `rusage` is valid, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0);
        usage
    };
    let part = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    part(usage.ru_utime) + part(usage.ru_stime)
}

/// Runs alone in a process of its own, so that the CPU time is its own.
#[test]
#[ignore = "started by r8_waiting_costs_almost_no_cpu"]
fn r8_child() {
    for profile in profiles() {
        run(true, async {
            let Pair { a, b } = Pair::new(profile, 16).await;
            let recv = b.qp.recv(());
            a.qp.send(()).await.0.unwrap();
            recv.await.0.unwrap();
            let before = cpu_time();
            // An operation that waits all the while.
            let pending = b.qp.recv(());
            tokio::time::sleep(Duration::from_secs(1)).await;
            let used = cpu_time() - before;
            println!("{profile}: {used:?} of CPU in 1 s");
            assert!(used < Duration::from_millis(100), "{used:?} of CPU in 1 s of waiting");
            drop(pending);
        });
    }
}

#[test]
fn r8_waiting_costs_almost_no_cpu() {
    alone("r8_r9_runtime::r8_child");
}

async fn r9_every_count_of_writes_completes_beside_a_busy_task(on: On) {
    let pair = Pair::new(on, 16).await;
    let target = pair.b.exposed(64).await;
    let source = pair.a.exposed(64).await;
    let busy = tokio::spawn(async {
        loop {
            std::hint::black_box((0..1000u64).sum::<u64>());
            tokio::task::yield_now().await;
        }
    });
    for count in (1..=64).chain([96]) {
        let writes: Vec<_> =
            (0..count).map(|_| pair.a.qp.write(source.slice(..).unwrap(), target.remote().whole())).collect();
        for write in writes {
            write.await.0.unwrap();
        }
    }
    busy.abort();
}

/// The queues are driven by one runtime; the futures are awaited on another, and on no runtime at all.
fn r9_futures_are_awaited_on_another_runtime(on: On) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (pair, target, source) = runtime.block_on(async {
        let pair = Pair::new(on, 16).await;
        let (target, source) = (pair.b.exposed(64).await, pair.a.exposed(64).await);
        (pair, target, source)
    });
    let write = || pair.a.qp.write(source.slice(..).unwrap(), target.remote().whole());
    run(false, async {
        for _ in 0..50 {
            write().await.0.unwrap();
        }
    });
    let write = write();
    let thread = std::thread::current();
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread)).into();
    let mut write = std::pin::pin!(write);
    let result = loop {
        match write.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready((result, _)) => break result,
            std::task::Poll::Pending => std::thread::park_timeout(DEADLINE),
        }
    };
    assert_eq!(result.unwrap().bytes, 64);
}

#[test]
fn r9_twenty_thousand_posts_let_others_run() {
    run(false, async {
        let pair = Pair::new(Profile::Default, 16_384).await;
        let target = pair.b.exposed(64).await;
        let source = pair.a.exposed(64).await;
        let turns = Arc::new(AtomicU64::new(0));
        let other = tokio::spawn({
            let turns = turns.clone();
            async move {
                loop {
                    turns.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            }
        });
        let cq = pair.a.cq.clone();
        let reaper = tokio::spawn(async move {
            for _ in 0..20_000 {
                cq.next().await.unwrap().result.unwrap();
            }
        });
        let mut batch = pair.a.qp.batch();
        for i in 0..20_000 {
            let op = Op::write(source.slice(..).unwrap(), target.remote().whole()).user_data(i);
            batch.push_wait(op).await.unwrap();
        }
        batch.submit();
        let seen = turns.load(Ordering::Relaxed);
        assert!(seen >= 20, "{seen} turns of another task during 20,000 posts");
        reaper.await.unwrap();
        other.abort();
    });
}
