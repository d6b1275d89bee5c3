//! The driver, real or recorded: one call each, with its status as an error. Contexts are the affair of `context.rs`: what needs a
//! current one is reached through a [`Current`](super::context::Current) only.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::error::CudaError;
#[cfg(test)]
use super::fake::Fake;
use super::gather::Plan;
use super::sys::{self, Api, DevicePtr, IPC_HANDLE, IpcHandle, Opaque, Status, Uuid, pointer};

/// Where calls go.
pub(super) enum Driver {
    Real(Box<Api>),
    /// Records calls and contexts; its memory is the host's.
    #[cfg(test)]
    Fake(std::sync::Arc<Fake>),
}

/// What the driver says of a GPU.
#[derive(Clone, Debug)]
pub(super) struct DeviceFacts {
    pub(super) handle: c_int,
    pub(super) name: String,
    pub(super) pci: String,
    pub(super) uuid: [u8; 16],
}

/// What the driver says of an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct PointerFacts {
    /// 0 for memory that is of no context: stream-ordered, or mapped by the caller.
    pub(super) context: Opaque,
    pub(super) ordinal: c_int,
    pub(super) managed: bool,
    pub(super) ipc_capable: bool,
    pub(super) pooled: bool,
    /// Names the allocation in this process; never given out again.
    pub(super) buffer_id: u64,
}

/// A gathered copy, as the kernel of `gather.rs` takes it: `list` is device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatherArgs {
    pub(super) list: DevicePtr,
    pub(super) plan: Plan,
}

/// What the recorded driver refuses with: CUDA_ERROR_OUT_OF_MEMORY.
#[cfg(test)]
const OUT_OF_MEMORY: Status = 2;

impl Driver {
    pub(super) fn load() -> Result<Self, CudaError> {
        let api = Api::load().map_err(|reason| CudaError::NoDriver { reason })?;
        // SAFETY: a plain call; 0 is the only flag.
        let status = unsafe { (api.init)(0) };
        let this = Self::Real(Box::new(api));
        this.check("cuInit", status).map_err(|e| CudaError::NoDriver { reason: e.to_string() })?;
        Ok(this)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == sys::SUCCESS { Ok(()) } else { Err(self.failed(call, status)) }
    }

