//! What needs a look inside: causes across queues, and queue pairs that do not drain.

use std::time::Duration;

use super::*;
use crate::completion_queue::CqConfig;
use crate::device::{Device, Profile, SoftConfig, SoftTransport};
use crate::error::WcStatus;
use crate::memory::{Access, Memory};
use crate::provider::{SendOp, Sge};
use crate::ring::{Owner, Wr, WrKind};

#[tokio::test]
async fn r7_a_queue_pair_that_does_not_drain_in_time_is_destroyed() {
    let device = Device::soft(SoftConfig::new()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = CompletionQueue::new(&device, CqConfig::new(16)).unwrap();
    let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(8, 8)).unwrap();
    let recv = qp.recv(());
    // As if it had been closing, without completions, until its time was over.
    cq.core().watch_closing(std::time::Instant::now(), qp.core.clone());
    cq.core().nudge();
    assert!(matches!(recv.await.0, Err(OpError::Closed { .. })));
    assert!(qp.core.with_qp(|_| ()).is_none(), "destroyed");
    qp.close().await;
}

/// A disconnect that has found the queue pair open, and watches it when it is gone.
#[tokio::test]
async fn r7_a_queue_pair_that_is_watched_after_its_end_is_not_kept() {
    let device = Device::soft(SoftConfig::new()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = CompletionQueue::new(&device, CqConfig::new(16)).unwrap();
    let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(8, 8)).unwrap();
    let core = qp.core.clone();
    qp.close().await;
    core.watch_closing();
    let gone = std::sync::Arc::downgrade(&core);
    drop(core);
    assert!(gone.upgrade().is_none(), "held by the queue that it holds");
}

#[tokio::test]
async fn r7_what_the_reaper_gives_up_ends_all_the_same() {
    use crate::reactor::Drive;

    let device = Device::soft(SoftConfig::new()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = CompletionQueue::new(&device, CqConfig::new(16)).unwrap();
    let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(8, 8)).unwrap();
    let recvs: Vec<_> = (0..12).map(|_| qp.recv(())).collect();
    cq.core().runtime_gone();
    cq.core().abandon();
    for recv in recvs {
        assert!(matches!(recv.await.0, Err(OpError::RuntimeGone)));
    }
    assert!(cq.next().await.is_none() && cq.core().is_drained());
}

