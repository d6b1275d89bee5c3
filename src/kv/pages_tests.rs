//! Many small blocks over one host: they travel as WRITEs of pages, whatever the memory, and are what they would be block by block.

use std::time::Duration;

use super::*;
use crate::device::{Device, Profile, SoftConfig, SoftTransport};
use crate::memory::Memory;

const PATIENCE: Duration = Duration::from_secs(60);
const LAYERS: u32 = 3;
const BLOCKS: u32 = 300;

async fn endpoint(soft: SoftConfig, memory: impl Fn(u64) -> Memory, block: u64) -> KvEndpoint {
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    let layout = Layout::contiguous(LAYERS, BLOCKS, block).unwrap();
    let pool = KvPool::with_memory(&pd, layout, memory(layout.required_bytes()), PoolAccess::Both).await;
    KvEndpoint::new(pool.unwrap(), KvConfig::default()).unwrap()
}

/// Of host memory, on several rails.
async fn on_rails(rails: &[SoftConfig], block: u64) -> KvEndpoint {
    let pd = |soft: &SoftConfig| Device::soft(soft.clone()).unwrap().alloc_pd().unwrap();
    let (pds, layout) =
        (rails.iter().map(pd).collect::<Vec<_>>(), Layout::contiguous(LAYERS, BLOCKS, block).unwrap());
    let pds: Vec<_> = pds.iter().collect();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, KvConfig::default()).unwrap()
}

async fn pair(
    soft: &SoftConfig,
    memory: (impl Fn(u64) -> Memory, impl Fn(u64) -> Memory),
    block: u64,
) -> (KvChannel, KvChannel) {
    let (a, b) =
        (endpoint(soft.clone(), memory.0, block).await, endpoint(soft.clone(), memory.1, block).await);
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap()
}

fn shuffled(seed: u32) -> Vec<u32> {
    (0..BLOCKS).map(|i| (i * 7 + seed * 13) % BLOCKS).collect()
}

fn content(round: u32, layer: u32, position: u32, block: u64) -> Vec<u8> {
    let salt = u64::from(round * 1_000_003 + layer * 1009 + position);
    (0..block).map(|i| ((i + 1).wrapping_mul(salt * 2 + 1) >> 5) as u8).collect()
}

/// Rounds of all blocks, from anywhere to anywhere. The WRITEs that it took, and the bytes.
async fn rounds(tx: &KvChannel, rx: &KvChannel, block: u64) -> (u64, u64) {
    let mut bytes = 0;
    for round in 0..3 {
        let mut from = tx.pool().claim(&shuffled(round)).unwrap();
        for (layer, position) in (0..LAYERS).flat_map(|l| (0..BLOCKS).map(move |p| (l, p))) {
            from.copy_in(layer, position, 0, &content(round, layer, position, block)).unwrap();
        }
        let grant = rx.grant(rx.pool().claim(&shuffled(round + 50)).unwrap()).unwrap();
        let write = tx.write(WriteRequest::new(&grant, from));
        let (landed, arrival) =
            tokio::time::timeout(PATIENCE, async { tokio::join!(write, rx.next_arrival()) }).await.unwrap();
        bytes += landed.0.unwrap().bytes;
        let (arrival, mut got) = (arrival.unwrap(), vec![0; block as usize]);
        for (layer, position) in (0..LAYERS).flat_map(|l| (0..BLOCKS).map(move |p| (l, p))) {
            arrival.blocks().copy_out(layer, position, 0, &mut got).unwrap();
            assert!(
                got == content(round, layer, position, block),
                "{round}: layer {layer}, block {position}"
            );
        }
    }
    let report = tx.path();
    let carried: u64 = report.qps.iter().map(|qp| qp.bytes_written).sum();
    assert_eq!((carried, bytes), (bytes, 3 * u64::from(LAYERS * BLOCKS) * block), "K9");
    (report.qps.iter().map(|qp| qp.writes).sum(), bytes)
}

