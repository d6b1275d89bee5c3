//! R8: idle is free (CASES 39). Measured by the process that is idle, over its own CPU time.

use std::time::Duration;

use landfall::kv::{KvEndpoint, WriteRequest};

use crate::harness::{ADDRESS, On, Peer, on_every_profile};
use crate::roles::{accepted, ask, command, dialled, say};

on_every_profile!(r8_an_idle_channel_is_free, r8_a_long_wait_is_nearly_free);

const IDLE: Duration = Duration::from_secs(5);
const PENDING: Duration = Duration::from_secs(2);

/// User and system time of this process so far.
fn cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole rusage, for the call to write.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) }, 0);
    // SAFETY: zeroed is a valid rusage, and the call has succeeded.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

pub(crate) async fn receiver(endpoint: &KvEndpoint) {
    let channel = accepted(endpoint).await;
    idle().await;
    let _ = channel.closed().await;
}

pub(crate) async fn sender(endpoint: &KvEndpoint) {
    let channel = dialled(endpoint).await;
    idle().await;
    // Not before the other one has measured too.
    while command().is_some() {}
    let _ = channel.close().await;
}

/// Says how much CPU time this process uses while nothing is to be done.
async fn idle() {
    // What connecting still has to do belongs to that.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = cpu();
    tokio::time::sleep(IDLE).await;
    say(format_args!("cpu {}", (cpu() - before).as_micros()));
}

/// Starts a write to a receiver that the test has frozen, and says what the wait costs.
pub(crate) async fn pending(endpoint: &KvEndpoint) {
    let channel = dialled(endpoint).await;
    let grant = ask(&channel, 16).await.unwrap();
    say("granted");
    command().expect("the word to start");
    let source = channel.pool().try_alloc(16).unwrap();
    let write = channel.write(WriteRequest::new(&grant, source));
    tokio::pin!(write);
    // What the sockets take is work; then it waits.
    let filled = tokio::time::timeout(Duration::from_millis(500), &mut write).await;
    let before = cpu();
    let waited = tokio::time::timeout(PENDING, &mut write).await;
    let used = cpu() - before;
    assert!(filled.is_err() && waited.is_err(), "a frozen process took 16 MiB");
    say(format_args!("cpu {}", used.as_micros()));
    channel.kill();
}

/// Ten times as much in an emulator; one that spins needs a hundred times that.
fn limit(on: On, ms: u64) -> Duration {
    Duration::from_millis(if on == On::Devices { 10 * ms } else { ms })
}

async fn used(peer: &mut Peer) -> Duration {
    Duration::from_micros(peer.hear("cpu").await.parse().unwrap())
}

async fn r8_an_idle_channel_is_free(on: On) {
    let mut receiver = Peer::start("idle-receiver", on, &[]);
    let address = receiver.hear("listening").await;
    let mut sender = Peer::start("idle-sender", on, &[(ADDRESS, &address)]);
    let cpu = [used(&mut receiver).await, used(&mut sender).await];
    let limit = limit(on, 50);
    assert!(cpu.iter().all(|&cpu| cpu < limit), "{cpu:?} of CPU in {IDLE:?}");
    assert!(sender.end().await.success());
    assert!(receiver.end().await.success());
}

async fn r8_a_long_wait_is_nearly_free(on: On) {
    let mut receiver = Peer::start("receiver", on, &[]);
    let address = receiver.hear("listening").await;
    let mut sender = Peer::start("pending-sender", on, &[(ADDRESS, &address)]);
    sender.hear("granted").await;
    receiver.freeze();
    sender.tell("write").await;
    let cpu = used(&mut sender).await;
    assert!(cpu < limit(on, 100), "{cpu:?} of CPU in {PENDING:?}");
    assert!(sender.end().await.success());
    receiver.kill().await;
}
