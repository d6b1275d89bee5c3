//! The two sides of a connect: claim the pair, build, agree, commit, drive.
//!
//! The frames are the same over either bootstrap. Out of band, each side connects its queue pairs by the addresses in the
//! peer's hello, the server before it replies. By a connection manager (`managed`), the client asks for each queue pair
//! after the reply, which says where; the server answers until it is told that they are ready.
//!
//! Whatever fails on the way gives back what it had (B4): a claim, queue pairs, a place among the accepted channels.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use super::bootstrap::{Chosen, Way};
use super::channel::{ChannelInner, KvChannel, PathFacts};
use super::driver::KvDriver;
use super::endpoint::Shared;
use super::managed::{self, Entrance};
use super::path_check::{Facts, FirstReading, PathCheck};
use super::peers::Answer;
use super::proto::{Config, Opening};
use super::setup::{self, Built};
use super::targets::PeerPool;
use crate::connect::{
    Agreed, ConnectError, Deadline, Expect, Hello, Incoming, Notify, Offer, Reject, Stage, agree, client,
    dial, dial_cm, part, see_off,
};
use crate::counters::{CounterPort, Sysfs};
use crate::provider;
use crate::reactor;

const TO_ITSELF: &str = "an endpoint cannot connect to itself";

/// A claimed pair: given back unless it became a channel.
struct Claimed {
    shared: Arc<Shared>,
    peer: u64,
    connection: u64,
    done: bool,
}

impl Claimed {
    /// Claims the pair for `connection`, or names the one that is kept. Waits for one that is coming to its end.
    async fn take(
        shared: &Arc<Shared>,
        peer: &Hello,
        connection: u64,
        dead: &[u64],
        deadline: Deadline,
    ) -> Result<Result<Self, u64>, ConnectError> {
        let answer = shared.peers.until(|| match shared.peers.claim(peer.epoch, connection, dead) {
            Answer::Wait => None,
            Answer::Taken(winner) => Some(Err(winner)),
            Answer::Yes(()) => Some(Ok(())),
        });
        let answer = deadline.run(Stage::Hello, async { Ok(answer.await) }).await?;
        Ok(answer.map(|()| Self { shared: shared.clone(), peer: peer.epoch, connection, done: false }))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if !self.done {
            self.shared.peers.release(self.peer, self.connection);
        }
    }
}

pub(super) async fn dial_peer(
    shared: &Arc<Shared>,
    target: &str,
    expect: &Expect,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    match chosen.way {
        Way::Oob => {
            let stream = dial(target, deadline).await?;
            let deadline = stream.peer_addr().map_or(deadline, |at| deadline.of(at));
            ask(shared, stream, None, expect, chosen, deadline).await
        }
        Way::Cm => {
            let (stream, peer) = dial_cm(&shared.pd, target, shared.epoch, deadline).await?;
            ask(shared, stream, Some(peer), expect, chosen, deadline.of(peer)).await
        }
    }
}

/// The client's side. `managed` is the peer's address where a connection manager connects the queue pairs.
async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    shared: &Arc<Shared>,
    stream: S,
    managed: Option<SocketAddr>,
    expect: &Expect,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let built = setup::build(shared, shared.config.qps).await?;
    let connection = setup::new_id()?;
    let ours = setup::hello(shared, &built, connection, shared.peers.dead());
    let reply = client(stream, &ours, expect, deadline).await?;
    let (peer, agreed) = (reply.reply.clone(), reply.agreed);
    if peer.epoch == shared.epoch {
        let error = reply.reject(Reject::Unsupported { what: TO_ITSELF.to_owned() }).await;
        return Err(error);
    }
    let claimed = match Claimed::take(shared, &peer, connection, &[], deadline).await? {
        Ok(claimed) => claimed,
        Err(winner) => return Err(reply.reject(Reject::Duplicate { winner }).await),
    };
    let opening = if managed.is_some() { Opening::Speak } else { Opening::Free };
    let checked = setup::protocol(shared, &built, &peer, &agreed, opening)
        .and_then(|proto| Ok((proto, setup::peer_pool(&peer)?)));
    let (proto, pool) = match checked {
        Ok(checked) => checked,
        Err(reject) => return Err(reply.reject(reject).await),
    };
    let connected = match managed {
        None => setup::connect(shared, built, &peer, &agreed, true).await,
        Some(to) => managed::ask(shared, built, &peer, &agreed, to, deadline).await,
    };
    let built = match connected {
        // Only the side that dials finds that out, and the other one is told.
        Err(error @ ConnectError::NoPath { .. }) => {
            reply.reject(Reject::Unsupported { what: error.to_string() }).await;
            return Err(error);
        }
        built => built?,
    };
    let parts = (built, proto, pool);
    let channel = match establish(claimed, parts, &ours, &peer, &agreed, chosen, deadline).await {
        Err(ConnectError::Duplicate { winner }) => {
            return Err(reply.reject(Reject::Duplicate { winner }).await);
        }
        channel => channel?,
    };
    // From here on a failure is one of the channel: dropping it ends it.
    match reply.ready().await {
        Ok(stream) => {
            part(stream, deadline).await;
            Ok(channel)
        }
        Err(error) => {
            channel.kill();
            Err(error)
        }
    }
}

