//! `landfall verify ADDR`: is it really RDMA? A transfer, the devices' own counters of both ends beside the payload, and the same
//! bytes once more over TCP, for contrast.
//!
//! The counters of a device are told by the library's [`counters`](landfall::counters), the rules of which hold here: what is not
//! counted is unknown, never 0. The run over TCP shows that the counters tell one path from the other: if the devices count as much
//! of bytes that did not go through them, they prove nothing.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use landfall::counters::{CountUnit, CounterPort, CounterSnapshot, Sysfs};
use landfall::error::chain;
use landfall::kv::PathReport;
use serde::Serialize;

use crate::device::DeviceArgs;
use crate::measure::client::Client;
use crate::measure::load::Report;
use crate::measure::talk::{About, Counted, Memory, Op, ReadBy, Shape};
use crate::measure::units::{digits, duration, show_bytes};
use crate::output::{Error, Outcome, Output};

/// Say whether the bytes really go by RDMA: transfers, and what the devices count of them
///
/// Exit status: 0 verified, 1 contradicted, 3 unknown.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The server (`landfall bench serve`), as HOST:PORT
    #[arg(value_name = "ADDR")]
    address: String,
    /// How long each of the two runs takes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    duration: Duration,
    /// Queue pairs of each rail
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    qps: u16,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What is said in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Verified,
    Contradicted,
    Unknown,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Contradicted => "contradicted",
            Self::Unknown => "unknown",
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Self::Verified => Outcome::Well,
            Self::Contradicted => Outcome::NotWell,
            Self::Unknown => Outcome::Unknown,
        }
    }
}

/// The run over TCP.
#[derive(Clone, Debug, Serialize)]
struct Control {
    payload: u64,
    gb_s: f64,
    /// What the devices of this end have counted meanwhile, in `unit`.
    counted: Option<u64>,
    unit: Option<&'static str>,
    /// What they would have counted at least, had they carried it.
    least: Option<u64>,
}

#[derive(Serialize)]
struct Document<'a> {
    command: &'static str,
    verdict: Verdict,
    reason: &'a str,
    server: &'a About,
    path: &'a PathReport,
    transfer: &'a Report,
    here: &'a Counted,
    there: &'a Counted,
    control: Option<&'a Control>,
    /// Why there was no run over TCP.
    no_control: Option<&'a str>,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(verify(args, output))
}

const BLOCK: u64 = 1 << 20;

fn shape(tcp: bool) -> Shape {
    Shape {
        op: Op::Write,
        block_bytes: BLOCK,
        descriptors: 1,
        in_flight: 8,
        both: false,
        read_by: ReadBy::Auto,
        memory: Memory::Host,
        spin_us: 0,
        tcp,
    }
}

async fn verify(args: &Args, output: &Output) -> Result<Outcome, Error> {
    let client = Client::connect(&args.address, &args.device).await?;
    let seen = AtomicU64::new(0);
    let mut measured = client.open(shape(false), args.qps.into()).await?;
    let (transfer, _) = measured.drive(8, args.duration, &seen).await?;
    let (here, there) = measured.verify().await?;
    let path = measured.path();
    measured.close().await;
    let rdma = client.is_rdma();
    let control = if rdma {
        control(&client, &path, args.duration).await
    } else {
        Err(format!("the path is {} already", way(&path)).into())
    };
    let no_control = control.as_ref().err().map(|why: &Error| chain(why.as_ref()));
    let control = control.ok();
    let (verdict, reason) = judge(rdma, &way(&path), &here, &there, control.as_ref());
    if output.is_json() {
        output.document(&Document {
            command: "verify",
            verdict,
            reason: &reason,
            server: client.about(),
            path: &path,
            transfer: &transfer,
            here: &here,
            there: &there,
            control: control.as_ref(),
            no_control: no_control.as_deref(),
        })?;
    } else {
        let over_tcp = match (&control, &no_control) {
            (Some(control), _) => format!(
                "{} at {} GB/s; the devices here counted {}",
                show(control.payload),
                digits(control.gb_s),
                control.counted.map_or("nothing that can be known".to_owned(), |n| format!(
                    "{n} {} (at least {} had they carried it)",
                    control.unit.unwrap_or_default(),
                    control.least.unwrap_or_default()
                ))
            ),
            (None, why) => format!("not made: {}", why.as_deref().unwrap_or_default()),
        };
        output.print(&format!(
            "path      {path}\ntransfer  {} at {} GB/s, landed\nhere      {}: {}\nthere     {}: {}\nover TCP  {over_tcp}\n\n{}: {reason}\n",
            show(transfer.bytes),
            digits(transfer.landed_gb_s()),
            here.verdict, here.reason, there.verdict, there.reason, verdict.name(),
        ))?;
    }
    client.close().await;
    Ok(verdict.outcome())
}

