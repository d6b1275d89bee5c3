//! What the fuzz targets of the protocol run, by lists of operations: `control`, one connection against a hostile peer;
//! and `pair`, two sound ones on a hostile wire, in a module of its own.
//!
//! Whatever the peer says, nothing panics, and every write and read that was accepted has exactly one outcome once the
//! connection has been lost and fenced (R2, K2).

mod pair;

pub(crate) use pair::pair;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::*;
use crate::kv::layout::Layout;

/// Our epoch and the peer's. Inputs hold the peer's in their messages.
const EPOCHS: (u64, u64) = (1, 2);

/// Records what is posted.
#[derive(Default)]
struct Posted {
    outstanding: Vec<Token>,
    /// Queue pairs that are destroyed.
    gone: u64,
}

impl Sink for Posted {
    fn room(&self, _qp: usize) -> usize {
        64usize.saturating_sub(self.outstanding.len())
    }

    fn write(&mut self, qp: usize, _piece: &Piece, _imm: Option<u32>, token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        self.outstanding.push(token);
    }

    fn read(&mut self, qp: usize, _piece: &Piece, token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        self.outstanding.push(token);
    }

    fn send(&mut self, qp: usize, _bytes: &[u8], token: Token) {
        assert_eq!(self.gone >> qp & 1, 0, "k10: posted on a queue pair that is destroyed");
        self.outstanding.push(token);
    }
}

/// The input, read until it ends.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (b, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*b)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = usize::from(self.byte()?) | usize::from(self.byte()?) << 8;
        let (out, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        Some(out)
    }
}

fn plan(rails: usize, blocks: u32) -> Plan {
    let layout = Layout::new(2, 16, 64, 16 * 64, 64).expect("a valid layout");
    let seams = Seams::new(vec![Part { addr: 4096, len: 2 * 16 * 64, key: 1 }]).expect("a valid part");
    let seams = PoolSeams::new(vec![seams; rails]);
    let mut b = PlanBuilder::new((&layout, &seams), (&layout, &seams)).expect("layouts that agree");
    if blocks > 0 {
        b.push(0, 0, blocks).expect("blocks of the pool");
    }
    b.build().expect("a small plan")
}