/// The flushed receive is polled before anybody has looked at the queue that has the cause.
#[tokio::test]
async fn r6_the_cause_is_found_in_the_other_completion_queue() {
    let device = Device::soft(SoftConfig::new()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = |spin| CompletionQueue::new(&device, CqConfig::new(16).spin(spin)).unwrap();
    let (sends, recvs) = (cq(Duration::ZERO), cq(Duration::from_secs(5)));
    let qp = QueuePair::new(&pd, &sends, &recvs, QpConfig::new(8, 8)).unwrap();
    let peer = QueuePair::new(&pd, &sends, &sends, QpConfig::new(1, 1)).unwrap();
    qp.connect(&peer.endpoint().unwrap(), Role::Active, ConnectOptions::default()).await.unwrap();
    let recv = qp.recv(());
    // Past the checks: a key that is none. The device fails it at the post.
    let op = SendOp::Send { imm: None };
    let wr =
        Wr { kind: WrKind::Send(op), sge: Some(Sge { addr: 4096, len: 8, lkey: u32::MAX }), device: false };
    qp.core.submit(wr, Owner::Ignored, None).unwrap();
    // One thread: this spins on the receives' queue, and no driver runs.
    match recv.await.0.unwrap_err() {
        OpError::Flushed { cause: Some(cause), .. } => {
            assert!(matches!(*cause, OpError::Status { status: WcStatus::LocalProtection, .. }), "{cause:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn b1_order_and_no_order_are_not_connected() {
    let open = |profile| Device::soft(SoftConfig::new().profile(profile)).unwrap();
    let queue_pair = |device: &Device| {
        let cq = CompletionQueue::new(device, CqConfig::new(16)).unwrap();
        QueuePair::new(&device.alloc_pd().unwrap(), &cq, &cq, QpConfig::new(8, 8)).unwrap()
    };
    let (rc, srd) = (queue_pair(&open(Profile::Default)), queue_pair(&open(Profile::Srd)));
    for (ours, theirs) in [(&rc, &srd), (&srd, &rc)] {
        let refused =
            ours.connect(&theirs.endpoint().unwrap(), Role::Active, ConnectOptions::default()).await;
        assert!(matches!(refused, Err(QpError::Mismatch { .. })), "{refused:?}");
        // It is as it was.
        assert!(matches!(ours.send(()).await.0, Err(OpError::NotConnected { .. })));
    }
    let tiny = queue_pair(&open(Profile::Tiny));
    rc.connect(&tiny.endpoint().unwrap(), Role::Active, ConnectOptions::default()).await.unwrap();
}

/// And what carries its bytes is known when they are connected.
#[tokio::test]
async fn k9_queue_pairs_without_a_transport_in_common_are_not_connected() {
    let make = |transport| {
        let device = Device::soft(SoftConfig::new().transport(transport)).unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(16)).unwrap();
        QueuePair::new(&device.alloc_pd().unwrap(), &cq, &cq, QpConfig::new(4, 4)).unwrap()
    };
    for (ours, theirs) in [(SoftTransport::Tcp, SoftTransport::Shm), (SoftTransport::Shm, SoftTransport::Tcp)]
    {
        let (a, b) = (make(ours), make(theirs));
        let to_b = b.endpoint().unwrap();
        let error = a.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap_err();
        let QpError::Mismatch { ours: this, theirs: that, .. } = error else { panic!("{error:?}") };
        assert_eq!((this, that), (ours.of_device(), theirs.of_device()));
        assert_eq!(a.path(), None, "it is not connected");
    }
    for (transport, name) in [(SoftTransport::Tcp, "tcp"), (SoftTransport::Shm, "shm")] {
        let (a, b) = (make(transport), make(transport));
        let (to_a, to_b) = (a.endpoint().unwrap(), b.endpoint().unwrap());
        b.connect(&to_a, Role::Passive, ConnectOptions::default()).await.unwrap();
        a.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap();
        assert_eq!(a.path().unwrap().transport, name);
        let received = b.recv(());
        a.send(()).await.0.unwrap();
        received.await.0.unwrap();
        assert_eq!(b.path().unwrap().transport, name);
    }
}

/// Two connected queue pairs of a device of their own each, the second of which is made with `options`.
async fn pair(options: ConnectOptions) -> (ProtectionDomain, QueuePair, ProtectionDomain, QueuePair) {
    let queue_pair = || {
        let device = Device::soft(SoftConfig::new()).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(128)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(64, 8)).unwrap();
        (pd, qp)
    };
    let ((a_pd, a), (b_pd, b)) = (queue_pair(), queue_pair());
    a.connect(&b.endpoint().unwrap(), Role::Active, ConnectOptions::default()).await.unwrap();
    b.connect(&a.endpoint().unwrap(), Role::Passive, options).await.unwrap();
    (a_pd, a, b_pd, b)
}

/// The peer's option says what it issues itself, and not what it serves: nobody has told this side.
#[tokio::test]
async fn r10_reads_beyond_what_the_peer_issues_harm_nothing() {
    for theirs in [4, 1, 0] {
        let options = ConnectOptions { max_rd_atomic: theirs, ..ConnectOptions::default() };
        let (a_pd, a, b_pd, b) = pair(options).await;
        let source = b_pd.register_exposed(Memory::anonymous(64), Access::READ).await.unwrap();
        let from = source.remote().whole();
        let mut reads = Vec::new();
        for _ in 0..16 {
            let target = a_pd.register_local(Memory::anonymous(64)).await.unwrap();
            reads.push(a.read(target.into_slice(), from));
        }
        for read in reads {
            read.await.0.unwrap();
        }
        assert!(a.failure().is_none() && b.failure().is_none());
    }
}

/// A device has no place for it, and waits for one for ever.
#[tokio::test]
async fn r10_a_read_of_a_connection_that_was_made_for_none_is_refused_and_harms_nothing() {
    let options = ConnectOptions { max_rd_atomic: 0, ..ConnectOptions::default() };
    let (a_pd, a, b_pd, b) = pair(options).await;
    let access = Access::READ_WRITE.with_atomics();
    let exposed = a_pd.register_exposed(Memory::anonymous(64), access).await.unwrap();
    let there = exposed.remote().whole();
    let word = there.slice(0, 8).unwrap();
    let own = async |len| b_pd.register_local(Memory::anonymous(len)).await.unwrap().into_slice();
    for (what, refused) in [
        ("READ", b.read(own(64).await, there).await.0.map(drop)),
        ("atomic", b.fetch_add(own(8).await, word, 1).await.0.map(drop)),
    ] {
        assert!(matches!(refused, Err(OpError::Refused { limit: 0, .. })), "{what}: {refused:?}");
    }
    b.write(own(64).await, there).await.0.unwrap();
    assert!(a.failure().is_none() && b.failure().is_none());
}
