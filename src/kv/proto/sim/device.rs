//! The devices of the simulation: they execute, complete, fail and flush work requests.

use super::super::{Cause, Piece, Token};
use super::wire::{Happening, Item, Op, Wr};
use super::world::World;

impl World {
    pub(super) fn post(&mut self, ch: usize, from: usize, qp: usize, op: Op, token: Token) {
        let channel = &mut self.channels[ch];
        let mut at = self.now + channel.timing.delay(qp, &mut self.rng);
        if channel.timing.ordered {
            let queue = &mut channel.sides[from].queues[qp];
            at = at.max(queue.executes);
            queue.executes = at;
        }
        let referred = channel.shared.as_ref().is_some_and(|s| s.refers_to(&op));
        let queue = &mut channel.sides[from].queues[qp];
        // In order: not before what was referred to has been copied.
        let handed_off = channel.timing.early_completion && !referred && queue.references == 0;
        queue.references += u32::from(referred);
        let travels = if channel.shared.is_some() { !referred } else { handed_off };
        let (incarnation, data) = (channel.incarnation, None);
        let mut wr = Wr { ch, from, qp, op, token, incarnation, data, handed_off, referred, copied: 0 };
        if travels {
            self.read_ahead(&mut wr);
        }
        if handed_off {
            self.complete(&wr, 0, true);
        }
        self.at(at - self.now, Happening::Execute(wr));
    }

    pub(super) fn execute(&mut self, wr: Wr) {
        let (from, to) = (wr.from, 1 - wr.from);
        let channel = &mut self.channels[wr.ch];
        if wr.incarnation != channel.incarnation {
            return;
        }
        if channel.sides[from].queues[wr.qp].dead || channel.sides[to].fenced {
            // The device tries again for a while, then gives up.
            return self.fail(&wr);
        }
        let takes_receive = !matches!(wr.op, Op::Write { imm: None, .. });
        if takes_receive && channel.sides[to].queues[wr.qp].receives == 0 {
            let open = channel.sides[to].conn.as_ref().is_some_and(|c| c.poll_timeout().is_some());
            assert!(!open, "k7: a message with no receive posted, on queue pair {}", wr.qp);
            return self.fail(&wr);
        }
        self.summary.work_requests += 1;
        let item = match &wr.op {
            Op::Write { piece, imm } => {
                if !wr.is_copied() {
                    let data = wr.data.clone().unwrap_or_else(|| self.read(&wr, piece));
                    self.place(&wr, piece, &data);
                }
                if piece.len > 0 {
                    let sender = self.channels[wr.ch].lives[wr.from];
                    let receiver = self.channels[wr.ch].ends[to];
                    self.model.on_executed((sender, receiver, wr.token.0 >> 1), piece);
                }
                imm.map(|imm| Item::Imm(wr.qp, imm))
            }
            Op::Send(bytes) => Some(Item::Bytes(wr.qp, bytes.clone())),
        };
        let channel = &mut self.channels[wr.ch];
        if let Some(item) = item {
            let queue = &mut channel.sides[to].queues[wr.qp];
            queue.receives -= 1;
            let late = !self.rng.one_in(2);
            let mut at = self.now + if late { channel.timing.delay(wr.qp, &mut self.rng) } else { 0 };
            if channel.timing.ordered {
                at = at.max(queue.shows);
                queue.shows = at;
            }
            let show = Happening::Show { ch: wr.ch, side: to, item, incarnation: wr.incarnation };
            self.at(at - self.now, show);
        }
        if !wr.handed_off {
            self.complete(&wr, 0, true);
        }
    }

    /// The source's device gives up on a work request, or, if that had completed early, on its queue pair.
    pub(super) fn fail(&mut self, wr: &Wr) {
        let side = &mut self.channels[wr.ch].sides[wr.from];
        side.queues[wr.qp].dead = true;
        if !wr.handed_off {
            return self.complete(wr, 5000, false);
        }
        self.show_received(wr.ch, wr.from);
        self.tell_lost(wr.ch, wr.from);
    }

    /// The driver of a side learns that its connection is dead.
    pub(super) fn tell_lost(&mut self, ch: usize, side: usize) {
        let now = self.instant(self.now);
        if let Some(conn) = &mut self.channels[ch].sides[side].conn {
            conn.connection_lost(Cause::Transport, now);
            self.wake(ch, side, self.now);
        }
    }

    /// A caller hands in what has been received before it reports a failure.
    pub(super) fn show_received(&mut self, ch: usize, side: usize) {
        let due = |h: &Happening| match h {
            Happening::Show { ch: c, side: s, item, .. } => {
                (*c, *s) == (ch, side) && !matches!(item, Item::Sent(..))
            }
            _ => false,
        };
        let due: Vec<_> = self.agenda.iter().filter(|(_, h)| due(h)).map(|(k, _)| *k).collect();
        for key in due {
            if let Some(what) = self.take(key) {
                self.on_happening(what);
            }
        }
    }

