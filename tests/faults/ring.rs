//! R2, R6: each operation ends once, and the first cause is kept, whatever fails.

use std::time::Duration;

use landfall::device::{Device, Profile, ProtectionDomain};
use landfall::error::{OpError, WcStatus};
use landfall::memory::{Access, Exposed, Memory, Region};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};

use crate::common::On;

const DEPTH: u32 = 16;
const LEN: u64 = 20_000;

struct Side {
    pd: ProtectionDomain,
    _cq: CompletionQueue,
    qp: QueuePair,
}

impl Side {
    fn new(faults: &str, on: On) -> Self {
        let device = Device::soft(on.faulty(faults)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(2 * DEPTH)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(DEPTH, DEPTH)).unwrap();
        Self { pd, _cq: cq, qp }
    }

    async fn memory(&self, len: u64) -> Region<Exposed> {
        self.pd.register_exposed(Memory::anonymous(len), Access::READ_WRITE).await.unwrap()
    }
}

async fn pair(on: On, faults: &str) -> (Side, Side) {
    let (a, b) = (Side::new(faults, on), Side::new("", on));
    let (to_a, to_b) = (a.qp.endpoint().unwrap(), b.qp.endpoint().unwrap());
    b.qp.connect(&to_a, Role::Passive, ConnectOptions::default()).await.unwrap();
    a.qp.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap();
    (a, b)
}

/// The results of `n` writes of [`LEN`] bytes that were submitted together.
async fn writes(a: &Side, b: &Side, n: u64) -> Vec<Result<u64, OpError>> {
    let (source, target) = (a.memory(LEN).await, b.memory(LEN).await);
    let remote = target.remote().whole();
    let ops: Vec<_> = (0..n).map(|_| a.qp.write(source.slice(..).unwrap(), remote)).collect();
    let mut ends = Vec::new();
    for op in ops {
        let (end, slice) = op.await;
        assert_eq!(slice.len(), LEN, "the buffer comes back with the result");
        ends.push(end.map(|done| done.bytes));
    }
    ends
}

fn on_every<F: AsyncFn(On)>(test: F) {
    for profile in Profile::ALL.into_iter().filter(|p| p.capabilities().oob) {
        for on in [On::Soft(profile), On::Shm(profile)] {
            eprintln!("{on:?}");
            crate::common::run(test(on));
        }
    }
}

fn status_of(error: &OpError) -> Option<WcStatus> {
    match error {
        OpError::Status { status, .. } => Some(*status),
        _ => None,
    }
}

/// Exactly one has `status`, and every other failure carries it as its cause.
fn one_cause(ends: &[Result<u64, OpError>], status: WcStatus) {
    let failed: Vec<&OpError> = ends.iter().filter_map(|e| e.as_ref().err()).collect();
    let first = failed.iter().filter(|e| status_of(e) == Some(status)).count();
    assert_eq!(first, 1, "{ends:?}");
    for error in failed.into_iter().filter(|e| status_of(e).is_none()) {
        let OpError::Flushed { cause: Some(cause), .. } = error else { panic!("{error:?}") };
        assert_eq!(status_of(cause), Some(status), "{error:?}");
    }
}

#[test]
fn r6_a_dropped_connection_is_the_cause_of_every_flush() {
    on_every(async |on| {
        let (a, b) = pair(on, "drop_after=110000").await;
        // More than the queue holds: some wait inside of the ring.
        let ends = writes(&a, &b, 40).await;
        one_cause(&ends, WcStatus::RetryExceeded);
        let done = ends.iter().filter(|e| e.is_ok()).count();
        assert!(done <= 5, "{done} of 20 kB each, in 110 kB");
    });
}

#[test]
fn r6_a_request_that_the_device_fails_is_the_cause_of_every_flush() {
    on_every(async |on| {
        let (a, b) = pair(on, "fail_wr=6").await;
        let ends = writes(&a, &b, 40).await;
        one_cause(&ends, WcStatus::LocalQpOperation);
        assert_eq!(status_of(ends[5].as_ref().unwrap_err()), Some(WcStatus::LocalQpOperation));
    });
}

#[test]
fn r10_a_post_that_the_driver_refuses_fails_alone() {
    on_every(async |on| {
        let (a, b) = pair(on, "fail_post=6").await;
        let ends = writes(&a, &b, 10).await;
        for (i, end) in ends.iter().enumerate() {
            match (i, end) {
                (5, Err(OpError::Post { reason, .. })) => assert!(reason.contains("os error 5"), "{reason}"),
                (5, other) => panic!("{other:?}"),
                (_, end) => assert_eq!(*end.as_ref().unwrap(), LEN),
            }
        }
        assert!(a.qp.failure().is_none(), "the queue pair lives on");
    });
}

#[test]
fn r2_delays_draws_paces_and_stalls_lose_nothing() {
    on_every(async |on| {
        for faults in ["delay=3ms", "reorder=3ms", "rate=4000000", "delay=1ms,reorder=5ms,rate=8000000"] {
            let (a, b) = pair(on, faults).await;
            let ends = writes(&a, &b, 40).await;
            assert!(ends.iter().all(|e| matches!(e, Ok(LEN))), "{on:?}, {faults}: {ends:?}");
        }
    });
}

/// Dropping what waits on a stalled peer neither blocks nor leaks: the futures are dropped, then everything else.
#[test]
fn r7_what_a_fault_holds_back_is_dropped_like_anything_else() {
    on_every(async |on| {
        for faults in ["delay=1000s", "stall=1000s", "rate=1024"] {
            let (a, b) = pair(on, faults).await;
            let (source, target) = (a.memory(LEN).await, b.memory(LEN).await);
            let write = || a.qp.write(source.slice(..).unwrap(), target.remote().whole());
            drop((0..10).map(|_| write()).collect::<Vec<_>>());
            let kept: Vec<_> = (0..10).map(|_| write()).collect();
            let closed = tokio::time::timeout(Duration::from_secs(60), a.qp.close()).await;
            assert!(closed.is_ok(), "{on:?}, {faults}: closing hangs");
            for op in kept {
                // The first may have left by itself before the close.
                let _ = op.await;
            }
        }
    });
}
