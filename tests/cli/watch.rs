//! `landfall watch`: lines, JSON, and the exporter on a real socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, ChildStdout};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::program::{landfall, output, stderr, stdout};
use crate::roots::{Root, erdma, mlx5, siw};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const XMIT: &str = "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data";
const OUT_OF_SEQUENCE: &str = "sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence";

/// A program that runs until it is ended.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(root: &Root, args: &[&str]) -> Self {
        let root = root.path().to_str().unwrap();
        let all: Vec<&str> = ["watch", "--root", root].iter().chain(args).copied().collect();
        let mut child = landfall(&all).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "it has ended");
        line
    }

    /// The exporter, and where it serves.
    fn exporter(root: &Root) -> (Self, SocketAddr) {
        let mut this = Self::start(root, &["--prometheus", "127.0.0.1:0"]);
        let line = this.line();
        let address = line.trim().strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics"));
        let address = address.unwrap_or_else(|| panic!("no URL: {line}")).parse().unwrap();
        (this, address)
    }

    /// Ends it as a container's end does.
    fn terminate(mut self) -> Option<i32> {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: a plain call; the child has not been waited for, so that the id is its own.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends bytes and reads the answer to its end.
fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

fn scrape(address: SocketAddr) -> String {
    let answer = exchange(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    body.to_owned()
}

/// The value of a series, by its name and all of its labels.
fn value(body: &str, series: &str) -> Option<f64> {
    let line =
        body.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn the_exporter_serves_what_the_devices_count() {
    let root = mlx5();
    let (running, address) = Running::exporter(&root);
    let body = scrape(address);
    let port = r#"{device="mlx5_0",port="1"}"#;
    // In units of four bytes.
    assert_eq!(value(&body, &format!("landfall_port_sent_bytes_total{port}")), Some(4000.0), "{body}");
    assert_eq!(value(&body, &format!("landfall_port_received_bytes_total{port}")), Some(8000.0));
    assert_eq!(value(&body, &format!("landfall_port_up{port}")), Some(1.0));
    let which = r#"device="mlx5_0",port="1",group="hw_counters",counter="out_of_sequence""#;
    let errors = format!("landfall_port_errors_total{{{which}}}");
    assert_eq!(value(&body, &errors), Some(3.0), "{body}");
    // It has no counter of packets, and nothing says 0 of them. A setting is no counter.
    assert!(!body.contains("packets_total") && !body.contains("lifespan"), "{body}");

    root.write(XMIT, "2500\n");
    let end = Instant::now() + PATIENCE;
    while value(&scrape(address), &format!("landfall_port_sent_bytes_total{port}")) != Some(10_000.0) {
        assert!(Instant::now() < end, "a scrape never shows what was counted since");
        std::thread::yield_now();
    }
    root.write(XMIT, "N/A (no PMA)\n");
    while value(&scrape(address), &format!("landfall_port_sent_bytes_total{port}")).is_some() {
        assert!(Instant::now() < end, "a counter that is not known is still served");
        std::thread::yield_now();
    }
    assert_eq!(running.terminate(), Some(0));
}

#[test]
fn every_served_name_is_documented_and_declared_once() {
    let (erdma, mlx5) = (erdma("Y\n"), mlx5());
    let (_running, address) = Running::exporter(&erdma);
    let (_other, with_pma) = Running::exporter(&mlx5);
    let guide = include_str!("../../src/guide/operating.md");
    for body in [scrape(address), scrape(with_pma)] {
        let mut declared = Vec::new();
        for line in body.lines() {
            if let Some(family) = line.strip_prefix("# TYPE ") {
                let name = family.split(' ').next().unwrap();
                assert!(!declared.contains(&name.to_owned()), "{name} is declared twice");
                assert!(guide.contains(&format!("`{name}`")), "{name} is not in operating.md");
                declared.push(name.to_owned());
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                assert_eq!(declared.last().map(String::as_str), Some(name), "{line}");
            }
        }
        assert!(declared.len() > 4, "{body}");
    }
}

#[test]
fn clients_that_misbehave_are_answered_or_dropped_and_hurt_nobody() {
    let root = mlx5();
    let (running, address) = Running::exporter(&root);
    // These say nothing, and hold their places until their time is over.
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (request, status) in [
        (&b"GET /nothing HTTP/1.1\r\n\r\n"[..], "404"),
        (b"GET / HTTP/1.0\r\n\r\n", "200"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405"),
        (b"nonsense\r\n\r\n", "400"),
        (b"GET /metrics\r\n\r\n", "400"),
        (b"GET metrics HTTP/1.1\r\n\r\n", "400"),
        (b"\xff\xfe\x00\r\n\r\n", "400"),
    ] {
        let answer = exchange(address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
    }
    let head = exchange(address, b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    let long = [&b"GET /metrics HTTP/1.1\r\nX: "[..], &[b'a'; 20_000]].concat();
    assert!(exchange(address, &long).starts_with("HTTP/1.1 431 "));
    // One that closes in the middle of its request, and one that sends half of it and closes its side.
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(b"GET /met").unwrap();
    drop(half);
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(b"GET /met").unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    half.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(scrape(address).contains("landfall_port_up"));
    drop(silent);
    assert_eq!(running.terminate(), Some(0));
}

#[test]
fn silent_clients_beyond_the_places_give_way_to_whoever_asks() {
    let root = mlx5();
    let (_running, address) = Running::exporter(&root);
    // Three times as many as there are places, each of which would have five seconds: some that say nothing, some half of it, and some
    // that keep the connection open behind their answer.
    let mut silent: Vec<_> = (0..192).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (n, client) in silent.iter_mut().enumerate() {
        // One that had to give way may be closed by now.
        let _ = match n % 3 {
            0 => Ok(()),
            1 => client.write_all(b"GET /met"),
            _ => client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n"),
        };
    }
    for _ in 0..10 {
        assert!(scrape(address).contains("landfall_port_up"));
    }
    // The first had to.
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = silent[0].read(&mut [0; 16]);
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    assert!(!matches!(closed, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), "it is still there");
}

#[test]
fn a_taken_address_is_a_complaint_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let root = mlx5();
    let ended = output(&["watch", "--root", root.path().to_str().unwrap(), "--prometheus", &address]);
    assert_eq!(ended.status.code(), Some(1));
    assert!(stderr(&ended).contains(&address), "{}", stderr(&ended));
}

#[test]
fn rates_and_errors_are_shown_as_they_grow() {
    let root = mlx5();
    let mut running = Running::start(&root, &["--json", "--interval", "0.1"]);
    let first: Value = serde_json::from_str(&running.line()).unwrap();
    assert_eq!((&first[0]["device"], &first[0]["sent"]["bytes"]), (&"mlx5_0".into(), &0.0.into()), "{first}");
    assert_eq!((&first[0]["sent"]["packets"], &first[0]["errors"]), (&Value::Null, &0.into()), "{first}");
    root.write(XMIT, "1000000\n");
    root.write(OUT_OF_SEQUENCE, "10\n");
    let (mut sent, mut errors) = (0.0, 0);
    let end = Instant::now() + PATIENCE;
    // Each line has its own time: rate and time make the count again.
    while sent < 3_995_999.0 || errors < 7 {
        assert!(Instant::now() < end, "sent {sent}, errors {errors}");
        let line: Value = serde_json::from_str(&running.line()).unwrap();
        sent += line[0]["sent"]["bytes"].as_f64().unwrap_or(0.0) * line[0]["seconds"].as_f64().unwrap();
        errors += line[0]["errors"].as_u64().unwrap();
    }
    assert!((sent - 3_996_000.0).abs() < 1.0, "{sent}");
    assert_eq!(errors, 7);
    assert_eq!(running.terminate(), Some(0));
}

#[test]
fn lines_for_a_file_are_complete_and_come_to_an_end() {
    let root = mlx5();
    let ended =
        output(&["watch", "--root", root.path().to_str().unwrap(), "--interval", "0.1", "--count", "2"]);
    assert_eq!((ended.status.code(), stderr(&ended).as_str()), (Some(0), ""));
    let line = "mlx5_0 port 1: sent 0 B/s received 0 B/s errors 0\n";
    assert_eq!(stdout(&ended), format!("{line}{line}"));
}

#[test]
fn what_is_not_counted_is_unknown_and_not_zero() {
    let root = siw();
    let ended =
        output(&["watch", "--root", root.path().to_str().unwrap(), "--interval", "0.1", "--count", "1"]);
    assert_eq!(
        stdout(&ended),
        "siw0 port 1: sent unknown received unknown errors unknown\n",
        "{}",
        stderr(&ended)
    );
}

#[test]
fn no_device_to_watch_is_a_complaint() {
    let root = Root::new();
    let ended = output(&["watch", "--root", root.path().to_str().unwrap()]);
    assert_eq!(ended.status.code(), Some(1));
    assert!(stderr(&ended).contains("no RDMA device"), "{}", stderr(&ended));
    let root = mlx5();
    let ended = output(&["watch", "--root", root.path().to_str().unwrap(), "--device", "mlx5_9"]);
    assert!(ended.status.code() == Some(1) && stderr(&ended).contains("mlx5_9"), "{}", stderr(&ended));
}

#[test]
fn options_of_watch_are_checked() {
    for args in [
        &["watch", "--interval", "0"][..],
        &["watch", "--interval", "soon"],
        &["watch", "--prometheus", "nowhere"],
        &["watch", "--prometheus", "9797", "--count", "1"],
    ] {
        assert_eq!(output(args).status.code(), Some(2), "{args:?}");
    }
}
