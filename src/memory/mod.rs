//! Memory: what is registered, and how it is held.
//!
//! ```text
//!   Memory        what to register: our own pages, a sealed memfd, or the user's mapping
//!   Region<K>     registered memory; K says who may touch it
//!   Slice<K>      a range of a region, moved by value into an operation and back out of it
//!   RemoteRegion  what a peer needs to reach an exposed region: address, length, rkey
//! ```
//!
//! A region is [`Local`] or [`Exposed`]. Nobody but this process and the operations that it submits touches a local
//! one, so its slices are ordinary `[u8]`. An exposed one may be written or read by a peer at any time, so safe code
//! only copies in and out of it; there is no `&[u8]` to it outside of `unsafe`.

mod checksum;
mod mapping;
pub(crate) mod memfd;
mod region;
mod remote;
mod slice;

use std::any::Any;
use std::sync::Arc;

pub(crate) use checksum::Checksum;
pub use checksum::checksum;
pub(crate) use mapping::Mapping;
pub(crate) use mapping::next_name;
#[cfg(feature = "cuda")]
pub(crate) use mapping::page_size;
pub(crate) use region::MrInner;
pub use region::{Exposed, Kind, Local, Region};
pub use remote::{Access, RemoteRegion, RemoteSlice};
pub use slice::{AnySlice, Slice};

use crate::cuda::DeviceMemory;
#[cfg(feature = "cuda")]
use crate::cuda::{Cuda, CudaError};
use crate::error::MemoryError;
use crate::provider::{self, AccessFlags};

/// Whether the pages of a region are faulted in when it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefault {
    /// At registration, off the runtime's workers. The first transfer then runs at full speed.
    #[default]
    Yes,
    /// At first use. For sparse regions.
    No,
}

/// A description of memory to register. Nothing is mapped before it is registered.
///
/// # On a soft device that takes shared memory
///
/// There the peer copies from our memory by itself. What [`Memory::anonymous`] describes is then made of a sealed memfd, as
/// with [`Memory::memfd`], so that it can be lent to a peer of the same host. Elsewhere, and over
/// [`SoftTransport::Tcp`](crate::device::SoftTransport::Tcp), it is private memory, which gets huge pages more often. What the
/// caller should know of a memfd:
///
/// - It takes one file descriptor as long as the memory lives.
/// - The kernel refuses everyone but this process to write it, to punch holes into it and to change its size. A peer that was
///   lent a part of it can *read all of the mapping*, also where the registration does not say so and after it has ended, for as
///   long as the peer keeps its descriptor. Memory that a peer must not see belongs in a registration of its own that takes
///   part in no operation with that peer.
/// - The memory is returned to the system after its last user, of either process, has gone.
/// - It is shared with children that are forked without `exec`, instead of copied when written.
/// - It has huge pages only where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` allows them (`advise` does).
/// - Its pages are on the NUMA node of the thread that first touches them, with [`Prefault::Yes`] one of the runtime's blocking
///   pool. A copy between nodes runs at the speed of their link. Where that counts, bind both processes to one node (`numactl
///   --cpunodebind=0 --membind=0`).
///
/// Memory of the caller ([`Memory::from_raw`]) stays what it is: a peer reads it where the system permits one process to read
/// another's memory.
#[derive(Debug)]
pub struct Memory {
    source: Source,
    len: u64,
    prefault: Prefault,
    relaxed_ordering: bool,
}

enum Source {
    Anonymous,
    Memfd,
    User {
        addr: usize,
        owner: Box<dyn Any + Send + Sync>,
    },
    /// Memory of a GPU that is there already.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Device(Arc<DeviceMemory>),
    /// Memory of that GPU, allocated when it is mapped.
    #[cfg(feature = "cuda")]
    DeviceAlloc(Result<Arc<Cuda>, CudaError>, u32),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Memfd => f.write_str("Memfd"),
            Self::User { addr, .. } => write!(f, "User({addr:#x})"),
            Self::Device(memory) => memory.fmt(f),
            #[cfg(feature = "cuda")]
            Self::DeviceAlloc(_, device) => write!(f, "DeviceAlloc({device})"),
        }
    }
}

impl Memory {
    /// Page-aligned, zeroed memory of this process. On a soft device that takes shared memory, the same as
    /// [`memfd`](Self::memfd).
    pub fn anonymous(len: u64) -> Self {
        Self::new(Source::Anonymous, len)
    }

    /// Page-aligned, zeroed memory in a memfd that is sealed against shrinking, growing and the writes of others, so that
    /// it can be shared with another process of this host.
    pub fn memfd(len: u64) -> Self {
        Self::new(Source::Memfd, len)
    }

    /// Memory of the caller. `owner` is dropped after the last use of it, also by a device.
    ///
    /// # Safety
    /// - `ptr..ptr + len` is initialised and valid for reads and writes until `owner` is dropped.
    /// - Until then nothing but this crate accesses it: no reference to it exists or is made, and it is given to
    ///   `from_raw` once.
    pub unsafe fn from_raw(ptr: *mut u8, len: u64, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self::new(Source::User { addr: ptr.expose_provenance(), owner }, len)
    }

    /// Zeroed memory of a GPU, by `cuMemAlloc`: `device` is an ordinal of [`cuda::devices`](crate::cuda::devices). It is allocated
    /// when it is registered, and freed after its last use.
    ///
    /// It can be registered [exposed](crate::device::ProtectionDomain::register_exposed) only, without atomics, and as a
    /// [pool](crate::kv::KvPool). What copies in and out of it waits for a copy by the GPU, some ten microseconds each.
    #[cfg(feature = "cuda")]
    pub fn cuda(device: u32, len: u64) -> Self {
        Self::new(Source::DeviceAlloc(Cuda::system(), device), len)
    }

