//! `poll_transmit`: cuts WRITEs from plans and packs records into messages, as far as room and credits reach.
//!
//! Control goes first (it is small, and others wait for it), then data, then the headers that the data has made
//! ready. So a write that is one WR leaves as WRITE_WITH_IMM and header in one call.

use super::control::{Class, Head};
use super::credits::Urgency;
use super::event::{Sink, Token, Transmitted};
use super::outbox::Queued;
use super::pace::Way;
use super::plan::{Cursor, Piece};
use super::rails::Rail;
use super::record::{Counts, Record};
use super::transfer::{HeaderState, Transfer};
use super::{Connection, Link, Notify, SQ_RESERVE};
use crate::pages::Checked;
use std::time::Instant;

/// Work requests of one call (R9).
const BUDGET: usize = 256;
/// Work requests of one transfer before the next one has its turn.
const QUANTUM: usize = 16;

/// The next piece of a transfer, for a queue pair that can take it.
struct Cut {
    rail: usize,
    qp: usize,
    /// `None` if there is nothing (left) to copy.
    piece: Option<Piece>,
    /// What the piece is made of, where it is more than one.
    pages: Option<Checked>,
    cursor: Cursor,
    last: bool,
    /// It carries a notification.
    notify: bool,
}

/// What one step of a transfer has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Posted,
    /// It was pages, which take long to make.
    PostedPages,
    /// No queue pair has the room or the credit that it needs.
    Blocked,
    /// It has nothing more to post.
    Finished,
}

/// The next queue pair of a rail that can take data, and a notification if `notify`. Those of `prefer` first.
fn pick(links: &[Link], rail: &Rail, sink: &impl Sink, notify: bool, prefer: u64) -> Option<usize> {
    let fits = |&q: &usize| {
        links[q].may_carry() && sink.room(q) > SQ_RESERVE && (!notify || links[q].may_send_data())
    };
    let all = rail.turn();
    all.clone().filter(|&q| prefer >> q & 1 == 1).find(fits).or_else(|| all.clone().find(fits))
}

impl Connection {
    pub(super) fn transmit(&mut self, now: Instant, sink: &mut impl Sink) -> Transmitted {
        let mut budget = BUDGET;
        self.links.iter_mut().for_each(|link| link.look(now));
        self.settle_reads();
        self.transmit_control(sink, &mut budget);
        // Who had what there was of a send queue is second the next time.
        let before = budget;
        let paged;
        if self.reads_first {
            self.transmit_reads(now, sink, &mut budget);
            self.reads_first = budget == before;
            paged = self.transmit_data(now, sink, &mut budget);
        } else {
            paged = self.transmit_data(now, sink, &mut budget);
            self.reads_first = budget < before;
            self.transmit_reads(now, sink, &mut budget);
        }
        self.transmit_control(sink, &mut budget);
        if self.ready_to_close() {
            self.close_sent = true;
            self.out.queue(Queued::Close);
            self.transmit_control(sink, &mut budget);
        }
        match (paged, budget) {
            (true, _) => Transmitted::Again,
            (false, 0) => Transmitted::More,
            (false, _) => Transmitted::Idle,
        }
    }

    /// True when it has stopped behind a WRITE of pages.
    fn transmit_data(&mut self, now: Instant, sink: &mut impl Sink, budget: &mut usize) -> bool {
        self.sender.activate(&self.cfg);
        // Ends when all active transfers are blocked, one after the other.
        let mut blocked = 0;
        while *budget > 0 && blocked < self.sender.active.len() {
            // Looked at before anyone's turn: where there is no room, nobody loses it.
            if (0..self.links.len()).all(|q| sink.room(q) <= SQ_RESERVE) {
                break;
            }
            let Some(id) = self.sender.active.pop_front() else { break };
            let (mut posted, mut paged) = (0, false);
            let finished = loop {
                let step = if posted < QUANTUM && *budget > 0 && !paged {
                    self.step(id, now, sink)
                } else {
                    Step::Blocked
                };
                match step {
                    Step::Posted | Step::PostedPages => {
                        posted += 1;
                        *budget -= 1;
                        paged = step == Step::PostedPages;
                    }
                    Step::Blocked => {
                        self.sender.active.push_back(id);
                        break false;
                    }
                    Step::Finished => break true,
                }
            };
            if paged {
                return true;
            }
            blocked = if posted == 0 && !finished { blocked + 1 } else { 0 };
        }
        false
    }

