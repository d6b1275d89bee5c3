//! The channel: one connection between two endpoints, as its user sees it.

use std::future::poll_fn;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;

use super::arrival::{Arrival, ArrivalError};
use super::driver::{ChannelClosed, KvDriver, MessageError};
use super::grant::Grant;
use super::path::PathReport;
use super::pool::{Blocks, KvPool, PoolAccess};
use super::proto::{Resolution, TransferId};
use super::write::{Write, WriteRequest};

/// What a channel was agreed to be, for its path report.
#[derive(Debug)]
pub(super) struct PathFacts {
    pub(super) transport: &'static str,
    pub(super) device: String,
    pub(super) profile: Option<String>,
    pub(super) notify: &'static str,
    pub(super) ordered: bool,
    pub(super) gid: [u8; 16],
    pub(super) peer_gid: [u8; 16],
    pub(super) mtu: u32,
}

pub(super) struct ChannelInner {
    pub(super) driver: Arc<KvDriver>,
    pub(super) facts: PathFacts,
    pub(super) connection: u64,
    pub(super) peer_epoch: u64,
    pub(super) peer_name: String,
}

impl std::fmt::Debug for ChannelInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvChannel")
            .field("connection", &format_args!("{:#018x}", self.connection))
            .field("peer", &self.peer_name)
            .field("peer_epoch", &format_args!("{:#018x}", self.peer_epoch))
            .finish_non_exhaustive()
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // The last handle: what is in flight finishes in the background, within the closing deadline.
        self.driver.close(CLOSE_LIMIT);
    }
}

/// How long a graceful close may take before the queue pairs are killed.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A channel between two endpoints: either side grants blocks, and writes to those that it was granted.
///
/// Cloning gives another handle. When the last one is dropped, the channel closes in the background: writes that were
/// detached finish, within five seconds; [`KvChannel::close`] waits for that.
///
/// # Cancel safety
/// Every future of a channel can be dropped at any time and loses nothing: an arrival or message that was not
/// returned is there for the next call. Dropping a [`Write`] aborts that transfer alone.
#[derive(Clone, Debug)]
pub struct KvChannel {
    pub(super) inner: Arc<ChannelInner>,
}

/// Why blocks could not be granted. The blocks come back.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct GrantRefused {
    /// The blocks, untouched.
    pub blocks: Blocks,
    /// Why.
    #[source]
    pub why: GrantRefusal,
}

/// See [`GrantRefused`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrantRefusal {
    /// The pool gives peers no access.
    #[error("the pool is a source only; create it with PoolAccess::Target to be written to")]
    SourceOnly,
    /// The blocks are of another pool than this endpoint's.
    #[error("the blocks belong to another pool than this endpoint's; take them from KvEndpoint::pool")]
    ForeignBlocks,
    /// The channel has ended.
    #[error(transparent)]
    Closed(#[from] ChannelClosed),
}

impl KvChannel {
    /// The pool of this side's endpoint.
    pub fn pool(&self) -> &KvPool {
        self.inner.driver.pool()
    }

    /// The peer's epoch: another one means that its process was restarted.
    pub fn peer_epoch(&self) -> u64 {
        self.inner.peer_epoch
    }

    /// The peer's name.
    pub fn peer_name(&self) -> &str {
        &self.inner.peer_name
    }

    /// Whether two handles are of one channel.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Lets the peer write to `blocks`, once, by one transfer. They come back with its [`Arrival`]; if it is aborted,
    /// they return to the pool when no late write can reach them any more.
    ///
    /// The grant is for the peer: serialise it into whatever carries the request, or use
    /// [`KvChannel::send_message`]. It is valid on this channel only, not after a reconnect.
    ///
    /// # Errors
    /// The blocks come back in the error.
    pub fn grant(&self, blocks: Blocks) -> Result<Grant, GrantRefused> {
        if self.pool().access() == PoolAccess::Source {
            return Err(GrantRefused { blocks, why: GrantRefusal::SourceOnly });
        }
        if !blocks.pool().same(self.pool()) {
            return Err(GrantRefused { blocks, why: GrantRefusal::ForeignBlocks });
        }
        self.inner
            .driver
            .grant(blocks)
            .map_err(|(closed, blocks)| GrantRefused { blocks, why: GrantRefusal::Closed(closed) })
    }

