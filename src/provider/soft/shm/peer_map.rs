//! A region of a peer on this host: its memfd, mapped read-only.
//!
//! The descriptor comes from the peer, so that nothing about it is taken for granted. It has to be a memfd of ordinary pages
//! (of `tmpfs` without a mount: no file system that answers when it likes, no huge pages that can run out) which is sealed
//! against shrinking and growing. Then what `fstat` says stays true, and reading the mapping can never be a SIGBUS. A hole in it
//! reads as zeros. (It is filled by that, on the account of whoever reads. So only what a peer names is read, and pages are
//! faulted in ahead only where the memfd has them already.)
//!
//! There is one mapping of a memfd in the process, whatever number of queue pairs uses it; it goes with the last of them. It
//! is found by device and inode, which cannot be anybody else's while the mapping holds the file. Only that of a peer's slots, which
//! are pinned, is of one connection: what another one lends is not pinned for that.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};

use super::super::lock;
use crate::background;
use crate::cuda::{Gpu, Pinned};

/// The longest memfd that is mapped: what a region of a soft device can be, and a page. Address space is what it costs, so the
/// link bounds how many there are.
const MAX_BYTES: u64 = (1 << 40) + (64 << 10);
/// From this size on, pages are faulted in ahead, and unmapped, in the background.
const LARGE: u64 = 1 << 20;
/// Faulted in at a time: how much longer than its last user a mapping may live.
const POPULATE_BYTES: usize = 32 << 20;

/// Why the memory of a peer is not mapped.
#[derive(Debug, thiserror::Error)]
pub(in crate::provider::soft) enum PeerMapError {
    #[error("the peer sent a descriptor of something else than a memfd of ordinary pages")]
    NotMemfd,
    #[error(
        "the peer's memfd is not sealed against shrinking and growing (its seals are {seals:#x}), so that reading it could kill this process"
    )]
    NotSealed { seals: i32 },
    #[error("the peer's memfd has {size} bytes, and {told} were announced")]
    TooShort { told: u64, size: u64 },
    #[error("the peer's memfd has {size} bytes, and {most} is the most that is mapped")]
    TooLarge { size: u64, most: u64 },
    #[error("{what} failed")]
    Os {
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

/// Which file it is.
type FileId = (u64, u64);

/// The mappings of this process. An entry may have outlived its mapping, by a moment.
static MAPPED: LazyLock<Mutex<HashMap<FileId, Weak<PeerMap>>>> = LazyLock::new(Mutex::default);

/// The whole of a peer's memfd.
#[derive(Debug)]
pub(in crate::provider::soft) struct PeerMap {
    /// By what it is found. `None`: it has the peer's slots, and is found by nobody.
    file: Option<FileId>,
    /// Of slots: whether they were to be pinned, and what came of it.
    asked: AtomicBool,
    pinned: OnceLock<Option<Pinned>>,
    // After what pins it.
    pages: Pages,
}

impl PeerMap {
    /// Maps the memfd `fd`, of which the peer says that it has at least `len` bytes. The descriptor is closed.
    pub(in crate::provider::soft) fn map(fd: OwnedFd, len: u64) -> Result<Arc<Self>, PeerMapError> {
        Self::map_as(fd, len, false)
    }

    /// The same of the peer's slots, which have exactly `len` bytes.
    pub(super) fn map_slots(fd: OwnedFd, len: u64) -> Result<Arc<Self>, PeerMapError> {
        Self::map_as(fd, len, true)
    }

    fn map_as(fd: OwnedFd, len: u64, slots: bool) -> Result<Arc<Self>, PeerMapError> {
        let stat = check(&fd)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size < len || size == 0 {
            return Err(PeerMapError::TooShort { told: len, size });
        }
        let most = if slots { len } else { MAX_BYTES };
        if size > most {
            return Err(PeerMapError::TooLarge { size, most });
        }
        let mapped_len = usize::try_from(size).map_err(|_| PeerMapError::TooLarge { size, most })?;
        let new = |file| -> Result<Arc<Self>, PeerMapError> {
            let pages = Pages::map(&fd, mapped_len)?;
            let (asked, pinned) = (AtomicBool::new(false), OnceLock::new());
            Ok(Arc::new(Self { file, asked, pinned, pages }))
        };
        if slots {
            return new(None);
        }
        let file: FileId = (stat.st_dev, stat.st_ino);
        let mut mapped = lock(&MAPPED);
        if let Some(map) = mapped.get(&file).and_then(Weak::upgrade) {
            return Ok(map);
        }
        let map = new(Some(file))?;
        mapped.insert(file, Arc::downgrade(&map));
        drop(mapped);
        // Blocks of 512 bytes. A sparse memfd stays sparse.
        let allocated = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        if size >= LARGE && allocated >= size {
            let map = Arc::downgrade(&map);
            background::run(move || populate(map, 0));
        }
        Ok(map)
    }

    /// Bytes of the memfd.
    pub(in crate::provider::soft) fn len(&self) -> u64 {
        self.pages.len as u64
    }

    /// Whether it has slots, through which memory of GPUs is staged.
    pub(super) fn is_of_slots(&self) -> bool {
        self.file.is_none()
    }

    /// Whether it is pinned, for copies by GPUs: `None` while that is being done, elsewhere, for it takes its time.
    pub(super) fn is_pinned(self: &Arc<Self>, gpu: &Arc<Gpu>) -> Option<bool> {
        if !self.asked.swap(true, Ordering::Relaxed) {
            let (map, gpu) = (Arc::downgrade(self), gpu.clone());
            background::run_apart(move || {
                let Some(map) = map.upgrade() else { return };
                let at = map.pages.addr as u64;
                // SAFETY: a mapping of whole pages, for reading, which ends after what pins it.
                let pinned = unsafe { Pinned::new(&gpu, at, map.pages.len, true) };
                if let Err(error) = &pinned {
                    tracing::warn!(%error, "slots of a peer are not pinned: copies from them are slow, and block");
                }
                let _ = map.pinned.set(pinned.ok());
            });
        }
        self.pinned.get().map(Option::is_some)
    }

    /// The address of `offset..+len`, when the memfd has that.
    pub(super) fn at(&self, offset: u64, len: u64) -> Option<*const u8> {
        let inside = offset.checked_add(len)? <= self.len();
        inside.then(|| ptr::with_exposed_provenance(self.pages.addr + offset as usize))
    }
}

impl Drop for PeerMap {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let mut mapped = lock(&MAPPED);
            // Another mapping of the file may have been made since the last user of this one left.
            if mapped.get(file).is_some_and(|map| map.strong_count() == 0) {
                mapped.remove(file);
            }
        }
        if let Some(Some(pinned)) = self.pinned.take() {
            let (lane, pages) = (pinned.gpu().lane().clone(), std::mem::take(&mut self.pages));
            lane.run(move || {
                drop(pinned);
                // They stay mapped while they are pinned.
                drop(pages);
            });
        }
    }
}

