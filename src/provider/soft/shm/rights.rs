//! Messages with descriptors over a unix socket (SCM_RIGHTS). System calls only; none of them waits.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Room for one descriptor, by words, so that it is aligned. The padding holds a second one, which is why those are counted.
const CONTROL: usize = control_bytes(1).div_ceil(size_of::<u64>());

const fn control_bytes(descriptors: usize) -> usize {
    // SAFETY: arithmetic on a small number.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as libc::c_uint) as usize }
}

/// A message that has come.
#[derive(Debug)]
pub(super) struct Message {
    /// Its bytes; 0 when the peer has closed its end.
    pub(super) len: usize,
    /// The one descriptor that came with it. More of them make the message an error.
    pub(super) fd: Option<OwnedFd>,
}

/// Sends one message, whole.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut vec = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0u64; CONTROL];
    // SAFETY: all zeros is a valid `msghdr`.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut vec;
    msg.msg_iovlen = 1;
    if let Some(fd) = fd {
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = control_bytes(1) as _;
        // SAFETY: `control` has room for a header and one descriptor, is aligned for it, and is what `msg` names.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&msg);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as libc::c_uint) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
        }
    }
    // SAFETY: `msg` names memory that lives for the call.
    let n = unsafe { libc::sendmsg(socket.as_raw_fd(), &msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    match n {
        n if n < 0 => Err(io::Error::last_os_error()),
        // The socket keeps messages whole.
        n if n as usize != bytes.len() => Err(io::ErrorKind::WriteZero.into()),
        _ => Ok(()),
    }
}

/// Takes the next message. `InvalidData` for one that is longer than `into`, or has more than one descriptor, which are closed
/// then. A descriptor that this process has no room for is left out.
pub(super) fn recv(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Message> {
    let mut vec = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL];
    // SAFETY: all zeros is a valid `msghdr`.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut vec;
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = control_bytes(1) as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes at most what `msg` says to `into` and to `control`, which live for the call.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut msg, flags) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    // Owned before anything is judged, so that none is left open.
    let mut fds = descriptors(&msg);
    if msg.msg_flags & libc::MSG_TRUNC != 0 || fds.len() > 1 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Message { len: n as usize, fd: fds.pop() })
}

/// The descriptors that `recvmsg` has installed for a message.
fn descriptors(msg: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: `msg` is what `recvmsg` has filled in, with its control buffer still alive; the headers are read as it wrote
    // them. Each descriptor is new, and nobody else has it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(msg);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(msg, header);
        }
    }
    fds
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (socket2::Socket, socket2::Socket) {
        socket2::Socket::pair(socket2::Domain::UNIX, socket2::Type::SEQPACKET.cloexec(), None).unwrap()
    }

    fn open_descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    #[test]
    fn b1_messages_stay_whole_and_bring_one_descriptor() {
        let (a, b) = pair();
        let null = std::fs::File::open("/dev/null").unwrap();
        send(a.as_fd(), b"one", None).unwrap();
        send(a.as_fd(), b"two", Some(null.as_fd())).unwrap();
        let mut into = [0; 8];
        let first = recv(b.as_fd(), &mut into).unwrap();
        assert_eq!((&into[..first.len], first.fd.is_some()), (&b"one"[..], false));
        let second = recv(b.as_fd(), &mut into).unwrap();
        assert_eq!(&into[..second.len], b"two");
        let fd = second.fd.expect("a descriptor");
        // SAFETY: a plain query of an open descriptor.
        assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
        assert_eq!(recv(b.as_fd(), &mut into).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert_eq!(recv(b.as_fd(), &mut into).unwrap().len, 0);
    }

    /// What a stranger sends: too long, with several descriptors, or descriptors that nobody asked for.
    #[test]
    fn b4_surplus_descriptors_are_closed() {
        let (a, b) = pair();
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut into = [0; 8];
        // Other tests open and close some meanwhile: this one's own are many.
        const ROUNDS: usize = 400;
        let before = open_descriptors();
        for _ in 0..ROUNDS {
            send(a.as_fd(), &[1; 9], Some(null.as_fd())).unwrap();
            assert_eq!(recv(b.as_fd(), &mut into).unwrap_err().kind(), io::ErrorKind::InvalidData);
            for n in [2, 3, 200] {
                send_many(&a, &vec![null.as_raw_fd(); n]);
                assert_eq!(recv(b.as_fd(), &mut into).unwrap_err().kind(), io::ErrorKind::InvalidData);
            }
        }
        assert!(open_descriptors() < before + ROUNDS / 2, "{before} and then {}", open_descriptors());
    }

    fn send_many(socket: &socket2::Socket, fds: &[RawFd]) {
        let mut byte = [7u8];
        let mut vec = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = vec![0u64; control_bytes(fds.len()).div_ceil(8)];
        // SAFETY: as in `send`, with room for all of `fds`.
        unsafe {
            let mut msg: libc::msghdr = std::mem::zeroed();
            msg.msg_iov = &mut vec;
            msg.msg_iovlen = 1;
            msg.msg_control = control.as_mut_ptr().cast();
            msg.msg_controllen = control_bytes(fds.len()) as _;
            let header = libc::CMSG_FIRSTHDR(&msg);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of_val(fds) as libc::c_uint) as _;
            std::ptr::copy_nonoverlapping(
                fds.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                size_of_val(fds),
            );
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), &msg, 0), 1);
        }
    }
}
