//! RDMA_CM's identifiers: the calls on librdmacm. What they do to queue pairs is in `cm_qp.rs`.
//!
//! Each identifier has an event channel of its own, non-blocking. An event is copied and acknowledged at once, so that
//! destroying never waits for one. What may block says so; futures are made of this in `connect::cm`.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use socket2::SockAddr;

use super::addresses::socket_addr;
use super::calls::{check, object};
use super::cm_event::CmEvent;
use super::load;
use super::qp::{self, Connecting};
use super::sys::*;
use super::sys_cm::*;
use crate::error::DeviceError;
use crate::provider::CmAttr;

/// An identifier and its channel, as librdmacm has them. Dropping destroys both, which may block.
struct Raw {
    lib: &'static LibRdmacm,
    id: Option<NonNull<rdma_cm_id>>,
    channel: NonNull<rdma_event_channel>,
    /// The queue pair that iWARP is connecting: let go of after the identifier.
    qp: Option<Connecting>,
}

// SAFETY: librdmacm's objects belong to no thread; who holds this is the only one that calls on them.
unsafe impl Send for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // SAFETY: created by or given to us, destroyed only here; every event of it was acknowledged.
            if let Err(error) = check(unsafe { self.lib.rdma_destroy_id(id.as_ptr()) }) {
                tracing::warn!(%error, "destroying an RDMA_CM identifier failed");
                return;
            }
        }
        // SAFETY: created by `Raw::channel`, destroyed only here, after its only identifier.
        unsafe { self.lib.rdma_destroy_event_channel(self.channel.as_ptr()) };
    }
}

impl Raw {
    /// A non-blocking channel without an identifier.
    fn channel() -> Result<Self, DeviceError> {
        let lib = load::rdmacm()?;
        let os = |what| move |source| DeviceError::Os { what, source };
        // SAFETY: a plain call; it takes nothing.
        let channel = object(unsafe { lib.rdma_create_event_channel() }).map_err(|e| os(opening(&e))(e))?;
        let this = Self { lib, id: None, channel, qp: None };
        // SAFETY: the channel's descriptor is open; a flag is set.
        let set = unsafe {
            let flags = libc::fcntl(this.fd(), libc::F_GETFL);
            if flags < 0 { flags } else { libc::fcntl(this.fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }
        };
        match set {
            ..0 => Err(os("making an RDMA_CM channel non-blocking")(io::Error::last_os_error())),
            _ => Ok(this),
        }
    }

    fn fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { self.channel.as_ref().fd }
    }

    /// The identifier. Every `Raw` of a `CmId` has one.
    fn id(&self) -> *mut rdma_cm_id {
        self.id.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }
}

/// What failed, with the fix. The library does not keep apart a file that is missing and one that it may not open.
fn opening(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => {
            "opening /dev/infiniband/rdma_cm (this process or host is at a limit: raise it, see `ulimit -a`)"
        }
        _ if Path::new("/dev/infiniband/rdma_cm").exists() => {
            "opening /dev/infiniband/rdma_cm, which is there (may this user read and write it? grant it by a udev rule, or pass the device into the container)"
        }
        _ => {
            "opening /dev/infiniband/rdma_cm, which is not there (load the module rdma_ucm, and pass the device into a container)"
        }
    }
}

/// An identifier of RDMA_CM. Dropping it destroys it on a thread of its own: a connection ends, a request is rejected, a
/// connect that is under way is given up.
pub(crate) struct CmId {
    /// One call at a time: librdmacm writes to an identifier without a lock. Taken by the drop only.
    raw: Mutex<Option<Raw>>,
    fd: RawFd,
}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CmId").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        let raw = self.raw.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // Without a thread the closure is dropped here, and with it what is to be destroyed.
        if let Err(error) =
            std::thread::Builder::new().name("landfall-cm".to_owned()).spawn(move || drop(raw))
        {
            tracing::debug!(%error, "an RDMA_CM identifier is destroyed in place");
        }
    }
}

/// The descriptor is readable when there is an event.
impl AsRawFd for CmId {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

/// A locked identifier.
struct Held<'a>(MutexGuard<'a, Option<Raw>>);

impl Held<'_> {
    fn raw(&self) -> &Raw {
        self.0.as_ref().expect("taken by the drop only")
    }

    fn lib(&self) -> &'static LibRdmacm {
        self.raw().lib
    }

    fn id(&self) -> *mut rdma_cm_id {
        self.raw().id()
    }

    /// What the library says of the identifier.
    fn says(&self) -> &rdma_cm_id {
        // SAFETY: the identifier is live, and the lock keeps calls away that write to it.
        unsafe { &*self.id() }
    }
}

