//! Two connected endpoints, blocks with known content, and one harness over every profile.

use std::future::Future;
use std::time::Duration;

use landfall::device::{Device, Profile, SoftConfig};
use landfall::kv::{Blocks, KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout};

/// Longer than anything takes on a busy machine. A test that reaches it hangs, and says where.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Makes a test for each profile out of `async fn name(profile: Profile)`.
macro_rules! on_every_profile {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use landfall::device::Profile;
            #[test]
            fn default() { crate::common::run(super::$name(Profile::Default)) }
            #[test]
            fn erdma_compat() { crate::common::run(super::$name(Profile::ErdmaCompat)) }
            #[test]
            fn erdma_standard() { crate::common::run(super::$name(Profile::ErdmaStandard)) }
            #[test]
            fn siw() { crate::common::run(super::$name(Profile::Siw)) }
            #[test]
            fn srd() { crate::common::run(super::$name(Profile::Srd)) }
            #[test]
            fn tiny() { crate::common::run(super::$name(Profile::Tiny)) }
        }
    )+};
}
pub(crate) use on_every_profile;

/// Runs a test on a multi-thread runtime.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") });
}

pub fn device(profile: Profile) -> Device {
    Device::soft(SoftConfig::new().profile(profile).seed(7)).unwrap()
}

pub fn layout(layers: u32, blocks: u32, block_bytes: u64) -> Layout {
    Layout::contiguous(layers, blocks, block_bytes).unwrap()
}

pub async fn endpoint(profile: Profile, layout: Layout, config: KvConfig) -> KvEndpoint {
    let pd = device(profile).alloc_pd().unwrap();
    KvEndpoint::new(KvPool::new(&pd, layout).await.unwrap(), config).unwrap()
}

/// A config whose failures come soon enough for a test, and late enough for a busy machine.
pub fn config() -> KvConfig {
    KvConfig::default()
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

pub async fn pair(profile: Profile, layout: Layout) -> Pair {
    pair_with(profile, layout, config(), config()).await
}

pub async fn pair_with(profile: Profile, layout: Layout, sends: KvConfig, receives: KvConfig) -> Pair {
    let sending = endpoint(profile, layout, sends).await;
    let receiving = endpoint(profile, layout, receives).await;
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Pair { sender: sender.unwrap(), receiver: receiver.unwrap(), sending, receiving, listener }
}

/// A byte that belongs at `at` of the block at `position` in `layer`, under `seed`.
fn byte(seed: u64, layer: u32, position: u32, at: u64) -> u8 {
    let mut x = seed ^ (u64::from(layer) << 48) ^ (u64::from(position) << 20) ^ (at >> 3);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ (x >> 31)) >> ((at & 7) * 8)) as u8
}

pub fn fill(blocks: &mut Blocks, seed: u64) {
    let layout = *blocks.pool().layout();
    let mut bytes = vec![0; layout.block_bytes() as usize];
    for layer in 0..layout.layers() {
        for position in 0..blocks.len() {
            for (at, b) in bytes.iter_mut().enumerate() {
                *b = byte(seed, layer, position, at as u64);
            }
            blocks.copy_in(layer, position, 0, &bytes).unwrap();
        }
    }
}

/// Number of blocks at `positions` whose content is not what `fill` wrote under `seed` at the position given by `from`.
pub fn wrong(blocks: &Blocks, seed: u64, from: impl Fn(u32) -> u32) -> usize {
    let layout = *blocks.pool().layout();
    let (mut got, mut wrong) = (vec![0; layout.block_bytes() as usize], 0);
    for layer in 0..layout.layers() {
        for position in 0..blocks.len() {
            blocks.copy_out(layer, position, 0, &mut got).unwrap();
            let source = from(position);
            if (0..got.len()).any(|at| got[at] != byte(seed, layer, source, at as u64)) {
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
