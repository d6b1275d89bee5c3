//! System calls: epoll, eventfd, timerfd, gathered reads and writes. No policy.
//!
//! With `mr.rs`, the inline copy in `post.rs`, and `map.rs`, `ring.rs`, `rights.rs` and the copies in `shm/` the only files of
//! the provider with `unsafe`.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use super::mr::MemRange;
use super::tuning::MAX_IOVECS;
use crate::cuda::{SLOT_BYTES, Slot};

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

fn owned(rc: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the callers pass the result of a call that creates a descriptor, which nobody else has.
    check(rc).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An epoll instance.
#[derive(Debug)]
pub(super) struct Epoll(OwnedFd);

/// What epoll reported of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Readiness(u32);

impl Readiness {
    pub(super) fn readable(self) -> bool {
        self.0 & (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }

    pub(super) fn writable(self) -> bool {
        self.0 & (libc::EPOLLOUT | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }

    /// The peer has closed its side, or the connection has failed: read until the end.
    pub(super) fn ended(self) -> bool {
        self.0 & (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }
}

impl Epoll {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Watches a socket for both directions, by edges. Closing it ends the registration.
    pub(super) fn add_socket(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.add(fd, token, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET)
    }

    /// Watches a socket for what comes in, by edges. (A local one would report room each time its peer takes a message.)
    pub(super) fn add_incoming(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.add(fd, token, libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET)
    }

    /// Watches a counter, by level.
    pub(super) fn add_readable(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.add(fd, token, libc::EPOLLIN)
    }

    fn add(&self, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open, and `event` lives for the call.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
        })?;
        Ok(())
    }

    /// Hands every pending event to `each`, without waiting.
    pub(super) fn drain(&self, mut each: impl FnMut(u64, Readiness)) -> io::Result<()> {
        const BATCH: usize = 64;
        let mut events: [MaybeUninit<libc::epoll_event>; BATCH] = [MaybeUninit::uninit(); BATCH];
        loop {
            // SAFETY: room for `BATCH` events; the call writes the first `n` of them.
            let n = unsafe {
                libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr().cast(), BATCH as libc::c_int, 0)
            };
            let n = match check(n) {
                Ok(n) => n as usize,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            for event in &events[..n] {
                // SAFETY: epoll_wait has written the first `n` events.
                let event = unsafe { event.assume_init() };
                each(event.u64, Readiness(event.events));
            }
            if n < BATCH {
                return Ok(());
            }
        }
    }
}

/// A counter that makes its descriptor readable.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Adds one. The only refusal is a full counter, which is readable already.
    pub(super) fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of a local variable.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub(super) fn clear(&self) {
        take_count(self.0.as_raw_fd());
    }
}

/// Waits until the far end of a connected socket has said its last, by a shutdown or its end.
pub(super) fn wait_for_hang_up(socket: BorrowedFd<'_>) {
    let mut fd = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    loop {
        // SAFETY: one element, which lives for the call.
        let n = unsafe { libc::poll(&mut fd, 1, -1) };
        let interrupted = n < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if !interrupted {
            return;
        }
    }
}

/// A one-shot timer that makes its descriptor readable.
#[derive(Debug)]
pub(super) struct TimerFd(OwnedFd);

impl TimerFd {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) })
            .map(Self)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(super) fn arm(&self, after: Duration) -> io::Result<()> {
        // Zero would disarm it.
        let after = after.max(Duration::from_nanos(1));
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec {
            tv_sec: libc::time_t::try_from(after.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: after.subsec_nanos().into(),
        };
        let spec = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: `spec` lives for the call; the old value is not asked for.
        check(unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &spec, std::ptr::null_mut()) })?;
        Ok(())
    }

    pub(super) fn clear(&self) {
        take_count(self.0.as_raw_fd());
    }
}

fn take_count(fd: RawFd) {
    let mut count = 0u64;
    // SAFETY: eight bytes of a local variable. `EAGAIN` means that it is clear already.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

/// A gather list: elements that are readable for `'a`.
pub(super) struct SendVecs<'a>(IoVecs<'a>);

/// A scatter list: elements that are writable for `'a`.
pub(super) struct RecvVecs<'a>(IoVecs<'a>);

struct IoVecs<'a> {
    vecs: [MaybeUninit<libc::iovec>; MAX_IOVECS],
    len: usize,
    bytes: usize,
    elements: PhantomData<&'a mut [u8]>,
}