/// What `fstat` says of `fd`, when it is one that can be mapped without danger. The seals are looked at first: with them the
/// rest does not change any more.
pub(super) fn check(fd: &OwnedFd) -> Result<libc::stat, PeerMapError> {
    let os = |what| move || PeerMapError::Os { what, source: io::Error::last_os_error() };
    // SAFETY: a plain query of an open descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(PeerMapError::NotMemfd);
    }
    let mut fs = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: room for one `statfs`, which the call fills when it answers 0.
    let fs = unsafe {
        (libc::fstatfs(fd.as_raw_fd(), fs.as_mut_ptr()) == 0)
            .then(|| fs.assume_init())
            .ok_or_else(os("asking for the file system of a peer's memfd"))?
    };
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: room for one `stat`, which the call fills when it answers 0.
    let stat = unsafe {
        (libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) == 0)
            .then(|| stat.assume_init())
            .ok_or_else(os("asking for the size of a peer's memfd"))?
    };
    if fs.f_type as u64 != libc::TMPFS_MAGIC as u64 || stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(PeerMapError::NotMemfd);
    }
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals & needed != needed {
        return Err(PeerMapError::NotSealed { seals });
    }
    Ok(stat)
}

/// Faults the pages in from `at` on, for as long as somebody uses them. A failure costs speed only. After each part others have their
/// turn: a region may have a terabyte.
fn populate(map: Weak<PeerMap>, at: usize) {
    let Some(used) = map.upgrade() else { return };
    let Some(left) = used.pages.len.checked_sub(at).filter(|&left| left > 0) else { return };
    let n = left.min(POPULATE_BYTES);
    let start: *mut libc::c_void = ptr::with_exposed_provenance_mut(used.pages.addr + at);
    // SAFETY: a part of a mapping that `used` keeps; reading pages in changes no content.
    if unsafe { libc::madvise(start, n, libc::MADV_POPULATE_READ) } == 0 {
        background::run(move || populate(map, at + n));
    }
}

/// A mapping that can only be read. Unmapped at drop.
#[derive(Debug, Default)]
struct Pages {
    addr: usize,
    len: usize,
}

impl Pages {
    fn map(fd: &OwnedFd, len: usize) -> Result<Self, PeerMapError> {
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), 0) };
        if addr == libc::MAP_FAILED {
            let source = io::Error::last_os_error();
            return Err(PeerMapError::Os { what: "mapping a peer's memfd", source });
        }
        Ok(Self { addr: addr.expose_provenance(), len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let (addr, len) = (self.addr, self.len);
        if len == 0 {
            // Taken.
            return;
        }
        let unmap = move || {
            // SAFETY: mapped by `map` with this length, and unmapped only here; who copies from it holds the `PeerMap`.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(addr), len) };
        };
        // Letting go of many pages takes a while, and the last user may be a queue pair that ends on a worker.
        if len as u64 >= LARGE { background::run(unmap) } else { unmap() }
    }
}

#[cfg(test)]
mod tests;
