//! One claim under several grants: what has landed of it, what will not, and when nobody can write to it any more.
//!
//! The driver holds a [`Part`] for each grant; whoever granted holds the [`Parts`] and hears of each end. The driver calls
//! under its own lock, so that nothing here wakes or frees: wakers go to the caller, and a part is dropped by it later.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::blocks::Blocks;
use super::lock;
use super::proto::{AbortReason, TransferId};

/// What the driver holds for a grant: blocks of its own, or a part in those of a claim under several grants.
pub(super) enum Held {
    Whole(Blocks),
    Part(Part),
}

/// The end of one grant.
#[derive(Clone, Debug)]
pub(super) enum News {
    Landed {
        part: u32,
        layer: u32,
        transfer: TransferId,
        tag: u64,
        bytes: u64,
    },
    /// Told once for all grants of a part.
    Aborted {
        part: u32,
        reason: AbortReason,
    },
}

/// What is known of a claim's grants. One future waits for it at a time.
#[derive(Debug, Default)]
pub(super) struct Parts {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    news: VecDeque<News>,
    /// Grants under which something may still be written.
    open: usize,
    /// Parts that have been aborted.
    aborted: Vec<u32>,
    waker: Option<Waker>,
}

/// One grant's share in a claim.
pub(super) struct Part {
    parts: Arc<Parts>,
    /// Taken at its end, before that is counted: who then finds none open has the only handle.
    blocks: Option<Arc<Blocks>>,
    index: u32,
    layer: u32,
    /// The grants of this part: one layer's end without arrival ends the others.
    grants: Range<u64>,
}

impl Parts {
    /// A part for grant number `layer` of `grants`.
    pub(super) fn part(
        self: &Arc<Self>,
        blocks: &Arc<Blocks>,
        index: u32,
        layer: u32,
        grants: Range<u64>,
    ) -> Part {
        lock(&self.state).open += 1;
        Part { parts: self.clone(), blocks: Some(blocks.clone()), index, layer, grants }
    }

    /// The next end that was not told yet; `None` when there will be no more.
    pub(super) fn poll_news(&self, cx: &Context<'_>) -> Poll<Option<News>> {
        self.poll(cx, |state| match state.news.pop_front() {
            None if state.open == 0 => Some(None),
            None => None,
            news => Some(news),
        })
    }

    /// Ready when nothing can be written any more, and every part has let go of the blocks.
    pub(super) fn poll_quiet(&self, cx: &Context<'_>) -> Poll<()> {
        self.poll(cx, |state| (state.open == 0).then_some(()))
    }

    fn poll<T>(&self, cx: &Context<'_>, ready: impl FnOnce(&mut State) -> Option<T>) -> Poll<T> {
        let mut state = lock(&self.state);
        if let Some(out) = ready(&mut state) {
            return Poll::Ready(out);
        }
        // A waker is the user's code: the one that it replaces is dropped without the lock.
        let known = state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        let _replaced = if known { None } else { state.waker.replace(cx.waker().clone()) };
        drop(state);
        Poll::Pending
    }
}

impl Part {
    /// All of its data is there. Gives the waker of who waits for that.
    pub(super) fn landed(&self, transfer: TransferId, tag: u64, bytes: u64) -> Option<Waker> {
        let mut state = lock(&self.parts.state);
        let (part, layer) = (self.index, self.layer);
        state.news.push_back(News::Landed { part, layer, transfer, tag, bytes });
        state.waker.take()
    }

    /// It will not arrive. Gives the waker of who waits, the first time for this part.
    pub(super) fn aborted(&self, reason: AbortReason) -> Option<Option<Waker>> {
        let mut state = lock(&self.parts.state);
        if state.aborted.contains(&self.index) {
            return None;
        }
        state.aborted.push(self.index);
        state.news.push_back(News::Aborted { part: self.index, reason });
        Some(state.waker.take())
    }

    /// The grants of this part, its own among them.
    pub(super) fn grants(&self) -> Range<u64> {
        self.grants.clone()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        drop(self.blocks.take());
        let mut state = lock(&self.parts.state);
        state.open -= 1;
        let waker = if state.open == 0 { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
