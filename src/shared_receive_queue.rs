//! Shared receive queues: the public handle. The work is in `ring`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::completion_queue::CompletionQueue;
use crate::device::ProtectionDomain;
use crate::error::QpError;
use crate::memory::AnySlice;
use crate::ring::{
    Batch, Buffer, FirstCause, NoEntries, Object, Op, OpFuture, QpCore, Rejected, Side, Tie,
    next_qp_generation,
};

/// Receives for several queue pairs: a message takes the oldest of them, whichever queue pair it comes by, and
/// [`Completed::qp_num`](crate::ring::Completed::qp_num) says which that was.
///
/// For programs with many peers of which few speak at a time. landfall needs none itself, and many devices have none
/// ([`Capabilities::max_srq`](crate::device::Capabilities::max_srq)). A peer does not see it.
///
/// Every receive completes on the one completion queue, whose entries it takes once for all (R4), and ends exactly once
/// (R2): with a message, or with the queue pair that fails while a message comes in, or, when nobody has taken it, with the
/// queue. A queue pair that ends leaves the receives that it has not taken to the others. (Some devices drop the completions
/// that a destroyed queue pair has left in a completion queue; such a receive ends with the shared queue, too.)
///
/// Dropping it closes it: no receive is taken any more, and those that it holds serve its queue pairs until the last of
/// these is destroyed.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    core: Arc<QpCore>,
    cq: CompletionQueue,
}

impl SharedReceiveQueue {
    /// Creates a queue for `depth` receives, which complete on `cq`.
    ///
    /// # Errors
    /// [`QpError::Unsupported`] on a device without shared receive queues; [`QpError::Limit`] for a depth of zero or
    /// above the device's; [`QpError::CqTooSmall`], [`QpError::ForeignResource`], [`QpError::CqClosed`],
    /// [`QpError::DeviceGone`], [`QpError::Os`].
    pub fn new(pd: &ProtectionDomain, cq: &CompletionQueue, depth: u32) -> Result<Self, QpError> {
        let (device, c) = (pd.device(), cq.core());
        if !c.device.same(device) {
            return Err(QpError::ForeignResource { what: "a completion queue and a protection domain" });
        }
        if let Some(device) = device.gone() {
            return Err(QpError::DeviceGone { device });
        }
        if device.capabilities().max_srq == 0 {
            return Err(QpError::Unsupported {
                what: "a shared receive queue (srq)",
                device: device.name().to_owned(),
                fix: "post receives to each queue pair",
            });
        }
        let limit = device.capabilities().max_srq_wr;
        if depth == 0 || depth > limit {
            return Err(QpError::Limit {
                what: "the depth of a shared receive queue",
                asked: depth.into(),
                limit: limit.into(),
                fix: "ask for 1 up to max_srq_wr of capabilities()",
            });
        }
        let recv_half = c.ring.lock().reserve(true, depth).map_err(|e| match e {
            NoEntries::Shut => QpError::CqClosed,
            NoEntries::TooSmall { capacity, committed } => QpError::CqTooSmall {
                capacity,
                committed,
                asked: depth,
                send: 0,
                recv: depth,
                needed: committed.saturating_add(depth),
            },
        })?;
        let made = pd.provider().create_srq(depth).and_then(|srq| {
            let send_half = c.ring.lock().reserve(false, 0).map_err(|_| QpError::CqClosed)?;
            Ok((srq, send_half))
        });
        let (srq, send_half) = match made {
            Ok(made) => made,
            Err(error) => {
                c.release(recv_half, false);
                return Err(error);
            }
        };
        let tie = Arc::new(Tie {
            qp_num: 0,
            generation: next_qp_generation(),
            cause: FirstCause::new(),
            closing: AtomicBool::new(false),
            shared: true,
        });
        let sides = (Side::new(c.clone(), send_half), Side::new(c.clone(), recv_half));
        let core = QpCore::new(Object::Shared(srq), tie, sides, pd.clone(), 0, None);
        let this = Self { core, cq: cq.clone() };
        // Closed since the reservation, when it was not there to be closed yet.
        if c.ring.lock().is_shut() {
            return Err(QpError::CqClosed);
        }
        Ok(this)
    }

    /// The completion queue of its receives.
    pub fn completion_queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// The protection domain that it is of.
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.core.pd
    }

    /// RECV: one message of a peer of any of its queue pairs.
    pub fn recv<B: Buffer>(&self, buf: B) -> OpFuture<B> {
        self.core.submit_future(Op::recv(buf))
    }

    /// Submits a receive without ever waiting, as
    /// [`QueuePair::try_submit`](crate::ring::QueuePair::try_submit).
    ///
    /// # Errors
    /// [`Rejected`] with the operation.
    #[allow(clippy::result_large_err)] // The operation comes back by value: no allocation.
    pub fn try_submit(&self, op: Op) -> Result<OpFuture<Option<AnySlice>>, Rejected> {
        self.core.try_submit(op)
    }

    /// A batch of receives, whose completions come from [`CompletionQueue::next`].
    pub fn batch(&self) -> Batch<'_> {
        Batch::new(&self.core)
    }

    /// Closes it and waits until it is destroyed, which comes after the last of its queue pairs. Receives that nobody has
    /// taken end with [`OpError::SrqClosed`](crate::error::OpError::SrqClosed), and have their buffers.
    ///
    /// # Cancel safety
    /// It is closed at the first poll, or when the future is dropped; dropping it only stops waiting.
    pub async fn close(self) {
        self.core.close();
        self.core.destroyed().await;
    }

    pub(crate) fn core(&self) -> &Arc<QpCore> {
        &self.core
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        self.core.close();
    }
}
