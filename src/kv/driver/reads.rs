//! Reads in progress: started, followed, and handed back with their blocks.

use std::collections::HashMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tracing::Span;
use tracing::field::debug;

use super::events::OUTSTAYED;
use super::spans::{micros, read_span};
use super::{After, Inner, KvDriver, State};
use crate::clock::later;
use crate::kv::blocks::Blocks;
use crate::kv::exposure::{Exposed, To};
use crate::kv::grant::{Grant, GrantKind};
use crate::kv::parts::Held;
use crate::kv::proto::{
    Cause, GrantRef, MAX_MESSAGE, ReadBy, ReadEnd, ReadId, ReadRequest as ProtoRead, Reason, Refused,
};
use crate::kv::read::{ReadDone, ReadError, ReadRequest};
use crate::kv::read_choice::{Choice, ReadMethod, Trials, choose};
use crate::kv::read_plan;

/// The reads of a channel.
#[derive(Default)]
pub(super) struct Reads {
    running: HashMap<ReadId, Entry>,
    trials: Trials,
}

/// One read of ours.
struct Entry {
    target: Blocks,
    /// Where the owner writes to them, and the device asks.
    exposed: Option<Exposed>,
    started: Instant,
    planned: Duration,
    bytes: u64,
    descriptors: u64,
    choice: Choice,
    done: Option<Done>,
    released: bool,
    waker: Option<Waker>,
    /// Nobody waits: forget it at its end.
    detached: bool,
    span: Span,
}

#[derive(Clone, Copy)]
struct Done {
    result: Result<(), ReadEnd>,
    wrs: u64,
    most: u32,
    at: Instant,
}

impl Entry {
    fn is_finished(&self) -> bool {
        self.done.is_some() && self.released
    }
}

impl KvDriver {
    /// Starts a read.
    pub(in crate::kv) fn start_read(&self, request: ReadRequest) -> Result<ReadId, (ReadError, Blocks)> {
        let started = Instant::now();
        let extent = self.check_read(&request);
        let extent = match extent.and_then(|()| read_plan::check(&request, &self.pool, &self.peer)) {
            Ok(extent) => extent,
            Err(error) => return Err(self.refuse_read(error, request.target)),
        };
        let chosen = self.locked(|inner, _| {
            choose(request.strategy, &self.reading, extent.bytes, &mut inner.reads.trials)
        });
        let choice = match chosen {
            Ok(choice) => choice,
            Err(error) => return Err(self.refuse_read(error, request.target)),
        };
        let time = request.deadline.unwrap_or(self.config.deadline);
        // Long lists take milliseconds: planned without the lock, so that the channel goes on meanwhile (R9).
        let by = match choice.method {
            ReadMethod::RdmaRead { depth, qps } => read_plan::by_reads(&request, &self.pool, &self.peer)
                .map(|plan| ReadBy::Rdma { plan, depth, qps }),
            ReadMethod::RemoteWrite => match read_plan::encode(&request, time) {
                long if long.len() > MAX_MESSAGE => Err(ReadError::OutOfRange {
                    what: "byte of the request to the owner",
                    index: long.len() as u64,
                    limit: MAX_MESSAGE as u64,
                }),
                request => Ok(ReadBy::Write { request, bytes: extent.bytes }),
            },
        };
        let now = Instant::now();
        let started = self.locked(|inner, after| {
            let by = match by {
                Ok(by) => by,
                Err(error) => {
                    inner.end_trial(&choice, extent.bytes, None);
                    return Err((error, request.target));
                }
            };
            let exposed = match by {
                ReadBy::Write { .. } => self.expose(&request.target, To::Write),
                ReadBy::Rdma { .. } => None,
            };
            let entry = Entry {
                target: request.target,
                exposed,
                started,
                planned: now - started,
                bytes: extent.bytes,
                descriptors: extent.descriptors,
                choice,
                done: None,
                released: false,
                waker: None,
                detached: false,
                span: Span::none(),
            };
            inner.start_read(&request.grant, by, later(started, time), entry, now, after)
        });
        started.map_err(|(error, target)| self.refuse_read(error, target))
    }

    fn refuse_read(&self, error: ReadError, target: Blocks) -> (ReadError, Blocks) {
        self.locked(|inner, _| inner.stats.refused += 1);
        (error, target)
    }

    /// What needs no lock: epochs, pool, kind.
    fn check_read(&self, request: &ReadRequest) -> Result<(), ReadError> {
        let grant = &request.grant;
        if !request.target.pool().same(&self.pool) {
            return Err(ReadError::ForeignBlocks);
        }
        if grant.kind() != GrantKind::Read {
            return Err(ReadError::WrongKind { grant: grant.id() });
        }
        if grant.owner_epoch() != self.peer_epoch {
            return Err(ReadError::PeerRestarted { grant: grant.owner_epoch(), peer: self.peer_epoch });
        }
        if grant.bound_epoch() != self.local_epoch {
            return Err(ReadError::NotOurs { bound: grant.bound_epoch(), ours: self.local_epoch });
        }
        if grant.connection() != self.connection_id {
            return Err(ReadError::StaleGrant { grant: grant.id() });
        }
        Ok(())
    }

    pub(in crate::kv) fn poll_read(
        &self,
        id: ReadId,
        waker: &Waker,
    ) -> Poll<(Result<ReadDone, ReadError>, Blocks)> {
        self.wait(&Context::from_waker(waker), |inner, after, waker| inner.take_read(id, waker, after))
    }

