//! A process's part of a lap. Commands: `listen LIFE SEED QPS BOOTSTRAP ADDRESS DEVICE` and `dial` with the same, where DEVICE is a soft
//! device as `LANDFALL_SOFT` has it or the name of an RDMA device; `stop` for the end of the lap. Lines out: `listening ADDRESS`,
//! `linked` for each channel, `did OPERATION`, and what became of transfers (`landed TAG` and so on).

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::device::Device;
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, Layout};
use tokio::task::{JoinHandle, LocalSet};

use crate::arrivals::{GUARD, come_back, watch};
use crate::content::{BLOCK_BYTES, BLOCKS, Rng, differs, fill};
use crate::link::{Life, Link};
use crate::node::PATIENCE;
use crate::process::{Commands, bad, say};

/// Blocks of a pool: what all operations of two channels hold at most, at both ends, and a third more.
const POOL: u32 = 16 * BLOCKS;
/// Blocks that are never granted.
const GUARDED: u32 = 8;
/// Before a dial that failed is tried again.
const PAUSE: Duration = Duration::from_millis(20);

/// Does what `line` says.
pub async fn part(line: String, commands: &mut Commands) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    let [role, life, seed, qps, bootstrap, address, device] = words[..] else {
        return Err(format!("no command {line:?}"));
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("command {line:?}"));
    let endpoint = endpoint(device, life, number(qps)?, bootstrap).await?;
    let pool = endpoint.pool().clone();
    let life = Rc::new(Life::new(endpoint, number(life)?, number(seed)?));
    let mut guarded = pool.try_alloc(GUARDED).map_err(|e| e.to_string())?;
    fill(&mut guarded, GUARD);
    let local = LocalSet::new();
    let ran = local.run_until(async {
        let watching = tokio::task::spawn_local(watch(pool.clone(), Rng::new(life.draw())));
        let ran = match role {
            "listen" => listen(&life, address, commands).await,
            "dial" => dial(&life, address, commands).await,
            _ => Err(format!("no command {line:?}")),
        };
        watching.abort();
        ran
    });
    let ran = ran.await;
    drop(local);
    if let Some(what) = differs(&guarded, GUARD) {
        bad(format_args!("blocks that were never granted were written: {what}"));
    }
    drop(guarded);
    drop(life);
    come_back(&pool).await.unwrap_or_else(|what| say(format_args!("leak {what}")));
    ran
}

async fn listen(life: &Rc<Life>, address: &str, commands: &mut Commands) -> Result<(), String> {
    let address: SocketAddr = address.parse().map_err(|_| format!("no address {address:?}"))?;
    let listening = async {
        loop {
            match life.endpoint().listen(address).await {
                // Of the life before this one, or of a dial that had taken the port meanwhile.
                Err(ConnectError::AddrInUse { .. }) => tokio::time::sleep(PAUSE).await,
                listening => return listening.map_err(|e| e.to_string()),
            }
        }
    };
    let listening = tokio::time::timeout(PATIENCE, listening).await;
    let mut listener = listening.map_err(|_| format!("{address} stays in use"))??;
    say(format_args!("listening {}", listener.local_addr()));
    let mut served = Vec::new();
    let mut channels = Vec::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(channel) => {
                    channels.push(channel.clone());
                    served.push(tokio::task::spawn_local(Link::new(life.clone(), channel).run(false)));
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
    life.stop();
    // Those who dialled have closed what they could: what is left is dead, and some do not know it yet.
    channels.iter().for_each(|channel| channel.kill());
    drop(channels);
    for task in served {
        ended(task, "a killed channel's work").await;
    }
    Ok(())
}

async fn dial(life: &Rc<Life>, address: &str, commands: &mut Commands) -> Result<(), String> {
    let (own, address) = (life.clone(), address.to_owned());
    let dialling = tokio::task::spawn_local(async move {
        while !own.is_stopping() {
            match own.endpoint().connect(&address).await {
                Ok(channel) => Link::new(own.clone(), channel).run(true).await,
                // The other process may be dead, or stopped.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    });
    while commands.recv().await.is_some_and(|command| command != "stop") {}
    life.stop();
    ended(dialling, "a channel's work").await;
    Ok(())
}

async fn ended(task: JoinHandle<()>, what: &str) {
    match tokio::time::timeout(PATIENCE, task).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => bad(format_args!("{what}: {error}")),
        Err(_) => bad(format_args!("{what} does not end (K5)")),
    }
}

/// Deadlines that are short beside a lap, and long enough that a busy machine, or an emulated one, does not end every channel.
async fn endpoint(device: &str, life: &str, qps: u64, bootstrap: &str) -> Result<KvEndpoint, String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let bootstrap: Bootstrap = bootstrap.parse().map_err(|e| text(&e))?;
    let (device, unit) = match device.contains('=') {
        true => (device.parse().and_then(Device::soft).map_err(|e| text(&e))?, 1),
        false => (Device::open(device).map_err(|e| text(&e))?, 5),
    };
    let layout = Layout::contiguous(1, POOL, BLOCK_BYTES).map_err(|e| text(&e))?;
    let pd = device.alloc_pd().map_err(|e| text(&e))?;
    let pool = KvPool::new(&pd, layout).await.map_err(|e| text(&e))?;
    let ms = |n: u64| Duration::from_millis(n * unit);
    let kv = KvConfig::default()
        .qps(qps as usize)
        .bootstrap(bootstrap)
        .heartbeat(ms(200))
        .peer_timeout(ms(1000))
        .abort_grace(ms(200))
        .connect_timeout(ms(2000))
        .deadline(ms(3000))
        .require_rdma(unit > 1);
    KvEndpoint::named(pool, kv, life).map_err(|e| text(&e))
}
