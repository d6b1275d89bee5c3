//! R1 and R2: buffers stay with their operations; every operation ends once. R3: no completion is forgotten.

use std::collections::HashSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use landfall::memory::{AnySlice, Memory};
use landfall::ring::{Op, Opcode};

use crate::harness::*;

on_every_profile!(
    r3_a_completion_at_any_moment_wakes_its_future,
    r1_memory_of_a_dropped_future_lives_until_the_device_is_done,
    r1_dropped_and_forgotten_futures_disturb_nobody,
    r1_r2_send_recv_read_write_give_back_the_same_buffers,
    r2_r3_a_full_batch_behind_one_doorbell_gives_every_completion_once,
    r2_a_waker_and_an_owner_that_panic_end_no_driver,
);

struct Owner {
    gone: Arc<AtomicBool>,
    bytes: *mut [u8],
}

// SAFETY: the bytes are reached through the region only.
unsafe impl Send for Owner {}
// SAFETY: a shared owner does nothing.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
        // SAFETY: made by `Box::into_raw`, freed once.
        drop(unsafe { Box::from_raw(self.bytes) });
    }
}

fn owned_memory(len: usize) -> (Memory, Arc<AtomicBool>) {
    owned_memory_with(len, ())
}

/// `more` is dropped after the bytes.
fn owned_memory_with(len: usize, more: impl Send + Sync + 'static) -> (Memory, Arc<AtomicBool>) {
    let gone = Arc::new(AtomicBool::new(false));
    let bytes = Box::into_raw(vec![3u8; len].into_boxed_slice());
    let owner = Owner { gone: gone.clone(), bytes };
    // SAFETY: the bytes live until `owner` is dropped, and only the region uses them.
    (unsafe { Memory::from_raw(bytes.cast(), len as u64, Box::new((owner, more))) }, gone)
}

async fn r1_memory_of_a_dropped_future_lives_until_the_device_is_done(on: On) {
    if !on.by_hand() {
        return;
    }
    let ((near, far), depth) = (on.devices(), depth(on, 16));
    let (a, b) = (Side::new(&near, depth, Default::default()), Side::new(&far, depth, Default::default()));
    let target = b.exposed(4096).await;
    // Connected on one side only: the write is the device's, and cannot complete.
    a.qp.connect(&b.qp.endpoint().unwrap(), landfall::ring::Role::Active, Default::default()).await.unwrap();
    let (memory, gone) = owned_memory(4096);
    let buf = a.pd.register_local(memory).await.unwrap().into_slice();
    drop(a.qp.write(buf, target.remote().whole()));
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!gone.load(Ordering::SeqCst), "the device still reads this memory");
    b.qp.connect(&a.qp.endpoint().unwrap(), landfall::ring::Role::Passive, Default::default()).await.unwrap();
    until(|| gone.load(Ordering::SeqCst)).await;
    let mut bytes = [0; 4096];
    target.slice(..).unwrap().copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 4096]);
}

/// What the user's code does when it is told of an end is its own affair, and not that of the other operations.
async fn r2_a_waker_and_an_owner_that_panic_end_no_driver(on: On) {
    struct WhenWoken;
    impl Wake for WhenWoken {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics");
        }
    }
    struct WhenDropped;
    impl Drop for WhenDropped {
        fn drop(&mut self) {
            panic!("an owner that panics");
        }
    }
    let Pair { a, b } = Pair::new(on, 16).await;
    let mut waited_for = pin!(a.qp.recv(()));
    let waker = Waker::from(Arc::new(WhenWoken));
    assert!(waited_for.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let (memory, gone) = owned_memory_with(4096, WhenDropped);
    drop(a.qp.recv(a.pd.register_local(memory).await.unwrap().into_slice()));
    let other = a.qp.recv(());
    for _ in 0..3 {
        b.qp.send(()).await.0.unwrap();
    }
    other.await.0.unwrap();
    waited_for.await.0.unwrap();
    until(|| gone.load(Ordering::SeqCst)).await;
    // In this order: iWARP ends a connection whose message finds no receive.
    let received = b.qp.recv(());
    a.qp.send(()).await.0.unwrap();
    received.await.0.unwrap();
}

