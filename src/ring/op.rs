//! Building operations, and the checks before they are posted (R10).

use super::buffer::Buffer;
use super::slots::{Wr, WrKind};
use crate::device::ProtectionDomain;
use crate::error::OpError;
use crate::memory::{AnySlice, RemoteSlice};
use crate::provider::{SendOp, Sge};

/// An operation that has not been submitted. It owns its buffer.
///
/// ```no_run
/// # use landfall::{memory::{Local, RemoteSlice, Slice}, ring::{Op, QueuePair}};
/// # async fn f(qp: &QueuePair, a: Slice<Local>, b: Slice<Local>, remote: RemoteSlice) -> Result<(), Box<dyn std::error::Error>> {
/// let mut batch = qp.batch();
/// batch.push(Op::write(a, remote).user_data(1)).map_err(|r| r.error)?;
/// batch.push(Op::send(b).imm(7).user_data(2)).map_err(|r| r.error)?;
/// batch.submit(); // one doorbell
/// while let Some(done) = qp.send_cq().next().await {
///     println!("{}: {:?}", done.user_data, done.result);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "an operation does nothing until it is submitted"]
pub struct Op {
    kind: OpKind,
    imm: Option<u32>,
    buf: Option<AnySlice>,
    user_data: u64,
}

#[derive(Clone, Copy, Debug)]
enum OpKind {
    Send,
    Recv,
    Write(RemoteSlice),
    Read(RemoteSlice),
    FetchAdd { at: RemoteSlice, add: u64 },
    CompareSwap { at: RemoteSlice, compare: u64, swap: u64 },
}

/// Bytes that an atomic works on.
const WORD: u64 = size_of::<u64>() as u64;

impl Op {
    /// SEND: the whole buffer, into the peer's oldest receive.
    pub fn send(buf: impl Buffer) -> Self {
        Self::new(OpKind::Send, buf)
    }

    /// RECV: one message of the peer, at most the buffer's length. `()` receives immediates and empty messages.
    pub fn recv(buf: impl Buffer) -> Self {
        Self::new(OpKind::Recv, buf)
    }

    /// WRITE: the whole buffer, to the start of `to`.
    pub fn write(buf: impl Buffer, to: RemoteSlice) -> Self {
        Self::new(OpKind::Write(to), buf)
    }

    /// READ: the whole of `from`, to the start of the buffer.
    pub fn read(buf: impl Buffer, from: RemoteSlice) -> Self {
        Self::new(OpKind::Read(from), buf)
    }

    /// FETCH_ADD: adds `add` to the number at `at`, wrapping, and puts what was there before into the buffer. Both are
    /// eight bytes; `at` is a multiple of eight in its owner's memory.
    ///
    /// Numbers are in the byte order of the host in whose memory they are: read them by [`u64::from_ne_bytes`].
    pub fn fetch_add(buf: impl Buffer, at: RemoteSlice, add: u64) -> Self {
        Self::new(OpKind::FetchAdd { at, add }, buf)
    }

    /// CMP_SWAP: stores `swap` at `at` if `compare` is there, and puts what was there before into the buffer: it was stored
    /// when that is `compare`. Sizes, alignment and byte order are those of [`fetch_add`](Self::fetch_add).
    pub fn compare_swap(buf: impl Buffer, at: RemoteSlice, compare: u64, swap: u64) -> Self {
        Self::new(OpKind::CompareSwap { at, compare, swap }, buf)
    }

    fn new(kind: OpKind, buf: impl Buffer) -> Self {
        Self { kind, imm: None, buf: buf.erase(), user_data: 0 }
    }

