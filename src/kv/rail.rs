//! One rail of a channel before it is driven: a completion queue, queue pairs on one device, and how they are connected.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::config::{CONTROL_BYTES, KvConfig};
use super::endpoint::Shared;
use super::exposure::Nothing;
use super::path_rails::RailWarning;
use super::pool::{KvPool, PoolAccess, words};
use super::pool_device::{PoolDevice, Registered};
use super::queues::{Queue, QueueSizes};
use crate::connect::{
    AgreedRail, ConnectError, Credits, HelloCaps, HelloRail, HelloRegion, Lines, MAX_NAME, NotifyModes,
    path_mtu,
};
use crate::device::{Device, ProtectionDomain};
use crate::error::DeviceError;
use crate::memory::{Exposed, Local, Memory, Prefault, Region, Slice};
use crate::provider::{self, QpAddress, QpConnect};

/// Local ACK time-out: 4.096 µs × 2^16 = 0.27 s, [`RETRIES`] times: above a lost packet or two, below the heartbeat's
/// patience.
pub(super) const ACK_TIMEOUT: u8 = 16;
/// Of lost packets. And of missing receives, which credits make impossible: a few let a bug of ours surface (K7).
pub(super) const RETRIES: u8 = 6;
pub(super) const MIN_RNR_TIMER: u8 = 14;

/// The queue pairs of a rail.
#[derive(Default)]
pub(crate) struct QueuePairs {
    pub(super) queues: Vec<Queue>,
    /// Under them, where a connection manager has connected them: they go first.
    pub(super) lines: Lines,
}

/// A rail's local resources. Dropping them leaves nothing (B4).
pub(super) struct BuiltRail {
    // Queue pairs go before what they use (R7).
    pub(super) pairs: QueuePairs,
    pub(super) cq: provider::Cq,
    pub(super) channel: provider::Channel,
    pub(super) pd: ProtectionDomain,
    /// Fitted to the device.
    pub(super) config: KvConfig,
}

/// One of our halves of a rail.
pub(super) enum Half {
    Built(BuiltRail),
    /// Left out for now.
    Later(Absent),
    /// Left out for good, or handed on.
    None,
}

/// A rail that is left out, and may come while the channel lives.
#[derive(Clone, Debug)]
pub(super) struct Absent {
    /// Fitted to the device.
    pub(super) config: KvConfig,
    /// What has failed.
    pub(super) warning: RailWarning,
    /// The pool was not registered on the device: the peer hears of its regions when the rail comes.
    pub(super) keyless: bool,
}

impl Half {
    pub(super) fn built(&self) -> Option<&BuiltRail> {
        match self {
            Self::Built(built) => Some(built),
            Self::Later(_) | Self::None => None,
        }
    }

    pub(super) fn is_built(&self) -> bool {
        self.built().is_some()
    }

    /// Leaves it out from now on. What it was fitted to stays.
    pub(super) fn leave_out(&mut self, warning: RailWarning) {
        if let Self::Built(BuiltRail { config, .. }) = self {
            *self = Self::Later(Absent { config: config.clone(), warning, keyless: false });
        }
    }

    /// Left out for now, on a device that the pool is not registered on.
    pub(super) fn is_keyless(&self) -> bool {
        matches!(self, Self::Later(Absent { keyless: true, .. }))
    }

    fn config(&self) -> Option<&KvConfig> {
        match self {
            Self::Built(built) => Some(&built.config),
            Self::Later(absent) => Some(&absent.config),
            Self::None => None,
        }
    }
}

/// The transport's name in the hello: what our queue pairs can be carried by. One without order speaks another protocol than
/// one with it (as SRD and RC do), so that it has another name.
pub(super) fn transport_of(device: &Device) -> String {
    let name = device.transport();
    if device.capabilities().ordered { name.to_owned() } else { format!("{name}-unordered") }
}

/// How deep the queues of a channel's queue pairs are on this device.
pub(super) fn sizes_on(device: &Device, config: &KvConfig) -> QueueSizes {
    QueueSizes {
        send_depth: config.send_depth,
        recv_depth: config.recv_depth(),
        control_bytes: CONTROL_BYTES,
        max_inline: device.capabilities().max_inline.min(CONTROL_BYTES as u32),
        gpu_ways: config.gpu_paths.ways(),
    }
}

