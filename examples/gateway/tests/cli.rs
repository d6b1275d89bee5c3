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
        (&["gateway", "--directory", "static://host:1", "--stall", "1.9"], "--stall 1.9: 2s at least"),
        (&["decode", "--name", "d", "--drain", "nan"], "from 0 to 86400"),
        (&["prefill", "--name", "p", "--drain", "1e9"], "from 0 to 86400"),
    ] {
        let output = gateway().args(options).output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.contains(word), "{options:?}: {words}");
    }
}

/// Before any worker: they have a limited time to start, and it is one download.
#[test]
fn the_demonstration_fetches_the_model_once() {
    let place =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("no-network-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let python = place.join("python3");
    std::fs::write(&python, "#!/bin/sh\necho no network here >&2\nexit 1\n").unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.display(), std::env::var("PATH").unwrap());
    let output = gateway().arg("demo").env("PATH", path).env("XDG_CACHE_HOME", &place).output().unwrap();
    let _ = std::fs::remove_dir_all(&place);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && words.contains("no network here"), "{words}");
    assert_eq!((words.matches("fetching").count(), words.contains("ended before")), (1, false), "{words}");
}

/// The turn of the second request is after a thousand seconds.
#[test]
fn a_load_of_a_low_rate_ends_when_its_time_is_over() {
    let options = ["load", "--url", "http://127.0.0.1:1", "--rate", "0.001", "--seconds", "1"];
    let mut child = gateway().args(options).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let begun = std::time::Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > std::time::Duration::from_secs(300) {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it has not ended");
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    // Nobody listens there.
    assert!(!status.success());
    let mut report = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut report).unwrap();
    assert!(report.contains("requests 1: answered 0"), "{report}");
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
