//! What both halves of the protocol leave for others: events for the user, records for the peer.

use std::collections::VecDeque;

use super::event::Event;

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
        landed: bool,
    },
    Revoke {
        grant: u64,
    },
    Revoked {
        grant: u64,
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

#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) events: VecDeque<Event>,
    pub(super) urgent: VecDeque<Queued>,
}

impl Outbox {
    pub(super) fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(super) fn queue(&mut self, record: Queued) {
        self.urgent.push_back(record);
    }
}
