//! Mapped memory: what a region is registered over. Owns the mapping (or the user's owner) until its last use.
//!
//! This file and `slice.rs` are the only ones of `memory/` that turn an address into a pointer.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard, Weak};

use super::{Prefault, memfd};
use crate::background;
use crate::cuda::{DeviceMemory, Flight};
use crate::error::MemoryError;

/// From this size on, a mapping of ours asks for huge pages.
const HUGE_PAGE: u64 = 2 << 20;

/// From this size on, a mapping of ours is unmapped elsewhere: that takes a while.
const LARGE: usize = 64 << 20;

/// What names the next memfd, or allocation of a GPU, in this process. None is 0.
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// A name for memory that is lent to peers: never 0, never given out again.
pub(crate) fn next_name() -> u64 {
    NEXT_NAME.fetch_add(1, Ordering::Relaxed)
}

/// Memory with a fixed address for as long as this value lives.
pub(crate) struct Mapping {
    addr: usize,
    len: u64,
    backing: Backing,
    /// Orders the CPU's own safe copies into and out of exposed memory, so that two of them are never a data race.
    /// Devices, peers and the kernel are outside of it. Held for one small piece of a copy at a time.
    copies: RwLock<()>,
    /// Copies into it and out of it by a GPU that may not be over.
    flights: Mutex<Vec<Weak<Flight>>>,
}

enum Backing {
    /// Ours: unmapped at drop. The length mapped is rounded up to whole pages.
    Mapped { mapped_len: usize, memfd: Option<Memfd> },
    /// The user's, kept by an owner that we only drop.
    User { _owner: Box<dyn Any + Send + Sync> },
    /// Memory of a GPU: its address is nothing that this processor can reach.
    Device(Arc<DeviceMemory>),
}

/// The memfd behind a mapping of ours: its first byte is the mapping's.
struct Memfd {
    fd: OwnedFd,
    id: u64,
}

/// The sealed memfd behind a mapping, for who lends it to another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemfdRef<'m> {
    pub(crate) fd: BorrowedFd<'m>,
    /// The length of the memfd: the mapping's, rounded up to pages.
    pub(crate) len: u64,
    /// Names this memfd in this process: never 0, never given out again.
    pub(crate) id: u64,
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.backing {
            Backing::Mapped { memfd: None, .. } => "anonymous",
            Backing::Mapped { memfd: Some(_), .. } => "memfd",
            Backing::User { .. } => "user",
            Backing::Device(_) => "device",
        };
        write!(f, "Mapping({kind}, {:#x}..+{})", self.addr, self.len)
    }
}

impl Mapping {
    pub(crate) fn anonymous(len: u64, prefault: Prefault) -> Result<Self, MemoryError> {
        let mapped_len = whole_pages(len)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let this = Self::map("mapping anonymous memory", len, mapped_len, flags, None)?;
        this.ask_for_huge_pages();
        this.prefault(prefault)?;
        Ok(this)
    }

    /// Memory in a memfd that is sealed against everything but the writes through this mapping, see [`memfd`].
    pub(crate) fn memfd(len: u64, prefault: Prefault) -> Result<Self, MemoryError> {
        let mapped_len = whole_pages(len)?;
        let os = |what| move |source| MemoryError::Os { what, len, source };
        let fd = memfd::create(mapped_len as u64).map_err(os("creating a memfd"))?;
        let id = next_name();
        let memfd = Some(Memfd { fd, id });
        let this = Self::map("mapping a memfd", len, mapped_len, libc::MAP_SHARED, memfd)?;
        // After the mapping: from then on nobody gets another one that can write.
        if let Some(memfd) = this.memfd_ref() {
            memfd::seal(memfd.fd).map_err(os("sealing a memfd"))?;
        }
        this.ask_for_huge_pages();
        this.prefault(prefault)?;
        Ok(this)
    }

    /// For a fresh mapping of ours. Transparent huge pages of a memfd need the system's consent besides
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    fn ask_for_huge_pages(&self) {
        if let Backing::Mapped { mapped_len, .. } = self.backing
            && self.len >= HUGE_PAGE
        {
            // SAFETY: the range is a mapping of ours; the advice changes no content. A refusal costs speed only.
            unsafe { libc::madvise(self.addr as *mut libc::c_void, mapped_len, libc::MADV_HUGEPAGE) };
        }
    }

