//! When to ask a GPU whether a copy is over: nobody calls back, and each question costs a wake-up where nobody spins.
//!
//! Copies of a queue pair are much alike, so that the shortest time for a mebibyte says when the next one will be over. It is asked
//! a little before that, and from then on for a few microseconds in a row; whoever is late is asked ever later. What has been learned
//! is forgotten slowly, since copies can become slower for good.

use std::time::{Duration, Instant};

/// The first look where nothing is known, and the least and the longest time between two.
const FIRST_LOOK: Duration = Duration::from_micros(10);
const LAST_LOOK: Duration = Duration::from_millis(1);
/// Shorter copies say more of the way to the GPU than of its rate, and are over as soon as one can look.
const TELLING: u64 = 4 << 20;
const MIB: u64 = 1 << 20;

/// What copies of a queue pair have taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    /// The least for a mebibyte; 0 when nothing is known.
    nanos: u64,
}

impl Looks {
    /// A copy of `bytes` was seen to be over after `took`.
    pub(super) fn saw(&mut self, bytes: u64, took: Duration) {
        if bytes < TELLING {
            return;
        }
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let nanos = (took / (bytes / MIB)).max(1);
        self.nanos = if self.nanos == 0 { nanos } else { nanos.min(self.nanos + (self.nanos / 64).max(1)) };
    }

    /// What a copy of `bytes` is likely to take.
    fn expects(&self, bytes: u64) -> Option<Duration> {
        let known = self.nanos > 0 && bytes >= TELLING;
        known.then(|| Duration::from_nanos((bytes / MIB).saturating_mul(self.nanos)))
    }

    /// When to look at one that began at `since`, and is not over `now`.
    pub(super) fn next(&self, bytes: u64, since: Instant, now: Instant) -> Instant {
        let age = now.saturating_duration_since(since);
        let wait = match self.expects(bytes) {
            None => age / 16,
            Some(all) if age < early(all) => early(all) - age,
            Some(all) => age.saturating_sub(all) / 4,
        };
        now + wait.clamp(FIRST_LOOK, LAST_LOOK)
    }

    /// It is likely to be over in a moment.
    pub(super) fn is_near(&self, bytes: u64, since: Instant, now: Instant) -> bool {
        let age = now.saturating_duration_since(since);
        self.expects(bytes).is_some_and(|all| (early(all)..all + all / 32).contains(&age))
    }
}

fn early(all: Duration) -> Duration {
    all - all / 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy that takes `takes` from `since` on, looked at as `land` does, in rows of 12 us: when it was seen, and the looks it took.
    fn fly(looks: &mut Looks, bytes: u64, takes: Duration) -> (Duration, u32) {
        let since = Instant::now();
        let end = since + takes;
        let (mut now, mut asked) = (looks.next(bytes, since, since), 1);
        while now < end {
            if looks.is_near(bytes, since, now) && now + Duration::from_micros(12) >= end {
                now = end;
                break;
            }
            now = looks.next(bytes, since, now);
            asked += 1;
        }
        looks.saw(bytes, now - since);
        (now - since, asked)
    }

    #[test]
    fn r8_copies_like_those_before_are_seen_at_their_end_and_cost_few_looks() {
        let mut looks = Looks::default();
        let us = Duration::from_micros;
        let (first, many) = fly(&mut looks, 1 << 30, us(515));
        assert!(first > us(515) && many > 20, "{first:?} in {many}");
        for _ in 0..200 {
            fly(&mut looks, 1 << 30, us(515));
        }
        for _ in 0..200 {
            let (seen, asked) = fly(&mut looks, 1 << 30, us(515));
            assert!(seen < us(530) && asked <= 3, "{seen:?} in {asked}");
        }
        // A little one is as before.
        assert!(fly(&mut looks, 4096, us(8)).0 <= us(10));
        // Slower for good: it is late for a while, and then it is not.
        for _ in 0..200 {
            fly(&mut looks, 1 << 30, us(5000));
        }
        let (seen, asked) = fly(&mut looks, 1 << 30, us(5000));
        assert!(seen < us(5200) && asked < 12, "{seen:?} in {asked}");
    }
}
