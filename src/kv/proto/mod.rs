//! The protocol of a KV channel: sans-io and deterministic. No sockets, no clock, no tasks, no provider.
//!
//! ```text
//!   write, abort, issue_grant, revoke_grant, send_message, close     what the user wants
//!   read, abort_read, issue_read_grant, serve                        the same of reads
//!   handle_sent, handle_recv, handle_timeout, connection_lost        what has happened
//!   rail_failed, rail_fenced, rail_up, rail_talk                     of one rail, where there are several
//!   poll_transmit(now, &mut Sink)                                    WRITEs, READs and SENDs to post
//!   poll_timeout, poll_event                                         when to call, what to tell
//! ```
//!
//! After any call that is not a poll: [`Connection::poll_transmit`] until `Idle`, [`Connection::poll_event`] until
//! `None`, and read [`Connection::poll_timeout`] again. One `Connection` is one connection; what must survive it is in
//! its [`Ledger`].
//!
//! A write, on a transport that orders (RC), over two queue pairs:
//!
//! ```text
//!   sender                                        receiver
//!     qp 0: WRITE, WRITE, WRITE + imm ─────────▶  1 notification on qp 0
//!     qp 1: WRITE, WRITE, (0 bytes) + imm ─────▶  1 notification on qp 1
//!     any:  SEND header {qps 0 and 1} ─────────▶  Arrived, when all three are there, in any order
//!   Done(Landed) ◀───────────────── SEND confirm
//! ```
//!
//! Without order every WRITE carries the immediate and the header counts them. Without immediates a SEND takes
//! its place.
//!
//! What the files hold: `plan` what to copy, and `seams` where; `sender` (with its `slots`) and `receiver` the two halves, `aborted` that of
//! a receiver whose transfer will not land; `transmit` packs and cuts; `control` the codec of messages, `record` what is in them, and `codec`
//! how that is written; `link` one queue pair, with its
//! `credits` and `liveness`; `rails` those of one device, `pace` which of them is next, `reopen` and `resend` what a rail
//! that fails has lost; `deadlines` what is overdue, and `word` what the peer has still to say; `message` the application's messages; `ledger` what outlives a connection; `numbered` a list of what ends in
//! any order. Reads:
//! `reader` and `lender` are the two halves, `flights` and `asking` the two ways, `reads` the calls.
//!
//! The duties of the caller:
//! - Each token given to the [`Sink`] is handed back once, by [`Connection::handle_sent`], also for work requests
//!   that were flushed or could not be posted.
//! - A receive that was consumed is posted again before the next `poll_transmit`, which gives its credit back.
//! - What has been received is handed in before a failed work request is, and before [`Connection::handle_timeout`] and
//!   `connection_lost` are called. (A completion queue that serves all queue pairs keeps that order by itself.)
//! - After [`Event::RailDown`]: the same for the queue pairs of that rail only, then [`Connection::rail_fenced`]. Nothing
//!   that a new queue pair has received is handed in before [`Connection::rail_up`].
//! - After [`Event::Lost`]: queue pairs to ERR, all flushes handed in, queue pairs destroyed, then
//!   [`Connection::fenced`]. Only then may the ledger start the next connection.

mod aborted;
mod asking;
mod codec;
mod config;
mod control;
mod credits;
mod deadlines;
mod dispatch;
mod event;
mod flights;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod ledger;
mod lender;
mod link;
mod liveness;
mod message;
mod numbered;
mod outbox;
mod pace;
mod plan;
mod rails;
mod ranges;
mod reader;
mod reads;
mod receiver;
mod record;
mod reopen;
mod resend;
mod runs;
mod seams;
mod sender;
mod slots;
mod transfer;
mod transmit;
mod word;

#[cfg(test)]
pub(crate) mod sim;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Instant;

pub(crate) use config::{
    Config, ConfigError, DAY, MAX_CONTROL_CREDITS, MAX_QPS, Notify, Opening, RailConfig, SQ_RESERVE,
};
pub(crate) use event::*;
pub use event::{
    AbortReason, Cause, ProtocolViolation, ReadRefusal, Reason, Resolution, SenderReason, TransferId,
};
pub(crate) use ledger::{Ledger, Numbers};
pub(crate) use message::MAX_MESSAGE;
pub(crate) use rails::{RailState, TalkRefused};
pub(crate) use reader::{ReadBy, ReadRequest};
pub(crate) use {
    config::Credits,
    plan::{List, Piece, Plan, PlanBuilder, PlanError},
    seams::{Part, PoolSeams, Seams},
};

