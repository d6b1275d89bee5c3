//! B4, R7, K5: what failed, or came and went, or was killed, leaves the process as it was: descriptors, mappings, tasks, threads.
//!
//! Each body runs in a process of its own, so that nothing else is counted. `LANDFALL_FAILED_CONNECTS`,
//! `LANDFALL_REGISTRATIONS` and `LANDFALL_KILLED_PEERS` say how many; `tests/nightly` asks for 5,000, 100,000 and 400.

#[path = "traffic/levels.rs"]
mod levels;

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::pin::pin;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::kv::{
    Bootstrap, Grant, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout, PeerIdentity, WriteRequest,
};
use landfall::memory::{Access, Memory, Prefault};
use levels::Levels;
use tokio::io::AsyncWriteExt;

/// What is made once (a runtime's thread, the reaper, buffers) is made by this many.
const WARM_UP: u64 = 60;

/// Blocks of each endpoint.
const BLOCKS: u32 = 4;

/// What is killed in the middle of something.
const TRANSPORTS: [SoftTransport; 2] = [SoftTransport::Tcp, SoftTransport::Shm];

/// How often, unless the environment asks for more.
fn count(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |v| v.parse().expect("a number"))
}

/// Runs the ignored test in a process of its own.
fn alone(test: &str) {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(levels::SETTINGS)
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{text}{errors}");
    println!("{text}");
}

fn run(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // Of the blocking threads, one that stays: their stacks are mappings too.
    runtime.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::from_secs(1 << 20));
    runtime.build().unwrap().block_on(test);
}

fn report(what: &str, n: u64, start: Instant, before: &Levels) {
    let now = Levels::now().unwrap();
    println!("{n} {what} in {:.1} s; before: {before}; after: {now}", start.elapsed().as_secs_f64());
}

async fn endpoint(soft: SoftConfig, block: u64, bootstrap: Bootstrap) -> KvEndpoint {
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    let pool = KvPool::new(&pd, Layout::contiguous(1, BLOCKS, block).unwrap()).await.unwrap();
    let config = KvConfig::default().bootstrap(bootstrap).connect_timeout(Duration::from_secs(5));
    KvEndpoint::new(pool, config).unwrap()
}

async fn listening(endpoint: &KvEndpoint) -> KvListener {
    endpoint.listen("127.0.0.1:0".parse().unwrap()).await.unwrap()
}

/// Where a connect is to fail.
struct Targets {
    nobody: SocketAddr,
    other_layout: SocketAddr,
    good: SocketAddr,
}

/// One connect that fails, in the `n`-th of the ways to do so.
async fn fail(n: u64, from: &KvEndpoint, to: &Targets, soft: &SoftConfig, bootstrap: Bootstrap) {
    match n % 6 {
        0 => assert!(from.connect(to.nobody).await.is_err()),
        1 => assert!(from.connect(to.other_layout).await.is_err()),
        2 => {
            let other = PeerIdentity { epoch: Some(1), name: None };
            assert!(from.connect_to(to.good, &other).await.is_err());
        }
        // Given up in the middle, as when its caller is killed.
        3 => {
            let mut dial = pin!(from.connect(to.good));
            for _ in 0..n / 6 % 100 {
                tokio::select! {
                    biased;
                    channel = &mut dial => { channel.unwrap().kill(); break }
                    () = tokio::task::yield_now() => {}
                }
            }
        }
        // Nobody that speaks the protocol.
        4 => {
            let mut stream = tokio::net::TcpStream::connect(to.good).await.unwrap();
            let _ = stream.write_all(&n.to_le_bytes().repeat(n as usize % 40)).await;
        }
        // The queue pairs die after some bytes: in the handshake where it is on one, and soon after it elsewhere.
        _ => {
            let faults = landfall::device::Faults::new().drop_after(n * 7 % 700);
            let soft = soft.clone().seed(n).faults(faults);
            if let Ok(channel) = endpoint(soft, 500, bootstrap).await.connect(to.good).await {
                let _ = channel.close().await;
            }
        }
    }
}

