//! Reads by READ: what is cut next, what is in flight, and what is read again when a rail has failed.
//!
//! A READ that was flushed with its rail is kept by where the plan was cut for it, and cut anew for another rail once both
//! sides are fenced (K10): until then its request may still be on its way to the owner's device.

use std::time::Instant;

use super::outbox::Outbox;
use super::plan::{Cursor, Piece};
use super::reader::{By, Reader};

/// A READ in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) read: u64,
    pub(super) qp: usize,
    pub(super) cursor: Cursor,
    pub(super) len: u32,
}

/// A piece of a read that can be posted now.
pub(super) struct Next {
    pub(super) piece: Piece,
    rail: usize,
    before: Cursor,
    after: Option<Cursor>,
}

impl Reader {
    /// What a read may put in flight: READs on a queue pair, and the number of queue pairs. `None` when it has nothing
    /// to post.
    pub(super) fn wants(&self, id: u64) -> Option<(u32, usize)> {
        let read = self.get(id).filter(|r| r.abort.is_none())?;
        match &read.by {
            By::Rdma { plan, cursor, depth, qps, again, .. } => {
                (!cursor.is_done(plan) || !again.is_empty()).then_some((*depth, *qps))
            }
            By::Write { .. } => None,
        }
    }

    /// Cuts the next READ of `id` for `rail`, of at most `max` bytes, without taking it.
    pub(super) fn next(&self, id: u64, rail: usize, max: u32) -> Option<Next> {
        let By::Rdma { plan, cursor, again, .. } = &self.get(id)?.by else { return None };
        let (before, max) = match again.last() {
            Some(&(at, left)) => (at, left.min(max)),
            None => (*cursor, max),
        };
        let mut after = before;
        let piece = after.next(plan, rail, max)?;
        Some(Next { piece, rail, before, after: again.is_empty().then_some(after) })
    }

    /// The READ of `next` goes out on `qp`. Answers the number for its token.
    pub(super) fn posted(&mut self, id: u64, next: &Next, qp: usize) -> usize {
        let len = next.piece.len;
        if let Some(read) = self.get_mut(id)
            && let By::Rdma { plan, cursor, outstanding, again, .. } = &mut read.by
        {
            match (next.after, again.last_mut()) {
                (Some(after), _) => *cursor = after,
                (None, Some((at, left))) if *left > len => {
                    let _ = at.next(plan, next.rail, len);
                    *left -= len;
                }
                (None, _) => {
                    again.pop();
                }
            }
            *outstanding += 1;
            read.wrs += 1;
            read.most = read.most.max(*outstanding);
        }
        self.in_flight[qp] += 1;
        let flight = Some(InFlight { read: id, qp, cursor: next.before, len });
        match self.free.pop() {
            Some(number) => {
                self.flights[number] = flight;
                number
            }
            None => {
                self.flights.push(flight);
                self.flights.len() - 1
            }
        }
    }

    /// A READ has completed; or it has failed with its rail (`ok` is false), and others are left.
    ///
    /// The grace of a cancelled read counts from its last completion, as that of a write does.
    pub(super) fn on_sent(&mut self, number: usize, ok: bool, now: Instant, out: &mut Outbox) {
        let Some(flight) = self.land(number) else { return };
        let Some(read) = self.get_mut(flight.read) else { return };
        if let Some(abort) = &mut read.abort {
            abort.got_on(now, read.deadline);
        }
        if let By::Rdma { outstanding, failed, .. } = &mut read.by {
            *outstanding = outstanding.saturating_sub(1);
            if !ok {
                failed.push((flight.qp, flight.cursor, flight.len));
            }
        }
        self.settle(flight.read, out);
    }

    /// The queue pairs of `mask` are destroyed at both ends: what was read there in vain is read again on others. Nothing that
    /// is on its way to them reaches our memory any more.
    pub(super) fn on_rail_fenced(&mut self, mask: u64, out: &mut Outbox) {
        for id in self.ids() {
            let Some(By::Rdma { failed, again, .. }) = self.get_mut(id).map(|r| &mut r.by) else { continue };
            let before = again.len();
            failed.retain(|&(qp, cursor, len)| {
                let fenced = mask >> qp & 1 == 1;
                if fenced {
                    again.push((cursor, len));
                }
                !fenced
            });
            if again.len() > before && !self.active.contains(&id) {
                self.active.push_back(id);
            }
            self.settle(id, out);
        }
    }

    /// Bytes of a READ in flight.
    pub(super) fn len_of(&self, number: usize) -> u32 {
        self.flights.get(number).copied().flatten().map_or(0, |flight| flight.len)
    }

    pub(super) fn land(&mut self, number: usize) -> Option<InFlight> {
        let flight = self.flights.get_mut(number)?.take()?;
        self.free.push(number);
        self.in_flight[flight.qp] = self.in_flight[flight.qp].saturating_sub(1);
        Some(flight)
    }

    /// Lets go of a read by READ that is over, and tells its owner.
    pub(super) fn settle(&mut self, id: u64, out: &mut Outbox) {
        let Some(read) = self.get(id) else { return };
        let By::Rdma { plan, cursor, outstanding, failed, again, .. } = &read.by else { return };
        // What has failed with its rail may still be on its way to the owner's device: its blocks are in use until the fence,
        // and ours are not.
        let (quiet, complete) = (failed.is_empty(), cursor.is_done(plan) && again.is_empty());
        if *outstanding > 0 || !(complete && quiet || read.abort.is_some()) {
            return;
        }
        let reason = read.abort.map(|abort| abort.reason);
        if reason.is_none() {
            self.tell_done(id, Ok(()), out);
        }
        self.tell_released(id, out);
        if quiet {
            self.say_end(id, reason, out);
            self.release(id, out);
        }
    }
}
