//! `landfall bench`, `sweep` and `verify` on two RDMA devices of one host, named by `RDMA_DEV0` and `RDMA_DEV1`, the first of which
//! has the address `RDMA_IP0`. They fail where there are none.

use serde_json::Value;

use crate::bench_server::Server;
use crate::program::{output, stderr, stdout};

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} must be set: these tests run on RDMA devices"))
}

fn server() -> Server {
    Server::at(&format!("{}:0", env("RDMA_IP0")), &["--device", &env("RDMA_DEV0"), "--insecure"])
}

/// The document, and the exit status.
fn run(server: &Server, words: &[&str]) -> (Value, i32) {
    let device = env("RDMA_DEV1");
    let mut all = vec!["--json"];
    let at = words.iter().position(|word| *word == "ADDR").expect("a place for the address");
    all.extend(&words[..at]);
    all.push(&server.address);
    all.extend(&words[at + 1..]);
    all.extend(["--device", &device]);
    let run = output(&all);
    let document = serde_json::from_str(&stdout(&run));
    (
        document.unwrap_or_else(|why| panic!("{why}: {}", stderr(&run))),
        run.status.code().expect("it ended by itself"),
    )
}

#[test]
#[ignore = "needs RDMA devices"]
fn every_operation_is_measured_on_devices() {
    let server = server();
    for op in ["write", "read", "send"] {
        for way in [&[][..], &["--bidirectional", "-q", "2"]] {
            let words = ["bench", "connect", "ADDR", "--op", op, "--size", "2,4K,64K", "--duration", "200ms"];
            let (document, status) = run(&server, &[&words[..], way].concat());
            assert_eq!((status, &document["error"]), (0, &Value::Null), "{op}: {document}");
            assert_eq!(document["path"]["transport"], "verbs");
            assert_eq!(document["rows"].as_array().unwrap().len(), 3);
            for row in document["rows"].as_array().unwrap() {
                assert!(row["landed_gb_s"].as_f64().unwrap() > 0.0, "{row}");
                assert!(row["latency"]["landed"]["p50_us"].as_f64().unwrap() > 0.0, "{row}");
            }
        }
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn a_sweep_runs_on_devices() {
    let words =
        ["sweep", "ADDR", "--size", "16K", "--descriptors", "1,4", "-q", "1,2", "--duration", "100ms"];
    let (document, status) = run(&server(), &words);
    assert_eq!((status, document["rows"].as_array().unwrap().len()), (0, 16), "{document}");
}

/// rxe counts packets, and none of them for TCP; siw has no counter.
#[test]
#[ignore = "needs RDMA devices"]
fn k9_verify_says_what_the_devices_count() {
    let (document, status) = run(&server(), &["verify", "ADDR", "--duration", "500ms"]);
    assert!(document["control"]["payload"].as_u64().is_some_and(|bytes| bytes > 0), "{document}");
    if env("RDMA_DEV0").starts_with("rxe") {
        assert_eq!((status, &document["verdict"]), (0, &Value::from("verified")), "{document}");
        assert_eq!(document["here"]["unit"], "packets");
        assert!(
            document["control"]["counted"].as_u64() < document["control"]["least"].as_u64(),
            "{document}"
        );
    } else if env("RDMA_DEV0").starts_with("siw") {
        assert_eq!((status, &document["verdict"]), (3, &Value::from("unknown")), "{document}");
        assert!(document["reason"].as_str().unwrap().contains("no counter"), "{document}");
    } else {
        assert_eq!(status, 0, "{document}");
    }
}
