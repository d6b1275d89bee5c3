//! Round trips over a queue pair: SEND and RECV, WRITE_WITH_IMM, and WRITE.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use landfall::connect::cm::{CmConnection, CmListener, CmOptions};
use landfall::device::Device;
use landfall::error::OpError;
use landfall::memory::{Access, Exposed, Local, Memory, Region, RemoteSlice, Slice};
use landfall::ring::{
    Buffer, Completed, CompletionQueue, ConnectOptions, CqConfig, OpFuture, QpConfig, QueuePair, Role,
};

use crate::common::Error;
use crate::exchange::{OpKind, Plan, Raw};
use crate::report::Way;

/// One side's queue pair and memory, for one measurement.
pub(crate) struct Lane {
    plan: Plan,
    qp: QueuePair,
    source: Slice<Local>,
    target: Slice<Local>,
    exposed: Region<Exposed>,
}

impl Lane {
    pub(crate) async fn new(device: &Device, plan: Plan) -> Result<Self, Error> {
        let pd = device.alloc_pd()?;
        let (send, recv) = (4, 4);
        let spin = Duration::from_micros(plan.spin_us);
        let cq = CompletionQueue::new(device, CqConfig::new(send + recv).spin(spin))?;
        let qp = QueuePair::new(&pd, &cq, &cq, QpConfig::new(send, recv))?;
        let source = pd.register_local(Memory::anonymous(plan.size)).await?.into_slice();
        let target = pd.register_local(Memory::anonymous(plan.size)).await?.into_slice();
        let exposed = pd.register_exposed(Memory::anonymous(plan.size), Access::WRITE).await?;
        // Regions are whole pages.
        let sized = |mut slice: Slice<Local>| slice.split_to(plan.size);
        Ok(Self { plan, qp, source: sized(source)?, target: sized(target)?, exposed })
    }

    /// `listens` is the answering side's, where a connection manager connects.
    pub(crate) fn raw(&self, listens: Option<SocketAddr>) -> Result<Raw, Error> {
        let qp = if self.plan.by_manager { None } else { Some(self.qp.endpoint()?) };
        Ok(Raw { qp, listens, region: self.exposed.remote() })
    }

    /// The measuring side: the time of each round. The queue pair is for the caller to close, when the peer is through.
    pub(crate) async fn measure(self, peer: &Raw) -> Result<(Vec<Duration>, Connected), Error> {
        let manager = match (&peer.qp, peer.listens) {
            (Some(qp), None) => {
                self.qp.connect(qp, Role::Active, ConnectOptions::default()).await?;
                None
            }
            (None, Some(to)) => Some(CmConnection::connect(&self.qp, to, CmOptions::new()).await?),
            _ => return Err("the peer says nothing of how to connect".into()),
        };
        let to = peer.region.slice(0, self.plan.size)?;
        let mut times = Vec::with_capacity(self.plan.rounds as usize);
        let Self { plan, qp, mut source, mut target, exposed: _exposed } = self;
        for round in 0..plan.rounds {
            let sent;
            match plan.op {
                OpKind::Send => {
                    // Posted before the peer can answer.
                    let answer = qp.recv(target);
                    let start = Instant::now();
                    let ping = qp.send(source);
                    let (time, received);
                    (time, received, target, sent, source) = there_and_back(start, ping, answer).await?;
                    times.push(time);
                    whole(received.bytes, plan)?;
                }
                OpKind::Imm => {
                    let answer = qp.recv(());
                    let start = Instant::now();
                    let ping = qp.write_imm(source, to, round);
                    let (time, received);
                    (time, received, (), sent, source) = there_and_back(start, ping, answer).await?;
                    times.push(time);
                    whole(received.bytes, plan)?;
                    in_turn(received.imm, round)?;
                }
                OpKind::Write | OpKind::Kv => {
                    let start = Instant::now();
                    (sent, source) = qp.write(source, to).await;
                    times.push(start.elapsed());
                }
            }
            sent?;
        }
        Ok((times, Connected { qp, manager }))
    }
}

/// A queue pair, and the connection manager's connection, if it has one.
pub(crate) struct Connected {
    qp: QueuePair,
    manager: Option<CmConnection>,
}

