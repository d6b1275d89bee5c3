//! A worker's part of a round. Commands: `receive SEED QPS BOOTSTRAP SOFT`, `send SEED QPS BOOTSTRAP SENDER TRANSFERS ADDRESS SOFT`, and
//! `stop` for a receiver whose senders are through. Lines out: `listening ADDRESS`, `step`, and what became of transfers
//! (`landed TAG` and so on).

use std::time::Duration;

use landfall::device::{Device, SoftConfig};
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, Layout};

use crate::content::{BLOCK_BYTES, BLOCKS};
use crate::process::Commands;
use crate::{receiver, sender};

/// Does what `line` says.
pub async fn part(line: String, commands: &mut Commands) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    let number =
        |i: usize| words.get(i).and_then(|w| w.parse::<u64>().ok()).ok_or(format!("command {line:?}"));
    let text = |i: usize| words.get(i).copied().unwrap_or("");
    let soft = words.last().copied().unwrap_or("");
    match words.first().copied() {
        Some("receive") => {
            let endpoint = endpoint(soft, number(2)?, text(3)).await?;
            receiver::run(endpoint, number(1)?, commands).await
        }
        Some("send") => {
            let endpoint = endpoint(soft, number(2)?, text(3)).await?;
            sender::run(endpoint, number(1)?, number(4)?, number(5)?, text(6)).await
        }
        _ => Err(format!("no command {line:?}")),
    }
}

/// Deadlines that are short beside a round, and long enough that a busy machine does not end every channel.
async fn endpoint(soft: &str, qps: u64, bootstrap: &str) -> Result<KvEndpoint, String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let bootstrap: Bootstrap = bootstrap.parse().map_err(|e| text(&e))?;
    let config: SoftConfig = soft.parse().map_err(|e| text(&e))?;
    let pd = Device::soft(config).and_then(|d| d.alloc_pd()).map_err(|e| text(&e))?;
    let layout = Layout::contiguous(1, BLOCKS, BLOCK_BYTES).map_err(|e| text(&e))?;
    let pool = KvPool::new(&pd, layout).await.map_err(|e| text(&e))?;
    let kv = KvConfig::default()
        .qps(qps as usize)
        .bootstrap(bootstrap)
        .heartbeat(Duration::from_millis(200))
        .peer_timeout(Duration::from_secs(1))
        .abort_grace(Duration::from_millis(200))
        .connect_timeout(Duration::from_secs(2))
        .deadline(Duration::from_secs(3));
    KvEndpoint::new(pool, kv).map_err(|e| text(&e))
}
