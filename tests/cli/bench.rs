//! `landfall bench`: two processes on loopback, every operation, and what a bad peer costs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use serde_json::Value;

use crate::bench_server::{LONG, Server};
use crate::program::{landfall, output, program, stderr, stdout};
use crate::xml;

/// A run that has to end well.
fn measured(server: &Server, options: &[&str]) -> Value {
    let mut words = vec!["--json", "bench", "connect", &server.address, "--duration", "50ms"];
    words.extend(options);
    let run = output(&words);
    assert_eq!(run.status.code(), Some(0), "{words:?}: {}", stderr(&run));
    assert_eq!(stderr(&run), "");
    serde_json::from_str(&stdout(&run)).expect("one document")
}

/// A direction's report adds up.
fn check_report(report: &Value, bytes: u64) {
    let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name} of {report}"));
    assert!(number("operations") >= 1.0, "{report}");
    assert_eq!(number("bytes"), number("operations") * bytes as f64, "{report}");
    assert_eq!(report["landed"]["samples"], report["operations"]);
    let landed = |name: &str| report["landed"][name].as_f64().unwrap();
    let ascending = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(landed);
    assert!(ascending[0] > 0.0 && ascending.is_sorted(), "{report}");
    if report["local"].is_object() {
        assert_eq!(report["local"]["samples"], report["operations"]);
        assert!(number("local_seconds") > 0.0, "{report}");
    }
}

#[test]
fn every_operation_is_measured_both_ways_against_one_server() {
    let mut server = Server::start(&[]);
    for op in ["write", "read", "send"] {
        for options in [&[][..], &["--bidirectional"], &["--transport", "tcp", "-q", "2"]] {
            let mut words = vec!["--op", op, "--size", "2,4K,1M", "--in-flight", "3"];
            words.extend(options);
            let document = measured(&server, &words);
            assert_eq!((&document["command"], &document["error"]), (&Value::from("bench"), &Value::Null));
            let rows = document["rows"].as_array().unwrap();
            assert_eq!(rows.len(), 3, "{document}");
            for (row, bytes) in rows.iter().zip([2, 4096, 1 << 20]) {
                assert_eq!((&row["op"], &row["bytes"]), (&Value::from(op), &Value::from(bytes)));
                assert!(row["landed_gb_s"].as_f64().unwrap() > 0.0, "{row}");
                check_report(&row["latency"], bytes);
                check_report(&row["stream"], bytes);
                assert_eq!(row["local_gb_s"].is_null(), op == "read", "a read has no earlier end: {row}");
                match options.contains(&"--bidirectional") {
                    true => check_report(&row["peer_stream"], bytes),
                    false => assert!(row["peer_stream"].is_null()),
                }
            }
            if options.contains(&"tcp") {
                assert_eq!(document["path"]["transport"], "tcp");
                assert_eq!(document["path"]["qps"].as_array().unwrap().len(), 2);
            }
        }
    }
    assert!(server.is_alive());
}

#[test]
fn every_profile_is_measured() {
    for profile in ["erdma-standard", "siw", "srd", "tiny"] {
        let server = Server::start(&["--profile", profile]);
        for op in ["write", "read", "send"] {
            let document = measured(&server, &["--profile", profile, "--op", op, "--size", "64K"]);
            check_report(&document["rows"][0]["stream"], 64 << 10);
            assert_eq!(document["path"]["profile"], profile);
        }
    }
}

#[test]
fn the_table_has_a_line_for_each_size_and_the_plot_is_a_diagram() {
    let server = Server::start(&[]);
    let file = std::env::temp_dir().join(format!("landfall-bench-{}.svg", std::process::id()));
    let path = file.to_str().unwrap();
    let run = output(&[
        "bench",
        "connect",
        &server.address,
        "--all",
        "--duration",
        "5ms",
        "--in-flight",
        "2",
        "--plot",
        path,
    ]);
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    let table = stdout(&run);
    assert!(!table.contains('\x1b') && !table.contains('\r'), "nobody watches: {table:?}");
    for size in ["2 B", "512 B", "1 KiB", "64 KiB", "8 MiB"] {
        assert_eq!(
            table.lines().filter(|l| l.trim_start().starts_with(&format!("{size} "))).count(),
            1,
            "{table}"
        );
    }
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let elements = xml::elements(&svg).unwrap_or_else(|why| panic!("{why}: {svg}"));
    assert_eq!(elements[0], "svg");
    // Each of the 23 sizes: two lines of bandwidth, four of latency.
    assert_eq!(elements.iter().filter(|name| *name == "circle").count(), 23 * 6);
    assert!(svg.contains("prefers-color-scheme:dark"));
}

