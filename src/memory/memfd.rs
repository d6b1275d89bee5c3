//! Memfds that another process may be given: created, sized, sealed. Descriptors only; `mapping.rs` maps them.
//!
//! The seals protect both sides. Without `SHRINK`, cutting the file would kill whoever has it mapped (SIGBUS); the receiver
//! insists on it, and on `GROW`, so that a length once looked at stays true. `FUTURE_WRITE` is for the owner, who goes on to write
//! through the mapping that is there when the seal is set: whoever gets the descriptor can neither map it for writing, nor
//! `write(2)`, nor punch holes. A kernel before 5.1 does not know that one, and then a peer is trusted not to write, as with any
//! shared memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What a receiver insists on.
const SIZE_SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A memfd of `len` bytes, all zero and none of them allocated, not sealed yet.
pub(crate) fn create(len: u64) -> io::Result<OwnedFd> {
    let len = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Not executable, which some systems demand (`vm.memfd_noexec`) and a kernel before 6.3 does not know.
    let fd = match memfd_create(flags | libc::MFD_NOEXEC_SEAL) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => memfd_create(flags)?,
        other => other?,
    };
    // SAFETY: a plain system call on a descriptor that we own.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Seals it: its size, its seals, and against every mapping to come that could write.
pub(crate) fn seal(fd: BorrowedFd<'_>) -> io::Result<()> {
    match add_seals(fd, SIZE_SEALS | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => add_seals(fd, SIZE_SEALS | libc::F_SEAL_SEAL),
        other => other,
    }
}

/// Seals its size only, for memory that the other side writes, too.
pub(crate) fn seal_size(fd: BorrowedFd<'_>) -> io::Result<()> {
    add_seals(fd, SIZE_SEALS | libc::F_SEAL_SEAL)
}

fn memfd_create(flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call with a NUL-terminated name.
    let fd = unsafe { libc::memfd_create(c"landfall".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create has just given us this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn add_seals(fd: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: a plain system call on an open descriptor.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
