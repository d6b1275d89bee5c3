//! One endpoint that serves hundreds of channels: all of them work, none is left behind, a bad one hurts no other, and what the
//! system does not give is an error that says so.
//!
//! ```text
//!   common.rs   an endpoint that serves, clients of it, a runtime       serve.rs   hundreds of channels: use, reconnect, close
//!   bad.rs      peers that stall, crawl, die, or talk nonsense          limits.rs  no descriptors left, at either end
//! ```

mod bad;
mod common;
mod limits;
#[path = "../on/mod.rs"]
mod on;
mod serve;
