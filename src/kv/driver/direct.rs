//! GPUDirect: the network device of a rail reads and writes the memory of a GPU itself. What it has written is visible there before
//! anybody hears of it, and what it has carried is counted as that.

use std::sync::Arc;

use crate::cuda::{CudaError, DeviceMemory, PathTraffic};
use crate::kv::path::QpReport;
use crate::kv::pool::KvPool;
use crate::provider::WcOpcode;

/// Of one rail: the memory of a GPU that its network device is given. `None` for any other pool or device.
#[derive(Debug)]
pub(super) struct Direct(Option<Arc<DeviceMemory>>);

impl Direct {
    /// Of `pool`, where the rail's device is a network device.
    pub(super) fn new(pool: &KvPool, network: bool) -> Self {
        let memory = pool.regions().first().and_then(|region| region.device_memory());
        Self(memory.filter(|_| network).cloned())
    }

    /// Before a completion is told: what its device has written for it is visible to what the GPU does next.
    pub(super) fn settle(&self, opcode: WcOpcode) -> Result<(), CudaError> {
        match (&self.0, opcode) {
            (Some(memory), WcOpcode::Recv | WcOpcode::RecvWriteWithImm | WcOpcode::Read) => {
                memory.flush_direct_writes()
            }
            _ => Ok(()),
        }
    }

