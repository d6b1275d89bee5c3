//! Queue pairs connected by a connection manager: the client asks for one after the other, at a port of this channel alone.

use std::net::SocketAddr;

use super::endpoint::Shared;
use super::setup::{ACK_TIMEOUT, Built, MIN_RNR_TIMER, RETRIES};
use crate::connect::cm::{self, CmAttr, private};
use crate::connect::{Agreed, ConnectError, Deadline, Hello, Stage};

fn attr(shared: &Shared, agreed: &Agreed) -> CmAttr {
    let rd_atomic = agreed.rd_atomic.min(shared.device.capabilities().max_rd_atomic);
    CmAttr {
        max_rd_atomic: rd_atomic,
        max_dest_rd_atomic: rd_atomic,
        timeout: ACK_TIMEOUT,
        retry_cnt: RETRIES,
        rnr_retry: RETRIES,
        min_rnr_timer: MIN_RNR_TIMER,
    }
}

/// Where the queue pairs of one channel are asked for.
pub(super) struct Entrance(cm::Listener);

impl Entrance {
    /// On the address that the peer has come in on.
    pub(super) async fn open(shared: &Shared, mut at: SocketAddr) -> Result<Self, ConnectError> {
        at.set_port(0);
        Ok(Self(cm::Listener::bind(&shared.device, at).await?))
    }

    pub(super) fn port(&self) -> u16 {
        self.0.local_addr().port()
    }

    /// Connects our queue pairs as the peer asks for them, each with that of the same number. Whoever has another epoch is
    /// refused. Those beyond `agreed.qps` are destroyed.
    pub(super) async fn admit(
        &self,
        shared: &Shared,
        mut built: Built,
        peer: &Hello,
        agreed: &Agreed,
        deadline: Deadline,
    ) -> Result<Built, ConnectError> {
        let (attr, ours) = (attr(shared, agreed), private::encode(shared.epoch));
        for n in 0..built.trim(peer, agreed) {
            let request = deadline.run(Stage::Request, self.next(peer.epoch, &ours)).await?;
            // The request is the one of this queue pair: the client asks in their order, and waits for each.
            let line = request.accept(built.qp(n)?, &attr, &ours, deadline).await?;
            built.lines.push(line);
        }
        Ok(built)
    }

    async fn next(&self, epoch: u64, ours: &[u8]) -> Result<cm::Request, ConnectError> {
        loop {
            let request = self.0.accept().await?;
            match private::parse(request.private_data(), Stage::Request) {
                Ok(got) if got == epoch => return Ok(request),
                other => {
                    tracing::debug!(from = %request.peer_addr(), ?other, "a stranger asks for a queue pair");
                    request.reject(ours);
                }
            }
        }
    }
}

/// Asks the peer at `to` for each of its queue pairs. Whoever answers with another epoch is refused.
pub(super) async fn ask(
    shared: &Shared,
    mut built: Built,
    peer: &Hello,
    agreed: &Agreed,
    mut to: SocketAddr,
    deadline: Deadline,
) -> Result<Built, ConnectError> {
    if peer.cm_port == 0 {
        return Err(ConnectError::malformed(Stage::HelloReply, "no port for the queue pairs"));
    }
    to.set_port(peer.cm_port);
    let (attr, ours) = (attr(shared, agreed), private::encode(shared.epoch));
    for n in 0..built.trim(peer, agreed) {
        let line = cm::connect(&shared.device, built.qp(n)?, to, &attr, &ours, deadline).await?;
        // The port may be another process's by now (K6).
        let epoch = private::parse(line.private_data(), Stage::Reply)?;
        if epoch != peer.epoch {
            return Err(ConnectError::IdentityMismatch {
                expected: format!("epoch {:#018x}", peer.epoch),
                got: format!("epoch {epoch:#018x}"),
            });
        }
        built.lines.push(line);
    }
    Ok(built)
}
