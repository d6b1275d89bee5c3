//! The slab of a ring: one slot an operation, from its submission to its end (R1, R5).
//!
//! A slot owns the operation's buffer. That is why dropping a future cannot free memory that a device may still
//! touch: the drop only changes the slot's owner to [`Owner::Ignored`], and the buffer goes when the completion comes.
//!
//! ```text
//!            submit, no credit          credit                  completion
//!   (free) ───────────────────▶ Queued ────────▶ Posted ─────────────────────▶ Done ──▶ (free)
//!      └───────────────────────────────────────────▲      (owner gone or tagged: freed at once)
//! ```
//!
//! Grows to what was in use at once and then allocates nothing. Imports no tokio.

use std::task::Waker;

use super::completion::Completed;
use super::wr_id::{INDEX_BITS, Key};
use crate::error::OpError;
use crate::provider::{SendOp, Sge};

/// The end of a linked list.
pub(super) const NIL: u32 = u32::MAX;

/// A work request without its id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wr {
    pub(crate) kind: WrKind,
    pub(crate) sge: Option<Sge>,
    /// The processor cannot read it, so that it is never copied at the post.
    pub(crate) device: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum WrKind {
    Send(SendOp),
    Recv,
}

/// Who is told about the end of an operation.
#[derive(Debug)]
pub(crate) enum Owner {
    /// A future, and its waker once it waits.
    Future(Option<Waker>),
    /// Nobody any more: the future was dropped.
    Ignored,
    /// The ring's completions; the waker is of a submitter that waits for the operation to be posted.
    Tagged { user_data: u64, submitter: Option<Waker> },
}

#[derive(Debug)]
pub(super) enum Phase {
    Free,
    /// Waits for a credit, in its half's queue.
    Queued,
    /// The device's.
    Posted,
    /// Ended; the future has not taken the result.
    Done(Result<Completed, OpError>),
}

#[derive(Debug)]
pub(super) struct Slot<B> {
    pub(super) generation: u32,
    /// The queue pair's half that it was submitted to.
    pub(super) half: u32,
    /// Next free slot, or next in the half's queue.
    pub(super) next: u32,
    /// The one before it in the half's queue.
    pub(super) prev: u32,
    pub(super) wr: Wr,
    pub(super) buf: Option<B>,
    pub(super) owner: Owner,
    pub(super) phase: Phase,
}

#[derive(Debug)]
pub(super) struct Slots<B> {
    slots: Vec<Slot<B>>,
    free: u32,
}

impl<B> Slots<B> {
    pub(super) fn with_capacity(n: usize) -> Self {
        Self { slots: Vec::with_capacity(n), free: NIL }
    }

    /// Takes a free slot. Gives the buffer back when 2^22 operations are outstanding or not taken.
    pub(super) fn insert(
        &mut self,
        half: u32,
        wr: Wr,
        owner: Owner,
        buf: Option<B>,
    ) -> Result<Key, Option<B>> {
        let index = self.free;
        if let Some(slot) = self.slots.get_mut(index as usize) {
            self.free = slot.next;
            let generation = slot.generation;
            *slot = Slot { generation, half, next: NIL, prev: NIL, wr, buf, owner, phase: Phase::Queued };
            return Ok(Key { index, generation });
        }
        let index = self.slots.len() as u32;
        if index >= 1 << INDEX_BITS {
            return Err(buf);
        }
        let (next, prev, phase) = (NIL, NIL, Phase::Queued);
        self.slots.push(Slot { generation: 0, half, next, prev, wr, buf, owner, phase });
        Ok(Key { index, generation: 0 })
    }

    pub(super) fn get(&mut self, key: Key) -> Option<&mut Slot<B>> {
        self.slots
            .get_mut(key.index as usize)
            .filter(|s| s.generation == key.generation && !matches!(s.phase, Phase::Free))
    }

    /// The slot at an index that one of our own lists holds.
    pub(super) fn at(&mut self, index: u32) -> &mut Slot<B> {
        &mut self.slots[index as usize]
    }

    pub(super) fn key_at(&self, index: u32) -> Key {
        Key { index, generation: self.slots[index as usize].generation }
    }

    /// Frees a slot and gives what it held: phase, owner, buffer.
    pub(super) fn remove(&mut self, key: Key) -> Option<(Phase, Owner, Option<B>)> {
        let free = self.free;
        let slot = self.get(key)?;
        slot.generation = Key::next_generation(slot.generation);
        slot.next = free;
        let phase = std::mem::replace(&mut slot.phase, Phase::Free);
        let owner = std::mem::replace(&mut slot.owner, Owner::Ignored);
        let buf = slot.buf.take();
        self.free = key.index;
        Some((phase, owner, buf))
    }

    /// Keys of the slots of `half` that are the device's.
    pub(super) fn posted_of(&self, half: u32) -> Vec<Key> {
        let posted = |s: &Slot<B>| s.half == half && matches!(s.phase, Phase::Posted);
        let slots = self.slots.iter().enumerate().filter(|(_, s)| posted(s));
        slots.map(|(i, s)| Key { index: i as u32, generation: s.generation }).collect()
    }
}
