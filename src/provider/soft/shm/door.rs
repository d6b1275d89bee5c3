//! The rendezvous of two processes of one host: a socket with a name, beside the TCP listener of a queue pair.
//!
//! The name is random and abstract: it is in no file system, ends with its process, and is seen in its network namespace
//! only. Who dials it gives the rings, once, with the first message; the key in that message says that it is the peer.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use socket2::{Domain, SockAddr, Socket, Type};

use super::super::frame::Preamble;
use super::super::link::Spare;
use super::super::sys::Epoll;
use super::super::tuning::{LISTEN_BACKLOG, MAX_STRANGERS};
use super::link::ShmLink;
use super::map::SharedMap;
use super::rights;
use super::ring::MAP_BYTES;
use super::words::{HELLO, Hello};
use crate::random::random_u64;

/// A listener, and the connections that have not shown who they are.
#[derive(Debug)]
pub(in crate::provider::soft) struct ShmDoor {
    listener: Socket,
    strangers: Vec<Socket>,
}

/// Whether the peer has come in.
#[derive(Debug)]
pub(in crate::provider::soft) enum Visit {
    Peer(Box<ShmLink>),
    /// Nobody, and an edge will tell.
    Nobody,
    /// More to accept than one visit does: come again.
    Again,
}

/// The address of a name.
pub(in crate::provider::soft) fn address(name: u64) -> io::Result<SockAddr> {
    SockAddr::unix(Path::new(OsStr::from_bytes(format!("\0landfall-{name:016x}").as_bytes())))
}

fn new_socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking().cloexec(), None)
}

impl ShmDoor {
    /// Listens, under a name of its own, which is not 0.
    pub(in crate::provider::soft) fn open() -> io::Result<(Self, u64)> {
        loop {
            let name = random_u64()?.max(1);
            let listener = new_socket()?;
            match listener.bind(&address(name)?) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => continue,
                Err(e) => return Err(e),
            }
            listener.listen(LISTEN_BACKLOG)?;
            return Ok((Self { listener, strangers: Vec::new() }, name));
        }
    }

    pub(in crate::provider::soft) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts, reads first messages, and lets in who shows `expected`. Others cost nothing more than this.
    pub(in crate::provider::soft) fn visit(
        &mut self,
        expected: &Preamble,
        epoll: &Epoll,
        token: u64,
        spare: &mut Spare,
    ) -> Visit {
        let mut more = true;
        for _ in 0..MAX_STRANGERS {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    // Its first message brings a descriptor.
                    spare.spend();
                    if socket.set_nonblocking(true).is_err()
                        || epoll.add_incoming(socket.as_fd(), token).is_err()
                    {
                        continue;
                    }
                    if self.strangers.len() == MAX_STRANGERS {
                        self.strangers.remove(0);
                    }
                    self.strangers.push(socket);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() != io::ErrorKind::WouldBlock && spare.spend() => {}
                // Nobody, or a shortage: the connection stays in the backlog, and the queue pair's deadline is the next occasion.
                Err(_) => {
                    more = false;
                    break;
                }
            }
        }
        let mut at = 0;
        while at < self.strangers.len() {
            match listen(&self.strangers[at], expected) {
                Heard::Nothing => at += 1,
                Heard::Nonsense => drop(self.strangers.swap_remove(at)),
                Heard::Hello(hello, map) => {
                    let socket = self.strangers.swap_remove(at);
                    if let Ok(link) = ShmLink::accept(socket, map, &hello) {
                        return Visit::Peer(Box::new(link));
                    }
                }
            }
        }
        if more { Visit::Again } else { Visit::Nobody }
    }
}

enum Heard {
    Nothing,
    /// Not the peer, or a peer whose rings cannot be mapped: it finds its connection closed.
    Nonsense,
    Hello(Hello, SharedMap),
}

fn listen(socket: &Socket, expected: &Preamble) -> Heard {
    let mut bytes = [0; HELLO];
    let message = loop {
        match rights::recv(socket.as_fd(), &mut bytes) {
            Ok(message) => break message,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Heard::Nothing,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Heard::Nonsense,
        }
    };
    let hello = Hello::decode(&bytes[..message.len]).filter(|hello| expected.admits(&hello.preamble));
    match (hello, message.fd.map(|fd| SharedMap::open(&fd, MAP_BYTES))) {
        (Some(hello), Some(Ok(map))) => Heard::Hello(hello, map),
        _ => Heard::Nonsense,
    }
}

/// Knocks at the door of that name. `ConnectionRefused`: there is none in this network namespace.
pub(in crate::provider::soft) fn dial(name: u64, preamble: Preamble) -> io::Result<ShmLink> {
    let socket = new_socket()?;
    socket.connect(&address(name)?)?;
    ShmLink::dial(socket, preamble)
}
