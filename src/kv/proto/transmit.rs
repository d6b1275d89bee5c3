//! `poll_transmit`: cuts WRITEs from plans and packs records into messages, as far as room and credits reach.
//!
//! Control goes first (it is small, and others wait for it), then data, then the headers that the data has made
//! ready. So a write that is one WR leaves as WRITE_WITH_IMM and header in one call.

use super::control::{Class, Counts, Head, Record};
use super::credits::Urgency;
use super::event::{Sink, Token, Transmitted};
use super::outbox::Queued;
use super::plan::Piece;
use super::transfer::{HeaderState, Transfer};
use super::{Connection, Link, Notify, SQ_RESERVE};

/// Work requests of one call (R9).
const BUDGET: usize = 256;
/// Work requests of one transfer before the next one has its turn.
const QUANTUM: usize = 16;

/// What one step of a transfer has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Posted,
    /// No queue pair has the room or the credit that it needs.
    Blocked,
    /// It has nothing more to post.
    Finished,
}

/// The next queue pair, from `start` on, that can take data, and a notification if `notify`. Those of `prefer` first.
fn pick(links: &[Link], sink: &impl Sink, start: usize, notify: bool, prefer: u64) -> Option<usize> {
    let fits =
        |&q: &usize| links[q].open && sink.room(q) > SQ_RESERVE && (!notify || links[q].may_send_data());
    let all = || (0..links.len()).map(|i| (start + i) % links.len());
    all().filter(|&q| prefer >> q & 1 == 1).find(fits).or_else(|| all().find(fits))
}

impl Connection {
    pub(super) fn transmit(&mut self, sink: &mut impl Sink) -> Transmitted {
        let mut budget = BUDGET;
        self.transmit_control(sink, &mut budget);
        self.transmit_data(sink, &mut budget);
        self.transmit_control(sink, &mut budget);
        if self.ready_to_close() {
            self.close_sent = true;
            self.out.queue(Queued::Close);
            self.transmit_control(sink, &mut budget);
        }
        if budget == 0 { Transmitted::More } else { Transmitted::Idle }
    }

    fn transmit_data(&mut self, sink: &mut impl Sink, budget: &mut usize) {
        self.sender.activate(&self.cfg);
        // Ends when all active transfers are blocked, one after the other.
        let mut blocked = 0;
        while *budget > 0 && blocked < self.sender.active.len() {
            // Looked at before anyone's turn: where there is no room, nobody loses it.
            if (0..self.links.len()).all(|q| sink.room(q) <= SQ_RESERVE) {
                break;
            }
            let Some(id) = self.sender.active.pop_front() else { break };
            let mut posted = 0;
            let finished = loop {
                let step = if posted < QUANTUM && *budget > 0 { self.step(id, sink) } else { Step::Blocked };
                match step {
                    Step::Posted => {
                        posted += 1;
                        *budget -= 1;
                    }
                    Step::Blocked => {
                        self.sender.active.push_back(id);
                        break false;
                    }
                    Step::Finished => break true,
                }
            };
            blocked = if posted == 0 && !finished { blocked + 1 } else { 0 };
        }
    }

    /// Posts one work request of a transfer.
    fn step(&mut self, id: u64, sink: &mut impl Sink) -> Step {
        let Some(t) = self.sender.get_mut(id) else { return Step::Finished };
        let (Some(slot), None) = (t.slot, t.abort) else { return Step::Finished };
        if t.cut {
            return self.step_tail(id, sink);
        }
        let by_imm = self.cfg.notify == Notify::Imm;
        let mut cursor = t.cursor;
        let piece = cursor.next(&t.plan, self.cfg.max_write);
        let last = cursor.is_done(&t.plan);
        // Without order every WRITE notifies; with order the last one does, unless a SEND will.
        let notify = by_imm && (last || !self.cfg.ordered);
        // A notification by SEND needs its credit later; an empty transfer is nothing but a notification.
        let needs_credit = notify || piece.is_none();
        let prefer = if last { t.took_part } else { 0 };
        let Some(qp) = pick(&self.links, sink, self.data_qp, needs_credit, prefer) else {
            return Step::Blocked;
        };
        self.data_qp = (qp + 1) % self.links.len();
        t.cursor = cursor;
        t.took_part |= 1 << qp;
        if piece.is_some() || by_imm {
            t.outstanding += 1;
            t.wrs += u64::from(piece.is_some());
            self.outstanding += 1;
            if notify {
                t.notified |= 1 << qp;
                self.links[qp].credits.on_sent_data();
            }
            sink.write(qp, &piece.unwrap_or_default(), notify.then_some(slot.imm()), Token::data(id));
        }
        let wrote = piece.is_some() || by_imm;
        if last {
            t.cut = true;
            t.tail = if self.cfg.ordered { t.took_part & !t.notified } else { 0 };
            t.header = HeaderState::Queued;
            self.sender.headers.push_back(id);
        }
        if notify && !self.cfg.ordered {
            self.sender.posted_mut(slot)[qp] += 1;
        }
        if wrote { Step::Posted } else { self.step_tail(id, sink) }
    }

