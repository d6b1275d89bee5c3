//! Building a channel's parts, and what the two hellos say of them.

use std::sync::Arc;
use std::time::Instant;

use super::config::{CONTROL_BYTES, KvConfig};
use super::driver::{KvDriver, OnEnd, Parts};
use super::endpoint::Shared;
use super::layout::{Dtype, Layout};
use super::proto::{self, Connection, Ledger, Part, PoolSeams, Seams, TransferId};
use super::queues::{Queue, QueueSizes};
use super::shape::{Heads, Shape, ShapeError, Strides};
use super::targets::PeerPool;
use crate::connect::{
    Agreed, ConnectError, Credits, Hello, HelloCaps, HelloLayout, HelloRegion, HelloShape, Lines,
    NotifyModes, Reject, path_mtu,
};
use crate::error::DeviceError;
use crate::memory::{Memory, Prefault};
use crate::provider::{self, QpAddress, QpConnect};
use crate::random::random_u64;

/// The transport's name in the hello: what our queue pairs can be carried by. One without order speaks another protocol than
/// one with it (as SRD and RC do), so that it has another name.
fn transport(shared: &Shared) -> String {
    let name = shared.device.transport();
    if shared.device.capabilities().ordered { name.to_owned() } else { format!("{name}-unordered") }
}

/// Local ACK time-out: 4.096 µs × 2^16 = 0.27 s, [`RETRIES`] times: above a lost packet or two, below the heartbeat's
/// patience.
pub(super) const ACK_TIMEOUT: u8 = 16;
/// Of lost packets. And of missing receives, which credits make impossible: a few let a bug of ours surface (K7).
pub(super) const RETRIES: u8 = 6;
pub(super) const MIN_RNR_TIMER: u8 = 14;

/// A channel's local resources, before it is connected. Dropping them leaves nothing (B4).
pub(super) struct Built {
    queues: Vec<Queue>,
    /// Under the queue pairs, where a connection manager has connected them.
    pub(super) lines: Lines,
    cq: provider::Cq,
    channel: provider::Channel,
    config: KvConfig,
}

/// Creates `qps` queue pairs with every receive posted. A driver may take its time: off the runtime's workers (R9).
pub(super) async fn build(shared: &Shared, qps: usize) -> Result<Built, ConnectError> {
    let caps = shared.device.capabilities();
    let config = shared.config.clone().qps(qps).fit(caps).map_err(ConnectError::resources)?;
    let sizes = QueueSizes {
        send_depth: config.send_depth,
        recv_depth: config.recv_depth(),
        control_bytes: CONTROL_BYTES,
        max_inline: caps.max_inline.min(CONTROL_BYTES as u32),
    };
    let mut memories = Vec::with_capacity(qps);
    for _ in 0..qps {
        // One region a queue pair: small enough for a short max_mr_size, and touched only where it is used.
        let memory = Memory::anonymous(sizes.buffer_bytes()).prefault(Prefault::No);
        let memory = shared.pd.register_local(memory).await.map_err(ConnectError::resources)?;
        memories.push(memory.into_slice());
    }
    let pd = shared.pd.clone();
    off_workers(shared, move || {
        let caps = pd.device().capabilities();
        let channel = pd.device().provider().create_channel().map_err(ConnectError::resources)?;
        let entries = (sizes.send_depth + sizes.recv_depth) * qps as u32;
        let cq = channel.create_cq(entries).map_err(ConnectError::resources)?;
        let queues = memories.into_iter().map(|memory| {
            let qp = pd.provider().create_qp(&cq, &cq, sizes.init()).map_err(ConnectError::resources)?;
            Queue::new(qp, &sizes, caps.ordered, caps.all_signaled, memory).map_err(ConnectError::resources)
        });
        let queues = queues.collect::<Result<_, _>>()?;
        Ok(Built { queues, lines: Lines::default(), cq, channel, config })
    })
    .await
}

/// Runs `work` where it may block.
async fn off_workers<T: Send + 'static>(
    shared: &Shared,
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    match shared.runtime.spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
        // It was shut down before this had run.
        Err(_) => Err(ConnectError::resources(DeviceError::NoRuntime)),
    }
}

impl Built {
    /// Leaves the queue pairs that both sides use, and answers their number. Each will meet the peer's of the same number.
    pub(super) fn trim(&mut self, peer: &Hello, agreed: &Agreed) -> usize {
        self.queues.truncate(agreed.qps);
        for (queue, remote) in self.queues.iter_mut().zip(&peer.qps) {
            queue.set_peer(remote.qp_num);
        }
        self.queues.len()
    }

