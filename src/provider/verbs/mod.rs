//! The verbs provider: InfiniBand, RoCE and iWARP devices, through libibverbs.
//!
//! The libraries are loaded when a device is asked for, behind declarations of our own, so that a build needs no
//! headers and a program starts without it. Only the classic calls are used (`ibv_create_qp`, `ibv_post_send`,
//! `ibv_poll_cq`): not every provider has the extended ones.
//!
//! ```text
//!   sys.rs      declarations, generated         sys_cm.rs  those of RDMA_CM    load.rs  loading the libraries
//!   calls.rs    the headers' inline functions, and what return values mean
//!   map.rs      numbers to types
//!   device.rs   devices and ports               caps.rs    what they can do     gids.rs  a port's GID table
//!   context.rs  contexts, protection domains    mr.rs      memory regions
//!   gpudirect.rs  memory of GPUs, registered
//!   cq.rs       channels, completion queues     qp.rs      queue pairs          post.rs  posting
//!   events.rs   asynchronous events, removal      srq.rs       shared receive queues
//!   cm.rs       RDMA_CM's identifiers             cm_event.rs  its events
//!   cm_qp.rs    queue pairs that it connects      addresses.rs of this host
//! ```
//!
//! Nothing outside of this directory calls libibverbs. What it does for memory safety is in two rules: an object
//! keeps alive what it needs (see `context.rs`), and requests are built by layers that keep their memory until they
//! complete (R1).

pub(crate) mod addresses;
mod calls;
mod caps;
mod cm;
mod cm_event;
mod cm_qp;
mod context;
mod cq;
mod device;
mod events;
mod gids;
mod gpudirect;
mod load;
mod map;
mod mr;
mod post;
mod qp;
mod srq;
#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]
mod sys;
#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    unused_imports
)]
mod sys_cm;

pub(crate) use cm::CmId;
pub(crate) use cm_event::{CmEvent, CmEventKind, reject_reason, status_error};
pub(crate) use cm_qp::{NotReady, VerbsCmQp};
pub(crate) use cq::{VerbsChannel, VerbsCq};
pub(crate) use device::{Fabric, VerbsDevice, VerbsPd, kernel_has, names};
pub(crate) use load::loads;
pub(crate) use mr::VerbsMr;
pub(crate) use qp::VerbsQp;
pub(crate) use srq::VerbsSrq;
