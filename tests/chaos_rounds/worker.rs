//! A worker process. It lives as long as nothing kills it, and has a part in round after round, so that what one round leaves
//! behind shows in the next.
//!
//! Commands, one a line: `receive SEED QPS BOOTSTRAP SOFT`, `send SEED QPS BOOTSTRAP SENDER TRANSFERS ADDRESS SOFT`, and `stop` for a
//! receiver whose senders are through. Lines out: `listening ADDRESS`, `step`, what became of transfers (`landed TAG` and so on),
//! `bad WHAT` for a contract that does not hold, and `done` at the end of the part.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use landfall::device::{Device, SoftConfig};
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, Layout};
use tokio::sync::mpsc;

use crate::content::{BLOCK_BYTES, BLOCKS};
use crate::levels::{Levels, map_stacks};
use crate::{receiver, sender};

pub const ARGUMENT: &str = "--worker";

/// Lines of the coordinator, read by a thread: a worker that is stopped and woken finds them all.
pub type Commands = mpsc::UnboundedReceiver<String>;

/// Says a line to the coordinator. One that is gone hears nothing, and ends this process by closing its input.
pub fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

pub fn bad(what: impl std::fmt::Display) {
    say(format_args!("bad {what}"));
}

pub fn main() -> ExitCode {
    map_stacks();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // What blocks (registration) runs on one thread that stays: it must not show in the levels.
        .max_blocking_threads(1)
        .thread_keep_alive(Duration::from_secs(1 << 20))
        .build();
    let Ok(runtime) = runtime else { return ExitCode::FAILURE };
    let (sender, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    runtime.block_on(parts(commands));
    ExitCode::SUCCESS
}

async fn parts(mut commands: Commands) {
    let mut before = None;
    while let Some(line) = commands.recv().await {
        // Of a round whose sender was quicker.
        if line == "stop" {
            continue;
        }
        if let Err(what) = part(&line, &mut commands).await {
            bad(what);
        }
        match before {
            // The first part has made what a process makes once: the reaper, the blocking thread, stacks.
            None => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                before = Levels::now().ok();
            }
            Some(before) => {
                if let Err(what) = Levels::settle(before).await {
                    bad(what);
                }
            }
        }
        say("done");
    }
}

async fn part(line: &str, commands: &mut Commands) -> Result<(), String> {
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
