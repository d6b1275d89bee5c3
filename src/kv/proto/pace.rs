//! Which rail carries the next piece: the one that would finish it first, by what it has in flight and the rate that it
//! has achieved.
//!
//! Rates are compared by powers of two only. Rails that are about as fast as each other get pieces by what they have in
//! flight, and so equal shares; the noise of a measurement moves nothing. A rail that is 2^k times slower than the best
//! counts each byte 2^k times. Each may have so much in flight as it carries in a few milliseconds, so that a transfer never
//! waits for a slow rail longer than that, and a rail that has room takes what comes next, so that bytes go by what each achieves.
//!
//! READs and WRITEs are paced apart: their bytes go opposite ways, so that neither waits until the other has nothing left.
//!
//! A single rail has a window, too. What is posted later waits behind all that is in flight on its queue pair: a small write
//! beside a large one, and a sign of life, which must not be taken for lost because the link is slow (K5).
//!
//! Deterministic: whole numbers, and the time that is passed in.

use std::time::Instant;

use super::Connection;
use super::rails::Rail;

/// What a rail that has no rate yet may have in flight, and the least for one of the fastest.
const FIRST_WINDOW: u64 = 256 << 10;
/// What the slowest may have in flight, unless a single piece is longer.
const LEAST_WINDOW: u64 = 16 << 10;
/// A window in milliseconds, at the rate of the fastest rail.
const WINDOW_MS: u64 = 4;
/// What a single rail may have in flight: so many milliseconds at its rate, and at least so many bytes.
const QUEUE_MS: u64 = 1;
const QUEUE_BYTES: u64 = 4 << 20;
/// A sample is taken over at least so long, or over a burst of at least so much.
const SAMPLE_US: u128 = 1000;
const SAMPLE_BYTES: u64 = 64 << 10;

/// Which way payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By WRITEs, to the peer.
    Out,
    /// By READs, to us.
    In,
}

/// What a rail has carried one way, and has in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    in_flight: u64,
    /// Bytes a millisecond, while it had something in flight; 0 before the first sample.
    rate: u64,
    /// The sample that is being taken: since when, its bytes, and when the last of them had completed.
    since: Option<Instant>,
    bytes: u64,
    until: Option<Instant>,
}

impl Pace {
    /// Payload was posted.
    pub(super) fn posted(&mut self, len: u64, now: Instant) {
        if self.in_flight == 0 && len > 0 {
            (self.since, self.bytes, self.until) = (Some(now), 0, None);
        }
        self.in_flight += len;
    }

    /// Payload has completed, or (`ok` is false) has been flushed.
    ///
    /// Completions come in bursts, since not every work request says that it has: a sample ends where a burst did, and never in the
    /// middle of one.
    pub(super) fn completed(&mut self, len: u64, ok: bool, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(len);
        if self.since.is_none() || !ok || len == 0 {
            return;
        }
        if self.until.is_some_and(|until| now > until) {
            self.sample(SAMPLE_US);
        }
        self.bytes += len;
        self.until = Some(now);
        if self.in_flight == 0 && self.bytes >= SAMPLE_BYTES {
            self.sample(1);
        }
    }

