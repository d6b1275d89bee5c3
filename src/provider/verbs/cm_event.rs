//! Events of RDMA_CM, copied, and what their numbers mean.

use super::cm::CmId;
use super::sys_cm::*;

/// What has happened to an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CmEventKind {
    AddrResolved,
    AddrError,
    RouteResolved,
    RouteError,
    ConnectRequest,
    ConnectResponse,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    /// The end of an ended connection's quarantine.
    TimewaitExit,
    /// One that changes nothing for us: an address that moved, multicast.
    Other(u32),
}

/// An event of a reliable connection.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: CmEventKind,
    /// 0, an error number below 0, or InfiniBand's reason of a rejection.
    pub(crate) status: i32,
    /// READs that this side is asked to serve.
    pub(crate) responder_resources: u8,
    /// READs that this side may have outstanding.
    pub(crate) initiator_depth: u8,
    pub(crate) private: Vec<u8>,
    /// The identifier of a connect request.
    pub(crate) request: Option<CmId>,
}

impl CmEvent {
    /// # Safety
    /// `event` was given by `rdma_get_cm_event` for a reliable connection, and is not acknowledged yet.
    pub(super) unsafe fn copy(event: &rdma_cm_event) -> Self {
        let kind = kind(event.event);
        let mut this = Self {
            kind,
            status: event.status,
            responder_resources: 0,
            initiator_depth: 0,
            private: Vec::new(),
            request: None,
        };
        if kind.has_parameters() {
            // SAFETY: the port space is RDMA_PS_TCP, so that the parameters are those of a connection; librdmacm fills them in
            // for these events.
            let param = unsafe { &event.param.conn };
            this.responder_resources = param.responder_resources;
            this.initiator_depth = param.initiator_depth;
            if !param.private_data.is_null() {
                // SAFETY: the private data is part of the event, and as long as it says.
                let private = unsafe {
                    std::slice::from_raw_parts(
                        param.private_data.cast::<u8>(),
                        usize::from(param.private_data_len),
                    )
                };
                this.private = private.to_vec();
            }
        }
        this
    }

    pub(super) fn is_request(&self) -> bool {
        self.kind == CmEventKind::ConnectRequest
    }
}

impl CmEventKind {
    fn has_parameters(self) -> bool {
        matches!(
            self,
            Self::ConnectRequest
                | Self::ConnectResponse
                | Self::Rejected
                | Self::Established
                | Self::Disconnected
        )
    }
}

fn kind(event: rdma_cm_event_type) -> CmEventKind {
    use CmEventKind::*;
    match event {
        RDMA_CM_EVENT_ADDR_RESOLVED => AddrResolved,
        RDMA_CM_EVENT_ADDR_ERROR => AddrError,
        RDMA_CM_EVENT_ROUTE_RESOLVED => RouteResolved,
        RDMA_CM_EVENT_ROUTE_ERROR => RouteError,
        RDMA_CM_EVENT_CONNECT_REQUEST => ConnectRequest,
        RDMA_CM_EVENT_CONNECT_RESPONSE => ConnectResponse,
        RDMA_CM_EVENT_CONNECT_ERROR => ConnectError,
        RDMA_CM_EVENT_UNREACHABLE => Unreachable,
        RDMA_CM_EVENT_REJECTED => Rejected,
        RDMA_CM_EVENT_ESTABLISHED => Established,
        RDMA_CM_EVENT_DISCONNECTED => Disconnected,
        RDMA_CM_EVENT_DEVICE_REMOVAL => DeviceRemoval,
        RDMA_CM_EVENT_TIMEWAIT_EXIT => TimewaitExit,
        other => Other(other),
    }
}

/// InfiniBand's reasons of a rejection, as far as RDMA_CM leads to them.
pub(crate) fn reject_reason(status: i32) -> String {
    let words = match status {
        1 => "it has no queue pair left",
        2 => "it has no end-to-end context left",
        3 => "it has no resources left",
        4 => "its side timed out",
        5 => "it does not support the request",
        6 | 7 => "it does not know the connection (any more)",
        8 => "nothing listens there",
        9 => "it does not have this transport",
        10 => "the queue pair is in use already (stale connection)",
        11 => "it cannot be reached at this path's address",
        12..=14 => "the path's GID or LID is not one of its",
        15 => "it has not this path MTU",
        20..=23 => "it does not accept an attribute of the request",
        24 => "the connection is redirected to another port",
        26 => "the primary path's rate is not supported",
        28 => "the listening program rejected the request",
        33 => "the listening side's vendor code refused the request",
        status if status < 0 => {
            return format!("{}", std::io::Error::from_raw_os_error(status.saturating_neg()));
        }
        status => return format!("reason {status}"),
    };
    words.to_owned()
}

/// The status of an event as an error of the system.
pub(crate) fn status_error(status: i32) -> std::io::Error {
    match status {
        ..0 => std::io::Error::from_raw_os_error(status.saturating_neg()),
        0 => std::io::Error::from_raw_os_error(libc::ETIMEDOUT),
        _ => std::io::Error::other(format!("status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b4_a_rejection_is_put_in_words() {
        assert!(reject_reason(28).contains("program"));
        assert!(reject_reason(8).contains("listens"));
        assert!(reject_reason(-libc::ECONNRESET).contains("reset"));
        assert_eq!(reject_reason(77), "reason 77");
        assert!(!reject_reason(i32::MIN).is_empty());
        assert_eq!(status_error(-libc::EHOSTUNREACH).raw_os_error(), Some(libc::EHOSTUNREACH));
        let _ = (status_error(i32::MIN), status_error(3));
    }
}
