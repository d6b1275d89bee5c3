//! What can go wrong between this crate and the CUDA driver.

/// A call of the CUDA driver failed, or memory is not what a path needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver here, or one that is too old.
    #[error(
        "the CUDA driver cannot be loaded ({reason}); install NVIDIA's driver (libcuda.so.1, 11.7 or newer; containers: the NVIDIA container toolkit), or use host memory"
    )]
    NoDriver {
        /// The loader's words.
        reason: String,
    },
    /// The process sees fewer GPUs.
    #[error(
        "GPU {device} was asked for, this process sees {count}; see nvidia-smi -L and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// The ordinal asked for.
        device: u32,
        /// Devices that there are.
        count: u32,
    },
    /// The driver refused.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its `CUresult`.
        code: i32,
        /// The name of that.
        name: String,
    },
    /// The slots of a connection, which both processes map, could not be made.
    #[error(
        "host memory to stage {bytes} bytes of GPU memory at a time could not be made: {reason}; it is a memfd"
    )]
    NoSlots {
        /// Bytes of all of them.
        bytes: u64,
        /// The system's words.
        reason: String,
    },
    /// The address is not one of device memory.
    #[error(
        "{address:#x} is not GPU memory of this process ({found}); give the address that cuMemAlloc or cudaMalloc gave"
    )]
    NotDeviceMemory {
        /// The address.
        address: u64,
        /// What the driver says of it.
        found: &'static str,
    },
    /// The range goes beyond the allocation that it begins in.
    #[error("{len} bytes at {address:#x} were given, their allocation has {rest} from there on")]
    BeyondAllocation {
        /// The address.
        address: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes that there are.
        rest: u64,
    },
    /// Another process cannot be given this memory.
    #[error(
        "this GPU memory is {kind}, which CUDA IPC does not export; allocate what is sent with cuMemAlloc or cudaMalloc (PyTorch: PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:False)"
    )]
    NotExportable {
        /// How it was allocated.
        kind: &'static str,
    },
}
