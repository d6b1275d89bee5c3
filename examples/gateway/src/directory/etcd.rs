//! Workers in etcd: a key for each, under a lease that the worker keeps alive. A gateway reads them all, and then watches.
//!
//! ```text
//!   landfall/gateway/workers/<role>/<name>   the worker, as JSON
//! ```
//!
//! A worker whose lease has run out while etcd could not be reached registers again by itself, and a gateway that loses its watch
//! goes on with those that it knows until it can read again, and with those that have not registered again by then for a while
//! longer: an outage of etcd stops nobody.
//!
//! A worker that is asked to stop writes that it drains, under the same lease, and gives the lease up when it has finished: what a
//! gateway has under way there goes on until then.
//!
//! A name is one worker's. Another one of that name waits until the lease has run out, unless it is at the same address: then the
//! first is gone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, EventType, GetOptions, PutOptions, Txn, TxnOp,
    WatchOptions, WatchStream,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::{Change, Directory, DirectoryError, Keeper, LEASE, Registration, Task, Watch, Workers, task};
use crate::protocol::{Worker, words};

const PREFIX: &str = "landfall/gateway/workers/";
/// Before something that has failed is tried again.
const PAUSE: Duration = Duration::from_millis(500);
/// How often a connection is asked whether it lives. A server closes one that asks more often than every 5 s (etcd's
/// `--grpc-keepalive-min-time`).
const PING: Duration = Duration::from_secs(6);
/// For a name that another worker has, and for workers to register again after an outage.
const PATIENCE: Duration = Duration::from_secs(3 * LEASE.as_secs());

/// The servers.
#[derive(Clone, Debug)]
pub struct Etcd {
    servers: Vec<String>,
}

impl Etcd {
    /// Each is `HOST:PORT`.
    pub fn new(servers: Vec<String>) -> Self {
        Self { servers }
    }

    async fn client(&self) -> Result<Client, Error> {
        let options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(2))
            .with_keep_alive(PING, LEASE)
            .with_keep_alive_while_idle(true);
        Client::connect(&self.servers, Some(options)).await
    }

    fn error(&self, what: &'static str) -> impl FnOnce(Error) -> DirectoryError {
        let servers = self.servers.join(",");
        move |source| DirectoryError::Etcd { servers, what, source }
    }
}

