//! What the system lets this process have, for errors that say so.

use std::io;
use std::mem::MaybeUninit;

/// The soft limit of open files, as `ulimit -n` prints it. `None` where there is none.
pub(crate) fn open_files() -> io::Result<Option<u64>> {
    // SAFETY: writes the struct when it succeeds.
    soft(|limit| unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, limit) })
}

/// The soft limit of locked memory in bytes; `ulimit -l` prints it in KiB. `None` where there is none.
#[cfg(feature = "verbs")]
pub(crate) fn locked_memory() -> io::Result<Option<u64>> {
    // SAFETY: writes the struct when it succeeds.
    soft(|limit| unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, limit) })
}

/// `get` writes the struct, or does not return 0.
fn soft(get: impl FnOnce(*mut libc::rlimit) -> libc::c_int) -> io::Result<Option<u64>> {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    if get(limit.as_mut_ptr()) != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: written by the call that has succeeded.
    let limit = unsafe { limit.assume_init() };
    Ok((limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur))
}