/// Memory for the control messages of each of `qps` queue pairs.
pub(super) async fn control_memory(
    pd: &ProtectionDomain,
    sizes: &QueueSizes,
    qps: usize,
) -> Result<Vec<Slice<Local>>, ConnectError> {
    let mut memories = Vec::with_capacity(qps);
    for _ in 0..qps {
        // One region a queue pair: small enough for a short max_mr_size, and touched only where it is used.
        let memory = Memory::anonymous(sizes.buffer_bytes()).prefault(Prefault::No);
        let memory = pd.register_local(memory).await.map_err(ConnectError::resources)?;
        memories.push(memory.into_slice());
    }
    Ok(memories)
}

/// Creates queue pairs on `cq`, one for each of the memories, with every receive posted. Blocks.
pub(super) fn queues_on(
    pd: &ProtectionDomain,
    cq: &provider::Cq,
    sizes: &QueueSizes,
    memories: Vec<Slice<Local>>,
) -> Result<QueuePairs, ConnectError> {
    let caps = pd.device().capabilities();
    let queue = |memory| {
        let qp = pd.provider().create_qp(cq, cq, sizes.init()).map_err(ConnectError::resources)?;
        // Before it is connected: its channel says more.
        qp.expose(Arc::new(Nothing));
        qp.set_gpu_ways(sizes.gpu_ways);
        Queue::new(qp, sizes, caps.ordered, caps.all_signaled, memory).map_err(ConnectError::resources)
    };
    let queues = memories.into_iter().map(queue).collect::<Result<_, _>>()?;
    Ok(QueuePairs { queues, lines: Lines::default() })
}

/// Creates `qps` queue pairs on `pd`, with every receive posted. A driver may take its time: off the runtime's workers (R9).
pub(super) async fn build(
    shared: &Shared,
    pd: &ProtectionDomain,
    qps: usize,
) -> Result<BuiltRail, ConnectError> {
    build_fitted(&shared.runtime, pd, fitted(shared, pd.device(), qps)?, qps).await
}

/// The endpoint's configuration, as it fits a device with so many queue pairs.
pub(super) fn fitted(shared: &Shared, device: &Device, qps: usize) -> Result<KvConfig, ConnectError> {
    shared.config.clone().qps(qps).fit(device.capabilities()).map_err(ConnectError::resources)
}

/// The same, with a configuration that was fitted to the device.
pub(super) async fn build_fitted(
    runtime: &Handle,
    pd: &ProtectionDomain,
    config: KvConfig,
    qps: usize,
) -> Result<BuiltRail, ConnectError> {
    let sizes = sizes_on(pd.device(), &config);
    let memories = control_memory(pd, &sizes, qps).await?;
    let pd = pd.clone();
    off_workers(runtime, move || {
        let channel = pd.device().provider().create_channel().map_err(ConnectError::resources)?;
        let entries = (sizes.send_depth + sizes.recv_depth) * qps as u32;
        let cq = channel.create_cq(entries).map_err(ConnectError::resources)?;
        let pairs = queues_on(&pd, &cq, &sizes, memories)?;
        Ok(BuiltRail { pairs, cq, channel, pd, config })
    })
    .await
}

/// Runs `work` where it may block.
pub(super) async fn off_workers<T: Send + 'static>(
    runtime: &Handle,
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    match runtime.spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
        // It was shut down before this had run.
        Err(_) => Err(ConnectError::resources(DeviceError::NoRuntime)),
    }
}

impl QueuePairs {
    /// Leaves the queue pairs that both sides use, and answers their number. Each will meet the peer's of the same number.
    pub(super) fn trim(&mut self, qps: usize, remotes: &[QpAddress]) -> usize {
        self.queues.truncate(qps);
        for (queue, remote) in self.queues.iter_mut().zip(remotes) {
            queue.set_peer(remote.qp_num);
        }
        self.queues.len()
    }