    /// Posts one work request of a transfer.
    fn step(&mut self, id: u64, now: Instant, sink: &mut impl Sink) -> Step {
        let Some(t) = self.sender.get_mut(id) else { return Step::Finished };
        let (Some(slot), None, false) = (t.slot, t.abort, t.reopening) else { return Step::Finished };
        if t.cut {
            return self.step_tail(id, now, sink);
        }
        let Some(Cut { rail, qp, piece, pages, cursor, last, notify }) = self.cut(id, sink) else {
            return Step::Blocked;
        };
        let Some(t) = self.sender.get_mut(id) else { return Step::Finished };
        let by_imm = self.cfg.rails[rail].notify == Notify::Imm;
        let posted = if pages.is_some() { Step::PostedPages } else { Step::Posted };
        self.rails[rail].used(qp);
        self.data_rail = (rail + 1) % self.rails.len();
        t.cursor = cursor;
        t.took_part |= 1 << qp;
        if piece.is_some() || by_imm {
            t.outstanding += 1;
            t.wrs += u64::from(piece.is_some());
            if notify {
                t.notified |= 1 << qp;
                self.links[qp].credits.on_sent_data();
            } else {
                t.notified &= !(1 << qp);
            }
            let piece = piece.unwrap_or_default();
            let (imm, token) = (notify.then_some(slot.imm()), Token::data(qp, id));
            match pages {
                None => sink.write(qp, &piece, imm, token),
                Some(pages) => sink.write_pages(qp, &piece, pages, imm, token),
            }
        }
        let wrote = piece.is_some() || by_imm;
        if last {
            t.cut = true;
            t.tail = t.took_part & !t.notified;
            t.header = HeaderState::Queued;
            self.sender.headers.push_back(id);
        }
        if notify {
            self.sender.count_posted(slot, qp);
        }
        if !wrote {
            return self.step_tail(id, now, sink);
        }
        self.on_data_posted(qp, piece.map_or(0, |p| p.len), now);
        posted
    }

    /// Cuts the next piece, for the first rail in turn that has a queue pair for it.
    fn cut(&self, id: u64, sink: &impl Sink) -> Option<Cut> {
        let t = self.sender.get(id)?;
        if let [rail] = &self.cfg.rails[..] {
            return self.rails[0].pace.may_queue().then(|| self.cut_for(t, 0, rail.max_write, sink))?;
        }
        let mut tried = 0u64;
        while let Some((rail, max_write)) = self.next_rail(Way::Out, tried) {
            tried |= 1 << rail;
            let cut = self.cut_for(t, rail, max_write, sink);
            if cut.is_some() {
                return cut;
            }
        }
        None
    }

    /// `pace` is the longest piece that the rail should carry now.
    fn cut_for(&self, t: &Transfer, rail: usize, pace: u32, sink: &impl Sink) -> Option<Cut> {
        let cfg = &self.cfg.rails[rail];
        // Without order every WRITE notifies; with order the last one does, unless a SEND will.
        let finish = |cursor: Cursor, piece: Option<Piece>, pages: Option<Checked>| {
            let last = cursor.is_done(&t.plan);
            let notify = cfg.notify == Notify::Imm && (last || !cfg.ordered);
            // A notification by SEND needs its credit later; an empty transfer is nothing but a notification.
            let needs_credit = notify || piece.is_none();
            let prefer = if last { t.took_part } else { 0 };
            let qp = pick(&self.links, &self.rails[rail], sink, needs_credit, prefer)?;
            Some(Cut { rail, qp, piece, pages, cursor, last, notify })
        };
        let mut cursor = t.cursor;
        // One of the rail speaks for the others: where that is wrong, the next WRITE goes without pages.
        let speaker = self.rails[rail].turn().next()?;
        let most = |key| sink.takes_pages(speaker, key).min(cfg.max_write);
        if let Some((piece, pages)) = cursor.next_pages(&t.plan, rail, pace, most) {
            let cut = finish(cursor, Some(piece), Some(pages))?;
            if cut.qp == speaker || sink.takes_pages(cut.qp, piece.lkey) >= piece.len {
                return Some(cut);
            }
        }
        let mut cursor = t.cursor;
        let piece = cursor.next(&t.plan, rail, pace);
        finish(cursor, piece, None)
    }

