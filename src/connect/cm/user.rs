//! The public half: queue pairs of the ring, connected by the manager.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;

use super::{Connection, Listener, Request, Target};
use crate::connect::{ConnectError, Deadline};
use crate::device::Device;
use crate::provider::{self, CmAttr};
use crate::ring::{ConnectOptions, QpCore, QueuePair};

/// How [`CmConnection::connect`] and [`CmRequest::accept`] connect a queue pair.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CmOptions {
    /// Attributes of the connection.
    pub attributes: ConnectOptions,
    /// For the other side to see: at most 56 bytes in a request, 196 in its acceptance.
    pub private_data: Vec<u8>,
    /// How long all of it may take.
    pub deadline: Duration,
}

impl Default for CmOptions {
    /// Without private data, within 10 s.
    fn default() -> Self {
        let attributes = ConnectOptions::default();
        Self { attributes, private_data: Vec::new(), deadline: Duration::from_secs(10) }
    }
}

impl CmOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the attributes.
    pub fn attributes(mut self, attributes: ConnectOptions) -> Self {
        self.attributes = attributes;
        self
    }

    /// Sets the private data.
    pub fn private_data(mut self, private_data: impl Into<Vec<u8>>) -> Self {
        self.private_data = private_data.into();
        self
    }

    /// Sets the deadline.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    fn attr(&self, device: &Device) -> Result<CmAttr, ConnectError> {
        let options = &self.attributes;
        options.check().map_err(ConnectError::resources)?;
        let rd_atomic = options.max_rd_atomic.min(device.capabilities().max_rd_atomic);
        Ok(CmAttr {
            max_rd_atomic: rd_atomic,
            max_dest_rd_atomic: rd_atomic,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            min_rnr_timer: options.min_rnr_timer,
        })
    }
}

/// The addresses of this host that belong to `device`, on which a [`CmListener`] of it can listen, the one that reaches
/// farthest first, with port 0. One that is IPv6 link-local says of which interface it is, without which nothing can be
/// bound to it. A device's GID does not tell: iWARP's is made of a MAC. On the soft provider it is the device's address.
///
/// # Cancel safety
/// Dropping the future leaves nothing.
///
/// # Errors
/// [`ConnectError::Resources`] when librdmacm or the kernel's RDMA_CM is missing; [`ConnectError::Manager`].
pub async fn addresses(device: &Device) -> Result<Vec<SocketAddr>, ConnectError> {
    match device.provider() {
        provider::Device::Soft(_) => Ok(vec![SocketAddr::new(device.address(), 0)]),
        #[cfg(feature = "verbs")]
        provider::Device::Verbs(_) => {
            let device = device.clone();
            super::thread::run(crate::connect::Stage::Address, move || super::source::all(&device)).await?
        }
    }
}

/// Listens for connect requests. Dropping it stops; requests that were not taken are rejected.
#[derive(Debug)]
pub struct CmListener {
    listener: Listener,
}

impl CmListener {
    /// Listens on an address of `device`, port 0 for any port. On the soft provider any address of this host does. Needs a
    /// tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// [`ConnectError::AddrInUse`]; [`ConnectError::OtherDevice`] for an address that is not of this RDMA device;
    /// [`ConnectError::Resources`] when librdmacm or the kernel's RDMA_CM is missing; [`ConnectError::Io`] and
    /// [`ConnectError::Manager`].
    pub async fn bind(device: &Device, addr: SocketAddr) -> Result<Self, ConnectError> {
        Listener::bind(device, addr).await.map(|listener| Self { listener })
    }

    /// The address bound, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// The next request. Peers that are silent, or send something else, delay nobody.
    ///
    /// # Cancel safety
    /// A call that is dropped takes no request.
    ///
    /// # Errors
    /// Those of the listener itself: [`ConnectError::DeviceRemoved`], [`ConnectError::Io`], [`ConnectError::Manager`].
    pub async fn accept(&self) -> Result<CmRequest, ConnectError> {
        self.listener.accept().await.map(|request| CmRequest { request })
    }
}

/// A connect request. Dropping it rejects it.
#[derive(Debug)]
#[must_use = "a request that is dropped is rejected"]
pub struct CmRequest {
    request: Request,
}

impl CmRequest {
    /// Where it comes from.
    pub fn peer_addr(&self) -> SocketAddr {
        self.request.peer_addr()
    }

    /// The local address that it came in on.
    pub fn local_addr(&self) -> SocketAddr {
        self.request.local_addr()
    }

    /// What the client sent along. Most transports pad it with zeros, to 56 bytes.
    pub fn private_data(&self) -> &[u8] {
        self.request.private_data()
    }

