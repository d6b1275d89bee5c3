//! Two connected queue pairs of one device, and a runner over the profiles.

use std::future::Future;
use std::time::Duration;

use landfall::device::{Device, Profile, ProtectionDomain, SoftConfig};
use landfall::memory::{Access, Exposed, Local, Memory, Region, Slice};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};

/// Far above what anything here takes; a hang fails instead of blocking the run.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Side {
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
}

pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
}

pub(crate) fn device(profile: Profile) -> Device {
    Device::soft(SoftConfig::new().profile(profile).seed(7)).unwrap()
}

/// A queue depth that every profile has, or `want` where it is smaller.
pub(crate) fn depth(profile: Profile, want: u32) -> u32 {
    want.min(device(profile).capabilities().max_qp_wr)
}

impl Side {
    pub(crate) fn new(device: &Device, depth: u32, spin: Duration) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(device, CqConfig::new(2 * depth).spin(spin)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(depth, depth)).unwrap();
        Self { pd, cq, qp }
    }

    pub(crate) async fn local(&self, len: u64) -> Slice<Local> {
        self.pd.register_local(Memory::anonymous(len)).await.unwrap().into_slice()
    }

    pub(crate) async fn exposed(&self, len: u64) -> Region<Exposed> {
        self.pd.register_exposed(Memory::anonymous(len), Access::READ_WRITE).await.unwrap()
    }
}

impl Pair {
    pub(crate) async fn new(profile: Profile, want: u32) -> Self {
        Self::spinning(profile, want, Duration::ZERO).await
    }

    pub(crate) async fn spinning(profile: Profile, want: u32, spin: Duration) -> Self {
        let device = device(profile);
        let depth = depth(profile, want);
        let (a, b) = (Side::new(&device, depth, spin), Side::new(&device, depth, spin));
        connect(&a.qp, &b.qp).await;
        Self { a, b }
    }
}

/// Patient with a peer that is slow to post its receives: the machine may be busy.
pub(crate) fn patient() -> ConnectOptions {
    let mut options = ConnectOptions::default();
    options.min_rnr_timer = 0;
    options
}

pub(crate) async fn connect(a: &QueuePair, b: &QueuePair) {
    let (to_a, to_b) = (a.endpoint().unwrap(), b.endpoint().unwrap());
    b.connect(&to_a, Role::Passive, patient()).await.unwrap();
    a.connect(&to_b, Role::Active, patient()).await.unwrap();
}

/// The profiles whose queue pairs an exchange of addresses connects, as `connect` here does it. Those that only RDMA_CM
/// connects are for tests that connect by it.
pub(crate) fn profiles() -> Vec<Profile> {
    Profile::ALL.into_iter().filter(|p| p.capabilities().oob).collect()
}

/// Runs `test` for every such profile, on both kinds of runtime.
pub(crate) fn every_profile<F: AsyncFn(Profile)>(test: F) {
    for profile in profiles() {
        for multi_thread in [false, true] {
            eprintln!("profile {profile}, {}", if multi_thread { "multi-thread" } else { "current_thread" });
            run(multi_thread, test(profile));
        }
    }
}

pub(crate) fn run<T>(multi_thread: bool, test: impl Future<Output = T>) -> T {
    let mut builder = if multi_thread {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2);
        builder
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = builder.enable_all().build().unwrap();
    runtime.block_on(within(test))
}

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("within the deadline")
}

/// Runs an ignored test of this binary in a process of its own, where what it measures is its own.
pub(crate) fn alone(test: &str) {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("1 passed"), "{out}{err}");
}

/// Lets everything else run until `done`.
pub(crate) async fn until(done: impl Fn() -> bool) {
    within(async {
        while !done() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// `n` slices of `each` bytes; the bytes of number `i` are `i`.
pub(crate) fn split(mut slice: Slice<Local>, n: u64, each: u64) -> Vec<Slice<Local>> {
    (0..n)
        .map(|i| {
            let mut part = slice.split_to(each).unwrap();
            part.fill(i as u8);
            part
        })
        .collect()
}
