//! One rail of a driver: its completion queue, its part of the queue pairs, and how far it is on its way down or back up.
//!
//! ```text
//!   Up ── fails ──▶ Draining ── flushes counted ──▶ Destroying ── destroyed ──▶ Down ── the peer answers ──▶ Coming
//!    ▲                                                                                                         │
//!    └──────────────────────────────── both sides are connected ───────────────────────────────────────────────┘
//! ```
//!
//! One that was left out at the start begins in `Down`, without a completion queue: it gets one when it comes.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;

use super::comeback::PeerPortUp;
use super::direct::Direct;
use super::tasks::Owner;
use super::{RailHalf, RailParts};
use crate::connect::Lines;
use crate::device::ProtectionDomain;
use crate::kv::config::KvConfig;
use crate::kv::path::RailFate;
use crate::kv::path_rails::RailState;
use crate::kv::pool::KvPool;
use crate::kv::queues::Queue;
use crate::kv::rail::Link;
use crate::kv::rail_talk::{Ear, Talk};
use crate::provider::Cq;
use crate::provider::events::Enrolled;

pub(super) struct Rail {
    /// Its queue pairs, by their numbers in the channel.
    pub(super) qps: Range<usize>,
    // Queue pairs, which are elsewhere, go before what they use: the connections under them, and the completion queue (R7).
    pub(super) lines: Option<Arc<Lines>>,
    /// Waits for the connection manager's word that the peer is gone.
    pub(super) watch: Option<AbortHandle>,
    /// The connection manager says that the peer is gone.
    pub(super) hung_up: bool,
    /// None before it has come for the first time, and after it is lost.
    pub(super) cq: Option<Arc<Cq>>,
    /// Its device or its completion channel is lost: nothing of it completes, and it does not come back.
    pub(super) lost: bool,
    /// By its place in the pool.
    pub(super) device: usize,
    pub(super) pd: ProtectionDomain,
    /// The pool was not registered on the device when the channel was connected: the peer hears of its regions when the rail comes.
    pub(super) keyless: bool,
    /// Whether its device is given memory of a GPU.
    pub(super) direct: Direct,
    /// Fitted to the device.
    pub(super) config: KvConfig,
    pub(super) link: Link,
    pub(super) phase: Phase,
    /// A connection manager connects it.
    pub(super) managed: bool,
    /// The protocol knows that it has come to rest.
    pub(super) fenced: bool,
    /// The device's words on the failure that is being told.
    pub(super) words: Option<String>,
    pub(super) down: Option<Down>,
    pub(super) failures: u32,
    pub(super) returns: u32,
    /// The attempt to come back that is under way on this side, by its number, and its ear.
    pub(super) attempt: Option<(u32, mpsc::Sender<Talk>)>,
    pub(super) attempts: u32,
    /// Attempts of the peer's that this side is answering: one that was overtaken is among them until it knows.
    pub(super) answers: usize,
    /// Hears what the peer's driver says of it.
    pub(super) ear: Ear,
    /// A task tries to bring it back.
    pub(super) probing: bool,
    /// Its port is up again: an attempt to come back need not wait.
    pub(super) port_up: Arc<Notify>,
    /// And the peer's.
    pub(super) peer_port_up: Arc<PeerPortUp>,
    /// Its place among those who hear of the device's events.
    pub(super) owner: Arc<Owner>,
    pub(super) enrolled: Option<Enrolled>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Up,
    /// Its queue pairs are in the error state; their flushes are being counted.
    Draining {
        since: Instant,
    },
    /// They are being destroyed, on a thread that waits for the driver.
    Destroying,
    /// They are destroyed.
    Down,
    /// There are new ones, which are connected to the peer's; the peer has yet to say that it knows.
    Coming,
}

/// Why a rail is down.
#[derive(Clone, Debug)]
pub(super) struct Down {
    pub(super) cause: String,
    pub(super) since: SystemTime,
    /// What the latest attempt to come back has found.
    pub(super) attempt: Option<String>,
}

impl Rail {
    /// A rail whose queue pairs have the numbers `qps`, and go to the end of `queues`: or places for them, where it was left out.
    pub(super) fn new(
        qps: Range<usize>,
        part: RailParts,
        pool: &KvPool,
        owner: Arc<Owner>,
        queues: &mut Vec<Queue>,
    ) -> Self {
        let RailParts { half, device, pd, keyless, config, link, managed, .. } = part;
        let (half, down) = match half {
            Ok(half) => (Some(half), None),
            Err(cause) => (None, Some(Down { cause, since: SystemTime::now(), attempt: None })),
        };
        let (lines, cq) = match half {
            Some(RailHalf { pairs, cq }) => {
                queues.extend(pairs.queues);
                (Some(Arc::new(pairs.lines)), Some(Arc::new(cq)))
            }
            None => {
                queues.extend(qps.clone().map(|_| Queue::absent()));
                (None, None)
            }
        };
        Self {
            qps,
            lines,
            watch: None,
            hung_up: false,
            lost: false,
            direct: Direct::new(pool, pd.device().is_rdma()),
            device,
            pd,
            keyless,
            config,
            link,
            phase: if cq.is_some() { Phase::Up } else { Phase::Down },
            managed,
            fenced: cq.is_none(),
            cq,
            words: None,
            down,
            failures: 0,
            returns: 0,
            attempt: None,
            attempts: 0,
            answers: 0,
            ear: Ear::default(),
            probing: false,
            port_up: Arc::default(),
            peer_port_up: Arc::default(),
            owner,
            enrolled: None,
        }
    }

    pub(super) fn fate(&self) -> RailFate {
        let state = match &self.down {
            None => RailState::Up,
            Some(Down { cause, since, attempt }) => {
                RailState::Down { cause: cause.clone(), since: *since, attempt: attempt.clone() }
            }
        };
        RailFate { state, failures: self.failures, returns: self.returns }
    }
}
