//! Why a bootstrap failed: what was found, whose fault it is, and what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::error::QpError;
use crate::provider::limits;

/// Where a connect or an accept stood when it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// Looking up the peer's name.
    Resolve,
    /// Binding or accepting at the listener.
    Listen,
    /// Establishing the TCP connection.
    Dial,
    /// The TLS handshake.
    Tls,
    /// Showing that both sides hold a pre-shared key.
    Challenge,
    /// The client's hello: sending it, or waiting for it.
    Hello,
    /// The server's answer to the hello.
    HelloReply,
    /// The client's message that its queue pairs are connected.
    Ready,
    /// The server's confirmation of it.
    ReadyAck,
    /// RDMA_CM: finding the device and the link of an address.
    Address,
    /// RDMA_CM: finding the route to the peer.
    Route,
    /// The connection manager's request: sending it, or waiting for it.
    Request,
    /// The listening side's answer to a request.
    Reply,
    /// The last step of the connection manager: both sides know that the other is there.
    Established,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resolve => "name look-up",
            Self::Listen => "listening",
            Self::Dial => "the TCP connect",
            Self::Tls => "TLS handshake",
            Self::Challenge => "proof of the key",
            Self::Hello => "hello",
            Self::HelloReply => "reply to the hello",
            Self::Ready => "ready",
            Self::ReadyAck => "confirmation of ready",
            Self::Address => "address resolution",
            Self::Route => "route resolution",
            Self::Request => "connect request",
            Self::Reply => "reply to the connect request",
            Self::Established => "establishing the connection",
        })
    }
}

/// Who has to change something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// This side: an argument, or a limit of this host.
    Local,
    /// The peer broke the protocol, or is not a landfall endpoint.
    Peer,
    /// Both follow the protocol and do not fit together.
    Incompatible,
    /// The network, or a peer that is absent, busy or slow.
    Environment,
}

