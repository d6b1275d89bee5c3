//! What a driver is made of, and its making.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use tokio::runtime::Handle;

use super::loans::Loans;
use super::meter::Meter;
use super::rail::Rail;
use super::reads::Reads;
use super::tasks::Owner;
use super::{BATCH, Inner, KvDriver, OnEnd, State};
use crate::background::Lane;
use crate::device::ProtectionDomain;
use crate::kv::config::KvConfig;
use crate::kv::exposure::PoolExposure;
use crate::kv::lock;
use crate::kv::pass::Pass;
use crate::kv::pool::KvPool;
use crate::kv::proto::{Connection, TransferId};
use crate::kv::queues::Queue;
use crate::kv::rail::{Link, QueuePairs};
use crate::kv::read_choice::Facts;
use crate::kv::stats::ChannelStats;
use crate::kv::targets::PeerPool;
use crate::kv::waiting::Waiting;
use crate::provider::{Cq, Cqe};

pub(crate) struct Parts {
    pub(crate) conn: Connection,
    /// In the order of the protocol's.
    pub(crate) rails: Vec<RailParts>,
    pub(crate) peer: PeerPool,
    /// What the ledger of `conn` has in doubt.
    pub(crate) doubts: Vec<TransferId>,
    pub(crate) pool: KvPool,
    pub(crate) config: KvConfig,
    pub(crate) connection_id: u64,
    pub(crate) reading: Facts,
    pub(crate) local_epoch: u64,
    pub(crate) peer_epoch: u64,
    pub(in crate::kv) pass: Pass,
    pub(crate) peer_name: String,
    /// This side has connected the channel.
    pub(crate) client: bool,
    pub(crate) on_end: OnEnd,
}

/// One rail.
pub(crate) struct RailParts {
    pub(crate) qps: usize,
    /// Or why it was left out for now.
    pub(crate) half: Result<RailHalf, String>,
    /// Our device, by its place in the pool.
    pub(crate) device: usize,
    pub(crate) pd: ProtectionDomain,
    /// The peer does not know our regions on it.
    pub(crate) keyless: bool,
    /// Fitted to the device.
    pub(crate) config: KvConfig,
    pub(crate) link: Link,
    /// A connection manager connects it.
    pub(crate) managed: bool,
}

/// What a rail that is there consists of.
pub(crate) struct RailHalf {
    pub(crate) pairs: QueuePairs,
    pub(crate) cq: Cq,
}

impl KvDriver {
    pub(crate) fn new(parts: Parts, runtime: Handle) -> Arc<Self> {
        let tasks = parts.rails.iter().map(|_| OnceLock::new()).collect();
        let exposure = PoolExposure::of(&parts.pool);
        let this = Arc::new_cyclic(|me: &Weak<Self>| {
            let (mut queues, mut rails) = (Vec::new(), Vec::new());
            let several = parts.rails.len() > 1;
            let devices = parts.rails.iter().map(|part| (part.pd.device().name(), part.half.is_ok()));
            let meter = Meter::new(&parts.peer_name, devices, parts.pool.is_device_memory());
            for (rail, part) in parts.rails.into_iter().enumerate() {
                let qps = queues.len()..queues.len() + part.qps;
                let owner = Arc::new(Owner { driver: me.clone(), rail });
                rails.push(Rail::new(qps.clone(), part, &parts.pool, owner, &mut queues));
                if several {
                    queues[qps].iter_mut().for_each(Queue::signal_often);
                }
            }
            if let Some(exposure) = &exposure {
                queues.iter().for_each(|queue| queue.expose(exposure));
            }
            Self {
                inner: Mutex::new(Inner {
                    conn: Some(parts.conn),
                    queues,
                    rails,
                    cqes: Box::new([Cqe::default(); BATCH]),
                    backlog: Default::default(),
                    failed: Vec::new(),
                    unposted: Vec::new(),
                    strict: parts.config.strict_rails,
                    client: parts.client,
                    writes: HashMap::new(),
                    grants: BTreeMap::new(),
                    reads: Reads::default(),
                    loans: Loans::default(),
                    arrivals: VecDeque::new(),
                    messages: VecDeque::new(),
                    doubts: parts.doubts.into_iter().map(|id| (id, None)).collect(),
                    waiting: Waiting::default(),
                    state: State::Open,
                    first_cause: None,
                    closing: false,
                    stats: ChannelStats::default(),
                    meter,
                    scheduled: None,
                    returning: 0,
                    destroying: 0,
                    batch: Vec::new(),
                }),
                config: parts.config,
                pool: parts.pool,
                peer: parts.peer,
                connection_id: parts.connection_id,
                reading: parts.reading,
                local_epoch: parts.local_epoch,
                peer_epoch: parts.peer_epoch,
                pass: parts.pass,
                exposure: exposure.clone(),
                runtime,
                tasks,
                planner: Arc::new(Lane::new()),
                on_end: Mutex::new(Some(parts.on_end)),
                me: me.clone(),
            }
        });
        // One that is not there hears of its device when it comes.
        let there: Vec<usize> = {
            let inner = lock(&this.inner);
            (0..inner.rails.len()).filter(|&rail| inner.rails[rail].cq.is_some()).collect()
        };
        there.into_iter().for_each(|rail| this.enrol(rail));
        this.watch_ports();
        this
    }
}
