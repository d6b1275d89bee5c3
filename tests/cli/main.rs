//! The program `landfall` as its users run it: what it prints, how it ends, and what it says about mistakes.

mod bench;
mod bench_server;
mod on_devices;
mod program;
mod sweep;
mod usage;
mod xml;