    /// Takes what has completed for a sample, if it took as many microseconds.
    fn sample(&mut self, least: u128) {
        let (Some(since), Some(until)) = (self.since, self.until) else { return };
        let micros = until.saturating_duration_since(since).as_micros();
        if micros < least {
            return;
        }
        let sample = u128::from(self.bytes) * 1000 / micros;
        let sample = u64::try_from(sample).unwrap_or(u64::MAX).max(1);
        self.rate = if self.rate == 0 { sample } else { self.rate / 4 * 3 + sample / 4 };
        (self.since, self.bytes) = (Some(until), 0);
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

    /// A single rail may take another piece.
    pub(super) fn may_queue(&self) -> bool {
        self.in_flight < self.rate.saturating_mul(QUEUE_MS).max(QUEUE_BYTES)
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
    pub(super) fn next_rail(&self, way: Way, tried: u64) -> Option<(usize, u32)> {
        let rails = self.rails.len();
        let best = self.best_rate(way);
        let pace = |n: usize| self.rails[n].pace(way);
        let open = |n: &usize| tried >> n & 1 == 0 && self.rails[*n].is_up() && pace(*n).has_room(best);
        // Among equals, the one whose turn it is.
        let turn = (0..rails).map(|i| (self.data_rail + i) % rails).filter(open);
        let rail = turn.min_by_key(|&n| pace(n).finish(LEAST_WINDOW, best))?;
        Some((rail, pace(rail).longest(best, self.cfg.rails[rail].max_write)))
    }

    fn best_rate(&self, way: Way) -> u64 {
        let up = self.rails.iter().filter(|r| r.is_up());
        up.map(|r| r.pace(way).rate()).max().unwrap_or(0)
    }

    /// Its rail is several times slower than the best, one way or the other.
    pub(super) fn is_slow(&self, qp: usize) -> bool {
        let rail = &self.rails[self.links[qp].rail];
        let slow = |way| rail.pace(way).class(self.best_rate(way)) >= 2;
        self.rails.len() > 1 && [Way::Out, Way::In].into_iter().any(slow)
    }

    /// A data work request is posted.
    pub(super) fn on_data_posted(&mut self, qp: usize, len: u32, now: Instant) {
        self.outstanding += 1;
        let link = &mut self.links[qp];
        let rail = &mut self.rails[link.rail];
        rail.outstanding += 1;
        link.posted();
        link.lengths.push_back(len);
        rail.pace.posted(len.into(), now);
    }
}

impl Rail {
    pub(super) fn pace(&self, way: Way) -> &Pace {
        match way {
            Way::Out => &self.pace,
            Way::In => &self.reading,
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

    /// One completion may speak for many work requests: all of them at one time.
    #[test]
    fn k10_a_burst_of_completions_is_one_sample() {
        let (start, mut pace) = (Instant::now(), Pace::default());
        for round in 0..20u32 {
            let at = |ms| start + Duration::from_millis(ms) * (round + 1);
            let now = if round == 0 { start } else { start + Duration::from_millis(8) * round };
            (0..8).for_each(|_| pace.posted(32 << 10, now));
            (0..8).for_each(|_| pace.completed(32 << 10, true, at(8)));
            assert_eq!((pace.in_flight, pace.rate()), (0, 32 << 10), "round {round}");
        }
        // Never idle: the next burst closes the last.
        let (start, mut pace) = (Instant::now(), Pace::default());
        pace.posted(1 << 20, start);
        for round in 1..20u32 {
            let now = start + Duration::from_millis(4) * round;
            pace.posted(64 << 10, now);
            (0..4).for_each(|_| pace.completed(16 << 10, true, now));
        }
        assert_eq!(pace.rate(), 16 << 10);
    }

    #[test]
    fn k5_a_slow_link_has_little_in_flight_and_a_fast_one_is_not_held_back() {
        let (mut p, t0) = (Pace::default(), Instant::now());
        let ms = |ms| t0 + Duration::from_millis(ms);
        // 60 MB a second, in pieces of 2 MiB: so many as drain in a fraction of the heartbeat.
        let mut posted = 0;
        while p.may_queue() {
            p.posted(2 << 20, t0);
            posted += 1;
        }
        assert_eq!(posted, 2);
        for n in 1..=8 {
            p.completed(2 << 20, true, ms(35 * n));
            while p.may_queue() {
                p.posted(2 << 20, ms(35 * n));
            }
        }
        assert!(p.in_flight <= 6 << 20, "{} bytes in flight", p.in_flight);
        let mut fast = Pace::default();
        for n in 0..20 {
            fast.posted(2 << 20, ms(n));
            fast.completed(2 << 20, true, ms(n) + Duration::from_micros(200));
        }
        fast.posted(8 << 20, ms(30));
        assert!(fast.may_queue(), "10 GB/s have 8 MiB in flight at a rate of {}", fast.rate());
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
