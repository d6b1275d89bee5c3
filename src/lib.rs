//! Async RDMA on tokio with an io_uring-style completion API.
//!
//! The promise is in the name: **a write is done when it has landed**, that is, when the remote side has
//! confirmed that the data is in its memory, never when the local queue has drained.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, unreachable_pub)]

pub mod connect;
pub mod device;
pub mod error;
pub mod kv;
pub mod memory;
pub mod ring;

mod completion_queue;
mod provider;
mod queue_pair;
mod random;
mod reactor;
mod sync;
mod wire;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz_api;
