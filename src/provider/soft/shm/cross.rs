//! Reading memory that the peer has not shared: `process_vm_readv`, where the system permits it.
//!
//! That is for memory which the user brought; memory of ours is lent by its memfd instead (`peer_map.rs`). The kernel copies
//! straight from the pages of the peer to the registered target, so that a late or frozen peer can do no more harm than with a
//! mapping. It asks for the same permission as a debugger. Whether we have it is tried when the queue pair connects
//! ([`CrossReader::probe`]), so that a refusal is an error at once and names what to change (`refusal.rs`).
//!
//! The call goes by the number of a process, and numbers are used again. A descriptor of the process (`process.rs`) is looked at
//! after each read: if it lives now, it had its number all along. Were it gone, the target may hold the bytes of a stranger that
//! we were allowed to read; the operation has failed then, and says nothing of its target. A process that *executes* another
//! program keeps its number, too: its socket closes with that, which the link sees.

mod process;
mod refusal;

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;

use self::process::PeerProcess;
use super::super::mr::MemRange;

/// Bytes of one call at most. The kernel's own limit is 2 GiB less a page.
const MAX_BYTES: usize = 1 << 30;
/// Pieces of one call at most. The kernel's own limit is 1,024; behind these few there is no speed left to gain.
const MAX_PIECES: usize = 128;
/// What a probe compares at most.
const MAX_PROBE: usize = 64;

/// Why memory of the peer's process cannot be read.
#[derive(Debug, thiserror::Error)]
pub(in crate::provider::soft) enum CrossError {
    #[error(
        "the peer's process is not visible here: it is in a pid namespace that is not this one or inside of it; run both in one (containers: --pid=host or --pid=container:NAME, in a pod shareProcessNamespace), or register memory that landfall allocates, which needs none of this"
    )]
    NotVisible,
    #[error(
        "reading the peer's memory is not permitted: {reason} ({setting}); {fix}, or register memory that landfall allocates, which needs no permission"
    )]
    NotPermitted {
        /// What is in the way.
        reason: String,
        /// The setting that decides, and its value where it has one.
        setting: String,
        /// What to change.
        fix: &'static str,
    },
    #[error("the peer's process has ended")]
    Gone,
    #[error("the peer has no memory at {at:#x}")]
    Fault { at: u64 },
    #[error("the process that the socket names is not the one that has the peer's memory")]
    NotThePeer,
    #[error("{what} failed")]
    Os {
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

/// The peer's process, for memory that it has not shared.
#[derive(Debug)]
pub(in crate::provider::soft) struct CrossReader {
    peer: PeerProcess,
}

/// Whether the other end of a connected unix socket is this process, by the kernel's word.
pub(in crate::provider::soft) fn is_this_process(socket: BorrowedFd<'_>) -> bool {
    process::peer_pid(socket).is_ok_and(|pid| pid > 0 && pid as u32 == std::process::id())
}

impl CrossReader {
    /// For the process at the other end of a connected unix socket: the one that dialled, or that listens.
    pub(in crate::provider::soft) fn open(socket: BorrowedFd<'_>) -> Result<Self, CrossError> {
        Ok(Self { peer: PeerProcess::of(socket)? })
    }

    /// Reads what is at `at` and compares it with what the peer says is there: whether it may be read, and whether it is the
    /// peer's. At most 64 bytes count.
    pub(in crate::provider::soft) fn probe(&self, at: u64, expected: &[u8]) -> Result<(), CrossError> {
        let mut seen = [0u8; MAX_PROBE];
        let n = expected.len().min(MAX_PROBE);
        // SAFETY: `n` bytes of a local array.
        unsafe { self.read_to(&[(at, n as u64)], seen.as_mut_ptr(), n, Limits::KERNEL)? };
        if seen[..n] == expected[..n] { Ok(()) } else { Err(CrossError::NotThePeer) }
    }

    /// Fills `target` from `pieces` of the peer's memory, address and length each, in order. Together they are as long as the
    /// target. After an error a part of it may have been written.
    pub(in crate::provider::soft) fn read(
        &self,
        pieces: &[(u64, u64)],
        target: MemRange<'_>,
    ) -> Result<(), CrossError> {
        self.read_within(pieces, target, Limits::KERNEL)
    }

    /// Fills `target` with what is at `at` in the peer's memory.
    pub(in crate::provider::soft) fn read_bytes(&self, at: u64, target: &mut [u8]) -> Result<(), CrossError> {
        // SAFETY: `target` is ours to write for the call.
        unsafe {
            self.read_to(&[(at, target.len() as u64)], target.as_mut_ptr(), target.len(), Limits::KERNEL)
        }
    }

    fn read_within(
        &self,
        pieces: &[(u64, u64)],
        target: MemRange<'_>,
        limits: Limits,
    ) -> Result<(), CrossError> {
        // SAFETY: a live registration, resolved with write access, that lives as long as the borrow; as with a `recvmsg` the
        // kernel writes it.
        unsafe { self.read_to(pieces, target.as_ptr(), target.len(), limits) }
    }

    /// # Safety
    /// `target..+len` is valid for writes by the kernel.
    unsafe fn read_to(
        &self,
        pieces: &[(u64, u64)],
        target: *mut u8,
        len: usize,
        limits: Limits,
    ) -> Result<(), CrossError> {
        let total = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.1));
        if total != Some(len as u64) {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "pieces and target differ in length");
            return Err(CrossError::Os { what: "reading the peer's memory", source });
        }
        let mut rest = Rest { pieces, skip: 0 };
        let mut done = 0;
        while done < len {
            let mut vecs = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_PIECES];
            let (count, bytes) = rest.gather(&mut vecs, limits)?;
            let local = libc::iovec { iov_base: target.wrapping_add(done).cast(), iov_len: bytes };
            let (pid, count) = (self.peer.pid(), count as libc::c_ulong);
            // SAFETY: `gather` gives at most `len - done` bytes, so that `local` is inside of what the caller promises. The
            // first `count` elements of `vecs` are addresses in another process: the kernel checks them.
            let n = unsafe { libc::process_vm_readv(pid, &local, 1, vecs.as_ptr(), count, 0) };
            match usize::try_from(n) {
                // It stops before an address that is not there; nothing at all would be the same.
                Ok(0) => return Err(CrossError::Fault { at: rest.at() }),
                Ok(n) => {
                    rest.advance(n as u64);
                    done += n;
                }
                Err(_) => return Err(self.why(io::Error::last_os_error(), rest.at())),
            }
        }
        if self.peer.is_alive()? { Ok(()) } else { Err(CrossError::Gone) }
    }

    fn why(&self, error: io::Error, at: u64) -> CrossError {
        match error.raw_os_error() {
            Some(libc::ESRCH) => CrossError::Gone,
            Some(libc::EFAULT) => CrossError::Fault { at },
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => match self.peer.is_alive() {
                // Its number may be another's by now, who is not to be explained.
                Ok(false) => CrossError::Gone,
                _ => refusal::explain(&refusal::Facts::of(self.peer.pid(), &error)),
            },
            _ => CrossError::Os { what: "reading the peer's memory (process_vm_readv)", source: error },
        }
    }
}

