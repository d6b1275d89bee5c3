//! A recorder for the facade `metrics`, as an exporter would have one: each number is an atomic, a histogram counts in buckets.
//!
//! For the tests of what a channel tells, and for what that costs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Handles to it share everything.
#[derive(Clone, Default)]
pub struct Numbers {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    counters: BTreeMap<String, Arc<AtomicU64>>,
    gauges: BTreeMap<String, Arc<AtomicU64>>,
    histograms: BTreeMap<String, Arc<Buckets>>,
    described: BTreeMap<String, Option<Unit>>,
}

/// Upper bounds in seconds: 1 µs, doubled up to half an hour or so.
const BOUNDS: usize = 31;

#[derive(Default)]
struct Buckets {
    counts: [AtomicU64; BOUNDS + 1],
    samples: AtomicU64,
    nanos: AtomicU64,
}

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let bucket = (0..BOUNDS).find(|bucket| seconds <= 1e-6 * f64::from(1u32 << bucket)).unwrap_or(BOUNDS);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.samples.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }
}

impl Numbers {
    fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Every number by `name{label=value,…}`, labels in the order of their names. Of a histogram, its samples (`…#count`) and their
    /// sum in seconds (`…#sum`).
    pub fn all(&self) -> BTreeMap<String, f64> {
        self.with(|inner| {
            let counters = inner.counters.iter().map(|(k, v)| (k.clone(), v.load(Ordering::Relaxed) as f64));
            let gauges =
                inner.gauges.iter().map(|(k, v)| (k.clone(), f64::from_bits(v.load(Ordering::Relaxed))));
            let mut all: BTreeMap<_, _> = counters.chain(gauges).collect();
            for (key, buckets) in &inner.histograms {
                let counted: u64 = buckets.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
                all.insert(format!("{key}#count"), counted as f64);
                all.insert(format!("{key}#sum"), buckets.nanos.load(Ordering::Relaxed) as f64 / 1e9);
            }
            all
        })
    }

    /// The names that were described, with their units.
    pub fn described(&self) -> BTreeMap<String, Option<Unit>> {
        self.with(|inner| inner.described.clone())
    }
}

fn text(key: &Key) -> String {
    let mut labels: Vec<_> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
    labels.sort();
    format!("{}{{{}}}", key.name(), labels.join(","))
}

impl Recorder for Numbers {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.with(|inner| inner.described.insert(name.as_str().to_owned(), unit));
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe_counter(name, unit, text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe_counter(name, unit, text);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.with(|inner| inner.counters.entry(text(key)).or_default().clone()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.with(|inner| inner.gauges.entry(text(key)).or_default().clone()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.with(|inner| inner.histograms.entry(text(key)).or_default().clone()))
    }
}