impl CmId {
    fn of(raw: Raw) -> Self {
        let fd = raw.fd();
        Self { raw: Mutex::new(Some(raw)), fd }
    }

    fn hold(&self) -> Held<'_> {
        Held(self.raw.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A new identifier for reliable connections. May block: the first one opens every RDMA device.
    pub(crate) fn create() -> Result<Self, DeviceError> {
        let mut raw = Raw::channel()?;
        let mut id = std::ptr::null_mut();
        // SAFETY: the channel is live; the call writes the pointer.
        check(unsafe {
            raw.lib.rdma_create_id(raw.channel.as_ptr(), &mut id, std::ptr::null_mut(), RDMA_PS_TCP)
        })
        .map_err(|source| DeviceError::Os { what: "creating an RDMA_CM identifier", source })?;
        raw.id = NonNull::new(id);
        Ok(Self::of(raw))
    }

    /// Binds to a local address, and to the RDMA device that has it.
    pub(crate) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        let (held, addr) = (self.hold(), SockAddr::from(addr));
        // SAFETY: the identifier is live; the address is as long as its family demands, and is only read.
        check(unsafe { held.lib().rdma_bind_addr(held.id(), addr.as_ptr().cast_mut().cast()) })
    }

    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        let held = self.hold();
        // SAFETY: the identifier is live.
        check(unsafe { held.lib().rdma_listen(held.id(), backlog) })
    }

    /// The local address, once bound.
    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        let held = self.hold();
        // SAFETY: the library has filled in a socket address, or zeros, in a union with a storage that holds any.
        unsafe { socket_addr((&raw const held.says().route.addr.__bindgen_anon_1).cast()) }
    }

    /// The other side's address, once known.
    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        let held = self.hold();
        // SAFETY: as for the local address.
        unsafe { socket_addr((&raw const held.says().route.addr.__bindgen_anon_2).cast()) }
    }

    /// The RDMA device and the port that it is bound to. `None` for none, as on an unspecified address.
    pub(crate) fn device(&self) -> Option<(String, u8)> {
        let held = self.hold();
        let id = held.says();
        let context = NonNull::new(id.verbs)?;
        // SAFETY: librdmacm's own context of the device, open for as long as the identifier is bound to it; the name is
        // NUL-terminated.
        let name = unsafe { CStr::from_ptr((*context.as_ref().device).name.as_ptr()) };
        Some((name.to_string_lossy().into_owned(), id.port_num))
    }

    /// The ACK time-out that the other side is told. Kernels before 5.3 have no such option.
    pub(crate) fn set_ack_timeout(&self, mut code: u8) {
        let held = self.hold();
        let value: *mut c_void = (&raw mut code).cast();
        // SAFETY: the identifier is live; the option's value is one byte, which is only read.
        let set = check(unsafe {
            held.lib().rdma_set_option(
                held.id(),
                RDMA_OPTION_ID as c_int,
                RDMA_OPTION_ID_ACK_TIMEOUT as c_int,
                value,
                1,
            )
        });
        if let Err(error) = set {
            tracing::debug!(%error, "RDMA_CM takes no ACK time-out here");
        }
    }

    /// Starts to look for the way to `to`, from the address that it is bound to.
    pub(crate) fn resolve_addr(&self, to: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let (held, to) = (self.hold(), SockAddr::from(to));
        // SAFETY: as in `bind`; without a source address the one that is bound is used.
        check(unsafe {
            held.lib().rdma_resolve_addr(
                held.id(),
                std::ptr::null_mut(),
                to.as_ptr().cast_mut().cast(),
                timeout_ms,
            )
        })
    }

    /// Starts to look for the route.
    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        let held = self.hold();
        // SAFETY: the identifier is live.
        check(unsafe { held.lib().rdma_resolve_route(held.id(), timeout_ms) })
    }

    /// Sends the request. May block: software iWARP waits here for its TCP connection.
    pub(super) fn connect(&self, qp_num: u32, attr: &CmAttr, private: &[u8]) -> io::Result<()> {
        let held = self.hold();
        let mut param = conn_param(qp_num, attr, private);
        // SAFETY: the identifier is live; the parameters and the private data are only read, during the call.
        check(unsafe { held.lib().rdma_connect(held.id(), &mut param) })
    }

    /// Accepts the request. May block, as `connect`.
    pub(super) fn accept(&self, qp_num: u32, attr: &CmAttr, private: &[u8]) -> io::Result<()> {
        let held = self.hold();
        let mut param = conn_param(qp_num, attr, private);
        // SAFETY: as in `connect`.
        check(unsafe { held.lib().rdma_accept(held.id(), &mut param) })
    }

    pub(crate) fn reject(&self, private: &[u8]) -> io::Result<()> {
        let held = self.hold();
        let len = u8::try_from(private.len()).unwrap_or(u8::MAX);
        // SAFETY: the identifier is live; `len` bytes of the private data are read, during the call.
        check(unsafe { held.lib().rdma_reject(held.id(), private.as_ptr().cast(), len) })
    }

    /// Tells the listening side that this side's queue pair is ready. Not on iWARP.
    pub(crate) fn establish(&self) -> io::Result<()> {
        let held = self.hold();
        // SAFETY: the identifier is live.
        check(unsafe { held.lib().rdma_establish(held.id()) })
    }

    pub(crate) fn disconnect(&self) -> io::Result<()> {
        let held = self.hold();
        // SAFETY: the identifier is live.
        check(unsafe { held.lib().rdma_disconnect(held.id()) })
    }

    /// Takes and acknowledges one event. `None` when there is none now.
    pub(crate) fn next_event(&self) -> io::Result<Option<CmEvent>> {
        let held = self.hold();
        let mut event = std::ptr::null_mut();
        // SAFETY: the channel is live, and does not block; the call writes the pointer.
        match check(unsafe { held.lib().rdma_get_cm_event(held.raw().channel.as_ptr(), &mut event) }) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(e),
        }
        // SAFETY: an event that was given and is not acknowledged yet: it and its private data are valid.
        let (mut copy, id) = unsafe { (CmEvent::copy(&*event), (*event).id) };
        // SAFETY: acknowledged once; nothing refers to it any more.
        if let Err(error) = check(unsafe { held.lib().rdma_ack_cm_event(event) }) {
            tracing::warn!(%error, "acknowledging an event of RDMA_CM failed");
        }
        if copy.is_request() {
            copy.request = NonNull::new(id).and_then(|id| adopt(held.lib(), id));
        }
        Ok(Some(copy))
    }

    /// Keeps the queue pair that is being connected.
    pub(super) fn keep(&self, qp: Connecting) {
        let mut held = self.hold();
        if let Some(raw) = held.0.as_mut() {
            raw.qp = Some(qp);
        }
    }

    /// Gives it back to its owner. One that has no owner any more is kept, and destroyed with the identifier.
    pub(super) fn let_go(&self) {
        // Not under the lock: a queue pair's own is taken before an identifier's.
        let qp = self.hold().0.as_mut().and_then(|raw| raw.qp.take());
        if let Some(qp) = qp.filter(Connecting::is_abandoned) {
            self.keep(qp);
        }
    }

    /// Whether RDMA_CM has no attributes for a queue pair of this connection any more.
    pub(crate) fn is_over(&self) -> bool {
        self.qp_attr(IBV_QPS_INIT).is_err()
    }

    /// What RDMA_CM wants a queue pair of this connection to have in `state`.
    pub(super) fn qp_attr(&self, state: ibv_qp_state) -> io::Result<(ibv_qp_attr, ibv_qp_attr_mask)> {
        let held = self.hold();
        let mut attr = qp::attributes(state);
        let mut mask: c_int = 0;
        // SAFETY: the identifier is live; the call writes both.
        check(unsafe { held.lib().rdma_init_qp_attr(held.id(), &mut attr, &mut mask) })?;
        Ok((attr, mask as ibv_qp_attr_mask))
    }
}

