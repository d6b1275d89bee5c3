//! What the user asks of a channel: each call takes the lock, does its part, and lets the rest go on by itself.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

use super::closed::{ChannelClosed, MessageError, ended_unknown};
use super::{Granted, KvDriver};
use crate::clock::later;
use crate::kv::arrival::{Arrival, ArrivalError};
use crate::kv::blocks::Blocks;
use crate::kv::channel::GrantRefusal;
use crate::kv::exposure::{Exposed, To};
use crate::kv::grant::{Binding, Grant, GrantKind};
use crate::kv::lock;
use crate::kv::parts::Held;
use crate::kv::proto::{Cause, MessageRefused, Resolution, TransferId};
use crate::kv::targets;
use crate::kv::waiting::{Place, Wait};
use crate::kv::write::{Landed, Planned, Started, WriteError, WriteRequest};

impl KvDriver {
    /// Checks and plans a write that was asked for at `since`.
    pub(in crate::kv) fn plan_write(
        &self,
        request: Box<WriteRequest>,
        since: Instant,
    ) -> Result<Planned, (WriteError, Arc<Blocks>)> {
        // Long lists take milliseconds: planned without the lock, so that the channel goes on meanwhile (R9).
        let checked = self
            .check(&request, GrantKind::Write)
            .and_then(|()| targets::plan(&request, false, &self.pool, &self.peer));
        match checked {
            Ok(plan) => {
                let deadline = later(since, self.deadline_of(Some(&request)));
                Ok(Planned { request, plan, since, deadline })
            }
            Err(error) => {
                self.locked(|inner, _| inner.stats.refused += 1);
                Err((error, request.source))
            }
        }
    }

    /// Starts a write. `waiter` is told when there is room, if there is none.
    pub(in crate::kv) fn start_write(
        &self,
        planned: Planned,
        waiter: Option<(&Waker, &mut Place)>,
    ) -> Started {
        self.locked(|inner, after| {
            let started = inner.start_write(planned, waiter, after);
            inner.stats.refused += u64::from(matches!(started, Started::Refused(..)));
            started
        })
    }

    /// A timer of the channel's runtime, whoever polls it.
    pub(in crate::kv) fn sleep_until(&self, at: Instant) -> Sleep {
        let _runtime = self.runtime.enter();
        tokio::time::sleep_until(at.into())
    }

    /// How long a write may take.
    pub(in crate::kv) fn deadline_of(&self, request: Option<&WriteRequest>) -> Duration {
        request.and_then(|request| request.deadline).unwrap_or(self.config.deadline)
    }

    /// What needs no lock: epochs, pool, the kind of the grant.
    pub(super) fn check(&self, request: &WriteRequest, kind: GrantKind) -> Result<(), WriteError> {
        let grant = &request.grant;
        if !request.source.pool().same(&self.pool) {
            return Err(WriteError::ForeignBlocks);
        }
        if let Some(region) = self.pool.regions().first().filter(|region| region.is_device()) {
            let inner = lock(&self.inner);
            if let Some(reason) = inner.queues.iter().find_map(|queue| queue.qp()?.why_not_send(region)) {
                return Err(WriteError::Unsendable { reason });
            }
        }
        if grant.owner_epoch() != self.peer_epoch {
            return Err(WriteError::PeerRestarted { grant: grant.owner_epoch(), peer: self.peer_epoch });
        }
        if grant.bound_epoch() != self.local_epoch {
            return Err(WriteError::NotOurs { bound: grant.bound_epoch(), ours: self.local_epoch });
        }
        if grant.connection() != self.connection_id {
            return Err(WriteError::StaleGrant { grant: grant.id() });
        }
        match (grant.kind(), kind) {
            (GrantKind::Layers(granted), GrantKind::Layers(layers)) if granted != layers => {
                let (index, limit) = (granted.into(), layers.into());
                Err(WriteError::OutOfRange { what: "layer of the grant", index, limit })
            }
            (granted, asked) if granted != asked => {
                let (granted, asked) = (granted.name(), asked.name());
                Err(WriteError::WrongKind { grant: grant.id(), granted, asked })
            }
            _ => Ok(()),
        }
    }

    pub(in crate::kv) fn poll_write(
        &self,
        id: TransferId,
        waker: &Waker,
    ) -> Poll<(Result<Landed, WriteError>, Arc<Blocks>)> {
        self.wait(&Context::from_waker(waker), |inner, after, waker| inner.take_write(id, waker, after))
    }

    /// The future of a write was dropped.
    pub(in crate::kv) fn abandon(&self, id: TransferId) {
        let now = Instant::now();
        self.locked(|inner, after| {
            let Some(entry) = inner.writes.get_mut(&id) else { return };
            entry.detached = true;
            after.replaced.extend(entry.waker.take());
            if entry.outcome.is_none()
                && let Some(conn) = &mut inner.conn
            {
                conn.abort(id, now);
                inner.turn(now, after);
            }
            inner.forget_finished(id, after);
        });
    }

    pub(in crate::kv) fn detach(&self, id: TransferId) {
        self.locked(|inner, after| {
            if let Some(entry) = inner.writes.get_mut(&id) {
                entry.detached = true;
                after.replaced.extend(entry.waker.take());
            }
            inner.forget_finished(id, after);
        });
    }

