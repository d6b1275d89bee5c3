//! RDMA_CM as futures: each identifier's event channel is read by one waiter, until it would block (R3).
//!
//! ```text
//!   client                                              server
//!   bind a source, resolve address and route            bind, listen
//!   connect                       ── request ──►        the request has an identifier of its own
//!   INIT, RTR, RTS; establish     ◄── response ──       INIT, RTR, RTS; accept           InfiniBand, RoCE
//!   (the driver moves the queue pair; established)      accept                           iWARP
//! ```
//!
//! What may block runs on threads of its own (`thread.rs`). A future that is dropped leaves its identifier to such a
//! thread, which destroys it: a request that was sent is withdrawn, one that came in is rejected, and a connection ends.

use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify};

use super::super::deadline::Deadline;
use super::super::error::{ConnectError, Stage};
use super::attr::{MAX_REJECT, foreign};
use super::source;
use super::thread;
use super::verbs_error::{
    device_of, failed_accept, failed_bind, failed_call, failed_event, failed_reply, not_ready,
};
use crate::device::Device;
use crate::provider::verbs::{CmEvent, CmEventKind, CmId, VerbsCmQp, VerbsDevice};
use crate::provider::{self, CmAttr};

/// Requests that wait to be taken, in the kernel.
const BACKLOG: i32 = 128;
/// What address and route resolution may take each, when the deadline is far.
const RESOLVE: Duration = Duration::from_secs(10);

/// What RDMA_CM is given for a resolution, in milliseconds, of the time `left`: about half, so that it can say that there is
/// no way before the deadline says that time is up.
fn resolve_ms(left: Duration) -> i32 {
    (left / 2).clamp(Duration::from_millis(1), RESOLVE).as_millis() as i32
}

/// An identifier, and its events.
#[derive(Debug)]
struct Events {
    io: AsyncFd<Arc<CmId>>,
}

impl Events {
    /// Needs a runtime.
    fn new(id: CmId, stage: Stage) -> Result<Self, ConnectError> {
        // SAFETY: an identifier has one descriptor, which stays open for as long as it lives; it lives in the `AsyncFd`.
        let io = unsafe { AsyncFd::register_with_interest(Arc::new(id), Interest::READABLE) };
        io.map(|io| Self { io }).map_err(|e| ConnectError::Manager {
            stage,
            what: "watching RDMA_CM's channel",
            source: e.into(),
        })
    }

    fn id(&self) -> &Arc<CmId> {
        self.io.get_ref()
    }

    /// The next event. One waiter at a time; cancel safe.
    async fn next(&self) -> io::Result<CmEvent> {
        loop {
            let mut ready = self.io.readable().await?;
            // Readiness is kept while there are events, and cleared only by their absence.
            match self.id().next_event()? {
                Some(event) => return Ok(event),
                None => ready.clear_ready(),
            }
        }
    }

    /// The next event that is of interest, within the deadline.
    async fn expect(&self, stage: Stage, deadline: Deadline) -> Result<CmEvent, ConnectError> {
        let next = async {
            loop {
                let event = self.next().await.map_err(|source| ConnectError::Manager {
                    stage,
                    what: "reading RDMA_CM's events",
                    source,
                })?;
                if !matches!(event.kind, CmEventKind::Other(_)) {
                    return Ok(event);
                }
            }
        };
        deadline.run(stage, next).await
    }
}

fn verbs_device(device: &Device) -> Result<&VerbsDevice, ConnectError> {
    match device.provider() {
        provider::Device::Verbs(d) => Ok(d),
        provider::Device::Soft(_) => Err(foreign()),
    }
}

/// Listens with RDMA_CM.
#[derive(Debug)]
pub(crate) struct VerbsListener {
    /// Locked by the one that waits.
    events: Mutex<Events>,
    device: Device,
    local: SocketAddr,
}

