//! The memory of a queue: a memfd that both sides have mapped for writing.
//!
//! Whoever has the descriptor can write every byte at any time. So nothing in it is ever a reference to plain memory: words are
//! atomics, bytes are copied by `raw_copy.rs`. The size is sealed, which is checked before the mapping of a foreign one, so
//! that no access of ours can end in SIGBUS.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::{peer_map, raw_copy};
use crate::memory::memfd;

/// A mapping of fixed size, shared with one other process.
#[derive(Debug)]
pub(super) struct SharedMap {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays where it is until drop, and every access is an atomic operation or a copy outside of the language.
unsafe impl Send for SharedMap {}
// SAFETY: as above.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// A new one, all zero, and its descriptor for the peer.
    pub(super) fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
        let fd = memfd::create(len as u64)?;
        memfd::seal_size(fd.as_fd())?;
        Ok((Self::map(&fd, len)?, fd))
    }

    /// A new one that only this side writes: a peer that is given the descriptor cannot map it for that.
    pub(super) fn create_ours(len: usize) -> io::Result<(Self, OwnedFd)> {
        let fd = memfd::create(len as u64)?;
        let this = Self::map(&fd, len)?;
        memfd::seal(fd.as_fd())?;
        Ok((this, fd))
    }

    /// Where it begins, for copies that are not of this program.
    pub(super) fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// That of a peer. The descriptor is not needed after this.
    pub(super) fn open(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let stat = peer_map::check(fd).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        if u64::try_from(stat.st_size).ok() != Some(len as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(fd, len)
    }

    fn map(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { base, len })
    }

    /// The word at `at`, a multiple of eight.
    pub(super) fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a place of our own layout");
        // SAFETY: inside of the mapping and aligned, checked above; the mapping lives as long as `self`. Nobody of this process
        // accesses it but by atomics; what the other one does is outside of the language's memory model, and for the hardware
        // an atomic access of ours is sound beside any.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// The same, of eight bytes.
    pub(super) fn word64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a place of our own layout");
        // SAFETY: as in `word32`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Copies the bytes at `at` out. What they are may be looked at afterwards, and only there.
    pub(super) fn copy_out(&self, at: usize, into: &mut [u8]) {
        assert!(at.checked_add(into.len()).is_some_and(|end| end <= self.len), "a range of our own making");
        // SAFETY: the source is inside of the mapping, checked above, and `into` is memory of our own.
        unsafe { raw_copy::plain(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len()) };
    }

    /// Copies `len` bytes at `from` to `at`.
    ///
    /// # Safety
    /// `from..+len` is readable.
    pub(super) unsafe fn copy_in(&self, at: usize, from: *const u8, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "a range of our own making");
        // SAFETY: the target is inside of the mapping, checked above, and only we and the peer, who may spoil its own queue, write
        // there; the source is the caller's promise. A mapping of its own does not overlap it.
        unsafe { raw_copy::plain(from, self.base.as_ptr().add(at), len) };
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and unmapped only here; every borrow of it has ended.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const LEN: usize = 8192;

    #[test]
    fn b1_a_file_that_could_shrink_or_has_another_size_is_not_mapped() {
        let (map, fd) = SharedMap::create(LEN).unwrap();
        let other = SharedMap::open(&fd, LEN).unwrap();
        map.word32(64).store(7, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(other.word32(64).load(std::sync::atomic::Ordering::SeqCst), 7);
        assert!(SharedMap::open(&fd, LEN * 2).is_err(), "shorter than it must be");
        let unsealed = memfd::create(LEN as u64).unwrap();
        assert!(SharedMap::open(&unsealed, LEN).is_err(), "not sealed");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(SharedMap::open(&file.into(), LEN).is_err(), "no memfd");
        let null = std::fs::File::open("/dev/zero").unwrap();
        assert!(SharedMap::open(&null.into(), LEN).is_err(), "no file at all");
        // And the one that we made cannot be cut by its receiver.
        // SAFETY: a plain system call on an open descriptor.
        let cut = unsafe { libc::ftruncate(fd.as_fd().as_raw_fd(), 0) };
        assert_eq!(cut, -1);
    }
}
