//! The driver of a channel: turns completions into protocol input and protocol output into work requests.
//!
//! One lock guards a channel's protocol, queues and waiters. It is never held across an await; wakers fire and
//! blocks go back to their pool after it is released. The reactor's task, a spinning future and a starting write all
//! drive by the same means, so that a small write is posted by the thread that asked for it and confirmed by the
//! thread that waits for it.
//!
//! ```text
//!   parts           what it is made of       after      what is done once the lock is released
//!   calls, writes   what the user asks       events     what the protocol tells
//!   progress        completions and posts, and the way down of the whole channel
//!   meter, spans    what is told of transfers to recorders and subscribers
//!   tasks           one a rail               rail, rails, comeback   a rail, its way down alone, and its way back
//! ```

mod after;
mod backlog;
mod calls;
mod closed;
mod comeback;
mod direct;
mod events;
#[cfg(test)]
mod full;
mod layers;
mod loans;
#[cfg(test)]
mod long_asks;
#[cfg(feature = "metrics")]
mod meter;
#[cfg(not(feature = "metrics"))]
#[path = "no_meter.rs"]
mod meter;
#[cfg(all(test, feature = "cuda"))]
mod outstay_tests;
mod parts;
mod progress;
mod rail;
mod rails;
mod reads;
mod spans;
mod tasks;
mod writes;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::background::Lane;
use crate::clock::later;
use crate::cuda::GpuTraffic;
use crate::kv::arrival::{Arrival, ArrivalError};
use crate::kv::blocks::Blocks;
use crate::kv::config::KvConfig;
use crate::kv::exposure::{Exposed, PoolExposure};
use crate::kv::layout::Layout;
use crate::kv::lock;
use crate::kv::parts::Held;
use crate::kv::pass::Pass;
use crate::kv::path::{QpReport, RailFate};
use crate::kv::path_check::Carried;
use crate::kv::pool::KvPool;
use crate::kv::proto::{Cause, Connection, Ledger, Outcome, Resolution, Token, TransferId};
use crate::kv::queues::Queue;
use crate::kv::read_choice::Facts;
use crate::kv::stats::ChannelStats;
use crate::kv::targets::PeerPool;
use crate::kv::waiting::Waiting;
use crate::provider::{self, Cqe};
use crate::reactor::DriverHandle;

use rail::Rail;
use rails::Job;

pub use closed::{ChannelClosed, MessageError};
pub(crate) use parts::{Parts, RailHalf, RailParts};

use after::After;
use backlog::Backlog;
use loans::Loans;
use meter::Meter;
use reads::Reads;

/// Completions that one poll takes.
const BATCH: usize = 64;
/// Polls that one slice makes before it yields (R9).
const POLLS: usize = 8;
/// How long a slice may go on before it yields all the same: one poll of a transport in software moves as much as a megabyte, and
/// every other channel of the runtime waits meanwhile.
const SLICE: Duration = Duration::from_micros(200);
/// WRITEs of pages that a turn makes and posts, one after the other: each takes some ten microseconds.
const TABLES: usize = 8;
/// How long flushed work requests may take to come back after the queue pairs were put in the error state. Drivers
/// flush at once; a queue pair that has not by then is destroyed all the same, which frees its buffers too.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// A connected channel's working parts.
pub(crate) struct KvDriver {
    inner: Mutex<Inner>,
    config: KvConfig,
    pool: KvPool,
    peer: PeerPool,
    connection_id: u64,
    /// What decides how reads are done.
    reading: Facts,
    local_epoch: u64,
    peer_epoch: u64,
    pass: Pass,
    /// What of the pool the peer may reach, where a device asks.
    exposure: Option<Arc<PoolExposure>>,
    runtime: Handle,
    /// Where plans are made that take long.
    planner: Arc<Lane>,
    /// One a rail.
    tasks: Vec<OnceLock<DriverHandle>>,
    /// Called once when the channel has ended and its queue pairs are gone, with what must outlive it.
    on_end: Mutex<Option<OnEnd>>,
    /// Itself, for the thread that destroys its queue pairs.
    me: Weak<Self>,
}

pub(crate) type OnEnd = Box<dyn FnOnce(Ledger) + Send>;

