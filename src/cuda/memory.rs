//! Device memory, ours or the user's, as a mapping has it (`memory/mapping.rs`).

use std::any::Any;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::context::{Cuda, Gpu, lock};
use super::error::CudaError;
use super::sys::DevicePtr;

/// A range of device memory. It stays what it is until this value is dropped.
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    addr: DevicePtr,
    len: u64,
    /// The allocation that it is in: what CUDA IPC exports.
    base: DevicePtr,
    allocation: u64,
    kind: Kind,
    name: u64,
    /// Shared by all that is of this allocation.
    _named: Arc<()>,
    owner: Owner,
}

/// How it was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// By cuMemAlloc, cudaMalloc.
    Plain,
    /// By cuMemAllocAsync and its like.
    Pooled,
    /// Mapped by cuMemMap.
    Mapped,
    /// By cuMemAllocManaged.
    Managed,
}

enum Owner {
    Ours,
    User { _owner: Box<dyn Any + Send + Sync> },
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMemory({:?}, {:#x}..+{}, {:?})", self.gpu, self.addr, self.len, self.kind)
    }
}

impl DeviceMemory {
    /// Zeroed memory of our own, by `cuMemAlloc`, which can be exported in every way.
    pub(crate) fn alloc(
        gpu: &Arc<Gpu>,
        len: u64,
        name: impl FnOnce() -> u64,
    ) -> Result<Arc<Self>, CudaError> {
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let (addr, facts) = {
            let current = gpu.enter()?;
            let driver = current.driver();
            let addr = driver.alloc(bytes)?;
            let ready = current.stream().and_then(|stream| {
                driver.zero(addr, bytes, stream)?;
                driver.stream_synchronize(stream)
            });
            match ready.and_then(|()| driver.pointer(addr)) {
                Ok(facts) => (addr, facts),
                Err(e) => {
                    let _ = driver.free(addr);
                    return Err(e);
                }
            }
        };
        let (name, named) = gpu.cuda().named(facts.buffer_id, name);
        let (gpu, owner) = (gpu.clone(), Owner::Ours);
        let this = Self {
            gpu,
            addr,
            len,
            base: addr,
            allocation: len,
            kind: Kind::Plain,
            name,
            _named: named,
            owner,
        };
        Ok(this.published())
    }

    /// Memory of the caller, anywhere in an allocation.
    ///
    /// # Safety
    /// `addr..+len`, and the context that it is of, stay valid until `owner` is dropped.
    pub(crate) unsafe fn user(
        cuda: &Arc<Cuda>,
        addr: DevicePtr,
        len: u64,
        owner: Box<dyn Any + Send + Sync>,
        name: impl FnOnce() -> u64,
    ) -> Result<Arc<Self>, CudaError> {
        let facts = cuda.driver.pointer(addr)?;
        let ordinal = u32::try_from(facts.ordinal).unwrap_or(u32::MAX);
        let gpu = cuda.gpu_with(ordinal, (facts.context != 0).then_some(facts.context))?;
        let (base, allocation) = gpu.enter()?.driver().address_range(addr)?;
        let rest = addr.checked_sub(base).and_then(|offset| allocation.checked_sub(offset)).unwrap_or(0);
        if len > rest {
            return Err(CudaError::BeyondAllocation { address: addr, len, rest });
        }
        let kind = match (facts.pooled, facts.managed, facts.ipc_capable) {
            (true, _, _) => Kind::Pooled,
            (_, true, _) => Kind::Managed,
            (_, _, true) => Kind::Plain,
            (_, _, false) => Kind::Mapped,
        };
        let (name, named) = cuda.named(facts.buffer_id, name);
        let owner = Owner::User { _owner: owner };
        Ok(Self { gpu, addr, len, base, allocation, kind, name, _named: named, owner }.published())
    }

    fn published(self) -> Arc<Self> {
        let this = Arc::new(self);
        lock(&this.gpu.cuda().live).entry(this.name).or_default().push(Arc::downgrade(&this));
        this
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) fn addr(&self) -> DevicePtr {
        self.addr
    }

    /// Where the allocation begins, and its bytes.
    pub(crate) fn allocation(&self) -> (DevicePtr, u64) {
        (self.base, self.allocation)
    }

    /// Names the allocation in this process, in the numbers of memfds: never given out again.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    /// The identity of its GPU.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.gpu.uuid()
    }

