//! An endpoint from its start to the end of the lap, or to its death.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use landfall::kv::{KvEndpoint, TransferId};

use super::content::Rng;
use super::part::Part;
use super::said::Item;

/// An endpoint's life.
pub struct Life {
    endpoint: KvEndpoint,
    part: Part,
    rng: RefCell<Rng>,
    stopping: Cell<bool>,
    /// Operations that were begun.
    begun: Cell<u64>,
    next: Cell<u64>,
    /// By the peer's epoch: what no channel to it has resolved yet.
    doubts: RefCell<HashMap<u64, Vec<(Item, TransferId)>>>,
}

impl Life {
    pub fn new(endpoint: KvEndpoint, part: Part) -> Self {
        Self {
            endpoint,
            rng: RefCell::new(Rng::new(part.seed)),
            part,
            stopping: Cell::new(false),
            begun: Cell::new(0),
            next: Cell::new(0),
            doubts: RefCell::default(),
        }
    }

    pub fn endpoint(&self) -> &KvEndpoint {
        &self.endpoint
    }

    pub fn part(&self) -> &Part {
        &self.part
    }

    pub fn draw(&self) -> u64 {
        self.rng.borrow_mut().next()
    }

    pub fn stop(&self) {
        self.stopping.set(true);
    }

    /// Whether there is anything left to do.
    pub fn goes_on(&self) -> bool {
        !self.stopping.get() && self.part.operations.is_none_or(|operations| self.begun.get() < operations)
    }

    /// Counts an operation that begins.
    pub fn begin(&self) {
        self.begun.set(self.begun.get() + 1);
    }

    /// The tag of its next transfer, of so many blocks, to or from another life.
    pub fn next_tag(&self, peer: u64, blocks: u32) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        tag::of(self.part.life, peer, number, blocks)
    }

    /// Of transfers to the peer with this epoch.
    pub fn doubt(&self, epoch: u64, more: impl IntoIterator<Item = (Item, TransferId)>) {
        self.doubts.borrow_mut().entry(epoch).or_default().extend(more);
    }

    pub fn take_doubts(&self, epoch: u64) -> Vec<(Item, TransferId)> {
        self.doubts.borrow_mut().remove(&epoch).unwrap_or_default()
    }

    pub fn has_doubts(&self) -> bool {
        self.doubts.borrow().values().any(|doubts| !doubts.is_empty())
    }
}

/// The tag of a transfer: which life asked for it, of which one, its number there, and its blocks.
pub mod tag {
    pub fn of(from: u64, to: u64, number: u64, blocks: u32) -> u64 {
        (from & 0xffff) << 48 | (to & 0xffff) << 32 | (number & 0xff_ffff) << 8 | u64::from(blocks & 0xff)
    }

    /// Who was asked: the receiver of a write.
    pub fn asked(tag: u64) -> u64 {
        tag >> 32 & 0xffff
    }

    pub fn blocks(tag: u64) -> u64 {
        tag & 0xff
    }
}
