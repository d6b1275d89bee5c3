//! What the two sides tell each other out of band, before each measurement: JSON, a line each, over TCP.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use landfall::memory::RemoteRegion;
use landfall::ring::QpEndpoint;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::common::Error;

/// Longest line that is read. An offer has some 300 bytes.
const MAX_LINE: u64 = 16 << 10;
/// How long the other side may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OpKind {
    Send,
    Imm,
    Write,
    Kv,
}

/// One measurement: an operation and a size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) op: OpKind,
    pub(crate) size: u64,
    /// Warm-up included.
    pub(crate) rounds: u32,
    pub(crate) spin_us: u64,
    /// The longest that it may take.
    pub(crate) deadline_s: u64,
    /// A connection manager connects the queue pairs.
    pub(crate) by_manager: bool,
}

/// A queue pair and the memory that the peer may write to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Raw {
    /// `None` where a connection manager connects it.
    pub(crate) qp: Option<QpEndpoint>,
    /// Where the answering side awaits the connection manager's request.
    pub(crate) listens: Option<SocketAddr>,
    pub(crate) region: RemoteRegion,
}

/// The measuring side asks, with its queue pair where the operation uses one; and says when it is through.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ask {
    Measure { plan: Plan, raw: Option<Raw> },
    Through,
}

/// The other one answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    Raw(Raw),
    /// Where a `KvEndpoint` listens.
    Kv(SocketAddr),
    Through,
    No(String),
}

/// A TCP connection of JSON lines.
pub(crate) struct Exchange {
    stream: BufReader<TcpStream>,
}

impl Exchange {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) async fn dial(address: SocketAddr) -> Result<Self, Error> {
        match tokio::time::timeout(PATIENCE, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => Ok(Self::new(stream)),
            Ok(Err(why)) => {
                Err(format!("connecting to {address}: {why}; start the peer first, or correct the address")
                    .into())
            }
            Err(_) => Err(format!("connecting to {address}: no answer within {PATIENCE:?}").into()),
        }
    }

    /// This side's address.
    pub(crate) fn local_ip(&self) -> Result<IpAddr, Error> {
        Ok(self.stream.get_ref().local_addr()?.ip())
    }

    pub(crate) async fn say(&mut self, message: &impl Serialize) -> Result<(), Error> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        Ok(self.stream.write_all(&line).await?)
    }

    /// The next message, which comes soon.
    pub(crate) async fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        match tokio::time::timeout(PATIENCE, self.next()).await {
            Ok(heard) => heard?.ok_or_else(|| "the peer has closed the connection".into()),
            Err(_) => Err(format!("the peer said nothing for {PATIENCE:?}").into()),
        }
    }

    /// The next message, whenever it comes; `None` when the peer has closed the connection.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Error> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        if read == 0 {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(format!("a message of the peer does not end within {MAX_LINE} bytes").into());
        }
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|why| format!("the peer speaks another language: {why}").into())
    }
}
