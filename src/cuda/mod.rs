//! GPU memory, by the CUDA driver (feature `cuda`).
//!
//! The driver (`libcuda.so.1`) is loaded when a GPU is asked for: a program with this feature builds without CUDA and starts
//! without a GPU.
//!
//! ```text
//!   context.rs   GPUs, and the context that is current around every call
//!   memory.rs    device memory, ours or the user's      ipc.rs     a peer's, opened once
//!   event.rs     what a write waits for
//!   copy.rs      copies that run beside the program     gather.rs  many small pieces by one kernel
//!   slots.rs     pinned host memory, for what is staged    pinned.rs  what is mapped already, pinned
//!   traffic.rs   what each path has carried
//!   driver.rs    the calls, real or recorded            sys.rs     their declarations      fake.rs  the recording
//! ```
//!
//! `Memory::cuda` allocates device memory to register, and `Memory::from_cuda` takes the program's own: see
//! [the guide](crate::guide::gpu).

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod context;
#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
mod driver;
mod error;
#[cfg(feature = "cuda")]
mod event;
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod fake;
#[cfg(feature = "cuda")]
mod gather;
#[cfg(feature = "cuda")]
mod ipc;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(all(test, feature = "cuda"))]
mod on_a_gpu;
#[cfg(feature = "cuda")]
mod pinned;
#[cfg(feature = "cuda")]
mod slots;
#[cfg(feature = "cuda")]
mod sys;
mod traffic;

/// Bytes of a slot of pinned memory.
pub(crate) const SLOT_BYTES: usize = 512 << 10;

pub use error::CudaError;
#[cfg(feature = "cuda")]
pub use event::Event;
pub use traffic::{GpuTraffic, PathTraffic};

#[cfg(feature = "cuda")]
pub(crate) use self::{
    context::{Cuda, Gpu},
    copy::{Copier, Flight},
    ipc::{PeerMemory, Source},
    memory::DeviceMemory,
    pinned::Pinned,
    slots::{Slot, SlotPool},
};
#[cfg(not(feature = "cuda"))]
pub(crate) use absent::{
    Copier, DeviceMemory, Event, Flight, Gpu, PeerMemory, Pinned, Slot, SlotPool, Source,
};

/// Which ways memory of a GPU may take to a peer on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuWays {
    /// By itself: opened by the peer, or the same process.
    pub(crate) ipc: bool,
    /// Through slots in host memory that both have pinned.
    pub(crate) staged: bool,
}

impl Default for GpuWays {
    fn default() -> Self {
        Self { ipc: true, staged: true }
    }
}

/// What a peer has said of an allocation of its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// What it calls the allocation.
    pub(crate) name: u64,
    /// Its bytes, and where the peer has it.
    pub(crate) bytes: u64,
    pub(crate) base: u64,
    /// Of the GPU.
    pub(crate) uuid: [u8; 16],
    pub(crate) handle: [u8; 64],
}

/// A GPU that this process sees.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuInfo {
    /// What [`Memory::cuda`](crate::memory::Memory::cuda) takes.
    pub device: u32,
    /// The driver's name of it.
    pub name: String,
    /// Its PCI address, as [`device::topology`](crate::device::topology) takes it.
    pub pci: String,
    /// The CUDA version of the driver, major and minor.
    pub driver: (u32, u32),
}

/// The GPUs of this process. Asks the driver, which takes a good part of a second the first time: use `spawn_blocking`.
///
/// # Errors
/// [`CudaError::NoDriver`] where there is none, and [`CudaError::Driver`].
#[cfg(feature = "cuda")]
pub fn devices() -> Result<Vec<GpuInfo>, CudaError> {
    let cuda = Cuda::system()?;
    let driver = cuda.driver_version()?;
    let gpus = (0..cuda.count()?).map(|device| {
        let gpu = cuda.gpu(device)?;
        Ok(GpuInfo { device: gpu.ordinal(), name: gpu.name().to_owned(), pci: gpu.pci().to_owned(), driver })
    });
    gpus.collect()
}
