//! The sender's side of a write by layer: each layer goes as soon as it is pushed, while later ones are still being made.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use super::blocks::Blocks;
use super::channel::KvChannel;
use super::driver::KvDriver;
use super::layer_events::{Pushed, push_after};
use super::pool::PoolError;
use super::proto::{Reason, TransferId};
use super::write::{Landed, WriteError, WriteRequest};
use crate::cuda::Event;

/// A write of which each layer is sent when it is pushed, from [`KvChannel::write_layers`].
///
/// The layers are transfers of their own under one grant and one deadline. One that fails ends the others, here and at the
/// receiver, where the whole is then aborted; layers that had landed may have been read there by then.
///
/// ```no_run
/// # use landfall::kv::{Blocks, Grant, KvChannel, WriteRequest};
/// # async fn compute(layer: u32) -> Vec<u8> { vec![] }
/// # async fn f(channel: &KvChannel, grant: &Grant, blocks: Blocks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut write = channel.write_layers(WriteRequest::new(grant, blocks))?;
/// for layer in 0..write.layers() {
///     let bytes = compute(layer).await; // while earlier layers are on their way
///     write.copy_in(layer, 0, 0, &bytes)?;
///     write.push(layer)?;
/// }
/// let (landed, blocks) = write.finish().await;
/// println!("{:?} after the last layer was pushed", landed?.tail);
/// # Ok(()) }
/// ```
///
/// # Cancel safety
/// Dropping it aborts the layers that have not landed, pushed or not: the receiver's arrivals end with `Aborted`, the channel
/// stays healthy, and the source returns to its pool when no device reads it any more.
#[must_use = "dropping it aborts the write; push every layer, then await finish"]
pub struct LayerWrite {
    driver: Arc<KvDriver>,
    source: Arc<Blocks>,
    /// Nobody else has a handle of the source.
    alone: bool,
    transfers: Range<u64>,
    started: Instant,
    pushed: Vec<Option<Pushed>>,
    /// What every layer comes after.
    first: Option<Arc<Event>>,
    /// Layers whose end has been taken.
    ended: Vec<Result<Landed, WriteError>>,
}

/// Why a write by layer was not started (in [`source()`](std::error::Error::source) and in `why`). Nothing was posted.
#[derive(Debug, thiserror::Error)]
#[error("the write by layer was refused")]
pub struct LayersRefused {
    /// The source, untouched.
    pub blocks: Arc<Blocks>,
    /// Why.
    #[source]
    pub why: WriteError,
}

/// Why a layer was not pushed, or filled.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A layer that the layout does not have.
    #[error("layer {layer} is out of range: there are {layers}")]
    OutOfRange {
        /// The layer.
        layer: u32,
        /// The number that there is.
        layers: u32,
    },
    /// The layer was pushed before: it is being read by the device, or has left.
    #[error("layer {layer} was pushed before; push each layer once, when all of it is there")]
    Pushed {
        /// The layer.
        layer: u32,
    },
    /// The source is shared with somebody who may be reading it.
    #[error(
        "the source is shared, and cannot be changed; give the write the only handle, or fill the blocks otherwise"
    )]
    Shared,
    /// A position or byte that does not exist.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The write has failed, or its channel has ended. [`LayerWrite::finish`] has the whole story.
    #[error("the write has ended: {0}")]
    Ended(Reason),
}

/// All layers have landed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayersLanded {
    /// Payload bytes.
    pub bytes: u64,
    /// Work requests that it took.
    pub wrs: u64,
    /// From [`KvChannel::write_layers`] to the peer's last confirmation.
    pub landed: Duration,
    /// From the last push, or the event that it came after, to the peer's last confirmation: what is left to wait for once the model is done.
    pub tail: Duration,
    /// Each layer, in their order. Its times count from its push.
    pub layers: Vec<Landed>,
}

/// The write has not landed as a whole. What is known of each layer is here: the receiver gives out none of the blocks, but may
/// have read the layers that had landed before.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{landed} of {} layers have landed; layer {first} has not, or may not have", .layers.len())]
#[non_exhaustive]
pub struct LayersNotLanded {
    /// What ended it.
    #[source]
    pub why: WriteError,
    /// The layer that this is of: where one has caused the end of the others, that one.
    pub first: u32,
    /// How many have landed.
    pub landed: u32,
    /// Each layer, in their order.
    pub layers: Vec<Result<Landed, WriteError>>,
}

impl LayersNotLanded {
    /// The layers in doubt, with the transfers that [`KvChannel::resolve`] asks about after a reconnect. The whole has landed if
    /// these have, and [`every other one`](Self::may_have_landed) has.
    pub fn in_doubt(&self) -> impl Iterator<Item = (u32, TransferId)> + '_ {
        (0..).zip(&self.layers).filter_map(|(layer, result)| match result {
            Err(WriteError::InDoubt { transfer, .. }) => Some((layer, *transfer)),
            _ => None,
        })
    }

    /// No layer is known to be missing: each has landed, or is in doubt.
    pub fn may_have_landed(&self) -> bool {
        self.layers.iter().all(|layer| matches!(layer, Ok(_) | Err(WriteError::InDoubt { .. })))
    }
}

