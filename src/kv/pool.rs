//! A registered pool of KV blocks and who holds which of them.
//!
//! A pool is one mapping, registered as one memory region or, where `max_mr_size` is small, as several; and so on each device
//! that it is on. Blocks are handed out as [`Blocks`]: an exclusive claim on a list of block ids, which goes back to the pool when it is
//! dropped. A claim moves into a grant or a write and comes back with its result, so a block cannot be reused while
//! a device may still touch it (R1, K4).

use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;

use super::blocks::Blocks;
use super::free_runs::{FreeRuns, push_run};
use super::layout::Layout;
use super::lock;
use super::pool_device::{PoolDevice, Registered};
use crate::connect::MAX_RAILS;
use crate::device::ProtectionDomain;
use crate::error::MemoryError;
use crate::memory::{Exposed, Memory, Region};
use crate::provider::AccessFlags;

/// What the peers of a pool's owner may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PoolAccess {
    /// Source of writes only: no peer is given any access. Blocks can be granted to read all the same, and are then read by
    /// [`ReadStrategy::RemoteWrite`](super::ReadStrategy::RemoteWrite).
    Source,
    /// Blocks of this pool can be granted to be written to: the region is registered with REMOTE_WRITE.
    #[default]
    Target,
    /// Blocks can be read by READs, under grants to read: the region is registered with REMOTE_READ. Nothing is written to it.
    Readable,
    /// Both of [`Target`](Self::Target) and [`Readable`](Self::Readable).
    Both,
}

impl PoolAccess {
    /// Whether peers can be granted blocks to write to.
    pub fn peers_write(self) -> bool {
        matches!(self, Self::Target | Self::Both)
    }

    /// Whether peers can read by READs.
    pub fn peers_read(self) -> bool {
        matches!(self, Self::Readable | Self::Both)
    }

    fn flags(self) -> AccessFlags {
        let none = AccessFlags(0);
        let write = if self.peers_write() { AccessFlags::REMOTE_WRITE } else { none };
        let read = if self.peers_read() { AccessFlags::REMOTE_READ } else { none };
        AccessFlags::LOCAL_WRITE.union(write).union(read)
    }
}

/// Why blocks could not be taken from a pool, or addressed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Not enough free blocks now; `KvPool::alloc` waits instead.
    #[error(
        "{asked} blocks were asked for, {free} of {total} are free; wait for some to come back, or make the pool larger"
    )]
    Exhausted {
        /// Blocks asked for.
        asked: u64,
        /// Blocks free now.
        free: u64,
        /// Blocks of the pool.
        total: u64,
    },
    /// The pool will never have so many.
    #[error("{asked} blocks were asked for, the pool has {total} in all; make the pool larger")]
    TooMany {
        /// Blocks asked for.
        asked: u64,
        /// Blocks of the pool.
        total: u64,
    },
    /// A block that somebody else holds, or that was named twice.
    #[error("block {block} is in use; each block has one holder at a time")]
    InUse {
        /// The block id.
        block: u32,
    },
    /// Bytes could not be copied to or from the block: of memory of a GPU.
    #[error("the block could not be copied: {reason}")]
    Copy {
        /// What failed.
        reason: String,
    },
    /// An id, layer, position or byte range that does not exist.
    #[error("{what} {index} is out of range: there are {limit}")]
    OutOfRange {
        /// What was indexed.
        what: &'static str,
        /// The index asked for.
        index: u64,
        /// The number that there is.
        limit: u64,
    },
}

/// A registered pool of blocks. Cloning gives another handle to the same pool.
#[derive(Clone)]
pub struct KvPool {
    inner: Arc<Inner>,
}

struct Inner {
    devices: Vec<PoolDevice>,
    /// The first device that it is registered on.
    first: usize,
    layout: Layout,
    access: PoolAccess,
    /// What it is registered for.
    flags: AccessFlags,
    /// As many permits as there are free blocks. A permit is held (forgotten) by each claimed block.
    permits: Semaphore,
    free: Mutex<FreeRuns>,
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvPool")
            .field("layout", &self.inner.layout)
            .field("devices", &self.inner.devices.len())
            .field("regions", &self.regions().len())
            .field("free", &self.free_blocks())
            .finish()
    }
}

impl KvPool {
    /// Allocates and registers a pool for `layout` in anonymous memory, faulted in, that peers may write to under
    /// grants.
    ///
    /// # Errors
    /// [`MemoryError`]: memory that cannot be had or registered, or no tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future releases everything.
    pub async fn new(pd: &ProtectionDomain, layout: Layout) -> Result<Self, MemoryError> {
        let memory = Memory::anonymous(layout.required_bytes());
        Self::with_memory(pd, layout, memory, PoolAccess::Target).await
    }

