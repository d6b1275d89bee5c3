//! R7: a runtime that is dropped with writes in flight leaves a process that ends by itself, with no thread behind.

use std::time::{Duration, Instant};

use landfall::device::Profile;
use landfall::kv::WriteRequest;

use crate::harness::{BLOCKS, On, PATIENCE, Peer, endpoint, run, soon};
use crate::roles::say;

/// What runtimes are dropped on, one after the other.
fn each() -> impl Iterator<Item = On> {
    Profile::ALL.into_iter().flat_map(|p| [On::Soft(p), On::Shm(p)])
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// In the peer process.
pub(crate) fn dropped() {
    let before = threads();
    for on in each() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (pool, target, writes) = runtime.block_on(async {
            let (sending, receiving) = (endpoint(on, soon()).await, endpoint(on, soon()).await);
            let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
            let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
            let writes: Vec<_> = (0..4)
                .map(|_| {
                    let grant = receiver.grant(receiver.pool().try_alloc(8).unwrap()).unwrap();
                    sender.write(WriteRequest::new(&grant, sender.pool().try_alloc(8).unwrap()))
                })
                .collect();
            (sender.pool().clone(), receiver.pool().clone(), writes)
        });
        drop(runtime);
        drop(writes);
        let start = Instant::now();
        while threads() > before || pool.free_blocks() < BLOCKS || target.free_blocks() < BLOCKS {
            let (threads, free) = (threads(), (pool.free_blocks(), target.free_blocks()));
            assert!(
                start.elapsed() < PATIENCE,
                "{on:?}: {threads} threads, {before} before; free blocks {free:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        say(format_args!("clean {on:?}"));
    }
}

#[test]
fn r7_a_dropped_runtime_leaves_no_thread_behind() {
    run(async {
        let mut peer = Peer::start("runtime-dropped", Profile::Default, &[]);
        for on in each() {
            peer.hear(&format!("clean {on:?}")).await;
        }
        assert!(peer.end().await.success());
    });
}
