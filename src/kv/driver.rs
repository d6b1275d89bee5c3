//! The driver of a channel: turns completions into protocol input and protocol output into work requests.
//!
//! One lock guards a channel's protocol, queues and waiters. It is never held across an await; wakers fire and
//! blocks go back to their pool after it is released. The reactor's task, a spinning future and a starting write all
//! drive by the same means, so that a small write is posted by the thread that asked for it and confirmed by the
//! thread that waits for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::arrival::{Arrival, ArrivalError};
use super::grant::{Binding, Grant};
use super::lock;
use super::pool::{Blocks, KvPool};
use super::proto::{
    AbortReason, Cause, Connection, Event, GrantRef, Ledger, MessageRefused, Outcome, Reason, Received,
    Refused, Resolution, Transmitted,
};
use super::proto::{TransferId, WriteRequest as ProtoWrite};
use super::queues::{Outbox, Queue};
use super::stats::ChannelStats;
use super::targets::{self, PeerPool, Planned};
use super::waiting::{Place, Wait, Waiting};
use super::write::{Landed, Started, WriteError, WriteRequest};
use crate::clock::later;
use crate::provider::{Armed, Cq, Cqe, WcOpcode, WcStatus};
use crate::reactor::{Drive, DriverHandle, Step};
use crate::ring::WrId;

/// Completions that one poll takes.
const BATCH: usize = 64;
/// Polls that one slice makes before it yields (R9).
const POLLS: usize = 8;
/// How long flushed work requests may take to come back after the queue pairs were put in the error state. Drivers
/// flush at once; a queue pair that has not by then is destroyed all the same, which frees its buffers too.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// A connected channel's working parts.
pub(crate) struct KvDriver {
    inner: Mutex<Inner>,
    spin: Duration,
    deadline: Duration,
    pool: KvPool,
    peer: PeerPool,
    connection_id: u64,
    local_epoch: u64,
    peer_epoch: u64,
    runtime: Handle,
    task: OnceLock<DriverHandle>,
    /// Called once when the channel has ended and its queue pairs are gone, with what must outlive it.
    on_end: Mutex<Option<OnEnd>>,
}

pub(crate) type OnEnd = Box<dyn FnOnce(Ledger) + Send>;

struct Inner {
    conn: Option<Connection>,
    // Queue pairs go before the completion queue that they use (R7).
    queues: Vec<Queue>,
    cq: Cq,
    cqes: Box<[Cqe; BATCH]>,
    writes: HashMap<TransferId, WriteEntry>,
    /// Blocks that the peer may be writing to, by grant. In order, so that their ends are told in order.
    grants: BTreeMap<u64, Granted>,
    arrivals: VecDeque<Result<Arrival, ArrivalError>>,
    messages: VecDeque<Vec<u8>>,
    /// Transfers of earlier connections that were in doubt, and what became of them.
    doubts: HashMap<TransferId, Option<Resolution>>,
    waiting: Waiting,
    state: State,
    /// The device's own words on the failure that came first (R6).
    first_cause: Option<String>,
    closing: bool,
    stats: ChannelStats,
    /// What the task sleeps until.
    scheduled: Option<Instant>,
    batch: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Queue pairs are in the error state; their flushes are being counted.
    Draining {
        since: Instant,
        cause: Cause,
    },
    /// The queue pairs are destroyed.
    Ended {
        cause: Cause,
    },
}

/// Blocks that were granted.
struct Granted {
    blocks: Blocks,
    /// Their arrival has ended; they are in quarantine.
    aborted: bool,
}

struct WriteEntry {
    source: Arc<Blocks>,
    started: Instant,
    planned: Duration,
    local: Option<Instant>,
    landed: Option<Instant>,
    outcome: Option<Outcome>,
    released: bool,
    waker: Option<Waker>,
    /// Nobody waits: forget it at its end.
    detached: bool,
    bytes: u64,
    descriptors: u64,
    wrs: u64,
}

/// What is to be done after the lock is released.
#[derive(Default)]
struct After {
    wakers: Vec<Waker>,
    /// Wakers that were replaced or are not needed any more: only dropped, which is the user's code too.
    replaced: Vec<Waker>,
    blocks: Vec<Blocks>,
    sources: Vec<Arc<Blocks>>,
    ledger: Option<Ledger>,
    nudge: bool,
}