    /// Adds what the rail's queue pairs have carried by it. Of what the peer writes here its device has the count.
    pub(super) fn count<'r>(&self, reports: impl Iterator<Item = &'r QpReport>, traffic: &mut PathTraffic) {
        if self.0.is_none() {
            return;
        }
        for report in reports {
            traffic.bytes_out += report.bytes_written;
            traffic.operations_out += report.writes;
            traffic.bytes_in += report.bytes_read;
            traffic.operations_in += report.reads;
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cuda::Cuda;
    use crate::cuda::fake::Fake;
    use crate::device::{Device, SoftConfig, SoftTransport};
    use crate::kv::path_rails::RailState;
    use crate::kv::{KvChannel, KvConfig, KvEndpoint, Layout, PoolAccess, WriteRequest, lock};
    use crate::memory::Memory;

    const FLUSH: &str = "cuFlushGPUDirectRDMAWrites";
    const BLOCKS: u32 = 32;
    const BLOCK: usize = 128 << 10;

    async fn pool(rails: usize, memory: impl FnOnce(u64) -> Memory) -> KvPool {
        let layout = Layout::contiguous(1, BLOCKS, BLOCK as u64).unwrap();
        let soft = || Device::soft(SoftConfig::new().transport(SoftTransport::Shm)).unwrap();
        let pds: Vec<_> = (0..rails).map(|_| soft().alloc_pd().unwrap()).collect();
        let pds: Vec<_> = pds.iter().collect();
        KvPool::on_rails(&pds, layout, memory(layout.required_bytes()), PoolAccess::Both).await.unwrap()
    }

    #[tokio::test]
    async fn k1_what_a_network_device_wrote_is_flushed_before_it_is_told_and_counted_as_gpudirect() {
        let (cuda, fake) = Fake::new(1);
        let gpu = pool(1, |bytes| Memory::cuda_of(&cuda, 0, bytes)).await;
        let host = pool(1, Memory::anonymous).await;
        let report =
            QpReport { bytes_written: 300, writes: 3, bytes_read: 70, reads: 2, ..Default::default() };
        for (pool, network, direct) in [(&gpu, true, true), (&gpu, false, false), (&host, true, false)] {
            let this = Direct::new(pool, network);
            let flushes = fake.count(FLUSH);
            for opcode in [WcOpcode::Recv, WcOpcode::RecvWriteWithImm, WcOpcode::Read, WcOpcode::Write] {
                this.settle(opcode).unwrap();
            }
            let flushes = fake.count(FLUSH) - flushes;
            let mut traffic = PathTraffic::default();
            this.count([report, report].iter(), &mut traffic);
            let carried =
                (traffic.bytes_out, traffic.operations_out, traffic.bytes_in, traffic.operations_in);
            let expected = if direct { (3, (600, 6, 140, 4)) } else { (0, (0, 0, 0, 0)) };
            assert_eq!((flushes, carried), expected, "{network}");
        }
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }

    /// A channel between two pools in memory of a GPU. The device of the rails in `direct` passes for a network device.
    async fn pair(cuda: &Arc<Cuda>, rails: usize, direct: usize) -> (KvChannel, KvChannel) {
        let hours = Duration::from_secs(36_000);
        let end = async || {
            let pool = pool(rails, |bytes| Memory::cuda_of(cuda, 0, bytes)).await;
            KvEndpoint::new(pool, KvConfig::default().rail_probe(hours, hours)).unwrap()
        };
        let (near, far) = (end().await, end().await);
        let mut listener = far.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (tx, rx) = tokio::try_join!(near.connect(listener.local_addr()), listener.accept()).unwrap();
        for channel in [&tx, &rx] {
            lock(&channel.inner.driver.inner).rails[direct].direct = Direct::new(channel.pool(), true);
        }
        (tx, rx)
    }

    /// All blocks, written and compared. Answers the bytes.
    async fn write(tx: &KvChannel, rx: &KvChannel, round: u8) -> u64 {
        let content = |block: u32| vec![round.wrapping_mul(31) ^ block as u8; BLOCK];
        let mut source = tx.pool().alloc(BLOCKS).await.unwrap();
        for block in 0..BLOCKS {
            source.copy_in(0, block, 0, &content(block)).unwrap();
        }
        let grant = rx.grant(rx.pool().alloc(BLOCKS).await.unwrap()).unwrap();
        let ((landed, _source), arrival) =
            tokio::join!(tx.write(WriteRequest::new(&grant, source)), rx.next_arrival());
        let (landed, arrival) = (landed.unwrap(), arrival.unwrap());
        for block in 0..BLOCKS {
            let mut got = vec![0; BLOCK];
            arrival.blocks().copy_out(0, block, 0, &mut got).unwrap();
            assert!(got == content(block), "round {round}, block {block}");
        }
        landed.bytes
    }

    #[tokio::test]
    async fn k10_a_flush_that_fails_takes_its_rail_and_the_others_do_the_work() {
        let (cuda, fake) = Fake::new(1);
        let (tx, rx) = pair(&cuda, 3, 1).await;
        let bytes = write(&tx, &rx, 0).await;
        assert!(fake.count(FLUSH) > 0, "the peer's word that it has landed is among what is flushed for");
        let path = tx.path();
        let (direct, of_rail) = (path.gpu.gpudirect, path.rails[1].bytes_written);
        assert!(of_rail > 0 && of_rail < bytes, "{path}");
        assert_eq!((direct.bytes_out, direct.bytes_in), (of_rail, 0), "of that rail, and of no other");

        fake.refuse(FLUSH, usize::MAX);
        let down = |channel: &KvChannel| channel.path().rails[1].state != RailState::Up;
        let mut round = 0;
        let until_it_fails = async {
            while !(down(&tx) && down(&rx)) {
                round += 1;
                write(&tx, &rx, round).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), until_it_fails).await.unwrap();
        write(&tx, &rx, round + 1).await;
        let states: Vec<_> =
            [&tx, &rx].into_iter().flat_map(|of| of.path().rails).map(|rail| rail.state).collect();
        assert_eq!(states.iter().filter(|&state| *state == RailState::Up).count(), 4);
        let told = format!("{states:?}");
        assert!(told.contains(FLUSH), "{told}");
        tx.close().await.unwrap();
        assert!(rx.closed().await.is_graceful());
        let free = (tx.pool().free_blocks(), rx.pool().free_blocks());
        assert_eq!(free, (BLOCKS, BLOCKS));
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn k10_a_flush_that_fails_on_the_last_rail_takes_the_channel_along_with_its_cause() {
        let (cuda, fake) = Fake::new(1);
        let (tx, rx) = pair(&cuda, 1, 0).await;
        write(&tx, &rx, 0).await;
        fake.refuse(FLUSH, usize::MAX);
        let grant = rx.grant(rx.pool().alloc(BLOCKS).await.unwrap()).unwrap();
        let source = tx.pool().alloc(BLOCKS).await.unwrap();
        let ending = async {
            let (landed, source) = tx.write(WriteRequest::new(&grant, source)).await;
            assert!(landed.is_err());
            drop(source);
            (tx.closed().await, rx.closed().await)
        };
        let (near, far) = tokio::time::timeout(Duration::from_secs(60), ending).await.unwrap();
        assert!([&near, &far].into_iter().any(|closed| closed.to_string().contains(FLUSH)), "{near}; {far}");
        assert_eq!((tx.pool().free_blocks(), rx.pool().free_blocks()), (BLOCKS, BLOCKS));
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }
}
