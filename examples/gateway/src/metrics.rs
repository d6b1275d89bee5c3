//! What the gateway counts, in the text format of Prometheus. No I/O.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;

use crate::api::Usage;
use crate::gateway::fleet::Levels;
use crate::protocol::Role;

/// Upper bounds of a histogram's buckets, seconds.
const BUCKETS: [f64; 16] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

/// What carries KV cache.
const PATHS: [&str; 4] = ["shm", "tcp", "verbs", "mixed"];

/// All counts.
#[derive(Debug, Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    ended: BTreeMap<&'static str, u64>,
    refused: BTreeMap<u16, u64>,
    lost: BTreeMap<&'static str, u64>,
    kv_bytes: BTreeMap<&'static str, u64>,
    tokens: u64,
    ttft: Histogram,
    queued: Histogram,
    prefill: Histogram,
    kv_local: Histogram,
    kv_landed: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        self.count += 1;
        self.sum += seconds;
        for (bucket, bound) in self.buckets.iter_mut().zip(BUCKETS) {
            *bucket += u64::from(seconds <= bound);
        }
    }
}

impl Metrics {
    /// A request was answered.
    pub fn answered(&self, usage: &Usage) {
        let mut counts = self.lock();
        let under = &usage.landfall;
        counts.tokens += u64::from(usage.completion_tokens);
        counts.ttft.add(under.ttft_ms / 1e3);
        counts.queued.add(under.queued_ms / 1e3);
        counts.prefill.add(under.prefill_ms / 1e3);
        counts.kv_local.add(under.kv.local_us as f64 / 1e6);
        counts.kv_landed.add(under.kv.landed_us as f64 / 1e6);
        // As a worker says it: of those that there are.
        let path = PATHS.iter().find(|path| **path == under.kv.path).unwrap_or(&"other");
        let bytes = counts.kv_bytes.entry(path).or_default();
        *bytes = bytes.saturating_add(under.kv.bytes);
    }

    /// A request has ended: `ok`, `hung_up`, or an error's code.
    pub fn ended(&self, outcome: &'static str) {
        *self.lock().ended.entry(outcome).or_default() += 1;
    }

    /// A response with an error's status.
    pub fn status(&self, status: StatusCode) {
        *self.lock().refused.entry(status.as_u16()).or_default() += 1;
    }

    /// A worker was lost under a request.
    pub fn lost(&self, role: Role) {
        *self.lock().lost.entry(role.name()).or_default() += 1;
    }

    /// All of it.
    pub fn render(&self, levels: &Levels) -> String {
        let counts = self.lock();
        let mut page = Page(String::new());
        page.counter("requests_total", "Requests that have ended, by outcome", "outcome", &counts.ended);
        page.counter("errors_total", "Responses with an error's status", "status", &counts.refused);
        page.counter("workers_lost_total", "Workers that were lost under a request", "role", &counts.lost);
        page.counter(
            "kv_bytes_total",
            "Bytes of KV cache that have landed, by path",
            "path",
            &counts.kv_bytes,
        );
        page.value("tokens_total", "Tokens of answers", "counter", counts.tokens);
        page.value("requests_waiting", "Requests that wait for a place", "gauge", levels.waiting as u64);
        page.value(
            "prefill_workers",
            "Prefill workers that take requests",
            "gauge",
            levels.prefill_workers as u64,
        );
        page.value(
            "decode_workers",
            "Decode workers that take requests",
            "gauge",
            levels.decode_workers as u64,
        );
        page.value("prefilling", "Seats taken at prefill workers", "gauge", levels.prefilling.into());
        page.value("decoding", "Seats taken at decode workers", "gauge", levels.decoding.into());
        page.histogram("ttft_seconds", "From a request to its first token", &counts.ttft);
        page.histogram("queued_seconds", "From a request to its place", &counts.queued);
        page.histogram("prefill_seconds", "Computing a prompt", &counts.prefill);
        page.histogram(
            "kv_local_seconds",
            "KV transfer, from the call to the local completion",
            &counts.kv_local,
        );
        page.histogram("kv_landed_seconds", "KV transfer, from the call to the landing", &counts.kv_landed);
        page.0
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Page(String);

impl Page {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{line}");
    }

    fn head(&mut self, name: &str, help: &str, kind: &str) {
        self.line(format_args!("# HELP gateway_{name} {help}.\n# TYPE gateway_{name} {kind}"));
    }

    fn value(&mut self, name: &str, help: &str, kind: &str, value: u64) {
        self.head(name, help, kind);
        self.line(format_args!("gateway_{name} {value}"));
    }

    fn counter(&mut self, name: &str, help: &str, label: &str, counts: &BTreeMap<impl ToString, u64>) {
        self.head(name, help, "counter");
        for (value, count) in counts {
            self.line(format_args!("gateway_{name}{{{label}=\"{}\"}} {count}", value.to_string()));
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, help, "histogram");
        for (bucket, bound) in histogram.buckets.iter().zip(BUCKETS) {
            self.line(format_args!("gateway_{name}_bucket{{le=\"{bound}\"}} {bucket}"));
        }
        self.line(format_args!("gateway_{name}_bucket{{le=\"+Inf\"}} {}", histogram.count));
        self.line(format_args!(
            "gateway_{name}_sum {}\ngateway_{name}_count {}",
            histogram.sum, histogram.count
        ));
    }
}
