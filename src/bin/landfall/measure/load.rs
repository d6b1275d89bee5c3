//! The load on a data channel: transfers one after the other or several at once, for a time, and what came of them.
//!
//! Times are those of the library: from the call to the last local completion, and to the confirmation. Transfers under way are
//! awaited in the order of their start.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use landfall::kv::{Blocks, Grant, KvChannel, Read, ReadRequest, ReadStrategy, Write, WriteRequest};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::histogram::{Histogram, Latency};
use super::lane;
use super::talk::{Op, ReadBy, Shape};
use crate::output::Error;

/// How long the peer may take to grant what is wanted.
const PATIENCE: Duration = Duration::from_secs(30);

/// What came of a load, in one direction.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    /// Work requests of this end, without control messages. 0 where the peer posts them, and for messages.
    pub(crate) wrs: u64,
    /// From the first start to the last landing: the confirmation of a write, the data of a read, the answer to a message.
    pub(crate) landed_seconds: f64,
    /// From the first start to the last local completion: of a write's work requests; of a message, that it is queued. A read has
    /// none before its data is here.
    pub(crate) local_seconds: Option<f64>,
    pub(crate) landed: Latency,
    pub(crate) local: Option<Latency>,
    /// From one to the other: how much too early a program is that takes local completion for the end.
    pub(crate) local_to_landed: Option<Latency>,
    /// How reads were done.
    pub(crate) method: Option<String>,
}

impl Report {
    /// 10^9 bytes a second that have landed.
    pub(crate) fn landed_gb_s(&self) -> f64 {
        self.bytes as f64 / self.landed_seconds / 1e9
    }

    /// The same, to local completion.
    pub(crate) fn local_gb_s(&self) -> Option<f64> {
        Some(self.bytes as f64 / self.local_seconds? / 1e9)
    }

    pub(crate) fn operations_per_s(&self) -> f64 {
        self.operations as f64 / self.landed_seconds
    }
}

/// One that is over.
struct Done {
    bytes: u64,
    wrs: u64,
    landed: Duration,
    local: Option<Duration>,
    method: Option<String>,
}

/// A transfer under way.
enum Transfer {
    Write(Write),
    Read(Read),
}

/// The blocks of a transfer, which it gives back.
pub(crate) enum Slot {
    Source(Arc<Blocks>),
    Target(Blocks),
}

impl Future for Transfer {
    type Output = (Result<Done, Error>, Slot);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Write(write) => Pin::new(write).poll(cx).map(|(result, source)| {
                let done = result.map(|l| Done {
                    bytes: l.bytes,
                    wrs: l.wrs,
                    landed: l.landed,
                    local: Some(l.local),
                    method: None,
                });
                (done.map_err(Error::from), Slot::Source(source))
            }),
            Self::Read(read) => Pin::new(read).poll(cx).map(|(result, target)| {
                let done = result.map(|r| Done {
                    bytes: r.bytes,
                    wrs: r.wrs,
                    landed: r.took,
                    local: None,
                    method: Some(r.method.to_string()),
                });
                (done.map_err(Error::from), Slot::Target(target))
            }),
        }
    }
}

/// Sums up.
#[derive(Default)]
struct Tally {
    operations: u64,
    bytes: u64,
    wrs: u64,
    landed: Histogram,
    local: Histogram,
    between: Histogram,
    last_landed: Duration,
    last_local: Duration,
    method: Option<String>,
}

impl Tally {
    /// `after` the first start, this one was started.
    fn add(&mut self, after: Duration, done: Done, seen: &AtomicU64) {
        self.operations += 1;
        self.bytes += done.bytes;
        self.wrs += done.wrs;
        self.landed.record(done.landed);
        self.last_landed = self.last_landed.max(after + done.landed);
        if let Some(local) = done.local {
            self.local.record(local);
            self.between.record(done.landed.saturating_sub(local));
            self.last_local = self.last_local.max(after + local);
        }
        self.method = done.method.or(self.method.take());
        seen.fetch_add(done.bytes, Ordering::Relaxed);
    }

    fn report(self) -> Result<Report, Error> {
        let local = self.local.latency();
        Ok(Report {
            operations: self.operations,
            bytes: self.bytes,
            wrs: self.wrs,
            landed_seconds: self.last_landed.as_secs_f64(),
            local_seconds: local.map(|_| self.last_local.as_secs_f64()),
            landed: self.landed.latency().ok_or("not one transfer was made in the time that there was")?,
            local,
            local_to_landed: self.between.latency(),
            method: self.method,
        })
    }
}

/// Where this end's transfers are started.
pub(crate) struct Starter {
    pub(crate) channel: KvChannel,
    pub(crate) shape: Shape,
    /// Queue pairs of the channel.
    pub(crate) qps: usize,
    pub(crate) slots: VecDeque<Slot>,
    pub(crate) grants: mpsc::Receiver<Grant>,
    pub(crate) answered: mpsc::Receiver<u64>,
}

