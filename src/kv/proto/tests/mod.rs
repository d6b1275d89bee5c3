//! Tests by contract, on two connections and a wire that the test holds in its hands.

mod aborts;
mod deadlines;
mod gated;
mod hostile;
mod landing;
mod limits;
mod mapped;
mod opening;
mod pages;
mod rails;
mod reads;

use super::*;
use crate::kv::layout::Layout;
use std::time::Duration;

pub(super) fn rail() -> RailConfig {
    RailConfig {
        absent: false,
        qps: 2,
        notify: Notify::Imm,
        ordered: true,
        opening: Opening::Free,
        tx_credits: Credits { data: 8, control: 8 },
        rx_credits: Credits { data: 8, control: 8 },
        max_write: 4096,
        max_reads: 4,
    }
}

pub(super) fn config() -> Config {
    Config {
        rails: vec![rail()],
        local_epoch: 1,
        peer_epoch: 2,
        max_control: 512,
        max_transfers: 16,
        heartbeat: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(500),
        abort_grace: Duration::from_millis(200),
    }
}

/// A posted work request.
#[derive(Debug, Clone)]
enum Posted {
    Write(usize, Piece, Option<u32>, Token),
    Read(usize, Token),
    Send(usize, Vec<u8>, Token),
}

impl Posted {
    fn token(&self) -> Token {
        match self {
            Self::Write(.., t) | Self::Read(.., t) | Self::Send(.., t) => *t,
        }
    }

    fn qp(&self) -> usize {
        match self {
            Self::Write(q, ..) | Self::Read(q, ..) | Self::Send(q, ..) => *q,
        }
    }

    fn is_read(&self) -> bool {
        matches!(self, Self::Read(..))
    }

    fn is_write(&self) -> bool {
        matches!(self, Self::Write(..))
    }
}

/// Of one rail.
fn on(rail: RailConfig) -> Config {
    Config { rails: vec![rail], ..config() }
}

/// With something changed on every rail.
fn each(mut cfg: Config, change: impl Fn(&mut RailConfig)) -> Config {
    cfg.rails.iter_mut().for_each(change);
    cfg
}

struct Wire {
    room: usize,
    posted: Vec<Posted>,
}

impl Sink for Wire {
    fn room(&self, qp: usize) -> usize {
        self.room - self.posted.iter().filter(|p| p.qp() == qp).count()
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        self.posted.push(Posted::Write(qp, *piece, imm, token));
    }

    fn read(&mut self, qp: usize, _piece: &Piece, token: Token) {
        self.posted.push(Posted::Read(qp, token));
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        self.posted.push(Posted::Send(qp, bytes.to_vec(), token));
    }
}

/// Two connections, A (0) and B (1).
struct Pair {
    conns: [Connection; 2],
    cfg: Config,
    now: Instant,
    room: usize,
}

impl Pair {
    fn new(cfg: Config) -> Self {
        let ledgers = [Ledger::new(1, 2), Ledger::new(2, 1)];
        Self::with(cfg, ledgers)
    }

    fn with(cfg: Config, ledgers: [Ledger; 2]) -> Self {
        let now = Instant::now();
        let [a, b] = ledgers;
        let b_cfg = Config { local_epoch: b.local_epoch, peer_epoch: a.local_epoch, ..cfg.clone() };
        let b_cfg = each(b_cfg, |rail| {
            rail.opening = match rail.opening {
                Opening::Free => Opening::Free,
                Opening::Speak => Opening::Listen,
                Opening::Listen => Opening::Speak,
            };
            std::mem::swap(&mut rail.tx_credits, &mut rail.rx_credits);
        });
        let a_cfg = Config { local_epoch: a.local_epoch, peer_epoch: b.local_epoch, ..cfg.clone() };
        let conns =
            [Connection::new(a_cfg, a, now).expect("valid"), Connection::new(b_cfg, b, now).expect("valid")];
        Self { conns, cfg, now, room: 64 }
    }

    fn transmit(&mut self, ep: usize) -> Vec<Posted> {
        let mut wire = Wire { room: self.room, posted: Vec::new() };
        while self.conns[ep].poll_transmit(self.now, &mut wire) != Transmitted::Idle {}
        wire.posted
    }

