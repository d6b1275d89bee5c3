//! What an operation ends with.

use crate::error::OpError;
use crate::memory::AnySlice;

/// What kind of work a completion is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// A SEND, with or without immediate.
    Send,
    /// A WRITE, with or without immediate.
    Write,
    /// A READ.
    Read,
    /// A FETCH_ADD: its buffer has what was there before.
    FetchAdd,
    /// A CMP_SWAP: its buffer has what was there before, which tells whether it was stored.
    CompareSwap,
    /// A receive that took a message: the bytes are in its buffer.
    Recv,
    /// A receive that took a peer's WRITE_WITH_IMM: the bytes are where the peer wrote them, and the receive's own
    /// buffer is untouched.
    RecvWrite,
}

/// The value of an operation that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completed {
    /// What it was.
    pub opcode: Opcode,
    /// Bytes moved. For [`Opcode::RecvWrite`]: the bytes that the peer wrote.
    pub bytes: u64,
    /// The peer's immediate, in host order (receives only).
    pub imm: Option<u32>,
    /// The number of the queue pair that it came by: of a receive in a shared receive queue, the one that took it.
    pub qp_num: u32,
}

/// The end of an operation that was submitted in a batch, as [`CompletionQueue::next`] gives it.
///
/// [`CompletionQueue::next`]: super::CompletionQueue::next
#[derive(Debug)]
#[must_use = "it holds the operation's buffer and its error"]
pub struct Completion {
    /// The operation's [`user_data`](super::Op::user_data).
    pub user_data: u64,
    /// How it ended.
    pub result: Result<Completed, OpError>,
    /// Its buffer, when it had one.
    pub buf: Option<AnySlice>,
}
