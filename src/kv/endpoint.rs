//! An endpoint: a pool on a device, with an epoch, that listens and connects.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

use super::channel::{ChannelInner, KvChannel, PathFacts};
use super::config::KvConfig;
use super::driver::KvDriver;
use super::peers::{Answer, Peers};
use super::pool::KvPool;
use super::setup::{self, Built};
use crate::connect::{
    Agreed, ConnectError, Deadline, Expect, Hello, Incoming, Notify, OobListener, Reject, Stage, agree,
    client, dial,
};
use crate::device::{Device, ProtectionDomain};
use crate::error::DeviceError;
use crate::provider;
use crate::random::random_u64;
use crate::reactor;

/// Channels that were accepted and wait for [`KvListener::accept`]. Handshakes beyond wait their turn.
const BACKLOG: usize = 128;

/// One side of channels: a pool on a device, under a random epoch. Another epoch is another life of the process.
///
/// Between two endpoints there is one channel at a time, whoever dialled.
#[derive(Clone, Debug)]
pub struct KvEndpoint {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    pub(super) pool: KvPool,
    pub(super) config: KvConfig,
    pub(super) epoch: u64,
    pub(super) name: String,
    pub(super) runtime: Handle,
    peers: Arc<Peers>,
}

/// Whom [`KvEndpoint::connect_to`] must find at the address. What is `None` is not compared.
#[derive(Clone, Debug, Default)]
pub struct PeerIdentity {
    /// Its epoch.
    pub epoch: Option<u64>,
    /// Its name.
    pub name: Option<String>,
}

impl KvEndpoint {
    /// An endpoint on the pool's device. Its channels are driven by the runtime that this is called in.
    ///
    /// # Errors
    /// [`DeviceError::NoRuntime`] outside of a tokio runtime; [`DeviceError::Config`] and [`DeviceError::Limit`] when
    /// `config` is not valid or does not fit the device; [`DeviceError::Unsupported`] when it requires RDMA.
    pub fn new(pool: KvPool, config: KvConfig) -> Result<Self, DeviceError> {
        Self::named(pool, config, "")
    }

    /// As [`KvEndpoint::new`], with a name that peers see, of at most 64 bytes. Names need not be unique.
    ///
    /// # Errors
    /// As [`KvEndpoint::new`], and [`DeviceError::Config`] for a longer name.
    pub fn named(pool: KvPool, config: KvConfig, name: &str) -> Result<Self, DeviceError> {
        let runtime = Handle::try_current().map_err(|_| DeviceError::NoRuntime)?;
        if name.len() > 64 {
            return Err(DeviceError::Config {
                what: "endpoint name",
                got: name.to_owned(),
                expected: "at most 64 bytes".to_owned(),
            });
        }
        let pd = pool.pd().clone();
        let device = pd.device().clone();
        if config.require_rdma && !device.is_rdma() {
            return Err(DeviceError::Unsupported {
                what: "RDMA, which KvConfig::require_rdma asks for,",
                device: device.name().to_owned(),
                fix: "open an RDMA device, or do not require it",
            });
        }
        // Checked here, so that the mistake is found before anybody connects.
        config.clone().fit(device.capabilities())?;
        let os = |source| DeviceError::Os { what: "reading random bytes", source };
        let epoch = random_u64().map_err(os)?;
        let peers = Arc::new(Peers::new(epoch));
        let name = name.to_owned();
        Ok(Self { shared: Arc::new(Shared { device, pd, pool, config, epoch, name, runtime, peers }) })
    }

    /// This endpoint's epoch: random, the same for as long as it lives.
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The pool.
    pub fn pool(&self) -> &KvPool {
        &self.shared.pool
    }

    /// Listens for peers on a TCP address; port 0 takes a free one ([`KvListener::local_addr`] says which). Peers are not
    /// authenticated: listen on trusted networks only.
    ///
    /// # Errors
    /// [`ConnectError::AddrInUse`], or [`ConnectError::Io`] for another refusal of the system, at once; and
    /// [`ConnectError::Resources`] outside of a tokio runtime, or with [`DeviceError::NoManualConnect`] on a device that
    /// only RDMA_CM can connect.
    ///
    /// # Cancel safety
    /// It does not wait; dropping the future leaves no listener.
    pub async fn listen(&self, address: SocketAddr) -> Result<KvListener, ConnectError> {
        self.listen_with(address, BACKLOG).await
    }

    /// As [`listen`](Self::listen), with room for `backlog` channels that are not accepted yet.
    async fn listen_with(&self, address: SocketAddr, backlog: usize) -> Result<KvListener, ConnectError> {
        inside_a_runtime()?;
        self.shared.device.check_oob().map_err(ConnectError::resources)?;
        let listener = OobListener::bind(address).await?;
        let local = listener.local_addr();
        let (sender, channels) = mpsc::channel(backlog);
        let shared = self.shared.clone();
        let task = self.shared.runtime.spawn(accept_all(shared, listener, sender));
        Ok(KvListener { local, channels, task })
    }

