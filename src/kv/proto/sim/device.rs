//! The devices of the simulation: they execute, complete, fail and flush work requests.

use super::super::{Cause, Piece, Token};
use super::wire::{Happening, Item, Op, Wr};
use super::world::World;

impl World {
    /// A connection dies on some queue pairs, or a process freezes.
    pub(super) fn kill(&mut self) {
        if self.closing || self.ends.iter().any(|e| e.conn.is_none()) {
            return;
        }
        if self.rng.one_in(3) {
            let ep = self.rng.below(2) as usize;
            if !self.ends[ep].frozen {
                self.ends[ep].frozen = true;
                self.ends[ep].was_frozen = true;
                let longest = self.rng.pick(&[100_000, 2_000_000]);
                let time = self.rng.below(longest);
                self.at(time, Happening::Thaw { ep });
            }
            return;
        }
        for ep in 0..2 {
            for qp in 0..self.cfg.qps {
                self.ends[ep].queues[qp].dead |= !self.rng.one_in(4);
            }
            if self.rng.one_in(3) {
                // The driver tells; otherwise a failed work request or silence will.
                let now = self.instant(self.now);
                if let Some(conn) = &mut self.ends[ep].conn {
                    conn.connection_lost(Cause::Transport, now);
                }
                self.wake(ep, self.now);
            }
        }
    }

    pub(super) fn execute(&mut self, wr: Wr) {
        if wr.incarnation != self.incarnation {
            return;
        }
        let (from, to) = (wr.from, 1 - wr.from);
        let dead = self.ends[from].queues[wr.qp].dead || self.ends[to].fenced;
        if dead {
            // The device tries again for a while, then gives up.
            return self.fail(&wr);
        }
        let takes_receive = !matches!(wr.op, Op::Write { imm: None, .. });
        if takes_receive && self.ends[to].queues[wr.qp].receives == 0 {
            let open = self.ends[to].conn.as_ref().is_some_and(|c| c.poll_timeout().is_some());
            assert!(!open, "k7: a message with no receive posted, on queue pair {}", wr.qp);
            return self.fail(&wr);
        }
        self.summary.work_requests += 1;
        let item = match &wr.op {
            Op::Write { piece, imm } => {
                if piece.len > 0 {
                    self.place(&wr, piece);
                }
                imm.map(|imm| Item::Imm(wr.qp, imm))
            }
            Op::Send(bytes) => Some(Item::Bytes(wr.qp, bytes.clone())),
        };
        if let Some(item) = item {
            let queue = &mut self.ends[to].queues[wr.qp];
            queue.receives -= 1;
            let mut at = self.now + if self.rng.one_in(2) { 0 } else { self.timing.delay(&mut self.rng) };
            if self.timing.ordered {
                at = at.max(queue.shows);
                queue.shows = at;
            }
            self.at(at - self.now, Happening::Receive { ep: to, item, incarnation: wr.incarnation });
        }
        if !self.timing.early_completion {
            self.complete(&wr, 0, true);
        }
    }

    /// The source's device gives up on a work request, or, if that had completed early, on its queue pair.
    pub(super) fn fail(&mut self, wr: &Wr) {
        self.ends[wr.from].queues[wr.qp].dead = true;
        if !self.timing.early_completion {
            return self.complete(wr, 5000, false);
        }
        self.show_received(wr.from);
        let now = self.instant(self.now);
        if let Some(conn) = &mut self.ends[wr.from].conn {
            conn.connection_lost(Cause::Transport, now);
            self.wake(wr.from, self.now);
        }
    }

    /// A caller hands in what has been received before it reports a failure.
    pub(super) fn show_received(&mut self, to: usize) {
        let received = |h: &Happening| matches!(h, Happening::Receive { ep, .. } if *ep == to);
        let due: Vec<_> = self.agenda.iter().filter(|(_, h)| received(h)).map(|(k, _)| *k).collect();
        for key in due {
            if let Some(what) = self.agenda.remove(&key) {
                self.on_happening(what);
            }
        }
    }

