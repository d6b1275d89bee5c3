//! Reads: what is asked for, the future that waits for it, how it ends; and what the owner of the blocks learns.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::blocks::Blocks;
use super::channel::{GrantRefusal, KvChannel, Waiter};
use super::driver::{ChannelClosed, KvDriver};
use super::grant::Grant;
use super::mapping::{Mapping, MappingError};
use super::proto::{AbortReason, ReadId, ReadRefusal, Reason};
use super::read_choice::{ReadMethod, ReadStrategy};
use super::shape::Shape;
use super::spans::{Mapped, Stretch, TokenSpan};

/// A read to be started: which of the granted blocks come to which of ours.
///
/// By default position *i* of the grant comes to position *i* of our blocks, in every layer. Of [`pairs`](Self::pairs) and the
/// calls for [mapped](Self::mapped) tokens the last one counts.
#[derive(Debug)]
#[must_use = "a request does nothing until it is given to KvChannel::read"]
pub struct ReadRequest {
    pub(crate) grant: Grant,
    pub(crate) target: Blocks,
    pub(crate) pairs: Option<Vec<(u32, u32)>>,
    pub(crate) mapped: Option<Mapped>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) strategy: ReadStrategy,
}

impl ReadRequest {
    /// Reads the blocks of `grant` to `target`, which moves in and comes back with the result.
    pub fn new(grant: &Grant, target: Blocks) -> Self {
        let (grant, strategy) = (grant.clone(), ReadStrategy::Auto);
        Self { grant, target, pairs: None, mapped: None, deadline: None, strategy }
    }

    /// Reads these pairs (position in the grant, position in our blocks) instead, each in every layer. A position of the grant
    /// may occur more than once, one of ours may not.
    pub fn pairs(mut self, pairs: impl IntoIterator<Item = (u32, u32)>) -> Self {
        self.pairs = Some(pairs.into_iter().collect());
        self.mapped = None;
        self
    }

    /// Reads every token of the grant to the same token of our blocks, from blocks of one shape to blocks of another: for pools
    /// whose blocks differ in tokens, heads or order. The mapping is the channel's
    /// [`mapping_from_peer`](KvChannel::mapping_from_peer). See [shapes](crate::guide::shapes).
    ///
    /// Bytes of our blocks that the mapping does not name (other heads, tokens beyond) are left as they are.
    pub fn mapped(self, mapping: &Mapping) -> Self {
        self.stretch(mapping, Stretch::All)
    }

    /// As [`mapped`](Self::mapped), of the first `tokens` tokens only: a request need not fill its last block.
    pub fn mapped_tokens(self, mapping: &Mapping, tokens: u32) -> Self {
        self.mapped_spans(mapping, [TokenSpan { source: 0, target: 0, tokens }])
    }

    /// As [`mapped`](Self::mapped), of these tokens only: `source` is counted over the grant, `target` over our blocks. A token of
    /// the grant may occur more than once, one of ours may not.
    pub fn mapped_spans(self, mapping: &Mapping, spans: impl IntoIterator<Item = TokenSpan>) -> Self {
        self.stretch(mapping, Stretch::Spans(spans.into_iter().collect()))
    }

    fn stretch(mut self, mapping: &Mapping, what: Stretch) -> Self {
        self.mapped = Some(Mapped { mapping: mapping.clone(), what });
        self.pairs = None;
        self
    }

    /// The time that the read may take in all, from the call on: by default [`KvConfig::deadline`](super::KvConfig::deadline).
    /// At its end the read is given up, and its blocks come back: by READs when those in flight have completed, within
    /// [`KvConfig::abort_grace`](super::KvConfig::abort_grace); by [`ReadStrategy::RemoteWrite`] when the owner has said that it does
    /// not write to them any more, which may take `abort_grace` and four times
    /// [`KvConfig::peer_timeout`](super::KvConfig::peer_timeout) before the channel is given up for it.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// How to read. By default [`ReadStrategy::Auto`].
    pub fn strategy(mut self, strategy: ReadStrategy) -> Self {
        self.strategy = strategy;
        self
    }
}

/// A read whose data is here: all of it is in our blocks, and visible.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReadDone {
    /// Payload bytes.
    pub bytes: u64,
    /// Pieces that were asked for: pairs of blocks × layers; of a mapped read, pairs of blocks that meet × layers.
    pub descriptors: u64,
    /// How it was done.
    pub method: ReadMethod,
    /// Why in that way.
    pub why: &'static str,
    /// READs that it took, after coalescing neighbours and slicing at limits. 0 by
    /// [`RemoteWrite`](ReadMethod::RemoteWrite): the owner posted its work requests.
    pub wrs: u64,
    /// READs that were in flight at most, on all queue pairs. 0 by [`RemoteWrite`](ReadMethod::RemoteWrite).
    pub most_in_flight: u32,
    /// From the call to the finished plan: every bound checked, nothing posted yet.
    pub planned: Duration,
    /// From the call to the data.
    pub took: Duration,
}

