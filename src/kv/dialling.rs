//! Dialling by a connection manager: the queue pair that carries the handshake, on the first of our devices from which the peer is
//! reached. One that is down costs its share of the time, and nothing else: its rail comes later.

use std::net::SocketAddr;

use super::endpoint::Shared;
use super::rail::why;
use crate::connect::{ConnectError, Deadline, Inband, dial_cm};

/// What carries a handshake.
#[derive(Clone, Copy, Debug)]
pub(super) struct Managed {
    /// The peer's address, or ours that it has dialled.
    pub(super) at: SocketAddr,
    /// Our device, by its place in the pool.
    pub(super) device: usize,
}

/// Dials `target` from one device after the other. When none reaches it, the first one's error counts.
pub(super) async fn dial_managed(
    shared: &Shared,
    target: &str,
    deadline: Deadline,
) -> Result<(Inband, Managed), ConnectError> {
    let devices = shared.pool.devices();
    let usable: Vec<usize> = (0..devices.len()).filter(|&n| devices[n].registered().is_some()).collect();
    let mut first = None;
    for (tried, &device) in usable.iter().enumerate() {
        let pd = &devices[device].pd;
        let share = deadline.share(usable.len() - tried);
        match dial_cm(pd, target, shared.epoch, share).await {
            Ok((stream, at)) => return Ok((stream, Managed { at, device })),
            Err(error) if is_of_the_way(&error) => {
                let (device, why) = (pd.device().name(), why(&error));
                tracing::debug!(device, why, "the peer is not reached from a device");
                first.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    // A pool is registered on one device at least.
    Err(first.unwrap_or_else(|| deadline.timeout(crate::connect::Stage::Dial)))
}

/// Another device may have another way. Not when the peer's host has answered, or the address is wrong by itself.
fn is_of_the_way(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::Timeout { .. }
            | ConnectError::Io { .. }
            | ConnectError::Closed { .. }
            | ConnectError::NoPath { .. }
            | ConnectError::Resources { .. }
            | ConnectError::Unreachable { .. }
            | ConnectError::OtherDevice { .. }
            | ConnectError::NoLocalAddress { .. }
            | ConnectError::Manager { .. }
    )
}
