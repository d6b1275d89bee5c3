//! The few calls of the CUDA driver that the suite makes beside the crate, as a framework would: plain copies to compare with,
//! stream-ordered memory, events.

use std::ffi::{c_int, c_uint};

use libloading::Library;

use crate::Failed;

type Fn0 = unsafe extern "C" fn(c_uint) -> c_int;

/// The loaded driver, with the primary context of GPU 0.
pub struct Cuda {
    library: Library,
    context: usize,
}

impl Cuda {
    pub fn load() -> Result<Self, Failed> {
        // SAFETY: the driver's library sets up nothing but itself; its functions have the types of its manual, here and below.
        unsafe {
            let library =
                Library::new("libcuda.so.1").map_err(|e| format!("there is no CUDA driver here: {e}"))?;
            let init = library.get::<Fn0>(b"cuInit\0")?;
            check("cuInit", init(0))?;
            let get = library.get::<unsafe extern "C" fn(*mut c_int, c_int) -> c_int>(b"cuDeviceGet\0")?;
            let (mut device, mut context) = (0, 0usize);
            check("cuDeviceGet", get(&mut device, 0))?;
            let retain = library
                .get::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(b"cuDevicePrimaryCtxRetain\0")?;
            check("cuDevicePrimaryCtxRetain", retain(&mut context, device))?;
            Ok(Self { library, context })
        }
    }

