//! The receiver's side of a write by layer: each layer as it lands, while later ones are still on their way.

use std::future::poll_fn;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::arrival::ArrivalError;
use super::blocks::Blocks;
use super::channel::{GrantRefused, KvChannel};
use super::driver::KvDriver;
use super::grant::{Grant, GrantKind};
use super::parts::{News, Parts};
use super::pool::PoolError;
use super::proto::TransferId;

/// A layer that has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LandedLayer {
    /// Which one, from 0 on.
    pub layer: u32,
    /// The sender's number of its transfer.
    pub transfer: TransferId,
    /// The sender's tag, the same for all layers.
    pub tag: u64,
    /// Payload bytes that were written.
    pub bytes: u64,
}

/// The arrivals of a grant by layer, from [`KvChannel::grant_layers`]. Layers land in whatever order they come.
///
/// ```no_run
/// # use landfall::kv::{Blocks, KvChannel};
/// # async fn f(channel: &KvChannel, blocks: Blocks) -> Result<(), Box<dyn std::error::Error>> {
/// let (grant, mut arrivals) = channel.grant_layers(blocks)?;
/// channel.send_message(grant.to_bytes()).await?;
/// let mut block = vec![0; 4096];
/// while let Some(landed) = arrivals.next().await? {
///     let layer = arrivals.layer(landed.layer).expect("it has landed");
///     layer.copy_out(0, 0, &mut block)?; // while later layers are on their way
/// }
/// let blocks = arrivals.finish().await?;
/// # Ok(()) }
/// ```
///
/// # Cancel safety
/// [`next`](Self::next) loses nothing. Dropping the `LayerArrivals` revokes the grant: the layers that are still to come end,
/// and the blocks return to the pool when no late write can reach them. As any grant, it does not keep its channel open.
#[must_use = "dropping it revokes the grant"]
pub struct LayerArrivals {
    driver: Arc<KvDriver>,
    parts: Arc<Parts>,
    /// `None` once they were handed out.
    blocks: Option<Arc<Blocks>>,
    grant: Grant,
    landed: Vec<bool>,
    /// Layers that have landed.
    told: u32,
    failed: Option<ArrivalError>,
}

impl std::fmt::Debug for LayerArrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerArrivals")
            .field("grant", &self.grant.id())
            .field("layers", &self.layers())
            .field("landed", &self.told)
            .finish_non_exhaustive()
    }
}

impl KvChannel {
    /// Lets the peer write to `blocks`, once, layer by layer, in whatever order it has them ready
    /// ([`KvChannel::write_layers`]). Each layer may be read as soon as it has landed.
    ///
    /// All layers of the blocks stay exposed until the last one has ended, on soft devices, too: a peer that does not use this library can
    /// write once more to a layer that has landed. Where peers are
    /// not trusted, read after the last one.
    ///
    /// The grant travels as any other. It has as many numbers as the pool has layers, from its [`id`](Grant::id) on.
    ///
    /// # Errors
    /// As [`KvChannel::grant`]; the blocks come back in the error.
    pub fn grant_layers(&self, blocks: Blocks) -> Result<(Grant, LayerArrivals), GrantRefused> {
        if let Err(why) = self.may_grant(&blocks) {
            return Err(GrantRefused { blocks, why });
        }
        let layers = blocks.pool().layout().layers();
        let (driver, parts, blocks) =
            (self.inner.driver.clone(), Arc::new(Parts::default()), Arc::new(blocks));
        match driver.grant_parts(&blocks, &parts, 0, GrantKind::Layers(layers)) {
            Ok(grant) => {
                let landed = vec![false; layers as usize];
                let blocks = Some(blocks);
                let arrivals = LayerArrivals {
                    driver,
                    parts,
                    blocks,
                    grant: grant.clone(),
                    landed,
                    told: 0,
                    failed: None,
                };
                Ok((grant, arrivals))
            }
            Err(why) => {
                let blocks = Arc::into_inner(blocks).expect("no part of it was granted");
                Err(GrantRefused { blocks, why })
            }
        }
    }
}

impl LayerArrivals {
    /// The grant that it belongs to.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Layers in all.
    pub fn layers(&self) -> u32 {
        self.landed.len() as u32
    }

    /// The next layer that has landed, and `None` when all of them have been told.
    ///
    /// # Errors
    /// [`ArrivalError::Aborted`], with the number of the grant, as soon as one layer will not come: then none of those that are
    /// missing does, and every later call fails alike. The layers that were told stay readable; the blocks return to the pool
    /// when this is dropped and no late write can reach them.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<LandedLayer>, ArrivalError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.told == self.layers() {
            return Ok(None);
        }
        match poll_fn(|cx| self.parts.poll_news(cx)).await {
            Some(News::Landed { layer, transfer, tag, bytes, .. }) => {
                if let Some(landed) = self.landed.get_mut(layer as usize) {
                    *landed = true;
                }
                self.told += 1;
                Ok(Some(LandedLayer { layer, transfer, tag, bytes }))
            }
            Some(News::Aborted { reason, .. }) => {
                let error = ArrivalError::Aborted { grant: self.grant.id(), reason };
                self.failed = Some(error.clone());
                Err(error)
            }
            // Each layer has ended, and each end was told.
            None => Ok(None),
        }
    }

    /// The blocks of one layer, once [`next`](Self::next) has told that it has landed: nobody writes to them any more.
    pub fn layer(&self, layer: u32) -> Option<LayerView<'_>> {
        let blocks = self.blocks.as_deref()?;
        self.landed.get(layer as usize)?.then_some(LayerView { blocks, layer })
    }

    /// Waits for the layers that are still to come, and gives the blocks.
    ///
    /// # Errors
    /// As [`next`](Self::next); the blocks return to the pool when no late write can reach them.
    ///
    /// # Cancel safety
    /// Dropping the future is dropping the `LayerArrivals`: it revokes the grant.
    pub async fn finish(mut self) -> Result<Blocks, ArrivalError> {
        while self.next().await?.is_some() {}
        poll_fn(|cx| self.parts.poll_quiet(cx)).await;
        let blocks = self.blocks.take().and_then(Arc::into_inner);
        Ok(blocks.expect("every part has let go of the blocks, and views borrow from this"))
    }
}

impl Drop for LayerArrivals {
    fn drop(&mut self) {
        if self.blocks.is_some() {
            self.driver.revoke(self.grant.ids());
        }
    }
}

/// The blocks of a layer that has landed, by their position in the grant. Reached by copies, as [`Blocks`] are.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    blocks: &'a Blocks,
    layer: u32,
}

impl LayerView<'_> {
    /// Which layer.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.blocks.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// As [`Blocks::copy_out`].
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`], with nothing copied.
    pub fn copy_out(&self, position: u32, at: u64, bytes: &mut [u8]) -> Result<(), PoolError> {
        self.blocks.copy_out(self.layer, position, at, bytes)
    }

    /// As [`Blocks::checksum`].
    ///
    /// # Errors
    /// [`PoolError::OutOfRange`].
    pub fn checksum(&self, position: u32) -> Result<u64, PoolError> {
        self.blocks.checksum(self.layer, position)
    }

    /// As [`Blocks::write_to`].
    ///
    /// # Errors
    /// As there.
    pub fn write_to(&self, position: u32, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        self.blocks.write_to(self.layer, position, fd)
    }
}