    /// Connects to the endpoint that listens at `target` (`host:port` or `[v6]:port`), whoever it is.
    ///
    /// Between two endpoints there is one channel at a time. When there is one already, or the peer dials at the same
    /// moment, this gives the one that is kept: [`KvChannel::same`] tells.
    ///
    /// # Errors
    /// By the deadline in [`KvConfig::connect_timeout`], name look-up included; a failed connect leaves nothing.
    /// [`ConnectError::Resources`] with [`DeviceError::NoManualConnect`] on a device that only RDMA_CM can connect.
    /// [`ConnectError::fault`] says who has to change something.
    ///
    /// # Cancel safety
    /// Dropping the future gives the attempt up and releases what it had.
    pub async fn connect(&self, target: impl ToString) -> Result<KvChannel, ConnectError> {
        self.connect_to(target, &PeerIdentity::default()).await
    }

    /// As [`KvEndpoint::connect`], and refuses any other endpoint than `peer`. That finds mistakes and restarts; it is no
    /// authentication.
    ///
    /// # Errors
    /// As [`KvEndpoint::connect`], and [`ConnectError::IdentityMismatch`].
    ///
    /// # Cancel safety
    /// As [`KvEndpoint::connect`].
    pub async fn connect_to(
        &self,
        target: impl ToString,
        peer: &PeerIdentity,
    ) -> Result<KvChannel, ConnectError> {
        inside_a_runtime()?;
        self.shared.device.check_oob().map_err(ConnectError::resources)?;
        let deadline = Deadline::after(self.shared.config.connect_timeout);
        let expect = Expect { epoch: peer.epoch, name: peer.name.clone() };
        match dial_peer(&self.shared, &target.to_string(), &expect, deadline).await {
            // The channel that the peer or a dial of its own has made with us.
            Err(ConnectError::Duplicate { winner }) => {
                let peers = &self.shared.peers;
                let found = deadline
                    .run(Stage::HelloReply, async { Ok(peers.until(|| peers.channel(winner)).await) });
                Ok(KvChannel { inner: found.await? })
            }
            other => other,
        }
    }
}

/// Sockets and timers of a bootstrap belong to the runtime that polls it.
fn inside_a_runtime() -> Result<(), ConnectError> {
    match Handle::try_current() {
        Ok(_) => Ok(()),
        Err(_) => Err(ConnectError::resources(DeviceError::NoRuntime)),
    }
}

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

async fn dial_peer(
    shared: &Arc<Shared>,
    target: &str,
    expect: &Expect,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let stream = dial(target, deadline).await?;
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
    let checked = setup::protocol(shared, &built, &peer, &agreed).and_then(|_| setup::peer_pool(&peer));
    if let Err(reject) = checked {
        return Err(reply.reject(reject).await);
    }
    let built = setup::connect(shared, built, &peer, &agreed, true).await?;
    let channel = match establish(claimed, built, &ours, &peer, &agreed, deadline).await {
        Err(ConnectError::Duplicate { winner }) => {
            return Err(reply.reject(Reject::Duplicate { winner }).await);
        }
        channel => channel?,
    };
    // From here on a failure is one of the channel: dropping it ends it.
    match reply.ready().await {
        Ok(_) => Ok(channel),
        Err(error) => {
            channel.kill();
            Err(error)
        }
    }
}

type Accepted = Result<KvChannel, ConnectError>;

async fn accept_all(shared: Arc<Shared>, listener: OobListener, channels: mpsc::Sender<Accepted>) {
    let mut handshakes = JoinSet::new();
    loop {
        let incoming = listener.accept(shared.config.connect_timeout).await;
        // Those that have ended meanwhile.
        while handshakes.try_join_next().is_some() {}
        match incoming {
            Ok(incoming) => {
                let (shared, channels) = (shared.clone(), channels.clone());
                handshakes.spawn(async move {
                    let from = incoming.peer();
                    match answer(&shared, incoming, channels).await {
                        Ok((channel, place)) => drop(place.send(Ok(channel))),
                        Err(error) => tracing::debug!(%from, %error, "a handshake failed"),
                    }
                });
            }
            Err(error) => {
                tracing::error!(%error, "the listener failed");
                // The receiver is gone when the listener was dropped: then nobody wants to know.
                let _ = channels.send(Err(error)).await;
                return;
            }
        }
    }
}

/// One handshake, and the place among the accepted channels that it has taken.
async fn answer(
    shared: &Arc<Shared>,
    incoming: Incoming<TcpStream>,
    channels: mpsc::Sender<Accepted>,
) -> Result<(KvChannel, mpsc::OwnedPermit<Accepted>), ConnectError> {
    let mut offer = incoming.hello(shared.epoch).await?;
    let deadline = offer.deadline();
    let peer = offer.hello.clone();
    if peer.epoch == shared.epoch {
        return Err(offer.reject(Reject::Unsupported { what: TO_ITSELF.to_owned() }).await);
    }
    if let Err(reject) = setup::peer_pool(&peer) {
        return Err(offer.reject(reject).await);
    }
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
    let built = setup::build(shared, peer.qps.len().clamp(1, shared.max_qps())).await?;
    let ours = setup::hello(shared, &built, peer.connection_id, Vec::new());
    let agreed = agree(&ours, &peer).and_then(|agreed| {
        // What the protocol cannot run with is refused while the peer can still be told.
        setup::protocol(shared, &built, &peer, &agreed)?;
        Ok(agreed)
    });
    let agreed = match agreed {
        Ok(agreed) => agreed,
        Err(reject) => return Err(offer.reject(reject).await),
    };
    let built = setup::connect(shared, built, &peer, &agreed, false).await?;
    let accepted = offer.accept(&ours).await?;
    let channel = establish(claimed, built, &ours, &peer, &agreed, deadline).await?;
    match accepted.finish().await {
        Ok(_) => Ok((channel, place)),
        Err(error) => {
            channel.kill();
            Err(error)
        }
    }
}