    /// Ordered only: posts one notification on a queue pair that took part and has none.
    fn step_tail(&mut self, id: u64, now: Instant, sink: &mut impl Sink) -> Step {
        let Some(t) = self.sender.get_mut(id) else { return Step::Finished };
        let (Some(slot), false) = (t.slot, t.tail == 0) else { return Step::Finished };
        let (tail, attempt) = (t.tail, t.attempt);
        let fits =
            |q: &usize| tail >> q & 1 == 1 && sink.room(*q) > SQ_RESERVE && self.links[*q].may_send_data();
        let Some(qp) = (0..self.links.len()).find(fits) else { return Step::Blocked };
        t.tail &= !(1 << qp);
        t.notified |= 1 << qp;
        t.outstanding += 1;
        self.on_data_posted(qp, 0, now);
        self.sender.count_posted(slot, qp);
        self.links[qp].credits.on_sent_data();
        match self.cfg.rails[self.links[qp].rail].notify {
            Notify::Imm => sink.write(qp, &Piece::default(), Some(slot.imm()), Token::data(qp, id)),
            Notify::Send => {
                self.begin(qp, Class::Data);
                let fits = self.builder.push(&Record::Notify { transfer: id, attempt, slot });
                debug_assert!(fits, "a NOTIFY fits into any message");
                sink.send(qp, self.builder.bytes(), Token::data(qp, id));
            }
        }
        Step::Posted
    }

    fn transmit_control(&mut self, sink: &mut impl Sink, budget: &mut usize) {
        let nothing_left = self.out.is_empty() && !self.is_recovering();
        if self.both_closed() && nothing_left {
            return;
        }
        for qp in 0..self.links.len() {
            while *budget > 0 && self.links[qp].is_due() {
                if sink.room(qp) == 0 || !self.links[qp].may_send_own() {
                    break;
                }
                self.begin(qp, Class::Control);
                self.fill_own(qp);
                if self.links[qp].proven {
                    self.fill_common();
                }
                self.post_control(qp, sink, budget);
            }
        }
        while *budget > 0
            && let Some(urgency) = self.common_urgency()
        {
            let qps = self.links.len();
            let fits = |q: &usize| sink.room(*q) > 0 && self.links[*q].may_send_control(urgency);
            let all = (0..qps).map(|i| (self.control_qp + i) % qps);
            // Others wait for it, so a slow rail is taken only if there is no other.
            let found =
                all.clone().filter(|&q| !self.is_slow(q)).find(fits).or_else(|| all.clone().find(fits));
            let Some(qp) = found else { return };
            self.control_qp = qp;
            self.begin(qp, Class::Control);
            self.fill_common();
            self.post_control(qp, sink, budget);
        }
    }

