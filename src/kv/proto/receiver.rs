//! The receiving half: grants, slots, and when a transfer has landed or an aborted one is quiet.
//!
//! A slot collects everything about one transfer, in whatever order it comes: notifications (counted for each queue
//! pair, K3), the header, and the messages of an abort. It says *landed* when header and counts agree exactly, and,
//! once it is aborted (`aborted`), when it is quiet. Nothing is ever allocated on the word of the peer beyond 4,096 slots.

use super::aborted::Abort;
use super::config::{Config, MAX_QPS, MAX_SLOTS};
use super::event::{AbortReason, Event, ProtocolViolation, Resolution, TransferId};
use super::ledger::{Grant, RxLedger};
use super::outbox::{Outbox, Queued};
use super::record::{Counts, Slot};
use super::sender::WINDOW;
use super::word::{Word, Words};
use std::time::Instant;

pub(super) type Result<T = ()> = std::result::Result<T, ProtocolViolation>;

pub(super) fn broken<T>(rule: &'static str) -> Result<T> {
    Err(ProtocolViolation::Rule(rule))
}

/// What a header has said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    bytes: u64,
    tag: u64,
}

/// The transfer of a slot, known from the first message that names it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) transfer: u64,
    pub(super) attempt: u16,
    pub(super) grant: u64,
}

#[derive(Debug, Default)]
pub(super) struct SlotState {
    /// Of the transfer that uses it, or that used it last.
    generation: u32,
    pub(super) busy: bool,
    pub(super) bound: Option<Bound>,
    /// The transfer that a NOTIFY has named, before the header.
    named: Option<u64>,
    pub(super) header: Option<Header>,
    pub(super) abort: Option<Abort>,
    /// For each queue pair: notifications that came, that the header expects, that an abort says were posted.
    pub(super) counts: Vec<u32>,
    expected: Vec<u32>,
    pub(super) posted: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) ledger: RxLedger,
    pub(super) slots: Vec<SlotState>,
    pub(super) qps: usize,
    /// Queue pairs that keep the order: each has one notification of a transfer, and no count in its header.
    pub(super) ordered: u64,
    /// More than one rail: words may come late, after their transfer is over.
    several: bool,
    /// Queue pairs whose rail has failed at some time, and was fenced on our side.
    pub(super) fenced: u64,
    /// On grants that were taken back, or whose transfer is aborted.
    words: Words,
    pub(super) arrived: u64,
}

impl Receiver {
    pub(super) fn new(cfg: &Config, mut ledger: RxLedger, now: Instant, out: &mut Outbox) -> Self {
        let mut words = Words::default();
        for (&grant, g) in &mut ledger.grants {
            g.word = g.revoking.then(|| words.wait(cfg, now));
            if g.revoking {
                out.queue(Queued::Revoke { grant });
            }
        }
        let (qps, ordered, several) = (cfg.qps(), cfg.ordered_mask(), cfg.rails.len() > 1);
        Self { ledger, slots: Vec::new(), qps, ordered, several, fenced: 0, words, arrived: 0 }
    }

    pub(super) fn issue_grant(&mut self, max_bytes: u64) -> u64 {
        let id = self.reserve_grant();
        self.ledger.grants.insert(id, Grant { max_bytes, revoking: false, claimed: None, word: None });
        id
    }

    /// A grant to read, whose number no grant to write has.
    pub(super) fn reserve_grant(&mut self) -> u64 {
        let id = self.ledger.next_grant;
        self.ledger.next_grant += 1;
        id
    }

    /// Checks that the peer names a grant that was issued, and is not open for a write.
    pub(super) fn was_issued(&self, grant: u64) -> Result {
        match grant < self.ledger.next_grant && !self.ledger.grants.contains_key(&grant) {
            true => Ok(()),
            false => broken("a word on a read under a grant that is none to read"),
        }
    }

    /// Ends a grant that nobody will use, without an event. It was issued for a read.
    pub(super) fn withdraw(&mut self, grant: u64) -> Result {
        if self.ledger.grants.get(&grant).is_some_and(|g| g.claimed.is_some()) {
            return broken("a read refused and served at once");
        }
        self.ledger.grants.remove(&grant);
        Ok(())
    }

