//! A set of numbers that mostly come in order: a watermark below which all are in, and ranges above it.

use std::collections::BTreeMap;

/// Gaps among what the peer numbers or cuts to pieces, beyond which it makes them up: each is a message under way.
pub(super) const MAX_GAPS: usize = 4096;

/// A set of u64, as a watermark and sorted ranges. Bounded only if its user bounds it; see [`RangeSet::ranges`].
#[derive(Debug, Default, Clone)]
pub(super) struct RangeSet {
    /// Everything below is in the set.
    floor: u64,
    /// Start and end (exclusive) of disjoint ranges above the floor that do not touch.
    above: BTreeMap<u64, u64>,
}

impl RangeSet {
    pub(super) fn contains(&self, v: u64) -> bool {
        v < self.floor || self.above.range(..=v).next_back().is_some_and(|(_, &end)| v < end)
    }

    /// Adds `start..end`. False, with nothing changed, if a part of it was in the set.
    pub(super) fn insert_range(&mut self, start: u64, end: u64) -> bool {
        if start >= end {
            return true;
        }
        if start < self.floor {
            return false;
        }
        let before = self.above.range(..=start).next_back().map(|(&s, &e)| (s, e));
        let after = self.above.range(start..).next().map(|(&s, &e)| (s, e));
        if before.is_some_and(|(_, e)| e > start) || after.is_some_and(|(s, _)| s < end) {
            return false;
        }
        let (mut new_start, mut new_end) = (start, end);
        if let Some((s, _)) = before.filter(|&(_, e)| e == start) {
            self.above.remove(&s);
            new_start = s;
        }
        if let Some((s, e)) = after.filter(|&(s, _)| s == end) {
            self.above.remove(&s);
            new_end = e;
        }
        if new_start == self.floor {
            self.floor = new_end;
        } else {
            self.above.insert(new_start, new_end);
        }
        true
    }

    /// Adds one number. False if it was in the set.
    pub(super) fn insert(&mut self, v: u64) -> bool {
        match v.checked_add(1) {
            Some(end) => self.insert_range(v, end),
            None => false,
        }
    }

    /// Adds everything below `floor`.
    pub(super) fn raise_floor(&mut self, floor: u64) {
        self.floor = self.floor.max(floor);
        while let Some((&s, &e)) = self.above.first_key_value() {
            if s > self.floor {
                break;
            }
            self.above.remove(&s);
            self.floor = self.floor.max(e);
        }
    }

    /// Forgets everything below `v`, which the caller will not ask about again.
    pub(super) fn forget_below(&mut self, v: u64) {
        while let Some((&s, &e)) = self.above.first_key_value() {
            if s >= v {
                break;
            }
            self.above.remove(&s);
            if e > v {
                self.above.insert(v, e);
                break;
            }
        }
    }

    /// Fills the lowest gap.
    pub(super) fn close_lowest_gap(&mut self) {
        if let Some((_, end)) = self.above.pop_first() {
            self.floor = end;
        }
    }

    /// Fills all gaps.
    pub(super) fn close_gaps(&mut self) {
        if let Some((_, end)) = self.above.pop_last() {
            self.floor = end;
            self.above.clear();
        }
    }

    /// Forgets what is above the watermark and not in `part`, which has nothing that this has not.
    pub(super) fn keep(&mut self, part: &Self) {
        let kept = part.above.range(self.floor..).map(|(&start, &end)| (start, end));
        self.above = kept.collect();
        // What is below the watermark of the part is below that of the whole.
        debug_assert!(part.floor <= self.floor);
    }

    /// Ranges above the watermark: the memory that the set takes.
    pub(super) fn ranges(&self) -> usize {
        self.above.len()
    }

    /// It has no number.
    pub(super) fn is_empty(&self) -> bool {
        self.floor == 0 && self.above.is_empty()
    }

    /// The watermark.
    #[cfg(test)]
    pub(super) fn floor(&self) -> u64 {
        self.floor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k6_range_set_agrees_with_a_plain_set() {
        let mut seed = 7u64;
        let mut set = RangeSet::default();
        let mut plain = std::collections::BTreeSet::new();
        for _ in 0..4000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let start = (seed >> 33) % 600;
            let end = start + 1 + (seed >> 60) % 4;
            let free = (start..end).all(|v| !plain.contains(&v));
            assert_eq!(set.insert_range(start, end), free);
            if free {
                plain.extend(start..end);
            }
        }
        for v in 0..700 {
            assert_eq!(set.contains(v), plain.contains(&v), "{v}");
        }
        set.raise_floor(300);
        assert!((0..300).all(|v| set.contains(v)));
        assert!((300..700).all(|v| set.contains(v) == plain.contains(&v)));
        while set.ranges() > 0 {
            set.close_lowest_gap();
        }
        assert!(!set.insert(u64::MAX));
    }

    #[test]
    fn k2_forgetting_keeps_what_is_above() {
        let mut set = RangeSet::default();
        assert!(set.insert_range(5, 10) && set.insert_range(12, 14));
        set.forget_below(7);
        assert!(!set.contains(6) && set.contains(7) && set.contains(12));
        set.forget_below(13);
        assert!(!set.contains(9) && !set.contains(12) && set.contains(13));
        assert_eq!(set.floor(), 0);
    }
}
