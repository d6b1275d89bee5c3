//! Channels between pools in memory of GPUs, by a recorded driver.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::cuda::fake::Fake;
use crate::cuda::{Cuda, Event};
use crate::device::{Device, SoftConfig, SoftTransport};
use crate::memory::Memory;

#[cfg(feature = "metrics")]
#[path = "../../benches/common/recorder.rs"]
// It is of the tests and benches, too, which use all of it.
#[allow(dead_code, unreachable_pub)]
mod recorder;

const PATIENCE: Duration = Duration::from_secs(60);
const LAYERS: u32 = 2;
const BLOCKS: u32 = 32;
const BLOCK: u64 = 4096;

async fn endpoint(cuda: &Arc<Cuda>, device: u32, config: KvConfig) -> KvEndpoint {
    by(cuda, device, SoftTransport::Shm, config.gpu_path(GpuPath::Ipc)).await
}

async fn by(cuda: &Arc<Cuda>, device: u32, transport: SoftTransport, config: KvConfig) -> KvEndpoint {
    let soft = SoftConfig::new().transport(transport);
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    let layout = Layout::contiguous(LAYERS, BLOCKS, BLOCK).unwrap();
    let memory = Memory::cuda_of(cuda, device, layout.required_bytes());
    let pool = KvPool::with_memory(&pd, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::named(pool, config, "worker").unwrap()
}

/// From a pool on GPU 0 to one on GPU 1.
async fn pair(cuda: &Arc<Cuda>, qps: usize) -> (KvChannel, KvChannel) {
    let a = endpoint(cuda, 0, KvConfig::default().qps(qps)).await;
    let b = endpoint(cuda, 1, KvConfig::default().qps(qps)).await;
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap()
}

fn content(round: u64, layer: u32, position: u32) -> Vec<u8> {
    let salt = round * 1_000_003 + u64::from(layer) * 1009 + u64::from(position);
    (0..BLOCK).map(|i| ((i + 1).wrapping_mul(salt | 1) >> 5) as u8).collect()
}

fn places(count: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..LAYERS).flat_map(move |layer| (0..count).map(move |position| (layer, position)))
}

fn fill(blocks: &mut Blocks, round: u64) {
    for (layer, position) in places(blocks.len()) {
        blocks.copy_in(layer, position, 0, &content(round, layer, position)).unwrap();
    }
}

fn check(blocks: &Blocks, round: u64) {
    for (layer, position) in places(blocks.len()) {
        let mut got = vec![0; BLOCK as usize];
        blocks.copy_out(layer, position, 0, &mut got).unwrap();
        assert!(got == content(round, layer, position), "round {round}, layer {layer}, block {position}");
        let sum = crate::memory::checksum(&got);
        assert_eq!(blocks.checksum(layer, position).unwrap(), sum);
    }
}

/// The bytes of so many writes of several sizes, each of which has arrived as it was.
async fn written(tx: &KvChannel, rx: &KvChannel, rounds: u64) -> u64 {
    let mut bytes = 0;
    for round in 0..rounds {
        let count = 1 + (round as u32 * 7) % BLOCKS;
        let mut blocks = tx.pool().alloc(count).await.unwrap();
        fill(&mut blocks, round);
        let grant = rx.grant(rx.pool().alloc(count).await.unwrap()).unwrap();
        let write = tx.write(WriteRequest::new(&grant, blocks));
        let (landed, arrival) =
            tokio::time::timeout(PATIENCE, async { tokio::join!(write, rx.next_arrival()) }).await.unwrap();
        bytes += landed.0.unwrap().bytes;
        check(arrival.unwrap().blocks(), round);
    }
    bytes
}

/// Case 31: progress from eight workers, two devices, several queue pairs.
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn r9_case_31_every_call_is_in_the_context_of_its_device_whatever_thread_makes_it() {
    let (cuda, fake) = Fake::new(2);
    fake.lag(3);
    let (tx, rx) = pair(&cuda, 4).await;
    let bytes = written(&tx, &rx, 50).await;
    assert_eq!(fake.wrong(), Vec::<String>::new());
    let (ours, theirs) = (tx.path().gpu, rx.path().gpu);
    assert_eq!((ours.same_process.bytes_out, theirs.same_process.bytes_in), (bytes, bytes), "K9");
    assert_eq!(ours.same_process.operations_out, theirs.same_process.operations_in);
    assert!(tx.path().to_string().contains("gpu by same process"), "{}", tx.path());
}

/// Staged within one host: as IPC to its user, but that it says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn k9_required_staging_on_one_host_lands_by_slots_and_counts_the_payload_at_both_ends() {
    let (cuda, fake) = Fake::new(2);
    fake.lag(3);
    let staged = async |device| {
        by(&cuda, device, SoftTransport::Shm, KvConfig::default().gpu_path(GpuPath::Staged).qps(2)).await
    };
    let (a, b) = (staged(0).await, staged(1).await);
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (tx, rx) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
    let bytes = written(&tx, &rx, 20).await;
    let (ours, theirs) = (tx.path().gpu, rx.path().gpu);
    assert_eq!((ours.staged.bytes_out, theirs.staged.bytes_in), (bytes, bytes), "K9");
    assert_eq!((ours.same_process, theirs.same_process, theirs.host), Default::default());
    assert!(tx.path().to_string().contains("staging"), "{}", tx.path());
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

