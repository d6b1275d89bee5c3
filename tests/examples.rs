//! The examples as their users run them: what they print, how they end, and what they say about mistakes.
//!
//! `cargo test` builds them; with `--test examples` alone, run `cargo build --examples` before.

use std::ffi::OsStr;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

const PROFILES: [&str; 6] = ["default", "erdma-compat", "erdma-standard", "siw", "srd", "tiny"];

const TRANSPORTS: [&str; 2] = ["tcp", "shm"];

/// What `auto` takes.
fn bootstrap(profile: &str) -> &'static str {
    if matches!(profile, "erdma-standard" | "siw") { "cm" } else { "oob" }
}

fn block_on<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("after {PATIENCE:?} still waiting for: {what}"),
    }
}

/// The built example: beside the directory of this test's executable.
fn example(name: &str) -> Command {
    let exe = std::env::current_exe().unwrap();
    let path = exe.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing: run cargo build --examples", path.display());
    let mut command = Command::new(path);
    command.env_remove("LANDFALL_SOFT").env("RUST_BACKTRACE", "1").kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn kv_stream(args: &str) -> Command {
    let mut command = example("kv_stream");
    command.args(args.split_whitespace());
    command
}

async fn output(mut command: Command) -> Output {
    let what = format!("{:?}", command.as_std());
    within(&what, command.output()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Ends well, says nothing on standard error and one JSON object on standard output.
async fn report(mut command: Command) -> Value {
    command.arg("--json");
    let out = output(command).await;
    assert!(out.status.success(), "{}: {}", out.status, text(&out.stderr));
    assert_eq!(text(&out.stderr), "");
    assert_eq!(text(&out.stdout).lines().count(), 1);
    serde_json::from_slice(&out.stdout).unwrap()
}

/// A complaint is one line that begins with the program's name, and no panic.
fn is_a_complaint(program: &str, stderr: &str, about: &str) {
    assert_eq!(stderr.trim_end().lines().count(), 1, "not one line: {stderr}");
    assert!(stderr.starts_with(&format!("{program}: ")), "{stderr}");
    assert!(stderr.contains(about), "{about:?} is not in: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

async fn complains(command: Command, about: &str) {
    let program =
        Path::new(command.as_std().get_program()).file_name().and_then(OsStr::to_str).unwrap().to_owned();
    let what = format!("{:?}", command.as_std());
    let out = output(command).await;
    assert!(matches!(out.status.code(), Some(1 | 2)), "{what}: {}", out.status);
    assert_eq!(text(&out.stdout), "", "{what}");
    is_a_complaint(&program, &text(&out.stderr), about);
}

/// A directory of this test's own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("landfall-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.path(name)
    }

    /// A file of zeros that takes no space, too long to be streamed within a test.
    fn endless(&self) -> String {
        std::fs::File::create(self.0.join("endless")).unwrap().set_len(1 << 40).unwrap();
        self.path("endless")
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `kv_stream --listen`, with the address that it says.
struct Listener {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Listener {
    async fn start(args: &str) -> Self {
        let mut child = kv_stream(&format!("--listen 127.0.0.1:0 {args}")).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        within("the listener's address", stderr.read_line(&mut line)).await.unwrap();
        let address = line.trim().strip_prefix("kv_stream: listening on ").expect("its address").to_owned();
        Self { child, stderr, address }
    }

    /// How it ended, and what it said after its address.
    async fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        within("the listener's end", self.stderr.read_to_string(&mut said)).await.unwrap();
        (within("the listener's end", self.child.wait()).await.unwrap().code(), said)
    }
}

#[test]
fn k1_every_profile_and_page_size_is_verified() {
    block_on(async {
        for (profile, transport) in PROFILES.into_iter().flat_map(|p| TRANSPORTS.map(|t| (p, t))) {
            for page in [1, 16, 64] {
                let seen = report(kv_stream(&format!(
                    "--transport {transport} --profile {profile} --requests 2 --tokens 256 --layers 3 --page {page} --run 4"
                )))
                .await;
                for (field, value) in [
                    ("transport", Value::from(transport)),
                    ("profile", profile.into()),
                    ("bootstrap", bootstrap(profile).into()),
                    ("requests", 2.into()),
                    ("descriptors", (2 * 3 * 256 / page).into()),
                    ("landed_bytes", (2 * 3 * 256 * 1152).into()),
                    ("verified", true.into()),
                ] {
                    assert_eq!(seen[field], value, "{field} of {seen}");
                }
                // What may follow is of memory that the program brought itself.
                let why = seen["transport_reason"].as_str().unwrap();
                assert!(why.starts_with("it was asked for"), "{why}");
                let number =
                    |field: &str| seen[field].as_f64().unwrap_or_else(|| panic!("no {field} in {seen}"));
                assert!(number("wrs") >= 2.0);
                assert!(number("local_s") > 0.0 && number("landed_s") >= number("local_s"), "{seen}");
                assert!(number("gb_per_s") > 0.0);
                assert_eq!(bytes_written(&seen), 2 * 3 * 256 * 1152);
            }
        }
    });
}

/// The decode side pulls, in the way that was asked for, and says which it was.
#[test]
fn k1_what_the_decode_side_reads_is_verified_whichever_way() {
    block_on(async {
        for (profile, transport) in PROFILES.into_iter().flat_map(|p| TRANSPORTS.map(|t| (p, t))) {
            for (way, method) in [("", ""), (" rdma", "rdma-read"), ("=remote-write", "remote-write")] {
                let seen = report(kv_stream(&format!(
                    "--transport {transport} --profile {profile} --requests 2 --tokens 256 --layers 3 --run 4 --read{way}"
                )))
                .await;
                assert_eq!(seen["verified"], true, "{seen}");
                assert_eq!(seen["landed_bytes"], 2 * 3 * 256 * 1152, "{seen}");
                assert!(seen["read"]["method"].as_str().unwrap().starts_with(method), "{seen}");
                assert!(!seen["read"]["why"].as_str().unwrap().is_empty(), "{seen}");
                // The prefill side writes when it was asked to, and then only.
                let by_write = seen["read"]["method"] == "remote-write";
                assert_eq!(bytes_written(&seen), if by_write { 2 * 3 * 256 * 1152 } else { 0 }, "{seen}");
            }
        }
    });
}

/// What one host's processes are asked to do in earnest: three requests of 221,184 blocks, in shared memory, every profile.
#[test]
fn k1_three_whole_requests_in_shared_memory_under_every_profile() {
    async fn whole(profile: &str) {
        let args = format!("--transport shm --profile {profile} --requests 3 --page 1 --run 47");
        let seen = report(kv_stream(&args)).await;
        assert_eq!((&seen["landed_bytes"], &seen["verified"]), (&764_411_904.into(), &true.into()), "{seen}");
        assert_eq!((&seen["transport"], &seen["profile"]), (&"shm".into(), &profile.into()));
        assert_eq!(bytes_written(&seen), 764_411_904);
    }
    block_on(async {
        // Two at a time: most of it is filling and verifying.
        for profiles in PROFILES.chunks(2) {
            tokio::join!(whole(profiles[0]), whole(profiles[1]));
        }
    });
}

/// Each request once more, layer by layer: verified as the others are, with the tail behind the last layer.
#[test]
fn k1_layers_are_streamed_as_they_are_made() {
    block_on(async {
        for (profile, transport) in PROFILES.into_iter().flat_map(|p| TRANSPORTS.map(|t| (p, t))) {
            let seen = report(kv_stream(&format!(
                "--transport {transport} --profile {profile} --requests 2 --tokens 256 --layers 9 --page 16 --run 4 --layerwise"
            )))
            .await;
            assert_eq!((&seen["verified"], &seen["requests"]), (&true.into(), &2.into()), "{seen}");
            let layerwise = &seen["layerwise"];
            for (field, value) in [("requests", 2), ("layers", 9), ("landed_bytes", 2u64 * 9 * 256 * 1152)] {
                assert_eq!(layerwise[field], value, "{field} of {seen}");
            }
            let time =
                |field: &str| layerwise[field].as_f64().unwrap_or_else(|| panic!("no {field} in {seen}"));
            assert_eq!(time("layer_time_s"), 0.001);
            // Nine ticks of the timer, and then the tail.
            assert!(time("by_layer_s") >= 0.009 && time("tail_s") <= time("by_layer_s"), "{seen}");
            assert!(time("tail_s") > 0.0 && time("tail_s") <= time("longest_tail_s"), "{seen}");
            assert!(time("layer_s") > 0.0 && time("at_once_s") > 0.0, "{seen}");
        }
        let people = output(kv_stream("--tokens 64 --layerwise --layer-time 100")).await;
        let said = text(&people.stdout);
        assert!(
            said.contains("by layer: 27 layers, one every 0.100 ms") && said.contains("at once"),
            "{said}"
        );
        complains(kv_stream("--layerwise --file /dev/null"), "has no layers").await;
    });
}

/// By itself a stream within one host is in shared memory, and says why; two sides that have no transport in common do not begin.
#[test]
fn k9_the_transport_is_chosen_reported_and_refused() {
    block_on(async {
        let seen = report(kv_stream("--tokens 64 --requests 1")).await;
        assert_eq!(seen["transport"], "shm");
        assert!(seen["transport_reason"].as_str().unwrap().contains("on this host"), "{seen}");
        let seen = report(ping_pong("--iters 10 --warmup 1 --sizes 64 --op send,kv")).await;
        assert_eq!((&seen["transport"], &seen["results"][1]["transport"]), (&"shm".into(), &"shm".into()));
        assert!(seen["transport_reason"].as_str().unwrap().contains("on this host"), "{seen}");

        let listener = Listener::start("--transport tcp --tokens 64 --requests 1").await;
        let connect = format!("--tokens 64 --requests 1 --connect {}", listener.address);
        for about in ["soft-shm on this side", "soft-tcp on the peer's"] {
            complains(kv_stream(&format!("{connect} --transport shm")), about).await;
        }
        // Whoever takes either meets it, and says why it is not what one host could have.
        let seen = report(kv_stream(&format!("{connect} --transport auto"))).await;
        assert_eq!(seen["transport"], "tcp");
        assert!(seen["transport_reason"].as_str().unwrap().contains("TCP only"), "{seen}");
        assert_eq!(listener.end().await, (Some(0), String::new()));
    });
}

/// Every profile by the connection manager, whatever `auto` would take.
#[test]
fn b5_every_profile_by_the_connection_manager() {
    block_on(async {
        for (profile, transport) in PROFILES.into_iter().flat_map(|p| TRANSPORTS.map(|t| (p, t))) {
            let soft = format!("--transport {transport} --profile {profile}");
            let args = format!("{soft} --bootstrap cm --requests 2 --tokens 256 --layers 3");
            let seen = report(kv_stream(&args)).await;
            assert_eq!((&seen["verified"], &seen["bootstrap"]), (&true.into(), &"cm".into()), "{seen}");
            assert_eq!(
                (&seen["transport"], &seen["bootstrap_reason"]),
                (&transport.into(), &"it was asked for".into())
            );
            let args = format!("{soft} --bootstrap cm --iters 10 --warmup 1 --sizes 64 --op send,write,kv");
            let seen = report(ping_pong(&args)).await;
            assert_eq!((&seen["bootstrap"], seen["results"].as_array().unwrap().len()), (&"cm".into(), 3));
        }
        let seen = report(kv_stream("--transport tcp --profile siw --tokens 64")).await;
        assert_eq!((&seen["path"]["notify"], &seen["path"]["bootstrap"]), (&"send".into(), &"cm".into()));
    });
}

/// CASES 44: eRDMA in standard mode. The error names the cause, the module parameter's file, and the fix.
#[test]
fn k9_standard_mode_refuses_out_of_band_and_says_the_fix() {
    block_on(async {
        for about in ["RTS", "/sys/module/erdma/parameters/compat_mode", "RDMA_CM", "compat_mode=Y"] {
            let refused =
                kv_stream("--json --transport tcp --profile erdma-standard --bootstrap oob --tokens 64");
            complains(refused, about).await;
        }
        let seen = report(kv_stream("--transport tcp --profile erdma-standard --tokens 64")).await;
        assert_eq!((&seen["verified"], &seen["bootstrap"]), (&true.into(), &"cm".into()));
        assert!(seen["bootstrap_reason"].as_str().unwrap().contains("compat_mode N"), "{seen}");
        let people = output(kv_stream("--profile erdma-standard --tokens 64")).await;
        assert!(text(&people.stdout).contains("bootstrap cm: the device cannot"), "{}", text(&people.stdout));
    });
}

fn bytes_written(report: &Value) -> u64 {
    let qps = report["path"]["qps"].as_array().unwrap();
    qps.iter().map(|qp| qp["bytes_written"].as_u64().unwrap()).sum()
}

/// K3: over several queue pairs; `tiny` has room for two.
#[test]
fn k3_several_queue_pairs_are_verified() {
    block_on(async {
        for (profile, qps) in [("default", 4), ("erdma-compat", 4), ("siw", 4), ("srd", 4), ("tiny", 2)] {
            let args = format!(
                "--profile {profile} --qps {qps} --requests 2 --tokens 512 --page 1 --run 2 --layers 4"
            );
            let seen = report(kv_stream(&args)).await;
            assert_eq!(seen["verified"], true);
            assert_eq!(seen["path"]["qps"].as_array().unwrap().len(), qps);
            assert_eq!(bytes_written(&seen), 2 * 512 * 4 * 1152);
        }
        let refused = kv_stream("--profile tiny --qps 4 --tokens 64");
        complains(refused, "queue pairs").await;
    });
}

/// K10: several rails, over TCP and in shared memory, under every profile; and one that cannot be had.
#[test]
fn k10_several_rails_are_verified_and_reported() {
    block_on(async {
        for (profile, transport) in PROFILES.into_iter().flat_map(|p| TRANSPORTS.map(|t| (p, t))) {
            let args = format!(
                "--transport {transport} --profile {profile} --rails 3 --requests 2 --tokens 512 --layers 4"
            );
            let seen = report(kv_stream(&args)).await;
            assert_eq!((&seen["verified"], &seen["transport"]), (&true.into(), &transport.into()), "{seen}");
            let rails = seen["path"]["rails"].as_array().unwrap();
            assert_eq!((rails.len(), &seen["path"]["warnings"]), (3, &serde_json::json!([])), "{seen}");
            let written = rails.iter().map(|rail| rail["bytes_written"].as_u64().unwrap()).sum::<u64>();
            assert_eq!(written, 2 * 512 * 4 * 1152);
            assert!(
                rails.iter().all(|rail| rail["state"] == "up" && rail["transport"] == transport),
                "{seen}"
            );
        }
        let people = output(kv_stream("--rails 2 --tokens 64")).await;
        assert!(
            text(&people.stdout).contains("rail 1: soft-default to soft-default"),
            "{}",
            text(&people.stdout)
        );

        // A device that cannot make its completion queue, in both processes.
        let mut command = kv_stream("--rails 2 --tokens 64");
        command.env("LANDFALL_SOFT", "fail_cq=1");
        complains(command, "creating a completion queue").await;
        complains(kv_stream("--rails 17"), "16").await;
    });
}

/// R8's spin budget, and the environment, are heard.
#[test]
fn k9_the_report_says_what_was_asked_for() {
    block_on(async {
        let mut command = kv_stream("--spin 50 --tokens 64 --requests 1");
        command.env("LANDFALL_SOFT", "profile=srd,seed=3");
        let seen = report(command).await;
        assert_eq!((&seen["profile"], &seen["path"]["ordered"]), (&"srd".into(), &false.into()));
        // The flag is nearer than the environment.
        let mut command = kv_stream("--profile erdma-compat --tokens 64 --requests 1");
        command.env("LANDFALL_SOFT", "profile=srd");
        assert_eq!(report(command).await["profile"], "erdma-compat");
        let people = output(kv_stream("--tokens 64")).await;
        let said = text(&people.stdout);
        assert!(
            people.status.success() && said.contains("verified: every block") && said.contains("path: shm"),
            "{said}"
        );
        assert_eq!(text(&people.stderr), "");
        let help = output(kv_stream("--help")).await;
        assert!(help.status.success() && text(&help.stdout).contains("--profile"));
    });
}

#[test]
fn k1_files_arrive_with_the_same_digest() {
    block_on(async {
        let scratch = Scratch::new("files");
        for (profile, len) in PROFILES.into_iter().zip([0usize, 1, (1 << 20) + 1, 1 << 18, 77, 100_000]) {
            let bytes: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
            let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
            let (input, stored) = (scratch.file("in", &bytes), scratch.path("out"));
            let seen = report(kv_stream(&format!("--profile {profile} --file {input}"))).await;
            assert_eq!(
                (&seen["verified"], &seen["sha256"]),
                (&true.into(), &digest.as_str().into()),
                "{len} bytes"
            );
            // And as two processes, of which one stores it.
            let listener = Listener::start(&format!("--profile {profile} --file {stored}")).await;
            let connect = format!("--profile {profile} --connect {} --file {input}", listener.address);
            assert_eq!(report(kv_stream(&connect)).await["sha256"], digest);
            assert_eq!(listener.end().await, (Some(0), String::new()));
            assert!(std::fs::read(stored).unwrap() == bytes, "{len} bytes");
        }
    });
}

#[test]
fn b1_two_processes_after_a_bad_peer_and_a_wrong_one() {
    block_on(async {
        let listener = Listener::start("--tokens 128 --page 16").await;
        let mut garbage = tokio::net::TcpStream::connect(&listener.address).await.unwrap();
        garbage.write_all(b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n").await.unwrap();
        let _silent = tokio::net::TcpStream::connect(&listener.address).await.unwrap();
        let connect = format!("--connect {}", listener.address);
        complains(kv_stream(&format!("{connect} --tokens 128 --page 64")), "73728").await;
        complains(kv_stream(&format!("{connect} --tokens 64 --page 16 --layers 9")), "layers").await;
        complains(kv_stream(&format!("{connect} --file /dev/null")), "262144").await;
        let busy = format!("--tokens 64 --listen {}", listener.address);
        complains(kv_stream(&busy), &listener.address).await;
        let seen = report(kv_stream(&format!("{connect} --tokens 128 --page 16 --requests 2"))).await;
        assert_eq!(seen["verified"], true);
        assert_eq!(listener.end().await, (Some(0), String::new()));
    });
}

#[test]
fn r10_every_wrong_argument_is_one_line() {
    block_on(async {
        let scratch = Scratch::new("arguments");
        let missing = scratch.path("missing");
        let directory = scratch.0.to_str().unwrap().to_owned();
        let nobody = {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            free.local_addr().unwrap().to_string()
        };
        for (args, about) in [
            ("--fast", "--fast"),
            ("fast", "fast"),
            ("--tokens", "--tokens"),
            ("--tokens ten", "ten"),
            ("--tokens -1", "-1"),
            ("--tokens 0", "from 1"),
            ("--tokens 99999999999999999999", "99999999999999999999"),
            ("--tokens 100 --page 64", "page 64"),
            ("--page 0", "--page"),
            ("--run 0", "--run"),
            ("--qps 0", "--qps"),
            ("--qps 65", "64"),
            ("--deadline 0", "--deadline"),
            ("--spin 1ms", "1ms"),
            ("--seed x", "--seed"),
            ("--json=yes", "--json"),
            ("--profile fast", "erdma-compat"),
            ("--profile=", "erdma-compat"),
            ("--bootstrap rdma", "auto, oob, cm"),
            ("--device rxe0", "--transport verbs"),
            ("--transport verbs", "--device"),
            ("--transport verbs --device rxe0 --profile siw", "--profile"),
            ("--transport rdma", "auto, tcp, shm and verbs"),
            ("--listen", "--listen"),
            ("--listen localhost:1", "IP:PORT"),
            ("--listen 127.0.0.1", "IP:PORT"),
            ("--listen 127.0.0.1:70000", "IP:PORT"),
            ("--connect nowhere", "IP:PORT"),
            ("--listen 127.0.0.1:0 --connect 127.0.0.1:1", "--connect"),
            ("--layers 4096 --tokens 16777216 --token-bytes 16777216", "memory"),
            (&format!("--connect {nobody} --tokens 64"), &nobody),
            (&format!("--file {missing}"), &missing),
            (&format!("--file {directory}"), &directory),
            (&format!("--listen 127.0.0.1:0 --file {directory}"), &directory),
        ] {
            complains(kv_stream(args), about).await;
        }
        for (value, about) in
            [("profile=fast", "profile=fast"), ("garbage", "garbage"), ("seed=-1", "seed"), ("a=b", "a=b")]
        {
            let mut command = kv_stream("--tokens 64");
            command.env("LANDFALL_SOFT", value);
            complains(command, about).await;
        }
    });
}

/// The writing end of a pipe whose reader has gone.
fn nobody_reads() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// A reader that goes away, or a full disk, is an error like any other.
#[test]
fn r10_a_closed_standard_output_is_no_panic() {
    block_on(async {
        for args in ["--help", "--tokens 64 --json", "--tokens 64"] {
            let mut command = kv_stream(args);
            let child = command.stdout(nobody_reads()).spawn().unwrap();
            let out = within(args, child.wait_with_output()).await.unwrap();
            assert_eq!(out.status.code(), Some(1), "{args}");
            is_a_complaint("kv_stream", &text(&out.stderr), "standard output");
            let mut command = kv_stream(args);
            command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
            let out = within(args, command.spawn().unwrap().wait_with_output()).await.unwrap();
            assert_eq!(out.status.code(), Some(1), "{args}");
            is_a_complaint("kv_stream", &text(&out.stderr), "standard output");
        }
        let mut child = kv_stream("--fast").stderr(nobody_reads()).spawn().unwrap();
        assert_eq!(within("its end", child.wait()).await.unwrap().code(), Some(2));
    });
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    within(what, async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// K5: either side is killed in the middle of a stream; the other one says so in one line.
#[test]
fn k5_a_killed_peer_is_one_line() {
    block_on(async {
        let scratch = Scratch::new("killed");
        for kill_the_sender in [false, true] {
            let stored = scratch.path("stored");
            let _ = std::fs::remove_file(&stored);
            let mut listener = Listener::start(&format!("--file {stored}")).await;
            let connect = format!("--connect {} --file {}", listener.address, scratch.endless());
            let mut sender = kv_stream(&connect).spawn().unwrap();
            until("the stream to flow", || {
                for (name, child) in [("sender", &mut sender), ("listener", &mut listener.child)] {
                    assert_eq!(child.try_wait().unwrap(), None, "the {name} has ended");
                }
                std::fs::metadata(&stored).is_ok_and(|m| m.len() > 0)
            })
            .await;
            if kill_the_sender {
                sender.kill().await.unwrap();
                let (code, said) = listener.end().await;
                assert_eq!(code, Some(1), "{said}");
                is_a_complaint("kv_stream", &said, "ended");
            } else {
                listener.child.kill().await.unwrap();
                let out = within("the sender's end", sender.wait_with_output()).await.unwrap();
                assert_eq!((out.status.code(), text(&out.stdout)), (Some(1), String::new()));
                // By a write, or between two.
                let said = text(&out.stderr);
                is_a_complaint(
                    "kv_stream",
                    &said,
                    if said.contains("lost") { "" } else { "the channel has ended" },
                );
            }
        }
    });
}

#[test]
fn k5_the_killed_peer_of_a_lone_process_is_one_line() {
    block_on(async {
        let scratch = Scratch::new("alone");
        let sender = kv_stream(&format!("--file {}", scratch.endless())).spawn().unwrap();
        let id = sender.id().unwrap();
        let children =
            || std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        until("the peer", || !children().is_empty()).await;
        let peer: libc::pid_t = children().split_whitespace().next().unwrap().parse().unwrap();
        // SAFETY: no memory is involved; the process is a child of our child, which has not waited for it.
        assert_eq!(unsafe { libc::kill(peer, libc::SIGKILL) }, 0);
        let out = within("the sender's end", sender.wait_with_output()).await.unwrap();
        assert_eq!((out.status.code(), text(&out.stdout)), (Some(1), String::new()));
        is_a_complaint("kv_stream", &text(&out.stderr), "");
    });
}

fn ping_pong(args: &str) -> Command {
    let mut command = example("ping_pong");
    command.args(args.split_whitespace());
    command
}

#[test]
fn k9_ping_pong_reports_every_operation_and_size() {
    block_on(async {
        for (at, (profile, spin)) in PROFILES.into_iter().zip([0, 50, 0, 50, 0, 50]).enumerate() {
            let mode = if spin == 0 { "event" } else { "spin" };
            // siw has no immediates.
            let ops: &[&str] =
                if profile == "siw" { &["send", "write", "kv"] } else { &["send", "imm", "write", "kv"] };
            // Each transport with each way to wait.
            let transport = TRANSPORTS[at / 2 % 2];
            let seen = report(ping_pong(&format!(
                "--transport {transport} --profile {profile} --spin {spin} --op {} --sizes 2,4097,65536 --iters 40 --warmup 4",
                ops.join(",")
            )))
            .await;
            assert_eq!((&seen["profile"], &seen["mode"]), (&profile.into(), &mode.into()));
            assert_eq!(seen["transport"], transport);
            assert_eq!(seen["bootstrap"], bootstrap(profile));
            let results = seen["results"].as_array().unwrap();
            assert_eq!(results.len(), ops.len() * 3);
            for (at, result) in results.iter().enumerate() {
                assert_eq!(result["op"], ops[at / 3]);
                assert_eq!(result["size"], [2, 4097, 65536][at % 3]);
                assert_eq!(result["iters"], 40);
                let us = |field: &str| result[field].as_f64().unwrap();
                assert!(
                    us("p50_us") > 0.0 && us("p50_us") <= us("p99_us") && us("p99_us") <= us("p999_us"),
                    "{result}"
                );
            }
        }
    });
}

#[test]
fn b1_ping_pong_as_two_processes_after_a_bad_peer() {
    block_on(async {
        let mut child = ping_pong("--listen 127.0.0.1:0").spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        within("the address", stderr.read_line(&mut line)).await.unwrap();
        let address = line.trim().strip_prefix("ping_pong: listening on ").expect("its address").to_owned();
        let mut garbage = tokio::net::TcpStream::connect(&address).await.unwrap();
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let args = format!("--connect {address} --iters 10 --warmup 0 --sizes 64 --op write,send");
        assert_eq!(report(ping_pong(&args)).await["results"].as_array().unwrap().len(), 2);
        let mut said = String::new();
        within("the listener's end", stderr.read_to_string(&mut said)).await.unwrap();
        assert_eq!(
            (within("the listener's end", child.wait()).await.unwrap().code(), said.as_str()),
            (Some(0), "")
        );
    });
}

#[test]
fn r10_ping_pong_complains_in_one_line() {
    block_on(async {
        let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let busy = busy.local_addr().map(|a| (busy, a.to_string())).unwrap();
        for (args, about) in [
            ("--fast", "--fast"),
            ("--op read", "read"),
            ("--sizes", "--sizes"),
            ("--sizes 2,,4", "--sizes"),
            ("--sizes 0", "from 1"),
            ("--iters 0", "--iters"),
            ("--profile fast", "erdma-compat"),
            ("--bootstrap rdma", "auto, oob, cm"),
            ("--port 1", "--transport verbs"),
            ("--profile siw --op imm", "immediate"),
            ("--profile siw --bootstrap oob --sizes 64", "RDMA_CM"),
            ("--connect localhost", "IP:PORT"),
            ("--connect 127.0.0.1:1", "127.0.0.1:1"),
            ("--listen 127.0.0.1:0 --listen 127.0.0.1:0", "--listen"),
            (&format!("--listen {}", busy.1), &busy.1),
            // One byte more than a message of the device has.
            ("--profile tiny --op send --sizes 65537 --iters 1", "65536"),
            ("--profile tiny --op imm --sizes 65537 --iters 1", "65536"),
        ] {
            complains(ping_pong(args), about).await;
        }
        let mut command = ping_pong("");
        command.env("LANDFALL_SOFT", "profile=fast");
        complains(command, "profile=fast").await;
        let child = ping_pong("--help").stdout(nobody_reads()).spawn().unwrap();
        let out = within("help", child.wait_with_output()).await.unwrap();
        assert_eq!(out.status.code(), Some(1));
        is_a_complaint("ping_pong", &text(&out.stderr), "standard output");
    });
}
