//! The part of a queue pair that outlives its handle: posting. Its end is in `qp_end.rs` (R7).
//!
//! A handle that is dropped moves the queue pair to the error state; this stays, held by the halves of its
//! completion queues, until everything posted has completed. Then, and only then, the queue pair is destroyed.
//!
//! Locks, in the order in which they may be held: a side's `post` (send before receive), `qp`, a ring.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{OnceLock, RwLock};

use super::buffer::Buffer;
use super::cq_core::{CqCore, Fx};
use super::future::OpFuture;
use super::gate::Gate;
use super::op::{Op, Rejected};
use super::slots::{Owner, Wr, WrKind};
use super::state::{HalfId, Submitted, Tie, WhenFull};
use super::wr_id::Key;
use crate::device::ProtectionDomain;
use crate::error::{OpError, PostError};
use crate::memory::AnySlice;
use crate::provider::events::Enrolled;
use crate::provider::{self, QpState, RecvWr, SendOp, WrChain};
use crate::sync::{Arc, Mutex, MutexGuard};

/// A queue pair, or a shared receive queue, which is like one that has no send side and that several queue pairs
/// receive by.
pub(crate) struct QpCore {
    pub(super) object: RwLock<Option<Object>>,
    pub(crate) tie: Arc<Tie>,
    pub(crate) send: Side,
    pub(crate) recv: Side,
    pub(crate) pd: ProtectionDomain,
    pub(crate) connected: AtomicBool,
    /// READs and atomics that the connection allows this side.
    rd_atomic: AtomicU8,
    /// Payloads up to this are copied at the post.
    pub(crate) inline: u32,
    /// The shared receive queue that it receives by, if so.
    pub(super) srq: Option<Arc<QpCore>>,
    /// Of a shared receive queue: the queue pairs that receive by it.
    pub(super) attached: AtomicUsize,
    pub(super) finished: AtomicBool,
    pub(super) destroyed: Gate,
    /// Its place among those who hear of the device's events.
    enrolled: OnceLock<Enrolled>,
    /// An emptied vector of a batch, for the next one.
    pub(super) spare: Mutex<Vec<(Op, Wr)>>,
}

/// Short: its completion queues know it, and it knows them.
impl fmt::Debug for QpCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("qp_num", &self.tie.qp_num).finish_non_exhaustive()
    }
}

/// What the provider has made.
#[derive(Debug)]
pub(crate) enum Object {
    Pair(provider::Qp),
    Shared(provider::Srq),
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
                let small = len > 0 && len <= inline && !op.has_answer() && !wr.device;
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
    /// `srq` has counted it already, see [`attach`](Self::attach).
    pub(crate) fn new(
        object: Object,
        tie: Arc<Tie>,
        (send, recv): (Side, Side),
        pd: ProtectionDomain,
        inline: u32,
        srq: Option<Arc<Self>>,
    ) -> Arc<Self> {
        let id = match &object {
            Object::Pair(qp) => qp.id(),
            Object::Shared(srq) => srq.id(),
        };
        let this = Arc::new(Self {
            object: RwLock::new(Some(object)),
            tie,
            send,
            recv,
            pd,
            connected: AtomicBool::new(false),
            rd_atomic: AtomicU8::new(0),
            inline,
            srq,
            attached: AtomicUsize::new(0),
            finished: AtomicBool::new(false),
            destroyed: Gate::new(),
            enrolled: OnceLock::new(),
            spare: Mutex::new(Vec::new()),
        });
        for side in [&this.send, &this.recv] {
            side.cq.ring.lock().bind(side.half, this.clone(), this.tie.clone());
        }
        let events = this.pd.device().provider().events();
        let _ = this.enrolled.set(events.enrol(vec![id], &this));
        this
    }

    /// Calls `f` with the queue pair, unless it has been destroyed.
    pub(crate) fn with_qp<R>(&self, f: impl FnOnce(&provider::Qp) -> R) -> Option<R> {
        match self.object.read().unwrap_or_else(|e| e.into_inner()).as_ref()? {
            Object::Pair(qp) => Some(f(qp)),
            Object::Shared(_) => None,
        }
    }

    /// Calls `f` with the shared receive queue that this is, unless it has been destroyed.
    pub(crate) fn with_srq<R>(&self, f: impl FnOnce(&provider::Srq) -> R) -> Option<R> {
        match self.object.read().unwrap_or_else(|e| e.into_inner()).as_ref()? {
            Object::Shared(srq) => Some(f(srq)),
            Object::Pair(_) => None,
        }
    }

    pub(super) fn side(&self, recv: bool) -> &Side {
        if recv { &self.recv } else { &self.send }
    }

    // Posting.

