//! A decode worker's reservations: blocks and a slot for each attempt, from the grant to the landing and on to the engine.
//! Owns the channels' tasks.
//!
//! A reservation ends by being taken for generation, by a release of either worker or of the gateway, with its channel, or
//! when its time is over. Its blocks and its slot are free then, as soon as no late write can reach the blocks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use landfall::kv::{Arrival, ArrivalError, Grant, GrantRefused, KvChannel, KvListener, KvPool, PoolError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::{Identity, memory};
use crate::protocol::{Answer, Ask, words};

/// Why blocks were not reserved.
#[derive(Debug, thiserror::Error)]
enum ReserveError {
    #[error("this worker is draining")]
    Draining,
    #[error("all {0} slots are taken")]
    Slots(u32),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Refused(#[from] GrantRefused),
    #[error("attempt {0} has a reservation already")]
    Twice(u64),
}

/// One attempt's.
#[derive(Debug)]
struct Entry {
    channel: KvChannel,
    grant: Grant,
    slot: OwnedSemaphorePermit,
    arrival: oneshot::Receiver<Arrival>,
    _expiry: Expiry,
}

/// The task that ends a reservation in time; it ends with the reservation.
#[derive(Debug)]
struct Expiry(AbortHandle);

impl Drop for Expiry {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Takes a grant back, unless it has landed: nobody waits for it any more.
#[derive(Debug)]
struct Revoke {
    channel: KvChannel,
    grant: Grant,
    armed: bool,
}

impl Drop for Revoke {
    fn drop(&mut self) {
        if self.armed {
            self.channel.revoke(&self.grant);
        }
    }
}

/// What generation begins with.
#[derive(Debug)]
pub struct Taken {
    pub arrival: Arrival,
    /// Held until the sequence has ended.
    pub slot: OwnedSemaphorePermit,
}

/// Why nothing could be taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    #[error("attempt {0} has no reservation here: it was released, or its time was over")]
    Unknown(u64),
    #[error("the transfer of attempt {0} was aborted")]
    Aborted(u64),
}

/// All of them.
#[derive(Debug)]
pub struct Reservations {
    identity: Arc<Identity>,
    pool: KvPool,
    slots: Arc<Semaphore>,
    total: u32,
    /// By attempt.
    entries: Mutex<HashMap<u64, Entry>>,
}

impl Reservations {
    pub(crate) fn new(identity: Arc<Identity>, pool: KvPool, slots: u32) -> Arc<Self> {
        let semaphore = Arc::new(Semaphore::new(slots as usize));
        Arc::new(Self { identity, pool, slots: semaphore, total: slots, entries: Mutex::default() })
    }

    /// Takes channels and serves them.
    pub async fn accept(self: Arc<Self>, mut listener: KvListener) {
        loop {
            match listener.accept().await {
                Ok(channel) => {
                    tracing::info!(peer = channel.peer_name(), path = %channel.path(), "connected");
                    tokio::spawn(Channel { all: self.clone(), channel, granted: HashMap::new() }.serve());
                }
                Err(error) => {
                    tracing::error!(
                        error = words(&error),
                        "no more channels can be accepted; restart the worker"
                    );
                    return;
                }
            }
        }
    }

    /// Slots that are free.
    pub fn free_slots(&self) -> u32 {
        self.slots.available_permits() as u32
    }