    /// Connects `qp` to the client's queue pair, and waits until the client is there too.
    ///
    /// Post the first receives before: on iWARP the client must be the first to send, and this side waits for that.
    ///
    /// # Cancel safety
    /// Dropping the future rejects the request, or ends the connection. Drop `qp` then, as after an error.
    ///
    /// # Errors
    /// [`ConnectError::PrivateDataTooLong`], [`ConnectError::Timeout`], [`ConnectError::Closed`] when the client has gone;
    /// [`ConnectError::Unsupported`] when the devices do not fit together; [`ConnectError::Resources`] for a queue pair that
    /// was connected before or is of another device, and for options out of range; [`ConnectError::Manager`].
    pub async fn accept(self, qp: &QueuePair, options: CmOptions) -> Result<CmConnection, ConnectError> {
        let deadline = Deadline::after(options.deadline);
        let attr = options.attr(qp.protection_domain().device())?;
        let target = target(qp)?;
        let connection = self.request.accept_target(target, &attr, &options.private_data, deadline).await?;
        CmConnection::new(qp, connection)
    }

    /// Rejects it, with words for the client. What is above 148 bytes is cut off.
    pub fn reject(self, private_data: &[u8]) {
        self.request.reject(private_data);
    }
}

fn target(qp: &QueuePair) -> Result<Target, ConnectError> {
    qp.core().with_qp(Target::of).ok_or_else(|| ConnectError::resources(qp.closed("connected")))
}

/// A connection that the manager has made. Keep it for as long as the queue pair is used: dropping it disconnects.
///
/// When it ends, from either side or by the death of the peer's process, the queue pair goes to the error state and its
/// operations end: with what failed first on it or, when nothing had, with
/// [`OpError::Disconnected`](crate::error::OpError::Disconnected) as the cause.
pub struct CmConnection {
    connection: Arc<Connection>,
    qp: Weak<QpCore>,
    watch: AbortHandle,
}

impl fmt::Debug for CmConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmConnection")
            .field("local_addr", &self.local_addr())
            .field("peer_addr", &self.peer_addr())
            .finish_non_exhaustive()
    }
}

impl CmConnection {
    /// Connects `qp` to the listener at `to`, which has an address of another RDMA device, or of a soft device's host.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the request, and leaves nothing of it. Drop `qp` then, as after an error: it may have
    /// been moved on.
    ///
    /// # Errors
    /// [`ConnectError::Refused`] when nobody listens there; [`ConnectError::PeerRejected`] with the listening program's words;
    /// [`ConnectError::Unreachable`], [`ConnectError::Timeout`]; [`ConnectError::OtherDevice`] when the way there leads over
    /// another RDMA device than the queue pair's; [`ConnectError::NoScope`]; [`ConnectError::PrivateDataTooLong`];
    /// [`ConnectError::Unsupported`] when the devices do not fit together; [`ConnectError::Resources`] for a queue pair that
    /// was connected before, for options out of range, and when librdmacm is missing; [`ConnectError::Manager`].
    pub async fn connect(qp: &QueuePair, to: SocketAddr, options: CmOptions) -> Result<Self, ConnectError> {
        let deadline = Deadline::after(options.deadline);
        let device = qp.protection_domain().device();
        let attr = options.attr(device)?;
        let target = target(qp)?;
        let connection =
            super::connect_target(device, target, to, &attr, &options.private_data, |_| Ok(()), deadline)
                .await?;
        Self::new(qp, connection)
    }

    fn new(qp: &QueuePair, connection: Connection) -> Result<Self, ConnectError> {
        if !qp.core().set_connected(connection.rd_atomic()) {
            return Err(ConnectError::resources(qp.closed("connected")));
        }
        let connection = Arc::new(connection);
        let (seen, core) = (connection.clone(), Arc::downgrade(qp.core()));
        let watch = tokio::spawn(async move {
            seen.disconnected().await;
            if let Some(core) = core.upgrade() {
                core.disconnected();
            }
        });
        let qp = Arc::downgrade(qp.core());
        Ok(Self { connection, qp, watch: watch.abort_handle() })
    }

    /// What the other side sent along with its request or its acceptance. Most transports pad it with zeros.
    pub fn private_data(&self) -> &[u8] {
        self.connection.private_data()
    }

    /// The other side's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.connection.peer_addr()
    }

    /// This side's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.connection.local_addr()
    }

    /// Waits until the connection has ended: one of the sides has disconnected, the peer's process is gone, or the device
    /// was removed. It says nothing of a host that is cut off without a word.
    ///
    /// # Cancel safety
    /// Dropping the future only stops waiting. Any number may wait.
    pub async fn disconnected(&self) {
        // The watching task waits too, one at a time: whoever has seen the end lets the next one see it.
        self.connection.disconnected().await;
    }

    /// Ends the connection, for both sides. This side's queue pair goes to the error state at once.
    pub fn disconnect(&self) {
        if let Some(qp) = self.qp.upgrade() {
            qp.disconnected();
        }
        self.connection.disconnect();
    }
}

impl Drop for CmConnection {
    fn drop(&mut self) {
        self.disconnect();
        // It holds the connection too.
        self.watch.abort();
    }
}
