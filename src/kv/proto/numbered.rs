//! What is numbered one after the other, and ends in any order: transfers, reads.

use std::collections::VecDeque;
use std::ops::Range;

/// Items by their numbers. Those that have ended leave gaps, until all before them have ended, too.
#[derive(Debug)]
pub(super) struct Numbered<T> {
    /// The number of the oldest.
    first: u64,
    items: VecDeque<Option<T>>,
}

impl<T> Numbered<T> {
    /// The first will have this number.
    pub(super) fn from(first: u64) -> Self {
        Self { first, items: VecDeque::new() }
    }

    /// Its number is the one after that of the last.
    pub(super) fn push(&mut self, item: T) -> u64 {
        let id = self.ids().end;
        self.items.push_back(Some(item));
        id
    }

    pub(super) fn get(&self, id: u64) -> Option<&T> {
        self.items.get(self.index(id)?)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        let index = self.index(id)?;
        self.items.get_mut(index)?.as_mut()
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<T> {
        let index = self.index(id)?;
        let item = self.items.get_mut(index)?.take()?;
        while let Some(None) = self.items.front() {
            self.items.pop_front();
            self.first += 1;
        }
        Some(item)
    }

    /// Every number below the first of these has ended; the next item gets the one behind the last. There are gaps.
    pub(super) fn ids(&self) -> Range<u64> {
        self.first..self.first + self.items.len() as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    fn index(&self, id: u64) -> Option<usize> {
        usize::try_from(id.checked_sub(self.first)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k2_numbers_go_on_whatever_has_ended() {
        let mut all = Numbered::from(7);
        assert_eq!([all.push('a'), all.push('b'), all.push('c')], [7, 8, 9]);
        assert_eq!((all.remove(8), all.ids()), (Some('b'), 7..10));
        assert_eq!((all.get(8), all.get(9), all.get(6), all.get(10)), (None, Some(&'c'), None, None));
        assert_eq!((all.remove(8), all.remove(u64::MAX)), (None, None));
        *all.get_mut(7).expect("there") = 'x';
        assert_eq!((all.remove(7), all.ids(), all.is_empty()), (Some('x'), 9..10, false));
        assert_eq!((all.remove(9), all.ids(), all.is_empty()), (Some('c'), 10..10, true));
        assert_eq!(all.push('d'), 10);
    }
}