/// A connect or an accept failed. Nothing of it is left: its sockets and queue pairs are gone (B4).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address does not parse as `host:port`.
    #[error("{given:?} is not an address; give host:port or [v6]:port")]
    Address {
        /// What was given.
        given: String,
    },
    /// The name has no address, or the look-up failed.
    #[error("{name:?} cannot be resolved; check the name, or give an IP address")]
    Resolve {
        /// The name asked for.
        name: String,
        /// The resolver's error.
        #[source]
        source: io::Error,
    },
    /// The port is taken.
    #[error("{addr} is in use by another socket; choose another port, or port 0 for any")]
    AddrInUse {
        /// The address asked for.
        addr: SocketAddr,
    },
    /// Nobody listens there.
    #[error(
        "{addr} refused the connection: nothing listens there, or the peer bootstraps differently (oob, cm); start the peer first, correct the address, or choose one bootstrap on both sides"
    )]
    Refused {
        /// The address dialled.
        addr: SocketAddr,
    },
    /// The deadline passed.
    #[error(
        "{stage}{}: not done within {after:?}; check that the peer is alive and reachable, or allow more time",
        At(to)
    )]
    Timeout {
        /// What was awaited.
        stage: Stage,
        /// The address dialled, on the side that dials.
        to: Option<SocketAddr>,
        /// The time that the whole connect was given.
        after: Duration,
    },
    /// The system refused.
    #[error("{stage}: the socket failed")]
    Io {
        /// What was going on.
        stage: Stage,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The peer closed the connection, or died.
    #[error("{stage}: the peer closed the connection; its log says why")]
    Closed {
        /// What was awaited.
        stage: Stage,
    },
    /// The listener had too many handshakes and gave up the oldest, this one.
    #[error("{stage}: given up for newer connections, because it took too long; the peer may retry")]
    Evicted {
        /// What was awaited.
        stage: Stage,
    },
    /// The other side speaks something else.
    #[error(
        "the peer is not a landfall endpoint (its first bytes are {}); check the address and port",
        first_bytes(*got)
    )]
    NotLandfall {
        /// The first four bytes, as a little-endian integer.
        got: u32,
    },
    /// The two sides are of different versions of the protocol.
    #[error(
        "the peer speaks version {theirs} of the bootstrap, this side version {ours}; run one landfall version on both"
    )]
    Version {
        /// Our version.
        ours: u16,
        /// The peer's version.
        theirs: u16,
    },
    /// A frame above the limit.
    #[error(
        "{stage}: a frame of {declared} bytes, the limit is {limit}; fewer or larger regions make a hello shorter"
    )]
    TooLarge {
        /// What the frame was.
        stage: Stage,
        /// The length declared.
        declared: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// The connection ended inside a frame.
    #[error("{stage}: the peer's frame ended after {got} of {wanted} bytes; the peer died or is faulty")]
    Truncated {
        /// What was awaited.
        stage: Stage,
        /// Bytes that came.
        got: u64,
        /// Bytes that were declared.
        wanted: u64,
    },
    /// A frame whose content breaks the format.
    #[error("{stage}: the peer's message is malformed: {what}; this is a fault of the peer")]
    Malformed {
        /// What the message was.
        stage: Stage,
        /// What is wrong with it.
        what: String,
    },
    /// A frame of a kind that has no place here.
    #[error("{stage}: the peer sent a message of kind {kind} instead; this is a fault of the peer")]
    Unexpected {
        /// What was awaited.
        stage: Stage,
        /// The kind that came.
        kind: u16,
    },
    /// A listener that anybody who reaches it could connect to, which was not asked for.
    #[error(
        "{addr} can be reached from other hosts, and anybody could connect: give KvConfig::admission a key (Admission::Psk), say Admission::Open where every host of the network is trusted, or listen on a loopback address"
    )]
    AdmissionRequired {
        /// The address asked for.
        addr: SocketAddr,
    },
    /// The two sides admit peers in different ways.
    #[error(
        "admission differs: {ours} on this side, {theirs} on the peer's; configure KvConfig::admission alike on both"
    )]
    AdmissionMismatch {
        /// Our way: `open`, `psk` or `tls`.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// One side names a pre-shared key that the other one does not have.
    #[error("{by} has no pre-shared key of the id {id:?}; give both sides the key under the same id")]
    UnknownKey {
        /// The key's id.
        id: String,
        /// Who does not have it.
        by: &'static str,
    },
    /// What came does not prove that the peer holds the key.
    #[error(
        "{stage}: the peer does not prove that it holds the key: it has another one under the same id, or somebody has changed, repeated or made up what came"
    )]
    NotAuthentic {
        /// What the message was.
        stage: Stage,
    },
    /// The peer did not take what we sent as proof that we hold the key.
    #[error(
        "the peer refuses this side's proof of the key: the two have different keys under the same id, or somebody has changed what was sent"
    )]
    RefusedAsNotAuthentic,
    /// TLS failed on this side: the peer's certificate is not taken, or what came is not TLS as it should be.
    #[error("{stage}: TLS failed; check both sides' certificates, authorities and clocks")]
    Tls {
        /// What was going on.
        stage: Stage,
        /// What was wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The peer refused TLS with us.
    #[error("the peer refuses this side's certificate, or its TLS; check what it trusts, and both clocks")]
    RefusedByTls {
        /// What it said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The peer's certificate is good, and for none of the names that may connect; or its endpoint is known as that of another.
    #[error(
        "{by} does not admit {peer:?}: it is none of those that may connect (Tls::peers), or gives itself out as the endpoint of another one"
    )]
    NotAdmitted {
        /// The names in the certificate of the one that is refused.
        peer: String,
        /// Who does not admit whom.
        by: &'static str,
    },
    /// Certificates were asked for where queue pairs are connected by a connection manager.
    #[error(
        "{device} is connected by a connection manager, which carries no TLS; use Admission::Psk, or a device that can be connected out of band with Bootstrap::Oob"
    )]
    TlsByManager {
        /// The device.
        device: String,
    },
    /// The endpoint that answers is not the one asked for.
    #[error(
        "another endpoint answers: expected {expected}, got {got}; the peer was restarted or the address is wrong: look it up again"
    )]
    IdentityMismatch {
        /// The identity asked for.
        expected: String,
        /// The one found.
        got: String,
    },
    /// The two block layouts differ where they must agree.
    #[error("{field} differs: {ours} on this side, {theirs} on the peer's; configure both pools alike")]
    LayoutMismatch {
        /// The part of the layout.
        field: &'static str,
        /// Our value.
        ours: u64,
        /// The peer's value.
        theirs: u64,
    },
    /// The element types differ.
    #[error("dtype differs: {ours:?} on this side, {theirs:?} on the peer's; configure both pools alike")]
    DtypeMismatch {
        /// Our type.
        ours: String,
        /// The peer's type.
        theirs: String,
    },
    /// A channel between the two endpoints exists, or the peer's own dial wins (B3).
    #[error(
        "connection {winner:#018x} between the two endpoints goes on instead of this one; use the channel that it gives"
    )]
    Duplicate {
        /// The connection that is kept.
        winner: u64,
    },
    /// One side takes only shared memory and the other one only TCP, or one of the two is no soft device.
    #[error(
        "the transports have nothing in common: {ours} on this side, {theirs} on the peer's; choose the same on both (soft-auto takes tcp and shm)"
    )]
    TransportMismatch {
        /// Ours, as [`Device::transport`](crate::device::Device::transport) names it, and whether it keeps order.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// The transport that was asked for does not reach the peer.
    #[error("{transport} was asked for and does not reach the peer: {cause}; {fix}")]
    NoPath {
        /// The transport.
        transport: &'static str,
        /// Why it does not.
        cause: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The two sides have no way in common.
    #[error("the two sides do not fit together: {what}")]
    Unsupported {
        /// What is missing, with both sides' values and the fix.
        what: String,
    },
    /// What this side wants to say of itself is outside of what a hello can hold.
    #[error("this side's configuration does not fit in a hello: {what}; correct it")]
    Invalid {
        /// What is wrong.
        what: String,
    },
    /// This side could not create or connect what a channel needs.
    #[error("the channel's resources could not be set up")]
    Resources {
        /// What failed, and the fix.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No file descriptor is left for a socket or a queue of this side.
    #[error(
        "no file descriptor is left for the channel{}; raise the limit (`ulimit -n`), or close channels",
        OpenFiles(limit)
    )]
    Descriptors {
        /// The most that this process may have open, as `ulimit -n` prints it; the host has a limit of its own in
        /// `/proc/sys/fs/file-max`. `None` where it is not known, or there is none.
        limit: Option<u64>,
        /// What could not be had.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The listening side cannot take one more channel now, for want of descriptors, memory or what a device has.
    #[error("the listening side cannot take one more channel now; retry later")]
    Busy,
    /// This side connects more often than the listener allows one address.
    #[error(
        "the listener takes {limit} connects a second from one address; connect less often, or raise PeerLimits::connects_per_second there"
    )]
    TooOften {
        /// Connects a second.
        limit: u32,
    },
    /// The peer is closing.
    #[error("the peer is closing; connect to another one, or retry when it is back")]
    Closing,
    /// The peer refused our hello as malformed.
    #[error("the peer found this side's hello malformed: {what}; run one landfall version on both")]
    RefusedAsMalformed {
        /// What the peer says.
        what: String,
    },
    /// Private data above what the connection manager's message holds.
    #[error("{len} bytes of private data, {of} carries at most {limit}; send the rest over the connection")]
    PrivateDataTooLong {
        /// The message.
        of: &'static str,
        /// Bytes given.
        len: usize,
        /// The most that it carries.
        limit: usize,
    },
    /// RDMA_CM finds no way to the address.
    #[error(
        "{stage}: {addr} cannot be reached from {device}; check the address, the link and the route to it"
    )]
    Unreachable {
        /// What was asked.
        stage: Stage,
        /// The address.
        addr: SocketAddr,
        /// The device that was to be used.
        device: String,
        /// What RDMA_CM says.
        #[source]
        source: io::Error,
    },
    /// The address is of another device than the one that was opened, or the way to it leads over another one.
    #[error(
        "{addr} belongs to {found}, and not to {device}; use an address of {device}, or open the other device"
    )]
    OtherDevice {
        /// A local address, or the one that was to be reached.
        addr: SocketAddr,
        /// The device that was to be used, with its port.
        device: String,
        /// Where RDMA_CM leads, with its port.
        found: String,
    },
    /// An IPv6 link-local address that does not say of which interface it is.
    #[error(
        "{addr} is link-local and does not say of which interface: add the interface's index (`ip link` has it), as in [fe80::1%2]:{}",
        addr.port()
    )]
    NoScope {
        /// The address.
        addr: SocketAddr,
    },
    /// No network interface of the device has an address from which the peer's could be reached.
    #[error(
        "{device} has no address of the family of {addr} to connect from; give its network interface one"
    )]
    NoLocalAddress {
        /// The device.
        device: String,
        /// The address that was to be reached.
        addr: SocketAddr,
    },
    /// RDMA_CM failed.
    #[error("{stage}: {what} failed{}", manager_fix(source))]
    Manager {
        /// What was going on.
        stage: Stage,
        /// The call or the event.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The device was removed meanwhile.
    #[error("{stage}: {device} was removed; open another device, or wait until it is back")]
    DeviceRemoved {
        /// What was going on.
        stage: Stage,
        /// The device.
        device: String,
    },
    /// The listening side rejected the connect request.
    #[error("{addr} rejected the connect request: {reason}")]
    PeerRejected {
        /// The address that was asked.
        addr: SocketAddr,
        /// What the connection manager says of the reason.
        reason: String,
        /// What the listening program said, padded with zeros or not; empty where it was not the program.
        private_data: Vec<u8>,
    },
    /// The peer refused with a code that this version does not know.
    #[error("the peer refused with code {code}: {text:?}; run one landfall version on both")]
    Rejected {
        /// The code.
        code: u16,
        /// The peer's words.
        text: String,
    },
}

