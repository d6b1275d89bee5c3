//! The two sides of a connect: claim the pair, build, agree, commit, drive.
//!
//! The frames are the same over either bootstrap. Out of band, each side connects its queue pairs by the addresses in the
//! peer's hello, the server before it replies. By a connection manager (`managed`), the client asks for each queue pair
//! after the reply, which says where; the server answers until it is told that they are ready.
//!
//! Whatever fails on the way gives back what it had (B4): a claim, queue pairs, a place among the accepted channels.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use super::bootstrap::{Chosen, Way};
use super::channel::{ChannelInner, KvChannel};
use super::dialling::{Managed, dial_managed};
use super::driver::KvDriver;
use super::endpoint::Shared;
use super::join::{Rails, gone, join_hello, join_reply, leave_out};
use super::managed::{self, Admissions};
use super::pass::Pass;
use super::path::{PathFacts, RailFacts};
use super::path_check::{Facts, FirstReading, PathCheck};
use super::peers::Answer;
use super::proto::{Config, Opening};
use super::rail::why;
use super::setup::{self, Built};
use super::targets::PeerPool;
#[cfg(feature = "tls")]
use crate::connect::Admission;
use crate::connect::{
    ConnectError, Deadline, Expect, Framed, Hello, Incoming, Offer, PeerAuth, Reject, Role, Stage, TO_ITSELF,
    agree, authenticate, client, dial, part, see_off,
};
use crate::counters::{CounterPort, Sysfs};
use crate::provider;
use crate::reactor;

/// A claimed pair: given back unless it became a channel.
struct Claimed {
    shared: Arc<Shared>,
    peer: u64,
    /// Where the peer is.
    from: Option<IpAddr>,
    connection: u64,
    done: bool,
}

impl Claimed {
    /// Claims the pair with `peer`, which has shown to be `who`, for `connection`, or says why it is refused. Waits for a connection
    /// that is coming to its end.
    async fn take(
        shared: &Arc<Shared>,
        (peer, who, from): (&Hello, &PeerAuth, Option<IpAddr>),
        connection: u64,
        dead: &[u64],
        deadline: Deadline,
    ) -> Result<Result<Self, Reject>, ConnectError> {
        let answer = shared.peers.until(|| match shared.peers.claim(peer.epoch, who, connection, dead) {
            Answer::Wait => None,
            Answer::Taken(winner) => Some(Err(Reject::Duplicate { winner })),
            Answer::Other => Some(Err(Reject::NotAdmitted { peer: who.to_string() })),
            Answer::Yes(()) => Some(Ok(())),
        });
        let answer = deadline.run(Stage::Hello, async { Ok(answer.await) }).await?;
        let (shared, peer) = (shared.clone(), peer.epoch);
        Ok(answer.map(|()| Self { shared, peer, from, connection, done: false }))
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
            #[cfg(feature = "tls")]
            if let Admission::Tls(tls) = &shared.config.admission {
                let (stream, identity) = tls.connect(stream, target, deadline).await?;
                return ask(shared, Framed::known(stream, identity), None, expect, chosen, deadline).await;
            }
            ask(shared, Framed::plain(stream), None, expect, chosen, deadline).await
        }
        Way::Cm => {
            let (stream, way) = dial_managed(shared, target, deadline).await?;
            ask(shared, Framed::plain(stream), Some(way), expect, chosen, deadline.of(way.at)).await
        }
    }
}

/// The client's side. `managed` says what carries the handshake where a connection manager connects the queue pairs.
async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    shared: &Arc<Shared>,
    framed: Framed<S>,
    managed: Option<Managed>,
    expect: &Expect,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let built = setup::build(shared, managed.is_some()).await?;
    let connection = setup::new_id()?;
    let first = setup::first_of(&built, managed.map(|way| way.device));
    let ours = setup::hello(shared, &built, &[], first, connection, shared.peers.dead());
    let framed = authenticate(framed, &shared.config.admission, shared.epoch, deadline).await?;
    let auth = framed.identity().clone();
    match introduce(shared, framed, (built, &ours), managed, expect, chosen, deadline).await {
        Err(ConnectError::Duplicate { winner }) => kept(shared, winner, &auth, expect, deadline).await,
        other => other,
    }
}

/// The channel that the peer, or a dial of its own, has made with us, which is kept instead of a new one. Who names a channel is not
/// whom it is with: that has to be the one that was asked for, and who has answered.
async fn kept(
    shared: &Shared,
    winner: u64,
    who: &PeerAuth,
    expect: &Expect,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let channel = shared.peers.until(|| shared.peers.channel(winner));
    let inner = deadline.run(Stage::HelloReply, async { Ok(channel.await) }).await?;
    expect.check(&inner.peer_name, inner.peer_epoch)?;
    match inner.peer_auth.may_be(who) {
        true => Ok(KvChannel { inner }),
        false => Err(ConnectError::IdentityMismatch {
            expected: who.to_string(),
            got: inner.peer_auth.to_string(),
        }),
    }
}

