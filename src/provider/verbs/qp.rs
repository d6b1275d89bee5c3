//! Queue pairs: creation, INIT→RTR→RTS, the error state, the end. Posting is in `post.rs`.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::calls::{check, object};
use super::context::{Ended, RawPd, user_pointer};
use super::cq::{RawCq, VerbsCq};
use super::device::{Fabric, Port, VerbsDevice, VerbsPd};
use super::map;
use super::post::Scratch;
use super::srq::VerbsSrq;
use super::sys::*;
use crate::background::Lane;
use crate::error::QpError;
use crate::provider::events::ObjectId;
use crate::provider::{QpAddress, QpConnect, QpInit, QpState};
use crate::random::random_psn;

// Where a queue pair stands, as far as this side knows.
pub(super) const INIT: u8 = 0;
pub(super) const RTS: u8 = 1;
pub(super) const ERR: u8 = 2;

/// A packet sequence number, and a queue pair's number, have 24 bits.
const BITS_24: u32 = 0xff_ffff;

/// A queue pair of libibverbs, with what it needs.
pub(super) struct RawQp {
    raw: NonNull<ibv_qp>,
    id: ObjectId,
    qp_num: u32,
    pub(super) state: Arc<AtomicU8>,
    /// `ibv_modify_qp` writes to the object: one at a time, and not after its end.
    life: Mutex<Life>,
    pd: Arc<RawPd>,
    send_cq: Arc<RawCq>,
    recv_cq: Arc<RawCq>,
    srq: Option<Arc<VerbsSrq>>,
}

/// Whether there is a queue pair, and who destroys it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Live,
    /// iWARP's RDMA_CM is connecting it by its number, and does not let go of it until the peer has answered.
    Connecting,
    /// Its owner has dropped it meanwhile: it is in ERR, and destroyed after that.
    Abandoned,
    Destroyed,
}

// SAFETY: libibverbs' calls on a queue pair may come from any thread; providers lock what posts touch, `life`
// orders the changes of state, and no call but the one in `destroy_now` ends its life.
unsafe impl Send for RawQp {}
// SAFETY: as above.
unsafe impl Sync for RawQp {}

impl RawQp {
    /// A reliable connected queue pair, in RESET. Its requests are signalled one by one.
    pub(super) fn create(
        pd: &Arc<RawPd>,
        send_cq: &Arc<RawCq>,
        recv_cq: &Arc<RawCq>,
        init: QpInit,
    ) -> io::Result<Self> {
        Self::create_on(pd, send_cq, recv_cq, init, None)
    }

