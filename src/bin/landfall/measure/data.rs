//! Endpoints of a measurement: a small one for the control channel, and one with memory for each data channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use landfall::connect::Admission;
use landfall::device::Device;
use landfall::kv::{Bootstrap, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;

use super::talk::{self, Memory as Place, Shape};
use super::units::show_bytes;
use crate::device::{DeviceArgs, Side};
use crate::output::Error;

/// How this end connects.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) devices: Vec<Device>,
    pub(crate) bootstrap: Bootstrap,
    pub(crate) admission: Admission,
}

impl DeviceArgs {
    /// What the arguments say of this side.
    pub(crate) fn setup(&self, side: Side) -> Result<Setup, Error> {
        let (devices, admission) = (self.open(side)?, self.admission()?);
        Ok(Setup { devices, bootstrap: self.bootstrap, admission })
    }
}

impl Setup {
    fn config(&self) -> KvConfig {
        KvConfig::default()
            .bootstrap(self.bootstrap)
            .admission(self.admission.clone())
            .require_rdma(self.is_rdma())
    }

    pub(crate) fn is_rdma(&self) -> bool {
        self.devices.iter().all(Device::is_rdma)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.name().to_owned()).collect()
    }

    pub(crate) fn transport(&self) -> String {
        let mut kinds: Vec<_> = self.devices.iter().map(Device::transport).collect();
        kinds.dedup();
        kinds.join(",")
    }

    /// Whose channels carry control messages.
    pub(crate) async fn control(&self) -> Result<KvEndpoint, Error> {
        let layout = Layout::contiguous(1, 1, 4096)?;
        let memory = Memory::anonymous(layout.required_bytes());
        self.endpoint(layout, memory, PoolAccess::Source, self.config()).await
    }

    /// Whose channel carries what is measured, with `blocks` blocks.
    pub(crate) async fn data(&self, shape: &Shape, blocks: u64, qps: usize) -> Result<KvEndpoint, Error> {
        let config = self.config().qps(qps).spin(Duration::from_micros(shape.spin_us));
        let layout = layout(shape, blocks)?;
        let memory = memory(shape.memory, layout.required_bytes())?;
        self.endpoint(layout, memory, PoolAccess::Both, config).await
    }

    async fn endpoint(
        &self,
        layout: Layout,
        memory: Memory,
        access: PoolAccess,
        config: KvConfig,
    ) -> Result<KvEndpoint, Error> {
        let domains = self.devices.iter().map(Device::alloc_pd).collect::<Result<Vec<_>, _>>()?;
        let pool = KvPool::on_rails(&domains.iter().collect::<Vec<_>>(), layout, memory, access).await?;
        Ok(KvEndpoint::named(pool, config, talk::NAME)?)
    }
}

fn memory(place: Place, bytes: u64) -> Result<Memory, Error> {
    match place {
        Place::Host => Ok(Memory::anonymous(bytes)),
        #[cfg(feature = "cuda")]
        Place::Cuda(device) => Ok(Memory::cuda(device, bytes)),
        #[cfg(not(feature = "cuda"))]
        Place::Cuda(_) => Err(talk::NO_CUDA.into()),
    }
}

fn layout(shape: &Shape, blocks: u64) -> Result<Layout, Error> {
    let count = u32::try_from(blocks).map_err(|_| format!("{blocks} blocks; a pool has at most 2^32 - 1"))?;
    // The two ends must agree on the size of a block, not on its neighbours.
    let stride = shape.stride();
    let layer = stride.checked_mul(blocks).ok_or("more memory than 64 bits count")?;
    Ok(Layout::new(1, count, shape.block_bytes, layer, stride)?)
}

/// Bytes of memory that the pool of such a channel takes.
pub(crate) fn pool_bytes(shape: &Shape, blocks: u64) -> Result<u64, Error> {
    Ok(layout(shape, blocks)?.required_bytes())
}

/// Memory that all measurements of a server may take together.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    left: Arc<AtomicU64>,
    limit: u64,
}

/// Memory that one of them has. Dropped, it is given back.
#[derive(Debug)]
pub(crate) struct Share {
    left: Arc<AtomicU64>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { left: Arc::new(AtomicU64::new(limit)), limit }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// # Errors
    /// In words for the one who asked.
    pub(crate) fn take(&self, bytes: u64) -> Result<Share, String> {
        let taken =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => Ok(Share { left: self.left.clone(), bytes }),
            Err(left) => Err(format!(
                "the transfers in flight take {} of this server's memory, {} of its {} are left; measure smaller or fewer ones, \
                 or start it with a larger --limit",
                show_bytes(bytes),
                show_bytes(left),
                show_bytes(self.limit)
            )),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_memory_of_all_clients_together_is_bounded() {
        let budget = Budget::new(100);
        let first = budget.take(60).unwrap();
        let why = budget.take(41).unwrap_err();
        assert!(why.contains("41 B") && why.contains("40 B of its 100 B"), "{why}");
        let _second = budget.take(40).unwrap();
        drop(first);
        budget.take(60).unwrap();
        assert!(budget.take(u64::MAX).is_err());
    }
}
