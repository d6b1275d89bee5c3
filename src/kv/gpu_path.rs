//! Which paths memory of a GPU has to take, or must not, and where that is possible.

use std::fmt;
use std::str::FromStr;

use super::pool::KvPool;
use crate::cuda::GpuWays;
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
    /// Through host memory: copied there by the sender's GPU and from there by the receiver's. Over TCP it is sent in between; on one host
    /// both have mapped it. It takes a soft device.
    Staged,
    /// GPUDirect: the network device reads and writes the memory itself. It takes an RDMA device; registering the memory fails where
    /// that one cannot. It was never run: see [the guide](crate::guide::gpu).
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

    const fn bit(self) -> u8 {
        match self {
            Self::Any => Self::Ipc.bit() | Self::Staged.bit() | Self::GpuDirect.bit(),
            Self::Ipc => 1,
            Self::Staged => 2,
            Self::GpuDirect => 4,
        }
    }
}

/// Which paths memory of a GPU may take: all of them, [one](Self::only), or all [but](Self::without) some.
///
/// A device that may take a path that is forbidden is refused by [`KvEndpoint::new`](super::KvEndpoint::new), before anything is
/// connected; so is one that can take none of those that are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuPaths(u8);

impl Default for GpuPaths {
    fn default() -> Self {
        Self::ALL
    }
}

impl GpuPaths {
    /// Every one of them.
    pub const ALL: Self = Self(GpuPath::Any.bit());

    /// `path` and no other: it is required. [`GpuPath::Any`] requires none.
    pub const fn only(path: GpuPath) -> Self {
        Self(path.bit())
    }

    /// The same without `path`: it is forbidden. Without [`GpuPath::Any`] there is none left.
    #[must_use = "the result is what is without it"]
    pub const fn without(self, path: GpuPath) -> Self {
        Self(self.0 & !path.bit())
    }

    /// Whether `path` is allowed. Of [`GpuPath::Any`], whether all are.
    pub const fn allow(self, path: GpuPath) -> bool {
        self.0 & path.bit() == path.bit()
    }

    /// The names of what is allowed.
    fn names(self) -> impl Iterator<Item = &'static str> {
        GpuPath::ALL.into_iter().filter(move |&p| p != GpuPath::Any && self.allow(p)).map(GpuPath::name)
    }

    /// What of it a connection on one host has to know.
    pub(super) fn ways(self) -> GpuWays {
        GpuWays { ipc: self.allow(GpuPath::Ipc), staged: self.allow(GpuPath::Staged) }
    }

    /// Whether `pool`, registered with `device`, goes these ways and no other.
    pub(super) fn check(self, pool: &KvPool, device: &Device) -> Result<(), DeviceError> {
        if self == Self::ALL {
            return Ok(());
        }
        let no = |what, fix| {
            let device = format!("{} ({})", device.name(), device.transport());
            Err(DeviceError::Unsupported { what, device, fix })
        };
        if !pool.is_device_memory() {
            if self.names().count() > 1 {
                // None is asked for, and none is taken.
                return Ok(());
            }
            let fix = "make the pool of Memory::cuda or Memory::from_cuda, or require no GPU path";
            return no("a GPU path for a pool in host memory, which KvConfig::gpu_path asks for,", fix);
        }
        let possible = Self::of(device.transport());
        let unavoidable = Self::unavoidable_on(device.transport());
        if self.0 & possible.0 != 0 && self.0 & unavoidable.0 == unavoidable.0 {
            return Ok(());
        }
        // What is allowed and not possible, and then what is possible and not allowed.
        if self.0 & possible.0 == 0 {
            return match self.names().next() {
                Some("ipc") => no(
                    "CUDA IPC and nothing else, which KvConfig::gpu_path asks for,",
                    "open a soft device with SoftTransport::Shm, with both processes on one host",
                ),
                Some("staged") => no(
                    "staging through host memory and nothing else, which KvConfig::gpu_path asks for,",
                    "open a soft device: within one host, or over TCP",
                ),
                Some(_) => no(
                    "GPUDirect, which KvConfig::gpu_path asks for,",
                    "open an RDMA device; or use ipc on one host, or staged over TCP",
                ),
                None => no(
                    "memory of a GPU with every path forbidden by KvConfig::gpu_paths",
                    "allow one, or make the pool in host memory",
                ),
            };
        }
        no(
            "CUDA IPC and no staging, as KvConfig::gpu_path or gpu_paths has it,",
            "open a soft device with SoftTransport::Shm: this one stages over TCP where the peer is elsewhere",
        )
    }

    /// The ways that a device of this transport goes.
    fn of(transport: &str) -> Self {
        let is = |soft: SoftTransport| transport == soft.of_device();
        if is(SoftTransport::Tcp) {
            Self::only(GpuPath::Staged)
        } else if is(SoftTransport::Shm) || is(SoftTransport::Auto) {
            Self::ALL.without(GpuPath::GpuDirect)
        } else {
            Self::only(GpuPath::GpuDirect)
        }
    }

    /// The ways that it may go whatever is allowed. Within one host a connection is told which it may.
    fn unavoidable_on(transport: &str) -> Self {
        let is = |soft: SoftTransport| transport == soft.of_device();
        if is(SoftTransport::Shm) {
            Self(0)
        } else if is(SoftTransport::Auto) {
            Self::only(GpuPath::Staged)
        } else {
            Self::of(transport)
        }
    }
}

impl From<GpuPath> for GpuPaths {
    fn from(path: GpuPath) -> Self {
        Self::only(path)
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
