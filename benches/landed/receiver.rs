//! The receiving process: grants blocks ahead of time, and gives each arrival back to the pool at once; or grants them to be
//! read.
//!
//! It never waits for two things at a time, so that a spinning receiver spins on what comes next: after a request for
//! grants it awaits exactly that many arrivals, then the next request.

use std::sync::Arc;
use std::time::Duration;

use landfall::kv::{Blocks, KvChannel};

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::common::{self, Error};
use crate::endpoint;
use crate::placement::{End, Order};

/// "Give me grants": how many, in which order each, whether to tell the digest of the last one's blocks, and whether they are
/// to be read.
pub struct Ask {
    pub grants: usize,
    pub order: Order,
    pub digest: bool,
    pub read: bool,
}

impl Ask {
    pub fn to_bytes(&self) -> Vec<u8> {
        let flags = [self.digest, self.read].map(u8::from);
        format!("{} {} {} {}", self.grants, self.order.to_word(), flags[0], flags[1]).into_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        let grants = words.next()?.parse().ok()?;
        let order = Order::from_word(words.next()?)?;
        Some(Self { grants, order, digest: words.next()? == "1", read: words.next()? == "1" })
    }
}

pub async fn serve(args: &Args, case: &Case, mode: Mode) -> Result<(), Error> {
    let endpoint = endpoint(args, case, mode).await?;
    let mut listener = common::listen(&endpoint).await?;
    let channel = tokio::time::timeout(Duration::from_secs(60), listener.accept()).await??;
    while let Some(ask) = common::asked(&channel).await? {
        let ask = Ask::from_bytes(&ask).ok_or("not a request for grants")?;
        round(&channel, case, &ask).await?;
    }
    Ok(())
}

async fn round(channel: &KvChannel, case: &Case, ask: &Ask) -> Result<(), Error> {
    if ask.read {
        return lend(channel, case, ask).await;
    }
    for _ in 0..ask.grants {
        let blocks = ask.order.claim(channel.pool(), case.blocks, End::Target)?;
        channel.send_message(channel.grant(blocks)?.to_bytes()).await?;
    }
    for n in 0..ask.grants {
        let arrival = channel.next_arrival().await?;
        if ask.digest && n + 1 == ask.grants {
            channel.send_message(digest(arrival.blocks())?.to_le_bytes().to_vec()).await?;
        }
    }
    Ok(())
}

/// What was written last is in the blocks.
async fn lend(channel: &KvChannel, case: &Case, ask: &Ask) -> Result<(), Error> {
    // One claim for all of them: they are read and not changed.
    let blocks = Arc::new(ask.order.claim(channel.pool(), case.blocks, End::Target)?);
    for _ in 0..ask.grants {
        channel.send_message(channel.grant_read(blocks.clone())?.to_bytes()).await?;
    }
    for _ in 0..ask.grants {
        channel.next_served().await?.result()?;
    }
    Ok(())
}

/// Differs when a byte or the place of a block does.
pub fn digest(blocks: &Blocks) -> Result<u64, Error> {
    let mut sum = 0u64;
    for layer in 0..blocks.pool().layout().layers() {
        for position in 0..blocks.len() {
            sum = sum.wrapping_mul(0x100_0000_01b3).wrapping_add(blocks.checksum(layer, position)?);
        }
    }
    Ok(sum)
}
