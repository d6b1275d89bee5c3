//! Which blocks of a pool are free, as maximal runs.

use std::collections::BTreeMap;

pub(super) fn push_run(runs: &mut Vec<(u32, u32)>, (start, len): (u32, u32)) {
    match runs.last_mut() {
        Some((s, l)) if *s + *l == start => *l += len,
        _ => runs.push((start, len)),
    }
}

/// Free blocks as maximal runs: start → length.
#[derive(Debug)]
pub(super) struct FreeRuns(BTreeMap<u32, u32>);

impl FreeRuns {
    pub(super) fn all(blocks: u32) -> Self {
        let mut map = BTreeMap::new();
        if blocks > 0 {
            map.insert(0, blocks);
        }
        Self(map)
    }

    /// Takes `start..start + len`, or names the first block that is not free.
    pub(super) fn take(&mut self, start: u32, len: u32) -> Result<(), u32> {
        let Some((&s, &l)) = self.0.range(..=start).next_back().filter(|&(&s, &l)| start - s < l) else {
            return Err(start);
        };
        let end = s + l;
        if start + len > end {
            return Err(end);
        }
        self.0.remove(&s);
        if s < start {
            self.0.insert(s, start - s);
        }
        if start + len < end {
            self.0.insert(start + len, end - start - len);
        }
        Ok(())
    }

    /// Takes `count` blocks: the first run that holds them all, else runs from the front.
    pub(super) fn take_any(&mut self, count: u32) -> Vec<(u32, u32)> {
        if count == 0 {
            return Vec::new();
        }
        let fit = self.0.iter().find(|&(_, &l)| l >= count).map(|(&s, _)| s);
        let mut out = Vec::new();
        let mut left = count;
        while left > 0 {
            let Some((s, l)) =
                fit.map(|s| (s, count)).or_else(|| self.0.first_key_value().map(|(&s, &l)| (s, l)))
            else {
                unreachable!("permits promise that {left} more blocks are free");
            };
            let n = l.min(left);
            let taken = self.take(s, n);
            debug_assert!(taken.is_ok());
            push_run(&mut out, (s, n));
            left -= n;
        }
        out
    }

    pub(super) fn put(&mut self, start: u32, len: u32) {
        let (mut s, mut l) = (start, len);
        if let Some((&ps, &pl)) = self.0.range(..start).next_back() {
            debug_assert!(ps + pl <= start, "block {start} freed twice");
            if ps + pl == start {
                self.0.remove(&ps);
                (s, l) = (ps, pl + len);
            }
        }
        if let Some(nl) = self.0.remove(&(start + len)) {
            l += nl;
        }
        self.0.insert(s, l);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_runs_merge_and_split() {
        let mut f = FreeRuns::all(100);
        assert_eq!(f.take(10, 5), Ok(()));
        assert_eq!(f.take(12, 1), Err(12));
        assert_eq!(f.take(8, 4), Err(10));
        assert_eq!(f.take(99, 2), Err(100));
        assert_eq!(f.take_any(85), vec![(15, 85)]);
        assert_eq!(f.take_any(10), vec![(0, 10)]);
        f.put(0, 10);
        f.put(15, 85);
        f.put(10, 5);
        assert_eq!(f.0.into_iter().collect::<Vec<_>>(), vec![(0, 100)]);
    }

    #[test]
    fn free_runs_gather_when_no_run_is_long_enough() {
        let mut f = FreeRuns::all(10);
        f.take(3, 1).unwrap();
        f.take(7, 1).unwrap();
        assert_eq!(f.take_any(8), vec![(0, 3), (4, 3), (8, 2)]);
        assert!(f.0.is_empty());
    }
}
