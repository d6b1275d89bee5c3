//! How many handshakes a listener runs at once, so that idle or hostile connections cost the others nothing.
//!
//! Before its hello, a connection is *waiting*. One more than the limit evicts the oldest: an honest peer speaks
//! at once, a connection that sends nothing only ever displaces its like. With its hello it is *admitted*, up to a
//! limit of its own, beyond which it is told that the listener is busy.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Connections that have not said hello.
const MAX_WAITING: usize = 64;
/// Handshakes after the hello.
const MAX_ADMITTED: usize = 64;

#[derive(Debug)]
pub(crate) struct Gate {
    waiting: Arc<Mutex<Waiting>>,
    limit: usize,
    admitted: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// In order of arrival. Dropping a sender is the eviction.
    queue: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// The place of a connection that has not said hello.
#[derive(Debug)]
pub(crate) struct Ticket {
    id: u64,
    waiting: Arc<Mutex<Waiting>>,
    admitted: Arc<Semaphore>,
    evicted: oneshot::Receiver<()>,
}

/// The place of a handshake after its hello.
#[derive(Debug)]
pub(crate) struct Permit {
    _place: OwnedSemaphorePermit,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self::with_limits(MAX_WAITING, MAX_ADMITTED)
    }

    pub(super) fn with_limits(waiting: usize, admitted: usize) -> Self {
        Self { waiting: Arc::default(), limit: waiting.max(1), admitted: Arc::new(Semaphore::new(admitted)) }
    }

    /// Takes a place for a new connection, evicting the oldest when there is none.
    pub(crate) fn enter(&self) -> Ticket {
        let (alive, evicted) = oneshot::channel();
        let mut w = lock(&self.waiting);
        let id = w.next;
        w.next += 1;
        let oldest = if w.queue.len() >= self.limit { w.queue.pop_front() } else { None };
        w.queue.push_back((id, alive));
        drop(w);
        // Its wake-up happens outside of the lock.
        drop(oldest);
        Ticket { id, waiting: self.waiting.clone(), admitted: self.admitted.clone(), evicted }
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        lock(&self.waiting).queue.len()
    }
}

impl Ticket {
    /// Runs `fut`, or gives it up when this connection is evicted: `None`.
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

    /// A permit, for which the ticket can then be dropped, or `None` when too many have one.
    pub(crate) fn admit(&self) -> Option<Permit> {
        let permit = Arc::clone(&self.admitted).try_acquire_owned().ok()?;
        Some(Permit { _place: permit })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut w = lock(&self.waiting);
        if let Ok(at) = w.queue.binary_search_by_key(&self.id, |e| e.0) {
            w.queue.remove(at);
        }
    }
}

/// Nothing panics while the lock is held, and the queue is valid after every step.
fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn b1_the_oldest_silent_connection_makes_room() {
        let gate = Gate::with_limits(2, 1);
        let (mut a, mut b) = (gate.enter(), gate.enter());
        let c = gate.enter();
        assert_eq!(a.unless_evicted(std::future::pending::<()>()).await, None);
        assert_eq!(b.unless_evicted(std::future::ready(7)).await, Some(7));
        assert_eq!(gate.waiting(), 2);
        let permit = b.admit();
        assert!(permit.is_some());
        drop(b);
        assert_eq!(gate.waiting(), 1);
        assert!(c.admit().is_none(), "one is admitted at a time here");
        drop(permit);
        assert!(gate.enter().admit().is_some());
        drop((a, c));
        assert_eq!(gate.waiting(), 0);
    }
}