/// Gives the identifier of a request a channel of its own. One for which there is none is destroyed, which rejects it.
fn adopt(lib: &'static LibRdmacm, id: NonNull<rdma_cm_id>) -> Option<CmId> {
    let failed = |error: String| {
        tracing::warn!(error, "a connect request cannot be taken, and is rejected");
        // SAFETY: an identifier of a request, which nobody else knows; its event is acknowledged.
        unsafe { lib.rdma_destroy_id(id.as_ptr()) };
        None
    };
    let mut raw = match Raw::channel() {
        Ok(raw) => raw,
        Err(e) => return failed(e.to_string()),
    };
    // SAFETY: both are live, and no event of the identifier is outstanding.
    if let Err(e) = check(unsafe { lib.rdma_migrate_id(id.as_ptr(), raw.channel.as_ptr()) }) {
        return failed(e.to_string());
    }
    raw.id = Some(id);
    Some(CmId::of(raw))
}

fn conn_param(qp_num: u32, attr: &CmAttr, private: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: private.as_ptr().cast(),
        private_data_len: u8::try_from(private.len()).unwrap_or(u8::MAX),
        responder_resources: attr.max_dest_rd_atomic,
        initiator_depth: attr.max_rd_atomic,
        flow_control: 1,
        retry_count: attr.retry_cnt,
        rnr_retry_count: attr.rnr_retry,
        srq: 0,
        qp_num,
    }
}
