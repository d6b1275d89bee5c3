//! The owner's half of reads: grants to read, from the day they are issued until nobody reads their blocks any more.
//!
//! ```text
//!              ┌── READ_DONE ─────────────────────────────────────────────▶ over     the peer has read by READs
//!   idle ──────┼── READ_ASK, all of it ──▶ asked ── served ──▶ serving ───▶ over     we write, as with any transfer
//!              └── revoked: REVOKE ──▶ REVOKED ───────────────────────────▶ over     it was never used
//! ```
//!
//! Blocks that the peer may be reading are given back (`Served`, or `Freed` after `Aborted`) when it has said that it does not
//! read any more, when our own transfer from them is over, or when the queue pairs are destroyed. What a READ does cannot be
//! seen here: a peer that says nothing keeps them until they are taken back, and then for as long as its last word is waited for
//! (`word`); one that says so too early reads what is in them later.

use std::collections::BTreeMap;
use std::time::Instant;

use super::asking::ASK_WINDOW;
use super::config::Config;
use super::event::{AbortReason, Event, Outcome, ProtocolViolation, ReadRefusal, Reason, SenderReason};
use super::message::{Gaps, MAX_MESSAGE, Partial};
use super::outbox::{Outbox, Queued};
use super::word::{Word, Words};

type Result<T = ()> = std::result::Result<T, ProtocolViolation>;

fn broken<T>(rule: &'static str) -> Result<T> {
    Err(ProtocolViolation::Rule(rule))
}

#[derive(Debug)]
enum State {
    Idle,
    /// Parts of a request have come, to write under `target`.
    Asking {
        target: u64,
        request: Partial,
    },
    /// The request was handed out, and is not answered yet.
    Asked {
        target: u64,
    },
    /// Our transfer of this number serves it.
    Serving {
        transfer: u64,
        bytes: u64,
        outcome: Option<Outcome>,
        released: bool,
    },
}

#[derive(Debug)]
struct Loan {
    /// The most bytes that can be read under it.
    most: u64,
    revoking: bool,
    word: Option<Word>,
    state: State,
}

impl Loan {
    /// The peer's last word, while it is the peer's to say.
    fn awaited(&mut self) -> Option<&mut Word> {
        match self.state {
            State::Idle | State::Asking { .. } => self.word.as_mut(),
            State::Asked { .. } | State::Serving { .. } => None,
        }
    }
}

/// Grants to read that are open.
#[derive(Debug, Default)]
pub(super) struct Lender {
    loans: BTreeMap<u64, Loan>,
    /// Bytes of requests that have not come completely.
    held: usize,
    gaps: Gaps,
    /// On grants that were taken back.
    words: Words,
    /// READ_DONE and READ_ASK records that have come.
    pub(super) heard: u64,
}

impl Lender {
    /// `grant` is a number of its own: no other grant of this side has it, to write or to read. The peer has room for `most`
    /// bytes.
    pub(super) fn issue(&mut self, grant: u64, most: u64) {
        self.loans.insert(grant, Loan { most, revoking: false, word: None, state: State::Idle });
    }

    pub(super) fn has(&self, grant: u64) -> bool {
        self.loans.contains_key(&grant)
    }

    /// A transfer of ours serves a read, or is about to.
    pub(super) fn is_busy(&self) -> bool {
        self.loans.values().any(|l| !matches!(l.state, State::Idle))
    }

    /// A part of a request has not come.
    pub(super) fn is_asked_in_part(&self) -> bool {
        self.loans.values().any(|l| matches!(l.state, State::Asking { .. }))
    }

    /// From here on nobody is to read it. Answers the transfer to abort, if one serves it.
    pub(super) fn revoke(&mut self, cfg: &Config, grant: u64, now: Instant, out: &mut Outbox) -> Option<u64> {
        let loan = self.loans.get_mut(&grant).filter(|l| !l.revoking)?;
        loan.revoking = true;
        out.event(Event::Aborted { grant, reason: AbortReason::Revoked });
        match loan.state {
            State::Serving { transfer, .. } => return Some(transfer),
            State::Idle | State::Asking { .. } => {
                loan.word = Some(self.words.wait(cfg, now));
                out.queue(Queued::Revoke { grant });
            }
            // The answer will be no.
            State::Asked { .. } => {}
        }
        None
    }