/// Case 9: what fills the source is still under way when the write is called with its event.
#[tokio::test]
async fn k1_case_9_a_write_is_posted_after_its_event_and_sends_what_the_stream_has_made() {
    let (cuda, fake) = Fake::new(2);
    let (tx, rx) = pair(&cuda, 1).await;
    let stream = fake.stream_of(0);
    for round in 0..100 {
        let mut blocks = tx.pool().alloc(BLOCKS).await.unwrap();
        fill(&mut blocks, 1000);
        fake.hold(true);
        let at = tx.pool().regions()[0].addr();
        let layers: Vec<u8> = places(BLOCKS).flat_map(|(l, p)| content(round, l, p)).collect();
        fake.queue_fill(stream, at, layers);
        // SAFETY: a stream of the recorded driver.
        let event = unsafe { Event::record_in(&cuda, 0, stream).unwrap() };
        let grant = rx.grant(rx.pool().alloc(BLOCKS).await.unwrap()).unwrap();
        let before = tx.path().qps[0].writes;
        let mut write = tx.write(WriteRequest::new(&grant, blocks).after(event));
        // It looks a few times, in vain.
        let waiting = tokio::time::timeout(Duration::from_millis(5), &mut write).await;
        assert!(waiting.is_err() && tx.path().qps[0].writes == before, "nothing is posted before the event");
        fake.hold(false);
        let (landed, arrival) =
            tokio::time::timeout(PATIENCE, async { tokio::join!(write, rx.next_arrival()) }).await.unwrap();
        landed.0.unwrap();
        check(arrival.unwrap().blocks(), round);
    }
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

#[tokio::test]
async fn k5_a_write_whose_event_does_not_come_ends_with_its_deadline_and_gives_its_blocks_back() {
    let (cuda, fake) = Fake::new(2);
    let (tx, rx) = pair(&cuda, 1).await;
    fake.hold(true);
    let stream = fake.stream_of(0);
    // SAFETY: a stream of the recorded driver.
    let event = || unsafe { Event::record_in(&cuda, 0, stream).unwrap() };
    let grant = rx.grant(rx.pool().alloc(2).await.unwrap()).unwrap();
    let blocks = tx.pool().alloc(2).await.unwrap();
    let request = WriteRequest::new(&grant, blocks).deadline(Duration::from_millis(30)).after(event());
    let (result, blocks) = tokio::time::timeout(PATIENCE, tx.write(request)).await.unwrap();
    assert!(matches!(result, Err(WriteError::NotDelivered(_))), "{result:?}");
    drop(blocks);
    // And one that is given up.
    let grant = rx.grant(rx.pool().alloc(2).await.unwrap()).unwrap();
    drop(tx.write(WriteRequest::new(&grant, tx.pool().alloc(2).await.unwrap()).after(event())));
    assert_eq!(tx.pool().free_blocks(), BLOCKS);
    assert_eq!(tx.path().gpu.same_process.bytes_out, 0);
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

#[tokio::test]
async fn k9_a_gpu_path_that_is_not_possible_is_refused_before_anything_is_connected() {
    let (cuda, _fake) = Fake::new(1);
    let layout = || Layout::contiguous(LAYERS, BLOCKS, BLOCK).unwrap();
    let pool = async |transport, memory| {
        let pd = Device::soft(SoftConfig::new().transport(transport)).unwrap().alloc_pd().unwrap();
        KvPool::with_memory(&pd, layout(), memory, PoolAccess::Both).await
    };
    let bytes = layout().required_bytes();
    let gpu = || Memory::cuda_of(&cuda, 0, bytes);
    for (transport, path, words) in [
        (SoftTransport::Auto, GpuPath::Ipc, "SoftTransport::Shm"),
        (SoftTransport::Shm, GpuPath::GpuDirect, "use ipc on one host"),
    ] {
        let pool = pool(transport, gpu()).await.unwrap();
        let error = KvEndpoint::new(pool, KvConfig::default().gpu_path(path)).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("gpu_path"), "{error}");
    }
    // Each path required, and each forbidden.
    use SoftTransport::{Auto, Shm, Tcp};
    let without = |path| GpuPaths::ALL.without(path);
    for (paths, taken_by) in [
        (GpuPaths::only(GpuPath::Any), &[Auto, Shm, Tcp][..]),
        (GpuPaths::only(GpuPath::Ipc), &[Shm]),
        (GpuPaths::only(GpuPath::Staged), &[Auto, Shm, Tcp]),
        (GpuPaths::only(GpuPath::GpuDirect), &[]),
        (without(GpuPath::Ipc), &[Auto, Shm, Tcp]),
        (without(GpuPath::Staged), &[Shm]),
        (without(GpuPath::GpuDirect), &[Auto, Shm, Tcp]),
        (without(GpuPath::Ipc).without(GpuPath::Staged), &[]),
        (without(GpuPath::Any), &[]),
    ] {
        for transport in [Auto, Shm, Tcp] {
            let endpoint =
                KvEndpoint::new(pool(transport, gpu()).await.unwrap(), KvConfig::default().gpu_paths(paths));
            let what = format!("{paths:?} over {transport}");
            match endpoint {
                Ok(_) => assert!(taken_by.contains(&transport), "{what}"),
                Err(e) => {
                    assert!(!taken_by.contains(&transport), "{what}: {e}");
                    assert!(e.to_string().contains("KvConfig::gpu_path"), "{what}: {e}");
                }
            }
        }
    }
    let host = pool(Shm, Memory::anonymous(bytes)).await.unwrap();
    KvEndpoint::new(host, KvConfig::default().gpu_paths(without(GpuPath::Staged))).unwrap();
    let host = pool(SoftTransport::Shm, Memory::anonymous(bytes)).await.unwrap();
    let error = KvEndpoint::new(host, KvConfig::default().gpu_path(GpuPath::Ipc)).unwrap_err().to_string();
    assert!(error.contains("host memory"), "{error}");
    let tcp = pool(SoftTransport::Tcp, gpu()).await.unwrap();
    let error = KvEndpoint::new(tcp, KvConfig::default().gpu_path(GpuPath::Ipc)).unwrap_err().to_string();
    assert!(error.contains("SoftTransport::Shm"), "{error}");
}

/// Each layer goes after the kernel that makes it, in whatever order they end; what was not made is not posted.
#[tokio::test]
async fn r8_a_pushed_layer_goes_after_its_event_and_nobody_polls_for_it() {
    let (cuda, fake) = Fake::new(2);
    let (tx, rx) = pair(&cuda, 1).await;
    let stream = fake.stream_of(0);
    let at = tx.pool().regions()[0].addr();
    for round in 0..10 {
        let mut blocks = tx.pool().alloc(BLOCKS).await.unwrap();
        fill(&mut blocks, 1000);
        let (grant, arrivals) = rx.grant_layers(rx.pool().alloc(BLOCKS).await.unwrap()).unwrap();
        let mut write = tx.write_layers(WriteRequest::new(&grant, blocks)).unwrap();
        let before = tx.path().qps[0].bytes_written;
        for layer in 0..LAYERS {
            fake.hold(true);
            let bytes: Vec<u8> = (0..BLOCKS).flat_map(|p| content(round, layer, p)).collect();
            fake.queue_fill(stream, at + u64::from(layer) * u64::from(BLOCKS) * BLOCK, bytes);
            // SAFETY: a stream of the recorded driver.
            let event = unsafe { Event::record_in(&cuda, 0, stream).unwrap() };
            write.push_after(layer, event).unwrap();
            assert!(matches!(write.push(layer), Err(LayerError::Pushed { .. })));
            // It looks a few times, in vain.
            tokio::time::sleep(Duration::from_millis(4)).await;
            let posted = tx.path().qps[0].bytes_written - before;
            assert_eq!(posted, u64::from(layer) * u64::from(BLOCKS) * BLOCK, "nothing before its event");
            fake.hold(false);
            let gone = async {
                while tx.path().qps[0].bytes_written - before == posted {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(PATIENCE, gone).await.unwrap();
        }
        let (landed, arrived) =
            tokio::time::timeout(PATIENCE, async { tokio::join!(write.finish(), arrivals.finish()) })
                .await
                .unwrap();
        assert_eq!(landed.0.unwrap().layers.len(), LAYERS as usize);
        check(&arrived.unwrap(), round);
    }
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

/// What `PathReport::gpu` counts is told to the recorder, by way and direction.
#[cfg(feature = "metrics")]
#[tokio::test]
async fn k9_payload_of_gpus_is_told_by_the_way_it_went() {
    let numbers = recorder::Numbers::default();
    // Channels ask for their handles as they are connected, on this thread.
    let _here = ::metrics::set_default_local_recorder(&numbers);
    let (cuda, _fake) = Fake::new(2);
    for (transport, way) in [(SoftTransport::Shm, "same_process"), (SoftTransport::Tcp, "staged")] {
        let a = by(&cuda, 0, transport, KvConfig::default()).await;
        let b = by(&cuda, 1, transport, KvConfig::default()).await;
        let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (tx, rx) = tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap();
        let grant = rx.grant(rx.pool().alloc(3).await.unwrap()).unwrap();
        let write = tx.write(WriteRequest::new(&grant, tx.pool().alloc(3).await.unwrap()));
        let (landed, arrival) = tokio::join!(write, rx.next_arrival());
        let bytes = landed.0.unwrap().bytes;
        arrival.unwrap();
        tx.close().await.unwrap();
        let told = numbers.all();
        let of = |direction: &str| {
            told[&format!("landfall_gpu_bytes_total{{direction={direction},peer=worker,way={way}}}")]
        };
        // Both ends are in this process, under one name.
        assert_eq!((of("out"), of("in")), (bytes as f64, bytes as f64), "{told:#?}");
    }
    let known: Vec<_> = numbers.all().into_keys().filter(|key| key.starts_with("landfall_gpu")).collect();
    assert_eq!(known.len(), 10, "{known:?}");
}
