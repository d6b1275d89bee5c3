//! The soft provider's connection manager: RDMA_CM's semantics over a TCP connection of its own.
//!
//! ```text
//!   client                       server
//!   request (offer)    ──────►   checks it; accept: its queue pair waits for the client's
//!   dials the queue pair ◄────   reply (offer), or a rejection
//!   ready              ──────►   established
//! ```
//!
//! The connection stays open for as long as the queue pairs are connected: its end, also by the death of a process, is
//! what `disconnected` waits for. Nothing is sent on it any more.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::super::agree::path_mtu;
use super::super::deadline::Deadline;
use super::super::error::{ConnectError, Stage};
use super::super::frame::{self, Frame, Kind};
use super::super::gate::Ticket;
use super::super::oob::{self, OobListener};
use super::super::reject::Reject;
use super::attr::{MAX_REJECT, MAX_REPLY, MAX_REQUEST, foreign};
use super::offer::{self, MAX_BODY, Offer};
use crate::device::{Device, SoftTransport};
use crate::provider::soft::SoftCmQp;
use crate::provider::{self, CmAttr};

/// How long a connection may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(10);

/// Listens on a TCP port.
#[derive(Debug)]
pub(crate) struct SoftListener {
    listener: OobListener,
    device: Device,
    /// Locked by the one that waits.
    half_open: Mutex<HalfOpen>,
}

impl SoftListener {
    pub(super) async fn bind(device: &Device, addr: SocketAddr) -> Result<Self, ConnectError> {
        let listener = OobListener::bind(addr).await?;
        Ok(Self { listener, device: device.clone(), half_open: Mutex::default() })
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Also reads the requests of all connections that have come in: those that are silent, or send something else, delay
    /// nobody.
    pub(super) async fn accept(&self) -> Result<SoftRequest, ConnectError> {
        let mut half_open = self.half_open.lock().await;
        loop {
            let mut incoming = pin!(self.listener.accept_stream());
            let next = poll_fn(|cx| match half_open.poll(cx) {
                Some(done) => Poll::Ready(Next::Done(done)),
                None => incoming.as_mut().poll(cx).map(Next::Incoming),
            });
            match next.await {
                Next::Incoming(accepted) => {
                    let (stream, peer, ticket) = accepted?;
                    let device = self.device.clone();
                    half_open.0.push(Box::pin(read_request(stream, peer, ticket, device)));
                }
                Next::Done(Ok(request)) => return Ok(request),
                Next::Done(Err(error)) => tracing::debug!(%error, "a connection without a connect request"),
            }
        }
    }
}

enum Next {
    Incoming(Result<(TcpStream, SocketAddr, Ticket), ConnectError>),
    Done(Result<SoftRequest, ConnectError>),
}

type Reading = Pin<Box<dyn Future<Output = Result<SoftRequest, ConnectError>> + Send>>;

/// Connections whose request has not come yet. The gate bounds how many.
#[derive(Default)]
struct HalfOpen(Vec<Reading>);

impl std::fmt::Debug for HalfOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HalfOpen").field(&self.0.len()).finish()
    }
}

impl HalfOpen {
    /// Takes one that has ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> Option<Result<SoftRequest, ConnectError>> {
        for at in 0..self.0.len() {
            if let Poll::Ready(done) = self.0[at].as_mut().poll(cx) {
                drop(self.0.swap_remove(at));
                return Some(done);
            }
        }
        None
    }
}

async fn read_request(
    mut stream: TcpStream,
    peer: SocketAddr,
    mut ticket: Ticket,
    device: Device,
) -> Result<SoftRequest, ConnectError> {
    let stage = Stage::Request;
    let local = stream.local_addr().map_err(|e| ConnectError::io(stage, e))?;
    let read = read(&mut stream, Kind::CmRequest, stage, Deadline::after(REQUEST_TIME));
    let frame = ticket.unless_evicted(read).await.unwrap_or(Err(ConnectError::Evicted { stage }));
    if let Err(ConnectError::Unexpected { kind, .. }) = &frame
        && *kind == Kind::Hello as u16
    {
        let reject = Reject::other_bootstrap("by a connection manager", "out of band");
        send_last(&stream, Kind::Reject, |out| reject.encode(out));
    }
    let frame = frame?;
    let offer = Offer::decode(&frame.body, MAX_REQUEST).map_err(|e| ConnectError::malformed(stage, e))?;
    Ok(SoftRequest { stream: Some(stream), offer, device, peer, local })
}

/// A request that has come in.
#[derive(Debug)]
pub(crate) struct SoftRequest {
    /// Taken when it is accepted or rejected.
    stream: Option<TcpStream>,
    offer: Offer,
    device: Device,
    peer: SocketAddr,
    local: SocketAddr,
}

