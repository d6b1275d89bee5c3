//! Points in time that are computed from durations which the user chose.

use std::time::{Duration, Instant};

/// What stands for "never" where the clock cannot say it: a hundred years.
const FAR: Duration = Duration::from_secs(100 * 365 * 86_400);

/// `after` from `now`, or far away where the clock does not reach (`Duration::MAX` is a way to ask for no limit).
pub(crate) fn later(now: Instant, after: Duration) -> Instant {
    now.checked_add(after).unwrap_or_else(|| now + FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r10_a_duration_that_the_clock_cannot_add_is_far_away() {
        let now = Instant::now();
        assert_eq!(later(now, Duration::from_secs(3)), now + Duration::from_secs(3));
        assert_eq!(later(now, Duration::MAX), now + FAR);
    }
}
