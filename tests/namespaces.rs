//! K9 across containers: what shared memory reaches and what it does not, tried with real namespaces.
//!
//! As root, with `unshare`, `nsenter` and `ip`; elsewhere these tests pass over and say why. Addresses exist only inside of
//! namespaces that are made here. `cargo test` builds the example; with `--test namespaces` alone, run `cargo build --examples`
//! before.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// The address of the listening side, in the namespaces that have a network of their own.
const FAR: &str = "10.203.0.2";

/// Why there can be no namespaces here; `None` where there can.
fn impossible() -> Option<String> {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Some("only root may make namespaces".to_owned());
    }
    let tries: [&[&str]; 2] = [
        &["unshare", "--net", "ip", "link", "add", "type", "veth"],
        &["unshare", "--pid", "--ipc", "--fork", "--mount-proc", "nsenter", "--version"],
    ];
    tries.iter().find_map(|words| {
        let tried = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
        match tried {
            Ok(out) if out.status.success() => None,
            Ok(out) => Some(format!("{words:?}: {}", String::from_utf8_lossy(&out.stderr).trim())),
            Err(error) => Some(format!("{words:?}: {error}")),
        }
    })
}

fn passed_over() -> bool {
    let why = impossible();
    if let Some(why) = &why {
        eprintln!("passed over: {why}");
    }
    why.is_some()
}

/// A network namespace, which a sleeping process keeps.
struct Network(Child);

impl Network {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep 600"]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    /// What a command begins with that runs in it.
    fn enter(&self) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net=/proc/{}/ns/net", self.0.id())]
    }

    fn sh(&self, script: &str) {
        let enter = self.enter();
        let out = Command::new(&enter[0]).args(&enter[1..]).args(["sh", "-ec", script]).output().unwrap();
        assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
    }

    /// Bytes that have gone out by the cable's near end.
    fn carried(&self) -> u64 {
        let enter = self.enter();
        let words = ["ip", "-json", "-statistics", "link", "show", "near"];
        let out = Command::new(&enter[0]).args(&enter[1..]).args(words).output().unwrap();
        let seen: Value = serde_json::from_slice(&out.stdout).unwrap();
        seen[0]["stats64"]["tx"]["bytes"].as_u64().unwrap_or_else(|| panic!("{seen}"))
    }

    /// Two of them, joined by a cable.
    fn pair() -> (Self, Self) {
        let (near, far) = (Self::new(), Self::new());
        near.sh(&format!(
            "ip link add near type veth peer name far netns {}; ip address add 10.203.0.1/24 dev near; ip link set near up",
            far.0.id()
        ));
        far.sh(&format!("ip address add {FAR}/24 dev far; ip link set far up"));
        (near, far)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Both fail only when it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A file with the key that both sides hold: addresses of these namespaces are no loopback ones.
fn key() -> &'static PathBuf {
    static KEY: OnceLock<PathBuf> = OnceLock::new();
    KEY.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("landfall-namespaces-{}.psk", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&path).unwrap();
        writeln!(file, "namespaces {}", "5a".repeat(32)).unwrap();
        path
    })
}

/// `kv_stream` behind the words of `enter`.
fn kv_stream(enter: &[String], args: &str) -> Command {
    let exe = std::env::current_exe().unwrap();
    let path = exe.ancestors().nth(2).unwrap().join("examples/kv_stream");
    assert!(path.exists(), "{} is missing: run cargo build --examples", path.display());
    let words: Vec<_> = enter.iter().map(Into::into).chain([path.into_os_string()]).collect();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["--tokens", "256", "--requests", "2"]).args(args.split_whitespace());
    command.arg("--psk").arg(key());
    command.env_remove("LANDFALL_SOFT").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A `kv_stream` that listens. Ended when dropped.
struct Listener {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Listener {
    fn start(enter: &[String], at: &str, args: &str) -> Self {
        let mut child = kv_stream(enter, &format!("--listen {at}:0 {args}")).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("kv_stream: listening on ");
        let address = address.unwrap_or_else(|| panic!("no address: {line}")).to_owned();
        Self { child, stderr, address }
    }

