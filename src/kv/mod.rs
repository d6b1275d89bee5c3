//! `KvChannel`: blocks of KV cache from one process to another; a write ends when it has landed.
//!
//! ```text
//!   KvPool      registered memory, cut into blocks by a Layout      KvEndpoint   a pool with an epoch; listens, connects
//!   Blocks      an exclusive claim on some of them                  KvChannel    one connection between two endpoints
//!   Grant       "you may write to these, once"                      Arrival      the granted blocks, full
//! ```
//!
//! Data of a write flows one way: request → plan (`targets`, [`proto`]) → protocol ([`proto`], sans-io) → chains of
//! work requests (`queues`) → provider → completions → protocol → `Landed` or `Arrival` (`driver`).

mod arrival;
mod channel;
mod config;
mod driver;
mod endpoint;
mod grant;
pub mod layout;
mod path;
mod peers;
mod pool;
pub(crate) mod proto;
mod queues;
mod setup;
mod targets;
mod write;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use arrival::{Arrival, ArrivalError};
pub use channel::{Arrivals, GrantRefusal, GrantRefused, KvChannel};
pub use config::KvConfig;
pub use driver::{ChannelClosed, MessageError};
pub use endpoint::{KvEndpoint, KvListener, PeerIdentity};
pub use grant::{Grant, GrantError};
pub use layout::{Dtype, Layout, LayoutError};
pub use path::{PathReport, QpReport};
pub use pool::{Blocks, KvPool, PoolAccess, PoolError};
pub use proto::{AbortReason, Cause, ProtocolViolation, Reason, Resolution, SenderReason, TransferId};
pub use write::{Landed, Write, WriteError, WriteRequest};

/// Locks. A panic while it was held has left nothing half-done that the next holder could not bear.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
