//! How queue pairs are made and connected: depths, roles, attributes, and what a peer needs to know.

use std::fmt;
use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};

use crate::device::{Capabilities, SoftTransport};
use crate::error::QpError;
use crate::provider::QpAddress;

/// How a queue pair is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QpConfig {
    /// Sends, writes and reads that may be outstanding.
    pub send_depth: u32,
    /// Receives that may be posted.
    pub recv_depth: u32,
    /// Payloads of SEND and WRITE up to this many bytes are copied when they are posted (`IBV_SEND_INLINE`).
    pub max_inline: u32,
}

impl QpConfig {
    /// Depths of the send and the receive queue.
    pub fn new(send_depth: u32, recv_depth: u32) -> Self {
        Self { send_depth, recv_depth, max_inline: 0 }
    }

    /// Sets the largest payload that is copied at the post.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }
}

impl Default for QpConfig {
    /// 16 and 16: what every device has.
    fn default() -> Self {
        Self::new(16, 16)
    }
}

/// Which side of a connection dials, where a transport has to. Exactly one side is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Dials.
    Active,
    /// Is dialled.
    Passive,
}

/// Attributes of a connection. The defaults suit a data centre.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// READs and atomics that this side may have outstanding at most, less where one of the two devices has less; further
    /// ones wait in the queue. 0 refuses them. By RDMA_CM, which tells the peer, it also limits those of the peer.
    pub max_rd_atomic: u8,
    /// Local ACK time-out: 4.096 µs × 2^timeout, at most 31; 0 is for ever.
    pub timeout: u8,
    /// Retries after a time-out, at most 6: some drivers take 7 as "for ever".
    pub retry_cnt: u8,
    /// Retries while the peer has no receive posted, at most 6: 7 is "for ever".
    pub rnr_retry: u8,
    /// The IB code of the wait between those, at most 31 (12 is 0.64 ms, 20 is 10.24 ms, 0 is 655.36 ms).
    pub min_rnr_timer: u8,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { max_rd_atomic: 16, timeout: 14, retry_cnt: 6, rnr_retry: 6, min_rnr_timer: 20 }
    }
}

impl ConnectOptions {
    pub(crate) fn check(&self) -> Result<(), QpError> {
        let limits = [
            ("the ACK time-out code", self.timeout, 31),
            ("retry_cnt", self.retry_cnt, 6),
            ("rnr_retry", self.rnr_retry, 6),
            ("the RNR timer code", self.min_rnr_timer, 31),
        ];
        match limits.into_iter().find(|&(_, asked, limit)| asked > limit) {
            Some((what, asked, limit)) => {
                Err(limit_error(what, asked.into(), limit.into(), "use a smaller value"))
            }
            None => Ok(()),
        }
    }
}

/// What carries the bytes of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct QpPath {
    /// `"tcp"` or `"shm"` on the soft provider, `"verbs"` on an RDMA device.
    pub transport: &'static str,
    /// Why that one.
    pub reason: String,
}

impl fmt::Display for QpPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.transport, self.reason)
    }
}

/// What a peer needs to connect to a queue pair. Plain data for an exchange of the user's own.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpEndpoint {
    qp_num: u32,
    psn: u32,
    lid: u16,
    gid: Ipv6Addr,
    soft_port: u16,
    soft_key: u64,
    soft_local: u64,
    pub(super) mtu: u32,
    pub(super) rd_atomic: u8,
    pub(super) ordered: bool,
}

impl fmt::Debug for QpEndpoint {
    /// Without the key, which lets its holder connect.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpEndpoint")
            .field("qp_num", &self.qp_num)
            .field("gid", &self.gid)
            .finish_non_exhaustive()
    }
}

impl QpEndpoint {
    /// The queue pair's number.
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Its port's GID.
    pub fn gid(&self) -> Ipv6Addr {
        self.gid
    }

    pub(super) fn new(address: QpAddress, caps: &Capabilities) -> Self {
        Self {
            qp_num: address.qp_num,
            psn: address.psn,
            lid: address.lid,
            gid: address.gid.into(),
            soft_port: address.soft_port,
            soft_key: address.soft_key,
            soft_local: address.soft_local,
            mtu: caps.active_mtu,
            rd_atomic: caps.max_rd_atomic,
            ordered: caps.ordered,
        }
    }

    /// What it takes. `None` where it is not of a soft device.
    pub(super) fn takes(&self) -> Option<SoftTransport> {
        SoftTransport::of_address(&self.address())
    }

    pub(super) fn address(&self) -> QpAddress {
        QpAddress {
            qp_num: self.qp_num,
            psn: self.psn,
            lid: self.lid,
            gid: self.gid.octets(),
            soft_port: self.soft_port,
            soft_key: self.soft_key,
            soft_local: self.soft_local,
        }
    }
}

pub(super) fn limit_error(what: &'static str, asked: u64, limit: u64, fix: &'static str) -> QpError {
    QpError::Limit { what, asked, limit, fix }
}