/// Runs the operations of `data`.
pub(crate) fn operations(data: &[u8]) {
    let mut input = Input(data);
    let Some(flags) = input.byte() else { return };
    let ordered = flags & 1 != 0;
    let credits = Credits { data: 8, control: 8 };
    let rails = usize::from(flags >> 2 & 3) + 1;
    let rail = RailConfig {
        ordered,
        absent: false,
        qps: usize::from(flags >> 6) + 1,
        notify: if ordered && flags & 2 != 0 { Notify::Send } else { Notify::Imm },
        opening: if flags & 16 != 0 { Opening::Listen } else { Opening::Free },
        tx_credits: credits,
        rx_credits: credits,
        max_write: 100,
        max_reads: 3,
    };
    let cfg = Config {
        rails: vec![rail; rails],
        local_epoch: EPOCHS.0,
        peer_epoch: EPOCHS.1,
        max_control: 512,
        max_transfers: 4,
        heartbeat: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(500),
        abort_grace: Duration::from_millis(200),
    };
    let mut now = Instant::now();
    let mut c = Connection::new(cfg, Ledger::new(EPOCHS.0, EPOCHS.1), now).expect("a valid configuration");
    let mut posted = Posted::default();
    let (mut open, mut last) = (HashSet::new(), TransferId(0));
    let mut reads = HashSet::new();
    while let Some(op) = input.byte() {
        let Some(arg) = input.byte() else { break };
        if op >= 240 {
            rail_operation(&mut c, &mut posted, op, arg, now);
            drain(&mut c, &mut open, &mut reads);
            continue;
        }
        match op % 16 {
            0..=2 => {
                let Some(bytes) = input.bytes() else { break };
                let _ = c.handle_recv(usize::from(arg), Received::Bytes(bytes), now);
            }
            3 => {
                let Some(imm) = input.bytes() else { break };
                let imm = imm.iter().fold(0, |v, b| v << 8 | u32::from(*b));
                let _ = c.handle_recv(usize::from(arg), Received::Imm(imm), now);
            }
            4 => {
                let _ = c.poll_transmit(now, &mut posted);
            }
            5 if !posted.outstanding.is_empty() => {
                let token = posted.outstanding.remove(usize::from(arg >> 1) % posted.outstanding.len());
                c.handle_sent(token, arg & 1 == 0, now);
            }
            5 => {}
            6 => {
                now += Duration::from_millis(arg.into());
                c.handle_timeout(now);
            }
            7 => {
                let _ = c.issue_grant(u64::from(arg) * 16);
            }
            8 => {
                let (owner_epoch, bound_epoch) = (EPOCHS.1, EPOCHS.0);
                let grant = GrantRef { id: (arg >> 4).into(), owner_epoch, bound_epoch, max_bytes: 4096 };
                let deadline = now + Duration::from_millis(1000);
                let plan = plan(rails, u32::from(arg) % 17);
                if let Ok(id) = c.write(WriteRequest { grant, plan, tag: 0, deadline }, now) {
                    assert!(open.insert(id));
                    last = id;
                }
            }
            9 => c.abort(TransferId(last.0.saturating_sub(u64::from(arg % 4))), now),
            10 => c.revoke_grant((arg % 8).into(), now),
            11 if arg == 0 => c.close(now + Duration::from_millis(500), now),
            11 => {
                let _ = c.send_message(vec![arg; usize::from(arg) * 8]);
            }
            12 => {
                let _ = c.issue_read_grant(1 << 40);
            }
            13 => {
                let (owner_epoch, bound_epoch) = (EPOCHS.1, EPOCHS.0);
                let grant = GrantRef { id: (arg >> 4).into(), owner_epoch, bound_epoch, max_bytes: 4096 };
                let plan = plan(rails, u32::from(arg) % 17);
                let by = match arg & 8 {
                    0 => ReadBy::Rdma { plan, depth: u32::from(arg & 3), qps: usize::from(arg & 4) },
                    _ => ReadBy::Write { request: vec![arg; usize::from(arg) * 4], bytes: plan.bytes() },
                };
                let deadline = now + Duration::from_millis(1000);
                if let Ok(id) = c.read(ReadRequest { grant, by, deadline }, now) {
                    assert!(reads.insert(id));
                }
            }
            14 => c.abort_read(ReadId(arg.into()), now),
            _ => {
                let answer = match arg & 16 {
                    0 => Ok((plan(rails, u32::from(arg) % 17), now + Duration::from_millis(1000))),
                    _ => Err(ReadRefusal::OutOfRange),
                };
                c.serve((arg % 8).into(), answer, now);
            }
        }
        drain(&mut c, &mut open, &mut reads);
    }
    c.connection_lost(Cause::Transport, now);
    for token in std::mem::take(&mut posted.outstanding) {
        c.handle_sent(token, false, now);
    }
    c.fenced();
    drain(&mut c, &mut open, &mut reads);
    assert!(open.is_empty(), "writes without an outcome: {open:?}");
    assert!(reads.is_empty(), "reads whose blocks were not given back: {reads:?}");
}

/// What a driver does with one rail.
fn rail_operation(c: &mut Connection, posted: &mut Posted, op: u8, arg: u8, now: Instant) {
    let rail = usize::from(arg) % c.rails.len();
    let mask = c.rails[rail].mask();
    match op % 4 {
        0 => c.rail_failed(rail, Cause::Transport, now),
        1 if c.rail_state(rail) == RailState::Failing => {
            let of_rail = |t: &Token| mask >> t.qp() & 1 == 1;
            for token in posted.outstanding.extract_if(.., |t| of_rail(t)) {
                c.handle_sent(token, false, now);
            }
            posted.gone |= mask;
            c.rail_fenced(rail, now);
        }
        2 if c.rail_up(rail, now) => posted.gone &= !mask,
        3 => {
            let _ = c.rail_talk(rail, vec![arg; usize::from(arg)]);
        }
        _ => {}
    }
}

fn drain(c: &mut Connection, open: &mut HashSet<TransferId>, reads: &mut HashSet<ReadId>) {
    while let Some(event) = c.poll_event() {
        match event {
            Event::Done { id, .. } => assert!(open.remove(&id), "a second outcome of {id:?}"),
            Event::ReadReleased { id } => assert!(reads.remove(&id), "a second end of {id:?}"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sim::Rng;

    #[test]
    fn b1_random_operation_lists_panic_nowhere() {
        for seed in 0..600 {
            let mut rng = Rng::new(seed);
            let len = rng.below(900);
            let data: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
            super::operations(&data);
        }
    }
}