    /// Ordered only: posts one notification on a queue pair that took part and has none.
    fn step_tail(&mut self, id: u64, sink: &mut impl Sink) -> Step {
        let Some(t) = self.sender.get_mut(id) else { return Step::Finished };
        let (Some(slot), false) = (t.slot, t.tail == 0) else { return Step::Finished };
        let (tail, attempt) = (t.tail, t.attempt);
        let fits =
            |q: &usize| tail >> q & 1 == 1 && sink.room(*q) > SQ_RESERVE && self.links[*q].may_send_data();
        let Some(qp) = (0..self.links.len()).find(fits) else { return Step::Blocked };
        t.tail &= !(1 << qp);
        t.notified |= 1 << qp;
        t.outstanding += 1;
        self.outstanding += 1;
        self.links[qp].credits.on_sent_data();
        match self.cfg.notify {
            Notify::Imm => sink.write(qp, &Piece::default(), Some(slot.imm()), Token::data(id)),
            Notify::Send => {
                self.begin(qp, Class::Data);
                let fits = self.builder.push(&Record::Notify { transfer: id, attempt, slot });
                debug_assert!(fits, "a NOTIFY fits into any message");
                sink.send(qp, self.builder.bytes(), Token::data(id));
            }
        }
        Step::Posted
    }

    fn transmit_control(&mut self, sink: &mut impl Sink, budget: &mut usize) {
        if self.close_sent && self.peer_closed.is_some() && self.out.urgent.is_empty() {
            return;
        }
        for qp in 0..self.links.len() {
            while *budget > 0 && self.links[qp].is_due() {
                if sink.room(qp) == 0 || !self.links[qp].may_send_control(Urgency::Urgent) {
                    break;
                }
                self.begin(qp, Class::Control);
                self.fill_own(qp);
                self.fill_common();
                self.post_control(qp, sink, budget);
            }
        }
        while *budget > 0
            && let Some(urgency) = self.common_urgency()
        {
            let qps = self.links.len();
            let fits = |q: &usize| sink.room(*q) > 0 && self.links[*q].may_send_control(urgency);
            let Some(qp) = (0..qps).map(|i| (self.control_qp + i) % qps).find(fits) else { return };
            self.control_qp = qp;
            self.begin(qp, Class::Control);
            self.fill_common();
            self.post_control(qp, sink, budget);
        }
    }

    fn begin(&mut self, qp: usize, class: Class) {
        let (data_returned, control_returned) = self.links[qp].credits.report();
        self.builder.begin(&Head {
            class,
            epoch: self.cfg.local_epoch,
            resolved_below: self.sender.resolved_below(),
            data_returned,
            control_returned,
            messages: self.incoming.report(),
        });
    }

    fn post_control(&mut self, qp: usize, sink: &mut impl Sink, budget: &mut usize) {
        *budget -= 1;
        self.outstanding += 1;
        self.links[qp].credits.on_sent_control();
        sink.send(qp, self.builder.bytes(), Token::CONTROL);
    }