    fn enter(&self) -> Result<(), Failed> {
        // SAFETY: a context of the driver's, retained by `load`.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(usize) -> c_int>(b"cuCtxSetCurrent\0")?;
            check("cuCtxSetCurrent", set(self.context))
        }
    }

    /// Memory of a stream-ordered pool. It is not given back.
    pub fn pooled(&self, bytes: usize) -> Result<u64, Failed> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: room for one address; the default stream.
        unsafe {
            let alloc = self
                .library
                .get::<unsafe extern "C" fn(*mut u64, usize, usize) -> c_int>(b"cuMemAllocAsync\0")?;
            check("cuMemAllocAsync", alloc(&mut at, bytes, 0))?;
            let wait = self.library.get::<unsafe extern "C" fn(usize) -> c_int>(b"cuStreamSynchronize\0")?;
            check("cuStreamSynchronize", wait(0))?;
        }
        Ok(at)
    }

    /// Memory that the program maps itself, at least so many bytes. It is not given back.
    pub fn mapped(&self, bytes: usize) -> Result<u64, Failed> {
        /// `CUmemLocation`, of a device.
        #[repr(C)]
        struct Location(u32, i32);
        /// `CUmemAllocationProp`: pinned, no handle to export, where, nothing, no flags.
        #[repr(C)]
        struct Properties(u32, u32, Location, usize, u64);
        /// `CUmemAccessDesc`: where from, and read and write.
        #[repr(C)]
        struct Access(Location, u32);
        self.enter()?;
        let properties = Properties(1, 0, Location(1, 0), 0, 0);
        let (mut granularity, mut handle, mut at) = (0usize, 0u64, 0u64);
        // SAFETY: room for what each call writes; the structs are laid out as the manual has them, and live for the calls.
        unsafe {
            let least =
                self.library.get::<unsafe extern "C" fn(*mut usize, *const Properties, u32) -> c_int>(
                    b"cuMemGetAllocationGranularity\0",
                )?;
            check("cuMemGetAllocationGranularity", least(&mut granularity, &properties, 0))?;
            let bytes = bytes.next_multiple_of(granularity);
            let create =
                self.library.get::<unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int>(
                    b"cuMemCreate\0",
                )?;
            check("cuMemCreate", create(&mut handle, bytes, &properties, 0))?;
            let reserve =
                self.library.get::<unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int>(
                    b"cuMemAddressReserve\0",
                )?;
            check("cuMemAddressReserve", reserve(&mut at, bytes, 0, 0, 0))?;
            let map = self
                .library
                .get::<unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int>(b"cuMemMap\0")?;
            check("cuMemMap", map(at, bytes, 0, handle, 0))?;
            let allow = self.library.get::<unsafe extern "C" fn(u64, usize, *const Access, usize) -> c_int>(
                b"cuMemSetAccess\0",
            )?;
            check("cuMemSetAccess", allow(at, bytes, &Access(Location(1, 0), 3), 1))?;
        }
        Ok(at)
    }

    /// Queues on the default stream what keeps the GPU busy for a good while, `rounds` copies from `a` to `b` of `bytes` each, and
    /// then a copy of `len` bytes from `from` to `to`. Waits for nothing.
    pub fn queue_late_copy(
        &self,
        (a, b, bytes, rounds): (u64, u64, usize, usize),
        to: u64,
        from: u64,
        len: usize,
    ) -> Result<(), Failed> {
        self.enter()?;
        // SAFETY: memory of the suite's.
        unsafe {
            let copy = self
                .library
                .get::<unsafe extern "C" fn(u64, u64, usize, usize) -> c_int>(b"cuMemcpyDtoDAsync_v2\0")?;
            for _ in 0..rounds {
                check("cuMemcpyDtoDAsync", copy(b, a, bytes, 0))?;
            }
            check("cuMemcpyDtoDAsync", copy(to, from, len, 0))
        }
    }

    /// Copies between two places of the GPU `times` times, each waited for, and says how long the middle one took.
    pub fn plain_copy(&self, to: u64, from: u64, bytes: usize, times: usize) -> Result<f64, Failed> {
        self.enter()?;
        let mut seconds = Vec::new();
        // SAFETY: memory of the suite's, which nobody else uses meanwhile.
        unsafe {
            let copy = self
                .library
                .get::<unsafe extern "C" fn(u64, u64, usize, usize) -> c_int>(b"cuMemcpyDtoDAsync_v2\0")?;
            let wait = self.library.get::<unsafe extern "C" fn(usize) -> c_int>(b"cuStreamSynchronize\0")?;
            for _ in 0..times + 3 {
                let start = std::time::Instant::now();
                check("cuMemcpyDtoDAsync", copy(to, from, bytes, 0))?;
                check("cuStreamSynchronize", wait(0))?;
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        Ok(crate::median(&mut seconds[3..]))
    }

    /// Copies `pieces` of `piece` bytes each, a good many times over, between the GPU and pinned memory.
    pub fn pinned_rates(&self, piece: usize, pieces: usize) -> Result<Rates, Failed> {
        self.enter()?;
        let bytes = piece * pieces;
        let (mut host, mut device, mut streams) = ([0u64; 2], [0u64; 2], [0usize; 2]);
        // SAFETY: room for what each call writes; memory of this function's, which is not given back.
        unsafe {
            let pin = self
                .library
                .get::<unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int>(b"cuMemHostAlloc\0")?;
            let alloc =
                self.library.get::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(b"cuMemAlloc_v2\0")?;
            let stream =
                self.library.get::<unsafe extern "C" fn(*mut usize, c_uint) -> c_int>(b"cuStreamCreate\0")?;
            for way in 0..2 {
                check("cuMemHostAlloc", pin(&mut host[way], bytes, 0))?;
                check("cuMemAlloc", alloc(&mut device[way], bytes))?;
                check("cuStreamCreate", stream(&mut streams[way], 1))?;
            }
        }
        let [from, to, both] = [[true, false], [false, true], [true, true]].map(|ways| {
            self.copies(ways, (host, device, streams), piece, pieces)?;
            self.copies(ways, (host, device, streams), piece, pieces)
        });
        Ok(Rates { from: from?, to: to?, both: both? })
    }

    /// From the GPU, to it, or both at once: bytes a second each way.
    fn copies(
        &self,
        ways: [bool; 2],
        (host, device, streams): ([u64; 2], [u64; 2], [usize; 2]),
        piece: usize,
        pieces: usize,
    ) -> Result<f64, Failed> {
        const TIMES: usize = 20;
        let start = std::time::Instant::now();
        // SAFETY: memory and streams of `pinned_rates`.
        unsafe {
            let copy = self
                .library
                .get::<unsafe extern "C" fn(u64, u64, usize, usize) -> c_int>(b"cuMemcpyAsync\0")?;
            let wait = self.library.get::<unsafe extern "C" fn(usize) -> c_int>(b"cuStreamSynchronize\0")?;
            for at in (0..TIMES * pieces).map(|n| (n % pieces * piece) as u64) {
                if ways[0] {
                    check("cuMemcpyAsync", copy(host[0] + at, device[0] + at, piece, streams[0]))?;
                }
                if ways[1] {
                    check("cuMemcpyAsync", copy(device[1] + at, host[1] + at, piece, streams[1]))?;
                }
            }
            for stream in streams {
                check("cuStreamSynchronize", wait(stream))?;
            }
        }
        Ok((TIMES * pieces * piece) as f64 / start.elapsed().as_secs_f64())
    }
}

/// Bytes a second.
pub struct Rates {
    pub from: f64,
    pub to: f64,
    /// Each way, both at once.
    pub both: f64,
}

fn check(call: &str, status: c_int) -> Result<(), Failed> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: CUresult {status}").into()) }
}
