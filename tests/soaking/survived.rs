//! What a soak has survived, as a line and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use crate::Args;
use crate::traffic::said::{Counts, Said};

/// Everything that was survived, and what was not.
#[derive(Default)]
pub struct Survived {
    pub seconds: f64,
    pub laps: u64,
    pub counts: Counts,
    pub kills: u64,
    pub stops: u64,
    pub links: u64,
    /// Processes that were compared with themselves.
    pub levels: u64,
    pub operations: BTreeMap<String, u64>,
    pub mismatches: Vec<String>,
    pub leaks: Vec<String>,
}

impl Survived {
    /// What was said in a lap.
    pub fn add(&mut self, mut said: Said, lap: &str) {
        self.laps += 1;
        self.counts += said.counts();
        self.mismatches.extend(said.bad.drain(..).map(|what| format!("{lap}: {what}")));
        self.leaks.extend(said.leaks.drain(..).map(|what| format!("{lap}: {what}")));
    }

    pub fn is_clean(&self) -> bool {
        self.mismatches.is_empty() && self.leaks.is_empty()
    }

    fn transfers(&self) -> u64 {
        self.counts.writes + self.counts.layered + self.counts.reads
    }

    fn bytes(&self) -> u64 {
        self.counts.bytes
    }

    pub fn to_json(&self, args: &Args, ended: bool) -> serde_json::Value {
        serde_json::json!({
            "seed": args.common.seed,
            "seconds": self.seconds,
            "device": args.device,
            "profile": args.common.profile.map(|p| p.to_string()),
            "transport": args.common.transport.map(|t| t.to_string()),
            "laps": self.laps,
            "transfers": self.transfers(),
            "bytes": self.bytes(),
            "writes": self.counts.writes,
            "layered": self.counts.layered,
            "reads": self.counts.reads,
            "not_delivered": self.counts.lost,
            "not_read": self.counts.unread,
            "in_doubt": self.counts.doubts,
            "arrivals": self.counts.arrivals,
            "rails_lost": self.counts.rails_lost,
            "rails_back": self.counts.rails_back,
            "operations": self.operations,
            "kills": self.kills,
            "stops": self.stops,
            "channels": self.links,
            "level_checks": self.levels,
            "mismatches": self.mismatches,
            "leaks": self.leaks,
            "came_to_its_end": ended,
        })
    }
}

impl fmt::Display for Survived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, laps, counts, kills, stops, links, levels, .. } = self;
        write!(
            f,
            "{seconds:.0} s in {laps} laps: {} transfers ({:.1} MB): {counts}; {} operations; {kills} kills, {stops} stops, \
             {links} channels; {} mismatches, {} leaks in {levels} looks",
            self.transfers(),
            self.bytes() as f64 / 1e6,
            self.operations.values().sum::<u64>(),
            self.mismatches.len(),
            self.leaks.len(),
        )
    }
}
