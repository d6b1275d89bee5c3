//! The end of a driver, step by step: nothing else runs, since the runtime never gets a turn.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Wake, Waker};

use super::*;
use crate::device::Device;
use crate::ring::{CompletionQueue, CqConfig, OpFuture, QpConfig, QueuePair};

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A queue pair with one receive, which a task waits for.
struct Waiting {
    cq: CompletionQueue,
    qp: QueuePair,
    receive: OpFuture<()>,
    wakes: std::sync::Arc<Wakes>,
}

impl Waiting {
    fn new() -> Self {
        let device = Device::open("soft-default").unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(8)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(4, 4)).unwrap();
        let receive = qp.recv(());
        let mut this = Self { cq, qp, receive, wakes: Default::default() };
        assert!(this.poll().is_pending());
        this
    }

    fn poll(&mut self) -> Poll<()> {
        let waker = Waker::from(self.wakes.clone());
        pin!(&mut self.receive).poll(&mut Context::from_waker(&waker)).map(|_| ())
    }

    fn woken(&self) -> usize {
        self.wakes.0.load(Ordering::SeqCst)
    }

    /// The queue pair is closed, and somebody who is not the driver takes the flushed receive.
    fn close_and_absorb(&self) -> Arc<QpCore> {
        let core = self.cq.core();
        let [qp, _] = core.ring.lock().queue_pairs().try_into().unwrap();
        qp.close();
        let until = Instant::now() + Duration::from_secs(60);
        while !core.ring.lock().all_drained() {
            core.absorb_now();
            assert!(Instant::now() < until, "the receive is not flushed");
        }
        assert_eq!(self.woken(), 0, "only the driver wakes");
        qp
    }
}

#[tokio::test]
async fn r3_who_was_left_to_a_closed_queue_s_driver_is_woken_before_that_ends() {
    let mut w = Waiting::new();
    let qp = w.close_and_absorb();
    // Another thread finishes the queue pair, and closes the queue.
    qp.try_finish();
    let core = w.cq.core().clone();
    core.close(false);
    assert!(core.is_over());
    assert_eq!(w.woken(), 1);
    assert!(w.poll().is_ready());
    drop(w.qp);
}

#[tokio::test]
async fn r3_who_was_left_to_a_vanished_driver_is_woken_before_the_reaper_ends() {
    let mut w = Waiting::new();
    w.close_and_absorb();
    let core = w.cq.core().clone();
    core.runtime_gone();
    assert!(core.is_drained());
    assert_eq!(w.woken(), 1);
    assert!(w.poll().is_ready());
    drop(w.qp);
}

/// A half whose queue pair is being destroyed elsewhere stands for one: it is released when that is done.
#[test]
fn r7_a_close_waits_for_destructions_also_after_the_runtime_has_gone_and_the_reaper_too() {
    let device = Device::open("soft-default").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let cq = {
        let _entered = runtime.enter();
        CompletionQueue::new(&device, CqConfig::new(8)).unwrap()
    };
    let core = cq.core().clone();
    let [send, recv] = [false, true].map(|recv| core.ring.lock().reserve(recv, 4).unwrap());
    drop(runtime);
    assert!(core.is_drained(), "nothing is outstanding: the reaper lets go");
    let mut close = pin!(cq.close());
    let mut poll = || close.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll().is_pending());
    core.release(send, false);
    assert!(poll().is_pending(), "one is left");
    core.release(recv, false);
    assert!(poll().is_ready());
}
