//! For tests and fuzzing: the far end of a connection without an engine, which can do all that a peer can do and none would.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use socket2::Socket;

use super::super::frame::Preamble;
use super::map::SharedMap;
use super::rights;
use super::ring::{MAP_BYTES, Rings, Side};
use super::words::{HELLO, Hello, MAX_WORD, Probe, TOKEN, Word};
use crate::memory::memfd;

/// A peer by hand.
pub(in crate::provider::soft) struct RawPeer {
    socket: Socket,
    rings: Rings,
    /// The same memory, for what `Rings` would not do.
    map: SharedMap,
}

/// Memory that it has lent.
pub(in crate::provider::soft) struct RawMemory(SharedMap);

impl RawMemory {
    pub(in crate::provider::soft) fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: a slice is readable.
        unsafe { self.0.copy_in(at, bytes.as_ptr(), bytes.len()) };
    }
}

impl RawPeer {
    /// Shows `preamble` at a door, with `fd` or with rings that are right.
    pub(in crate::provider::soft) fn dial(
        socket: Socket,
        preamble: Preamble,
        fd: Option<BorrowedFd<'_>>,
    ) -> Self {
        let (map, rings_fd) = SharedMap::create(MAP_BYTES).unwrap();
        let hello = Hello { preamble, probe: Probe { at: 8, token: [0; TOKEN] } };
        rights::send(socket.as_fd(), &hello.encode(), Some(fd.unwrap_or(rings_fd.as_fd()))).unwrap();
        let second = SharedMap::open(&rings_fd, MAP_BYTES).unwrap();
        Self { socket, rings: Rings::new(map, Side::Dialling), map: second }
    }

    /// Lets in whoever has dialled.
    pub(in crate::provider::soft) fn accept(socket: Socket) -> Self {
        let mut bytes = [0; HELLO];
        let message = rights::recv(socket.as_fd(), &mut bytes).unwrap();
        let fd = message.fd.unwrap();
        let open = || SharedMap::open(&fd, MAP_BYTES).unwrap();
        Self { socket, rings: Rings::new(open(), Side::Listening), map: open() }
    }

    /// Puts bytes into its ring, as far as they go.
    pub(in crate::provider::soft) fn put(&self, bytes: &[u8]) {
        // SAFETY: a slice is readable.
        let put = unsafe { self.rings.put(std::iter::once((bytes.as_ptr(), bytes.len()))) };
        match put {
            // What finds no room is cut off.
            Ok((_, wake)) => {
                if wake {
                    self.say(&[1]);
                }
            }
            // It has spoilt its own counts, or there is no room.
            Err(e) => assert!(matches!(e.kind(), io::ErrorKind::InvalidData | io::ErrorKind::WouldBlock)),
        }
    }

    pub(in crate::provider::soft) fn take(&self) -> Vec<u8> {
        let mut out = vec![0; 65_536];
        let n = self.rings.take(&mut out).unwrap_or(0);
        self.rings.free_all_but(0);
        out.truncate(n);
        out
    }

    /// Takes all that was said.
    pub(in crate::provider::soft) fn hear_all(&self) {
        let mut bytes = [0; MAX_WORD];
        while rights::recv(self.socket.as_fd(), &mut bytes).is_ok_and(|message| message.len > 0) {}
    }

    pub(in crate::provider::soft) fn close(&self) {
        self.rings.close();
    }

    /// The socket's peer may have closed it, for what was said before.
    pub(in crate::provider::soft) fn say(&self, bytes: &[u8]) {
        let _ = rights::send(self.socket.as_fd(), bytes, None);
    }

    pub(in crate::provider::soft) fn say_with(&self, bytes: &[u8], fd: BorrowedFd<'_>) {
        let _ = rights::send(self.socket.as_fd(), bytes, Some(fd));
    }

    pub(in crate::provider::soft) fn lend_fd(&self, name: u64, bytes: u64, fd: BorrowedFd<'_>) {
        let (word, len) = Word::Lend { name, bytes }.encode();
        self.say_with(&word[..len], fd);
    }

    pub(in crate::provider::soft) fn lend(&self, name: u64, bytes: usize) -> RawMemory {
        let (map, fd) = SharedMap::create(bytes).unwrap();
        self.lend_fd(name, bytes as u64, fd.as_fd());
        RawMemory(map)
    }

    #[cfg(feature = "cuda")]
    pub(in crate::provider::soft) fn lend_slots(&self, name: u64, bytes: u64, fd: BorrowedFd<'_>) {
        let (word, len) = Word::Slots { name, bytes }.encode();
        self.say_with(&word[..len], fd);
    }

    pub(in crate::provider::soft) fn memfd(bytes: u64, sealed: bool) -> OwnedFd {
        let fd = memfd::create(bytes).unwrap();
        if sealed {
            memfd::seal_size(fd.as_fd()).unwrap();
        }
        fd
    }

    /// Says that it has put that much.
    pub(in crate::provider::soft) fn set_head(&self, head: u64) {
        self.map.word64(super::ring::SECOND_HEAD).store(head, Ordering::SeqCst);
    }

    /// Says that it is done with that much.
    pub(in crate::provider::soft) fn set_tail(&self, tail: u64) {
        self.map.word64(super::ring::SECOND_TAIL).store(tail, Ordering::SeqCst);
    }
}
