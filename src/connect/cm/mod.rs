//! The connection manager: queue pairs are connected as RDMA_CM does it, with a request that the listening side
//! accepts or rejects, and with word of the other side's end.
//!
//! Devices that refuse an out-of-band exchange (iWARP, eRDMA in standard mode) are connected in this way only; all others
//! can be. On RDMA devices it is RDMA_CM, through librdmacm. The soft provider has a manager of its own over TCP, with the
//! same semantics, so that a program meets the same steps on every device:
//!
//! ```text
//!   client                                   server
//!   connect(qp, to, private data)  ───────►  accept() gives a request: who, and the private data (zero-padded)
//!   established, or rejected       ◄───────  request.accept(qp, private data), or request.reject(private data)
//!   disconnected()                 ◄──────►  disconnected(): the other side disconnected, or its process is gone
//! ```
//!
//! ```
//! use landfall::connect::cm::{CmConnection, CmListener, CmOptions};
//! use landfall::device::Device;
//! use landfall::memory::Memory;
//! use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("soft-default")?;
//! let pd = device.alloc_pd()?;
//! let cq = CompletionQueue::new(&device, CqConfig::new(64))?;
//! let (a, b) = (
//!     QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16))?,
//!     QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16))?,
//! );
//! let listener = CmListener::bind(&device, "127.0.0.1:0".parse()?).await?;
//! let to = listener.local_addr();
//!
//! // The server: a receive is posted before the request is accepted.
//! let buf = pd.register_local(Memory::anonymous(64)).await?.into_slice();
//! let received = b.recv(buf);
//! let server = async {
//!     let request = listener.accept().await?;
//!     assert_eq!(&request.private_data()[..5], b"hello");
//!     request.accept(&b, CmOptions::new()).await
//! };
//!
//! // The client sends first.
//! let client = CmConnection::connect(&a, to, CmOptions::new().private_data(*b"hello"));
//! let (server, client) = tokio::try_join!(server, client)?;
//! let (sent, _) = a.send(pd.register_local(Memory::anonymous(64)).await?.into_slice()).await;
//! assert_eq!(sent?.bytes, 64);
//! received.await.0?;
//!
//! client.disconnect();
//! server.disconnected().await;
//! # Ok(()) }
//! ```
//!
//! # Limits
//!
//! Private data has at most 56 bytes in a request, 196 in an acceptance and 148 in a rejection, and most transports pad
//! it with zeros. On iWARP the client has to be the first to send on a queue pair. The manager notices when a process ends,
//! not when a host is cut off: that is for operations, whose retries run out, and for heartbeats of the program's own.
//!
//! # Inside
//!
//! `Listener`, `Request`, `connect` and `Connection` here are the crate's own half; each is one of two managers:
//!
//! ```text
//!   soft.rs     over TCP; offer.rs  what its frames say
//!   verbs.rs    futures over RDMA_CM's events (the calls are in provider/verbs/cm.rs); verbs_error.rs  what those mean
//!   user.rs     the public half, for queue pairs of the ring
//!   source.rs   from which address an RDMA device connects     thread.rs   calls that block
//!   attr.rs     attributes of a connection, limits of private data     private.rs  landfall's own private data
//! ```

mod attr;
mod offer;
pub(crate) mod private;
mod soft;
#[cfg(feature = "verbs")]
mod source;
#[cfg(test)]
mod tests;
#[cfg(feature = "verbs")]
mod thread;
mod user;
#[cfg(feature = "verbs")]
mod verbs;
#[cfg(feature = "verbs")]
mod verbs_error;

use std::net::SocketAddr;

use super::deadline::Deadline;
use super::error::ConnectError;
use crate::device::Device;
use crate::provider;
use crate::provider::soft::SoftCmQp;
#[cfg(feature = "verbs")]
use crate::provider::verbs::VerbsCmQp;

pub(crate) use crate::provider::CmAttr;
#[cfg(any(test, fuzzing))]
pub(super) use offer::fuzz;
pub use user::{CmConnection, CmListener, CmOptions, CmRequest, addresses};

/// Listens for connect requests. Dropping it stops; requests that were not taken are rejected.
#[derive(Debug)]
pub(crate) enum Listener {
    Soft(soft::SoftListener),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsListener),
}

/// A connect request. Dropping it rejects it.
#[derive(Debug)]
pub(crate) enum Request {
    Soft(soft::SoftRequest),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsRequest),
}

/// An established connection. Dropping it disconnects; the owner drops the queue pair first.
#[derive(Debug)]
pub(crate) enum Connection {
    Soft(soft::SoftConnection),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsConnection),
}

impl Listener {
    /// Binds to an address of `device` and listens. Port 0 is any port; one that is taken is an error at once.
    pub(crate) async fn bind(device: &Device, addr: SocketAddr) -> Result<Self, ConnectError> {
        match device.provider() {
            provider::Device::Soft(_) => soft::SoftListener::bind(device, addr).await.map(Self::Soft),
            #[cfg(feature = "verbs")]
            provider::Device::Verbs(_) => verbs::VerbsListener::bind(device, addr).await.map(Self::Verbs),
        }
    }

    /// The address bound, with the real port.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        match self {
            Self::Soft(l) => l.local_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.local_addr(),
        }
    }

    /// The next request. What a peer does wrong is not an error of the listener. Cancel safe.
    pub(crate) async fn accept(&self) -> Result<Request, ConnectError> {
        match self {
            Self::Soft(l) => l.accept().await.map(Request::Soft),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.accept().await.map(Request::Verbs),
        }
    }
}

