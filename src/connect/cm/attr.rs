//! Attributes of a connection, and how much private data its messages carry.

use super::super::error::ConnectError;
use crate::error::QpError;
use crate::provider::{CmAttr, QpAddress, QpConnect};

/// Most private data of a connect request: what InfiniBand's message has, less RDMA_CM's own header.
pub(super) const MAX_REQUEST: usize = 56;
/// Most private data of an acceptance.
pub(super) const MAX_REPLY: usize = 196;
/// Most private data of a rejection.
pub(super) const MAX_REJECT: usize = 148;

impl CmAttr {
    /// With the numbers of READs that the peer allows: what it serves, and what it may have outstanding.
    pub(super) fn agreed(self, peer_serves: u8, peer_issues: u8) -> Self {
        Self {
            max_rd_atomic: self.max_rd_atomic.min(peer_serves),
            max_dest_rd_atomic: self.max_dest_rd_atomic.min(peer_issues),
            ..self
        }
    }

    pub(super) fn qp_connect(self, remote: QpAddress, path_mtu: u32, active: bool) -> QpConnect {
        QpConnect {
            remote,
            path_mtu,
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            min_rnr_timer: self.min_rnr_timer,
            active,
        }
    }
}

/// Refuses private data that no request could carry.
pub(super) fn check_request(private: &[u8]) -> Result<(), ConnectError> {
    check("a connect request", private, MAX_REQUEST)
}

/// Refuses private data that no acceptance could carry.
pub(super) fn check_reply(private: &[u8]) -> Result<(), ConnectError> {
    check("an acceptance", private, MAX_REPLY)
}

fn check(of: &'static str, private: &[u8], limit: usize) -> Result<(), ConnectError> {
    if private.len() > limit {
        return Err(ConnectError::PrivateDataTooLong { of, len: private.len(), limit });
    }
    Ok(())
}

/// The queue pair is of another device than the listener or the call.
pub(super) fn foreign() -> ConnectError {
    ConnectError::resources(QpError::ForeignResource { what: "a queue pair and the connection manager" })
}