#[test]
fn k5_a_server_that_is_killed_is_an_error_and_what_was_measured_is_kept() {
    for transport in ["shm", "tcp"] {
        let mut server = Server::start(&[]);
        let address = server.address.clone();
        let words = [
            "--json",
            "bench",
            "connect",
            &address,
            "--transport",
            transport,
            "--size",
            "4K,64K",
            "--duration",
            "3s",
        ];
        let client = landfall(&words).spawn().unwrap();
        server.until("write 64 KiB");
        server.kill();
        let run = client.wait_with_output().unwrap();
        assert_eq!(run.status.code(), Some(1), "{transport}: {}", stderr(&run));
        let complaint = stderr(&run);
        assert!(complaint.starts_with("landfall: ") && complaint.lines().count() == 1, "{complaint}");
        let document: Value = serde_json::from_str(&stdout(&run)).unwrap();
        assert_eq!(document["rows"].as_array().unwrap().len(), 1, "{document}");
        assert!(!document["error"].as_str().unwrap().is_empty(), "{document}");
    }
}

#[test]
fn b1_garbage_at_the_port_hurts_nobody() {
    let mut server = Server::start(&[]);
    let mut kept = Vec::new();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[], b"landfall"] {
        let mut stranger = TcpStream::connect(&server.address).unwrap();
        stranger.write_all(garbage).unwrap();
        kept.push(stranger);
    }
    let document = measured(&server, &["--size", "4K"]);
    check_report(&document["rows"][0]["stream"], 4096);
    // What is no hello is closed at once, and not answered for ever.
    let mut stranger = kept.swap_remove(1);
    stranger.set_read_timeout(Some(LONG)).unwrap();
    let closed = match stranger.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(closed);
    drop(kept);
    measured(&server, &["--size", "4K"]);
    assert!(server.is_alive());
}

/// Who is a landfall endpoint, and says on the control channel what is none of the measuring protocol.
#[test]
fn b1_a_client_that_speaks_nonsense_is_told_so_and_costs_the_others_nothing() {
    let mut server = Server::start(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use landfall::kv::{KvConfig, KvEndpoint, KvPool, Layout};
        for nonsense in [
            b"hello".to_vec(),
            vec![0xff; 1 << 20],
            br#"{"landfall_bench":99,"say":"hello"}"#.to_vec(),
            br#"{"landfall_bench":1,"say":{"drive":{"in_flight":4000000000,"millis":18446744073709551615}}}"#.to_vec(),
            br#"{"landfall_bench":1,"say":{"open":{"epoch":1,"shape":{"op":"write","block_bytes":18446744073709551615,
                "descriptors":4294967295,"in_flight":256,"both":true,"read_by":"auto","spin_us":0,"tcp":false}}}}"#
                .to_vec(),
            br#"{"landfall_bench":1,"say":"verify"}"#.to_vec(),
        ] {
            let pd = landfall::device::Device::open("soft").unwrap().alloc_pd().unwrap();
            let pool = KvPool::new(&pd, Layout::contiguous(1, 1, 4096).unwrap()).await.unwrap();
            let endpoint = KvEndpoint::new(pool, KvConfig::default()).unwrap();
            let channel = endpoint.connect(&server.address).await.unwrap();
            channel.send_message(nonsense.clone()).await.unwrap();
            let answer = tokio::time::timeout(LONG, channel.recv_message()).await.expect("an answer").unwrap();
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            let why = answer["say"]["refused"]["why"].as_str().unwrap_or_else(|| panic!("{answer}"));
            assert!(!why.is_empty());
        }
    });
    measured(&server, &["--size", "4K"]);
    assert!(server.is_alive());
}

