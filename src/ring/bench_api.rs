//! For `benches/ring.rs` alone: the ring's state without a device and without I/O. Not part of the API.
//!
//! The device is a list of work request ids that completes everything at once. What is left is what the ring itself
//! does for an operation: take a slot and a credit, keep the waker, match the completion by generation, wake, hand the
//! result and the buffer out, free the slot; each under the lock that the ring uses.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Wake, Waker};

use super::slots::{Owner, Wr, WrKind};
use super::state::{Effects, Ring, Submitted, Tie, WhenFull};
use super::{FirstCause, HalfId, Key};
use crate::provider::{Cqe, SendOp, Sge, WcStatus};
use crate::sync::{Arc, Mutex};

/// A ring of one half and a device that is a list.
#[derive(Debug)]
pub struct Idle {
    ring: Mutex<Ring<u32, u64>>,
    half: HalfId,
    tie: Arc<Tie>,
    fx: Effects<u32, u64>,
    posted: Vec<(Key, u64)>,
    wakes: std::sync::Arc<Wakes>,
    waker: Waker,
}

#[derive(Debug)]
struct Wakes(AtomicU64);

impl Wake for Wakes {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Idle {
    /// A queue of `depth` operations. `None` when no ring is so large.
    pub fn new(depth: u32) -> Option<Self> {
        let mut ring = Ring::new(depth);
        let cause = FirstCause::new();
        let tie =
            Arc::new(Tie { qp_num: 1, generation: 1, cause, closing: AtomicBool::new(false), shared: false });
        let half = ring.reserve(false, depth).ok()?;
        ring.bind(half, 0, tie.clone());
        let wakes = std::sync::Arc::new(Wakes(AtomicU64::new(0)));
        let waker = Waker::from(wakes.clone());
        let posted = Vec::with_capacity(depth as usize);
        Some(Self { ring: Mutex::new(ring), half, tie, fx: Effects::default(), posted, wakes, waker })
    }

    /// `ops` operations, at most the depth, from submission to result: submitted one by one, awaited, completed as one
    /// batch of completions, woken after the lock is released, and taken by their futures. Returns how many ended well.
    pub fn round(&mut self, ops: u32) -> u32 {
        let kind = WrKind::Send(SendOp::Write { remote_addr: 0, rkey: 0, imm: None });
        let wr = Wr { kind, sge: Some(Sge { addr: 0, len: 8, lkey: 0 }), device: false };
        self.posted.clear();
        for n in 0..ops {
            let submitted = self.ring.lock().submit(
                self.half,
                &self.tie,
                wr,
                Owner::Future(None),
                Some(u64::from(n)),
                WhenFull::Wait,
            );
            if let Ok(Submitted::Post(key, id)) = submitted {
                self.posted.push((key, id));
            }
        }
        for &(key, _) in &self.posted {
            // Pending: leaves its waker.
            let pending = self.ring.lock().poll_op(key, &self.waker, &mut self.fx);
            debug_assert!(pending.is_none());
        }
        {
            let mut ring = self.ring.lock();
            for &(_, wr_id) in &self.posted {
                let cqe = Cqe { wr_id, status: WcStatus::Success, ..Cqe::default() };
                ring.complete(&cqe, &mut self.fx);
            }
        }
        self.fx.fire();
        let mut ended = 0;
        for &(key, _) in &self.posted {
            let result = self.ring.lock().poll_op(key, &self.waker, &mut self.fx);
            ended += u32::from(matches!(result, Some((Ok(_), Some(_)))));
        }
        ended
    }

    /// Wakes so far: one an operation.
    pub fn wakes(&self) -> u64 {
        self.wakes.0.load(Ordering::Relaxed)
    }
}
