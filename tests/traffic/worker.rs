//! A worker's part: it listens, or dials, until it has done its operations or is told to `stop`. Lines out: `listening ADDRESS`,
//! `linked` for each channel, `rails LOST BACK` for each that has ended, `did OPERATION`, `step`, and what became of transfers
//! (`landed TAG` and so on, see `said.rs`).

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use landfall::connect::ConnectError;
use tokio::task::{JoinHandle, LocalSet};

use super::arrivals::{come_back, watch};
use super::content::{GUARD, Rng, Wanted, fill};
use super::devices::{cut_and_mend, endpoint};
use super::life::Life;
use super::link::Link;
use super::node::PATIENCE;
use super::part::{Part, Role};
use super::process::{Commands, bad, say};

/// Blocks that are never granted.
const GUARDED: u32 = 8;
/// Before a dial that failed is tried again.
const PAUSE: Duration = Duration::from_millis(20);
/// How often one dials who has so many operations to do, and no more.
const DIALS: u32 = 4;

/// Does what `line` says.
pub async fn part(line: String, commands: &mut Commands) -> Result<(), String> {
    let part: Part = line.parse()?;
    let (endpoint, mut links) = endpoint(&part).await?;
    let pool = endpoint.pool().clone();
    let life = Rc::new(Life::new(endpoint, part));
    let mut guarded = pool.try_alloc(GUARDED).map_err(|e| e.to_string())?;
    fill(&mut guarded, GUARD);
    let local = LocalSet::new();
    let ran = local.run_until(async {
        let watching = tokio::task::spawn_local(watch(pool.clone(), Rng::new(life.draw())));
        // A steady channel keeps its first device.
        let spared = if life.part().steady { 1 } else { 0 };
        let cuttable = links.split_off(spared.min(links.len()));
        let cutting = match life.part().cuts {
            0 => None,
            every => Some(tokio::task::spawn_local(cut_and_mend(cuttable, every, Rng::new(life.draw())))),
        };
        let ran = match life.part().role {
            Role::Listen => listen(&life, commands).await,
            Role::Dial => dial(&life, commands).await,
        };
        watching.abort();
        if let Some(cutting) = cutting {
            cutting.abort();
        }
        ran
    });
    let ran = ran.await;
    drop(local);
    if let Some(what) = Wanted::Filled(GUARD).differs(&guarded) {
        bad(format_args!("blocks that were never granted were written: {what}"));
    }
    drop(guarded);
    drop(life);
    come_back(&pool).await.unwrap_or_else(|what| say(format_args!("leak {what}")));
    ran
}

async fn listen(life: &Rc<Life>, commands: &mut Commands) -> Result<(), String> {
    let at = &life.part().at;
    let address: SocketAddr = at.parse().map_err(|_| format!("no address {at:?}"))?;
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

async fn dial(life: &Rc<Life>, commands: &mut Commands) -> Result<(), String> {
    let mut dialling = tokio::task::spawn_local(channels(life.clone()));
    loop {
        tokio::select! {
            // It has done its operations.
            ran = &mut dialling => return ran.map_err(|error| format!("a channel's work: {error}")),
            command = commands.recv() => match command.as_deref() {
                Some("stop") | None => break,
                Some(_) => {}
            },
        }
    }
    life.stop();
    ended(dialling, "a channel's work").await;
    Ok(())
}

/// One channel after the other.
async fn channels(life: Rc<Life>) {
    let mut dials = 0;
    // What is in doubt when the operations are through may be settled by one more channel.
    while life.goes_on() || (life.part().operations.is_some() && life.has_doubts()) {
        if life.part().operations.is_some() && dials == DIALS {
            break;
        }
        dials += 1;
        match life.endpoint().connect(&life.part().at).await {
            Ok(channel) => {
                let graceful = Link::new(life.clone(), channel).run(true).await;
                if graceful && !life.goes_on() {
                    break;
                }
            }
            // The other process may be dead, or stopped; its link may be cut.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

async fn ended<T>(task: JoinHandle<T>, what: &str) {
    match tokio::time::timeout(PATIENCE, task).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => bad(format_args!("{what}: {error}")),
        Err(_) => bad(format_args!("{what} does not end (K5)")),
    }
}
