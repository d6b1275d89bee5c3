//! Durations in bounded memory: counted in buckets of logarithmic width, so that a run of any length takes the same room.
//!
//! Below 128 ns each nanosecond has a bucket of its own; above, each octave has 64, so that a percentile is off by at most a
//! 64th. The least, the greatest and the mean are exact.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets of an octave, as a power of two.
const BITS: u32 = 6;
/// Octaves above the first 2^(BITS + 1) nanoseconds: up to 2^44 ns, which is almost five hours. Longer ones count as that.
const OCTAVES: usize = 44 - (BITS as usize + 1);
const BUCKETS: usize = (2 << BITS) + OCTAVES * (1 << BITS);

/// How often each duration was seen.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    buckets: Box<[u64; BUCKETS]>,
    count: u64,
    sum: u128,
    least: u64,
    greatest: u64,
}

/// What is said of a histogram, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) samples: u64,
    pub(crate) min_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: Box::new([0; BUCKETS]), count: 0, sum: 0, least: u64::MAX, greatest: 0 }
    }
}

impl Histogram {
    pub(crate) fn record(&mut self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(nanos)] += 1;
        self.count += 1;
        self.sum += u128::from(nanos);
        self.least = self.least.min(nanos);
        self.greatest = self.greatest.max(nanos);
    }

    /// The least duration that so many of a thousand do not exceed, as far as buckets tell, in nanoseconds.
    fn per_mille(&self, part: u64) -> u64 {
        let rank = (u128::from(self.count) * u128::from(part)).div_ceil(1000).max(1);
        let mut seen = 0u128;
        for (index, &count) in self.buckets.iter().enumerate() {
            seen += u128::from(count);
            if seen >= rank {
                return upper(index).clamp(self.least, self.greatest);
            }
        }
        self.greatest
    }

    /// `None` when nothing was recorded.
    pub(crate) fn latency(&self) -> Option<Latency> {
        if self.count == 0 {
            return None;
        }
        let us = |nanos: u64| nanos as f64 / 1000.0;
        Some(Latency {
            samples: self.count,
            min_us: us(self.least),
            mean_us: (self.sum as f64 / self.count as f64) / 1000.0,
            p50_us: us(self.per_mille(500)),
            p90_us: us(self.per_mille(900)),
            p99_us: us(self.per_mille(990)),
            p999_us: us(self.per_mille(999)),
            max_us: us(self.greatest),
        })
    }
}

fn bucket(nanos: u64) -> usize {
    let octave = (u64::BITS - nanos.leading_zeros()).saturating_sub(BITS + 1);
    if octave == 0 {
        return nanos as usize;
    }
    // The leading bit and the BITS below it: from 2^BITS to 2^(BITS + 1) - 1.
    let place = (nanos >> octave) as usize;
    ((octave as usize) * (1 << BITS) + place).min(BUCKETS - 1)
}

/// The greatest duration of a bucket.
fn upper(index: usize) -> u64 {
    let first = 2 << BITS;
    if index < first {
        return index as u64;
    }
    let octave = (index - first) / (1 << BITS) + 1;
    let place = (index - first) % (1 << BITS) + (1 << BITS);
    ((place as u64 + 1) << octave) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_bucket_whose_bound_is_near() {
        let mut last = 0;
        for nanos in (0..200_000).chain((18..44).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])) {
            let index = bucket(nanos);
            assert!(index >= last || nanos < 200_000, "{nanos}");
            last = index;
            let bound = upper(index);
            assert!(bound >= nanos && (bound - nanos) as f64 <= nanos as f64 / 64.0, "{nanos} {bound}");
            assert!(index == 0 || upper(index - 1) < nanos, "{nanos}: an earlier bucket holds it");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_samples() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.latency(), None);
        // 1 to 10,000 microseconds, in no order.
        for i in 0..10_000u64 {
            histogram.record(Duration::from_micros(1 + i * 7919 % 10_000));
        }
        let latency = histogram.latency().unwrap();
        assert_eq!((latency.samples, latency.min_us, latency.max_us), (10_000, 1.0, 10_000.0));
        assert_eq!(latency.mean_us, 5000.5);
        for (found, exact) in [
            (latency.p50_us, 5000.0),
            (latency.p90_us, 9000.0),
            (latency.p99_us, 9900.0),
            (latency.p999_us, 9990.0),
        ] {
            assert!(found >= exact && found <= exact * (1.0 + 1.0 / 64.0), "{found} for {exact}");
        }
    }

    #[test]
    fn one_sample_is_every_percentile() {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_nanos(1_234_567));
        let latency = histogram.latency().unwrap();
        assert_eq!((latency.p50_us, latency.p999_us, latency.max_us), (1234.567, 1234.567, 1234.567));
    }
}
