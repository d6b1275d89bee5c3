//! The decode side, in a process of its own: a pool in memory of the GPU, grants, arrivals, verdicts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use landfall::cuda::Event;
use landfall::kv::{Blocks, Grant, KvChannel, WriteRequest};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::{Failed, Place, Shape, content, endpoint};

/// What is said beside the blocks.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// These blocks are wanted; with `seed`, their content is looked at.
    Want {
        ids: Vec<u32>,
        seed: Option<u64>,
        /// Layer by layer.
        layers: bool,
    },
    Granted(Grant),
    /// So many blocks were wrong.
    Arrived {
        wrong: u64,
    },
    /// What the peer's channel has counted: bytes that came to the GPU from here, operations, and calls of the driver.
    Count,
    Counted {
        bytes: u64,
        operations: u64,
        calls: u64,
    },
}

async fn say(channel: &KvChannel, message: &Message) -> Result<(), Failed> {
    Ok(channel.send_message(serde_json::to_vec(message)?).await?)
}

async fn hear(channel: &KvChannel) -> Result<Message, Failed> {
    Ok(serde_json::from_slice(&channel.recv_message().await?)?)
}

/// The decode process: `peer SHAPE PLACE`. Ends with its channels.
pub async fn serve(shape: Shape, place: Place) -> Result<(), Failed> {
    let endpoint = endpoint(shape, place.memory(shape.bytes()), place).await?;
    let mut listener = endpoint.listen("127.0.0.1:0".parse()?).await?;
    println!("{}", listener.local_addr());
    loop {
        let channel = listener.accept().await?;
        tokio::spawn(async move {
            if let Err(e) = serve_one(&channel, shape).await {
                eprintln!("decode: {e}");
            }
        });
    }
}

async fn serve_one(channel: &KvChannel, shape: Shape) -> Result<(), Failed> {
    loop {
        let message = tokio::select! {
            message = hear(channel) => message?,
            _ = channel.closed() => return Ok(()),
        };
        match message {
            Message::Want { ids, seed, layers: true } => {
                let (grant, arrivals) = channel.grant_layers(channel.pool().claim(&ids)?)?;
                say(channel, &Message::Granted(grant)).await?;
                let wrong = verify(&arrivals.finish().await?, shape, seed.unwrap_or_default())?;
                say(channel, &Message::Arrived { wrong }).await?;
            }
            Message::Want { ids, seed, layers: false } => {
                let grant = channel.grant(channel.pool().claim(&ids)?)?;
                say(channel, &Message::Granted(grant)).await?;
                let arrival = channel.next_arrival().await?;
                let wrong = match seed {
                    Some(seed) => verify(arrival.blocks(), shape, seed)?,
                    None => 0,
                };
                say(channel, &Message::Arrived { wrong }).await?;
            }
            Message::Count => {
                let gpu = channel.path().gpu;
                // Of a channel, all of it goes one way.
                let bytes = gpu.ipc.bytes_in + gpu.staged.bytes_in;
                let operations = gpu.ipc.operations_in + gpu.staged.operations_in;
                say(channel, &Message::Counted { bytes, operations, calls: gpu.calls }).await?;
            }
            other => return Err(format!("{other:?} does not belong here").into()),
        }
    }
}

pub fn verify(blocks: &Blocks, shape: Shape, seed: u64) -> Result<u64, Failed> {
    let mut wrong = 0;
    for layer in 0..shape.layers {
        for position in 0..blocks.len() {
            let expected = landfall::memory::checksum(&content(shape, seed, layer, position));
            wrong += u64::from(blocks.checksum(layer, position)? != expected);
        }
    }
    Ok(wrong)
}

/// A decode process of this program.
pub struct Peer {
    process: Child,
    pub address: SocketAddr,
}

impl Peer {
    pub async fn start(shape: Shape, place: Place) -> Result<Self, Failed> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["peer", &shape.to_string(), &place.to_string()])
            .stdout(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = process.stdout.take().ok_or("the peer has no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).await?;
        let address = line.trim().parse().map_err(|_| "the peer process did not start")?;
        Ok(Self { process, address })
    }

    pub async fn end(mut self) -> Result<(), Failed> {
        Ok(self.process.kill().await?)
    }
}

/// One write to the blocks `to`: how long until it had landed, and how many blocks were wrong.
pub async fn write(
    channel: &KvChannel,
    from: Blocks,
    to: &[u32],
    seed: Option<u64>,
) -> Result<(f64, Arc<Blocks>), Failed> {
    write_after(channel, from, to, seed, None).await
}

/// The same, after an event.
pub async fn write_after(
    channel: &KvChannel,
    from: Blocks,
    to: &[u32],
    seed: Option<u64>,
    event: Option<Event>,
) -> Result<(f64, Arc<Blocks>), Failed> {
    let grant = want(channel, to, seed, false).await?;
    let request = WriteRequest::new(&grant, from);
    let start = Instant::now();
    let (result, blocks) = channel
        .write(match event {
            Some(event) => request.after(event),
            None => request,
        })
        .await;
    let took = start.elapsed().as_secs_f64();
    result?;
    verdict(channel).await?;
    Ok((took, blocks))
}

async fn want(channel: &KvChannel, to: &[u32], seed: Option<u64>, layers: bool) -> Result<Grant, Failed> {
    say(channel, &Message::Want { ids: to.to_vec(), seed, layers }).await?;
    match hear(channel).await? {
        Message::Granted(grant) => Ok(grant),
        other => Err(format!("{other:?} instead of a grant").into()),
    }
}

async fn verdict(channel: &KvChannel) -> Result<(), Failed> {
    match hear(channel).await? {
        Message::Arrived { wrong: 0 } => Ok(()),
        Message::Arrived { wrong } => Err(format!("{wrong} blocks are wrong at the far end").into()),
        other => Err(format!("{other:?} instead of a verdict").into()),
    }
}

/// A write by layer, of which each goes after the event that `made` gives for it. From the last event to the landing.
pub async fn write_layers(
    channel: &KvChannel,
    from: Blocks,
    to: &[u32],
    seed: u64,
    mut made: impl FnMut(u32) -> Result<Event, Failed>,
) -> Result<f64, Failed> {
    let grant = want(channel, to, Some(seed), true).await?;
    let mut write = channel.write_layers(WriteRequest::new(&grant, from))?;
    for layer in 0..write.layers() {
        write.push_after(layer, made(layer)?)?;
    }
    let (landed, _) = write.finish().await;
    let tail = landed?.tail.as_secs_f64();
    verdict(channel).await?;
    Ok(tail)
}

/// What the far end has counted: bytes, operations, calls of the driver.
pub async fn counted(channel: &KvChannel) -> Result<(u64, u64, u64), Failed> {
    say(channel, &Message::Count).await?;
    match hear(channel).await? {
        Message::Counted { bytes, operations, calls } => Ok((bytes, operations, calls)),
        other => Err(format!("{other:?} instead of counts").into()),
    }
}