    /// The connection that a grant was issued for is fenced.
    pub(super) fn forget(&mut self, grant: u64) {
        self.ledger.grants.remove(&grant);
    }

    /// From here on the grant's arrival cannot come any more. Unknown and used-up grants are ignored.
    pub(super) fn revoke_grant(&mut self, cfg: &Config, grant: u64, now: Instant, out: &mut Outbox) {
        let Some(g) = self.ledger.grants.get_mut(&grant) else { return };
        let aborted = g.claimed.is_some_and(|s| self.slots[usize::from(s)].abort.is_some());
        if g.revoking || aborted {
            return;
        }
        g.revoking = true;
        g.word = Some(self.words.wait(cfg, now));
        out.event(Event::Aborted { grant, reason: AbortReason::Revoked });
        out.queue(Queued::Revoke { grant });
    }

    /// The transfer under a grant is aborted.
    pub(super) fn await_word(&mut self, cfg: &Config, grant: u64, now: Instant) {
        if let Some(g) = self.ledger.grants.get_mut(&grant) {
            g.word.get_or_insert_with(|| self.words.wait(cfg, now));
        }
    }

    /// When the peer must have said its last word on a grant.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.words.timeout()
    }

    /// False when the peer has not said its last word on a grant in time.
    pub(super) fn is_in_time(&mut self, cfg: &Config, recovering: bool, now: Instant) -> bool {
        let words = self.ledger.grants.values_mut().filter_map(|g| g.word.as_mut());
        self.words.are_in_time(cfg, recovering, now, words)
    }

    /// It gets its whole time once more.
    pub(super) fn wait_again(&mut self, cfg: &Config, now: Instant) {
        let words = self.ledger.grants.values_mut().filter_map(|g| g.word.as_mut());
        words.for_each(|word| *word = Word::new(cfg, now));
    }

    pub(super) fn on_resolved_below(&mut self, watermark: u64) {
        if watermark > self.ledger.resolved_below {
            self.ledger.resolved_below = watermark;
            self.ledger.delivered.forget_below(watermark);
            self.ledger.finished.raise_floor(watermark);
        }
    }

    /// A notification: by immediate, or by a NOTIFY that names its transfer.
    pub(super) fn on_notification(
        &mut self,
        qp: usize,
        slot: Slot,
        named: Option<(u64, u16)>,
        out: &mut Outbox,
    ) -> Result {
        let ordered = self.ordered >> qp & 1 == 1;
        let state = self.activate(slot)?;
        if let Some((transfer, attempt)) = named {
            let fits = match (&state.bound, state.named) {
                // Of an earlier attempt, too: on a queue pair that has not failed it still counts.
                (Some(b), _) => b.transfer == transfer && attempt <= b.attempt,
                (None, Some(earlier)) => earlier == transfer,
                (None, None) => true,
            };
            if !fits {
                return broken("a notification of another transfer");
            }
            state.named = Some(transfer);
        }
        // One for each attempt.
        let most = 1 + state.bound.map_or(0, |b| u32::from(b.attempt));
        state.counts[qp] = match state.counts[qp].checked_add(1) {
            Some(n) if !ordered || n <= most => n,
            _ => return broken("one notification too many"),
        };
        self.evaluate(slot.index, out)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record")]
    pub(super) fn on_header(
        &mut self,
        transfer: u64,
        attempt: u16,
        slot: Slot,
        grant: u64,
        bytes: u64,
        tag: u64,
        mask: u64,
        counts: Counts<'_>,
        out: &mut Outbox,
    ) -> Result {
        if self.is_over(transfer)? {
            // With several rails it may be that of an earlier attempt.
            return if self.several { Ok(()) } else { broken("a header of a transfer that is over") };
        }
        let ordered = if attempt == 0 { self.ordered } else { 0 };
        let wanted = (mask & !ordered).count_ones() as usize;
        if mask == 0 || !self.is_mask(mask) || counts.len() != wanted || counts.iter().any(|n| n == 0) {
            return broken("a header with impossible counts");
        }
        let opened = self.activate(slot)?.bound.map_or(0, |b| b.attempt);
        let granted = self.bind(slot, Bound { transfer, attempt, grant })?;
        if bytes > granted {
            return broken("more bytes than were granted");
        }
        if attempt < opened {
            return Ok(());
        }
        if attempt > opened {
            return broken("a header of an attempt that was not opened");
        }
        let state = &mut self.slots[usize::from(slot.index)];
        if state.header.is_some() {
            return broken("a second header");
        }
        state.header = Some(Header { bytes, tag });
        let mut counts = counts.iter();
        for (qp, expected) in state.expected.iter_mut().enumerate() {
            *expected = match mask >> qp & 1 {
                0 => 0,
                _ if ordered >> qp & 1 == 1 => 1,
                // There is a count for each other bit of the mask.
                _ => counts.next().unwrap_or(0),
            };
        }
        self.evaluate(slot.index, out)
    }

    /// The sender asks about a transfer of an earlier connection, which is fenced: whatever has not been delivered
    /// never will be. What was granted before our ledger began is forgotten, and so is what became of it.
    pub(super) fn on_query(&mut self, transfer: u64, grant: u64, out: &mut Outbox) -> Result {
        if transfer < self.ledger.resolved_below {
            return broken("a question about a transfer that was resolved");
        }
        let resolution = if self.ledger.delivered.contains(transfer) {
            Resolution::Landed
        } else if self.is_over(transfer)? {
            Resolution::NotDelivered
        } else if grant < self.ledger.first_grant {
            Resolution::Unknown
        } else if grant < self.ledger.next_grant {
            self.end_unstarted(transfer, grant, AbortReason::ConnectionLost, out)?;
            Resolution::NotDelivered
        } else {
            return broken("a question about a grant that was never issued");
        };
        out.queue(Queued::Answer { transfer, resolution });
        Ok(())
    }

    /// The sender has burned an unused grant.
    pub(super) fn on_revoked(&mut self, grant: u64, out: &mut Outbox) -> Result {
        match self.ledger.grants.get(&grant) {
            // Ended otherwise in the meantime.
            None if grant < self.ledger.next_grant => Ok(()),
            Some(g) if g.revoking && g.claimed.is_none() => {
                self.ledger.grants.remove(&grant);
                out.event(Event::Freed { grant });
                Ok(())
            }
            _ => broken("a grant burned that was not revoked, or that is in use"),
        }
    }

    /// Tells the user that nothing more will come from this connection.
    pub(super) fn on_lost(&mut self, out: &mut Outbox) {
        for state in &mut self.slots {
            let Some(bound) = state.bound.filter(|_| state.busy) else { continue };
            let revoking = self.ledger.grants.get(&bound.grant).is_some_and(|g| g.revoking);
            if state.abort.is_none() && !revoking {
                out.event(Event::Aborted { grant: bound.grant, reason: AbortReason::ConnectionLost });
            }
        }
    }

    /// No write of this connection can arrive any more.
    pub(super) fn on_fenced(&mut self, out: &mut Outbox) {
        for state in std::mem::take(&mut self.slots) {
            let Some(bound) = state.bound.filter(|_| state.busy) else { continue };
            self.ledger.grants.remove(&bound.grant);
            self.ledger.finished.insert(bound.transfer);
            out.event(Event::Freed { grant: bound.grant });
        }
    }

    pub(super) fn is_mask(&self, mask: u64) -> bool {
        self.qps == MAX_QPS || mask >> self.qps == 0
    }

    /// Whether a transfer has been delivered or closed before. Bounds what the peer may name.
    pub(super) fn is_over(&self, transfer: u64) -> Result<bool> {
        if transfer >= self.ledger.resolved_below.saturating_add(WINDOW) {
            return broken("a transfer beyond the window");
        }
        Ok(self.ledger.finished.contains(transfer))
    }

    /// The slot of a message, which must be in use with this generation, or about to be.
    fn activate(&mut self, slot: Slot) -> Result<&mut SlotState> {
        let index = usize::from(slot.index);
        debug_assert!(slot.index < MAX_SLOTS);
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, SlotState::default);
        }
        let (qps, state) = (self.qps, &mut self.slots[index]);
        if state.busy {
            if state.generation != slot.generation {
                return broken("a slot reused before it was free");
            }
        } else {
            if slot.generation != Slot::next_generation(state.generation) {
                return broken("a notification too many, or an unknown slot generation");
            }
            *state = SlotState {
                generation: slot.generation,
                busy: true,
                counts: std::mem::take(&mut state.counts),
                expected: std::mem::take(&mut state.expected),
                posted: std::mem::take(&mut state.posted),
                ..SlotState::default()
            };
            for v in [&mut state.counts, &mut state.expected, &mut state.posted] {
                v.clear();
                v.resize(qps, 0);
            }
        }
        Ok(state)
    }

    /// The slot of a transfer that begins again, if that is news.
    pub(super) fn reopen(
        &mut self,
        transfer: u64,
        attempt: u16,
        slot: Slot,
        grant: u64,
    ) -> Result<Option<&mut SlotState>> {
        self.bind(slot, Bound { transfer, attempt: 0, grant })?;
        let state = &mut self.slots[usize::from(slot.index)];
        let Some(bound) = &mut state.bound else { return Ok(None) };
        if attempt <= bound.attempt || state.abort.is_some() {
            return Ok(None);
        }
        bound.attempt = attempt;
        Ok(Some(state))
    }

    /// Binds a slot to a transfer and its grant, or checks that it is, in whatever attempt. Answers the bytes granted.
    pub(super) fn bind(&mut self, slot: Slot, bound: Bound) -> Result<u64> {
        let state = self.activate(slot)?;
        match &state.bound {
            Some(b) if (b.transfer, b.grant) == (bound.transfer, bound.grant) => {}
            Some(_) => return broken("two transfers in one slot"),
            None if state.named.is_some_and(|t| t != bound.transfer) => {
                return broken("two transfers in one slot");
            }
            None => {}
        }
        let was_bound = state.bound.is_some();
        let Some(grant) = self.ledger.grants.get_mut(&bound.grant) else {
            return broken("a transfer under a grant that is not open");
        };
        if !was_bound {
            if grant.claimed.is_some() {
                return broken("two transfers under one grant");
            }
            grant.claimed = Some(slot.index);
            self.slots[usize::from(slot.index)].bound = Some(bound);
        }
        Ok(grant.max_bytes)
    }

    /// Ends a transfer of which nothing can arrive on this connection.
    pub(super) fn end_unstarted(
        &mut self,
        transfer: u64,
        grant: u64,
        reason: AbortReason,
        out: &mut Outbox,
    ) -> Result {
        if let Some(g) = self.ledger.grants.get(&grant) {
            if g.claimed.is_some() {
                return broken("two transfers under one grant");
            }
            if !g.revoking {
                out.event(Event::Aborted { grant, reason });
            }
            self.ledger.grants.remove(&grant);
            out.event(Event::Freed { grant });
        }
        self.ledger.finished.insert(transfer);
        Ok(())
    }

    /// Looks whether a slot's transfer is complete, landed or quiet.
    pub(super) fn evaluate(&mut self, index: u16, out: &mut Outbox) -> Result {
        let state = &mut self.slots[usize::from(index)];
        let Some(Bound { transfer, attempt, grant }) = state.bound else { return Ok(()) };
        if state.abort.is_some() {
            return self.evaluate_aborted(index, out);
        }
        let Some(header) = state.header else { return Ok(()) };
        if state.counts.iter().zip(&state.expected).any(|(got, want)| got > want) {
            return broken("one notification too many");
        }
        if state.counts != state.expected {
            return Ok(());
        }
        state.busy = false;
        let revoked = self.ledger.grants.remove(&grant).is_some_and(|g| g.revoking);
        self.ledger.finished.insert(transfer);
        if revoked {
            out.event(Event::Freed { grant });
        } else {
            self.ledger.delivered.insert(transfer);
            self.arrived += 1;
            out.event(Event::Arrived {
                transfer: TransferId(transfer),
                grant,
                bytes: header.bytes,
                tag: header.tag,
            });
        }
        out.queue(Queued::Confirm { transfer, attempt, landed: !revoked });
        Ok(())
    }

    /// No slot is in use.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.slots.iter().all(|s| !s.busy)
    }
}
