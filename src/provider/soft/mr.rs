//! Memory regions: the table of a device, keys, and the one place where a key and an address become memory.
//!
//! Resolving happens under the table's read lock, and the [`MemRange`] that it gives cannot outlive that lock.
//! Deregistration takes the write lock: when it has returned, no I/O touches the region any more, and none will.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::tuning::SLOTS_AT_HAND;
use super::{SoftDevice, SoftPd};
use crate::cuda::{Copier, DeviceMemory, SlotPool};
use crate::device::SoftTransport;
use crate::error::MemoryError;
use crate::memory::Mapping;
use crate::pages::Pages;
use crate::provider::{AccessFlags, Exposure};
use crate::random::random;

/// Keys that were retired this recently are not given out again.
const RETIRED: usize = 4096;

/// A registered region. Deregisters on drop.
#[derive(Debug)]
pub(crate) struct SoftMr {
    device: Arc<SoftDevice>,
    key: u32,
}

impl SoftMr {
    pub(crate) fn lkey(&self) -> u32 {
        self.key
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.key
    }
}

impl Drop for SoftMr {
    fn drop(&mut self) {
        self.device.mrs.remove(self.key);
        self.device.lenders.withdraw(self.key);
    }
}

impl SoftPd {
    /// Whether our own memory is made so that peers of this host can be lent it.
    pub(crate) fn lends_memory(&self) -> bool {
        self.device.transport != SoftTransport::Tcp
    }

    pub(crate) fn reg_mr(
        self: &Arc<Self>,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<SoftMr, MemoryError> {
        let limit = self.device.caps.max_mr_size;
        if len > limit {
            return Err(MemoryError::TooLarge { asked: len, limit });
        }
        let size = mapping.len();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(MemoryError::OutOfRange { offset, len, size });
        }
        if self.device.fails_mr() {
            let source = io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(MemoryError::Os { what: "registering memory", len, source });
        }
        // The driver compiles now what copies to it and from it: no queue pair waits for that.
        if let Some(Err(error)) = mapping.device_memory().map(|memory| Copier::prepare(memory.gpu())) {
            tracing::debug!(%error, "pieces are copied one by one until the kernel for them can be made");
        }
        // What it is staged through over TCP is made now: it takes its time, and is there as long as this is registered.
        let tcp = self.device.transport != SoftTransport::Shm;
        let slots = mapping.device_memory().filter(|_| tcp).map(|memory| SlotPool::of(memory.gpu()));
        if let Some(Err(error)) = slots.as_ref().map(|slots| slots.prepare(SLOTS_AT_HAND)) {
            tracing::warn!(%error, "slots for staging could not be made; they are asked for again when they are needed");
        }
        let addr = mapping.addr() + offset;
        let entry = Entry { addr, len, access, pd: self.id, mapping, _slots: slots };
        let key = self.device.mrs.insert(entry).map_err(|source| MemoryError::Os {
            what: "drawing a key for a registration",
            len,
            source,
        })?;
        Ok(SoftMr { device: self.device.clone(), key })
    }
}

#[derive(Debug)]
struct Entry {
    addr: u64,
    len: u64,
    access: AccessFlags,
    pd: u32,
    mapping: Arc<Mapping>,
    _slots: Option<Arc<SlotPool>>,
}

/// Keys are random already.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u32(b.into());
        }
    }

    fn write_u32(&mut self, key: u32) {
        self.0 = (self.0 ^ u64::from(key)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Default)]
struct Entries {
    live: HashMap<u32, Entry, BuildHasherDefault<KeyHasher>>,
    retired: VecDeque<u32>,
}

/// The regions of a device, by key. A key serves as lkey and as rkey; it is 32 random bits and never 0.
#[derive(Default)]
pub(super) struct MrTable(RwLock<Entries>);

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MrTable")
    }
}

