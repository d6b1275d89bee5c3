//! The wire of the simulation: work requests that are executed at the target and completed at the source, later.

use std::collections::VecDeque;

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
    pub(super) ch: usize,
    /// The side of the channel that has posted it.
    pub(super) from: usize,
    pub(super) qp: usize,
    pub(super) op: Op,
    pub(super) token: Token,
    /// The connection, by count, and that of its queue pair.
    pub(super) incarnation: u32,
    pub(super) generation: u32,
    /// The payload, if it was read before it is placed.
    pub(super) data: Option<Vec<u8>>,
    /// It completes, or has completed, by being posted.
    pub(super) handed_off: bool,
    /// In shared memory: the payload does not travel, and so much of it has been copied.
    pub(super) referred: bool,
    pub(super) copied: u32,
}

impl Wr {
    /// The number of the transfer that it is of.
    pub(super) fn transfer(&self) -> u64 {
        self.token.transfer().expect("data of a transfer").0
    }

    /// Reads memory later.
    pub(super) fn unread_piece(&self) -> Option<Piece> {
        match self.op {
            Op::Write { piece, .. } if piece.len > 0 && self.data.is_none() => Some(piece),
            _ => None,
        }
    }

    pub(super) fn is_copied(&self) -> bool {
        !matches!(self.op, Op::Write { piece, .. } if self.copied < piece.len)
    }
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
    /// A piece of it is copied by the process that owns the target, in shared memory.
    Copy(Wr),
    /// The device of a side shows a completion. Each queue pair is polled at its own time.
    Show {
        ch: usize,
        side: usize,
        item: Item,
        incarnation: u32,
        generation: u32,
    },
    /// A user acts.
    Act(u32),
    /// Something goes wrong.
    Fault(u32),
    Thaw {
        ep: usize,
        life: u32,
    },
    /// The queue pairs of a side whose connection was lost are flushed and destroyed.
    Fence {
        ch: usize,
        side: usize,
        incarnation: u32,
    },
    Reconnect {
        ch: usize,
    },
    /// Something goes wrong with a rail.
    RailFault(u32),
    /// The queue pairs of a rail that failed are flushed and destroyed.
    RailFence {
        ch: usize,
        side: usize,
        rail: usize,
        incarnation: u32,
    },
    /// A side tries to bring a rail up again.
    RailProbe {
        ch: usize,
        side: usize,
        rail: usize,
        incarnation: u32,
    },
}

impl Happening {
    /// The channel that it belongs to.
    pub(super) fn channel(&self) -> Option<usize> {
        match self {
            Self::Execute(wr) | Self::Copy(wr) => Some(wr.ch),
            Self::Show { ch, .. } | Self::Fence { ch, .. } | Self::Reconnect { ch } => Some(*ch),
            Self::RailFence { ch, .. } | Self::RailProbe { ch, .. } => Some(*ch),
            Self::Act(_) | Self::Fault(_) | Self::RailFault(_) | Self::Thaw { .. } => None,
        }
    }
}

/// What carries one queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Line {
    pub(super) ordered: bool,
    /// A work request completes when it has been handed off (iWARP), not when it has been executed.
    pub(super) early_completion: bool,
    pub(super) latency: u64,
}

/// Delays of a wire, in microseconds.
#[derive(Debug, Clone)]
pub(super) struct Timing {
    /// By queue pair.
    pub(super) lines: Vec<Line>,
    /// A queue pair that is so many times slower than the others.
    pub(super) slow: (usize, u64),
}

impl Timing {
    pub(super) fn new(cfg: &Config, rng: &mut Rng) -> Self {
        let rail = &cfg.rails[0];
        let line = Line {
            ordered: rail.ordered,
            early_completion: rail.notify == Notify::Send && rng.one_in(2),
            latency: rng.pick(&[1, 20, 200, 1000]),
        };
        Self {
            lines: vec![line; rail.qps],
            slow: (rng.below(cfg.qps() as u64) as usize, rng.pick(&[1, 1, 4])),
        }
    }

    pub(super) fn delay(&self, qp: usize, rng: &mut Rng) -> u64 {
        let slow = if rng.one_in(20) { 10 } else { 1 };
        let rail = if qp == self.slow.0 { self.slow.1 } else { 1 };
        rng.below(self.lines[qp].latency * slow * rail) + 1
    }
}

/// One queue pair of one side.
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
    /// It is destroyed with its rail, and counts the queue pairs that were in its place.
    pub(super) gone: bool,
    pub(super) generation: u32,
    /// In shared memory: the owner has said that its sources may be used again.
    pub(super) closed: bool,
    /// The peer has to be the first to send.
    pub(super) listens: bool,
    /// In shared memory: what the peer has yet to take, and whether it copies for an earlier one.
    pub(super) ring: VecDeque<Wr>,
    pub(super) copying: bool,
    /// Posted with a reference, and not completed.
    pub(super) references: u32,
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
    /// By queue pair.
    pub(super) max_write: Vec<u32>,
    pub(super) queues: &'a mut [Queue],
    pub(super) posted: Vec<(usize, Op, Token)>,
}

impl Posted<'_> {
    fn push(&mut self, qp: usize, op: Op, token: Token) {
        assert!(self.room(qp) > 0, "r4: the send queue overflows");
        assert!(!self.queues[qp].gone, "k10: posted on queue pair {qp}, which is destroyed");
        super::rails::assert_of(qp, token);
        assert!(!self.queues[qp].listens, "b5: the passive side is the first to send on queue pair {qp}");
        self.queues[qp].outstanding.push(token);
        self.posted.push((qp, op, token));
    }
}

impl Sink for Posted<'_> {
    fn room(&self, qp: usize) -> usize {
        self.depth - self.queues[qp].outstanding.len()
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        assert!(piece.len <= self.max_write[qp], "k8: a WRITE of {} bytes", piece.len);
        self.push(qp, Op::Write { piece: *piece, imm }, token);
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        assert!(bytes.len() <= self.max_control, "k8: a SEND of {} bytes", bytes.len());
        self.push(qp, Op::Send(bytes.to_vec()), token);
    }
}