    pub(in crate::kv) fn grant(&self, blocks: Blocks) -> Result<Grant, (GrantRefusal, Blocks)> {
        let bytes = self.bytes_of(&blocks);
        self.locked(|inner, _| {
            if let Err(why) = inner.may_hold(&self.config.limits, 1, bytes) {
                return Err((why, blocks));
            }
            let closed = inner.closed();
            match (&mut inner.conn, closed) {
                (Some(conn), None) => {
                    let id = conn.issue_grant(bytes);
                    let grant = self.grant_of(id, &blocks);
                    let exposed = self.expose(&blocks, To::Write).map(Arc::new);
                    let blocks = Held::Whole(blocks);
                    inner.grants.insert(id, Granted { blocks, exposed, bytes, aborted: false });
                    Ok(grant)
                }
                (_, closed) => Err((closed.unwrap_or_else(ended_unknown).into(), blocks)),
            }
        })
    }

    /// Lets the peer reach a claim, for as long as what this answers is there.
    pub(super) fn expose(&self, blocks: &Blocks, to: To) -> Option<Exposed> {
        self.exposure.as_ref().map(|exposure| exposure.expose(blocks.runs(), to))
    }

    /// Payload bytes of a claim.
    pub(super) fn bytes_of(&self, blocks: &Blocks) -> u64 {
        let layout = self.pool.layout();
        // Within the pool's size.
        layout.block_bytes() * u64::from(layout.layers()) * u64::from(blocks.len())
    }

    /// The grant of this number, to write to a claim.
    pub(super) fn grant_of(&self, id: u64, blocks: &Blocks) -> Grant {
        let (owner, bound) = (self.local_epoch, self.peer_epoch);
        let binding = Binding { owner, bound, connection: self.connection_id };
        // A claim holds each block once, and fewer than there are u32s.
        Grant::from_runs(binding, id, blocks.runs().to_vec()).expect("a claim is disjoint")
    }

    /// Takes back those of these grants that are open.
    pub(in crate::kv) fn revoke(&self, grants: Range<u64>) {
        let now = Instant::now();
        self.locked(|inner, after| {
            let lent = inner.revoke_lent(grants.start, now);
            if inner.revoke_open(grants, now, after) || lent {
                inner.turn(now, after);
            }
        });
    }

    pub(in crate::kv) fn poll_arrival(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
    ) -> Poll<Result<Arrival, ArrivalError>> {
        self.wait(cx, |inner, after, waker| {
            if let Some(arrival) = inner.arrivals.pop_front() {
                return Some(arrival);
            }
            if let Some(closed) = inner.end_to_tell() {
                return Some(Err(closed.into()));
            }
            inner.enlist(Wait::Arrival, place, waker, after);
            None
        })
    }

    pub(in crate::kv) fn poll_message(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
    ) -> Poll<Result<Vec<u8>, ChannelClosed>> {
        self.wait(cx, |inner, after, waker| {
            if let Some(message) = inner.messages.pop_front() {
                if let Some(conn) = &mut inner.conn {
                    conn.message_taken(message.len());
                    inner.turn(Instant::now(), after);
                }
                return Some(Ok(message));
            }
            if let Some(closed) = inner.end_to_tell() {
                return Some(Err(closed));
            }
            inner.enlist(Wait::Message, place, waker, after);
            None
        })
    }

    pub(in crate::kv) fn poll_send_message(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
        message: &mut Option<Vec<u8>>,
    ) -> Poll<Result<(), MessageError>> {
        let now = Instant::now();
        let out = self.locked(|inner, after| {
            let closed = inner.closed();
            let Some(conn) = &mut inner.conn else {
                return Some(Err(closed.unwrap_or_else(ended_unknown).into()));
            };
            let bytes = message.take().unwrap_or_default();
            match conn.send_message(bytes) {
                Ok(()) => {
                    inner.turn(now, after);
                    Some(Ok(()))
                }
                Err((MessageRefused::TooLong { asked, limit }, _)) => {
                    Some(Err(MessageError::TooLong { asked, limit }))
                }
                Err((MessageRefused::Full { .. }, bytes)) => {
                    *message = Some(bytes);
                    inner.enlist(Wait::Room, place, Some(cx.waker()), after);
                    None
                }
                Err((MessageRefused::Closed, _)) => Some(Err(closed
                    .unwrap_or_else(|| ChannelClosed {
                        reason: "it is closing".to_owned(),
                        cause: Cause::Closed,
                    })
                    .into())),
            }
        });
        match out {
            Some(out) => Poll::Ready(out),
            None => Poll::Pending,
        }
    }

    pub(in crate::kv) fn poll_resolution(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
        id: TransferId,
    ) -> Poll<Option<Resolution>> {
        self.wait(cx, |inner, after, waker| {
            match inner.doubts.get(&id) {
                None => return Some(None),
                Some(&Some(resolution)) => return Some(Some(resolution)),
                Some(None) if inner.end_to_tell().is_some() => return Some(None),
                Some(None) => {}
            }
            inner.enlist(Wait::Resolution, place, waker, after);
            None
        })
    }

    pub(in crate::kv) fn poll_end(&self, cx: &Context<'_>, place: &mut Place) -> Poll<ChannelClosed> {
        self.locked(|inner, after| match inner.end_to_tell() {
            Some(closed) => Poll::Ready(closed),
            None => {
                inner.enlist(Wait::End, place, Some(cx.waker()), after);
                Poll::Pending
            }
        })
    }

    /// A future that may have waited is dropped.
    pub(in crate::kv) fn leave(&self, place: &mut Place) {
        if !place.is_new() {
            self.locked(|inner, after| after.replaced.extend(inner.waiting.leave(place)));
        }
    }
}
