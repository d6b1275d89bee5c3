//! What is done on a channel, by a table: a new operation is a function and a line.

use std::future::Future;
use std::pin::Pin;

use landfall::kv::ReadStrategy;

use super::content::Rng;
use super::link::Link;
use super::process::say;
use super::{layers, reads, refusals, writes};

/// `None` when the channel has ended.
type Running<'a> = Pin<Box<dyn Future<Output = Option<()>> + 'a>>;

struct Operation {
    name: &'static str,
    /// How often it is chosen, beside the others.
    weight: u64,
    run: for<'a> fn(&'a Link, &'a mut Rng) -> Running<'a>,
}

/// The names are keys of the report. The last ones end the channel.
#[rustfmt::skip]
const OPERATIONS: &[Operation] = &[
    Operation { name: "write_block", weight: 200, run: |l, r| Box::pin(writes::write(l, 1, false, r)) },
    Operation { name: "write_run", weight: 160, run: |l, r| Box::pin(writes::write(l, some(l, r), false, r)) },
    Operation { name: "write_scattered", weight: 80, run: |l, r| Box::pin(writes::write(l, some(l, r), true, r)) },
    Operation { name: "write_mapped", weight: 40, run: |l, r| Box::pin(writes::mapped(l, few(l, r), r)) },
    Operation { name: "write_cancelled", weight: 40, run: |l, r| Box::pin(writes::cancelled(l, r)) },
    Operation { name: "write_short_deadline", weight: 40, run: |l, r| Box::pin(writes::short_deadline(l, r)) },
    Operation { name: "write_detached", weight: 30, run: |l, r| Box::pin(writes::detached(l, r)) },
    Operation { name: "write_refused", weight: 20, run: |l, r| Box::pin(refusals::write(l, r)) },
    Operation { name: "layered", weight: 70, run: |l, r| Box::pin(layers::write(l, r, false)) },
    Operation { name: "layered_mapped", weight: 20, run: |l, r| Box::pin(layers::write(l, r, true)) },
    Operation { name: "layered_cancelled", weight: 15, run: |l, r| Box::pin(layers::cancelled(l, r)) },
    Operation { name: "read_auto", weight: 50, run: |l, r| Box::pin(reads::read(l, ReadStrategy::Auto, r)) },
    Operation { name: "read_by_reads", weight: 80, run: |l, r| Box::pin(reads::by_reads(l, r)) },
    Operation { name: "read_remote_write", weight: 80, run: |l, r| Box::pin(reads::read(l, ReadStrategy::RemoteWrite, r)) },
    Operation { name: "read_measured", weight: 20, run: |l, r| Box::pin(reads::read(l, ReadStrategy::Measured, r)) },
    Operation { name: "read_mapped", weight: 50, run: |l, r| Box::pin(reads::mapped(l, r)) },
    Operation { name: "read_cancelled", weight: 25, run: |l, r| Box::pin(reads::cancelled(l, r)) },
    Operation { name: "read_short_deadline", weight: 25, run: |l, r| Box::pin(reads::short_deadline(l, r)) },
    Operation { name: "read_refused", weight: 15, run: |l, r| Box::pin(refusals::read(l, r)) },
    Operation { name: "message", weight: 120, run: |l, r| Box::pin(l.text(r.range(0, 3000))) },
    Operation { name: "message_large", weight: 30, run: |l, r| Box::pin(l.text(r.range(3000, 300_000))) },
    Operation { name: "messages", weight: 15, run: |l, r| Box::pin(messages(l, r)) },
    Operation { name: "close", weight: 1, run: |l, _| Box::pin(close(l)) },
    Operation { name: "kill", weight: 1, run: |l, _| Box::pin(kill(l)) },
];
const ENDINGS: usize = 2;

/// One operation of the table. `None` when the channel has ended.
pub async fn operate(link: &Link, rng: &mut Rng) -> Option<()> {
    link.life.begin();
    let steady = link.life.part().steady;
    let operations = &OPERATIONS[..OPERATIONS.len() - if steady { ENDINGS } else { 0 }];
    let mut at = rng.range(0, operations.iter().map(|o| o.weight).sum::<u64>() - 1);
    let chosen = operations.iter().find(|operation| {
        let here = at < operation.weight;
        at = at.saturating_sub(operation.weight);
        here
    });
    let operation = chosen?;
    let ended = (operation.run)(link, rng).await;
    say(format_args!("did {}", operation.name));
    ended
}

/// Blocks of a larger operation.
pub fn some(link: &Link, rng: &mut Rng) -> u64 {
    rng.range(2, link.life.part().most)
}

/// Where each is many work requests.
pub fn few(link: &Link, rng: &mut Rng) -> u64 {
    rng.range(1, link.life.part().most.min(8))
}

async fn messages(link: &Link, rng: &mut Rng) -> Option<()> {
    for _ in 0..rng.range(10, 60) {
        link.text(rng.range(0, 2000)).await?;
    }
    Some(())
}

/// Everything in flight finishes, on both sides.
async fn close(link: &Link) -> Option<()> {
    let _ = link.channel.close().await;
    None
}

async fn kill(link: &Link) -> Option<()> {
    link.channel.kill();
    None
}