/// Layers to push: one (`u32`), or a range (`Range<u32>`).
pub trait LayerSet: sealed::Sealed {
    /// The layers.
    fn layers(self) -> Range<u32>;
}

mod sealed {
    /// Only the two types below are sets of layers.
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for std::ops::Range<u32> {}
}

impl LayerSet for u32 {
    fn layers(self) -> Range<u32> {
        // The last one is refused as out of range either way.
        self..self.saturating_add(1)
    }
}

impl LayerSet for Range<u32> {
    fn layers(self) -> Range<u32> {
        self
    }
}

impl KvChannel {
    /// Begins a write of which each layer is sent when it is [pushed](LayerWrite::push), under a grant by layer
    /// ([`KvChannel::grant_layers`]). The deadline is that of the whole, from this call on. A request may be mapped, or of pairs, as
    /// for [`KvChannel::write`].
    ///
    /// It uses the grant up. The layers take transfer slots only while they are on their way.
    ///
    /// # Errors
    /// The source comes back in the error. As [`KvChannel::write`]; [`WriteError::WrongKind`] for a grant of one write, and
    /// [`WriteError::Full`] when 65,536 transfers are unresolved, counted from the oldest.
    pub fn write_layers(&self, request: WriteRequest) -> Result<LayerWrite, LayersRefused> {
        let started = Instant::now();
        let mut request = request;
        let first = request.after.take().map(Arc::new);
        let alone = Arc::get_mut(&mut request.source).is_some();
        let (driver, source) = (self.inner.driver.clone(), request.source.clone());
        match driver.start_layers(request) {
            Ok(transfers) => {
                let pushed = vec![None; (transfers.end - transfers.start) as usize];
                let ended = Vec::with_capacity(pushed.len());
                Ok(LayerWrite { driver, source, alone, transfers, started, pushed, first, ended })
            }
            Err((why, blocks)) => {
                drop(source);
                Err(LayersRefused { blocks, why })
            }
        }
    }
}

impl LayerWrite {
    /// Layers in all.
    pub fn layers(&self) -> u32 {
        self.pushed.len() as u32
    }

    /// The source.
    pub fn source(&self) -> &Blocks {
        &self.source
    }

    /// The transfer of a layer: what [`KvChannel::resolve`] asks about. Keep them where a write must be accounted for also when
    /// this is lost.
    pub fn transfer(&self, layer: u32) -> Option<TransferId> {
        self.transfers.clone().nth(layer as usize).map(TransferId)
    }

    /// Copies into a layer of the source that was not pushed yet, as [`Blocks::copy_in`] does.
    ///
    /// # Errors
    /// [`LayerError`], with nothing copied: a layer that was pushed, or is not there; a source of which somebody else has a
    /// handle, too; a position or byte out of range.
    pub fn copy_in(&mut self, layer: u32, position: u32, at: u64, bytes: &[u8]) -> Result<(), LayerError> {
        self.unpushed(layer)?;
        if !self.alone {
            return Err(LayerError::Shared);
        }
        Ok(self.source.copy_into(layer, position, at, bytes)?)
    }

    /// Sends a layer, or a range of them, now: all of its blocks are there. In whatever order, each once. It does not wait.
    ///
    /// # Errors
    /// [`LayerError`]. None of a range that has a layer out of range, or one that was pushed, is pushed;
    /// [`LayerError::Ended`] says that it is of no use to go on, and [`finish`](Self::finish) why.
    pub fn push(&mut self, layers: impl LayerSet) -> Result<(), LayerError> {
        let layers = layers.layers();
        for layer in layers.clone() {
            self.unpushed(layer)?;
        }
        if let Some(first) = self.first.clone() {
            self.follow(layers, vec![first]);
            return Ok(());
        }
        for layer in layers {
            let Some(id) = self.transfer(layer) else { continue };
            let now = Instant::now();
            self.driver.push_layer(id, now).map_err(LayerError::Ended)?;
            self.pushed[layer as usize] = Some(Pushed::At(now));
        }
        Ok(())
    }

