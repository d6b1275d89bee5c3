//! A prefill worker's channels to decode workers: one to each, dialled when it is first needed, and what is asked in them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::kv::{
    Blocks, ChannelClosed, Grant, KvChannel, KvEndpoint, Landed, MessageError, PeerIdentity, WriteError,
    WriteRequest,
};
use tokio::sync::{OnceCell, oneshot};

use crate::protocol::{Answer, Ask, Fault};

/// Why a KV cache did not get to a decode worker.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the decode worker at {address} cannot be connected to")]
    Connect {
        address: SocketAddr,
        #[source]
        source: ConnectError,
    },
    #[error("the channel to the decode worker has ended")]
    Message(#[from] MessageError),
    #[error("the channel to the decode worker has ended")]
    Closed(#[from] ChannelClosed),
    #[error("the decode worker did not answer the request for blocks within {0:?}")]
    Silent(Duration),
    #[error("the decode worker has no room: {0}")]
    Busy(String),
    #[error("the decode worker's pool is too small: {0}")]
    TooLarge(String),
    #[error("there is no channel to the decode worker after {0:?}")]
    NoChannel(Duration),
    #[error("the KV cache did not land")]
    Write(#[from] WriteError),
}

impl LinkError {
    /// What the gateway makes of it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Busy(_) => Fault::PeerBusy,
            _ => Fault::Peer,
        }
    }
}

/// A request for blocks is answered at once, with whatever is so.
const ANSWER: Duration = Duration::from_secs(5);
/// Computed state waits for nothing but the network. More than it needs; less than the gateway waits for a sign of life.
const WRITE: Duration = Duration::from_secs(10);

type Waiting = Mutex<HashMap<u64, oneshot::Sender<Answer>>>;

/// The channels.
#[derive(Debug)]
pub struct Links {
    endpoint: KvEndpoint,
    /// By the peer's epoch. A cell that several wait for dials once.
    links: Mutex<HashMap<u64, Arc<OnceCell<Arc<Link>>>>>,
}

impl Links {
    pub fn new(endpoint: KvEndpoint) -> Arc<Self> {
        Arc::new(Self { endpoint, links: Mutex::default() })
    }

    /// The channel to the endpoint of that epoch.
    ///
    /// # Errors
    /// [`LinkError::Connect`]; also when another life of it answers.
    pub async fn to(self: &Arc<Self>, address: SocketAddr, epoch: u64) -> Result<Arc<Link>, LinkError> {
        let cell = lock(&self.links).entry(epoch).or_default().clone();
        let dialled = tokio::time::timeout(ANSWER, cell.get_or_try_init(|| self.dial(address, epoch))).await;
        let link = dialled.map_err(|_| LinkError::NoChannel(ANSWER)).and_then(|link| link.cloned());
        if link.is_err() && !cell.initialized() {
            lock(&self.links).remove(&epoch);
        }
        link
    }

    async fn dial(self: &Arc<Self>, address: SocketAddr, epoch: u64) -> Result<Arc<Link>, LinkError> {
        let peer = PeerIdentity { epoch: Some(epoch), name: None };
        let connected = self.endpoint.connect_to(address, &peer).await;
        let channel = connected.map_err(|source| LinkError::Connect { address, source })?;
        tracing::info!(peer = channel.peer_name(), path = %channel.path(), "connected");
        let link = Arc::new(Link { channel: channel.clone(), waiting: Waiting::default() });
        let (links, heard) = (self.clone(), link.clone());
        tokio::spawn(async move {
            let ended = heard.hear().await;
            tracing::info!(peer = channel.peer_name(), %ended, "the channel has ended");
            lock(&links.links).remove(&epoch);
            // Whoever waits for an answer learns that none comes.
            lock(&heard.waiting).clear();
        });
        Ok(link)
    }
}

/// One channel.
#[derive(Debug)]
pub struct Link {
    channel: KvChannel,
    waiting: Waiting,
}

impl Link {
    async fn hear(&self) -> ChannelClosed {
        loop {
            let message = match self.channel.recv_message().await {
                Ok(message) => message,
                Err(closed) => return closed,
            };
            match serde_json::from_slice::<Answer>(&message) {
                Ok(answer) => {
                    if let Some(waits) = lock(&self.waiting).remove(&answer.attempt()) {
                        let _ = waits.send(answer);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a decode worker says what is not understood; same version?")
                }
            }
        }
    }

    /// Asks for blocks for `bytes` bytes.
    ///
    /// # Errors
    /// [`LinkError::Busy`], [`LinkError::Silent`], and a channel that ends.
    ///
    /// # Cancel safety
    /// Blocks that were granted to a dropped future are released.
    pub async fn reserve(
        self: &Arc<Self>,
        attempt: u64,
        bytes: u64,
        timeout: Duration,
    ) -> Result<Reserved, LinkError> {
        let (sender, answer) = oneshot::channel();
        lock(&self.waiting).insert(attempt, sender);
        let mut release = Release { link: self.clone(), attempt, armed: true };
        let timeout_ms = timeout.as_millis() as u64;
        self.say(&Ask::Reserve { attempt, bytes, timeout_ms }).await?;
        let patience = timeout.min(ANSWER);
        match tokio::time::timeout(patience, answer).await {
            Ok(Ok(Answer::Granted { grant, .. })) => Ok(Reserved { release, grant }),
            Ok(Ok(Answer::Busy { why, .. })) => {
                release.armed = false;
                Err(LinkError::Busy(why))
            }
            Ok(Ok(Answer::TooLarge { why, .. })) => {
                release.armed = false;
                Err(LinkError::TooLarge(why))
            }
            Ok(Err(_)) => Err(self.channel.closed().await.into()),
            Err(_) => Err(LinkError::Silent(patience)),
        }
    }

    async fn say(&self, ask: &Ask) -> Result<(), LinkError> {
        // Numbers and nothing else: they can always be written.
        Ok(self.channel.send_message(serde_json::to_vec(ask).unwrap_or_default()).await?)
    }

    /// The channel.
    pub fn channel(&self) -> &KvChannel {
        &self.channel
    }
}

/// Blocks at a decode worker. Dropped before they are written, they are released there.
#[derive(Debug)]
pub struct Reserved {
    release: Release,
    grant: Grant,
}

impl Reserved {
    /// Writes `blocks` to them.
    ///
    /// # Errors
    /// [`LinkError::Write`]: the decode worker has none of it, or frees it when its time is over.
    ///
    /// # Cancel safety
    /// Dropped, the write is aborted and the blocks at both ends are free again.
    pub async fn write(mut self, blocks: Blocks, timeout: Duration) -> Result<Landed, LinkError> {
        let request =
            WriteRequest::new(&self.grant, blocks).deadline(timeout.min(WRITE)).tag(self.release.attempt);
        let (result, _blocks) = self.release.link.channel.write(request).await;
        let landed = result?;
        self.release.armed = false;
        Ok(landed)
    }
}

/// Tells the decode worker that an attempt needs nothing any more.
#[derive(Debug)]
struct Release {
    link: Arc<Link>,
    attempt: u64,
    armed: bool,
}

impl Drop for Release {
    fn drop(&mut self) {
        lock(&self.link.waiting).remove(&self.attempt);
        if self.armed {
            let (link, attempt) = (self.link.clone(), self.attempt);
            // In order behind the request itself. If the channel has ended, so have its grants.
            tokio::spawn(async move { link.say(&Ask::Release { attempt }).await });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
