//! Which rail carries the next piece: the one that would finish it first, by what it has in flight and the rate that it
//! has achieved.
//!
//! Rates are compared by powers of two only. Rails that are about as fast as each other get pieces by what they have in
//! flight, and so equal shares; the noise of a measurement moves nothing. A rail that is 2^k times slower than the best
//! counts each byte 2^k times. Each may have so much in flight as it carries in a few milliseconds, so that a transfer never
//! waits for a slow rail longer than that, and a rail that has room takes what comes next, so that bytes go by what each achieves.
//!
//! Deterministic: whole numbers, and the time that is passed in. Used where there is more than one rail.

use std::time::Instant;

use super::Connection;

/// What a rail that has no rate yet may have in flight, and the least for one of the fastest.
const FIRST_WINDOW: u64 = 256 << 10;
/// What the slowest may have in flight, unless a single piece is longer.
const LEAST_WINDOW: u64 = 16 << 10;
/// A window in milliseconds, at the rate of the fastest rail.
const WINDOW_MS: u64 = 4;
/// A sample is taken over at least so long, or over a burst of at least so much.
const SAMPLE_US: u128 = 1000;
const SAMPLE_BYTES: u64 = 64 << 10;

/// What a rail has carried, and has in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    in_flight: u64,
    /// Bytes a millisecond, while it had something in flight; 0 before the first sample.
    rate: u64,
    /// The sample that is being taken: since when, and its bytes.
    since: Option<Instant>,
    bytes: u64,
}

impl Pace {
    /// Payload was posted.
    pub(super) fn posted(&mut self, len: u64, now: Instant) {
        if self.in_flight == 0 && len > 0 {
            self.since = Some(now);
            self.bytes = 0;
        }
        self.in_flight += len;
    }

    /// Payload has completed, or (`ok` is false) has been flushed.
    pub(super) fn completed(&mut self, len: u64, ok: bool, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(len);
        let Some(since) = self.since.filter(|_| ok && len > 0) else { return };
        self.bytes += len;
        let micros = now.saturating_duration_since(since).as_micros();
        let idle = self.in_flight == 0;
        if micros >= SAMPLE_US || (idle && self.bytes >= SAMPLE_BYTES) {
            let sample = u128::from(self.bytes) * 1000 / micros.max(1);
            let sample = u64::try_from(sample).unwrap_or(u64::MAX).max(1);
            self.rate = if self.rate == 0 { sample } else { self.rate / 4 * 3 + sample / 4 };
            self.since = (!idle).then_some(now);
            self.bytes = 0;
        }
    }

    pub(super) fn rate(&self) -> u64 {
        self.rate
    }

    /// How many times 2 it is slower than the fastest, whose rate is `best`.
    pub(super) fn class(&self, best: u64) -> u32 {
        match self.rate {
            0 => 0,
            rate => (best / rate).max(1).ilog2(),
        }
    }

    /// When it would have finished `len` more bytes: comparable with that of other rails.
    pub(super) fn finish(&self, len: u64, best: u64) -> u128 {
        u128::from(self.in_flight.saturating_add(len)) << self.class(best).min(60)
    }

    /// What it may have in flight.
    fn window(&self, best: u64) -> u64 {
        if self.rate == 0 {
            return FIRST_WINDOW;
        }
        let fastest = best.saturating_mul(WINDOW_MS).max(FIRST_WINDOW);
        (fastest >> self.class(best).min(63)).max(LEAST_WINDOW)
    }

    /// It may take another piece. One always may be in flight.
    pub(super) fn has_room(&self, best: u64) -> bool {
        self.in_flight == 0 || self.in_flight < self.window(best)
    }

    /// The longest piece for it: a part of its window, so that none keeps a slow rail busy for long.
    pub(super) fn longest(&self, best: u64, max_write: u32) -> u32 {
        let part = (self.window(best) / 4).max(LEAST_WINDOW);
        u32::try_from(part).unwrap_or(u32::MAX).min(max_write)
    }
}

impl Connection {
    /// The rail that is to carry the next piece, and the longest that it may carry; not one of `tried`, a mask.
    pub(super) fn next_rail(&self, tried: u64) -> Option<(usize, u32)> {
        let rails = self.rails.len();
        let best = self.best_rate();
        let open =
            |n: &usize| tried >> n & 1 == 0 && self.rails[*n].is_up() && self.rails[*n].pace.has_room(best);
        // Among equals, the one whose turn it is.
        let turn = (0..rails).map(|i| (self.data_rail + i) % rails).filter(open);
        let rail = turn.min_by_key(|&n| self.rails[n].pace.finish(LEAST_WINDOW, best))?;
        Some((rail, self.rails[rail].pace.longest(best, self.cfg.rails[rail].max_write)))
    }

