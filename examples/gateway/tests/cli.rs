//! Options that cannot be, and what the program writes where.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

fn gateway() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

#[test]
fn options_that_cannot_be_are_refused_with_what_can() {
    let long = "x".repeat(65);
    for (options, word) in [
        (&["prefill", "--name", ""][..], "1 to 64 letters"),
        (&["prefill", "--name", "a/b"], "1 to 64 letters"),
        (&["decode", "--name", &long], "1 to 64 letters"),
        (&["decode", "--name", "d", "--context", "0"], "--context"),
        (&["decode", "--name", "d", "--slots", "0"], "--slots"),
        (&["decode", "--name", "d", "--context", "1000000"], "the model has 8192 at most"),
        (
            &["decode", "--name", "d", "--pool-mib", "1"],
            "--pool-mib 1 holds no sequence of --context 1024 tokens",
        ),
        (
            &["prefill", "--name", "p", "--pool-mib", "1"],
            "--pool-mib 1 holds no sequence of --context 1024 tokens",
        ),
        (&["gateway", "--directory", "static://host"], "HOST:PORT"),
        (&["gateway", "--directory", "static"], "names no workers"),
        (&["gateway", "--directory", "static://host:1", "--grace", "0"], "--grace"),
        (&["gateway", "--directory", "static://host:1", "--stall", "nan"], "--stall"),
    ] {
        let output = gateway().args(options).output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.contains(word), "{options:?}: {words}");
    }
}

#[test]
fn a_log_that_is_no_terminal_has_no_colours() {
    let mut child = gateway()
        .args(["gateway", "--listen", "127.0.0.1:0", "--directory", "static://127.0.0.1:1"])
        .env("RUST_LOG", "info")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.starts_with("gateway listening on 127.0.0.1:"), "{said}");
    let stopped = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(stopped.success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("draining") && !log.contains('\u{1b}'), "{log:?}");
}
