//! The program on real kernel drivers: runs in the lab, see tests/lab/README.md.

use serde_json::Value;

use crate::program::{output, stderr, stdout};

fn env(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: this runs in the guest, see tests/lab/README.md"))
}

#[track_caller]
fn json(args: &[&str]) -> (Option<i32>, Value) {
    let ended = output(&[args, &["--json"]].concat());
    let text = stdout(&ended);
    let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text} {}", stderr(&ended)));
    (ended.status.code(), value)
}

#[test]
#[ignore = "needs the lab"]
fn devices_shows_the_labs_devices_opened() {
    let kind = env("RDMA_KIND");
    let (status, json) = json(&["devices"]);
    assert_eq!(status, Some(0));
    for name in [env("RDMA_DEV0"), env("RDMA_DEV1")] {
        let device = json["rdma"]
            .as_array()
            .unwrap()
            .iter()
            .find(|d| d["name"] == name.as_str())
            .expect("it is listed");
        let transport = if kind == "siw" { "verbs-iwarp" } else { "verbs-roce" };
        assert_eq!(device["transport"], transport, "{device:#}");
        assert_eq!(device["capabilities"]["out_of_band"], kind == "rxe", "{device:#}");
        assert_eq!(device["ports"][0]["state"], "ACTIVE", "{device:#}");
        assert!(
            device["ports"][0]["gids"].as_array().unwrap().iter().any(|gid| gid["chosen"] == true),
            "{device:#}"
        );
    }
}

#[test]
#[ignore = "needs the lab"]
fn doctor_finds_the_labs_devices_right() {
    let (kind, name) = (env("RDMA_KIND"), env("RDMA_DEV0"));
    let (status, report) = json(&["doctor", "--device", &name, "--require-rdma"]);
    assert_eq!(status, Some(0), "{report:#}");
    let of = |check: &str| {
        let all = report["checks"].as_array().unwrap();
        let found = all.iter().find(|c| c["name"] == check).unwrap_or_else(|| panic!("no check {check}"));
        found["verdict"].as_str().unwrap().to_owned()
    };
    for check in [
        "devices",
        "libraries",
        "modules",
        "provider",
        "permissions",
        "opens",
        "capabilities",
        "port",
        "gid",
        "memlock",
    ] {
        assert_eq!(of(check), "ok", "{check}: {report:#}");
    }
    // siw counts nothing.
    assert_eq!(of("counters"), if kind == "siw" { "unknown" } else { "ok" }, "{report:#}");
}

#[test]
#[ignore = "needs the lab"]
fn watch_reads_the_labs_counters() {
    let name = env("RDMA_DEV0");
    let (status, rates) = json(&["watch", "--device", &name, "--interval", "0.1", "--count", "1"]);
    assert_eq!((status, &rates[0]["device"]), (Some(0), &name.as_str().into()), "{rates}");
    let counted = rates[0]["sent"]["packets"].is_number();
    assert_eq!(counted, env("RDMA_KIND") == "rxe", "{rates}");
}
