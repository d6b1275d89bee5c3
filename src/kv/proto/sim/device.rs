//! The devices of the simulation: they execute, complete, fail and flush work requests.

use super::super::{Cause, Piece, Token};
use super::wire::{Happening, Item, Op, Wr};
use super::world::World;

impl World {
    pub(super) fn post(&mut self, ch: usize, from: usize, qp: usize, op: Op, token: Token) {
        let channel = &mut self.channels[ch];
        let mut at = self.now + channel.timing.delay(qp, &mut self.rng);
        if channel.timing.lines[qp].ordered {
            let queue = &mut channel.sides[from].queues[qp];
            at = at.max(queue.executes);
            queue.executes = at;
        }
        let referred = channel.shared.as_ref().is_some_and(|s| s.refers_to(&op));
        let queue = &mut channel.sides[from].queues[qp];
        // In order: not before what was referred to has been copied.
        let handed_off = channel.timing.lines[qp].early_completion && !referred && queue.references == 0;
        queue.references += u32::from(referred);
        let travels = if channel.shared.is_some() { !referred } else { handed_off };
        let (incarnation, generation, data) = (channel.incarnation, queue.generation, None);
        let copied = 0;
        let mut wr =
            Wr { ch, from, qp, op, token, incarnation, generation, data, handed_off, referred, copied };
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
        let [ours, theirs] = [from, to].map(|side| &channel.sides[side].queues[wr.qp]);
        if theirs.generation < wr.generation && !ours.gone {
            // The device tries again until the other one is there.
            return self.channels[wr.ch].sides[from].queues[wr.qp].ring.push_back(wr);
        }
        if theirs.gone || theirs.generation != wr.generation || ours.generation != wr.generation {
            return self.fail(&wr);
        }
        if ours.dead || channel.sides[to].fenced {
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
                    self.model.on_executed((sender, receiver, wr.transfer()), piece);
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
            if channel.timing.lines[wr.qp].ordered {
                at = at.max(queue.shows);
                queue.shows = at;
            }
            let Wr { ch, incarnation, generation, .. } = wr;
            let show = Happening::Show { ch, side: to, item, incarnation, generation };
            self.at(at - self.now, show);
        }
        if !wr.handed_off {
            self.complete(&wr, 0, true);
        }
    }

    /// The source's device gives up on a work request, or, if that had completed early, on its queue pair.
    pub(super) fn fail(&mut self, wr: &Wr) {
        let queue = &mut self.channels[wr.ch].sides[wr.from].queues[wr.qp];
        if queue.gone || queue.generation != wr.generation {
            // It was flushed.
            return;
        }
        queue.dead = true;
        if !wr.handed_off {
            return self.complete(wr, 5000, false);
        }
        self.show_received(wr.ch, wr.from);
        self.tell_dead(wr.ch, wr.from, wr.qp);
    }

    /// The driver of a side learns that a queue pair is dead.
    pub(super) fn tell_dead(&mut self, ch: usize, side: usize, qp: usize) {
        match self.channels[ch].has_rails() {
            true => self.tell_rail_lost(ch, side, self.channels[ch].rail_of(qp)),
            false => self.tell_lost(ch, side),
        }
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
        let rail = self.channels[wr.ch].rail_of(wr.qp);
        let offset = targets.offset(piece.dst_addr, piece.len, piece.rkey, rail);
        self.model.on_placed((sender, receiver.0, wr.transfer()), receiver, offset, piece, targets);
        targets.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    /// The source's device reads.
    pub(super) fn read(&self, wr: &Wr, piece: &Piece) -> Vec<u8> {
        let ends = self.channels[wr.ch].ends;
        let sources = &self.ends[ends[wr.from]].sources;
        let rail = self.channels[wr.ch].rail_of(wr.qp);
        let offset = sources.offset(piece.src_addr, piece.len, piece.lkey, rail);
        let owner = Some((ends[1 - wr.from], wr.transfer()));
        for block in sources.blocks_at(offset, piece.len as usize) {
            assert_eq!(sources.owner[block as usize], owner, "r1: a released source is read");
        }
        sources.bytes[offset..offset + piece.len as usize].to_vec()
    }

    /// The queue pairs of a side end, or its process does. What its device has read may still be on the wire; what it has
    /// not read never will be. In shared memory, nobody executes what is read from now on.
    pub(super) fn stop_reading(&mut self, ch: usize, side: usize, killed: bool) {
        if self.memory_outlives(ch, side, killed) {
            let all = 0..self.channels[ch].sides[side].queues.len();
            self.read_all_ahead(ch, side, all);
        }
    }

    /// The same of the queue pairs of one rail.
    pub(super) fn stop_reading_of(&mut self, ch: usize, side: usize, qps: std::ops::Range<usize>) {
        match self.channels[ch].shared.is_some() {
            true => self.channels[ch].sides[side].queues[qps].iter_mut().for_each(|q| q.closed = true),
            false => self.read_all_ahead(ch, side, qps),
        }
    }

    fn read_all_ahead(&mut self, ch: usize, side: usize, qps: std::ops::Range<usize>) {
        let mut agenda = std::mem::take(&mut self.agenda);
        for what in agenda.values_mut() {
            let (Happening::Execute(wr) | Happening::Copy(wr)) = what else { continue };
            let queue = &self.channels[ch].sides[side].queues[wr.qp.min(qps.end - 1)];
            let is_of = (wr.ch, wr.from) == (ch, side) && qps.contains(&wr.qp);
            let is_now = wr.incarnation == self.channels[ch].incarnation && wr.generation == queue.generation;
            if is_of && is_now && !queue.gone {
                self.read_ahead(wr);
            }
        }
        self.agenda = agenda;
        // Those of a rail that was fenced before have been read, or count as unsound.
        for qp in qps.filter(|&qp| !self.channels[ch].sides[side].queues[qp].gone).collect::<Vec<_>>() {
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
        if channel.timing.lines[wr.qp].ordered {
            let queue = &mut channel.sides[wr.from].queues[wr.qp];
            at = at.max(queue.completes);
            queue.completes = at;
        }
        let item = Item::Sent(wr.qp, wr.token, ok);
        let &Wr { ch, from: side, incarnation, generation, .. } = wr;
        let done = Happening::Show { ch, side, item, incarnation, generation };
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
