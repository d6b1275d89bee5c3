//! Memory regions: pinned, keyed memory.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::calls::{check, object};
use super::context::RawPd;
use super::sys::ibv_mr;
use crate::error::MemoryError;
use crate::memory::Mapping;
use crate::provider::AccessFlags;

/// A registered region. Deregisters on drop.
pub(crate) struct VerbsMr {
    pd: Arc<RawPd>,
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    // After the registration.
    mapping: Arc<Mapping>,
}

// SAFETY: the object is only passed to `ibv_dereg_mr`, which may be called from any thread; the keys are copies.
unsafe impl Send for VerbsMr {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for VerbsMr {}

impl std::fmt::Debug for VerbsMr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsMr").field("mapping", &self.mapping).finish_non_exhaustive()
    }
}

impl VerbsMr {
    /// Registers `offset..offset + len` of `mapping`. Blocks: it pins the pages.
    pub(super) fn register(
        pd: &Arc<RawPd>,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let size = mapping.len();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(MemoryError::OutOfRange { offset, len, size });
        }
        let length = usize::try_from(len)
            .map_err(|_| MemoryError::Length { asked: len, fix: "no address space is that large" })?;
        // Verbs demands local write access with remote write access.
        let access = match access.contains(AccessFlags::REMOTE_WRITE) {
            true => access.union(AccessFlags::LOCAL_WRITE),
            false => access,
        };
        let addr = std::ptr::with_exposed_provenance_mut((mapping.addr() + offset) as usize);
        // SAFETY: the range is inside of the mapping, by the check above, and stays mapped until `drop` has
        // deregistered it. The access flags are bits of enum ibv_access_flags.
        let raw = unsafe { pd.context.lib.ibv_reg_mr(pd.raw(), addr, length, access.0 as i32) };
        let raw = object(raw).map_err(|source| match source.raw_os_error() {
            Some(libc::ENOMEM) => MemoryError::Register { len, memlock: memlock(), source },
            _ => MemoryError::Os { what: "registering memory", len, source },
        })?;
        // SAFETY: a region that was registered just now.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Ok(Self { pd: pd.clone(), raw, lkey, rkey, mapping })
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        // SAFETY: registered by `register`, deregistered only here.
        if let Err(error) = check(unsafe { self.pd.context.lib.ibv_dereg_mr(self.raw.as_ptr()) }) {
            tracing::error!(%error, "deregistering memory failed: it stays mapped until the process ends");
            std::mem::forget((self.pd.clone(), self.mapping.clone()));
        }
    }
}

/// The soft `RLIMIT_MEMLOCK`, as `ulimit -l` prints it: in KiB.
fn memlock() -> String {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: writes the struct when it succeeds.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, limit.as_mut_ptr()) } != 0 {
        return format!("unknown: {}", io::Error::last_os_error());
    }
    // SAFETY: written by the call that has succeeded.
    match unsafe { limit.assume_init() }.rlim_cur {
        libc::RLIM_INFINITY => "unlimited".to_owned(),
        bytes => format!("{} KiB", bytes / 1024),
    }
}
