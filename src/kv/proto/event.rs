//! The vocabulary of the protocol's boundary: what goes in, what comes out, and why things end.

use super::plan::{Piece, Plan};
use crate::pages::Checked;
use crate::wire::Malformed;
use std::time::Instant;

/// A transfer, by its sender's count of those to one peer: unique between two endpoints in one direction, also across reconnects.
/// Transfers to two peers may have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

impl std::fmt::Display for TransferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A read, by its reader's count on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReadId(pub(crate) u64);

/// Names a posted work request; handed back once, when it has completed. Opaque to the caller, who may put it in
/// the work request's id: the two highest bits are zero, as long as fewer than 2^54 transfers and messages were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token(pub(crate) u64);

impl Token {
    /// Set in those of READs.
    const READ: u64 = 1 << 61;

    /// Control message `count` of queue pair `qp`.
    pub(super) fn control(qp: usize, count: u64) -> Self {
        Self(count << 7 | (qp as u64) << 1)
    }

    /// Of queue pair `qp`, below 64.
    pub(super) fn data(qp: usize, transfer: u64) -> Self {
        Self(transfer << 7 | (qp as u64) << 1 | 1)
    }

    pub(super) fn qp(self) -> usize {
        (self.0 >> 1 & 63) as usize
    }

    /// Which of its queue pair's control messages it is, if it is one.
    pub(super) fn control_count(self) -> Option<u64> {
        (self.0 & 1 == 0).then_some(self.0 >> 7)
    }

    /// The READ of this number, below 2^32, on queue pair `qp`.
    pub(super) fn read(qp: usize, number: usize) -> Self {
        Self(Self::READ | (number as u64) << 7 | (qp as u64) << 1 | 1)
    }

    /// The number of the READ that this is.
    pub(super) fn read_number(self) -> Option<usize> {
        (self.0 & Self::READ != 0).then_some(((self.0 & !Self::READ) >> 7) as usize)
    }

    #[cfg(test)]
    pub(super) fn is_read(self) -> bool {
        self.read_number().is_some()
    }

    /// The transfer whose data or notification this is; `None` for control and READs.
    pub(crate) fn transfer(self) -> Option<TransferId> {
        (self.0 & (1 | Self::READ) == 1).then_some(TransferId(self.0 >> 7))
    }
}

/// What the sender knows of a grant. The blocks that it covers are in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantRef {
    pub(crate) id: u64,
    /// Epoch of the endpoint that issued it.
    pub(crate) owner_epoch: u64,
    /// Epoch of the endpoint that may use it.
    pub(crate) bound_epoch: u64,
    /// The most bytes that may be written under it.
    pub(crate) max_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct WriteRequest {
    pub(crate) grant: GrantRef,
    pub(crate) plan: Plan,
    /// The user's own value, shown with the arrival.
    pub(crate) tag: u64,
    pub(crate) deadline: Instant,
}

/// Where posted work goes. Infallible: a work request that could not be posted completes with `ok == false`.
pub(crate) trait Sink {
    /// Work requests that the send queue of `qp` can take now.
    fn room(&self, qp: usize) -> usize;
    /// An RDMA WRITE, with immediate data if `imm`. A piece of 0 bytes has no source and no target.
    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token);
    /// Bytes of the largest WRITE of pages from memory of `lkey` that `qp` takes; 0 where it takes none.
    fn takes_pages(&self, qp: usize, lkey: u32) -> u32 {
        let _ = (qp, lkey);
        0
    }
    /// A WRITE of pages: the piece says all of its bytes, and where the first block of each end is. Only where it is taken.
    fn write_pages(&mut self, qp: usize, piece: &Piece, pages: Checked, imm: Option<u32>, token: Token) {
        let _ = pages;
        debug_assert!(false, "no pages are taken");
        self.write(qp, piece, imm, token);
    }
    /// An RDMA READ: from the piece's target side, which is the peer's, to its source side, which is ours.
    fn read(&mut self, qp: usize, piece: &Piece, token: Token);
    /// A SEND of `bytes`, at most `max_control`, copied before this returns.
    fn send(&mut self, qp: usize, bytes: &[u8], token: Token);
}

/// Why `poll_transmit` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Transmitted {
    /// Nothing more can be posted before something else happens.
    Idle,
    /// It stopped at its budget (R9): call again, after a yield.
    More,
    /// A WRITE of pages is made: post it, so that it travels while the next one is made, and call again.
    Again,
}

/// What a receive work request has received.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Received<'a> {
    /// The immediate of a WRITE.
    Imm(u32),
    /// A SEND's payload.
    Bytes(&'a [u8]),
}

