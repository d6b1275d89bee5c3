//! The driver as its rails see it: each has a task, which sleeps on the completion channel of its device, and hears of that device's
//! events. One of the tasks keeps the clock of the channel: the first whose rail can still be driven.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::KvDriver;
use crate::kv::lock;
use crate::kv::proto::Cause;
use crate::provider::events::{Affected, Harm, PortWatcher};
use crate::reactor::{Drive, Step};

const RUNTIME_GONE: &str =
    "the tokio runtime that drove it is gone; keep it alive until close().await has returned";

/// What the task of a rail drives.
struct OfRail {
    driver: Arc<KvDriver>,
    rail: usize,
}

/// Who is told of what happens to a rail's device.
pub(super) struct Owner {
    pub(super) driver: Weak<KvDriver>,
    pub(super) rail: usize,
}

impl KvDriver {
    /// For the task of a rail.
    pub(crate) fn of_rail(this: &Arc<Self>, rail: usize) -> Arc<dyn Drive> {
        Arc::new(OfRail { driver: this.clone(), rail })
    }

    /// Nothing tells of what completes on a rail any more.
    pub(super) fn channel_failed(&self, rail: usize, error: &str) {
        let now = Instant::now();
        self.locked(|inner, after| {
            if inner.rails[rail].pd.device().gone().is_some() {
                inner.fail_rail(rail, Cause::DeviceGone, "", now, after);
            } else {
                // What has completed by now may say why.
                inner.poll_once(None, now, after);
                let words = format!("the completion channel failed: {error}");
                inner.fail_rail(rail, Cause::Transport, &words, now, after);
            }
            inner.lose_rail(rail, "its completion channel has failed", now, after);
        });
        self.nudge();
    }

    /// No task will drive it.
    pub(crate) fn abandon_all(&self) {
        self.locked(|inner, after| {
            inner.fail(Cause::Local, RUNTIME_GONE, Instant::now(), after);
            inner.end(Instant::now(), after);
        });
    }
}

impl Affected for Owner {
    fn harmed(self: Arc<Self>, harm: Harm) {
        let (now, rail) = (Instant::now(), self.rail);
        let Some(driver) = self.driver.upgrade() else { return };
        driver.locked(|inner, after| match harm {
            Harm::Object { event, id } => {
                // What has completed by now may say why.
                inner.poll_once(None, now, after);
                let lost = inner.rails[rail].cq.as_ref().is_some_and(|cq| cq.id() == id);
                inner.fail_rail(rail, Cause::Transport, &format!("the device reported {event}"), now, after);
                if lost {
                    inner.lose_rail(rail, "its completion queue has failed", now, after);
                }
            }
            // Nothing may complete any more.
            Harm::DeviceGone => {
                inner.fail_rail(rail, Cause::DeviceGone, "", now, after);
                inner.lose_rail(rail, "its device is gone", now, after);
            }
        });
        driver.nudge();
    }
}

impl PortWatcher for Owner {
    fn port(self: Arc<Self>, port: u8, active: bool) {
        let Some(driver) = self.driver.upgrade() else { return };
        let (now, rail) = (Instant::now(), self.rail);
        driver.locked(|inner, after| inner.port_changed(rail, port, active, now, after));
        driver.nudge();
    }
}

impl Drive for OfRail {
    fn drive(&self, now: Instant) -> Step {
        self.driver.locked(|inner, after| inner.drive(self.rail, now, after))
    }

    fn next_timeout(&self) -> Option<Instant> {
        let mut inner = lock(&self.driver.inner);
        if !inner.keeps_clock(self.rail) {
            return None;
        }
        inner.scheduled = inner.next_timeout();
        inner.scheduled
    }

    fn channel_failed(&self, error: &io::Error) {
        self.driver.channel_failed(self.rail, &error.to_string());
    }

    fn runtime_gone(&self) {
        self.driver.locked(|inner, after| {
            inner.fail(Cause::Local, RUNTIME_GONE, Instant::now(), after);
        });
    }

    fn is_drained(&self) -> bool {
        lock(&self.driver.inner).is_ended()
    }

    fn abandon(&self) {
        self.driver.abandon_all();
    }
}
