//! What the ring and the channel say when their device commits faults: see `landfall::device::Faults`.
//!
//! A configuration is written as `LANDFALL_SOFT` has it, and names a failing run.

// Of `kv`'s, the half that is used here.
#[allow(dead_code, unused_imports, unused_macros)]
#[path = "../kv/common.rs"]
mod common;
mod kv;
#[path = "../on/mod.rs"]
mod on;
mod process;
mod ring;