    pub(super) fn place(&mut self, wr: &Wr, piece: &Piece) {
        let (from, to) = (wr.from, 1 - wr.from);
        let id = wr.token.0 >> 1;
        let (sender, receiver) = (self.life(from), self.life(to));
        let data = match &wr.data {
            Some(data) => data.clone(),
            None => self.read(from, id, piece),
        };
        let targets = &mut self.ends[to].targets;
        let offset = targets.offset(piece.dst_addr, piece.len, piece.rkey);
        self.model.on_placed(sender, receiver, id, offset, piece, targets);
        targets.bytes[offset..offset + data.len()].copy_from_slice(&data);
    }

    /// The source's device reads.
    pub(super) fn read(&self, ep: usize, id: u64, piece: &Piece) -> Vec<u8> {
        let sources = &self.ends[ep].sources;
        let offset = sources.offset(piece.src_addr, piece.len, piece.lkey);
        for block in sources.blocks_at(offset, piece.len as usize) {
            assert_eq!(sources.owner[block as usize], Some(id), "r1: a released source is read");
        }
        sources.bytes[offset..offset + piece.len as usize].to_vec()
    }

    pub(super) fn complete(&mut self, wr: &Wr, least: u64, ok: bool) {
        let queue_time = self.ends[wr.from].queues[wr.qp].completes;
        let mut at = self.now + least + self.timing.delay(&mut self.rng);
        if self.timing.ordered {
            at = at.max(queue_time);
            self.ends[wr.from].queues[wr.qp].completes = at;
        }
        let done =
            Happening::Complete { ep: wr.from, qp: wr.qp, token: wr.token, ok, incarnation: wr.incarnation };
        self.at(at - self.now, done);
    }

    pub(super) fn post(&mut self, from: usize, qp: usize, op: Op, token: Token) {
        let mut at = self.now + self.timing.delay(&mut self.rng);
        if self.timing.ordered {
            at = at.max(self.ends[from].queues[qp].executes);
            self.ends[from].queues[qp].executes = at;
        }
        let mut wr = Wr { from, qp, op, token, incarnation: self.incarnation, data: None };
        if self.timing.early_completion {
            if let Op::Write { piece, .. } = &wr.op
                && piece.len > 0
            {
                wr.data = Some(self.read(from, token.0 >> 1, piece));
            }
            self.complete(&wr, 0, true);
        }
        self.at(at - self.now, Happening::Execute(wr));
    }

    /// What a caller does after `Lost`: flush, destroy, tell.
    pub(super) fn fence(&mut self, ep: usize, incarnation: u32) {
        assert_eq!(incarnation, self.incarnation);
        let now = self.instant(self.now);
        let Some(mut conn) = self.ends[ep].conn.take() else { return };
        while let Some(item) = self.ends[ep].cq.pop_front() {
            self.feed(ep, &mut conn, item, now);
        }
        // What the device has read may still be on the wire; otherwise it will never be.
        for qp in 0..self.cfg.qps {
            self.ends[ep].queues[qp].dead |= self.rng.one_in(2);
        }
        let mut agenda = std::mem::take(&mut self.agenda);
        for what in agenda.values_mut() {
            if let Happening::Execute(wr) = what
                && wr.from == ep
                && wr.data.is_none()
                && let Op::Write { piece, .. } = &wr.op
                && piece.len > 0
            {
                wr.data = Some(self.read(ep, wr.token.0 >> 1, piece));
            }
        }
        self.agenda = agenda;
        for qp in 0..self.cfg.qps {
            for token in std::mem::take(&mut self.ends[ep].queues[qp].outstanding) {
                conn.handle_sent(token, false, now);
            }
        }
        self.events(ep, &mut conn);
        self.ends[ep].fenced = true;
        conn.fenced();
        self.events(ep, &mut conn);
        self.ends[ep].ledger = Some(conn.into_ledger());
        self.ends[ep].wake = None;
        if self.ends.iter().all(|e| e.conn.is_none()) && !self.rng.one_in(6) {
            let delay = self.rng.below(3000);
            self.at(delay, Happening::Reconnect);
        }
    }
}