#[test]
fn a_server_without_memory_is_refused() {
    let refused = output(&["bench", "serve", "127.0.0.1:0", "--limit", "0"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--limit"), "{}", stderr(&refused));
}

#[test]
fn clients_and_memory_beyond_the_limits_are_refused_with_the_fix() {
    let server = Server::start(&["--clients", "1", "--limit", "1M"]);
    let refused = output(&["bench", "connect", &server.address, "--size", "1M"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("--limit"), "{}", stderr(&refused));
    server.until("gone");
    let long = ["bench", "connect", &server.address, "--size", "4K", "--duration", "60s"];
    let mut first = landfall(&long).spawn().unwrap();
    server.until("write 4 KiB");
    let second = output(&["bench", "connect", &server.address, "--size", "4K"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(stderr(&second).contains("--clients"), "{}", stderr(&second));
    // A client that is killed makes room.
    first.kill().unwrap();
    first.wait().unwrap();
    server.until("gone");
    measured(&server, &["--size", "4K"]);
}

/// What the server does not lend, the client does not take for itself: it would be 128 GiB, faulted in.
#[test]
fn memory_that_the_server_does_not_lend_is_not_taken_by_the_client() {
    let server = Server::start(&[]);
    let connect = format!("exec {} bench connect {} --size 1G --in-flight 64", program(), server.address);
    let refused = Command::new("sh").args(["-c", &format!("ulimit -v 8000000; {connect}")]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("the server lends 4 GiB"), "{}", stderr(&refused));
    measured(&server, &["--size", "4K"]);
}

#[test]
fn a_server_beyond_this_host_is_asked_for_by_name() {
    let refused = output(&["bench", "serve", "0.0.0.0:0"]);
    assert_eq!((refused.status.code(), stdout(&refused).as_str()), (Some(2), ""));
    assert!(
        stderr(&refused).contains("--psk") && stderr(&refused).contains("--insecure"),
        "{}",
        stderr(&refused)
    );
}

/// As the first process of a container is ended.
#[test]
fn a_server_ends_when_it_is_told_to() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut server = Server::start(&[]);
        measured(&server, &["--size", "4K"]);
        assert_eq!(server.signal(signal), Some(0));
    }
}

#[test]
fn another_service_at_the_port_is_named_by_its_first_words() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let http = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let _ = client.read(&mut [0; 4096]);
        client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let refused = output(&["bench", "connect", &address]);
    http.join().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("its first bytes are \"HTTP\""), "{}", stderr(&refused));
}

#[test]
fn another_endpoint_than_a_bench_server_is_refused() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        use landfall::kv::{KvConfig, KvEndpoint, KvPool, Layout};
        let pd = landfall::device::Device::open("soft").unwrap().alloc_pd().unwrap();
        let pool = KvPool::new(&pd, Layout::contiguous(1, 1, 4096).unwrap()).await.unwrap();
        let endpoint = KvEndpoint::named(pool, KvConfig::default(), "decode-7").unwrap();
        let listener = endpoint.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().to_string();
        let run = tokio::task::spawn_blocking(move || output(&["bench", "connect", &address])).await.unwrap();
        assert_eq!(run.status.code(), Some(1));
        let complaint = stderr(&run);
        assert!(complaint.contains("landfall-bench") && complaint.contains("decode-7"), "{complaint}");
    });
}

#[test]
fn memory_of_a_gpu_is_measured_or_refused_by_name() {
    let server = Server::start(&[]);
    let run = output(&[
        "bench",
        "connect",
        &server.address,
        "--duration",
        "50ms",
        "--size",
        "4K",
        "--memory",
        "cuda",
    ]);
    let complaint = stderr(&run);
    if !cfg!(feature = "cuda") {
        assert_eq!(run.status.code(), Some(2));
        assert!(complaint.contains("without the feature cuda"), "{complaint}");
    } else if std::path::Path::new("/dev/nvidiactl").exists() {
        assert_eq!(run.status.code(), Some(0), "{complaint}");
    } else {
        assert_eq!(run.status.code(), Some(1));
        assert!(complaint.contains("libcuda.so.1"), "{complaint}");
    }
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    for words in [
        &["bench"][..],
        &["bench", "connect"],
        &["bench", "connect", "nowhere"],
        &["bench", "connect", "127.0.0.1:1", "--size", "0"],
        &["bench", "connect", "127.0.0.1:1", "--size", "2G"],
        &["bench", "connect", "127.0.0.1:1", "--size", "17M", "--op", "send"],
        &["bench", "connect", "127.0.0.1:1", "--in-flight", "257"],
        &["bench", "connect", "127.0.0.1:1", "--duration", "never"],
        &["bench", "connect", "127.0.0.1:1", "--duration", "0"],
        &["bench", "connect", "127.0.0.1:1", "--memory", "cuda:first"],
        &["bench", "connect", "127.0.0.1:1", "--transport", "verbs"],
        &["bench", "connect", "127.0.0.1:1", "--device", "rxe0", "--transport", "tcp"],
        &["bench", "serve", "localhost"],
        &["sweep", "127.0.0.1:1", "--descriptors", "0"],
        &["sweep", "127.0.0.1:1", "--qps", "65"],
    ] {
        let wrong = output(words);
        assert_eq!(wrong.status.code(), Some(2), "{words:?}: {}", stderr(&wrong));
        assert_eq!(stdout(&wrong), "", "{words:?}");
    }
    let nobody = output(&["bench", "connect", "127.0.0.1:1"]);
    assert_eq!(nobody.status.code(), Some(1), "{}", stderr(&nobody));
}