    /// The future of a read was dropped.
    pub(in crate::kv) fn abandon_read(&self, id: ReadId) {
        let now = Instant::now();
        self.locked(|inner, after| {
            let Some(entry) = inner.reads.running.get_mut(&id) else { return };
            entry.detached = true;
            after.replaced.extend(entry.waker.take());
            if entry.done.is_none()
                && let Some(conn) = &mut inner.conn
            {
                conn.abort_read(id, now);
                inner.turn(now, after);
            }
            inner.forget_read(id, after);
        });
    }
}

impl Inner {
    fn start_read(
        &mut self,
        grant: &Grant,
        by: ReadBy,
        deadline: Instant,
        mut entry: Entry,
        now: Instant,
        after: &mut After,
    ) -> Result<ReadId, (ReadError, Blocks)> {
        let cause = match self.state {
            State::Draining { cause, .. } | State::Destroying { cause } | State::Ended { cause } => cause,
            State::Open => Cause::Closed,
        };
        let closed = ReadError::Closed { reason: Reason::Lost(cause) };
        let Some(conn) = &mut self.conn else {
            self.end_trial(&entry.choice, entry.bytes, None);
            return Err((closed, entry.target));
        };
        let (id, owner_epoch, bound_epoch) = (grant.id(), grant.owner_epoch(), grant.bound_epoch());
        // Positions have been checked, and one of the grant may be read more than once.
        let grant = GrantRef { id, owner_epoch, bound_epoch, max_bytes: entry.bytes };
        match conn.read(ProtoRead { grant, by, deadline }, now) {
            Ok(id) => {
                entry.span = read_span(id, entry.bytes, entry.descriptors, entry.choice.method.name());
                self.reads.running.insert(id, entry);
                if self.turn(now, after) {
                    after.nudge = true;
                }
                Ok(id)
            }
            Err(refused) => {
                self.end_trial(&entry.choice, entry.bytes, None);
                let error = match refused {
                    Refused::StaleGrant { grant } => ReadError::StaleGrant { grant },
                    Refused::PeerRestarted { grant, peer } => ReadError::PeerRestarted { grant, peer },
                    Refused::WrongPeer { bound, local } => ReadError::NotOurs { bound, ours: local },
                    Refused::OutOfRange { asked, granted } => {
                        ReadError::OutOfRange { what: "byte", index: asked, limit: granted }
                    }
                    Refused::Full { .. } | Refused::Closed => closed,
                };
                Err((error, entry.target))
            }
        }
    }

    fn end_trial(&mut self, choice: &Choice, bytes: u64, took: Option<Duration>) {
        if choice.trial {
            self.reads.trials.ended(choice.method, bytes, took);
        }
    }

    /// The outcome of a read is known.
    pub(super) fn read_done(
        &mut self,
        id: ReadId,
        result: Result<(), ReadEnd>,
        wrs: u64,
        most: u32,
        now: Instant,
        after: &mut After,
    ) {
        let Some(entry) = self.reads.running.get_mut(&id) else { return };
        entry.done = Some(Done { result, wrs, most, at: now });
        let (choice, bytes, took) = (entry.choice, entry.bytes, now - entry.started);
        if !entry.span.is_disabled() {
            match result {
                Ok(()) => entry.span.record("outcome", "done"),
                Err(why) => entry.span.record("outcome", debug(why)),
            };
            entry.span.record("wrs", wrs).record("landed_us", micros(took));
        }
        if result.is_ok() {
            self.stats.reads += 1;
            self.stats.read_bytes += bytes;
            self.tell_read(took);
        } else {
            self.stats.reads_failed += 1;
        }
        self.end_trial(&choice, bytes, result.is_ok().then_some(took));
        self.read_event(id, after);
    }

    /// No device writes to its blocks any more.
    pub(super) fn read_released(&mut self, id: ReadId, now: Instant, after: &mut After) {
        if let Some(entry) = self.reads.running.get_mut(&id) {
            entry.released = true;
            let exposed = entry.exposed.take();
            if self.outstays(exposed) {
                // Which waits for the copies.
                self.fail(OUTSTAYED, "", now, after);
            }
        }
        self.read_event(id, after);
    }

    fn read_event(&mut self, id: ReadId, after: &mut After) {
        if let Some(entry) = self.reads.running.get_mut(&id)
            && entry.is_finished()
        {
            after.wakers.extend(entry.waker.take());
        }
        self.forget_read(id, after);
    }

    fn forget_read(&mut self, id: ReadId, after: &mut After) {
        if self.reads.running.get(&id).is_some_and(|e| e.detached && e.is_finished())
            && let Some(entry) = self.reads.running.remove(&id)
        {
            after.blocks.push(Held::Whole(entry.target));
        }
    }

    fn take_read(
        &mut self,
        id: ReadId,
        waker: Option<&Waker>,
        after: &mut After,
    ) -> Option<(Result<ReadDone, ReadError>, Blocks)> {
        let entry = self.reads.running.get_mut(&id)?;
        if !entry.is_finished() {
            if let Some(waker) = waker
                && !entry.waker.as_ref().is_some_and(|w| w.will_wake(waker))
            {
                after.replaced.extend(entry.waker.replace(waker.clone()));
            }
            return None;
        }
        let entry = self.reads.running.remove(&id)?;
        let done = entry.done?;
        let result = match done.result {
            Ok(()) => Ok(ReadDone {
                bytes: entry.bytes,
                descriptors: entry.descriptors,
                method: entry.choice.method,
                why: entry.choice.why,
                wrs: done.wrs,
                most_in_flight: done.most,
                planned: entry.planned,
                took: done.at - entry.started,
            }),
            Err(ReadEnd::Failed(reason)) => Err(ReadError::Failed(reason)),
            Err(ReadEnd::Refused(why)) => Err(ReadError::Refused(why)),
        };
        Some((result, entry.target))
    }
}
