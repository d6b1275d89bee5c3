//! The sockets of a queue pair: its listener, the dial, strangers at the door, and the connection, by TCP or shared memory.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::frame::{PREAMBLE, Preamble};
use super::shm::{ShmDoor, ShmLink, Visit};
use super::sys::{self, Epoll, SendVecs};
use super::tuning::{LISTEN_BACKLOG, LOOPBACK_CONGESTION, MAX_STRANGERS, SOCKET_BUFFER};

/// How a queue pair is, or is not yet, or is no longer connected.
#[derive(Debug)]
pub(super) enum Link {
    /// INIT, and RTS of the passive side: peers knock here.
    Listening(Doors),
    /// RTS of the active side.
    Dialing(Socket),
    Up(Stream),
    /// Over shared memory: the last words are in the ring. The peer has to copy what it was referred to before them, so that
    /// nothing is given back until it has read them, which it says by going.
    Leaving(Box<ShmLink>),
    /// ERR: the last words have been sent; what still arrives is discarded, so that they are not reset.
    Draining {
        socket: Socket,
        left: usize,
    },
    Down,
}

/// What frames travel on.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(Socket),
    Shm(Box<ShmLink>),
}

impl Stream {
    /// What of the list goes now. `WouldBlock`: there is no room.
    pub(super) fn send(&self, vecs: &mut SendVecs<'_>) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => vecs.send(socket.as_fd()),
            Self::Shm(link) => link.send(vecs),
        }
    }
}

impl Link {
    /// The established connection, if it is over shared memory.
    pub(super) fn shm(&self) -> Option<&ShmLink> {
        match self {
            Self::Up(Stream::Shm(link)) | Self::Leaving(link) => Some(&**link),
            _ => None,
        }
    }
}

/// Where the peer knocks: one or two listeners.
#[derive(Debug)]
pub(super) struct Doors {
    pub(super) tcp: Option<Door>,
    pub(super) shm: Option<ShmDoor>,
    pub(super) spare: Spare,
}

/// The descriptors that the peer's connection will take, held from the beginning: a process that has not enough of them finds that
/// where it makes a queue pair, and can say so, and not where the peer knocks, which nobody waits for.
#[derive(Debug, Default)]
pub(super) struct Spare(Vec<OwnedFd>);

impl Spare {
    /// So many copies of a descriptor.
    pub(super) fn hold(&mut self, count: usize, of: BorrowedFd<'_>) -> io::Result<()> {
        while self.0.len() < count {
            self.0.push(of.try_clone_to_owned()?);
        }
        Ok(())
    }

    /// Gives them back, for what is accepted now. False when they were given back before.
    pub(super) fn spend(&mut self) -> bool {
        let held = !self.0.is_empty();
        self.0.clear();
        held
    }
}

impl Doors {
    /// Lets in who shows `expected` at either of them.
    pub(super) fn visit(&mut self, expected: &Preamble, epoll: &Epoll, token: u64) -> Knock {
        let mut again = false;
        if let Some(door) = &mut self.shm {
            match door.visit(expected, epoll, token, &mut self.spare) {
                Visit::Peer(link) => return Knock::Peer(Stream::Shm(link)),
                Visit::Nobody => {}
                Visit::Again => again = true,
            }
        }
        match self.tcp.as_mut().map(|door| door.visit(expected, epoll, token, &mut self.spare)) {
            Some(Knock::Nobody) | None if again => Knock::Again,
            None => Knock::Nobody,
            Some(knock) => knock,
        }
    }
}

/// A listener, and the connections that have not shown who they are.
#[derive(Debug)]
pub(super) struct Door {
    listener: Socket,
    strangers: Vec<Stranger>,
}

#[derive(Debug)]
struct Stranger {
    socket: Socket,
    said: [u8; PREAMBLE],
    len: usize,
}

/// Whether the peer has come in.
pub(super) enum Knock {
    Peer(Stream),
    /// Nobody, and an edge will tell.
    Nobody,
    /// More to accept than one visit does: come again.
    Again,
}

