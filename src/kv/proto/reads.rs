//! What a connection does for reads: the calls of both sides, and the posting of READs. The state is in `reader` and
//! `lender`.

use std::time::Instant;

use super::event::{
    Event, GrantRef, ReadId, ReadRefusal, Refused, SenderReason, Sink, Token, TransferId, WriteRequest,
};
use super::pace::Way;
use super::plan::Plan;
use super::reader::{ReadBy, ReadRequest};
use super::sender::check_grant;
use super::{Connection, SQ_RESERVE, State};

/// READs of one read before the next one has its turn.
const QUANTUM: usize = 16;

impl Connection {
    /// Accepts a read, or refuses it with nothing posted (K6, R10). An accepted one uses its grant up, and ends with exactly
    /// one `ReadDone` and then one `ReadReleased`. A request to write is at most [`MAX_MESSAGE`](super::message::MAX_MESSAGE)
    /// bytes long: the caller sees to it.
    pub(crate) fn read(&mut self, req: ReadRequest, _now: Instant) -> Result<ReadId, Refused> {
        let bytes = match &req.by {
            ReadBy::Rdma { plan, .. } => plan.bytes(),
            ReadBy::Write { bytes, .. } => *bytes,
        };
        let result = if self.state != State::Open || self.closing || self.peer_closed.is_some() {
            Err(Refused::Closed)
        } else {
            check_grant(&self.cfg, &req.grant, bytes)
                .and_then(|()| self.sender.use_grant(req.grant.id))
                .map(|()| self.reader.read(req, &mut self.receiver, &mut self.out))
        };
        self.refused += u64::from(result.is_err());
        result
    }

    /// Cancels a read. It may still end well; unknown ones are ignored.
    pub(crate) fn abort_read(&mut self, id: ReadId, now: Instant) {
        if self.state == State::Open {
            self.settle_reads();
            self.abort_read_for(id.0, SenderReason::Cancelled, now);
        }
    }

    pub(super) fn abort_read_for(&mut self, id: u64, reason: SenderReason, now: Instant) {
        self.reader.abort(&self.cfg, id, reason, now, &mut self.receiver, &mut self.out);
    }

    /// A grant for the peer to read, which has room for `most` bytes. It ends with `Served`, or with `Aborted` and then `Freed`;
    /// when both sides have closed, without.
    pub(crate) fn issue_read_grant(&mut self, most: u64) -> u64 {
        let grant = self.receiver.reserve_grant();
        self.lender.issue(grant, most);
        grant
    }

    pub(super) fn revoke_read_grant(&mut self, grant: u64, now: Instant) {
        self.settle_reads();
        if let Some(transfer) = self.lender.revoke(&self.cfg, grant, now, &mut self.out) {
            self.abort_for(transfer, SenderReason::Revoked, now);
        }
    }

    /// Answers `ReadAsked`: with the plan of what was asked for, and until when, or with why not. Gives the transfer that
    /// serves it, if one does; of that no event tells.
    pub(crate) fn serve(
        &mut self,
        grant: u64,
        answer: Result<(Plan, Instant), ReadRefusal>,
        _now: Instant,
    ) -> Option<TransferId> {
        let (target, revoked) = self.lender.asked(grant)?;
        if self.state != State::Open {
            return None;
        }
        let answer = match answer {
            _ if revoked => Err(ReadRefusal::Revoked),
            Ok(_) if self.close_sent || self.peer_closed.is_some() => Err(ReadRefusal::Closing),
            Ok((plan, deadline)) => {
                let bytes = plan.bytes();
                let (owner_epoch, bound_epoch) = (self.cfg.peer_epoch, self.cfg.local_epoch);
                let under = GrantRef { id: target, owner_epoch, bound_epoch, max_bytes: bytes };
                let write = WriteRequest { grant: under, plan, tag: 0, deadline };
                match self.sender.write(&self.cfg, write) {
                    Ok(transfer) => {
                        self.sender.ungate(transfer.0);
                        Ok((transfer, bytes))
                    }
                    // The reader has taken it back meanwhile, or the two do not agree on what they are.
                    Err(Refused::StaleGrant { .. }) => Err(ReadRefusal::Cancelled),
                    Err(Refused::Full { .. }) => Err(ReadRefusal::Busy),
                    Err(_) => Err(ReadRefusal::OutOfRange),
                }
            }
            Err(why) => Err(why),
        };
        match answer {
            Ok((transfer, bytes)) => {
                self.lender.serving(grant, transfer.0, bytes, &mut self.out);
                Some(transfer)
            }
            Err(why) => {
                // From here on nothing is written under it.
                let _ = self.sender.use_grant(target);
                self.out.queue(super::outbox::Queued::ReadRefused { target, why });
                self.lender.refused(grant, why, &mut self.out);
                None
            }
        }
    }

