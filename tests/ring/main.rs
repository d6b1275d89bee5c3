//! The ring's contracts (DESIGN.md, R1 to R10), one harness over every profile of the soft provider and over RDMA devices.
//!
//! The tests named `verbs` need two devices that reach each other, named by `RDMA_DEV0` and `RDMA_DEV1`, with the addresses
//! `RDMA_IP0` and `RDMA_IP1`; they are ignored by default. What stays with the soft provider names a profile: it is about the
//! profiles, or looks at counters and numbers that only the soft provider promises.

mod harness;

mod atomics;
mod b5_manager;
mod cases;
#[path = "../on/mod.rs"]
mod on;
mod r1_ownership;
mod r4_r5_limits;
mod r6_r10_errors;
mod r7_drop;
mod r8_r9_runtime;
mod shared_receives;