    /// Memory of a GPU that the program has, also in the middle of an allocation: what `cudaMalloc`, `cuMemAlloc` or a tensor's
    /// `data_ptr()` gives. `owner` is dropped after the last use of it, also by a peer.
    ///
    /// Stream-ordered memory (`cudaMallocAsync`) and memory that the program has mapped itself (`cuMemMap`) can be written to by
    /// peers, and be their source in the same process; another process cannot be given it, and a write from it says so.
    ///
    /// # Errors
    /// [`MemoryError::Gpu`]: no driver, an address that is no device memory, or a range beyond its allocation.
    ///
    /// # Safety
    /// - `ptr..ptr + len`, and the CUDA context that it is of, stay valid until `owner` is dropped.
    /// - Nothing else writes it while an operation of this crate reads it, nor uses it while one writes it. Work of the GPU that fills
    ///   it is over before it is given to an operation.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_cuda(
        ptr: u64,
        len: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        // SAFETY: the caller's promise.
        let memory = unsafe { DeviceMemory::user(&Cuda::system()?, ptr, len, owner, next_name)? };
        Ok(Self::new(Source::Device(memory), len))
    }

    /// Memory of a recorded driver.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn cuda_of(cuda: &Arc<Cuda>, device: u32, len: u64) -> Self {
        Self::new(Source::DeviceAlloc(Ok(cuda.clone()), device), len)
    }

    /// Memory of a recorded driver that a test has got from it.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn from_cuda_of(cuda: &Arc<Cuda>, ptr: u64, len: u64) -> Result<Self, MemoryError> {
        // SAFETY: a recorded driver's memory lives as long as the driver, which the memory keeps.
        let memory = unsafe { DeviceMemory::user(cuda, ptr, len, Box::new(()), next_name)? };
        Ok(Self::new(Source::Device(memory), len))
    }

    /// Whether it is memory of a GPU.
    pub(crate) fn is_device(&self) -> bool {
        match self.source {
            Source::Device(_) => true,
            #[cfg(feature = "cuda")]
            Source::DeviceAlloc(..) => true,
            _ => false,
        }
    }

    fn new(source: Source, len: u64) -> Self {
        Self { source, len, prefault: Prefault::Yes, relaxed_ordering: false }
    }

    /// Whether the pages are faulted in at registration. The default is [`Prefault::Yes`].
    pub fn prefault(mut self, prefault: Prefault) -> Self {
        self.prefault = prefault;
        self
    }

    /// Lets the device's writes into it overtake each other on the way through the PCIe fabric
    /// (`IBV_ACCESS_RELAXED_ORDERING`), which some hosts need for full bandwidth. The default is not to. A device, driver or
    /// kernel that does not know this does without; the soft provider has nothing to relax.
    ///
    /// It changes what may be seen when, and no result: bytes that a peer has written are visible after a **completion** on
    /// this side that comes behind them, the receive of an immediate or of a SEND. That is what a
    /// [`KvChannel`](crate::kv) goes by, so that its arrivals and `Landed` mean the same. What no longer holds is a habit:
    /// polling for the last byte of a WRITE, or for a flag behind it, says nothing of the bytes before. Do not combine it with
    /// memory that peers use atomics on to tell of other memory.
    pub fn relaxed_ordering(mut self, relaxed: bool) -> Self {
        self.relaxed_ordering = relaxed;
        self
    }

    /// `access`, and what the memory itself asks for.
    pub(crate) fn access(&self, access: AccessFlags) -> AccessFlags {
        if self.relaxed_ordering { access.union(AccessFlags::RELAXED_ORDERING) } else { access }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True for a length of zero, which cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps it for a registration in `pd`. Blocks while pages are faulted in.
    ///
    /// This is where it is decided what memory of ours is made of.
    pub(crate) fn map_for(self, pd: &provider::Pd) -> Result<Mapping, MemoryError> {
        self.map_for_all([pd])
    }

    /// Maps it for a registration in each of `pds`.
    pub(crate) fn map_for_all<'p>(
        mut self,
        pds: impl IntoIterator<Item = &'p provider::Pd>,
    ) -> Result<Mapping, MemoryError> {
        if matches!(self.source, Source::Anonymous) && pds.into_iter().any(provider::Pd::lends_memory) {
            self.source = Source::Memfd;
        }
        self.map()
    }

    /// Maps it as it is described. Blocks while pages are faulted in.
    pub(crate) fn map(self) -> Result<Mapping, MemoryError> {
        match self.source {
            Source::Anonymous => Mapping::anonymous(self.len, self.prefault),
            Source::Memfd => Mapping::memfd(self.len, self.prefault),
            // SAFETY: the caller of `from_raw` has promised what `user` asks for.
            Source::User { addr, owner } => unsafe { Mapping::user(addr, self.len, owner, self.prefault) },
            Source::Device(memory) => Ok(Mapping::device(memory, self.len)),
            #[cfg(feature = "cuda")]
            Source::DeviceAlloc(cuda, device) => {
                if self.len == 0 {
                    return Err(MemoryError::Length { asked: 0, fix: "ask for at least one byte" });
                }
                let gpu = cuda?.gpu(device)?;
                Ok(Mapping::device(DeviceMemory::alloc(&gpu, self.len, next_name)?, self.len))
            }
        }
    }
}

#[cfg(test)]
mod tests;
