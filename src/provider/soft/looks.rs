//! When to ask a GPU whether a copy is over: nobody calls back, and each question costs a wake-up where nobody spins.
//!
//! Copies of a queue pair are much alike, so that the time that one has taken for a mebibyte says when the next will be over. It is asked
//! a little before that, and from then on in a row until a little after it; whoever is late is asked ever later. A copy that is over at
//! the first look was over nobody knows when: then the next one is looked at earlier, until a first look is in vain. Where the thread
//! sleeps until a look, it wakes later than it asked to, which is allowed for.

use std::time::{Duration, Instant};

/// The least and the longest time between two looks.
const FIRST_LOOK: Duration = Duration::from_micros(10);
const LAST_LOOK: Duration = Duration::from_millis(1);
/// Between two looks of a thread that polls all the time, at least. It costs that thread a microsecond.
const GLANCE: Duration = Duration::from_micros(2);
/// Shorter copies say more of the way to the GPU than of its rate, and are over as soon as one can look.
const TELLING: u64 = 4 << 20;
/// So long before the end is soon enough.
const LONGEST_LEAD: Duration = Duration::from_micros(40);
/// What is made of one that was kept from looking at all.
const LATEST: Duration = Duration::from_micros(200);
const MIB: u64 = 1 << 20;

/// What copies of a queue pair have taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    /// For a mebibyte; 0 when nothing is known.
    nanos: u64,
    /// The copy that is under way was looked at, and not over.
    vain: bool,
    /// How late looks come.
    late: Duration,
}

impl Looks {
    /// It is looked at, and should have been `asked`.
    pub(super) fn looked(&mut self, asked: Instant, now: Instant) {
        if let Some(late) = now.checked_duration_since(asked) {
            self.late = (self.late * 3 + late.min(LATEST)) / 4;
        }
    }

    /// It is not over.
    pub(super) fn in_vain(&mut self) {
        self.vain = true;
    }

    /// One of `bytes` was seen to be over after `took`. `None`: so was the one before it, and when it began is not known.
    pub(super) fn saw(&mut self, bytes: u64, took: Option<Duration>) {
        let vain = std::mem::take(&mut self.vain);
        let Some(took) = took.filter(|_| bytes >= TELLING) else { return };
        let nanos = (u64::try_from(took.as_nanos()).unwrap_or(u64::MAX) / (bytes / MIB)).max(1);
        self.nanos = match (vain, self.nanos) {
            (true, _) | (false, 0) => nanos,
            (false, known) => (nanos.min(known) * 7 / 8).max(1),
        };
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
            Some(all) if age < early(all) => early(all) - age,
            Some(_) => age / 32,
            None => age / 16,
        };
        now + wait.saturating_sub(self.late).clamp(FIRST_LOOK, LAST_LOOK)
    }

    /// It is likely to be over in a moment.
    pub(super) fn is_near(&self, bytes: u64, since: Instant, now: Instant) -> bool {
        let age = now.saturating_duration_since(since);
        self.expects(bytes).is_some_and(|all| (early(all)..all + lead(all)).contains(&age))
    }
}

/// When somebody looks at one that began at `since`, and is not over `now`, who polls all the time anyway.
pub(super) fn next_glance(since: Instant, now: Instant) -> Instant {
    now + (now.saturating_duration_since(since) / 16).max(GLANCE)
}

/// A little before the end.
fn early(all: Duration) -> Duration {
    all - lead(all)
}

fn lead(all: Duration) -> Duration {
    (all / 16).min(LONGEST_LEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy that takes `takes`, looked at as `land` does, in rows: how late it was seen, and the looks it took.
    fn fly(looks: &mut Looks, bytes: u64, takes: Duration) -> (Duration, u32) {
        let since = Instant::now();
        let end = since + takes;
        let (mut now, mut asked) = (looks.next(bytes, since, since), 1);
        while now < end {
            looks.in_vain();
            if looks.is_near(bytes, since, now) && looks.is_near(bytes, since, end) {
                now = end;
                break;
            }
            now = looks.next(bytes, since, now);
            asked += 1;
        }
        looks.saw(bytes, Some(now - since));
        (now - end, asked)
    }

    #[test]
    fn r8_copies_like_those_before_are_seen_at_their_end_and_cost_few_looks() {
        let us = Duration::from_micros;
        let mut looks = Looks::default();
        // The first takes long, since the driver makes itself ready; then the others do not; and then all of them do.
        fly(&mut looks, 64 << 20, us(3000));
        for takes in [515, 5000, 515] {
            for _ in 0..40 {
                fly(&mut looks, 1 << 30, us(takes));
            }
            let (mut late, mut most) = (Duration::ZERO, 0);
            for _ in 0..100 {
                let (by, asked) = fly(&mut looks, 1 << 30, us(takes));
                (late, most) = (late + by, most.max(asked));
            }
            assert!(
                late / 100 < us(takes) / 50 && most < 20,
                "{takes} us: {:?} late, {most} looks",
                late / 100
            );
        }
        // A little one is as before.
        assert!(fly(&mut looks, 4096, us(8)).0 <= us(10));
    }

    #[test]
    fn r8_a_copy_that_was_over_with_the_one_before_teaches_nothing() {
        let mut looks = Looks::default();
        fly(&mut looks, 1 << 30, Duration::from_micros(515));
        let before = looks.nanos;
        looks.saw(1 << 30, None);
        assert_eq!(looks.nanos, before);
    }
}
