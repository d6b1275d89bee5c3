//! How a channel has ended, and what it then refuses.

use crate::kv::proto::Cause;

/// How a channel has ended, or why it does not take something.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the channel has ended: {reason}")]
pub struct ChannelClosed {
    pub(super) reason: String,
    pub(super) cause: Cause,
}

impl ChannelClosed {
    /// Whether both sides had closed it, with nothing left undone.
    pub fn is_graceful(&self) -> bool {
        self.cause == Cause::Closed
    }

    /// Why it ended. The text of this error also has the device's words, where there are any.
    pub fn cause(&self) -> Cause {
        self.cause
    }
}

/// Why a message was not sent.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Longer than the limit.
    #[error("a message of {asked} bytes, the limit is {limit}; split it, or write it as blocks")]
    TooLong {
        /// Its length.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// The channel has ended.
    #[error(transparent)]
    Closed(#[from] ChannelClosed),
}

pub(super) fn ended_unknown() -> ChannelClosed {
    ChannelClosed { reason: "ended locally".to_owned(), cause: Cause::Local }
}
