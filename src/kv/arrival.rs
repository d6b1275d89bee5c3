//! What the receiver gets: blocks that have landed, or the news that they will not.

use super::blocks::Blocks;
use super::driver::ChannelClosed;
use super::proto::{AbortReason, TransferId};

/// A transfer that has landed here: every byte is in memory and visible. The blocks are the granted ones.
#[derive(Debug)]
pub struct Arrival {
    pub(crate) grant: u64,
    pub(crate) transfer: TransferId,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    pub(crate) blocks: Blocks,
}

impl Arrival {
    /// Number of the grant that it used ([`Grant::id`](super::Grant::id)).
    pub fn grant(&self) -> u64 {
        self.grant
    }

    /// The sender's number of the transfer.
    pub fn transfer(&self) -> TransferId {
        self.transfer
    }

    /// The sender's tag.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Payload bytes that were written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The granted blocks: no peer writes to them any more.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Takes the blocks.
    pub fn into_blocks(self) -> Blocks {
        self.blocks
    }
}

/// Why an arrival will not come.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalError {
    /// A granted transfer was aborted. Its blocks return to the pool when no late write can reach them any more.
    #[error("the transfer under grant {grant} was aborted: {reason}")]
    Aborted {
        /// Number of the grant.
        grant: u64,
        /// Why.
        reason: AbortReason,
    },
    /// The channel has ended; nothing more arrives.
    #[error(transparent)]
    Closed(#[from] ChannelClosed),
}
