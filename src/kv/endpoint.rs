//! An endpoint: a pool on a device, or on several, with an epoch, that listens and connects.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

#[cfg(feature = "tls")]
use super::bootstrap::Way;
use super::bootstrap::{Bootstrap, Chosen};
use super::channel::KvChannel;
use super::config::{KvConfig, MAX_QPS};
use super::door::Door;
use super::handshake::{Accepted, dial_peer};
use super::peers::Peers;
use super::pool::KvPool;
#[cfg(feature = "tls")]
use crate::connect::Admission;
use crate::connect::{ConnectError, Deadline, Expect, Stage};
use crate::device::{Device, ProtectionDomain, SoftTransport};
use crate::error::{DeviceError, chain};
use crate::random::random_u64;

/// Channels that were accepted and wait for [`KvListener::accept`]. Handshakes beyond wait their turn.
const BACKLOG: usize = 128;

/// One side of channels: a pool on a device, or on several, under a random epoch. Another epoch is another life of the process.
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
    pub(super) peers: Arc<Peers>,
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
    /// An endpoint on the pool's devices, which are its rails. Its channels are driven by the runtime that this is called in.
    ///
    /// # Errors
    /// [`DeviceError::NoRuntime`] outside of a tokio runtime; [`DeviceError::Config`] and [`DeviceError::Limit`] when
    /// `config` is not valid or does not fit a device; [`DeviceError::Unsupported`] when it requires RDMA, or shared memory, and
    /// a device is of another kind; [`DeviceError::Rail`] when it asks for every rail and the pool is without one.
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
        let rails = pool.devices();
        if config.qps.saturating_mul(rails.len()) > MAX_QPS && rails.len() > 1 {
            return Err(DeviceError::Config {
                what: "KvConfig::qps",
                got: format!("{} on each of {} rails", config.qps, rails.len()),
                expected: "at most 64 queue pairs on all rails together".to_owned(),
            });
        }
        for rail in rails {
            let device = rail.pd.device();
            check_kind(&config, device)?;
            config.gpu_paths.check(&pool, device)?;
            match rail.refusal() {
                // Checked here, so that the mistake is found before anybody connects.
                None => _ = config.clone().fit(device.capabilities())?,
                Some(reason) if config.strict_rails => {
                    return Err(DeviceError::Rail { device: device.name().to_owned(), reason });
                }
                Some(_) => {}
            }
        }
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

    /// The first of its pool's devices that can be used.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The pool.
    pub fn pool(&self) -> &KvPool {
        &self.shared.pool
    }

    /// Listens for peers, in the way that [`KvConfig::bootstrap`] says: on a TCP address, or on an address of the device for
    /// its connection manager. Port 0 takes a free one ([`KvListener::local_addr`] says which). [`KvConfig::admission`] says who
    /// is let in.
    ///
    /// # Errors
    /// [`ConnectError::AdmissionRequired`] for an address that is not a loopback one, unless [`KvConfig::admission`] has a key,
    /// or says that anybody may connect; [`ConnectError::AddrInUse`], or [`ConnectError::Io`] and [`ConnectError::Manager`] for another refusal of the system,
    /// at once; and [`ConnectError::Resources`] outside of a tokio runtime, or with [`DeviceError::NoManualConnect`] when
    /// [`Bootstrap::Oob`](super::Bootstrap::Oob) is asked for on a device that only a connection manager can connect.
    ///
    /// # Cancel safety
    /// It does not wait; dropping the future leaves no listener.
    pub async fn listen(&self, address: SocketAddr) -> Result<KvListener, ConnectError> {
        self.listen_with(address, BACKLOG).await
    }

    /// As [`listen`](Self::listen), with room for `backlog` channels that are not accepted yet.
    async fn listen_with(&self, address: SocketAddr, backlog: usize) -> Result<KvListener, ConnectError> {
        inside_a_runtime()?;
        self.shared.config.admission.check_listener(address)?;
        let chosen = self.shared.choose()?;
        let door = Door::open(&self.shared, chosen, address).await?;
        let local = door.local_addr();
        let (sender, channels) = mpsc::channel(backlog);
        let task = self.shared.runtime.spawn(door.serve(self.shared.clone(), sender));
        Ok(KvListener { local, channels, failed: None, task })
    }

    /// Connects to the endpoint that listens at `target` (`host:port` or `[v6]:port`), whoever it is.
    ///
    /// Between two endpoints there is one channel at a time. When there is one already, or the peer dials at the same
    /// moment, this gives the one that is kept: [`KvChannel::same`] tells.
    ///
    /// # Errors
    /// By the deadline in [`KvConfig::connect_timeout`], name look-up included; a failed connect leaves nothing.
    /// [`ConnectError::Descriptors`] when this process has no file descriptor left (a channel takes several, see
    /// [tuning](crate::guide::tuning)), [`ConnectError::Busy`] when the peer has none, or nothing else that a channel needs.
    /// [`ConnectError::Resources`] with [`DeviceError::NoManualConnect`] when out of band is asked for on a device that only
    /// a connection manager can connect. [`ConnectError::TransportMismatch`] and [`ConnectError::NoPath`] when the soft devices'
    /// [`SoftTransport`]s do not lead to each other. [`ConnectError::fault`] says who has to change something.
    ///
    /// # Cancel safety
    /// Dropping the future gives the attempt up and releases what it had.
    pub async fn connect(&self, target: impl ToString) -> Result<KvChannel, ConnectError> {
        self.connect_to(target, &PeerIdentity::default()).await
    }

    /// As [`KvEndpoint::connect`], and refuses any other endpoint than `peer`. That finds mistakes and restarts; it is no
    /// authentication: [`KvConfig::admission`] is.
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
        let chosen = self.shared.choose()?;
        let deadline = Deadline::after(self.shared.config.connect_timeout);
        let expect = Expect { epoch: peer.epoch, name: peer.name.clone() };
        dial_peer(&self.shared, &target.to_string(), &expect, chosen, deadline).await
    }
}

