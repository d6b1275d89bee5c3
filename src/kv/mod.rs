//! `KvChannel`: blocks of KV cache from one process to another; a write ends when it has landed.

pub mod layout;

pub(crate) mod proto;
