//! Who waits for what on a channel: a list of wakers for each kind of news.
//!
//! News wakes everybody on its list, and empties it. A future has one [`Place`], which it keeps while it waits and gives
//! back when it is dropped: tasks that wait for a while and then give up leave nothing behind. Wakers are the user's code,
//! so that none is woken or dropped here: the caller does that, without its lock.

use std::task::Waker;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Arrival,
    Message,
    /// A free transfer slot, or room for a message.
    Room,
    End,
    Resolution,
    Served,
}

impl Wait {
    pub(super) const ALL: [Self; 6] =
        [Self::Arrival, Self::Message, Self::Room, Self::End, Self::Resolution, Self::Served];
}

/// A future's place on a list, if it is on one.
#[derive(Debug, Default)]
pub(super) struct Place(Option<(Wait, u64)>);

impl Place {
    /// It was never put on a list: there is nothing to give back.
    pub(super) fn is_new(&self) -> bool {
        self.0.is_none()
    }
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    lists: [Vec<(u64, Waker)>; Wait::ALL.len()],
    /// Of the place that was given out last.
    number: u64,
}

impl Waiting {
    /// Puts a future on a list, or changes its waker there. Gives the waker that it had.
    pub(super) fn enlist(&mut self, wait: Wait, place: &mut Place, waker: &Waker) -> Option<Waker> {
        let list = &mut self.lists[wait as usize];
        if let Some((_, own)) = place.0
            && let Some((_, kept)) = list.iter_mut().find(|(n, _)| *n == own)
        {
            return (!kept.will_wake(waker)).then(|| std::mem::replace(kept, waker.clone()));
        }
        self.number += 1;
        list.push((self.number, waker.clone()));
        place.0 = Some((wait, self.number));
        None
    }

    /// Takes a future off its list. Gives its waker, unless it has been woken.
    pub(super) fn leave(&mut self, place: &mut Place) -> Option<Waker> {
        let (wait, own) = place.0.take()?;
        let list = &mut self.lists[wait as usize];
        let at = list.iter().position(|(n, _)| *n == own)?;
        Some(list.swap_remove(at).1)
    }

    /// Moves the wakers of a list to `out`.
    pub(super) fn take(&mut self, wait: Wait, out: &mut Vec<Waker>) {
        out.extend(self.lists[wait as usize].drain(..).map(|(_, waker)| waker));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lists.iter().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r3_news_wakes_each_future_once_and_who_left_not_at_all() {
        struct Task;
        impl std::task::Wake for Task {
            fn wake(self: std::sync::Arc<Self>) {}
        }
        let (mut waiting, waker) = (Waiting::default(), &Waker::from(std::sync::Arc::new(Task)));
        let (mut a, mut b, mut c) = (Place::default(), Place::default(), Place::default());
        assert!(waiting.leave(&mut a).is_none());
        // Two futures of one task have the same waker.
        for place in [&mut a, &mut b, &mut c] {
            assert!(waiting.enlist(Wait::Arrival, place, waker).is_none());
            assert!(waiting.enlist(Wait::Arrival, place, waker).is_none());
        }
        assert_eq!(waiting.len(), 3);
        assert!(waiting.leave(&mut b).is_some() && b.is_new());
        let mut woken = Vec::new();
        waiting.take(Wait::Room, &mut woken);
        assert!(woken.is_empty());
        waiting.take(Wait::Arrival, &mut woken);
        assert_eq!((woken.len(), waiting.len()), (2, 0));
        // Woken, and dropped or waiting again.
        assert!(waiting.leave(&mut a).is_none());
        assert!(waiting.enlist(Wait::Arrival, &mut c, waker).is_none());
        assert_eq!(waiting.len(), 1);
    }
}
