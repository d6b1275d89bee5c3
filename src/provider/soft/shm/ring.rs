//! The queue between two processes: a ring of bytes in each direction, in one shared mapping.
//!
//! ```text
//!   0      lines of the dialling side     head · tail · sleeping · closed, each on a line of its own
//!   1024   lines of the listening side
//!   4096   bytes from the dialling side   RING_BYTES
//!   …      bytes from the listening side  RING_BYTES
//! ```
//! A side writes its own lines only: `head` counts what it has put into its ring, `tail` what it is done with of the other's.
//! Both only grow, and a place in a ring is the count modulo its size. `sleeping` is taken back by the peer that wakes us.
//!
//! One thread at a time puts and takes (under the lock of its queue pair); any may look and sleep. What the peer writes is looked
//! at once and checked before it is used. A hostile one can stop or spoil its own connection, and nothing else.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::super::tuning::RING_BYTES;
use super::fence;
use super::loans::Loans;
use super::map::SharedMap;

/// Words of one side, from where its lines begin. Two lines of 64 bytes each, since processors fetch them in pairs.
const HEAD: usize = 0;
const TAIL: usize = 128;
const SLEEPING: usize = 256;
const CLOSED: usize = 384;

/// Where the lines of the listening side begin, and the rings.
const SECOND: usize = 1024;
const DATA: usize = 4096;

/// For a test that writes what no side would.
#[cfg(any(test, fuzzing))]
pub(super) const SECOND_HEAD: usize = SECOND + HEAD;
#[cfg(any(test, fuzzing))]
pub(super) const SECOND_TAIL: usize = SECOND + TAIL;

/// Bytes of the whole mapping.
pub(super) const MAP_BYTES: usize = DATA + 2 * RING_BYTES;

/// Which of the two this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Dialling,
    Listening,
}

impl Side {
    fn lines(self) -> usize {
        if self == Self::Dialling { 0 } else { SECOND }
    }

    fn data(self) -> usize {
        if self == Self::Dialling { DATA } else { DATA + RING_BYTES }
    }

    fn other(self) -> Self {
        if self == Self::Dialling { Self::Listening } else { Self::Dialling }
    }
}

/// What a queue pair would do something about, if it happened.
pub(in crate::provider::soft) const WANTS_BYTES: u8 = 1;
pub(in crate::provider::soft) const WANTS_ROOM: u8 = 2;
pub(in crate::provider::soft) const WANTS_END: u8 = 4;
/// That the peer is done with as much as is [awaited](Rings::set_awaited).
pub(in crate::provider::soft) const WANTS_DONE: u8 = 8;

/// The bits of `sleeping`.
const WAKE_BYTES: u32 = 1;
const WAKE_ROOM: u32 = 2;
const WAKE_DONE: u32 = 4;

/// A sender that has found its ring full goes on when this much of it is free again, so that it is not woken for every frame.
const ENOUGH_ROOM: u64 = RING_BYTES as u64 / 2;

/// Both rings, as one side sees them.
#[derive(Debug)]
pub(in crate::provider::soft) struct Rings {
    map: SharedMap,
    side: Side,
    /// Our own counts. Those in the mapping are for the peer, and it could change them.
    put: AtomicU64,
    taken: AtomicU64,
    freed: AtomicU64,
    wants: AtomicU8,
    awaited: AtomicU64,
    loans: Loans,
}

/// Whether a count of bytes has come to another one.
pub(in crate::provider::soft) fn is_past(count: u64, end: u64) -> bool {
    count.wrapping_sub(end) <= u64::MAX / 2
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer has written nonsense into the shared queue")
}

impl Rings {
    pub(super) fn new(map: SharedMap, side: Side) -> Self {
        let zero = || AtomicU64::new(0);
        let (put, taken, freed, awaited) = (zero(), zero(), zero(), zero());
        let wants = AtomicU8::new(0);
        let this = Self { map, side, put, taken, freed, wants, awaited, loans: Loans::default() };
        // Whoever waits for this connection may be asleep since before it was there: the first change is told.
        this.say_asleep(WAKE_BYTES | WAKE_ROOM);
        this
    }

