//! The ring's contracts (DESIGN.md, R1 to R10) on the soft provider, one harness over every profile.

mod harness;

mod atomics;
mod b5_manager;
mod cases;
mod r1_ownership;
mod r4_r5_limits;
mod r6_r10_errors;
mod r7_drop;
mod r8_r9_runtime;
mod shared_receives;