    /// Hands on what has become of grants and transfers that are behind reads.
    pub(super) fn settle_reads(&mut self) {
        while let Some(event) = self.out.of_reads.pop_front() {
            match event {
                Event::Arrived { grant, .. } => self.reader.on_target_arrived(grant, &mut self.out),
                Event::Aborted { grant, reason } => {
                    self.reader.on_target_aborted(grant, reason, &mut self.out);
                }
                Event::Freed { grant } => self.reader.on_target_freed(grant, &mut self.out),
                Event::Done { id, outcome, .. } => self.lender.on_done(id.0, outcome, &mut self.out),
                Event::Released { id } => self.lender.on_released(id.0, &mut self.out),
                _ => {}
            }
        }
    }

    /// Posts READs, those of one read after the other, as many as each queue pair may have in flight.
    pub(super) fn transmit_reads(&mut self, now: Instant, sink: &mut impl Sink, budget: &mut usize) {
        let mut blocked = 0;
        while *budget > 0 && blocked < self.reader.active.len() {
            let Some(id) = self.reader.active.pop_front() else { break };
            let mut posted = 0;
            let finished = loop {
                let Some((depth, qps)) = self.reader.wants(id) else { break true };
                if posted == QUANTUM || *budget == 0 || !self.post_read(id, (depth, qps), now, sink) {
                    break false;
                }
                posted += 1;
                *budget -= 1;
            };
            if finished {
                // One of no bytes is complete without a READ.
                self.reader.settle(id, &mut self.out);
            } else {
                self.reader.active.push_back(id);
            }
            blocked = if posted == 0 && !finished { blocked + 1 } else { 0 };
        }
    }

    /// Posts one READ, on the rail whose turn it is. False when no queue pair can take it.
    fn post_read(&mut self, id: u64, most: (u32, usize), now: Instant, sink: &mut impl Sink) -> bool {
        let found = match &self.cfg.rails[..] {
            // A sign of life waits behind READs, too: theirs is the answer's way.
            [_] if !self.rails[0].reading.may_queue() => None,
            [rail] => self.reading_qp(0, most, sink).map(|qp| (0, qp, rail.max_write)),
            _ => {
                let mut tried = 0u64;
                loop {
                    let Some((rail, max)) = self.next_rail(Way::In, tried) else { break None };
                    tried |= 1 << rail;
                    if let Some(qp) = self.reading_qp(rail, most, sink) {
                        break Some((rail, qp, max));
                    }
                }
            }
        };
        let Some((rail, qp, max)) = found else { return false };
        let Some(next) = self.reader.next(id, rail, max) else { return false };
        let number = self.reader.posted(id, &next, qp);
        self.outstanding += 1;
        self.rails[rail].outstanding += 1;
        self.links[qp].posted();
        self.rails[rail].reading.posted(next.piece.len.into(), now);
        sink.read(qp, &next.piece, Token::read(qp, number));
        true
    }

    /// The queue pair of a rail with the fewest READs in flight, if it can take one more.
    fn reading_qp(&self, rail: usize, (depth, qps): (u32, usize), sink: &impl Sink) -> Option<usize> {
        let in_flight = &self.reader.in_flight;
        let limit = depth.min(self.cfg.rails[rail].max_reads);
        let fits =
            |&qp: &usize| self.links[qp].may_carry() && in_flight[qp] < limit && sink.room(qp) > SQ_RESERVE;
        self.rails[rail].qps.clone().take(qps).filter(fits).min_by_key(|&qp| in_flight[qp])
    }
}
