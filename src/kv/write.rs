//! One write: what is asked for, the future that waits for it, and how it ends.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

use super::blocks::Blocks;
use super::driver::KvDriver;
use super::grant::Grant;
use super::mapping::{Mapping, MappingError};
use super::proto::{Reason, TransferId};
use super::shape::Shape;
use super::spans::{Mapped, Stretch, TokenSpan};
use super::targets;
use super::waiting::Place;
use crate::cuda::{CudaError, Event};

/// A write to be started: which of our blocks go to which of the granted ones.
///
/// By default position *i* of the source goes to position *i* of the grant, in every layer. Of [`pairs`](Self::pairs) and the
/// calls for [mapped](Self::mapped) tokens the last one counts.
#[derive(Debug)]
#[must_use = "a request does nothing until it is given to KvChannel::write"]
pub struct WriteRequest {
    pub(crate) grant: Grant,
    pub(crate) source: Arc<Blocks>,
    pub(crate) pairs: Option<Vec<(u32, u32)>>,
    pub(crate) mapped: Option<Mapped>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) tag: u64,
    /// What has to have happened before it is begun.
    pub(crate) after: Option<Event>,
}

impl WriteRequest {
    /// Writes `source` to the blocks of `grant`.
    ///
    /// The source moves in, or is shared: an `Arc<Blocks>` of which the caller keeps a clone can be read and sent to
    /// several peers at once, and cannot be changed until the last write has given its clone back.
    pub fn new(grant: &Grant, source: impl Into<Arc<Blocks>>) -> Self {
        let (grant, source) = (grant.clone(), source.into());
        Self { grant, source, pairs: None, mapped: None, deadline: None, tag: 0, after: None }
    }

    /// Writes these pairs (position in the source, position in the grant) instead, each in every layer. A position of
    /// the source may occur more than once, one of the grant may not.
    pub fn pairs(mut self, pairs: impl IntoIterator<Item = (u32, u32)>) -> Self {
        self.pairs = Some(pairs.into_iter().collect());
        self.mapped = None;
        self
    }

    /// Writes every token of the source to the same token of the grant, from blocks of one shape to blocks of another: for
    /// pools whose blocks differ in tokens, heads or order. See [shapes](crate::guide::shapes).
    ///
    /// Bytes of the granted blocks that the mapping does not name (other heads, tokens beyond) are left as they are.
    pub fn mapped(self, mapping: &Mapping) -> Self {
        self.stretch(mapping, Stretch::All)
    }

    /// As [`mapped`](Self::mapped), of the first `tokens` tokens only: a request need not fill its last block.
    pub fn mapped_tokens(self, mapping: &Mapping, tokens: u32) -> Self {
        self.mapped_spans(mapping, [TokenSpan { source: 0, target: 0, tokens }])
    }

    /// As [`mapped`](Self::mapped), of these tokens only. A token of the source may occur more than once, one of the grant may
    /// not.
    pub fn mapped_spans(self, mapping: &Mapping, spans: impl IntoIterator<Item = TokenSpan>) -> Self {
        self.stretch(mapping, Stretch::Spans(spans.into_iter().collect()))
    }

    fn stretch(mut self, mapping: &Mapping, what: Stretch) -> Self {
        self.mapped = Some(Mapped { mapping: mapping.clone(), what });
        self.pairs = None;
        self
    }

    /// The time that the write may take in all, from the call on: by default
    /// [`KvConfig::deadline`](super::KvConfig::deadline). At its end the write is aborted, and its blocks come back.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Begins the write when `event` has come: when the work that fills the source is done. Until then nothing is posted, no
    /// thread waits, and the time counts towards the deadline. The write's future has to be polled, or detached, meanwhile.
    ///
    /// Of the calls of this the last one counts.
    #[cfg(feature = "cuda")]
    pub fn after(mut self, event: Event) -> Self {
        self.after = Some(event);
        self
    }

    /// A number that the receiver gets with the arrival.
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }
}

