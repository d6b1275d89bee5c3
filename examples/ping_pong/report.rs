//! Percentiles, and how they are shown.

use std::time::Duration;

use landfall::device::Device;
use serde_json::json;

use crate::args::Args;
use crate::exchange::Plan;

/// What carried the bytes of a measurement.
pub(crate) struct Way {
    pub(crate) transport: &'static str,
    pub(crate) reason: String,
}

pub(crate) struct Report {
    lines: Vec<(Plan, Way, Vec<Duration>)>,
}

impl Report {
    pub(crate) fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// `times` without the warm-up, at least one.
    pub(crate) fn add(&mut self, plan: Plan, way: Way, mut times: Vec<Duration>) {
        times.sort_unstable();
        self.lines.push((plan, way, times));
    }

    /// That of every measurement, and why; `mixed` where they differ, each of which says its own.
    fn transport(&self) -> (&str, &str) {
        let Some(((_, first, _), others)) = self.lines.split_first() else { return ("", "") };
        match others.iter().all(|(_, way, _)| way.transport == first.transport) {
            true => (first.transport, &first.reason),
            false => ("mixed", "the measurements differ"),
        }
    }

    pub(crate) fn json(&self, args: &Args, device: &Device) -> String {
        let us = |t: Duration| t.as_nanos() as f64 / 1e3;
        let results: Vec<_> = self
            .lines
            .iter()
            .map(|(plan, way, times)| {
                json!({
                    "op": plan.op,
                    "transport": way.transport,
                    "size": plan.size,
                    "iters": times.len(),
                    "min_us": us(times[0]),
                    "p50_us": us(percentile(times, 0.5)),
                    "p99_us": us(percentile(times, 0.99)),
                    "p999_us": us(percentile(times, 0.999)),
                    "max_us": us(times[times.len() - 1]),
                })
            })
            .collect();
        let (transport, reason) = self.transport();
        let object = json!({
            "transport": transport,
            "transport_reason": reason,
            "device": device.name(),
            "profile": device.profile().map(|p| p.to_string()),
            "bootstrap": bootstrap(args, device),
            "mode": mode(args),
            "spin_us": args.spin.as_micros() as u64,
            "results": results,
        });
        format!("{object}\n")
    }

    pub(crate) fn text(&self, args: &Args, device: &Device) -> String {
        let (transport, reason) = self.transport();
        let mut text = format!(
            "{transport} over {}, bootstrap {}, {} mode; round trips in µs\nwhy {transport}: {reason}\n",
            device.name(),
            bootstrap(args, device),
            mode(args)
        );
        text +=
            &format!("{:<6}{:>10}{:>10}{:>11}{:>11}{:>11}\n", "op", "bytes", "rounds", "p50", "p99", "p99.9");
        for (plan, _, times) in &self.lines {
            let us = |p| percentile(times, p).as_nanos() as f64 / 1e3;
            let op = format!("{:?}", plan.op).to_lowercase();
            text += &format!(
                "{op:<6}{:>10}{:>10}{:>11.1}{:>11.1}{:>11.1}\n",
                plan.size,
                times.len(),
                us(0.5),
                us(0.99),
                us(0.999)
            );
        }
        text
    }
}

fn bootstrap(args: &Args, device: &Device) -> &'static str {
    if args.device.by_manager(device) { "cm" } else { "oob" }
}

fn mode(args: &Args) -> &'static str {
    if args.spin.is_zero() { "event" } else { "spin" }
}

/// The smallest time that at least the share `p` of all does not exceed. Of fewer than a thousand, p99.9 is the last.
fn percentile(sorted: &[Duration], p: f64) -> Duration {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}
