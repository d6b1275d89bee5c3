//! The prefill side: asks for blocks, fills its own, writes them, and waits for the verdict; or grants what it has filled to
//! be read.

use std::net::SocketAddr;
use std::time::Duration;

use landfall::kv::{Blocks, KvChannel, KvEndpoint, KvPool, Landed, WriteRequest};

use crate::args::{Args, Pull};
use crate::report::{Progress, Report};
use crate::{Error, Message, data, file, layerwise};

pub(crate) async fn stream(
    args: &Args,
    endpoint: &KvEndpoint,
    address: SocketAddr,
    input: Option<file::Input>,
) -> Result<(), Error> {
    let channel = endpoint.connect(address).await?;
    let mut report = Report::new(endpoint);
    let sent = match input {
        Some(input) => {
            let digest = input.send(args, endpoint.pool(), &channel, &mut report).await?;
            say(&channel, &Message::Finish { sha256: Some(digest.clone()) }).await?;
            Some(digest)
        }
        None => {
            synthetic(args, endpoint.pool(), &channel, &mut report).await?;
            say(&channel, &Message::Finish { sha256: None }).await?;
            None
        }
    };
    match hear(&channel).await? {
        Message::Finished { sha256, arrivals, landed_bytes } => {
            report.finish(sha256 == sent, arrivals, landed_bytes, sent);
        }
        other => return Err(unexpected(&other)),
    }
    let verified = report.is_verified();
    report.print(args, &channel).await?;
    channel.close().await?;
    if verified { Ok(()) } else { Err("what landed is not what was sent".into()) }
}

async fn synthetic(
    args: &Args,
    pool: &KvPool,
    channel: &KvChannel,
    report: &mut Report,
) -> Result<(), Error> {
    let seed = match args.seed {
        Some(seed) => seed,
        None => data::random_seed()?,
    };
    let pages = args.tokens / args.page;
    let bytes = u64::from(args.tokens) * u64::from(args.layers) * args.token_bytes;
    let mut progress = Progress::new(args, bytes * u64::from(args.requests));
    for index in 0..args.requests {
        let (source, _) = data::placement(seed, index, pages, args.run);
        let blocks = fill(args, seed, index, pool.claim(&source)?).await?;
        let landed = match args.read {
            Some(way) => {
                lend(args, channel, report, (index, seed, way), blocks).await?;
                None
            }
            None => {
                let request = Message::Request { index, blocks: pages, seed, bytes };
                Some(write(args, channel, report, request, blocks).await?)
            }
        };
        progress.add(bytes);
        verdict(channel, report, index).await?;
        if let Some(landed) = landed.filter(|_| args.layerwise) {
            report.layerwise.get_or_insert_default().at_once(landed.landed);
            // Of other content, in other places.
            let index = args.requests + index;
            let (source, _) = data::placement(seed, index, pages, args.run);
            let blocks = fill(args, seed, index, pool.claim(&source)?).await?;
            let request = Message::LayerRequest { index, blocks: pages, seed };
            layerwise::write(args, channel, report, request, blocks).await?;
            verdict(channel, report, index).await?;
        }
    }
    Ok(())
}

/// One request: ask, be granted, write, until it has landed. Gives the blocks back.
pub(crate) async fn write(
    args: &Args,
    channel: &KvChannel,
    report: &mut Report,
    request: Message,
    blocks: Blocks,
) -> Result<Landed, Error> {
    say(channel, &request).await?;
    let grant = match hear(channel).await? {
        Message::Granted { grant } => grant,
        other => return Err(unexpected(&other)),
    };
    let (result, _blocks) = channel.write(WriteRequest::new(&grant, blocks).deadline(args.deadline)).await;
    let landed = result?;
    report.add(&landed);
    Ok(landed)
}

/// One request that the decode side reads: granted, until nobody reads its blocks any more.
async fn lend(
    args: &Args,
    channel: &KvChannel,
    report: &mut Report,
    (index, seed, way): (u32, u64, Pull),
    blocks: Blocks,
) -> Result<(), Error> {
    let grant = channel.grant_read(blocks)?;
    say(channel, &Message::Readable { index, seed, grant, way, seconds: args.deadline.as_secs() }).await?;
    match hear(channel).await? {
        Message::Pulled { index: same, pulled } if same == index => report.pulled(pulled),
        other => return Err(unexpected(&other)),
    }
    let served = channel.next_served().await?;
    served.result()?;
    Ok(())
}

pub(crate) async fn verdict(channel: &KvChannel, report: &mut Report, expected: u32) -> Result<(), Error> {
    match hear(channel).await? {
        Message::Verified { index, wrong, first } if index == expected => {
            report.verified(wrong, first);
            Ok(())
        }
        other => Err(unexpected(&other)),
    }
}

/// On a thread of its own: on this one the channel answers its peer's heartbeats (R9).
async fn fill(args: &Args, seed: u64, request: u32, mut blocks: Blocks) -> Result<Blocks, Error> {
    let (layers, block_bytes) = (args.layers, u64::from(args.page) * args.token_bytes);
    let filled = tokio::task::spawn_blocking(move || {
        let mut block = vec![0; block_bytes as usize];
        for layer in 0..layers {
            for page in 0..blocks.len() {
                data::fill(seed, request, layer, page, &mut block);
                blocks.copy_in(layer, page, 0, &block)?;
            }
        }
        Ok(blocks)
    });
    filled.await?
}

pub(crate) async fn say(channel: &KvChannel, message: &Message) -> Result<(), Error> {
    Ok(channel.send_message(serde_json::to_vec(message)?).await?)
}

pub(crate) async fn hear(channel: &KvChannel) -> Result<Message, Error> {
    let limit = Duration::from_secs(300);
    match tokio::time::timeout(limit, channel.recv_message()).await {
        Ok(message) => Ok(serde_json::from_slice(&message?)?),
        Err(_) => Err(format!("the peer said nothing for {} s", limit.as_secs()).into()),
    }
}

pub(crate) fn unexpected(message: &Message) -> Error {
    format!("the peer said {message:?}, which does not belong here").into()
}
