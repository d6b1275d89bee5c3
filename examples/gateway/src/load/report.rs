//! The report of a load: counts, and how long things took.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::{Kills, LoadArgs, LoadError, Outcome};

/// What came of all requests.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub transport: String,
    pub seconds: f64,
    pub concurrency: usize,
    pub requests: u64,
    pub answered: u64,
    /// Of those, the ones that took more than one attempt.
    pub retried: u64,
    /// By status.
    pub refused: BTreeMap<u16, u64>,
    /// By status and message; 0 is an error at the end of a stream.
    pub failed: BTreeMap<String, u64>,
    /// Of those, the ones that no lost worker explains: requests that are right and were called wrong, answers of which a second
    /// attempt gave other tokens.
    pub faults: u64,
    pub wrong: u64,
    pub cut: u64,
    pub hung: u64,
    /// The first of them, in words.
    pub first_bad: Option<String>,
    pub killed: u64,
    pub frozen: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub kv_bytes: u64,
    pub paths: BTreeMap<String, u64>,
    /// Milliseconds.
    pub ttft: Spread,
    pub took: Spread,
    pub kv_local: Spread,
    pub kv_landed: Spread,
    #[serde(skip)]
    samples: Samples,
}

/// Milliseconds: the median, the 99th percentile and the greatest.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Spread {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

#[derive(Clone, Debug, Default)]
struct Samples {
    ttft: Vec<f64>,
    took: Vec<f64>,
    kv_local: Vec<f64>,
    kv_landed: Vec<f64>,
}

