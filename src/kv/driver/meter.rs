//! What a channel tells the recorder of the facade `metrics`. The names are documented in [`crate::metrics`].
//!
//! Counters follow the channel's own [`ChannelStats`], by difference, after each turn that has changed them: so nothing is counted
//! twice or in two places. Everything is called under the driver's lock.

use std::time::{Duration, Instant};

use ::metrics::{Counter, Gauge, Histogram, Label};

use crate::cuda::GpuTraffic;
use crate::kv::path::QpReport;
use crate::kv::stats::ChannelStats;

/// The numbers of one channel.
pub(super) struct Meter {
    peer: String,
    channels: Gauge,
    rails: Vec<RailMeter>,
    /// Of a pool in memory of a GPU: each way's bytes, and what was told of it.
    gpu: Vec<(Counter, GpuBytes, u64)>,
    /// From the first transfer on: by then it is known what carries the channel.
    path: Option<PathMeter>,
    last: ChannelStats,
    /// Transfers wait for credits since.
    waiting: Option<Instant>,
    ended: bool,
}

struct RailMeter {
    up: Gauge,
    down: Gauge,
    is_up: bool,
    written: Counter,
    read: Counter,
    /// What was told of it.
    told: (u64, u64),
}

/// What has the label `path`.
struct PathMeter {
    counters: Vec<(Counter, Count)>,
    retries: Counter,
    write_landed: Histogram,
    read_landed: Histogram,
    local_to_landed: Histogram,
    credits_waited: Histogram,
}

/// Payload of one way and direction.
type GpuBytes = fn(&GpuTraffic) -> u64;

const GPU: [(&str, &str, GpuBytes); 10] = [
    ("ipc", "out", |t| t.ipc.bytes_out),
    ("ipc", "in", |t| t.ipc.bytes_in),
    ("same_process", "out", |t| t.same_process.bytes_out),
    ("same_process", "in", |t| t.same_process.bytes_in),
    ("host", "out", |t| t.host.bytes_out),
    ("host", "in", |t| t.host.bytes_in),
    ("staged", "out", |t| t.staged.bytes_out),
    ("staged", "in", |t| t.staged.bytes_in),
    ("gpudirect", "out", |t| t.gpudirect.bytes_out),
    ("gpudirect", "in", |t| t.gpudirect.bytes_in),
];

/// One of a channel's counts.
type Count = fn(&ChannelStats) -> u64;

/// The outcomes, and what of the stats counts each.
const OUTCOMES: [(&str, &str, Count); 10] = [
    ("write", "landed", |s| s.landed),
    ("write", "not_delivered", |s| s.not_delivered),
    ("write", "in_doubt", |s| s.in_doubt),
    ("read", "done", |s| s.reads),
    ("read", "failed", |s| s.reads_failed),
    ("arrive", "arrived", |s| s.arrived),
    ("arrive", "aborted", |s| s.aborted),
    ("serve", "served", |s| s.served),
    ("serve", "not_served", |s| s.not_served),
    ("call", "refused", |s| s.refused),
];

const BYTES: [(&str, Count); 4] = [
    ("write", |s| s.landed_bytes),
    ("read", |s| s.read_bytes),
    ("arrive", |s| s.arrived_bytes),
    ("serve", |s| s.served_bytes),
];

impl Meter {
    /// What is costly to find out is found out.
    pub(super) const IS_ON: bool = true;