    fn best_rate(&self) -> u64 {
        let up = self.rails.iter().filter(|r| r.is_up());
        up.map(|r| r.pace.rate()).max().unwrap_or(0)
    }

    /// Its rail is several times slower than the best.
    pub(super) fn is_slow(&self, qp: usize) -> bool {
        self.rails.len() > 1 && self.rails[self.links[qp].rail].pace.class(self.best_rate()) >= 2
    }

    /// A data work request is posted.
    pub(super) fn on_data_posted(&mut self, qp: usize, len: u32, now: Instant) {
        self.outstanding += 1;
        let link = &mut self.links[qp];
        let rail = &mut self.rails[link.rail];
        rail.outstanding += 1;
        if self.cfg.rails.len() > 1 {
            link.lengths.push_back(len);
            rail.pace.posted(len.into(), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Rails that carry so many bytes a microsecond each, one piece after the other; what each has carried of `total`, and
    /// how long after the first the last of them had nothing left.
    fn carry(rates: &[u64], piece: u64, total: u64) -> (Vec<u64>, u64) {
        let start = Instant::now();
        let at = |us: u64| start + Duration::from_micros(us);
        let mut pace = vec![Pace::default(); rates.len()];
        let (mut done, mut left) = (vec![0; rates.len()], total);
        // The pieces of each rail that are in flight: when each completes.
        let mut flying = vec![std::collections::VecDeque::new(); rates.len()];
        let mut now = 0;
        loop {
            while left > 0 {
                let best = pace.iter().map(Pace::rate).max().unwrap_or(0);
                let fits = |r: &usize| pace[*r].has_room(best);
                let Some(r) =
                    (0..rates.len()).filter(fits).min_by_key(|&r| pace[r].finish(LEAST_WINDOW, best))
                else {
                    break;
                };
                let len = u64::from(pace[r].longest(best, piece as u32)).min(left);
                left -= len;
                pace[r].posted(len, at(now));
                let before = flying[r].back().map_or(now, |&(end, _)| end);
                flying[r].push_back((before + len.div_ceil(rates[r]), len));
            }
            let next = flying.iter().enumerate().filter_map(|(r, f)| Some((f.front()?.0, r))).min();
            let Some((end, r)) = next else { break };
            now = end;
            let (_, len) = flying[r].pop_front().expect("just seen");
            pace[r].completed(len, true, at(now));
            done[r] += len;
        }
        let fastest = total / rates.iter().sum::<u64>();
        (done, now.saturating_sub(fastest))
    }

    #[test]
    fn k10_four_equal_rails_get_a_quarter_each() {
        for piece in [4096, 64 << 10, 1 << 20] {
            let (done, _) = carry(&[1000; 4], piece, 1 << 30);
            for bytes in done {
                let share = bytes as f64 / (1u64 << 30) as f64;
                assert!((share - 0.25).abs() < 0.03, "{share} of pieces of {piece}");
            }
        }
    }

    #[test]
    fn k10_bytes_go_by_what_each_rail_achieves_and_none_holds_the_rest_back() {
        for rates in [[1000, 1000], [1000, 700], [1000, 250], [1000, 10], [100, 1]] {
            let (done, late) = carry(&rates, 1 << 20, 1 << 30);
            let sum: u64 = rates.iter().sum();
            for (bytes, rate) in done.iter().zip(rates) {
                let (got, want) = (*bytes as f64 / (1u64 << 30) as f64, rate as f64 / sum as f64);
                assert!((got - want).abs() < 0.05, "{rates:?}: {got}, not {want}");
            }
            // What the first bytes cost on a rail that nothing is known of, and two windows.
            let first = FIRST_WINDOW / rates[1];
            assert!(late < first + 2 * WINDOW_MS * 1000, "{rates:?}: {late} µs late");
        }
    }

    #[test]
    fn k10_a_small_write_that_was_alone_is_no_measure() {
        let (mut p, t0) = (Pace::default(), Instant::now());
        p.posted(4096, t0);
        p.completed(4096, true, t0 + Duration::from_micros(20));
        assert_eq!((p.rate(), p.in_flight), (0, 0));
        p.posted(1 << 20, t0);
        p.completed(1 << 20, true, t0 + Duration::from_micros(100));
        assert_eq!(p.rate(), (1 << 20) * 10);
        p.posted(100, t0);
        p.completed(100, false, t0 + Duration::from_secs(1));
        assert_eq!((p.rate(), p.in_flight), ((1 << 20) * 10, 0), "what was flushed is no measure");
    }
}
