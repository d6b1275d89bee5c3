//! What `landfall doctor` says of a made-up host, as JSON and as text.

use serde_json::Value;

use crate::program::{output, stderr, stdout};
use crate::roots::Root;

/// A check that is not ok: its name and its verdict.
pub(crate) type Wrong = (&'static str, &'static str);

pub(crate) struct Examined {
    pub(crate) status: i32,
    pub(crate) text: String,
    pub(crate) checks: Vec<Check>,
}

#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) verdict: String,
    pub(crate) summary: String,
    /// `source: found`.
    pub(crate) evidence: Vec<String>,
    pub(crate) fix: Option<String>,
}

/// Runs the doctor twice: both outputs have to say the same, and end alike.
#[track_caller]
pub(crate) fn examine(root: &Root, args: &[&str]) -> Examined {
    let root = root.path().to_str().unwrap();
    let all: Vec<&str> = ["doctor", "--root", root].iter().chain(args).copied().collect();
    let text = output(&all);
    let json = output(&[&all[..], &["--json"]].concat());
    assert_eq!((stderr(&text).as_str(), stderr(&json).as_str()), ("", ""));
    assert_eq!(text.status.code(), json.status.code());
    let report: Value = serde_json::from_str(&stdout(&json)).expect("JSON and nothing else");
    let checks: Vec<Check> = report["checks"].as_array().unwrap().iter().map(Check::of).collect();
    let failed = checks.iter().any(|check| check.verdict == "failure");
    assert_eq!(json.status.code(), Some(i32::from(failed)), "{report:#}");
    let examined = Examined { status: json.status.code().unwrap(), text: stdout(&text), checks };
    for check in &examined.checks {
        assert!(examined.text.contains(&check.summary), "{} is not in {}", check.summary, examined.text);
        assert!(!check.evidence.is_empty(), "{check:?}");
    }
    examined
}

impl Check {
    fn of(value: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let evidence = value["evidence"].as_array().unwrap().iter();
        Self {
            name: text(&value["name"]),
            verdict: text(&value["verdict"]),
            summary: text(&value["summary"]),
            evidence: evidence.map(|e| format!("{}: {}", text(&e["source"]), text(&e["found"]))).collect(),
            fix: value["fix"].as_str().map(str::to_owned),
        }
    }
}

impl Examined {
    /// In the order of the report.
    pub(crate) fn not_ok(&self) -> Vec<(&str, &str)> {
        let wrong = self.checks.iter().filter(|check| check.verdict != "ok");
        wrong.map(|check| (check.name.as_str(), check.verdict.as_str())).collect()
    }

    #[track_caller]
    pub(crate) fn check(&self, name: &str) -> Check {
        self.checks.iter().find(|check| check.name == name).expect("there is such a check").clone()
    }

    /// The check of that name that fails: a device may have several of one name.
    #[track_caller]
    pub(crate) fn failure(&self, name: &str) -> Check {
        let is = |check: &&Check| check.name == name && check.verdict == "failure";
        self.checks.iter().find(is).expect("it fails").clone()
    }
}
