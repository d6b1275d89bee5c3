//! Events of soft devices, from a source of the tests' own: a descriptor and a queue, as a driver has.

use std::collections::VecDeque;
use std::future::Future;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::*;
use crate::connect::ConnectError;
use crate::device::{Device, ProtectionDomain, SoftConfig};
use crate::error::{DeviceError, MemoryError, OpError, QpError};
use crate::kv::{Cause, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, WriteRequest};
use crate::memory::{Access, Memory};
use crate::provider;
use crate::provider::events::{AsyncEvent, Events, KEPT, ObjectId};
use crate::reactor::events::{EventSource, Watch, watch};
use crate::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};

const NAME: &str = "IBV_EVENT_QP_FATAL";

struct Source {
    events: Arc<Events>,
    pending: Mutex<VecDeque<AsyncEvent>>,
    ours: UnixDatagram,
    theirs: UnixDatagram,
}

impl EventSource for Source {
    fn drain(&self) {
        loop {
            match self.theirs.recv(&mut [0; 8]) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        loop {
            let Some(event) = self.pending.lock().unwrap().pop_front() else { break };
            self.events.dispatch(event);
        }
    }
}

struct Driver {
    source: Arc<Source>,
    _watch: Watch,
}

impl Driver {
    fn of(device: &Device) -> Self {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let fd = theirs.as_fd().try_clone_to_owned().unwrap();
        let events = device.provider().events().clone();
        let source = Arc::new(Source { events, pending: Mutex::default(), ours, theirs });
        let dynamic: Arc<dyn EventSource> = source.clone();
        let watch = watch(Arc::downgrade(&dynamic), vec![fd]).unwrap();
        Self { source, _watch: watch }
    }

    /// All of them behind one edge.
    fn says(&self, events: impl IntoIterator<Item = AsyncEvent>) {
        self.source.pending.lock().unwrap().extend(events);
        self.source.ours.send(&[1]).unwrap();
    }
}

fn device() -> Device {
    Device::soft(SoftConfig::new()).unwrap()
}

fn failed(id: ObjectId) -> AsyncEvent {
    AsyncEvent::QpFailed { id: Some(id), qp_num: 0, name: NAME }
}

/// Runs `test` on both kinds of runtime, within a deadline far above what it takes.
fn run<T>(test: impl AsyncFn() -> T) {
    let builders = [tokio::runtime::Builder::new_current_thread, tokio::runtime::Builder::new_multi_thread];
    for builder in builders {
        builder().enable_all().build().unwrap().block_on(within(test()));
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("within the deadline")
}

struct Ring {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
}

impl Ring {
    fn new(device: &Device) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(device, CqConfig::new(32)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(8, 8)).unwrap();
        Self { pd, cq, qp }
    }
}

async fn connected(a: &Device, b: &Device) -> (Ring, Ring) {
    let (a, b) = (Ring::new(a), Ring::new(b));
    let (to_a, to_b) = (a.qp.endpoint().unwrap(), b.qp.endpoint().unwrap());
    b.qp.connect(&to_a, Role::Passive, ConnectOptions::default()).await.unwrap();
    a.qp.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap();
    (a, b)
}

fn is_caused_by_event(error: &OpError) -> bool {
    match error {
        OpError::Flushed { cause: Some(cause), .. } => {
            matches!(**cause, OpError::DeviceEvent { event: NAME, .. })
        }
        _ => false,
    }
}

/// CASES 21.
#[test]
fn r3_an_event_behind_64_others_and_one_edge_is_seen() {
    run(async || {
        let device = device();
        let (driver, mut events) = (Driver::of(&device), device.events());
        let others = (0..64).map(|_| AsyncEvent::PortChanged { port: 1, name: "IBV_EVENT_GID_CHANGE" });
        driver.says(others.chain([AsyncEvent::PortDown { port: 1 }]));
        let mut told = 0;
        loop {
            match events.next().await.unwrap() {
                DeviceEvent::PortDown { port: 1 } => break,
                DeviceEvent::PortChanged { .. } => told += 1,
                DeviceEvent::Missed { count } => told += count,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(told, 64);
        // And the next edge is one.
        driver.says([AsyncEvent::PortActive { port: 1 }]);
        assert_eq!(events.next().await, Some(DeviceEvent::PortActive { port: 1 }));
    });
}

#[test]
fn r3_who_does_not_listen_misses_the_oldest_and_holds_nobody_up() {
    run(async || {
        let device = device();
        let (mut slow, mut other) = (device.events(), device.events());
        let events = device.provider().events();
        for port in 0..200 {
            events.dispatch(AsyncEvent::PortDown { port });
            assert_eq!(other.next().await, Some(DeviceEvent::PortDown { port }));
        }
        assert_eq!(slow.try_next(), Some(DeviceEvent::Missed { count: 200 - KEPT as u64 }));
        for port in 200 - KEPT as u8..200 {
            assert_eq!(slow.try_next(), Some(DeviceEvent::PortDown { port }));
        }
        assert_eq!((slow.try_next(), other.try_next()), (None, None));
    });
}

#[test]
fn r6_a_queue_pair_that_the_device_fails_ends_with_that_cause() {
    run(async || {
        let device = device();
        let driver = Driver::of(&device);
        let (a, b) = connected(&device, &device).await;
        let other = Ring::new(&device);
        // Posted, and waiting for room.
        let recvs: Vec<_> = (0..20).map(|_| a.qp.recv(())).collect();
        let mut untouched = Box::pin(other.qp.recv(()));
        driver.says([failed(a.qp.event_id())]);
        for recv in recvs {
            let error = recv.await.0.unwrap_err();
            assert!(is_caused_by_event(&error), "{error:?}");
        }
        assert!(matches!(a.qp.failure(), Some(OpError::DeviceEvent { event: NAME, .. })));
        let error = a.qp.send(()).await.0.unwrap_err();
        assert!(is_caused_by_event(&error), "{error:?}");
        // Another queue pair is another's, and so is the same number later (R5).
        let id = a.qp.event_id();
        a.qp.close().await;
        b.qp.close().await;
        let again = QueuePair::new(&a.pd, &a.cq, &a.cq, QpConfig::new(8, 8)).unwrap();
        let mut waiting = Box::pin(again.recv(()));
        let mut events = device.events();
        driver.says([failed(id), AsyncEvent::PortActive { port: 1 }]);
        while events.next().await != Some(DeviceEvent::PortActive { port: 1 }) {}
        assert!(futures_pending(&mut waiting).await && futures_pending(&mut untouched).await);
        assert!(again.failure().is_none() && other.qp.failure().is_none());
    });
}

async fn futures_pending(future: &mut (impl Future + Unpin)) -> bool {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx).is_pending())).await
}

