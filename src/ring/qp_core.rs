//! The part of a queue pair that outlives its handle: posting, closing, destroying (R7).
//!
//! A handle that is dropped moves the queue pair to the error state; this stays, held by the halves of its
//! completion queues, until everything posted has completed. Then, and only then, the queue pair is destroyed.
//!
//! Locks, in the order in which they may be held: a side's `post` (send before receive), `qp`, a ring.

use std::fmt;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::buffer::Buffer;
use super::cq_core::{CqCore, Fx};
use super::future::OpFuture;
use super::gate::Gate;
use super::op::{Op, Rejected};
use super::slots::{Owner, Wr, WrKind};
use super::state::{HalfId, Submitted, Tie};
use super::wr_id::Key;
use crate::device::ProtectionDomain;
use crate::error::{OpError, PostError};
use crate::memory::AnySlice;
use crate::provider::{self, QpState, RecvWr, WrChain};
use crate::sync::{Arc, Mutex, MutexGuard};

/// How long a closing queue pair may take to flush before it is destroyed as it is.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

pub(crate) struct QpCore {
    qp: RwLock<Option<provider::Qp>>,
    pub(crate) tie: Arc<Tie>,
    pub(crate) send: Side,
    pub(crate) recv: Side,
    pub(crate) pd: ProtectionDomain,
    pub(crate) connected: AtomicBool,
    /// Payloads up to this are copied at the post.
    pub(crate) inline: u32,
    finished: AtomicBool,
    destroyed: Gate,
    /// An emptied vector of a batch, for the next one.
    pub(super) spare: Mutex<Vec<(Op, Wr)>>,
}

/// Short: its completion queues know it, and it knows them.
impl fmt::Debug for QpCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("qp_num", &self.tie.qp_num).finish_non_exhaustive()
    }
}

/// One side: where its completions go.
pub(crate) struct Side {
    pub(crate) cq: Arc<CqCore>,
    pub(crate) half: HalfId,
    post: Mutex<Post>,
}

impl Side {
    pub(crate) fn new(cq: Arc<CqCore>, half: HalfId) -> Self {
        Self { cq, half, post: Mutex::new(Post::default()) }
    }
}

/// The work requests of one doorbell. Reused.
#[derive(Default)]
struct Post {
    sends: WrChain,
    recvs: Vec<RecvWr>,
    keys: Vec<Key>,
}

impl Post {
    fn add(&mut self, key: Key, wr_id: u64, wr: &Wr, inline: u32) {
        self.keys.push(key);
        match wr.kind {
            WrKind::Recv => self.recvs.push(RecvWr { wr_id, sge: wr.sge }),
            WrKind::Send(op) => {
                let len = wr.sge.map_or(0, |s| s.len);
                let small = len > 0 && len <= inline && !op.has_answer();
                self.sends.push(wr_id, op, wr.sge.as_slice(), true, small);
            }
        }
    }

    fn clear(&mut self) {
        self.sends.clear();
        self.recvs.clear();
        self.keys.clear();
    }
}

