//! The provider boundary: what a transport must offer, shaped like libibverbs.
//!
//! Everything above this module is the same for every transport. Everything below it is one of the variants of
//! the enums here, which are matched once for a batch of work, not once for a work request. The surface is
//! synchronous and never blocks: `post`, `poll`, `arm`, and a descriptor that becomes readable.
//!
//! ```text
//!   Channel   completion channel: a descriptor; events of its CQs   (ibv_comp_channel)
//!   Cq        completion queue: poll(&mut [Cqe]), arm()             (ibv_cq)
//!   Qp        queue pair: post_send(&WrChain), post_recv, connect   (ibv_qp)
//!   Pd, Mr    protection domain, memory region: lkey and rkey       (ibv_pd, ibv_mr)
//! ```
//!
//! A software transport has no hardware that works in the background: its I/O happens inside [`Cq::poll`], on the
//! thread that polls. That is why [`Cq::arm`] can answer [`Armed::More`].

// The soft provider's errors are completions: without another one nothing is dispatched.
#[cfg_attr(not(feature = "verbs"), allow(dead_code))]
pub(crate) mod events;
pub(crate) mod limits;
#[cfg(feature = "verbs")]
mod raw;
pub(crate) mod soft;
#[cfg(feature = "verbs")]
pub(crate) mod verbs;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::background::Lane;
use crate::device::Capabilities;
use crate::error::{DeviceError, MemoryError, PostError, QpError};
use crate::memory::{Exposed, Mapping, Region};
use crate::pages::{Checked, Pages};
use events::{Events, ObjectId};

/// Access flags of a memory region, with the bits of `enum ibv_access_flags`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct AccessFlags(pub(crate) u32);

impl AccessFlags {
    pub(crate) const LOCAL_WRITE: Self = Self(1);
    pub(crate) const REMOTE_WRITE: Self = Self(1 << 1);
    pub(crate) const REMOTE_READ: Self = Self(1 << 2);
    pub(crate) const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Of the range of optional flags: a device that does not know it does without.
    pub(crate) const RELAXED_ORDERING: Self = Self(1 << 20);

    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // For drivers that do not know an optional flag.
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A scatter/gather element: `length` bytes at a virtual address, under a local key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
}

/// What a send work request does. `imm` is in host order; providers put it on the wire big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendOp {
    Send {
        imm: Option<u32>,
    },
    Write {
        remote_addr: u64,
        rkey: u32,
        imm: Option<u32>,
    },
    Read {
        remote_addr: u64,
        rkey: u32,
    },
    /// On the eight bytes at `remote_addr`, which is a multiple of eight. What was there before comes into the elements, of
    /// eight bytes in all, in this host's byte order. So does the next.
    FetchAdd {
        remote_addr: u64,
        rkey: u32,
        add: u64,
    },
    /// Stores `swap` where `compare` is.
    CompareSwap {
        remote_addr: u64,
        rkey: u32,
        compare: u64,
        swap: u64,
    },
}

impl SendOp {
    pub(crate) const fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }

    /// Something comes back from the peer: a READ or an atomic.
    pub(crate) const fn has_answer(self) -> bool {
        self.is_atomic() || matches!(self, Self::Read { .. })
    }

    /// What a completion of it says.
    pub(crate) const fn opcode(self) -> WcOpcode {
        match self {
            Self::Send { .. } => WcOpcode::Send,
            Self::Write { .. } => WcOpcode::Write,
            Self::Read { .. } => WcOpcode::Read,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::CompareSwap { .. } => WcOpcode::CompareSwap,
        }
    }
}

/// One send work request of a [`WrChain`]. Its elements are `sges[sge_start..][..sge_len]` of the chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) sge_start: u32,
    pub(crate) sge_len: u16,
    pub(crate) signaled: bool,
    /// Copy the payload at the post; the elements need no lkey and may be reused when the post returns.
    pub(crate) inline: bool,
    /// A WRITE of many pieces, which are `pages[n]` of the chain: its element and its target are the places of the first block of the
    /// first layer. For queue pairs that say so, see [`Qp::takes_pages`].
    pub(crate) pages: Option<u32>,
}

/// A chain of send work requests, posted with one doorbell. Reused, so that steady state allocates nothing.
#[derive(Default, Debug)]
pub(crate) struct WrChain {
    pub(crate) wrs: Vec<SendWr>,
    pub(crate) sges: Vec<Sge>,
    pub(crate) pages: Vec<Arc<Checked>>,
}