impl MrTable {
    fn insert(&self, entry: Entry) -> io::Result<u32> {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut key = [0; 4];
            random(&mut key)?;
            let key = u32::from_le_bytes(key);
            if key != 0 && !entries.live.contains_key(&key) && !entries.retired.contains(&key) {
                entries.live.insert(key, entry);
                return Ok(key);
            }
        }
    }

    fn remove(&self, key: u32) {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.live.remove(&key);
        if entries.retired.len() == RETIRED {
            entries.retired.pop_front();
        }
        entries.retired.push_back(key);
        drop(entries);
        // Outside of the lock: what a GPU still copies into it ends, and when this was its last use, it is unmapped.
        if let Some(entry) = entry {
            entry.mapping.settle();
        }
    }

    pub(super) fn read(&self) -> MrGuard<'_> {
        MrGuard(self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the operations of one queue pair reach: the regions of its domain and, of what a peer asks for, what is exposed to it.
#[derive(Clone, Debug)]
pub(super) struct Reach {
    pub(super) pd: u32,
    /// None where keys alone say it.
    pub(super) exposure: Option<Arc<dyn Exposure>>,
}

impl Reach {
    /// Whether that may be reached, as far as it is for a peer.
    pub(super) fn exposes(&self, addr: u64, len: u64, access: AccessFlags) -> bool {
        let Some(exposure) = &self.exposure else { return true };
        let remote = [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_READ, AccessFlags::REMOTE_ATOMIC];
        !remote.contains(&access) || exposure.exposes(addr, len, access)
    }

    /// Whether the peer may write all targets of `pages`, whose first block is at `addr`. `None` where that is more than `most` to
    /// look at.
    pub(super) fn exposes_pages(&self, addr: u64, pages: &Pages, most: u64) -> Option<bool> {
        self.exposure.as_ref().map_or(Some(true), |exposure| exposure.exposes_pages(addr, pages, most))
    }
}

/// The table, held so that nothing is deregistered.
pub(super) struct MrGuard<'t>(RwLockReadGuard<'t, Entries>);

impl MrGuard<'_> {
    /// The memory at `addr..+len`, when `key` is within `reach`, covers all of it and allows `access`.
    pub(super) fn resolve(
        &self,
        key: u32,
        reach: &Reach,
        addr: u64,
        len: u64,
        access: AccessFlags,
    ) -> Option<MemRange<'_>> {
        self.registered(key, reach.pd, addr, len, access).filter(|_| reach.exposes(addr, len, access))
    }

    /// As [`resolve`](Self::resolve), whatever is exposed.
    pub(super) fn registered(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len: u64,
        access: AccessFlags,
    ) -> Option<MemRange<'_>> {
        let entry = self.0.live.get(&key)?;
        let offset = addr.checked_sub(entry.addr)?;
        let inside = offset.checked_add(len)? <= entry.len;
        (inside && entry.pd == pd && entry.access.contains(access)).then_some(MemRange {
            addr,
            len: len as usize,
            key,
            mapping: &entry.mapping,
            written: access == AccessFlags::REMOTE_WRITE,
            held: PhantomData,
        })
    }

    /// The memfds of everything that is registered, by their names.
    /// And the allocations of GPUs.
    pub(super) fn lendable(&self) -> HashSet<u64> {
        let name = |entry: &Entry| {
            let mapping = &entry.mapping;
            let memfd = mapping.memfd_ref().map(|memfd| memfd.id);
            memfd.or_else(|| mapping.device_memory().map(|memory| memory.name()))
        };
        self.0.live.values().filter_map(name).collect()
    }

    /// Whether `key` is of memory of a GPU.
    pub(super) fn is_device(&self, key: u32) -> bool {
        self.mapping(key).is_some_and(|mapping| mapping.device_memory().is_some())
    }

    /// What `key` is of.
    pub(super) fn mapping(&self, key: u32) -> Option<&Arc<Mapping>> {
        self.0.live.get(&key).map(|entry| &entry.mapping)
    }
}

/// Where registered memory is in a memfd, which can be lent to a peer of this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemfdOf<'g> {
    /// Sealed against shrinking and growing, and (where the kernel can) against writes through any other mapping.
    pub(super) fd: BorrowedFd<'g>,
    /// Where the memory begins in it.
    pub(super) offset: u64,
    /// The length of the whole memfd, which is what a peer maps.
    pub(super) len: u64,
    /// Names the memfd in this process: never 0, never given out again. Regions of one mapping have it in common, so that
    /// a peer is sent one descriptor for all of them.
    pub(super) id: u64,
}

impl<'g> MemfdOf<'g> {
    /// Of all of a mapping.
    pub(super) fn of(mapping: &'g Mapping) -> Option<Self> {
        Self::new(mapping, mapping.addr())
    }

