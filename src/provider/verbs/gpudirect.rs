//! GPUDirect: memory of a GPU is registered with the network device, which then reads and writes it without any copy.
//!
//! Two ways, in this order. A dmabuf of the whole allocation (Linux 5.12, rdma-core 34, NVIDIA's open kernel modules), of which the range
//! is registered by its offset. Peer memory (nvidia_peermem): the device's address is registered as if it were host memory. Where
//! both are refused the error has both causes.
//!
//! Tested up to these calls: there was no machine with both kinds of device.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::calls::object;
use super::load;
use super::sys::{LibIbverbs, ibv_mr, ibv_pd};
use crate::cuda::DeviceMemory;
use crate::error::{DmabufError, MemoryError};
use crate::provider::AccessFlags;

/// `ibv_reg_mr`.
type RegMr = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
/// `ibv_reg_dmabuf_mr`: offset in the dmabuf, length, what the first byte is called in requests, descriptor, access. It is not among
/// the generated declarations, all of which every supported version of the library has.
pub(super) type RegDmabufMr = unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

/// The calls that register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    plain: RegMr,
    /// `None` where the library is older.
    dmabuf: Option<RegDmabufMr>,
}

impl Calls {
    pub(super) fn of(lib: &LibIbverbs) -> Self {
        Self { plain: lib.ibv_reg_mr, dmabuf: load::reg_dmabuf_mr() }
    }

    /// Registers `addr..+len` of `memory`, under its own addresses.
    ///
    /// # Safety
    /// `pd` is a live protection domain of the library of these calls, or what their recorded ones take. The memory outlives the
    /// registration.
    pub(super) unsafe fn register(
        self,
        pd: *mut ibv_pd,
        memory: &DeviceMemory,
        (addr, len): (u64, u64),
        access: AccessFlags,
    ) -> Result<NonNull<ibv_mr>, MemoryError> {
        let length = usize::try_from(len)
            .map_err(|_| MemoryError::Length { asked: len, fix: "no address space is that large" })?;
        // SAFETY: the caller's promise, here and below.
        let dmabuf = match unsafe { self.as_dmabuf(pd, memory, addr, length, access) } {
            Ok(raw) => return Ok(raw),
            Err(cause) => cause,
        };
        let at = std::ptr::with_exposed_provenance_mut(addr as usize);
        let plain = |access: AccessFlags| {
            // SAFETY: the library only hands the address to the kernel, where peer memory finds whose it is.
            object(unsafe { (self.plain)(pd, at, length, access.0 as c_int) })
        };
        match relaxed(access, plain) {
            Ok(raw) => {
                tracing::debug!(%dmabuf, "memory of a GPU is registered through peer memory");
                Ok(raw)
            }
            Err(peer) => Err(MemoryError::GpuDirect { len, dmabuf, peer }),
        }
    }

    /// # Safety
    /// As for `register`.
    unsafe fn as_dmabuf(
        self,
        pd: *mut ibv_pd,
        memory: &DeviceMemory,
        addr: u64,
        length: usize,
        access: AccessFlags,
    ) -> Result<NonNull<ibv_mr>, DmabufError> {
        let Some(call) = self.dmabuf else { return Err(DmabufError::NoCall) };
        let (fd, pages) = memory.dma_buf().map_err(DmabufError::Export)?;
        let Some(offset) = addr.checked_sub(pages.start) else { return Err(DmabufError::NoCall) };
        let registered = relaxed(access, |access| {
            // SAFETY: the descriptor lives for the call, after which the registration holds the dmabuf itself.
            object(unsafe { call(pd, offset, length, addr, fd.as_raw_fd(), access.0 as c_int) })
        });
        registered.map_err(DmabufError::Register)
    }
}

