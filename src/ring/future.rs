//! A future per operation: a thin layer over a slot.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::buffer::Buffer;
use super::completion::Completed;
use super::cq_core::{CqCore, Fx};
use super::wr_id::Key;
use crate::error::OpError;
use crate::memory::AnySlice;
use crate::sync::Arc;

/// How an operation ended, and its buffer.
pub type OpResult<B> = (Result<Completed, OpError>, B);

/// An operation under way, submitted by the call that made this. Resolves to its outcome and its buffer.
///
/// Dropping it does not undo the operation: one that the device has runs to its end and its buffer is released then;
/// one that still waits for room in the queue is never posted. It can be awaited in any task of any runtime.
#[must_use = "the operation's outcome and its buffer come with the future"]
#[derive(Debug)]
pub struct OpFuture<B: Buffer> {
    state: State,
    kind: PhantomData<fn() -> B>,
}

#[derive(Debug)]
enum State {
    /// Never submitted.
    Refused(OpError, Option<AnySlice>),
    Submitted(Arc<CqCore>, Key),
    Taken,
}

impl<B: Buffer> OpFuture<B> {
    pub(super) fn refused(error: OpError, buf: Option<AnySlice>) -> Self {
        Self { state: State::Refused(error, buf), kind: PhantomData }
    }

    pub(super) fn submitted(cq: Arc<CqCore>, key: Key) -> Self {
        Self { state: State::Submitted(cq, key), kind: PhantomData }
    }
}

impl<B: Buffer> Future for OpFuture<B> {
    type Output = OpResult<B>;

    /// # Panics
    /// When polled after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpResult<B>> {
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        let (result, buf) = match &self.state {
            State::Submitted(cq, key) => ready!(poll_slot(cq, *key, cx)),
            _ => match std::mem::replace(&mut self.state, State::Taken) {
                State::Refused(error, buf) => (Err(error), buf),
                _ => panic!("polled after it was ready"),
            },
        };
        self.state = State::Taken;
        coop.made_progress();
        Poll::Ready((result, B::restore(buf)))
    }
}

fn poll_slot(
    cq: &CqCore,
    key: Key,
    cx: &mut Context<'_>,
) -> Poll<(Result<Completed, OpError>, Option<AnySlice>)> {
    // No waker while it spins: whoever takes the completion would wake this task, which is awake, by a system call.
    cq.spin_until(|| cq.ring.lock().is_done(key));
    let mut fx = Fx::default();
    let out = cq.ring.lock().poll_op(key, cx.waker(), &mut fx);
    fx.fire();
    out.map_or(Poll::Pending, Poll::Ready)
}

impl<B: Buffer> Drop for OpFuture<B> {
    fn drop(&mut self) {
        if let State::Submitted(cq, key) = &self.state {
            let mut fx = Fx::default();
            cq.ring.lock().abandon_op(*key, &mut fx);
            fx.fire();
        }
    }
}