/// The client says hello, and connects what the two sides agree on.
async fn introduce<S: AsyncRead + AsyncWrite + Unpin>(
    shared: &Arc<Shared>,
    framed: Framed<S>,
    (built, ours): (Built, &Hello),
    managed: Option<Managed>,
    expect: &Expect,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let (auth, connection) = (framed.identity().clone(), ours.connection_id);
    let reply = client(framed, ours, expect, deadline).await?;
    let (peer, agreed) = (reply.reply.clone(), reply.agreed.clone());
    if peer.epoch == shared.epoch {
        let error = reply.reject(Reject::Unsupported { what: TO_ITSELF.to_owned() }).await;
        return Err(error);
    }
    let claimed =
        match Claimed::take(shared, (&peer, &auth, deadline.address()), connection, &[], deadline).await? {
            Ok(claimed) => claimed,
            Err(reject) => return Err(reply.reject(reject).await),
        };
    let layout = match setup::peer_layout(&peer) {
        Ok(layout) => layout,
        Err(reject) => return Err(reply.reject(reject).await),
    };
    let pass = Pass::new(shared.epoch, peer.epoch, reply.binding());
    let connected = async {
        let rails = join_reply(shared, built, &peer, &agreed).await?;
        match managed {
            None => rails.connect(shared, true).await,
            Some(way) => managed::ask_all(shared, rails, (&peer, &pass), way.at, deadline).await,
        }
    };
    let (rails, left_out) = match connected.await {
        // Only the side that dials finds that out, and the other one is told.
        Err(error) if is_for_the_peer(&error) => {
            reply.reject(Reject::Unsupported { what: why(&error) }).await;
            return Err(error);
        }
        connected => connected?,
    };
    let opening = if managed.is_some() { Opening::Speak } else { Opening::Free };
    let proto = match setup::protocol(shared, layout, &rails, &peer, &agreed, opening) {
        Ok(proto) => proto,
        Err(reject) => return Err(reply.reject(reject).await),
    };
    let late = if managed.is_some() { gone(&left_out) } else { rails.late(&left_out) };
    let channel =
        match establish(claimed, rails, proto, (&peer, auth, pass), Side::Client, chosen, deadline).await {
            Err(ConnectError::Duplicate { winner }) => {
                return Err(reply.reject(Reject::Duplicate { winner }).await);
            }
            channel => channel?,
        };
    // From here on a failure is one of the channel: dropping it ends it.
    match reply.ready(&late).await {
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

/// An error that the other side should hear of: it has done nothing wrong, and waits.
fn is_for_the_peer(error: &ConnectError) -> bool {
    matches!(error, ConnectError::NoPath { .. } | ConnectError::Resources { .. })
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
    let from = Some(incoming.peer().ip());
    let mut offer = incoming.hello(shared.epoch, &shared.config.admission).await?;
    let deadline = offer.deadline();
    let auth = offer.identity().clone();
    let peer = offer.hello.clone();
    if peer.epoch == shared.epoch {
        return Err(offer.reject(Reject::Unsupported { what: TO_ITSELF.to_owned() }).await);
    }
    let layout = match setup::peer_layout(&peer) {
        Ok(layout) => layout,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    // Before anything is built: whoever does not accept has a bounded number of channels, and the peers wait.
    // It fails when the listener was dropped.
    let place = offer.prepare(async {
        channels.reserve_owned().await.map_err(|_| ConnectError::Closed { stage: Stage::Listen })
    });
    let place = place.await?;
    let claim = Claimed::take(shared, (&peer, &auth, from), peer.connection_id, &peer.dead, deadline);
    let claimed = match offer.prepare(claim).await? {
        Ok(claimed) => claimed,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    let (mut built, with) = match setup::build_answer(shared, &peer, managed.is_some()).await {
        Ok(Ok(built)) => built,
        Ok(Err(reject)) => return Err(offer.reject(reject).await),
        Err(error) if is_for_the_peer(&error) => {
            offer.reject(Reject::Unsupported { what: why(&error) }).await;
            return Err(error);
        }
        Err(error) => return Err(busy(offer, error).await),
    };
    let first = setup::first_of(&built, managed.map(|_| shared.pool.first_device()));
    let entrances = match managed {
        None => Vec::new(),
        Some(at) => managed::open_all(shared, &mut built, first, at).await?,
    };
    let mut ours = setup::hello(shared, &built, &with, first, peer.connection_id, Vec::new());
    managed::announce(&mut ours, &entrances);
    let opening = if managed.is_some() { Opening::Listen } else { Opening::Free };
    let agreed = match agree(&ours, &peer, Role::Server) {
        Ok(agreed) => agreed,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    let rails = join_hello(shared, built, &peer, &agreed);
    // What the protocol cannot run with is refused while the peer can still be told.
    if let Err(reject) = setup::protocol(shared, layout, &rails, &peer, &agreed, opening) {
        return Err(offer.reject(reject).await);
    }
    let pass = Pass::new(shared.epoch, peer.epoch, offer.binding());
    let (accepted, rails) = match managed {
        None => {
            let (rails, left_out) = match rails.connect(shared, false).await {
                Ok(connected) => connected,
                Err(error) => return Err(busy(offer, error).await),
            };
            leave_out(&mut ours, &rails, &left_out);
            let mut accepted = offer.accept(&ours).await?;
            let late = std::mem::take(&mut accepted.late);
            (accepted, rails.complete(shared, late).await?)
        }
        Some(_) => {
            let admissions = Admissions::start(shared, rails, entrances, &pass, deadline);
            let accepted = offer.accept(&ours).await?;
            let left_out: Vec<usize> = accepted.late.iter().map(|late| late.rail.into()).collect();
            (accepted, admissions.finish(shared, &left_out).await?.check(shared)?)
        }
    };
    // Without those that were left out meanwhile.
    let proto = match setup::protocol(shared, layout, &rails, &peer, &agreed, opening) {
        Ok(proto) => proto,
        Err(reject) => return Err(reject.local_error()),
    };
    let channel =
        establish(claimed, rails, proto, (&peer, auth, pass), Side::Server, chosen, deadline).await?;
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

/// Which side of the handshake we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// Commits the claim, and starts the channel's driver.
async fn establish(
    mut claimed: Claimed,
    Rails { rails, warnings, .. }: Rails,
    proto: (Config, PeerPool),
    (peer, peer_auth, pass): (&Hello, PeerAuth, Pass),
    side: Side,
    chosen: Chosen,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let shared = claimed.shared.clone();
    let shared = &shared;
    let devices = shared.pool.devices();
    // Before it is a channel: nothing was carried yet, and an attempt that is given up leaves nothing.
    let mut ports: Vec<CounterPort> = Vec::new();
    for port in rails.iter().filter_map(|j| CounterPort::of(devices[j.device].pd.device())) {
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    let first = match ports.is_empty() {
        // Bytes on a device that does not count are missing from the sum.
        _ if rails.iter().any(|j| CounterPort::of(devices[j.device].pd.device()).is_none()) => None,
        true => None,
        false => Some(FirstReading::take(ports, Sysfs::default(), &shared.runtime).await),
    };
    let facts: Vec<RailFacts> = rails.iter().map(|j| RailFacts::new(shared, j)).collect();
    let (peer_epoch, connection) = (claimed.peer, claimed.connection);
    let committed = shared.peers.until(|| match shared.peers.commit(peer_epoch, &peer_auth, connection) {
        Answer::Wait => None,
        Answer::Taken(winner) => Some(Err(ConnectError::Duplicate { winner })),
        Answer::Other => Some(Err(Reject::NotAdmitted { peer: peer_auth.to_string() }.local_error())),
        Answer::Yes(ledger) => Some(Ok(ledger)),
    });
    let ledger = deadline.run(Stage::Ready, committed).await?;
    // From here on the channel's end gives the pair back.
    claimed.done = true;
    let peers = shared.peers.clone();
    let on_end = Box::new(move |ledger| peers.ended(peer_epoch, connection, ledger));
    let (client, managed) = (side == Side::Client, chosen.way == Way::Cm);
    let (driver, completions) =
        setup::driver(shared, rails, (peer, pass), proto, ledger, (client, managed), on_end);
    let check = first.map(|first| {
        let facts = Facts {
            mtu: facts.iter().map(|rail| rail.mtu).min().unwrap_or_default(),
            block_bytes: shared.pool.layout().block_bytes(),
            same_port: facts.iter().any(RailFacts::is_same_port),
        };
        PathCheck::new(&driver, first, facts, &shared.runtime)
    });
    let inner = Arc::new(ChannelInner {
        driver: driver.clone(),
        facts: PathFacts { bootstrap: chosen, rails: facts, warnings },
        check,
        connection,
        peer_epoch,
        peer_name: peer.name.clone(),
        peer_auth,
    });
    shared.peers.live(peer_epoch, claimed.from, connection, &inner);
    // After that: it may end here.
    driver.look();
    start(shared, &driver, completions)?;
    Ok(KvChannel { inner })
}

/// One task a rail. One that is not there has none until it comes.
fn start(
    shared: &Shared,
    driver: &Arc<KvDriver>,
    completions: Vec<Option<provider::Channel>>,
) -> Result<(), ConnectError> {
    for (rail, channel) in completions.into_iter().enumerate() {
        let Some(channel) = channel else { continue };
        match reactor::spawn(&shared.runtime, channel, KvDriver::of_rail(driver, rail)) {
            Ok(task) => driver.set_task(rail, task),
            Err(error) => {
                // No task will drive it: end it here.
                driver.abandon_all();
                return Err(ConnectError::resources(error));
            }
        }
    }
    driver.watch_lines();
    driver.probe_absent();
    Ok(())
}