impl IoVecs<'_> {
    fn new() -> Self {
        Self { vecs: [MaybeUninit::uninit(); MAX_IOVECS], len: 0, bytes: 0, elements: PhantomData }
    }

    /// False when there is no room.
    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(slot) = self.vecs.get_mut(self.len) else { return false };
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.len += 1;
        self.bytes += len;
        true
    }

    /// Keeps the first `bytes` bytes.
    fn truncate(&mut self, bytes: usize) {
        while self.bytes > bytes {
            // SAFETY: the first `len` elements are initialised, and there is one: `bytes` counts them.
            let last = unsafe { self.vecs[self.len - 1].assume_init_mut() };
            let cut = last.iov_len.min(self.bytes - bytes);
            last.iov_len -= cut;
            self.bytes -= cut;
            if last.iov_len == 0 {
                self.len -= 1;
            }
        }
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zeros is a valid `msghdr`.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = self.vecs.as_mut_ptr().cast();
        msg.msg_iovlen = self.len as _;
        msg
    }
}

impl<'a> SendVecs<'a> {
    pub(super) fn new() -> Self {
        Self(IoVecs::new())
    }

    /// Adds ordinary memory. False when the list is full, here and below.
    pub(super) fn push_bytes(&mut self, bytes: &'a [u8]) -> bool {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Adds registered memory.
    pub(super) fn push_range(&mut self, range: MemRange<'a>) -> bool {
        self.0.push(range.as_ptr(), range.len())
    }

    /// Adds a part of a slot that nothing writes meanwhile.
    pub(super) fn push_slot(&mut self, slot: &'a Slot, at: usize, len: usize) -> bool {
        assert!(at + len <= SLOT_BYTES, "inside of a slot");
        self.0.push(ptr::with_exposed_provenance_mut(slot.addr() as usize + at), len)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Keeps the first `bytes` bytes.
    pub(super) fn truncate(&mut self, bytes: usize) {
        self.0.truncate(bytes);
    }

    /// The elements, address and length each: readable for `'a`.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (*const u8, usize)> + '_ {
        self.0.vecs[..self.0.len].iter().map(|vec| {
            // SAFETY: the first `len` elements are initialised.
            let vec = unsafe { vec.assume_init_ref() };
            (vec.iov_base.cast_const().cast(), vec.iov_len)
        })
    }

    /// One non-blocking `sendmsg`.
    pub(super) fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let msg = self.0.message();
        // SAFETY: the first `len` elements are initialised, and each is readable for `'a`, which outlives this call.
        let n = unsafe { libc::sendmsg(fd.as_raw_fd(), &msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }
}

impl<'a> RecvVecs<'a> {
    pub(super) fn new() -> Self {
        Self(IoVecs::new())
    }

    /// Adds registered memory, with write access. False when the list is full, but for a tail.
    pub(super) fn push_range(&mut self, range: MemRange<'a>) -> bool {
        self.0.len < MAX_IOVECS - 1 && self.0.push(range.as_ptr(), range.len())
    }

    /// Adds a part of a slot that nobody else uses meanwhile. False as above.
    pub(super) fn push_slot(&mut self, slot: &'a Slot, at: usize, len: usize) -> bool {
        assert!(at + len <= SLOT_BYTES, "inside of a slot");
        let base = ptr::with_exposed_provenance_mut(slot.addr() as usize + at);
        self.0.len < MAX_IOVECS - 1 && self.0.push(base, len)
    }

    /// Adds ordinary memory, as the last element.
    pub(super) fn push_tail(&mut self, bytes: &'a mut [u8]) {
        self.0.push(bytes.as_mut_ptr(), bytes.len());
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Keeps the first `bytes` bytes.
    pub(super) fn truncate(&mut self, bytes: usize) {
        self.0.truncate(bytes);
    }

    /// One non-blocking `recvmsg`.
    pub(super) fn recv(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let mut msg = self.0.message();
        // SAFETY: the first `len` elements are initialised, and each is writable for `'a`, which outlives this call:
        // ranges come from live registrations that allow it, the tail came in as `&mut`.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut msg, libc::MSG_DONTWAIT) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }
}

/// One non-blocking `recv` into ordinary memory.
pub(super) fn recv(fd: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `into.len()` bytes to `into`.
    let n = unsafe { libc::recv(fd.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// SIGKILL: nothing of this process runs any more, no destructor and no handler.
pub(super) fn kill_this_process() -> ! {
    // SAFETY: plain system calls.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    // It is delivered before the call returns, when anything of this thread is to run at all.
    std::process::abort()
}
