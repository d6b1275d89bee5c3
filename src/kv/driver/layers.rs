//! Several grants of one claim, and writes layer by layer: transfers that belong together, and end together when one fails.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::closed::ended_unknown;
use super::{After, Granted, Inner, KvDriver, WriteEntry};
use crate::clock::later;
use crate::kv::blocks::Blocks;
use crate::kv::channel::GrantRefusal;
use crate::kv::exposure::To;
use crate::kv::grant::{Grant, GrantKind};
use crate::kv::parts::{Held, Parts};
use crate::kv::proto::{GrantRef, Outcome, Reason, TransferId, WriteRequest as ProtoWrite};
use crate::kv::targets::{self, Planned};
use crate::kv::write::{WriteError, WriteRequest};

impl KvDriver {
    /// Grants `blocks` as part `index` of several, by one number, or by one for each layer.
    pub(in crate::kv) fn grant_parts(
        &self,
        blocks: &Arc<Blocks>,
        parts: &Arc<Parts>,
        index: u32,
        kind: GrantKind,
    ) -> Result<Grant, GrantRefusal> {
        self.locked(|inner, _| {
            let all = match kind {
                GrantKind::Layers(layers) => layers as usize,
                _ => 1,
            };
            inner.may_hold(&self.config.limits, all, self.bytes_of(blocks))?;
            let closed = inner.closed();
            let (Some(conn), None) = (&mut inner.conn, &closed) else {
                return Err(closed.unwrap_or_else(ended_unknown).into());
            };
            let layout = self.pool.layout();
            let layer = layout.block_bytes() * u64::from(blocks.len());
            let (count, bytes) = match kind {
                GrantKind::Layers(layers) => (layers, layer),
                _ => (1, layer * u64::from(layout.layers())),
            };
            let mut ids = (0..count).map(|_| conn.issue_grant(bytes));
            let first = ids.next().unwrap_or_default();
            // They are numbered without gaps, under one lock.
            ids.for_each(drop);
            let numbers = first..first + u64::from(count);
            let exposed = self.expose(blocks, To::Write).map(Arc::new);
            for (layer, id) in (0..count).zip(numbers.clone()) {
                let part = Held::Part(parts.part(blocks, index, layer, numbers.clone()));
                let exposed = exposed.clone();
                inner.grants.insert(id, Granted { blocks: part, exposed, bytes, aborted: false });
            }
            Ok(self
                .grant_of(first, blocks)
                .of_kind(kind)
                .expect("a layout has layers, and a channel issues fewer than 2^64 grants"))
        })
    }

    /// Takes all layers of a write, of which each starts when it is pushed. Their transfers are numbered by layer.
    pub(in crate::kv) fn start_layers(
        &self,
        request: WriteRequest,
    ) -> Result<Range<u64>, (WriteError, Arc<Blocks>)> {
        let started = Instant::now();
        let kind = GrantKind::Layers(self.peer.layout.layers());
        let planned =
            self.check(&request, kind).and_then(|()| targets::plan(&request, true, &self.pool, &self.peer));
        self.locked(|inner, after| {
            let deadline = later(started, request.deadline.unwrap_or(self.config.deadline));
            let transfers =
                planned.and_then(|planned| inner.start_layers(&request, &planned, deadline, started, after));
            inner.stats.refused += u64::from(transfers.is_err());
            transfers.map_err(|error| (error, request.source))
        })
    }

    /// Lets a layer's transfer begin. Answers how it has ended, if it has: nothing is posted of it then.
    pub(in crate::kv) fn push_layer(&self, id: TransferId, now: Instant) -> Result<(), Reason> {
        self.locked(|inner, after| {
            let Some(entry) = inner.writes.get_mut(&id) else { return Err(Reason::Cancelled) };
            match entry.outcome {
                Some(Outcome::NotDelivered(reason) | Outcome::InDoubt(reason)) => return Err(reason),
                // Not before it was pushed.
                Some(Outcome::Landed) => return Ok(()),
                None => {}
            }
            entry.started = now;
            if let Some(conn) = &mut inner.conn {
                conn.ungate(id);
                if inner.turn(now, after) {
                    after.nudge = true;
                }
            }
            Ok(())
        })
    }

    /// Whether a layer's transfer has not ended.
    pub(in crate::kv) fn layer_is_open(&self, id: TransferId) -> bool {
        self.locked(|inner, _| inner.writes.get(&id).is_some_and(|entry| entry.outcome.is_none()))
    }

