//! From counts to a verdict: the payload that is said to have been carried, between two bounds.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::difference::{CounterDifference, PortCount};
use super::snapshot::CounterPort;
use super::table::CountUnit;

/// More than the headers of any packet: Ethernet, IPv6, and TCP with all of its options under MPA, DDP and its checksum
/// (iWARP: 18 + 40 + 60 + 42), or UDP under the transport's headers (RoCE v2: 106 in all, InfiniBand: 86).
const HEADERS: u64 = 160;
/// More than a message of a channel has in control data.
const CONTROL: u64 = 1024;
/// The least path MTU there is.
const LEAST_MTU: u32 = 256;

/// Whether the devices' counters bear out that a path carried the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// They do: as much was counted, and not so much more that somebody else's traffic alone could have been it.
    Verified,
    /// They do not: less was counted than the payload has.
    Contradicted,
    /// They do not tell, and the report has the reason.
    Unknown,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Verified => "verified",
            Self::Contradicted => "contradicted",
            Self::Unknown => "unknown",
        })
    }
}

/// What a program has carried in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Payload {
    /// Bytes of payload.
    pub bytes: u64,
    /// Messages: those with payload, and those for control, of up to 1 KiB each.
    pub messages: u64,
}

impl Payload {
    /// `bytes` in `messages`. Rather too many messages than too few: they raise the upper bound only.
    pub fn new(bytes: u64, messages: u64) -> Self {
        Self { bytes, messages }
    }

    /// Packets that carry it, at most.
    fn most_packets(self, mtu: u64) -> u64 {
        let per_message = 1 + CONTROL.div_ceil(mtu);
        (self.bytes / mtu).saturating_add(self.messages.saturating_mul(per_message))
    }

    /// (least, most) that a device counts of it, while `other` goes the other way.
    fn bounds(self, unit: CountUnit, other: Self, mtu: u64) -> (u64, u64) {
        // One acknowledgement for each packet that comes in, at most.
        let packets = self.most_packets(mtu).saturating_add(other.most_packets(mtu));
        match unit {
            CountUnit::Packets => (self.bytes.div_ceil(mtu), packets),
            CountUnit::Bytes => {
                let control = self.messages.saturating_mul(CONTROL);
                let headers = packets.saturating_mul(HEADERS);
                (self.bytes, self.bytes.saturating_add(control).saturating_add(headers))
            }
        }
    }
}

/// What the counters are held against.
#[derive(Clone, Debug)]
pub struct Expected {
    rails: Vec<CounterPort>,
    mtu: u64,
    sent: Payload,
    received: Payload,
    same_port: bool,
}

impl Expected {
    /// Traffic over `rails`, all together, at a path MTU of `mtu` bytes. A port that is named twice counts once.
    pub fn new(rails: impl IntoIterator<Item = CounterPort>, mtu: u32) -> Self {
        let rails: BTreeSet<_> = rails.into_iter().collect();
        Self {
            rails: rails.into_iter().collect(),
            mtu: mtu.max(LEAST_MTU).into(),
            sent: Payload::default(),
            received: Payload::default(),
            same_port: false,
        }
    }

    /// What was sent.
    pub fn sent(mut self, payload: Payload) -> Self {
        self.sent = payload;
        self
    }

    /// What was received.
    pub fn received(mut self, payload: Payload) -> Self {
        self.received = payload;
        self
    }

    /// Both ends are on the same port. A device may move such data inside, where it does not count: then too low a count is
    /// no contradiction.
    pub fn same_port(mut self, same: bool) -> Self {
        self.same_port = same;
        self
    }
}

/// A verdict, with the numbers that it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CounterReport {
    /// Contradicted when a direction is; verified when each direction that has payload is; else unknown.
    pub verdict: Verdict,
    /// What was sent.
    pub sent: DirectionReport,
    /// What was received.
    pub received: DirectionReport,
}

/// One direction of a [`CounterReport`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DirectionReport {
    /// What the counters say of this direction.
    pub verdict: Verdict,
    /// Why, in a sentence with the numbers.
    pub reason: String,
    /// What was carried, as the program has it.
    pub payload: Payload,
    /// What the rails have counted together, in [`unit`](Self::unit).
    pub counted: Option<u64>,
    /// What they count. `None` when no rail counts, or not all in the same unit.
    pub unit: Option<CountUnit>,
    /// The least that a device counts of this payload.
    pub least: Option<u64>,
    /// The most that this traffic explains.
    pub most: Option<u64>,
    /// Each rail's own count.
    pub rails: Vec<PortCount>,
    /// Ports that are no rails and counted as much as this payload: where the data may have gone instead.
    pub elsewhere: Vec<PortCount>,
}

impl CounterReport {
    /// For counters that could not be asked.
    pub(crate) fn not_read(why: &str) -> Self {
        let nothing = Expected::new([], LEAST_MTU);
        let difference = CounterDifference { sent: Vec::new(), received: Vec::new() };
        let mut report = difference.check(&nothing);
        report.sent.reason = why.to_owned();
        report.received.reason = why.to_owned();
        report
    }
}