    /// Payload is written into its target.
    pub(super) fn place(&mut self, wr: &Wr, piece: &Piece, data: &[u8]) {
        let lives = self.channels[wr.ch].lives;
        let (sender, receiver) = (lives[wr.from], lives[1 - wr.from]);
        assert_eq!(self.life(receiver.0), receiver, "the memory of a process that is gone");
        let targets = &mut self.ends[receiver.0].targets;
        let offset = targets.offset(piece.dst_addr, piece.len, piece.rkey);
        self.model.on_placed((sender, receiver.0, wr.token.0 >> 1), receiver, offset, piece, targets);
        targets.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    /// The source's device reads.
    pub(super) fn read(&self, wr: &Wr, piece: &Piece) -> Vec<u8> {
        let ends = self.channels[wr.ch].ends;
        let sources = &self.ends[ends[wr.from]].sources;
        let offset = sources.offset(piece.src_addr, piece.len, piece.lkey);
        let owner = Some((ends[1 - wr.from], wr.token.0 >> 1));
        for block in sources.blocks_at(offset, piece.len as usize) {
            assert_eq!(sources.owner[block as usize], owner, "r1: a released source is read");
        }
        sources.bytes[offset..offset + piece.len as usize].to_vec()
    }

    /// The queue pairs of a side end, or its process does. What its device has read may still be on the wire; what it has
    /// not read never will be. In shared memory, nobody executes what is read from now on.
    pub(super) fn stop_reading(&mut self, ch: usize, side: usize, killed: bool) {
        if !self.memory_outlives(ch, side, killed) {
            return;
        }
        let mut agenda = std::mem::take(&mut self.agenda);
        for what in agenda.values_mut() {
            let (Happening::Execute(wr) | Happening::Copy(wr)) = what else { continue };
            if (wr.ch, wr.from) == (ch, side) && wr.incarnation == self.channels[ch].incarnation {
                self.read_ahead(wr);
            }
        }
        self.agenda = agenda;
        for qp in 0..self.channels[ch].sides[side].queues.len() {
            let mut ring = std::mem::take(&mut self.channels[ch].sides[side].queues[qp].ring);
            ring.iter_mut().for_each(|wr| self.read_ahead(wr));
            self.channels[ch].sides[side].queues[qp].ring = ring;
        }
    }

    fn read_ahead(&self, wr: &mut Wr) {
        if let Some(piece) = wr.unread_piece() {
            wr.data = Some(self.read(wr, &piece));
        }
    }

    fn complete(&mut self, wr: &Wr, least: u64, ok: bool) {
        let channel = &mut self.channels[wr.ch];
        channel.sides[wr.from].queues[wr.qp].references -= u32::from(wr.referred);
        let mut at = self.now + least + channel.timing.delay(wr.qp, &mut self.rng);
        if channel.timing.ordered {
            let queue = &mut channel.sides[wr.from].queues[wr.qp];
            at = at.max(queue.completes);
            queue.completes = at;
        }
        let item = Item::Sent(wr.qp, wr.token, ok);
        let done = Happening::Show { ch: wr.ch, side: wr.from, item, incarnation: wr.incarnation };
        self.at(at - self.now, done);
    }

    /// What a caller does after `Lost`: flush, destroy, tell.
    pub(super) fn fence(&mut self, ch: usize, side: usize, incarnation: u32) {
        if self.ends[self.channels[ch].ends[side]].frozen {
            return self.at(1000, Happening::Fence { ch, side, incarnation });
        }
        if incarnation != self.channels[ch].incarnation {
            return;
        }
        let now = self.instant(self.now);
        let Some(mut conn) = self.channels[ch].sides[side].conn.take() else { return };
        while let Some(item) = self.channels[ch].sides[side].cq.pop_front() {
            self.feed(ch, side, &mut conn, item, now);
        }
        // What is in a ring is mostly taken after the end of who has put it there, too.
        let dies = if self.channels[ch].shared.is_some() { 8 } else { 2 };
        for qp in 0..self.channels[ch].cfg.qps() {
            self.channels[ch].sides[side].queues[qp].dead |= self.rng.one_in(dies);
        }
        self.stop_reading(ch, side, false);
        for qp in 0..self.channels[ch].cfg.qps() {
            for token in std::mem::take(&mut self.channels[ch].sides[side].queues[qp].outstanding) {
                conn.handle_sent(token, false, now);
            }
        }
        self.events(ch, side, &mut conn);
        self.channels[ch].sides[side].fenced = true;
        conn.fenced();
        self.events(ch, side, &mut conn);
        self.ended(ch, side, conn);
    }
}

/// The part of a piece from `at` on, of `most` bytes.
pub(super) fn part(piece: &Piece, at: u32, most: u32) -> Piece {
    Piece {
        src_addr: piece.src_addr + u64::from(at),
        dst_addr: piece.dst_addr + u64::from(at),
        len: most.min(piece.len - at),
        ..*piece
    }
}