    /// Records that must travel on this queue pair.
    fn fill_own(&mut self, qp: usize) {
        let link = &mut self.links[qp];
        link.pong &= !self.builder.push(&Record::Pong);
        if link.ping {
            link.ping = !self.builder.push(&Record::Ping);
        }
        while let Some(&id) = link.abort_done.front() {
            if let Some((t, slot, reason)) = aborting(self.sender.get(id)) {
                let posted = match self.sender.posted(slot) {
                    [] => (t.notified >> qp & 1) as u32,
                    counts => counts[qp],
                };
                let record = Record::AbortDone {
                    transfer: id,
                    attempt: t.attempt,
                    grant: t.grant,
                    reason,
                    slot,
                    mask: t.took_part,
                    posted,
                    header: t.header == HeaderState::Posted,
                };
                if !self.builder.push(&record) {
                    return;
                }
            }
            link.abort_done.pop_front();
        }
    }

    /// Drops what has become pointless, and says whether something waits that can travel on any queue pair.
    fn common_urgency(&mut self) -> Option<Urgency> {
        while let Some(&Queued::Abort { transfer }) = self.out.urgent.front()
            && self.sender.get(transfer).is_none_or(|t| t.resolved)
        {
            self.out.urgent.pop_front();
        }
        while let Some(&id) = self.sender.headers.front()
            && self.sender.get(id).is_none_or(|t| t.abort.is_some())
        {
            self.sender.headers.pop_front();
        }
        if !self.out.urgent.is_empty() || self.incoming.must_report() {
            return Some(Urgency::Urgent);
        }
        (!self.sender.headers.is_empty() || self.outgoing.has_fragment()).then_some(Urgency::Bulk)
    }

    /// Fills the rest of a message with records that may travel on any queue pair.
    fn fill_common(&mut self) {
        while let Some(&queued) = self.out.urgent.front() {
            if self.record(queued).is_some_and(|record| !self.builder.push(&record)) {
                return;
            }
            self.out.urgent.pop_front();
        }
        while let Some(&id) = self.sender.headers.front() {
            if !self.push_header(id) {
                return;
            }
            self.sender.headers.pop_front();
        }
        while self.outgoing.next_fragment(self.builder.room(), |record| self.builder.push(record)) {}
    }

    fn record(&self, queued: Queued) -> Option<Record<'static>> {
        Some(match queued {
            Queued::Confirm { transfer, attempt, landed } => Record::Confirm { transfer, attempt, landed },
            Queued::Abort { transfer } => {
                let t = self.sender.get(transfer).filter(|t| !t.resolved)?;
                let reason = t.abort?.reason;
                Record::Abort { transfer, attempt: t.attempt, grant: t.grant, reason, slot: t.slot }
            }
            Queued::AbortEarlier { transfer, grant } => {
                let reason = super::SenderReason::ConnectionLost;
                Record::Abort { transfer, attempt: 0, grant, reason, slot: None }
            }
            Queued::AbortAck { transfer } => Record::AbortAck { transfer },
            Queued::Query { transfer, grant } => Record::Query { transfer, grant },
            Queued::Answer { transfer, landed } => Record::Answer { transfer, landed },
            Queued::Revoke { grant } => Record::Revoke { grant },
            Queued::Revoked { grant } => Record::Revoked { grant },
            Queued::Close => Record::Close { messages: self.outgoing.sent() },
        })
    }

    /// Appends a transfer's header. False if it does not fit.
    fn push_header(&mut self, id: u64) -> bool {
        let Some(t) = self.sender.get(id) else { return true };
        let (Some(slot), None) = (t.slot, t.abort) else { return true };
        self.counts.clear();
        for (qp, n) in self.sender.posted(slot).iter().enumerate() {
            if t.took_part >> qp & 1 == 1 {
                self.counts.extend_from_slice(&n.to_le_bytes());
            }
        }
        let fits = self.builder.push(&Record::Header {
            transfer: id,
            attempt: t.attempt,
            slot,
            grant: t.grant,
            bytes: t.plan.bytes(),
            tag: t.tag,
            mask: t.took_part,
            counts: Counts(&self.counts),
        });
        if fits && let Some(t) = self.sender.get_mut(id) {
            t.header = HeaderState::Posted;
        }
        fits
    }
}

fn aborting(t: Option<&Transfer>) -> Option<(&Transfer, super::control::Slot, super::SenderReason)> {
    let t = t.filter(|t| !t.resolved)?;
    Some((t, t.slot?, t.abort?.reason))
}
