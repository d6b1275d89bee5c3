//! Which path memory of a GPU has to take, and where that is possible.

use std::fmt;
use std::str::FromStr;

use super::pool::KvPool;
use crate::device::{Device, SoftTransport};
use crate::error::DeviceError;

/// How memory of a GPU reaches a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuPath {
    /// Whatever the device can do.
    #[default]
    Any,
    /// CUDA IPC: the receiver's GPU copies from the sender's memory, on the same host; within one process, nothing has to be
    /// opened. It takes a soft device with [`SoftTransport::Shm`] and nothing else.
    Ipc,
    /// Through host memory, over TCP: copied there by the sender and from there by the receiver. It takes a soft device with
    /// [`SoftTransport::Tcp`] and nothing else.
    Staged,
    /// GPUDirect: the network device reads and writes the memory itself. No device does yet in this version, so that it is refused.
    GpuDirect,
}

impl GpuPath {
    const ALL: [Self; 4] = [Self::Any, Self::Ipc, Self::Staged, Self::GpuDirect];

    /// `"any"`, `"ipc"`, `"staged"`, `"gpudirect"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Ipc => "ipc",
            Self::Staged => "staged",
            Self::GpuDirect => "gpudirect",
        }
    }

    /// Whether `pool` can take this path over `device`.
    pub(super) fn check(self, pool: &KvPool, device: &Device) -> Result<(), DeviceError> {
        let no = |what, fix| {
            let device = format!("{} ({})", device.name(), device.transport());
            Err(DeviceError::Unsupported { what, device, fix })
        };
        if self == Self::Any {
            return Ok(());
        }
        if !pool.is_device_memory() {
            let fix = "make the pool of Memory::cuda or Memory::from_cuda, or require no GPU path";
            return no("a GPU path for a pool in host memory, which KvConfig::gpu_path asks for,", fix);
        }
        match self {
            Self::Any => Ok(()),
            Self::Ipc if device.transport() == SoftTransport::Shm.of_device() => Ok(()),
            Self::Ipc => no(
                "CUDA IPC and nothing else, which KvConfig::gpu_path asks for,",
                "open a soft device with SoftTransport::Shm, with both processes on one host",
            ),
            Self::Staged if device.transport() == SoftTransport::Tcp.of_device() => Ok(()),
            Self::Staged => no(
                "staging through host memory and nothing else, which KvConfig::gpu_path asks for,",
                "open a soft device with SoftTransport::Tcp",
            ),
            Self::GpuDirect => no(
                "GPUDirect, which KvConfig::gpu_path asks for,",
                "use ipc on one host, or staged over TCP: this version has GPUDirect on no device yet",
            ),
        }
    }
}

impl fmt::Display for GpuPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no path of memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no path of GPU memory: one of any, ipc, staged, gpudirect")]
pub struct UnknownGpuPath(String);

impl FromStr for GpuPath {
    type Err = UnknownGpuPath;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|path| path.name() == name);
        found.ok_or_else(|| UnknownGpuPath(name.to_owned()))
    }
}