    /// Why another process cannot be given this memory. `None` when it can.
    pub(crate) fn not_exportable(&self) -> Option<CudaError> {
        let kind = match self.kind {
            Kind::Plain => return None,
            Kind::Pooled => "of a stream-ordered pool (cuMemAllocAsync)",
            Kind::Mapped => "mapped by the program (cuMemMap)",
            Kind::Managed => "managed memory",
        };
        Some(CudaError::NotExportable { kind })
    }

    /// What another process opens the allocation by.
    pub(crate) fn export(&self) -> Result<[u8; 64], CudaError> {
        if let Some(why) = self.not_exportable() {
            return Err(why);
        }
        self.gpu.enter()?.driver().ipc_export(self.base)
    }

    /// A descriptor of the pages of the host's size that the allocation is in, for the registration by a network device, and their
    /// addresses here. The driver allocates larger pages, so that they are there.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
    pub(crate) fn dma_buf(&self) -> Result<(OwnedFd, Range<DevicePtr>), CudaError> {
        let page = crate::memory::page_size() as u64;
        let start = self.base & !(page - 1);
        let end = (self.base + self.allocation).next_multiple_of(page);
        let fd = self.gpu.enter()?.driver().dma_buf(start, (end - start) as usize)?;
        Ok((fd, start..end))
    }

    /// What a network device has written to it is visible to what is started on the GPU from here on.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
    pub(crate) fn flush_direct_writes(&self) -> Result<(), CudaError> {
        self.gpu.enter()?.driver().flush_direct_writes()
    }

    /// Copies `bytes` to `at`, an address inside of it, and waits.
    pub(crate) fn copy_in(&self, at: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.holds(at, bytes.len() as u64)?;
        let from = bytes.as_ptr().expose_provenance() as u64;
        // SAFETY: checked to be inside of this memory; `bytes` lives until the copy has been waited for.
        unsafe { self.copy(at, from, bytes.len()) }
    }

    /// Copies what is at `at`, an address inside of it, to `bytes`, and waits.
    pub(crate) fn copy_out(&self, at: DevicePtr, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.holds(at, bytes.len() as u64)?;
        let to = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: checked to be inside of this memory; `bytes` lives until the copy has been waited for.
        unsafe { self.copy(to, at, bytes.len()) }
    }

    fn holds(&self, at: DevicePtr, len: u64) -> Result<(), CudaError> {
        let rest = at.checked_sub(self.addr).and_then(|offset| self.len.checked_sub(offset)).unwrap_or(0);
        if len <= rest { Ok(()) } else { Err(CudaError::BeyondAllocation { address: at, len, rest }) }
    }

    /// # Safety
    /// As for `Driver::copy`, until this returns.
    unsafe fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        if len == 0 {
            return Ok(());
        }
        let current = self.gpu.enter()?;
        let (driver, stream) = (current.driver(), current.stream()?);
        // SAFETY: the caller's promise; it is waited for below, also when the copy was refused.
        let queued = unsafe { driver.copy(to, from, len, stream) };
        driver.stream_synchronize(stream)?;
        queued
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        {
            let mut live = lock(&self.gpu.cuda().live);
            if let Some(same) = live.get_mut(&self.name) {
                same.retain(|memory| memory.strong_count() > 0);
                if same.is_empty() {
                    live.remove(&self.name);
                }
            }
        }
        if matches!(self.owner, Owner::Ours) {
            let freed = self.gpu.enter().and_then(|current| current.driver().free(self.addr));
            if let Err(error) = freed {
                tracing::warn!(%error, "GPU memory could not be freed");
            }
        }
    }
}

impl Cuda {
    /// The name of an allocation: the one that it has, or a new one.
    fn named(&self, buffer_id: u64, new: impl FnOnce() -> u64) -> (u64, Arc<()>) {
        let mut names = lock(&self.names);
        if let Some((name, named)) = names.get(&buffer_id)
            && let Some(named) = named.upgrade()
        {
            return (*name, named);
        }
        names.retain(|_, (_, named)| named.strong_count() > 0);
        let (name, named) = (new(), Arc::new(()));
        names.insert(buffer_id, (name, Arc::downgrade(&named)));
        (name, named)
    }

    /// Memory of this process that holds `at..+len` of the allocation `name`, while it lives.
    pub(super) fn find(&self, name: u64, at: DevicePtr, len: u64) -> Option<Arc<DeviceMemory>> {
        let live = lock(&self.live);
        live.get(&name)?.iter().filter_map(Weak::upgrade).find(|memory| memory.holds(at, len).is_ok())
    }
}