    /// Registers `memory` (at least [`Layout::required_bytes`]) as a pool: as one region, or as several where the device's
    /// `max_mr_size` asks for it.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when `memory` is shorter than the layout; else as [`KvPool::new`].
    ///
    /// # Cancel safety
    /// As [`KvPool::new`].
    pub async fn with_memory(
        pd: &ProtectionDomain,
        layout: Layout,
        memory: Memory,
        access: PoolAccess,
    ) -> Result<Self, MemoryError> {
        Self::on_rails(&[pd], layout, memory, access).await
    }

    /// Registers `memory` once on the device of each of `pds`, 1 to 16: the rails of an endpoint of this pool, in this order. The
    /// same domain, or the same device, may be named more than once.
    ///
    /// A device that does not register it is left out, and named in [`PathReport::warnings`](super::PathReport::warnings) of every
    /// channel, each of which asks it again from time to time: [rails](crate::guide::rails).
    /// [`KvConfig::strict_rails`](super::KvConfig::strict_rails) makes an error of that.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] for none or more than 16; when no device registers it, the error of the first; else as
    /// [`KvPool::with_memory`].
    ///
    /// # Cancel safety
    /// As [`KvPool::new`].
    pub async fn on_rails(
        pds: &[&ProtectionDomain],
        layout: Layout,
        memory: Memory,
        access: PoolAccess,
    ) -> Result<Self, MemoryError> {
        let need = layout.required_bytes();
        if memory.len() < need {
            return Err(MemoryError::OutOfRange { offset: 0, len: need, size: memory.len() });
        }
        if pds.is_empty() || pds.len() > MAX_RAILS {
            return Err(MemoryError::Unsupported {
                what: "registration on none, or on more than 16 domains,",
                device: "a pool".to_owned(),
                fix: "name 1 to 16 protection domains",
            });
        }
        let flags = memory.access(access.flags());
        let (mut devices, mut failed) = (Vec::with_capacity(pds.len()), None);
        for (&pd, registered) in pds.iter().zip(ProtectionDomain::register_on_all(pds, memory, flags).await?)
        {
            devices.push(PoolDevice::new(pd.clone(), registered.as_ref().map(Vec::clone)));
            failed = failed.or(registered.err());
        }
        let Some(first) = devices.iter().position(|d| d.registered().is_some()) else {
            return Err(failed.unwrap_or(MemoryError::RuntimeGone));
        };
        let blocks = layout.blocks();
        Ok(Self {
            inner: Arc::new(Inner {
                devices,
                first,
                layout,
                access,
                flags,
                permits: Semaphore::new(blocks as usize),
                free: Mutex::new(FreeRuns::all(blocks)),
            }),
        })
    }

    /// The layout of the pool.
    pub fn layout(&self) -> &Layout {
        &self.inner.layout
    }

    /// The devices that it was to be registered on, in the order in which they were named.
    pub(crate) fn devices(&self) -> &[PoolDevice] {
        &self.inner.devices
    }

    /// Registers it on a device that has refused before, unless somebody has been there by now.
    pub(crate) async fn register(&self, device: usize) -> Result<&Registered, String> {
        // There is one: the pool is registered on a device at least.
        self.inner.devices[device].register(&self.regions()[0], self.inner.flags).await
    }

    /// The place of the first that it is registered on.
    pub(crate) fn first_device(&self) -> usize {
        self.inner.first
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.inner.devices[self.inner.first].pd
    }

    /// What peers may do.
    pub fn access(&self) -> PoolAccess {
        self.inner.access
    }

    /// Of the first device: every one has the same memory.
    pub(crate) fn regions(&self) -> &[Region<Exposed>] {
        // `first` is one that has.
        self.inner.devices[self.inner.first].registered().map_or(&[], |registered| &registered.regions)
    }

    /// Whether it is in memory of a GPU.
    pub(crate) fn is_device_memory(&self) -> bool {
        self.regions().first().is_some_and(Region::is_device)
    }

    /// Whether two handles are of the same pool.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Blocks that nobody holds now: neither claims, nor grants, nor the quarantine of aborted transfers.
    pub fn free_blocks(&self) -> u32 {
        self.inner.permits.available_permits() as u32
    }

