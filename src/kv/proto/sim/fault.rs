//! What goes wrong: connections die, processes freeze, are killed and restarted.

use super::Rng;
use super::wire::Happening;
use super::world::World;

impl World {
    pub(super) fn fault(&mut self, rng: &mut Rng) {
        match rng.below(6) {
            0..3 => self.cut(rng),
            3..5 => self.freeze(rng),
            _ => {
                let ep = rng.below(self.ends.len() as u64) as usize;
                self.restart(ep);
            }
        }
    }

    /// A connection dies: on some queue pairs, in one direction or both; or one side gives it up while all of it works.
    fn cut(&mut self, rng: &mut Rng) {
        let ch = rng.below(self.channels.len() as u64) as usize;
        let how = rng.below(3);
        let one = rng.below(2) as usize;
        for side in 0..2 {
            let dies = how == 0 || (how == 1 && side == one);
            for queue in &mut self.channels[ch].sides[side].queues {
                queue.dead |= dies && !rng.one_in(4);
            }
            let frozen = self.ends[self.channels[ch].ends[side]].frozen;
            let told = if how == 2 { side == one } else { rng.one_in(3) };
            if told && !frozen {
                // The driver tells; otherwise a failed work request or silence will.
                self.tell_lost(ch, side);
            }
        }
    }

    /// A process stops for a while. Its device goes on, where it has one.
    fn freeze(&mut self, rng: &mut Rng) {
        let ep = rng.below(self.ends.len() as u64) as usize;
        let shared = self.channels.iter().any(|c| c.shared.is_some());
        // In shared memory nothing ends meanwhile: often it should be about as long as the peer's patience.
        let lengths: &[u64] = if shared { &[100_000, 500_000, 2_000_000] } else { &[100_000, 2_000_000] };
        let longest = rng.pick(lengths);
        let end = &mut self.ends[ep];
        if end.frozen {
            return;
        }
        self.summary.freezes += 1;
        end.frozen = true;
        end.was_frozen = true;
        let life = end.life;
        self.set_silent(ep, Some(self.now));
        self.at(rng.below(longest), Happening::Thaw { ep, life });
    }

    pub(super) fn thaw(&mut self, ep: usize, life: u32) {
        let end = &mut self.ends[ep];
        if end.life != life || !end.frozen {
            return;
        }
        end.frozen = false;
        end.awake_since = self.now;
        self.set_silent(ep, None);
        self.serve_all(ep);
        for ch in 0..self.channels.len() {
            for side in 0..2 {
                if self.channels[ch].ends[side] == ep && self.channels[ch].sides[side].conn.is_some() {
                    self.wake(ch, side, self.now);
                }
            }
        }
    }

    fn set_silent(&mut self, ep: usize, since: Option<u64>) {
        for channel in &mut self.channels {
            for side in 0..2 {
                if channel.ends[side] == ep && channel.sides[side].conn.is_some() {
                    channel.sides[side].silent_since = since;
                }
            }
        }
    }

    /// A process is killed, and a new one takes its place. The system destroys its queue pairs.
    fn restart(&mut self, ep: usize) {
        self.summary.restarts += 1;
        let life = self.life(ep);
        for ch in 0..self.channels.len() {
            for side in 0..2 {
                if self.channels[ch].ends[side] == ep {
                    self.stop_reading(ch, side, true);
                    let s = &mut self.channels[ch].sides[side];
                    s.conn = None;
                    s.ledger = None;
                    s.queues.iter_mut().for_each(|q| q.outstanding.clear());
                    s.cq.clear();
                    s.wake = None;
                    s.fenced = true;
                    s.silent_since = Some(self.now);
                    s.usable.clear();
                    s.readable.clear();
                    s.reads.clear();
                    s.messages.clear();
                }
            }
        }
        self.model.process_ended(life);
        let end = &mut self.ends[ep];
        end.life += 1;
        end.frozen = false;
        end.was_frozen = false;
        end.awake_since = self.now;
        end.sources.reset();
        end.targets.reset();
        self.serve_all(ep);
        for ch in 0..self.channels.len() {
            if self.channels[ch].ends.contains(&ep) {
                self.reconnect(ch);
            }
        }
    }
}
