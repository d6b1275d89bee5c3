//! Writes in progress: started, followed, and handed back with their source.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::{After, Inner, State, WriteEntry};
use crate::kv::blocks::Blocks;
use crate::kv::proto::{Cause, GrantRef, Outcome, Reason, Refused, TransferId, WriteRequest as ProtoWrite};
use crate::kv::waiting::{Place, Wait};
use crate::kv::write::{Landed, Planned, Started, WriteError};

impl Inner {
    pub(super) fn write_event(&mut self, id: TransferId, after: &mut After) {
        if let Some(entry) = self.writes.get_mut(&id)
            && entry.is_finished()
        {
            after.wakers.extend(entry.waker.take());
        }
        self.forget_finished(id, after);
    }

    pub(super) fn forget_finished(&mut self, id: TransferId, after: &mut After) {
        if self.writes.get(&id).is_some_and(|e| e.detached && e.is_finished())
            && let Some(entry) = self.writes.remove(&id)
        {
            after.sources.push(entry.source);
        }
    }

    pub(super) fn start_write(
        &mut self,
        planned: Planned,
        waiter: Option<(&Waker, &mut Place)>,
        after: &mut After,
    ) -> Started {
        let Some(conn) = &mut self.conn else {
            let closed = WriteError::Closed { reason: self.closed_reason() };
            return Started::Refused(closed, planned.request.source);
        };
        if conn.is_full() {
            if let Some((waker, place)) = waiter {
                self.enlist(Wait::Room, place, Some(waker), after);
            }
            return Started::Full(Box::new(planned));
        }
        let Planned { request, plan, since, deadline } = planned;
        let grant = GrantRef {
            id: request.grant.id(),
            owner_epoch: request.grant.owner_epoch(),
            bound_epoch: request.grant.bound_epoch(),
            max_bytes: plan.granted_bytes,
        };
        let (bytes, descriptors) = (plan.plan.bytes(), plan.plan.descriptors());
        let write = ProtoWrite { grant, plan: plan.plan, tag: request.tag, deadline };
        let now = Instant::now();
        match conn.write(write, now) {
            Ok(id) => {
                let mut entry = WriteEntry::new(request.source, since, plan.took, bytes, descriptors);
                entry.waker = waiter.map(|(waker, _)| waker.clone());
                entry.begin_span(id, request.tag);
                self.writes.insert(id, entry);
                if self.turn(now, after) {
                    after.nudge = true;
                }
                Started::Running(id)
            }
            Err(refused) => Started::Refused(self.refusal(refused), request.source),
        }
    }

    /// Why the protocol did not take a write.
    pub(super) fn refusal(&self, refused: Refused) -> WriteError {
        match refused {
            Refused::Full { limit } => WriteError::Full { limit },
            Refused::StaleGrant { grant } => WriteError::StaleGrant { grant },
            Refused::PeerRestarted { grant, peer } => WriteError::PeerRestarted { grant, peer },
            Refused::WrongPeer { bound, local } => WriteError::NotOurs { bound, ours: local },
            Refused::OutOfRange { asked, granted } => {
                WriteError::OutOfRange { what: "byte", index: asked, limit: granted }
            }
            Refused::Closed => {
                let cause = match self.state {
                    State::Draining { cause, .. } | State::Destroying { cause } | State::Ended { cause } => {
                        cause
                    }
                    State::Open => Cause::Closed,
                };
                WriteError::Closed { reason: Reason::Lost(cause) }
            }
        }
    }

    /// Why nothing can be written any more, once the protocol is gone.
    pub(super) fn closed_reason(&self) -> Reason {
        debug_assert!(self.closed().is_some());
        Reason::Lost(match self.state {
            State::Ended { cause } => cause,
            _ => Cause::Local,
        })
    }

    pub(super) fn take_write(
        &mut self,
        id: TransferId,
        waker: Option<&Waker>,
        after: &mut After,
    ) -> Option<(Result<Landed, WriteError>, Arc<Blocks>)> {
        let entry = self.writes.get_mut(&id)?;
        if !entry.is_finished() {
            if let Some(waker) = waker
                && !entry.waker.as_ref().is_some_and(|w| w.will_wake(waker))
            {
                after.replaced.extend(entry.waker.replace(waker.clone()));
            }
            return None;
        }
        let entry = self.writes.remove(&id)?;
        let result = match entry.outcome? {
            Outcome::Landed => {
                let since = |at: Option<Instant>| at.map_or(Duration::ZERO, |at| at - entry.started);
                let landed = since(entry.landed);
                Ok(Landed {
                    transfer: id,
                    bytes: entry.bytes,
                    descriptors: entry.descriptors,
                    wrs: entry.wrs,
                    attempts: entry.attempts,
                    planned: entry.planned,
                    local: entry.local.map_or(landed, |at| at - entry.started),
                    landed,
                })
            }
            Outcome::NotDelivered(reason) => Err(WriteError::NotDelivered(reason)),
            Outcome::InDoubt(reason) => Err(WriteError::InDoubt { transfer: id, reason }),
        };
        Some((result, entry.source))
    }
}

impl WriteEntry {
    pub(super) fn new(
        source: Arc<Blocks>,
        started: Instant,
        planned: Duration,
        bytes: u64,
        descriptors: u64,
    ) -> Self {
        Self {
            source,
            started,
            planned,
            local: None,
            landed: None,
            outcome: None,
            released: false,
            waker: None,
            detached: false,
            fellows: None,
            bytes,
            descriptors,
            wrs: 0,
            attempts: 0,
            span: tracing::Span::none(),
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.outcome.is_some() && self.released
    }
}
