//! The link of a soft device to all of its peers, which can be cut and mended: what a pulled cable, a dead switch or a port that
//! is switched off is to a NIC.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::member::QpShared;
use super::qp::QpInner;
use super::{SoftChannel, lock};
use crate::provider::events::{AsyncEvent, Events};

/// The one port of a soft device.
const PORT: u8 = 1;

/// The queue pairs of a device, and whether they reach anybody.
#[derive(Debug)]
pub(crate) struct Cable {
    /// The device's, which tell of its port.
    events: Arc<Events>,
    cut: AtomicBool,
    plugged: Mutex<Vec<(Weak<QpShared>, Weak<SoftChannel>)>>,
}

impl Cable {
    pub(super) fn new(events: Arc<Events>) -> Arc<Self> {
        Arc::new(Self { events, cut: AtomicBool::new(false), plugged: Mutex::default() })
    }

    pub(super) fn plug(&self, qp: &Arc<QpShared>, channel: &Arc<SoftChannel>) {
        let mut plugged = lock(&self.plugged);
        // Those that are destroyed go when the list would grow.
        if plugged.len() == plugged.capacity() {
            plugged.retain(|(qp, _)| qp.strong_count() > 0);
        }
        plugged.push((Arc::downgrade(qp), Arc::downgrade(channel)));
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    /// Every connection ends here and now, as one whose peer does not answer any more; none is made until it is mended.
    pub(crate) fn cut(&self) {
        if self.cut.swap(true, Ordering::SeqCst) {
            return;
        }
        self.events.dispatch(AsyncEvent::PortDown { port: PORT });
        // Not under the lock: a queue pair that fails raises events.
        let plugged = std::mem::take(&mut *lock(&self.plugged));
        let live = plugged.iter().filter_map(|(qp, channel)| Some((qp.upgrade()?, channel.upgrade()?)));
        live.for_each(|(qp, channel)| qp.with(&channel, QpInner::cut_off));
        lock(&self.plugged).extend(plugged);
    }

    pub(crate) fn mend(&self) {
        if self.cut.swap(false, Ordering::SeqCst) {
            self.events.dispatch(AsyncEvent::PortActive { port: PORT });
        }
    }
}