/// Whether a device is of the kind that is required.
fn check_kind(config: &KvConfig, device: &Device) -> Result<(), DeviceError> {
    if config.require_rdma && !device.is_rdma() {
        return Err(DeviceError::Unsupported {
            what: "RDMA, which KvConfig::require_rdma asks for,",
            device: device.name().to_owned(),
            fix: "open an RDMA device, or do not require it",
        });
    }
    if config.require_shared_memory && device.transport() != SoftTransport::Shm.of_device() {
        return Err(DeviceError::Unsupported {
            what: "shared memory and nothing else, which KvConfig::require_shared_memory asks for,",
            device: format!("{} ({})", device.name(), device.transport()),
            fix: "open a soft device with SoftTransport::Shm, or do not require it",
        });
    }
    Ok(())
}

/// Sockets and timers of a bootstrap belong to the runtime that polls it.
fn inside_a_runtime() -> Result<(), ConnectError> {
    match Handle::try_current() {
        Ok(_) => Ok(()),
        Err(_) => Err(ConnectError::resources(DeviceError::NoRuntime)),
    }
}

impl Shared {
    /// How this endpoint connects.
    fn choose(&self) -> Result<Chosen, ConnectError> {
        let registered = self.pool.devices().iter().filter(|device| device.registered().is_some());
        let mut usable = registered.map(|device| device.pd.device());
        // Where one of them needs a connection manager, all use it: every device can. Where they must not, those that need it are
        // left out.
        let by_hand = self.config.bootstrap == Bootstrap::Oob;
        let device = usable.find(|device| device.check_oob().is_ok() == by_hand);
        let device = device.unwrap_or(&self.device);
        let chosen = self.config.bootstrap.choose(device).map_err(ConnectError::resources)?;
        #[cfg(feature = "tls")]
        if chosen.way == Way::Cm && matches!(self.config.admission, Admission::Tls(_)) {
            return Err(ConnectError::TlsByManager { device: device.name().to_owned() });
        }
        Ok(chosen)
    }

    /// Queue pairs that a device can give one channel.
    pub(super) fn max_qps(&self, device: &Device) -> usize {
        let fits = |n: &usize| self.config.clone().qps(*n).fit(device.capabilities()).is_ok();
        (1..=MAX_QPS).rev().find(fits).unwrap_or(1)
    }
}

/// A listening endpoint. Dropping it stops listening; channels that were accepted live on, those that were not are
/// closed.
#[derive(Debug)]
pub struct KvListener {
    local: SocketAddr,
    channels: mpsc::Receiver<Accepted>,
    /// Why nobody comes any more.
    failed: Option<String>,
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
        match (self.channels.recv().await, &self.failed) {
            (Some(Ok(channel)), _) => Ok(channel),
            (Some(Err(error)), _) => {
                self.failed = Some(chain(&error));
                Err(error)
            }
            (None, Some(why)) => {
                let source =
                    io::Error::other(format!("the listener has failed before ({why}); listen again"));
                Err(ConnectError::Io { stage: Stage::Listen, source })
            }
            // Else the task ends only with its runtime.
            (None, None) => Err(ConnectError::resources(DeviceError::NoRuntime)),
        }
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

    #[tokio::test]
    async fn b1_a_listener_that_has_failed_says_so_every_time() {
        let (sender, channels) = mpsc::channel(1);
        let source = io::Error::from(io::ErrorKind::OutOfMemory);
        sender.send(Err(ConnectError::Io { stage: Stage::Listen, source })).await.unwrap();
        drop(sender);
        let (local, task) = (SocketAddr::from(([127, 0, 0, 1], 0)), tokio::spawn(async {}));
        let mut listener = KvListener { local, channels, failed: None, task };
        let first = chain(&listener.accept().await.unwrap_err());
        for _ in 0..2 {
            let again = chain(&listener.accept().await.unwrap_err());
            assert!(again.contains(&first) && again.contains("listen again"), "{again}");
        }
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