    pub(super) fn qp(&self, n: usize) -> Result<&provider::Qp, ConnectError> {
        let gone = || ConnectError::resources(DeviceError::NoRuntime);
        self.queues.get(n).and_then(Queue::qp).ok_or_else(gone)
    }
}

/// What we say of ourselves, and of these queue pairs.
pub(super) fn hello(shared: &Shared, built: &Built, connection_id: u64, dead: Vec<u64>) -> Hello {
    let caps = shared.device.capabilities();
    let layout = shared.pool.layout();
    Hello {
        epoch: shared.epoch,
        name: shared.name.clone(),
        transport: transport(shared),
        connection_id,
        qps: built.queues.iter().filter_map(Queue::qp).map(provider::Qp::address).collect(),
        cm_port: 0,
        // A device may report an MTU that is no path MTU (Ethernet's).
        mtu: path_mtu(caps.active_mtu, caps.active_mtu).unwrap_or(caps.active_mtu),
        rd_atomic: caps.max_rd_atomic,
        caps: HelloCaps { ordered: caps.ordered, immediate: caps.immediate, max_msg: caps.max_msg_size },
        credits: Credits { data: built.config.data_credits, control: built.config.control_credits },
        max_control: CONTROL_BYTES as u32,
        notify: NotifyModes { imm: caps.immediate, send: caps.ordered },
        layout: Some(HelloLayout {
            layers: layout.layers(),
            blocks: layout.blocks(),
            block_bytes: layout.block_bytes(),
            layer_stride: layout.layer_stride(),
            block_stride: layout.block_stride(),
            dtype: layout.dtype().to_string(),
            shape: layout.shape().map(Shape::hello),
        }),
        regions: shared.pool.remote_regions(),
        dead,
        auth: Vec::new(),
    }
}

/// Connects our queue pairs to the peer's, each to that of the same number. Those beyond `agreed.qps` are destroyed.
///
/// A device may look up the peer's address in between, so that it happens off the runtime's workers (R9).
pub(super) async fn connect(
    shared: &Shared,
    mut built: Built,
    peer: &Hello,
    agreed: &Agreed,
    active: bool,
) -> Result<Built, ConnectError> {
    built.trim(peer, agreed);
    let (remotes, path_mtu) = (peer.qps.clone(), agreed.path_mtu);
    let rd_atomic = agreed.rd_atomic.min(shared.device.capabilities().max_rd_atomic);
    off_workers(shared, move || {
        connect_all(&mut built, &remotes, path_mtu, rd_atomic, active)?;
        Ok(built)
    })
    .await
}

fn connect_all(
    built: &mut Built,
    remotes: &[QpAddress],
    path_mtu: u32,
    rd_atomic: u8,
    active: bool,
) -> Result<(), ConnectError> {
    for (queue, remote) in built.queues.iter_mut().zip(remotes) {
        let Some(qp) = queue.qp() else { continue };
        qp.connect(&QpConnect {
            remote: *remote,
            path_mtu,
            max_rd_atomic: rd_atomic,
            max_dest_rd_atomic: rd_atomic,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            min_rnr_timer: MIN_RNR_TIMER,
            active,
        })
        .map_err(ConnectError::queue_pair)?;
    }
    Ok(())
}

/// The peer's pool, checked: its regions must hold its layout.
pub(super) fn peer_pool(peer: &Hello) -> Result<PeerPool, Reject> {
    let malformed = |what: String| Reject::Malformed { what };
    let Some(l) = &peer.layout else { return Err(malformed("the hello names no layout".to_owned())) };
    let dtype = Dtype::new(&l.dtype).map_err(|e| malformed(e.to_string()))?;
    let layout = Layout::new(l.layers, l.blocks, l.block_bytes, l.layer_stride, l.block_stride)
        .map_err(|e| malformed(e.to_string()))?
        .with_dtype(dtype);
    let layout = match &l.shape {
        None => layout,
        Some(said) => {
            let shape = Shape::said(said).map_err(|e| malformed(e.to_string()))?;
            layout.with_shape(shape).map_err(|e| malformed(e.to_string()))?
        }
    };
    let parts = peer.regions.iter().map(|r| Part { addr: r.addr, len: r.len, key: r.rkey }).collect();
    let seams = PoolSeams::from(Seams::new(parts).map_err(|e| malformed(e.to_string()))?);
    // A peer that only sends exposes nothing; then there is nothing to write to, and no grant of it either.
    if seams.total() > 0 && seams.total() < layout.required_bytes() {
        return Err(malformed(format!(
            "the layout needs {} bytes, the regions have {}",
            layout.required_bytes(),
            seams.total()
        )));
    }
    Ok(PeerPool { layout, seams })
}