    /// When the peer must have said its last word on a grant that was taken back.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.words.timeout()
    }

    /// False when the peer has not said its last word on a grant in time.
    pub(super) fn is_in_time(&mut self, cfg: &Config, recovering: bool, now: Instant) -> bool {
        let words = self.loans.values_mut().filter_map(Loan::awaited);
        self.words.are_in_time(cfg, recovering, now, words)
    }

    /// It gets its whole time once more.
    pub(super) fn wait_again(&mut self, cfg: &Config, now: Instant) {
        let words = self.loans.values_mut().filter_map(Loan::awaited);
        words.for_each(|word| *word = Word::new(cfg, now));
    }

    /// The peer has read by READs, or has given up.
    pub(super) fn on_read_done(
        &mut self,
        grant: u64,
        bytes: u64,
        reason: Option<SenderReason>,
        out: &mut Outbox,
    ) -> Result {
        self.heard += 1;
        let Some(loan) = self.loans.get(&grant) else {
            // It was revoked as the peer ended.
            return Ok(());
        };
        if !matches!(loan.state, State::Idle) {
            return broken("a read that ended both by us and by the peer");
        }
        if bytes > loan.most {
            return broken("more bytes read than the reader has room for");
        }
        match reason {
            None => self.end(grant, Ok((bytes, false)), out),
            Some(reason) => self.end(grant, Err(AbortReason::Reader(reason)), out),
        }
        Ok(())
    }

    /// The peer has burned a grant that it does not use, or not any more: a read that it has cancelled may have asked, and
    /// parts of its request be late.
    pub(super) fn on_revoked(&mut self, grant: u64, out: &mut Outbox) -> Result {
        let state = self.loans.get(&grant).filter(|l| l.revoking).map(|l| &l.state);
        match state {
            Some(State::Idle) => {}
            Some(State::Asking { request, .. }) => {
                self.held -= request.len();
                self.gaps.forget(request);
            }
            // The answer, which is no, will end it.
            Some(State::Asked { .. }) => return Ok(()),
            _ => return broken("a grant to read burned that was not revoked, or that is in use"),
        }
        self.end(grant, Err(AbortReason::Revoked), out);
        Ok(())
    }

    /// A part of the peer's request that we write to it. The last one hands the request out.
    pub(super) fn on_ask(
        &mut self,
        grant: u64,
        target: u64,
        total: u32,
        offset: u32,
        bytes: &[u8],
        out: &mut Outbox,
    ) -> Result {
        self.heard += 1;
        let Some(loan) = self.loans.get_mut(&grant) else {
            // Late, as above: it has ended without. One part says so for all of them.
            if offset == 0 {
                out.queue(Queued::ReadRefused { target, why: ReadRefusal::Revoked });
            }
            return Ok(());
        };
        if let State::Idle = loan.state {
            let size = total as usize;
            if size > MAX_MESSAGE || self.held + size > ASK_WINDOW {
                return broken("a request to write that is too long");
            }
            self.held += size;
            loan.state = State::Asking { target, request: Partial::new(size) };
        } else if total == 0 {
            return broken("two requests under one grant to read");
        }
        let State::Asking { target: first, request } = &mut loan.state else {
            return broken("two requests under one grant to read");
        };
        if *first != target {
            return broken("two requests under one grant to read");
        }
        request.insert(total, offset, bytes, &mut self.gaps)?;
        if !request.is_complete() {
            return Ok(());
        }
        self.held -= request.len();
        let request = request.take();
        loan.state = State::Asked { target };
        out.event(Event::ReadAsked { grant, target, request });
        Ok(())
    }

    /// What was asked for under `grant` and is not answered: where to write to, and whether it was revoked meanwhile.
    pub(super) fn asked(&self, grant: u64) -> Option<(u64, bool)> {
        let loan = self.loans.get(&grant)?;
        match loan.state {
            State::Asked { target } => Some((target, loan.revoking)),
            _ => None,
        }
    }

    /// The answer is a transfer of ours.
    pub(super) fn serving(&mut self, grant: u64, transfer: u64, bytes: u64, out: &mut Outbox) {
        if let Some(loan) = self.loans.get_mut(&grant) {
            loan.state = State::Serving { transfer, bytes, outcome: None, released: false };
            out.serving.insert(transfer, grant);
        }
    }

    /// The answer is no.
    pub(super) fn refused(&mut self, grant: u64, why: ReadRefusal, out: &mut Outbox) {
        self.end(grant, Err(AbortReason::ReadRefused(why)), out);
    }

    /// The transfer has an outcome.
    pub(super) fn on_done(&mut self, transfer: u64, done: Outcome, out: &mut Outbox) {
        let Some(&grant) = out.serving.get(&transfer) else { return };
        if let Some(State::Serving { outcome, .. }) = self.loans.get_mut(&grant).map(|l| &mut l.state) {
            *outcome = Some(done);
        }
        self.settle(grant, out);
    }

    /// No device reads its source any more.
    pub(super) fn on_released(&mut self, transfer: u64, out: &mut Outbox) {
        let Some(&grant) = out.serving.get(&transfer) else { return };
        if let Some(State::Serving { released, .. }) = self.loans.get_mut(&grant).map(|l| &mut l.state) {
            *released = true;
        }
        self.settle(grant, out);
    }

    fn settle(&mut self, grant: u64, out: &mut Outbox) {
        let Some(State::Serving { transfer, bytes, outcome: Some(outcome), released: true }) =
            self.loans.get(&grant).map(|l| &l.state)
        else {
            return;
        };
        let (transfer, bytes, outcome) = (*transfer, *bytes, *outcome);
        out.serving.remove(&transfer);
        let result = match outcome {
            Outcome::Landed => Ok((bytes, true)),
            // The peer takes its grant back when its read is cancelled or late; the deadline that we keep is the same one.
            Outcome::NotDelivered(Reason::Deadline) => Err(AbortReason::Reader(SenderReason::Deadline)),
            Outcome::NotDelivered(_) => Err(AbortReason::Reader(SenderReason::Cancelled)),
            Outcome::InDoubt(_) => Err(AbortReason::ConnectionLost),
        };
        self.end(grant, result, out);
    }

    /// Tells how a grant has ended. Nobody reads its blocks any more.
    fn end(&mut self, grant: u64, result: std::result::Result<(u64, bool), AbortReason>, out: &mut Outbox) {
        let Some(loan) = self.loans.remove(&grant) else { return };
        match result {
            Ok((bytes, by_write)) if !loan.revoking => out.event(Event::Served { grant, bytes, by_write }),
            Err(reason) if !loan.revoking => {
                out.event(Event::Aborted { grant, reason });
                out.event(Event::Freed { grant });
            }
            // That it was revoked has been told.
            _ => out.event(Event::Freed { grant }),
        }
    }

    /// Nothing more will come of this connection.
    pub(super) fn on_lost(&mut self, out: &mut Outbox) {
        for (&grant, loan) in &mut self.loans {
            if !std::mem::replace(&mut loan.revoking, true) {
                out.event(Event::Aborted { grant, reason: AbortReason::ConnectionLost });
            }
        }
    }

    /// The queue pairs are destroyed: nobody reads anything.
    pub(super) fn on_fenced(&mut self, out: &mut Outbox) {
        // Those that were issued since it was lost.
        self.on_lost(out);
        out.serving.clear();
        for grant in std::mem::take(&mut self.loans).into_keys() {
            out.event(Event::Freed { grant });
        }
    }
}