    fn theirs(&self) -> usize {
        self.side.other().lines()
    }

    fn say_asleep(&self, bits: u32) {
        fence::fall_asleep(self.map.word32(self.side.lines() + SLEEPING), bits);
    }

    fn peer_sleeps(&self, bit: u32) -> bool {
        fence::must_wake(self.map.word32(self.theirs() + SLEEPING), bit)
    }

    /// Bytes that may be put.
    fn free(&self) -> io::Result<usize> {
        let used = self.put.load(Ordering::Relaxed).wrapping_sub(self.done());
        if used > RING_BYTES as u64 {
            return Err(nonsense());
        }
        Ok(RING_BYTES - used as usize)
    }

    /// Puts as much of the pieces as there is room for, in one go for the peer. How much that was, and whether the peer has to be
    /// woken. `WouldBlock` where there is no room at all.
    ///
    /// # Safety
    /// Each piece, an address and a length, is readable.
    pub(super) unsafe fn put(
        &self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> io::Result<(usize, bool)> {
        let mut free = self.free()?;
        if free == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let start = self.put.load(Ordering::Relaxed);
        let mut head = start;
        for (mut from, len) in pieces {
            let mut left = len.min(free);
            free -= left;
            while left > 0 {
                let at = (head % RING_BYTES as u64) as usize;
                let n = left.min(RING_BYTES - at);
                // SAFETY: `n` bytes are left of this piece, which is readable by the caller's promise.
                unsafe { self.map.copy_in(self.side.data() + at, from, n) };
                from = from.wrapping_add(n);
                head = head.wrapping_add(n as u64);
                left -= n;
            }
        }
        self.put.store(head, Ordering::Relaxed);
        self.map.word64(self.side.lines() + HEAD).store(head, Ordering::Release);
        Ok((head.wrapping_sub(start) as usize, self.peer_sleeps(WAKE_BYTES)))
    }

    /// Takes up to `into.len()` bytes. `WouldBlock` where there are none. Their room stays taken until [`free_all_but`](Self::free_all_but).
    pub(super) fn take(&self, into: &mut [u8]) -> io::Result<usize> {
        let taken = self.taken.load(Ordering::Relaxed);
        let there = self.map.word64(self.theirs() + HEAD).load(Ordering::Acquire).wrapping_sub(taken);
        if there > RING_BYTES as u64 {
            return Err(nonsense());
        }
        let n = into.len().min(there as usize);
        if n == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let at = (taken % RING_BYTES as u64) as usize;
        let (first, second) = into[..n].split_at_mut(n.min(RING_BYTES - at));
        let data = self.side.other().data();
        self.map.copy_out(data + at, first);
        self.map.copy_out(data, second);
        self.taken.store(taken.wrapping_add(n as u64), Ordering::Relaxed);
        Ok(n)
    }

    /// How much was taken since the beginning.
    pub(in crate::provider::soft) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Everything taken but the last `kept` bytes is done with: gives its room back. Says whether the peer has to be woken.
    pub(super) fn free_all_but(&self, kept: usize) -> bool {
        self.free_until(self.taken().wrapping_sub(kept as u64))
    }

    /// Everything that was taken until there had been `tail` bytes of it is done with. `tail` never goes back.
    pub(super) fn free_until(&self, tail: u64) -> bool {
        if tail == self.freed.load(Ordering::Relaxed) {
            return false;
        }
        self.freed.store(tail, Ordering::Relaxed);
        self.map.word64(self.side.lines() + TAIL).store(tail, Ordering::Release);
        // In front of the look at who sleeps, so that one who waits for this much is not left behind.
        let used = self.map.word64(self.theirs() + HEAD).load(Ordering::Acquire).wrapping_sub(tail);
        let room = used <= RING_BYTES as u64 - ENOUGH_ROOM;
        self.peer_sleeps(if room { WAKE_ROOM | WAKE_DONE } else { WAKE_DONE })
    }

    /// How much was put since the beginning.
    pub(in crate::provider::soft) fn count(&self) -> u64 {
        self.put.load(Ordering::Relaxed)
    }

    /// How much of what was put the peer is done with, by its own word: counted, as `put`, since the beginning.
    pub(in crate::provider::soft) fn done(&self) -> u64 {
        self.map.word64(self.theirs() + TAIL).load(Ordering::Acquire)
    }

    /// Memory of `key` is referred to in a piece of the frame that is being made, and the key is registered meanwhile.
    pub(super) fn lend(&self, key: u32, piece: usize) {
        self.loans.add(key, piece);
    }

    /// That frame is put next, after what is ahead of it: `end` says how far from here on each piece goes.
    pub(in crate::provider::soft) fn settle(&self, end: impl Fn(usize) -> u64) {
        let start = self.put.load(Ordering::Relaxed);
        self.loans.settle(self.done(), |piece| start.wrapping_add(end(piece)));
    }

    /// Whether the peer may still copy from memory of `key`.
    pub(super) fn lends(&self, key: u32) -> bool {
        self.loans.has(key, self.done())
    }

    /// The peer has put something that was not taken.
    pub(in crate::provider::soft) fn has_bytes(&self) -> bool {
        self.map.word64(self.theirs() + HEAD).load(Ordering::Acquire) != self.taken.load(Ordering::Relaxed)
    }

    /// There is room, after the ring was found full.
    pub(in crate::provider::soft) fn has_room(&self) -> bool {
        let used = self.put.load(Ordering::Relaxed).wrapping_sub(self.done());
        // One that makes no sense is found by the next `put`.
        used <= RING_BYTES as u64 - ENOUGH_ROOM || used > RING_BYTES as u64
    }

    /// The peer says that it has ended.
    pub(in crate::provider::soft) fn peer_closed(&self) -> bool {
        self.map.word32(self.theirs() + CLOSED).load(Ordering::Acquire) != 0
    }

    /// Whether what was copied from the peer until now is what it meant.
    pub(super) fn is_sound(&self) -> bool {
        fence::is_sound(self.map.word32(self.theirs() + CLOSED))
    }

    /// Says that this side has ended. When this has returned, nothing is executed any more that the peer copies from then on.
    pub(super) fn close(&self) {
        fence::close(self.map.word32(self.side.lines() + CLOSED));
    }

    /// Whether this side has said so.
    pub(super) fn is_closed(&self) -> bool {
        self.map.word32(self.side.lines() + CLOSED).load(Ordering::Acquire) != 0
    }

    pub(in crate::provider::soft) fn set_wants(&self, wants: u8) {
        if self.wants.load(Ordering::Relaxed) != wants {
            self.wants.store(wants, Ordering::SeqCst);
        }
    }

    /// What is waited for by [`WANTS_DONE`].
    pub(in crate::provider::soft) fn set_awaited(&self, end: u64) {
        self.awaited.store(end, Ordering::SeqCst);
    }

    /// Something is there that the queue pair waits for.
    pub(in crate::provider::soft) fn is_ready(&self) -> bool {
        let wants = self.wants.load(Ordering::SeqCst);
        (wants & WANTS_BYTES != 0 && self.has_bytes())
            || (wants & (WANTS_BYTES | WANTS_END) != 0 && self.peer_closed())
            || (wants & WANTS_ROOM != 0 && self.has_room())
            || (wants & WANTS_DONE != 0 && is_past(self.done(), self.awaited.load(Ordering::SeqCst)))
    }

    /// From now on the peer tells by its socket of what the queue pair waits for. Look at [`is_ready`](Self::is_ready) after it.
    pub(in crate::provider::soft) fn fall_asleep(&self) {
        let wants = self.wants.load(Ordering::SeqCst);
        let bit = |wanted, bit| if wants & wanted != 0 { bit } else { 0 };
        let room = bit(WANTS_ROOM, WAKE_ROOM) | bit(WANTS_DONE, WAKE_DONE);
        self.say_asleep(bit(WANTS_BYTES, WAKE_BYTES) | room);
    }

    /// This side looks by itself again.
    pub(in crate::provider::soft) fn wake_up(&self) {
        let word = self.map.word32(self.side.lines() + SLEEPING);
        if word.load(Ordering::Relaxed) != 0 {
            word.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
