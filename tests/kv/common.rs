//! Two connected endpoints, blocks with known content, and one harness over every profile, over TCP and in shared memory, and
//! over RDMA devices.

use std::future::Future;
use std::time::Duration;

use landfall::device::Device;
use landfall::kv::{Blocks, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout};

pub(crate) use crate::on::On;

/// Longer than anything takes on a busy machine. A test that reaches it hangs, and says where.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Makes a test for each profile over TCP, and one in shared memory, out of `async fn name(on: On)`.
macro_rules! on_soft_profiles {
    ($($name:ident $({ $more:item })?),+ $(,)?) => {$(
        mod $name {
            use super::$name as body;
            mod tcp { $crate::on::on_each_profile!(Soft, common); }
            mod shm { $crate::on::on_each_profile!(Shm, common); }
            $($more)?
        }
    )+};
}
pub(crate) use on_soft_profiles;

/// The same out of `async fn name(on: On)`, and a test on RDMA devices, which is ignored by default.
macro_rules! on_every_profile {
    ($($name:ident),+ $(,)?) => {
        $crate::common::on_soft_profiles!($($name {
            #[test]
            #[ignore = "needs RDMA devices"]
            fn verbs() { $crate::common::run(body($crate::common::On::Devices)) }
        }),+);
    };
}
pub(crate) use on_every_profile;

/// Runs a test on a multi-thread runtime.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") });
}

/// The near end's device.
pub fn device(on: impl Into<On>) -> Device {
    on.into().devices().0
}

pub fn layout(layers: u32, blocks: u32, block_bytes: u64) -> Layout {
    Layout::contiguous(layers, blocks, block_bytes).unwrap()
}

/// At the near end.
pub async fn endpoint(on: impl Into<On>, layout: Layout, config: KvConfig) -> KvEndpoint {
    let on = on.into();
    endpoint_of(on, on.devices().0, layout, config).await
}

/// At the far end.
pub async fn far_endpoint(on: impl Into<On>, layout: Layout, config: KvConfig) -> KvEndpoint {
    let on = on.into();
    endpoint_of(on, on.devices().1, layout, config).await
}

async fn endpoint_of(on: On, device: Device, layout: Layout, config: KvConfig) -> KvEndpoint {
    let pool = KvPool::new(&device.alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, on.admit(config.require_rdma(on == On::Devices))).unwrap()
}

/// Queue pairs for a channel: as many as the completion queue has room for, `want` at most.
pub fn qps(on: On, want: u32) -> usize {
    (on.caps().max_cqe / 24).clamp(1, want) as usize
}

/// A config whose failures come late enough for a busy machine, and an emulated one.
pub fn config() -> KvConfig {
    KvConfig::default().abort_grace(PATIENCE / 4).peer_timeout(PATIENCE / 4).connect_timeout(PATIENCE / 4)
}

pub struct Pair {
    /// Writes.
    pub sender: KvChannel,
    /// Grants.
    pub receiver: KvChannel,
    pub sending: KvEndpoint,
    pub receiving: KvEndpoint,
    pub listener: KvListener,
}

pub async fn pair(on: impl Into<On>, layout: Layout) -> Pair {
    pair_with(on, layout, config(), config()).await
}

pub async fn pair_with(on: impl Into<On>, layout: Layout, sends: KvConfig, receives: KvConfig) -> Pair {
    let on = on.into();
    let sending = endpoint(on, layout, sends).await;
    let receiving = far_endpoint(on, layout, receives).await;
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Pair { sender: sender.unwrap(), receiver: receiver.unwrap(), sending, receiving, listener }
}

/// What belongs in the block at `position` in `layer`, under `seed`.
pub fn content(seed: u64, layer: u32, position: u32, bytes: &mut [u8]) {
    for (at, eight) in (0u64..).zip(bytes.chunks_mut(8)) {
        let mut x = seed ^ (u64::from(layer) << 48) ^ (u64::from(position) << 20) ^ at;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        eight.copy_from_slice(&(x ^ (x >> 31)).to_le_bytes()[..eight.len()]);
    }
}

pub fn fill(blocks: &mut Blocks, seed: u64) {
    let layout = *blocks.pool().layout();
    let mut bytes = vec![0; layout.block_bytes() as usize];
    for layer in 0..layout.layers() {
        for position in 0..blocks.len() {
            content(seed, layer, position, &mut bytes);
            blocks.copy_in(layer, position, 0, &bytes).unwrap();
        }
    }
}

/// Number of blocks at `positions` whose content is not what `fill` wrote under `seed` at the position given by `from`.
pub fn wrong(blocks: &Blocks, seed: u64, from: impl Fn(u32) -> u32) -> usize {
    let layout = *blocks.pool().layout();
    let (mut got, mut wrong) = (vec![0; layout.block_bytes() as usize], 0);
    let mut expected = got.clone();
    for layer in 0..layout.layers() {
        for position in 0..blocks.len() {
            blocks.copy_out(layer, position, 0, &mut got).unwrap();
            content(seed, layer, from(position), &mut expected);
            if got != expected {
                wrong += 1;
            }
        }
    }
    wrong
}

/// Waits until `done`: yields to the runtime, and gives up at `PATIENCE`.
pub async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !done() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "still waiting for: {what}");
}