/// A write that has landed: all of its bytes are in the peer's memory, and the peer has said so.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Landed {
    /// The transfer.
    pub transfer: TransferId,
    /// Payload bytes.
    pub bytes: u64,
    /// Pieces that were asked for: pairs of blocks × layers.
    pub descriptors: u64,
    /// Work requests that it took: after coalescing neighbours and slicing at limits, without control messages.
    pub wrs: u64,
    /// How often it was begun: once, and once more for each [rail](crate::guide::rails) that failed under it.
    pub attempts: u32,
    /// From the call to the finished plan: every bound checked, runs of neighbours merged, nothing posted yet.
    pub planned: Duration,
    /// From the call to the last local completion: what other systems call done. On the soft provider it often comes
    /// together with the confirmation. It may come after it, too: when the device's own acknowledgement is lost on the
    /// wire, the peer's confirmation overtakes it.
    pub local: Duration,
    /// From the call to the peer's confirmation.
    pub landed: Duration,
}

/// Why a write did not land, or is not known to have landed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The grant was used before, or revoked. Nothing was posted.
    #[error(
        "grant {grant} was used before or revoked; each grant serves one write: ask the peer for a new one"
    )]
    StaleGrant {
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
    #[error("position {position} of the grant is written twice in one request; name each target once")]
    Duplicate {
        /// The position in the grant.
        position: u32,
    },
    /// The blocks of the two pools hold different things, and the request does not say what goes where. Nothing was posted.
    #[error(
        "a block has the shape {ours:?} here and {theirs:?} at the peer; use WriteRequest::mapped with the channel's mapping"
    )]
    Shapes {
        /// Our pool's shape.
        ours: Box<Option<Shape>>,
        /// The peer's.
        theirs: Box<Option<Shape>>,
    },
    /// The mapping does not fit the two pools. Nothing was posted.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// Two spans name the same token of the grant. Nothing was posted.
    #[error("token {token} of the grant is written twice in one request; name each once")]
    TokenTwice {
        /// The token.
        token: u32,
    },
    /// The grant is for another call. Nothing was posted, and it can still be used for that.
    #[error(
        "grant {grant} is for {granted}, it was used for {asked}; use it as it was granted, or ask for another one"
    )]
    WrongKind {
        /// The grant.
        grant: u64,
        /// What it is for.
        granted: &'static str,
        /// What it was used for.
        asked: &'static str,
    },
    /// As many transfers are unresolved as a channel follows, and this call does not wait. Nothing was posted.
    #[error("{limit} transfers of the channel are unresolved; await some of them, then write")]
    Full {
        /// How many it follows.
        limit: u64,
    },
    /// The source is memory of a GPU that the peer cannot be given. Nothing was posted.
    #[error("the blocks cannot be sent to this peer: {reason}")]
    Unsendable {
        /// Why, and the fix.
        reason: String,
    },
    /// What fills the source has failed, and with it the event that the write was to come after. Nothing was posted.
    #[error("the event that the write waits for has failed: {0}")]
    Event(CudaError),
    /// The source blocks are of another endpoint's pool. Nothing was posted.
    #[error(
        "the source blocks belong to another pool than this endpoint's; register one pool and take blocks from it"
    )]
    ForeignBlocks,
    /// The channel was closed before the write could start. Nothing was posted.
    #[error("the channel is closed: {reason}")]
    Closed {
        /// Why.
        reason: Reason,
    },
    /// The receiver was never given this transfer, and never will be.
    #[error("not delivered: {0}")]
    NotDelivered(Reason),
    /// The connection died after everything was sent and before the confirmation came. Connecting again to the same
    /// life of the peer tells: [`KvChannel::resolve`](super::KvChannel::resolve).
    #[error(
        "in doubt: {reason}; connect to the peer again, then KvChannel::resolve({transfer}) says whether it landed"
    )]
    InDoubt {
        /// The transfer.
        transfer: TransferId,
        /// How the connection ended.
        reason: Reason,
    },
}

