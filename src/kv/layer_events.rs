//! Layers that go when an event has come: when the GPU has made them. A task of the channel's looks for it, so that no thread waits.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::driver::KvDriver;
use super::proto::TransferId;
use super::write::WriteError;
use crate::cuda::{CudaError, Event};

/// The longest time between two looks at an event.
const LAST_LOOK: Duration = Duration::from_millis(10);

/// When a layer began to go.
#[derive(Clone, Debug)]
pub(super) enum Pushed {
    At(Instant),
    /// When its event has come. One that has failed ends the write.
    After(Arc<OnceLock<Result<Instant, WriteError>>>),
}

impl Pushed {
    /// `None` before its event.
    pub(super) fn at(&self) -> Option<Instant> {
        match self {
            Self::At(at) => Some(*at),
            Self::After(came) => came.get()?.as_ref().ok().copied(),
        }
    }

    /// Why its event never comes.
    pub(super) fn failure(&self) -> Option<WriteError> {
        match self {
            Self::At(_) => None,
            Self::After(came) => came.get()?.as_ref().err().cloned(),
        }
    }
}

fn have_come(events: &[Arc<Event>]) -> Result<bool, CudaError> {
    for event in events {
        if !event.is_done()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Pushes `layers` when `events` have come: now, or by a task that ends with their transfers.
pub(super) fn push_after(driver: &Arc<KvDriver>, events: Vec<Arc<Event>>, layers: Vec<TransferId>) -> Pushed {
    let came = Arc::new(OnceLock::new());
    let pushed = Pushed::After(came.clone());
    if end(driver, have_come(&events), &layers, &came) {
        return pushed;
    }
    let owner = driver.clone();
    driver.spawn(async move {
        let since = Instant::now();
        while layers.iter().any(|&layer| owner.layer_is_open(layer)) {
            // tokio's timer counts milliseconds.
            let next = (since.elapsed() / 8).clamp(Duration::from_millis(1), LAST_LOOK);
            tokio::time::sleep(next).await;
            if end(&owner, have_come(&events), &layers, &came) {
                return;
            }
        }
    });
    pushed
}

/// Acts on a look at the events. True when there is nothing more to look for.
fn end(
    driver: &KvDriver,
    look: Result<bool, CudaError>,
    layers: &[TransferId],
    came: &OnceLock<Result<Instant, WriteError>>,
) -> bool {
    match look {
        Ok(false) => return false,
        Ok(true) => {
            let now = Instant::now();
            let _ = came.set(Ok(now));
            // One that has ended has taken the others along: `finish` says how.
            layers.iter().for_each(|&layer| _ = driver.push_layer(layer, now));
        }
        Err(error) => {
            let _ = came.set(Err(WriteError::Event(error)));
            layers.iter().for_each(|&layer| _ = driver.cancel_layer(layer));
        }
    }
    true
}