    /// Sends a layer, or a range of them, when `event` has come: when the GPU has made them. It does not wait, and nothing has to be
    /// polled meanwhile: a task of the channel's looks for the event, every millisecond at first and then ever more seldom, up to
    /// ten. The time counts towards the deadline of the whole. An event that fails ends the write with [`WriteError::Event`].
    ///
    /// # Errors
    /// As [`push`](Self::push), with nothing pushed.
    #[cfg(feature = "cuda")]
    pub fn push_after(&mut self, layers: impl LayerSet, event: Event) -> Result<(), LayerError> {
        let layers = layers.layers();
        for layer in layers.clone() {
            self.unpushed(layer)?;
        }
        let events = self.first.iter().cloned().chain([Arc::new(event)]).collect();
        self.follow(layers, events);
        Ok(())
    }

    fn follow(&mut self, layers: Range<u32>, events: Vec<Arc<Event>>) {
        let transfers = layers.clone().filter_map(|layer| self.transfer(layer)).collect();
        let pushed = push_after(&self.driver, events, transfers);
        layers.for_each(|layer| self.pushed[layer as usize] = Some(pushed.clone()));
    }

    fn unpushed(&self, layer: u32) -> Result<(), LayerError> {
        match self.pushed.get(layer as usize) {
            None => Err(LayerError::OutOfRange { layer, layers: self.layers() }),
            Some(Some(_)) => Err(LayerError::Pushed { layer }),
            Some(None) => Ok(()),
        }
    }

    /// Waits until every layer has landed, or is known not to, and gives the source back, in every case. Layers that were not
    /// pushed are cancelled, and so is the whole.
    ///
    /// # Errors
    /// [`LayersNotLanded`] says what is known of each layer.
    ///
    /// # Cancel safety
    /// Dropping the future is dropping the [`LayerWrite`]: what has not landed is aborted.
    pub async fn finish(mut self) -> (Result<LayersLanded, LayersNotLanded>, Arc<Blocks>) {
        let missing = (0..).zip(&self.pushed).find(|(_, pushed)| pushed.is_none()).map(|(layer, _)| layer);
        let cancelled =
            missing.filter(|&layer| self.transfer(layer).is_some_and(|id| self.driver.cancel_layer(id)));
        while let Some(id) = self.transfer(self.ended.len() as u32) {
            let (result, _source) =
                poll_fn(|cx: &mut Context<'_>| self.driver.poll_write(id, cx.waker())).await;
            self.ended.push(result);
        }
        let result = self.outcome(cancelled);
        (result, self.source.clone())
    }

    /// What has become of all layers, which end because `cancelled` was, if it was.
    fn outcome(&mut self, cancelled: Option<u32>) -> Result<LayersLanded, LayersNotLanded> {
        let layers = std::mem::take(&mut self.ended);
        let done: Vec<Landed> = layers.iter().filter_map(|layer| layer.as_ref().ok().copied()).collect();
        let failed = (0..)
            .zip(&self.pushed)
            .find_map(|(layer, pushed)| pushed.as_ref()?.failure().map(|why| (layer, why)));
        let own = failed.or_else(|| {
            cancelled.and_then(|layer| Some((layer, layers.get(layer as usize)?.as_ref().err()?.clone())))
        });
        if let Some((first, why)) = own.or_else(|| cause(&layers)) {
            return Err(LayersNotLanded { why, first, landed: done.len() as u32, layers });
        }
        let pushed = |pushed: &Option<Pushed>| pushed.as_ref().and_then(Pushed::at);
        let times = self.pushed.iter().zip(&done);
        let ends = times.filter_map(|(at, landed)| Some(pushed(at)? + landed.landed));
        let end = ends.max().unwrap_or(self.started);
        let last_push = self.pushed.iter().filter_map(pushed).max().unwrap_or(self.started);
        Ok(LayersLanded {
            bytes: done.iter().map(|landed| landed.bytes).sum(),
            wrs: done.iter().map(|landed| landed.wrs).sum(),
            landed: end.saturating_duration_since(self.started),
            tail: end.saturating_duration_since(last_push),
            layers: done,
        })
    }
}

/// The layer that ended the others, as far as that shows. Those were cancelled for it; or, if all of one was on its way, refused
/// by the receiver, which had heard of it.
fn cause(layers: &[Result<Landed, WriteError>]) -> Option<(u32, WriteError)> {
    let failed = (0..).zip(layers).filter_map(|(layer, result)| Some((layer, result.as_ref().err()?)));
    let follows = |error: &WriteError| match error {
        WriteError::NotDelivered(Reason::Cancelled) => 2,
        WriteError::NotDelivered(Reason::Revoked) => 1,
        _ => 0,
    };
    failed.min_by_key(|(_, error)| follows(error)).map(|(layer, error)| (layer, error.clone()))
}

impl std::fmt::Debug for LayerWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerWrite")
            .field("transfers", &self.transfers)
            .field("pushed", &self.pushed.iter().flatten().count())
            .finish_non_exhaustive()
    }
}

impl Drop for LayerWrite {
    fn drop(&mut self) {
        // Those that were taken by `finish` are unknown by now.
        self.driver.abandon_layers(self.transfers.clone());
    }
}
