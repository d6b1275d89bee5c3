//! Models of the ring under loom: every interleaving, up to a bound on preemptions, of the real types.
//!
//! `tests/run loom` runs them; `tests/loom/Cargo.toml` has the command. Without the flag none of this is compiled. Each
//! has been seen to fail with the type broken as said here:
//!
//! | model | contract | broken by |
//! |---|---|---|
//! | `slots` | R1: a buffer is the slot's until its completion, also when the future is dropped meanwhile | `abandon_op` discards what is posted |
//! | `slots` | R5: a completion of an earlier use of a slot ends nothing | `Slots::get` ignores the generation |
//! | `wakers` | R3: a task that waits is woken, the one that polled last | `poll_op` keeps the first waker |
//! | `wakers` | R3: wakers fire, and drop, outside of the lock | `end` wakes at once |
//! | `polling` | R3: a completion between the last poll and the arm is seen | `poll_and_arm` answers `Idle` at the first arm |
//! | `credits` | R4: never more posted than the depth, and what waits is posted | `served` leaves a half noted |
//! | `credits` | R4: who does not wait is refused, and never queued | `submit` does not look at `when_full` |
//! | `credits` | R4: a waiter that leaves while it gets its turn holds nobody up | `cancel_queued` leaves it in the queue |
//! | `credits` | R7: what is submitted during a close ends, and nothing is posted after the destruction | `submit` does not look at `closing` |

mod credits;
mod polling;
mod slots;
mod wakers;

use std::sync::atomic::Ordering;

use loom::sync::Mutex as LoomMutex;

use super::slots::{Owner, Wr, WrKind};
use super::state::{Effects, HalfId, Ring, Submitted, Tie, WhenFull};
use super::{FirstCause, Key};
use crate::error::OpError;
use crate::provider::{Cqe, SendOp, Sge, WcStatus};
use crate::sync::{Arc, Mutex};

/// Explores every interleaving with at most so many preemptions of a thread that could go on.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    const PREEMPTIONS: usize = 5;
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

/// What the device of a model has: work requests in the order in which they were posted.
#[derive(Debug, Default)]
struct Device {
    posted: Vec<u64>,
    /// The queue pair is destroyed.
    destroyed: bool,
}

/// A buffer. The device must not have its work request when it is dropped.
#[derive(Debug)]
struct Buf {
    device: Arc<LoomMutex<Device>>,
    /// The work request that uses it, once it is posted.
    wr_id: Arc<LoomMutex<Option<u64>>>,
    dropped: Arc<LoomMutex<u32>>,
}

impl Drop for Buf {
    fn drop(&mut self) {
        let wr_id = self.wr_id.lock().unwrap().take();
        if let Some(id) = wr_id {
            assert!(!self.device.lock().unwrap().posted.contains(&id), "r1: the device has it still");
        }
        *self.dropped.lock().unwrap() += 1;
    }
}

type Fx = Effects<u32, Buf>;

/// One half of one queue pair at one ring, as `qp_core` and `cq_core` use them.
struct Model {
    ring: Mutex<Ring<u32, Buf>>,
    /// Held from submission until the doorbell, as in `qp_core`.
    post: Mutex<()>,
    half: HalfId,
    tie: Arc<Tie>,
    depth: u32,
    device: Arc<LoomMutex<Device>>,
    dropped: Arc<LoomMutex<u32>>,
}

impl Model {
    fn new(depth: u32) -> Arc<Self> {
        let mut ring = Ring::new(depth);
        let half = ring.reserve(false, depth).expect("it fits");
        let closing = false.into();
        let tie =
            Arc::new(Tie { qp_num: 1, generation: 1, cause: FirstCause::new(), closing, shared: false });
        ring.bind(half, 0, tie.clone());
        let device = Arc::default();
        Arc::new(Self {
            ring: Mutex::new(ring),
            post: Mutex::new(()),
            half,
            tie,
            depth,
            device,
            dropped: Arc::default(),
        })
    }

    fn buf(&self) -> Buf {
        Buf { device: self.device.clone(), wr_id: Arc::default(), dropped: self.dropped.clone() }
    }

    fn dropped(&self) -> u32 {
        *self.dropped.lock().unwrap()
    }

    /// `QpCore::submit`.
    fn submit(&self, owner: Owner) -> Result<Key, OpError> {
        self.submit_or(owner, WhenFull::Wait)
    }

    fn submit_or(&self, owner: Owner, when_full: WhenFull) -> Result<Key, OpError> {
        let kind = WrKind::Send(SendOp::Write { remote_addr: 0, rkey: 0, imm: None });
        let wr = Wr { kind, sge: Some(Sge { addr: 0, len: 8, lkey: 0 }), device: false };
        let buf = self.buf();
        let used = buf.wr_id.clone();
        let _post = self.post.lock();
        let submitted = self.ring.lock().submit(self.half, &self.tie, wr, owner, Some(buf), when_full);
        match submitted {
            Ok(Submitted::Post(key, id)) => {
                *used.lock().unwrap() = Some(id);
                self.doorbell(id);
                Ok(key)
            }
            Ok(Submitted::Queued(key)) => Ok(key),
            Err((error, _buf)) => Err(error),
        }
    }

    fn doorbell(&self, id: u64) {
        let mut device = self.device.lock().unwrap();
        assert!(!device.destroyed, "r7: posted to a queue pair that is destroyed");
        device.posted.push(id);
        assert!(device.posted.len() <= self.depth as usize, "r4: the queue overflows");
    }

    /// The device completes the oldest work request: its completion, once it has one.
    fn finish_one(&self) -> Option<Cqe> {
        let mut device = self.device.lock().unwrap();
        let wr_id = (!device.posted.is_empty()).then(|| device.posted.remove(0))?;
        Some(Cqe { wr_id, status: WcStatus::Success, ..Cqe::default() })
    }

    /// A slice of the driver: absorbs, then settles.
    fn complete(&self, cqe: &Cqe) {
        let mut fx = Fx::default();
        self.ring.lock().complete(cqe, &mut fx);
        self.settle(&mut fx);
    }

    /// `settle` and `QpCore::pump`.
    fn settle(&self, fx: &mut Fx) {
        while let Some((_, _)) = fx.attention.pop() {
            let _post = self.post.lock();
            let mut ids = Vec::new();
            {
                let mut ring = self.ring.lock();
                ring.served(self.half);
                ring.end_queued(self.half, fx);
                while let Some((_, id, _)) = ring.next_queued(self.half, fx) {
                    ids.push(id);
                }
            }
            ids.into_iter().for_each(|id| self.doorbell(id));
            self.try_finish();
        }
        fx.fire();
    }

    /// `QpCore::close`.
    fn close(&self) {
        self.tie.closing.store(true, Ordering::Release);
        let mut fx = Fx::default();
        self.ring.lock().end_queued(self.half, &mut fx);
        self.try_finish();
        self.settle(&mut fx);
    }

    /// `QpCore::try_finish`.
    fn try_finish(&self) {
        if self.tie.is_closing() && self.ring.lock().is_drained(self.half) {
            self.device.lock().unwrap().destroyed = true;
        }
    }

    /// `Drop` of an `OpFuture`.
    fn abandon(&self, key: Key) {
        let mut fx = Fx::default();
        self.ring.lock().abandon_op(key, &mut fx);
        fx.fire();
    }
}