impl Starter {
    /// Keeps `in_flight` transfers under way for `time`, then waits for the last. `seen` counts the bytes that have landed.
    pub(crate) async fn drive(
        &mut self,
        in_flight: u32,
        time: Duration,
        seen: &AtomicU64,
    ) -> Result<Report, Error> {
        match self.shape.op {
            Op::Write | Op::Read => self.transfers(in_flight as usize, time, seen).await,
            Op::Send => self.messages(u64::from(in_flight), time, seen).await,
        }
    }

    async fn transfers(
        &mut self,
        in_flight: usize,
        time: Duration,
        seen: &AtomicU64,
    ) -> Result<Report, Error> {
        let begin = Instant::now();
        let mut tally = Tally::default();
        let mut under_way: VecDeque<(Duration, Transfer)> = VecDeque::with_capacity(in_flight);
        loop {
            // One at least, however short the time.
            let more = begin.elapsed() < time || (tally.operations == 0 && under_way.is_empty());
            let room = more && under_way.len() < in_flight && !self.slots.is_empty();
            let grant = match under_way.front_mut() {
                None if !room => return tally.report(),
                None => Some(self.next_grant().await?),
                Some((after, transfer)) => tokio::select! {
                    biased;
                    (result, slot) = transfer => {
                        let done = result.map_err(|error| ended(&tally, error))?;
                        tally.add(*after, done, seen);
                        self.slots.push_back(slot);
                        under_way.pop_front();
                        None
                    }
                    grant = self.grants.recv(), if room => match grant {
                        Some(grant) => Some(grant),
                        None => return Err(self.end().await),
                    },
                },
            };
            if let Some(grant) = grant
                && let Some(slot) = self.slots.pop_front()
            {
                under_way.push_back((begin.elapsed(), self.start(&grant, slot)));
            }
        }
    }

    fn start(&self, grant: &Grant, slot: Slot) -> Transfer {
        match slot {
            Slot::Source(source) => Transfer::Write(self.channel.write(WriteRequest::new(grant, source))),
            Slot::Target(target) => {
                let qps = self.qps;
                let strategy = match self.shape.read_by {
                    ReadBy::Auto => ReadStrategy::Auto,
                    ReadBy::RdmaRead => ReadStrategy::RdmaRead { depth: u32::MAX, qps },
                    ReadBy::RemoteWrite => ReadStrategy::RemoteWrite,
                };
                Transfer::Read(self.channel.read(ReadRequest::new(grant, target).strategy(strategy)))
            }
        }
    }

    async fn next_grant(&mut self) -> Result<Grant, Error> {
        match tokio::time::timeout(PATIENCE, self.grants.recv()).await {
            Ok(Some(grant)) => Ok(grant),
            Ok(None) => Err(self.end().await),
            Err(_) => Err(format!("the peer has granted nothing for {PATIENCE:?}").into()),
        }
    }

    async fn messages(&mut self, in_flight: u64, time: Duration, seen: &AtomicU64) -> Result<Report, Error> {
        let message = lane::payload(self.shape.block_bytes as usize);
        let begin = Instant::now();
        let mut tally = Tally::default();
        // When each was given to the channel, and when it was queued.
        let mut under_way: VecDeque<(Duration, Duration)> = VecDeque::with_capacity(in_flight as usize);
        loop {
            let more = begin.elapsed() < time || (tally.operations == 0 && under_way.is_empty());
            if more && (under_way.len() as u64) < in_flight {
                let start = begin.elapsed();
                self.channel.send_message(message.clone()).await?;
                under_way.push_back((start, begin.elapsed()));
                if (under_way.len() as u64) < in_flight && self.answered.is_empty() {
                    continue;
                }
            }
            if under_way.is_empty() {
                return tally.report();
            }
            let answered = match tokio::time::timeout(PATIENCE, self.answered.recv()).await {
                Ok(Some(count)) => count,
                Ok(None) => return Err(self.end().await),
                Err(_) => return Err(format!("the peer has answered no message for {PATIENCE:?}").into()),
            };
            let now = begin.elapsed();
            for _ in 0..answered {
                let Some((start, queued)) = under_way.pop_front() else {
                    return Err("the peer has answered more messages than it was sent".into());
                };
                let done = Done {
                    bytes: message.len() as u64,
                    wrs: 0,
                    landed: now - start,
                    local: Some(queued - start),
                    method: None,
                };
                tally.add(start, done, seen);
            }
        }
    }

    /// Why the channel has ended.
    async fn end(&self) -> Error {
        match tokio::time::timeout(PATIENCE, self.channel.closed()).await {
            Ok(end) => end.into(),
            Err(_) => "the peer says nothing that is understood on the data channel".into(),
        }
    }
}

fn ended(tally: &Tally, error: Error) -> Error {
    format!("after {} transfers: {}", tally.operations, landfall::error::chain(error.as_ref())).into()
}
