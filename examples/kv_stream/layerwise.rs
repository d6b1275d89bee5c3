//! `--layerwise`: each request once more, layer by layer. The prefill side has a layer ready at every tick of a timer, as a model
//! would, and pushes it; the decode side reads each layer as it lands. What is left to wait for after the last layer is the tail.

use std::time::Duration;

use landfall::kv::{Blocks, KvChannel, LayersLanded, WriteRequest};

use crate::args::Args;
use crate::prefill::{hear, say, unexpected};
use crate::report::Report;
use crate::{Error, Message, data};

/// Bytes that the decode side reads before it lets the channel go on.
const SLICE: u64 = 64 << 10;

/// What was measured, a request each.
#[derive(Default)]
pub(crate) struct Layerwise {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    layers: u32,
    /// From the last push to the last confirmation.
    tails: Vec<Duration>,
    /// From a layer's push to its confirmation: the median of the request's.
    layer: Vec<Duration>,
    /// From the beginning to the last confirmation.
    whole: Vec<Duration>,
    /// The same bytes by one write, when all layers are there.
    at_once: Vec<Duration>,
}

impl Layerwise {
    pub(crate) fn at_once(&mut self, landed: Duration) {
        self.at_once.push(landed);
    }

    fn add(&mut self, landed: &LayersLanded) {
        let layers = landed.layers.iter().map(|layer| layer.landed).collect();
        self.requests += 1;
        self.bytes += landed.bytes;
        self.layers = landed.layers.len() as u32;
        self.tails.push(landed.tail);
        self.layer.push(median(layers));
        self.whole.push(landed.landed);
    }

    /// Medians over the requests, and the longest tail.
    fn times(&self) -> [(&'static str, Duration); 5] {
        [
            ("tail", median(self.tails.clone())),
            ("longest_tail", self.tails.iter().max().copied().unwrap_or_default()),
            ("layer", median(self.layer.clone())),
            ("by_layer", median(self.whole.clone())),
            ("at_once", median(self.at_once.clone())),
        ]
    }

    pub(crate) fn json(&self, layer_time: Duration) -> serde_json::Value {
        let mut object = serde_json::json!({
            "requests": self.requests,
            "layers": self.layers,
            "landed_bytes": self.bytes,
            "layer_time_s": layer_time.as_secs_f64(),
        });
        for (name, time) in self.times() {
            object[format!("{name}_s")] = time.as_secs_f64().into();
        }
        object
    }

    pub(crate) fn text(&self, layer_time: Duration) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let [tail, longest, layer, whole, at_once] = self.times().map(|(_, time)| ms(time));
        format!(
            "by layer: {} layers, one every {:.3} ms: {tail:.3} ms after the last one (at most {longest:.3}); one layer takes \
             {layer:.3} ms, the request {whole:.3} ms by layer and {at_once:.3} ms at once when all layers are there\n",
            self.layers,
            ms(layer_time),
        )
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The prefill side: one request, a layer at every tick. `blocks` are filled; a tick stands for what fills them.
pub(crate) async fn write(
    args: &Args,
    channel: &KvChannel,
    report: &mut Report,
    request: Message,
    blocks: Blocks,
) -> Result<(), Error> {
    say(channel, &request).await?;
    let grant = match hear(channel).await? {
        Message::Granted { grant } => grant,
        other => return Err(unexpected(&other)),
    };
    let request = WriteRequest::new(&grant, blocks).deadline(args.deadline);
    let mut write = channel.write_layers(request)?;
    let mut ticks = tokio::time::interval(args.layer_time);
    // The first one is at once.
    ticks.tick().await;
    for layer in 0..write.layers() {
        ticks.tick().await;
        write.push(layer)?;
    }
    let (landed, _blocks) = write.finish().await;
    report.layerwise.get_or_insert_default().add(&landed?);
    Ok(())
}

/// The decode side: reads each layer as it lands, and compares when all have. Answers bytes, wrong blocks and the first of them.
pub(crate) async fn receive(
    args: &Args,
    channel: &KvChannel,
    (index, blocks, seed): (u32, u32, u64),
) -> Result<(u64, u64, Option<String>), Error> {
    let (_, target) = data::placement(seed, index, blocks, args.run);
    let (grant, mut arrivals) = channel.grant_layers(channel.pool().claim(&target)?)?;
    say(channel, &Message::Granted { grant }).await?;
    let block_bytes = u64::from(args.page) * args.token_bytes;
    let mut sums = vec![Vec::new(); args.layers as usize];
    let (mut bytes, mut unyielded) = (0, 0);
    while let Some(landed) = arrivals.next().await? {
        let layer = arrivals.layer(landed.layer).ok_or("a layer was told that has not landed")?;
        let sums = sums.get_mut(landed.layer as usize).ok_or("a layer of another layout")?;
        bytes += landed.bytes;
        for page in 0..layer.len() {
            sums.push(layer.checksum(page)?);
            unyielded += block_bytes;
            if unyielded >= SLICE {
                // Beside the channel, which confirms later layers on this thread.
                tokio::task::yield_now().await;
                unyielded = 0;
            }
        }
    }
    arrivals.finish().await?;
    let compared = tokio::task::spawn_blocking(move || {
        let mut expected = vec![0; block_bytes as usize];
        let (mut wrong, mut first) = (0, None);
        for (layer, sums) in (0..).zip(&sums) {
            for page in 0..blocks {
                data::fill(seed, index, layer, page, &mut expected);
                if sums.get(page as usize) != Some(&landfall::memory::checksum(&expected)) {
                    wrong += 1;
                    first.get_or_insert_with(|| {
                        format!("request {index} by layer, layer {layer}, page {page}")
                    });
                }
            }
        }
        (wrong, first)
    });
    let (wrong, first) = compared.await?;
    Ok((bytes, wrong, first))
}