    fn map(
        what: &'static str,
        len: u64,
        mapped_len: usize,
        flags: libc::c_int,
        memfd: Option<Memfd>,
    ) -> Result<Self, MemoryError> {
        let fd = memfd.as_ref().map_or(-1, |memfd| memfd.fd.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let addr = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped_len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        if addr == libc::MAP_FAILED {
            return Err(MemoryError::Os { what, len, source: io::Error::last_os_error() });
        }
        Ok(Self::over(addr.expose_provenance(), len, Backing::Mapped { mapped_len, memfd }))
    }

    /// # Safety
    /// `addr..addr + len` is initialised memory that stays valid for reads and writes until `owner` is dropped, and
    /// see [`super::Memory::from_raw`].
    pub(crate) unsafe fn user(
        addr: usize,
        len: u64,
        owner: Box<dyn Any + Send + Sync>,
        prefault: Prefault,
    ) -> Result<Self, MemoryError> {
        whole_pages(len)?;
        if addr == 0 || (addr as u64).checked_add(len).is_none() {
            return Err(MemoryError::Length {
                asked: len,
                fix: "address and length must stay inside the address space",
            });
        }
        let this = Self::over(addr, len, Backing::User { _owner: owner });
        this.prefault(prefault)?;
        Ok(this)
    }

    /// `len` bytes of memory of a GPU.
    pub(crate) fn device(memory: Arc<DeviceMemory>, len: u64) -> Self {
        Self::over(memory.addr() as usize, len, Backing::Device(memory))
    }

    fn over(addr: usize, len: u64, backing: Backing) -> Self {
        Self { addr, len, backing, copies: RwLock::new(()), flights: Mutex::default() }
    }

    /// The memory of a GPU that it is, if it is that. Then no pointer may be made of its address.
    pub(crate) fn device_memory(&self) -> Option<&Arc<DeviceMemory>> {
        match &self.backing {
            Backing::Device(memory) => Some(memory),
            _ => None,
        }
    }

    /// A GPU copies into it until `flight` is over.
    pub(crate) fn written_by(&self, flight: &Arc<Flight>) {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        flights.retain(|flight| flight.strong_count() > 0);
        flights.push(Arc::downgrade(flight));
    }

    /// A GPU copies from it until `flight` is over.
    pub(crate) fn read_by(&self, flight: &Arc<Flight>) {
        self.written_by(flight);
    }

    /// Waits until no GPU copies into it or out of it. Those copies wait for nobody, and end in milliseconds.
    pub(crate) fn settle(&self) {
        let flights = std::mem::take(&mut *self.flights.lock().unwrap_or_else(PoisonError::into_inner));
        for flight in flights.iter().filter_map(Weak::upgrade) {
            // After an error of the context nothing of it runs any more.
            let _ = flight.wait();
        }
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Bytes, as asked for (a mapping of ours may be larger by a part of a page).
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sealed memfd behind this memory, where there is one.
    pub(crate) fn memfd_ref(&self) -> Option<MemfdRef<'_>> {
        match &self.backing {
            Backing::Mapped { mapped_len, memfd: Some(memfd) } => {
                Some(MemfdRef { fd: memfd.fd.as_fd(), len: *mapped_len as u64, id: memfd.id })
            }
            _ => None,
        }
    }

    /// Keeps the copies of safe code out, for a copy into this memory by a provider.
    pub(crate) fn lock_copies(&self) -> RwLockWriteGuard<'_, ()> {
        self.copies.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock for CPU copies, see the field.
    pub(super) fn copies(&self) -> &RwLock<()> {
        &self.copies
    }

    fn prefault(&self, prefault: Prefault) -> Result<(), MemoryError> {
        if prefault == Prefault::No || self.device_memory().is_some() {
            return Ok(());
        }
        let page = page_size();
        let start = self.addr & !(page - 1);
        let end = self.addr + self.len as usize;
        let span = (end - start).next_multiple_of(page);
        loop {
            // SAFETY: the whole pages that hold this mapping; populating them changes no content.
            let rc = unsafe { libc::madvise(start as *mut libc::c_void, span, libc::MADV_POPULATE_WRITE) };
            if rc == 0 {
                return Ok(());
            }
            let source = io::Error::last_os_error();
            match source.raw_os_error() {
                Some(libc::EINTR) => continue,
                // A kernel before 5.14, or a mapping that it does not populate.
                Some(libc::EINVAL) => break,
                _ => return Err(MemoryError::Os { what: "faulting in the pages", len: self.len, source }),
            }
        }
        let ours = matches!(self.backing, Backing::Mapped { .. });
        for at in (self.addr..end).step_by(page) {
            let p = std::ptr::with_exposed_provenance_mut::<u8>(at);
            // SAFETY: `at` is inside this mapping. A fresh mapping of ours is zero and unshared, so zero is written;
            // the user's memory is only read.
            unsafe {
                if ours {
                    p.write_volatile(0);
                } else {
                    p.read_volatile();
                }
            }
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Backing::Mapped { mapped_len, .. } = self.backing {
            let addr = self.addr;
            let unmap = move || {
                // SAFETY: mapped by `map` with this length, and unmapped only here; whoever uses the memory holds an
                // `Arc` of this value.
                unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(addr), mapped_len) };
            };
            // Letting go of many pages takes a while, and the last user may be a task's buffer (R9).
            if mapped_len >= LARGE { background::run(unmap) } else { unmap() }
        }
    }
}

pub(crate) fn page_size() -> usize {
    // SAFETY: a plain query.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).ok().filter(|n| n.is_power_of_two()).unwrap_or(4096)
}

/// `len` rounded up to pages, when it is a length that a mapping (and a Rust slice) can have.
fn whole_pages(len: u64) -> Result<usize, MemoryError> {
    if len == 0 {
        return Err(MemoryError::Length { asked: 0, fix: "ask for at least one byte" });
    }
    let page = page_size() as u64;
    len.checked_next_multiple_of(page)
        .filter(|&n| n <= isize::MAX as u64)
        .map(|n| n as usize)
        .ok_or(MemoryError::Length { asked: len, fix: "no address space is that large; ask for less" })
}