impl WrChain {
    pub(crate) fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
        self.pages.clear();
    }

    pub(crate) fn push(&mut self, wr_id: u64, op: SendOp, sges: &[Sge], signaled: bool, inline: bool) {
        let sge_start = self.sges.len() as u32;
        self.sges.extend_from_slice(sges);
        let sge_len = sges.len() as u16;
        self.wrs.push(SendWr { wr_id, op, sge_start, sge_len, signaled, inline, pages: None });
    }

    /// The WRITE that was pushed last is of `pages`.
    pub(crate) fn is_of(&mut self, pages: Arc<Checked>) {
        if let Some(last) = self.wrs.last_mut() {
            last.pages = Some(self.pages.len() as u32);
            self.pages.push(pages);
        }
    }

    pub(crate) fn pages_of(&self, wr: &SendWr) -> Option<&Arc<Checked>> {
        self.pages.get(wr.pages? as usize)
    }

    pub(crate) fn sges_of(&self, wr: &SendWr) -> &[Sge] {
        &self.sges[wr.sge_start as usize..][..wr.sge_len as usize]
    }
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    /// `None` receives immediates and empty messages only.
    pub(crate) sge: Option<Sge>,
}

/// Status of a completion: `enum ibv_wc_status`, by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// `IBV_WC_SUCCESS`. No [`OpError`](crate::error::OpError) has it.
    Success,
    /// `IBV_WC_LOC_LEN_ERR`: a received message is longer than the receive buffer.
    LocalLength,
    /// `IBV_WC_LOC_QP_OP_ERR`: the local queue pair could not execute the request as it was posted.
    LocalQpOperation,
    /// `IBV_WC_LOC_PROT_ERR`: a local element is not covered by its lkey.
    LocalProtection,
    /// `IBV_WC_WR_FLUSH_ERR`: the queue pair was in the error state before this request was executed.
    Flushed,
    /// `IBV_WC_BAD_RESP_ERR`: the peer's answer makes no sense.
    BadResponse,
    /// `IBV_WC_LOC_ACCESS_ERR`: the local memory of a peer's request does not allow it.
    LocalAccess,
    /// `IBV_WC_REM_INV_REQ_ERR`: the responder found the request malformed (for instance, too long for its receive).
    RemoteInvalidRequest,
    /// `IBV_WC_REM_ACCESS_ERR`: the rkey, its bounds or its access flags do not allow this.
    RemoteAccess,
    /// `IBV_WC_REM_OP_ERR`: the responder could not complete the request, for a reason of its own.
    RemoteOperation,
    /// `IBV_WC_RETRY_EXC_ERR`: the peer does not answer.
    RetryExceeded,
    /// `IBV_WC_RNR_RETRY_EXC_ERR`: the peer posted no receive in time.
    RnrRetryExceeded,
    /// `IBV_WC_FATAL_ERR`: the device cannot go on.
    Fatal,
    /// `IBV_WC_GENERAL_ERR`: none of the others.
    General,
    /// A status that this crate has no name for.
    Other(u32),
}

impl std::fmt::Display for WcStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = match self {
            Self::Success => "success",
            Self::LocalLength => "local length error: the message is longer than the receive buffer",
            Self::LocalQpOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error: an element is not covered by its lkey",
            Self::Flushed => "flushed: the queue pair had failed before",
            Self::BadResponse => "bad response: the peer answered out of protocol",
            Self::LocalAccess => "local access error: the region does not allow this",
            Self::RemoteInvalidRequest => {
                "remote invalid request: the peer's receive is too short, or the request is malformed"
            }
            Self::RemoteAccess => {
                "remote access error: the rkey, its bounds or its access flags do not allow this"
            }
            Self::RemoteOperation => "remote operation error: the peer could not execute the request",
            Self::RetryExceeded => "retry exceeded: the peer does not answer",
            Self::RnrRetryExceeded => {
                "receiver-not-ready retries exceeded: the peer posted no receive in time"
            }
            Self::Fatal => "fatal device error",
            Self::General => "general transport error",
            Self::Other(code) => return write!(f, "status {code}"),
        };
        f.write_str(words)
    }
}

/// What a completion is of: `enum ibv_wc_opcode`. Only valid when the status is `Success`, as in verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WcOpcode {
    Send,
    Write,
    Read,
    FetchAdd,
    CompareSwap,
    Recv,
    RecvWriteWithImm,
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    pub(crate) wr_id: u64,
    pub(crate) qp_num: u32,
    pub(crate) status: WcStatus,
    pub(crate) vendor_err: u32,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
}