pub(super) type Accepted = Result<KvChannel, ConnectError>;

/// A channel, and the place among the accepted ones that it has taken.
pub(super) type Answered = Result<(KvChannel, mpsc::OwnedPermit<Accepted>), ConnectError>;

/// The server's side. `managed` is our address where a connection manager connects the queue pairs.
pub(super) async fn answer<S: AsyncRead + AsyncWrite + Unpin>(
    shared: &Arc<Shared>,
    incoming: Incoming<S>,
    managed: Option<SocketAddr>,
    chosen: Chosen,
    channels: mpsc::Sender<Accepted>,
) -> Answered {
    let mut offer = incoming.hello(shared.epoch).await?;
    let deadline = offer.deadline();
    let peer = offer.hello.clone();
    if peer.epoch == shared.epoch {
        return Err(offer.reject(Reject::Unsupported { what: TO_ITSELF.to_owned() }).await);
    }
    let pool = match setup::peer_pool(&peer) {
        Ok(pool) => pool,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    // Before anything is built: whoever does not accept has a bounded number of channels, and the peers wait.
    // It fails when the listener was dropped.
    let place = offer.prepare(async {
        channels.reserve_owned().await.map_err(|_| ConnectError::Closed { stage: Stage::Listen })
    });
    let place = place.await?;
    let claim = Claimed::take(shared, &peer, peer.connection_id, &peer.dead, deadline);
    let claimed = match offer.prepare(claim).await? {
        Ok(claimed) => claimed,
        Err(winner) => return Err(offer.reject(Reject::Duplicate { winner }).await),
    };
    let built = match setup::build(shared, peer.qps.len().clamp(1, shared.max_qps())).await {
        Ok(built) => built,
        Err(error) => return Err(busy(offer, error).await),
    };
    let entrance = match managed {
        None => None,
        Some(at) => Some(Entrance::open(shared, at).await?),
    };
    let mut ours = setup::hello(shared, &built, peer.connection_id, Vec::new());
    ours.cm_port = entrance.as_ref().map_or(0, Entrance::port);
    let opening = if managed.is_some() { Opening::Listen } else { Opening::Free };
    let agreed = agree(&ours, &peer).and_then(|agreed| {
        // What the protocol cannot run with is refused while the peer can still be told.
        let proto = setup::protocol(shared, &built, &peer, &agreed, opening)?;
        Ok((agreed, proto))
    });
    let (agreed, proto) = match agreed {
        Ok(agreed) => agreed,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    let (accepted, built) = match &entrance {
        None => {
            let built = match setup::connect(shared, built, &peer, &agreed, false).await {
                Ok(built) => built,
                Err(error) => return Err(busy(offer, error).await),
            };
            (offer.accept(&ours).await?, built)
        }
        Some(entrance) => {
            let admit = entrance.admit(shared, built, &peer, &agreed, deadline);
            both(offer.accept(&ours), admit).await?
        }
    };
    drop(entrance);
    let parts = (built, proto, pool);
    let channel = establish(claimed, parts, &ours, &peer, &agreed, chosen, deadline).await?;
    match accepted.finish().await {
        Ok(stream) => {
            if managed.is_some() {
                see_off(stream, deadline).await;
            }
            Ok((channel, place))
        }
        Err(error) => {
            channel.kill();
            Err(error)
        }
    }
}

/// What this side could not have is for its own log; the peer hears that there is no room for it now.
async fn busy<S: AsyncRead + AsyncWrite + Unpin>(offer: Offer<S>, error: ConnectError) -> ConnectError {
    if let ConnectError::Resources { .. } | ConnectError::Descriptors { .. } = error {
        offer.reject(Reject::Busy).await;
    }
    error
}

/// Both results, or the error that comes first.
async fn both<A, B, E>(
    a: impl Future<Output = Result<A, E>>,
    b: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut from_a, mut from_b) = (None, None);
    poll_fn(|cx| {
        if from_a.is_none()
            && let Poll::Ready(done) = a.as_mut().poll(cx)
        {
            from_a = Some(done?);
        }
        if from_b.is_none()
            && let Poll::Ready(done) = b.as_mut().poll(cx)
        {
            from_b = Some(done?);
        }
        match (from_a.take(), from_b.take()) {
            (Some(a), Some(b)) => Poll::Ready(Ok((a, b))),
            (a, b) => {
                (from_a, from_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

/// Commits the claim, and starts the channel's driver.
async fn establish(
    mut claimed: Claimed,
    (built, proto, pool): (Built, Config, PeerPool),
    ours: &Hello,
    peer: &Hello,
    agreed: &Agreed,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let shared = claimed.shared.clone();
    let shared = &shared;
    // Before it is a channel: nothing was carried yet, and an attempt that is given up leaves nothing.
    let first = match CounterPort::of(&shared.device) {
        Some(rail) => Some(FirstReading::take(rail, Sysfs::default(), &shared.runtime).await),
        None => None,
    };
    let (peer_epoch, connection) = (claimed.peer, claimed.connection);
    let committed = shared.peers.until(|| match shared.peers.commit(peer_epoch, connection) {
        Answer::Wait => None,
        Answer::Taken(winner) => Some(Err(ConnectError::Duplicate { winner })),
        Answer::Yes(ledger) => Some(Ok(ledger)),
    });
    let ledger = deadline.run(Stage::Ready, committed).await?;
    // From here on the channel's end gives the pair back.
    claimed.done = true;
    let peers = shared.peers.clone();
    let on_end = Box::new(move |ledger| peers.ended(peer_epoch, connection, ledger));
    let (driver, completions) = setup::driver(shared, built, peer, pool, proto, ledger, on_end);
    let gid = |hello: &Hello| hello.qps.first().map_or([0; 16], |qp| qp.gid);
    let check = first.map(|first| {
        let facts = Facts {
            mtu: agreed.path_mtu,
            block_bytes: shared.pool.layout().block_bytes(),
            same_port: gid(ours) == gid(peer) && gid(ours) != [0; 16],
        };
        PathCheck::new(&driver, first, facts, &shared.runtime)
    });
    let inner = Arc::new(ChannelInner {
        driver: driver.clone(),
        facts: PathFacts {
            fabric: shared.device.transport().strip_prefix("verbs-"),
            device: shared.device.name().to_owned(),
            port: shared.device.port(),
            profile: shared.device.profile().map(|p| p.to_string()),
            bootstrap: chosen,
            notify: match agreed.notify {
                Notify::Imm => "imm",
                Notify::Send => "send",
            },
            ordered: agreed.ordered,
            gid: gid(ours),
            peer_gid: gid(peer),
            mtu: agreed.path_mtu,
        },
        check,
        connection,
        peer_epoch,
        peer_name: peer.name.clone(),
    });
    shared.peers.live(peer_epoch, connection, &inner);
    // After that: it may end here.
    driver.look();
    start(shared, &driver, completions)?;
    Ok(KvChannel { inner })
}

fn start(
    shared: &Shared,
    driver: &Arc<KvDriver>,
    completions: provider::Channel,
) -> Result<(), ConnectError> {
    match reactor::spawn(&shared.runtime, completions, driver.clone()) {
        Ok(task) => {
            driver.set_task(task);
            driver.watch_lines();
            Ok(())
        }
        Err(error) => {
            // No task will drive it: end it here.
            reactor::Drive::abandon(&**driver);
            Err(ConnectError::resources(error))
        }
    }
}