impl Door {
    /// Listens on a port of the system's choice.
    pub(super) fn open(ip: IpAddr) -> io::Result<(Self, u16)> {
        let listener = new_socket(ip)?;
        // An accepted socket inherits the buffers, which have to be set before the handshake.
        set_buffers(&listener);
        listener.bind(&SocketAddr::new(ip, 0).into())?;
        listener.listen(LISTEN_BACKLOG)?;
        let port = listener.local_addr()?.as_socket().map_or(0, |a| a.port());
        Ok((Self { listener, strangers: Vec::new() }, port))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts, reads first bytes, and lets in who shows `expected`. Others cost nothing more than this.
    fn visit(&mut self, expected: &Preamble, epoll: &Epoll, token: u64, spare: &mut Spare) -> Knock {
        let mut more = true;
        for _ in 0..MAX_STRANGERS {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if socket.set_nonblocking(true).is_err()
                        || epoll.add_socket(socket.as_fd(), token).is_err()
                    {
                        continue;
                    }
                    if self.strangers.len() == MAX_STRANGERS {
                        self.strangers.remove(0);
                    }
                    self.strangers.push(Stranger { socket, said: [0; PREAMBLE], len: 0 });
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    more = false;
                    break;
                }
                // A shortage does not pass by asking again at once. The connection stays in the backlog, and the queue
                // pair's deadline is the next occasion.
                Err(e) if is_shortage(&e) => {
                    if spare.spend() {
                        continue;
                    }
                    more = false;
                    break;
                }
                // Of one connection that went away.
                Err(_) => {}
            }
        }
        let mut at = 0;
        while at < self.strangers.len() {
            match self.strangers[at].listen(expected) {
                Some(true) => return Knock::Peer(Stream::Tcp(self.strangers.swap_remove(at).socket)),
                Some(false) => {
                    self.strangers.swap_remove(at);
                }
                None => at += 1,
            }
        }
        if more { Knock::Again } else { Knock::Nobody }
    }
}

fn is_shortage(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

impl Stranger {
    /// Whether it is the peer, once that is known.
    fn listen(&mut self, expected: &Preamble) -> Option<bool> {
        while self.len < PREAMBLE {
            match sys::recv(self.socket.as_fd(), &mut self.said[self.len..]) {
                Ok(0) => return Some(false),
                Ok(n) => self.len += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Some(false),
            }
        }
        Some(Preamble::decode(&self.said).is_some_and(|said| expected.admits(&said)))
    }
}

/// Starts to connect.
pub(super) fn dial(local: IpAddr, remote: SocketAddr) -> io::Result<Socket> {
    let socket = new_socket(remote.ip())?;
    set_buffers(&socket);
    set_loopback(&socket, local, remote.ip());
    if local.is_ipv4() == remote.is_ipv4() {
        socket.bind(&SocketAddr::new(local, 0).into())?;
    }
    match socket.connect(&remote.into()) {
        Ok(()) => Ok(socket),
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        Err(e) => Err(e),
    }
}

/// Whether the dial has ended, and how.
pub(super) fn dialed(socket: &Socket) -> io::Result<bool> {
    if let Some(e) = socket.take_error()? {
        return Err(e);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(e) => Err(e),
    }
}

/// Options of an established connection. They make it faster, or quicker to give up: without them it works.
pub(super) fn tune(socket: &Socket, timeout: Duration) {
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_user_timeout(Some(timeout));
    if let (Ok(local), Ok(peer)) = (socket.local_addr(), socket.peer_addr())
        && let (Some(local), Some(peer)) = (local.as_socket(), peer.as_socket())
    {
        set_loopback(socket, local.ip(), peer.ip());
    }
}

fn new_socket(ip: IpAddr) -> io::Result<Socket> {
    let domain = if ip.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    Ok(socket)
}

fn set_buffers(socket: &Socket) {
    // The system bounds them, and a smaller one works too.
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
}

fn set_loopback(socket: &Socket, local: IpAddr, remote: IpAddr) {
    if remote.is_loopback() || local == remote {
        let _ = socket.set_tcp_congestion(LOOPBACK_CONGESTION);
    }
}

/// Fails when no socket can be bound to `ip` here.
pub(super) fn check_address(ip: IpAddr) -> io::Result<()> {
    new_socket(ip)?.bind(&SocketAddr::new(ip, 0).into())
}

/// The GID of an address: IPv4 is mapped.
pub(super) fn gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
        IpAddr::V6(a) => a.octets(),
    }
}

/// The address that a GID stands for.
pub(super) fn from_gid(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}