    /// Sends an immediate with a SEND or a WRITE: the same `u32` at the peer, which consumes a receive.
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = Some(imm);
        self
    }

    /// A number that comes back with the completion. The ring does not look at it.
    pub fn user_data(mut self, user_data: u64) -> Self {
        self.user_data = user_data;
        self
    }

    /// The buffer, given back.
    pub fn into_buf(self) -> Option<AnySlice> {
        self.buf
    }

    pub(super) fn is_recv(&self) -> bool {
        matches!(self.kind, OpKind::Recv)
    }

    /// The buffer, to be handed on with the work request; see [`put_back`](Self::put_back).
    pub(super) fn take_buf(&mut self) -> Option<AnySlice> {
        self.buf.take()
    }

    pub(super) fn put_back(self, buf: Option<AnySlice>) -> Self {
        Self { buf, ..self }
    }

    pub(super) fn into_parts(self) -> (Option<AnySlice>, u64) {
        (self.buf, self.user_data)
    }

    /// The peer's memory that it touches.
    fn remote(&self) -> Option<RemoteSlice> {
        match self.kind {
            OpKind::Send | OpKind::Recv => None,
            OpKind::Write(at) | OpKind::Read(at) => Some(at),
            OpKind::FetchAdd { at, .. } | OpKind::CompareSwap { at, .. } => Some(at),
        }
    }

    /// The work request, when the operation is one that this device and these ranges allow.
    pub(super) fn check(&self, pd: &ProtectionDomain) -> Result<Wr, OpError> {
        let caps = pd.device().capabilities();
        if self.buf.as_ref().is_some_and(|buf| !buf.is_of(pd.provider())) {
            return Err(OpError::ForeignBuffer);
        }
        let sge = self.buf.as_ref().map(AnySlice::sge);
        let have = sge.map_or(0, |s| s.len);
        if let OpKind::FetchAdd { at, .. } | OpKind::CompareSwap { at, .. } = self.kind {
            check_atomic(pd, &at, have)?;
        }
        let len = match self.kind {
            OpKind::Read(from) => {
                if from.len > have {
                    return Err(refused(
                        "a READ into a buffer",
                        from.len,
                        have,
                        "give a buffer as long as the source",
                    ));
                }
                from.len
            }
            OpKind::Write(to) if have > to.len => {
                return Err(refused(
                    "a WRITE to a remote range",
                    have,
                    to.len,
                    "write at most the range's length",
                ));
            }
            // A receive buffer may be longer than any message.
            OpKind::Recv => have.min(caps.max_msg_size),
            _ => have,
        };
        if let Some(at) = self.remote()
            && at.addr.checked_add(at.len).is_none()
        {
            return Err(refused(
                "a remote range's length",
                at.len,
                u64::MAX - at.addr,
                "the range is not the peer's",
            ));
        }
        let limit = caps.max_msg_size.min(u64::from(u32::MAX));
        if len > limit {
            return Err(refused(
                "the bytes of a message",
                len,
                limit,
                "split it, see Capabilities::max_msg_size",
            ));
        }
        if self.imm.is_some() {
            if !matches!(self.kind, OpKind::Send | OpKind::Write(_)) {
                return Err(refused(
                    "an immediate with a READ, an atomic or a receive",
                    1,
                    0,
                    "only SEND and WRITE carry one",
                ));
            }
            if !caps.immediate {
                return Err(refused("an immediate", 1, 0, "this device has none: WRITE, then SEND"));
            }
        }
        let imm = self.imm;
        let kind = match self.kind {
            OpKind::Recv => WrKind::Recv,
            OpKind::Send => WrKind::Send(SendOp::Send { imm }),
            OpKind::Write(to) => WrKind::Send(SendOp::Write { remote_addr: to.addr, rkey: to.rkey, imm }),
            OpKind::Read(from) => {
                if caps.max_rd_atomic == 0 {
                    return Err(refused(
                        "outstanding READs",
                        1,
                        0,
                        "this device has no READ: let the peer WRITE",
                    ));
                }
                WrKind::Send(SendOp::Read { remote_addr: from.addr, rkey: from.rkey })
            }
            OpKind::FetchAdd { at, add } => {
                WrKind::Send(SendOp::FetchAdd { remote_addr: at.addr, rkey: at.rkey, add })
            }
            OpKind::CompareSwap { at, compare, swap } => {
                let (remote_addr, rkey) = (at.addr, at.rkey);
                WrKind::Send(SendOp::CompareSwap { remote_addr, rkey, compare, swap })
            }
        };
        let sge = sge.filter(|_| len > 0).map(|s| Sge { addr: s.addr, len: len as u32, lkey: s.lkey });
        let device = self.buf.as_ref().is_some_and(AnySlice::is_device);
        Ok(Wr { kind, sge, device })
    }
}

/// What an atomic needs: a device that has them, and eight bytes on both sides, aligned at the peer's.
fn check_atomic(pd: &ProtectionDomain, at: &RemoteSlice, have: u64) -> Result<(), OpError> {
    let caps = pd.device().capabilities();
    if !caps.atomics || caps.max_rd_atomic == 0 {
        return Err(OpError::Unsupported {
            what: "an atomic operation",
            device: pd.device().name().to_owned(),
            fix: "let the owner of the memory count: send it a message",
        });
    }
    for (what, len) in [("the buffer of an atomic", have), ("the remote range of an atomic", at.len)] {
        if len != WORD {
            return Err(refused(what, len, WORD, "give exactly eight bytes"));
        }
    }
    match at.addr % WORD {
        0 => Ok(()),
        off => {
            Err(refused("the bytes of an atomic's address beyond a multiple of eight", off, 0, "align it"))
        }
    }
}

fn refused(what: &'static str, asked: u64, limit: u64, fix: &'static str) -> OpError {
    OpError::Refused { what, asked, limit, fix }
}

/// An operation that was not accepted, given back with the reason (in [`source()`](std::error::Error::source) and in
/// `error`).
#[derive(Debug, thiserror::Error)]
#[error("the operation was not accepted")]
pub struct Rejected {
    /// Why.
    #[source]
    pub error: OpError,
    /// The operation, to be tried again or taken apart with [`Op::into_buf`].
    pub op: Op,
}