/// Why a read has not brought its data. Some of it may be in the blocks.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The grant was used before, or revoked. Nothing was posted.
    #[error(
        "grant {grant} was used before or revoked; each grant serves one read: ask the peer for a new one"
    )]
    StaleGrant {
        /// The grant.
        grant: u64,
    },
    /// It is a grant to write. Nothing was posted, and it can still be written to.
    #[error("grant {grant} is one to write; ask the peer for one by KvChannel::grant_read")]
    WrongKind {
        /// The grant.
        grant: u64,
    },
    /// The grant is of another life of the peer. Nothing was posted.
    #[error(
        "grant of epoch {grant:#018x}, the peer has epoch {peer:#018x}: it was restarted since, and its old keys are dead; ask for a new grant"
    )]
    PeerRestarted {
        /// Epoch in the grant.
        grant: u64,
        /// Epoch of the connected peer.
        peer: u64,
    },
    /// The grant was given to another endpoint. Nothing was posted.
    #[error(
        "the grant is bound to the endpoint of epoch {bound:#018x}, this one is {ours:#018x}; use it there"
    )]
    NotOurs {
        /// The epoch that the grant is bound to.
        bound: u64,
        /// Our epoch.
        ours: u64,
    },
    /// A position, layer or block that does not exist. Nothing was posted.
    #[error("{what} {index} is out of range: there are {limit}")]
    OutOfRange {
        /// What was indexed.
        what: &'static str,
        /// The index asked for.
        index: u64,
        /// The number that there is.
        limit: u64,
    },
    /// Two pairs name the same target. Nothing was posted.
    #[error("position {position} of our blocks is read to twice in one request; name each target once")]
    Duplicate {
        /// The position in our blocks.
        position: u32,
    },
    /// The blocks of the two pools hold different things, and the request does not say what goes where. Nothing was posted, and
    /// the grant can still be used.
    #[error(
        "a block has the shape {ours:?} here and {theirs:?} at the peer; use ReadRequest::mapped with the channel's mapping_from_peer"
    )]
    Shapes {
        /// Our pool's shape.
        ours: Box<Shape>,
        /// The peer's.
        theirs: Box<Shape>,
    },
    /// The mapping does not fit the two pools. Nothing was posted, and the grant can still be used.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// Two spans name the same token of our blocks. Nothing was posted.
    #[error("token {token} of our blocks is read to twice in one request; name each once")]
    TokenTwice {
        /// The token.
        token: u32,
    },
    /// The target blocks are of another endpoint's pool. Nothing was posted.
    #[error(
        "the target blocks belong to another pool than this endpoint's; register one pool and take blocks from it"
    )]
    ForeignBlocks,
    /// A strategy with a number that is not one. Nothing was posted.
    #[error("ReadStrategy::RdmaRead with {what} 0; give from 1 to {limit}, which is what the channel has")]
    Strategy {
        /// `"depth"` or `"qps"`.
        what: &'static str,
        /// The most that this channel uses.
        limit: u64,
    },
    /// READs were asked for, and the owner's pool is not registered to be read. Nothing was posted.
    #[error(
        "the owner's pool gives no access to read; let it be created with PoolAccess::Readable or PoolAccess::Both, or read by \
         ReadStrategy::RemoteWrite or Auto"
    )]
    NotReadable,
    /// READs were asked for, and one of the devices has none. Nothing was posted.
    #[error(
        "one of the two devices has no READ (max_rd_atomic 0); read by ReadStrategy::RemoteWrite or Auto"
    )]
    NoRead,
    /// The owner was to write, and our own pool does not let it. Nothing was posted.
    #[error(
        "our own pool gives peers no access to write; create it with PoolAccess::Target or PoolAccess::Both, or read by \
         ReadStrategy::RdmaRead or Auto from a readable pool"
    )]
    NotWritable,
    /// The channel was closed before the read could start. Nothing was posted.
    #[error("the channel is closed: {reason}")]
    Closed {
        /// Why.
        reason: Reason,
    },
    /// The owner was asked to write, and did not begin.
    #[error("the owner refused: {0}")]
    Refused(ReadRefusal),
    /// It was started, and ended without all of the data.
    #[error("not read: {0}")]
    Failed(Reason),
}

/// A read in progress. It makes progress whether or not it is polled.
///
/// # Cancel safety
/// Dropping it gives the read up: the owner learns of it, the channel stays healthy, and our blocks return to their pool
/// when no device writes to them any more.
#[must_use = "dropping a read gives it up; await it"]
pub struct Read {
    state: State,
}

enum State {
    /// Refused at the call, or over.
    Ended(Option<(ReadError, Blocks)>),
    Running {
        driver: Arc<KvDriver>,
        id: ReadId,
    },
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match &self.state {
            State::Ended(_) => "ended",
            State::Running { .. } => "running",
        };
        f.debug_struct("Read").field("state", &state).finish_non_exhaustive()
    }
}