    /// What it said before it ended with a failure.
    fn ends_badly(mut self) -> String {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(1), "{said}");
        said
    }

    fn ends_well(mut self) {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn dial(enter: &[String], to: &Listener, args: &str) -> Output {
    kv_stream(enter, &format!("--connect {} --json {args}", to.address)).output().unwrap()
}

fn report(out: &Output) -> Value {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let seen: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(seen["verified"], true);
    seen
}

fn complaint(out: &Output, about: &[&str]) {
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    for about in about {
        assert!(said.contains(about), "{about:?} is not in: {said}");
    }
}

/// A machine that is gone says nothing, and what is sent to it gets lost. Both ends find that by their heartbeats, within the
/// peer's time-out of 5 s, and end with their blocks back.
#[test]
fn k5_a_machine_that_is_gone_is_a_lost_peer_at_either_end() {
    if passed_over() {
        return;
    }
    for bootstrap in ["oob", "cm"] {
        let (near, far) = Network::pair();
        let options = format!("--transport tcp --bootstrap {bootstrap} --requests 100000 --quiet");
        let listener = Listener::start(&far.enter(), FAR, &options);
        let mut dialling =
            kv_stream(&near.enter(), &format!("--connect {} {options}", listener.address)).spawn().unwrap();
        // In the middle of it: ten megabytes are on their way, or were.
        let before = near.carried();
        while near.carried() < before + 10_000_000 {
            assert!(dialling.try_wait().unwrap().is_none(), "it ended before the machine was gone");
            std::thread::yield_now();
        }
        far.sh("ip link set far down");
        let out = dialling.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("peer_timeout"), "{said}");
        // It may have been granting, waiting for a message, or for an arrival.
        let said = listener.ends_badly();
        assert!(
            ["peer_timeout", "the connection was lost"].iter().any(|words| said.contains(words)),
            "{said}"
        );
    }
}

/// Containers of one pod: the network is shared, and nothing else.
#[test]
fn k9_processes_and_ipc_of_their_own_do_not_hinder_shared_memory() {
    if passed_over() {
        return;
    }
    let own = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"].map(str::to_owned);
    for (listens, dials, bootstrap) in [("shm", "shm", "oob"), ("auto", "auto", "cm")] {
        let listener =
            Listener::start(&own, "127.0.0.1", &format!("--transport {listens} --bootstrap {bootstrap}"));
        let out = dial(&own, &listener, &format!("--transport {dials} --bootstrap {bootstrap}"));
        assert_eq!(report(&out)["transport"], "shm");
        listener.ends_well();
    }
}

/// Containers with a network each, as on two hosts.
#[test]
fn k9_a_network_of_its_own_is_another_host_and_the_path_says_so() {
    if passed_over() {
        return;
    }
    let (near, far) = Network::pair();
    let (near, far) = (near.enter(), far.enter());
    for bootstrap in ["oob", "cm"] {
        let options = |transport: &str| format!("--transport {transport} --bootstrap {bootstrap}");
        let listener = Listener::start(&far, FAR, &options("auto"));
        // Shared memory was asked for, and nothing else will do: an error before any byte, with its reason and the fix.
        complaint(
            &dial(&near, &listener, &options("shm")),
            &["shm was asked for", "network namespace", "TCP"],
        );
        let seen = report(&dial(&near, &listener, &options("auto")));
        assert_eq!(seen["transport"], "tcp");
        assert!(seen["transport_reason"].as_str().unwrap().contains("network namespace"), "{seen}");
        listener.ends_well();

        // The other way round: it is the listening side that takes nothing else.
        let listener = Listener::start(&far, FAR, &options("shm"));
        complaint(
            &dial(&near, &listener, &options("auto")),
            &["shm was asked for", "network namespace", "TCP"],
        );
    }
}