impl VerbsListener {
    pub(super) async fn bind(device: &Device, addr: SocketAddr) -> Result<Self, ConnectError> {
        let ours = device.clone();
        let id = thread::run(Stage::Listen, move || listen(&ours, addr)).await??;
        let local = id.local_addr().unwrap_or(addr);
        let events = Mutex::new(Events::new(id, Stage::Listen)?);
        Ok(Self { events, device: device.clone(), local })
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(super) async fn accept(&self) -> Result<VerbsRequest, ConnectError> {
        let stage = Stage::Listen;
        let events = self.events.lock().await;
        loop {
            let mut event = events.next().await.map_err(|source| ConnectError::Manager {
                stage,
                what: "reading RDMA_CM's events",
                source,
            })?;
            match event.kind {
                CmEventKind::ConnectRequest => {}
                CmEventKind::DeviceRemoval => {
                    return Err(ConnectError::DeviceRemoved { stage, device: self.device.name().to_owned() });
                }
                _ => continue,
            }
            // Without one it could not be taken, and was rejected.
            let Some(id) = event.request.take() else { continue };
            let (local, peer) = (id.local_addr(), id.peer_addr());
            // On an unspecified address it may be another device's: dropping it rejects it.
            let (Ok(()), Some(local), Some(peer)) = (device_of(&id, &self.device, self.local), local, peer)
            else {
                tracing::debug!("a connect request to another device is rejected");
                continue;
            };
            match Events::new(id, stage) {
                Ok(events) => {
                    return Ok(VerbsRequest { events, event, device: self.device.clone(), local, peer });
                }
                Err(error) => tracing::warn!(%error, "a connect request cannot be taken, and is rejected"),
            }
        }
    }
}

fn listen(device: &Device, addr: SocketAddr) -> Result<CmId, ConnectError> {
    let stage = Stage::Listen;
    let id = CmId::create().map_err(ConnectError::resources)?;
    id.bind(addr).map_err(|e| failed_bind(e, addr, device))?;
    if !addr.ip().is_unspecified() {
        device_of(&id, device, addr)?;
    }
    match id.listen(BACKLOG) {
        Ok(()) => Ok(id),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(ConnectError::AddrInUse { addr }),
        Err(source) => Err(ConnectError::Manager { stage, what: "rdma_listen", source }),
    }
}

/// A request that has come in, with an identifier of its own.
#[derive(Debug)]
pub(crate) struct VerbsRequest {
    events: Events,
    event: CmEvent,
    device: Device,
    local: SocketAddr,
    peer: SocketAddr,
}

impl VerbsRequest {
    pub(super) fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn private_data(&self) -> &[u8] {
        &self.event.private
    }

    pub(super) async fn accept(
        self,
        qp: VerbsCmQp,
        attr: CmAttr,
        private: &[u8],
        deadline: Deadline,
    ) -> Result<VerbsConnection, ConnectError> {
        let Self { events, event, device, local, peer } = self;
        if !qp.is_of(verbs_device(&device)?) {
            return Err(foreign());
        }
        let stage = Stage::Reply;
        let own = attr.max_rd_atomic;
        let attr = attr.agreed(event.initiator_depth, event.responder_resources);
        // The driver agrees by itself on iWARP, and does not always say on what.
        let rd_atomic = if qp.is_iwarp() { own } else { attr.max_rd_atomic };
        let (id, target, reply) = (events.id().clone(), qp.clone(), private.to_vec());
        let accepting = thread::run(stage, move || {
            target.check_new().map_err(ConnectError::resources)?;
            id.set_ack_timeout(attr.timeout);
            if !target.is_iwarp() {
                target.ready(&id, &attr).map_err(|e| not_ready(e, stage))?;
            }
            target.accept(&id, &attr, &reply).map_err(|e| failed_reply(e, stage, || id.is_over()))
        });
        deadline.run(stage, async { accepting.await? }).await?;
        let stage = Stage::Established;
        let done = events.expect(stage, deadline).await?;
        if done.kind != CmEventKind::Established {
            return Err(failed_accept(done, stage, peer, &device));
        }
        qp.connected(events.id());
        Ok(VerbsConnection::new(events, local, peer, event.private, rd_atomic))
    }