/// Without the optional flag where it is not known.
pub(super) fn relaxed<T>(
    access: AccessFlags,
    mut register: impl FnMut(AccessFlags) -> io::Result<T>,
) -> io::Result<T> {
    match register(access) {
        // A kernel or a driver from before there was such.
        Err(e)
            if access.contains(AccessFlags::RELAXED_ORDERING)
                && matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) =>
        {
            register(access.without(AccessFlags::RELAXED_ORDERING))
        }
        registered => registered,
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::*;
    use crate::cuda::Cuda;
    use crate::cuda::fake::Fake;

    /// What a recorded registration was asked for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Asked {
        Dmabuf { offset: u64, length: usize, iova: u64, access: c_int },
        Plain { addr: u64, length: usize, access: c_int },
    }

    #[derive(Default)]
    struct Recorded {
        asked: Vec<Asked>,
        /// The error numbers of the next calls; 0 is success.
        dmabuf: Vec<i32>,
        plain: Vec<i32>,
    }

    thread_local! {
        static RECORDED: RefCell<Recorded> = RefCell::default();
    }

    fn answer(errnos: &mut Vec<i32>) -> *mut ibv_mr {
        match if errnos.is_empty() { 0 } else { errnos.remove(0) } {
            0 => std::ptr::dangling_mut(),
            errno => {
                // SAFETY: this thread's own error number.
                unsafe { *libc::__errno_location() = errno };
                std::ptr::null_mut()
            }
        }
    }

    unsafe extern "C" fn dmabuf(
        _: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> *mut ibv_mr {
        // SAFETY: a query of a descriptor.
        assert!(unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0, "the descriptor is open during the call");
        RECORDED.with_borrow_mut(|r| {
            r.asked.push(Asked::Dmabuf { offset, length, iova, access });
            answer(&mut r.dmabuf)
        })
    }

    unsafe extern "C" fn plain(
        _: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> *mut ibv_mr {
        RECORDED.with_borrow_mut(|r| {
            r.asked.push(Asked::Plain { addr: addr.expose_provenance() as u64, length, access });
            answer(&mut r.plain)
        })
    }

    const ALL: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::LOCAL_WRITE);
    const RELAXED: AccessFlags = ALL.union(AccessFlags::RELAXED_ORDERING);

    struct Rig {
        fake: Arc<Fake>,
        memory: Arc<DeviceMemory>,
        base: u64,
    }

    impl Rig {
        /// 64 KiB from byte 4160 of an allocation of 1 MiB on.
        fn new() -> Self {
            let (cuda, fake): (Arc<Cuda>, _) = Fake::new(1);
            let base = fake.foreign(0, 1 << 20, false);
            // SAFETY: memory of the recorded driver's, which it keeps.
            let memory = unsafe {
                DeviceMemory::user(&cuda, base + 4160, 64 << 10, Box::new(()), crate::memory::next_name)
            };
            RECORDED.with_borrow_mut(|r| *r = Recorded::default());
            Self { fake, memory: memory.unwrap(), base }
        }

        fn register(&self, calls: Calls, access: AccessFlags) -> Result<(), MemoryError> {
            let at = (self.memory.addr() + 64, 1000);
            // SAFETY: recorded calls, which look at no domain.
            unsafe { calls.register(std::ptr::null_mut(), &self.memory, at, access) }.map(|_| ())
        }

        fn asked(&self) -> Vec<Asked> {
            assert_eq!(self.fake.wrong(), Vec::<String>::new());
            RECORDED.with_borrow(|r| r.asked.clone())
        }

        /// How a range of the allocation is asked for, whose dmabuf begins with its first page.
        fn as_dmabuf(&self, access: AccessFlags) -> Asked {
            let page = self.base & !(crate::memory::page_size() as u64 - 1);
            let iova = self.base + 4160 + 64;
            Asked::Dmabuf { offset: iova - page, length: 1000, iova, access: access.0 as c_int }
        }

        fn as_plain(&self, access: AccessFlags) -> Asked {
            Asked::Plain { addr: self.base + 4160 + 64, length: 1000, access: access.0 as c_int }
        }
    }

    const BOTH: Calls = Calls { plain, dmabuf: Some(dmabuf) };

    #[test]
    fn r10_a_range_is_registered_as_a_part_of_the_dmabuf_of_its_allocation() {
        let rig = Rig::new();
        rig.register(BOTH, ALL).unwrap();
        assert_eq!(rig.asked(), [rig.as_dmabuf(ALL)]);
        assert_eq!(rig.fake.count("cuMemGetHandleForAddressRange"), 1);
    }

    #[test]
    fn r10_peer_memory_is_next_and_an_optional_flag_is_left_away_where_it_is_not_known() {
        let rig = Rig::new();
        RECORDED.with_borrow_mut(|r| {
            r.dmabuf = vec![libc::EINVAL, libc::EOPNOTSUPP];
            r.plain = vec![libc::EINVAL];
        });
        rig.register(BOTH, RELAXED).unwrap();
        let expected = [rig.as_dmabuf(RELAXED), rig.as_dmabuf(ALL), rig.as_plain(RELAXED), rig.as_plain(ALL)];
        assert_eq!(rig.asked(), expected);
    }

    #[test]
    fn r10_an_old_library_registers_through_peer_memory() {
        let rig = Rig::new();
        rig.register(Calls { plain, dmabuf: None }, ALL).unwrap();
        assert_eq!(rig.asked(), [rig.as_plain(ALL)]);
        assert_eq!(rig.fake.count("cuMemGetHandleForAddressRange"), 0);
    }

    /// Case 45: both causes are listed, each with its number, and what to do.
    #[test]
    fn r10_case_45_both_refusals_are_one_error_that_names_both_causes() {
        let rig = Rig::new();
        RECORDED.with_borrow_mut(|r| (r.dmabuf, r.plain) = (vec![libc::EOPNOTSUPP], vec![libc::EFAULT]));
        let error = rig.register(BOTH, ALL).unwrap_err();
        let MemoryError::GpuDirect { len: 1000, dmabuf: DmabufError::Register(first), peer } = &error else {
            panic!("{error}");
        };
        assert_eq!((first.raw_os_error(), peer.raw_os_error()), (Some(libc::EOPNOTSUPP), Some(libc::EFAULT)));
        let text = error.to_string();
        for word in ["os error 95", "os error 14", "nvidia_peermem", "5.12", "1000 bytes"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }

    #[test]
    fn r10_case_45_a_gpu_that_exports_nothing_is_the_first_cause() {
        let rig = Rig::new();
        rig.fake.refuse("cuMemGetHandleForAddressRange", 1);
        RECORDED.with_borrow_mut(|r| r.plain = vec![libc::EFAULT]);
        let error = rig.register(BOTH, ALL).unwrap_err();
        assert!(matches!(error, MemoryError::GpuDirect { dmabuf: DmabufError::Export(_), .. }), "{error}");
        assert!(error.to_string().contains("cuMemGetHandleForAddressRange"), "{error}");
        assert_eq!(rig.asked(), [rig.as_plain(ALL)]);
    }
}