    pub(super) fn qp(&self, n: usize) -> Result<&provider::Qp, ConnectError> {
        let gone = || ConnectError::resources(DeviceError::NoRuntime);
        self.queues.get(n).and_then(Queue::qp).ok_or_else(gone)
    }

    pub(super) fn addresses(&self) -> Vec<QpAddress> {
        self.queues.iter().filter_map(Queue::qp).map(provider::Qp::address).collect()
    }
}

/// What the queue pairs of a rail are connected with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(super) path_mtu: u32,
    pub(super) rd_atomic: u8,
    pub(super) active: bool,
}

impl Link {
    pub(super) fn new(device: &Device, agreed: &AgreedRail, active: bool) -> Self {
        let rd_atomic = agreed.rd_atomic.min(device.capabilities().max_rd_atomic);
        Self { path_mtu: agreed.path_mtu, rd_atomic, active }
    }

    /// Connects each queue pair to that of the same number. Blocks.
    pub(super) fn connect(&self, queues: &[Queue], remotes: &[QpAddress]) -> Result<(), ConnectError> {
        for (queue, remote) in queues.iter().zip(remotes) {
            let Some(qp) = queue.qp() else { continue };
            qp.connect(&QpConnect {
                remote: *remote,
                path_mtu: self.path_mtu,
                max_rd_atomic: self.rd_atomic,
                max_dest_rd_atomic: self.rd_atomic,
                timeout: ACK_TIMEOUT,
                retry_cnt: RETRIES,
                rnr_retry: RETRIES,
                min_rnr_timer: MIN_RNR_TIMER,
                active: self.active,
            })
            .map_err(ConnectError::queue_pair)?;
        }
        Ok(())
    }
}

/// What we say of a device, and of the queue pairs on it: none, where it could not be set up. `qps` is how many there are to be.
pub(super) fn describe(
    pool: &KvPool,
    device: &PoolDevice,
    half: &Half,
    qps: usize,
    with: usize,
) -> HelloRail {
    let caps = device.pd.device().capabilities();
    let credits = half.config().map_or(Credits { data: 1, control: 1 }, |c| Credits {
        data: c.data_credits,
        control: c.control_credits,
    });
    HelloRail {
        device: short(device.pd.device().name()),
        transport: transport_of(device.pd.device()),
        // At most 16.
        with: with as u8,
        qps: half.built().map(|b| b.pairs.addresses()).unwrap_or_default(),
        // At most MAX_QPS.
        later: if matches!(half, Half::Later(_)) { qps as u8 } else { 0 },
        keyless: half.is_keyless(),
        manager: None,
        // A device may report an MTU that is no path MTU (Ethernet's).
        mtu: path_mtu(caps.active_mtu, caps.active_mtu).unwrap_or(caps.active_mtu),
        rd_atomic: caps.max_rd_atomic,
        caps: HelloCaps { ordered: caps.ordered, immediate: caps.immediate, max_msg: caps.max_msg_size },
        credits,
        notify: NotifyModes { imm: caps.immediate, send: caps.ordered },
        regions: match device.registered() {
            Some(registered) if half.config().is_some() && !half.is_keyless() => registered.remote(pool),
            _ => Vec::new(),
        },
    }
}

/// A device's name as a hello holds it.
fn short(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars().filter(|c| !c.is_control()) {
        if out.len() + c.len_utf8() > MAX_NAME {
            break;
        }
        out.push(c);
    }
    out
}

impl Registered {
    /// What peers are told of it: nothing of a pool that is a source only.
    pub(super) fn remote(&self, pool: &KvPool) -> Vec<HelloRegion> {
        if pool.access() == PoolAccess::Source {
            return Vec::new();
        }
        let remote = |region: &Region<Exposed>| {
            let r = region.remote();
            HelloRegion { addr: r.addr, len: r.len, rkey: r.rkey }
        };
        self.regions.iter().map(remote).collect()
    }
}

/// Why a rail was left out, for a report.
pub(super) fn why(error: &ConnectError) -> String {
    match error {
        // That it is of a channel is said by who asks.
        ConnectError::Resources { source } => words(&**source),
        other => words(other),
    }
}