impl QpCore {
    pub(crate) fn new(
        qp: provider::Qp,
        tie: Arc<Tie>,
        send: Side,
        recv: Side,
        pd: ProtectionDomain,
        inline: u32,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            qp: RwLock::new(Some(qp)),
            tie,
            send,
            recv,
            pd,
            connected: AtomicBool::new(false),
            inline,
            finished: AtomicBool::new(false),
            destroyed: Gate::new(),
            spare: Mutex::new(Vec::new()),
        });
        for side in [&this.send, &this.recv] {
            side.cq.ring.lock().bind(side.half, this.clone(), this.tie.clone());
        }
        this
    }

    /// Calls `f` with the queue pair, unless it has been destroyed.
    pub(crate) fn with_qp<R>(&self, f: impl FnOnce(&provider::Qp) -> R) -> Option<R> {
        self.qp.read().unwrap_or_else(|e| e.into_inner()).as_ref().map(f)
    }

    pub(super) fn side(&self, recv: bool) -> &Side {
        if recv { &self.recv } else { &self.send }
    }

    // Posting.

    /// Submits one operation. `Ok` also when it is queued, or when the post failed: then its slot says so.
    pub(crate) fn submit(
        &self,
        wr: Wr,
        owner: Owner,
        buf: Option<AnySlice>,
    ) -> Result<Key, (OpError, Option<AnySlice>)> {
        let recv = matches!(wr.kind, WrKind::Recv);
        if let Err(error) = self.check_connected(recv) {
            return Err((error, buf));
        }
        let side = self.side(recv);
        let mut fx = Fx::default();
        let mut post = side.post.lock();
        let submitted = side.cq.ring.lock().submit(side.half, &self.tie, wr, owner, buf)?;
        let key = match submitted {
            Submitted::Queued(key) => return Ok(key),
            Submitted::Post(key, id) => {
                post.add(key, id, &wr, self.inline);
                key
            }
        };
        self.doorbell(side, post, &mut fx);
        settle(&mut fx);
        Ok(key)
    }

    /// Submits an operation that a future waits for.
    pub(crate) fn submit_future<B: Buffer>(&self, op: Op) -> OpFuture<B> {
        let checked = op.check(&self.pd);
        let recv = op.is_recv();
        let (buf, _) = op.into_parts();
        let submitted = match checked {
            Ok(wr) => self.submit(wr, Owner::Future(None), buf),
            Err(error) => Err((error, buf)),
        };
        match submitted {
            Ok(key) => OpFuture::submitted(self.side(recv).cq.clone(), key),
            Err((error, buf)) => OpFuture::refused(error, buf),
        }
    }

    /// The same, when there is room now.
    #[allow(clippy::result_large_err)]
    pub(crate) fn try_submit(&self, op: Op) -> Result<OpFuture<Option<AnySlice>>, Rejected> {
        let recv = op.is_recv();
        let side = self.side(recv);
        let admitted = op.check(&self.pd).and_then(|_| self.check_connected(recv)).and_then(|()| {
            let ring = side.cq.ring.lock();
            ring.check_open(&self.tie)?;
            if ring.room(side.half) == 0 {
                let queue = if recv { "receive" } else { "send" };
                return Err(OpError::Full { qp_num: self.tie.qp_num, queue, depth: ring.depth(side.half) });
            }
            Ok(())
        });
        match admitted {
            Ok(()) => Ok(self.submit_future(op)),
            Err(error) => Err(Rejected { error, op }),
        }
    }

    /// Submits checked operations, tagged, with one doorbell a side: receives first, so that they are there before a
    /// send provokes an answer.
    pub(super) fn submit_batch(&self, ops: &mut Vec<(Op, Wr)>) {
        let mut fx = Fx::default();
        for recv in [true, false] {
            if !ops.iter().any(|(op, _)| op.is_recv() == recv) {
                continue;
            }
            let side = self.side(recv);
            let mut post = side.post.lock();
            let mut ring = side.cq.ring.lock();
            for (op, wr) in ops.extract_if(.., |(op, _)| op.is_recv() == recv) {
                let (buf, user_data) = op.into_parts();
                let owner = Owner::Tagged { user_data, submitter: None };
                match ring.submit(side.half, &self.tie, wr, owner, buf) {
                    Ok(Submitted::Post(key, id)) => post.add(key, id, &wr, self.inline),
                    Ok(Submitted::Queued(_)) => {}
                    Err((error, buf)) => ring.push_ready(user_data, Err(error), buf, &mut fx),
                }
            }
            drop(ring);
            self.doorbell(side, post, &mut fx);
        }
        settle(&mut fx);
    }

    pub(super) fn check_connected(&self, recv: bool) -> Result<(), OpError> {
        if recv || self.connected.load(Ordering::Acquire) {
            return Ok(());
        }
        let qp_num = self.tie.qp_num;
        Err(if self.tie.is_closing() { OpError::Closed { qp_num } } else { OpError::NotConnected { qp_num } })
    }

    /// Posts queued operations that have a credit now; ends them when the queue pair takes nothing any more.
    fn pump(&self, recv: bool, fx: &mut Fx) {
        let side = self.side(recv);
        let mut post = side.post.lock();
        {
            let mut ring = side.cq.ring.lock();
            ring.served(side.half);
            ring.end_queued(side.half, fx);
            while let Some((key, id, wr)) = ring.next_queued(side.half, fx) {
                post.add(key, id, &wr, self.inline);
            }
        }
        self.doorbell(side, post, fx);
    }

    fn doorbell(&self, side: &Side, mut post: MutexGuard<'_, Post>, fx: &mut Fx) {
        let result = self.with_qp(|qp| {
            if !post.recvs.is_empty() {
                qp.post_recv(&post.recvs)
            } else if !post.sends.wrs.is_empty() {
                qp.post_send(&post.sends)
            } else {
                Ok(())
            }
        });
        let error = match result {
            Some(Ok(())) => {
                post.clear();
                return;
            }
            Some(Err(error)) => error,
            None => PostError { index: 0, source: std::io::ErrorKind::NotConnected.into() },
        };
        // Requests before the index are posted and complete by themselves.
        let posted = error.index.min(post.keys.len());
        let unposted = post.keys.split_off(posted);
        post.clear();
        drop(post);
        let error = self.post_error(&error);
        let mut ring = side.cq.ring.lock();
        unposted.into_iter().for_each(|key| ring.fail(key, error.clone(), fx));
    }

    /// Why a post failed. On a queue pair that has failed, that is the first failure (R6), whose completion may still
    /// be in a queue.
    fn post_error(&self, error: &PostError) -> OpError {
        let qp_num = self.tie.qp_num;
        if !self.tie.is_closing() && self.tie.cause.get().is_none() {
            if self.with_qp(provider::Qp::state) != Some(QpState::Err) {
                return OpError::Post { qp_num, reason: error.source.to_string() };
            }
            self.send.cq.absorb_now();
            self.recv.cq.absorb_now();
        }
        if self.tie.is_closing() { OpError::Closed { qp_num } } else { self.tie.cause.flushed(qp_num) }
    }

    // Closing.

    /// Moves the queue pair to the error state and ends what is queued. What is posted completes by being flushed;
    /// the driver, or the reaper, destroys the queue pair after the last. Does not block.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.tie.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.set_error();
        let mut fx = Fx::default();
        for side in [&self.send, &self.recv] {
            side.cq.ring.lock().end_queued(side.half, &mut fx);
        }
        self.send.cq.watch_closing(Instant::now() + CLOSE_PATIENCE, self.clone());
        self.try_finish();
        if self.finished.load(Ordering::Acquire) {
            // Whoever drives the queues may have finished it between `set_error` and `watch_closing`: then nobody would
            // ever take it from that list.
            self.send.cq.forget_closing(self);
        }
        settle(&mut fx);
        self.send.cq.nudge();
    }

    /// The connection manager has connected it. False when it was closed meanwhile.
    pub(crate) fn set_connected(&self) -> bool {
        if self.tie.is_closing() {
            return false;
        }
        self.tie.cause.set_managed();
        self.connected.store(true, Ordering::Release);
        self.send.cq.nudge();
        true
    }

    /// The connection manager's connection has ended: to the error state, so that what is outstanding ends too, with what
    /// has failed first. Completions that came before are taken before.
    pub(crate) fn disconnected(&self) {
        if self.tie.is_closing() {
            return;
        }
        self.send.cq.absorb_now();
        self.recv.cq.absorb_now();
        self.tie.cause.record(OpError::Disconnected { qp_num: self.tie.qp_num });
        self.set_error();
        self.end_queued();
        self.send.cq.nudge();
        self.recv.cq.nudge();
    }

    /// To the error state, without closing: what is queued or comes later ends with the reason that the rings know.
    pub(super) fn set_error(&self) {
        if let Some(Err(error)) = self.with_qp(provider::Qp::set_error) {
            tracing::warn!(qp_num = self.tie.qp_num, error = %error, "moving a queue pair to the error state failed");
        }
    }

    /// Ends the operations that are queued because of what the rings know by now.
    pub(super) fn end_queued(&self) {
        let mut fx = Fx::default();
        for side in [&self.send, &self.recv] {
            side.cq.ring.lock().end_queued(side.half, &mut fx);
        }
        settle(&mut fx);
    }

    /// Destroys the queue pair when it is closing and nothing of it is outstanding.
    fn try_finish(self: &Arc<Self>) {
        let drained = |side: &Side| side.cq.ring.lock().is_drained(side.half);
        if self.tie.is_closing()
            && !self.finished.load(Ordering::Acquire)
            && drained(&self.send)
            && drained(&self.recv)
            && !self.finished.swap(true, Ordering::AcqRel)
        {
            self.destroy();
            self.release(false);
        }
    }

    /// Destroys the queue pair now, with operations in flight. No device touches their buffers afterwards, so that
    /// they end; completions of them that come later are stale.
    pub(crate) fn kill(self: &Arc<Self>, error: Option<OpError>) {
        self.tie.closing.store(true, Ordering::Release);
        if self.finished.swap(true, Ordering::AcqRel) {
            return;
        }
        self.set_error();
        let mut fx = Fx::default();
        {
            let _posts = (self.send.post.lock(), self.recv.post.lock());
            self.destroy();
        }
        for side in [&self.send, &self.recv] {
            let mut ring = side.cq.ring.lock();
            let error = match &error {
                Some(error) => error.clone(),
                None if ring.gone => OpError::RuntimeGone,
                None => match self.tie.cause.get() {
                    Some(_) => self.tie.cause.flushed(self.tie.qp_num),
                    None => OpError::Closed { qp_num: self.tie.qp_num },
                },
            };
            ring.end_queued(side.half, &mut fx);
            ring.fail_posted(side.half, &error, &mut fx);
        }
        // Nothing is left to serve, and nobody else may see the halves.
        fx.attention.clear();
        self.release(true);
        fx.fire();
    }

    /// The one place where a queue pair is destroyed. Cheap on the soft provider; a device whose destroy blocks hands
    /// it to the reaper here.
    fn destroy(&self) {
        let qp = self.qp.write().unwrap_or_else(|e| e.into_inner()).take();
        drop(qp);
    }

    fn release(&self, linger: bool) {
        for side in [&self.send, &self.recv] {
            let released = side.cq.ring.lock().release(side.half, linger);
            side.cq.forget_closing(self);
            drop(released);
        }
        for side in [&self.send, &self.recv] {
            side.cq.nudge();
        }
        self.destroyed.open();
    }

    /// Waits until the queue pair is destroyed.
    pub(crate) async fn destroyed(&self) {
        self.destroyed.wait().await;
    }
}

/// Carries out the effects of a call, and those that follow from it. No lock of ours is held.
pub(super) fn settle(fx: &mut Fx) {
    while let Some((qp, recv)) = fx.attention.pop() {
        qp.pump(recv, fx);
        qp.try_finish();
    }
    fx.fire();
}
