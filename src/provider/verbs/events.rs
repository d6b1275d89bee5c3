//! A device's asynchronous events, and its removal.
//!
//! Two sources. The context's descriptor has what the driver says (`ibv_get_async_event`); each event is acknowledged at
//! once, since the destruction of its object waits for that. And the kernel announces over netlink, to everybody, that
//! a device goes: a driver that cannot take a device away from under its users (rxe and siw, for two) sends them no event, and
//! its removal waits until they have closed it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::calls::check;
use super::context::Context;
use super::sys::*;
use crate::provider::events::{AsyncEvent, Events, ObjectId};
use crate::reactor::events::EventSource;

/// Reads the events of one device.
pub(super) struct Reader {
    context: Arc<Context>,
    /// `None` where there is no such socket; then a removal shows in the driver's own events only.
    removals: Option<Removals>,
    events: Arc<Events>,
}

impl Reader {
    pub(super) fn new(context: &Arc<Context>, events: &Arc<Events>) -> io::Result<Self> {
        context.async_events_do_not_block()?;
        let removals = Removals::watch(context.user_device()).inspect_err(|error| {
            tracing::warn!(%error, device = %events.device(), "the removal of the device may go unnoticed");
        });
        Ok(Self { context: context.clone(), removals: removals.ok(), events: events.clone() })
    }

    /// Copies of what becomes readable.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let removals = self.removals.as_ref().map(|r| r.socket.as_fd());
        let all = std::iter::once(self.context.async_fd()).chain(removals);
        all.map(|fd: BorrowedFd<'_>| fd.try_clone_to_owned()).collect()
    }
}

impl EventSource for Reader {
    fn drain(&self) {
        loop {
            match self.context.next_event() {
                Ok(Some(event)) => self.events.dispatch(event),
                // One that nobody needs to hear of.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The kernel has taken the device from under us.
                    tracing::debug!(%error, device = %self.events.device(), "no more events");
                    self.events.dispatch(AsyncEvent::DeviceRemoved);
                    break;
                }
            }
        }
        if self.removals.as_ref().is_some_and(|r| r.seen(&self.context)) {
            self.events.dispatch(AsyncEvent::DeviceRemoved);
        }
    }
}

impl Context {
    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: an open context; its descriptor is open until it is closed, and the result borrows it.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    fn async_events_do_not_block(&self) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let fd = self.async_fd().as_raw_fd();
        // SAFETY: plain calls on a descriptor that the context owns.
        let rc = unsafe {
            match libc::fcntl(fd, libc::F_GETFL) {
                -1 => -1,
                flags => libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK),
            }
        };
        if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes one event and acknowledges it. `None` for one that says nothing which a user of queue pairs must know.
    fn next_event(&self) -> io::Result<Option<AsyncEvent>> {
        // SAFETY: integers and a union of pointers and an integer, for which zero is a value.
        let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the struct is written when the call succeeds.
        check(unsafe { self.lib.ibv_get_async_event(self.raw(), &mut event) })?;
        // SAFETY: an event that was taken and not acknowledged yet: the object that it is of is not freed before.
        let meaning = unsafe { meaning(&event) };
        // SAFETY: taken above, acknowledged once.
        unsafe { self.lib.ibv_ack_async_event(&mut event) };
        Ok(meaning)
    }
}

/// # Safety
/// `event` was filled by `ibv_get_async_event` and is not acknowledged yet.
unsafe fn meaning(event: &ibv_async_event) -> Option<AsyncEvent> {
    // SAFETY: by its type the event is of a port, whose member this is.
    let port = || u8::try_from(unsafe { event.element.port_num }).unwrap_or(0);
    let qp = || {
        // SAFETY: by its type the event is of a queue pair, which is live until the acknowledgement.
        let qp = unsafe { &*event.element.qp };
        (ObjectId::from_raw(qp.qp_context as u64), qp.qp_num)
    };
    let qp_failed = |name| {
        let (id, qp_num) = qp();
        Some(AsyncEvent::QpFailed { id, qp_num, name })
    };
    let changed = |name| Some(AsyncEvent::PortChanged { port: port(), name });
    match event.event_type {
        IBV_EVENT_PORT_ERR => Some(AsyncEvent::PortDown { port: port() }),
        IBV_EVENT_PORT_ACTIVE => Some(AsyncEvent::PortActive { port: port() }),
        IBV_EVENT_LID_CHANGE => changed("IBV_EVENT_LID_CHANGE"),
        IBV_EVENT_PKEY_CHANGE => changed("IBV_EVENT_PKEY_CHANGE"),
        IBV_EVENT_GID_CHANGE => changed("IBV_EVENT_GID_CHANGE"),
        IBV_EVENT_QP_FATAL => qp_failed("IBV_EVENT_QP_FATAL"),
        IBV_EVENT_QP_REQ_ERR => qp_failed("IBV_EVENT_QP_REQ_ERR"),
        IBV_EVENT_QP_ACCESS_ERR => qp_failed("IBV_EVENT_QP_ACCESS_ERR"),
        IBV_EVENT_QP_LAST_WQE_REACHED => Some(AsyncEvent::LastWqe { qp_num: qp().1 }),
        IBV_EVENT_CQ_ERR => {
            // SAFETY: by its type the event is of a completion queue, which is live until the acknowledgement.
            let raw = unsafe { (*event.element.cq).cq_context } as u64;
            Some(AsyncEvent::CqFailed { id: ObjectId::from_raw(raw), name: "IBV_EVENT_CQ_ERR" })
        }
        IBV_EVENT_SRQ_ERR => {
            // SAFETY: by its type the event is of a shared receive queue, which is live until the acknowledgement.
            let raw = unsafe { (*event.element.srq).srq_context } as u64;
            Some(AsyncEvent::SrqFailed { id: ObjectId::from_raw(raw), name: "IBV_EVENT_SRQ_ERR" })
        }
        IBV_EVENT_SRQ_LIMIT_REACHED => Some(AsyncEvent::SrqLimit),
        IBV_EVENT_DEVICE_FATAL => Some(AsyncEvent::DeviceFatal),
        // Path migration, a first packet before the connection was established, a drained send queue, the subnet manager.
        _ => None,
    }
}

