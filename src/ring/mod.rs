//! ring
#![allow(dead_code)]
mod cause;
mod send_queue;
mod wr_id;