impl Request {
    /// Where it comes from.
    pub(crate) fn peer_addr(&self) -> SocketAddr {
        match self {
            Self::Soft(r) => r.peer_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => r.peer_addr(),
        }
    }

    /// The local address that it came in on.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        match self {
            Self::Soft(r) => r.local_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => r.local_addr(),
        }
    }

    /// What the client sent along, padded with zeros to the most that a request holds, or not.
    pub(crate) fn private_data(&self) -> &[u8] {
        match self {
            Self::Soft(r) => r.private_data(),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => r.private_data(),
        }
    }

    /// Connects `qp` with the client's queue pair, and waits until the client is there too. When this fails or is
    /// dropped the request is rejected, or the connection ended; `qp` may have been moved on and is to be destroyed.
    pub(crate) async fn accept(
        self,
        qp: &provider::Qp,
        attr: &CmAttr,
        private: &[u8],
        deadline: Deadline,
    ) -> Result<Connection, ConnectError> {
        self.accept_target(Target::of(qp), attr, private, deadline).await
    }

    async fn accept_target(
        self,
        qp: Target,
        attr: &CmAttr,
        private: &[u8],
        deadline: Deadline,
    ) -> Result<Connection, ConnectError> {
        attr::check_reply(private)?;
        match (self, qp) {
            (Self::Soft(r), Target::Soft(qp)) => {
                r.accept(qp, *attr, private, deadline).await.map(Connection::Soft)
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(r), Target::Verbs(qp)) => {
                r.accept(qp, *attr, private, deadline).await.map(Connection::Verbs)
            }
            #[cfg(feature = "verbs")]
            _ => Err(attr::foreign()),
        }
    }

    /// Refuses, with up to 148 bytes for the client. What is beyond that is cut off.
    pub(crate) fn reject(self, private: &[u8]) {
        match self {
            Self::Soft(r) => r.reject(private),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => r.reject(private),
        }
    }
}

/// Connects `qp`, of `device`, to the listener at `to`. When this fails or is dropped nothing of it is left (B4), but that
/// `qp` may have been moved on: it is to be destroyed.
///
/// `check` looks at the private data of the answer before `qp` is connected to whoever has given it. On iWARP the driver connects
/// it by itself as the answer comes: there it is ended right after.
pub(crate) async fn connect(
    device: &Device,
    qp: &provider::Qp,
    to: SocketAddr,
    attr: &CmAttr,
    private: &[u8],
    check: impl FnOnce(&[u8]) -> Result<(), ConnectError>,
    deadline: Deadline,
) -> Result<Connection, ConnectError> {
    connect_target(device, Target::of(qp), to, attr, private, check, deadline).await
}

async fn connect_target(
    device: &Device,
    qp: Target,
    to: SocketAddr,
    attr: &CmAttr,
    private: &[u8],
    check: impl FnOnce(&[u8]) -> Result<(), ConnectError>,
    deadline: Deadline,
) -> Result<Connection, ConnectError> {
    attr::check_request(private)?;
    let deadline = deadline.of(to);
    match qp {
        Target::Soft(qp) => {
            soft::connect(device, qp, to, *attr, private, check, deadline).await.map(Connection::Soft)
        }
        #[cfg(feature = "verbs")]
        Target::Verbs(qp) => {
            verbs::connect(device, qp, to, *attr, private, check, deadline).await.map(Connection::Verbs)
        }
    }
}

/// A queue pair as the managers hold it: its owner can drop it meanwhile.
#[derive(Debug)]
enum Target {
    Soft(SoftCmQp),
    #[cfg(feature = "verbs")]
    Verbs(VerbsCmQp),
}

impl Target {
    fn of(qp: &provider::Qp) -> Self {
        match qp {
            provider::Qp::Soft(qp) => Self::Soft(qp.for_cm()),
            #[cfg(feature = "verbs")]
            provider::Qp::Verbs(qp) => Self::Verbs(qp.for_cm()),
        }
    }
}

impl Connection {
    /// READs and atomics that both sides allow this one to have outstanding.
    pub(crate) fn rd_atomic(&self) -> u8 {
        match self {
            Self::Soft(c) => c.rd_atomic(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.rd_atomic(),
        }
    }

    /// What the other side sent along with its request or its acceptance, zero-padded or not.
    pub(crate) fn private_data(&self) -> &[u8] {
        match self {
            Self::Soft(c) => c.private_data(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.private_data(),
        }
    }

    /// The other side's address.
    pub(crate) fn peer_addr(&self) -> SocketAddr {
        match self {
            Self::Soft(c) => c.peer_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.peer_addr(),
        }
    }

    /// This side's address.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        match self {
            Self::Soft(c) => c.local_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.local_addr(),
        }
    }

    /// Waits until the connection has ended: one of the sides has disconnected, the peer's process is gone, or the device
    /// was removed. Cancel safe, and any number may wait.
    pub(crate) async fn disconnected(&self) {
        match self {
            Self::Soft(c) => c.disconnected().await,
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.disconnected().await,
        }
    }

    /// Ends the connection, for both sides. The queue pair is the owner's to move to ERR. Does not block.
    pub(crate) fn disconnect(&self) {
        match self {
            Self::Soft(c) => c.disconnect(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.disconnect(),
        }
    }
}
