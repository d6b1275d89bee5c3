//! `KvChannel`: blocks of KV cache from one process to another; a write ends when it has landed.

// The channel is the consumer: remove the allowance with it.
#[allow(dead_code)]
mod grant;

pub(crate) mod proto;

pub use grant::{Grant, GrantError};
