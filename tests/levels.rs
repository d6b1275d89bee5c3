//! B4, R7: what failed, or came and went, leaves the process as it was: descriptors, mappings, tasks, threads.
//!
//! Each body runs in a process of its own, so that nothing else is counted. `LANDFALL_FAILED_CONNECTS` and
//! `LANDFALL_REGISTRATIONS` say how many; `tests/nightly` asks for 5,000 and 100,000.

#[path = "chaos_rounds/levels.rs"]
mod levels;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use landfall::device::{Device, Profile, SoftConfig};
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvListener, KvPool, Layout, PeerIdentity};
use landfall::memory::{Access, Memory, Prefault};
use levels::Levels;
use tokio::io::AsyncWriteExt;

/// What is made once (a runtime's thread, the reaper, buffers) is made by this many.
const WARM_UP: u64 = 60;

/// How often, unless the environment asks for more.
fn count(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |v| v.parse().expect("a number"))
}

/// Runs the ignored test in a process of its own.
fn alone(test: &str) {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        // One arena, and nothing of it by mmap: then each mapping is one that somebody asked for.
        .env("MALLOC_ARENA_MAX", "1")
        .env("MALLOC_MMAP_THRESHOLD_", "33554432")
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

fn report(what: &str, n: u64, start: Instant, before: Levels) {
    let now = Levels::now().unwrap();
    println!("{n} {what} in {:.1} s; before: {before}; after: {now}", start.elapsed().as_secs_f64());
}

async fn endpoint(soft: SoftConfig, block: u64, bootstrap: Bootstrap) -> KvEndpoint {
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    let pool = KvPool::new(&pd, Layout::contiguous(1, 4, block).unwrap()).await.unwrap();
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
async fn fail(n: u64, from: &KvEndpoint, to: &Targets, profile: Profile, bootstrap: Bootstrap) {
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
            let soft = SoftConfig::new().profile(profile).seed(n).faults(faults);
            if let Ok(channel) = endpoint(soft, 500, bootstrap).await.connect(to.good).await {
                let _ = channel.close().await;
            }
        }
    }
}

fn failed_connects(profile: Profile, bootstrap: Bootstrap) {
    let n = count("LANDFALL_FAILED_CONNECTS", 300);
    run(async {
        let soft = || SoftConfig::new().profile(profile);
        let a = endpoint(soft(), 500, bootstrap).await;
        let b = endpoint(soft(), 600, bootstrap).await;
        let c = endpoint(soft(), 500, bootstrap).await;
        let other = listening(&b).await;
        let mut good = listening(&c).await;
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let to = Targets { nobody, other_layout: other.local_addr(), good: good.local_addr() };
        // Channels that came to be are dropped, which closes them.
        let accepting = tokio::spawn(async move { while good.accept().await.is_ok() {} });
        for n in 0..WARM_UP {
            fail(n, &a, &to, profile, bootstrap).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (before, start) = (Levels::now().unwrap(), Instant::now());
        for n in 0..n {
            fail(n, &a, &to, profile, bootstrap).await;
        }
        Levels::settle(before).await.unwrap();
        report("failed connects", n, start, before);
        accepting.abort();
    });
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_out_of_band() {
    failed_connects(Profile::Default, Bootstrap::Oob);
}

#[test]
#[ignore = "run by b4_case_34_failed_connects_leave_the_process_as_it_was"]
fn failed_connects_by_the_manager() {
    failed_connects(Profile::Siw, Bootstrap::Cm);
}

/// CASES 34.
#[test]
fn b4_case_34_failed_connects_leave_the_process_as_it_was() {
    alone("failed_connects_out_of_band");
    alone("failed_connects_by_the_manager");
}

#[test]
#[ignore = "run by r7_case_35_registrations_leave_the_process_as_it_was"]
fn registrations() {
    let n = count("LANDFALL_REGISTRATIONS", 2000);
    run(async {
        let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
        // Lengths that are no multiple of a page, and both kinds of region.
        let cycle = async |i: u64| {
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
        Levels::settle(before).await.unwrap();
        report("pairs of registrations", n, start, before);
    });
}

/// CASES 35, as far as it needs no device.
#[test]
fn r7_case_35_registrations_leave_the_process_as_it_was() {
    alone("registrations");
}
