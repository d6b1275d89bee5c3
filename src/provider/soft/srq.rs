//! Shared receive queues: receives for whichever of several queue pairs has a message for them first.
//!
//! A queue pair that dies leaves what it has not taken. The lock of the queue is taken under that of a queue pair.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use super::member::QpShared;
use super::qp::refused;
use super::{SoftChannel, SoftPd, lock};
use crate::error::{PostError, QpError};
use crate::provider::RecvWr;
use crate::provider::events::ObjectId;

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SoftSrq {
    id: ObjectId,
    depth: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    receives: VecDeque<RecvWr>,
    /// The queue pairs that receive by it, to be woken when they wait for a receive.
    members: Vec<(Weak<QpShared>, Arc<SoftChannel>)>,
    /// One of them has found it empty.
    starved: bool,
}

impl SoftPd {
    pub(crate) fn create_srq(&self, depth: u32) -> Result<Arc<SoftSrq>, QpError> {
        Ok(Arc::new(SoftSrq { id: ObjectId::next(), depth: depth as usize, inner: Mutex::default() }))
    }
}

impl SoftSrq {
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    pub(super) fn join(&self, qp: &Arc<QpShared>, channel: &Arc<SoftChannel>) {
        let mut inner = lock(&self.inner);
        inner.members.retain(|(qp, _)| qp.strong_count() > 0);
        inner.members.push((Arc::downgrade(qp), channel.clone()));
    }

    /// The oldest receive. None: whoever posts the next one wakes the caller.
    pub(super) fn take(&self) -> Option<RecvWr> {
        let mut inner = lock(&self.inner);
        let taken = inner.receives.pop_front();
        inner.starved |= taken.is_none();
        taken
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let (posted, starved) = {
            let mut inner = lock(&self.inner);
            let room = self.depth - inner.receives.len();
            let taken = wrs.len().min(room);
            inner.receives.extend(&wrs[..taken]);
            let starved = taken > 0 && std::mem::take(&mut inner.starved);
            let posted = if taken == wrs.len() { Ok(()) } else { Err(refused(taken, libc::ENOMEM)) };
            (posted, if starved { inner.members.clone() } else { Vec::new() })
        };
        for (qp, channel) in starved {
            if let Some(qp) = qp.upgrade() {
                qp.receive_posted(&channel);
            }
        }
        posted
    }
}
