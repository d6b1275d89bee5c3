//! Out-of-band bootstrap over TCP: the listener, the dial, and name look-up. Handshakes are in `handshake`.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};

use super::deadline::Deadline;
use super::error::{ConnectError, Stage, is_exhaustion};
use super::gate::{Gate, Ticket};
use super::handshake::Incoming;

/// First and longest pause after an accept that failed for want of descriptors or memory.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// Most addresses of a name that are tried.
const MAX_ADDRESSES: usize = 8;
/// Name look-ups at once in this process. They cannot be cancelled, so their threads are bounded.
static LOOKUPS: Semaphore = Semaphore::const_new(16);

/// A bound TCP listener.
#[derive(Debug)]
pub(crate) struct OobListener {
    listener: TcpListener,
    local: SocketAddr,
    gate: Gate,
}

impl OobListener {
    /// Binds at once, or says that the port is taken.
    pub(crate) async fn bind(addr: SocketAddr) -> Result<Self, ConnectError> {
        // A socket address needs no look-up: this does not wait.
        let listener = TcpListener::bind(addr).await.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ConnectError::AddrInUse { addr },
            _ => ConnectError::io(Stage::Listen, source),
        })?;
        let local =
            listener.local_addr().map_err(|source| ConnectError::Io { stage: Stage::Listen, source })?;
        Ok(Self { listener, local, gate: Gate::new() })
    }

    /// With other limits on the handshakes at once.
    #[cfg(test)]
    pub(super) fn with_gate(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// The address bound, with the real port where 0 was asked for.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The next connection, whose handshake has `limit` from now. What a peer or a full descriptor table can
    /// cause is not an error of the listener. Run each handshake in a task of its own, so that a slow peer delays
    /// nobody. Cancel safe.
    pub(crate) async fn accept(&self, limit: Duration) -> Result<Incoming<TcpStream>, ConnectError> {
        let (stream, peer, ticket) = self.accept_stream().await?;
        Ok(Incoming::new(stream, peer, ticket, Deadline::after(limit)))
    }

    /// The next connection, with a place at the gate. Cancel safe.
    pub(super) async fn accept_stream(&self) -> Result<(TcpStream, SocketAddr, Ticket), ConnectError> {
        self.gate.room().await;
        let (stream, peer) = self.accept_raw().await?;
        Ok((stream, peer, self.gate.enter()))
    }

    async fn accept_raw(&self) -> Result<(TcpStream, SocketAddr), ConnectError> {
        let mut pause = PAUSE.0;
        loop {
            let source = match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // A peer that reset already makes this fail: its handshake will say so.
                    let _ = stream.set_nodelay(true);
                    return Ok((stream, peer));
                }
                Err(e) => e,
            };
            match after_accept_error(&source) {
                AcceptError::Next => {}
                AcceptError::Pause => {
                    tracing::warn!(error = %source, ?pause, "accept: waiting for resources");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
                AcceptError::Fatal => return Err(ConnectError::Io { stage: Stage::Listen, source }),
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum AcceptError {
    /// An error of one connection: take the next.
    Next,
    /// Out of descriptors or memory: the connection stays in the backlog; wait.
    Pause,
    /// An error of the listener itself.
    Fatal,
}

/// accept(2): errors of a connection that was pending are handed to accept, and are to be treated as "again".
fn after_accept_error(e: &io::Error) -> AcceptError {
    match e.raw_os_error() {
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP | libc::EFAULT) | None => {
            AcceptError::Fatal
        }
        Some(_) if is_exhaustion(e) => AcceptError::Pause,
        Some(_) => AcceptError::Next,
    }
}

/// Connects to `target`, `host:port`. Every address of a name gets a share of the time left.
pub(crate) async fn dial(target: &str, deadline: Deadline) -> Result<TcpStream, ConnectError> {
    let addrs = resolve(target, deadline).await?;
    let mut failed = deadline.timeout(Stage::Dial);
    for (i, addr) in addrs.iter().enumerate() {
        let share = deadline.of(*addr).share(addrs.len() - i);
        failed = match share.within(TcpStream::connect(addr)).await {
            Some(Ok(stream)) if is_self(&stream) => ConnectError::Refused { addr: *addr },
            Some(Ok(stream)) => {
                stream.set_nodelay(true).map_err(|source| ConnectError::Io { stage: Stage::Dial, source })?;
                return Ok(stream);
            }
            Some(Err(e)) if e.kind() == io::ErrorKind::ConnectionRefused => {
                ConnectError::Refused { addr: *addr }
            }
            Some(Err(e)) => ConnectError::io(Stage::Dial, e),
            None => share.timeout(Stage::Dial),
        };
    }
    Err(failed)
}

/// A dial to an ephemeral port of this host on which nobody listens can meet itself.
fn is_self(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(l), Ok(p)) if l == p)
}

/// The addresses of `target`. Literal addresses are not looked up.
pub(super) async fn resolve(target: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, ConnectError> {
    if let Ok(addr) = target.parse::<SocketAddr>() {
        return Ok(vec![addr]);
    }
    let invalid = || ConnectError::Address { given: target.to_owned() };
    let (host, port) = target.rsplit_once(':').ok_or_else(invalid)?;
    let port: u16 = port.parse().map_err(|_| invalid())?;
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control() || "[]:/".contains(c)) {
        return Err(invalid());
    }
    let host = host.to_owned();
    deadline.run(Stage::Resolve, lookup(host, port)).await
}

/// Asks the system's resolver, on a thread of its own: a look-up can take minutes and cannot be cancelled, and a
/// runtime that shuts down waits for its blocking pool, but not for this.
async fn lookup(host: String, port: u16) -> Result<Vec<SocketAddr>, ConnectError> {
    let failed = |name: &str, source| ConnectError::Resolve { name: name.to_owned(), source };
    let permit = LOOKUPS.acquire().await.expect("the semaphore is never closed");
    let (tx, rx) = oneshot::channel();
    let name = host.clone();
    std::thread::Builder::new()
        .name("landfall-resolve".into())
        .spawn(move || {
            let found = (host.as_str(), port).to_socket_addrs();
            // The receiver is gone when the deadline has passed.
            let _ = tx.send(found.map(|a| a.take(MAX_ADDRESSES).collect::<Vec<_>>()));
            drop(permit);
        })
        .map_err(|e| failed(&name, e))?;
    match rx.await {
        Ok(Ok(addrs)) if !addrs.is_empty() => Ok(addrs),
        Ok(Ok(_)) => Err(failed(&name, io::ErrorKind::NotFound.into())),
        Ok(Err(e)) => Err(failed(&name, e)),
        Err(_) => Err(failed(&name, io::Error::other("the look-up thread ended early"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_accept_survives_what_peers_and_full_tables_cause() {
        let after = |code| after_accept_error(&io::Error::from_raw_os_error(code));
        for code in
            [libc::ECONNABORTED, libc::EINTR, libc::EPROTO, libc::ENETDOWN, libc::EHOSTUNREACH, libc::EPERM]
        {
            assert_eq!(after(code), AcceptError::Next);
        }
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            assert_eq!(after(code), AcceptError::Pause);
        }
        assert_eq!(after(libc::EBADF), AcceptError::Fatal);
        assert_eq!(after(libc::EINVAL), AcceptError::Fatal);
    }
}