/// As text where it is some: whoever reads it knows `HTTP` and `SSH-`.
fn first_bytes(got: u32) -> String {
    let bytes = got.to_le_bytes();
    match std::str::from_utf8(&bytes) {
        Ok(text) if bytes.iter().all(|b| b.is_ascii_graphic() || *b == b' ') => format!("{text:?}"),
        _ => format!("{got:#010x}"),
    }
}

impl ConnectError {
    /// Who has to change something for a retry to succeed.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Address { .. }
            | Self::AddrInUse { .. }
            | Self::Invalid { .. }
            | Self::AdmissionRequired { .. }
            | Self::TlsByManager { .. }
            | Self::PrivateDataTooLong { .. }
            | Self::OtherDevice { .. }
            | Self::NoScope { .. }
            | Self::NoLocalAddress { .. }
            | Self::Resources { .. }
            | Self::Descriptors { .. }
            | Self::RefusedAsMalformed { .. } => Fault::Local,
            Self::NotLandfall { .. }
            | Self::TooLarge { .. }
            | Self::Truncated { .. }
            | Self::Malformed { .. }
            | Self::NotAuthentic { .. }
            | Self::Evicted { .. }
            | Self::Unexpected { .. } => Fault::Peer,
            Self::Version { .. }
            | Self::AdmissionMismatch { .. }
            | Self::UnknownKey { .. }
            | Self::RefusedAsNotAuthentic
            | Self::Tls { .. }
            | Self::RefusedByTls { .. }
            | Self::NotAdmitted { .. }
            | Self::IdentityMismatch { .. }
            | Self::LayoutMismatch { .. }
            | Self::DtypeMismatch { .. }
            | Self::TransportMismatch { .. }
            | Self::NoPath { .. }
            | Self::Duplicate { .. }
            | Self::Unsupported { .. }
            | Self::PeerRejected { .. }
            | Self::Rejected { .. } => Fault::Incompatible,
            Self::Io { source, .. } if is_exhaustion(source) => Fault::Local,
            Self::Resolve { .. }
            | Self::Unreachable { .. }
            | Self::Manager { .. }
            | Self::DeviceRemoved { .. }
            | Self::Refused { .. }
            | Self::Timeout { .. }
            | Self::Io { .. }
            | Self::Closed { .. }
            | Self::Busy
            | Self::TooOften { .. }
            | Self::Closing => Fault::Environment,
        }
    }

    /// An error of the socket at `stage`; a peer that went away is [`ConnectError::Closed`].
    pub(crate) fn io(stage: Stage, source: io::Error) -> Self {
        use io::ErrorKind as K;
        #[cfg(feature = "tls")]
        let source = match Self::tls(stage, source) {
            Ok(found) => return found,
            Err(source) => source,
        };
        match source.kind() {
            K::ConnectionReset | K::BrokenPipe | K::UnexpectedEof if stage != Stage::Dial => {
                Self::Closed { stage }
            }
            _ if is_descriptors(&source) => Self::no_descriptor(source.into()),
            _ => Self::Io { stage, source },
        }
    }

    pub(crate) fn resources(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let source = source.into();
        let first: &(dyn std::error::Error + 'static) = &*source;
        let mut causes = std::iter::successors(Some(first), |error| error.source());
        if causes.any(|error| error.downcast_ref().is_some_and(is_descriptors)) {
            return Self::no_descriptor(source);
        }
        Self::Resources { source }
    }

    fn no_descriptor(source: Box<dyn std::error::Error + Send + Sync>) -> Self {
        Self::Descriptors { limit: limits::open_files().ok().flatten(), source }
    }

    /// A queue pair could not be connected.
    pub(crate) fn queue_pair(error: QpError) -> Self {
        match error {
            QpError::NoPath { transport, cause, fix, .. } => Self::NoPath { transport, cause, fix },
            other => Self::resources(other),
        }
    }

    pub(crate) fn malformed(stage: Stage, what: impl fmt::Display) -> Self {
        Self::Malformed { stage, what: what.to_string() }
    }
}

