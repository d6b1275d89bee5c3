//! The cases, read instead of written: by READs, and by the owner's WRITEs. In turn with the writes of the same case, so that the
//! two can be compared.

use std::time::Instant;

use landfall::kv::{Grant, KvChannel, ReadDone, ReadRequest, ReadStrategy};

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::common::{Error, Samples, line};
use crate::initiator::{PATIENCE, ask, fill};
use crate::placement::{End, Order};
use crate::receiver::{Ask, digest};

/// One way of reading a case.
pub struct Series {
    /// `read`, `read_remote`, or `read_d1` for one READ in flight on each queue pair.
    name: &'static str,
    strategy: ReadStrategy,
    total: Samples,
    last: Option<ReadDone>,
}

/// The ways in which a case is read. One READ in flight is of interest on a device, and takes long.
pub fn series(args: &Args, case: &Case) -> Vec<Series> {
    if !case.reads {
        return Vec::new();
    }
    let mut ways = vec![
        ("read", ReadStrategy::RdmaRead { depth: u32::MAX, qps: args.qps }),
        ("read_remote", ReadStrategy::RemoteWrite),
    ];
    if args.device.is_some() {
        ways.push(("read_d1", ReadStrategy::RdmaRead { depth: 1, qps: args.qps }));
    }
    let series = |(name, strategy)| Series { name, strategy, total: Samples::default(), last: None };
    ways.into_iter().map(series).collect()
}

/// Warms up with a read of what was written before, whose digest is known.
pub async fn verify(channel: &KvChannel, case: &Case, expected: u64, ways: &[Series]) -> Result<(), Error> {
    for way in ways {
        let one = Ask { grants: 1, order: case.order, digest: false, read: true };
        let grants = ask(channel, &one).await?;
        let grant = Grant::from_bytes(grants.first().ok_or("the owner gave no grant")?)?;
        let mut target = case.order.claim(channel.pool(), case.blocks, End::Source)?;
        fill(&mut target, 7)?;
        let request = ReadRequest::new(&grant, target).strategy(way.strategy).deadline(PATIENCE);
        let (done, target) = channel.read(request).await;
        done?;
        if digest(&target)? != expected {
            return Err(format!("{}, {}: what was read is not what was written", case.name, way.name).into());
        }
    }
    Ok(())
}

pub async fn round(
    channel: &KvChannel,
    case: &Case,
    grants: usize,
    series: &mut Series,
) -> Result<(), Error> {
    let asked = ask(channel, &Ask { grants, order: case.order, digest: false, read: true }).await?;
    let mut target = None;
    for bytes in asked {
        let claimed = match target.take() {
            Some(claimed) => claimed,
            None => case.order.claim(channel.pool(), case.blocks, End::Source)?,
        };
        let grant = Grant::from_bytes(&bytes)?;
        let start = Instant::now();
        let mut request = ReadRequest::new(&grant, claimed).strategy(series.strategy).deadline(PATIENCE);
        if case.pairs && case.order != Order::Flat {
            request = request.pairs((0..case.blocks).map(|position| (position, position)));
        }
        let (result, back) = channel.read(request).await;
        series.total.push(start.elapsed().as_secs_f64());
        series.last = Some(result?);
        target = Some(back);
    }
    Ok(())
}

impl Series {
    pub fn print(&self, case: &Case, mode: Mode) {
        let name = |what: &str| format!("landfall.{}.{}.{}.{what}", mode.name(), case.name, self.name);
        if let Some(done) = &self.last {
            println!(
                "# {} by {}, {} READs, {} in flight at most",
                case.name, done.method, done.wrs, done.most_in_flight
            );
        }
        if case.bytes() <= 64 << 10 {
            line(&name("done_p50"), self.total.median() * 1e6, "us");
            line(&name("done_p99"), self.total.quantile(0.99) * 1e6, "us");
        } else {
            line(&name("done_ms"), self.total.median() * 1e3, "ms");
        }
        line(&name("done"), case.bytes() as f64 / self.total.median() / 1e9, "GB/s");
    }
}