/// A write or a read that was refused; nothing was posted and the grant is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("grant {grant} was used or revoked before; ask the receiver for a new one")]
    StaleGrant { grant: u64 },
    #[error(
        "the grant is of epoch {grant:#x}, the peer runs under {peer:#x}: it restarted; ask it for a new one"
    )]
    PeerRestarted { grant: u64, peer: u64 },
    #[error(
        "the grant is bound to epoch {bound:#x}, this endpoint is {local:#x}; ask the receiver for one of our own"
    )]
    WrongPeer { bound: u64, local: u64 },
    #[error("{asked} bytes were asked for, the grant covers {granted}; write at most what was granted")]
    OutOfRange { asked: u64, granted: u64 },
    #[error("{limit} transfers are waiting or unresolved; await one of them")]
    Full { limit: u64 },
    #[error("the connection is closing or lost")]
    Closed,
}

/// A message that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageRefused {
    #[error("a message of {asked} bytes, the limit is {limit}; split it")]
    TooLong { asked: usize, limit: usize },
    #[error("{queued} bytes of messages are waiting to be sent; try again when some have left")]
    Full { queued: usize },
    #[error("the connection is closing or lost")]
    Closed,
}

/// What the peer did wrong. The connection ends with it; nothing else does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A message that does not decode.
    #[error("malformed {what} at byte {at}")]
    Malformed {
        /// The kind of message.
        what: &'static str,
        /// Where.
        at: usize,
    },
    /// A message of another life of the peer.
    #[error("a message of epoch {got:#x} on a connection with {expected:#x}")]
    Epoch {
        /// The epoch in the message.
        got: u64,
        /// The epoch of the handshake.
        expected: u64,
    },
    /// A message that has no place where it came.
    #[error("the peer broke the protocol: {0}")]
    Rule(&'static str),
}

impl From<Malformed> for ProtocolViolation {
    fn from(Malformed { what, at }: Malformed) -> Self {
        Self::Malformed { what, at }
    }
}

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Silence for longer than `peer_timeout`, a work request that the peer's device did not acknowledge in all its
    /// retries, or the word of a connection manager that the peer has gone (K5).
    #[error(
        "the peer is lost: it was silent for peer_timeout, does not acknowledge, or has disconnected; it is dead, frozen \
         or unreachable"
    )]
    PeerLost,
    /// The device failed a work request for another reason than a peer that does not answer.
    #[error("a work request failed")]
    Transport,
    /// The device was taken away, or has failed as a whole.
    #[error("the device is gone: it was removed, or has failed as a whole")]
    DeviceGone,
    /// An aborted transfer did not come to rest in time.
    #[error(
        "posted work did not drain within abort_grace; the queue pairs are killed to give the buffers back"
    )]
    AbortStuck,
    /// A graceful close did not finish in time.
    #[error("closing did not finish by its deadline")]
    CloseTimeout,
    /// The peer broke the protocol.
    #[error(transparent)]
    Violation(#[from] ProtocolViolation),
    /// A graceful end.
    #[error("closed by both sides")]
    Closed,
    /// This side ended it at once.
    #[error("ended locally")]
    Local,
    /// Of a rail: the peer has given it up.
    #[error("the peer has given the rail up")]
    PeerGaveUp,
}

/// Why a transfer was not delivered, or is in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// Its future was dropped.
    #[error("cancelled by the sender")]
    Cancelled,
    /// Its deadline passed.
    #[error("its deadline passed")]
    Deadline,
    /// The receiver took the grant back.
    #[error("the receiver revoked the grant")]
    Revoked,
    /// The connection ended under it.
    #[error("the connection was lost: {0}")]
    Lost(Cause),
    /// The peer that knew has restarted.
    #[error("the peer restarted")]
    PeerRestarted,
}

/// Why the owner of a grant to read did not write what it was asked to ([`ReadStrategy::RemoteWrite`]).
///
/// [`ReadStrategy::RemoteWrite`]: crate::kv::ReadStrategy::RemoteWrite
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadRefusal {
    /// The grant was revoked.
    #[error("the owner revoked the grant")]
    Revoked,
    /// The reader had taken its request back.
    #[error("the read was cancelled before the owner began")]
    Cancelled,
    /// The request names blocks or positions that do not exist, or more than was granted.
    #[error("the owner found the request out of range of the grant or of the reader's pool")]
    OutOfRange,
    /// The request does not decode.
    #[error("the owner could not read the request; run one landfall version on both sides")]
    Malformed,
    /// The owner's side of the channel is closing.
    #[error("the owner is closing the channel")]
    Closing,
    /// The owner has as many unresolved transfers as it may have.
    #[error("the owner has too many transfers under way; read again when some have ended")]
    Busy,
}

impl ReadRefusal {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Revoked => 0,
            Self::Cancelled => 1,
            Self::OutOfRange => 2,
            Self::Malformed => 3,
            Self::Closing => 4,
            Self::Busy => 5,
        }
    }

    /// A code that a newer peer has added reads as `Malformed`: the two do not understand each other.
    pub(super) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Revoked,
            1 => Self::Cancelled,
            2 => Self::OutOfRange,
            4 => Self::Closing,
            5 => Self::Busy,
            _ => Self::Malformed,
        }
    }
}

/// How a read ended without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadEnd {
    Failed(Reason),
    Refused(ReadRefusal),
}

