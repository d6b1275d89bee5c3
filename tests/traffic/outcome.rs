//! What becomes of a write, as it is said to the coordinator: landed, lost, or in doubt until a later channel resolves it.

use landfall::kv::{KvChannel, Resolution, TransferId, Write, WriteError};

use crate::node::PATIENCE;
use crate::process::{bad, say};

/// K2: what was in doubt on an earlier channel. What stays in doubt stays in the list.
pub async fn resolve(channel: &KvChannel, doubts: &mut Vec<(u64, TransferId)>) {
    for (tag, transfer) in std::mem::take(doubts) {
        let asked = tokio::time::timeout(PATIENCE, channel.resolve(transfer)).await;
        match asked {
            Ok(Some(Resolution::Landed)) => say(format_args!("landed {tag}")),
            Ok(Some(Resolution::NotDelivered)) => say(format_args!("lost {tag}")),
            // The receiver is another one, or this channel has ended as well.
            Ok(Some(_)) => {}
            Ok(None) => doubts.push((tag, transfer)),
            Err(_) => bad(format_args!("transfer {transfer} stays in doubt on a channel (K2)")),
        }
    }
}

/// Waits for the end of a write. One that is in doubt is given back.
pub async fn end(tag: u64, write: Write) -> Option<(u64, TransferId)> {
    let Ok((ended, source)) = tokio::time::timeout(PATIENCE, write).await else {
        bad(format_args!("write {tag:#x} does not end (K5)"));
        return None;
    };
    if std::sync::Arc::strong_count(&source) != 1 {
        bad(format_args!("the source of {tag:#x} came back with another owner (R1)"));
    }
    let mut doubt = None;
    match ended {
        Ok(_) => say(format_args!("landed {tag}")),
        Err(WriteError::InDoubt { transfer, .. }) => {
            say(format_args!("doubt {tag}"));
            doubt = Some((tag, transfer));
        }
        Err(WriteError::NotDelivered(_) | WriteError::Closed { .. } | WriteError::StaleGrant { .. }) => {
            say(format_args!("lost {tag}"));
        }
        Err(other) => bad(format_args!("write {tag:#x}: {other}")),
    }
    say("step");
    doubt
}