impl Default for Cqe {
    fn default() -> Self {
        Self {
            wr_id: 0,
            qp_num: 0,
            status: WcStatus::Success,
            vendor_err: 0,
            opcode: WcOpcode::Send,
            byte_len: 0,
            imm: None,
        }
    }
}

/// The answer of [`Cq::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Armed {
    /// The next completion makes the channel's descriptor readable. Poll once more before sleeping.
    Armed,
    /// There is work that needs no event (a software transport stopped at its budget): yield, then poll again.
    More,
}

/// The state of a queue pair, as `enum ibv_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QpState {
    Init,
    Rts,
    Err,
}

/// What a peer must know to connect to a queue pair. Exchanged by the bootstrap; encoded in `connect::hello`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct QpAddress {
    pub(crate) qp_num: u32,
    /// First packet sequence number, 24 random bits.
    pub(crate) psn: u32,
    pub(crate) lid: u16,
    /// The port's GID; on the soft provider an IPv6 or an IPv4-mapped address.
    pub(crate) gid: [u8; 16],
    /// Soft provider only: the TCP port on which this queue pair accepts its peer, and the secret the peer shows.
    pub(crate) soft_port: u16,
    pub(crate) soft_key: u64,
    /// Soft provider only: under which name it accepts a peer of its host, random; 0 when it takes no shared memory.
    pub(crate) soft_local: u64,
}

/// Attributes of a queue pair at creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpInit {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline: u32,
}

/// Attributes of INIT→RTR→RTS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpConnect {
    pub(crate) remote: QpAddress,
    /// Path MTU in bytes: the smaller of the two ports' active MTUs (B2). One of 256, 512, 1024, 2048, 4096.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))] // TCP has its own segments.
    pub(crate) path_mtu: u32,
    /// READs that we may have outstanding, and that we serve.
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    /// Local ACK time-out: 4.096 µs × 2^timeout, times `retry_cnt`. 7 retries mean "for ever" on rxe: never 7.
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    /// Receiver-not-ready retries; 7 is for ever, so never 7. `min_rnr_timer` is the IB code (12 = 0.64 ms).
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    /// This side dials where a transport has to dial (soft). Exactly one side of a connection is active.
    pub(crate) active: bool,
}

/// Attributes of a connection that the connection manager makes, as this side wants them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CmAttr {
    /// READs that we may have outstanding, at most.
    pub(crate) max_rd_atomic: u8,
    /// READs of the peer that we serve, at most.
    pub(crate) max_dest_rd_atomic: u8,
    /// ACK time-out code: 4.096 µs × 2^timeout.
    pub(crate) timeout: u8,
    /// Never 7, which some drivers take as "for ever"; nor is `rnr_retry`.
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
}

// Below, each enum has one variant a provider.

#[derive(Clone, Debug)]
pub(crate) enum Device {
    Soft(Arc<soft::SoftDevice>),
    #[cfg(feature = "verbs")]
    Verbs(Arc<verbs::VerbsDevice>),
}

/// A completion channel. All its queues belong to one driver (see `reactor`).
#[derive(Clone, Debug)]
pub(crate) enum Channel {
    Soft(Arc<soft::SoftChannel>),
    #[cfg(feature = "verbs")]
    Verbs(Arc<verbs::VerbsChannel>),
}

#[derive(Clone, Debug)]
pub(crate) enum Pd {
    Soft(Arc<soft::SoftPd>),
    #[cfg(feature = "verbs")]
    Verbs(Arc<verbs::VerbsPd>),
}

/// A registered memory region. Deregisters on drop; memory stays mapped until the last in-flight use is over.
#[derive(Debug)]
pub(crate) enum Mr {
    Soft(soft::SoftMr),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsMr),
}

#[derive(Debug)]
pub(crate) enum Cq {
    Soft(soft::SoftCq),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsCq),
}

/// A queue pair. [`Qp::destroy`] says when no payload of its peer is written any more; dropping it destroys it too, but
/// soon, where that blocks.
#[derive(Debug)]
pub(crate) enum Qp {
    Soft(soft::SoftQp),
    #[cfg(feature = "verbs")]
    Verbs(verbs::VerbsQp),
}

