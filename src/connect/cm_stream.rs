//! The bootstrap over a connection manager: a small queue pair is connected first, and the handshake runs over it in-band.
//!
//! The private data of the request names landfall, its version and the epoch (B5); everything else is the handshake's.

use std::net::SocketAddr;
use std::time::Duration;

use super::cm::{self, CmAttr, private};
use super::deadline::Deadline;
use super::error::{ConnectError, Stage};
use super::gate::{Gate, Ticket};
use super::handshake::Incoming;
use super::inband::Inband;
use super::oob;
use crate::device::{Device, ProtectionDomain};

/// Of the queue pair that carries the handshake. It carries no READ.
const ATTR: CmAttr = CmAttr {
    max_rd_atomic: 1,
    max_dest_rd_atomic: 1,
    // 4.096 µs × 2^19 = 2.1 s, six times: the deadline and the connection manager end it earlier.
    timeout: 19,
    retry_cnt: 6,
    // A missing receive is impossible (`inband`).
    rnr_retry: 6,
    min_rnr_timer: 14,
};

/// Listens for endpoints that connect by a connection manager.
#[derive(Debug)]
pub(crate) struct CmListener {
    listener: cm::Listener,
    gate: Gate,
}

impl CmListener {
    /// Binds to an address of the device at once, or says that the port is taken.
    pub(crate) async fn bind(device: &Device, addr: SocketAddr) -> Result<Self, ConnectError> {
        Ok(Self { listener: cm::Listener::bind(device, addr).await?, gate: Gate::new() })
    }

    /// The address bound, with the real port where 0 was asked for.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// The next request, whose handshake has `limit` from now. Cancel safe.
    pub(crate) async fn accept(&self, limit: Duration) -> Result<Knock, ConnectError> {
        self.gate.room().await;
        let request = self.listener.accept().await?;
        Ok(Knock { request, ticket: self.gate.enter(), deadline: Deadline::after(limit) })
    }
}

/// A request for a queue pair that will carry a handshake. Dropping it rejects it.
#[derive(Debug)]
pub(crate) struct Knock {
    request: cm::Request,
    ticket: Ticket,
    deadline: Deadline,
}

impl Knock {
    /// Where it comes from.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.request.peer_addr()
    }

    /// The local address that it came in on.
    pub(crate) fn local(&self) -> SocketAddr {
        self.request.local_addr()
    }

    /// Accepts it: the handshake can begin. `epoch` is ours. A stranger's request is rejected.
    pub(crate) async fn open(
        self,
        pd: &ProtectionDomain,
        epoch: u64,
    ) -> Result<Incoming<Inband>, ConnectError> {
        let Self { request, mut ticket, deadline } = self;
        let peer = request.peer_addr();
        let ours = private::encode(epoch);
        let opening = async {
            if let Err(error) = private::parse(request.private_data(), Stage::Request) {
                request.reject(&ours);
                return Err(error);
            }
            let mut stream = deadline.run(Stage::Request, Inband::open(pd)).await?;
            let line = request.accept(stream.qp(), &ATTR, &ours, deadline).await?;
            stream.attach(line);
            Ok(stream)
        };
        let evicted = ConnectError::Evicted { stage: Stage::Request };
        let stream = ticket.unless_evicted(opening).await.unwrap_or(Err(evicted))?;
        Ok(Incoming::new(stream, peer, ticket, deadline))
    }
}

/// Connects to `target`, `host:port`. Every address of a name gets a share of the time left. Answers the address, too.
pub(crate) async fn dial_cm(
    pd: &ProtectionDomain,
    target: &str,
    epoch: u64,
    deadline: Deadline,
) -> Result<(Inband, SocketAddr), ConnectError> {
    let addrs = oob::resolve(target, deadline).await?;
    let ours = private::encode(epoch);
    let mut failed = deadline.timeout(Stage::Dial);
    for (i, &addr) in addrs.iter().enumerate() {
        // One that was tried is not used again.
        let mut stream = deadline.run(Stage::Dial, Inband::open(pd)).await?;
        // Its every stage ends with the share, and says which it was.
        let share = deadline.share(addrs.len() - i);
        let check = |theirs: &[u8]| private::parse(theirs, Stage::Reply).map(drop);
        failed = match cm::connect(pd.device(), stream.qp(), addr, &ATTR, &ours, check, share).await {
            Ok(line) => {
                stream.attach(line);
                return Ok((stream, addr));
            }
            Err(error) => by_version(error),
        };
    }
    Err(failed)
}

/// A landfall of another version has rejected us, and says so.
fn by_version(error: ConnectError) -> ConnectError {
    let ConnectError::PeerRejected { private_data, .. } = &error else { return error };
    match private::parse(private_data, Stage::Reply) {
        Err(version @ ConnectError::Version { .. }) => version,
        _ => error,
    }
}