impl Directory for Etcd {
    async fn register(&self, worker: Worker) -> Result<Registration, DirectoryError> {
        let mut client = self.client().await.map_err(self.error("connecting"))?;
        let end = Instant::now() + PATIENCE;
        let lease = loop {
            match put(&mut client, &worker).await.map_err(self.error("registering"))? {
                Put::Lease(lease) => break lease,
                Put::Taken(by) if Instant::now() >= end => {
                    return Err(DirectoryError::Taken { name: worker.name, by });
                }
                // It may be ourselves, before we were started again.
                Put::Taken(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        let keep = Kept { client: client.clone(), lease };
        let etcd = self.clone();
        let (changes, told) = mpsc::unbounded_channel();
        Ok(Registration { kept: Some(Keeper { changes, _task: task(etcd.keep(keep, worker, told)) }) })
    }

    async fn watch(&self) -> Result<Watch, DirectoryError> {
        let mut client = self.client().await.map_err(self.error("connecting"))?;
        let (known, stream) = read(&mut client).await.map_err(self.error("reading the workers"))?;
        let (sender, workers) = watch::channel(list(known.values()));
        Ok(Watch { workers, _keep: follow_in_background(client, known, stream, sender) })
    }
}

/// A change, and who waits for it to be written.
type Told = (Change, oneshot::Sender<()>);

/// A lease that is given up when its task ends: the worker is out at once, not when the lease has run out.
struct Kept {
    client: Client,
    lease: i64,
}

impl Kept {
    async fn revoke(&mut self) {
        // If it does not get there, the lease runs out.
        let _ = self.client.lease_revoke(self.lease).await;
        self.lease = NONE;
    }
}

/// No lease.
const NONE: i64 = 0;

impl Drop for Kept {
    fn drop(&mut self) {
        let (mut client, lease) = (self.client.clone(), self.lease);
        if lease == NONE {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // If it does not get there, the lease runs out.
            runtime.spawn(async move { client.lease_revoke(lease).await });
        }
    }
}

impl Etcd {
    /// Keeps the lease alive, or gets another one; writes that the worker drains when it does, and ends when it has left.
    async fn keep(self, mut kept: Kept, mut worker: Worker, mut told: mpsc::UnboundedReceiver<Told>) {
        // Who waits for a change to be written.
        let mut waits: Option<oneshot::Sender<()>> = None;
        loop {
            let changed = tokio::select! {
                kept = keep_alive(&mut kept.client, kept.lease) => {
                    if let Err(error) = kept {
                        tracing::warn!(error = words(&error), "etcd: the lease could not be kept");
                    }
                    None
                }
                changed = told.recv() => changed,
            };
            match changed {
                Some((Change::Draining, done)) => {
                    worker.draining = true;
                    // Under the lease that it has: the worker is the same, with the requests that it has.
                    match write(&mut kept.client, &worker, kept.lease).await {
                        Ok(Put::Lease(_)) => {
                            let _ = done.send(());
                            continue;
                        }
                        Ok(Put::Taken(by)) => tracing::warn!(%by, "another worker has our name"),
                        Err(error) => tracing::warn!(error = words(&error), "etcd: saying that it drains"),
                    }
                    waits = Some(done);
                }
                Some((Change::Gone, done)) => {
                    kept.revoke().await;
                    let _ = done.send(());
                    return;
                }
                None => {}
            }
            // It has run out, or may have.
            loop {
                tokio::select! {
                    () = tokio::time::sleep(PAUSE) => {}
                    Some((change, done)) = told.recv() => match change {
                        Change::Draining => {
                            worker.draining = true;
                            waits = Some(done);
                        }
                        Change::Gone => {
                            kept.revoke().await;
                            let _ = done.send(());
                            return;
                        }
                    },
                }
                match put(&mut kept.client, &worker).await {
                    Ok(Put::Lease(lease)) => {
                        kept.lease = lease;
                        if let Some(done) = waits.take() {
                            let _ = done.send(());
                        }
                        break;
                    }
                    Ok(Put::Taken(by)) => {
                        let name = &worker.name;
                        tracing::warn!(name, %by, "another worker has our name now; give each its own");
                    }
                    Err(error) => tracing::warn!(error = words(&error), "etcd: registering again"),
                }
            }
        }
    }
}

fn key(worker: &Worker) -> String {
    format!("{PREFIX}{}/{}", worker.role, worker.name)
}

/// What became of a registration.
enum Put {
    /// It is there, under this lease.
    Lease(i64),
    /// Another worker of that name is, at that address.
    Taken(SocketAddr),
}

/// Writes the worker under a new lease, unless another has its name.
async fn put(client: &mut Client, worker: &Worker) -> Result<Put, Error> {
    let lease = client.lease_grant(LEASE.as_secs() as i64, None).await?.id();
    write(client, worker, lease).await
}

/// Writes the worker under this lease, unless another has its name.
async fn write(client: &mut Client, worker: &Worker, lease: i64) -> Result<Put, Error> {
    let key = key(worker);
    loop {
        let there = client.get(key.clone(), None).await?;
        let other = there.kvs().first().and_then(|pair| serde_json::from_slice::<Worker>(pair.value()).ok());
        if let Some(other) = other.filter(|other| other.http != worker.http) {
            // A lease that nothing is under runs out by itself.
            return Ok(Put::Taken(other.http));
        }
        // Numbers and words: they can always be written.
        let value = serde_json::to_vec(worker).unwrap_or_default();
        let write = TxnOp::put(key.clone(), value, Some(PutOptions::new().with_lease(lease)));
        // As it was when we looked: of two at once, one looks again.
        let revision = there.kvs().first().map_or(0, |pair| pair.mod_revision());
        let same = Compare::mod_revision(key.clone(), CompareOp::Equal, revision);
        if client.txn(Txn::new().when([same]).and_then([write])).await?.succeeded() {
            return Ok(Put::Lease(lease));
        }
    }
}

/// Until the lease has run out, or etcd is not reached.
async fn keep_alive(client: &mut Client, lease: i64) -> Result<(), Error> {
    let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
    loop {
        keeper.keep_alive().await?;
        match tokio::time::timeout(LEASE, answers.message()).await {
            Ok(answer) => match answer? {
                Some(answer) if answer.ttl() > 0 => {}
                _ => return Ok(()),
            },
            Err(_) => return Ok(()),
        }
        tokio::time::sleep(LEASE / 4).await;
    }
}

type Known = BTreeMap<Vec<u8>, Worker>;

fn list<'a>(workers: impl Iterator<Item = &'a Worker>) -> Workers {
    Arc::new(workers.cloned().collect())
}

/// All workers, and a watch from there on.
async fn read(client: &mut Client) -> Result<(Known, WatchStream), Error> {
    let all = client.get(PREFIX, Some(GetOptions::new().with_prefix())).await?;
    let mut known = Known::new();
    for pair in all.kvs() {
        note(&mut known, pair.key(), pair.value());
    }
    let revision = all.header().map_or(0, |header| header.revision()) + 1;
    let options = WatchOptions::new().with_prefix().with_start_revision(revision);
    let stream = client.watch(PREFIX, Some(options)).await?;
    Ok((known, stream))
}

fn note(known: &mut Known, key: &[u8], value: &[u8]) {
    match serde_json::from_slice(value) {
        Ok(worker) => _ = known.insert(key.to_vec(), worker),
        Err(error) => {
            known.remove(key);
            tracing::warn!(key = %String::from_utf8_lossy(key), %error, "etcd: a worker that is not understood");
        }
    }
}

fn follow_in_background(
    mut client: Client,
    known: Known,
    mut stream: WatchStream,
    sender: watch::Sender<Workers>,
) -> Task {
    task(async move {
        let mut view = View { known, missed: BTreeMap::new(), sender };
        loop {
            if let Err(error) = view.follow(&mut stream).await {
                tracing::warn!(error = words(&error), "etcd: the watch has ended");
            }
            // What has changed meanwhile is not known: read all again.
            let again;
            (again, stream) = loop {
                tokio::time::sleep(PAUSE).await;
                match read(&mut client).await {
                    Ok(again) => break again,
                    Err(error) => tracing::warn!(error = words(&error), "etcd: reading the workers"),
                }
            };
            view.read_again(again);
        }
    })
}

/// What a gateway knows.
struct View {
    known: Known,
    /// Those that were there before an outage and have not registered again. They count as there until then.
    missed: BTreeMap<Vec<u8>, (Worker, Instant)>,
    sender: watch::Sender<Workers>,
}

impl View {
    fn read_again(&mut self, again: Known) {
        // Those that were missed before keep their time.
        let until = Instant::now() + PATIENCE;
        for (key, worker) in std::mem::replace(&mut self.known, again) {
            self.missed.insert(key, (worker, until));
        }
        self.missed.retain(|key, _| !self.known.contains_key(key));
        self.tell();
    }

    fn tell(&self) {
        self.sender
            .send_replace(list(self.known.values().chain(self.missed.values().map(|(worker, _)| worker))));
    }

    /// Until the watch ends.
    async fn follow(&mut self, stream: &mut WatchStream) -> Result<(), Error> {
        loop {
            let first = self.missed.values().map(|(_, until)| *until).min();
            let changes = tokio::select! {
                changes = stream.message() => changes?,
                () = tokio::time::sleep_until(first.unwrap_or_else(Instant::now)), if first.is_some() => {
                    let now = Instant::now();
                    self.missed.retain(|_, (_, until)| *until > now);
                    self.tell();
                    continue;
                }
            };
            let Some(changes) = changes else { return Ok(()) };
            if changes.canceled() {
                return Ok(());
            }
            for event in changes.events() {
                let Some(pair) = event.kv() else { continue };
                self.missed.remove(pair.key());
                match event.event_type() {
                    EventType::Put => note(&mut self.known, pair.key(), pair.value()),
                    EventType::Delete => _ = self.known.remove(pair.key()),
                }
            }
            self.tell();
        }
    }
}