/// How much one call reads. Smaller in tests.
#[derive(Clone, Copy, Debug)]
struct Limits {
    bytes: usize,
    pieces: usize,
}

impl Limits {
    const KERNEL: Self = Self { bytes: MAX_BYTES, pieces: MAX_PIECES };
}

/// The pieces that have not been read yet.
struct Rest<'p> {
    pieces: &'p [(u64, u64)],
    /// Of the first piece.
    skip: u64,
}

impl Rest<'_> {
    /// Puts as much as one call takes into `vecs`: how many elements, and bytes.
    fn gather(
        &self,
        vecs: &mut [libc::iovec; MAX_PIECES],
        limits: Limits,
    ) -> Result<(usize, usize), CrossError> {
        let (mut count, mut bytes) = (0, 0);
        let mut skip = self.skip;
        for &(at, len) in self.pieces {
            if count == limits.pieces.min(MAX_PIECES) || bytes == limits.bytes {
                break;
            }
            let fault = CrossError::Fault { at };
            // An end that no address has is not there.
            let last = len.checked_sub(1).map_or(Some(at), |n| at.checked_add(n));
            let (Some(_), Ok(start)) = (last, usize::try_from(at + skip)) else { return Err(fault) };
            let n = (len - skip).min((limits.bytes - bytes) as u64) as usize;
            skip = 0;
            if n > 0 {
                vecs[count] = libc::iovec { iov_base: ptr::without_provenance_mut(start), iov_len: n };
                (count, bytes) = (count + 1, bytes + n);
            }
        }
        Ok((count, bytes))
    }

    /// The address of the first byte that was not read.
    fn at(&self) -> u64 {
        let unread = self.pieces.iter().find(|piece| piece.1 > 0);
        unread.map_or(0, |piece| piece.0.saturating_add(self.skip))
    }

    fn advance(&mut self, mut bytes: u64) {
        while let Some((first, others)) = self.pieces.split_first() {
            let left = first.1 - self.skip;
            if bytes < left {
                self.skip += bytes;
                return;
            }
            bytes -= left;
            (self.pieces, self.skip) = (others, 0);
        }
    }
}

#[cfg(test)]
mod tests;