    /// Takes a grant back. Its arrival ends with `Aborted`, or comes all the same if it had landed already.
    pub fn revoke(&self, grant: &Grant) {
        self.inner.driver.revoke(grant.id());
    }

    /// Writes blocks of ours to granted ones. Starts at once, whether or not the future is polled; it resolves when
    /// the peer has confirmed that all of the data is in its memory.
    ///
    /// Any number of writes may be in progress; beyond the channel's transfer slots they wait for their turn.
    pub fn write(&self, request: WriteRequest) -> Write {
        Write::start(&self.inner.driver, request)
    }

    /// The next arrival, or the end of one that will not come. Any number of tasks may wait; each arrival goes to one.
    pub async fn next_arrival(&self) -> Result<Arrival, ArrivalError> {
        poll_fn(|cx| self.inner.driver.poll_arrival(cx)).await
    }

    /// The arrivals as a stream, which ends with the channel.
    pub fn arrivals(&self) -> Arrivals {
        Arrivals { channel: self.clone() }
    }

    /// Sends a message to the peer's [`KvChannel::recv_message`]: reliable, in order, at most 16 MiB. It resolves when
    /// the message is queued; the queue is bounded.
    ///
    /// # Cancel safety
    /// Dropped before it resolves, the message is not sent.
    pub async fn send_message(&self, message: Vec<u8>) -> Result<(), MessageError> {
        let mut message = Some(message);
        poll_fn(|cx| self.inner.driver.poll_send_message(cx, &mut message)).await
    }

    /// The peer's next message.
    pub async fn recv_message(&self) -> Result<Vec<u8>, ChannelClosed> {
        poll_fn(|cx| self.inner.driver.poll_message(cx)).await
    }

    /// What became of a transfer that was [`InDoubt`](super::WriteError::InDoubt) on an earlier channel to the same
    /// life of the peer. `None` when it is not one of those, or this channel ends before the answer.
    pub async fn resolve(&self, transfer: TransferId) -> Option<Resolution> {
        poll_fn(|cx| self.inner.driver.poll_resolution(cx, transfer)).await
    }

    /// Which way the bytes took, and how many.
    pub fn path(&self) -> PathReport {
        let facts = &self.inner.facts;
        let ip = |gid: [u8; 16]| {
            let ip = Ipv6Addr::from(gid);
            ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
        };
        PathReport {
            transport: facts.transport,
            device: facts.device.clone(),
            profile: facts.profile.clone(),
            bootstrap: "oob",
            notify: facts.notify,
            ordered: facts.ordered,
            gid: ip(facts.gid),
            peer_gid: ip(facts.peer_gid),
            mtu: facts.mtu,
            qps: self.inner.driver.reports(),
        }
    }

    /// Resolves when the channel has ended, by whichever side and for whatever reason.
    pub async fn closed(&self) -> ChannelClosed {
        poll_fn(|cx| self.inner.driver.poll_end(cx)).await
    }

    /// Closes gracefully: what is in flight on either side finishes, nothing new starts, and the queue pairs are
    /// destroyed. Takes at most five seconds; an end that was not graceful is the error.
    pub async fn close(&self) -> Result<(), ChannelClosed> {
        self.inner.driver.close(CLOSE_LIMIT);
        match self.closed().await {
            closed if closed.is_graceful() => Ok(()),
            closed => Err(closed),
        }
    }

    /// Ends the channel at once: its queue pairs go to the error state and are destroyed.
    pub fn kill(&self) {
        self.inner.driver.kill();
    }
}

/// See [`KvChannel::arrivals`].
#[derive(Clone, Debug)]
pub struct Arrivals {
    channel: KvChannel,
}

impl Stream for Arrivals {
    type Item = Result<Arrival, ArrivalError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.channel.inner.driver.poll_arrival(cx).map(|arrival| match arrival {
            Err(ArrivalError::Closed { .. }) => None,
            arrival => Some(arrival),
        })
    }
}

impl KvDriver {
    fn close(&self, limit: Duration) {
        self.close_by(Instant::now() + limit);
    }
}