impl CounterDifference {
    /// Compares what was counted with what was `expected`.
    pub fn check(&self, expected: &Expected) -> CounterReport {
        let sent = direction("sent", &self.sent, expected, expected.sent, expected.received);
        let received = direction("received", &self.received, expected, expected.received, expected.sent);
        let with_payload = [&sent, &received].into_iter().filter(|d| d.payload.bytes > 0);
        let verdicts: Vec<_> = with_payload.map(|d| d.verdict).collect();
        let verdict = if verdicts.contains(&Verdict::Contradicted) {
            Verdict::Contradicted
        } else if verdicts.is_empty() || verdicts.contains(&Verdict::Unknown) {
            Verdict::Unknown
        } else {
            Verdict::Verified
        };
        CounterReport { verdict, sent, received }
    }
}

fn direction(
    verb: &str,
    ports: &[PortCount],
    expected: &Expected,
    payload: Payload,
    other: Payload,
) -> DirectionReport {
    let is_rail = |count: &PortCount| expected.rails.contains(&count.port);
    let rails: Vec<_> = expected.rails.iter().map(|rail| count_of(ports, rail)).collect();
    let unit = rails.iter().find_map(|rail| rail.unit);
    let unit = unit.filter(|unit| rails.iter().all(|rail| rail.unit.is_none_or(|other| other == *unit)));
    let bounds = |unit| payload.bounds(unit, other, expected.mtu);
    let elsewhere: Vec<_> = ports
        .iter()
        .filter(|count| payload.bytes > 0 && !is_rail(count))
        .filter(|count| count.counted.zip(count.unit).is_some_and(|(n, unit)| n >= bounds(unit).0))
        .cloned()
        .collect();
    let counted = rails.iter().filter_map(|rail| rail.counted).reduce(u64::saturating_add);
    let counted = counted.filter(|_| unit.is_some());
    let (least, most) = unit.map(bounds).unzip();
    let mut report = DirectionReport {
        verdict: Verdict::Unknown,
        reason: String::new(),
        payload,
        counted,
        unit,
        least,
        most,
        rails,
        elsewhere,
    };
    (report.verdict, report.reason) = judge(verb, &report, expected.same_port);
    report
}

fn count_of(ports: &[PortCount], rail: &CounterPort) -> PortCount {
    ports.iter().find(|count| count.port == *rail).cloned().unwrap_or_else(|| PortCount::not_read(rail))
}

fn judge(verb: &str, report: &DirectionReport, same_port: bool) -> (Verdict, String) {
    let DirectionReport { payload, rails, elsewhere, .. } = report;
    if payload.bytes == 0 {
        return (Verdict::Unknown, format!("no payload was {verb} between the two readings"));
    }
    let (Some(counted), Some(unit), Some(least), Some(most)) =
        (report.counted, report.unit, report.least, report.most)
    else {
        return (Verdict::Unknown, without_count(rails));
    };
    let units = unit.name();
    let names = join(rails.iter().map(|rail| rail.port.to_string()));
    let numbers = format!(
        "{names} {verb} {counted} {units}, {} bytes of payload make {least} to {most}",
        payload.bytes
    );
    if counted < least {
        let hidden = rails.iter().find_map(|rail| Some((rail, rail.unknown.as_ref()?)));
        if let Some((rail, why)) = hidden {
            let why = format!("{numbers}; the rest may be on {}: {why}", rail.port);
            return (Verdict::Unknown, why);
        }
        if let Some(rail) = rails.iter().find(|rail| rail.wrapped) {
            let why = format!("{numbers}; the counter of {} began anew, perhaps more than once", rail.port);
            return (Verdict::Unknown, why);
        }
        if same_port {
            let why = format!("{numbers}; both ends are on that port, which may not count what stays inside");
            return (Verdict::Unknown, why);
        }
        let counts = elsewhere.iter().map(|count| {
            let unit = count.unit.map_or("", CountUnit::name);
            format!("{} {} {unit}", count.port, count.counted.unwrap_or(0))
        });
        let why = match elsewhere.as_slice() {
            [] => format!("{numbers}: the data took another path"),
            _ => format!("{numbers}: the data took another path; {verb} elsewhere: {}", join(counts)),
        };
        return (Verdict::Contradicted, why);
    }
    let surplus = counted.saturating_sub(most);
    if surplus >= least {
        let why = format!(
            "{numbers}; {surplus} more than that are somebody else's or were sent again, as much as the payload: it cannot be told apart"
        );
        return (Verdict::Unknown, why);
    }
    (Verdict::Verified, numbers)
}

/// No rail has a number, or they have numbers of different kinds.
fn without_count(rails: &[PortCount]) -> String {
    if rails.is_empty() {
        return "there is no device to ask".to_owned();
    }
    if rails.iter().all(|rail| rail.unknown.is_none()) {
        return "some rails count bytes and some packets".to_owned();
    }
    let unknown = rails.iter().filter_map(|rail| {
        let counter = rail.counter.as_deref().map_or(String::new(), |counter| format!(" ({counter})"));
        Some(format!("{}{counter}: {}", rail.port, rail.unknown.as_ref()?))
    });
    join(unknown)
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for CounterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_payload: Vec<_> =
            [&self.sent, &self.received].into_iter().filter(|d| d.payload.bytes > 0).collect();
        match with_payload.as_slice() {
            [] => write!(f, "{}: {}", self.verdict, self.sent.reason),
            [one] => write!(f, "{}: {}", self.verdict, one.reason),
            several => {
                write!(f, "{}: {}", self.verdict, join(several.iter().map(|d| d.reason.clone())))
            }
        }
    }
}