    fn begin(&mut self, qp: usize, class: Class) {
        let (data_returned, control_returned) = self.links[qp].credits.report();
        let number = (self.rails.len() > 1).then_some(self.links[qp].number);
        self.builder.begin(&Head {
            number,
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
        let link = &mut self.links[qp];
        self.rails[link.rail].outstanding += 1;
        link.posted();
        let count = link.credits.control_sent();
        link.credits.on_sent_control();
        if self.rails.len() > 1 {
            let records = self.builder.records();
            self.resend.keep(&mut link.kept, count, link.number, records);
            link.number += records.len() as u64;
        }
        sink.send(qp, self.builder.bytes(), Token::control(qp, count));
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
                    // With several rails, one that comes late is nothing.
                    header: self.rails.len() == 1 && t.header == HeaderState::Posted,
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
        while let Some(Queued::Abort { transfer }) = self.out.front()
            && self.sender.get(transfer).is_none_or(|t| t.resolved)
        {
            self.out.pop();
        }
        while let Some(&id) = self.sender.headers.front()
            && !self.sender.is_header_due(id)
        {
            self.sender.headers.pop_front();
        }
        if !self.out.is_empty() || self.incoming.must_report() {
            return Some(Urgency::Urgent);
        }
        let again = !self.resend.is_empty() || !self.talks.is_empty();
        let asks = self.reader.has_ask() || self.outgoing.has_fragment();
        (again || asks || !self.sender.headers.is_empty()).then_some(Urgency::Bulk)
    }

    /// Fills the rest of a message with records that may travel on any queue pair.
    fn fill_common(&mut self) {
        while let Some(queued) = self.out.front() {
            if self.record(queued).is_some_and(|record| !self.builder.push(&record)) {
                return;
            }
            self.out.pop();
        }
        while self.resend.next(|record| self.builder.push(record)) {}
        while let Some((rail, bytes)) = self.talks.front() {
            if !self.builder.push(&Record::RailTalk { rail: *rail as u16, bytes }) {
                break;
            }
            self.talks.pop_front();
        }
        while let Some(&id) = self.sender.headers.front() {
            if !self.push_header(id) {
                return;
            }
            self.sender.headers.pop_front();
        }
        // At most what could be sent again, should the rail fail.
        let most = self.resend.room();
        while self.reader.next_ask(self.builder.room().min(most), |record| self.builder.push(record)) {}
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
            Queued::Answer { transfer, resolution } => Record::Answer { transfer, resolution },
            Queued::Revoke { grant } => Record::Revoke { grant },
            Queued::Revoked { grant } => Record::Revoked { grant },
            Queued::ReadDone { grant, bytes, reason } => Record::ReadDone { grant, bytes, reason },
            Queued::ReadRefused { target, why } => Record::ReadRefused { target, why },
            Queued::Close => Record::Close { messages: self.outgoing.sent(), reads: self.reader.said },
            Queued::Reopen { transfer } => {
                let t =
                    self.sender.get(transfer).filter(|t| t.reopening && !t.resolved && t.abort.is_none())?;
                let (attempt, grant, reset) = (t.attempt, t.grant, t.reset);
                Record::Reopen { transfer, attempt, slot: t.slot?, grant, reset }
            }
            Queued::Reopened { transfer, attempt } => Record::Reopened { transfer, attempt },
            Queued::AbortQuiet { transfer } => {
                let (t, slot, reason) = aborting(self.sender.get(transfer))?;
                let (attempt, grant) = (t.attempt, t.grant);
                Record::AbortDone {
                    transfer,
                    attempt,
                    grant,
                    reason,
                    slot,
                    mask: 0,
                    posted: 0,
                    header: false,
                }
            }
            Queued::RailDown { rail, generation } => Record::RailDown { rail, generation },
            Queued::Fenced { rail, generation } => Record::Fenced { rail, generation },
        })
    }

    /// Appends a transfer's header. False if it does not fit.
    fn push_header(&mut self, id: u64) -> bool {
        let Some(t) = self.sender.get(id).filter(|_| self.sender.is_header_due(id)) else { return true };
        let Some(slot) = t.slot else { return true };
        self.counts.clear();
        // A later attempt is counted everywhere: earlier ones have notified, too.
        let counted = if t.attempt == 0 { t.took_part & !self.receiver.ordered } else { t.took_part };
        for (qp, n) in self.sender.posted(slot).iter().enumerate() {
            if counted >> qp & 1 == 1 {
                // With what is still to be posted.
                let n = n + (t.tail >> qp & 1) as u32;
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

fn aborting(t: Option<&Transfer>) -> Option<(&Transfer, super::record::Slot, super::SenderReason)> {
    let t = t.filter(|t| !t.resolved)?;
    Some((t, t.slot?, t.abort?.reason))
}
