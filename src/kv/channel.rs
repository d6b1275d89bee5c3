//! The channel: one connection between two endpoints, as its user sees it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;

use super::arrival::{Arrival, ArrivalError};
use super::blocks::Blocks;
use super::driver::{ChannelClosed, KvDriver, MessageError};
use super::grant::Grant;
use super::path::{PathFacts, PathReport};
use super::path_check::PathCheck;
use super::pool::KvPool;
use super::proto::{Resolution, TransferId};
use super::stats::ChannelStats;
use super::waiting::Place;
use super::write::{Write, WriteRequest};
use crate::connect::PeerAuth;

pub(super) struct ChannelInner {
    pub(super) driver: Arc<KvDriver>,
    pub(super) facts: PathFacts,
    /// `None` without a device that counts.
    pub(super) check: Option<PathCheck>,
    pub(super) connection: u64,
    pub(super) peer_epoch: u64,
    pub(super) peer_name: String,
    pub(super) peer_auth: PeerAuth,
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

/// A channel between two endpoints: either side grants blocks, writes to those that it was granted to write to, and reads those
/// that it was granted to read.
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

/// Why blocks could not be granted (in [`source()`](std::error::Error::source) and in `why`). The blocks come back.
#[derive(Debug, thiserror::Error)]
#[error("the blocks were not granted")]
pub struct GrantRefused {
    /// The blocks, untouched.
    pub blocks: Blocks,
    /// Why.
    #[source]
    pub why: GrantRefusal,
}

/// Why a grant was refused, see [`GrantRefused`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrantRefusal {
    /// The pool gives peers no access to write.
    #[error(
        "the pool is a source only; create it with PoolAccess::Target or PoolAccess::Both to be written to"
    )]
    SourceOnly,
    /// The blocks are of another pool than this endpoint's.
    #[error("the blocks belong to another pool than this endpoint's; take them from KvEndpoint::pool")]
    ForeignBlocks,
    /// The peer has as many grants as [`PeerLimits::grants`](super::PeerLimits::grants) allows.
    #[error(
        "{open} grants are open on this channel, and PeerLimits::grants is {limit}; wait until some have arrived, or raise it"
    )]
    TooMany {
        /// Open grants.
        open: usize,
        /// The limit.
        limit: u32,
    },
    /// The peer would have more memory than [`PeerLimits::granted_bytes`](super::PeerLimits::granted_bytes) allows.
    #[error(
        "{asked} bytes more than the {held} under this channel's open grants, and PeerLimits::granted_bytes is {limit}; wait until some have arrived, or raise it"
    )]
    TooLarge {
        /// Bytes of the blocks that were to be granted.
        asked: u64,
        /// Bytes under open grants.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// The channel has ended.
    #[error(transparent)]
    Closed(#[from] ChannelClosed),
}

impl KvChannel {
    /// The pool of this side's endpoint: sources of writes and blocks to grant are taken from it.
    pub fn pool(&self) -> &KvPool {
        self.inner.driver.pool()
    }

    /// The peer's epoch: another one means that its process was restarted.
    pub fn peer_epoch(&self) -> u64 {
        self.inner.peer_epoch
    }

    /// The peer's name, as it gave it to [`KvEndpoint::named`](super::KvEndpoint::named); empty when it gave none.
    pub fn peer_name(&self) -> &str {
        &self.inner.peer_name
    }

    /// How the peer was admitted, see [`KvConfig::admission`](super::KvConfig::admission).
    pub fn peer_auth(&self) -> &PeerAuth {
        &self.inner.peer_auth
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
    /// It does not wait. Any number of grants may be open, unless [`KvConfig::limits`](super::KvConfig::limits) says otherwise.
    ///
    /// # Errors
    /// The blocks come back in the error. [`GrantRefusal`] says why: a pool that is a source only, blocks of another
    /// pool, a limit, a channel that has ended.
    pub fn grant(&self, blocks: Blocks) -> Result<Grant, GrantRefused> {
        if let Err(why) = self.may_grant(&blocks) {
            return Err(GrantRefused { blocks, why });
        }
        self.inner.driver.grant(blocks).map_err(|(why, blocks)| GrantRefused { blocks, why })
    }

    /// Whether blocks of these can be granted on this channel, as far as it is open.
    pub(super) fn may_grant(&self, blocks: &Blocks) -> Result<(), GrantRefusal> {
        if !self.pool().access().peers_write() {
            return Err(GrantRefusal::SourceOnly);
        }
        if !blocks.pool().same(self.pool()) {
            return Err(GrantRefusal::ForeignBlocks);
        }
        Ok(())
    }

    /// Takes back a grant that this side issued on this channel. Its arrival ends with
    /// [`Aborted`](ArrivalError::Aborted), or comes all the same if it had landed already. The blocks return to the pool
    /// when no late write can reach them. Those of a grant to read come out of [`next_served`](Self::next_served) when
    /// nobody reads them any more; the peer may have read all of them by then. A peer that does not say so within
    /// [`abort_grace`](crate::kv::KvConfig::abort_grace) and four times
    /// [`peer_timeout`](crate::kv::KvConfig::peer_timeout) is lost ([`Cause::PeerLost`](crate::kv::Cause::PeerLost)).
    ///
    /// Does nothing for a grant that is used up, and for one of another channel or of the peer.
    pub fn revoke(&self, grant: &Grant) {
        if grant.connection() == self.inner.connection && grant.bound_epoch() == self.inner.peer_epoch {
            self.inner.driver.revoke(grant.ids());
        }
    }

    /// Writes blocks of ours to granted ones. Starts at once, whether or not the future is polled; it resolves when
    /// the peer has confirmed that all of the data is in its memory.
    ///
    /// Any number of writes may be in progress. 256 have a transfer slot; the others wait for one, in order, without
    /// being polled. Only when 65,536 transfers are unresolved does a write wait outside of the channel, and then it has
    /// to be polled (or [detached](Write::detach)) to start.
    ///
    /// # Errors
    /// The future's output is a `Result` and the source blocks, which come back in every case. See
    /// [`WriteError`](super::WriteError) for what was and was not posted.
    ///
    /// # Cancel safety
    /// Dropping the [`Write`] aborts the transfer; the channel goes on.
    pub fn write(&self, request: WriteRequest) -> Write {
        Write::start(&self.inner.driver, request)
    }

    /// The next arrival, or the end of one that will not come. Any number of tasks may wait; each arrival goes to one.
    /// Arrivals wait in memory until they are taken, also after the channel has ended. Grants by layer
    /// ([`LayerArrivals`](super::LayerArrivals)) and in parts ([`Gather`](super::Gather)) tell of theirs by themselves.
    ///
    /// # Errors
    /// [`ArrivalError::Aborted`] ends one granted transfer, and the next call goes on with the others.
    /// [`ArrivalError::Closed`] ends the channel, after everything that had arrived was taken.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next_arrival(&self) -> Result<Arrival, ArrivalError> {
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_arrival(cx, &mut waiter.place)).await
    }

    /// The arrivals as a stream, which ends with the channel. Aborted transfers are items too. It keeps the channel open.
    pub fn arrivals(&self) -> Arrivals {
        Arrivals { channel: self.clone(), place: Place::default() }
    }

    /// Sends a message to the peer's [`KvChannel::recv_message`]: whole, in order, at most 16 MiB. It resolves when the
    /// message is queued, not when it is delivered: one that is queued is lost if the channel fails. The queue holds
    /// 32 MiB or 4,096 messages; beyond, this waits.
    ///
    /// # Errors
    /// [`MessageError::TooLong`], and [`MessageError::Closed`] also while the channel is closing.
    ///
    /// # Cancel safety
    /// Dropped before it resolves, the message is not sent.
    pub async fn send_message(&self, message: Vec<u8>) -> Result<(), MessageError> {
        let mut message = Some(message);
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_send_message(cx, &mut waiter.place, &mut message)).await
    }

    /// The peer's next message. Messages wait in memory until they are taken, also after the channel has ended; 32 MiB or
    /// 256 of them, and the peer sends no more until some are (K7). Any number of tasks may wait; each message goes to one.
    ///
    /// # Errors
    /// When the channel has ended and every message was taken.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn recv_message(&self) -> Result<Vec<u8>, ChannelClosed> {
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_message(cx, &mut waiter.place)).await
    }

    /// What became of a transfer that was [`InDoubt`](super::WriteError::InDoubt) on an earlier channel to the same
    /// life of the peer. `None` when it is not one of those, or this channel ends before the answer. The answer is kept for
    /// as long as this channel lives.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn resolve(&self, transfer: TransferId) -> Option<Resolution> {
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_resolution(cx, &mut waiter.place, transfer)).await
    }

    /// Which way the bytes took, and how many, counted from the channel's beginning to now. Does no I/O: the device's
    /// counters are those of the last [`verify_path`](Self::verify_path).
    pub fn path(&self) -> PathReport {
        let counters = self.inner.check.as_ref().and_then(PathCheck::last);
        let driver = &self.inner.driver;
        self.inner.facts.report(driver.reports(), driver.gpu_traffic(), driver.rail_reports(), counters)
    }

    /// As [`path`](Self::path), held against what the device itself has counted since the channel opened: whether it
    /// bears out what this side knows to have landed and to have arrived. [`counters`](crate::counters) says how, and
    /// when the answer is unknown.
    ///
    /// Reads sysfs on a blocking thread. When the counters say less than they should, it waits until they are fresh (10 ms
    /// and a little) and reads once more.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn verify_path(&self) -> PathReport {
        if let Some(check) = &self.inner.check {
            check.verify().await;
        }
        self.path()
    }

    /// How many transfers ended in which way, counted from the channel's beginning to now.
    pub fn stats(&self) -> ChannelStats {
        self.inner.driver.stats()
    }

    /// Resolves when the channel has ended, by whichever side and for whatever reason, and its queue pairs are destroyed.
    /// By then the blocks of open grants and of detached writes are back in their pools, and the endpoint takes a
    /// reconnect.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn closed(&self) -> ChannelClosed {
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_end(cx, &mut waiter.place)).await
    }

    /// Closes gracefully: what is in flight on either side finishes, nothing new starts, and the queue pairs are
    /// destroyed. When five seconds are over, what is left is ended as by [`KvChannel::kill`].
    ///
    /// # Errors
    /// An end that was not graceful, with its reason: also one that had come before.
    ///
    /// # Cancel safety
    /// The channel closes all the same.
    pub async fn close(&self) -> Result<(), ChannelClosed> {
        self.inner.driver.close(CLOSE_LIMIT);
        match self.closed().await {
            closed if closed.is_graceful() => Ok(()),
            closed => Err(closed),
        }
    }

    /// Ends the channel at once: its queue pairs go to the error state and are destroyed. Writes in progress end as
    /// [`NotDelivered`](super::WriteError::NotDelivered) or [`InDoubt`](super::WriteError::InDoubt), open grants as
    /// aborted. Does not wait: [`KvChannel::closed`] does.
    pub fn kill(&self) {
        self.inner.driver.kill();
    }
}

/// A call that may wait: its place is given back when it ends, or is dropped.
pub(super) struct Waiter<'a> {
    pub(super) driver: &'a KvDriver,
    pub(super) place: Place,
}

impl<'a> Waiter<'a> {
    pub(super) fn new(channel: &'a KvChannel) -> Self {
        Self { driver: &channel.inner.driver, place: Place::default() }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.driver.leave(&mut self.place);
    }
}

/// The stream of [`KvChannel::arrivals`].
#[derive(Debug)]
pub struct Arrivals {
    channel: KvChannel,
    place: Place,
}

impl Clone for Arrivals {
    fn clone(&self) -> Self {
        self.channel.arrivals()
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.channel.inner.driver.leave(&mut self.place);
    }
}

impl Stream for Arrivals {
    type Item = Result<Arrival, ArrivalError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { channel, place } = self.get_mut();
        channel.inner.driver.poll_arrival(cx, place).map(|arrival| match arrival {
            Err(ArrivalError::Closed(_)) => None,
            arrival => Some(arrival),
        })
    }
}

impl KvDriver {
    fn close(&self, limit: Duration) {
        self.close_by(Instant::now() + limit);
    }
}
