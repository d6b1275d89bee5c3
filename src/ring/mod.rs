//! The ring: operations in, completions out, in the manner of io_uring.
//!
//! ```text
//!   QueuePair ── Op ──▶ slot (owns the buffer) ── one doorbell ──▶ device
//!                        ▲                                           │
//!   OpFuture / next() ◀──┴──────── driver: poll, arm, poll ◀─────────┘  CompletionQueue
//! ```
//!
//! An operation is submitted in one of two ways, and that decides where its end is told:
//!
//! - **A future an operation**: `qp.write(buf, to).await` gives the outcome and the buffer. The operation is submitted
//!   by the call, not by the first poll, so that several overlap when they are made first and awaited later.
//! - **A batch**: [`QueuePair::batch`], [`Batch::push`] with a [`user_data`](Op::user_data) each, [`Batch::submit`]:
//!   one doorbell for all. Their completions, and only theirs, come from [`CompletionQueue::next`].
//!
//! Every operation is signalled and ends exactly once (R2). A queue pair posts at most as many as its queues hold; what
//! comes above that waits in order, inside of the ring ([`OpFuture`], [`Batch::push_wait`]), or comes back as
//! [`OpError::Full`] ([`Batch::push`], [`QueuePair::try_submit`]).
//!
//! ```
//! use landfall::device::Device;
//! use landfall::memory::{Access, Memory};
//! use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, QpConfig, QueuePair, Role};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("soft-default")?;
//! let pd = device.alloc_pd()?;
//! let cq = CompletionQueue::new(&device, CqConfig::new(64))?;
//! let a = QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16))?;
//! let b = QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16))?;
//! // Here both are in one process; else the endpoints, which have serde, travel by a connection of your own.
//! a.connect(&b.endpoint()?, Role::Active, ConnectOptions::default()).await?;
//! b.connect(&a.endpoint()?, Role::Passive, ConnectOptions::default()).await?;
//!
//! // b shows memory, and waits for an immediate. a writes to it.
//! let target = pd.register_exposed(Memory::anonymous(4096), Access::WRITE).await?;
//! let notified = b.recv(());
//! let mut source = pd.register_local(Memory::anonymous(4096)).await?.into_slice();
//! source[..5].copy_from_slice(b"hello");
//! let (done, _source) = a.write_imm(source, target.remote().whole(), 7).await;
//! assert_eq!(done?.bytes, 4096);
//!
//! let (received, ()) = notified.await;
//! assert_eq!(received?.imm, Some(7));
//! let mut bytes = [0; 5];
//! target.slice(..5)?.copy_out(0, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok(()) }
//! ```
//!
//! # Send, Sync
//!
//! | type | `Send` | `Sync` | |
//! |---|---|---|---|
//! | [`CompletionQueue`] | yes | yes | `Clone`: the same queue |
//! | [`QueuePair`], [`SharedReceiveQueue`] | yes | yes | methods take `&self`; share it in an `Arc` |
//! | [`OpFuture`] | yes | yes | may be awaited elsewhere than where it was made |
//! | [`Op`], [`Completion`], [`Rejected`] | yes | yes | |
//! | [`Batch`] | yes | yes | borrows its queue pair |
//!
//! # Cancel safety
//!
//! | dropped | what happens |
//! |---|---|
//! | [`OpFuture`], posted | the device finishes it; the buffer is released then; nobody is told |
//! | [`OpFuture`], waiting for room | it is never posted; the buffer is dropped |
//! | [`Batch`] | what was not submitted is not submitted; buffers are dropped |
//! | [`Batch::push_wait`], waiting | the operation is not submitted; its buffer is dropped; earlier ones may be submitted |
//! | [`Batch::push_wait`], posted meanwhile | the device finishes it; its completion comes from [`CompletionQueue::next`] |
//! | [`CompletionQueue::next`] | no completion is lost |
//! | [`QueuePair`] | closed: outstanding operations are flushed and end, then it is destroyed; nothing blocks |
//! | [`SharedReceiveQueue`] | closed: no receive is taken any more; those it holds end with the last queue pair that receives by it |
//! | [`CompletionQueue`] | its driver ends after the last queue pair |
//! | `close()` of either | it is closed all the same |
//!
//! `mem::forget` of any of them leaks what it holds: its buffer and slot and, of a submitted future, the memory and the
//! descriptors of its completion queue. No other operation waits for it.
//!
//! # Runtime
//!
//! [`CompletionQueue::new`] needs a tokio runtime, `current_thread` or multi-thread, with I/O and time enabled, and
//! spawns its driver there. Submitting needs none. Futures can be awaited on any runtime, or by any executor, as long
//! as the queue's own runtime runs; a program that uses two runtimes gives each its queues, or lets one drive for
//! both. When the driving runtime is dropped, queue pairs of its queues are moved to the error state, a thread waits for
//! what the device still has, and then the operations end with [`OpError::RuntimeGone`], with their buffers.
//! `close().await` before that is the graceful way.
//!
//! A waker, or the owner of a buffer, that panics when it is woken or dropped is logged and harms nobody else.
//!
//! # Spinning
//!
//! With a budget ([`CqConfig::spin`]) a pending await polls the device itself for that long before it sleeps. It
//! lowers latency and occupies the worker thread meanwhile. Without (the default), waiting costs no CPU.
//!
//! [`OpError::Full`]: crate::error::OpError::Full
//! [`OpError::RuntimeGone`]: crate::error::OpError::RuntimeGone

mod batch;
#[doc(hidden)]
pub mod bench_api;
mod buffer;
mod cause;
mod completion;
mod cq_core;
mod future;
mod gate;
#[cfg(all(test, landfall_loom))]
mod models;
mod op;
mod poll;
mod qp_core;
mod qp_end;
mod send_queue;
mod slots;
mod state;
mod wr_id;

pub use crate::completion_queue::{CompletionQueue, CqConfig};
pub use crate::queue_pair::{ConnectOptions, QpConfig, QpEndpoint, QpPath, QueuePair, Role};
pub use crate::shared_receive_queue::SharedReceiveQueue;
pub use batch::Batch;
pub use buffer::Buffer;
pub use completion::{Completed, Completion, Opcode};
pub use future::{OpFuture, OpResult};
pub use op::{Op, Rejected};
pub use state::CqStats;

pub(crate) use cause::FirstCause;
pub(crate) use cq_core::CqCore;
pub(crate) use qp_core::{Object, QpCore, Side};
pub(crate) use send_queue::SendQueue;
#[cfg(test)]
pub(crate) use slots::{Owner, Wr, WrKind};
pub(crate) use state::{HalfId, NoEntries, Tie};
pub(crate) use wr_id::next_qp_generation;
pub(crate) use wr_id::{Key, WrId};

/// Entries of a completion queue that a work request id can tell apart.
pub(crate) const MAX_CQ_ENTRIES: u32 = 1 << wr_id::INDEX_BITS;
