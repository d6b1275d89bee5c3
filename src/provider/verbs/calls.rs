//! Calling libibverbs: what its headers have as static inline functions, and what its return values mean.
//!
//! `ibv_post_send`, `ibv_post_recv`, `ibv_poll_cq` and `ibv_req_notify_cq` are no symbols of the library: the headers
//! call the provider through the table in `ibv_context`. So do these. Every provider fills the four entries used.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;

use super::sys::{
    LibIbverbs, ibv_context, ibv_cq, ibv_port_attr, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_wc,
};

/// The result of a call that returns 0 or an error number.
///
/// Providers disagree on how: most return `errno`, some its negation (siw), some -1 and set `errno`.
pub(super) fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        rc => Err(error_of(rc, io::Error::last_os_error().raw_os_error())),
    }
}

fn error_of(rc: c_int, errno: Option<i32>) -> io::Error {
    io::Error::from_raw_os_error(match (rc, errno) {
        (1.., _) => rc,
        (-1, Some(errno)) if errno > 0 => errno,
        _ => rc.checked_neg().unwrap_or(libc::EIO),
    })
}

/// The result of a call that returns an object, or null and `errno`.
pub(super) fn object<T>(p: *mut T) -> io::Result<std::ptr::NonNull<T>> {
    std::ptr::NonNull::new(p).ok_or_else(|| {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(errno) if errno > 0 => error,
            // Some providers say nothing.
            _ => io::Error::from_raw_os_error(libc::EIO),
        }
    })
}

fn unsupported() -> io::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}

/// `ibv_query_port`. The symbol has the type of an older ABI and fills a prefix of the struct, which holds
/// everything used here; what follows stays zero, as in the headers' own fallback.
///
/// # Safety
/// `context` is an open context of `lib`.
pub(super) unsafe fn query_port(
    lib: &LibIbverbs,
    context: *mut ibv_context,
    port: u8,
) -> io::Result<ibv_port_attr> {
    let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the context is open, by the caller; the struct is at least as large as the compatible one.
    check(unsafe { lib.ibv_query_port(context, port, attr.as_mut_ptr().cast()) })?;
    // SAFETY: plain integers, for which zero is a value.
    Ok(unsafe { attr.assume_init() })
}

/// `ibv_poll_cq`: how many entries of `out` it has filled.
///
/// # Safety
/// `cq` is a live completion queue.
pub(super) unsafe fn poll_cq(cq: *mut ibv_cq, out: &mut [MaybeUninit<ibv_wc>]) -> io::Result<usize> {
    // SAFETY: a live queue points to its open context.
    let poll = unsafe { (*(*cq).context).ops.poll_cq }.ok_or_else(unsupported)?;
    let len = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
    // SAFETY: the queue is live; at most `len` entries are written, to `out`. Providers lock the queue.
    let n = unsafe { poll(cq, len, out.as_mut_ptr().cast()) };
    match usize::try_from(n) {
        Ok(n) => Ok(n.min(out.len())),
        Err(_) => Err(error_of(n, io::Error::last_os_error().raw_os_error())),
    }
}

/// `ibv_req_notify_cq`, for the next completion of any kind.
///
/// # Safety
/// `cq` is a live completion queue.
pub(super) unsafe fn req_notify_cq(cq: *mut ibv_cq) -> io::Result<()> {
    // SAFETY: a live queue points to its open context.
    let notify = unsafe { (*(*cq).context).ops.req_notify_cq }.ok_or_else(unsupported)?;
    // SAFETY: the queue is live.
    check(unsafe { notify(cq, 0) })
}

/// A post that was refused: the request that was not taken, as the provider told it, and why.
pub(super) struct Refused<T> {
    pub(super) bad: *mut T,
    pub(super) error: io::Error,
}

/// `ibv_post_send`.
///
/// # Safety
/// `qp` is live; `wr` is a chain of valid requests whose elements are valid until the call returns, and whose
/// memory, unless inline, is registered and stays so until they complete.
pub(super) unsafe fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr) -> Result<(), Refused<ibv_send_wr>> {
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue pair points to its open context.
    let post = unsafe { (*(*qp).context).ops.post_send };
    let Some(post) = post else { return Err(Refused { bad: wr, error: unsupported() }) };
    // SAFETY: by the caller. Providers lock the queue.
    check(unsafe { post(qp, wr, &mut bad) }).map_err(|error| Refused { bad, error })
}

/// `ibv_post_recv`.
///
/// # Safety
/// As [`post_send`].
pub(super) unsafe fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr) -> Result<(), Refused<ibv_recv_wr>> {
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue pair points to its open context.
    let post = unsafe { (*(*qp).context).ops.post_recv };
    let Some(post) = post else { return Err(Refused { bad: wr, error: unsupported() }) };
    // SAFETY: by the caller. Providers lock the queue.
    check(unsafe { post(qp, wr, &mut bad) }).map_err(|error| Refused { bad, error })
}

/// `ibv_post_srq_recv`.
///
/// # Safety
/// As [`post_send`], with a live shared receive queue.
pub(super) unsafe fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
) -> Result<(), Refused<ibv_recv_wr>> {
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue points to its open context.
    let post = unsafe { (*(*srq).context).ops.post_srq_recv };
    let Some(post) = post else { return Err(Refused { bad: wr, error: unsupported() }) };
    // SAFETY: by the caller. Providers lock the queue.
    check(unsafe { post(srq, wr, &mut bad) }).map_err(|error| Refused { bad, error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r10_negative_and_errno_less_returns_become_the_right_error() {
        for (rc, errno, expected) in [
            (libc::ENOMEM, Some(0), libc::ENOMEM),
            (libc::ENOMEM, Some(libc::EAGAIN), libc::ENOMEM),
            // siw: -EINVAL, and errno is not set.
            (-libc::EINVAL, Some(0), libc::EINVAL),
            (-libc::EINVAL, Some(libc::EAGAIN), libc::EINVAL),
            (-1, Some(libc::EIO), libc::EIO),
            (-1, Some(0), libc::EPERM),
            (-1, None, libc::EPERM),
            (c_int::MIN, None, libc::EIO),
        ] {
            assert_eq!(error_of(rc, errno).raw_os_error(), Some(expected), "{rc} {errno:?}");
        }
        assert!(check(0).is_ok());
    }
}
