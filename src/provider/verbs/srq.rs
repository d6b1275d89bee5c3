//! Shared receive queues.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::calls::{self, object};
use super::context::{Ended, RawPd, user_pointer};
use super::device::{Fabric, VerbsPd};
use super::post::{Scratch, index_of};
use super::sys::{ibv_srq, ibv_srq_attr, ibv_srq_init_attr};
use crate::background::Lane;
use crate::error::{PostError, QpError};
use crate::provider::RecvWr;
use crate::provider::events::ObjectId;

/// A shared receive queue. Its queue pairs keep it.
pub(crate) struct VerbsSrq {
    pd: Arc<RawPd>,
    raw: NonNull<ibv_srq>,
    id: ObjectId,
    fabric: Fabric,
    scratch: Mutex<Scratch>,
    in_place: bool,
}

// SAFETY: libibverbs' calls on a queue may come from any thread; providers lock what posts touch, and no call but the
// one in `drop` ends its life.
unsafe impl Send for VerbsSrq {}
// SAFETY: as above.
unsafe impl Sync for VerbsSrq {}

impl std::fmt::Debug for VerbsSrq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VerbsSrq")
    }
}

impl VerbsPd {
    pub(crate) fn create_srq(&self, depth: u32) -> Result<Arc<VerbsSrq>, QpError> {
        let id = ObjectId::next();
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: user_pointer(id), attr };
        // SAFETY: the domain is live, and the `Arc` below keeps it so until the queue is destroyed.
        let raw = object(unsafe { self.raw.context.lib.ibv_create_srq(self.raw.raw(), &mut init) })
            .map_err(|source| QpError::Os { what: "creating a shared receive queue", source })?;
        let (pd, fabric) = (self.raw.clone(), self.device.port().fabric);
        Ok(Arc::new(VerbsSrq { pd, raw, id, fabric, scratch: Mutex::default(), in_place: false }))
    }
}

impl VerbsSrq {
    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.raw.as_ptr()
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Destroys it before this returns, when this is the last handle: no queue pair keeps it.
    pub(crate) fn destroy(mut this: Arc<Self>) {
        if let Some(srq) = Arc::get_mut(&mut this) {
            srq.in_place = true;
        }
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let first = scratch.link_recvs(wrs, self.fabric);
        // SAFETY: the queue is live; the list and its elements are in `scratch`, which is locked. Their memory is
        // registered and kept until they complete, or the queue is destroyed, by whoever built the list (R1).
        let refused = match unsafe { calls::post_srq_recv(self.raw(), first) } {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        let index = index_of(first, wrs.len(), refused.bad).unwrap_or_else(|| {
            // Nobody knows which requests the device has. They count as posted, so that their memory is kept.
            tracing::error!(error = %refused.error, "a refused post does not say how far it came");
            wrs.len()
        });
        Err(PostError { index, source: refused.error })
    }
}

impl VerbsSrq {
    /// As of a queue pair.
    pub(crate) fn lane(&self) -> &Arc<Lane> {
        &self.pd.context.lane
    }
}

impl Drop for VerbsSrq {
    /// Elsewhere, unless somebody waits; see [`VerbsSrq::destroy`].
    fn drop(&mut self) {
        let ended = Ended { context: self.pd.context.clone(), raw: self.raw, keep: self.pd.clone() };
        let destroy = move || {
            ended.destroy("a shared receive queue", |lib, srq| {
                // SAFETY: created by `create_srq`, destroyed only here; its queue pairs held an `Arc` of it and are gone.
                unsafe { lib.ibv_destroy_srq(srq) }
            });
        };
        if self.in_place { destroy() } else { self.lane().run(destroy) }
    }
}
