//! The wire of the simulation: work requests that are executed at the target and completed at the source, later.

use super::super::{Config, Notify, Piece, Sink, Token};
use super::Rng;

/// What a posted work request does at the target.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Write { piece: Piece, imm: Option<u32> },
    Send(Vec<u8>),
}

#[derive(Debug, Clone)]
pub(super) struct Wr {
    pub(super) from: usize,
    pub(super) qp: usize,
    pub(super) op: Op,
    pub(super) token: Token,
    /// The connection, by count.
    pub(super) incarnation: u32,
    /// The payload, if the device has read it before it is executed.
    pub(super) data: Option<Vec<u8>>,
}

/// A completion.
#[derive(Debug, Clone)]
pub(super) enum Item {
    Imm(usize, u32),
    Bytes(usize, Vec<u8>),
    Sent(usize, Token, bool),
}

/// Things that happen at their time.
#[derive(Debug, Clone)]
pub(super) enum Happening {
    /// The target's device executes it.
    Execute(Wr),
    /// The source's device reports it.
    Complete {
        ep: usize,
        qp: usize,
        token: Token,
        ok: bool,
        incarnation: u32,
    },
    /// The target's queue pair shows what it has received. Each is polled at its own time.
    Receive {
        ep: usize,
        item: Item,
        incarnation: u32,
    },
    User,
    Kill,
    Thaw {
        ep: usize,
    },
    /// The queue pairs of an endpoint whose connection was lost are flushed and destroyed.
    Fence {
        ep: usize,
        incarnation: u32,
    },
    Reconnect,
}

/// Delays of a wire, in microseconds.
#[derive(Debug, Clone)]
pub(super) struct Timing {
    pub(super) ordered: bool,
    /// A work request completes when it has been handed off (iWARP), not when it has been executed.
    pub(super) early_completion: bool,
    pub(super) latency: u64,
}

impl Timing {
    pub(super) fn new(cfg: &Config, rng: &mut Rng) -> Self {
        Self {
            ordered: cfg.ordered,
            early_completion: cfg.notify == Notify::Send && rng.one_in(2),
            latency: rng.pick(&[1, 20, 200, 1000]),
        }
    }

    pub(super) fn delay(&self, rng: &mut Rng) -> u64 {
        let slow = if rng.one_in(20) { 10 } else { 1 };
        rng.below(self.latency * slow) + 1
    }
}

/// One queue pair of one endpoint.
#[derive(Debug, Clone, Default)]
pub(super) struct Queue {
    /// Posted and not yet taken from the completion queue, in order.
    pub(super) outstanding: Vec<Token>,
    /// Receives posted.
    pub(super) receives: u32,
    /// On an ordered wire nothing is executed or completed before these times.
    pub(super) executes: u64,
    pub(super) completes: u64,
    /// Nothing that the peer has sent is shown before this time.
    pub(super) shows: u64,
    /// Nothing more gets through.
    pub(super) dead: bool,
    /// A work request has failed: all that follow are flushed.
    pub(super) failed: bool,
    /// The peer has to be the first to send.
    pub(super) listens: bool,
}

impl Queue {
    /// A receive was handed in, and is posted again.
    pub(super) fn took_receive(&mut self) {
        self.receives += 1;
        self.listens = false;
    }
}

/// Collects what one `poll_transmit` posts.
pub(super) struct Posted<'a> {
    pub(super) depth: usize,
    pub(super) max_control: usize,
    pub(super) max_write: u32,
    pub(super) queues: &'a mut [Queue],
    pub(super) posted: Vec<(usize, Op, Token)>,
}

impl Sink for Posted<'_> {
    fn room(&self, qp: usize) -> usize {
        self.depth - self.queues[qp].outstanding.len()
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        assert!(self.room(qp) > 0, "r4: the send queue overflows");
        assert!(piece.len <= self.max_write);
        assert!(!self.queues[qp].listens, "b5: the passive side is the first to send on queue pair {qp}");
        self.queues[qp].outstanding.push(token);
        self.posted.push((qp, Op::Write { piece: *piece, imm }, token));
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        assert!(self.room(qp) > 0, "r4: the send queue overflows");
        assert!(bytes.len() <= self.max_control);
        assert!(!self.queues[qp].listens, "b5: the passive side is the first to send on queue pair {qp}");
        self.queues[qp].outstanding.push(token);
        self.posted.push((qp, Op::Send(bytes.to_vec()), token));
    }
}
