//! A rail's way down, alone (K10): it fails, its queue pairs go to the error state, their flushes are counted, they are destroyed,
//! and the protocol hears that it has come to rest. Meanwhile the others carry on. The last one that fails takes the channel along.

use std::time::{Instant, SystemTime};

use super::after::Note;
use super::rail::{Down, Phase, Rail};
use super::{After, DRAIN_LIMIT, Inner, KvDriver, State};
use crate::kv::lock;
use crate::kv::proto::Cause;
use crate::kv::queues::Queue;
use crate::kv::rail_talk::Talk;
use crate::provider;

const HUNG_UP: &str = "the connection manager says that the peer has disconnected: its process has ended, or has \
                       ended the channel";

/// What another thread destroys queue pairs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Channel,
    Rail(usize),
}

impl KvDriver {
    /// Has a rail's owner told of what happens to its device, and to the queue pairs that it has now.
    pub(super) fn enrol(&self, rail: usize) {
        let (owner, ids, events) = {
            let inner = lock(&self.inner);
            let rail = &inner.rails[rail];
            let queues = &inner.queues[rail.qps.clone()];
            let ids = queues.iter().filter_map(Queue::qp).map(provider::Qp::id);
            let ids = ids.chain(rail.cq.iter().map(|cq| cq.id())).collect();
            (rail.owner.clone(), ids, rail.pd.device().provider().events().clone())
        };
        // Not under the lock: a device that is gone tells at once.
        let enrolled = events.enrol(ids, &owner);
        let replaced = lock(&self.inner).rails[rail].enrolled.replace(enrolled);
        drop(replaced);
    }

    /// Has each rail told of its device's ports, whether it is up or not.
    pub(super) fn watch_ports(&self) {
        let owners: Vec<_> = {
            let inner = lock(&self.inner);
            inner.rails.iter().map(|rail| (rail.pd.clone(), rail.owner.clone())).collect()
        };
        for (pd, owner) in owners {
            pd.device().provider().events().watch_ports(&owner);
        }
    }

    /// Ends a rail when the connection manager says that the peer is gone.
    pub(crate) fn watch_lines(&self) {
        (0..self.tasks.len()).for_each(|rail| self.watch(rail));
    }

    pub(super) fn watch(&self, rail: usize) {
        let Some(lines) = lock(&self.inner).rails[rail].lines.clone() else { return };
        if lines.is_empty() {
            return;
        }
        let driver = self.me.clone();
        let watched = lines.clone();
        let watch = self.runtime.spawn(async move {
            watched.any_ended().await;
            if let Some(driver) = driver.upgrade() {
                let mut inner = lock(&driver.inner);
                let own = inner.rails[rail].lines.as_ref();
                // Those of a rail that came back since are others.
                if own.is_some_and(|own| std::sync::Arc::ptr_eq(own, &watched)) {
                    inner.rails[rail].hung_up = true;
                }
                drop(inner);
                driver.nudge();
            }
        });
        let mut inner = lock(&self.inner);
        let own = &mut inner.rails[rail];
        // It may have ended meanwhile, when there was nothing to abort.
        if own.lines.as_ref().is_some_and(|own| std::sync::Arc::ptr_eq(own, &lines)) {
            own.watch = Some(watch.abort_handle());
        } else {
            watch.abort();
        }
    }
}

impl Inner {
    /// A port of a rail's device has gone down, or is up again.
    ///
    /// Its queue pairs would fail when their retries are used up. A rail beside others does not wait for that: what it has under
    /// way is done by them at once. The last one that is up does, since its port may be back before, and is asked for a sign of
    /// life, so that its queue pairs find out though nothing else is posted.
    pub(super) fn port_changed(
        &mut self,
        rail: usize,
        port: u8,
        active: bool,
        now: Instant,
        after: &mut After,
    ) {
        if self.rails[rail].pd.device().port().is_some_and(|own| own != port) {
            return;
        }
        if active {
            self.rails[rail].port_up.notify_one();
            // The other side asks, and knows nothing of our port. One that is not down on both sides has an attempt before it anyway.
            if !self.client && self.say(rail, &Talk::PortUp).is_ok() {
                self.turn(now, after);
            }
            return;
        }
        let other = |(n, other): (usize, &Rail)| n != rail && other.phase == Phase::Up;
        if self.rails.iter().enumerate().any(other) {
            return self.fail_rail(rail, Cause::Transport, "its port is down", now, after);
        }
        if let Some(conn) = &mut self.conn {
            conn.ask_for_life(rail);
            self.turn(now, after);
        }
    }