    /// The same, with the receives of `srq`.
    fn create_on(
        pd: &Arc<RawPd>,
        send_cq: &Arc<RawCq>,
        recv_cq: &Arc<RawCq>,
        init: QpInit,
        srq: Option<&Arc<VerbsSrq>>,
    ) -> io::Result<Self> {
        let id = ObjectId::next();
        let mut attr = ibv_qp_init_attr {
            qp_context: user_pointer(id),
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: srq.map_or(std::ptr::null_mut(), |srq| srq.raw()),
            cap: ibv_qp_cap {
                max_send_wr: init.max_send_wr,
                max_recv_wr: init.max_recv_wr,
                max_send_sge: init.max_send_sge,
                max_recv_sge: init.max_recv_sge,
                max_inline_data: init.max_inline,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are live and of one context, and the `Arc`s below keep them so until the queue pair is destroyed.
        let raw = object(unsafe { pd.context.lib.ibv_create_qp(pd.raw(), &mut attr) })?;
        // SAFETY: a queue pair that was created just now.
        let qp_num = unsafe { raw.as_ref().qp_num };
        let this = Self {
            raw,
            id,
            qp_num,
            state: Arc::new(AtomicU8::new(INIT)),
            life: Mutex::new(Life::Live),
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.cloned(),
        };
        for cq in [send_cq, recv_cq] {
            cq.watch(qp_num, &this.state);
        }
        Ok(this)
    }

    pub(super) fn raw(&self) -> *mut ibv_qp {
        self.raw.as_ptr()
    }

    pub(super) fn qp_num(&self) -> u32 {
        self.qp_num
    }

    pub(super) fn modify(&self, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> io::Result<()> {
        let life = self.life();
        if matches!(*life, Life::Abandoned | Life::Destroyed) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.modify_now(attr, mask)
    }

    /// To the error state.
    fn fail(&self, life: MutexGuard<'_, Life>) -> io::Result<()> {
        if matches!(*life, Life::Abandoned | Life::Destroyed) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.modify_now(&mut attributes(IBV_QPS_ERR), IBV_QP_STATE)?;
        self.state.store(ERR, Ordering::Release);
        Ok(())
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock of a life that is not over.
    fn modify_now(&self, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> io::Result<()> {
        // SAFETY: the queue pair is live, and nobody else modifies it.
        check(unsafe { self.pd.context.lib.ibv_modify_qp(self.raw(), attr, mask as c_int) })
    }

    /// Under the lock of a life that is not over, which it ends.
    fn destroy_now(&self, life: &mut Life) {
        *life = Life::Destroyed;
        // Both may be one queue, which is told once.
        let second = (!Arc::ptr_eq(&self.send_cq, &self.recv_cq)).then_some(&self.recv_cq);
        let queues = || std::iter::once(&self.send_cq).chain(second);
        queues().for_each(|cq| cq.forget(self.qp_num, &self.state));
        let keep = (self.pd.clone(), self.send_cq.clone(), self.recv_cq.clone(), self.srq.clone());
        let ended = Ended { context: self.pd.context.clone(), raw: self.raw, keep };
        ended.destroy("a queue pair", |lib, qp| {
            // SAFETY: created by `create_on`, destroyed only here and once.
            unsafe { lib.ibv_destroy_qp(qp) }
        });
        queues().for_each(|cq| cq.qp_destroyed(self.qp_num));
    }

    /// Calls RDMA_CM with the number of this queue pair, which stays its own for as long.
    pub(super) fn while_live<T>(&self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let life = self.life();
        if *life != Life::Live {
            return Err(io::ErrorKind::NotConnected.into());
        }
        call()
    }

    /// As [`while_live`](Self::while_live), until the result is dropped.
    pub(super) fn connecting(self: &Arc<Self>) -> io::Result<Connecting> {
        let mut life = self.life();
        if *life != Life::Live {
            return Err(io::ErrorKind::NotConnected.into());
        }
        *life = Life::Connecting;
        Ok(Connecting(self.clone()))
    }

    /// Its owner has ended it.
    fn is_over(&self) -> bool {
        matches!(*self.life(), Life::Abandoned | Life::Destroyed)
    }

    /// The owner's end of it. No device touches its memory any more when this returns.
    fn destroy(&self) {
        let mut life = self.life();
        match *life {
            Life::Live => self.destroy_now(&mut life),
            Life::Connecting => {
                *life = Life::Abandoned;
                let _ = self.modify_now(&mut attributes(IBV_QPS_ERR), IBV_QP_STATE);
                self.state.store(ERR, Ordering::Release);
            }
            Life::Abandoned | Life::Destroyed => {}
        }
    }

    /// RESET→INIT: receives can be posted from now on.
    pub(super) fn init(&self, port: u8, atomics: bool) -> io::Result<()> {
        self.init_in(port, 0, atomics)
    }

    /// The same, and INIT→INIT, in a partition.
    pub(super) fn init_in(&self, port: u8, pkey_index: u16, atomics: bool) -> io::Result<()> {
        let mut attr = attributes(IBV_QPS_INIT);
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        // What peers may do at most; each region's own flags decide.
        attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        if atomics {
            attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
        }
        self.modify(&mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
    }

    /// INIT→RTR: receives from `connect.remote` from now on.
    pub(super) fn ready_to_receive(&self, port: &Port, connect: &QpConnect, mtu: ibv_mtu) -> io::Result<()> {
        let mut attr = attributes(IBV_QPS_RTR);
        attr.path_mtu = mtu;
        attr.dest_qp_num = connect.remote.qp_num;
        attr.rq_psn = connect.remote.psn & BITS_24;
        attr.max_dest_rd_atomic = connect.max_dest_rd_atomic;
        attr.min_rnr_timer = connect.min_rnr_timer;
        attr.ah_attr.port_num = port.number;
        attr.ah_attr.dlid = connect.remote.lid;
        attr.ah_attr.sl = port.service_level;
        if port.needs_grh(&connect.remote) {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid.raw = connect.remote.gid;
            attr.ah_attr.grh.sgid_index = port.gid_index;
            attr.ah_attr.grh.hop_limit = 64;
            attr.ah_attr.grh.traffic_class = port.traffic_class;
            attr.ah_attr.grh.flow_label = port.flow_label;
        }
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)
    }

    /// RTR→RTS: sends from now on.
    pub(super) fn ready_to_send(&self, connect: &QpConnect, psn: u32) -> io::Result<()> {
        let mut attr = attributes(IBV_QPS_RTS);
        attr.sq_psn = psn & BITS_24;
        attr.timeout = connect.timeout;
        attr.retry_cnt = connect.retry_cnt;
        attr.rnr_retry = connect.rnr_retry;
        attr.max_rd_atomic = connect.max_rd_atomic;
        let mask = IBV_QP_STATE
            | IBV_QP_SQ_PSN
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
    }

    /// What the driver says of its state. siw says RESET, always.
    fn query(&self) -> io::Result<ibv_qp_state> {
        let mut attr = attributes(IBV_QPS_RESET);
        // SAFETY: plain integers and null pointers, for which zero is a value.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair is live; both structs are written by the call.
        check(unsafe {
            self.pd.context.lib.ibv_query_qp(self.raw(), &mut attr, IBV_QP_STATE as c_int, &mut init)
        })?;
        Ok(attr.qp_state)
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// Keeps a queue pair for a connect of iWARP, which the driver makes. The owner can drop it meanwhile without waiting: what is
/// not connected yet, and is in ERR, is never connected. Dropping this may block then: the queue pair is destroyed here.
pub(super) struct Connecting(Arc<RawQp>);

impl Connecting {
    /// The owner has dropped the queue pair.
    pub(super) fn is_abandoned(&self) -> bool {
        *self.0.life() == Life::Abandoned
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        let mut life = self.0.life();
        match *life {
            Life::Abandoned => self.0.destroy_now(&mut life),
            Life::Connecting => *life = Life::Live,
            Life::Live | Life::Destroyed => {}
        }
    }
}

pub(super) fn attributes(state: ibv_qp_state) -> ibv_qp_attr {
    // SAFETY: plain integers and a union of them, for which zero is a value.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// A reliable connected queue pair.
pub(crate) struct VerbsQp {
    /// Shared with the connection manager while that connects it.
    pub(super) raw: Arc<RawQp>,
    pub(super) scratch: Mutex<Scratch>,
    pub(super) device: Arc<VerbsDevice>,
    psn: u32,
}

impl std::fmt::Debug for VerbsQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsQp").field("qp_num", &self.raw.qp_num).finish_non_exhaustive()
    }
}

impl VerbsPd {
    pub(crate) fn create_qp(
        &self,
        send_cq: &VerbsCq,
        recv_cq: &VerbsCq,
        init: QpInit,
    ) -> Result<VerbsQp, QpError> {
        self.create_qp_on(send_cq, recv_cq, init, None)
    }

    pub(crate) fn create_qp_on(
        &self,
        send_cq: &VerbsCq,
        recv_cq: &VerbsCq,
        init: QpInit,
        srq: Option<&Arc<VerbsSrq>>,
    ) -> Result<VerbsQp, QpError> {
        let ours = |cq: &VerbsCq| Arc::ptr_eq(&cq.raw.context, &self.raw.context);
        if !ours(send_cq) || !ours(recv_cq) {
            // Providers take the objects of a context for their own.
            return Err(QpError::ForeignResource { what: "a completion queue and a protection domain" });
        }
        let os = |what| move |source| QpError::Os { what, source };
        let psn = random_psn().map_err(os("drawing a packet sequence number"))?;
        let raw = RawQp::create_on(&self.raw, &send_cq.raw, &recv_cq.raw, init, srq)
            .map_err(os("creating a queue pair"))?;
        let atomics = self.device.capabilities().atomics;
        raw.init(self.device.port().number, atomics).map_err(os("moving a queue pair to INIT"))?;
        let raw = Arc::new(raw);
        Ok(VerbsQp { raw, scratch: Mutex::default(), device: self.device.clone(), psn })
    }
}

impl Drop for VerbsQp {
    /// Elsewhere, since it may be a worker that drops it and nobody waits (R9); see [`VerbsQp::destroy`]. Not left to
    /// `raw`, which the connection manager may still hold.
    fn drop(&mut self) {
        if !self.raw.is_over() {
            let raw = self.raw.clone();
            self.lane().run(move || raw.destroy());
        }
    }
}

impl VerbsQp {
    pub(crate) fn id(&self) -> ObjectId {
        self.raw.id
    }

    pub(super) fn fabric(&self) -> Fabric {
        self.device.port().fabric
    }

    /// Where it is destroyed: that waits for the device.
    pub(crate) fn lane(&self) -> &Arc<Lane> {
        &self.raw.pd.context.lane
    }

    /// Blocks until the driver has let go.
    pub(crate) fn destroy(self) {
        self.raw.destroy();
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.raw.qp_num
    }

    /// Its `ibv_qp`.
    pub(crate) fn as_raw(&self) -> *mut c_void {
        self.raw.raw().cast()
    }

    pub(crate) fn address(&self) -> QpAddress {
        let port = self.device.port();
        QpAddress {
            qp_num: self.raw.qp_num,
            psn: self.psn,
            lid: port.lid,
            gid: port.gid,
            ..QpAddress::default()
        }
    }

    /// INIT→RTR→RTS. On RoCE the kernel resolves the peer's address here.
    pub(crate) fn connect(&self, connect: &QpConnect) -> Result<(), QpError> {
        let qp_num = self.raw.qp_num;
        let wrong = |state, fix| Err(QpError::State { qp_num, state, wanted: "connected", fix });
        match self.raw.state.load(Ordering::Acquire) {
            INIT => {}
            RTS => return wrong("RTS", "connect a queue pair once; create another one"),
            _ => return wrong("ERR", "create another queue pair"),
        }
        let Some(mtu) = map::mtu_code(connect.path_mtu) else {
            return Err(QpError::Limit {
                what: "the path MTU",
                asked: connect.path_mtu.into(),
                limit: 4096,
                fix: "one of 256, 512, 1024, 2048, 4096",
            });
        };
        if connect.remote.qp_num > BITS_24 {
            return Err(QpError::Limit {
                what: "the peer's queue pair number",
                asked: connect.remote.qp_num.into(),
                limit: BITS_24.into(),
                fix: "the peer's endpoint is not of an RDMA device; use one provider on both sides",
            });
        }
        let refused = |what, source: io::Error| match self.device.no_manual_connect() {
            Some((cause, fix)) => QpError::ManualConnect { qp_num, what, cause, fix, source },
            None => QpError::Os { what, source },
        };
        self.raw
            .ready_to_receive(self.device.port(), connect, mtu)
            .map_err(|e| refused("moving a queue pair to RTR", e))?;
        self.raw.ready_to_send(connect, self.psn).map_err(|e| refused("moving a queue pair to RTS", e))?;
        // Unless it has failed since.
        let _ = self.raw.state.compare_exchange(INIT, RTS, Ordering::AcqRel, Ordering::Acquire);
        Ok(())
    }

    /// At once; or soon, while somebody else moves it: on RoCE the kernel may be looking for the peer's address, for a second
    /// and more, and whoever calls this has no time (R9).
    pub(crate) fn set_error(&self) -> Result<(), QpError> {
        let life = match self.raw.life.try_lock() {
            Ok(life) => life,
            Err(TryLockError::Poisoned(life)) => life.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let raw = self.raw.clone();
                self.lane().run(move || {
                    // One that has ended meanwhile needs nothing.
                    let _ = raw.fail(raw.life());
                });
                return Ok(());
            }
        };
        let failed = self.raw.fail(life);
        failed.map_err(|source| QpError::Os { what: "moving a queue pair to ERR", source })
    }

    /// By what this side did and saw; where that is not all, by asking the driver.
    pub(crate) fn state(&self) -> QpState {
        match self.raw.state.load(Ordering::Acquire) {
            ERR => QpState::Err,
            known => match self.raw.query() {
                Ok(IBV_QPS_ERR | IBV_QPS_SQE) => QpState::Err,
                _ if known == RTS => QpState::Rts,
                _ => QpState::Init,
            },
        }
    }
}

impl Port {
    /// RoCE always has a global route header; InfiniBand only beyond its subnet.
    fn needs_grh(&self, remote: &QpAddress) -> bool {
        self.fabric != Fabric::InfiniBand || remote.lid == 0 || self.gid[..8] != remote.gid[..8]
    }
}
