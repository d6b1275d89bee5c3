//! Shared memory in place of a device: the process that owns the target moves the data.
//!
//! What differs from a device, and only that:
//!
//! | with a device (`device.rs`) | in shared memory |
//! |---|---|
//! | it goes on while its process is frozen | nothing is copied or executed then: all of it comes late |
//! | a payload is read and placed at once | in pieces, each read from the source when it is copied; small payloads travel, read at the post |
//! | what was read before the source's queue pair ended still lands | a copy that ends after that is not executed, and has torn its target |
//! | iWARP completes at hand-off | that, but not where the payload was only referred to |
//! | the memory of a killed process was read, or is not | it outlives the process (a memfd), or is gone |
//!
//! Any number of queue pairs of a process are served side by side, one that is ordered by one copy at a time.
//!
//! A source may be used again as soon as the protocol gives it back: `Pool::release` overwrites it, the next write fills it
//! anew, and a copy from a released source fails at once, unless its owner had ended.

use super::super::Piece;
use super::Rng;
use super::Script;
use super::device::part;
use super::wire::{Happening, Op, Wr};
use super::world::World;

/// The number of the generator that draws it, so that everything else is drawn as without.
const DRAW: u64 = 2000;

/// How a channel uses shared memory.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    /// A payload up to this length travels; a longer one is referred to.
    inline: u32,
    /// The longest piece of a copy.
    slice: u32,
    /// The longest time that an ordinary piece takes.
    pace: u64,
}

/// Whether a run is one of processes that share memory.
pub(super) fn is_drawn(script: &Script) -> bool {
    let drawn = Rng::nth(script.seed, DRAW).one_in(3);
    script.shared.unwrap_or(drawn)
}

/// What the channels of a run are like in shared memory, if that is where it is.
pub(super) fn draw(script: &Script) -> impl Iterator<Item = Option<Shared>> + use<> {
    let on = is_drawn(script);
    let mut rng = Rng::nth(script.seed, DRAW + 1);
    std::iter::repeat_with(move || {
        let shared = Shared {
            inline: rng.pick(&[0, 0, 12, 60]),
            slice: rng.pick(&[8, 24, 4096]),
            pace: rng.pick(&[1, 10, 40, 150]),
        };
        on.then_some(shared)
    })
}

impl Shared {
    pub(super) fn refers_to(&self, op: &Op) -> bool {
        matches!(op, Op::Write { piece, .. } if piece.len > self.inline)
    }

    fn delay(&self, rng: &mut Rng) -> u64 {
        let preempted = if rng.one_in(50) { 50 } else { 1 };
        1 + rng.below(self.pace * preempted)
    }
}

impl World {
    /// A work request is in the ring of the process that owns its target.
    pub(super) fn enter_ring(&mut self, wr: Wr) {
        let (ch, from, qp) = (wr.ch, wr.from, wr.qp);
        if wr.incarnation == self.channels[ch].incarnation
            && wr.generation == self.channels[ch].sides[from].queues[qp].generation
        {
            self.channels[ch].sides[from].queues[qp].ring.push_back(wr);
            self.serve(ch, from, qp);
        }
    }

    /// The owner of the targets takes what is in its ring, unless it is frozen or copies for an earlier one.
    pub(super) fn serve(&mut self, ch: usize, from: usize, qp: usize) {
        let frozen = self.ends[self.channels[ch].ends[1 - from]].frozen;
        loop {
            let channel = &mut self.channels[ch];
            let theirs = channel.sides[1 - from].queues[qp].generation;
            let queue = &mut channel.sides[from].queues[qp];
            if theirs < queue.generation {
                return;
            }
            if frozen || (channel.timing.lines[qp].ordered && queue.copying) {
                return;
            }
            match queue.ring.pop_front() {
                Some(wr) if wr.referred && !wr.is_copied() => self.copy_later(wr),
                Some(wr) => self.execute(wr),
                None => return,
            }
        }
    }