    /// Whether the task of this rail keeps the clock.
    pub(super) fn keeps_clock(&self, rail: usize) -> bool {
        self.rails.iter().position(|rail| !rail.lost && rail.cq.is_some()) == Some(rail)
    }

    /// When a rail that is on its way down has had its time.
    pub(super) fn rail_timeout(&self) -> Option<Instant> {
        let draining = self.rails.iter().filter_map(|rail| match rail.phase {
            Phase::Draining { since } => Some(since + DRAIN_LIMIT),
            _ => None,
        });
        draining.min()
    }

    /// Everything that was posted on a rail has come back, or never will.
    pub(super) fn is_drained(&self, rail: usize) -> bool {
        let rail = &self.rails[rail];
        rail.lost || self.queues[rail.qps.clone()].iter().all(Queue::is_drained)
    }

    /// The connection manager's word on a rail, once all that had come on it was handed in.
    pub(super) fn hung_up(&mut self, rail: usize, now: Instant, after: &mut After) {
        if self.state == State::Open {
            self.fail_rail(rail, Cause::PeerLost, HUNG_UP, now, after);
        }
    }

    /// A rail has failed: alone, or with the channel, when it is the only one, or every one is asked for. The first call counts.
    pub(super) fn fail_rail(
        &mut self,
        rail: usize,
        cause: Cause,
        words: &str,
        now: Instant,
        after: &mut After,
    ) {
        if self.state != State::Open {
            return;
        }
        if self.rails.len() == 1 {
            return self.fail(cause, words, now, after);
        }
        match self.rails[rail].phase {
            Phase::Up => {}
            // It had not come back yet: the protocol knows of no other end than its first.
            Phase::Coming => return self.retreat(rail, words, now, after),
            Phase::Draining { .. } | Phase::Destroying | Phase::Down => return,
        }
        let words = if words.is_empty() { cause.to_string() } else { words.to_owned() };
        self.rails[rail].words = Some(words);
        if let Some(conn) = &mut self.conn {
            conn.rail_failed(rail, cause, now);
        }
        self.events(now, after);
        self.blame(rail);
    }

    /// When a rail's end was that of the channel: its words are the channel's (R6), and those of the rails that went before it.
    fn blame(&mut self, rail: usize) {
        if self.state == State::Open {
            return;
        }
        let Some(mut words) = self.rails[rail].words.take() else { return };
        for (n, other) in self.rails.iter().enumerate().filter(|(n, _)| *n != rail) {
            if let Some(Down { cause, .. }) = &other.down {
                words += &format!("; before it, rail {n} over {}: {cause}", other.pd.device().name());
            }
        }
        let device = self.rails[rail].pd.device().name();
        self.first_cause.get_or_insert_with(|| format!("rail {rail} over {device}: {words}"));
    }

    /// The protocol says that a rail has failed, here or at the peer.
    pub(super) fn rail_down(&mut self, rail: usize, cause: Cause, now: Instant, after: &mut After) {
        if self.state != State::Open {
            return;
        }
        let own = &mut self.rails[rail];
        match own.phase {
            Phase::Up => {}
            // The peer had its own half up again, and has seen it fail: the protocol waits for ours to come to rest once more.
            Phase::Down => {
                if let Some(conn) = &mut self.conn {
                    conn.rail_fenced(rail, now);
                }
                return;
            }
            Phase::Coming => {
                own.fenced = false;
                return self.retreat(rail, &cause.to_string(), now, after);
            }
            Phase::Draining { .. } | Phase::Destroying => {
                own.fenced = false;
                return;
            }
        }
        let words = own.words.take().unwrap_or_else(|| cause.to_string());
        if self.strict {
            let device = own.pd.device().name();
            let words =
                format!("rail {rail} over {device} has failed, and strict_rails asks for all: {words}");
            return self.fail(cause, &words, now, after);
        }
        let device = own.pd.device().name().to_owned();
        after.notes.push(Note::RailFailed { rail, device, words: words.clone() });
        own.phase = Phase::Draining { since: now };
        own.failures += 1;
        self.meter.rail(rail, false);
        own.down = Some(Down { cause: words, since: SystemTime::now(), attempt: None });
        self.set_error(rail);
        // The flushes are polled by its task.
        after.nudge = true;
    }