    pub(super) fn reject(self, private: &[u8]) {
        let private = private[..private.len().min(MAX_REJECT)].to_vec();
        let id = self.events.id().clone();
        let rejected = thread::detach(move || {
            if let Err(error) = id.reject(&private) {
                tracing::debug!(%error, "a rejection may not have arrived");
            }
        });
        if let Err(error) = rejected {
            tracing::debug!(%error, "a request is rejected without its words");
        }
    }
}

pub(super) async fn connect(
    device: &Device,
    qp: VerbsCmQp,
    to: SocketAddr,
    attr: CmAttr,
    private: &[u8],
    check: impl FnOnce(&[u8]) -> Result<(), ConnectError>,
    deadline: Deadline,
) -> Result<VerbsConnection, ConnectError> {
    if !qp.is_of(verbs_device(device)?) {
        return Err(foreign());
    }
    qp.check_new().map_err(ConnectError::resources)?;

    let stage = Stage::Address;
    let ours = device.clone();
    let bound = thread::run(stage, move || {
        let id = source::bound(&ours, to)?;
        id.set_ack_timeout(attr.timeout);
        id.resolve_addr(to, resolve_ms(deadline.left()))
            .map_err(|e| failed_call(e, "rdma_resolve_addr", stage, to, &ours))?;
        Ok(id)
    });
    let events = Events::new(deadline.run(stage, async { bound.await? }).await?, stage)?;
    wait_for(&events, CmEventKind::AddrResolved, stage, deadline, to, device).await?;
    device_of(events.id(), device, to)?;

    let stage = Stage::Route;
    events
        .id()
        .resolve_route(resolve_ms(deadline.left()))
        .map_err(|e| failed_call(e, "rdma_resolve_route", stage, to, device))?;
    wait_for(&events, CmEventKind::RouteResolved, stage, deadline, to, device).await?;

    let stage = Stage::Request;
    let (id, target, request) = (events.id().clone(), qp.clone(), private.to_vec());
    let requested = thread::run(stage, move || target.request(&id, &attr, &request));
    let requested = deadline.run(stage, requested).await?;
    requested.map_err(|e| failed_call(e, "rdma_connect", stage, to, device))?;

    let stage = Stage::Reply;
    let (reply, rd_atomic) = if qp.is_iwarp() {
        let reply = wait_for(&events, CmEventKind::Established, stage, deadline, to, device).await?;
        // The driver was quicker. Its end is that of the connection, by the drop of the identifier.
        check(&reply.private)?;
        (reply, attr.max_rd_atomic)
    } else {
        let reply = wait_for(&events, CmEventKind::ConnectResponse, stage, deadline, to, device).await?;
        check(&reply.private)?;
        let attr = attr.agreed(reply.initiator_depth, reply.responder_resources);
        let stage = Stage::Established;
        let (id, target) = (events.id().clone(), qp.clone());
        let ready = thread::run(stage, move || {
            target.ready(&id, &attr).map_err(|e| not_ready(e, stage))?;
            id.establish().map_err(|source| ConnectError::Manager { stage, what: "rdma_establish", source })
        });
        deadline.run(stage, async { ready.await? }).await?;
        (reply, attr.max_rd_atomic)
    };
    qp.connected(events.id());
    let local = events.id().local_addr().unwrap_or(SocketAddr::new(IpAddr::from([0; 4]), 0));
    Ok(VerbsConnection::new(events, local, to, reply.private, rd_atomic))
}

/// The event that is the next step, or the error that another one is.
async fn wait_for(
    events: &Events,
    kind: CmEventKind,
    stage: Stage,
    deadline: Deadline,
    to: SocketAddr,
    device: &Device,
) -> Result<CmEvent, ConnectError> {
    let event = events.expect(stage, deadline).await?;
    if event.kind == kind { Ok(event) } else { Err(failed_event(event, stage, to, device)) }
}

/// An established connection: its identifier, which is destroyed when this is dropped.
#[derive(Debug)]
pub(crate) struct VerbsConnection {
    /// Locked by the one that waits.
    events: Mutex<Events>,
    id: Arc<CmId>,
    over: AtomicBool,
    ended: Notify,
    local: SocketAddr,
    peer: SocketAddr,
    private: Vec<u8>,
    /// READs and atomics that this side may have outstanding.
    rd_atomic: u8,
}

impl VerbsConnection {
    fn new(events: Events, local: SocketAddr, peer: SocketAddr, private: Vec<u8>, rd_atomic: u8) -> Self {
        let id = events.id().clone();
        Self {
            events: Mutex::new(events),
            id,
            over: AtomicBool::new(false),
            ended: Notify::new(),
            local,
            peer,
            private,
            rd_atomic,
        }
    }

    pub(super) fn rd_atomic(&self) -> u8 {
        self.rd_atomic
    }

    pub(super) fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn private_data(&self) -> &[u8] {
        &self.private
    }

    pub(super) async fn disconnected(&self) {
        let mut ended = pin!(self.ended.notified());
        // From here on it is told of an end that comes after the look.
        ended.as_mut().enable();
        if self.over.load(Ordering::Acquire) {
            return;
        }
        let mut watch = pin!(self.watch());
        poll_fn(|cx| match ended.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => watch.as_mut().poll(cx),
        })
        .await;
    }

    /// Reads events, one waiter at a time, until the end.
    async fn watch(&self) {
        let events = self.events.lock().await;
        while !self.over.load(Ordering::Acquire) {
            match events.next().await.map(|event| event.kind) {
                Ok(CmEventKind::Established | CmEventKind::Other(_)) => {}
                // Also a rejection: of a server that gave up after its acceptance had come here. InfiniBand's other side
                // waits for an answer to its disconnect.
                Ok(_) | Err(_) => self.disconnect(),
            }
        }
    }

    /// Over at once on this side, whether the other one can still be told or not.
    pub(super) fn disconnect(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        self.ended.notify_waiters();
        let id = self.id.clone();
        let call = |id: &CmId| {
            // Fails when it has ended already.
            if let Err(error) = id.disconnect() {
                tracing::debug!(%error, "rdma_disconnect");
            }
        };
        if thread::detach(move || call(&id)).is_err() {
            call(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b4_a_resolution_ends_well_before_the_deadline_and_takes_some_time() {
        for (left, given) in
            [(0, 1), (1, 1), (500, 250), (10_000, 5_000), (30_000, 10_000), (u64::MAX, 10_000)]
        {
            assert_eq!(resolve_ms(Duration::from_millis(left)), given, "{left}");
        }
    }
}
