//! What a channel tells of its transfers while they run: to the recorder of numbers, and to subscribers of spans.
//!
//! A span begins in the span of whoever has called, and ends when the result is taken.

use std::time::{Duration, Instant};

use tracing::Span;
use tracing::field::{Empty, debug};

use super::meter::Meter;
use super::rail::Rail;
use super::{Inner, WriteEntry};
use crate::cuda::GpuTraffic;
use crate::kv::proto::{Outcome, ReadId, TransferId};
use crate::kv::queues::Queue;

const TARGET: &str = "landfall::kv";

/// What the queue pairs have carried to and from memory of GPUs.
pub(super) fn gpu_traffic_of(queues: &[Queue], rails: &[Rail]) -> GpuTraffic {
    let mut all = GpuTraffic::default();
    queues.iter().for_each(|queue| all.add(&queue.gpu_traffic()));
    for rail in rails {
        rail.direct.count(queues[rail.qps.clone()].iter().map(Queue::report_ref), &mut all.gpudirect);
    }
    all
}

/// What carries the queue pairs, in one word.
fn path_of(queues: &[Queue]) -> &'static str {
    let mut words = queues.iter().filter(|queue| queue.qp().is_some()).map(|queue| queue.path().0);
    let first = words.next().unwrap_or("mixed");
    if words.all(|word| word == first) { first } else { "mixed" }
}

impl Inner {
    /// Tells what has been counted since the last time.
    pub(super) fn tell(&mut self) {
        if !self.meter.is_due(&self.stats) {
            return;
        }
        let Self { meter, stats, queues, rails, .. } = self;
        let of_rails = rails
            .iter()
            .enumerate()
            .flat_map(|(n, rail)| queues[rail.qps.clone()].iter().map(move |queue| (n, queue.report_ref())));
        let gpu = || gpu_traffic_of(queues, rails);
        meter.tell(stats, || path_of(queues), of_rails, gpu);
    }

    /// A write is over: its entry has everything but the release of its blocks.
    pub(super) fn tell_write(&mut self, id: TransferId) {
        let Self { meter, writes, queues, .. } = self;
        let Some(entry) = writes.get(&id) else { return };
        let landed = entry.landed.map_or(Duration::ZERO, |at| at - entry.started);
        if entry.outcome == Some(Outcome::Landed) {
            let after_local = entry.local.zip(entry.landed).map(|(local, landed)| landed - local);
            meter.write_landed(|| path_of(queues), landed, after_local, entry.attempts);
        }
        if entry.span.is_disabled() {
            return;
        }
        match entry.outcome {
            Some(Outcome::Landed) => entry.span.record("outcome", "landed"),
            Some(Outcome::NotDelivered(why)) => entry.span.record("outcome", debug(("not_delivered", why))),
            Some(Outcome::InDoubt(why)) => entry.span.record("outcome", debug(("in_doubt", why))),
            None => return,
        };
        entry.span.record("wrs", entry.wrs).record("attempts", entry.attempts);
        if let Some(local) = entry.local {
            entry.span.record("local_us", micros(local - entry.started));
        }
        entry.span.record("landed_us", micros(landed));
    }

    pub(super) fn tell_read(&mut self, took: Duration) {
        let Self { meter, queues, .. } = self;
        meter.read_done(|| path_of(queues), took);
    }

    /// Whether transfers wait for the peer's receives.
    pub(super) fn tell_credits(&mut self, now: Instant) {
        if Meter::IS_ON {
            let waits = self.conn.as_ref().is_some_and(|conn| conn.waits_for_credits());
            let Self { meter, queues, .. } = self;
            meter.credits(|| path_of(queues), waits, now);
        }
    }
}

impl WriteEntry {
    /// Its span, in that of the caller.
    pub(super) fn begin_span(&mut self, id: TransferId, tag: u64) {
        self.span = tracing::debug_span!(
            target: TARGET,
            "kv_write",
            transfer = id.0,
            bytes = self.bytes,
            descriptors = self.descriptors,
            tag,
            outcome = Empty,
            wrs = Empty,
            attempts = Empty,
            local_us = Empty,
            landed_us = Empty,
        );
    }
}

pub(super) fn read_span(id: ReadId, bytes: u64, descriptors: u64, method: &'static str) -> Span {
    tracing::debug_span!(
        target: TARGET,
        "kv_read",
        transfer = id.0,
        bytes,
        descriptors,
        method,
        outcome = Empty,
        wrs = Empty,
        landed_us = Empty,
    )
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
