//! The report, and a progress bar where there is a terminal to show it.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use landfall::kv::{KvChannel, KvEndpoint, Landed};

use crate::Error;
use crate::args::Args;

pub struct Report {
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
}

impl Report {
    pub fn new(_args: &Args, endpoint: &KvEndpoint) -> Self {
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
        }
    }

    pub fn add(&mut self, landed: &Landed) {
        self.requests += 1;
        self.descriptors += landed.descriptors;
        self.wrs += landed.wrs;
        self.landed_bytes += landed.bytes;
        self.local += landed.local;
        self.landed += landed.landed;
    }

    pub fn verified(&mut self, wrong: u64, first: Option<String>) {
        self.wrong += wrong;
        if self.first_wrong.is_none() {
            self.first_wrong = first;
        }
    }

    pub fn finish(&mut self, same_digest: bool, arrivals: u64, bytes: u64, sha256: Option<String>) {
        self.agreed = same_digest && arrivals == self.requests && bytes == self.landed_bytes;
        self.sha256 = sha256;
    }

    /// Prints the report; whether everything was verified.
    pub fn print(&self, args: &Args, channel: &KvChannel) -> Result<bool, Error> {
        let verified = self.wrong == 0 && self.agreed;
        let path = channel.path();
        let seconds = self.landed.as_secs_f64();
        let gb_per_s = if seconds > 0.0 { self.landed_bytes as f64 / seconds / 1e9 } else { 0.0 };
        if args.json {
            let mut object = serde_json::json!({
                "transport": path.transport,
                "profile": self.profile,
                "bootstrap": path.bootstrap,
                "requests": self.requests,
                "descriptors": self.descriptors,
                "wrs": self.wrs,
                "landed_bytes": self.landed_bytes,
                "verified": verified,
                "local_s": self.local.as_secs_f64(),
                "landed_s": seconds,
                "gb_per_s": gb_per_s,
                "path": path,
            });
            if let Some(sha256) = &self.sha256 {
                object["sha256"] = sha256.as_str().into();
            }
            println!("{object}");
        } else {
            println!(
                "{} requests, {} descriptors in {} work requests, {} bytes",
                self.requests, self.descriptors, self.wrs, self.landed_bytes
            );
            println!(
                "local completion {:.3} s, landed {seconds:.3} s, {gb_per_s:.2} GB/s",
                self.local.as_secs_f64()
            );
            println!("path: {path}");
            if let Some(sha256) = &self.sha256 {
                println!("sha256 {sha256}");
            }
            match (verified, &self.first_wrong) {
                (true, _) => println!("verified: every block landed in its place"),
                (false, Some(first)) => {
                    println!("NOT verified: {} blocks are wrong, the first is {first}", self.wrong)
                }
                (false, None) => {
                    println!("NOT verified: the far end counted other arrivals, bytes or digest")
                }
            }
        }
        Ok(verified)
    }
}

/// A bar on standard error, when that is a terminal.
pub struct Progress {
    total: u64,
    done: u64,
    start: Instant,
    show: bool,
}

impl Progress {
    pub fn new(args: &Args, total: u64) -> Self {
        let show = !args.quiet && std::io::stderr().is_terminal();
        Self { total, done: 0, start: Instant::now(), show }
    }

    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if !self.show {
            return;
        }
        const WIDTH: u64 = 40;
        let filled = (self.done * WIDTH).checked_div(self.total).unwrap_or(WIDTH).min(WIDTH) as usize;
        let bar = "#".repeat(filled) + &"-".repeat(WIDTH as usize - filled);
        let end = if self.done >= self.total { "\n" } else { "" };
        let seconds = self.start.elapsed().as_secs_f64();
        let mut err = std::io::stderr().lock();
        // A terminal that went away is no reason to stop.
        let _ = write!(
            err,
            "\r[{bar}] {} of {} MB, {seconds:.1} s{end}",
            self.done / 1_000_000,
            self.total / 1_000_000
        );
        let _ = err.flush();
    }
}