    /// Takes `count` blocks, from the first contiguous run that holds them all, else from several, or says that they are
    /// not there now.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] when so many are not free now; [`PoolError::TooMany`] when they never will be.
    pub fn try_alloc(&self, count: u32) -> Result<Blocks, PoolError> {
        self.check_total(count)?;
        let Ok(permit) = self.inner.permits.try_acquire_many(count) else {
            return Err(PoolError::Exhausted {
                asked: count.into(),
                free: self.free_blocks().into(),
                total: self.inner.layout.blocks().into(),
            });
        };
        permit.forget();
        Ok(self.take_first_fit(count))
    }

    /// Takes `count` blocks as [`KvPool::try_alloc`] does, waiting for them in turn: nobody who came later is served
    /// before.
    ///
    /// # Errors
    /// [`PoolError::TooMany`] at once, when the pool will never have so many.
    ///
    /// # Cancel safety
    /// A dropped wait holds nothing.
    pub async fn alloc(&self, count: u32) -> Result<Blocks, PoolError> {
        self.check_total(count)?;
        // The semaphore is never closed, so the only outcome is the permit.
        if let Ok(permit) = self.inner.permits.acquire_many(count).await {
            permit.forget();
        }
        Ok(self.take_first_fit(count))
    }

    /// Claims exactly these blocks, in this order: for engines that have a block allocator of their own.
    ///
    /// # Errors
    /// All or nothing: [`PoolError::OutOfRange`], [`PoolError::InUse`] (also for an id that is named twice), and
    /// [`PoolError::Exhausted`] when the blocks are promised to somebody who waits in [`KvPool::alloc`].
    pub fn claim(&self, ids: &[u32]) -> Result<Blocks, PoolError> {
        let total = self.inner.layout.blocks();
        let count = u32::try_from(ids.len())
            .map_err(|_| PoolError::TooMany { asked: ids.len() as u64, total: total.into() })?;
        if let Some(&id) = ids.iter().find(|&&id| id >= total) {
            return Err(PoolError::OutOfRange { what: "block", index: id.into(), limit: total.into() });
        }
        self.check_total(count)?;
        let mut runs = Vec::new();
        for &id in ids {
            push_run(&mut runs, (id, 1));
        }
        let mut free = lock(&self.inner.free);
        for (i, &(start, len)) in runs.iter().enumerate() {
            if let Err(block) = free.take(start, len) {
                for &(start, len) in &runs[..i] {
                    free.put(start, len);
                }
                return Err(PoolError::InUse { block });
            }
        }
        // The free list and the permits change under different locks: `alloc` may hold permits for blocks that it
        // has not taken yet. Those are spoken for, so without enough permits the claim is refused.
        match self.inner.permits.try_acquire_many(count) {
            Ok(permit) => permit.forget(),
            Err(_) => {
                for &(start, len) in &runs {
                    free.put(start, len);
                }
                return Err(PoolError::Exhausted {
                    asked: count.into(),
                    free: self.free_blocks().into(),
                    total: total.into(),
                });
            }
        }
        drop(free);
        Ok(Blocks::new(self.clone(), runs))
    }

    fn check_total(&self, count: u32) -> Result<(), PoolError> {
        let total = self.inner.layout.blocks();
        if count > total {
            return Err(PoolError::TooMany { asked: count.into(), total: total.into() });
        }
        Ok(())
    }

    /// The caller has forgotten `count` permits, so that many blocks are free.
    fn take_first_fit(&self, count: u32) -> Blocks {
        let runs = lock(&self.inner.free).take_any(count);
        Blocks::new(self.clone(), runs)
    }

    /// Takes back runs that were claimed.
    pub(super) fn put(&self, runs: &[(u32, u32)]) {
        let mut free = lock(&self.inner.free);
        let mut blocks = 0;
        for &(start, len) in runs {
            free.put(start, len);
            blocks += len as usize;
        }
        drop(free);
        self.inner.permits.add_permits(blocks);
    }

    pub(super) fn locate(&self, layer: u32, block: u32, at: u64, len: u64) -> Result<u64, PoolError> {
        let layout = &self.inner.layout;
        if layer >= layout.layers() {
            return Err(PoolError::OutOfRange {
                what: "layer",
                index: layer.into(),
                limit: layout.layers().into(),
            });
        }
        let end = at.saturating_add(len);
        if end > layout.block_bytes() {
            return Err(PoolError::OutOfRange { what: "byte", index: end, limit: layout.block_bytes() });
        }
        match layout.offset(layer, block) {
            Some(offset) => Ok(offset + at),
            None => Err(PoolError::OutOfRange {
                what: "block",
                index: block.into(),
                limit: layout.blocks().into(),
            }),
        }
    }
}

/// An error and its causes, in a line.
pub(super) fn words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
