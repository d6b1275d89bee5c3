//! Two connected queue pairs, and a runner over the soft profiles, over TCP and in shared memory, and over RDMA devices.

use std::future::Future;
use std::time::Duration;

use landfall::connect::cm::{CmConnection, CmListener, CmOptions};
use landfall::device::{Device, Profile, ProtectionDomain};
use landfall::memory::{Access, Exposed, Local, Memory, Region, Slice};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};

pub(crate) use crate::on::On;

/// Far above what anything here takes; a hang fails instead of blocking the run.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Side {
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
    /// Its connection, where RDMA_CM has made one: the queue pair ends with it.
    pub(crate) _cm: Option<CmConnection>,
}

pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
}

/// The near end's.
pub(crate) fn device(on: impl Into<On>) -> Device {
    on.into().devices().0
}

/// A queue depth that the device has, or `want` where it is smaller.
pub(crate) fn depth(on: impl Into<On>, want: u32) -> u32 {
    want.min(device(on).capabilities().max_qp_wr)
}

impl Side {
    pub(crate) fn new(device: &Device, depth: u32, spin: Duration) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(device, CqConfig::new(2 * depth).spin(spin)).unwrap();
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(depth, depth)).unwrap();
        Self { pd, cq, qp, _cm: None }
    }

    pub(crate) async fn local(&self, len: u64) -> Slice<Local> {
        self.pd.register_local(Memory::anonymous(len)).await.unwrap().into_slice()
    }

    pub(crate) async fn exposed(&self, len: u64) -> Region<Exposed> {
        self.pd.register_exposed(Memory::anonymous(len), Access::READ_WRITE).await.unwrap()
    }
}

impl Pair {
    pub(crate) async fn new(on: impl Into<On>, want: u32) -> Self {
        Self::spinning(on, want, Duration::ZERO).await
    }

    /// Connected by hand, or by RDMA_CM where that is the only way.
    pub(crate) async fn spinning(on: impl Into<On>, want: u32, spin: Duration) -> Self {
        let on = on.into();
        let ((near, far), depth) = (on.devices(), depth(on, want));
        let (mut a, mut b) = (Side::new(&near, depth, spin), Side::new(&far, depth, spin));
        if near.capabilities().oob {
            connect(&a.qp, &b.qp).await;
        } else {
            let (client, server) = connect_managed(on, &a, &b).await;
            (a._cm, b._cm) = (Some(client), Some(server));
        }
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

pub(crate) fn options() -> CmOptions {
    CmOptions::new().attributes(patient()).deadline(DEADLINE)
}

/// By RDMA_CM; `a` asks.
pub(crate) async fn connect_managed(on: On, a: &Side, b: &Side) -> (CmConnection, CmConnection) {
    let listener = CmListener::bind(b.pd.device(), on.any_port_of(1)).await.unwrap();
    let serve = async { listener.accept().await.unwrap().accept(&b.qp, options()).await };
    let (client, server) =
        tokio::join!(CmConnection::connect(&a.qp, listener.local_addr(), options()), serve);
    (client.unwrap(), server.unwrap())
}

/// The profiles whose queue pairs an exchange of addresses connects, as `connect` here does it. Those that only RDMA_CM
/// connects are for tests that connect by it.
pub(crate) fn profiles() -> Vec<Profile> {
    Profile::ALL.into_iter().filter(|p| p.capabilities().oob).collect()
}

/// Makes three tests of `async fn name(on: On)`: over every such profile by TCP, the same in shared memory, and on RDMA devices,
/// which is ignored by default.
/// `name(own_runtime)` does it for `fn name(on: On)`, which makes the runtimes that it wants.
macro_rules! on_every_profile {
    ($($name:ident $(($own:ident))?),+ $(,)?) => {$(
        mod $name {
            #[test]
            fn soft() {
                crate::harness::profiles().into_iter().for_each(|p| on(crate::harness::On::Soft(p)))
            }
            #[test]
            fn shm() {
                crate::harness::profiles().into_iter().for_each(|p| on(crate::harness::On::Shm(p)))
            }
            #[test]
            #[ignore = "needs RDMA devices"]
            fn verbs() {
                on(crate::harness::On::Devices)
            }
            fn on(on: crate::harness::On) {
                crate::harness::on_every_profile!(@ $name on $($own)?)
            }
        }
    )+};
    (@ $name:ident $on:ident) => { crate::harness::on_both_runtimes($on, super::$name) };
    (@ $name:ident $on:ident own_runtime) => { super::$name($on) };
}
pub(crate) use on_every_profile;

pub(crate) fn on_both_runtimes<F: AsyncFn(On)>(on: On, test: F) {
    for multi_thread in [false, true] {
        eprintln!("{on:?}, {}", if multi_thread { "multi-thread" } else { "current_thread" });
        run(multi_thread, test(on));
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
