//! What an examination says: checks with verdicts, and what they rest on. No I/O.

use std::fmt;

use serde::Serialize;

/// How it is with one thing. The order is that of gravity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Nothing that could be read tells.
    Unknown,
    /// It works, but worse than it could, or not for everything.
    Warning,
    /// Something that is wanted does not work like this.
    Failure,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Failure => "failure",
        })
    }
}

/// What was read, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Evidence {
    /// A file, a directory, or a call.
    pub source: String,
    /// What it said; for a file that could not be read, why.
    pub found: String,
}

impl Evidence {
    pub(super) fn new(source: impl Into<String>, found: impl Into<String>) -> Self {
        Self { source: clean(source), found: clean(found) }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.found)
    }
}

/// What a file says is quoted, and must not reach a terminal as a command.
fn clean(text: impl Into<String>) -> String {
    let text = text.into();
    if text.contains(char::is_control) { text.replace(char::is_control, " ") } else { text }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// Which check it is, as the table of the [module](super) has it.
    pub name: &'static str,
    /// The device that it is about, where it is about one.
    pub device: Option<String>,
    /// The port that it is about, where it is about one.
    pub port: Option<u8>,
    /// How it is.
    pub verdict: Verdict,
    /// What was found, in a sentence.
    pub summary: String,
    /// What that rests on.
    pub evidence: Vec<Evidence>,
    /// What to do. `None` when all is well, and where nothing can be done.
    pub fix: Option<String>,
}

impl Check {
    fn new(verdict: Verdict, name: &'static str, summary: impl Into<String>) -> Self {
        let summary = clean(summary);
        Self { name, device: None, port: None, verdict, summary, evidence: Vec::new(), fix: None }
    }

    pub(super) fn ok(name: &'static str, summary: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, name, summary)
    }

    pub(super) fn unknown(name: &'static str, summary: impl Into<String>) -> Self {
        Self::new(Verdict::Unknown, name, summary)
    }

    pub(super) fn warning(name: &'static str, summary: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(clean(fix)), ..Self::new(Verdict::Warning, name, summary) }
    }

    pub(super) fn failure(name: &'static str, summary: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(clean(fix)), ..Self::new(Verdict::Failure, name, summary) }
    }

    /// A failure where it matters, a warning elsewhere.
    pub(super) fn graded(
        matters: bool,
        name: &'static str,
        summary: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        if matters { Self::failure(name, summary, fix) } else { Self::warning(name, summary, fix) }
    }

    pub(super) fn of(mut self, device: &str) -> Self {
        self.device = Some(device.to_owned());
        self
    }

    pub(super) fn of_port(self, device: &str, port: u8) -> Self {
        Self { port: Some(port), ..self.of(device) }
    }

    pub(super) fn with(mut self, evidence: impl IntoIterator<Item = Evidence>) -> Self {
        self.evidence.extend(evidence);
        self
    }

    /// What it is about: the host, a device, or a port of one.
    pub fn subject(&self) -> String {
        match (&self.device, self.port) {
            (None, _) => String::new(),
            (Some(device), None) => device.clone(),
            (Some(device), Some(port)) => format!("{device} port {port}"),
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subject = self.subject();
        let of = if subject.is_empty() { String::new() } else { format!(" of {subject}") };
        write!(f, "{}: {}{of}: {}", self.verdict, self.name, self.summary)?;
        self.fix.as_ref().map_or(Ok(()), |fix| write!(f, "; {fix}"))
    }
}

/// All that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The gravest of the checks' verdicts, unknown left out: what nobody knows makes no host worse.
    pub verdict: Verdict,
    /// In the order in which they are best mended: what a check needs comes before it.
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(checks: Vec<Check>) -> Self {
        let known = checks.iter().map(|check| check.verdict).filter(|verdict| *verdict != Verdict::Unknown);
        Self { verdict: known.max().unwrap_or(Verdict::Ok), checks }
    }
}