/// A small block and one of no round length, on every profile that has blocks of that size in one message.
#[tokio::test]
async fn k8_small_blocks_are_pages_on_every_profile_and_land_where_they_belong() {
    for profile in Profile::ALL {
        let soft = SoftConfig::new().transport(SoftTransport::Shm).profile(profile).seed(7);
        let host = Memory::anonymous;
        // A region of `tiny` has a mebibyte.
        let block = if profile == Profile::Tiny { 1000 } else { 1152 };
        let (tx, rx) = pair(&soft, (host, host), block).await;
        let (writes, _) = rounds(&tx, &rx, block).await;
        assert!(writes < 3 * u64::from(BLOCKS) / 2, "{profile}: {writes} WRITEs");
    }
}

/// Two of shared memory, and one beside TCP: blocks that are more than a rail may carry at once at first, with their layers, and small
/// ones.
#[tokio::test]
async fn k10_pages_travel_on_several_rails_whatever_each_of_them_takes() {
    for profile in Profile::ALL {
        let soft = |on| SoftConfig::new().transport(on).profile(profile).seed(7);
        let others = [SoftTransport::Shm, SoftTransport::Tcp];
        let blocks = if profile == Profile::Default { &[1000, 24 << 10][..] } else { &[1000] };
        for (other, &block) in others.iter().flat_map(|on| blocks.iter().map(move |block| (*on, block))) {
            let rails = [soft(SoftTransport::Shm), soft(other)];
            let (a, b) = (on_rails(&rails, block).await, on_rails(&rails, block).await);
            let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let (tx, rx) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
            let (writes, _) = rounds(&tx, &rx, block).await;
            let few = other == SoftTransport::Shm && block == 1000;
            assert!(!few || writes < 3 * u64::from(BLOCKS) / 2, "{profile}: {writes} WRITEs");
        }
    }
}

/// Over TCP nobody takes pages.
#[tokio::test]
async fn k8_over_tcp_each_block_is_a_write() {
    let soft = SoftConfig::new().transport(SoftTransport::Tcp);
    let (tx, rx) = pair(&soft, (Memory::anonymous, Memory::anonymous), 1000).await;
    let (writes, _) = rounds(&tx, &rx, 1000).await;
    assert!(writes > 3 * u64::from(LAYERS * BLOCKS) / 2, "{writes} WRITEs");
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use crate::cuda::fake::Fake;

    /// Within one GPU a kernel copies them. Between two, and where the length is no multiple of what the kernel copies, the driver
    /// does, piece by piece.
    #[tokio::test]
    async fn k8_pages_between_memory_of_gpus_and_the_host() {
        let (cuda, fake) = Fake::new(2);
        fake.lag(2);
        let soft = SoftConfig::new().transport(SoftTransport::Shm);
        let gpu = |n| {
            let cuda = cuda.clone();
            move |bytes| Memory::cuda_of(&cuda, n, bytes)
        };
        for (to, block, by_kernel) in [(0, 1152, true), (1, 1152, false), (0, 1001, false)] {
            let (tx, rx) = pair(&soft, (gpu(0), gpu(to)), block).await;
            let before = fake.count("cuLaunchKernel");
            let (writes, bytes) = rounds(&tx, &rx, block).await;
            assert!(writes <= 3, "{writes} WRITEs of 64 MiB at most");
            let kernels = fake.count("cuLaunchKernel") - before;
            assert_eq!(kernels == 3, by_kernel, "{kernels} kernels, GPU {to}, blocks of {block}");
            let (ours, theirs) = (tx.path().gpu, rx.path().gpu);
            assert_eq!((ours.same_process.bytes_out, theirs.same_process.bytes_in), (bytes, bytes), "K9");
            if by_kernel {
                let operations = (ours.same_process.operations_out, theirs.same_process.operations_in);
                assert_eq!(operations, (3, 3));
                assert_eq!(theirs.calls, 6, "a kernel and its list each");
            }
        }
        let (tx, rx) = pair(&soft, (gpu(0), Memory::anonymous), 1152).await;
        let (_, bytes) = rounds(&tx, &rx, 1152).await;
        assert_eq!(rx.path().gpu.same_process.bytes_in, bytes);
        let (tx, rx) = pair(&soft, (Memory::anonymous, gpu(1)), 1152).await;
        let (_, bytes) = rounds(&tx, &rx, 1152).await;
        assert_eq!(rx.path().gpu.host.bytes_in, bytes);
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }
}
