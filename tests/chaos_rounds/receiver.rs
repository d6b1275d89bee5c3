//! The receiving part: it grants blocks, has what arrives checked, and the blocks that nobody may write to watched.

use std::cell::RefCell;
use std::collections::VecDeque;

use landfall::kv::{KvChannel, KvEndpoint};
use tokio::task::LocalSet;

use crate::arrivals::{GUARD, check, come_back, take, watch};
use crate::content::{Rng, differs, fill};
use crate::node::PATIENCE;
use crate::process::{Commands, bad, say};

/// Blocks that are never granted.
const GUARDED: u32 = 8;
pub async fn run(endpoint: KvEndpoint, seed: u64, commands: &mut Commands) -> Result<(), String> {
    let pool = endpoint.pool().clone();
    let mut guarded = pool.try_alloc(GUARDED).map_err(|e| e.to_string())?;
    fill(&mut guarded, GUARD);
    let local = LocalSet::new();
    local
        .run_until(async {
            let address = "127.0.0.1:0".parse().map_err(|_| "an address")?;
            let mut listener = endpoint.listen(address).await.map_err(|e| e.to_string())?;
            say(format_args!("listening {}", listener.local_addr()));
            let mut rng = Rng::new(seed);
            let watching = tokio::task::spawn_local(watch(pool.clone(), Rng::new(rng.next())));
            let (mut channels, mut served): (Vec<KvChannel>, Vec<_>) = (Vec::new(), Vec::new());
            loop {
                tokio::select! {
                    accepted = listener.accept() => match accepted {
                        Ok(channel) => {
                            channels.push(channel.clone());
                            served.push(tokio::task::spawn_local(serve(channel, Rng::new(rng.next()))));
                        }
                        Err(error) => return Err(format!("accepting: {error}")),
                    },
                    command = commands.recv() => match command.as_deref() {
                        Some("stop") | None => break,
                        Some(_) => {}
                    },
                }
            }
            drop(listener);
            // Some are closed by now, some are dead, and some do not know it yet.
            for channel in &channels {
                channel.kill();
            }
            channels.clear();
            for task in served {
                match tokio::time::timeout(PATIENCE, task).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => bad(format_args!("a task that serves a channel: {error}")),
                    Err(_) => bad("a killed channel's arrivals do not end (K5)"),
                }
            }
            watching.abort();
            Ok(())
        })
        .await?;
    drop(local);
    if let Some(what) = differs(&guarded, GUARD) {
        bad(format_args!("blocks that were never granted were written: {what}"));
    }
    drop(guarded);
    come_back(endpoint.pool()).await
}

async fn serve(channel: KvChannel, mut rng: Rng) {
    let watched = RefCell::new(VecDeque::new());
    let granting = grant(channel.clone(), Rng::new(rng.next()));
    let (granted, ended) = tokio::join!(granting, take(&channel, &watched));
    for blocks in watched.borrow_mut().drain(..) {
        check(&blocks);
    }
    if granted != ended {
        bad(format_args!(
            "{granted} grants, and {ended} of them ended, each by an arrival or an abort (R2, K4)"
        ));
    }
}

/// Answers each message of a number by a grant of so many blocks; takes some grants back. The number of grants.
async fn grant(channel: KvChannel, mut rng: Rng) -> u64 {
    let mut granted = 0;
    while let Ok(wanted) = channel.recv_message().await {
        let Ok(wanted) = wanted.try_into().map(u32::from_le_bytes) else {
            bad("a message that nobody sent");
            break;
        };
        let blocks = tokio::select! {
            blocks = channel.pool().alloc(wanted) => blocks,
            _ = channel.closed() => break,
        };
        let Ok(blocks) = blocks else {
            bad(format_args!("{wanted} blocks were asked for"));
            break;
        };
        let Ok(grant) = channel.grant(blocks) else { break };
        granted += 1;
        if channel.send_message(grant.to_bytes()).await.is_err() {
            break;
        }
        if rng.one_in(12) {
            for _ in 0..rng.range(0, 20) {
                tokio::task::yield_now().await;
            }
            channel.revoke(&grant);
        }
    }
    granted
}