impl Connected {
    pub(crate) fn way(&self) -> Result<Way, Error> {
        let path = self.qp.path().ok_or("the queue pair has ended")?;
        Ok(Way { transport: path.transport, reason: path.reason })
    }

    pub(crate) async fn close(self) {
        self.qp.close().await;
        drop(self.manager);
    }
}

/// What came back, and when; and how the operation that went there has ended. To one that failed nothing comes back.
async fn there_and_back<P: Buffer, A: Buffer>(
    start: Instant,
    mut ping: OpFuture<P>,
    mut answer: OpFuture<A>,
) -> Result<(Duration, Completed, A, Result<Completed, OpError>, P), Error> {
    tokio::select! {
        biased;
        (received, target) = &mut answer => {
            let time = start.elapsed();
            let (sent, source) = ping.await;
            Ok((time, received?, target, sent, source))
        }
        (sent, source) = &mut ping => {
            let sent = sent?;
            let (received, target) = answer.await;
            Ok((start.elapsed(), received?, target, Ok(sent), source))
        }
    }
}

/// The answering side, connected, with its first receive posted.
pub(crate) struct Echo {
    plan: Plan,
    qp: QueuePair,
    manager: Option<CmListener>,
    source: Slice<Local>,
    to: RemoteSlice,
    exposed: Region<Exposed>,
    first: First,
}

enum First {
    Message(OpFuture<Slice<Local>>),
    Immediate(OpFuture<()>),
    Nothing,
}

impl Echo {
    /// `manager` awaits the request for it, where one connects.
    pub(crate) async fn new(lane: Lane, peer: &Raw, manager: Option<CmListener>) -> Result<Self, Error> {
        let Lane { plan, qp, source, target, exposed } = lane;
        match (&peer.qp, &manager) {
            (Some(peer), None) => qp.connect(peer, Role::Passive, ConnectOptions::default()).await?,
            (None, Some(_)) => {}
            _ => return Err("the peer wants to connect in another way".into()),
        }
        let first = match plan.op {
            OpKind::Send => First::Message(qp.recv(target)),
            OpKind::Imm => First::Immediate(qp.recv(())),
            OpKind::Write | OpKind::Kv => First::Nothing,
        };
        Ok(Self { plan, qp, manager, source, to: peer.region.slice(0, plan.size)?, exposed, first })
    }

    /// Answers each round. What it gives back must live until the peer is through: it may only write, without answers.
    pub(crate) async fn serve(self) -> Result<(Connected, Region<Exposed>), Error> {
        let Self { plan, qp, manager, mut source, to, exposed, first } = self;
        let manager = match manager {
            Some(listener) => Some(listener.accept().await?.accept(&qp, CmOptions::new()).await?),
            None => None,
        };
        match first {
            First::Message(mut ping) => {
                for _ in 0..plan.rounds {
                    let (received, target) = ping.await;
                    whole(received?.bytes, plan)?;
                    // Posted before the peer can send again. The last one is flushed at the end.
                    ping = qp.recv(target);
                    let (sent, back) = qp.send(source).await;
                    sent?;
                    source = back;
                }
            }
            First::Immediate(mut ping) => {
                for round in 0..plan.rounds {
                    let (received, ()) = ping.await;
                    let received = received?;
                    whole(received.bytes, plan)?;
                    in_turn(received.imm, round)?;
                    ping = qp.recv(());
                    let (sent, back) = qp.write_imm(source, to, round).await;
                    sent?;
                    source = back;
                }
            }
            First::Nothing => {}
        }
        Ok((Connected { qp, manager }, exposed))
    }
}

fn whole(bytes: u64, plan: Plan) -> Result<(), Error> {
    if bytes == plan.size {
        return Ok(());
    }
    Err(format!("{bytes} bytes arrived, {} were sent", plan.size).into())
}

fn in_turn(imm: Option<u32>, round: u32) -> Result<(), Error> {
    if imm == Some(round) {
        return Ok(());
    }
    Err(format!("immediate {imm:?} arrived in round {round}").into())
}