    fn new(mapping: &'g Mapping, addr: u64) -> Option<Self> {
        let memfd = mapping.memfd_ref()?;
        let offset = addr.checked_sub(mapping.addr())?;
        Some(Self { fd: memfd.fd, offset, len: memfd.len, id: memfd.id })
    }
}

/// What an atomic does to its eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atomic {
    FetchAdd(u64),
    CompareSwap { compare: u64, swap: u64 },
}

/// Memory inside of a live registration: its mapping cannot go away during `'g`.
#[derive(Clone, Copy)]
pub(super) struct MemRange<'g> {
    addr: u64,
    len: usize,
    key: u32,
    mapping: &'g Arc<Mapping>,
    /// It was looked up for the peer, to write to it.
    written: bool,
    held: PhantomData<&'g ()>,
}

impl<'g> MemRange<'g> {
    /// The memory of a GPU that it is a part of. Then no pointer may be made of its address.
    pub(super) fn device(self) -> Option<&'g Arc<DeviceMemory>> {
        self.mapping.device_memory()
    }

    pub(super) fn addr(self) -> u64 {
        self.addr
    }

    /// By which it was looked up. While that is registered, so is the memory: keys come back late.
    pub(super) fn key(self) -> u32 {
        self.key
    }

    pub(super) fn mapping(self) -> &'g Arc<Mapping> {
        self.mapping
    }

    /// Where it is, and its bytes, when the peer writes to it: as long as it is exposed.
    pub(super) fn asked(self) -> Option<(u64, u64)> {
        self.written.then_some((self.addr, self.len as u64))
    }

    /// `len` bytes of it, from `offset` on.
    pub(super) fn part(self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "a part of it");
        Self { addr: self.addr + offset as u64, len, ..self }
    }

    /// The memfd behind it, and where this range begins in it. `None` for the user's memory.
    pub(super) fn memfd(self) -> Option<MemfdOf<'g>> {
        MemfdOf::new(self.mapping, self.addr)
    }

    /// `offset..+len` of it.
    pub(super) fn within(self, offset: u64, len: u32) -> Option<Self> {
        let inside = offset.checked_add(len.into())? <= self.len as u64;
        inside.then_some(Self { addr: self.addr + offset, len: len as usize, ..self })
    }

    pub(super) fn as_ptr(self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.addr as usize)
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Copies `from` to its start. The lengths are equal.
    pub(super) fn write(self, from: &[u8]) {
        assert_eq!(from.len(), self.len, "the caller cuts both to the same length");
        let _copying = self.mapping.lock_copies();
        // SAFETY: `resolve` checked the range against the registration, whose mapping lives for `'g`; the lock
        // keeps the copies of safe code out, and a local region's slice is owned by the operation meanwhile.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.as_ptr(), from.len()) };
    }

    /// Hands its pieces of at most `piece` bytes to `fill`, in order: where a piece begins in the range, its address and its
    /// length. `fill` may write the piece, and keeps the copies of safe code out meanwhile.
    pub(super) fn fill(self, piece: usize, mut fill: impl FnMut(usize, *mut u8, usize)) {
        let mut at = 0;
        while at < self.len {
            let n = piece.clamp(1, self.len - at);
            let _copying = self.mapping.lock_copies();
            fill(at, self.as_ptr().wrapping_add(at), n);
            at += n;
        }
    }

    /// Does `op` on its eight bytes, and says what was there before. `None` for another length, or an address that is not a
    /// multiple of eight.
    pub(super) fn atomic(self, op: Atomic) -> Option<u64> {
        let word = self.as_ptr().cast::<u64>();
        if self.len != size_of::<u64>() || !word.is_aligned() || self.addr == 0 {
            return None;
        }
        let _copying = self.mapping.lock_copies();
        // SAFETY: eight bytes, aligned, checked above; `resolve` checked the range against the registration, whose mapping
        // lives for `'g`. The lock keeps the copies of safe code out, which are not atomic; others reach exposed memory by
        // `unsafe` only, or from outside of this process.
        let word = unsafe { AtomicU64::from_ptr(word) };
        Some(match op {
            Atomic::FetchAdd(add) => word.fetch_add(add, Ordering::SeqCst),
            Atomic::CompareSwap { compare, swap } => word
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|other| other),
        })
    }
}
