//! The report, and a progress bar where there is a terminal to show it.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use landfall::kv::{KvChannel, KvEndpoint, Landed, PathReport};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::args::Args;
use crate::layerwise::Layerwise;

/// One request that the decode side has read.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Pulled {
    pub(crate) bytes: u64,
    pub(crate) descriptors: u64,
    pub(crate) wrs: u64,
    pub(crate) most_in_flight: u32,
    pub(crate) seconds: f64,
    pub(crate) method: String,
    pub(crate) why: String,
}

pub(crate) struct Report {
    profile: String,
    requests: u64,
    descriptors: u64,
    wrs: u64,
    landed_bytes: u64,
    local: Duration,
    landed: Duration,
    wrong: u64,
    first_wrong: Option<String>,
    /// The far end has counted the same arrivals and bytes (and the same SHA-256 of a file).
    agreed: bool,
    sha256: Option<String>,
    /// How the last request was read, why, and how many READs were in flight at most.
    read: Option<(String, String, u32)>,
    /// With `--layerwise`.
    pub(crate) layerwise: Option<Layerwise>,
}

impl Report {
    pub(crate) fn new(endpoint: &KvEndpoint) -> Self {
        let profile = endpoint.device().profile().map_or_else(String::new, |p| p.to_string());
        Self {
            profile,
            requests: 0,
            descriptors: 0,
            wrs: 0,
            landed_bytes: 0,
            local: Duration::ZERO,
            landed: Duration::ZERO,
            wrong: 0,
            first_wrong: None,
            agreed: false,
            sha256: None,
            read: None,
            layerwise: None,
        }
    }

    pub(crate) fn pulled(&mut self, pulled: Pulled) {
        self.requests += 1;
        self.descriptors += pulled.descriptors;
        self.wrs += pulled.wrs;
        self.landed_bytes += pulled.bytes;
        let took = Duration::try_from_secs_f64(pulled.seconds).unwrap_or_default();
        self.local += took;
        self.landed += took;
        let most = self.read.take().map_or(0, |(.., most)| most).max(pulled.most_in_flight);
        self.read = Some((pulled.method, pulled.why, most));
    }

    pub(crate) fn add(&mut self, landed: &Landed) {
        self.requests += 1;
        self.descriptors += landed.descriptors;
        self.wrs += landed.wrs;
        self.landed_bytes += landed.bytes;
        self.local += landed.local;
        self.landed += landed.landed;
    }

    pub(crate) fn verified(&mut self, wrong: u64, first: Option<String>) {
        self.wrong += wrong;
        if self.first_wrong.is_none() {
            self.first_wrong = first;
        }
    }

    pub(crate) fn finish(&mut self, same_digest: bool, arrivals: u64, bytes: u64, sha256: Option<String>) {
        let (more, more_bytes) = self.layerwise.as_ref().map_or((0, 0), |l| (l.requests, l.bytes));
        let counted = arrivals == self.requests + more && bytes == self.landed_bytes + more_bytes;
        self.agreed = same_digest && counted;
        self.sha256 = sha256;
    }

    /// Whether every block was right, and both sides have counted the same.
    pub(crate) fn is_verified(&self) -> bool {
        self.wrong == 0 && self.agreed
    }

    pub(crate) async fn print(&self, args: &Args, channel: &KvChannel) -> Result<(), Error> {
        let path = channel.verify_path().await;
        crate::print(&if args.json { self.json(args, &path) } else { self.text(args, &path) })
    }

    /// Bytes a second, in units of 10⁹, over the time from each call to its landing.
    fn gb_per_s(&self) -> f64 {
        let seconds = self.landed.as_secs_f64();
        if seconds > 0.0 { self.landed_bytes as f64 / seconds / 1e9 } else { 0.0 }
    }

    fn json(&self, args: &Args, path: &PathReport) -> String {
        let mut object = serde_json::json!({
            "transport": path.transport,
            "transport_reason": path.transport_reason,
            "profile": self.profile,
            "bootstrap": path.bootstrap,
            "bootstrap_reason": path.bootstrap_reason,
            "requests": self.requests,
            "descriptors": self.descriptors,
            "wrs": self.wrs,
            "landed_bytes": self.landed_bytes,
            "verified": self.is_verified(),
            "local_s": self.local.as_secs_f64(),
            "landed_s": self.landed.as_secs_f64(),
            "gb_per_s": self.gb_per_s(),
            "path": path,
        });
        if let Some(sha256) = &self.sha256 {
            object["sha256"] = sha256.as_str().into();
        }
        if let Some((method, why, most_in_flight)) = &self.read {
            object["read"] =
                serde_json::json!({ "method": method, "why": why, "most_in_flight": most_in_flight });
        }
        if let Some(layerwise) = &self.layerwise {
            object["layerwise"] = layerwise.json(args.layer_time);
        }
        format!("{object}\n")
    }

    fn text(&self, args: &Args, path: &PathReport) -> String {
        let mut text = format!(
            "{} requests, {} descriptors in {} work requests, {} bytes\n\
             local completion {:.3} s, landed {:.3} s, {:.2} GB/s\n\
             bootstrap {}: {}\n\
             path: {path}\n",
            self.requests,
            self.descriptors,
            self.wrs,
            self.landed_bytes,
            self.local.as_secs_f64(),
            self.landed.as_secs_f64(),
            self.gb_per_s(),
            path.bootstrap,
            path.bootstrap_reason
        );
        for (n, rail) in path.rails.iter().enumerate().filter(|_| path.rails.len() > 1) {
            text += &format!("rail {n}: {rail}\n");
        }
        for warning in &path.warnings {
            text += &format!("warning: {warning}\n");
        }
        if let Some(sha256) = &self.sha256 {
            text += &format!("sha256 {sha256}\n");
        }
        if let Some((method, why, most)) = &self.read {
            text += &format!("read by {method}: {why}; {most} in flight at most\n");
        }
        if let Some(layerwise) = &self.layerwise {
            text += &layerwise.text(args.layer_time);
        }
        text += &match (self.is_verified(), &self.first_wrong) {
            (true, _) => "verified: every block landed in its place\n".to_owned(),
            (false, Some(first)) => {
                format!("NOT verified: {} blocks are wrong, the first is {first}\n", self.wrong)
            }
            (false, None) => "NOT verified: the far end counted other arrivals, bytes or digest\n".to_owned(),
        };
        text
    }
}

/// A bar on standard error, when that is a terminal.
pub(crate) struct Progress {
    total: u64,
    done: u64,
    start: Instant,
    show: bool,
}

impl Progress {
    pub(crate) fn new(args: &Args, total: u64) -> Self {
        let show = !args.quiet && std::io::stderr().is_terminal();
        Self { total, done: 0, start: Instant::now(), show }
    }

    pub(crate) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if !self.show {
            return;
        }
        const WIDTH: u64 = 40;
        let filled = (self.done * WIDTH).checked_div(self.total).unwrap_or(WIDTH).min(WIDTH) as usize;
        let bar = "#".repeat(filled) + &"-".repeat(WIDTH as usize - filled);
        let seconds = self.start.elapsed().as_secs_f64();
        let mut err = std::io::stderr().lock();
        // A terminal that went away is no reason to stop.
        let _ = write!(
            err,
            "\r[{bar}] {} of {} MB, {seconds:.1} s",
            self.done / 1_000_000,
            self.total / 1_000_000
        );
        let _ = err.flush();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.show && self.done > 0 {
            let _ = writeln!(std::io::stderr());
        }
    }
}
