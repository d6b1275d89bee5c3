//! All processes on this machine, on loopback: for the demonstration, the load generator and the tests. Starts this program again,
//! once for each.
//!
//! A process that is started here ends with its parent, however that ends: its standard input closes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::protocol::Role;

/// The time that a process has to say where it listens: the model is read, and its SHA-256 compared.
const START: Duration = Duration::from_secs(120);

/// What is started.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// This program.
    pub program: PathBuf,
    pub prefill: usize,
    pub decode: usize,
    /// Further options of every worker.
    pub worker: Vec<String>,
    /// Further options of the gateway.
    pub gateway: Vec<String>,
    /// A directory service; `None`: the gateway is given the workers' addresses.
    pub directory: Option<String>,
}

/// Why a process does not run.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("{name} cannot be started: {source}")]
    Start {
        name: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{0} has ended before it listened; its messages say why")]
    Ended(String),
    #[error("{name} said nothing within {START:?}")]
    Silent { name: String },
    #[error("{name} said {line:?}, which is not where it listens")]
    Words { name: String, line: String },
}

/// One process.
#[derive(Debug)]
pub struct Process {
    pub name: String,
    pub address: SocketAddr,
    child: Child,
}

impl Process {
    async fn start(program: &PathBuf, name: &str, options: &[String]) -> Result<Self, ClusterError> {
        let start = |source| ClusterError::Start { name: name.to_owned(), source };
        let mut child = Command::new(program)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(start)?;
        let ended = || ClusterError::Ended(name.to_owned());
        let mut lines = BufReader::new(child.stdout.take().ok_or_else(ended)?).lines();
        let line = match tokio::time::timeout(START, lines.next_line()).await {
            Ok(line) => line.map_err(start)?.ok_or_else(ended)?,
            Err(_) => return Err(ClusterError::Silent { name: name.to_owned() }),
        };
        let address =
            line.split_once("listening on ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        let address = address.ok_or(ClusterError::Words { name: name.to_owned(), line })?;
        Ok(Self { name: name.to_owned(), address, child })
    }

    /// Kills it (SIGKILL) and waits until it is gone.
    pub async fn kill(&mut self) {
        // It may be gone already.
        let _ = self.child.kill().await;
    }

    /// Its number; `None` when it was waited for.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    /// The system's.
    pub async fn wait(&mut self) -> std::io::Result<std::process::ExitStatus> {
        // Its standard input stays open: `Child::wait` would close it.
        let input = self.child.stdin.take();
        let status = self.child.wait().await;
        drop(input);
        status
    }
}

/// All of them.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    pub gateway: Process,
    pub workers: Vec<(Role, Process)>,
}

impl Cluster {
    /// Starts the workers, and then a gateway.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn start(config: ClusterConfig) -> Result<Self, ClusterError> {
        let roles = std::iter::repeat_n(Role::Prefill, config.prefill)
            .enumerate()
            .chain(std::iter::repeat_n(Role::Decode, config.decode).enumerate());
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let started = roles.map(|(n, role)| {
            let (config, name) = (&config, format!("{role}-{n}"));
            async move { Ok((role, worker(config, role, &name, any).await?)) }
        });
        let workers = futures_util::future::try_join_all(started).await?;
        let gateway = gateway(&config, &workers).await?;
        Ok(Self { config, gateway, workers })
    }

    /// Where the gateway takes requests.
    pub fn url(&self) -> String {
        format!("http://{}", self.gateway.address)
    }

    /// Starts worker `n` again, which has ended, at the address that it had.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn restart(&mut self, n: usize) -> Result<(), ClusterError> {
        let (role, process) = &mut self.workers[n];
        process.kill().await;
        *process = worker(&self.config, *role, &process.name.clone(), process.address).await?;
        Ok(())
    }
}

async fn worker(
    config: &ClusterConfig,
    role: Role,
    name: &str,
    listen: SocketAddr,
) -> Result<Process, ClusterError> {
    let mut options: Vec<String> = ["--tied", role.name(), "--name", name].map(str::to_owned).into();
    options.push(format!("--listen={listen}"));
    if let Some(directory) = &config.directory {
        options.push(format!("--directory={directory}"));
    }
    options.extend_from_slice(&config.worker);
    Process::start(&config.program, name, &options).await
}

async fn gateway(config: &ClusterConfig, workers: &[(Role, Process)]) -> Result<Process, ClusterError> {
    let addresses: Vec<String> = workers.iter().map(|(_, process)| process.address.to_string()).collect();
    let directory = config.directory.clone().unwrap_or_else(|| format!("static://{}", addresses.join(",")));
    let mut options: Vec<String> = ["--tied", "gateway", "--listen=127.0.0.1:0"].map(str::to_owned).into();
    options.push(format!("--directory={directory}"));
    options.extend_from_slice(&config.gateway);
    Process::start(&config.program, "gateway", &options).await
}