    /// Cancels a transfer of several, and so all of them. Answers whether it had not ended before.
    pub(in crate::kv) fn cancel_layer(&self, id: TransferId) -> bool {
        let now = Instant::now();
        self.locked(|inner, after| {
            let open = inner.writes.get(&id).is_some_and(|entry| entry.outcome.is_none());
            if let (true, Some(conn)) = (open, &mut inner.conn) {
                conn.abort(id, now);
                inner.turn(now, after);
            }
            open
        })
    }

    /// Nobody waits for these transfers any more: those that have not ended are aborted.
    pub(in crate::kv) fn abandon_layers(&self, transfers: Range<u64>) {
        let now = Instant::now();
        self.locked(|inner, after| {
            for id in transfers.clone().map(TransferId) {
                if let Some(entry) = inner.writes.get_mut(&id) {
                    entry.detached = true;
                    after.replaced.extend(entry.waker.take());
                }
            }
            inner.abort_fellows(Some(transfers.clone()), now, after);
            inner.turn(now, after);
            transfers.for_each(|id| inner.forget_finished(TransferId(id), after));
        });
    }
}

impl Inner {
    fn start_layers(
        &mut self,
        request: &WriteRequest,
        planned: &Planned,
        deadline: Instant,
        started: Instant,
        after: &mut After,
    ) -> Result<Range<u64>, WriteError> {
        let now = Instant::now();
        let layers = u64::from(planned.plan.layers());
        let mut transfers: Option<Range<u64>> = None;
        for (layer, grant) in (0..planned.plan.layers()).zip(request.grant.ids()) {
            // There are as many layers as the plan has.
            let Some(plan) = planned.plan.layer(layer) else { break };
            let grant = GrantRef {
                id: grant,
                owner_epoch: request.grant.owner_epoch(),
                bound_epoch: request.grant.bound_epoch(),
                max_bytes: planned.granted_bytes / layers,
            };
            let (bytes, descriptors) = (plan.bytes(), plan.descriptors());
            let write = ProtoWrite { grant, plan, tag: request.tag, deadline };
            let accepted = match &mut self.conn {
                Some(conn) => conn.write_gated(write, now).map_err(|refused| self.refusal(refused)),
                None => Err(WriteError::Closed { reason: self.closed_reason() }),
            };
            let id = match accepted {
                Ok(id) => id,
                Err(error) => {
                    // Those that were taken end as cancelled; nobody knows of them.
                    if let Some(taken) = transfers {
                        self.drop_layers(taken, now, after);
                    }
                    return Err(error);
                }
            };
            // Numbered without gaps: all are taken under one lock.
            transfers.get_or_insert(id.0..id.0).end = id.0 + 1;
            let source = request.source.clone();
            let mut entry = WriteEntry::new(source, started, planned.took, bytes, descriptors);
            entry.begin_span(id, request.tag);
            self.writes.insert(id, entry);
        }
        let transfers = transfers.unwrap_or_default();
        for id in transfers.clone() {
            if let Some(entry) = self.writes.get_mut(&TransferId(id)) {
                entry.fellows = Some(transfers.clone());
            }
        }
        if self.turn(now, after) {
            after.nudge = true;
        }
        Ok(transfers)
    }

    fn drop_layers(&mut self, transfers: Range<u64>, now: Instant, after: &mut After) {
        for id in transfers.clone().map(TransferId) {
            if let Some(entry) = self.writes.get_mut(&id) {
                entry.detached = true;
            }
        }
        self.abort_fellows(Some(transfers), now, after);
        self.turn(now, after);
    }

    /// Aborts the transfers of `fellows` that have not ended.
    pub(super) fn abort_fellows(&mut self, fellows: Option<Range<u64>>, now: Instant, after: &mut After) {
        let (Some(fellows), Some(conn)) = (fellows, &mut self.conn) else { return };
        for id in fellows.map(TransferId) {
            if self.writes.get(&id).is_some_and(|entry| entry.outcome.is_none()) {
                conn.abort(id, now);
                // The peer is told by the next turn.
                after.nudge = true;
            }
        }
    }

    /// Takes back those of these grants that are open. Answers whether there was one.
    pub(super) fn revoke_open(&mut self, grants: Range<u64>, now: Instant, after: &mut After) -> bool {
        let Some(conn) = &mut self.conn else { return false };
        let mut any = false;
        for (&id, granted) in self.grants.range(grants) {
            if !granted.aborted {
                conn.revoke_grant(id, now);
                any = true;
            }
        }
        after.nudge |= any;
        any
    }
}
