//! Contracts that need a peer in another process: one that is frozen, killed, restarted, or measured.
//!
//! The peer is this test binary, started again with one of the roles in `roles`. See `harness`.

mod blocks;
mod frozen;
mod harness;
mod idle;
mod killed;
#[path = "../on/mod.rs"]
mod on;
mod orphans;
mod rails;
mod roles;
mod runtime;
mod tied;
