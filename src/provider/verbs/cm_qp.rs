//! Queue pairs that RDMA_CM connects.
//!
//! They are created in contexts of our own, so that librdmacm is used without its queue pairs: it says what INIT, RTR and
//! RTS need, and the moves are made here. On iWARP the driver makes them by itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cm::CmId;
use super::device::{Fabric, Port, VerbsDevice};
use super::qp::{self, RawQp, VerbsQp};
use super::sys::*;
use crate::error::QpError;
use crate::provider::CmAttr;

/// A queue pair as the connection manager holds it. One whose owner is gone is in the error state.
#[derive(Clone)]
pub(crate) struct VerbsCmQp {
    raw: Arc<RawQp>,
    device: Arc<VerbsDevice>,
}

impl std::fmt::Debug for VerbsCmQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsCmQp").field("qp_num", &self.raw.qp_num()).finish_non_exhaustive()
    }
}

impl VerbsQp {
    /// The way in of the connection manager.
    pub(crate) fn for_cm(&self) -> VerbsCmQp {
        VerbsCmQp { raw: self.raw.clone(), device: self.device.clone() }
    }
}

/// Why a queue pair is not ready.
#[derive(Debug)]
pub(crate) enum NotReady {
    /// RDMA_CM has no attributes for it: the connection is over before it was there.
    Over(io::Error),
    /// The device refuses to move it.
    Refused(QpError),
}

impl VerbsCmQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.raw.qp_num()
    }

    /// Whether it is of the device and the port of that handle, which may have been opened by itself: RDMA_CM knows queue
    /// pairs by their numbers.
    pub(crate) fn is_of(&self, device: &VerbsDevice) -> bool {
        self.device.name == device.name && self.device.port().number == device.port().number
    }

    /// Refuses a queue pair that was connected before, or has failed.
    pub(crate) fn check_new(&self) -> Result<(), QpError> {
        let state = match self.raw.state.load(Ordering::Acquire) {
            qp::INIT => return Ok(()),
            qp::RTS => "RTS",
            _ => "ERR",
        };
        let fix = "a queue pair connects once; create another one";
        Err(QpError::State { qp_num: self.qp_num(), state, wanted: "connected", fix })
    }

    /// INIT→RTR→RTS, on InfiniBand and RoCE. May block.
    pub(crate) fn ready(&self, id: &CmId, own: &CmAttr) -> Result<(), NotReady> {
        let moving = |what| move |source| NotReady::Refused(QpError::Os { what, source });
        // Once more INIT: the partition is RDMA_CM's choice.
        let (mut attr, _) = id.qp_attr(IBV_QPS_INIT).map_err(NotReady::Over)?;
        self.raw
            .init_in(attr.port_num, attr.pkey_index, self.device.capabilities().atomics)
            .map_err(moving("moving a queue pair to INIT, as RDMA_CM wants it"))?;
        let mask;
        (attr, mask) = id.qp_attr(IBV_QPS_RTR).map_err(NotReady::Over)?;
        attr.max_dest_rd_atomic = own.max_dest_rd_atomic;
        attr.min_rnr_timer = own.min_rnr_timer;
        self.device.port().mark(&mut attr.ah_attr);
        self.raw
            .modify(&mut attr, mask)
            .map_err(moving("moving a queue pair to RTR, as RDMA_CM wants it"))?;
        let mask;
        (attr, mask) = id.qp_attr(IBV_QPS_RTS).map_err(NotReady::Over)?;
        attr.max_rd_atomic = own.max_rd_atomic;
        attr.timeout = own.timeout;
        attr.retry_cnt = own.retry_cnt;
        attr.rnr_retry = own.rnr_retry;
        self.raw.modify(&mut attr, mask).map_err(moving("moving a queue pair to RTS, as RDMA_CM wants it"))
    }

    /// Sends the request for it. Software iWARP waits here for its TCP connection, for minutes if it must.
    pub(crate) fn request(&self, id: &CmId, attr: &CmAttr, private: &[u8]) -> io::Result<()> {
        if !self.is_iwarp() {
            return self.raw.while_live(|| id.connect(self.qp_num(), attr, private));
        }
        id.keep(self.raw.connecting()?);
        let requested = id.connect(self.qp_num(), attr, private);
        if requested.is_err() {
            id.let_go();
        }
        requested
    }

    /// Accepts a request with it. May block for a short while.
    pub(crate) fn accept(&self, id: &CmId, attr: &CmAttr, private: &[u8]) -> io::Result<()> {
        self.raw.while_live(|| id.accept(self.qp_num(), attr, private))
    }

    /// RDMA_CM's driver moves it to RTS.
    pub(crate) fn is_iwarp(&self) -> bool {
        self.device.port().fabric == Fabric::Iwarp
    }

    /// It is in RTS: moved there by us, or by the driver. Unless it has failed since.
    pub(crate) fn connected(&self, id: &CmId) {
        id.let_go();
        let (init, rts) = (qp::INIT, qp::RTS);
        let _ = self.raw.state.compare_exchange(init, rts, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl Port {
    /// How packets are marked, where the user has said so; else as RDMA_CM's route has it.
    fn mark(&self, attr: &mut ibv_ah_attr) {
        if self.service_level != 0 {
            attr.sl = self.service_level;
        }
        if self.traffic_class != 0 {
            attr.grh.traffic_class = self.traffic_class;
        }
        if self.flow_label != 0 {
            attr.grh.flow_label = self.flow_label;
        }
    }
}
