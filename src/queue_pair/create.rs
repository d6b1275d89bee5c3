//! How queue pairs come into being: limits are checked, entries of the completion queues reserved (R4), and the provider
//! asked. What fails undoes what came before.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::options::limit_error;
use super::{QpConfig, QueuePair};
use crate::completion_queue::CompletionQueue;
use crate::device::ProtectionDomain;
use crate::error::QpError;
use crate::provider::{self, QpInit};
use crate::ring::{FirstCause, HalfId, NoEntries, Object, QpCore, Side, Tie, next_qp_generation};

impl QueuePair {
    /// `srq` counts it already; a failure takes that back.
    pub(super) fn create(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        config: QpConfig,
        srq: Option<&Arc<QpCore>>,
    ) -> Result<Self, QpError> {
        let made = Self::make(pd, send_cq, recv_cq, &config, srq);
        let (qp, (send_half, recv_half)) = made.inspect_err(|_| {
            if let Some(srq) = srq {
                srq.detach();
            }
        })?;
        let tie = Arc::new(Tie {
            qp_num: qp.qp_num(),
            generation: next_qp_generation(),
            cause: FirstCause::new(),
            closing: AtomicBool::new(false),
            shared: false,
        });
        let (s, r) = (send_cq.core(), recv_cq.core());
        let sides = (Side::new(s.clone(), send_half), Side::new(r.clone(), recv_half));
        let core = QpCore::new(Object::Pair(qp), tie, sides, pd.clone(), config.max_inline, srq.cloned());
        let this = Self { core, send_cq: send_cq.clone(), recv_cq: recv_cq.clone() };
        // Closed since the reservation, when it had no queue pair to close yet.
        if s.ring.lock().is_shut() || r.ring.lock().is_shut() {
            return Err(QpError::CqClosed);
        }
        Ok(this)
    }

    /// Checks, reserves entries of the completion queues, and has the provider make it.
    fn make(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        config: &QpConfig,
        srq: Option<&Arc<QpCore>>,
    ) -> Result<(provider::Qp, (HalfId, HalfId)), QpError> {
        let (s, r) = (send_cq.core(), recv_cq.core());
        if !s.device.same(pd.device()) || !r.device.same(pd.device()) {
            return Err(QpError::ForeignResource { what: "a completion queue and a protection domain" });
        }
        if let Some(device) = pd.device().gone() {
            return Err(QpError::DeviceGone { device });
        }
        let caps = pd.device().capabilities();
        for (what, depth) in [("the send depth", config.send_depth), ("the receive depth", config.recv_depth)]
        {
            if depth == 0 && (what == "the send depth" || srq.is_none()) {
                return Err(limit_error(what, 0, caps.max_qp_wr.into(), "ask for at least one"));
            }
            if depth > caps.max_qp_wr {
                let fix = "ask for fewer: waiting calls wait for room";
                return Err(limit_error(what, depth.into(), caps.max_qp_wr.into(), fix));
            }
        }
        if config.max_inline > caps.max_inline {
            let (asked, limit) = (config.max_inline.into(), caps.max_inline.into());
            return Err(limit_error("max_inline", asked, limit, "ask for fewer bytes"));
        }
        let halves = Self::reserve(send_cq, recv_cq, config)?;
        let init = QpInit {
            max_send_wr: config.send_depth,
            max_recv_wr: config.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: config.max_inline,
        };
        let (pd, send_cq, recv_cq) = (pd.provider(), s.provider(), r.provider());
        let made = match srq {
            None => pd.create_qp(send_cq, recv_cq, init),
            Some(srq) => srq
                .with_srq(|srq| pd.create_qp_on(send_cq, recv_cq, init, srq))
                .unwrap_or(Err(QpError::SrqClosed)),
        };
        made.map(|qp| (qp, halves)).inspect_err(|_| {
            s.release(halves.0, false);
            r.release(halves.1, false);
        })
    }

    fn reserve(
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        config: &QpConfig,
    ) -> Result<(HalfId, HalfId), QpError> {
        let (s, r) = (send_cq.core(), recv_cq.core());
        let (send, recv) = (config.send_depth, config.recv_depth);
        // What this queue pair has taken of the queue already, and what it asks of it in all.
        let refused = |e, taken: u32, send: u32, recv: u32| match e {
            NoEntries::Shut => QpError::CqClosed,
            NoEntries::TooSmall { capacity, committed } => {
                let (committed, asked) = (committed - taken, send.saturating_add(recv));
                QpError::CqTooSmall {
                    capacity,
                    committed,
                    asked,
                    send,
                    recv,
                    needed: committed.saturating_add(asked),
                }
            }
        };
        let same = Arc::ptr_eq(s, r);
        let send_half = s.ring.lock().reserve(false, send);
        let send_half = send_half.map_err(|e| refused(e, 0, send, if same { recv } else { 0 }))?;
        let recv_half = r.ring.lock().reserve(true, recv);
        recv_half.map(|recv_half| (send_half, recv_half)).map_err(|e| {
            s.release(send_half, false);
            if same { refused(e, send, send, recv) } else { refused(e, 0, 0, recv) }
        })
    }
}
