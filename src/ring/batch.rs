//! Batches: many operations, one doorbell.

use std::future::poll_fn;
use std::task::Poll;

use super::cq_core::Fx;
use super::op::{Op, Rejected};
use super::qp_core::{QpCore, Side};
use super::slots::{Owner, Wr};
use super::wr_id::Key;
use crate::error::OpError;
use crate::sync::Arc;

/// Operations that are submitted together. Their completions come from [`CompletionQueue::next`], by `user_data`.
///
/// What was pushed and not submitted when the batch is dropped is not submitted; its buffers are dropped.
///
/// [`CompletionQueue::next`]: super::CompletionQueue::next
#[must_use = "a batch does nothing until it is submitted"]
#[derive(Debug)]
pub struct Batch<'a> {
    qp: &'a Arc<QpCore>,
    ops: Vec<(Op, Wr)>,
    sends: u32,
    recvs: u32,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(qp: &'a Arc<QpCore>) -> Self {
        let ops = std::mem::take(&mut *qp.spare.lock());
        Self { qp, ops, sends: 0, recvs: 0 }
    }

    /// Operations in it.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether it has no operation.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Adds an operation, if it is allowed and there is room for it. The others of the batch are not affected.
    ///
    /// # Errors
    /// [`Rejected`] with the operation: [`OpError::Full`] when it can be tried again, else why it is not possible.
    #[allow(clippy::result_large_err)] // The operation comes back by value: no allocation.
    pub fn push(&mut self, op: Op) -> Result<(), Rejected> {
        match self.admit(&op) {
            Ok(wr) => {
                *(if op.is_recv() { &mut self.recvs } else { &mut self.sends }) += 1;
                self.ops.push((op, wr));
                Ok(())
            }
            Err(error) => Err(Rejected { error, op }),
        }
    }

    /// Adds an operation, and waits while its queue is full. What was pushed before is submitted when it has to wait.
    ///
    /// It fails with [`OpError::Full`] of the `"completion"` queue when as many completions as the completion queue
    /// has entries wait to be taken with `next()`: it does not wait for the caller's own reaping.
    ///
    /// # Errors
    /// [`Rejected`] with the operation. The failure of a queue pair while this waits is told by the operation's completion.
    ///
    /// # Cancel safety
    /// A call that is dropped while it waits submits nothing: its operation is not posted, and the buffer is dropped. The
    /// exception is one that has got room just before, and has been posted for a call that was not polled again, as when
    /// another branch of a `select!` was ready too: then its completion comes from [`CompletionQueue::next`], as every
    /// other, by its `user_data`.
    ///
    /// [`CompletionQueue::next`]: super::CompletionQueue::next
    pub async fn push_wait(&mut self, op: Op) -> Result<(), Rejected> {
        // Takes part in cooperative scheduling also when it never has to wait. Before the push: what was pushed is
        // submitted later, also when this call is dropped.
        tokio::task::coop::consume_budget().await;
        let op = match self.push(op) {
            Ok(()) => return Ok(()),
            Err(Rejected { error: OpError::Full { queue, .. }, op }) if queue != COMPLETION => op,
            Err(rejected) => return Err(rejected),
        };
        self.submit_pushed();
        let wr = match op.check(&self.qp.pd) {
            Ok(wr) => wr,
            Err(error) => return Err(Rejected { error, op }),
        };
        let side = self.qp.side(op.is_recv());
        let (buf, user_data) = op.into_parts();
        let owner = Owner::Tagged { user_data, submitter: None };
        match self.qp.submit(wr, owner, buf) {
            Ok(key) => {
                Queued { side, key }.posted().await;
            }
            Err((error, buf)) => {
                let mut fx = Fx::default();
                side.cq.ring.lock().push_ready(user_data, Err(error), buf, &mut fx);
                fx.fire();
            }
        }
        Ok(())
    }

    /// Posts what was pushed, with one doorbell a queue, and returns how many operations that were.
    ///
    /// Each ends with a completion, also when the device refuses the post. Where another task has taken the room
    /// meanwhile, the rest is posted as room comes back.
    pub fn submit(mut self) -> usize {
        self.submit_pushed()
    }

    fn submit_pushed(&mut self) -> usize {
        let n = self.ops.len();
        self.qp.submit_batch(&mut self.ops);
        (self.sends, self.recvs) = (0, 0);
        n
    }

    fn admit(&self, op: &Op) -> Result<Wr, OpError> {
        let wr = op.check(&self.qp.pd)?;
        let recv = op.is_recv();
        self.qp.check_connected(&wr)?;
        let side = self.qp.side(recv);
        let (queue, pushed) = if recv { ("receive", self.recvs) } else { ("send", self.sends) };
        let qp_num = self.qp.tie.qp_num;
        // Those of this batch that complete into the same queue.
        let shared = Arc::ptr_eq(&self.qp.send.cq, &self.qp.recv.cq);
        let tagged = if shared { self.recvs + self.sends } else { pushed };
        let ring = side.cq.ring.lock();
        ring.check_open(&self.qp.tie)?;
        if ring.tagged_room() <= tagged {
            return Err(OpError::Full { qp_num, queue: COMPLETION, depth: side.cq.capacity });
        }
        if ring.room(side.half) <= pushed {
            return Err(OpError::Full { qp_num, queue, depth: ring.depth(side.half) });
        }
        Ok(wr)
    }
}

const COMPLETION: &str = "completion";

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.ops.clear();
        let ops = std::mem::take(&mut self.ops);
        let mut spare = self.qp.spare.lock();
        if spare.capacity() < ops.capacity() {
            *spare = ops;
        }
    }
}

/// A tagged operation that waits for a credit. Dropped before it is posted: cancelled. Dropped after: it is the device's.
struct Queued<'a> {
    side: &'a Side,
    key: Key,
}

impl Queued<'_> {
    async fn posted(self) {
        poll_fn(|cx| {
            let mut fx = Fx::default();
            let posted = self.side.cq.ring.lock().poll_posted(self.key, cx.waker(), &mut fx);
            fx.fire();
            if posted { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        let mut fx = Fx::default();
        self.side.cq.ring.lock().cancel_queued(self.key, &mut fx);
        fx.fire();
    }
}
