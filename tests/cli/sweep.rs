//! `landfall sweep` and `landfall verify` on loopback.

use serde_json::Value;

use crate::bench_server::Server;
use crate::program::{output, stderr, stdout};
use crate::xml;

#[test]
fn a_sweep_measures_every_combination_and_names_the_best() {
    let server = Server::start(&[]);
    let file = std::env::temp_dir().join(format!("landfall-sweep-{}.svg", std::process::id()));
    let path = file.to_str().unwrap();
    let lists =
        ["--op", "write,read", "--descriptors", "1,3", "--in-flight", "1,2", "-q", "1,2", "--size", "4K,64K"];
    let mut words = vec!["sweep", &server.address, "--duration", "20ms", "--json", "--plot", path];
    words.extend(lists);
    let run = output(&words);
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    let document: Value = serde_json::from_str(&stdout(&run)).unwrap();
    let rows = document["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &document["cells"], &document["error"]), (32, &Value::from(32), &Value::Null));
    let mut seen: Vec<String> = Vec::new();
    for row in rows {
        let names = ["op", "descriptors", "in_flight", "qps", "block_bytes"];
        seen.push(names.map(|name| row[name].to_string()).join(" "));
        let report = &row["report"];
        let transfers = report["operations"].as_u64().unwrap();
        let descriptors = row["descriptors"].as_u64().unwrap();
        let bytes = row["block_bytes"].as_u64().unwrap() * descriptors;
        assert_eq!(report["bytes"].as_u64().unwrap(), transfers * bytes, "{row}");
        // No two blocks are neighbours: each takes a work request, or more.
        if row["op"] == "write" {
            assert!(report["wrs"].as_u64().unwrap() >= transfers * descriptors, "{row}");
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 32);
    let speed = |row: &Value| row["landed_gb_s"].as_f64().unwrap();
    let best = document["best"].as_u64().unwrap() as usize;
    assert!(rows.iter().all(|row| speed(row) <= speed(&rows[best])));
    assert_eq!(document["best_of"].as_array().unwrap().len(), 2);
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    xml::elements(&svg).unwrap_or_else(|why| panic!("{why}: {svg}"));
    assert_eq!(svg.matches("class=\"bar\"").count() + svg.matches("class=\"best\"").count(), 32);
}

#[test]
fn a_sweep_says_beforehand_how_long_it_takes() {
    let server = Server::start(&[]);
    let words = ["sweep", &server.address, "--duration", "10ms", "--op", "write", "--size", "4K", "-q", "1"];
    let run = output(&words);
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    let text = stdout(&run);
    assert!(text.starts_with("4 combinations of 10ms each: about 1 s"), "{text}");
    assert!(text.contains("\nbest write "), "{text}");
}

#[test]
fn k9_verify_says_that_the_soft_provider_is_not_rdma() {
    let server = Server::start(&[]);
    for (transport, word) in [("tcp", "TCP"), ("shm", "shared memory")] {
        let words = ["verify", &server.address, "--duration", "20ms", "--transport", transport];
        let run = output(&words);
        assert_eq!(run.status.code(), Some(3), "{}", stderr(&run));
        let text = stdout(&run);
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("unknown: it is not RDMA") && last.contains(word), "{text}");
        let run = output(&[&words[..], &["--json"]].concat());
        assert_eq!(run.status.code(), Some(3), "{}", stderr(&run));
        let document: Value = serde_json::from_str(&stdout(&run)).unwrap();
        assert_eq!(document["verdict"], "unknown");
        assert_eq!(document["path"]["transport"], transport);
        assert!(document["transfer"]["bytes"].as_u64().unwrap() > 0 && document["control"].is_null());
    }
}