    /// A process runs again, or has been killed, which ends what it would have copied.
    pub(super) fn serve_all(&mut self, ep: usize) {
        for ch in 0..self.channels.len() {
            for from in 0..2 {
                for qp in 0..self.channels[ch].sides[from].queues.len() {
                    let channel = &self.channels[ch];
                    if channel.ends[1 - from] == ep {
                        let late = if channel.sides[1 - from].fenced {
                            0
                        } else {
                            channel.sides[from].queues[qp].ring.len()
                        };
                        self.summary.taken_late += late as u64;
                        self.serve(ch, from, qp);
                    }
                }
            }
        }
    }

    fn copy_later(&mut self, wr: Wr) {
        let channel = &mut self.channels[wr.ch];
        channel.sides[wr.from].queues[wr.qp].copying = true;
        let delay = channel.shared.as_ref().map_or(0, |s| s.delay(&mut self.rng));
        self.at(delay, Happening::Copy(wr));
    }

    /// A piece of a copy is made.
    pub(super) fn copy(&mut self, mut wr: Wr) {
        let (ch, from, qp) = (wr.ch, wr.from, wr.qp);
        let channel = &mut self.channels[ch];
        let frozen = self.ends[channel.ends[1 - from]].frozen;
        let (Op::Write { piece, .. }, Some(shared)) = (&wr.op, &channel.shared) else { return };
        let generation = channel.sides[from].queues[qp].generation;
        if wr.incarnation != channel.incarnation || wr.generation != generation {
            return;
        }
        let theirs = &channel.sides[1 - from].queues[qp];
        let gone = channel.sides[1 - from].fenced || theirs.gone || theirs.generation > generation;
        let closed = channel.sides[from].closed || channel.sides[from].queues[qp].closed;
        let queue = &mut channel.sides[from].queues[qp];
        if frozen {
            queue.copying = false;
            return queue.ring.push_front(wr);
        }
        if gone || queue.dead {
            queue.copying = false;
            self.fail(&wr);
            return self.serve(ch, from, qp);
        }
        let piece = part(piece, wr.copied, shared.slice);
        let data = match &wr.data {
            Some(data) => data[wr.copied as usize..][..piece.len as usize].to_vec(),
            None if closed => self.read_anything(&wr, &piece),
            None => self.read(&wr, &piece),
        };
        self.place(&wr, &piece, &data);
        wr.copied += piece.len;
        self.summary.copies += 1;
        // After the copy: a source of a side that has ended may have been anything meanwhile.
        if closed && wr.data.is_none() {
            return self.unsound(&wr);
        }
        if !wr.is_copied() {
            return self.copy_later(wr);
        }
        self.channels[ch].sides[from].queues[qp].copying = false;
        self.execute(wr);
        self.serve(ch, from, qp);
    }

    /// The side that owns the target finds that the other has ended: nothing more of this queue pair is executed.
    fn unsound(&mut self, wr: &Wr) {
        self.summary.unsound_copies += 1;
        let queue = &mut self.channels[wr.ch].sides[wr.from].queues[wr.qp];
        queue.copying = false;
        queue.dead = true;
        self.show_received(wr.ch, 1 - wr.from);
        self.tell_dead(wr.ch, 1 - wr.from, wr.qp);
        self.serve(wr.ch, wr.from, wr.qp);
    }

    /// What is in the source now, whoever it belongs to.
    fn read_anything(&self, wr: &Wr, piece: &Piece) -> Vec<u8> {
        let sources = &self.ends[self.channels[wr.ch].ends[wr.from]].sources;
        let offset =
            sources.offset(piece.src_addr, piece.len, piece.lkey, self.channels[wr.ch].rail_of(wr.qp));
        sources.bytes[offset..offset + piece.len as usize].to_vec()
    }

    /// The end of a side, by itself or by the system. Answers whether its memory can be read as it was at this moment.
    pub(super) fn memory_outlives(&mut self, ch: usize, side: usize, killed: bool) -> bool {
        if self.channels[ch].shared.is_none() {
            return true;
        }
        let closed = &mut self.channels[ch].sides[side].closed;
        let outlives = !*closed && killed && self.rng.one_in(2);
        *closed |= !outlives;
        outlives
    }
}
