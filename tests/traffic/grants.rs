//! What a peer asks for, and what comes of it: blocks to write to, at once or layer by layer, and blocks to read.

use std::sync::Arc;

use landfall::kv::{AbortReason, Blocks, Grant, LayerArrivals, ReadRefusal, TokenSpan};

use super::content::{GUARD, LAYERS, Rng, Wanted, fill};
use super::life::tag;
use super::link::Link;
use super::node::PATIENCE;
use super::process::{bad, say};
use super::said::Item;

/// A request for a grant.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Its number on this channel.
    pub id: u64,
    pub want: Want,
    /// The transfer's, with the number of blocks in it.
    pub tag: u64,
    /// The tokens that are to be written. None, where blocks are, or are to be read.
    pub spans: Vec<TokenSpan>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Write,
    Layers,
    /// Blocks filled for the tag.
    Read,
}

impl Ask {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [&self.id.to_le_bytes()[..], &self.tag.to_le_bytes(), &[self.want as u8]].concat();
        let numbers = self.spans.iter().flat_map(|span| [span.source, span.target, span.tokens]);
        bytes.extend(numbers.flat_map(u32::to_le_bytes));
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (id, rest) = bytes.split_first_chunk()?;
        let (tag, rest) = rest.split_first_chunk()?;
        let (want, mut rest) = rest.split_first()?;
        let want = match want {
            0 => Want::Write,
            1 => Want::Layers,
            2 => Want::Read,
            _ => return None,
        };
        let mut spans = Vec::new();
        while !rest.is_empty() {
            let mut number = || {
                let (number, after) = rest.split_first_chunk()?;
                rest = after;
                Some(u32::from_le_bytes(*number))
            };
            spans.push(TokenSpan { source: number()?, target: number()?, tokens: number()? });
        }
        Some(Self { id: u64::from_le_bytes(*id), want, tag: u64::from_le_bytes(*tag), spans })
    }
}

/// Grants what was asked for, and sees to its end what has one of its own; takes some grants back.
pub async fn grant(link: &Link, ask: Ask) {
    let blocks = tokio::select! {
        blocks = link.channel.pool().alloc(tag::blocks(ask.tag) as u32) => blocks,
        _ = link.channel.closed() => return,
    };
    let Ok(mut blocks) = blocks else { return bad("more blocks were asked for than there are") };
    if !ask.spans.is_empty() {
        // What is not written is left as it is.
        fill(&mut blocks, GUARD);
    }
    let mut rng = Rng::new(link.life.draw());
    match ask.want {
        Want::Write => {
            let Ok(grant) = link.channel.grant(blocks) else { return };
            link.granted.set(link.granted.get() + 1);
            if !ask.spans.is_empty() {
                link.mapped.borrow_mut().insert(ask.tag, ask.spans);
            }
            give(link, ask.id, &grant, &mut rng).await;
        }
        Want::Read => {
            fill(&mut blocks, ask.tag);
            let Ok(grant) = link.channel.grant_read(blocks) else { return };
            link.lent.borrow_mut().insert(grant.id(), ask.tag);
            give(link, ask.id, &grant, &mut rng).await;
        }
        Want::Layers => {
            let Ok((grant, arrivals)) = link.channel.grant_layers(blocks) else { return };
            let gives_up = rng.one_in(20).then(|| rng.range(0, u64::from(LAYERS)) as u32);
            tokio::join!(give(link, ask.id, &grant, &mut rng), follow(link, &ask, arrivals, gives_up));
        }
    }
}

async fn give(link: &Link, id: u64, grant: &Grant, rng: &mut Rng) {
    if link.answer(id, grant).await.is_some() && rng.one_in(25) {
        for _ in 0..rng.range(0, 20) {
            tokio::task::yield_now().await;
        }
        link.channel.revoke(grant);
    }
}

/// Each layer as it lands, then the whole; or not, if it is given up when so many have landed.
async fn follow(link: &Link, ask: &Ask, mut arrivals: LayerArrivals, gives_up: Option<u32>) {
    let tag = ask.tag;
    let wanted = link.wanted(tag, (!ask.spans.is_empty()).then_some(&ask.spans));
    let mut landed = 0;
    loop {
        if gives_up == Some(landed) {
            say(format_args!("dropped {tag}"));
            return;
        }
        match arrivals.next().await {
            Ok(Some(layer)) => {
                if layer.tag != tag {
                    bad(format_args!("a layer of {:#x} under the grant of {tag:#x} (K1)", layer.tag));
                }
                let view = arrivals.layer(layer.layer);
                if let Some(what) =
                    view.and_then(|view| wanted.layer_differs(view, link.channel.pool().layout()))
                {
                    bad(format_args!("a layer was told and is not whole (K1): {what}"));
                }
                say(format_args!("arrived {}", Item::layer(tag, layer.layer)));
                landed += 1;
            }
            Ok(None) => break,
            Err(_) => return say(format_args!("aborted {tag}")),
        }
    }
    match tokio::time::timeout(PATIENCE, arrivals.finish()).await {
        Ok(Ok(blocks)) => {
            if let Some(what) = wanted.differs(&blocks) {
                bad(format_args!("all layers have landed and are not whole (K1): {what}"));
            }
            say(format_args!("whole {tag}"));
            link.watched.push(blocks);
        }
        Ok(Err(error)) => bad(format_args!("every layer of {tag:#x} was told, and it failed: {error}")),
        Err(_) => bad(format_args!("{tag:#x} has landed by layer, and its blocks do not come back (K5)")),
    }
    say("step");
}

/// What was lent comes back when nobody reads it, as it was; it is overwritten at once, which who still reads would see.
pub async fn serve(link: &Link) {
    while let Ok(served) = link.channel.next_served().await {
        let Some(tag) = link.lent.borrow_mut().remove(&served.grant()) else {
            bad(format_args!("grant {} was served twice, or was none to read (R2)", served.grant()));
            continue;
        };
        match served.result() {
            Ok(_) => say(format_args!("served {tag}")),
            Err(AbortReason::Revoked | AbortReason::ConnectionLost) => say(format_args!("withdrawn {tag}")),
            Err(AbortReason::ReadRefused(ReadRefusal::OutOfRange | ReadRefusal::Malformed)) => {
                bad(format_args!("the read of {tag:#x} was refused, as one that it is not"));
            }
            Err(_) => say(format_args!("unserved {tag}")),
        }
        reclaim(tag, served.into_blocks());
        say("step");
    }
}

fn reclaim(tag: u64, blocks: Arc<Blocks>) {
    let Some(mut blocks) = Arc::into_inner(blocks) else {
        return bad(format_args!("what was lent as {tag:#x} came back with another owner (R1)"));
    };
    if let Some(what) = Wanted::Filled(tag).differs(&blocks) {
        bad(format_args!("what was lent to be read was written to: {what}"));
    }
    fill(&mut blocks, GUARD);
}