/// How a transfer ended for its sender (K2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The receiver has confirmed that all data is in its memory.
    Landed,
    /// The receiver has not delivered it and never will.
    NotDelivered(Reason),
    /// Everything had been posted and no confirmation came. A reconnect resolves it.
    InDoubt(Reason),
}

/// What a reconnect has found out about a transfer that was in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// It was delivered, once.
    Landed,
    /// It was not delivered, and never will be.
    NotDelivered,
    /// The peer that knew has forgotten, as it may when many others were connected since: it stays in doubt for ever.
    Unknown,
}

/// Why a grant's arrival will not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AbortReason {
    /// The sender's side: cancelled, or its deadline passed.
    #[error("by the sender: {0}")]
    Sender(SenderReason),
    /// The reader's side, of a grant to read: cancelled, or its deadline passed.
    #[error("by the reader: {0}")]
    Reader(SenderReason),
    /// This side did not write what the reader had asked for.
    #[error("the read was refused: {0}")]
    ReadRefused(ReadRefusal),
    /// We revoked it.
    #[error("the grant was revoked")]
    Revoked,
    /// The connection died under it.
    #[error("the connection was lost")]
    ConnectionLost,
    /// The peer that it was bound to has restarted.
    #[error("the peer restarted")]
    PeerRestarted,
}

/// What the sender of a write, or the reader of a read, says with an abort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SenderReason {
    /// Its future was dropped.
    #[error("cancelled")]
    Cancelled,
    /// Its deadline passed.
    #[error("its deadline passed")]
    Deadline,
    /// The grant's owner had revoked it.
    #[error("the grant was revoked")]
    Revoked,
    /// An earlier connection died before everything was sent.
    #[error("an earlier connection was lost")]
    ConnectionLost,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// Sender: every work request of the transfer has completed locally. Nothing is known of the far end.
    Sent { id: TransferId },
    /// Sender: the outcome, the number of WRITEs of payload, and how often it was begun: once, and again for each rail
    /// that failed with a part of it. Exactly one for each accepted write.
    Done { id: TransferId, outcome: Outcome, wrs: u64, attempts: u32 },
    /// Sender: no device reads the sources any more. Exactly one for each accepted write, before or after `Done`; where
    /// there are several rails, not before the outcome is known, since the sources may have to be read again.
    Released { id: TransferId },
    /// Sender, after a reconnect: what became of a transfer that was in doubt.
    Resolved { id: TransferId, resolution: Resolution },
    /// Receiver: all data under the grant has landed. The grant is used up and its blocks are the caller's.
    Arrived { transfer: TransferId, grant: u64, bytes: u64, tag: u64 },
    /// Receiver: no arrival will come for this grant. Its blocks stay in quarantine until `Freed`.
    Aborted { grant: u64, reason: AbortReason },
    /// Receiver: no late write can reach the blocks of this grant any more.
    Freed { grant: u64 },
    /// Reader: how a read ended, the READs that it took, and how many of them were in flight at most. Exactly one for each
    /// accepted read.
    ReadDone { id: ReadId, result: Result<(), ReadEnd>, wrs: u64, most: u32 },
    /// Reader: no device writes to the targets of the read any more. Exactly one for each accepted read, after `ReadDone`.
    ReadReleased { id: ReadId },
    /// Owner: the peer asks for a grant to read to be written to its grant `target`; `request` says what to where, in the
    /// caller's own words. To be answered by `Connection::serve`.
    ReadAsked { grant: u64, target: u64, request: Vec<u8> },
    /// Owner: all that the peer wanted under this grant to read is in its memory, by a transfer of ours if `by_write`, and
    /// nobody reads the blocks any more. A grant to read that does not end so ends as others do: `Aborted`, then `Freed`.
    Served { grant: u64, bytes: u64, by_write: bool },
    /// A message of the peer's `send_message`, in order. Counts against the peer's window until
    /// `Connection::message_taken`.
    Message(Vec<u8>),
    /// A rail has failed, and others go on. Put its queue pairs in the error state, hand in what they have received and
    /// every flushed work request (`handle_sent`), destroy them, then call `rail_fenced`. The same for a rail that was down
    /// and was to come back: the peer's has been up and has failed, and what was built here for it is to be destroyed.
    RailDown { rail: usize, cause: Cause },
    /// The rail is used again: `rail_up` was called.
    RailUp { rail: usize },
    /// What the peer's `rail_talk` has said about a rail. Those that follow each other may come in another order.
    RailTalk { rail: usize, bytes: Vec<u8> },
    /// The peer is closing: it starts no more transfers, and accepts none of ours.
    PeerClosed,
    /// The connection is over. Put the queue pairs in the error state, report every flushed work request by
    /// `handle_sent`, destroy the queue pairs, then call `fenced`. Once a connection, also if the caller said so itself.
    Lost(Cause),
    /// Both sides have closed and nothing is outstanding. The queue pairs can be destroyed; grants that are still open
    /// can never be used.
    Closed,
}
