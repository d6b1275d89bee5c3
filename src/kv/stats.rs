//! What became of a channel's transfers, in numbers.

use serde::Serialize;

use super::proto::Outcome;

/// Counts of a channel, from its beginning. For whoever operates it: none of them is needed to use it. Each layer of a write by
/// layer counts as a write and as a transfer; their grant counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ChannelStats {
    /// Writes and reads that were refused with nothing posted: a stale grant, a position out of range, a closed channel.
    pub refused: u64,
    /// Writes of ours that have landed.
    pub landed: u64,
    /// Writes of ours that were not delivered.
    pub not_delivered: u64,
    /// Writes of ours that were in doubt when the channel ended.
    pub in_doubt: u64,
    /// Transfers of the peer that have arrived.
    pub arrived: u64,
    /// Grants of ours whose arrival ended without.
    pub aborted: u64,
    /// Payload bytes of the writes that have landed.
    pub landed_bytes: u64,
    /// Payload bytes of the transfers that have arrived.
    pub arrived_bytes: u64,
    /// Reads of ours whose data is here, by either way. Those by [`RemoteWrite`](super::ReadMethod::RemoteWrite) are not
    /// counted as arrivals.
    pub reads: u64,
    /// Reads of ours that ended without.
    pub reads_failed: u64,
    /// Payload bytes of the reads whose data is here.
    pub read_bytes: u64,
    /// Grants to read of ours that the peer has read. What we wrote for it is not counted as writes.
    pub served: u64,
    /// Grants to read of ours that ended without.
    pub not_served: u64,
    /// Payload bytes that the peer has read.
    pub served_bytes: u64,
}

impl ChannelStats {
    pub(super) fn done(&mut self, outcome: Outcome) {
        *match outcome {
            Outcome::Landed => &mut self.landed,
            Outcome::NotDelivered(_) => &mut self.not_delivered,
            Outcome::InDoubt(_) => &mut self.in_doubt,
        } += 1;
    }
}
