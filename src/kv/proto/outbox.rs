//! What both halves of the protocol leave for others: events for the user, records for the peer.

use std::collections::{BTreeMap, VecDeque};

use super::event::{Event, ProtocolViolation, ReadRefusal, Resolution, SenderReason};
use super::sender::WINDOW;

/// Answers that the peer may be owed: for each of its transfers, and for as many grants that it takes back. An honest one takes
/// answers as fast as it asks.
const MAX_OWED: usize = 2 * WINDOW as usize;

/// A record that is to be sent on any queue pair. Those that speak of a live transfer name it only, and are filled
/// in (or dropped, if it is over by then) when they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queued {
    Confirm {
        transfer: u64,
        attempt: u16,
        landed: bool,
    },
    Abort {
        transfer: u64,
    },
    /// Of an earlier connection: nothing of it can arrive on this one.
    AbortEarlier {
        transfer: u64,
        grant: u64,
    },
    AbortAck {
        transfer: u64,
    },
    Query {
        transfer: u64,
        grant: u64,
    },
    Answer {
        transfer: u64,
        resolution: Resolution,
    },
    Revoke {
        grant: u64,
    },
    Revoked {
        grant: u64,
    },
    /// A grant to read is not used any more: all of it was read, or why not.
    ReadDone {
        grant: u64,
        bytes: u64,
        reason: Option<SenderReason>,
    },
    /// We do not write under a grant that was issued for a read.
    ReadRefused {
        target: u64,
        why: ReadRefusal,
    },
    Close,
    /// A transfer begins again.
    Reopen {
        transfer: u64,
    },
    Reopened {
        transfer: u64,
        attempt: u16,
    },
    /// No queue pair is left on which the last word of an aborted transfer could be said: any will do.
    AbortQuiet {
        transfer: u64,
    },
    RailDown {
        rail: u16,
        generation: u32,
    },
    Fenced {
        rail: u16,
        generation: u32,
    },
}

impl Queued {
    /// The peer has asked for it.
    fn is_answer(&self) -> bool {
        match self {
            Self::Confirm { .. }
            | Self::AbortAck { .. }
            | Self::Answer { .. }
            | Self::Revoked { .. }
            | Self::ReadRefused { .. }
            | Self::Reopened { .. } => true,
            Self::Abort { .. }
            | Self::AbortEarlier { .. }
            | Self::Query { .. }
            | Self::Revoke { .. }
            | Self::ReadDone { .. }
            | Self::Close
            | Self::Reopen { .. }
            | Self::AbortQuiet { .. }
            | Self::RailDown { .. }
            | Self::Fenced { .. } => false,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) events: VecDeque<Event>,
    urgent: VecDeque<Queued>,
    /// How many of them are answers.
    owed: usize,
    /// Events of what is behind a read: the user is told of the read, so that they go to its half instead.
    pub(super) of_reads: VecDeque<Event>,
    /// Grants that were issued for reads of ours, and the reads.
    pub(super) targets: BTreeMap<u64, u64>,
    /// Transfers of ours that serve reads of the peer, and the grants to read.
    pub(super) serving: BTreeMap<u64, u64>,
}

impl Outbox {
    pub(super) fn event(&mut self, event: Event) {
        let of_read = match &event {
            Event::Arrived { grant, .. } | Event::Aborted { grant, .. } | Event::Freed { grant } => {
                self.targets.contains_key(grant)
            }
            Event::Sent { id } | Event::Done { id, .. } | Event::Released { id } => {
                self.serving.contains_key(&id.0)
            }
            _ => false,
        };
        if of_read { self.of_reads.push_back(event) } else { self.events.push_back(event) }
    }

    pub(super) fn queue(&mut self, record: Queued) {
        self.owed += usize::from(record.is_answer());
        self.urgent.push_back(record);
    }

    /// The record that is to be sent next.
    pub(super) fn front(&self) -> Option<Queued> {
        self.urgent.front().copied()
    }

    /// It was sent, or is pointless by now.
    pub(super) fn pop(&mut self) {
        let record = self.urgent.pop_front();
        self.owed -= usize::from(record.is_some_and(|record| record.is_answer()));
    }

    /// No record waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.urgent.is_empty()
    }

    /// Nothing is sent any more.
    pub(super) fn forget_records(&mut self) {
        self.urgent.clear();
        self.owed = 0;
    }

    /// Fails when the peer asks, and does not take the answers.
    pub(super) fn check_owed(&self) -> Result<(), ProtocolViolation> {
        match self.owed > MAX_OWED {
            true => Err(ProtocolViolation::Rule("more questions than answers were taken for")),
            false => Ok(()),
        }
    }
}