/// Commits the claim, and starts the channel's driver.
async fn establish(
    mut claimed: Claimed,
    built: Built,
    ours: &Hello,
    peer: &Hello,
    agreed: &Agreed,
    deadline: Deadline,
) -> Result<KvChannel, ConnectError> {
    let shared = claimed.shared.clone();
    let shared = &shared;
    let (peer_epoch, connection) = (claimed.peer, claimed.connection);
    let proto = setup::protocol(shared, &built, peer, agreed).map_err(Reject::local_error)?;
    let peer_pool = setup::peer_pool(peer).map_err(Reject::local_error)?;
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
    let (driver, completions) = setup::driver(shared, built, peer, peer_pool, proto, ledger, on_end);
    let gid = |hello: &Hello| hello.qps.first().map_or([0; 16], |qp| qp.gid);
    let inner = Arc::new(ChannelInner {
        driver: driver.clone(),
        facts: PathFacts {
            transport: if shared.device.is_rdma() { "verbs" } else { "tcp" },
            fabric: shared.device.transport().strip_prefix("verbs-"),
            device: shared.device.name().to_owned(),
            port: shared.device.port(),
            profile: shared.device.profile().map(|p| p.to_string()),
            notify: match agreed.notify {
                Notify::Imm => "imm",
                Notify::Send => "send",
            },
            ordered: agreed.ordered,
            gid: gid(ours),
            peer_gid: gid(peer),
            mtu: agreed.path_mtu,
        },
        connection,
        peer_epoch,
        peer_name: peer.name.clone(),
    });
    shared.peers.live(peer_epoch, connection, &inner);
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
            Ok(())
        }
        Err(error) => {
            // No task will drive it: end it here.
            reactor::Drive::abandon(&**driver);
            Err(ConnectError::resources(error))
        }
    }
}

impl Shared {
    /// Queue pairs that the device can give one channel.
    fn max_qps(&self) -> usize {
        let fits = |n: &usize| self.config.clone().qps(*n).fit(self.device.capabilities()).is_ok();
        (1..=super::config::MAX_QPS).rev().find(fits).unwrap_or(1)
    }
}

/// A listening endpoint. Dropping it stops listening; channels that were accepted live on, those that were not are
/// closed.
#[derive(Debug)]
pub struct KvListener {
    local: SocketAddr,
    channels: mpsc::Receiver<Accepted>,
    task: JoinHandle<()>,
}

impl KvListener {
    /// The address, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The next channel. Handshakes go on in the background, each within its deadline: a peer that sends garbage, or
    /// nothing, costs only its own connection. 128 channels wait to be accepted; further handshakes wait for room.
    ///
    /// # Cancel safety
    /// Dropping the future loses no channel.
    ///
    /// # Errors
    /// When the listening socket itself has failed, or the runtime of the endpoint is gone. After the first such error
    /// every call fails.
    pub async fn accept(&mut self) -> Result<KvChannel, ConnectError> {
        // The task ends early only with its runtime.
        self.channels.recv().await.unwrap_or_else(|| Err(ConnectError::resources(DeviceError::NoRuntime)))
    }
}

impl Drop for KvListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::SoftConfig;
    use crate::kv::Layout;

    async fn endpoint(connect: Duration) -> KvEndpoint {
        let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
        let pool = KvPool::new(&pd, Layout::contiguous(1, 1, 64).unwrap()).await.unwrap();
        KvEndpoint::new(pool, KvConfig::default().connect_timeout(connect)).unwrap()
    }

    /// Whoever does not accept keeps a bounded number of channels: peers beyond wait, and then give up.
    #[tokio::test]
    async fn b1_channels_that_nobody_accepts_are_bounded() {
        let long = Duration::from_secs(60);
        let server = endpoint(long).await;
        let mut listener = server.listen_with("127.0.0.1:0".parse().unwrap(), 2).await.unwrap();
        let mut kept = Vec::new();
        for _ in 0..2 {
            let client = endpoint(long).await;
            kept.push(client.connect(listener.local_addr()).await.unwrap());
        }
        let error =
            endpoint(Duration::from_millis(300)).await.connect(listener.local_addr()).await.unwrap_err();
        assert!(matches!(error, ConnectError::Timeout { stage: Stage::HelloReply, .. }), "{error:?}");
        // One is taken: one more comes in.
        listener.accept().await.unwrap();
        kept.push(endpoint(long).await.connect(listener.local_addr()).await.unwrap());
    }
}