/// What the protocol is told, checked: the peer's numbers are its own.
pub(super) fn protocol(
    shared: &Shared,
    built: &Built,
    peer: &Hello,
    agreed: &Agreed,
    opening: proto::Opening,
) -> Result<proto::Config, Reject> {
    let config = &built.config;
    let rail = proto::RailConfig {
        qps: agreed.qps,
        notify: match agreed.notify {
            crate::connect::Notify::Imm => proto::Notify::Imm,
            crate::connect::Notify::Send => proto::Notify::Send,
        },
        ordered: agreed.ordered,
        opening,
        tx_credits: proto::Credits { data: peer.credits.data, control: peer.credits.control },
        rx_credits: proto::Credits { data: config.data_credits, control: config.control_credits },
        max_write: config.max_write.min(u32::try_from(agreed.max_msg).unwrap_or(u32::MAX)),
    };
    let proto = proto::Config {
        rails: vec![rail],
        local_epoch: shared.epoch,
        peer_epoch: peer.epoch,
        max_control: agreed.max_control as usize,
        max_transfers: config.max_transfers,
        heartbeat: config.heartbeat,
        peer_timeout: config.peer_timeout,
        abort_grace: config.abort_grace,
    };
    match proto.check() {
        Ok(()) => Ok(proto),
        Err(error) => Err(Reject::Unsupported { what: error.to_string() }),
    }
}

/// A connected channel's driver. Its task is not started yet.
pub(super) fn driver(
    shared: &Arc<Shared>,
    built: Built,
    peer: &Hello,
    peer_pool: PeerPool,
    proto: proto::Config,
    ledger: Ledger,
    on_end: OnEnd,
) -> (Arc<KvDriver>, provider::Channel) {
    let Built { queues, lines, cq, channel, config } = built;
    let doubts = ledger.in_doubt().map(TransferId).collect();
    // `protocol` has checked the configuration, and a ledger is kept by the two epochs.
    let conn = Connection::new(proto, ledger, Instant::now()).expect("a checked configuration");
    let parts = Parts {
        conn,
        cq,
        queues,
        lines: Arc::new(lines),
        peer: peer_pool,
        doubts,
        pool: shared.pool.clone(),
        spin: config.spin,
        deadline: config.deadline,
        connection_id: peer.connection_id,
        local_epoch: shared.epoch,
        peer_epoch: peer.epoch,
        on_end,
    };
    (KvDriver::new(parts, shared.runtime.clone()), channel)
}

pub(super) fn new_id() -> Result<u64, ConnectError> {
    random_u64().map_err(ConnectError::resources)
}

impl super::pool::KvPool {
    /// What peers are told of the pool's memory: nothing, when it is a source only.
    fn remote_regions(&self) -> Vec<HelloRegion> {
        match self.access() {
            super::pool::PoolAccess::Source => Vec::new(),
            super::pool::PoolAccess::Target => self
                .regions()
                .iter()
                .map(|region| {
                    let r = region.remote();
                    HelloRegion { addr: r.addr, len: r.len, rkey: r.rkey }
                })
                .collect(),
        }
    }
}

impl Shape {
    /// As a hello says it.
    fn hello(&self) -> HelloShape {
        let (heads, strides) = (self.heads(), self.strides());
        HelloShape {
            planes: self.planes(),
            tokens: self.tokens(),
            first_head: heads.first(),
            heads: heads.count(),
            total_heads: heads.total(),
            head_bytes: self.head_bytes(),
            plane_stride: strides.plane,
            token_stride: strides.token,
            head_stride: strides.head,
        }
    }

    /// What a hello has said, checked.
    fn said(s: &HelloShape) -> Result<Self, ShapeError> {
        let heads = Heads::new(s.first_head, s.heads, s.total_heads)?;
        let strides = Strides { plane: s.plane_stride, token: s.token_stride, head: s.head_stride };
        Self::strided(s.planes, s.tokens, heads, s.head_bytes, strides)
    }
}
