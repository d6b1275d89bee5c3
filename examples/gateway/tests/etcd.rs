//! Workers that are found by etcd: a real etcd-server (Debian's package of that name) on loopback.
#![cfg(feature = "etcd")]

mod common;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{LONG, Reading, alone, body, client, config, send, start, streamed, until, whole};
use gateway::cluster::Cluster;
use gateway::directory::LEASE;
use gateway::protocol::Role;
use serde_json::Value;
use tokio::process::{Child, Command};

struct Server {
    child: Child,
    data: PathBuf,
    ports: [u16; 2],
}

impl Server {
    /// With a data directory and ports of its own.
    async fn fresh() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("etcd-{}-{number}", std::process::id());
        let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&data);
        // Free at this moment.
        let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = [0, 1].map(|n| free[n].local_addr().unwrap().port());
        drop(free);
        let child = launch(&data, ports).await;
        Self { child, data, ports }
    }

    async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// As it was.
    async fn restart(&mut self) {
        self.child = launch(&self.data, self.ports).await;
    }

    fn uri(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.ports[0])
    }
}

async fn launch(data: &Path, ports: [u16; 2]) -> Child {
    let [clients, peers] = ports.map(|port| format!("http://127.0.0.1:{port}"));
    let child = Command::new("etcd")
        .arg("--data-dir")
        .arg(data)
        .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
        .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}"), "--log-level", "error"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("etcd runs: Debian's package is etcd-server");
    let up = async {
        while client().get(format!("{clients}/health")).send().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, up).await.expect("etcd answers");
    child
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.data);
    }
}

async fn until_decode_workers(cluster: &Cluster, count: u64) {
    let wait = async {
        loop {
            let health = client().get(format!("{}/health", cluster.url())).send().await.unwrap();
            let health: Value = health.json().await.unwrap();
            if health["decode_workers"] == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.unwrap_or_else(|_| panic!("there are not {count} decode workers"));
}

#[tokio::test]
async fn k6_workers_come_and_go_with_their_leases_and_an_outage_of_etcd_stops_nobody() {
    let mut server = Server::fresh().await;
    let mut config = config(1, 2, "auto");
    config.directory = Some(server.uri());
    let mut cluster = start(config).await;
    let (_, expected) = alone("Once upon a time", 12);
    let ask = async |cluster: &Cluster| whole(send(cluster, &body("Once upon a time", 12)).await).await.0;
    until_decode_workers(&cluster, 2).await;
    assert_eq!(ask(&cluster).await, expected);

    // A dead one is out when its lease has run out; one that was started again is back, in another life.
    cluster.workers[1].1.kill().await;
    until_decode_workers(&cluster, 1).await;
    assert_eq!(ask(&cluster).await, expected);
    cluster.restart(1).await.unwrap();
    until_decode_workers(&cluster, 2).await;

    // One that is asked to stop is out at once, without the lease.
    common::signal(cluster.workers[2].1.pid(), "-TERM").await;
    assert!(cluster.workers[2].1.wait().await.unwrap().success());
    until_decode_workers(&cluster, 1).await;
    cluster.restart(2).await.unwrap();
    until_decode_workers(&cluster, 2).await;

    // Without etcd, what is known is used.
    server.kill().await;
    assert_eq!(ask(&cluster).await, expected);
    // When it is back, everybody registers again under a new lease.
    server.restart().await;
    cluster.workers[1].1.kill().await;
    until_decode_workers(&cluster, 1).await;
    cluster.restart(1).await.unwrap();
    until_decode_workers(&cluster, 2).await;
    assert_eq!(ask(&cluster).await, expected);
}

/// It is still known, and so are its requests.
#[tokio::test]
async fn a_worker_that_is_asked_to_stop_finishes_what_it_has_and_gets_nothing_new() {
    let server = Server::fresh().await;
    let mut config = config(2, 2, "auto");
    config.directory = Some(server.uri());
    let mut cluster = start(config).await;
    until_decode_workers(&cluster, 2).await;
    let (tokens, _) = alone("Once upon a time", 300);
    let mut reading = Reading::new(send(&cluster, &streamed("Once upon a time", 300)).await);
    reading.parts(3).await;
    let n = until(&cluster, Role::Decode, |load| load.computing > 0).await;
    common::signal(cluster.workers[n].1.pid(), "-TERM").await;
    // It says so before it is gone.
    until_decode_workers(&cluster, 1).await;
    let (_, other) = whole(send(&cluster, &body("Once upon a time", 4)).await).await;
    let (_, usage) = reading.done().await;
    assert_eq!(usage["landfall"]["attempts"], 1);
    assert_eq!(usage["landfall"]["token_ids"], serde_json::json!(tokens));
    assert_ne!(usage["landfall"]["decode"], other["landfall"]["decode"]);
    assert!(cluster.workers[n].1.wait().await.unwrap().success());
    let metrics =
        client().get(format!("{}/metrics", cluster.url())).send().await.unwrap().text().await.unwrap();
    assert!(!metrics.contains("gateway_workers_lost_total{"), "{metrics}");
}

/// An outage that is longer than every lease: what is known is used meanwhile, and nothing that runs is ended when etcd is back.
#[tokio::test]
async fn k6_an_outage_longer_than_the_leases_ends_no_request() {
    let mut server = Server::fresh().await;
    let mut config = config(1, 1, "auto");
    config.directory = Some(server.uri());
    let cluster = start(config).await;
    until_decode_workers(&cluster, 1).await;
    let long = Reading::new(send(&cluster, &streamed("Once upon a time", 900)).await);
    server.kill().await;
    let begun = std::time::Instant::now();
    while begun.elapsed() < 4 * LEASE {
        let (_, usage) = whole(send(&cluster, &body("Once upon a time", 4)).await).await;
        assert_eq!(usage["landfall"]["attempts"], 1);
    }
    server.restart().await;
    let begun = std::time::Instant::now();
    while begun.elapsed() < 4 * LEASE {
        let (_, usage) = whole(send(&cluster, &body("Once upon a time", 4)).await).await;
        assert_eq!(usage["landfall"]["attempts"], 1);
    }
    let (_, usage) = long.done().await;
    assert_eq!(usage["landfall"]["attempts"], 1);
    let metrics =
        client().get(format!("{}/metrics", cluster.url())).send().await.unwrap().text().await.unwrap();
    assert!(!metrics.contains("gateway_workers_lost_total{"), "{metrics}");
}

#[tokio::test]
async fn a_name_that_a_worker_has_is_not_taken_by_another() {
    let server = Server::fresh().await;
    let mut config = config(1, 1, "auto");
    config.directory = Some(server.uri());
    let cluster = start(config).await;
    until_decode_workers(&cluster, 1).await;
    let second = Command::new(env!("CARGO_BIN_EXE_gateway"))
        .args(["decode", "--name", "decode-0", "--directory", &server.uri()])
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(LONG, second).await.expect("it ends").unwrap();
    assert!(!output.status.success());
    let words = String::from_utf8_lossy(&output.stderr);
    let expected = format!("a worker of the name decode-0 already, at {}", cluster.workers[1].1.address);
    assert!(words.contains(&expected), "{words}");
    // The first one is not the worse for it.
    let (_, usage) = whole(send(&cluster, &body("Once upon a time", 4)).await).await;
    assert_eq!(usage["landfall"]["attempts"], 1);
}
