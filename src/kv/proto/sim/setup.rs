//! What a seed draws at its start: endpoints, the capabilities and the timing of each channel.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::super::{Config, Connection, Credits, Ledger, Notify, Opening, RailConfig, TransferId};
use super::Rng;
use super::model::{GrantKey, Life};
use super::pool::{BLOCK_BYTES, BLOCKS, Pool};
use super::rails::{Health, receives};
use super::reads::Reading;
use super::shared::Shared;
use super::wire::{Item, Queue, Timing};
use crate::kv::layout::Layout;

/// One endpoint: a process with memory.
pub(super) struct End {
    /// How often it has been restarted.
    pub(super) life: u32,
    pub(super) frozen: bool,
    /// It was frozen at some time: its own deadlines may be late.
    pub(super) was_frozen: bool,
    /// When it began to run, or to run again.
    pub(super) awake_since: u64,
    pub(super) sources: Pool,
    pub(super) targets: Pool,
}

impl End {
    fn new(rng: &mut Rng, layers: u32, me: u64) -> Self {
        let mut pool = |base: u64, key: u32| {
            let gap = rng.pick(&[0, 0, 24]);
            let stride = BLOCK_BYTES + gap;
            let layout = Layout::new(layers, BLOCKS, BLOCK_BYTES, stride * u64::from(BLOCKS), stride);
            Pool::new(layout.expect("valid"), base, key)
        };
        Self {
            life: 0,
            frozen: false,
            was_frozen: false,
            awake_since: 0,
            sources: pool(0x10_0000 * (me + 1), 10),
            targets: pool(0x1000_0000 * (me + 1), 20),
        }
    }
}

/// One side of a channel.
#[derive(Default)]
pub(super) struct Side {
    pub(super) conn: Option<Connection>,
    pub(super) ledger: Option<Ledger>,
    pub(super) queues: Vec<Queue>,
    pub(super) cq: VecDeque<Item>,
    pub(super) wake: Option<u64>,
    /// The queue pairs are destroyed.
    pub(super) fenced: bool,
    /// In shared memory: it has said that its sources may be used again.
    pub(super) closed: bool,
    /// When a rail has come up again.
    pub(super) revived_at: u64,
    /// Since when its process says nothing any more: frozen or gone.
    pub(super) silent_since: Option<u64>,
    /// Grants of the peer.
    pub(super) usable: Vec<GrantKey>,
    /// Grants of the peer to read, of the present connection.
    pub(super) readable: Vec<GrantKey>,
    /// Reads of the present connection whose blocks have not come back.
    pub(super) reads: BTreeMap<u64, Reading>,
    /// Transfers that were accepted before their data was ready.
    pub(super) gated: Vec<TransferId>,
    /// Messages that were accepted on this connection and not yet delivered to the peer.
    pub(super) messages: VecDeque<Vec<u8>>,
}

/// Two endpoints and what is between them.
pub(super) struct Channel {
    pub(super) ends: [usize; 2],
    /// Of the processes that the present connection, or the last one, is between.
    pub(super) lives: [Life; 2],
    pub(super) cfg: Config,
    /// Receives that each side posts on a queue pair.
    pub(super) credits: [Credits; 2],
    pub(super) depth: usize,
    /// A connection manager connects the queue pairs: one side speaks first.
    pub(super) by_cm: bool,
    pub(super) timing: Timing,
    /// By rail.
    pub(super) health: Vec<Health>,
    /// Which side has to wait for the other's first word on a queue pair.
    pub(super) listens: [bool; 2],
    /// It is one in shared memory.
    pub(super) shared: Option<Shared>,
    pub(super) incarnation: u32,
    pub(super) connected_at: u64,
    pub(super) sides: [Side; 2],
    /// A user has closed, or the run is ending.
    pub(super) closing: bool,
    /// The run is ending.
    pub(super) last: bool,
    pub(super) reconnecting: bool,
    /// Happenings of this channel on the agenda.
    pub(super) pending: u32,
}

impl Channel {
    fn new(rng: &mut Rng, ends: [usize; 2]) -> Self {
        let ordered = rng.one_in(2);
        let tiny = rng.one_in(2);
        let credits = |rng: &mut Rng| match tiny {
            true => Credits { data: rng.range(1, 8) as u32, control: rng.range(4, 8) as u32 },
            false => Credits { data: 64, control: 32 },
        };
        let credits = [credits(rng), credits(rng)];
        let mut rail = RailConfig {
            absent: false,
            qps: rng.range(1, 4) as usize,
            notify: if ordered && rng.one_in(2) { Notify::Send } else { Notify::Imm },
            ordered,
            opening: Opening::Free,
            tx_credits: credits[1],
            rx_credits: credits[0],
            max_write: 0,
            max_reads: 0,
        };
        let max_control = if rng.one_in(2) { 256 } else { 1024 };
        rail.max_write = rng.pick(&[16, 64, 100, 4096]);
        rail.max_reads = rng.range(1, 4) as u32;
        let cfg = Config {
            rails: vec![rail],
            local_epoch: 0,
            peer_epoch: 0,
            max_control,
            max_transfers: rng.pick(&[1, 2, 5, 16]),
            heartbeat: Duration::from_millis(30),
            peer_timeout: Duration::from_millis(400),
            abort_grace: Duration::from_millis(300),
        };
        let timing = Timing::new(&cfg, rng);
        Self {
            ends,
            lives: ends.map(|ep| (ep, 0)),
            cfg,
            credits,
            depth: if tiny { rng.range(6, 16) as usize } else { 128 },
            by_cm: rng.one_in(2),
            timing,
            health: vec![Health::default()],
            listens: [false; 2],
            shared: None,
            incarnation: 0,
            connected_at: 0,
            sides: Default::default(),
            closing: false,
            last: false,
            reconnecting: false,
            pending: 0,
        }
    }

    /// The configuration of one side; `dials` is the side that connects.
    pub(super) fn config(&self, side: usize, dials: usize) -> Config {
        let opening = match self.by_cm {
            false => Opening::Free,
            true if side == dials => Opening::Speak,
            true => Opening::Listen,
        };
        let (rx_credits, tx_credits) = (self.credits[side], self.credits[1 - side]);
        let rails = self.cfg.rails.iter().map(|r| RailConfig { opening, rx_credits, tx_credits, ..*r });
        Config {
            rails: rails.collect(),
            local_epoch: epoch(self.lives[side]),
            peer_epoch: epoch(self.lives[1 - side]),
            ..self.cfg.clone()
        }
    }

    pub(super) fn new_queues(&self, cfg: &Config) -> Vec<Queue> {
        let queues = |rail: &RailConfig| {
            let receives = receives(rail.rx_credits);
            let listens = rail.opening == Opening::Listen;
            vec![Queue { receives, listens, ..Queue::default() }; rail.qps]
        };
        cfg.rails.iter().flat_map(queues).collect()
    }
}

pub(super) fn epoch(life: Life) -> u64 {
    100 + life.0 as u64 + 10 * u64::from(life.1)
}

/// All endpoints, and a channel between each two.
pub(super) fn draw(rng: &mut Rng) -> (Vec<End>, Vec<Channel>) {
    let layers = rng.range(1, 3) as u32;
    let count = if rng.one_in(3) { 3 } else { 2 };
    let ends = (0..count).map(|me| End::new(rng, layers, me as u64)).collect();
    let pairs: &[[usize; 2]] = if count == 2 { &[[0, 1]] } else { &[[0, 1], [1, 2], [2, 0]] };
    (ends, pairs.iter().map(|&pair| Channel::new(rng, pair)).collect())
}
