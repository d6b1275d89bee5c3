//! The raw escape hatch: pointers to libibverbs' own objects, for what this crate does not offer.
//!
//! All public methods of it are here. `None` on the soft provider, which has no such objects.
//!
//! A pointer is to an object that this crate owns. It is valid as long as the value that it was asked of, and for a queue pair
//! until that is closed or killed. Calls that only ask (`ibv_query_qp`, a vendor's `*dv_init_obj`) are always fine. The caller
//! must not
//!
//! - destroy, deregister, close or free the object, or what it is made of;
//! - post to a queue pair, change its state, or attach it to anything: the ring counts what it has posted (R4), and its
//!   completions would be foreign;
//! - poll or resize a completion queue, ask for its events, take or acknowledge them: the reactor does, and would miss some
//!   (R3);
//! - fork and use them in the child.
//!
//! New objects may be made from a context or a domain (a shared receive queue, a flow, another kind of queue pair). They are
//! the caller's, and have to be gone before the device or the domain is dropped.

use std::ffi::c_void;

use crate::completion_queue::CompletionQueue;
use crate::device::{Device, ProtectionDomain};
use crate::memory::{Kind, Region};
use crate::queue_pair::QueuePair;

impl Device {
    /// Its `struct ibv_context *`. `None` on the soft provider.
    ///
    /// Valid as long as a handle of the device or something made from it. Do not close it.
    pub fn as_raw_context(&self) -> Option<*mut c_void> {
        self.provider().as_raw()
    }
}

impl ProtectionDomain {
    /// Its `struct ibv_pd *`. `None` on the soft provider.
    ///
    /// Valid as long as a handle of the domain or something made from it. What is made from it by hand has to be gone before.
    pub fn as_raw_pd(&self) -> Option<*mut c_void> {
        self.provider().as_raw()
    }
}

impl<K: Kind> Region<K> {
    /// Its `struct ibv_mr *`. `None` on the soft provider.
    ///
    /// Valid as long as the region or a slice of it. Do not deregister or register it anew: operations go by its keys.
    pub fn as_raw_mr(&self) -> Option<*mut c_void> {
        self.provider().as_raw()
    }
}

impl CompletionQueue {
    /// Its `struct ibv_cq *`. `None` on the soft provider.
    ///
    /// Valid as long as a handle of the queue or a queue pair of it. Do not poll, arm or resize it, or take its events: its
    /// driver does, and operations would never end.
    pub fn as_raw_cq(&self) -> Option<*mut c_void> {
        self.core().provider().as_raw()
    }
}

impl QueuePair {
    /// Its `struct ibv_qp *`. `None` on the soft provider, and once it has been destroyed.
    ///
    /// Valid until the queue pair is closed, killed or dropped. Asking is fine (`ibv_query_qp`). Do not post to it, change its
    /// state or destroy it: the ring counts what it has posted, and takes other completions for stale ones.
    pub fn as_raw_qp(&self) -> Option<*mut c_void> {
        self.core().with_qp(|qp| qp.as_raw()).flatten()
    }
}
