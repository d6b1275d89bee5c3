//! Holding a channel's own counts against those of its device (K9): a reading before the channel carries anything, another
//! when asked.
//!
//! Reads sysfs on the runtime's blocking threads, and takes the driver's lock for a moment to ask what it has carried.
//! The rules are in [`counters`](crate::counters).

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;

use super::driver::KvDriver;
use super::lock;
use crate::counters::{CounterPort, CounterReport, CounterSnapshot, Expected, Payload, Sysfs, Verdict};

/// A device that takes longer to say its counters does not hold up a connect: the channel is without them.
const PATIENCE: Duration = Duration::from_secs(1);
/// The kernel measures a counter's age in ticks, of at most this.
const TICK: Duration = Duration::from_millis(10);

/// What a channel has carried, as far as its device's counters can be held against it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Carried {
    /// Payload whose landing was confirmed.
    pub(crate) landed: u64,
    /// Payload that has arrived.
    pub(crate) arrived: u64,
    /// WRITEs and control messages that were posted.
    pub(crate) messages_sent: u64,
    /// Messages and notifications that came.
    pub(crate) messages_received: u64,
}

/// The first reading, of all ports: so that a report can name the one that has carried the data instead.
#[derive(Debug)]
pub(super) struct FirstReading {
    /// Those of the rails.
    rails: Vec<CounterPort>,
    sysfs: Sysfs,
    snapshot: Option<CounterSnapshot>,
}

impl FirstReading {
    /// Reads the counters that there are under `sysfs`.
    pub(super) async fn take(rails: Vec<CounterPort>, sysfs: Sysfs, runtime: &Handle) -> Self {
        let at = sysfs.clone();
        let reading = runtime.spawn_blocking(move || CounterSnapshot::take(&at, &at.ports()));
        let snapshot = tokio::time::timeout(PATIENCE, reading).await;
        Self { rails, sysfs, snapshot: snapshot.ok().and_then(Result::ok) }
    }
}

/// What is known of a channel from its beginning.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) mtu: u32,
    /// A WRITE is of a block, or of more than one.
    pub(super) block_bytes: u64,
    /// Both ends are on one port.
    pub(super) same_port: bool,
}

/// The check of one channel.
#[derive(Debug)]
pub(super) struct PathCheck {
    shared: Arc<Shared>,
    runtime: Handle,
    last: Mutex<Option<CounterReport>>,
}

#[derive(Debug)]
struct Shared {
    driver: Weak<KvDriver>,
    first: FirstReading,
    facts: Facts,
}

impl PathCheck {
    /// For a `driver` that has carried nothing when the first reading was taken.
    pub(super) fn new(driver: &Arc<KvDriver>, first: FirstReading, facts: Facts, runtime: &Handle) -> Self {
        let shared = Arc::new(Shared { driver: Arc::downgrade(driver), first, facts });
        Self { shared, runtime: runtime.clone(), last: Mutex::new(None) }
    }

    /// The latest report.
    pub(super) fn last(&self) -> Option<CounterReport> {
        lock(&self.last).clone()
    }

    /// Reads the counters now, and keeps the report.
    pub(super) async fn verify(&self) {
        let shared = self.shared.clone();
        // On the channel's runtime: whoever awaits this may be on another, or on none.
        let report = self.runtime.spawn(async move { shared.verify().await }).await.ok().flatten();
        let report = report.unwrap_or_else(|| {
            CounterReport::not_read("the counters were not read: the channel's runtime is gone")
        });
        *lock(&self.last) = Some(report);
    }
}

impl Shared {
    async fn verify(self: Arc<Self>) -> Option<CounterReport> {
        let Some(first) = &self.first.snapshot else {
            let ports: Vec<String> = self.first.rails.iter().map(CounterPort::to_string).collect();
            let why = format!("{} did not say its counters when the channel opened", ports.join(", "));
            return Some(CounterReport::not_read(&why));
        };
        let (report, lifespan) = self.compare(first).await?;
        if report.verdict != Verdict::Contradicted {
            return Some(report);
        }
        // The values may be older than the last transfer.
        tokio::time::sleep(lifespan + TICK).await;
        Some(self.compare(first).await?.0)
    }

