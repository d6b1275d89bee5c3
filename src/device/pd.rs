//! Protection domains: what a queue pair of one may reach with the keys of its regions.

use std::sync::Arc;

use super::Device;
use crate::error::MemoryError;
use crate::memory::{Access, Exposed, Kind, Local, Memory, Region};
use crate::provider::{self, AccessFlags};

/// A protection domain. Cheap to clone; clones are the same domain.
///
/// Keys of one domain's regions do not work on the queue pairs of another: separate domains limit what a wrong peer
/// can reach.
#[derive(Clone, Debug)]
pub struct ProtectionDomain {
    inner: Arc<PdInner>,
}

#[derive(Debug)]
struct PdInner {
    pd: provider::Pd,
    device: Device,
}

impl ProtectionDomain {
    pub(super) fn new(device: Device, pd: provider::Pd) -> Self {
        Self { inner: Arc::new(PdInner { pd, device }) }
    }

    /// The device that it is of.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(crate) fn provider(&self) -> &provider::Pd {
        &self.inner.pd
    }

    /// Registers memory that only this process and its own operations touch.
    ///
    /// Mapping, faulting in and pinning run on tokio's blocking pool.
    ///
    /// # Errors
    /// [`MemoryError::Length`] and [`MemoryError::TooLarge`] for the length, [`MemoryError::Os`] and
    /// [`MemoryError::Register`] when the system or the device refuses, [`MemoryError::DeviceGone`] when the device is,
    /// [`MemoryError::RuntimeGone`] without a runtime. [`MemoryError::Unsupported`] for memory of a GPU, which is no `[u8]`.
    ///
    /// # Cancel safety
    /// Dropping the future leaks nothing: what had been registered by then is deregistered.
    pub async fn register_local(&self, memory: Memory) -> Result<Region<Local>, MemoryError> {
        if memory.is_device() {
            return Err(MemoryError::Unsupported {
                what: "memory of a GPU as a local region, whose slices are [u8],",
                device: self.inner.device.name().to_owned(),
                fix: "register it exposed, whose slices copy in and out",
            });
        }
        self.register(memory, AccessFlags::LOCAL_WRITE).await
    }

    /// Registers memory that peers reach as `access` says, by the key in [`Region::remote`].
    ///
    /// # Errors
    /// As [`register_local`](Self::register_local), and [`MemoryError::Unsupported`] for atomics on a device that has none.
    ///
    /// # Cancel safety
    /// As [`register_local`](Self::register_local).
    pub async fn register_exposed(
        &self,
        memory: Memory,
        access: Access,
    ) -> Result<Region<Exposed>, MemoryError> {
        let device = &self.inner.device;
        if access.allows_atomics() && !device.capabilities().atomics {
            return Err(MemoryError::Unsupported {
                what: "access by atomics",
                device: device.name().to_owned(),
                fix: "register without it, and let the owner count by SENDs",
            });
        }
        if access.allows_atomics() && memory.is_device() {
            return Err(MemoryError::Unsupported {
                what: "access by atomics to memory of a GPU",
                device: device.name().to_owned(),
                fix: "keep what is counted in host memory",
            });
        }
        self.register(memory, access.flags()).await
    }

    /// Registers one memory on each of `pds`, the first of which decides with the others what it is made of. A device that
    /// refuses has its error in the list; the memory lives until the last registration of it is gone.
    pub(crate) async fn register_on_all(
        pds: &[&Self],
        memory: Memory,
        access: AccessFlags,
    ) -> Result<Vec<Result<Vec<Region<Exposed>>, MemoryError>>, MemoryError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| MemoryError::RuntimeGone)?;
        let access = memory.access(access);
        let inners: Vec<_> = pds.iter().map(|pd| pd.inner.clone()).collect();
        let register = move || {
            let mapping = Arc::new(memory.map_for_all(inners.iter().map(|inner| &inner.pd))?);
            let on = |inner: &Arc<PdInner>| match inner.device.gone() {
                Some(device) => Err(MemoryError::DeviceGone { device }),
                None => {
                    let limit = inner.device.capabilities().max_mr_size;
                    Region::register_pieces_of(&inner.pd, &mapping, limit, access)
                }
            };
            Ok(inners.iter().map(on).collect())
        };
        match runtime.spawn_blocking(register).await {
            Ok(done) => done,
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Err(_) => Err(MemoryError::RuntimeGone),
        }
    }

    /// Registers the memory of `region`, which is of another domain, in this one, too.
    pub(crate) async fn register_again(
        &self,
        region: &Region<Exposed>,
        access: AccessFlags,
    ) -> Result<Vec<Region<Exposed>>, MemoryError> {
        let (region, limit) = (region.clone(), self.inner.device.capabilities().max_mr_size);
        self.blocking(move |pd| region.register_again(pd, limit, access)).await
    }

    async fn register<K: Kind>(&self, memory: Memory, access: AccessFlags) -> Result<Region<K>, MemoryError> {
        let (asked, limit) = (memory.len(), self.inner.device.capabilities().max_mr_size);
        if asked > limit {
            return Err(MemoryError::TooLarge { asked, limit });
        }
        let access = memory.access(access);
        self.blocking(move |pd| Region::register(pd, memory.map_for(pd)?, access)).await
    }

    /// Runs `register` on tokio's blocking pool.
    async fn blocking<T: Send + 'static>(
        &self,
        register: impl FnOnce(&provider::Pd) -> Result<T, MemoryError> + Send + 'static,
    ) -> Result<T, MemoryError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| MemoryError::RuntimeGone)?;
        if let Some(device) = self.inner.device.gone() {
            return Err(MemoryError::DeviceGone { device });
        }
        let inner = self.inner.clone();
        match runtime.spawn_blocking(move || register(&inner.pd)).await {
            Ok(done) => done,
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Err(_) => Err(MemoryError::RuntimeGone),
        }
    }
}