impl Spread {
    fn of(samples: &mut [f64]) -> Self {
        samples.sort_by(f64::total_cmp);
        // The smallest that is at least as great as that part of all.
        let at = |part: f64| {
            let rank = (part * samples.len() as f64).ceil() as usize;
            samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

impl Report {
    pub(super) fn new(args: &LoadArgs) -> Self {
        let transport = args.url.clone().unwrap_or_else(|| args.transport.to_string());
        Self { transport, concurrency: args.concurrency, ..Self::default() }
    }

    pub(super) fn add(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            self.requests += 1;
            match outcome {
                Outcome::Answered { ttft, took, usage } => {
                    let under = &usage.landfall;
                    self.answered += 1;
                    self.retried += u64::from(under.attempts > 1);
                    self.prompt_tokens += u64::from(usage.prompt_tokens);
                    self.completion_tokens += u64::from(usage.completion_tokens);
                    self.kv_bytes += under.kv.bytes;
                    *self.paths.entry(under.kv.path.clone()).or_default() += 1;
                    self.samples.ttft.push(ttft.as_secs_f64() * 1e3);
                    self.samples.took.push(took.as_secs_f64() * 1e3);
                    self.samples.kv_local.push(under.kv.local_us as f64 / 1e3);
                    self.samples.kv_landed.push(under.kv.landed_us as f64 / 1e3);
                }
                Outcome::Refused { status, .. } => *self.refused.entry(status).or_default() += 1,
                Outcome::Failed { status, code, message } => {
                    if (400..500).contains(&status) || code == "diverged" {
                        self.faults += 1;
                        self.first_bad.get_or_insert_with(|| format!("{status} {code}: {message}"));
                    }
                    *self.failed.entry(format!("{status} {message}")).or_default() += 1;
                }
                Outcome::Wrong { text, expected } => {
                    self.wrong += 1;
                    self.first_bad.get_or_insert_with(|| format!("{text:?} came, {expected:?} was expected"));
                }
                Outcome::Cut(why) => {
                    self.cut += 1;
                    self.first_bad.get_or_insert(why);
                }
                Outcome::Hung => {
                    self.hung += 1;
                    self.first_bad.get_or_insert_with(|| "no answer, long after the deadline".to_owned());
                }
            }
        }
    }

    pub(super) fn finish(&mut self, took: Duration, kills: Kills) {
        self.seconds = took.as_secs_f64();
        (self.killed, self.frozen) = (kills.killed, kills.frozen);
        self.ttft = Spread::of(&mut self.samples.ttft);
        self.took = Spread::of(&mut self.samples.took);
        self.kv_local = Spread::of(&mut self.samples.kv_local);
        self.kv_landed = Spread::of(&mut self.samples.kv_landed);
    }

    /// Requests that were neither answered rightly nor refused clearly.
    pub fn bad(&self) -> u64 {
        self.wrong + self.cut + self.hung + self.faults
    }

    /// Whether it was a load that all went well under. With `kill_every`, workers have to have been killed.
    ///
    /// # Errors
    /// [`LoadError::Bad`], [`LoadError::Unanswered`], [`LoadError::NoKills`].
    pub fn verdict(&self, kill_every: Option<f64>) -> Result<(), LoadError> {
        if self.bad() > 0 {
            return Err(LoadError::Bad(self.bad()));
        }
        if self.answered == 0 {
            return Err(LoadError::Unanswered(self.requests));
        }
        match kill_every {
            Some(every) if self.killed + self.frozen == 0 => {
                Err(LoadError::NoKills { every, seconds: self.seconds })
            }
            _ => Ok(()),
        }
    }

    /// As a line of JSON.
    pub fn json(&self) -> String {
        // Numbers and words: they can always be written.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |counts: &BTreeMap<u16, u64>| counts.values().sum::<u64>();
        writeln!(f, "{:.0} s, {} at once, transport {}", self.seconds, self.concurrency, self.transport)?;
        if self.killed + self.frozen > 0 {
            writeln!(f, "workers killed {}, frozen and then killed {}", self.killed, self.frozen)?;
        }
        writeln!(
            f,
            "requests {}: answered {} ({} after a worker was lost), refused {}, failed {}, faults {}, wrong {}, cut off {}, hung {}",
            self.requests,
            self.answered,
            self.retried,
            sum(&self.refused),
            self.failed.values().sum::<u64>(),
            self.faults,
            self.wrong,
            self.cut,
            self.hung
        )?;
        for (status, count) in &self.refused {
            writeln!(f, "  refused with {status}: {count}")?;
        }
        for (what, count) in &self.failed {
            writeln!(f, "  failed: {count} of {what}")?;
        }
        if let Some(bad) = &self.first_bad {
            writeln!(f, "  the first bad one: {bad}")?;
        }
        let per_second = |n: u64| n as f64 / self.seconds.max(1e-9);
        writeln!(
            f,
            "tokens {} in, {} out, {:.1} and {:.1} a second; KV cache {:.1} MB, paths {:?}",
            self.prompt_tokens,
            self.completion_tokens,
            per_second(self.prompt_tokens),
            per_second(self.completion_tokens),
            self.kv_bytes as f64 / 1e6,
            self.paths
        )?;
        writeln!(f, "{:<28}{:>10}{:>10}{:>10}", "milliseconds", "p50", "p99", "max")?;
        for (name, spread) in [
            ("time to the first token", self.ttft),
            ("whole answer", self.took),
            ("KV, local completion", self.kv_local),
            ("KV, landed", self.kv_landed),
        ] {
            writeln!(f, "{name:<28}{:>10.2}{:>10.2}{:>10.2}", spread.p50, spread.p99, spread.max)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered() -> Outcome {
        Outcome::Answered { ttft: Duration::ZERO, took: Duration::ZERO, usage: Box::default() }
    }

    fn failed(status: u16, code: &str) -> Outcome {
        Outcome::Failed { status, code: code.to_owned(), message: "why".to_owned() }
    }

    fn verdict(outcomes: Vec<Outcome>, kills: Kills, every: Option<f64>) -> Result<(), LoadError> {
        let mut report = Report::default();
        report.add(outcomes);
        report.finish(Duration::from_secs(1), kills);
        report.verdict(every)
    }

    #[test]
    fn wrong_answers_and_none_and_no_kills_fail_a_load() {
        let (none, one) = (Kills::default(), Kills { killed: 0, frozen: 1 });
        // What lost workers and a full gateway explain.
        let busy = Outcome::Refused { status: 429, retry_after: 1 };
        for code in ["worker_lost", "unavailable", "deadline"] {
            verdict(vec![answered(), failed(0, code), failed(504, code), busy.clone()], one, Some(1.0))
                .unwrap();
        }
        // Tokens that are others; requests that are right.
        for bad in
            [failed(0, "diverged"), failed(502, "diverged"), failed(400, "invalid_value"), failed(404, "x")]
        {
            let error = verdict(vec![answered(), bad], none, None).unwrap_err();
            assert!(matches!(error, LoadError::Bad(1)), "{error}");
        }
        let error = verdict(vec![busy, failed(504, "deadline")], none, None).unwrap_err();
        assert!(matches!(error, LoadError::Unanswered(2)), "{error}");
        assert!(matches!(verdict(Vec::new(), none, None), Err(LoadError::Unanswered(0))));
        let error = verdict(vec![answered()], none, Some(6.0)).unwrap_err();
        assert!(error.to_string().contains("--kill-every 6"), "{error}");
        verdict(vec![answered()], none, None).unwrap();
    }
}
