//! The control connection between the two processes, and the queue pairs and memory of one case.

use landfall::device::Device;
use landfall::memory::{Access, Exposed, Memory, Region, RemoteRegion};
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QpEndpoint, QueuePair, Role};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::case::{Case, Op};
use crate::common::{self, Error};

/// Lines of JSON over loopback.
pub struct Control(BufReader<TcpStream>);

impl Control {
    /// Listens, tells the port on standard output, and takes the one who comes.
    pub async fn accept() -> Result<Self, Error> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        common::hello(listener.local_addr()?)?;
        Ok(Self(BufReader::new(listener.accept().await?.0)))
    }

    pub async fn dial(address: &str) -> Result<Self, Error> {
        Ok(Self(BufReader::new(TcpStream::connect(address).await?)))
    }

    /// Both sides say one line each.
    async fn exchange<T: Serialize + for<'a> Deserialize<'a>>(&mut self, ours: &T) -> Result<T, Error> {
        let mut line = serde_json::to_string(ours)?;
        line.push('\n');
        self.0.write_all(line.as_bytes()).await?;
        line.clear();
        if self.0.read_line(&mut line).await? == 0 {
            return Err("the peer process has ended".into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// Both sides have come to this point.
    pub async fn meet(&mut self) -> Result<(), Error> {
        self.exchange(&()).await
    }
}

#[derive(Serialize, Deserialize)]
struct Offer {
    qps: Vec<QpEndpoint>,
    memory: RemoteRegion,
}

/// Connected queue pairs on one completion queue, and one region for all of them.
pub struct Link {
    pub cq: CompletionQueue,
    pub qps: Vec<QueuePair>,
    /// `2 * bytes`: what is sent from, then what is received into.
    pub memory: Region<Exposed>,
    pub peer: RemoteRegion,
}

impl Link {
    pub async fn new(
        device: &Device,
        case: &Case,
        control: &mut Control,
        active: bool,
    ) -> Result<Self, Error> {
        let pd = device.alloc_pd()?;
        let caps = device.capabilities();
        // perftest asks for as many bytes inline in its latency programs, and for none in its bandwidth programs.
        let inline = match case.op {
            Op::WriteLat | Op::SendLat => caps.max_inline.min(220),
            Op::WriteBw | Op::ReadBw => 0,
        };
        let depth = (case.window() as u32).min(caps.max_qp_wr);
        let entries = 2 * depth * case.qps as u32;
        let cq = CompletionQueue::new(device, CqConfig::new(entries).spin(case.budget()))?;
        let config = QpConfig::new(depth, depth).max_inline(inline);
        let qps = (0..case.qps)
            .map(|_| QueuePair::new(&pd, &cq, &cq, config.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let memory = pd.register_exposed(Memory::anonymous(2 * case.bytes), Access::READ_WRITE).await?;
        let ours = Offer {
            qps: qps.iter().map(QueuePair::endpoint).collect::<Result<_, _>>()?,
            memory: memory.remote(),
        };
        let theirs = control.exchange(&ours).await?;
        if theirs.qps.len() != qps.len() {
            return Err("the peer has another number of queue pairs".into());
        }
        let mut options = ConnectOptions::default();
        options.max_rd_atomic = case.depth.unwrap_or(u8::MAX);
        let role = if active { Role::Active } else { Role::Passive };
        for (qp, to) in qps.iter().zip(&theirs.qps) {
            qp.connect(to, role, options.clone()).await?;
        }
        control.meet().await?;
        Ok(Self { cq, qps, memory, peer: theirs.memory })
    }

    pub async fn close(self) {
        for qp in self.qps {
            qp.close().await;
        }
        self.cq.close().await;
    }
}
