//! Writes by layer: pushed in whatever order, each layer filled just before it goes.

use std::time::Duration;

use landfall::kv::{LayerError, LayerWrite, WriteError, WriteRequest};

use super::content::{GUARD, LAYERS, Rng, block, fill};
use super::grants::Want;
use super::link::Link;
use super::mapped::Stretches;
use super::operations::few;
use super::outcome::end_layers;
use super::process::bad;
use super::writes::by_tokens;

pub async fn write(link: &Link, rng: &mut Rng, mapped: bool) -> Option<()> {
    let (tag, mut write) = match begin(link, rng, mapped).await {
        Ok(begun) => begun,
        Err(goes_on) => return goes_on,
    };
    for layer in shuffled(rng) {
        if push(&mut write, tag, layer).is_none() {
            break;
        }
        pause(rng).await;
    }
    link.doubt(end_layers(tag, write).await);
    Some(())
}

/// Given up with some of its layers pushed: dropped, or finished as it is.
pub async fn cancelled(link: &Link, rng: &mut Rng) -> Option<()> {
    let (tag, mut write) = match begin(link, rng, false).await {
        Ok(begun) => begun,
        Err(goes_on) => return goes_on,
    };
    let pushed = rng.range(0, u64::from(LAYERS) - 1) as usize;
    for layer in shuffled(rng).into_iter().take(pushed) {
        if push(&mut write, tag, layer).is_none() {
            break;
        }
    }
    pause(rng).await;
    if rng.one_in(2) {
        link.doubt(end_layers(tag, write).await);
    }
    Some(())
}

type Begun = (u64, LayerWrite);

/// Its source holds something else until a layer is pushed. The error is `None` when the channel has ended.
async fn begin(link: &Link, rng: &mut Rng, mapped: bool) -> Result<Begun, Option<()>> {
    let blocks = few(link, rng);
    let mapped = (mapped || !link.is_alike()).then(|| Stretches::draw(&link.to_peer, blocks, rng));
    let asked = match &mapped {
        Some(what) => link.ask_mapped(Want::Layers, what).await,
        None => link.ask(Want::Layers, blocks).await,
    };
    let (tag, grant) = asked.ok_or(None)?;
    let count = mapped.as_ref().map_or(blocks as u32, |what| what.source_blocks);
    let mut source = link.channel.pool().alloc(count).await.map_err(|_| None)?;
    fill(&mut source, GUARD);
    let mut request = WriteRequest::new(&grant, source).tag(tag);
    if let Some(what) = &mapped {
        request = by_tokens(request, &link.to_peer, what);
    }
    if rng.one_in(10) {
        request = request.deadline(Duration::from_micros(rng.range(1, 20_000)));
    }
    link.channel.write_layers(request).map(|write| (tag, write)).map_err(|refused| {
        // The peer takes some grants back.
        if !matches!(refused.why, WriteError::StaleGrant { .. } | WriteError::Closed { .. }) {
            bad(format_args!("the write by layer {tag:#x}: {}", refused.why));
        }
        Some(())
    })
}

/// `None` when it is of no use to go on.
fn push(write: &mut LayerWrite, tag: u64, layer: u32) -> Option<()> {
    for position in 0..write.source().len() {
        let bytes = block(write.source().pool().layout(), tag, layer, position);
        if let Err(error) = write.copy_in(layer, position, 0, &bytes) {
            bad(format_args!("filling layer {layer} of {tag:#x}: {error}"));
        }
    }
    match write.push(layer) {
        Ok(()) => Some(()),
        Err(LayerError::Ended(_)) => None,
        Err(error) => {
            bad(format_args!("pushing layer {layer} of {tag:#x}: {error}"));
            None
        }
    }
}

fn shuffled(rng: &mut Rng) -> Vec<u32> {
    let mut layers: Vec<u32> = (0..LAYERS).collect();
    for i in (1..layers.len()).rev() {
        layers.swap(i, rng.range(0, i as u64) as usize);
    }
    layers
}

/// What a model takes for a layer: nothing, moments, or a while.
async fn pause(rng: &mut Rng) {
    if rng.one_in(4) {
        tokio::time::sleep(Duration::from_millis(rng.range(1, 5))).await;
    }
    for _ in 0..rng.range(0, 5) {
        tokio::task::yield_now().await;
    }
}