    /// `None` when the runtime or the driver is gone.
    async fn compare(self: &Arc<Self>, first: &CounterSnapshot) -> Option<(CounterReport, Duration)> {
        let this = self.clone();
        let read = move || {
            // Before the reading: what has landed by now has been counted.
            let carried = this.driver.upgrade()?.carried();
            let sysfs = &this.first.sysfs;
            Some((carried, CounterSnapshot::take(sysfs, &sysfs.ports())))
        };
        let (carried, now) = tokio::task::spawn_blocking(read).await.ok()??;
        let expected = self.facts.expected(&self.first.rails, &carried);
        Some((now.since(first).check(&expected), now.lifespan()))
    }
}

impl Facts {
    fn expected(&self, rails: &[CounterPort], carried: &Carried) -> Expected {
        // WRITEs without notification are not seen here: at most one a block.
        let writes = carried.arrived / self.block_bytes.max(1);
        let received = carried.messages_received.saturating_add(writes);
        Expected::new(rails.iter().cloned(), self.mtu)
            .sent(Payload::new(carried.landed, carried.messages_sent))
            .received(Payload::new(carried.arrived, received))
            .same_port(self.same_port)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::device::{Device, SoftConfig};
    use crate::kv::{KvChannel, KvConfig, KvEndpoint, KvPool, Layout, WriteRequest};

    /// A port of a made-up device, which counts what the test says.
    struct Sys(PathBuf);

    impl Sys {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("landfall-path-{name}-{}", std::process::id()));
            std::fs::create_dir_all(root.join("class/infiniband/fake0/ports/1/counters")).unwrap();
            let this = Self(root);
            this.count(0, 0);
            this
        }

        fn count(&self, sent: u64, received: u64) {
            let dir = self.0.join("class/infiniband/fake0/ports/1/counters");
            std::fs::write(dir.join("port_xmit_data"), format!("{}\n", sent / 4)).unwrap();
            std::fs::write(dir.join("port_rcv_data"), format!("{}\n", received / 4)).unwrap();
        }

        async fn check(&self, channel: &KvChannel) -> PathCheck {
            let (runtime, sysfs) = (Handle::current(), Sysfs::at(&self.0));
            let first = FirstReading::take(vec![CounterPort::new("fake0", 1)], sysfs, &runtime).await;
            let facts = Facts { mtu: 1024, block_bytes: 4096, same_port: false };
            PathCheck::new(&channel.inner.driver, first, facts, &runtime)
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    async fn endpoint() -> KvEndpoint {
        let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
        let pool = KvPool::new(&pd, Layout::contiguous(1, 8, 4096).unwrap()).await.unwrap();
        KvEndpoint::new(pool, KvConfig::default()).unwrap()
    }

    /// The verdicts of both ends, when their devices counted `sent` and `received`.
    async fn verdicts(name: &str, sent: u64, received: u64) -> [CounterReport; 2] {
        let (a, b) = (endpoint().await, endpoint().await);
        let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (tx, rx) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
        let (from, to) = (Sys::new(&format!("{name}-tx")), Sys::new(&format!("{name}-rx")));
        let checks = [from.check(&tx).await, to.check(&rx).await];
        assert!(checks[0].last().is_none());
        let grant = rx.grant(rx.pool().alloc(8).await.unwrap()).unwrap();
        let (landed, _) = tx.write(WriteRequest::new(&grant, tx.pool().alloc(8).await.unwrap())).await;
        landed.unwrap();
        rx.next_arrival().await.unwrap();
        from.count(sent, 600);
        to.count(600, received);
        checks[0].verify().await;
        checks[1].verify().await;
        checks.map(|check| check.last().unwrap())
    }

    #[tokio::test]
    async fn k9_what_landed_and_what_arrived_is_held_against_the_counters() {
        let [tx, rx] = verdicts("verified", 34_000, 34_000).await;
        assert_eq!((tx.verdict, tx.sent.payload.bytes), (Verdict::Verified, 32_768), "{tx}");
        assert_eq!((rx.verdict, rx.received.payload.bytes), (Verdict::Verified, 32_768), "{rx}");
        assert_eq!((tx.received.payload.bytes, rx.sent.payload.bytes), (0, 0));
    }

    #[tokio::test]
    async fn k9_a_device_that_counted_less_contradicts() {
        let [tx, rx] = verdicts("contradicted", 600, 32_764).await;
        assert_eq!((tx.verdict, rx.verdict), (Verdict::Contradicted, Verdict::Contradicted), "{tx}; {rx}");
    }

    /// The soft provider has no device that counts, and its channels say nothing of one.
    #[tokio::test]
    async fn k9_a_soft_channel_has_no_counters() {
        let (a, b) = (endpoint().await, endpoint().await);
        let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (tx, _rx) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
        assert_eq!(tx.verify_path().await.counters, None);
    }
}