impl SoftRequest {
    pub(super) fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn private_data(&self) -> &[u8] {
        &self.offer.private
    }

    pub(super) async fn accept(
        mut self,
        qp: SoftCmQp,
        attr: CmAttr,
        private: &[u8],
        deadline: Deadline,
    ) -> Result<SoftConnection, ConnectError> {
        check_device(&self.device, &qp)?;
        let caps = self.device.capabilities();
        let path_mtu = match agree(&self.device, &qp, &self.offer) {
            Ok(path_mtu) => path_mtu,
            Err(reject) => {
                if let Some(stream) = self.stream.take() {
                    send_last(&stream, Kind::Reject, |out| reject.encode(out));
                }
                return Err(reject.local_error());
            }
        };
        let agreed = attr.agreed(self.offer.serves, self.offer.issues);
        qp.connect(&agreed.qp_connect(self.offer.address, path_mtu, false))
            .map_err(ConnectError::queue_pair)?;
        let reply = Offer {
            address: qp.address(),
            mtu: caps.active_mtu,
            serves: attr.max_dest_rd_atomic,
            issues: attr.max_rd_atomic,
            ordered: caps.ordered,
            private: private.to_vec(),
        };
        let stage = Stage::Established;
        let mut stream = self.stream.take().ok_or(ConnectError::Closed { stage })?;
        let bytes = frame::encode(Kind::CmReply, 0, |out| reply.encode(out))?;
        frame::write(&mut stream, &bytes, Stage::Reply, deadline).await?;
        read(&mut stream, Kind::CmReady, stage, deadline).await?;
        let private = std::mem::take(&mut self.offer.private);
        let rd_atomic = agreed.max_rd_atomic;
        Ok(SoftConnection { stream, peer: self.peer, local: self.local, private, rd_atomic })
    }

    pub(super) fn reject(mut self, private: &[u8]) {
        self.refuse(private);
    }

    fn refuse(&mut self, private: &[u8]) {
        if let Some(stream) = self.stream.take() {
            let private = &private[..private.len().min(MAX_REJECT)];
            send_last(&stream, Kind::CmReject, |out| offer::encode_private(private, out));
        }
    }
}

impl Drop for SoftRequest {
    fn drop(&mut self) {
        self.refuse(&[]);
    }
}

pub(super) async fn connect(
    device: &Device,
    qp: SoftCmQp,
    to: SocketAddr,
    attr: CmAttr,
    private: &[u8],
    check: impl FnOnce(&[u8]) -> Result<(), ConnectError>,
    deadline: Deadline,
) -> Result<SoftConnection, ConnectError> {
    check_device(device, &qp)?;
    let caps = device.capabilities();
    let mut stream = oob::dial(&to.to_string(), deadline).await?;
    let socket = |source| ConnectError::io(Stage::Request, source);
    let (local, peer) = (stream.local_addr().map_err(socket)?, stream.peer_addr().map_err(socket)?);
    let request = Offer {
        address: qp.address(),
        mtu: caps.active_mtu,
        serves: attr.max_dest_rd_atomic,
        issues: attr.max_rd_atomic,
        ordered: caps.ordered,
        private: private.to_vec(),
    };
    let bytes = frame::encode(Kind::CmRequest, 0, |out| request.encode(out))?;
    frame::write(&mut stream, &bytes, Stage::Request, deadline).await?;

    let stage = Stage::Reply;
    let frame = frame::read_within(&mut stream, MAX_BODY, stage, deadline).await?;
    let malformed = |e| ConnectError::malformed(stage, e);
    match frame.kind {
        Kind::CmReply => {}
        Kind::CmReject => {
            let private_data = offer::decode_private(&frame.body, MAX_REJECT).map_err(malformed)?;
            return Err(ConnectError::PeerRejected { addr: to, reason: CONSUMER.into(), private_data });
        }
        Kind::Reject => return Err(refused(&frame, stage)),
        other => return Err(ConnectError::Unexpected { stage, kind: other as u16 }),
    }
    let reply = Offer::decode(&frame.body, MAX_REPLY).map_err(malformed)?;
    check(&reply.private)?;
    let path_mtu = agree(device, &qp, &reply).map_err(Reject::local_error)?;
    let attr = attr.agreed(reply.serves, reply.issues);
    if let Err(error) = qp.connect(&attr.qp_connect(reply.address, path_mtu, true)) {
        let error = ConnectError::queue_pair(error);
        // The listening side cannot find out by itself why nobody came.
        let reject = Reject::Unsupported { what: error.to_string() };
        send_last(&stream, Kind::Reject, |out| reject.encode(out));
        return Err(error);
    }
    let ready = frame::encode(Kind::CmReady, 0, |_| {})?;
    frame::write(&mut stream, &ready, Stage::Established, deadline).await?;
    Ok(SoftConnection { stream, peer, local, private: reply.private, rd_atomic: attr.max_rd_atomic })
}

