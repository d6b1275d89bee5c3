//! Who is at the other end of a unix socket: its number, and a descriptor that stays with it when the number is used again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::CrossError;

/// The process that dialled, or listens, at the other end.
#[derive(Debug)]
pub(super) struct PeerProcess {
    /// In our pid namespace.
    pid: libc::pid_t,
    pidfd: OwnedFd,
}

impl PeerProcess {
    pub(super) fn of(socket: BorrowedFd<'_>) -> Result<Self, CrossError> {
        let pid = peer_pid(socket)?;
        if pid <= 0 {
            return Err(CrossError::NotVisible);
        }
        let this = match peer_pidfd(socket) {
            Ok(pidfd) => Self { pid, pidfd },
            Err(e) => match e.raw_os_error() {
                // A kernel before 6.5.
                Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL) => Self::by_number(pid, socket)?,
                Some(libc::ESRCH | libc::ENODATA) => return Err(CrossError::Gone),
                _ => return Err(CrossError::Os { what: "asking for the peer's process", source: e }),
            },
        };
        if this.is_alive()? { Ok(this) } else { Err(CrossError::Gone) }
    }

    /// By its number: for a moment that could be another process's already. But while the peer has not closed its end of the
    /// socket it has not ended, and it has its number.
    pub(super) fn by_number(pid: libc::pid_t, socket: BorrowedFd<'_>) -> Result<Self, CrossError> {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if fd < 0 {
            let source = io::Error::last_os_error();
            return Err(match source.raw_os_error() {
                Some(libc::ESRCH) => CrossError::Gone,
                _ => CrossError::Os { what: "opening the peer's process (pidfd_open)", source },
            });
        }
        // SAFETY: pidfd_open has just given us this descriptor, and nobody else has it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        if poll(socket, libc::POLLRDHUP)? & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR) != 0 {
            return Err(CrossError::Gone);
        }
        Ok(Self { pid, pidfd })
    }

    pub(super) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Whether it runs. Then its number has been its own until now.
    pub(super) fn is_alive(&self) -> Result<bool, CrossError> {
        // It becomes readable at the end.
        Ok(poll(self.pidfd.as_fd(), libc::POLLIN)? == 0)
    }
}

/// What is true of `fd` now, of `events` and of what is always reported.
fn poll(fd: BorrowedFd<'_>, events: libc::c_short) -> Result<libc::c_short, CrossError> {
    let mut one = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    loop {
        // SAFETY: one element, which lives for the call. It does not wait.
        if unsafe { libc::poll(&mut one, 1, 0) } >= 0 {
            return Ok(one.revents);
        }
        let source = io::Error::last_os_error();
        if source.kind() != io::ErrorKind::Interrupted {
            return Err(CrossError::Os { what: "polling the peer's process", source });
        }
    }
}

/// The number of the process at the other end, 0 when it has none in our namespace.
pub(super) fn peer_pid(socket: BorrowedFd<'_>) -> Result<libc::pid_t, CrossError> {
    // SAFETY: a `ucred` is three integers.
    let credentials: io::Result<libc::ucred> = unsafe { option(socket, libc::SO_PEERCRED) };
    credentials
        .map(|credentials| credentials.pid)
        .map_err(|source| CrossError::Os { what: "asking for the peer's credentials (SO_PEERCRED)", source })
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: an integer.
    let fd: RawFd = unsafe { option(socket, libc::SO_PEERPIDFD)? };
    // SAFETY: the kernel has just made this descriptor for us (closed on exec), and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket option.
///
/// # Safety
/// Any bytes are a `T`.
unsafe fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: room for `len` bytes, of which the kernel fills as many as it says.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value.as_mut_ptr().cast(), &mut len)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed or filled, and the caller says that any bytes will do.
    Ok(unsafe { value.assume_init() })
}
