//! K6: a peer that has a GPU copy to blocks behind the end of their transfer, by a recorded driver.

use std::sync::Arc;
use std::time::Duration;

use crate::cuda::Cuda;
use crate::cuda::fake::Fake;
use crate::device::{Device, SoftConfig, SoftTransport};
use crate::kv::{
    ArrivalError, Blocks, Cause, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, WriteRequest,
};
use crate::memory::Memory;
use crate::provider::{SendOp, Sge, WrChain};

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: u32 = 8;
const BLOCK: u64 = 4096;

async fn endpoint(cuda: &Arc<Cuda>, config: KvConfig) -> KvEndpoint {
    let pd = Device::soft(SoftConfig::new().transport(SoftTransport::Shm)).unwrap().alloc_pd().unwrap();
    let layout = Layout::contiguous(1, BLOCKS, BLOCK).unwrap();
    let memory = Memory::cuda_of(cuda, 0, layout.required_bytes());
    let pool = KvPool::with_memory(&pd, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, config).unwrap()
}

async fn pair(cuda: &Arc<Cuda>, config: &KvConfig) -> (KvChannel, KvChannel) {
    let (a, b) = (endpoint(cuda, config.clone()).await, endpoint(cuda, config.clone()).await);
    let mut listener = b.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    tokio::try_join!(a.connect(listener.local_addr()), listener.accept()).unwrap()
}

/// Writes a block of `tx` to block `to` of the peer, past the library, by queue pair `qp`; and waits until the peer's GPU has it before it.
async fn write_past(tx: &KvChannel, rx: &KvChannel, fake: &Fake, qp: usize, to: u32) {
    let before = fake.queued();
    {
        let inner = crate::kv::lock(&tx.inner.driver.inner);
        let from = tx.pool().regions()[0].slice(..BLOCK).unwrap().sge();
        let target = rx.pool().regions()[0].remote();
        let mut chain = WrChain::default();
        let op =
            SendOp::Write { remote_addr: target.addr + u64::from(to) * BLOCK, rkey: target.rkey, imm: None };
        let sge = Sge { addr: from.addr, len: BLOCK as u32, lkey: from.lkey };
        chain.push(u64::MAX, op, &[sge], false, false);
        inner.queues[qp].qp().unwrap().post_send(&chain).unwrap();
    }
    let there = async {
        while fake.queued() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, there).await.expect("the copy is queued");
}

fn first_byte(blocks: &Blocks) -> u8 {
    let mut byte = [0];
    blocks.copy_out(0, 0, 0, &mut byte).unwrap();
    byte[0]
}

/// The copy on one queue pair is under way when the other one says that the transfer is over. Nobody else gets those blocks before it is.
#[tokio::test]
async fn k6_blocks_that_a_gpu_still_copies_to_for_the_peer_are_given_to_nobody() {
    let (cuda, fake) = Fake::new(1);
    let config = KvConfig::default().qps(2);
    for own in [true, false] {
        let (tx, rx) = pair(&cuda, &config).await;
        let mut late = tx.pool().claim(&[0]).unwrap();
        late.copy_in(0, 0, 0, &[0xee; BLOCK as usize]).unwrap();
        let granted = rx.pool().claim(&[3]).unwrap();
        let grant = rx.grant(granted).unwrap();
        // Of another grant, which stays open, it is allowed.
        let open = rx.grant(rx.pool().claim(&[5]).unwrap()).unwrap();
        fake.hold_new(true);
        write_past(&tx, &rx, &fake, 1, if own { 3 } else { 5 }).await;
        fake.hold_new(false);
        let mut source = tx.pool().claim(&[1]).unwrap();
        source.copy_in(0, 0, 0, &[0x11; BLOCK as usize]).unwrap();
        let write = tx.write(WriteRequest::new(&grant, source));
        let (_, arrival) =
            tokio::time::timeout(PATIENCE, async { tokio::join!(write, rx.next_arrival()) }).await.unwrap();
        if own {
            assert!(matches!(arrival, Err(ArrivalError::Aborted { grant: id, .. }) if id == grant.id()));
            let closed = tokio::time::timeout(PATIENCE, rx.closed()).await.unwrap();
            assert!(matches!(closed.cause(), Cause::Violation(_)), "{closed}");
            assert_eq!(fake.queued(), 0, "its copy is over when the blocks are free");
            assert_eq!(rx.pool().free_blocks(), BLOCKS);
        } else {
            assert_eq!(first_byte(arrival.unwrap().blocks()), 0x11);
            assert!(rx.inner.driver.is_open() && fake.queued() > 0, "the other one is under way still");
            rx.revoke(&open);
        }
    }
    assert_eq!(fake.wrong(), Vec::<String>::new());
}