use control::Builder;
use lender::Lender;
use link::Link;
use outbox::Outbox;
use rails::Rail;
use reader::Reader;
use receiver::Receiver;
use resend::Resend;
use sender::Sender;
use word::Word;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Work requests may still be outstanding.
    Lost,
    Fenced,
    Closed,
}

/// One connection of a channel: both directions.
#[derive(Debug)]
pub(crate) struct Connection {
    cfg: Config,
    state: State,
    rails: Vec<Rail>,
    links: Vec<Link>,
    sender: Sender,
    receiver: Receiver,
    reader: Reader,
    lender: Lender,
    outgoing: message::Outgoing,
    incoming: message::Incoming,
    out: Outbox,
    /// Control that a rail has lost.
    resend: Resend,
    /// What is to be said of rails that come back.
    talks: VecDeque<(usize, Vec<u8>)>,
    /// Work requests that have been posted and have not completed.
    outstanding: u64,
    /// We want to close; until when.
    closing: bool,
    close_deadline: Option<Instant>,
    close_sent: bool,
    /// The peer has closed, after so many messages and words on reads.
    peer_closed: Option<(u64, u64)>,
    /// All of which has left, so that it comes.
    hear_by: Option<Word>,
    /// When a rail was fenced last, and what it had lost was said again.
    fenced_at: Option<Instant>,
    refused: u64,
    /// Where the next data work request, and the next control message, are tried first.
    data_rail: usize,
    control_qp: usize,
    /// READs are posted before data, the next time.
    reads_first: bool,
    /// We have come too late, and waited anew for what the peer owes.
    excused: bool,
    builder: Builder,
    /// Scratch of a header's counts.
    counts: Vec<u8>,
}

/// Counts that a connection keeps.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    /// Writes and messages that were refused before anything was posted.
    pub(crate) refused: u64,
    pub(crate) landed: u64,
    pub(crate) not_delivered: u64,
    pub(crate) in_doubt: u64,
    pub(crate) arrived: u64,
}

impl Connection {
    /// A connection between two endpoints whose queue pairs are connected and whose receives are posted. `ledger` is
    /// new, or that of the connection before, which must be fenced: then what was in doubt is asked for.
    pub(crate) fn new(cfg: Config, ledger: Ledger, now: Instant) -> Result<Self, ConfigError> {
        cfg.check()?;
        if ledger.local_epoch != cfg.local_epoch {
            let must = "the epoch of the ledger";
            return Err(ConfigError { what: "local_epoch", got: cfg.local_epoch, must });
        }
        let mut out = Outbox::default();
        let ledger = ledger.meet(cfg.peer_epoch, &mut out);
        let rails = cfg.rails.iter().enumerate();
        let links = rails.flat_map(|(n, r)| (0..r.qps).map(move |_| Link::new(n, r, now))).collect();
        Ok(Self {
            state: State::Open,
            rails: Rail::all(&cfg, now),
            links,
            sender: Sender::new(&cfg, ledger.tx, &mut out),
            receiver: Receiver::new(&cfg, ledger.rx, now, &mut out),
            reader: Reader::new(&cfg),
            lender: Lender::default(),
            outgoing: message::Outgoing::default(),
            incoming: message::Incoming::default(),
            out,
            resend: Resend::new(cfg.max_control),
            talks: VecDeque::new(),
            outstanding: 0,
            closing: false,
            close_deadline: None,
            close_sent: false,
            peer_closed: None,
            hear_by: None,
            fenced_at: None,
            refused: 0,
            data_rail: 0,
            control_qp: 0,
            reads_first: true,
            excused: false,
            builder: Builder::new(cfg.max_control),
            counts: Vec::new(),
            cfg,
        })
    }

    /// What the next connection needs. For after `fenced` or `Closed`: on a live connection this gives it up, and
    /// the events that tell of that are lost.
    pub(crate) fn into_ledger(mut self) -> Ledger {
        if self.state != State::Closed {
            self.fenced();
        }
        Ledger {
            local_epoch: self.cfg.local_epoch,
            peer_epoch: self.cfg.peer_epoch,
            tx: self.sender.ledger,
            rx: self.receiver.ledger,
        }
    }

    /// Accepts a transfer, or refuses it with nothing posted (K6, R10). An accepted one uses its grant up, whatever
    /// becomes of it, and ends with exactly one `Done` and one `Released`.
    pub(crate) fn write(&mut self, req: WriteRequest, now: Instant) -> Result<TransferId, Refused> {
        let id = self.write_gated(req, now)?;
        self.ungate(id);
        Ok(id)
    }