/// A shared receive queue: receives for several queue pairs, which keep it. It is destroyed after the last of them;
/// what it holds then never completes.
#[derive(Debug)]
pub(crate) enum Srq {
    Soft(Arc<soft::SoftSrq>),
    #[cfg(feature = "verbs")]
    Verbs(Arc<verbs::VerbsSrq>),
}

impl Device {
    pub(crate) fn capabilities(&self) -> &Capabilities {
        match self {
            Self::Soft(d) => d.capabilities(),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => d.capabilities(),
        }
    }

    /// What it says out of turn.
    pub(crate) fn events(&self) -> &Arc<Events> {
        match self {
            Self::Soft(d) => d.events(),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => d.events(),
        }
    }

    /// Refuses a device that is gone.
    fn check_present(&self) -> Result<(), DeviceError> {
        match self.events() {
            events if events.is_gone() => Err(DeviceError::DeviceGone { device: events.device() }),
            _ => Ok(()),
        }
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        self.check_present()?;
        match self {
            Self::Soft(d) => Ok(Pd::Soft(d.alloc_pd()?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => Ok(Pd::Verbs(d.alloc_pd()?)),
        }
    }

    pub(crate) fn create_channel(&self) -> Result<Channel, DeviceError> {
        self.check_present()?;
        match self {
            Self::Soft(d) => Ok(Channel::Soft(d.create_channel()?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => Ok(Channel::Verbs(d.create_channel()?)),
        }
    }
}

impl Pd {
    /// Whether two handles are of the same protection domain.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Soft(a), Self::Soft(b)) => Arc::ptr_eq(a, b),
            #[cfg(feature = "verbs")]
            (Self::Verbs(a), Self::Verbs(b)) => Arc::ptr_eq(a, b),
            #[cfg(feature = "verbs")]
            _ => false,
        }
    }

    /// Whether peers of this host copy from memory that is registered here, when it can be lent to them.
    pub(crate) fn lends_memory(&self) -> bool {
        match self {
            Self::Soft(pd) => pd.lends_memory(),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => false,
        }
    }

    /// Registers `mapping`. Blocking on real devices (pins pages): call it off the runtime's workers.
    pub(crate) fn reg_mr(
        &self,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<Mr, MemoryError> {
        match self {
            Self::Soft(pd) => Ok(Mr::Soft(pd.reg_mr(mapping, offset, len, access)?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => Ok(Mr::Verbs(pd.reg_mr(mapping, offset, len, access)?)),
        }
    }

    pub(crate) fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, init: QpInit) -> Result<Qp, QpError> {
        match (self, send_cq, recv_cq) {
            (Self::Soft(pd), Cq::Soft(s), Cq::Soft(r)) => Ok(Qp::Soft(pd.create_qp(s, r, init)?)),
            #[cfg(feature = "verbs")]
            (Self::Verbs(pd), Cq::Verbs(s), Cq::Verbs(r)) => Ok(Qp::Verbs(pd.create_qp(s, r, init)?)),
            #[cfg(feature = "verbs")]
            _ => Err(QpError::ForeignResource { what: "a completion queue and a protection domain" }),
        }
    }
}

impl Pd {
    /// Creates a shared receive queue of `depth` receives with one element each.
    pub(crate) fn create_srq(&self, depth: u32) -> Result<Srq, QpError> {
        match self {
            Self::Soft(pd) => Ok(Srq::Soft(pd.create_srq(depth)?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => Ok(Srq::Verbs(pd.create_srq(depth)?)),
        }
    }

    /// As [`create_qp`](Self::create_qp), with the receives of `srq`. `init` asks for none.
    pub(crate) fn create_qp_on(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        init: QpInit,
        srq: &Srq,
    ) -> Result<Qp, QpError> {
        match (self, send_cq, recv_cq, srq) {
            (Self::Soft(pd), Cq::Soft(s), Cq::Soft(r), Srq::Soft(srq)) => {
                Ok(Qp::Soft(pd.create_qp_on(s, r, init, Some(srq))?))
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(pd), Cq::Verbs(s), Cq::Verbs(r), Srq::Verbs(srq)) => {
                Ok(Qp::Verbs(pd.create_qp_on(s, r, init, Some(srq))?))
            }
            #[cfg(feature = "verbs")]
            _ => Err(QpError::ForeignResource { what: "a shared receive queue and a protection domain" }),
        }
    }
}

impl Srq {
    /// The queue in its device's events.
    pub(crate) fn id(&self) -> ObjectId {
        match self {
            Self::Soft(s) => s.id(),
            #[cfg(feature = "verbs")]
            Self::Verbs(s) => s.id(),
        }
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match self {
            Self::Soft(s) => s.post_recv(wrs),
            #[cfg(feature = "verbs")]
            Self::Verbs(s) => s.post_recv(wrs),
        }
    }

    /// As [`Qp::lane`].
    pub(crate) fn lane(&self) -> Option<Arc<Lane>> {
        match self {
            Self::Soft(_) => None,
            #[cfg(feature = "verbs")]
            Self::Verbs(s) => Some(s.lane().clone()),
        }
    }

    /// Destroys the queue, when no queue pair keeps it: no device touches the memory of what it held when this returns.
    pub(crate) fn destroy(self) {
        match self {
            Self::Soft(s) => drop(s),
            #[cfg(feature = "verbs")]
            Self::Verbs(s) => verbs::VerbsSrq::destroy(s),
        }
    }
}

impl Channel {
    /// Becomes readable when a queue of this channel that was armed has something to poll.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Soft(c) => c.fd(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.fd(),
        }
    }

    /// Takes and acknowledges every pending event, until the descriptor would block (R3).
    pub(crate) fn drain_events(&self) -> io::Result<()> {
        match self {
            Self::Soft(c) => c.drain_events(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.drain_events(),
        }
    }

    /// Creates a completion queue with room for `capacity` entries.
    pub(crate) fn create_cq(&self, capacity: u32) -> Result<Cq, DeviceError> {
        match self {
            Self::Soft(c) => Ok(Cq::Soft(c.create_cq(capacity)?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => Ok(Cq::Verbs(c.create_cq(capacity)?)),
        }
    }
}

impl Mr {
    pub(crate) fn lkey(&self) -> u32 {
        match self {
            Self::Soft(m) => m.lkey(),
            #[cfg(feature = "verbs")]
            Self::Verbs(m) => m.lkey(),
        }
    }

    pub(crate) fn rkey(&self) -> u32 {
        match self {
            Self::Soft(m) => m.rkey(),
            #[cfg(feature = "verbs")]
            Self::Verbs(m) => m.rkey(),
        }
    }
}

impl Cq {
    /// Takes up to `out.len()` completions. On a software transport this is also where I/O happens, a bounded
    /// slice of it a call.
    pub(crate) fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        match self {
            Self::Soft(c) => c.poll(out),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.poll(out),
        }
    }

    /// Whether polling uses an arm up: so on a software transport, whose I/O is in the poll. A device stays armed until
    /// it has raised the event.
    pub(crate) fn poll_disarms(&self) -> bool {
        match self {
            Self::Soft(_) => true,
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => false,
        }
    }

    /// The queue in its device's events.
    pub(crate) fn id(&self) -> ObjectId {
        match self {
            Self::Soft(c) => c.id(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.id(),
        }
    }

    /// Requests an event for the next completion.
    pub(crate) fn arm(&self) -> io::Result<Armed> {
        match self {
            Self::Soft(c) => c.arm(),
            #[cfg(feature = "verbs")]
            Self::Verbs(c) => c.arm(),
        }
    }
}

/// What of registered memory the peer of a queue pair may reach, within what keys allow: asked before anything is read or written
/// for it.
pub(crate) trait Exposure: std::fmt::Debug + Send + Sync {
    /// Whether all of these bytes may be reached, by one of `REMOTE_WRITE`, `REMOTE_READ` and `REMOTE_ATOMIC`.
    fn exposes(&self, addr: u64, len: u64, access: AccessFlags) -> bool;

    /// Whether the target of every piece of `pages`, whose first block is at `addr`, may be written. `None` where that cannot be said
    /// without looking at more than `most` pieces.
    fn exposes_pages(&self, addr: u64, pages: &Pages, most: u64) -> Option<bool> {
        let exposes = |(at, len): (u64, u32)| self.exposes(at, len.into(), AccessFlags::REMOTE_WRITE);
        (pages.pieces() <= most).then(|| pages.targets_of(addr).all(exposes))
    }
}

impl Qp {
    /// From here on the peer reaches what `exposure` says, and nothing else. An RDMA device does not ask: there keys alone say it.
    pub(crate) fn expose(&self, exposure: Arc<dyn Exposure>) {
        match self {
            Self::Soft(q) => q.expose(exposure),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => {}
        }
    }

    /// Whether all that is being copied for the peer, beside the program, is exposed to it still. What is copied from here on is.
    pub(crate) fn keeps_to_exposure(&self) -> bool {
        match self {
            Self::Soft(q) => q.keeps_to_exposure(),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => true,
        }
    }

    pub(crate) fn qp_num(&self) -> u32 {
        match self {
            Self::Soft(q) => q.qp_num(),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.qp_num(),
        }
    }

    /// The queue pair in its device's events.
    pub(crate) fn id(&self) -> ObjectId {
        match self {
            Self::Soft(q) => q.id(),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.id(),
        }
    }

    /// Where [`destroy`](Self::destroy) belongs, since it may block. `None` where it does not.
    pub(crate) fn lane(&self) -> Option<Arc<Lane>> {
        match self {
            Self::Soft(_) => None,
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => Some(q.lane().clone()),
        }
    }

    /// Destroys the queue pair. When this returns, no payload of its peer is written any more.
    pub(crate) fn destroy(self) {
        match self {
            Self::Soft(q) => drop(q),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.destroy(),
        }
    }

    /// The address that the peer needs. Stable from creation on.
    pub(crate) fn address(&self) -> QpAddress {
        match self {
            Self::Soft(q) => q.address(),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.address(),
        }
    }

    /// Whether [`connect`](Self::connect) may block, and belongs off the runtime's workers.
    pub(crate) fn connect_blocks(&self) -> bool {
        match self {
            Self::Soft(_) => false,
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => true,
        }
    }

    /// Why the peer cannot be given what is in `region`, memory of a GPU. `None` where it can, or that is not known yet.
    pub(crate) fn why_not_send(&self, region: &Region<Exposed>) -> Option<String> {
        match self {
            Self::Soft(q) => q.why_not_send(region),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => None,
        }
    }

    /// From here on memory of GPUs takes these ways only to a peer on this host, and is taken only so. An RDMA device knows neither.
    pub(crate) fn set_gpu_ways(&self, ways: crate::cuda::GpuWays) {
        match self {
            Self::Soft(q) => q.set_gpu_ways(ways),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => {}
        }
    }

    /// What went to and from memory of GPUs.
    pub(crate) fn gpu_traffic(&self) -> crate::cuda::GpuTraffic {
        match self {
            Self::Soft(q) => q.gpu_traffic(),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => Default::default(),
        }
    }

    /// What carries its bytes (`tcp`, `shm` or `verbs`), and why that. The dialling side knows it once it is connected, the other
    /// one when the peer has come in; it stays known after the end.
    pub(crate) fn path(&self) -> (&'static str, String) {
        match self {
            Self::Soft(q) => q.path(),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => ("verbs", "the device is an RDMA device".to_owned()),
        }
    }

    /// INIT→RTR→RTS. Does not wait for the peer; a device may wait for the network to resolve its address.
    pub(crate) fn connect(&self, attr: &QpConnect) -> Result<(), QpError> {
        match self {
            Self::Soft(q) => q.connect(attr),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.connect(attr),
        }
    }

    /// Posts the whole chain with one doorbell, or says which request was the first not posted.
    pub(crate) fn post_send(&self, chain: &WrChain) -> Result<(), PostError> {
        match self {
            Self::Soft(q) => q.post_send(chain),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => match chain.wrs.iter().position(|wr| wr.pages.is_some()) {
                None => q.post_send(chain),
                // It has said that it takes none.
                Some(index) => Err(PostError { index, source: io::ErrorKind::Unsupported.into() }),
            },
        }
    }

    /// Bytes of the largest WRITE of pages from memory of `lkey` that it takes now. 0 where it takes none: asked of the connection,
    /// whose two ends have to have it.
    pub(crate) fn takes_pages(&self, lkey: u32) -> u32 {
        match self {
            Self::Soft(q) => q.takes_pages(lkey),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => 0,
        }
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match self {
            Self::Soft(q) => q.post_recv(wrs),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.post_recv(wrs),
        }
    }

    /// Moves to ERR. Every outstanding request completes, with [`WcStatus::Flushed`] unless it had failed by itself.
    pub(crate) fn set_error(&self) -> Result<(), QpError> {
        match self {
            Self::Soft(q) => q.set_error(),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.set_error(),
        }
    }

    pub(crate) fn state(&self) -> QpState {
        match self {
            Self::Soft(q) => q.state(),
            #[cfg(feature = "verbs")]
            Self::Verbs(q) => q.state(),
        }
    }
}
