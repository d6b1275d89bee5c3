//! Slots of the sending half: what an immediate can name. A transfer holds one from its first post until it is over and nothing of it
//! is outstanding; each use has a generation of its own.

use super::config::Config;
use super::record::Slot;

#[derive(Debug)]
pub(super) struct Slots {
    states: Vec<SlotState>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct SlotState {
    generation: u32,
    /// Notifications posted for each queue pair, where any queue pair counts them.
    posted: Vec<u32>,
}

impl Slots {
    /// As many as transfers may be under way.
    pub(super) fn new(cfg: &Config) -> Self {
        Self {
            states: std::iter::repeat_with(SlotState::default).take(cfg.max_transfers.into()).collect(),
            free: (0..cfg.max_transfers).rev().collect(),
        }
    }

    /// How many are free.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// The next use of a free one.
    pub(super) fn take(&mut self, cfg: &Config) -> Option<Slot> {
        let index = self.free.pop()?;
        let state = &mut self.states[usize::from(index)];
        state.generation = Slot::next_generation(state.generation);
        state.posted.clear();
        if cfg.counts() {
            state.posted.resize(cfg.qps(), 0);
        }
        Some(Slot { index, generation: state.generation })
    }

    /// Its transfer is over.
    pub(super) fn give_back(&mut self, slot: Slot) {
        self.free.push(slot.index);
    }

    /// The same of one that was not used: the receiver has never heard of this generation.
    pub(super) fn give_back_unused(&mut self, slot: Slot) {
        self.states[usize::from(slot.index)].generation = slot.generation.wrapping_sub(1) & 0xf_ffff;
        self.give_back(slot);
    }

    /// Notifications posted in this use, by queue pair; empty where none are counted.
    pub(super) fn posted(&self, slot: Slot) -> &[u32] {
        &self.states[usize::from(slot.index)].posted
    }

    /// One was posted on `qp`.
    pub(super) fn count_posted(&mut self, slot: Slot, qp: usize) {
        if let Some(n) = self.states[usize::from(slot.index)].posted.get_mut(qp) {
            *n += 1;
        }
    }

    /// What was posted on the queue pairs of `mask` has come to nothing.
    pub(super) fn forget_posted(&mut self, slot: Slot, mask: u64) {
        let posted = self.states[usize::from(slot.index)].posted.iter_mut().enumerate();
        posted.filter(|(qp, _)| mask >> qp & 1 == 1).for_each(|(_, n)| *n = 0);
    }
}
