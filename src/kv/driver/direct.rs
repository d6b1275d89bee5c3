//! GPUDirect: a network device reads and writes the memory of a GPU itself. What it has written is visible there before anybody hears
//! of it, and what it has carried is counted as that.

use std::sync::Arc;

use crate::cuda::{CudaError, DeviceMemory, PathTraffic};
use crate::kv::path::QpReport;
use crate::kv::pool::KvPool;
use crate::provider::WcOpcode;

/// A pool in memory of a GPU that network devices are given. `None` for any other pool or device.
#[derive(Debug)]
pub(super) struct Direct(Option<Arc<DeviceMemory>>);

impl Direct {
    /// Of `pool`, registered with devices of these transports.
    pub(super) fn new<'t>(pool: &KvPool, mut transports: impl Iterator<Item = &'t str>) -> Self {
        let network = transports.any(|transport| !transport.starts_with("soft-"));
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

    /// What queue pairs have carried by it. Of what the peer writes here its device has the count.
    pub(super) fn traffic<'r>(&self, reports: impl Iterator<Item = &'r QpReport>) -> PathTraffic {
        let mut traffic = PathTraffic::default();
        if self.0.is_some() {
            for report in reports {
                traffic.bytes_out += report.bytes_written;
                traffic.operations_out += report.writes;
                traffic.bytes_in += report.bytes_read;
                traffic.operations_in += report.reads;
            }
        }
        traffic
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::cuda::fake::Fake;
    use crate::device::{Device, SoftConfig};
    use crate::kv::{Layout, PoolAccess};
    use crate::memory::Memory;

    #[tokio::test]
    async fn k1_what_a_network_device_wrote_is_flushed_before_it_is_told_and_counted_as_gpudirect() {
        let (cuda, fake) = Fake::new(1);
        let layout = Layout::contiguous(1, 4, 4096).unwrap();
        let pool = async |memory| {
            let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
            KvPool::with_memory(&pd, layout, memory, PoolAccess::Both).await.unwrap()
        };
        let gpu = pool(Memory::cuda_of(&cuda, 0, layout.required_bytes())).await;
        let host = pool(Memory::anonymous(layout.required_bytes())).await;
        let report =
            QpReport { bytes_written: 300, writes: 3, bytes_read: 70, reads: 2, ..Default::default() };
        for (pool, transports, direct) in [
            (&gpu, &["verbs"][..], true),
            (&gpu, &["soft-tcp"], false),
            (&gpu, &["soft-tcp", "verbs"], true),
            (&host, &["verbs"], false),
        ] {
            let this = Direct::new(pool, transports.iter().copied());
            let flushes = fake.count("cuFlushGPUDirectRDMAWrites");
            for opcode in [WcOpcode::Recv, WcOpcode::RecvWriteWithImm, WcOpcode::Read, WcOpcode::Write] {
                this.settle(opcode).unwrap();
            }
            let flushes = fake.count("cuFlushGPUDirectRDMAWrites") - flushes;
            let traffic = this.traffic([report].iter());
            let carried =
                (traffic.bytes_out, traffic.operations_out, traffic.bytes_in, traffic.operations_in);
            let expected = if direct { (3, (300, 3, 70, 2)) } else { (0, (0, 0, 0, 0)) };
            assert_eq!((flushes, carried), expected, "{transports:?}");
        }
        assert_eq!(fake.wrong(), Vec::<String>::new());
    }
}