    /// As [`write`](Self::write), of which nothing is posted before [`ungate`](Self::ungate): its data is not ready yet. It has
    /// a deadline, and ends, as any other.
    pub(crate) fn write_gated(&mut self, req: WriteRequest, _now: Instant) -> Result<TransferId, Refused> {
        let result = if self.state != State::Open || self.closing || self.peer_closed.is_some() {
            Err(Refused::Closed)
        } else {
            self.sender.write(&self.cfg, req)
        };
        self.refused += u64::from(result.is_err());
        result
    }

    /// As many transfers are unresolved as may be: a write has to wait.
    pub(crate) fn is_full(&self) -> bool {
        self.state == State::Open && !self.closing && self.sender.is_full()
    }

    /// Lets a gated transfer begin. Others are ignored.
    pub(crate) fn ungate(&mut self, id: TransferId) {
        self.sender.ungate(id.0);
    }

    /// Cancels a transfer. Its outcome is still `Landed` if the receiver has delivered it; unknown ones are ignored.
    pub(crate) fn abort(&mut self, id: TransferId, now: Instant) {
        if self.state == State::Open {
            self.abort_for(id.0, SenderReason::Cancelled, now);
        }
    }

    fn abort_for(&mut self, id: u64, reason: SenderReason, now: Instant) {
        let mask = self.sender.abort(&self.cfg, id, reason, now, &mut self.out);
        self.queue_abort_done(id, mask);
    }

    fn queue_abort_done(&mut self, id: u64, mask: Option<u64>) {
        let Some(mask) = mask else { return };
        for (qp, link) in self.links.iter_mut().enumerate() {
            if mask >> qp & 1 == 1 {
                link.abort_done.push_back(id);
            }
        }
    }

    /// A grant for the peer, for at most `max_bytes`. It ends with `Arrived`, or with `Aborted` and then `Freed`.
    pub(crate) fn issue_grant(&mut self, max_bytes: u64) -> u64 {
        self.receiver.issue_grant(max_bytes)
    }

    /// Takes a grant back: `Aborted` at once, and `Freed` when no write can reach its blocks, or nobody reads them; the connection
    /// ends when the peer does not say so in time. Does nothing if the grant has ended.
    pub(crate) fn revoke_grant(&mut self, grant: u64, now: Instant) {
        if self.state != State::Open {
            return;
        }
        if self.lender.has(grant) {
            self.revoke_read_grant(grant, now);
        } else {
            self.receiver.revoke_grant(&self.cfg, grant, now, &mut self.out);
        }
    }

    /// Queues a message for the peer's application: reliable and in order while this connection lives, at most
    /// [`MAX_MESSAGE`] bytes. A refused one comes back.
    pub(crate) fn send_message(&mut self, message: Vec<u8>) -> Result<(), (MessageRefused, Vec<u8>)> {
        let result = if self.state != State::Open || self.closing || self.peer_closed.is_some() {
            Err((MessageRefused::Closed, message))
        } else {
            self.outgoing.send(message)
        };
        self.refused += u64::from(result.is_err());
        result
    }

    /// The application has taken the oldest message that an event has handed out, of `len` bytes: the peer may send as
    /// much more.
    pub(crate) fn message_taken(&mut self, len: usize) {
        self.incoming.on_taken(len);
    }

    /// A posted work request has completed; `ok` is false if it failed, was flushed or could not be posted.
    pub(crate) fn handle_sent(&mut self, token: Token, ok: bool, now: Instant) {
        debug_assert!(self.outstanding > 0, "a token handed back twice");
        self.outstanding = self.outstanding.saturating_sub(1);
        self.on_rail_sent(token, ok, now);
        match (token.transfer(), self.state) {
            (Some(TransferId(id)), State::Open) => {
                let mask = self.sender.on_sent(id, now, &mut self.out);
                self.queue_abort_done(id, mask);
            }
            (Some(TransferId(id)), _) => self.sender.on_sent_lost(id, &mut self.out),
            (None, state) => match token.read_number() {
                Some(n) if state == State::Open => self.reader.on_sent(n, ok, now, &mut self.out),
                Some(n) => self.reader.on_sent_lost(n, &mut self.out),
                None => {}
            },
        }
        self.finish_closing();
    }

    /// A receive of queue pair `qp` has completed. It must be posted again before the next `poll_transmit`. After an
    /// error the connection is lost.
    pub(crate) fn handle_recv(
        &mut self,
        qp: usize,
        received: Received<'_>,
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        if self.state != State::Open {
            return Ok(());
        }
        let result = self.receive(qp, received, now);
        if let Err(violation) = result {
            self.lost(Cause::Violation(violation));
        }
        self.finish_closing();
        result
    }

