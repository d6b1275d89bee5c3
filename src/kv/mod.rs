//! `KvChannel`: blocks of KV cache from one process to another; a write ends when it has landed.

pub(crate) mod proto;

// The channel is the consumer: remove the allowance with it.
#[allow(dead_code)]
mod grant;

pub use grant::{Grant, GrantError};
