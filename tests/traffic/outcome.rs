//! What becomes of a write, of a write by layer and of a read, as it is said to the coordinator.

use std::future::Future;
use std::sync::Arc;

use landfall::kv::{
    Blocks, KvChannel, LayerWrite, Read, ReadDone, ReadError, ReadRefusal, Resolution, TransferId, Write,
    WriteError,
};

use super::content::LAYERS;
use super::node::PATIENCE;
use super::process::{bad, say};
use super::said::Item;

/// In doubt until a later channel resolves it.
pub type Doubt = (Item, TransferId);

/// K2: what was in doubt on an earlier channel. What stays in doubt stays in the list.
pub async fn resolve(channel: &KvChannel, doubts: &mut Vec<Doubt>) {
    for (item, transfer) in std::mem::take(doubts) {
        let asked = tokio::time::timeout(PATIENCE, channel.resolve(transfer)).await;
        match asked {
            Ok(Some(Resolution::Landed)) => say(format_args!("landed {item}")),
            Ok(Some(Resolution::NotDelivered)) => say(format_args!("lost {item}")),
            // The receiver is another one, or this channel has ended as well.
            Ok(Some(_)) => {}
            Ok(None) => doubts.push((item, transfer)),
            Err(_) => bad(format_args!("transfer {transfer} stays in doubt on a channel (K2)")),
        }
    }
}

/// Waits for the end of a write. One that is in doubt is given back.
pub async fn end(tag: u64, write: Write) -> Option<Doubt> {
    let (ended, source) = ends(tag, write).await?;
    alone(tag, &source);
    moved(ended.as_ref().map_or(0, |landed| landed.bytes));
    let doubt = fate(Item::write(tag), ended.err());
    say("step");
    doubt
}

/// The same of a write by layer. Layers that were not pushed are cancelled.
pub async fn end_layers(tag: u64, write: LayerWrite) -> Vec<Doubt> {
    let Some((ended, source)) = ends(tag, write.finish()).await else { return Vec::new() };
    alone(tag, &source);
    let layers = match ended {
        Ok(landed) => {
            say(format_args!("layered {tag}"));
            moved(landed.bytes);
            landed.layers.into_iter().map(Ok).collect()
        }
        Err(not) => {
            if not.layers.iter().all(Result::is_ok) {
                bad(format_args!("every layer of {tag:#x} landed, and the whole did not: {not} (K1)"));
            }
            not.layers
        }
    };
    if layers.len() != LAYERS as usize {
        bad(format_args!("{} layers of {tag:#x} ended, of {LAYERS} (R2)", layers.len()));
    }
    let fates = (0..).zip(layers).map(|(layer, ended)| fate(Item::layer(tag, layer), ended.err()));
    let doubts = fates.flatten().collect();
    say("step");
    doubts
}

/// Waits for the end of a read: how it was done, and the blocks, which nobody writes to any more.
pub async fn end_read(tag: u64, read: Read) -> Option<(Option<ReadDone>, Blocks)> {
    let (ended, target) = ends(tag, read).await?;
    let done = match ended {
        Ok(done) => {
            moved(done.bytes);
            Some(done)
        }
        Err(error) => {
            let usual = match &error {
                ReadError::Refused(ReadRefusal::OutOfRange | ReadRefusal::Malformed) => false,
                ReadError::Failed(_) | ReadError::Refused(_) => true,
                ReadError::StaleGrant { .. } | ReadError::Closed { .. } => true,
                _ => false,
            };
            if !usual {
                bad(format_args!("read {tag:#x}: {error}"));
            }
            say(format_args!("unread {tag}"));
            None
        }
    };
    say("step");
    Some((done, target))
}

async fn ends<T>(tag: u64, operation: impl Future<Output = T>) -> Option<T> {
    let ended = tokio::time::timeout(PATIENCE, operation).await;
    if ended.is_err() {
        bad(format_args!("{tag:#x} does not end (K5)"));
    }
    ended.ok()
}

/// Payload of what has landed or was read.
fn moved(bytes: u64) {
    say(format_args!("moved {bytes}"));
}

fn alone(tag: u64, source: &Arc<Blocks>) {
    if Arc::strong_count(source) != 1 {
        bad(format_args!("the source of {tag:#x} came back with another owner (R1)"));
    }
}

/// Says what became of one transfer: landed, or why not.
fn fate(item: Item, error: Option<WriteError>) -> Option<Doubt> {
    match error {
        None => say(format_args!("landed {item}")),
        Some(WriteError::InDoubt { transfer, .. }) => {
            say(format_args!("doubt {item}"));
            return Some((item, transfer));
        }
        Some(WriteError::NotDelivered(_) | WriteError::Closed { .. } | WriteError::StaleGrant { .. }) => {
            say(format_args!("lost {item}"))
        }
        Some(other) => bad(format_args!("write {item}: {other}")),
    }
    None
}
