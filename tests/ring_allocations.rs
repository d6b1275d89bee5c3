//! In steady state an operation allocates nothing: counted by the allocator, over the ring and the soft provider.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::memory::{Access, Memory};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, Op, QpConfig, QueuePair, Role};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// The one test of this binary: nothing else allocates meanwhile.
#[test]
fn operations_allocate_nothing_in_steady_state() {
    // Those that only RDMA_CM connects are not connected here.
    for profile in Profile::ALL.into_iter().filter(|p| p.capabilities().oob) {
        for transport in [SoftTransport::Tcp, SoftTransport::Shm] {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let run = count(SoftConfig::new().profile(profile).transport(transport));
                tokio::time::timeout(Duration::from_secs(60), run).await.expect("within the deadline")
            });
        }
    }
}

async fn count(soft: SoftConfig) {
    let name = soft.to_string();
    let device = Device::soft(soft).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = || CompletionQueue::new(&device, CqConfig::new(32)).unwrap();
    let (ca, cb) = (cq(), cq());
    let qp = |cq| QueuePair::new(&pd, cq, cq, QpConfig::new(16, 16)).unwrap();
    let (a, b) = (qp(&ca), qp(&cb));
    let (to_a, to_b) = (a.endpoint().unwrap(), b.endpoint().unwrap());
    b.connect(&to_a, Role::Passive, ConnectOptions::default()).await.unwrap();
    a.connect(&to_b, Role::Active, ConnectOptions::default()).await.unwrap();
    let target = pd.register_exposed(Memory::anonymous(4096), Access::READ_WRITE).await.unwrap();
    let remote = target.remote().whole();
    let mut buf = pd.register_local(Memory::anonymous(4096)).await.unwrap().into_slice();
    let shared = pd.register_exposed(Memory::anonymous(4096), Access::READ).await.unwrap();
    let mut least = u64::MAX;
    // The first rounds warm up: vectors grow to what is in use at once.
    for _ in 0..8 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..100 {
            let recv = b.recv(());
            let (result, back) = a.write_imm(buf, remote, 7).await;
            result.unwrap();
            recv.await.0.unwrap();
            let (result, back) = a.read(back, remote).await;
            result.unwrap();
            buf = back;
            let mut batch = a.batch();
            for i in 0..16 {
                batch.push(Op::write(shared.slice(..).unwrap(), remote).user_data(i)).unwrap();
            }
            batch.push_wait(Op::write(shared.slice(..).unwrap(), remote)).await.unwrap();
            batch.submit();
            for _ in 0..17 {
                ca.next().await.unwrap().result.unwrap();
            }
        }
        least = least.min(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    assert_eq!(least, 0, "{name}: allocations in 2,000 operations of steady state");
}
