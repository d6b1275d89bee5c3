//! The driver of a channel: turns completions into protocol input and protocol output into work requests.
//!
//! One lock guards a channel's protocol, queues and waiters. It is never held across an await; wakers fire and
//! blocks go back to their pool after it is released. The reactor's task, a spinning future and a starting write all
//! drive by the same means, so that a small write is posted by the thread that asked for it and confirmed by the
//! thread that waits for it.

mod calls;
mod closed;
mod events;
mod loans;
mod progress;
mod reads;
mod writes;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::background;
use crate::clock::later;
use crate::connect::Lines;
use crate::kv::arrival::{Arrival, ArrivalError};
use crate::kv::blocks::Blocks;
use crate::kv::lock;
use crate::kv::path::QpReport;
use crate::kv::path_check::Carried;
use crate::kv::pool::KvPool;
use crate::kv::proto::{Cause, Connection, Ledger, Outcome, Resolution, TransferId};
use crate::kv::queues::Queue;
use crate::kv::read_choice::Facts;
use crate::kv::stats::ChannelStats;
use crate::kv::targets::PeerPool;
use crate::kv::waiting::Waiting;
use crate::provider::events::{Affected, Enrolled, Harm};
use crate::provider::{self, Cq, Cqe};
use crate::reactor::{Drive, DriverHandle, Step};

pub use closed::{ChannelClosed, MessageError};

use loans::{Asked, Loans};
use reads::Reads;

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
    /// What decides how reads are done.
    reading: Facts,
    local_epoch: u64,
    peer_epoch: u64,
    runtime: Handle,
    task: OnceLock<DriverHandle>,
    /// Waits for the connection manager's word that the peer is gone.
    watch: OnceLock<AbortHandle>,
    /// Called once when the channel has ended and its queue pairs are gone, with what must outlive it.
    on_end: Mutex<Option<OnEnd>>,
    /// Itself, for the thread that destroys its queue pairs.
    me: Weak<Self>,
    /// Its place among those who hear of the device's events.
    enrolled: OnceLock<Enrolled>,
}

pub(crate) type OnEnd = Box<dyn FnOnce(Ledger) + Send>;

struct Inner {
    conn: Option<Connection>,
    // Queue pairs go before what they use: the connections under them, and the completion queue (R7).
    queues: Vec<Queue>,
    lines: Option<Arc<Lines>>,
    /// The connection manager says that the peer is gone.
    hung_up: bool,
    cq: Cq,
    cqes: Box<[Cqe; BATCH]>,
    writes: HashMap<TransferId, WriteEntry>,
    /// Blocks that the peer may be writing to, by grant. In order, so that their ends are told in order.
    grants: BTreeMap<u64, Granted>,
    reads: Reads,
    loans: Loans,
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
    /// How many calls have let go of the lock and not yet given back the blocks, or the ledger, that they took along.
    returning: usize,
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
    /// The queue pairs are being destroyed, on a thread that waits for the driver.
    Destroying {
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
    /// What the peer has asked to be written to it.
    asked: Vec<Asked>,
    ledger: Option<Ledger>,
    /// Queue pairs whose destruction blocks.
    destroy: Vec<provider::Qp>,
    lines: Option<Arc<Lines>>,
    nudge: bool,
}

impl After {
    /// Whether there is something that a user who hears of the end expects to be back in its place.
    fn returns(&self) -> bool {
        !(self.blocks.is_empty() && self.sources.is_empty() && self.asked.is_empty()) || self.ledger.is_some()
    }
}

pub(crate) struct Parts {
    pub(crate) conn: Connection,
    pub(crate) cq: Cq,
    pub(crate) queues: Vec<Queue>,
    pub(crate) lines: Arc<Lines>,
    pub(crate) peer: PeerPool,
    /// What the ledger of `conn` has in doubt.
    pub(crate) doubts: Vec<TransferId>,
    pub(crate) pool: KvPool,
    pub(crate) spin: Duration,
    pub(crate) deadline: Duration,
    pub(crate) connection_id: u64,
    pub(crate) reading: Facts,
    pub(crate) local_epoch: u64,
    pub(crate) peer_epoch: u64,
    pub(crate) on_end: OnEnd,
}
impl KvDriver {
    pub(crate) fn new(parts: Parts, runtime: Handle) -> Arc<Self> {
        let events = parts.pool.pd().device().provider().events().clone();
        let ids = parts.queues.iter().filter_map(Queue::qp).map(provider::Qp::id);
        let ids = ids.chain([parts.cq.id()]).collect();
        let this = Arc::new_cyclic(|me| Self {
            inner: Mutex::new(Inner {
                conn: Some(parts.conn),
                queues: parts.queues,
                lines: Some(parts.lines),
                hung_up: false,
                cq: parts.cq,
                cqes: Box::new([Cqe::default(); BATCH]),
                writes: HashMap::new(),
                grants: BTreeMap::new(),
                reads: Reads::default(),
                loans: Loans::default(),
                arrivals: VecDeque::new(),
                messages: VecDeque::new(),
                doubts: parts.doubts.into_iter().map(|id| (id, None)).collect(),
                waiting: Waiting::default(),
                state: State::Open,
                first_cause: None,
                closing: false,
                stats: ChannelStats::default(),
                scheduled: None,
                returning: 0,
                batch: Vec::new(),
            }),
            spin: parts.spin,
            deadline: parts.deadline,
            pool: parts.pool,
            peer: parts.peer,
            connection_id: parts.connection_id,
            reading: parts.reading,
            local_epoch: parts.local_epoch,
            peer_epoch: parts.peer_epoch,
            runtime,
            task: OnceLock::new(),
            watch: OnceLock::new(),
            on_end: Mutex::new(Some(parts.on_end)),
            me: me.clone(),
            enrolled: OnceLock::new(),
        });
        let _ = this.enrolled.set(events.enrol(ids, &this));
        this
    }