async fn r1_dropped_and_forgotten_futures_disturb_nobody(on: On) {
    let pair = Pair::new(on, 16).await;
    let n = 96;
    let target = pair.b.exposed(n * 64).await;
    let parts = split(pair.a.local(n * 64).await, n, 64);
    let mut kept = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let write = pair.a.qp.write(part, target.remote().slice(i as u64 * 64, 64).unwrap());
        match i % 3 {
            0 => drop(write),
            1 => std::mem::forget(write),
            _ => kept.push((i, write)),
        }
    }
    for (i, write) in kept {
        let (result, buf) = write.await;
        assert_eq!(result.unwrap().bytes, 64);
        assert!(buf.iter().all(|&byte| byte == i as u8));
    }
    assert!(pair.a.cq.stats().peak_outstanding <= depth(on, 16));
}

async fn r1_r2_send_recv_read_write_give_back_the_same_buffers(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    let (mut out, mut inn) = (a.local(1000).await, b.local(4096).await);
    out.fill(0x5a);
    inn.fill(0);
    let recv = b.qp.recv(inn);
    let ((sent, out), (received, inn)) = tokio::join!(a.qp.send(out), recv);
    assert_eq!((sent.unwrap().opcode, received.unwrap().bytes), (Opcode::Send, 1000));
    assert!(inn[..1000].iter().all(|&b| b == 0x5a) && inn[1000..].iter().all(|&b| b == 0));
    let target = b.exposed(4096).await;
    let (written, mut out) = a.qp.write(out, target.remote().slice(96, 4000).unwrap()).await;
    assert_eq!(written.unwrap().bytes, 1000);
    out.fill(0);
    let (read, out) = a.qp.read(out, target.remote().slice(96, 999).unwrap()).await;
    assert_eq!((read.unwrap().bytes, out[998], out[999]), (999, 0x5a, 0));
}

async fn r2_r3_a_full_batch_behind_one_doorbell_gives_every_completion_once(on: On) {
    let pair = Pair::new(on, 256).await;
    let n = u64::from(depth(on, 256));
    let target = pair.b.exposed(n * 16).await;
    let source = pair.a.exposed(n * 16).await;
    let mut batch = pair.a.qp.batch();
    for i in 0..n {
        let to = target.remote().slice(i * 16, 16).unwrap();
        batch.push(Op::write(source.slice(i * 16..(i + 1) * 16).unwrap(), to).user_data(i)).unwrap();
    }
    assert_eq!(batch.submit() as u64, n);
    let mut seen = HashSet::new();
    for _ in 0..n {
        let done = pair.a.cq.next().await.unwrap();
        assert_eq!(done.result.unwrap().bytes, 16);
        assert!(done.buf.and_then(AnySlice::into_exposed).is_some());
        assert!(seen.insert(done.user_data), "{} came twice", done.user_data);
    }
    assert!(pair.a.cq.try_next().is_none());
}

/// One operation at a time: each completion meets a driver that is about to sleep, or asleep.
async fn r3_a_completion_at_any_moment_wakes_its_future(on: On) {
    for spin in [0, 20] {
        let Pair { a, b } = Pair::spinning(on, 4, std::time::Duration::from_micros(spin)).await;
        let (mut recv, mut spare) = (b.qp.recv(b.local(8).await), b.local(8).await);
        let echo = tokio::spawn(async move {
            for _ in 0..on.rounds(300) {
                let (received, got) = recv.await;
                received.unwrap();
                // Before the answer, and the first one before there is a question: not every device waits for a receive.
                recv = b.qp.recv(spare);
                let (sent, back) = b.qp.send(got).await;
                sent.unwrap();
                spare = back;
            }
            drop(recv);
            b
        });
        let (mut out, mut inn) = (a.local(8).await, a.local(8).await);
        for i in 0..on.rounds(300) {
            out.copy_from_slice(&i.to_le_bytes());
            let recv = a.qp.recv(inn);
            let (sent, back) = a.qp.send(out).await;
            sent.unwrap();
            let (received, got) = recv.await;
            received.unwrap();
            assert_eq!(got[..], i.to_le_bytes());
            (out, inn) = (back, got);
        }
        echo.await.unwrap();
    }
}
