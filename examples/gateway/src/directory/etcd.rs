//! Workers in etcd: a key for each, under a lease that the worker keeps alive. A gateway reads them all, and then watches.
//!
//! ```text
//!   landfall/gateway/workers/<role>/<name>   the worker, as JSON
//! ```
//!
//! A worker whose lease has run out while etcd could not be reached registers again by itself, and a gateway that loses its watch
//! goes on with those that it knows until it can read again: an outage of etcd stops nobody.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, Error, EventType, GetOptions, PutOptions, WatchOptions, WatchStream,
};
use tokio::sync::watch;

use super::{Directory, DirectoryError, LEASE, Registration, Task, Watch, Workers, task};
use crate::protocol::{Worker, words};

const PREFIX: &str = "landfall/gateway/workers/";
/// Before something that has failed is tried again.
const PAUSE: Duration = Duration::from_millis(500);

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
            .with_keep_alive(Duration::from_secs(1), Duration::from_secs(2))
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
        let lease = put(&mut client, &worker).await.map_err(self.error("registering"))?;
        let keep = Kept { client: client.clone(), lease };
        let etcd = self.clone();
        Ok(Registration { _keep: Some(task(etcd.keep(keep, worker))) })
    }

    async fn watch(&self) -> Result<Watch, DirectoryError> {
        let mut client = self.client().await.map_err(self.error("connecting"))?;
        let (known, stream) = read(&mut client).await.map_err(self.error("reading the workers"))?;
        let (sender, workers) = watch::channel(list(&known));
        Ok(Watch { workers, _keep: follow_in_background(client, known, stream, sender) })
    }
}

/// A lease that is given up when its task ends: the worker is out at once, not when the lease has run out.
struct Kept {
    client: Client,
    lease: i64,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let (mut client, lease) = (self.client.clone(), self.lease);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // If it does not get there, the lease runs out.
            runtime.spawn(async move { client.lease_revoke(lease).await });
        }
    }
}

impl Etcd {
    /// Keeps the lease alive, or gets another one.
    async fn keep(self, mut kept: Kept, worker: Worker) {
        loop {
            if let Err(error) = keep_alive(&mut kept.client, kept.lease).await {
                tracing::warn!(error = words(&error), "etcd: the lease could not be kept");
            }
            // It has run out, or may have.
            loop {
                tokio::time::sleep(PAUSE).await;
                match put(&mut kept.client, &worker).await {
                    Ok(lease) => {
                        kept.lease = lease;
                        break;
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

/// Writes the worker under a new lease.
async fn put(client: &mut Client, worker: &Worker) -> Result<i64, Error> {
    let lease = client.lease_grant(LEASE.as_secs() as i64, None).await?.id();
    // Numbers and words: they can always be written.
    let value = serde_json::to_vec(worker).unwrap_or_default();
    client.put(key(worker), value, Some(PutOptions::new().with_lease(lease))).await?;
    Ok(lease)
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

fn list(known: &Known) -> Workers {
    Arc::new(known.values().cloned().collect())
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
    mut known: Known,
    mut stream: WatchStream,
    sender: watch::Sender<Workers>,
) -> Task {
    task(async move {
        loop {
            if let Err(error) = follow(&mut known, &mut stream, &sender).await {
                tracing::warn!(error = words(&error), "etcd: the watch has ended");
            }
            // What has changed meanwhile is not known: read all again.
            (known, stream) = loop {
                tokio::time::sleep(PAUSE).await;
                match read(&mut client).await {
                    Ok(again) => break again,
                    Err(error) => tracing::warn!(error = words(&error), "etcd: reading the workers"),
                }
            };
            sender.send_replace(list(&known));
        }
    })
}

async fn follow(
    known: &mut Known,
    stream: &mut WatchStream,
    sender: &watch::Sender<Workers>,
) -> Result<(), Error> {
    while let Some(changes) = stream.message().await? {
        if changes.canceled() {
            return Ok(());
        }
        for event in changes.events() {
            let Some(pair) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => note(known, pair.key(), pair.value()),
                EventType::Delete => _ = known.remove(pair.key()),
            }
        }
        sender.send_replace(list(known));
    }
    Ok(())
}