/// A write in progress. It makes progress whether or not it is polled.
///
/// # Cancel safety
/// Dropping it aborts the transfer: the peer's arrival ends with `Aborted`, the channel stays healthy, and the
/// source blocks return to their pool when no device reads them any more. [`Write::detach`] lets it finish instead.
#[must_use = "dropping a write aborts it; await it, or call detach"]
pub struct Write {
    state: State,
}

enum State {
    /// Refused at the call, or waiting for its turn: nothing has been posted.
    Ended(Option<(WriteError, Arc<Blocks>)>),
    /// Waits for its event.
    Held {
        driver: Arc<KvDriver>,
        request: Option<Box<WriteRequest>>,
        event: Event,
        since: Instant,
        look: Option<Pin<Box<Sleep>>>,
    },
    /// Waits for its turn, outside of the channel.
    Queued {
        driver: Arc<KvDriver>,
        waiting: Option<Box<Planned>>,
        place: Place,
        /// Its deadline, from the first time on that it has waited.
        sleep: Option<Pin<Box<Sleep>>>,
    },
    Running {
        driver: Arc<KvDriver>,
        id: TransferId,
    },
}

impl std::fmt::Debug for Write {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match &self.state {
            State::Ended(_) => "ended",
            State::Held { .. } => "held",
            State::Queued { .. } => "queued",
            State::Running { .. } => "running",
        };
        f.debug_struct("Write").field("state", &state).finish_non_exhaustive()
    }
}

/// A write that has been checked and planned, and can be started.
pub(crate) struct Planned {
    pub(crate) request: Box<WriteRequest>,
    pub(crate) plan: targets::Planned,
    /// When it was asked for, and until when it may take.
    pub(crate) since: Instant,
    pub(crate) deadline: Instant,
}

/// What became of an attempt to start a write.
pub(crate) enum Started {
    Running(TransferId),
    /// Too many transfers are unresolved: try again when there is room.
    Full(Box<Planned>),
    Refused(WriteError, Arc<Blocks>),
}

impl Write {
    pub(crate) fn start(driver: &Arc<KvDriver>, mut request: WriteRequest) -> Self {
        if let Some(event) = request.after.take() {
            let (driver, request) = (driver.clone(), Some(Box::new(request)));
            return Self { state: State::Held { driver, request, event, since: Instant::now(), look: None } };
        }
        Self::begin(driver, Box::new(request), Instant::now())
    }

    /// Starts a write that was asked for at `since`.
    fn begin(driver: &Arc<KvDriver>, request: Box<WriteRequest>, since: Instant) -> Self {
        let started = match driver.plan_write(request, since) {
            Ok(planned) => driver.start_write(planned, None),
            Err((error, source)) => Started::Refused(error, source),
        };
        let state = match started {
            Started::Running(id) => State::Running { driver: driver.clone(), id },
            Started::Full(waiting) => {
                let (driver, waiting, place) = (driver.clone(), Some(waiting), Place::default());
                State::Queued { driver, waiting, place, sleep: None }
            }
            Started::Refused(error, source) => State::Ended(Some((error, source))),
        };
        Self { state }
    }

    /// The transfer's number. `None` for a write that was refused, has ended, or is waiting outside of the channel (see
    /// [`KvChannel::write`](super::KvChannel::write)).
    ///
    /// Keep it where a write must be accounted for also when its future is lost: it is what
    /// [`KvChannel::resolve`](super::KvChannel::resolve) asks about.
    pub fn transfer(&self) -> Option<TransferId> {
        match self.state {
            State::Running { id, .. } => Some(id),
            _ => None,
        }
    }