impl Future for Read {
    type Output = (Result<ReadDone, ReadError>, Blocks);

    /// # Panics
    /// When polled after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match &mut this.state {
            State::Ended(end) => match end.take() {
                Some((error, target)) => Poll::Ready((Err(error), target)),
                None => panic!("`Read` polled after it had completed"),
            },
            State::Running { driver, id } => {
                let out = driver.poll_read(*id, cx.waker());
                if out.is_ready() {
                    this.state = State::Ended(None);
                }
                out
            }
        }
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        if let State::Running { driver, id } = &self.state {
            driver.abandon_read(*id);
        }
    }
}

/// A grant to read that has ended: nobody reads its blocks any more.
#[derive(Debug)]
pub struct Served {
    pub(crate) grant: u64,
    pub(crate) blocks: Arc<Blocks>,
    pub(crate) bytes: u64,
    pub(crate) result: Result<ServedBy, AbortReason>,
}

/// By whom the data of a grant to read was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServedBy {
    /// By the peer's READs. That they are complete is the peer's word.
    RdmaRead,
    /// By WRITEs of ours, whose landing the peer has confirmed.
    RemoteWrite,
}

impl Served {
    /// Number of the grant ([`Grant::id`]).
    pub fn grant(&self) -> u64 {
        self.grant
    }

    /// Payload bytes that the peer has in its memory. When it ended without, some may have been read all the same.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How the peer was served, or why it was not.
    ///
    /// # Errors
    /// The reason: revoked by us, cancelled or late by the peer, refused, or the channel ended.
    pub fn result(&self) -> Result<ServedBy, AbortReason> {
        self.result
    }

    /// The granted blocks.
    pub fn blocks(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    /// Takes the blocks.
    pub fn into_blocks(self) -> Arc<Blocks> {
        self.blocks
    }
}

/// Why blocks could not be granted to be read (in [`source()`](std::error::Error::source) and in `why`). The blocks come
/// back.
#[derive(Debug, thiserror::Error)]
#[error("the blocks were not granted to be read")]
pub struct GrantReadRefused {
    /// The blocks, untouched.
    pub blocks: Arc<Blocks>,
    /// Why.
    #[source]
    pub why: GrantRefusal,
}

/// Reading.
impl KvChannel {
    /// Lets the peer read `blocks`, once. They come back by [`next_served`](Self::next_served), when nobody reads them any
    /// more. An `Arc<Blocks>` of which the caller keeps a clone can be read meanwhile, and granted to several peers at once.
    ///
    /// The grant is for the peer: serialise it into whatever carries the request, or use
    /// [`send_message`](Self::send_message). It is valid on this channel only, not after a reconnect. The pool need not be
    /// [readable](super::PoolAccess::peers_read): from one that is not, the peer reads by
    /// [`ReadStrategy::RemoteWrite`].
    ///
    /// It does not wait. Any number of grants may be open, unless [`KvConfig::limits`](super::KvConfig::limits) says otherwise.
    ///
    /// # Errors
    /// The blocks come back in the error: they are of another pool, above a limit, or the channel has ended.
    pub fn grant_read(&self, blocks: impl Into<Arc<Blocks>>) -> Result<Grant, GrantReadRefused> {
        let blocks = blocks.into();
        if !blocks.pool().same(self.pool()) {
            return Err(GrantReadRefused { blocks, why: GrantRefusal::ForeignBlocks });
        }
        self.inner.driver.grant_read(blocks).map_err(|(why, blocks)| GrantReadRefused { blocks, why })
    }

    /// Reads granted blocks to blocks of ours. Starts at once, whether or not the future is polled; it resolves when all of
    /// the data is in our memory, or why it is not, and no device writes to our blocks any more.
    ///
    /// Any number of reads may be in progress; the READs of all of them take turns.
    ///
    /// # Errors
    /// The future's output is a `Result` and the target blocks, which come back in every case. See [`ReadError`] for what was
    /// and was not posted.
    ///
    /// # Cancel safety
    /// Dropping the [`Read`] gives it up; the channel goes on.
    pub fn read(&self, request: ReadRequest) -> Read {
        let driver = &self.inner.driver;
        let state = match driver.start_read(request) {
            Ok(id) => State::Running { driver: driver.clone(), id },
            Err(refused) => State::Ended(Some(refused)),
        };
        Read { state }
    }

    /// The next grant to read of ours that has ended: read, or not and why. Exactly one for each, also when the channel ends.
    /// Any number of tasks may wait; each goes to one. They wait in memory, with their blocks, until they are taken.
    ///
    /// # Errors
    /// When the channel has ended and all were taken.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next_served(&self) -> Result<Served, ChannelClosed> {
        let mut waiter = Waiter::new(self);
        poll_fn(|cx| self.inner.driver.poll_served(cx, &mut waiter.place)).await
    }
}
