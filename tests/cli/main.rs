//! The program `landfall` as its users run it: what it prints, how it ends, and what it says about mistakes.

mod bench;
mod bench_server;
mod devices;
mod documents;
mod examined;
mod lab;
mod on_devices;
mod program;
mod roots;
mod sweep;
mod usage;
mod watch;
mod xml;