    fn set_error(&self, rail: usize) {
        for qp in self.queues[self.rails[rail].qps.clone()].iter().filter_map(Queue::qp) {
            if let Err(error) = qp.set_error() {
                tracing::warn!(%error, "a queue pair did not go to the error state; it is destroyed all the same");
            }
        }
    }

    /// A rail that was about to come back does not.
    pub(super) fn retreat(&mut self, rail: usize, words: &str, now: Instant, after: &mut After) {
        if self.rails[rail].phase != Phase::Coming {
            return;
        }
        self.note(rail, words);
        self.rails[rail].phase = Phase::Draining { since: now };
        self.rails[rail].attempt = None;
        self.set_error(rail);
        after.nudge = true;
    }

    /// What the latest attempt to bring a rail back has found.
    pub(super) fn note(&mut self, rail: usize, words: &str) {
        if let Some(down) = &mut self.rails[rail].down {
            down.attempt = Some(words.to_owned());
        }
    }

    /// Nothing of a rail that has failed completes any more: its queue pairs are destroyed as they are, and it does not come back.
    pub(super) fn lose_rail(&mut self, rail: usize, words: &str, now: Instant, after: &mut After) {
        let own = &mut self.rails[rail];
        own.lost = true;
        own.attempt = None;
        self.note(rail, words);
        self.rest(now, after);
        // Another task may have to keep the clock.
        after.nudge = true;
    }

    /// Rails that are on their way down: those that have drained, or have had their time, are destroyed.
    pub(super) fn rest_rails(&mut self, now: Instant, after: &mut After) {
        for rail in 0..self.rails.len() {
            let Phase::Draining { since } = self.rails[rail].phase else { continue };
            if self.is_drained(rail) || now >= since + DRAIN_LIMIT {
                self.end_rail(rail, now, after);
            }
        }
    }

    fn end_rail(&mut self, rail: usize, now: Instant, after: &mut After) {
        let own = self.queues[self.rails[rail].qps.clone()].iter_mut();
        let queue_pairs: Vec<_> = own.filter_map(Queue::take_qp).collect();
        self.rails[rail].phase = Phase::Destroying;
        if queue_pairs.iter().any(|qp| qp.lane().is_some()) {
            self.destroying += 1;
            after.destroy.push((Job::Rail(rail), queue_pairs));
        } else {
            queue_pairs.into_iter().for_each(provider::Qp::destroy);
            self.rail_destroyed(rail, now, after);
        }
    }

    /// Another thread has destroyed queue pairs.
    pub(super) fn job_done(&mut self, job: Job, now: Instant, after: &mut After) {
        if let Job::Rail(rail) = job {
            self.rail_destroyed(rail, now, after);
        }
        self.rest(now, after);
        // Of the channel, when nothing else is on its way.
        self.destroyed(now, after);
    }

    /// A rail's queue pairs are destroyed: on it no late write reaches a block of ours, and no device reads one.
    fn rail_destroyed(&mut self, rail: usize, now: Instant, after: &mut After) {
        let own = &mut self.rails[rail];
        own.phase = Phase::Down;
        own.hung_up = false;
        after.lines.push((own.watch.take(), own.lines.take()));
        own.enrolled = None;
        if own.lost {
            after.cqs.extend(own.cq.take());
        }
        let (qps, fenced) = (own.qps.clone(), std::mem::replace(&mut own.fenced, true));
        if let Some(conn) = &mut self.conn {
            for queue in &mut self.queues[qps] {
                queue.destroyed(|token| conn.handle_sent(token, false, now));
            }
            if self.state == State::Open && !fenced {
                conn.rail_fenced(rail, now);
                if self.client {
                    after.probe.push(rail);
                }
            }
        }
        if self.state == State::Open {
            self.turn(now, after);
        }
    }
}
