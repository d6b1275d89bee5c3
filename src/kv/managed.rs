//! Queue pairs connected by a connection manager: the client asks for one after the other, rail by rail, at a port of this channel
//! alone for each rail.

use std::collections::HashMap;
use std::net::SocketAddr;

use tokio::task::{AbortHandle, JoinSet};

use super::endpoint::Shared;
use super::join::{Attempt, Joined, Outline, Rails};
use super::pass::Pass;
use super::path_rails::RailWarning;
use super::rail::{ACK_TIMEOUT, Link, MIN_RNR_TIMER, QueuePairs, RETRIES, why};
use super::setup::Built;
use crate::connect::cm::{self, CmAttr};
use crate::connect::{ConnectError, Deadline, Hello, Stage};
use crate::device::Device;
use crate::error::DeviceError;

fn attr(link: &Link) -> CmAttr {
    CmAttr {
        max_rd_atomic: link.rd_atomic,
        max_dest_rd_atomic: link.rd_atomic,
        timeout: ACK_TIMEOUT,
        retry_cnt: RETRIES,
        rnr_retry: RETRIES,
        min_rnr_timer: MIN_RNR_TIMER,
    }
}

/// Where the queue pairs of one rail are asked for.
pub(super) struct Entrance(cm::Listener);

impl Entrance {
    /// On an address of `device`, with any port.
    pub(super) async fn open(device: &Device, mut at: SocketAddr) -> Result<Self, ConnectError> {
        at.set_port(0);
        Ok(Self(cm::Listener::bind(device, at).await?))
    }

    /// On an address of `device` that its peers can reach.
    pub(super) async fn on(device: &Device) -> Result<Self, ConnectError> {
        let none = || {
            ConnectError::resources(DeviceError::Rail {
                device: device.name().to_owned(),
                reason: "it has no IP address to listen on".to_owned(),
            })
        };
        let at = cm::addresses(device).await?.first().copied().ok_or_else(none)?;
        Self::open(device, at).await
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Connects our queue pairs as the peer asks for them, each with that of the same number. Whoever else asks is refused.
    pub(super) async fn admit(
        &self,
        pairs: &mut QueuePairs,
        link: &Link,
        pass: &Pass,
        deadline: Deadline,
    ) -> Result<(), ConnectError> {
        let attr = attr(link);
        for n in 0..pairs.queues.len() {
            let private = pass.reply(n);
            let request = deadline.run(Stage::Request, self.next(pass, n)).await?;
            // The request is the one of this queue pair: the client asks in their order, and waits for each.
            let line = request.accept(pairs.qp(n)?, &attr, &private, deadline).await?;
            pairs.lines.push(line);
        }
        Ok(())
    }

    async fn next(&self, pass: &Pass, n: usize) -> Result<cm::Request, ConnectError> {
        loop {
            let request = self.0.accept().await?;
            if pass.takes(n, request.private_data()) {
                return Ok(request);
            }
            tracing::debug!(from = %request.peer_addr(), "a stranger asks for a queue pair");
            request.reject(&pass.refusal());
        }
    }
}

/// Lets the peer's queue pairs in, on every rail at the same time. Dropping it ends that.
pub(super) struct Admissions {
    tasks: JoinSet<(usize, Result<Joined, ConnectError>)>,
    /// Of each rail that waits: what is left of it should the peer leave it out.
    waiting: Vec<(usize, AbortHandle, Outline)>,
    /// Those that are left out already.
    rails: Rails,
}

impl Admissions {
    /// Each rail that is there has its entrance, by its number.
    pub(super) fn start(
        shared: &Shared,
        rails: Rails,
        entrances: Vec<(usize, Entrance)>,
        pass: &Pass,
        deadline: Deadline,
    ) -> Self {
        let (rails, all) = (Rails { rails: Vec::new(), ..rails }, rails.rails);
        let mut this = Self { tasks: JoinSet::new(), waiting: Vec::new(), rails };
        let mut entrances: HashMap<usize, Entrance> = entrances.into_iter().collect();
        for mut joined in all {
            let number = joined.agreed.number;
            if joined.half.is_err() {
                this.rails.rails.push(joined);
                continue;
            }
            // A rail without an entrance was left out before.
            let Some(entrance) = entrances.remove(&number) else { continue };
            let pass = pass.of(number, 0);
            let outline = joined.outline();
            let admit = async move {
                let Joined { agreed, half, peer, .. } = &mut joined;
                let admitted = match half {
                    Ok(built) => {
                        built.pairs.trim(agreed.qps, &peer.qps);
                        let link = Link::new(built.pd.device(), agreed, false);
                        entrance.admit(&mut built.pairs, &link, &pass, deadline).await
                    }
                    Err(_) => Ok(()),
                };
                (number, admitted.map(|()| joined))
            };
            this.waiting.push((number, this.tasks.spawn_on(admit, &shared.runtime), outline));
        }
        this
    }

