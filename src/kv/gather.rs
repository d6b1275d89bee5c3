//! Blocks that several peers fill together: each is granted the same blocks, and writes its part of them.

use std::future::poll_fn;
use std::sync::Arc;

use super::arrival::ArrivalError;
use super::blocks::Blocks;
use super::channel::{GrantRefusal, KvChannel};
use super::driver::KvDriver;
use super::grant::{Grant, GrantKind};
use super::parts::{News, Parts};
use super::proto::{AbortReason, TransferId};

/// One claim, granted to several peers: the ranks of a sender whose heads meet in the same blocks.
///
/// Each grant is as any other: used once, ended by its arrival or its abort, revoked by
/// [`KvChannel::revoke`]. Its end is told here and not by [`KvChannel::next_arrival`]. The blocks come back when every part
/// has ended. That the parts do not overlap is for the senders to see to: with a [`Mapping`](super::Mapping) each writes the heads
/// that it has.
///
/// ```no_run
/// # use landfall::kv::{Blocks, Gather, KvChannel};
/// # async fn f(ranks: &[KvChannel], blocks: Blocks) -> Result<Blocks, Box<dyn std::error::Error>> {
/// let mut gather = Gather::new(blocks);
/// for rank in ranks {
///     let grant = gather.grant(rank)?;
///     rank.send_message(grant.to_bytes()).await?;
/// }
/// let (all_landed, blocks) = gather.finish().await;
/// all_landed?;
/// # Ok(blocks) }
/// ```
///
/// # Cancel safety
/// [`next`](Self::next) loses nothing. Dropping the `Gather` revokes the grants that are still open; the blocks return to the
/// pool when no late write can reach them. It does not keep the channels open.
#[must_use = "dropping it revokes what it has granted"]
pub struct Gather {
    parts: Arc<Parts>,
    blocks: Option<Arc<Blocks>>,
    grants: Vec<(Arc<KvDriver>, Grant)>,
}

/// How a part of a [`Gather`] ended, or one layer of it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartArrival {
    /// Which part: grants are counted from 0 on, in the order of the calls.
    pub part: u32,
    /// Number of its grant.
    pub grant: u64,
    /// What has landed, or why the part will not.
    pub result: Result<PartLanded, AbortReason>,
}

/// A part, or one layer of it, that has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartLanded {
    /// The layer, of a part that was granted by layer.
    pub layer: Option<u32>,
    /// The sender's number of the transfer.
    pub transfer: TransferId,
    /// The sender's tag.
    pub tag: u64,
    /// Payload bytes that were written.
    pub bytes: u64,
}

impl std::fmt::Debug for Gather {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gather").field("blocks", &self.blocks).field("grants", &self.grants.len()).finish()
    }
}

impl Gather {
    /// Nothing is granted yet.
    pub fn new(blocks: Blocks) -> Self {
        Self { parts: Arc::default(), blocks: Some(Arc::new(blocks)), grants: Vec::new() }
    }

    /// Lets the peer of `channel` write to the blocks, once, by one transfer, beside the others.
    ///
    /// # Errors
    /// As [`KvChannel::grant`]; the other parts are as they were.
    pub fn grant(&mut self, channel: &KvChannel) -> Result<Grant, GrantRefusal> {
        self.grant_kind(channel, GrantKind::Write)
    }

    /// The same, layer by layer: [`KvChannel::write_layers`]. Each layer is told by itself.
    ///
    /// # Errors
    /// As [`Gather::grant`].
    pub fn grant_layers(&mut self, channel: &KvChannel) -> Result<Grant, GrantRefusal> {
        self.grant_kind(channel, GrantKind::Layers(channel.pool().layout().layers()))
    }

    fn grant_kind(&mut self, channel: &KvChannel, kind: GrantKind) -> Result<Grant, GrantRefusal> {
        // Taken by `finish` only, which consumes this.
        let Some(blocks) = &self.blocks else { return Err(GrantRefusal::ForeignBlocks) };
        channel.may_grant(blocks)?;
        let driver = channel.inner.driver.clone();
        let grant = driver.grant_parts(blocks, &self.parts, self.grants.len() as u32, kind)?;
        self.grants.push((driver, grant.clone()));
        Ok(grant)
    }

    /// Number of parts that were granted.
    pub fn parts(&self) -> usize {
        self.grants.len()
    }

    /// The next part, or layer of one, that has ended; `None` when every part that was granted has, and was told.
    ///
    /// A part that is aborted does not end the others: revoke those that are of no use without it, or drop the `Gather`.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<PartArrival> {
        let news = poll_fn(|cx| self.parts.poll_news(cx)).await?;
        Some(self.arrival(news))
    }

    fn arrival(&self, news: News) -> PartArrival {
        let grant = |part: u32| self.grants.get(part as usize).map(|(_, grant)| grant);
        let id = |part: u32| grant(part).map_or(0, Grant::id);
        match news {
            News::Landed { part, layer, transfer, tag, bytes } => {
                let by_layer = matches!(grant(part).map(Grant::kind), Some(GrantKind::Layers(_)));
                let layer = by_layer.then_some(layer);
                let result = Ok(PartLanded { layer, transfer, tag, bytes });
                PartArrival { part, grant: id(part), result }
            }
            News::Aborted { part, reason } => PartArrival { part, grant: id(part), result: Err(reason) },
        }
    }

    /// Waits until every part has ended and no late write can reach the blocks, and gives them back, in every case.
    ///
    /// # Errors
    /// Beside the blocks: the first part that was aborted and that [`next`](Self::next) had not told.
    ///
    /// # Cancel safety
    /// Dropping the future is dropping the `Gather`: it revokes what is still open.
    pub async fn finish(mut self) -> (Result<(), ArrivalError>, Blocks) {
        let mut result = Ok(());
        while let Some(PartArrival { grant, result: ended, .. }) = self.next().await {
            if let Err(reason) = ended
                && result.is_ok()
            {
                result = Err(ArrivalError::Aborted { grant, reason });
            }
        }
        poll_fn(|cx| self.parts.poll_quiet(cx)).await;
        let blocks = self.blocks.take().and_then(Arc::into_inner);
        (result, blocks.expect("every part has let go of the blocks"))
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        if self.blocks.is_some() {
            for (driver, grant) in &self.grants {
                driver.revoke(grant.ids());
            }
        }
    }
}
