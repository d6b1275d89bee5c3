//! What is done after the lock of a driver is released: wakers fire, blocks go back, queue pairs are destroyed.

use std::sync::Arc;
use std::task::Waker;

use tokio::task::AbortHandle;

use super::loans::{Asked, Planning};
use super::rails::Job;
use super::{Inner, KvDriver};
use crate::background::{self, Lane};
use crate::connect::Lines;
use crate::kv::blocks::Blocks;
use crate::kv::lock;
use crate::kv::parts::Held;
use crate::kv::proto::{Cause, Ledger};
use crate::provider::{self, Cq};

/// What is to be done after the lock is released.
#[derive(Default)]
pub(super) struct After {
    pub(super) wakers: Vec<Waker>,
    /// Wakers that were replaced or are not needed any more: only dropped, which is the user's code too.
    pub(super) replaced: Vec<Waker>,
    pub(super) blocks: Vec<Held>,
    pub(super) sources: Vec<Arc<Blocks>>,
    /// What the peer has asked to be written to it, and what of that takes long to plan.
    pub(super) asked: Vec<Asked>,
    pub(super) long: Vec<Asked>,
    pub(super) ledger: Option<Ledger>,
    /// Queue pairs whose destruction blocks.
    pub(super) destroy: Vec<(Job, Vec<provider::Qp>)>,
    pub(super) lines: Vec<(Option<AbortHandle>, Option<Arc<Lines>>)>,
    /// Queues of rails that are lost. Destroying one may block, so that it is done last.
    pub(super) cqs: Vec<Arc<Cq>>,
    /// What the peer's driver has said about a rail that is to come back.
    pub(super) talk: Vec<(usize, Vec<u8>)>,
    /// Rails that have come to rest, and are to be brought back.
    pub(super) probe: Vec<usize>,
    /// For subscribers.
    pub(super) notes: Vec<Note>,
    pub(super) nudge: bool,
}

/// Something to be told to subscribers of events: they are the user's code, which may ask the channel.
pub(super) enum Note {
    Ends { cause: Cause, words: String },
    RailFailed { rail: usize, device: String, words: String },
    RailBack { rail: usize, device: String },
}

impl Note {
    fn tell(self) {
        match self {
            Self::Ends { cause, words } => tracing::debug!(%cause, words, "channel ends"),
            Self::RailFailed { rail, device, words } => {
                tracing::warn!(rail, device, words, "a rail has failed");
            }
            Self::RailBack { rail, device } => tracing::info!(rail, device, "a rail has come back"),
        }
    }
}

impl After {
    /// Whether there is something that a user who hears of the end expects to be back in its place.
    fn returns(&self) -> bool {
        !(self.blocks.is_empty() && self.sources.is_empty() && self.asked.is_empty()) || self.ledger.is_some()
    }
}

/// Where they are destroyed: with what else is of their device; those of several devices by themselves, so that none waits for another.
fn lane_of(queue_pairs: &[provider::Qp]) -> Arc<Lane> {
    let mut lanes = queue_pairs.iter().filter_map(provider::Qp::lane);
    match lanes.next() {
        Some(first) if lanes.all(|lane| Arc::ptr_eq(&lane, &first)) => first,
        _ => Arc::new(Lane::new()),
    }
}

impl KvDriver {
    /// Runs `f` under the lock, then does what had to wait for its release.
    pub(super) fn locked<T>(&self, f: impl FnOnce(&mut Inner, &mut After) -> T) -> T {
        let mut after = After::default();
        let out = {
            let mut inner = lock(&self.inner);
            let out = f(&mut inner, &mut after);
            // A timeout that is nearer than what the task sleeps for: it must look again.
            if let Some(next) = inner.next_timeout()
                && inner.scheduled.is_none_or(|at| next < at)
            {
                inner.scheduled = Some(next);
                after.nudge = true;
            }
            // What is planned elsewhere comes back by itself.
            inner.returning += usize::from(after.returns()) + after.long.len();
            inner.tell();
            out
        };
        let returns = after.returns();
        let After {
            mut wakers,
            replaced,
            blocks,
            sources,
            asked,
            long,
            notes,
            ledger,
            destroy,
            lines,
            cqs,
            talk,
            probe,
            nudge,
        } = after;
        if nudge {
            self.nudge();
        }
        // Whoever calls holds an `Arc` of it.
        if let Some(this) = self.me.upgrade() {
            for (job, queue_pairs) in destroy {
                let this = this.clone();
                let lane = lane_of(&queue_pairs);
                lane.run(move || this.destroy(job, queue_pairs));
            }
            for asked in long {
                let planning = Planning::new(this.clone(), asked);
                self.planner.run(move || planning.run());
            }
            talk.into_iter().for_each(|(rail, bytes)| this.hear(rail, &bytes));
            probe.into_iter().for_each(|rail| this.probe(rail));
        }
        for (watch, lines) in lines {
            // The queue pairs are gone: nobody needs to be told of their end any more.
            watch.iter().for_each(AbortHandle::abort);
            drop(lines);
        }
        if !cqs.is_empty() {
            background::run(move || drop(cqs));
        }
        // What must not be lost comes before what is the user's code.
        if let Some(ledger) = ledger {
            let on_end = lock(&self.on_end).take();
            if let Some(on_end) = on_end {
                on_end(ledger);
            }
        }
        drop((blocks, sources));
        if !asked.is_empty() {
            wakers.drain(..).for_each(Waker::wake);
            self.serve(asked);
        }
        if returns {
            lock(&self.inner).returned(&mut wakers);
        }
        wakers.into_iter().for_each(Waker::wake);
        drop(replaced);
        notes.into_iter().for_each(Note::tell);
        out
    }

    /// What was planned elsewhere is back.
    pub(super) fn is_back(&self) {
        let mut wakers = Vec::new();
        lock(&self.inner).returned(&mut wakers);
        wakers.into_iter().for_each(Waker::wake);
    }
}
