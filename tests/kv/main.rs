//! The contracts of `KvChannel`, each over every profile of the soft provider, over TCP and in shared memory, and on RDMA devices,
//! within one process.
//!
//! A test is written once and runs under each profile: see `on_every_profile`. The tests named `verbs` need two devices that
//! reach each other, named by `RDMA_DEV0` and `RDMA_DEV1`, with the addresses `RDMA_IP0` and `RDMA_IP1`; they are ignored by
//! default. What stays with the soft provider says so by naming a profile: it is about the profiles, or about this host.

mod admission;
mod arguments;
mod bootstrap;
mod common;
mod failure;
mod identity;
mod kinds;
mod landing;
mod layers;
mod lives;
mod manager;
#[path = "../on/mod.rs"]
mod on;
mod rails;
mod rails_late;
mod read;
mod shapes;
mod transports;
