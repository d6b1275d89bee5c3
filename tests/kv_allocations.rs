//! What a small write of a `KvChannel` allocates in steady state: counted by the allocator, both ends together.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::kv::{Blocks, Grant, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, WriteRequest};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Block) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Block) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Block, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Writes of a round, whose grants are made before it is counted.
const WRITES: u64 = 50;

/// Most allocations of one 4 KiB write, from the request to the arrival's blocks in the pool again.
const BOUND: u64 = 8;

/// The one test of this binary: nothing else allocates meanwhile.
#[test]
fn k1_a_small_write_allocates_a_bounded_number_of_times() {
    let profiles = Profile::ALL.into_iter().map(|p| SoftConfig::new().profile(p));
    for soft in
        profiles.flat_map(|c| [SoftTransport::Tcp, SoftTransport::Shm].map(|t| c.clone().transport(t)))
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let least = runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(120), count(&soft)).await.expect("the test hangs")
        });
        let each = least.div_ceil(WRITES);
        println!("{soft}: {least} allocations in {WRITES} writes, grants apart");
        assert!(each <= BOUND, "{soft}: {each} allocations a write, at most {BOUND} are expected");
    }
}

/// The fewest allocations of a round: a heartbeat or a growing table falls into some.
async fn count(soft: &SoftConfig) -> u64 {
    let endpoint = async || {
        let device = Device::soft(soft.clone()).unwrap();
        let layout = Layout::contiguous(1, 256, 4096).unwrap();
        let pool = KvPool::new(&device.alloc_pd().unwrap(), layout).await.unwrap();
        KvEndpoint::new(pool, KvConfig::default()).unwrap()
    };
    let (sending, receiving) = (endpoint().await, endpoint().await);
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
    let mut source = Arc::new(sending.pool().try_alloc(1).unwrap());
    let mut least = u64::MAX;
    for _ in 0..8 {
        let grants: Vec<Grant> =
            (0..WRITES).map(|_| receiver.grant(receiving.pool().try_alloc(1).unwrap()).unwrap()).collect();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for grant in &grants {
            source = write(&sender, &receiver, grant, source).await;
        }
        least = least.min(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    least
}

async fn write(sender: &KvChannel, receiver: &KvChannel, grant: &Grant, source: Arc<Blocks>) -> Arc<Blocks> {
    let write = sender.write(WriteRequest::new(grant, source));
    let ((result, back), arrival) = tokio::join!(write, receiver.next_arrival());
    assert_eq!((result.unwrap().bytes, arrival.unwrap().bytes()), (4096, 4096));
    back
}
