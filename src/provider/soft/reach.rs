//! Which transport reaches a peer, and why. What is chosen is told by [`SoftQp::path`](super::SoftQp::path): no fallback is silent.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;

use socket2::Socket;

use super::SoftDevice;
use super::frame::Preamble;
use super::link::{self, Stream};
use super::shm::{self, ShmLink};
use crate::device::SoftTransport;
use crate::error::QpError;
use crate::provider::QpAddress;

/// The transport, and why it is that one.
pub(super) type Path = (&'static str, Cow<'static, str>);

const ASKED: &str = "it was asked for";
const LOCAL: &str = "both ends are on this host";

/// What has become of a dial.
pub(super) enum Dialed {
    Tcp(Socket),
    Shm(Box<ShmLink>),
    /// By TCP: nobody listens there any more.
    Refused,
}

/// Before there is a connection.
pub(super) fn before(transport: SoftTransport) -> Path {
    match transport {
        SoftTransport::Tcp => ("tcp", ASKED.into()),
        SoftTransport::Shm => ("shm", ASKED.into()),
        SoftTransport::Auto => ("auto", "the queue pair is not connected yet".into()),
    }
}

/// The peer has come in by `stream`.
pub(super) fn came(transport: SoftTransport, stream: &Stream) -> Path {
    match (transport, stream) {
        (SoftTransport::Auto, Stream::Shm(_)) => ("shm", LOCAL.into()),
        (SoftTransport::Auto, Stream::Tcp(_)) => {
            let why =
                "the peer came by it: it takes TCP only, or does not see this process's network namespace";
            ("tcp", why.into())
        }
        (_, Stream::Shm(_)) => ("shm", ASKED.into()),
        (_, Stream::Tcp(_)) => ("tcp", ASKED.into()),
    }
}

/// Refuses a peer that has no transport in common with this side, whichever of them dials.
pub(super) fn check(qp_num: u32, ours: SoftTransport, remote: &QpAddress) -> Result<(), QpError> {
    let (takes_tcp, takes_shm) = (remote.soft_port != 0, remote.soft_local != 0);
    match ours {
        SoftTransport::Shm if !takes_shm => Err(QpError::NoPath {
            qp_num,
            transport: "shm",
            cause: "the peer takes TCP only".into(),
            fix: "let the peer take shared memory (transport=auto or shm), or take TCP here (transport=auto or tcp)",
        }),
        SoftTransport::Tcp if takes_shm && !takes_tcp => Err(QpError::NoPath {
            qp_num,
            transport: "tcp",
            cause: "the peer takes shared memory only".into(),
            fix: "let the peer take TCP (transport=auto or tcp), or take shared memory here (transport=auto or shm)",
        }),
        _ => Ok(()),
    }
}

/// Dials: shared memory first, where both sides take it, and TCP where that does not reach the peer and is allowed.
pub(super) fn dial(
    qp_num: u32,
    device: &SoftDevice,
    remote: &QpAddress,
    hello: Preamble,
) -> Result<(Dialed, Path), QpError> {
    let transport = device.transport;
    let why = match transport {
        SoftTransport::Tcp => Cow::Borrowed(ASKED),
        _ if remote.soft_local == 0 => "the peer takes TCP only".into(),
        SoftTransport::Auto | SoftTransport::Shm => match shm::dial(remote.soft_local, hello) {
            Ok(link) => {
                let why = if transport == SoftTransport::Shm { ASKED } else { LOCAL };
                return Ok((Dialed::Shm(Box::new(link)), ("shm", why.into())));
            }
            Err(e) => no_door(&e),
        },
    };
    if transport == SoftTransport::Shm || remote.soft_port == 0 {
        return Err(QpError::NoPath {
            qp_num,
            transport: "shm",
            cause: why.into_owned(),
            fix: "run both ends on one host and in one network namespace, or let both take TCP (transport=auto)",
        });
    }
    let to = SocketAddr::new(link::from_gid(remote.gid), remote.soft_port);
    let dialed = match link::dial(device.address, to) {
        Ok(socket) => Dialed::Tcp(socket),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Dialed::Refused,
        Err(source) => return Err(QpError::Os { what: "dialling the peer of a queue pair", source }),
    };
    Ok((dialed, ("tcp", why)))
}

/// Why a peer that takes shared memory was not reached by it.
fn no_door(e: &io::Error) -> Cow<'static, str> {
    match e.kind() {
        io::ErrorKind::ConnectionRefused => {
            "no listener of the peer in this network namespace: it is on another host, in another namespace, or gone".into()
        }
        io::ErrorKind::WouldBlock => "too many others knock at the peer's door".into(),
        _ => format!("shared memory failed: {e}").into(),
    }
}