    /// Of an open channel over these devices, one a rail, each of which is there or not; its pool may be in memory of a GPU.
    pub(super) fn new<'d>(peer: &str, devices: impl Iterator<Item = (&'d str, bool)>, gpu: bool) -> Self {
        let peer = if peer.is_empty() { "unnamed" } else { peer }.to_owned();
        let rail = |(number, (device, is_up)): (usize, (&str, bool))| {
            let labels = |key: &'static str, value: &'static str| {
                vec![
                    Label::new("peer", peer.clone()),
                    Label::new("rail", number.to_string()),
                    Label::new("device", device.to_owned()),
                    Label::new(key, value),
                ]
            };
            let rail = RailMeter {
                up: ::metrics::gauge!("landfall_rails", labels("state", "up")),
                down: ::metrics::gauge!("landfall_rails", labels("state", "down")),
                is_up,
                written: ::metrics::counter!("landfall_rail_bytes_total", labels("direction", "written")),
                read: ::metrics::counter!("landfall_rail_bytes_total", labels("direction", "read")),
                told: (0, 0),
            };
            rail.up.increment(f64::from(u8::from(is_up)));
            rail.down.increment(f64::from(u8::from(!is_up)));
            rail
        };
        let rails = devices.enumerate().map(rail).collect();
        let channels = ::metrics::gauge!("landfall_channels", vec![Label::new("peer", peer.clone())]);
        channels.increment(1.0);
        let last = ChannelStats::default();
        let way = |(way, direction, of): (_, _, GpuBytes)| {
            let labels = vec![
                Label::new("peer", peer.clone()),
                Label::from_static_parts("way", way),
                Label::from_static_parts("direction", direction),
            ];
            (::metrics::counter!("landfall_gpu_bytes_total", labels), of, 0)
        };
        let gpu = if gpu { GPU.into_iter().map(way).collect() } else { Vec::new() };
        Self { peer, channels, rails, gpu, path: None, last, waiting: None, ended: false }
    }

    /// Whether there is anything to be told.
    pub(super) fn is_due(&self, stats: &ChannelStats) -> bool {
        *stats != self.last
    }

    /// Tells what has been counted since the last time; of each rail what its queue pairs report. `gpu` is asked where there is one.
    pub(super) fn tell<'q>(
        &mut self,
        stats: &ChannelStats,
        path: impl Fn() -> &'static str,
        rails: impl Iterator<Item = (usize, &'q QpReport)>,
        gpu: impl FnOnce() -> GpuTraffic,
    ) {
        if self.path.is_none() && path() == "auto" {
            // The peer has not come in yet.
            return;
        }
        let meter = self.path.get_or_insert_with(|| PathMeter::new(&self.peer, path()));
        for (counter, of) in &meter.counters {
            let grown = of(stats) - of(&self.last);
            if grown > 0 {
                counter.increment(grown);
            }
        }
        self.last = *stats;
        let mut now = [(0u64, 0u64); crate::connect::MAX_RAILS];
        for (rail, report) in rails {
            now[rail].0 += report.bytes_written;
            now[rail].1 += report.bytes_read;
        }
        for (rail, (written, read)) in self.rails.iter_mut().zip(now) {
            rail.written.increment(written.saturating_sub(rail.told.0));
            rail.read.increment(read.saturating_sub(rail.told.1));
            rail.told = (rail.told.0.max(written), rail.told.1.max(read));
        }
        if !self.gpu.is_empty() {
            let now = gpu();
            for (counter, of, told) in &mut self.gpu {
                counter.increment(of(&now).saturating_sub(*told));
                *told = of(&now).max(*told);
            }
        }
    }

    fn path(&mut self, path: impl FnOnce() -> &'static str) -> &PathMeter {
        self.path.get_or_insert_with(|| PathMeter::new(&self.peer, path()))
    }

    /// A write has landed; `local` is `None` when its last local completion comes after the confirmation.
    pub(super) fn write_landed(
        &mut self,
        path: impl FnOnce() -> &'static str,
        landed: Duration,
        after_local: Option<Duration>,
        attempts: u32,
    ) {
        let meter = self.path(path);
        meter.write_landed.record(landed);
        meter.local_to_landed.record(after_local.unwrap_or_default());
        if attempts > 1 {
            meter.retries.increment(u64::from(attempts - 1));
        }
    }

    pub(super) fn read_done(&mut self, path: impl FnOnce() -> &'static str, took: Duration) {
        self.path(path).read_landed.record(took);
    }

    /// Whether transfers wait for credits now.
    pub(super) fn credits(&mut self, path: impl FnOnce() -> &'static str, waits: bool, now: Instant) {
        match (self.waiting, waits) {
            (None, true) => self.waiting = Some(now),
            (Some(since), false) => {
                self.waiting = None;
                self.path(path).credits_waited.record(now.saturating_duration_since(since));
            }
            _ => {}
        }
    }

    /// A rail has failed, or has come back.
    pub(super) fn rail(&mut self, rail: usize, up: bool) {
        let ended = self.ended;
        if let Some(rail) = self.rails.get_mut(rail)
            && rail.is_up != up
            && !ended
        {
            rail.is_up = up;
            let (to, from) = if up { (&rail.up, &rail.down) } else { (&rail.down, &rail.up) };
            to.increment(1.0);
            from.decrement(1.0);
        }
    }

    /// The channel is not open any more.
    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.channels.decrement(1.0);
            for rail in &self.rails {
                if rail.is_up { &rail.up } else { &rail.down }.decrement(1.0);
            }
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.end();
    }
}

impl PathMeter {
    fn new(peer: &str, path: &'static str) -> Self {
        let base = || vec![Label::new("peer", peer.to_owned()), Label::from_static_parts("path", path)];
        let with = |more: &[(&'static str, &'static str)]| {
            let mut labels = base();
            labels.extend(more.iter().map(|(key, value)| Label::from_static_parts(key, value)));
            labels
        };
        let outcome = |(op, outcome, of): (_, _, Count)| {
            let labels = with(&[("op", op), ("outcome", outcome)]);
            (::metrics::counter!("landfall_transfers_total", labels), of)
        };
        let bytes =
            |(op, of): (_, Count)| (::metrics::counter!("landfall_bytes_total", with(&[("op", op)])), of);
        let landed = |op| ::metrics::histogram!("landfall_landed_seconds", with(&[("op", op)]));
        Self {
            counters: OUTCOMES.into_iter().map(outcome).chain(BYTES.into_iter().map(bytes)).collect(),
            retries: ::metrics::counter!("landfall_retries_total", base()),
            write_landed: landed("write"),
            read_landed: landed("read"),
            local_to_landed: ::metrics::histogram!("landfall_local_to_landed_seconds", base()),
            credits_waited: ::metrics::histogram!("landfall_credits_waited_seconds", base()),
        }
    }
}
