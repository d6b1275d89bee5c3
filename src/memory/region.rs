//! Registered memory, and the two kinds of it.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use super::{Mapping, RemoteRegion, Slice};
use crate::cuda::DeviceMemory;
use crate::error::MemoryError;
use crate::provider::{self, AccessFlags};

/// Regions of one mapping start on pages.
const PAGE: u64 = 4096;

mod sealed {
    pub trait Sealed: Send + Sync + 'static {}
}

/// Who may touch a region: [`Local`] or [`Exposed`].
pub trait Kind: sealed::Sealed {}

/// Touched by this process and by the operations that it submits. Slices are exclusive and are `[u8]`.
#[derive(Debug)]
pub enum Local {}

/// Peers may read or write it at any time. Slices copy in and out.
#[derive(Debug)]
pub enum Exposed {}

impl sealed::Sealed for Local {}
impl sealed::Sealed for Exposed {}
impl Kind for Local {}
impl Kind for Exposed {}

/// One registration, shared by the region and every slice of it. The last of them deregisters it.
///
/// Deregistration happens in `mr`'s drop: cheap on the soft provider, and on a thread of its own or in the background where it
/// blocks.
#[derive(Debug)]
pub(crate) struct MrInner {
    // Dropped in this order: the registration before its domain and the memory.
    pub(super) mr: provider::Mr,
    pub(super) pd: provider::Pd,
    pub(super) mapping: Arc<Mapping>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl MrInner {
    /// The address of its first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.mapping.addr() + self.offset
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.mr.lkey()
    }
}

/// Registered memory.
#[derive(Debug)]
pub struct Region<K: Kind> {
    pub(super) inner: Arc<MrInner>,
    pub(super) kind: PhantomData<fn() -> K>,
}

impl<K: Kind> Region<K> {
    /// Registers the whole of `mapping`. Blocks.
    pub(crate) fn register(
        pd: &provider::Pd,
        mapping: Mapping,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let mapping = Arc::new(mapping);
        let len = mapping.len();
        let mr = pd.reg_mr(mapping.clone(), 0, len, access)?;
        Ok(Self {
            inner: Arc::new(MrInner { mr, pd: pd.clone(), mapping, offset: 0, len }),
            kind: PhantomData,
        })
    }

    /// Registers all of `mapping` in pieces of at most `limit` bytes, a multiple of the page size. Blocks.
    pub(crate) fn register_pieces_of(
        pd: &provider::Pd,
        mapping: &Arc<Mapping>,
        limit: u64,
        access: AccessFlags,
    ) -> Result<Vec<Self>, MemoryError> {
        let piece = (limit & !(PAGE - 1)).max(PAGE);
        let mut regions = Vec::new();
        let mut offset = 0;
        while offset < mapping.len() {
            let len = piece.min(mapping.len() - offset);
            let mr = pd.reg_mr(mapping.clone(), offset, len, access)?;
            let inner = MrInner { mr, pd: pd.clone(), mapping: mapping.clone(), offset, len };
            regions.push(Self { inner: Arc::new(inner), kind: PhantomData });
            offset += len;
        }
        Ok(regions)
    }

    /// Registers all of the memory that this region is a part of, in another domain. Blocks.
    pub(crate) fn register_again(
        &self,
        pd: &provider::Pd,
        limit: u64,
        access: AccessFlags,
    ) -> Result<Vec<Self>, MemoryError> {
        Self::register_pieces_of(pd, &self.inner.mapping, limit, access)
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    pub(crate) fn addr(&self) -> u64 {
        self.inner.addr()
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.inner.lkey()
    }

    #[cfg(feature = "verbs")]
    pub(crate) fn provider(&self) -> &provider::Mr {
        &self.inner.mr
    }

    /// The memory of a GPU that it is in, if it is that.
    pub(crate) fn device_memory(&self) -> Option<&Arc<DeviceMemory>> {
        self.inner.mapping.device_memory()
    }

    /// Whether it is memory of a GPU.
    pub(crate) fn is_device(&self) -> bool {
        self.device_memory().is_some()
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }
}

impl Region<Local> {
    /// The whole region as one exclusive slice. Split it to use parts at the same time.
    ///
    /// The slice is exclusive because the region is gone: a second one does not compile.
    ///
    /// ```compile_fail,E0382
    /// # use landfall::memory::{Local, Region};
    /// fn f(region: Region<Local>) {
    ///     let one = region.into_slice();
    ///     let two = region.into_slice(); // moved into `one`
    /// }
    /// ```
    ///
    /// Nor can a local region be cloned to get at a second one:
    ///
    /// ```compile_fail,E0277
    /// # use landfall::memory::{Local, Region};
    /// fn f(region: &Region<Local>) -> Region<Local> {
    ///     Region::<Local>::clone(region)
    /// }
    /// ```
    pub fn into_slice(self) -> Slice<Local> {
        let len = self.inner.len;
        // The region is consumed and not `Clone`: this is the only slice, so that it is exclusive.
        Slice::new(self.inner, 0, len)
    }
}

impl Region<Exposed> {
    /// A range of the region, in bytes. Slices of an exposed region may overlap.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Slice<Exposed>, MemoryError> {
        let size = self.inner.len;
        let start = match range.start_bound() {
            Bound::Included(&s) => s,
            Bound::Excluded(&s) => s.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&e) => e.saturating_add(1),
            Bound::Excluded(&e) => e,
            Bound::Unbounded => size,
        };
        if start > end || end > size {
            return Err(MemoryError::OutOfRange { offset: start, len: end.saturating_sub(start), size });
        }
        Ok(Slice::new(self.inner.clone(), start, end - start))
    }

    /// What a peer needs to reach this region.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion { addr: self.inner.addr(), len: self.inner.len, rkey: self.inner.mr.rkey() }
    }
}

impl Clone for Region<Exposed> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), kind: PhantomData }
    }
}
