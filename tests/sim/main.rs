//! The simulation of the protocol at full size: `cargo test -p landfall-sim -- --help`.
//!
//! It compiles the protocol's own sources, and nothing else of the crate: so they import no runtime, no socket and no
//! provider, and the whole is built optimised in seconds. What it checks is in `src/kv/proto/sim`.
#![allow(dead_code, unused_imports, reason = "the library uses what the simulation does not")]

#[path = "../../src/kv"]
mod kv {
    pub(crate) mod layout;
    pub(crate) mod mapping;
    pub(crate) mod proto;
    pub(crate) mod shape;
}
#[path = "../../src/pages.rs"]
mod pages;
#[path = "../../src/wire.rs"]
mod wire;

fn main() -> std::process::ExitCode {
    match kv::proto::sim::main() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("simulation: {message}");
            std::process::ExitCode::FAILURE
        }
    }
}