fn show(bytes: u64) -> String {
    format!("{bytes} bytes ({})", show_bytes(bytes))
}

fn way(path: &PathReport) -> String {
    match path.transport {
        "tcp" => "TCP".to_owned(),
        "shm" => "shared memory".to_owned(),
        other => other.to_owned(),
    }
}

/// The same over TCP, while the devices of the path are watched.
async fn control(client: &Client, path: &PathReport, time: Duration) -> Result<Control, Error> {
    let ports: Vec<_> = path
        .rails
        .iter()
        .filter_map(|rail| Some(CounterPort::new(rail.device.clone(), rail.port?)))
        .collect();
    let mut measured = client.open(shape(true), 1).await?;
    let before = snapshot(ports.clone()).await?;
    let (report, _) = measured.drive(8, time, &AtomicU64::new(0)).await?;
    // So that the last of it is in the reading.
    tokio::time::sleep(before.lifespan() * 2).await;
    let after = snapshot(ports).await?;
    measured.close().await;
    Ok(contrast(&before, &after, &report, path.mtu))
}

async fn snapshot(ports: Vec<CounterPort>) -> Result<CounterSnapshot, Error> {
    Ok(tokio::task::spawn_blocking(move || CounterSnapshot::take(&Sysfs::default(), &ports)).await?)
}

fn contrast(before: &CounterSnapshot, after: &CounterSnapshot, report: &Report, mtu: u32) -> Control {
    let difference = after.since(before);
    let units: Vec<_> = difference.sent().iter().map(|port| port.unit).collect();
    let unit =
        units.first().copied().flatten().filter(|unit| units.iter().all(|other| *other == Some(*unit)));
    let counted = unit.and_then(|_| difference.sent().iter().map(|port| port.counted).sum());
    Control {
        payload: report.bytes,
        gb_s: report.landed_gb_s(),
        counted,
        unit: unit.map(|unit| if unit == CountUnit::Packets { "packets" } else { "bytes" }),
        least: unit.map(|unit| match unit {
            CountUnit::Packets => report.bytes.div_ceil(u64::from(mtu.max(1))),
            _ => report.bytes,
        }),
    }
}

