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
    /// [`MemoryError::RuntimeGone`] without a runtime.
    ///
    /// # Cancel safety
    /// Dropping the future leaks nothing: what had been registered by then is deregistered.
    pub async fn register_local(&self, memory: Memory) -> Result<Region<Local>, MemoryError> {
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
        self.register(memory, access.flags()).await
    }

    /// Registers `memory` in as few regions as `max_mr_size` allows, in the order of their addresses. All but the last
    /// have the same size.
    pub(crate) async fn register_pieces(
        &self,
        memory: Memory,
        access: AccessFlags,
    ) -> Result<Vec<Region<Exposed>>, MemoryError> {
        let limit = self.inner.device.capabilities().max_mr_size;
        let access = memory.access(access);
        self.blocking(move |pd| Region::register_pieces(pd, memory.map_for(pd)?, limit, access)).await
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
