//! What a device says out of turn, and whom it concerns: asynchronous events, in the words of `ibv_get_async_event`.
//!
//! A provider reads its device's events and hands each to [`Events::dispatch`]. That tells the listeners, who are users,
//! and ends what the event has ended: the owner of a queue pair, a completion queue, or everything of a device that is
//! gone. It never waits: a listener that does not listen misses events, and is told how many.
//!
//! Imports no runtime. Nothing is called under a lock.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use crate::device::DeviceEvent;
use crate::sync::Mutex;

/// Events that are kept for a listener. Of more, the oldest are given up.
pub(crate) const KEPT: usize = 64;

/// A queue pair or another object that events are of. Unlike a device's numbers it is never given out again (R5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ObjectId(NonZeroU64);

impl ObjectId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // It would take centuries to wrap.
        Self(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }

    /// As a driver keeps it, in the object's user pointer.
    #[cfg(feature = "verbs")]
    pub(crate) fn get(self) -> u64 {
        self.0.get()
    }

    /// What a driver gives back.
    #[cfg(feature = "verbs")]
    pub(crate) fn from_raw(raw: u64) -> Option<Self> {
        NonZeroU64::new(raw).map(Self)
    }
}

/// An event of a device. `name` is what libibverbs calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsyncEvent {
    PortDown {
        port: u8,
    },
    PortActive {
        port: u8,
    },
    PortChanged {
        port: u8,
        name: &'static str,
    },
    QpFailed {
        id: Option<ObjectId>,
        qp_num: u32,
        name: &'static str,
    },
    LastWqe {
        qp_num: u32,
    },
    CqFailed {
        id: Option<ObjectId>,
        name: &'static str,
    },
    SrqFailed {
        id: Option<ObjectId>,
        name: &'static str,
    },
    SrqLimit,
    /// The device has failed as a whole, and with it all that it had.
    DeviceFatal,
    /// It was taken away.
    DeviceRemoved,
}

impl AsyncEvent {
    fn told(self) -> DeviceEvent {
        match self {
            Self::PortDown { port } => DeviceEvent::PortDown { port },
            Self::PortActive { port } => DeviceEvent::PortActive { port },
            Self::PortChanged { port, name } => DeviceEvent::PortChanged { port, what: name },
            Self::QpFailed { qp_num, name, .. } => DeviceEvent::QpFatal { qp_num, what: name },
            Self::LastWqe { qp_num } => DeviceEvent::LastWqe { qp_num },
            Self::CqFailed { .. } => DeviceEvent::CqError,
            Self::SrqFailed { .. } => DeviceEvent::SrqError,
            Self::SrqLimit => DeviceEvent::SrqLimit,
            Self::DeviceFatal => DeviceEvent::DeviceFatal,
            Self::DeviceRemoved => DeviceEvent::DeviceRemoved,
        }
    }
}

/// What has happened to an object's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// The object has failed, by the event of that name.
    Object { id: ObjectId, event: &'static str },
    /// Its device is gone.
    DeviceGone,
}

/// Owns objects that events may be of. Called by the thread that reads the events: does not block.
pub(crate) trait Affected: Send + Sync {
    fn harmed(self: Arc<Self>, harm: Harm);
}

/// Wants to know of a device's ports. Called by the thread that reads the events, or that changes a soft device's link: does
/// not block.
pub(crate) trait PortWatcher: Send + Sync {
    /// The port carries traffic again, or none any more. What is on it lives on, for the time of its retries.
    fn port(self: Arc<Self>, port: u8, active: bool);
}

/// The events of one opened device.
#[derive(Debug)]
pub(crate) struct Events {
    device: Arc<str>,
    gone: AtomicBool,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    listeners: Vec<Weak<Listener>>,
    objects: HashMap<ObjectId, Weak<dyn Affected>>,
    watchers: Vec<Weak<dyn PortWatcher>>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known").field("listeners", &self.listeners.len()).finish_non_exhaustive()
    }
}

impl Events {
    pub(crate) fn new(device: &str) -> Arc<Self> {
        Arc::new(Self { device: device.into(), gone: AtomicBool::new(false), known: Mutex::default() })
    }

