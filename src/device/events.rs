//! What a device says out of turn: ports that go down, objects that fail, the device that is taken away.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::provider::events::Listener;

/// Something that has happened to a device (`ibv_get_async_event`). `what` is libibverbs' name of the event.
///
/// An event is only told here. What it ends has ended by itself: operations with their error, channels with their cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// A port carries no traffic any more. Its queue pairs live on, and fail when their retries are used up; a port that
    /// comes back before that costs nothing. (The rails of a channel do not wait for that, where another one is up: see
    /// [rails](crate::guide::rails).)
    PortDown {
        /// The port.
        port: u8,
    },
    /// A port carries traffic (again).
    PortActive {
        /// The port.
        port: u8,
    },
    /// An address or a table of a port has changed (its LID, GIDs or partition keys). Connections go on; a device opened
    /// from now on sees the new one.
    PortChanged {
        /// The port.
        port: u8,
        /// The event.
        what: &'static str,
    },
    /// A queue pair has failed without a completion that says so. Its operations end with this as their cause.
    QpFatal {
        /// Its number.
        qp_num: u32,
        /// The event.
        what: &'static str,
    },
    /// A queue pair that failed takes no more receives from its shared receive queue.
    LastWqe {
        /// Its number.
        qp_num: u32,
    },
    /// A completion queue has failed: its queue pairs are destroyed.
    CqError,
    /// A shared receive queue has failed.
    SrqError,
    /// A shared receive queue holds fewer receives than its limit.
    SrqLimit,
    /// The device has failed as a whole. All that it had is lost; the last event.
    DeviceFatal,
    /// The device was taken away: its driver was unloaded, or its link deleted. The last event.
    ///
    /// A driver may wait until everything of the device is closed: drop what is of it, the [`Device`](super::Device) too. In
    /// a process that has ever used RDMA_CM that is not enough for rxe and siw: librdmacm keeps every device open for itself,
    /// to the end of the process, and `rdma link del` does not return before.
    DeviceRemoved,
    /// So many events came before the next one, and were not taken in time.
    Missed {
        /// How many.
        count: u64,
    },
}

/// The events of a device, from [`Device::events`](super::Device::events) on.
///
/// 64 are kept. Whoever takes them too slowly misses the oldest and is told how many; nothing else waits for it.
#[derive(Debug)]
pub struct DeviceEvents {
    listener: Arc<Listener>,
}

impl DeviceEvents {
    pub(super) fn new(listener: Arc<Listener>) -> Self {
        Self { listener }
    }

    /// The next event. `None` after the last: the device is gone. Needs no runtime.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<DeviceEvent> {
        poll_fn(|cx| self.listener.poll(cx)).await
    }

    /// The next event, if there is one.
    pub fn try_next(&mut self) -> Option<DeviceEvent> {
        self.listener.take()
    }
}

impl futures_core::Stream for DeviceEvents {
    type Item = DeviceEvent;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<DeviceEvent>> {
        self.listener.poll(cx)
    }
}

#[cfg(test)]
mod tests;