/// The address that was dialled, as words of a message.
struct At<'a>(&'a Option<SocketAddr>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |addr| write!(f, " with {addr}"))
    }
}

/// The limit of open files, as words of a message.
struct OpenFiles<'a>(&'a Option<u64>);

impl fmt::Display for OpenFiles<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |limit| write!(f, " (this process may have {limit} open files)"))
    }
}

/// What to do about RDMA_CM's `error`, as the end of a message.
fn manager_fix(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "; let this user read and write /dev/infiniband/*, and use the port (below 1024 it takes CAP_NET_BIND_SERVICE)"
        }
        Some(libc::EMFILE | libc::ENFILE) => "; raise the limit of open files (`ulimit -n`)",
        Some(libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS) => {
            "; raise the limits of locked memory and of threads (`ulimit -l`, `ulimit -u`), or close connections"
        }
        Some(libc::ENODEV | libc::ENXIO | libc::EIO) => {
            "; check that the device is there and its link up (`rdma link`), or open another one"
        }
        Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT) => {
            "; update the kernel and rdma-core, or open another device"
        }
        Some(libc::ECONNRESET | libc::ECONNABORTED | libc::EPIPE | libc::EPROTO) => {
            "; the connection broke: check the peer's log, and retry"
        }
        _ => "",
    }
}

/// This process or host is out of descriptors.
fn is_descriptors(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// This process or host is out of descriptors, memory or ports.
pub(crate) fn is_exhaustion(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL | libc::EAGAIN)
    )
}
