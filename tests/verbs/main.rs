//! The verbs provider on RDMA devices: two of one host that reach each other, named by `RDMA_DEV0` and `RDMA_DEV1`.
//!
//! Tests that need devices are ignored by default, and fail when they are asked for without. The few that are not ignored
//! do the same on the soft provider, for comparison.
//! Modules say on which devices they hold; a test that is run on another kind of device fails:
//!
//! ```text
//!   any_device       all; so do fork and raw, but for the tests that begin with oob_
//!   shared_receives  all, and partly in the lab
//!   lab_events       all, in the lab: the devices themselves are taken away
//!   lab_rails        the lab, on whichever driver: it takes the devices of both
//!   counters         all; its tests say oob_ or cm_only by themselves
//!   cm_queue_pairs   all, with RDMA_CM; RDMA_IP0 and RDMA_IP1 are the devices' addresses
//!   cm_failures      the same, and iproute2's `rdma`
//!   cm_kv, examples  the same
//!   oob_queue_pairs  devices that can be connected out of band: InfiniBand, RoCE, eRDMA in compat mode   --skip cm_only
//!   oob_kv           the same
//!   oob_atomics      of these, the ones that have atomics
//!   oob_shared_…     the same, with shared receive queues
//!   oob_removal      the same, in the lab
//!   faults           all, in the lab: the wire between them is spoiled
//!   two_guests       all, in the lab with two guests
//!   cm_only          devices that only RDMA_CM connects: iWARP, eRDMA in standard mode                    --skip oob_
//! ```
//!
//! Every run skips `peer_process`: tests start it in a process of its own, and by itself it fails.

mod any_device;
mod cm_failures;
mod cm_harness;
mod cm_kv;
mod cm_only;
mod cm_queue_pairs;
mod counters;
mod examples;
mod faults;
mod fork;
mod harness;
mod lab_events;
mod lab_rails;
mod oob_atomics;
mod oob_failures;
mod oob_kv;
mod oob_queue_pairs;
mod oob_removal;
mod oob_shared_receives;
mod raw;
mod shared_receives;
mod two_guests;
