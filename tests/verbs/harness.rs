//! The two devices, queue pairs between them, and a deadline for everything.

use std::future::Future;
use std::time::Duration;

use landfall::connect::Admission;
use landfall::device::{Device, ProtectionDomain};
use landfall::kv::KvConfig;
use landfall::memory::{Access, Exposed, Local, Memory, Region, Slice};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};

/// Far above what anything here takes, in an emulator too. A hang fails instead of blocking the run.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn name(number: usize) -> String {
    let variable = ["RDMA_DEV0", "RDMA_DEV1"][number];
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} must name an RDMA device: these tests do not run without"))
}

pub(crate) fn device(number: usize) -> Device {
    Device::open(&name(number)).unwrap()
}

/// The devices have addresses of their own, which are no loopback ones.
pub(crate) fn kv() -> KvConfig {
    KvConfig::default().admission(Admission::Open)
}

pub(crate) struct Side {
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
}

impl Side {
    pub(crate) fn new(number: usize, depth: u32, spin: Duration) -> Self {
        Self::of(&device(number), depth, spin)
    }

    pub(crate) fn of(device: &Device, depth: u32, spin: Duration) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(device, CqConfig::new(2 * depth).spin(spin)).unwrap();
        let inline = device.capabilities().max_inline;
        let config = QpConfig::new(depth, depth).max_inline(inline);
        let qp = QueuePair::new(&pd, &cq, &cq, config).unwrap();
        Self { pd, cq, qp }
    }

    pub(crate) async fn local(&self, len: u64) -> Slice<Local> {
        self.pd.register_local(Memory::anonymous(len)).await.unwrap().into_slice()
    }

    pub(crate) async fn exposed(&self, len: u64) -> Region<Exposed> {
        self.pd.register_exposed(Memory::anonymous(len), Access::READ_WRITE).await.unwrap()
    }
}

/// A queue pair on each device, connected out of band.
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
}

impl Pair {
    pub(crate) async fn new(depth: u32) -> Self {
        Self::spinning(depth, Duration::ZERO).await
    }

    pub(crate) async fn spinning(depth: u32, spin: Duration) -> Self {
        let this = Self { a: Side::new(0, depth, spin), b: Side::new(1, depth, spin) };
        let (to_a, to_b) = (this.a.qp.endpoint().unwrap(), this.b.qp.endpoint().unwrap());
        this.b.qp.connect(&to_a, Role::Passive, patient()).await.unwrap();
        this.a.qp.connect(&to_b, Role::Active, patient()).await.unwrap();
        this
    }
}

/// Patient with a peer that is slow to post its receives: the machine may be emulated.
pub(crate) fn patient() -> ConnectOptions {
    let mut options = ConnectOptions::default();
    options.min_rnr_timer = 0;
    options.timeout = 17;
    options
}

/// Runs `test` on both kinds of runtime.
pub(crate) fn on_both_runtimes<F: AsyncFn()>(test: F) {
    for multi_thread in [false, true] {
        run(multi_thread, test());
    }
}

pub(crate) fn run<T>(multi_thread: bool, test: impl Future<Output = T>) -> T {
    let mut builder = match multi_thread {
        true => tokio::runtime::Builder::new_multi_thread(),
        false => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(within(test))
}

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("within the deadline")
}