    fn receive(&mut self, ep: usize, p: &Posted) -> Result<(), ProtocolViolation> {
        let now = self.now;
        match p {
            Posted::Write(qp, _, Some(imm), _) => self.conns[ep].handle_recv(*qp, Received::Imm(*imm), now),
            Posted::Write(.., None, _) | Posted::Read(..) => Ok(()),
            Posted::Send(qp, bytes, _) => self.conns[ep].handle_recv(*qp, Received::Bytes(bytes), now),
        }
    }

    /// From `ep` to the other, and the completion back.
    fn pass(&mut self, ep: usize, p: &Posted) {
        self.receive(1 - ep, p).expect("sound");
        self.complete(ep, p);
    }

    fn complete(&mut self, ep: usize, p: &Posted) {
        self.conns[ep].handle_sent(p.token(), true, self.now);
    }

    /// Passes everything until both are quiet; answers the number of work requests.
    fn settle(&mut self) -> usize {
        let mut count = 0;
        loop {
            let mut quiet = true;
            for ep in 0..2 {
                for p in self.transmit(ep) {
                    self.pass(ep, &p);
                    quiet = false;
                    count += 1;
                }
            }
            assert!(count < 100_000, "r8: it never comes to rest");
            if quiet {
                return count;
            }
        }
    }

    /// The number of WRITEs is left out: it depends on the plan, and has a test of its own.
    fn events(&mut self, ep: usize) -> Vec<Event> {
        let mut events: Vec<Event> = std::iter::from_fn(|| self.conns[ep].poll_event()).collect();
        for event in &mut events {
            if let Event::Done { wrs, .. } = event {
                *wrs = 0;
            }
        }
        events
    }

    /// A grant of B for A.
    fn grant(&mut self) -> GrantRef {
        let id = self.conns[1].issue_grant(1 << 30);
        GrantRef { id, owner_epoch: 2, bound_epoch: 1, max_bytes: 1 << 30 }
    }

    fn write(&mut self, grant: GrantRef, bytes: u64) -> Result<TransferId, Refused> {
        let deadline = self.now + Duration::from_secs(1);
        let plan = plan(self.cfg.rails.len(), bytes);
        self.conns[0].write(WriteRequest { grant, plan, tag: 5, deadline }, self.now)
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        for c in &mut self.conns {
            c.handle_timeout(self.now);
        }
    }

    /// Both connections die and are fenced; a new pair takes their ledgers.
    fn reconnect(self) -> Self {
        let cfg = self.cfg.clone();
        Self::with(cfg, self.ledgers())
    }

    /// Both connections die and are fenced.
    fn ledgers(self) -> [Ledger; 2] {
        self.conns.map(|mut conn| {
            conn.fenced();
            conn.into_ledger()
        })
    }
}

/// A plan of `bytes` bytes in one run, for so many rails.
fn plan(rails: usize, bytes: u64) -> Plan {
    let layout = Layout::contiguous(1, 1 << 16, 4096).expect("valid");
    let seams = |addr, key| {
        let one =
            |rail: u32| Seams::new(vec![Part { addr, len: 1 << 28, key: key + 10 * rail }]).expect("valid");
        PoolSeams::new((0..rails as u32).map(one).collect())
    };
    let mut b = PlanBuilder::new((&layout, &seams(0, 1)), (&layout, &seams(1 << 40, 2))).expect("alike");
    b.push(0, 0, (bytes / 4096) as u32).expect("in range");
    b.build().expect("small")
}

fn done(events: &[Event]) -> Vec<Outcome> {
    events
        .iter()
        .filter_map(|e| if let Event::Done { outcome, .. } = e { Some(*outcome) } else { None })
        .collect()
}

fn arrivals(events: &[Event]) -> usize {
    events.iter().filter(|e| matches!(e, Event::Arrived { .. })).count()
}

fn all_modes() -> Vec<Config> {
    let mut v = Vec::new();
    for (notify, ordered) in [(Notify::Imm, true), (Notify::Send, true), (Notify::Imm, false)] {
        for qps in [1, 2, 4] {
            v.push(on(RailConfig { notify, ordered, qps, ..rail() }));
        }
    }
    v
}