/// The kernel's announcements, of which one is waited for: that the device is taken away.
struct Removals {
    socket: Socket,
    device: String,
}

impl Removals {
    fn watch(device: String) -> io::Result<Self> {
        let domain = Domain::from(libc::AF_NETLINK);
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::from(libc::NETLINK_KOBJECT_UEVENT)))?;
        socket.set_nonblocking(true)?;
        // SAFETY: the storage is large enough for every kind of address, and aligned for it; the length is that of what
        // was written.
        let ((), address) = unsafe {
            SockAddr::try_init(|storage, len| {
                let to = storage.cast::<libc::sockaddr_nl>();
                (*to).nl_family = libc::AF_NETLINK as libc::sa_family_t;
                // The kernel's own announcements; those of udev are another group.
                (*to).nl_groups = 1;
                *len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
                Ok(())
            })
        }?;
        socket.bind(&address)?;
        Ok(Self { socket, device })
    }

    /// Reads all that is there.
    fn seen(&self, context: &Context) -> bool {
        let mut seen = false;
        let mut buffer = [0; 4096];
        loop {
            match io::Read::read(&mut (&self.socket), &mut buffer) {
                Ok(n) => seen |= announces_removal(&buffer[..n], &self.device),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Announcements were lost. What they said can be seen.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => seen |= context.is_removed(),
                Err(_) => return seen,
            }
        }
    }
}

/// Whether an announcement, of strings that each end in a NUL, says that `device` goes.
fn announces_removal(message: &[u8], device: &str) -> bool {
    let has = |key: &str, value: &dyn Fn(&[u8]) -> bool| {
        let mut fields = message.split(|&b| b == 0);
        fields.any(|field| field.strip_prefix(key.as_bytes()).is_some_and(value))
    };
    has("ACTION=", &|v| v == b"remove")
        && has("SUBSYSTEM=", &|v| v == b"infiniband_verbs")
        && has("DEVPATH=", &|v| v.rsplit(|&b| b == b'/').next() == Some(device.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(action: &str, subsystem: &str, path: &str) -> Vec<u8> {
        format!("{action}@{path}\0ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=7\0")
            .into_bytes()
    }

    #[test]
    fn r7_only_the_removal_of_this_device_is_one() {
        let path = "/devices/virtual/infiniband_verbs/uverbs1";
        assert!(announces_removal(&announcement("remove", "infiniband_verbs", path), "uverbs1"));
        for (action, subsystem, path) in [
            ("add", "infiniband_verbs", path),
            ("remove", "infiniband", path),
            ("remove", "infiniband_verbs", "/devices/virtual/infiniband_verbs/uverbs10"),
            ("remove", "infiniband_verbs", "/devices/virtual/infiniband_verbs/uverbs"),
        ] {
            assert!(!announces_removal(&announcement(action, subsystem, path), "uverbs1"), "{action} {path}");
        }
        for garbage in [&b""[..], b"\0\0\0", b"ACTION=remove", &[0xff; 4096]] {
            assert!(!announces_removal(garbage, "uverbs1"));
        }
    }

    fn event(event_type: ibv_event_type) -> ibv_async_event {
        // SAFETY: as in `next_event`.
        let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
        event.event_type = event_type;
        event
    }

    #[test]
    fn r3_ports_and_devices_are_told_and_path_migration_is_not() {
        let mut port = event(IBV_EVENT_PORT_ERR);
        port.element.port_num = 2;
        // SAFETY: filled as the library fills them.
        unsafe {
            assert_eq!(meaning(&port), Some(AsyncEvent::PortDown { port: 2 }));
            port.event_type = IBV_EVENT_PORT_ACTIVE;
            assert_eq!(meaning(&port), Some(AsyncEvent::PortActive { port: 2 }));
            port.event_type = IBV_EVENT_GID_CHANGE;
            assert!(matches!(meaning(&port), Some(AsyncEvent::PortChanged { port: 2, .. })));
            assert_eq!(meaning(&event(IBV_EVENT_DEVICE_FATAL)), Some(AsyncEvent::DeviceFatal));
            for ignored in [IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_SM_CHANGE, 1000] {
                assert_eq!(meaning(&event(ignored)), None);
            }
        }
    }

    #[test]
    fn r5_objects_are_known_by_what_they_were_made_with_and_not_by_number() {
        let id = ObjectId::next();
        // SAFETY: plain integers, pointers and locks of C, for which zero is a value; nothing is called with it.
        let mut qp: ibv_qp = unsafe { std::mem::zeroed() };
        qp.qp_context = std::ptr::without_provenance_mut(id.get() as usize);
        qp.qp_num = 17;
        let mut failed = event(IBV_EVENT_QP_FATAL);
        failed.element.qp = &mut qp;
        // SAFETY: the queue pair is live.
        let meaning = unsafe { meaning(&failed) };
        let name = "IBV_EVENT_QP_FATAL";
        assert_eq!(meaning, Some(AsyncEvent::QpFailed { id: Some(id), qp_num: 17, name }));
    }
}
