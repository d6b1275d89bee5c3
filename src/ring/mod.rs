//! ring
#![allow(dead_code)]
mod cause;
mod send_queue;
mod wr_id;
pub(crate) use send_queue::SendQueue;
pub(crate) use wr_id::{Key, WrId, next_qp_generation};
