//! What outlives a connection: what is needed so that nothing is delivered twice (K2) and no grant is used twice (K6).
//!
//! A new connection between the same two endpoints takes the ledger of the old one. Each half belongs to one
//! direction while a connection lives.

use std::collections::BTreeMap;

use super::event::{AbortReason, Event, Resolution, TransferId};
use super::outbox::Outbox;
use super::ranges::RangeSet;
use super::word::Word;

/// The state of an endpoint towards one peer, between two connections.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(super) local_epoch: u64,
    pub(super) peer_epoch: u64,
    pub(super) tx: TxLedger,
    pub(super) rx: RxLedger,
}

/// Where the numbers of a ledger begin: behind those that the peer may remember from one that was forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    transfer: u64,
    grant: u64,
}

impl Numbers {
    /// Behind those of a ledger that is forgotten, too.
    pub(crate) fn forget(&mut self, ledger: &Ledger) {
        self.transfer = self.transfer.max(ledger.tx.next);
        self.grant = self.grant.max(ledger.rx.next_grant);
    }
}

/// The sender's half.
#[derive(Debug, Default)]
pub(super) struct TxLedger {
    /// The next transfer's number, and the first that there was.
    pub(super) next: u64,
    first: u64,
    /// Grants of the peer that have been used or burned.
    pub(super) used: RangeSet,
    /// Transfers whose outcome only the peer knows, with their grants.
    pub(super) in_doubt: BTreeMap<u64, u64>,
    /// Transfers that were not delivered because the connection died, and of which the peer must still be told.
    pub(super) untold: BTreeMap<u64, u64>,
}

/// The receiver's half.
#[derive(Debug, Default)]
pub(super) struct RxLedger {
    /// The next grant's number, and the first that there was. What was granted before is forgotten.
    pub(super) next_grant: u64,
    pub(super) first_grant: u64,
    /// Grants that have neither been used up nor freed.
    pub(super) grants: BTreeMap<u64, Grant>,
    /// Transfers that have been delivered, or closed without; kept until the sender's watermark passes them.
    pub(super) delivered: RangeSet,
    pub(super) finished: RangeSet,
    /// Every transfer below this is resolved at the sender.
    pub(super) resolved_below: u64,
}

/// A grant that we issued.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    pub(super) max_bytes: u64,
    pub(super) revoking: bool,
    /// The slot of the transfer that uses it, on the connection that lives.
    pub(super) claimed: Option<u16>,
    /// The peer's last word on it, which is waited for.
    pub(super) word: Option<Word>,
}

impl Ledger {
    #[cfg(any(test, fuzzing))]
    pub(crate) fn new(local_epoch: u64, peer_epoch: u64) -> Self {
        Self::from(local_epoch, peer_epoch, Numbers::default())
    }

    pub(crate) fn from(local_epoch: u64, peer_epoch: u64, first: Numbers) -> Self {
        let Numbers { transfer, grant } = first;
        let tx = TxLedger { next: transfer, first: transfer, ..TxLedger::default() };
        let rx = RxLedger { next_grant: grant, first_grant: grant, ..RxLedger::default() };
        Self { local_epoch, peer_epoch, tx, rx }
    }

    /// Prepares for a connection to the peer as it runs now. If it has restarted, what it knew is lost: transfers in
    /// doubt stay so, and grants that were bound to it end.
    pub(super) fn meet(mut self, peer_epoch: u64, out: &mut Outbox) -> Self {
        if self.peer_epoch != peer_epoch {
            self.peer_epoch = peer_epoch;
            for &id in self.tx.in_doubt.keys() {
                out.event(Event::Resolved { id: TransferId(id), resolution: Resolution::Unknown });
            }
            for (&grant, g) in &self.rx.grants {
                if !g.revoking {
                    out.event(Event::Aborted { grant, reason: AbortReason::PeerRestarted });
                }
                out.event(Event::Freed { grant });
            }
            let (transfer, grant) = (self.tx.next, self.rx.next_grant);
            self = Self::from(self.local_epoch, peer_epoch, Numbers { transfer, grant });
        }
        self
    }

    /// Nothing that a later connection would have to know: it may begin with a new one.
    pub(crate) fn is_blank(&self) -> bool {
        let (tx, rx) = (&self.tx, &self.rx);
        tx.next == tx.first
            && tx.used.is_empty()
            && rx.next_grant == rx.first_grant
            && rx.finished.is_empty()
            && rx.resolved_below == 0
    }

    #[cfg(test)]
    pub(crate) fn mark_used(&mut self) {
        self.tx.next += 1;
    }

    /// Transfers that are still in doubt; a reconnect resolves them.
    pub(crate) fn in_doubt(&self) -> impl Iterator<Item = u64> {
        self.tx.in_doubt.keys().copied()
    }

    /// The connection has ended, and the blocks go back to their pools: every grant of either side is over, so that a new
    /// connection starts without any. What is left takes memory by what this side has granted and begun, and by nothing that the
    /// peer has said.
    pub(crate) fn end_connection(&mut self) {
        self.rx.grants.clear();
        // Those of the next connection have higher numbers than any that the peer has issued.
        self.tx.used.close_gaps();
        // What has not been delivered can be no more, and is found so when it is asked for.
        self.rx.finished.keep(&self.rx.delivered);
    }

    /// Ranges of numbers that it holds: the memory that it takes.
    #[cfg(test)]
    pub(crate) fn ranges(&self) -> usize {
        self.tx.used.ranges() + self.rx.finished.ranges() + self.rx.delivered.ranges()
    }

    /// Grants that have been issued and neither used up nor freed. When this ledger is dropped instead of being
    /// used for a reconnect, and the queue pairs are destroyed, their blocks are free.
    #[cfg(test)]
    pub(crate) fn open_grants(&self) -> impl Iterator<Item = u64> {
        self.rx.grants.keys().copied()
    }
}