    /// The task that drives this, once it has been started.
    pub(crate) fn set_task(&self, task: DriverHandle) {
        let _ = self.task.set(task);
        self.nudge();
    }

    /// Ends the channel when the connection manager says that the peer is gone.
    pub(crate) fn watch_lines(self: &Arc<Self>) {
        let Some(lines) = lock(&self.inner).lines.clone() else { return };
        if lines.is_empty() {
            return;
        }
        let driver = Arc::downgrade(self);
        let watch = self.runtime.spawn(async move {
            lines.any_ended().await;
            if let Some(driver) = driver.upgrade() {
                lock(&driver.inner).hung_up = true;
                driver.nudge();
            }
        });
        let _ = self.watch.set(watch.abort_handle());
        // It may have ended meanwhile, when there was nothing to abort.
        if lock(&self.inner).lines.is_none() {
            watch.abort();
        }
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
            inner.returning += usize::from(after.returns());
            out
        };
        let returns = after.returns();
        let After { mut wakers, replaced, blocks, sources, asked, ledger, destroy, lines, nudge } = after;
        if nudge {
            self.nudge();
        }
        // Whoever calls holds an `Arc` of it.
        if !destroy.is_empty()
            && let Some(this) = self.me.upgrade()
        {
            background::run(move || this.destroy(destroy));
        }
        // The queue pairs are gone: nobody needs to be told of their end any more.
        if lines.is_some()
            && let Some(watch) = self.watch.get()
        {
            watch.abort();
        }
        drop(lines);
        // What must not be lost comes before what is the user's code.
        if let Some(ledger) = ledger {
            let on_end = lock(&self.on_end).take();
            if let Some(on_end) = on_end {
                on_end(ledger);
            }
        }
        drop((blocks, sources));
        if !asked.is_empty() {
            wakers.drain(..).for_each(Waker::wake);
            self.serve(asked);
        }
        if returns {
            lock(&self.inner).returned(&mut wakers);
        }
        wakers.into_iter().for_each(Waker::wake);
        drop(replaced);
        out
    }

    /// Destroys its queue pairs, and ends. Blocks.
    fn destroy(&self, queue_pairs: Vec<provider::Qp>) {
        queue_pairs.into_iter().for_each(provider::Qp::destroy);
        self.locked(|inner, after| inner.destroyed(Instant::now(), after));
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
            }
        }
        match self.locked(|inner, after| ready(inner, after, Some(cx.waker()))) {
            Some(out) => Poll::Ready(out),
            None => Poll::Pending,
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

    /// Each queue pair, and why it is carried as it is.
    pub(crate) fn reports(&self) -> Vec<(QpReport, String)> {
        let inner = lock(&self.inner);
        let report = |queue: &Queue| {
            let (transport, reason) = queue.path();
            (QpReport { transport, ..queue.report() }, reason)
        };
        inner.queues.iter().map(report).collect()
    }

    /// One look at the queue pairs before anybody has the channel: a peer that has connected by now is let in, so that the path is
    /// known from the beginning (K9).
    pub(crate) fn look(&self) {
        self.locked(|inner, after| {
            inner.poll_once(Instant::now(), after);
        });
    }

    /// What was carried so far, to be held against the device's counters.
    pub(crate) fn carried(&self) -> Carried {
        let inner = lock(&self.inner);
        let mut carried = Carried {
            // What the peer has read has left here, and what we have read has come, by whichever way.
            landed: inner.stats.landed_bytes + inner.stats.served_bytes,
            arrived: inner.stats.arrived_bytes + inner.stats.read_bytes,
            ..Carried::default()
        };
        for report in inner.queues.iter().map(Queue::report) {
            carried.messages_sent += report.writes + report.reads + report.controls;
            carried.messages_received += report.received;
        }
        carried
    }
}

impl Affected for KvDriver {
    fn harmed(self: Arc<Self>, harm: Harm) {
        let now = Instant::now();
        self.locked(|inner, after| match harm {
            Harm::Object { event, .. } => {
                // What has completed by now may say why.
                inner.poll_once(now, after);
                inner.fail(Cause::Transport, &format!("the device reported {event}"), now, after);
            }
            // Nothing may complete any more.
            Harm::DeviceGone => {
                inner.fail(Cause::DeviceGone, "", now, after);
                inner.end(now, after);
            }
        });
        self.nudge();
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

    fn channel_failed(&self, error: &io::Error) {
        let now = Instant::now();
        let gone = self.pool.pd().device().provider().events().is_gone();
        self.locked(|inner, after| {
            if gone {
                inner.fail(Cause::DeviceGone, "", now, after);
            } else {
                // What has completed by now may say why.
                inner.poll_once(now, after);
                inner.fail(Cause::Transport, &format!("the completion channel failed: {error}"), now, after);
            }
            inner.end(now, after);
        });
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