#[test]
fn r6_a_completion_queue_that_the_device_fails_ends_its_queue_pairs() {
    run(async || {
        let device = device();
        let driver = Driver::of(&device);
        let (a, _b) = connected(&device, &device).await;
        let recv = a.qp.recv(());
        let id = a.cq.core().provider().id();
        driver.says([AsyncEvent::CqFailed { id: Some(id), name: "IBV_EVENT_CQ_ERR" }]);
        let error = recv.await.0.unwrap_err();
        // Or flushed, by the driver's task on its way out.
        let cause = match &error {
            OpError::Flushed { cause: Some(cause), .. } => cause,
            error => error,
        };
        assert!(matches!(cause, OpError::DeviceEvent { event: "IBV_EVENT_CQ_ERR", .. }), "{error:?}");
        let error = QueuePair::new(&a.pd, &a.cq, &a.cq, QpConfig::new(1, 1)).unwrap_err();
        assert!(matches!(error, QpError::CqClosed), "{error}");
        a.cq.close().await;
    });
}

/// Its completion channels fail as soon as they have something to tell.
fn break_channels(device: &Device) {
    match device.provider() {
        provider::Device::Soft(soft) => soft.channels_fail.store(true, Ordering::SeqCst),
        #[cfg(feature = "verbs")]
        provider::Device::Verbs(_) => unreachable!(),
    }
}

fn is_queue_failure(error: &OpError) -> bool {
    match error {
        OpError::Queue { reason, .. } => reason.contains("os error 5"),
        OpError::Flushed { cause: Some(cause), .. } => is_queue_failure(cause),
        _ => false,
    }
}

#[test]
fn r6_a_completion_channel_that_fails_ends_its_queue_pairs_with_the_error() {
    run(async || {
        let (broken, kept) = (device(), device());
        let (a, b) = connected(&broken, &kept).await;
        let recvs: Vec<_> = (0..20).map(|_| a.qp.recv(())).collect();
        break_channels(&broken);
        let mut told = vec![b.qp.send(())];
        let mut failed = 0;
        for recv in recvs {
            match recv.await.0 {
                // A driver that was awake has taken the message, and no event told of it: the next one does.
                Ok(_) => told.push(b.qp.send(())),
                Err(error) => {
                    assert!(is_queue_failure(&error), "{error:?}");
                    failed += 1;
                }
            }
        }
        assert!(failed > 0, "nobody has taken an event");
        let error = QueuePair::new(&a.pd, &a.cq, &a.cq, QpConfig::new(1, 1)).unwrap_err();
        assert!(matches!(error, QpError::CqClosed), "{error}");
        assert!(a.cq.next().await.is_none());
        a.qp.close().await;
        a.cq.close().await;
    });
}

#[test]
fn r6_a_channel_whose_completion_channel_fails_ends_with_the_error() {
    run(async || {
        let (broken, kept) = (device(), device());
        let (near, far, _dialler) = channel(&broken, &kept).await;
        let grant = near.grant(near.pool().alloc(4).await.unwrap()).unwrap();
        break_channels(&broken);
        // It may have had something to tell before, and then this comes too late.
        let _ = far.send_message(b"x".to_vec()).await;
        let closed = near.closed().await;
        assert_eq!(closed.cause(), Cause::Transport, "{closed}");
        assert!(closed.to_string().contains("os error 5"), "{closed}");
        drop(grant);
        assert_eq!(near.pool().free_blocks(), 8);
        far.closed().await;
    });
}

