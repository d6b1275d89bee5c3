//! How many handshakes a listener runs at once, so that idle or hostile connections cost the others nothing.
//!
//! Every handshake holds a place, from the accept to its end. When all are taken, the listener waits (new
//! connections stay in the kernel's backlog) until one is free, or until the oldest has had more time than an
//! honest handshake needs: that one is evicted.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

/// Handshakes at once.
const PLACES: usize = 128;
/// The age from which a handshake can be evicted.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Gate {
    shared: Arc<Shared>,
    places: usize,
    grace: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    inside: Mutex<Inside>,
    left: Notify,
}

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    /// In order of arrival.
    queue: VecDeque<Place>,
}

#[derive(Debug)]
struct Place {
    id: u64,
    since: Instant,
    /// Dropping it is the eviction.
    _alive: oneshot::Sender<()>,
}

/// The place of a handshake.
#[derive(Debug)]
pub(crate) struct Ticket {
    id: u64,
    shared: Arc<Shared>,
    evicted: oneshot::Receiver<()>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self::with(PLACES, GRACE)
    }

    pub(super) fn with(places: usize, grace: Duration) -> Self {
        Self { shared: Arc::default(), places: places.max(1), grace }
    }

    /// Waits until [`Gate::enter`] finds a place, or may evict somebody. Cancel safe.
    pub(crate) async fn room(&self) {
        loop {
            let until = {
                let inside = self.shared.lock();
                match inside.queue.front() {
                    Some(oldest) if inside.queue.len() >= self.places => oldest.since + self.grace,
                    _ => return,
                }
            };
            // A place that became free since is remembered by `left`. The time-out is the other way out.
            if Instant::now() >= until || timeout_at(until, self.shared.left.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Takes a place, evicting the oldest when there is none.
    pub(crate) fn enter(&self) -> Ticket {
        let (alive, evicted) = oneshot::channel();
        let mut inside = self.shared.lock();
        let id = inside.next;
        inside.next += 1;
        let oldest = if inside.queue.len() >= self.places { inside.queue.pop_front() } else { None };
        inside.queue.push_back(Place { id, since: Instant::now(), _alive: alive });
        drop(inside);
        // This wakes the evicted task: not under the lock.
        drop(oldest);
        Ticket { id, shared: self.shared.clone(), evicted }
    }
}

impl Shared {
    /// Every step leaves the queue valid.
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// Runs `fut`, or gives it up when this handshake is evicted: `None`.
    pub(crate) async fn unless_evicted<T>(&mut self, fut: impl Future<Output = T>) -> Option<T> {
        let mut fut = pin!(fut);
        poll_fn(|cx| {
            if let Poll::Ready(v) = fut.as_mut().poll(cx) {
                return Poll::Ready(Some(v));
            }
            Pin::new(&mut self.evicted).poll(cx).map(|_| None)
        })
        .await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut inside = self.shared.lock();
        // Ids grow along the queue. An evicted ticket is not in it any more.
        let place = inside.queue.binary_search_by_key(&self.id, |p| p.id).ok();
        let place = place.and_then(|at| inside.queue.remove(at));
        drop(inside);
        if place.is_some() {
            self.shared.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    const AGES: Duration = Duration::from_secs(3600);

    fn now<F: Future>(fut: Pin<&mut F>) -> Poll<F::Output> {
        fut.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn b1_the_oldest_handshake_makes_room() {
        let gate = Gate::with(2, Duration::ZERO);
        let (mut a, mut b) = (gate.enter(), gate.enter());
        gate.room().await;
        let c = gate.enter();
        assert_eq!(a.unless_evicted(std::future::pending::<()>()).await, None);
        assert_eq!(b.unless_evicted(std::future::ready(7)).await, Some(7));
        drop((a, b, c));
        assert!(gate.shared.lock().queue.is_empty());
    }

    #[tokio::test]
    async fn b1_young_handshakes_are_waited_for() {
        let gate = Gate::with(2, AGES);
        let a = gate.enter();
        gate.room().await;
        let mut b = gate.enter();
        let mut room = pin!(gate.room());
        assert!(now(room.as_mut()).is_pending());
        drop(a);
        assert!(now(room.as_mut()).is_ready());
        // A place that is left while nobody waits is not waited for.
        gate.room().await;
        let _c = gate.enter();
        let mut room = pin!(gate.room());
        assert!(now(room.as_mut()).is_pending());
        assert!(now(pin!(b.unless_evicted(std::future::pending::<()>()))).is_pending());
    }
}