    /// Posts what can be posted now, in bounded time.
    pub(crate) fn poll_transmit(&mut self, now: Instant, sink: &mut impl Sink) -> Transmitted {
        if self.state != State::Open {
            return Transmitted::Idle;
        }
        self.transmit(now, sink)
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.settle_reads();
        self.out.events.pop_front()
    }

    /// The queue pairs have failed, or the caller gives the connection up. Every outcome is told at once.
    pub(crate) fn connection_lost(&mut self, cause: Cause, _now: Instant) {
        self.lost(cause);
    }

    fn lost(&mut self, cause: Cause) {
        if self.state != State::Open {
            return;
        }
        if self.both_closed() {
            // The peer has destroyed its queue pairs, as it may.
            self.state = State::Closed;
            self.out.event(Event::Closed);
            return;
        }
        // What has happened by now is told first.
        self.settle_reads();
        self.state = State::Lost;
        self.out.forget_records();
        self.out.event(Event::Lost(cause));
        self.sender.on_lost(cause, &mut self.out);
        self.sender.end_with_connection(self.out.serving.keys().copied());
        self.receiver.on_lost(&mut self.out);
        self.reader.on_lost(cause, &mut self.out);
        self.lender.on_lost(&mut self.out);
    }

    /// The queue pairs are destroyed: no device reads our sources or writes to our targets any more.
    pub(crate) fn fenced(&mut self) {
        self.lost(Cause::Local);
        if self.state == State::Lost {
            self.state = State::Fenced;
            self.sender.on_fenced(&mut self.out);
            self.receiver.on_fenced(&mut self.out);
            self.reader.on_fenced(&mut self.receiver, &mut self.out);
            self.lender.on_fenced(&mut self.out);
            // Events of what was behind reads: those have had theirs.
            self.out.of_reads.clear();
        }
    }

    /// Graceful: accepts nothing new, finishes what has been accepted on both sides, then `Event::Closed`; `Lost`
    /// at the deadline.
    pub(crate) fn close(&mut self, deadline: Instant, _now: Instant) {
        if self.state == State::Open {
            self.closing = true;
            self.close_deadline = Some(self.close_deadline.map_or(deadline, |d| d.min(deadline)));
        }
    }

    /// It has ended, with nothing left undone on either side.
    pub(crate) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Transfers have something to post, and no queue pair that could carry it has a receive of the peer's left.
    pub(crate) fn waits_for_credits(&self) -> bool {
        let mut carrying = self.links.iter().filter(|link| link.may_carry()).peekable();
        !self.sender.active.is_empty()
            && carrying.peek().is_some()
            && carrying.all(|link| !link.may_send_data())
    }

    /// Everything of ours is done, and it is time to say so.
    fn ready_to_close(&self) -> bool {
        self.closing
            && !self.close_sent
            && self.sender.is_idle()
            && self.reader.is_idle()
            && !self.lender.is_busy()
            && self.outgoing.is_empty()
            && self.out.is_empty()
            && self.resend.is_empty()
    }

    /// Both sides have said that they are done, and all that the peer said has been heard. What we would still say
    /// (that a grant is revoked, or was) is worth sending, but the peer need not wait for it.
    fn both_closed(&self) -> bool {
        self.close_sent && self.has_heard_all() && !self.lender.is_busy()
    }

    /// The peer has closed, and what it had said before has come.
    fn has_heard_all(&self) -> bool {
        let heard = (self.incoming.delivered(), self.lender.heard);
        self.peer_closed == Some(heard) && !self.lender.is_asked_in_part()
    }

    fn finish_closing(&mut self) {
        let done = self.outstanding == 0 && self.out.is_empty() && !self.is_recovering();
        if self.state == State::Open && self.both_closed() && done {
            self.state = State::Closed;
            self.out.event(Event::Closed);
        }
    }

    #[cfg(test)]
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            refused: self.refused,
            landed: self.sender.landed,
            not_delivered: self.sender.not_delivered,
            in_doubt: self.sender.in_doubt,
            arrived: self.receiver.arrived,
        }
    }
}

#[cfg(test)]
impl Connection {
    /// With nothing under way: slots are free, and each credit that we lack is one that the peer has not yet given back.
    fn assert_at_rest(&self, peer: &Self) {
        assert_eq!(self.sender.slots.free(), usize::from(self.cfg.max_transfers), "slots are missing");
        assert!(self.receiver.is_idle(), "slots are busy");
        assert_eq!(self.outstanding, 0);
        for (ours, theirs) in self.links.iter().zip(&peer.links).filter(|(a, b)| a.up && b.up) {
            assert_eq!(ours.credits.outstanding(), theirs.credits.unreported(), "k7: credits are lost");
        }
    }
}
