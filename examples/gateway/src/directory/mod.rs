//! Who is there: workers make themselves known, and a gateway watches.
//!
//! - [`fixed`]: a list of addresses. A worker needs to do nothing; the gateway asks each address in turn. No service is needed.
//! - [`etcd`] (feature `etcd`): workers register under a lease; the gateway watches. For more than one machine, or more than one
//!   gateway.
//!
//! In both, a worker that is silent for the time of its lease is out, and one that was restarted comes back with a new epoch.

#[cfg(feature = "etcd")]
pub mod etcd;
pub mod fixed;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use crate::protocol::Worker;

/// A worker that is silent for so long is out.
pub const LEASE: Duration = Duration::from_secs(2);

/// Everybody who is there now.
pub type Workers = Arc<Vec<Worker>>;

/// Somewhere that workers are found. Two calls: the one a worker makes, and the one a gateway makes.
pub trait Directory {
    /// Makes `worker` known, until the registration is dropped or this process ends. Returns when it is known.
    fn register(&self, worker: Worker) -> impl Future<Output = Result<Registration, DirectoryError>> + Send;

    /// Who is there, from now on. Returns when it is known for the first time.
    fn watch(&self) -> impl Future<Output = Result<Watch, DirectoryError>> + Send;
}

/// A worker that is known. Dropping it takes the worker out, and with it the requests that it has.
#[derive(Debug)]
pub struct Registration {
    /// `None`: it is asked, and answers for itself.
    kept: Option<Keeper>,
}

/// The task that keeps a worker known, and the way to it.
#[derive(Debug)]
struct Keeper {
    changes: mpsc::UnboundedSender<(Change, oneshot::Sender<()>)>,
    _task: Task,
}

/// What becomes of a worker that is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// It takes nothing new, and finishes what it has.
    Draining,
    /// It has finished.
    Gone,
}

impl Registration {
    /// Says that the worker drains: it stays known, with the requests that it has, and gets no more of them. Returns when that is
    /// written, or after the time of a lease, if it cannot be.
    ///
    /// # Cancel safety
    /// It may or may not be written.
    pub async fn drain(&self) {
        self.change(Change::Draining).await;
    }

    /// Takes the worker out. Returns when that is done, or after the time of a lease: then the lease runs out by itself.
    ///
    /// # Cancel safety
    /// The registration is dropped, which takes the worker out too.
    pub async fn leave(self) {
        self.change(Change::Gone).await;
    }

    async fn change(&self, change: Change) {
        let Some(kept) = &self.kept else { return };
        let (done, is_done) = oneshot::channel();
        // The task ends with the registration only, or when the worker is out.
        if kept.changes.send((change, done)).is_ok() {
            let _ = tokio::time::timeout(LEASE, is_done).await;
        }
    }
}

/// Who is there.
#[derive(Debug)]
pub struct Watch {
    workers: watch::Receiver<Workers>,
    _keep: Task,
}

impl Watch {
    /// Everybody now.
    pub fn now(&self) -> Workers {
        self.workers.borrow().clone()
    }

    /// Waits until it is somebody else, or somebody has changed.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn changed(&mut self) -> Workers {
        if self.workers.changed().await.is_err() {
            // The task ends with the watch only, or with the runtime.
            std::future::pending::<()>().await;
        }
        self.workers.borrow_and_update().clone()
    }
}

/// A task that ends with its handle.
#[derive(Debug)]
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn task(future: impl Future<Output = ()> + Send + 'static) -> Task {
    Task(tokio::spawn(future).abort_handle())
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("--directory {0:?}: static, static://HOST:PORT,HOST:PORT,... or etcd://HOST:PORT,...")]
    Unknown(String),
    #[error("--directory static names no workers; a gateway needs static://HOST:PORT,...")]
    Empty,
    #[error("this build is without etcd; build with --features etcd")]
    NoEtcd,
    #[cfg(feature = "etcd")]
    #[error("there is a worker of the name {name} already, at {by}; give each a name of its own")]
    Taken { name: String, by: std::net::SocketAddr },
    #[cfg(feature = "etcd")]
    #[error("etcd at {servers}: {what}")]
    Etcd {
        servers: String,
        what: &'static str,
        #[source]
        source: etcd_client::Error,
    },
}

/// Which directory, as an option names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryUri {
    /// Addresses of workers; none, for a worker itself.
    Static(Vec<HostPort>),
    /// Addresses of etcd's servers.
    Etcd(Vec<String>),
}

/// `HOST:PORT`, where the host is a name or an address: a name is looked up each time that it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort(String);

impl FromStr for HostPort {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (host, port) = text.rsplit_once(':').ok_or(())?;
        let address = |inside: &str| inside.parse::<std::net::Ipv6Addr>().is_ok();
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(inside) => address(inside),
            None => !host.is_empty() && host.chars().all(named),
        };
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        if is_host && is_port { Ok(Self(text.to_owned())) } else { Err(()) }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DirectoryUri {
    type Err = DirectoryError;

    fn from_str(text: &str) -> Result<Self, DirectoryError> {
        let unknown = || DirectoryError::Unknown(text.to_owned());
        if text == "static" {
            return Ok(Self::Static(Vec::new()));
        }
        let (scheme, list) = text.split_once("://").ok_or_else(unknown)?;
        match scheme {
            "static" => {
                let addresses: Result<_, _> = list.split(',').map(str::parse).collect();
                Ok(Self::Static(addresses.map_err(|_| unknown())?))
            }
            "etcd" if !list.is_empty() => Ok(Self::Etcd(list.split(',').map(str::to_owned).collect())),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DirectoryUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(list) if list.is_empty() => f.write_str("static"),
            Self::Static(list) => {
                let list: Vec<String> = list.iter().map(HostPort::to_string).collect();
                write!(f, "static://{}", list.join(","))
            }
            Self::Etcd(list) => write!(f, "etcd://{}", list.join(",")),
        }
    }
}

impl Directory for DirectoryUri {
    async fn register(&self, worker: Worker) -> Result<Registration, DirectoryError> {
        match self {
            Self::Static(list) => fixed::Fixed::new(list.clone()).register(worker).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(servers) => etcd::Etcd::new(servers.clone()).register(worker).await,
            #[cfg(not(feature = "etcd"))]
            Self::Etcd(_) => Err(DirectoryError::NoEtcd),
        }
    }

    async fn watch(&self) -> Result<Watch, DirectoryError> {
        match self {
            Self::Static(list) if list.is_empty() => Err(DirectoryError::Empty),
            Self::Static(list) => fixed::Fixed::new(list.clone()).watch().await,
            #[cfg(feature = "etcd")]
            Self::Etcd(servers) => etcd::Etcd::new(servers.clone()).watch().await,
            #[cfg(not(feature = "etcd"))]
            Self::Etcd(_) => Err(DirectoryError::NoEtcd),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_list_has_names_and_addresses_with_a_port_each() {
        let list = "static://10.0.0.1:9000,worker-1.rack_2.example:9001,[fe80::1]:9002";
        assert_eq!(list.parse::<DirectoryUri>().unwrap().to_string(), list);
        for wrong in [
            "static://",
            "static://host",
            "static://:9000",
            "static://host:0",
            "static://host:65536",
            "static://a:1,",
            "static://user@host:1",
            "static://host/path:1",
            "static://fe80::1:9002",
            "static://[host]:1",
            "redis://host:1",
        ] {
            let error = wrong.parse::<DirectoryUri>().unwrap_err();
            assert!(error.to_string().contains(wrong), "{error}");
        }
    }
}
