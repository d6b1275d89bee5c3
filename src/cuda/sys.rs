//! The CUDA driver's functions that are used here: declarations of our own, loaded at run time. Nothing is linked, so that a
//! program starts without a driver and hears of it when it asks for a GPU.
//!
//! From the CUDA driver API's reference manual. Handles are opaque addresses, kept as `usize`; a device pointer is a `u64`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// `CUresult`: 0 is success.
pub(super) type Status = c_int;
pub(super) type DevicePtr = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUmemoryPool`.
pub(super) type Opaque = usize;

pub(super) const SUCCESS: Status = 0;
pub(super) const NOT_READY: Status = 600;

/// `CUipcMemHandle`, which travels to the importing process.
pub(super) const IPC_HANDLE: usize = 64;
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; IPC_HANDLE]);

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Uuid(pub(super) [u8; 16]);

/// `CU_STREAM_NON_BLOCKING`: it does not wait for the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: memory of another device is reached through peer access.
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
pub(super) const HOST_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`, and `..._READ_ONLY`, for mappings that cannot be written.
pub(super) const REGISTER_PORTABLE: c_uint = 1;
pub(super) const REGISTER_READ_ONLY: c_uint = 8;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`: kernels reach it by its own address.
pub(super) const HOST_POINTERS: c_int = 91;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(super) const NOT_SUPPORTED: Status = 801;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
#[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
pub(super) const RANGE_HANDLE_DMA_BUF: c_int = 1;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, and `..._TO_OWNER`.
#[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
pub(super) const FLUSH_CURRENT: (c_int, c_int) = (0, 100);

/// `CUpointer_attribute`.
pub(super) mod pointer {
    use super::c_int;

    pub(in crate::cuda) const CONTEXT: c_int = 1;
    pub(in crate::cuda) const MEMORY_TYPE: c_int = 2;
    pub(in crate::cuda) const BUFFER_ID: c_int = 7;
    pub(in crate::cuda) const IS_MANAGED: c_int = 8;
    pub(in crate::cuda) const DEVICE_ORDINAL: c_int = 9;
    pub(in crate::cuda) const IPC_CAPABLE: c_int = 10;
    pub(in crate::cuda) const MEMPOOL: c_int = 17;
    /// `CU_MEMORYTYPE_DEVICE`, a value of `MEMORY_TYPE`.
    pub(in crate::cuda) const TYPE_DEVICE: c_uint = 2;
    use super::c_uint;
}

/// The library that every driver installs.
pub(super) const LIBRARY: &str = "libcuda.so.1";

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The loaded library.
        #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // What GPUDirect alone calls.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> Status,)*
            _library: Library,
        }

        impl Api {
            /// Loads it, or says what is missing.
            pub(super) fn load() -> Result<Self, String> {
                // SAFETY: the driver's library sets up itself when it is loaded, and nothing of this program. Each symbol has the
                // type that the driver API's manual gives it; the suffix of a name is the version of that type.
                unsafe {
                    let library = Library::new(LIBRARY).map_err(|e| e.to_string())?;
                    $(let $name = *library
                        .get::<unsafe extern "C" fn($($arg),*) -> Status>(concat!($symbol, "\0").as_bytes())
                        .map_err(|e| format!("the driver is too old, it lacks {}: {e}", $symbol))?;)*
                    Ok(Self { $($name,)* _library: library })
                }
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint);
    error_name = "cuGetErrorName" (Status, *mut *const c_char);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_pci = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid" (*mut Uuid, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain" (*mut Opaque, c_int);
    context_push = "cuCtxPushCurrent_v2" (Opaque);
    context_pop = "cuCtxPopCurrent_v2" (*mut Opaque);
    context_current = "cuCtxGetCurrent" (*mut Opaque);
    alloc = "cuMemAlloc_v2" (*mut DevicePtr, usize);
    free = "cuMemFree_v2" (DevicePtr);
    host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost" (*mut c_void);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    set_bytes = "cuMemsetD8Async" (DevicePtr, u8, usize, Opaque);
    address_range = "cuMemGetAddressRange_v2" (*mut DevicePtr, *mut usize, DevicePtr);
    range_handle = "cuMemGetHandleForAddressRange" (*mut c_void, DevicePtr, usize, c_int, u64);
    flush_direct_writes = "cuFlushGPUDirectRDMAWrites" (c_int, c_int);
    pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, DevicePtr);
    copy = "cuMemcpyAsync" (DevicePtr, DevicePtr, usize, Opaque);
    stream_create = "cuStreamCreate" (*mut Opaque, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (Opaque);
    stream_synchronize = "cuStreamSynchronize" (Opaque);
    event_create = "cuEventCreate" (*mut Opaque, c_uint);
    event_record = "cuEventRecord" (Opaque, Opaque);
    event_query = "cuEventQuery" (Opaque);
    event_synchronize = "cuEventSynchronize" (Opaque);
    event_destroy = "cuEventDestroy_v2" (Opaque);
    ipc_export = "cuIpcGetMemHandle" (*mut IpcHandle, DevicePtr);
    ipc_open = "cuIpcOpenMemHandle_v2" (*mut DevicePtr, IpcHandle, c_uint);
    ipc_close = "cuIpcCloseMemHandle" (DevicePtr);
    module_load = "cuModuleLoadData" (*mut Opaque, *const c_void);
    module_function = "cuModuleGetFunction" (*mut Opaque, Opaque, *const c_char);
    launch = "cuLaunchKernel" (
        Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void
    );
}
