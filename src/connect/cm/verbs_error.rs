//! What RDMA_CM's error numbers, events and reasons mean, as errors with a fix.

use std::io;
use std::net::SocketAddr;

use super::super::error::{ConnectError, Stage};
use super::source::lacks_scope;
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
        Some(libc::EINVAL) if lacks_scope(&addr) => ConnectError::NoScope { addr },
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
        Some(libc::EINVAL) if lacks_scope(&to) => ConnectError::NoScope { addr: to },
        _ if is_unreachable(&error) => unreachable(error, stage, to, device),
        _ => ConnectError::Manager { stage, what, source: error },
    }
}

/// The acceptance was refused: by the state of a request that the client has withdrawn meanwhile (RDMA_CM does not tell of
/// that before), or for another reason. `is_over` asks RDMA_CM which it was, where the number says either.
pub(super) fn failed_reply(error: io::Error, stage: Stage, is_over: impl FnOnce() -> bool) -> ConnectError {
    let over = match error.raw_os_error() {
        Some(libc::ENOTCONN | libc::ECONNRESET) => true,
        Some(libc::EINVAL) => is_over(),
        _ => false,
    };
    match over {
        true => {
            tracing::debug!(%error, "a request cannot be accepted any more");
            ConnectError::Closed { stage }
        }
        false => ConnectError::Manager { stage, what: "rdma_accept", source: error },
    }
}

/// The queue pair could not be made ready.
pub(super) fn not_ready(error: NotReady, stage: Stage) -> ConnectError {
    match error {
        NotReady::Over(error) => failed_reply(error, stage, || true),
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
    let CmEvent { status, private, .. } = event;
    // iWARP tells of a reset or refused connection. What the program said, where it was one, is in the private data.
    let program = match status {
        NO_LISTENER => return ConnectError::Refused { addr: to },
        status if status == -libc::ECONNREFUSED && private.is_empty() => {
            return ConnectError::Refused { addr: to };
        }
        status => status == CONSUMER || status == -libc::ECONNREFUSED || status == -libc::ECONNRESET,
    };
    let reason = reject_reason(if program { CONSUMER } else { status });
    let private_data = if program { private } else { Vec::new() };
    ConnectError::PeerRejected { addr: to, reason, private_data }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SoftConfig;

    const STAGE: Stage = Stage::Reply;

    fn error_of(kind: CmEventKind, status: i32, private: &[u8]) -> ConnectError {
        let event = CmEvent {
            kind,
            status,
            responder_resources: 0,
            initiator_depth: 0,
            private: private.to_vec(),
            request: None,
        };
        let device = Device::soft(SoftConfig::new()).unwrap();
        failed_event(event, STAGE, SocketAddr::from(([10, 0, 0, 1], 7)), &device)
    }

    #[test]
    fn b4_each_rejection_says_by_whom() {
        let rejected = |status, private: &[u8]| error_of(CmEventKind::Rejected, status, private);
        assert!(matches!(rejected(8, &[0; 148]), ConnectError::Refused { .. }));
        assert!(matches!(rejected(-libc::ECONNREFUSED, &[]), ConnectError::Refused { .. }));
        for status in [28, -libc::ECONNRESET, -libc::ECONNREFUSED] {
            let ConnectError::PeerRejected { reason, private_data, .. } = rejected(status, b"no") else {
                panic!("{status}")
            };
            assert!(reason.contains("program"), "{reason}");
            assert_eq!(private_data, b"no");
        }
        // The manager's own, whose private data is nobody's.
        let ConnectError::PeerRejected { reason, private_data, .. } = rejected(10, &[0; 148]) else {
            panic!()
        };
        assert!(reason.contains("stale") && private_data.is_empty(), "{reason}");
    }

    #[test]
    fn b4_each_event_that_ends_a_connect_is_an_error_of_its_own() {
        let text = |kind, status| {
            let error = error_of(kind, status, &[]);
            (error.to_string(), format!("{error:?}"))
        };
        for kind in [CmEventKind::AddrError, CmEventKind::RouteError, CmEventKind::Unreachable] {
            let (said, debug) = text(kind, -libc::EHOSTUNREACH);
            assert!(said.contains("10.0.0.1:7") && debug.starts_with("Unreachable"), "{said}");
        }
        assert!(text(CmEventKind::DeviceRemoval, 0).1.starts_with("DeviceRemoved"));
        assert!(text(CmEventKind::ConnectError, -libc::EINVAL).1.starts_with("Manager"));
        assert!(text(CmEventKind::Disconnected, 0).1.starts_with("Closed"));
        // Out of order.
        assert!(text(CmEventKind::AddrResolved, 0).1.starts_with("Manager"));
    }

    #[test]
    fn b4_errors_of_calls_are_told_apart() {
        let device = Device::soft(SoftConfig::new()).unwrap();
        let addr = SocketAddr::from(([10, 0, 0, 1], 7));
        let os = io::Error::from_raw_os_error;
        let call = |code| failed_call(os(code), "rdma_connect", STAGE, addr, &device);
        assert!(matches!(call(libc::ECONNREFUSED), ConnectError::Refused { .. }));
        assert!(matches!(call(libc::ETIMEDOUT), ConnectError::Unreachable { .. }));
        assert!(matches!(call(libc::EINVAL), ConnectError::Manager { .. }));
        let bind = |code| failed_bind(os(code), addr, &device);
        assert!(matches!(bind(libc::EADDRINUSE), ConnectError::AddrInUse { .. }));
        assert!(matches!(bind(libc::ENODEV), ConnectError::OtherDevice { .. }));
        assert!(matches!(bind(libc::EADDRNOTAVAIL), ConnectError::OtherDevice { .. }));
        assert!(matches!(bind(libc::EACCES), ConnectError::Manager { .. }));
        // What is RDMA_CM's own comes with a fix where the number tells one, and nothing is said where none does.
        assert!(bind(libc::EACCES).to_string().contains("/dev/infiniband"));
        assert!(call(libc::ENOMEM).to_string().contains("ulimit"));
        assert!(call(libc::EINVAL).to_string().ends_with("rdma_connect failed"));
        assert!(call(libc::ECONNREFUSED).to_string().contains("bootstraps differently"));
        // A link-local address without its interface.
        let addr = "[fe80::1]:7".parse().unwrap();
        let bound = failed_bind(os(libc::EINVAL), addr, &device);
        let called = failed_call(os(libc::EINVAL), "rdma_resolve_addr", STAGE, addr, &device);
        for error in [bound, called] {
            assert!(matches!(error, ConnectError::NoScope { .. }), "{error:?}");
            assert!(error.to_string().contains("[fe80::1%2]:7"), "{error}");
        }
        let reply = |code, over| failed_reply(os(code), STAGE, || over);
        assert!(matches!(reply(libc::EINVAL, true), ConnectError::Closed { .. }));
        assert!(matches!(reply(libc::EINVAL, false), ConnectError::Manager { .. }));
        assert!(matches!(reply(libc::ECONNRESET, false), ConnectError::Closed { .. }));
        assert!(matches!(reply(libc::ENOMEM, true), ConnectError::Manager { .. }));
    }
}
