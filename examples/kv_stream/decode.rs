//! The decode side: grants blocks for each request, receives the arrival and verifies every block; or reads the blocks of
//! each request and verifies them.

use std::time::Duration;

use landfall::kv::{Blocks, Grant, KvChannel, ReadRequest, ReadStrategy};

use crate::args::{Args, Pull};
use crate::prefill::{hear, say, unexpected};
use crate::report::Pulled;
use crate::{Error, Message, data, file, layerwise};

pub(crate) async fn serve(
    args: &Args,
    channel: KvChannel,
    mut sink: Option<file::Sink>,
) -> Result<(), Error> {
    let (mut arrivals, mut landed_bytes, mut all_right) = (0, 0, true);
    loop {
        match hear(&channel).await? {
            Message::Request { index, blocks, seed, bytes } => {
                let claim = match sink {
                    Some(_) => channel.pool().alloc(blocks).await?,
                    None => {
                        let (_, target) = data::placement(seed, index, blocks, args.run);
                        channel.pool().claim(&target)?
                    }
                };
                let grant = channel.grant(claim)?;
                say(&channel, &Message::Granted { grant }).await?;
                let arrival = channel.next_arrival().await?;
                arrivals += 1;
                landed_bytes += arrival.bytes();
                let (wrong, first) = match &mut sink {
                    Some(sink) => (sink.store(&arrival, bytes).await?, None),
                    None => verify(args, seed, index, arrival.into_blocks()).await?,
                };
                all_right &= wrong == 0;
                say(&channel, &Message::Verified { index, wrong, first }).await?;
            }
            Message::Readable { index, seed, grant, way, seconds } => {
                let (_, target) = data::placement(seed, index, grant.len(), args.run);
                let target = channel.pool().claim(&target)?;
                let (pulled, blocks) =
                    pull(args, &channel, &grant, target, way, Duration::from_secs(seconds)).await?;
                arrivals += 1;
                landed_bytes += pulled.bytes;
                say(&channel, &Message::Pulled { index, pulled }).await?;
                let (wrong, first) = verify(args, seed, index, blocks).await?;
                all_right &= wrong == 0;
                say(&channel, &Message::Verified { index, wrong, first }).await?;
            }
            Message::LayerRequest { index, blocks, seed } => {
                let (bytes, wrong, first) = layerwise::receive(args, &channel, (index, blocks, seed)).await?;
                arrivals += 1;
                landed_bytes += bytes;
                all_right &= wrong == 0;
                say(&channel, &Message::Verified { index, wrong, first }).await?;
            }
            Message::Finish { sha256 } => {
                let digest = sink.map(file::Sink::finish);
                all_right &= digest == sha256;
                say(&channel, &Message::Finished { sha256: digest, arrivals, landed_bytes }).await?;
                channel.closed().await;
                return if all_right { Ok(()) } else { Err("what arrived is not what was sent".into()) };
            }
            other => return Err(unexpected(&other)),
        }
    }
}

/// Reads what was granted.
async fn pull(
    args: &Args,
    channel: &KvChannel,
    grant: &Grant,
    target: Blocks,
    way: Pull,
    deadline: Duration,
) -> Result<(Pulled, Blocks), Error> {
    let strategy = match way {
        Pull::Auto => ReadStrategy::Auto,
        // As many as the devices allow.
        Pull::Rdma => ReadStrategy::RdmaRead { depth: u32::MAX, qps: args.qps },
        Pull::RemoteWrite => ReadStrategy::RemoteWrite,
        Pull::Measured => ReadStrategy::Measured,
    };
    let request = ReadRequest::new(grant, target).strategy(strategy).deadline(deadline);
    let (done, blocks) = channel.read(request).await;
    let done = done?;
    let pulled = Pulled {
        bytes: done.bytes,
        descriptors: done.descriptors,
        wrs: done.wrs,
        most_in_flight: done.most_in_flight,
        seconds: done.took.as_secs_f64(),
        method: done.method.to_string(),
        why: done.why.to_owned(),
    };
    Ok((pulled, blocks))
}

/// Compares the checksum of each landed block with that of the block which belongs there. On a thread of its own: on this one the
/// channel answers its peer's heartbeats (R9).
async fn verify(
    args: &Args,
    seed: u64,
    request: u32,
    blocks: Blocks,
) -> Result<(u64, Option<String>), Error> {
    let (layers, block_bytes) = (args.layers, u64::from(args.page) * args.token_bytes);
    let verified = tokio::task::spawn_blocking(move || {
        let mut expected = vec![0; block_bytes as usize];
        let (mut wrong, mut first) = (0, None);
        for layer in 0..layers {
            for page in 0..blocks.len() {
                data::fill(seed, request, layer, page, &mut expected);
                if blocks.checksum(layer, page)? != landfall::memory::checksum(&expected) {
                    wrong += 1;
                    first.get_or_insert_with(|| format!("request {request}, layer {layer}, page {page}"));
                }
            }
        }
        Ok((wrong, first))
    });
    verified.await?
}
