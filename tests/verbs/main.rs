//! The verbs provider on RDMA devices: two of one host that reach each other, named by `RDMA_DEV0` and `RDMA_DEV1`.
//!
//! Nothing here runs without them, so every test is ignored by default and fails when it is asked for without devices.
//! Modules say on which devices they hold; a test that is run on another kind of device fails:
//!
//! ```text
//!   any_device       all
//!   cm_queue_pairs   all, with RDMA_CM; RDMA_IP0 and RDMA_IP1 are the devices' addresses
//!   cm_failures      the same, and iproute2's `rdma`
//!   oob_queue_pairs  devices that can be connected out of band: InfiniBand, RoCE, eRDMA in compat mode   --skip cm_only
//!   oob_kv           the same
//!   cm_only          devices that only RDMA_CM connects: iWARP, eRDMA in standard mode                    --skip oob_
//! ```

mod any_device;
mod cm_failures;
mod cm_harness;
mod cm_only;
mod cm_queue_pairs;
mod harness;
mod oob_failures;
mod oob_kv;
mod oob_queue_pairs;