    /// Submits one operation. `Ok` also when it waits for room, or when the post failed: then its slot says so.
    pub(crate) fn submit(
        &self,
        wr: Wr,
        owner: Owner,
        buf: Option<AnySlice>,
    ) -> Result<Key, (OpError, Option<AnySlice>)> {
        self.submit_or(wr, owner, buf, WhenFull::Wait)
    }

    /// The same; `when_full` says what becomes of it when there is no room.
    fn submit_or(
        &self,
        wr: Wr,
        owner: Owner,
        buf: Option<AnySlice>,
        when_full: WhenFull,
    ) -> Result<Key, (OpError, Option<AnySlice>)> {
        let recv = matches!(wr.kind, WrKind::Recv);
        if let Err(error) = self.check_connected(&wr) {
            return Err((error, buf));
        }
        let side = self.side(recv);
        let mut fx = Fx::default();
        let mut post = side.post.lock();
        let submitted = side.cq.ring.lock().submit(side.half, &self.tie, wr, owner, buf, when_full)?;
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
    pub(crate) fn try_submit(&self, mut op: Op) -> Result<OpFuture<Option<AnySlice>>, Rejected> {
        let recv = op.is_recv();
        let wr = match op.check(&self.pd) {
            Ok(wr) => wr,
            Err(error) => return Err(Rejected { error, op }),
        };
        match self.submit_or(wr, Owner::Future(None), op.take_buf(), WhenFull::Refuse) {
            Ok(key) => Ok(OpFuture::submitted(self.side(recv).cq.clone(), key)),
            Err((error, buf)) => Err(Rejected { error, op: op.put_back(buf) }),
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
                match ring.submit(side.half, &self.tie, wr, owner, buf, WhenFull::Wait) {
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

    /// It is connected, and may have as many READs and atomics outstanding.
    pub(crate) fn set_ready(&self, rd_atomic: u8) {
        self.rd_atomic.store(rd_atomic, Ordering::Release);
        self.connected.store(true, Ordering::Release);
    }

    /// The connection manager has connected it, for as many READs and atomics. False when it was closed meanwhile.
    pub(crate) fn set_connected(&self, rd_atomic: u8) -> bool {
        if self.tie.is_closing() {
            return false;
        }
        self.tie.cause.set_managed();
        self.set_ready(rd_atomic);
        self.send.cq.nudge();
        true
    }

    /// Whether an operation can be submitted here, by its kind and by what has become of the queue pair.
    pub(super) fn check_connected(&self, wr: &Wr) -> Result<(), OpError> {
        let qp_num = self.tie.qp_num;
        let (recv, reads) = match wr.kind {
            WrKind::Recv => (true, false),
            WrKind::Send(SendOp::Send { .. } | SendOp::Write { .. }) => (false, false),
            WrKind::Send(SendOp::Read { .. } | SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. }) => {
                (false, true)
            }
        };
        let not_here = |what, fix| Err(OpError::Refused { what, asked: 1, limit: 0, fix });
        if recv && self.srq.is_some() {
            return not_here(
                "a receive of a queue pair that receives by a shared receive queue",
                "submit it to the shared receive queue",
            );
        }
        if !recv && self.tie.shared {
            return not_here("a send on a shared receive queue", "submit it to a queue pair");
        }
        if recv {
            return Ok(());
        }
        if self.connected.load(Ordering::Acquire) {
            // A device waits for ever for a place that there is none of.
            return match reads && self.rd_atomic.load(Ordering::Acquire) == 0 {
                true => not_here(
                    "READs and atomics of a connection that was made for none",
                    "connect with ConnectOptions::max_rd_atomic above 0, by RDMA_CM at both sides",
                ),
                false => Ok(()),
            };
        }
        Err(if self.tie.cause.is_device_gone() {
            self.tie.cause.flushed(qp_num)
        } else if self.tie.is_closing() {
            self.tie.closed()
        } else {
            OpError::NotConnected { qp_num }
        })
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
        let result = {
            let object = self.object.read().unwrap_or_else(|e| e.into_inner());
            object.as_ref().map(|object| match object {
                _ if post.keys.is_empty() => Ok(()),
                Object::Shared(srq) => srq.post_recv(&post.recvs),
                Object::Pair(qp) if !post.recvs.is_empty() => qp.post_recv(&post.recvs),
                Object::Pair(qp) => qp.post_send(&post.sends),
            })
        };
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
            // Nothing completes by the failure of a shared receive queue.
            if self.with_qp(provider::Qp::state) != Some(QpState::Err) {
                return OpError::Post { qp_num, reason: error.source.to_string() };
            }
            self.send.cq.absorb_now();
            self.recv.cq.absorb_now();
        }
        if self.tie.is_closing() { self.tie.closed() } else { self.tie.cause.flushed(qp_num) }
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
