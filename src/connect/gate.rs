//! How many handshakes a listener runs at once, so that idle or hostile connections cost the others nothing.
//!
//! Every handshake holds a place, from the accept to its end. When all are taken, the listener waits (new
//! connections stay in the kernel's backlog) until one is free, or until the oldest has had more time than an
//! honest handshake needs: that one is evicted.
//!
//! A peer that has shown that it may connect goes over to places of its own, of which there are as many: strangers never evict it.
//! One that is refused goes over to a third kind, where it waits for its refusal to be read, and gives way at once.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

/// Handshakes at once, of each kind.
const PLACES: usize = 128;
/// The age from which a handshake can be evicted.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Gate {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    places: usize,
    grace: Duration,
    inside: Mutex<Inside>,
    /// A stranger has left.
    left: Notify,
}

/// Those inside, the oldest of each kind first.
#[derive(Debug, Default)]
struct Inside {
    next: u64,
    strangers: VecDeque<Place>,
    proven: VecDeque<Place>,
    refused: VecDeque<Place>,
}

#[derive(Debug)]
struct Place {
    id: u64,
    /// When it became what it is.
    since: Instant,
    /// Dropping it is the eviction.
    _alive: oneshot::Sender<()>,
}

/// The place of a handshake.
#[derive(Debug)]
pub(crate) struct Ticket {
    standing: Standing,
    evicted: oneshot::Receiver<()>,
}

