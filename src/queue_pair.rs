//! Queue pairs: creation, connection, and a method an operation. The work is in `ring`.

mod create;
mod options;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::completion_queue::CompletionQueue;
use crate::device::{ProtectionDomain, SoftTransport};
use crate::error::{OpError, QpError};
use crate::memory::{AnySlice, RemoteSlice};
use crate::provider::{self, QpConnect};
use crate::ring::{Batch, Buffer, Op, OpFuture, QpCore, Rejected};
use crate::shared_receive_queue::SharedReceiveQueue;

use options::limit_error;
pub use options::{ConnectOptions, QpConfig, QpEndpoint, QpPath, Role};

/// A reliable connected queue pair.
///
/// Its operations own their buffers until they complete, and give them back (R1). Share it by reference or in an
/// `Arc`. Dropping it closes it without blocking: what is outstanding is flushed, and the completion queue's driver
/// destroys it after the last completion.
///
/// Reading a buffer while an operation owns it does not compile:
///
/// ```compile_fail,E0382
/// # use landfall::{memory::{Local, RemoteSlice, Slice}, ring::QueuePair};
/// # async fn f(qp: &QueuePair, buf: Slice<Local>, to: RemoteSlice) {
/// let write = qp.write(buf, to);
/// println!("{}", buf[0]); // moved into the operation
/// write.await;
/// # }
/// ```
///
/// It comes back with the result:
///
/// ```
/// # use landfall::{memory::{Local, RemoteSlice, Slice}, ring::QueuePair};
/// # async fn f(qp: &QueuePair, buf: Slice<Local>, to: RemoteSlice) {
/// let (result, buf) = qp.write(buf, to).await;
/// println!("{result:?}, {}", buf[0]);
/// # }
/// ```
///
/// A buffer in an exposed region is no `[u8]` in safe code, since a peer may write it at any time:
///
/// ```compile_fail,E0308
/// # use landfall::memory::{Exposed, Slice};
/// fn f(buf: &Slice<Exposed>) -> &[u8] {
///     buf
/// }
/// ```
///
/// and it is not cloned while exclusive:
///
/// ```compile_fail,E0277
/// # use landfall::memory::{Local, Slice};
/// fn f(buf: &Slice<Local>) -> Slice<Local> {
///     Slice::<Local>::clone(buf)
/// }
/// ```
#[derive(Debug)]
pub struct QueuePair {
    core: Arc<QpCore>,
    // Keeps the queues open while the queue pair lives.
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
}

impl QueuePair {
    /// Creates a queue pair. `send_cq` and `recv_cq` may be the same; both need room for the depths (R4).
    ///
    /// It asks the driver, which takes microseconds, or milliseconds on a busy device: where a worker must not wait for
    /// that, call it in `spawn_blocking`.
    ///
    /// # Errors
    /// [`QpError::Limit`] for depths and inline sizes that the device has not, [`QpError::CqTooSmall`] with the capacity
    /// that would do, [`QpError::ForeignResource`], [`QpError::CqClosed`], [`QpError::DeviceGone`], [`QpError::Os`].
    pub fn new(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        config: QpConfig,
    ) -> Result<Self, QpError> {
        Self::create(pd, send_cq, recv_cq, config, None)
    }

    /// Creates a queue pair that receives by `srq`, on its completion queue. It has no receive queue of its own:
    /// [`QpConfig::recv_depth`] is of no account.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`QpError::SrqClosed`].
    pub fn with_shared_receives(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        srq: &SharedReceiveQueue,
        config: QpConfig,
    ) -> Result<Self, QpError> {
        if !srq.protection_domain().provider().is_same(pd.provider()) {
            return Err(QpError::ForeignResource { what: "a shared receive queue and a protection domain" });
        }
        if !srq.core().attach() {
            return Err(QpError::SrqClosed);
        }
        let config = QpConfig { recv_depth: 0, ..config };
        Self::create(pd, send_cq, srq.completion_queue(), config, Some(srq.core()))
    }

    /// Its number.
    pub fn qp_num(&self) -> u32 {
        self.core.tie.qp_num
    }