fn failed_connects(profile: Profile, transport: SoftTransport, bootstrap: Bootstrap) {
    let n = count("LANDFALL_FAILED_CONNECTS", 300);
    let soft = SoftConfig::new().profile(profile).transport(transport);
    run(async {
        let a = endpoint(soft.clone(), 500, bootstrap).await;
        let b = endpoint(soft.clone(), 600, bootstrap).await;
        let c = endpoint(soft.clone(), 500, bootstrap).await;
        let other = listening(&b).await;
        let mut good = listening(&c).await;
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let to = Targets { nobody, other_layout: other.local_addr(), good: good.local_addr() };
        // Channels that came to be are dropped, which closes them.
        let accepting = tokio::spawn(async move { while good.accept().await.is_ok() {} });
        for n in 0..WARM_UP {
            fail(n, &a, &to, &soft, bootstrap).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (before, start) = (Levels::now().unwrap(), Instant::now());
        for n in 0..n {
            fail(n, &a, &to, &soft, bootstrap).await;
        }
        Levels::settle(&before).await.unwrap();
        report("failed connects", n, start, &before);
        accepting.abort();
    });
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_out_of_band() {
    failed_connects(Profile::Default, SoftTransport::Tcp, Bootstrap::Oob);
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_in_shared_memory() {
    failed_connects(Profile::Default, SoftTransport::Shm, Bootstrap::Oob);
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_by_the_manager() {
    failed_connects(Profile::Siw, SoftTransport::Tcp, Bootstrap::Cm);
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_by_the_manager_in_shared_memory() {
    failed_connects(Profile::Siw, SoftTransport::Shm, Bootstrap::Cm);
}

/// CASES 34.
#[test]
fn b4_case_34_failed_connects_leave_the_process_as_it_was() {
    alone("failed_connects_out_of_band");
    alone("failed_connects_in_shared_memory");
    alone("failed_connects_by_the_manager");
    alone("failed_connects_by_the_manager_in_shared_memory");
}

#[test]
#[ignore = "run by r7_case_35_registrations_leave_the_process_as_it_was"]
fn registrations() {
    let n = count("LANDFALL_REGISTRATIONS", 2000);
    run(async {
        let [tcp, shm] =
            TRANSPORTS.map(|t| Device::soft(SoftConfig::new().transport(t)).unwrap().alloc_pd().unwrap());
        // Lengths that are no multiple of a page, both kinds of region, and memory that can be shared with a peer.
        let cycle = async |i: u64| {
            let pd = if i % 4 < 2 { &tcp } else { &shm };
            let memory = |len| {
                Memory::anonymous(len).prefault(if i.is_multiple_of(2) {
                    Prefault::Yes
                } else {
                    Prefault::No
                })
            };
            let local = pd.register_local(memory(1 + i * 37 % 100_000)).await.unwrap();
            let exposed = pd.register_exposed(memory(4097), Access::READ_WRITE).await.unwrap();
            let mut slice = local.into_slice();
            slice[0] = i as u8;
            let rest = slice.split_off(slice.len() / 2).unwrap();
            drop(exposed);
            drop((slice, rest));
        };
        for i in 0..WARM_UP {
            cycle(i).await;
        }
        let (before, start) = (Levels::now().unwrap(), Instant::now());
        for i in 0..n {
            cycle(i).await;
        }
        Levels::settle(&before).await.unwrap();
        report("pairs of registrations", n, start, &before);
    });
}

/// CASES 35, as far as it needs no device.
#[test]
fn r7_case_35_registrations_leave_the_process_as_it_was() {
    alone("registrations");
}

// Peers that are killed.

/// Environment of the peer: what it does, and where it dials; without that it listens.
const ROLE: &str = "LANDFALL_TEST_ROLE";
const TO: &str = "LANDFALL_TEST_ADDRESS";
const WRITES: &str = "writes";
/// What its own line begins with.
const MARK: &str = "@@ ";

#[test]
#[ignore = "the peer that is killed in another test"]
fn peer() {
    run(async {
        let (soft, bootstrap) = (SoftConfig::from_env().unwrap(), Bootstrap::Auto);
        let endpoint = endpoint(soft, 64 << 10, bootstrap).await;
        let channel = match std::env::var(TO) {
            Ok(to) => endpoint.connect(to).await.unwrap(),
            Err(_) => {
                let mut listener = listening(&endpoint).await;
                println!("\n{MARK}{}", listener.local_addr());
                listener.accept().await.unwrap()
            }
        };
        if std::env::var(ROLE).unwrap() == WRITES {
            write_on(&channel, |_| ()).await;
        } else {
            grant_on(&channel, |_| ()).await;
        }
    });
}

/// Writes whatever it is granted, until the channel ends; after each says how many there were.
async fn write_on(channel: &KvChannel, mut after: impl FnMut(u64)) {
    for n in 1.. {
        let _ = channel.send_message(Vec::new()).await;
        let Ok(grant) = channel.recv_message().await else { return };
        let source = channel.pool().alloc(BLOCKS / 2).await.unwrap();
        let grant = Grant::from_bytes(&grant).unwrap();
        let _ = channel.write(WriteRequest::new(&grant, source)).await;
        after(n);
    }
}

/// Grants blocks when it is asked, and takes them back written, until the channel ends.
async fn grant_on(channel: &KvChannel, mut after: impl FnMut(u64)) {
    for n in 1.. {
        if channel.recv_message().await.is_err() {
            return;
        }
        let Ok(grant) = channel.grant(channel.pool().alloc(BLOCKS / 2).await.unwrap()) else { return };
        let _ = channel.send_message(grant.to_bytes()).await;
        if channel.next_arrival().await.is_err() {
            return;
        }
        after(n);
    }
}

/// A channel with a peer that is killed after three transfers, in the middle of what comes next. Which side writes and which one
/// dials goes by `n`.
async fn outlive(n: u64, soft: &SoftConfig, survivor: &KvEndpoint, listener: &mut KvListener) {
    let (peer_writes, peer_dials) = (n.is_multiple_of(2), (n / 2).is_multiple_of(2));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "peer", "--ignored", "--nocapture"])
        .env("LANDFALL_SOFT", soft.to_string())
        .env(ROLE, if peer_writes { WRITES } else { "grants" })
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if peer_dials {
        command.env(TO, listener.local_addr().to_string());
    }
    let mut peer = command.spawn().unwrap();
    let channel = if peer_dials {
        listener.accept().await.unwrap()
    } else {
        let lines = BufReader::new(peer.stdout.as_mut().unwrap()).lines();
        let address = lines.map_while(Result::ok).find_map(|l| l.strip_prefix(MARK).map(str::to_owned));
        survivor.connect(address.expect("the peer's address")).await.unwrap()
    };
    let kill_the_third = |n: u64, peer: &mut Child| {
        if n == 3 {
            peer.kill().unwrap();
            peer.wait().unwrap();
        }
    };
    if peer_writes {
        grant_on(&channel, |n| kill_the_third(n, &mut peer)).await;
    } else {
        write_on(&channel, |n| kill_the_third(n, &mut peer)).await;
    }
    channel.closed().await;
    assert_eq!(survivor.pool().free_blocks(), BLOCKS);
    assert!(peer.try_wait().unwrap().is_some(), "the channel ended before its peer was killed");
}

#[test]
#[ignore = "run by k5_a_killed_peer_leaves_the_process_as_it_was"]
fn killed_peers() {
    let n = count("LANDFALL_KILLED_PEERS", 16);
    run(async {
        for profile in [Profile::Default, Profile::Siw] {
            for transport in TRANSPORTS {
                let soft = SoftConfig::new().profile(profile).transport(transport);
                let survivor = endpoint(soft.clone(), 64 << 10, Bootstrap::Auto).await;
                let mut listener = listening(&survivor).await;
                for n in 0..4 {
                    outlive(n, &soft, &survivor, &mut listener).await;
                }
                let (before, start) = (Levels::now().unwrap(), Instant::now());
                for n in 0..n {
                    outlive(n, &soft, &survivor, &mut listener).await;
                }
                Levels::settle(&before).await.unwrap();
                report(&format!("killed peers, {profile} over {transport}"), n, start, &before);
            }
        }
        // Shared memory has no names in the file system, so that none can stay behind.
        let ours = |name: &str| name.contains("landfall");
        let named = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        assert!(!named.map(|e| e.file_name()).any(|name| name.to_str().is_some_and(ours)));
    });
}

/// Either side, whoever writes and whoever has dialled: no descriptor, no mapping, no file.
#[test]
fn k5_a_killed_peer_leaves_the_process_as_it_was() {
    alone("killed_peers");
}