/// The reason of a rejection by the program on the other side, in RDMA_CM's words.
const CONSUMER: &str = "the listening program rejected the request";

fn check_device(device: &Device, qp: &SoftCmQp) -> Result<(), ConnectError> {
    match device.provider() {
        provider::Device::Soft(d) if qp.is_of(d) => Ok(()),
        _ => Err(foreign()),
    }
}

/// The path MTU of the two sides, or what does not fit.
fn agree(device: &Device, qp: &SoftCmQp, theirs: &Offer) -> Result<u32, Reject> {
    let caps = device.capabilities();
    if caps.ordered != theirs.ordered {
        let name = |ordered| if ordered { "keeps the order of messages (RC)" } else { "does not (SRD)" };
        return Err(Reject::Unsupported {
            what: format!(
                "the listening side's device {}, the client's {}; open devices of one kind on both sides",
                name(caps.ordered),
                name(theirs.ordered)
            ),
        });
    }
    let (ours, peers) =
        (SoftTransport::of_address(&qp.address()), SoftTransport::of_address(&theirs.address));
    if !ours.zip(peers).is_some_and(|(ours, peers)| ours.meets(peers)) {
        let name = |takes: Option<SoftTransport>| takes.map_or("none", SoftTransport::of_device).to_owned();
        return Err(Reject::Transport { ours: name(ours), theirs: name(peers) });
    }
    path_mtu(caps.active_mtu, theirs.mtu).ok_or_else(|| Reject::Unsupported {
        what: format!("the active MTUs are {} and {}; no path MTU is as small", caps.active_mtu, theirs.mtu),
    })
}

/// Reads a frame that must be of `kind`. A refusal becomes its error.
async fn read(
    stream: &mut TcpStream,
    kind: Kind,
    stage: Stage,
    deadline: Deadline,
) -> Result<Frame, ConnectError> {
    let frame = frame::read_within(stream, MAX_BODY, stage, deadline).await?;
    match frame.kind {
        got if got == kind => Ok(frame),
        Kind::Reject => Err(refused(&frame, stage)),
        other => Err(ConnectError::Unexpected { stage, kind: other as u16 }),
    }
}

fn refused(frame: &Frame, stage: Stage) -> ConnectError {
    match Reject::decode(&frame.body) {
        // A channel of ours is named in a handshake, by whoever has shown who it is: nobody is asked that here.
        Ok(Reject::Duplicate { .. }) => ConnectError::Unexpected { stage, kind: Kind::Reject as u16 },
        Ok(reject) => reject.remote_error(),
        Err(e) => ConnectError::malformed(stage, e),
    }
}

/// The last frame of a connection, without waiting: it fits in the socket's empty buffer. Where it does not arrive the
/// peer sees the end all the same.
fn send_last(stream: &TcpStream, kind: Kind, fill: impl FnOnce(&mut Vec<u8>)) {
    let sent = frame::encode(kind, 0, fill)
        .map_err(|e| e.to_string())
        .and_then(|bytes| stream.try_write(&bytes).and_then(|_| shutdown(stream)).map_err(|e| e.to_string()));
    if let Err(error) = sent {
        tracing::debug!(error, ?kind, "a rejection may not have arrived");
    }
}

fn shutdown(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).shutdown(std::net::Shutdown::Write)
}

/// An established connection: its socket, on which nothing comes but its end.
#[derive(Debug)]
pub(crate) struct SoftConnection {
    stream: TcpStream,
    peer: SocketAddr,
    local: SocketAddr,
    private: Vec<u8>,
    /// READs and atomics that this side may have outstanding.
    rd_atomic: u8,
}

impl SoftConnection {
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

    /// The end of a stream stays to be seen: each of several that wait sees it.
    pub(super) async fn disconnected(&self) {
        loop {
            if self.stream.readable().await.is_err() {
                return;
            }
            match self.stream.try_read(&mut [0; 16]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The end; an error; or bytes, which no peer of ours sends.
                _ => {
                    self.disconnect();
                    return;
                }
            }
        }
    }

    pub(super) fn disconnect(&self) {
        // Fails when it has ended already.
        let _ = SockRef::from(&self.stream).shutdown(std::net::Shutdown::Both);
    }
}