/// How a channel has ended, or why it does not take something.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the channel has ended: {reason}")]
pub struct ChannelClosed {
    pub(crate) reason: String,
    pub(crate) cause: Cause,
}

impl ChannelClosed {
    /// Whether both sides had closed it, with nothing left undone.
    pub fn is_graceful(&self) -> bool {
        self.cause == Cause::Closed
    }

    /// Why it ended. The text of this error also has the device's words, where there are any.
    pub fn cause(&self) -> Cause {
        self.cause
    }
}

/// Why a message was not sent.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Longer than the limit.
    #[error("a message of {asked} bytes, the limit is {limit}; split it, or write it as blocks")]
    TooLong {
        /// Its length.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// The channel has ended.
    #[error(transparent)]
    Closed(#[from] ChannelClosed),
}

pub(crate) struct Parts {
    pub(crate) conn: Connection,
    pub(crate) cq: Cq,
    pub(crate) queues: Vec<Queue>,
    pub(crate) peer: PeerPool,
    /// What the ledger of `conn` has in doubt.
    pub(crate) doubts: Vec<TransferId>,
    pub(crate) pool: KvPool,
    pub(crate) spin: Duration,
    pub(crate) deadline: Duration,
    pub(crate) connection_id: u64,
    pub(crate) local_epoch: u64,
    pub(crate) peer_epoch: u64,
    pub(crate) on_end: OnEnd,
}

impl KvDriver {
    pub(crate) fn new(parts: Parts, runtime: Handle) -> Self {
        Self {
            inner: Mutex::new(Inner {
                conn: Some(parts.conn),
                queues: parts.queues,
                cq: parts.cq,
                cqes: Box::new([Cqe::default(); BATCH]),
                writes: HashMap::new(),
                grants: BTreeMap::new(),
                arrivals: VecDeque::new(),
                messages: VecDeque::new(),
                doubts: parts.doubts.into_iter().map(|id| (id, None)).collect(),
                waiting: Waiting::default(),
                state: State::Open,
                first_cause: None,
                closing: false,
                stats: ChannelStats::default(),
                scheduled: None,
                batch: Vec::new(),
            }),
            spin: parts.spin,
            deadline: parts.deadline,
            pool: parts.pool,
            peer: parts.peer,
            connection_id: parts.connection_id,
            local_epoch: parts.local_epoch,
            peer_epoch: parts.peer_epoch,
            runtime,
            task: OnceLock::new(),
            on_end: Mutex::new(Some(parts.on_end)),
        }
    }

    /// The task that drives this, once it has been started.
    pub(crate) fn set_task(&self, task: DriverHandle) {
        let _ = self.task.set(task);
        self.nudge();
    }

    pub(crate) fn pool(&self) -> &KvPool {
        &self.pool
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }

    fn nudge(&self) {
        if let Some(task) = self.task.get() {
            task.nudge();
        }
    }

    /// Runs `f` under the lock, then does what had to wait for its release.
    fn locked<T>(&self, f: impl FnOnce(&mut Inner, &mut After) -> T) -> T {
        let mut after = After::default();
        let out = {
            let mut inner = lock(&self.inner);
            let out = f(&mut inner, &mut after);
            // A timeout that is nearer than what the task sleeps for: it must look again.
            if let Some(next) = inner.next_timeout()
                && inner.scheduled.is_none_or(|at| next < at)
            {
                inner.scheduled = Some(next);
                after.nudge = true;
            }
            out
        };
        let After { wakers, replaced, blocks, sources, ledger, nudge } = after;
        if nudge {
            self.nudge();
        }
        // What must not be lost comes before what is the user's code. Who is woken finds the blocks in their pool.
        if let Some(ledger) = ledger {
            let on_end = lock(&self.on_end).take();
            if let Some(on_end) = on_end {
                on_end(ledger);
            }
        }
        drop((blocks, sources));
        wakers.into_iter().for_each(Waker::wake);
        drop(replaced);
        out
    }

    /// Polls `ready` under the lock; while it has nothing, drives for up to the spin budget, then leaves the waker.
    ///
    /// Spinning polls without arming. The task may sleep meanwhile: what it relies on, its arm, is not used up by that
    /// without an event that wakes it.
    fn wait<T>(
        &self,
        cx: &Context<'_>,
        mut ready: impl FnMut(&mut Inner, &mut After, Option<&Waker>) -> Option<T>,
    ) -> Poll<T> {
        if !self.spin.is_zero() {
            let end = later(Instant::now(), self.spin);
            loop {
                let now = Instant::now();
                let out = self.locked(|inner, after| {
                    if let Some(out) = ready(inner, after, None) {
                        return Some(out);
                    }
                    inner.poll_once(now, after);
                    ready(inner, after, None)
                });
                if let Some(out) = out {
                    return Poll::Ready(out);
                }
                if now >= end {
                    break;
                }
                std::hint::spin_loop();
            }
        }
        match self.locked(|inner, after| ready(inner, after, Some(cx.waker()))) {
            Some(out) => Poll::Ready(out),
            None => Poll::Pending,
        }
    }

    /// Starts a write. `waiter` is told when there is room, if there is none.
    pub(super) fn start_write(
        &self,
        request: Box<WriteRequest>,
        waiter: Option<(&Waker, &mut Place)>,
    ) -> Started {
        let started = Instant::now();
        // Long lists take milliseconds: planned without the lock, so that the channel goes on meanwhile (R9).
        let checked = self.check(&request).and_then(|()| targets::plan(&request, &self.pool, &self.peer));
        self.locked(|inner, after| {
            let started = match checked {
                Ok(plan) => {
                    let deadline = later(started, request.deadline.unwrap_or(self.deadline));
                    inner.start_write(request, plan, deadline, waiter, started, after)
                }
                Err(error) => Started::Refused(error, request.source),
            };
            inner.stats.refused += u64::from(matches!(started, Started::Refused(..)));
            started
        })
    }

    /// What needs no lock: epochs, pool, positions.
    fn check(&self, request: &WriteRequest) -> Result<(), WriteError> {
        let grant = &request.grant;
        if !request.source.pool().same(&self.pool) {
            return Err(WriteError::ForeignBlocks);
        }
        if grant.owner_epoch() != self.peer_epoch {
            return Err(WriteError::PeerRestarted { grant: grant.owner_epoch(), peer: self.peer_epoch });
        }
        if grant.bound_epoch() != self.local_epoch {
            return Err(WriteError::NotOurs { bound: grant.bound_epoch(), ours: self.local_epoch });
        }
        if grant.connection() != self.connection_id {
            return Err(WriteError::StaleGrant { grant: grant.id() });
        }
        Ok(())
    }

    pub(crate) fn poll_write(
        &self,
        id: TransferId,
        waker: &Waker,
    ) -> Poll<(Result<Landed, WriteError>, Arc<Blocks>)> {
        self.wait(&Context::from_waker(waker), |inner, after, waker| inner.take_write(id, waker, after))
    }

    /// The future of a write was dropped.
    pub(crate) fn abandon(&self, id: TransferId) {
        let now = Instant::now();
        self.locked(|inner, after| {
            let Some(entry) = inner.writes.get_mut(&id) else { return };
            entry.detached = true;
            after.replaced.extend(entry.waker.take());
            if entry.outcome.is_none()
                && let Some(conn) = &mut inner.conn
            {
                conn.abort(id, now);
                inner.turn(now, after);
            }
            inner.forget_finished(id, after);
        });
    }

    pub(crate) fn detach(&self, id: TransferId) {
        self.locked(|inner, after| {
            if let Some(entry) = inner.writes.get_mut(&id) {
                entry.detached = true;
                after.replaced.extend(entry.waker.take());
            }
            inner.forget_finished(id, after);
        });
    }

    pub(crate) fn grant(&self, blocks: Blocks) -> Result<Grant, (ChannelClosed, Blocks)> {
        self.locked(|inner, _| {
            let closed = inner.closed();
            match (&mut inner.conn, closed) {
                (Some(conn), None) => {
                    let layout = self.pool.layout();
                    let bytes = layout.block_bytes() * u64::from(layout.layers()) * u64::from(blocks.len());
                    let id = conn.issue_grant(bytes);
                    let binding = Binding {
                        owner: self.local_epoch,
                        bound: self.peer_epoch,
                        connection: self.connection_id,
                    };
                    // A claim holds each block once, and fewer than there are u32s.
                    let grant =
                        Grant::from_runs(binding, id, blocks.runs().to_vec()).expect("a claim is disjoint");
                    inner.grants.insert(id, Granted { blocks, aborted: false });
                    Ok(grant)
                }
                (_, closed) => Err((closed.unwrap_or_else(ended_unknown), blocks)),
            }
        })
    }

    pub(crate) fn revoke(&self, grant: u64) {
        let now = Instant::now();
        self.locked(|inner, after| {
            if inner.grants.contains_key(&grant)
                && let Some(conn) = &mut inner.conn
            {
                conn.revoke_grant(grant, now);
                inner.turn(now, after);
            }
        });
    }

    pub(super) fn poll_arrival(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
    ) -> Poll<Result<Arrival, ArrivalError>> {
        self.wait(cx, |inner, after, waker| {
            if let Some(arrival) = inner.arrivals.pop_front() {
                return Some(arrival);
            }
            if let Some(closed) = inner.closed() {
                return Some(Err(closed.into()));
            }
            inner.enlist(Wait::Arrival, place, waker, after);
            None
        })
    }

    pub(super) fn poll_message(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
    ) -> Poll<Result<Vec<u8>, ChannelClosed>> {
        self.wait(cx, |inner, after, waker| {
            if let Some(message) = inner.messages.pop_front() {
                if let Some(conn) = &mut inner.conn {
                    conn.message_taken(message.len());
                    inner.turn(Instant::now(), after);
                }
                return Some(Ok(message));
            }
            if let Some(closed) = inner.closed() {
                return Some(Err(closed));
            }
            inner.enlist(Wait::Message, place, waker, after);
            None
        })
    }

    pub(super) fn poll_send_message(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
        message: &mut Option<Vec<u8>>,
    ) -> Poll<Result<(), MessageError>> {
        let now = Instant::now();
        let out = self.locked(|inner, after| {
            let closed = inner.closed();
            let Some(conn) = &mut inner.conn else {
                return Some(Err(closed.unwrap_or_else(ended_unknown).into()));
            };
            let bytes = message.take().unwrap_or_default();
            match conn.send_message(bytes) {
                Ok(()) => {
                    inner.turn(now, after);
                    Some(Ok(()))
                }
                Err((MessageRefused::TooLong { asked, limit }, _)) => {
                    Some(Err(MessageError::TooLong { asked, limit }))
                }
                Err((MessageRefused::Full { .. }, bytes)) => {
                    *message = Some(bytes);
                    inner.enlist(Wait::Room, place, Some(cx.waker()), after);
                    None
                }
                Err((MessageRefused::Closed, _)) => Some(Err(closed
                    .unwrap_or_else(|| ChannelClosed {
                        reason: "it is closing".to_owned(),
                        cause: Cause::Closed,
                    })
                    .into())),
            }
        });
        match out {
            Some(out) => Poll::Ready(out),
            None => Poll::Pending,
        }
    }

    pub(super) fn poll_resolution(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
        id: TransferId,
    ) -> Poll<Option<Resolution>> {
        self.wait(cx, |inner, after, waker| {
            match inner.doubts.get(&id) {
                None => return Some(None),
                Some(&Some(resolution)) => return Some(Some(resolution)),
                Some(None) if inner.closed().is_some() => return Some(None),
                Some(None) => {}
            }
            inner.enlist(Wait::Resolution, place, waker, after);
            None
        })
    }

    pub(super) fn poll_end(&self, cx: &Context<'_>, place: &mut Place) -> Poll<ChannelClosed> {
        self.locked(|inner, after| match inner.closed() {
            Some(closed) => Poll::Ready(closed),
            None => {
                inner.enlist(Wait::End, place, Some(cx.waker()), after);
                Poll::Pending
            }
        })
    }

    /// A future that may have waited is dropped.
    pub(super) fn leave(&self, place: &mut Place) {
        if !place.is_new() {
            self.locked(|inner, after| after.replaced.extend(inner.waiting.leave(place)));
        }
    }

    /// Starts a graceful end: what is in flight finishes, nothing new starts.
    pub(crate) fn close_by(&self, deadline: Instant) {
        let now = Instant::now();
        self.locked(|inner, after| {
            inner.closing = true;
            if let Some(conn) = &mut inner.conn {
                conn.close(deadline, now);
                inner.turn(now, after);
            }
        });
    }

    /// Ends the channel at once.
    pub(crate) fn kill(&self) {
        self.locked(|inner, after| inner.fail(Cause::Local, "killed", Instant::now(), after));
        self.nudge();
    }

    pub(crate) fn is_open(&self) -> bool {
        let inner = lock(&self.inner);
        inner.state == State::Open && !inner.closing
    }

    pub(crate) fn stats(&self) -> ChannelStats {
        lock(&self.inner).stats
    }

    pub(crate) fn reports(&self) -> Vec<super::path::QpReport> {
        lock(&self.inner).queues.iter().map(Queue::report).collect()
    }
}

impl Drive for KvDriver {
    fn drive(&self, now: Instant) -> Step {
        self.locked(|inner, after| inner.drive(now, after))
    }

    fn next_timeout(&self) -> Option<Instant> {
        let mut inner = lock(&self.inner);
        inner.scheduled = inner.next_timeout();
        inner.scheduled
    }

    fn runtime_gone(&self) {
        self.locked(|inner, after| {
            inner.fail(Cause::Local, RUNTIME_GONE, Instant::now(), after);
        });
    }

    fn is_drained(&self) -> bool {
        matches!(lock(&self.inner).state, State::Ended { .. })
    }

    fn abandon(&self) {
        self.locked(|inner, after| {
            inner.fail(Cause::Local, RUNTIME_GONE, Instant::now(), after);
            inner.end(Instant::now(), after);
        });
    }
}

const RUNTIME_GONE: &str =
    "the tokio runtime that drove it is gone; keep it alive until close().await has returned";

impl Inner {
    fn next_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Open => self.conn.as_ref().and_then(Connection::poll_timeout),
            State::Draining { since, .. } => Some(since + DRAIN_LIMIT),
            State::Ended { .. } => None,
        }
    }

    fn enlist(&mut self, wait: Wait, place: &mut Place, waker: Option<&Waker>, after: &mut After) {
        if let Some(waker) = waker {
            after.replaced.extend(self.waiting.enlist(wait, place, waker));
        }
    }

    fn wake(&mut self, wait: Wait, after: &mut After) {
        self.waiting.take(wait, &mut after.wakers);
    }

    /// How the channel ended; `None` while it has not.
    fn closed(&self) -> Option<ChannelClosed> {
        let State::Ended { cause } = self.state else { return None };
        let graceful = cause == Cause::Closed;
        let reason = match &self.first_cause {
            Some(words) if !graceful => format!("{cause}: {words}"),
            _ => cause.to_string(),
        };
        Some(ChannelClosed { reason, cause })
    }

    /// One bounded slice, which ends armed or with more to do.
    fn drive(&mut self, now: Instant, after: &mut After) -> Step {
        let mut armed = false;
        for _ in 0..POLLS {
            let busy = self.poll_once(now, after);
            if self.is_ended() {
                return Step::Done;
            }
            if !after.wakers.is_empty() {
                // Whoever was woken goes first: what it posts takes along what is due.
                return Step::More;
            }
            if busy {
                armed = false;
                continue;
            }
            // Poll, arm, poll again (R3). On a software transport the second poll may have stopped in the middle of I/O
            // that raises no event any more; arming once more asks for that too.
            match self.cq.arm() {
                Ok(Armed::More) => return Step::More,
                Ok(Armed::Armed) if armed => return Step::Idle,
                Ok(Armed::Armed) => armed = true,
                Err(error) => self.fail(Cause::Transport, &format!("arming the queue: {error}"), now, after),
            }
        }
        Step::More
    }

    fn is_ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Takes one batch of completions, and does what follows. False when there was nothing to do.
    fn poll_once(&mut self, now: Instant, after: &mut After) -> bool {
        if self.is_ended() {
            return false;
        }
        let taken = match self.cq.poll(&mut self.cqes[..]) {
            Ok(taken) => taken,
            Err(error) => {
                self.fail(Cause::Transport, &format!("polling the queue: {error}"), now, after);
                0
            }
        };
        for n in 0..taken {
            let cqe = self.cqes[n];
            self.completion(&cqe, now, after);
        }
        let more = self.turn(now, after);
        if taken > 0 {
            // What was acknowledged or has finished has made room.
            self.wake(Wait::Room, after);
        }
        taken > 0 || more
    }

    fn completion(&mut self, cqe: &Cqe, now: Instant, after: &mut After) {
        let id = WrId::decode(cqe.wr_id);
        // By generation, never by queue pair number (R5).
        let Some(qp) = self.queues.iter().position(|q| q.generation() == id.qp_generation) else { return };
        let ok = cqe.status == WcStatus::Success;
        if !ok && cqe.status != WcStatus::Flushed {
            let words = format!("queue pair {}: {} (vendor code {})", cqe.qp_num, cqe.status, cqe.vendor_err);
            self.fail(Cause::Transport, &words, now, after);
        } else if !ok {
            let words = "the connection to the peer has broken, and receives were flushed";
            self.fail(Cause::Transport, words, now, after);
        }
        let Some(conn) = &mut self.conn else { return };
        if !id.recv {
            self.queues[qp].complete(id.key, ok, |token, ok| conn.handle_sent(token, ok, now));
            return;
        }
        let queue = &mut self.queues[qp];
        queue.take_recv();
        if !ok {
            return;
        }
        let received = match cqe.opcode {
            WcOpcode::RecvWriteWithImm => {
                let _ = queue.received(id.key.index, 0);
                cqe.imm.map(Received::Imm)
            }
            _ => match queue.received(id.key.index, cqe.byte_len) {
                Some(bytes) => {
                    self.batch.clear();
                    self.batch.extend_from_slice(bytes);
                    Some(Received::Bytes(&self.batch))
                }
                None => None,
            },
        };
        // The receive goes back before the credit for it can leave (it leaves in `turn`).
        queue.repost(id.key.index);
        let result = match received {
            Some(received) => conn.handle_recv(qp, received, now),
            None => Ok(()),
        };
        if let Err(violation) = result {
            self.fail(Cause::Violation(violation), "the peer broke the protocol", now, after);
        }
    }

    /// Timeouts, posting, events. True when it stopped with work left.
    fn turn(&mut self, now: Instant, after: &mut After) -> bool {
        let mut more = false;
        if self.state == State::Open {
            if let Some(conn) = &mut self.conn
                && conn.poll_timeout().is_some_and(|at| at <= now)
            {
                conn.handle_timeout(now);
            }
            let mut failure = None;
            for queue in &mut self.queues {
                if let Err(error) = queue.flush_recvs() {
                    failure.get_or_insert_with(|| format!("posting a receive: {}", error.source));
                }
            }
            if let Some(conn) = &mut self.conn {
                more = conn.poll_transmit(now, &mut Outbox(&mut self.queues)) == Transmitted::More;
                for queue in &mut self.queues {
                    if let Err(error) = queue.flush(|token| conn.handle_sent(token, false, now)) {
                        failure.get_or_insert_with(|| format!("posting: {}", error.source));
                    }
                }
            }
            if let Some(words) = failure {
                self.fail(Cause::Transport, &words, now, after);
            }
        }
        self.events(now, after);
        if let State::Draining { since, .. } = self.state
            && (self.queues.iter().all(Queue::is_drained) || now >= since + DRAIN_LIMIT)
        {
            self.end(now, after);
        }
        more && self.state == State::Open
    }

    /// Puts every queue pair in the error state. The first call counts.
    fn fail(&mut self, cause: Cause, words: &str, now: Instant, after: &mut After) {
        if self.state != State::Open {
            return;
        }
        if let Some(conn) = &mut self.conn {
            conn.connection_lost(cause, now);
        }
        // Once both sides have said that they are done, either may destroy its queue pairs first: that is no failure.
        let graceful = self.conn.as_ref().is_some_and(Connection::is_closed);
        let cause = if graceful { Cause::Closed } else { cause };
        tracing::debug!(%cause, words, "channel ends");
        self.state = State::Draining { since: now, cause };
        self.first_cause.get_or_insert_with(|| words.to_owned());
        for queue in &self.queues {
            if let Some(qp) = queue.qp()
                && let Err(error) = qp.set_error()
            {
                tracing::warn!(%error, "a queue pair did not go to the error state; it is destroyed all the same");
            }
        }
        // What has arrived by now is told first; every other grant ends here. Its blocks stay until the queue pairs are
        // destroyed.
        self.events(now, after);
        let open: Vec<u64> = self.grants.iter().filter(|(_, g)| !g.aborted).map(|(&id, _)| id).collect();
        for grant in open {
            self.aborted(grant, AbortReason::ConnectionLost, after);
        }
        // The flushes are polled by the task.
        after.nudge = true;
    }

    /// The arrival under `grant` will not come (K4). Told once.
    fn aborted(&mut self, grant: u64, reason: AbortReason, after: &mut After) {
        if let Some(granted) = self.grants.get_mut(&grant)
            && !std::mem::replace(&mut granted.aborted, true)
        {
            self.stats.aborted += 1;
            self.arrivals.push_back(Err(ArrivalError::Aborted { grant, reason }));
            self.wake(Wait::Arrival, after);
        }
    }

    /// Destroys the queue pairs: from here on no late write reaches a block of ours, and no device reads one.
    fn end(&mut self, now: Instant, after: &mut After) {
        let State::Draining { cause, .. } = self.state else { return };
        if let Some(conn) = &mut self.conn {
            for queue in &mut self.queues {
                queue.destroy(|token| conn.handle_sent(token, false, now));
            }
            conn.fenced();
        }
        self.events(now, after);
        self.state = State::Ended { cause };
        // Whoever has come here, the task must see that it is over.
        after.nudge = true;
        after.ledger = self.conn.take().map(|conn| {
            let mut ledger = conn.into_ledger();
            // Their blocks go back to the pool now, so nobody may write to them under these grants any more. The sender
            // refuses them by their connection.
            ledger.burn_grants();
            ledger
        });
        after.blocks.extend(std::mem::take(&mut self.grants).into_values().map(|granted| granted.blocks));
        for wait in Wait::ALL {
            self.wake(wait, after);
        }
    }

    fn events(&mut self, now: Instant, after: &mut After) {
        while let Some(event) = self.conn.as_mut().and_then(Connection::poll_event) {
            match event {
                Event::Sent { id } => {
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.local.get_or_insert(now);
                    }
                }
                Event::Done { id, outcome, wrs } => {
                    self.stats.done(outcome);
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.outcome = Some(outcome);
                        entry.wrs = wrs;
                        entry.landed = Some(now);
                    }
                    self.wake(Wait::Room, after);
                    self.write_event(id, after);
                }
                Event::Released { id } => {
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.released = true;
                    }
                    self.write_event(id, after);
                }
                Event::Resolved { id, resolution } => {
                    self.doubts.insert(id, Some(resolution));
                    self.wake(Wait::Resolution, after);
                }
                Event::Arrived { transfer, grant, bytes, tag } => {
                    if let Some(Granted { blocks, .. }) = self.grants.remove(&grant) {
                        self.stats.arrived += 1;
                        self.arrivals.push_back(Ok(Arrival { grant, transfer, tag, bytes, blocks }));
                        self.wake(Wait::Arrival, after);
                    }
                }
                Event::Aborted { grant, reason } => self.aborted(grant, reason, after),
                Event::Freed { grant } => after.blocks.extend(self.grants.remove(&grant).map(|g| g.blocks)),
                Event::Message(bytes) => {
                    self.messages.push_back(bytes);
                    self.wake(Wait::Message, after);
                }
                Event::PeerClosed => self.closing = true,
                Event::Lost(cause) => self.fail(cause, "see the cause", now, after),
                Event::Closed => self.fail(Cause::Closed, "closed by both sides", now, after),
            }
        }
    }

    fn write_event(&mut self, id: TransferId, after: &mut After) {
        if let Some(entry) = self.writes.get_mut(&id)
            && entry.is_finished()
        {
            after.wakers.extend(entry.waker.take());
        }
        self.forget_finished(id, after);
    }

    fn forget_finished(&mut self, id: TransferId, after: &mut After) {
        if self.writes.get(&id).is_some_and(|e| e.detached && e.is_finished())
            && let Some(entry) = self.writes.remove(&id)
        {
            after.sources.push(entry.source);
        }
    }

    fn start_write(
        &mut self,
        request: Box<WriteRequest>,
        plan: Planned,
        deadline: Instant,
        waiter: Option<(&Waker, &mut Place)>,
        started: Instant,
        after: &mut After,
    ) -> Started {
        let refuse = |error, request: Box<WriteRequest>| Started::Refused(error, request.source);
        let closed = self.closed();
        let Some(conn) = &mut self.conn else {
            let reason = Reason::Lost(match self.state {
                State::Ended { cause } => cause,
                _ => Cause::Local,
            });
            debug_assert!(closed.is_some());
            return refuse(WriteError::Closed { reason }, request);
        };
        let grant = GrantRef {
            id: request.grant.id(),
            owner_epoch: request.grant.owner_epoch(),
            bound_epoch: request.grant.bound_epoch(),
            max_bytes: plan.granted_bytes,
        };
        let (bytes, descriptors) = (plan.plan.bytes(), plan.plan.descriptors());
        let write = ProtoWrite { grant, plan: plan.plan, tag: request.tag, deadline };
        let now = Instant::now();
        match conn.write(write, now) {
            Ok(id) => {
                self.writes.insert(
                    id,
                    WriteEntry {
                        source: request.source,
                        started,
                        planned: plan.took,
                        local: None,
                        landed: None,
                        outcome: None,
                        released: false,
                        waker: waiter.map(|(waker, _)| waker.clone()),
                        detached: false,
                        bytes,
                        descriptors,
                        wrs: 0,
                    },
                );
                if self.turn(now, after) {
                    after.nudge = true;
                }
                Started::Running(id)
            }
            Err(Refused::Full { .. }) => {
                if let Some((waker, place)) = waiter {
                    self.enlist(Wait::Room, place, Some(waker), after);
                }
                Started::Full(request)
            }
            Err(Refused::StaleGrant { grant }) => refuse(WriteError::StaleGrant { grant }, request),
            Err(Refused::PeerRestarted { grant, peer }) => {
                refuse(WriteError::PeerRestarted { grant, peer }, request)
            }
            Err(Refused::WrongPeer { bound, local }) => {
                refuse(WriteError::NotOurs { bound, ours: local }, request)
            }
            Err(Refused::OutOfRange { asked, granted }) => {
                refuse(WriteError::OutOfRange { what: "byte", index: asked, limit: granted }, request)
            }
            Err(Refused::Closed) => {
                let cause = match self.state {
                    State::Draining { cause, .. } | State::Ended { cause } => cause,
                    State::Open => Cause::Closed,
                };
                refuse(WriteError::Closed { reason: Reason::Lost(cause) }, request)
            }
        }
    }

    fn take_write(
        &mut self,
        id: TransferId,
        waker: Option<&Waker>,
        after: &mut After,
    ) -> Option<(Result<Landed, WriteError>, Arc<Blocks>)> {
        let entry = self.writes.get_mut(&id)?;
        if !entry.is_finished() {
            if let Some(waker) = waker
                && !entry.waker.as_ref().is_some_and(|w| w.will_wake(waker))
            {
                after.replaced.extend(entry.waker.replace(waker.clone()));
            }
            return None;
        }
        let entry = self.writes.remove(&id)?;
        let result = match entry.outcome? {
            Outcome::Landed => {
                let since = |at: Option<Instant>| at.map_or(Duration::ZERO, |at| at - entry.started);
                let landed = since(entry.landed);
                Ok(Landed {
                    transfer: id,
                    bytes: entry.bytes,
                    descriptors: entry.descriptors,
                    wrs: entry.wrs,
                    planned: entry.planned,
                    local: entry.local.map_or(landed, |at| at - entry.started),
                    landed,
                })
            }
            Outcome::NotDelivered(reason) => Err(WriteError::NotDelivered(reason)),
            Outcome::InDoubt(reason) => Err(WriteError::InDoubt { transfer: id, reason }),
        };
        Some((result, entry.source))
    }
}

impl WriteEntry {
    fn is_finished(&self) -> bool {
        self.outcome.is_some() && self.released
    }
}

fn ended_unknown() -> ChannelClosed {
    ChannelClosed { reason: "ended locally".to_owned(), cause: Cause::Local }
}
