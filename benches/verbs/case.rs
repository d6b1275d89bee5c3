//! One case: what is measured. Data only.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    WriteBw,
    ReadBw,
    WriteLat,
    SendLat,
}

const OPS: [(Op, &str); 4] = [
    (Op::WriteBw, "write_bw"),
    (Op::ReadBw, "read_bw"),
    (Op::WriteLat, "write_lat"),
    (Op::SendLat, "send_lat"),
];

impl Op {
    pub fn name(self) -> &'static str {
        OPS.iter().find(|(op, _)| *op == self).map_or("", |(_, name)| name)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub op: Op,
    pub bytes: u64,
    pub qps: usize,
    /// Both ends poll instead of sleeping until the kernel wakes them.
    pub spin: bool,
    pub iterations: usize,
    /// READs that a queue pair may have in flight; as many as the device allows without.
    pub depth: Option<u8>,
}

impl Case {
    /// How long the ends poll before they sleep: longer than any case takes, or not at all.
    pub fn budget(&self) -> Duration {
        if self.spin { Duration::from_secs(30) } else { Duration::ZERO }
    }

    /// Sends outstanding on a queue pair: as many as perftest's default, over one or over all of several, but not under 16.
    pub fn window(&self) -> usize {
        (128 / self.qps).max(16)
    }

    /// The beginning of its lines.
    pub fn name(&self) -> String {
        let mode = if self.spin { "spin" } else { "event" };
        let depth = self.depth.map_or(String::new(), |depth| format!(".d{depth}"));
        format!("landfall.{}.{}.q{}{depth}.{mode}", self.op.name(), self.bytes, self.qps)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.spin { "spin" } else { "event" };
        write!(f, "{}:{}:{}:{mode}:{}", self.op.name(), self.bytes, self.qps, self.iterations)?;
        self.depth.map_or(Ok(()), |depth| write!(f, ":{depth}"))
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text}: OPERATION:BYTES:QPS:MODE:ITERATIONS[:DEPTH]; see --help");
        let words: Vec<&str> = text.split(':').collect();
        let (op, bytes, qps, mode, iterations, depth) = match *words.as_slice() {
            [op, bytes, qps, mode, iterations] => (op, bytes, qps, mode, iterations, None),
            [op, bytes, qps, mode, iterations, depth] => (op, bytes, qps, mode, iterations, Some(depth)),
            _ => return Err(wrong()),
        };
        let op = OPS.iter().find(|(_, name)| *name == op).ok_or_else(wrong)?.0;
        let number = |text: &str, most: u64| {
            text.parse().ok().filter(|n: &u64| (1..=most).contains(n)).ok_or_else(wrong)
        };
        let case = Self {
            op,
            bytes: number(bytes, 1 << 23)?,
            qps: number(qps, 64)? as usize,
            spin: match mode {
                "spin" => true,
                "event" => false,
                _ => return Err(wrong()),
            },
            iterations: number(iterations, 100_000_000)? as usize,
            depth: depth.map(|depth| number(depth, 255)).transpose()?.map(|depth| depth as u8),
        };
        match op {
            Op::WriteLat | Op::SendLat if case.qps != 1 => {
                Err(format!("{text}: a latency has one queue pair"))
            }
            _ if case.depth.is_some() && op != Op::ReadBw => {
                Err(format!("{text}: DEPTH is of READs: read_bw"))
            }
            Op::WriteLat if !case.spin => Err(format!("{text}: write_lat polls the payload: spin")),
            _ => Ok(case),
        }
    }
}
