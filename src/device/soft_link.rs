//! The link of a soft device, which can be cut and mended while the program runs.

use std::sync::Arc;

use crate::provider::soft::Cable;

/// The link of a soft device to all of its peers: what the cable is to a NIC. See [`Device::soft_link`](super::Device::soft_link).
#[derive(Clone, Debug)]
pub struct SoftLink {
    cable: Arc<Cable>,
}

impl SoftLink {
    pub(super) fn new(cable: Arc<Cable>) -> Self {
        Self { cable }
    }

    /// Ends every connection of the device at once, as those whose peer does not answer any more, and makes none until it is
    /// mended: connecting a queue pair fails with `ENETDOWN`. The device tells of it, [`DeviceEvent::PortDown`](super::DeviceEvent).
    pub fn cut(&self) {
        self.cable.cut();
    }

    /// Connections can be made again, and the device tells of it. Those that were cut stay so: queue pairs do not come back.
    pub fn mend(&self) {
        self.cable.mend();
    }

    /// Whether it is cut.
    pub fn is_cut(&self) -> bool {
        self.cable.is_cut()
    }
}