    /// The completion queue of its sends, writes and reads.
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// The completion queue of its receives: that of its shared receive queue, if it has one.
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// The protection domain that it is of.
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.core.pd
    }

    /// What the peer needs to connect to this queue pair. On the soft provider it holds the secret that lets its holder
    /// in: send it to the peer only.
    ///
    /// # Errors
    /// [`QpError::State`] when the queue pair is closed.
    pub fn endpoint(&self) -> Result<QpEndpoint, QpError> {
        let address = self.core.with_qp(provider::Qp::address).ok_or_else(|| self.closed("an endpoint"))?;
        Ok(QpEndpoint::new(address, self.core.pd.device().capabilities()))
    }

    /// What carries its bytes, and why. `None` while that is not known, and once the queue pair has been destroyed.
    ///
    /// The side that is [`Role::Active`] knows when it is connected; the other one, where it takes either transport of the soft
    /// provider, when its peer has come in: what it has received came that way.
    pub fn path(&self) -> Option<QpPath> {
        if !self.core.connected.load(Ordering::Acquire) {
            return None;
        }
        let (transport, reason) = self.core.with_qp(provider::Qp::path)?;
        (transport != SoftTransport::Auto.name()).then_some(QpPath { transport, reason })
    }

    /// Connects to `remote`, whose side connects to this one with the other role. Does not wait for the peer:
    /// operations can be submitted at once, and fail with `RetryExceeded` when the peer does not appear.
    ///
    /// # Cancel safety
    /// Dropping the future only stops waiting: the queue pair is connected, or fails, all the same.
    ///
    /// # Errors
    /// [`QpError::Limit`] for an option or an MTU out of range; [`QpError::Mismatch`] when one of the two devices keeps
    /// order and the other does not, or they have no transport in common; [`QpError::NoPath`] when the one that was asked for
    /// does not reach the peer; [`QpError::State`] when it was connected before, has failed or is closed;
    /// [`QpError::ManualConnect`] on a device that only RDMA_CM connects; [`QpError::Os`].
    pub async fn connect(
        &self,
        remote: &QpEndpoint,
        role: Role,
        options: ConnectOptions,
    ) -> Result<(), QpError> {
        options.check()?;
        let caps = self.core.pd.device().capabilities();
        let mtu = remote.mtu.min(caps.active_mtu);
        if !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096) {
            return Err(limit_error("the path MTU", mtu.into(), 4096, "one of 256, 512, 1024, 2048, 4096"));
        }
        if remote.ordered != caps.ordered {
            let name = |ordered| if ordered { "kept (RC)" } else { "not kept (SRD)" };
            return Err(QpError::Mismatch {
                what: "the order of messages",
                ours: name(caps.ordered),
                theirs: name(remote.ordered),
                fix: "open devices of one kind on both sides",
            });
        }
        let own = self.core.with_qp(provider::Qp::address).ok_or_else(|| self.closed("connected"))?;
        check_transports(SoftTransport::of_address(&own), remote.takes())?;
        if self.core.tie.is_closing() {
            return Err(self.closed("connected"));
        }
        let rd_atomic = caps.max_rd_atomic.min(remote.rd_atomic);
        let issues = options.max_rd_atomic.min(rd_atomic);
        let attr = QpConnect {
            remote: remote.address(),
            path_mtu: mtu,
            max_rd_atomic: issues,
            // The peer's option is not known here: what it issues at most is what both devices can.
            max_dest_rd_atomic: rd_atomic,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            min_rnr_timer: options.min_rnr_timer,
            active: role == Role::Active,
        };
        let core = self.core.clone();
        let connect = move || {
            let done = core.with_qp(|qp| qp.connect(&attr));
            if matches!(done, Some(Ok(()))) {
                core.set_ready(issues);
                // A software transport has something to do now, and no event says so.
                core.send.cq.nudge();
            }
            done
        };
        // A device may look up the peer's address in between: off the runtime's workers (R9).
        let blocks = self.core.with_qp(provider::Qp::connect_blocks) == Some(true);
        let done = match tokio::runtime::Handle::try_current() {
            Ok(runtime) if blocks => match runtime.spawn_blocking(connect).await {
                Ok(done) => done,
                Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                // The runtime is shutting down.
                Err(_) => return Err(QpError::CqClosed),
            },
            _ => connect(),
        };
        done.unwrap_or_else(|| Err(self.closed("connected")))
    }

    pub(crate) fn core(&self) -> &Arc<QpCore> {
        &self.core
    }

    pub(crate) fn closed(&self, wanted: &'static str) -> QpError {
        QpError::State { qp_num: self.qp_num(), state: "closed", wanted, fix: "create another queue pair" }
    }

    #[cfg(test)]
    pub(crate) fn event_id(&self) -> crate::provider::events::ObjectId {
        self.core.with_qp(provider::Qp::id).expect("it is not closed")
    }

    /// What failed first on this queue pair, once something has (R6).
    pub fn failure(&self) -> Option<OpError> {
        self.core.tie.cause.get().map(|e| (**e).clone())
    }

    // Operations.

    /// SEND: the whole of `buf`, into the peer's oldest receive.
    ///
    /// On RC it waits for a receive that is not there yet, [`ConnectOptions::rnr_retry`](crate::ring::ConnectOptions) times. iWARP
    /// knows no waiting: a message that finds no receive ends the connection. Post receives before the peer may send.
    pub fn send<B: Buffer>(&self, buf: B) -> OpFuture<B> {
        self.submit(Op::send(buf))
    }

    /// SEND with an immediate, which the peer gets as the same `u32`.
    pub fn send_imm<B: Buffer>(&self, buf: B, imm: u32) -> OpFuture<B> {
        self.submit(Op::send(buf).imm(imm))
    }

    /// RECV: one message of the peer. Receives complete in the order in which they were submitted.
    pub fn recv<B: Buffer>(&self, buf: B) -> OpFuture<B> {
        self.submit(Op::recv(buf))
    }

    /// WRITE: the whole of `buf`, to the start of `to`.
    ///
    /// On RC the data is in the peer's memory when this succeeds, on iWARP only handed over: a
    /// [`KvChannel`](crate::kv) is what tells of landing on every transport.
    pub fn write<B: Buffer>(&self, buf: B, to: RemoteSlice) -> OpFuture<B> {
        self.submit(Op::write(buf, to))
    }

    /// WRITE_WITH_IMM: as [`write`](Self::write), and completes a receive of the peer with the immediate.
    pub fn write_imm<B: Buffer>(&self, buf: B, to: RemoteSlice, imm: u32) -> OpFuture<B> {
        self.submit(Op::write(buf, to).imm(imm))
    }

    /// READ: the whole of `from`, to the start of `buf`.
    pub fn read<B: Buffer>(&self, buf: B, from: RemoteSlice) -> OpFuture<B> {
        self.submit(Op::read(buf, from))
    }

    /// FETCH_ADD: adds `add` to the number at `at`, wrapping. `buf` gets what was there before.
    ///
    /// Both have eight bytes, and `at` is aligned to eight. Atomic with respect to the atomics of every queue pair on the same
    /// device of the peer; with respect to the peer's own CPU only on the soft provider and on devices that say so
    /// (`IBV_ATOMIC_GLOB`). The numbers are in the byte order of the host in whose memory they are:
    ///
    /// ```
    /// # use landfall::{memory::{Local, RemoteSlice, Slice}, ring::QueuePair};
    /// # async fn f(qp: &QueuePair, buf: Slice<Local>, at: RemoteSlice) -> Option<u64> {
    /// let (result, buf) = qp.fetch_add(buf, at, 1).await;
    /// result.ok()?;
    /// Some(u64::from_ne_bytes(buf[..].try_into().ok()?))
    /// # }
    /// ```
    pub fn fetch_add<B: Buffer>(&self, buf: B, at: RemoteSlice, add: u64) -> OpFuture<B> {
        self.submit(Op::fetch_add(buf, at, add))
    }

    /// CMP_SWAP: stores `swap` at `at` if `compare` is there. `buf` gets what was there before; it was stored when that is
    /// `compare`. As [`fetch_add`](Self::fetch_add) in all else.
    pub fn compare_swap<B: Buffer>(&self, buf: B, at: RemoteSlice, compare: u64, swap: u64) -> OpFuture<B> {
        self.submit(Op::compare_swap(buf, at, compare, swap))
    }

    fn submit<B: Buffer>(&self, op: Op) -> OpFuture<B> {
        self.core.submit_future(op)
    }

    /// Submits an operation without ever waiting: when its queue is full it comes back with
    /// [`OpError::Full`].
    ///
    /// # Errors
    /// [`Rejected`] with the operation: also for one that is not allowed, or a queue pair that is not connected, has
    /// failed or is closed.
    #[allow(clippy::result_large_err)] // The operation comes back by value: no allocation.
    pub fn try_submit(&self, op: Op) -> Result<OpFuture<Option<AnySlice>>, Rejected> {
        self.core.try_submit(op)
    }

    /// A batch of operations for one doorbell, whose completions come from [`CompletionQueue::next`].
    pub fn batch(&self) -> Batch<'_> {
        Batch::new(&self.core)
    }

    // The end.

    /// Closes the queue pair and waits until it is destroyed. What is outstanding is flushed: operations end with
    /// [`OpError::Closed`] where they had not succeeded, and have their buffers.
    ///
    /// # Cancel safety
    /// The queue pair is closed at the first poll, or when the future is dropped; dropping it only stops waiting.
    pub async fn close(self) {
        self.core.close();
        self.core.destroyed().await;
    }

    /// Destroys the queue pair at once, without waiting for what is outstanding, whose operations end when it is destroyed:
    /// on the soft provider when this returns, on an RDMA device soon after, from a thread that waits for the driver.
    /// Completions that a device still reports for them are counted as [stale](crate::ring::CqStats::stale), and match
    /// nothing.
    ///
    /// This is what a deadline needs to get its buffers back. [`close`](Self::close) is gentler and nearly as fast.
    pub fn kill(self) {
        self.core.kill(None);
    }
}

/// Refuses a peer whose queue pair takes nothing that ours takes. `None` is one that is not of a soft device.
fn check_transports(ours: Option<SoftTransport>, theirs: Option<SoftTransport>) -> Result<(), QpError> {
    let fits = match (ours, theirs) {
        (Some(ours), Some(theirs)) => ours.meets(theirs),
        (ours, theirs) => ours == theirs,
    };
    if fits {
        return Ok(());
    }
    let name = |takes: Option<SoftTransport>| takes.map_or("an RDMA device's", SoftTransport::of_device);
    Err(QpError::Mismatch {
        what: "the transport",
        ours: name(ours),
        theirs: name(theirs),
        fix: "choose the same on both sides (soft-auto takes tcp and shm)",
    })
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.core.close();
    }
}

#[cfg(test)]
mod tests;