#[test]
fn r7_a_device_that_is_gone_ends_all_that_is_of_it_and_takes_nothing_new() {
    for event in [AsyncEvent::DeviceRemoved, AsyncEvent::DeviceFatal] {
        run(async || {
            let (gone, kept) = (device(), device());
            let (driver, mut events) = (Driver::of(&gone), gone.events());
            let (a, b) = connected(&gone, &kept).await;
            let source = a.pd.register_local(Memory::anonymous(64)).await.unwrap().into_slice();
            let recvs: Vec<_> = (0..20).map(|_| a.qp.recv(())).collect();
            driver.says([event, event]);
            let gone_now = |error: &OpError| matches!(error, OpError::DeviceGone { .. });
            for recv in recvs {
                let error = recv.await.0.unwrap_err();
                assert!(gone_now(&error), "{error:?}");
            }
            assert!(matches!(
                events.next().await,
                Some(DeviceEvent::DeviceRemoved | DeviceEvent::DeviceFatal)
            ));
            // It goes once.
            assert_eq!(events.next().await, None);
            assert_eq!(gone.events().next().await, None);
            // The buffer comes back.
            let (result, source) = a.qp.send(source).await;
            assert!(gone_now(&result.unwrap_err()) && source.len() == 64);
            assert!(gone_now(&a.qp.recv(()).await.0.unwrap_err()));
            assert!(gone_now(&a.qp.try_submit(crate::ring::Op::recv(())).unwrap_err().error));
            let error = QueuePair::new(&a.pd, &a.cq, &a.cq, QpConfig::new(1, 1)).unwrap_err();
            assert!(matches!(error, QpError::DeviceGone { .. }), "{error}");
            assert!(matches!(gone.alloc_pd(), Err(DeviceError::DeviceGone { .. })));
            let error = CompletionQueue::new(&gone, CqConfig::new(1)).unwrap_err();
            assert!(matches!(error, DeviceError::DeviceGone { .. }), "{error}");
            let error = a.pd.register_exposed(Memory::anonymous(64), Access::READ).await.unwrap_err();
            assert!(matches!(error, MemoryError::DeviceGone { .. }), "{error}");
            // The other device has lost a peer, and nothing else.
            let error = b.qp.recv(()).await.0.unwrap_err();
            assert!(!gone_now(&error), "{error:?}");
            Ring::new(&kept).cq.close().await;
            a.qp.close().await;
            a.cq.close().await;
        });
    }
}

async fn endpoint(device: &Device) -> KvEndpoint {
    let pool =
        KvPool::new(&device.alloc_pd().unwrap(), Layout::contiguous(1, 8, 4096).unwrap()).await.unwrap();
    KvEndpoint::new(pool, KvConfig::default()).unwrap()
}

/// A channel that was just dialled, its other end, and who dialled.
async fn channel(a: &Device, b: &Device) -> (KvChannel, KvChannel, KvEndpoint) {
    let (a, b) = (endpoint(a).await, endpoint(b).await);
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (dialled, accepted) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
    (dialled, accepted, a)
}

#[test]
fn r6_a_channel_ends_with_the_queue_pair_that_the_device_fails() {
    run(async || {
        let (a, b) = (device(), device());
        let driver = Driver::of(&a);
        let (sender, receiver, _dialler) = channel(&a, &b).await;
        let ids = a.provider().events().enrolled();
        driver.says(ids.into_iter().map(failed));
        let closed = sender.closed().await;
        assert_eq!(closed.cause(), Cause::Transport);
        assert!(closed.to_string().contains(NAME), "{closed}");
        receiver.closed().await;
    });
}

#[test]
fn r7_a_channel_ends_with_its_device_and_gives_the_blocks_back() {
    run(async || {
        let (a, b) = (device(), device());
        let driver = Driver::of(&a);
        let (sender, receiver, dialler) = channel(&a, &b).await;
        // Both ways: blocks that the peer may write to, and blocks that are being written.
        let granted = sender.grant(sender.pool().alloc(4).await.unwrap()).unwrap();
        let grant = receiver.grant(receiver.pool().alloc(4).await.unwrap()).unwrap();
        driver.says([AsyncEvent::DeviceRemoved]);
        assert_eq!(sender.closed().await.cause(), Cause::DeviceGone);
        sender.next_arrival().await.unwrap_err();
        let source = sender.pool().alloc(4).await.unwrap();
        let (result, source) = sender.write(WriteRequest::new(&grant, source)).await;
        result.unwrap_err();
        drop((source, granted));
        assert_eq!(sender.pool().free_blocks(), 8);
        receiver.closed().await;
        // What is dialled next finds it gone.
        let other = endpoint(&b).await;
        let listener = other.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let error = dialler.connect(listener.local_addr()).await.unwrap_err();
        let ConnectError::Resources { source } = &error else { panic!("{error:?}") };
        assert!(matches!(source.downcast_ref(), Some(MemoryError::DeviceGone { .. })), "{source}");
    });
}