    /// The device's name, for errors.
    pub(crate) fn device(&self) -> Arc<str> {
        self.device.clone()
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Has `owner` told of what happens to `id` and to the device, until the result is dropped. At once, when the
    /// device is gone already.
    pub(crate) fn enrol(
        self: &Arc<Self>,
        ids: Vec<ObjectId>,
        owner: &Arc<impl Affected + 'static>,
    ) -> Enrolled {
        {
            let mut known = self.known.lock();
            for &id in &ids {
                let owner: Arc<dyn Affected> = owner.clone();
                known.objects.insert(id, Arc::downgrade(&owner));
            }
        }
        if self.is_gone() {
            owner.clone().harmed(Harm::DeviceGone);
        }
        Enrolled { events: self.clone(), ids }
    }

    /// Has `watcher` told of the device's ports, as long as it lives.
    pub(crate) fn watch_ports(&self, watcher: &Arc<impl PortWatcher + 'static>) {
        let watcher: Arc<dyn PortWatcher> = watcher.clone();
        let mut known = self.known.lock();
        known.watchers.retain(|w| w.strong_count() > 0);
        known.watchers.push(Arc::downgrade(&watcher));
    }

    pub(crate) fn listen(&self) -> Arc<Listener> {
        let listener = Arc::new(Listener::default());
        let mut known = self.known.lock();
        known.listeners.retain(|l| l.strong_count() > 0);
        known.listeners.push(Arc::downgrade(&listener));
        drop(known);
        if self.is_gone() {
            listener.end();
        }
        listener
    }

    /// Tells who listens, and ends what `event` has ended. A device goes once.
    pub(crate) fn dispatch(&self, event: AsyncEvent) {
        let goes = matches!(event, AsyncEvent::DeviceFatal | AsyncEvent::DeviceRemoved);
        if goes && self.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::debug!(device = %self.device, ?event, "an event of a device");
        let port = match event {
            AsyncEvent::PortDown { port } => Some((port, false)),
            AsyncEvent::PortActive { port } => Some((port, true)),
            _ => None,
        };
        let (listeners, owners, watchers) = {
            let known = self.known.lock();
            let listeners: Vec<_> = known.listeners.iter().filter_map(Weak::upgrade).collect();
            let harm = |id: ObjectId, event| (id, Harm::Object { id, event });
            let named = match event {
                AsyncEvent::QpFailed { id, name, .. }
                | AsyncEvent::CqFailed { id, name }
                | AsyncEvent::SrqFailed { id, name } => id.map(|id| harm(id, name)),
                _ => None,
            };
            let owners: Vec<_> = match named {
                _ if goes => {
                    let all = known.objects.values().filter_map(Weak::upgrade);
                    all.map(|owner| (owner, Harm::DeviceGone)).collect()
                }
                Some((id, harm)) => {
                    known.objects.get(&id).and_then(Weak::upgrade).map(|o| (o, harm)).into_iter().collect()
                }
                None => Vec::new(),
            };
            let watchers = known.watchers.iter().filter(|_| port.is_some());
            let watchers: Vec<_> = watchers.filter_map(Weak::upgrade).collect();
            (listeners, owners, watchers)
        };
        // Who is told finds that what it asks for has failed.
        owners.into_iter().for_each(|(owner, harm)| owner.harmed(harm));
        if let Some((port, active)) = port {
            watchers.into_iter().for_each(|watcher| watcher.port(port, active));
        }
        for listener in listeners {
            listener.hear(event.told());
            if goes {
                listener.end();
            }
        }
    }
}

#[cfg(test)]
impl Events {
    pub(crate) fn enrolled(&self) -> Vec<ObjectId> {
        self.known.lock().objects.keys().copied().collect()
    }
}

/// An owner's place among those who are told.
#[derive(Debug)]
pub(crate) struct Enrolled {
    events: Arc<Events>,
    ids: Vec<ObjectId>,
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        let mut known = self.events.known.lock();
        let gone: Vec<_> = self.ids.iter().filter_map(|id| known.objects.remove(id)).collect();
        drop(known);
        drop(gone);
    }
}

/// The events that a user has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Listener(Mutex<Heard>);

#[derive(Debug, Default)]
struct Heard {
    events: VecDeque<DeviceEvent>,
    missed: u64,
    ended: bool,
    waker: Option<Waker>,
}

impl Listener {
    fn hear(&self, event: DeviceEvent) {
        let waker = {
            let mut heard = self.0.lock();
            if heard.events.len() == KEPT {
                heard.events.pop_front();
                heard.missed += 1;
            }
            heard.events.push_back(event);
            heard.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    fn end(&self) {
        let waker = {
            let mut heard = self.0.lock();
            heard.ended = true;
            heard.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// The next event: `Ready(None)` when none is left and none will come.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<DeviceEvent>> {
        let mut heard = self.0.lock();
        if let Some(event) = heard.take() {
            return Poll::Ready(Some(event));
        }
        if heard.ended {
            return Poll::Ready(None);
        }
        let replaced = heard.waker.replace(cx.waker().clone());
        drop(heard);
        drop(replaced);
        Poll::Pending
    }

    pub(crate) fn take(&self) -> Option<DeviceEvent> {
        self.0.lock().take()
    }
}

impl Heard {
    fn take(&mut self) -> Option<DeviceEvent> {
        match std::mem::take(&mut self.missed) {
            0 => self.events.pop_front(),
            count => Some(DeviceEvent::Missed { count }),
        }
    }
}
