//! What RDMA_CM's error numbers, events and reasons mean, as errors with a fix.

use std::io;
use std::net::SocketAddr;

use super::super::error::{ConnectError, Stage};
use crate::device::Device;
use crate::provider::verbs::{CmEvent, CmEventKind, CmId, NotReady, reject_reason, status_error};

/// InfiniBand's reason for a rejection by the listening program, and for one because there is none.
const CONSUMER: i32 = 28;
const NO_LISTENER: i32 = 8;

/// Whether RDMA_CM has led to `device`, by way of `addr`. Names both where it has not.
pub(super) fn device_of(id: &CmId, device: &Device, addr: SocketAddr) -> Result<(), ConnectError> {
    let found = id.device();
    // The port is 0 as long as there is no choice.
    let ours =
        |(name, port): &(String, u8)| name == device.name() && (*port == 0 || Some(*port) == device.port());
    if found.as_ref().is_some_and(ours) {
        return Ok(());
    }
    let found = found.map_or("no RDMA device".to_owned(), |(name, port)| format!("port {port} of {name}"));
    Err(ConnectError::OtherDevice { addr, device: port_of(device), found })
}

fn port_of(device: &Device) -> String {
    format!("port {} of {}", device.port().unwrap_or(0), device.name())
}

/// A bind was refused.
pub(super) fn failed_bind(error: io::Error, addr: SocketAddr, device: &Device) -> ConnectError {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => ConnectError::AddrInUse { addr },
        // An address of no interface, or of one without an RDMA device.
        Some(libc::EADDRNOTAVAIL | libc::ENODEV) => {
            ConnectError::OtherDevice { addr, device: port_of(device), found: "no RDMA device".to_owned() }
        }
        _ => ConnectError::Manager { stage: Stage::Listen, what: "rdma_bind_addr", source: error },
    }
}

/// A call on the way to `to` was refused. iWARP connects in it.
pub(super) fn failed_call(
    error: io::Error,
    what: &'static str,
    stage: Stage,
    to: SocketAddr,
    device: &Device,
) -> ConnectError {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => ConnectError::Refused { addr: to },
        _ if is_unreachable(&error) => unreachable(error, stage, to, device),
        _ => ConnectError::Manager { stage, what, source: error },
    }
}

/// The acceptance was refused: by the state of a request that the client has withdrawn meanwhile (RDMA_CM does not tell of
/// that before), or for another reason.
pub(super) fn failed_reply(error: io::Error, stage: Stage) -> ConnectError {
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOTCONN | libc::ECONNRESET) => {
            tracing::debug!(%error, "a request cannot be accepted any more");
            ConnectError::Closed { stage }
        }
        _ => ConnectError::Manager { stage, what: "rdma_accept", source: error },
    }
}

/// The queue pair could not be made ready.
pub(super) fn not_ready(error: NotReady, stage: Stage) -> ConnectError {
    match error {
        NotReady::Over(error) => failed_reply(error, stage),
        NotReady::Refused(error) => ConnectError::resources(error),
    }
}

fn is_unreachable(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ENETDOWN | libc::EHOSTDOWN)
    )
}

fn unreachable(source: io::Error, stage: Stage, addr: SocketAddr, device: &Device) -> ConnectError {
    ConnectError::Unreachable { stage, addr, device: device.name().to_owned(), source }
}

/// What an event means that is not the next step of an accept. A client that gives up withdraws its request by a
/// rejection.
pub(super) fn failed_accept(event: CmEvent, stage: Stage, peer: SocketAddr, device: &Device) -> ConnectError {
    match event.kind {
        CmEventKind::Rejected => ConnectError::Closed { stage },
        _ => failed_event(event, stage, peer, device),
    }
}

/// What an event means that is not the next step.
pub(super) fn failed_event(event: CmEvent, stage: Stage, to: SocketAddr, device: &Device) -> ConnectError {
    let manager = |what, status| ConnectError::Manager { stage, what, source: status_error(status) };
    match event.kind {
        CmEventKind::AddrError | CmEventKind::RouteError | CmEventKind::Unreachable => {
            unreachable(status_error(event.status), stage, to, device)
        }
        CmEventKind::Rejected => rejected(event, to),
        CmEventKind::ConnectError => manager("the connection", event.status),
        CmEventKind::DeviceRemoval => ConnectError::DeviceRemoved { stage, device: device.name().to_owned() },
        CmEventKind::Disconnected | CmEventKind::TimewaitExit => ConnectError::Closed { stage },
        _ => manager("RDMA_CM's order of events", event.status),
    }
}

fn rejected(event: CmEvent, to: SocketAddr) -> ConnectError {
    // iWARP tells a reset of the connection: the program's word, where it is one, is in the private data.
    let reset = event.status == -libc::ECONNRESET;
    match event.status {
        NO_LISTENER => ConnectError::Refused { addr: to },
        status if status == -libc::ECONNREFUSED && event.private.is_empty() => {
            ConnectError::Refused { addr: to }
        }
        status => {
            let reason = reject_reason(if reset { CONSUMER } else { status });
            ConnectError::PeerRejected { addr: to, reason, private_data: event.private }
        }
    }
}