    /// Reservations that were not taken yet.
    pub fn len(&self) -> usize {
        lock(&self.entries).len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends a reservation. Does nothing when there is none.
    pub fn release(&self, attempt: u64) {
        let entry = lock(&self.entries).remove(&attempt);
        if let Some(entry) = entry {
            // If it has landed, its blocks go with the entry.
            entry.channel.revoke(&entry.grant);
        }
    }

    /// Takes what has landed for `attempt`. The confirmation that the sender has can be ahead of the arrival here by a moment.
    ///
    /// # Errors
    /// [`TakeError`].
    ///
    /// # Cancel safety
    /// The reservation is gone, and with it what it had.
    pub async fn take(&self, attempt: u64) -> Result<Taken, TakeError> {
        let entry = lock(&self.entries).remove(&attempt).ok_or(TakeError::Unknown(attempt))?;
        let Entry { channel, grant, slot, arrival, .. } = entry;
        let mut revoke = Revoke { channel, grant, armed: true };
        let arrived = arrival.await;
        revoke.armed = false;
        match arrived {
            Ok(arrival) => Ok(Taken { arrival, slot }),
            Err(_) => Err(TakeError::Aborted(attempt)),
        }
    }

    fn reserve(
        self: &Arc<Self>,
        channel: &KvChannel,
        (attempt, bytes, time): (u64, u64, Duration),
    ) -> Result<(Grant, oneshot::Sender<Arrival>), ReserveError> {
        if self.identity.is_draining() {
            return Err(ReserveError::Draining);
        }
        let mut entries = lock(&self.entries);
        if entries.contains_key(&attempt) {
            return Err(ReserveError::Twice(attempt));
        }
        let slot = self.slots.clone().try_acquire_owned().map_err(|_| ReserveError::Slots(self.total))?;
        let grant = channel.grant(self.pool.try_alloc(memory::blocks_for(bytes))?)?;
        let (sender, arrival) = oneshot::channel();
        let all = self.clone();
        let expiry = tokio::spawn(async move {
            tokio::time::sleep(time).await;
            all.release(attempt);
        });
        let expiry = Expiry(expiry.abort_handle());
        let entry = Entry { channel: channel.clone(), grant: grant.clone(), slot, arrival, _expiry: expiry };
        entries.insert(attempt, entry);
        Ok((grant, sender))
    }
}

/// One channel, and the grants that are open on it.
struct Channel {
    all: Arc<Reservations>,
    channel: KvChannel,
    /// By the grant's number.
    granted: HashMap<u64, (u64, oneshot::Sender<Arrival>)>,
}

impl Channel {
    async fn serve(mut self) {
        let ended = loop {
            tokio::select! {
                message = self.channel.recv_message() => match message {
                    Ok(message) => self.heard(&message).await,
                    Err(closed) => break closed,
                },
                arrival = self.channel.next_arrival() => match arrival {
                    Ok(arrival) => {
                        if let Some((_, waits)) = self.granted.remove(&arrival.grant()) {
                            // Released meanwhile: the blocks go back to the pool.
                            let _ = waits.send(arrival);
                        }
                    }
                    Err(ArrivalError::Aborted { grant, reason }) => {
                        if let Some((attempt, _)) = self.granted.remove(&grant) {
                            tracing::debug!(attempt, %reason, "a transfer was aborted");
                            self.all.release(attempt);
                        }
                    }
                    Err(ArrivalError::Closed(closed)) => break closed,
                    Err(error) => tracing::warn!(error = words(&error), "an arrival"),
                },
            }
        };
        tracing::info!(peer = self.channel.peer_name(), %ended, "the channel has ended");
        for (attempt, _) in self.granted.into_values() {
            self.all.release(attempt);
        }
    }

    async fn heard(&mut self, message: &[u8]) {
        let answer = match serde_json::from_slice(message) {
            Ok(Ask::Reserve { attempt, bytes, timeout_ms }) => {
                let time = Duration::from_millis(timeout_ms);
                match self.all.reserve(&self.channel, (attempt, bytes, time)) {
                    Ok((grant, sender)) => {
                        self.granted.insert(grant.id(), (attempt, sender));
                        Answer::Granted { attempt, grant }
                    }
                    Err(error @ ReserveError::Pool(PoolError::TooMany { .. })) => {
                        Answer::TooLarge { attempt, why: words(&error) }
                    }
                    Err(error) => Answer::Busy { attempt, why: words(&error) },
                }
            }
            Ok(Ask::Release { attempt }) => return self.all.release(attempt),
            Err(error) => {
                tracing::warn!(%error, "a prefill worker says what is not understood; same version?");
                return;
            }
        };
        // Numbers and nothing else can always be written; and a channel that has ended says so in the loop.
        let answer = serde_json::to_vec(&answer).unwrap_or_default();
        let _ = self.channel.send_message(answer).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