    fn failed(&self, call: &'static str, code: Status) -> CudaError {
        let mut name = std::ptr::null();
        match self {
            // SAFETY: room for a pointer; the name that it becomes is a constant of the library.
            Self::Real(api) => _ = unsafe { (api.error_name)(code, &mut name) },
            #[cfg(test)]
            Self::Fake(_) => {}
        }
        let name = if name.is_null() {
            "an unknown error".to_owned()
        } else {
            // SAFETY: the driver's constant, terminated by 0.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        CudaError::Driver { call, code, name }
    }

    // Devices and contexts.

    pub(super) fn version(&self) -> Result<(u32, u32), CudaError> {
        match self {
            Self::Real(api) => {
                let mut version = 0;
                // SAFETY: room for one number.
                self.check("cuDriverGetVersion", unsafe { (api.driver_version)(&mut version) })?;
                Ok(((version / 1000) as u32, (version % 1000 / 10) as u32))
            }
            #[cfg(test)]
            Self::Fake(_) => Ok((0, 0)),
        }
    }

    pub(super) fn device_count(&self) -> Result<u32, CudaError> {
        match self {
            Self::Real(api) => {
                let mut count = 0;
                // SAFETY: room for one number.
                self.check("cuDeviceGetCount", unsafe { (api.device_count)(&mut count) })?;
                Ok(u32::try_from(count).unwrap_or(0))
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.devices()),
        }
    }

    pub(super) fn device(&self, ordinal: u32) -> Result<DeviceFacts, CudaError> {
        match self {
            Self::Real(api) => {
                let (mut handle, mut name, mut pci, mut uuid) =
                    (0, [0 as c_char; 128], [0 as c_char; 32], Uuid::default());
                // SAFETY: room for what each call writes, with its size where it is told one.
                unsafe {
                    self.check("cuDeviceGet", (api.device_get)(&mut handle, ordinal as c_int))?;
                    let (n, p) = (name.len() as c_int - 1, pci.len() as c_int - 1);
                    self.check("cuDeviceGetName", (api.device_name)(name.as_mut_ptr(), n, handle))?;
                    self.check("cuDeviceGetPCIBusId", (api.device_pci)(pci.as_mut_ptr(), p, handle))?;
                    self.check("cuDeviceGetUuid", (api.device_uuid)(&mut uuid, handle))?;
                }
                Ok(DeviceFacts { handle, name: text(&name), pci: text(&pci), uuid: uuid.0 })
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(DeviceFacts {
                handle: ordinal as c_int,
                name: "recorded".to_owned(),
                pci: format!("0000:{ordinal:02x}:00.0"),
                uuid: fake.uuid(ordinal),
            }),
        }
    }

    pub(super) fn primary_context(&self, device: c_int) -> Result<Opaque, CudaError> {
        match self {
            Self::Real(api) => {
                let mut context = 0;
                // SAFETY: room for one handle.
                let status = unsafe { (api.primary_retain)(&mut context, device) };
                self.check("cuDevicePrimaryCtxRetain", status).map(|()| context)
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.primary(device)),
        }
    }

    pub(super) fn push(&self, context: Opaque) -> Result<(), CudaError> {
        match self {
            // SAFETY: a context that the driver gave, and that is retained or kept by the owner of its memory.
            Self::Real(api) => self.check("cuCtxPushCurrent", unsafe { (api.context_push)(context) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.push(context);
                Ok(())
            }
        }
    }

    pub(super) fn pop(&self) {
        match self {
            Self::Real(api) => {
                let mut context = 0;
                // SAFETY: room for one handle. There is one to pop: it was pushed by whoever calls this.
                unsafe { (api.context_pop)(&mut context) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.pop(),
        }
    }

    pub(super) fn current(&self) -> Option<Opaque> {
        match self {
            Self::Real(api) => {
                let mut context = 0;
                // SAFETY: room for one handle.
                let status = unsafe { (api.context_current)(&mut context) };
                (status == sys::SUCCESS && context != 0).then_some(context)
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.current(),
        }
    }

    // Memory. From here on a context is current.

    pub(super) fn alloc(&self, len: usize) -> Result<DevicePtr, CudaError> {
        match self {
            Self::Real(api) => {
                let mut at = 0;
                // SAFETY: room for one address.
                self.check("cuMemAlloc", unsafe { (api.alloc)(&mut at, len) }).map(|()| at)
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuMemAlloc") => Err(self.failed("cuMemAlloc", OUT_OF_MEMORY)),
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.alloc(len)),
        }
    }

    /// Waits for what the device does with it, as the driver defines it.
    pub(super) fn free(&self, at: DevicePtr) -> Result<(), CudaError> {
        match self {
            // SAFETY: given by `alloc`, and given back once.
            Self::Real(api) => self.check("cuMemFree", unsafe { (api.free)(at) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.free(at);
                Ok(())
            }
        }
    }

    /// Host memory that is pinned, for every context: copies to and from it run beside the program, and kernels reach it.
    pub(super) fn host_alloc(&self, len: usize) -> Result<u64, CudaError> {
        match self {
            Self::Real(api) => {
                let mut at: *mut c_void = std::ptr::null_mut();
                // SAFETY: room for one address.
                let status = unsafe { (api.host_alloc)(&mut at, len, sys::HOST_PORTABLE) };
                self.check("cuMemHostAlloc", status).map(|()| at.expose_provenance() as u64)
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuMemHostAlloc") => {
                Err(self.failed("cuMemHostAlloc", OUT_OF_MEMORY))
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.host_alloc(len)),
        }
    }

    pub(super) fn host_free(&self, at: u64) {
        match self {
            Self::Real(api) => {
                // SAFETY: given by `host_alloc`, and given back once, when no copy is queued that uses it.
                unsafe { (api.host_free)(std::ptr::with_exposed_provenance_mut(at as usize)) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.host_free(at),
        }
    }

    /// Pins a mapping, for every context: from here on it is as what `host_alloc` gives. `device` is that of the current context.
    ///
    /// # Safety
    /// `at..+len` are whole pages that stay mapped until [`host_unregister`](Self::host_unregister), with `read_only` for reading.
    pub(super) unsafe fn host_register(
        &self,
        device: c_int,
        (at, len): (u64, usize),
        read_only: bool,
    ) -> Result<(), CudaError> {
        match self {
            Self::Real(api) => {
                let mut reaches = 0;
                // SAFETY: room for one number.
                let asked = unsafe { (api.device_attribute)(&mut reaches, sys::HOST_POINTERS, device) };
                self.check("cuDeviceGetAttribute", asked)?;
                if reaches == 0 {
                    return Err(self.failed("cuMemHostRegister", sys::NOT_SUPPORTED));
                }
                let flags = if read_only { sys::REGISTER_READ_ONLY } else { 0 } | sys::REGISTER_PORTABLE;
                let at = std::ptr::with_exposed_provenance_mut(at as usize);
                // SAFETY: by the caller's promise.
                self.check("cuMemHostRegister", unsafe { (api.host_register)(at, len, flags) })
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuMemHostRegister") => {
                Err(self.failed("cuMemHostRegister", sys::NOT_SUPPORTED))
            }
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.host_register(at, len);
                Ok(())
            }
        }
    }

    pub(super) fn host_unregister(&self, at: u64) {
        match self {
            Self::Real(api) => {
                // SAFETY: pinned by `host_register`, and let go once, when no copy is queued that uses it.
                unsafe { (api.host_unregister)(std::ptr::with_exposed_provenance_mut(at as usize)) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.host_unregister(at),
        }
    }

    pub(super) fn zero(&self, at: DevicePtr, len: usize, stream: Opaque) -> Result<(), CudaError> {
        match self {
            // SAFETY: an allocation of ours of that length, which nobody uses yet.
            Self::Real(api) => self.check("cuMemsetD8Async", unsafe { (api.set_bytes)(at, 0, len, stream) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.zero(at, len, stream);
                Ok(())
            }
        }
    }

    /// Where the allocation of `at` begins, and its bytes.
    pub(super) fn address_range(&self, at: DevicePtr) -> Result<(DevicePtr, u64), CudaError> {
        match self {
            Self::Real(api) => {
                let (mut base, mut size) = (0, 0);
                // SAFETY: room for an address and a size; any address may be asked about.
                let status = unsafe { (api.address_range)(&mut base, &mut size, at) };
                self.check("cuMemGetAddressRange", status).map(|()| (base, size as u64))
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.range(at).ok_or_else(|| self.failed("cuMemGetAddressRange", 1)),
        }
    }

    /// Any address may be asked about.
    pub(super) fn pointer(&self, at: DevicePtr) -> Result<PointerFacts, CudaError> {
        let not = |found| CudaError::NotDeviceMemory { address: at, found };
        match self {
            Self::Real(api) => {
                let get = |attribute, into: *mut c_void| {
                    // SAFETY: each attribute is written to a variable of the type that the manual gives for it.
                    unsafe { (api.pointer_attribute)(into, attribute, at) == sys::SUCCESS }
                };
                let (mut kind, mut context, mut pool): (c_uint, Opaque, Opaque) = (0, 0, 0);
                let (mut ordinal, mut managed, mut capable, mut buffer_id): (c_int, c_uint, c_uint, u64) =
                    (0, 0, 0, 0);
                if !get(pointer::MEMORY_TYPE, (&raw mut kind).cast()) {
                    return Err(not("the driver does not know it"));
                }
                if kind != pointer::TYPE_DEVICE {
                    return Err(not("it is host memory"));
                }
                if !get(pointer::DEVICE_ORDINAL, (&raw mut ordinal).cast())
                    || !get(pointer::BUFFER_ID, (&raw mut buffer_id).cast())
                {
                    return Err(not("the driver names no device for it"));
                }
                // What a driver does not know is not so.
                get(pointer::CONTEXT, (&raw mut context).cast());
                get(pointer::IS_MANAGED, (&raw mut managed).cast());
                get(pointer::IPC_CAPABLE, (&raw mut capable).cast());
                get(pointer::MEMPOOL, (&raw mut pool).cast());
                let (managed, ipc_capable) = (managed & 0xff != 0, capable & 0xff != 0);
                Ok(PointerFacts { context, ordinal, managed, ipc_capable, pooled: pool != 0, buffer_id })
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.pointer(at).ok_or(not("the driver does not know it")),
        }
    }

    /// A descriptor of pages of an allocation, for a device that registers it.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
    pub(super) fn dma_buf(&self, at: DevicePtr, len: usize) -> Result<OwnedFd, CudaError> {
        match self {
            Self::Real(api) => {
                let mut fd: RawFd = -1;
                // SAFETY: room for one descriptor, which is what this type of handle is.
                let status = unsafe {
                    (api.range_handle)((&raw mut fd).cast(), at, len, sys::RANGE_HANDLE_DMA_BUF, 0)
                };
                self.check("cuMemGetHandleForAddressRange", status)?;
                // SAFETY: the driver has just given us this descriptor, and nobody else has it.
                Ok(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuMemGetHandleForAddressRange") => {
                Err(self.failed("cuMemGetHandleForAddressRange", sys::NOT_SUPPORTED))
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.dma_buf(at, len),
        }
    }

    /// What network devices have written to memory of the current context is visible to it when this returns.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For GPUDirect.
    pub(super) fn flush_direct_writes(&self) -> Result<(), CudaError> {
        match self {
            Self::Real(api) => {
                let (target, scope) = sys::FLUSH_CURRENT;
                // SAFETY: a plain call; a context is current.
                let status = unsafe { (api.flush_direct_writes)(target, scope) };
                self.check("cuFlushGPUDirectRDMAWrites", status)
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuFlushGPUDirectRDMAWrites") => {
                Err(self.failed("cuFlushGPUDirectRDMAWrites", sys::NOT_SUPPORTED))
            }
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.flush_direct_writes();
                Ok(())
            }
        }
    }

    // Streams and events.

    pub(super) fn stream(&self) -> Result<Opaque, CudaError> {
        match self {
            Self::Real(api) => {
                let mut stream = 0;
                // SAFETY: room for one handle.
                let status = unsafe { (api.stream_create)(&mut stream, sys::STREAM_NON_BLOCKING) };
                self.check("cuStreamCreate", status).map(|()| stream)
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.stream()),
        }
    }

    pub(super) fn stream_destroy(&self, stream: Opaque) {
        match self {
            Self::Real(api) => {
                // SAFETY: given by `stream`, and destroyed once. What is queued in it is finished by the driver.
                unsafe { (api.stream_destroy)(stream) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.used("cuStreamDestroy", stream),
        }
    }

    pub(super) fn stream_synchronize(&self, stream: Opaque) -> Result<(), CudaError> {
        match self {
            // SAFETY: a live stream.
            Self::Real(api) => self.check("cuStreamSynchronize", unsafe { (api.stream_synchronize)(stream) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.finish(stream);
                Ok(())
            }
        }
    }

    pub(super) fn event(&self) -> Result<Opaque, CudaError> {
        match self {
            Self::Real(api) => {
                let mut event = 0;
                // SAFETY: room for one handle.
                let status = unsafe { (api.event_create)(&mut event, sys::EVENT_DISABLE_TIMING) };
                self.check("cuEventCreate", status).map(|()| event)
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.event()),
        }
    }

    pub(super) fn record(&self, event: Opaque, stream: Opaque) -> Result<(), CudaError> {
        match self {
            // SAFETY: a live event and a live stream of the current context.
            Self::Real(api) => self.check("cuEventRecord", unsafe { (api.event_record)(event, stream) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.record(event, stream);
                Ok(())
            }
        }
    }

    /// Whether what was recorded before the event is done.
    pub(super) fn is_done(&self, event: Opaque) -> Result<bool, CudaError> {
        match self {
            // SAFETY: a live event.
            Self::Real(api) => match unsafe { (api.event_query)(event) } {
                sys::NOT_READY => Ok(false),
                status => self.check("cuEventQuery", status).map(|()| true),
            },
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.query(event)),
        }
    }

    pub(super) fn event_synchronize(&self, event: Opaque) -> Result<(), CudaError> {
        match self {
            // SAFETY: a live event.
            Self::Real(api) => self.check("cuEventSynchronize", unsafe { (api.event_synchronize)(event) }),
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.finish_event(event);
                Ok(())
            }
        }
    }

    pub(super) fn event_destroy(&self, event: Opaque) {
        match self {
            Self::Real(api) => {
                // SAFETY: given by `event`, and destroyed once.
                unsafe { (api.event_destroy)(event) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.used("cuEventDestroy", event),
        }
    }

    // Copies.

    /// Queues a copy between two addresses of the process, of a device or of the host: the driver knows which.
    ///
    /// # Safety
    /// `to..+len` may be written and `from..+len` be read until the stream has passed the copy.
    pub(super) unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        stream: Opaque,
    ) -> Result<(), CudaError> {
        match self {
            // SAFETY: by the caller's promise.
            Self::Real(api) => self.check("cuMemcpyAsync", unsafe { (api.copy)(to, from, len, stream) }),
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuMemcpyAsync") => {
                Err(self.failed("cuMemcpyAsync", OUT_OF_MEMORY))
            }
            #[cfg(test)]
            Self::Fake(fake) => {
                fake.copy(to, from, len, stream);
                Ok(())
            }
        }
    }

    /// Makes a function of a module's text. The text ends with a 0.
    pub(super) fn function(&self, text: &'static CStr, name: &'static CStr) -> Result<Opaque, CudaError> {
        match self {
            Self::Real(api) => {
                let (mut module, mut function) = (0, 0);
                // SAFETY: both texts end with a 0; room for a handle each. The module is never unloaded.
                unsafe {
                    self.check("cuModuleLoadData", (api.module_load)(&mut module, text.as_ptr().cast()))?;
                    self.check(
                        "cuModuleGetFunction",
                        (api.module_function)(&mut function, module, name.as_ptr()),
                    )?;
                }
                Ok(function)
            }
            #[cfg(test)]
            Self::Fake(fake) if fake.refuses("cuModuleLoadData") => {
                Err(self.failed("cuModuleLoadData", OUT_OF_MEMORY))
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.function()),
        }
    }

    /// Queues a gathered copy of the pieces in `args.list`, which is device memory.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), for each of the pieces, and for the list itself. `function` is the kernel of `gather.rs`.
    pub(super) unsafe fn gather(
        &self,
        function: Opaque,
        args: GatherArgs,
        stream: Opaque,
    ) -> Result<(), CudaError> {
        match self {
            Self::Real(api) => {
                let (blocks, threads) = args.plan.grid();
                let GatherArgs { mut list, plan: mut p } = args;
                let mut params: [*mut c_void; 9] = [
                    (&raw mut list).cast(),
                    (&raw mut p.to.base).cast(),
                    (&raw mut p.from.base).cast(),
                    (&raw mut p.to.layer).cast(),
                    (&raw mut p.from.layer).cast(),
                    (&raw mut p.to.unit).cast(),
                    (&raw mut p.from.unit).cast(),
                    (&raw mut p.per_piece).cast(),
                    (&raw mut p.total).cast(),
                ];
                // SAFETY: the kernel takes five numbers of 64 bits and then four of 32, which live for the call; the rest is the
                // caller's promise.
                let status = unsafe {
                    (api.launch)(
                        function,
                        blocks,
                        p.layers,
                        1,
                        threads,
                        1,
                        1,
                        0,
                        stream,
                        params.as_mut_ptr(),
                        std::ptr::null_mut(),
                    )
                };
                self.check("cuLaunchKernel", status)
            }
            #[cfg(test)]
            Self::Fake(fake) => {
                let _ = function;
                fake.gather(args, stream);
                Ok(())
            }
        }
    }

    // CUDA IPC.

    pub(super) fn ipc_export(&self, base: DevicePtr) -> Result<[u8; IPC_HANDLE], CudaError> {
        match self {
            Self::Real(api) => {
                let mut handle = IpcHandle([0; IPC_HANDLE]);
                // SAFETY: room for one handle.
                let status = unsafe { (api.ipc_export)(&mut handle, base) };
                self.check("cuIpcGetMemHandle", status).map(|()| handle.0)
            }
            #[cfg(test)]
            Self::Fake(fake) => Ok(fake.ipc_export(base)),
        }
    }

    pub(super) fn ipc_open(&self, handle: [u8; IPC_HANDLE]) -> Result<DevicePtr, CudaError> {
        match self {
            Self::Real(api) => {
                let mut at = 0;
                // SAFETY: room for one address. The driver checks a handle, which may be anything that a peer has sent.
                let status = unsafe { (api.ipc_open)(&mut at, IpcHandle(handle), sys::IPC_LAZY_PEER_ACCESS) };
                self.check("cuIpcOpenMemHandle", status).map(|()| at)
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.ipc_open(handle).ok_or_else(|| self.failed("cuIpcOpenMemHandle", 400)),
        }
    }

    pub(super) fn ipc_close(&self, at: DevicePtr) {
        match self {
            Self::Real(api) => {
                // SAFETY: opened by `ipc_open`, and closed once, when nothing is queued that uses it.
                unsafe { (api.ipc_close)(at) };
            }
            #[cfg(test)]
            Self::Fake(fake) => fake.ipc_close(at),
        }
    }
}

/// What a call has written into `bytes`, whose last one is 0.
fn text(bytes: &[c_char]) -> String {
    bytes.iter().take_while(|&&b| b != 0).map(|&b| char::from(b as u8)).collect()
}