/// What follows from the numbers.
fn judge(
    rdma: bool,
    way: &str,
    here: &Counted,
    there: &Counted,
    control: Option<&Control>,
) -> (Verdict, String) {
    if !rdma {
        return (Verdict::Unknown, format!("it is not RDMA: the path is {way}, and no device counts it"));
    }
    let ends = [("here", here), ("there", there)];
    let with = |verdict: &str| {
        ends.iter().filter(|(_, end)| end.verdict == verdict).map(|(name, _)| *name).collect::<Vec<_>>()
    };
    let against = with("contradicted");
    if !against.is_empty() {
        let reason = format!(
            "the devices {} counted less than the payload: it took another path",
            against.join(" and ")
        );
        return (Verdict::Contradicted, reason);
    }
    if with("verified").len() < ends.len() {
        let other: Vec<_> = ends
            .iter()
            .filter(|(_, end)| end.verdict != "verified")
            .map(|(name, end)| format!("{name}, {}", end.reason))
            .collect();
        return (Verdict::Unknown, format!("the counters do not tell: {}", other.join("; ")));
    }
    let numbers = "the devices of both ends counted the payload";
    match control {
        Some(Control { counted: Some(counted), least: Some(least), .. }) if counted >= least => (
            Verdict::Unknown,
            format!(
                "{numbers}, and as much of bytes that went over TCP: other traffic, or counters of all traffic, hides the answer"
            ),
        ),
        Some(Control { counted: Some(counted), unit, .. }) => (
            Verdict::Verified,
            format!("{numbers}, and {counted} {} while the same went over TCP", unit.unwrap_or_default()),
        ),
        _ => (Verdict::Verified, format!("{numbers}; there is no run over TCP to compare with")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use landfall::counters::{Expected, Payload};

    use super::*;
    use crate::measure::histogram::Latency;

    /// A device that does not exist, with counters that count what a test says.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("landfall-verify-{name}-{}", std::process::id()));
            std::fs::create_dir_all(root.join("class/infiniband/fake0/ports/1/counters")).unwrap();
            Self(root)
        }

        fn dir(&self) -> &Path {
            &self.0
        }

        /// With these numbers in `port_xmit_data`, which counts words, and `port_rcv_data`.
        fn snapshot(&self, sent: u64, received: u64) -> CounterSnapshot {
            let dir = self.dir().join("class/infiniband/fake0/ports/1/counters");
            std::fs::write(dir.join("port_xmit_data"), format!("{}\n", sent / 4)).unwrap();
            std::fs::write(dir.join("port_rcv_data"), format!("{}\n", received / 4)).unwrap();
            let sysfs = Sysfs::at(self.dir());
            CounterSnapshot::take(&sysfs, &sysfs.ports())
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const PAYLOAD: u64 = 64 << 20;

    fn ran() -> Report {
        Report {
            operations: 64,
            bytes: PAYLOAD,
            wrs: 64,
            landed_seconds: 1.0,
            local_seconds: None,
            landed: Latency::default(),
            local: None,
            local_to_landed: None,
            method: None,
        }
    }

    /// As an end says it whose device counted `sent` bytes of the payload.
    fn end(name: &str, sent: u64) -> Counted {
        let root = Root::new(name);
        let before = root.snapshot(1000, 1000);
        let difference = root.snapshot(1000 + sent, 1000).since(&before);
        let expected = Expected::new([CounterPort::new("fake0", 1)], 4096).sent(Payload::new(PAYLOAD, 64));
        let report = difference.check(&expected);
        Counted {
            devices: vec!["fake0".to_owned()],
            verdict: report.verdict.to_string(),
            reason: report.sent.reason,
            payload: PAYLOAD,
            counted: report.sent.counted,
            unit: None,
        }
    }

    fn over_tcp(name: &str, counted: u64) -> Control {
        let root = Root::new(name);
        let before = root.snapshot(5000, 0);
        contrast(&before, &root.snapshot(5000 + counted, 0), &ran(), 4096)
    }

    #[test]
    fn k9_bytes_that_the_devices_counted_and_tcp_s_they_did_not_are_verified() {
        let (here, there) = (end("a", PAYLOAD + 100_000), end("b", PAYLOAD + 90_000));
        let control = over_tcp("c", 400);
        assert_eq!((control.counted, control.unit, control.least), (Some(400), Some("bytes"), Some(PAYLOAD)));
        let (verdict, reason) = judge(true, "verbs", &here, &there, Some(&control));
        assert_eq!(verdict, Verdict::Verified, "{reason}");
        assert!(reason.contains("400 bytes"), "{reason}");
        // Without a run over TCP it is said that there was none.
        let (verdict, reason) = judge(true, "verbs", &here, &there, None);
        assert!(verdict == Verdict::Verified && reason.contains("no run over TCP"), "{reason}");
    }

    #[test]
    fn k9_one_end_that_counted_less_contradicts() {
        let (here, there) = (end("d", PAYLOAD + 100_000), end("e", 4000));
        let (verdict, reason) = judge(true, "verbs", &here, &there, Some(&over_tcp("f", 0)));
        assert_eq!(verdict, Verdict::Contradicted);
        assert!(reason.contains("there"), "{reason}");
        assert_eq!(verdict.outcome(), Outcome::NotWell);
    }

    #[test]
    fn k9_counters_that_count_tcp_as_well_prove_nothing() {
        let (here, there) = (end("g", PAYLOAD + 100_000), end("h", PAYLOAD + 100_000));
        let (verdict, reason) = judge(true, "verbs", &here, &there, Some(&over_tcp("i", PAYLOAD + 100_000)));
        assert!(verdict == Verdict::Unknown && reason.contains("hides the answer"), "{reason}");
        assert_eq!(verdict.outcome(), Outcome::Unknown);
    }

    #[test]
    fn k9_what_is_not_counted_is_unknown() {
        let root = Root::new("j");
        let none = CounterSnapshot::take(&Sysfs::at(root.dir()), &[CounterPort::new("siw0", 1)]);
        let control = contrast(&none, &none, &ran(), 4096);
        assert_eq!((control.counted, control.unit, control.least), (None, None, None));
        let silent =
            Counted { verdict: "unknown".to_owned(), reason: "siw0 port 1: N/A".to_owned(), ..end("k", 0) };
        let (verdict, reason) = judge(true, "verbs", &end("l", PAYLOAD), &silent, Some(&control));
        assert!(verdict == Verdict::Unknown && reason.contains("there, siw0 port 1: N/A"), "{reason}");
        let (verdict, reason) = judge(false, "TCP", &silent, &silent, None);
        assert!(verdict == Verdict::Unknown && reason.contains("not RDMA"), "{reason}");
    }
}
