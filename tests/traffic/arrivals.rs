//! What a receiver checks: that an arrival is whole, and that nobody writes to blocks that are free, or were given back.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use landfall::kv::{ArrivalError, Blocks, KvPool};

use super::content::{GUARD, Rng, Wanted, fill};
use super::link::Link;
use super::node::PATIENCE;
use super::process::{bad, say};

/// How many claims of a channel are watched after their transfer before they are granted again.
const WATCHED: usize = 2;

/// Claims that have come back from a transfer, which nobody writes to any more.
#[derive(Default)]
pub struct Watched(RefCell<VecDeque<Blocks>>);

impl Watched {
    pub fn push(&self, mut blocks: Blocks) {
        fill(&mut blocks, GUARD);
        self.0.borrow_mut().push_back(blocks);
        if self.0.borrow().len() > WATCHED
            && let Some(blocks) = self.0.borrow_mut().pop_front()
        {
            check(&blocks);
        }
    }

    /// The channel has ended.
    pub fn end(&self) {
        self.0.borrow_mut().drain(..).for_each(|blocks| check(&blocks));
    }
}

/// R7, K5: every block is back, whatever has become of the channels.
pub async fn come_back(pool: &KvPool) -> Result<(), String> {
    let all = pool.layout().blocks();
    let back = async {
        while pool.free_blocks() < all {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let came = tokio::time::timeout(PATIENCE, back).await;
    came.map_err(|_| format!("{} of {all} blocks came back", pool.free_blocks()))
}

/// Takes a few free blocks again and again, and looks whether they stay as they are: no peer reaches what is free (K4).
pub async fn watch(pool: KvPool, mut rng: Rng) {
    loop {
        if let Ok(mut blocks) = pool.try_alloc(rng.range(1, 6) as u32) {
            fill(&mut blocks, GUARD);
            tokio::time::sleep(Duration::from_millis(rng.range(1, 10))).await;
            check(&blocks);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Checks what arrives until the channel has ended. The number of grants to write that have ended.
pub async fn take(link: &Link) -> u64 {
    for ended in 0.. {
        match link.channel.next_arrival().await {
            Ok(arrival) => {
                let tag = arrival.tag();
                let spans = link.mapped.borrow_mut().remove(&tag);
                if let Some(what) = link.wanted(tag, spans.as_deref()).differs(arrival.blocks()) {
                    bad(format_args!("an arrival is torn (K1, K3): {what}"));
                }
                say(format_args!("arrived {tag}"));
                link.watched.push(arrival.into_blocks());
            }
            Err(ArrivalError::Aborted { .. }) => {}
            Err(_) => return ended,
        }
        say("step");
        tokio::task::yield_now().await;
    }
    u64::MAX
}

fn check(blocks: &Blocks) {
    if let Some(what) = Wanted::Filled(GUARD).differs(blocks) {
        bad(format_args!("a late write reached blocks that had been given back (K4): {what}"));
    }
}