    /// All rails, in their order: those that the peer has connected, and those that are left out, to which it has added those
    /// in `gone`.
    pub(super) async fn finish(mut self, shared: &Shared, gone: &[usize]) -> Result<Rails, ConnectError> {
        let (mut rails, mut missing) = (self.rails, self.waiting.len());
        for (number, task, outline) in self.waiting {
            if gone.contains(&number) {
                task.abort();
                missing -= 1;
                rails.dropped(shared, outline);
            }
        }
        while let Some(done) = self.tasks.join_next().await {
            match done {
                Ok((number, _)) if gone.contains(&number) => {}
                Ok((_, joined)) => {
                    rails.rails.push(joined?);
                    missing -= 1;
                }
                Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                // One that was aborted; or the runtime is going away, and the rail is missed below.
                Err(_) => {}
            }
        }
        rails.rails.sort_by_key(|joined| joined.agreed.number);
        match missing {
            0 => Ok(rails),
            _ => Err(ConnectError::resources(DeviceError::NoRuntime)),
        }
    }
}

/// Asks the peer for the queue pairs of all rails. `to` is where the handshake went. A rail that cannot be connected costs its share of
/// the time left, and is left out; answers the numbers of those.
pub(super) async fn ask_all(
    shared: &Shared,
    rails: Rails,
    (peer, pass): (&Hello, &Pass),
    to: SocketAddr,
    deadline: Deadline,
) -> Result<(Rails, Vec<usize>), ConnectError> {
    let (mut attempt, rails) = Attempt::new(rails);
    let mut to_ask = rails.iter().filter(|joined| joined.half.is_ok()).count();
    for mut joined in rails {
        let Joined { agreed, half, peer: theirs, .. } = &mut joined;
        let asked = match half {
            Err(_) => Ok(()),
            Ok(built) => {
                let at = match theirs.manager {
                    // A scope has a meaning on its own host only: ours is in the address that was dialled.
                    Some(at) if at.ip() == to.ip() => with_port(to, at.port()),
                    Some(at) => at,
                    None if agreed.number == peer.place() && peer.cm_port != 0 => with_port(to, peer.cm_port),
                    None => {
                        return Err(ConnectError::malformed(
                            Stage::HelloReply,
                            "no port for the queue pairs",
                        ));
                    }
                };
                built.pairs.trim(agreed.qps, &theirs.qps);
                let link = Link::new(built.pd.device(), agreed, true);
                let pass = pass.of(agreed.number, 0);
                let share = deadline.share(to_ask);
                to_ask -= 1;
                ask(built.pd.device(), &mut built.pairs, &link, &pass, at, share).await
            }
        };
        attempt.take(shared, joined, asked);
    }
    attempt.end(shared)
}

fn with_port(mut to: SocketAddr, port: u16) -> SocketAddr {
    to.set_port(port);
    to
}

/// Asks for each queue pair of one rail. Whoever answers and is not the peer is refused, before our queue pair is connected to it.
pub(super) async fn ask(
    device: &Device,
    pairs: &mut QueuePairs,
    link: &Link,
    pass: &Pass,
    at: SocketAddr,
    deadline: Deadline,
) -> Result<(), ConnectError> {
    let attr = attr(link);
    for n in 0..pairs.queues.len() {
        let (request, check) = (pass.request(n), |reply: &[u8]| pass.check_reply(n, reply));
        let line = cm::connect(device, pairs.qp(n)?, at, &attr, &request, check, deadline).await?;
        pairs.lines.push(line);
    }
    Ok(())
}

/// Opens the entrances of the rails in `rails`. A rail whose device has no address is left out.
pub(super) async fn open_all(
    shared: &Shared,
    built: &mut Built,
    first: usize,
    at: SocketAddr,
) -> Result<Vec<(usize, Entrance)>, ConnectError> {
    let mut entrances = Vec::new();
    for n in 0..built.halves.len() {
        if !built.halves[n].is_built() {
            continue;
        }
        let device = shared.pool.devices()[built.devices[n]].pd.device();
        let opened = if n == first { Entrance::open(device, at).await } else { Entrance::on(device).await };
        match opened {
            Ok(entrance) => entrances.push((n, entrance)),
            Err(error) if n == first || shared.config.strict_rails => return Err(error),
            Err(error) => {
                built.halves[n].leave_out(RailWarning::new(device.name(), None, why(&error)));
            }
        }
    }
    Ok(entrances)
}

/// Says in a reply where the queue pairs of each rail are asked for.
pub(super) fn announce(reply: &mut Hello, entrances: &[(usize, Entrance)]) {
    if entrances.is_empty() {
        return;
    }
    let (mut rails, first) = (reply.rail_list(), reply.place());
    for (number, entrance) in entrances {
        rails[*number].manager = Some(entrance.address());
    }
    reply.set_rails(rails, first);
}
