//! `KvChannel`: blocks of KV cache from one process to another; a write ends when it has landed.
//!
//! ```text
//!   KvPool      registered memory, cut into blocks by a Layout      KvEndpoint   a pool with an epoch; listens, connects
//!   Blocks      an exclusive claim on some of them                  KvChannel    one connection between two endpoints
//!   Grant       "you may write to these, once"                      Arrival      the granted blocks, full
//! ```
//!
//! A receiver takes [`Blocks`] from its pool and [grants](KvChannel::grant) them; the [`Grant`] travels to the sender,
//! which [writes](KvChannel::write) blocks of its own to them. The write resolves to [`Landed`] when the receiver has
//! confirmed it, and the granted blocks come out of [`KvChannel::next_arrival`]. Both ends of a channel can do both.
//! The other way round, an owner of data [grants it to be read](KvChannel::grant_read), and the peer [reads](KvChannel::read)
//! it. What that means in full is in the guide: [landing](crate::guide::landing), [grants](crate::guide::grants),
//! [reading](crate::guide::reading); [layers](crate::guide::layers), where each layer goes as soon as it is there, and
//! [shapes](crate::guide::shapes), where the blocks of the two ends differ.
//!
//! # Cancel safety
//!
//! | dropped | what happens |
//! |---|---|
//! | [`Read`] | it is given up; its blocks return to the pool when no device writes to them; the channel goes on |
//! | [`Write`] | the transfer is aborted; its blocks return to the pool when no device reads them; the channel goes on |
//! | [`LayerWrite`] | the same, for the layers that have not landed |
//! | [`LayerArrivals`], [`Gather`] | what they have granted is revoked |
//! | [`KvChannel::next_arrival`], [`next_served`](KvChannel::next_served), [`recv_message`](KvChannel::recv_message), [`resolve`](KvChannel::resolve), [`closed`](KvChannel::closed) | nothing is lost |
//! | [`KvChannel::send_message`] | before it has resolved, the message is not sent |
//! | [`KvChannel::close`] | it closes all the same |
//! | [`KvEndpoint::connect`], [`KvListener::accept`] | the attempt is given up; no channel is lost |
//! | [`KvPool::alloc`], [`KvPool::new`] | nothing is held |
//! | the last [`KvChannel`] | it closes in the background, within five seconds |
//! | [`KvListener`] | stops listening; channels that were not accepted are closed |
//!
//! # Inside
//!
//! Data of a write flows one way: request → plan (`targets`, `proto`) → protocol (`proto`, sans-io) → chains of work
//! requests (`queues`) → provider → completions → protocol → `Landed` or `Arrival` (`driver`).

mod arrival;
mod blocks;
mod bootstrap;
mod channel;
mod config;
mod dialling;
mod door;
mod driver;
mod endpoint;
mod exposure;
mod free_runs;
mod gather;
mod gpu_path;
#[cfg(all(test, feature = "cuda"))]
mod gpu_tests;
mod grant;
mod handshake;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod hostile_managed;
mod join;
mod layer_arrivals;
mod layer_events;
mod layers;
pub mod layout;
mod limits;
mod managed;
mod mapping;
#[cfg(test)]
mod pages_tests;
mod parts;
mod pass;
mod path;
mod path_check;
mod path_rails;
mod peers;
mod pool;
mod pool_device;
pub(crate) mod proto;
mod queues;
mod rail;
mod rail_talk;
mod read;
mod read_choice;
mod read_plan;
mod setup;
mod shape;
mod spans;
mod stats;
mod targets;
mod waiting;
mod write;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use arrival::{Arrival, ArrivalError};
pub use blocks::Blocks;
pub use bootstrap::{Bootstrap, BootstrapError};
pub use channel::{Arrivals, GrantRefusal, GrantRefused, KvChannel};
#[cfg(test)]
pub(crate) use config::CONTROL_BYTES;
pub use config::KvConfig;
pub use driver::{ChannelClosed, MessageError};
pub use endpoint::{KvEndpoint, KvListener, PeerIdentity};
pub use gather::{Gather, PartArrival, PartLanded};
pub use gpu_path::{GpuPath, GpuPaths, UnknownGpuPath};
pub use grant::{Grant, GrantError, GrantKind};
pub use layer_arrivals::{LandedLayer, LayerArrivals, LayerView};
pub use layers::{LayerError, LayerSet, LayerWrite, LayersLanded, LayersNotLanded, LayersRefused};
pub use layout::{Dtype, Layout, LayoutError};
pub use limits::PeerLimits;
pub use mapping::{Mapping, MappingError};
pub use path::{PathReport, QpReport};
pub use path_rails::{RailReport, RailState, RailWarning};
pub use pool::{KvPool, PoolAccess, PoolError};
pub use proto::{
    AbortReason, Cause, ProtocolViolation, ReadRefusal, Reason, Resolution, SenderReason, TransferId,
};
#[cfg(any(test, fuzzing))]
pub(crate) use rail_talk::fuzz as fuzz_rail_talk;
pub use read::{GrantReadRefused, Read, ReadDone, ReadError, ReadRequest, Served, ServedBy};
pub use read_choice::{ReadMethod, ReadStrategy};
#[cfg(any(test, fuzzing))]
pub(crate) use read_plan::fuzz as fuzz_ask;
pub use shape::{Heads, Order, Shape, ShapeError, Strides};
pub use spans::TokenSpan;
pub use stats::ChannelStats;
pub use write::{Landed, Write, WriteError, WriteRequest};

/// Locks. A panic while it was held has left nothing half-done that the next holder could not bear.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