/// Which kind of place a handshake has.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    id: u64,
    shared: Arc<Shared>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self::with(PLACES, GRACE)
    }

    pub(super) fn with(places: usize, grace: Duration) -> Self {
        let (inside, left) = (Mutex::default(), Notify::new());
        Self { shared: Arc::new(Shared { places: places.max(1), grace, inside, left }) }
    }

    /// Waits until [`Gate::enter`] finds a place, or may evict somebody. Cancel safe.
    pub(crate) async fn room(&self) {
        loop {
            let until = {
                let inside = self.shared.lock();
                match inside.strangers.front() {
                    Some(oldest) if inside.strangers.len() >= self.shared.places => {
                        oldest.since + self.shared.grace
                    }
                    _ => return,
                }
            };
            // A place that became free since is remembered by `left`. The time-out is the other way out.
            if Instant::now() >= until || timeout_at(until, self.shared.left.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Takes a place, evicting the oldest stranger when there is none.
    pub(crate) fn enter(&self) -> Ticket {
        let (alive, evicted) = oneshot::channel();
        let mut inside = self.shared.lock();
        let id = inside.next;
        inside.next += 1;
        let full = inside.strangers.len() >= self.shared.places;
        let oldest = if full { inside.strangers.pop_front() } else { None };
        inside.strangers.push_back(Place { id, since: Instant::now(), _alive: alive });
        drop(inside);
        // This wakes the evicted task: not under the lock.
        drop(oldest);
        Ticket { standing: Standing { id, shared: self.shared.clone() }, evicted }
    }
}

impl Shared {
    /// Every step leaves the queues valid.
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// Takes a place out of its queue, and says whether it was a stranger's. One that was evicted is in none.
    fn take(&mut self, id: u64) -> Option<(Place, bool)> {
        for (queue, stranger) in
            [(&mut self.strangers, true), (&mut self.proven, false), (&mut self.refused, false)]
        {
            if let Some(at) = queue.iter().position(|place| place.id == id) {
                return queue.remove(at).map(|place| (place, stranger));
            }
        }
        None
    }
}

impl Standing {
    /// Its peer has shown that it may connect. Where as many others have, and none of them has had its time, it stays a stranger.
    pub(crate) fn proven(&self) {
        let (shared, now) = (&self.shared, Instant::now());
        let mut inside = shared.lock();
        if inside.proven.iter().any(|place| place.id == self.id) {
            return;
        }
        let full = inside.proven.len() >= shared.places;
        if full && inside.proven.front().is_some_and(|oldest| now < oldest.since + shared.grace) {
            return;
        }
        let Some((place, stranger)) = inside.take(self.id) else { return };
        let oldest = if full { inside.proven.pop_front() } else { None };
        inside.proven.push_back(Place { since: now, ..place });
        drop(inside);
        drop(oldest);
        if stranger {
            shared.left.notify_one();
        }
    }

    /// Its peer is being told that it may not connect, and nothing else is done for it.
    pub(crate) fn refused(&self) {
        let mut inside = self.shared.lock();
        let Some((place, stranger)) = inside.take(self.id) else { return };
        let full = inside.refused.len() >= self.shared.places;
        let oldest = if full { inside.refused.pop_front() } else { None };
        inside.refused.push_back(place);
        drop(inside);
        drop(oldest);
        if stranger {
            self.shared.left.notify_one();
        }
    }
}

impl Ticket {
    /// What kind of place it has, for whoever learns more of its peer.
    pub(crate) fn standing(&self) -> &Standing {
        &self.standing
    }

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
        let Standing { id, shared } = &self.standing;
        let place = shared.lock().take(*id);
        if place.is_some_and(|(_, stranger)| stranger) {
            shared.left.notify_one();
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

    fn is_in(ticket: &mut Ticket) -> bool {
        now(pin!(ticket.unless_evicted(std::future::pending::<()>()))).is_pending()
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
        assert!(gate.shared.lock().strangers.is_empty());
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
        assert!(is_in(&mut b));
    }

    #[tokio::test]
    async fn b1_strangers_evict_nobody_who_has_shown_that_it_may_connect() {
        let gate = Gate::with(2, Duration::ZERO);
        let mut proven = [gate.enter(), gate.enter()];
        proven.iter().for_each(|ticket| ticket.standing().proven());
        // It gave its place among the strangers back.
        let mut strangers: Vec<Ticket> = Vec::new();
        for _ in 0..10 {
            gate.room().await;
            strangers.push(gate.enter());
        }
        assert!(proven.iter_mut().all(is_in));
        assert_eq!(strangers.iter_mut().filter_map(|t| is_in(t).then_some(())).count(), 2);
        // Another of their own does, when it has had its time.
        strangers[9].standing().proven();
        assert!(!is_in(&mut proven[0]) && is_in(&mut proven[1]) && is_in(&mut strangers[9]));
        drop((proven, strangers));
        assert!(gate.shared.lock().proven.is_empty());
    }

    #[tokio::test]
    async fn b1_whoever_is_proven_while_all_such_places_are_taken_by_the_young_stays_a_stranger() {
        let gate = Gate::with(1, AGES);
        let mut first = gate.enter();
        first.standing().proven();
        let mut second = gate.enter();
        second.standing().proven();
        assert!(is_in(&mut first) && is_in(&mut second));
        assert!(now(pin!(gate.room())).is_pending());
        drop(first);
        second.standing().proven();
        assert!(now(pin!(gate.room())).is_ready());
    }

    #[tokio::test]
    async fn b1_whoever_is_proven_twice_evicts_nobody() {
        let gate = Gate::with(2, Duration::ZERO);
        let mut proven = [gate.enter(), gate.enter()];
        for _ in 0..2 {
            proven.iter().for_each(|ticket| ticket.standing().proven());
            assert!(proven.iter_mut().all(is_in));
        }
        assert_eq!(gate.shared.lock().proven.len(), 2);
    }

    #[tokio::test]
    async fn b1_whoever_is_refused_takes_no_place_of_others() {
        let gate = Gate::with(1, AGES);
        let mut refused: Vec<Ticket> = Vec::new();
        for _ in 0..3 {
            assert!(now(pin!(gate.room())).is_ready());
            let ticket = gate.enter();
            assert!(now(pin!(gate.room())).is_pending());
            ticket.standing().refused();
            refused.push(ticket);
        }
        // The last one's words may still arrive.
        let left: Vec<bool> = refused.iter_mut().map(is_in).collect();
        assert_eq!(left, [false, false, true]);
        drop(refused);
        assert!(gate.shared.lock().refused.is_empty());
    }
}
