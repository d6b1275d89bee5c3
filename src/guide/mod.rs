//! The guide: what the API means, in chapters. Text only.
//!
//! - [`concepts`]: the words, and how the parts hang together.
//! - [`landing`]: what `Landed` says, the three outcomes of a write, deadlines, reconnecting and resolving.
//! - [`grants`]: who owns a block and when; pool, claim, grant, arrival; revoking and quarantine.
//! - [`reading`]: granting data to be read, the two ways of reading it and which is taken, what the owner learns.
//! - [`layers`]: writes by layer, sent while the next one is computed.
//! - [`shapes`]: pools whose blocks differ: page sizes, ranks, orders.
//! - [`cancel_safety`]: what dropping a future does.
//! - [`admission`]: who may connect: keys, certificates, limits.
//! - [`errors`]: whose fault an error is, and what to do about it.
//! - [`tuning`]: what can be chosen, and what each choice costs.
//! - [`choosing`]: which transport to take, and how to know that it was taken.
//! - [`transports`]: devices, profiles and their capabilities.
//! - [`rails`]: several devices: which are joined, who carries what, what happens when one fails.
//! - [`gpu`]: pools in memory of GPUs: which way the data goes, when it has landed, what cannot be sent.
//! - [`deploying`]: hosts, containers and Kubernetes, by kind of device.
//! - [`troubleshooting`]: by what a program says.
//! - [`operating`]: the program `landfall`: devices, doctor, watch, the exporter's names.
//! - [`measuring`]: bandwidth, latency, the best setting, and whether it is RDMA: the commands, and what their numbers mean.
//! - [`runtime`]: which runtime drives what, the order of dropping, two runtimes.
//! - [`migrating`]: for those who come from async-rdma or NIXL.

#[doc = include_str!("concepts.md")]
pub mod concepts {}

#[doc = include_str!("landing.md")]
pub mod landing {}

#[doc = include_str!("grants.md")]
pub mod grants {}

#[doc = include_str!("reading.md")]
pub mod reading {}

#[doc = include_str!("layers.md")]
pub mod layers {}

#[doc = include_str!("shapes.md")]
pub mod shapes {}

#[doc = include_str!("cancel_safety.md")]
pub mod cancel_safety {}

#[doc = include_str!("admission.md")]
pub mod admission {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("tuning.md")]
pub mod tuning {}

#[doc = include_str!("choosing.md")]
pub mod choosing {}

#[doc = include_str!("transports.md")]
pub mod transports {}

#[doc = include_str!("rails.md")]
pub mod rails {}

#[doc = include_str!("gpu.md")]
pub mod gpu {}
#[doc = include_str!("deploying.md")]
pub mod deploying {}

#[doc = include_str!("troubleshooting.md")]
pub mod troubleshooting {}

#[doc = include_str!("operating.md")]
pub mod operating {}

#[doc = include_str!("measuring.md")]
pub mod measuring {}

#[doc = include_str!("runtime.md")]
pub mod runtime {}

#[doc = include_str!("migrating.md")]
pub mod migrating {}

#[cfg(test)]
mod tests;
