//! The writing process: a channel a case, all connected at once and measured in turn, so that ratios are of neighbouring seconds.

use std::time::{Duration, Instant};

use landfall::device::Device;
use landfall::kv::{Grant, KvChannel, RailState, WriteRequest};

use crate::common::{Error, Peer, Samples, line};
use crate::{Args, BLOCK, CASES, CUT, Case, device, endpoint};

/// Longer than a rail takes to come back, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a rail that is awaited is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// A channel with its far process.
struct Lane {
    channel: KvChannel,
    devices: Vec<Device>,
    peer: Peer,
}

impl Lane {
    async fn connect(args: &Args, name: &str, slower: &[u64]) -> Result<Self, Error> {
        let devices: Result<Vec<_>, _> =
            slower.iter().map(|slower| device(Some(args.rate / slower))).collect();
        let devices = devices?;
        let peer = Peer::start(args.for_far(slower.len()))?;
        let channel = endpoint(args, &devices).await?.connect(peer.hello.trim()).await?;
        println!("# {name}: {}", channel.path());
        let rails = channel.path().rails.len();
        if rails != slower.len() {
            return Err(format!("{name}: {rails} rails in place of {}", slower.len()).into());
        }
        Ok(Self { channel, devices, peer })
    }

    /// Writes so many blocks; the seconds until they have landed.
    async fn write(&self, blocks: u32) -> Result<f64, Error> {
        self.channel.send_message(blocks.to_string().into_bytes()).await?;
        let grant = Grant::from_bytes(&self.channel.recv_message().await?)?;
        let source = self.channel.pool().alloc(blocks).await?;
        let start = Instant::now();
        self.channel.write(WriteRequest::new(&grant, source)).await.0?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn written(&self) -> Vec<u64> {
        self.channel.path().rails.iter().map(|rail| rail.bytes_written).collect()
    }

    async fn close(self) -> Result<(), Error> {
        self.channel.close().await?;
        self.peer.finish()
    }
}

/// A case, and what it has come to.
struct Series {
    case: &'static Case,
    lane: Lane,
    large: u32,
    /// Bytes a second.
    landed: Samples,
    of_rails: Samples,
    /// Seconds, for each of the smaller sizes.
    small: Vec<Samples>,
    carried: Vec<u64>,
}

impl Series {
    async fn connect(args: &Args, case: &'static Case) -> Result<Self, Error> {
        let lane = Lane::connect(args, case.name, case.slower).await?;
        let large = (args.mib / case.less).max(1);
        // What a rail achieves has to be known first.
        lane.write(large).await?;
        let small = case.small.iter().map(|_| Samples::default()).collect();
        let carried = vec![0; case.slower.len()];
        Ok(Self {
            case,
            lane,
            large,
            landed: Samples::default(),
            of_rails: Samples::default(),
            small,
            carried,
        })
    }

    /// One large write, and one of each smaller size; the bytes a second of the large one.
    async fn round(&mut self, args: &Args) -> Result<f64, Error> {
        let before = self.lane.written();
        let speed = f64::from(self.large) * BLOCK as f64 / self.lane.write(self.large).await?;
        for ((carried, after), before) in self.carried.iter_mut().zip(self.lane.written()).zip(before) {
            *carried += after - before;
        }
        self.landed.push(speed);
        for (mib, samples) in self.case.small.iter().zip(&mut self.small) {
            samples.push(self.lane.write((*mib).min(args.mib)).await?);
        }
        Ok(speed)
    }

    fn print(&self) {
        let name = |what: &str| format!("rails.{}.{what}", self.case.name);
        self.landed.spread(&name("landed"), 1e-9, "GB/s");
        if self.case.slower.len() > 1 {
            self.of_rails.spread(&name("of_rails"), 1.0, "times");
            let all: u64 = self.carried.iter().sum();
            for (rail, carried) in self.carried.iter().enumerate() {
                line(&name(&format!("share.{rail}")), 100.0 * *carried as f64 / all as f64, "%");
            }
        }
        for (mib, samples) in self.case.small.iter().zip(&self.small) {
            samples.spread(&name(&format!("{mib}MiB.landed_ms")), 1e3, "ms");
        }
    }
}

pub async fn measure(args: &Args) -> Result<(), Error> {
    let mut series = Vec::new();
    for case in CASES {
        series.push(Series::connect(args, case).await?);
    }
    let mut cut = Cut::connect(args).await?;
    for _ in 0..args.reps {
        // What each kind of rail carries alone, by how much slower it is.
        let mut alone = Vec::new();
        for series in &mut series {
            let speed = series.round(args).await?;
            match series.case.slower {
                [slower] => alone.push((*slower, speed)),
                rails => {
                    let of = |rail| alone.iter().find(|(slower, _)| slower == rail).map_or(f64::NAN, |a| a.1);
                    series.of_rails.push(speed / rails.iter().map(of).sum::<f64>());
                }
            }
        }
        let one = alone.first().map_or(f64::NAN, |(_, speed)| *speed);
        cut.round(f64::from(args.mib) * BLOCK as f64 / one).await?;
    }
    for series in &series {
        series.print();
    }
    cut.print();
    for series in series {
        series.lane.close().await?;
    }
    cut.lane.close().await
}

/// Two equal rails, one of which is cut half-way through a write, and mended when that has landed.
struct Cut {
    lane: Lane,
    large: u32,
    undisturbed: Samples,
    landed: Samples,
    of_least: Samples,
    back: Samples,
}

impl Cut {
    async fn connect(args: &Args) -> Result<Self, Error> {
        let lane = Lane::connect(args, "cut", CUT).await?;
        lane.write(args.mib).await?;
        let [undisturbed, landed, of_least, back] = Default::default();
        Ok(Self { lane, large: args.mib, undisturbed, landed, of_least, back })
    }

    /// `alone` is how many seconds one rail takes.
    async fn round(&mut self, alone: f64) -> Result<(), Error> {
        let undisturbed = self.lane.write(self.large).await?;
        let half = Duration::from_secs_f64(undisturbed / 2.0);
        let link = self.lane.devices.last().and_then(Device::soft_link).ok_or("a soft device has a link")?;
        let failures = self.failures();
        let cut = async {
            tokio::time::sleep(half).await;
            link.cut();
        };
        let (landed, ()) = tokio::join!(self.lane.write(self.large), cut);
        let landed = landed?;
        if self.failures() != failures + 1 {
            return Err("a rail was cut, and its failure is not in the report".into());
        }
        link.mend();
        let mended = Instant::now();
        while self.lane.channel.path().rails.iter().any(|rail| rail.state != RailState::Up) {
            if mended.elapsed() > PATIENCE {
                return Err(format!("the rail does not come back: {}", self.lane.channel.path()).into());
            }
            tokio::time::sleep(LOOK).await;
        }
        self.undisturbed.push(undisturbed);
        self.landed.push(landed);
        self.of_least.push(landed / (undisturbed / 2.0 + alone));
        self.back.push(mended.elapsed().as_secs_f64());
        // What the new connection achieves has to be known first.
        self.lane.write(self.large).await?;
        Ok(())
    }

    fn failures(&self) -> u32 {
        self.lane.channel.path().rails.iter().map(|rail| rail.failures).sum()
    }

    fn print(&self) {
        self.undisturbed.spread("rails.cut.undisturbed_ms", 1e3, "ms");
        self.landed.spread("rails.cut.landed_ms", 1e3, "ms");
        self.of_least.spread("rails.cut.of_least", 1.0, "times");
        self.back.spread("rails.cut.back_ms", 1e3, "ms");
    }
}