    /// Lets the transfer finish without anybody waiting for it; the source blocks return to their pool at its end.
    /// A write that is still waiting for its turn is started by a task of its own.
    pub fn detach(mut self) {
        match std::mem::replace(&mut self.state, State::Ended(None)) {
            State::Running { driver, id } => driver.detach(id),
            State::Queued { driver, waiting, mut place, sleep } => {
                driver.leave(&mut place);
                let write = Self { state: State::Queued { driver: driver.clone(), waiting, place, sleep } };
                driver.spawn(async move {
                    let _ = write.await;
                });
            }
            State::Held { driver, request, event, since, look } => {
                let write =
                    Self { state: State::Held { driver: driver.clone(), request, event, since, look } };
                driver.spawn(async move {
                    let _ = write.await;
                });
            }
            State::Ended(_) => {}
        }
    }

    /// Looks whether the event has come that it waits for, soon at first and then ever later.
    fn poll_held(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let State::Held { driver, request, event, since, look } = &mut self.state else {
            return Poll::Ready(());
        };
        let since = *since;
        let come = loop {
            if let Some(sleep) = look {
                std::task::ready!(sleep.as_mut().poll(cx));
            }
            let (waited, deadline) = (since.elapsed(), driver.deadline_of(request.as_deref()));
            match event.is_done() {
                Ok(true) => break Ok(()),
                Err(error) => break Err(WriteError::Event(error)),
                Ok(false) if waited >= deadline => break Err(WriteError::NotDelivered(Reason::Deadline)),
                Ok(false) => {
                    // tokio's timer counts milliseconds.
                    let next = (waited / 8).clamp(Duration::from_millis(1), LAST_LOOK);
                    *look = Some(Box::pin(tokio::time::sleep(next.min(deadline - waited))));
                }
            }
        };
        let Some(request) = request.take() else { return Poll::Ready(()) };
        let driver = driver.clone();
        self.state = match come {
            Ok(()) => std::mem::replace(&mut Self::begin(&driver, request, since).state, State::Ended(None)),
            Err(error) => State::Ended(Some((error, request.source))),
        };
        Poll::Ready(())
    }

    /// Starts a write that waits for its turn, if there is room; ends it at its deadline, if there was none.
    fn poll_queued(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let State::Queued { driver, waiting, place, sleep } = &mut self.state else {
            return Poll::Ready(());
        };
        let Some(planned) = waiting.take() else { return Poll::Ready(()) };
        let next = match driver.start_write(*planned, Some((cx.waker(), place))) {
            Started::Running(id) => State::Running { driver: driver.clone(), id },
            Started::Refused(error, source) => State::Ended(Some((error, source))),
            Started::Full(back) => {
                let sleep = sleep.get_or_insert_with(|| Box::pin(driver.sleep_until(back.deadline)));
                if sleep.as_mut().poll(cx).is_pending() {
                    *waiting = Some(back);
                    return Poll::Pending;
                }
                State::Ended(Some((WriteError::NotDelivered(Reason::Deadline), back.request.source)))
            }
        };
        driver.leave(place);
        self.state = next;
        Poll::Ready(())
    }
}

/// The longest time between two looks at the event that a write waits for.
const LAST_LOOK: Duration = Duration::from_millis(10);

impl Future for Write {
    type Output = (Result<Landed, WriteError>, Arc<Blocks>);

    /// # Panics
    /// When polled after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        std::task::ready!(this.poll_held(cx));
        std::task::ready!(this.poll_queued(cx));
        match &mut this.state {
            State::Ended(end) => match end.take() {
                Some((error, source)) => Poll::Ready((Err(error), source)),
                None => panic!("`Write` polled after it had completed"),
            },
            State::Running { driver, id } => {
                let id = *id;
                match driver.poll_write(id, cx.waker()) {
                    Poll::Ready(out) => {
                        this.state = State::Ended(None);
                        Poll::Ready(out)
                    }
                    Poll::Pending => Poll::Pending,
                }
            }
            State::Queued { .. } | State::Held { .. } => Poll::Pending,
        }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        match &mut self.state {
            State::Running { driver, id } => driver.abandon(*id),
            State::Queued { driver, place, .. } => driver.leave(place),
            State::Held { .. } | State::Ended(_) => {}
        }
    }
}