struct Inner {
    conn: Option<Connection>,
    // Queue pairs go before what they use: the connections under them, and the completion queues (R7).
    /// Of all rails, by their numbers in the protocol.
    queues: Vec<Queue>,
    rails: Vec<Rail>,
    cqes: Box<[Cqe; BATCH]>,
    /// What had come and may not have been taken.
    backlog: Backlog,
    /// Work requests that have failed, by rail: dealt with after what had come in before, on whichever rail.
    failed: Vec<(usize, Cqe)>,
    /// Tokens of work requests that could not be posted. Kept for its memory.
    unposted: Vec<Token>,
    /// A rail that fails ends the channel.
    strict: bool,
    /// This side has connected the channel, and brings rails back.
    client: bool,
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
    meter: Meter,
    /// What the task sleeps until.
    scheduled: Option<Instant>,
    /// How many calls have let go of the lock and not yet given back the blocks, or the ledger, that they took along.
    returning: usize,
    /// How many jobs are destroying queue pairs on another thread.
    destroying: usize,
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
    blocks: Held,
    /// Where the device asks. One for all layers: they are exposed until the last of them has ended.
    exposed: Option<Arc<Exposed>>,
    /// Of the layers that it is for.
    bytes: u64,
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
    /// The transfers of all layers, where it writes one of several: they land together or not at all.
    fellows: Option<Range<u64>>,
    bytes: u64,
    descriptors: u64,
    wrs: u64,
    attempts: u32,
    span: tracing::Span,
}

impl KvDriver {
    /// The task that drives a rail, once it has been started.
    pub(crate) fn set_task(&self, rail: usize, task: DriverHandle) {
        if let Some(slot) = self.tasks.get(rail) {
            let _ = slot.set(task);
        }
        self.nudge();
    }

    pub(crate) fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The layout of the peer's pool.
    pub(crate) fn peer_layout(&self) -> &Layout {
        &self.peer.layout
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }

    fn nudge(&self) {
        self.tasks.iter().filter_map(OnceLock::get).for_each(DriverHandle::nudge);
    }

    /// Destroys queue pairs: those of a rail, or all that there are, which is the end. Blocks.
    fn destroy(&self, job: Job, queue_pairs: Vec<provider::Qp>) {
        queue_pairs.into_iter().for_each(provider::Qp::destroy);
        self.locked(|inner, after| {
            inner.destroying -= 1;
            inner.job_done(job, Instant::now(), after);
        });
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
        if !self.config.spin.is_zero() {
            let end = later(Instant::now(), self.config.spin);
            loop {
                let now = Instant::now();
                let out = self.locked(|inner, after| {
                    if let Some(out) = ready(inner, after, None) {
                        return Some(out);
                    }
                    inner.poll_once(None, now, after);
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

    /// What went to and from memory of GPUs.
    pub(crate) fn gpu_traffic(&self) -> GpuTraffic {
        let inner = lock(&self.inner);
        spans::gpu_traffic_of(&inner.queues, &inner.rails)
    }

    /// One look at the queue pairs before anybody has the channel: a peer that has connected by now is let in, so that the path is
    /// known from the beginning (K9).
    pub(crate) fn look(&self) {
        self.locked(|inner, after| {
            inner.poll_once(None, Instant::now(), after);
        });
    }

    /// What became of each rail.
    pub(crate) fn rail_reports(&self) -> Vec<RailFate> {
        lock(&self.inner).rails.iter().map(Rail::fate).collect()
    }

    /// What was carried so far, to be held against the device's counters.
    pub(crate) fn carried(&self) -> Carried {
        let inner = lock(&self.inner);
        let mut carried = Carried {
            // What the peer has read has left here, and what we have read has come, by whichever way.
            landed: inner.stats.landed_bytes.saturating_add(inner.stats.served_bytes),
            arrived: inner.stats.arrived_bytes.saturating_add(inner.stats.read_bytes),
            ..Carried::default()
        };
        for report in inner.queues.iter().map(Queue::report) {
            carried.messages_sent += report.writes + report.reads + report.controls;
            carried.messages_received += report.received;
        }
        carried
    }
}
