//! The workers as the gateway sees them, and admission: who waits for a pair of them, in order, and how many may.
//!
//! A worker has as many seats as slots. A request gets a seat at a prefill and at a decode worker of one model, or waits; more
//! than `queue` do not wait. A worker that leaves the directory, or comes back with another epoch, ends its *life*: whoever has
//! a seat of that life learns it at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::route::{Candidate, Prefix, Route};
use crate::protocol::{Role, Worker};

/// A worker that failed under a request gets no more for so long, unless it comes back with another epoch before.
const SUSPECT: Duration = Duration::from_secs(2);

/// All workers, and the queue.
#[derive(Debug)]
pub struct Fleet {
    route: Box<dyn Route>,
    queue: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<(Role, String), Member>,
    waiting: VecDeque<Waiter>,
    /// How long a request has had its seats, smoothed, seconds.
    service: f64,
}

#[derive(Debug)]
struct Member {
    worker: Arc<Worker>,
    in_flight: u32,
    suspect: Option<Instant>,
    life: CancellationToken,
}

#[derive(Debug)]
struct Waiter {
    prefix: Prefix,
    avoid: Vec<u64>,
    sender: oneshot::Sender<Pair>,
}

/// A seat at each of two workers.
#[derive(Debug)]
pub struct Pair {
    pub prefill: Seat,
    pub decode: Seat,
}

/// A seat at a worker, until it is dropped.
#[derive(Debug)]
pub struct Seat {
    fleet: Arc<Fleet>,
    pub worker: Arc<Worker>,
    /// Cancelled when this life of the worker has ended.
    pub life: CancellationToken,
    since: Instant,
}

/// Why there is no seat.
#[derive(Debug, PartialEq, Eq)]
pub enum NoSeat {
    /// As many wait as may.
    Full {
        waiting: usize,
        /// Seconds after which it may be otherwise.
        retry_after: u64,
    },
}

impl Fleet {
    /// With a queue of that length.
    pub fn new(route: Box<dyn Route>, queue: usize) -> Arc<Self> {
        Arc::new(Self { route, queue, state: Mutex::default() })
    }

    /// What the directory says now.
    pub fn update(self: &Arc<Self>, workers: &[Worker]) {
        let mut state = self.lock();
        state.members.retain(|(role, name), member| {
            let still = workers.iter().any(|w| {
                w.role == *role
                    && w.name == *name
                    && w.epoch == member.worker.epoch
                    && w.http == member.worker.http
            });
            if !still {
                tracing::warn!(worker = name, epoch = member.worker.epoch, "is gone");
                member.life.cancel();
            }
            still
        });
        for worker in workers {
            let worker = Arc::new(worker.clone());
            let member = state.members.entry((worker.role, worker.name.clone())).or_insert_with(|| {
                tracing::info!(worker = worker.name, epoch = worker.epoch, "is there");
                Member { worker: worker.clone(), in_flight: 0, suspect: None, life: CancellationToken::new() }
            });
            member.worker = worker;
        }
        self.dispatch(state);
    }

    /// A seat at a prefill and a decode worker, when it is this request's turn. Lives in `avoid` are taken only where there
    /// is no other.
    ///
    /// # Errors
    /// [`NoSeat`], at once.
    ///
    /// # Cancel safety
    /// A dropped wait leaves the queue.
    pub fn acquire(
        self: &Arc<Self>,
        prefix: Prefix,
        avoid: Vec<u64>,
    ) -> Result<impl Future<Output = Option<Pair>> + use<>, NoSeat> {
        let (sender, pair) = oneshot::channel();
        let mut state = self.lock();
        // Whoever has left does not count.
        state.waiting.retain(|waiter| !waiter.sender.is_closed());
        if state.waiting.len() >= self.queue && !state.has_free() {
            return Err(NoSeat::Full { waiting: state.waiting.len(), retry_after: state.retry_after() });
        }
        state.waiting.push_back(Waiter { prefix, avoid, sender });
        self.dispatch(state);
        Ok(async { pair.await.ok() })
    }

    /// The worker has failed under somebody: it gets nothing for a while.
    pub fn suspect(&self, worker: &Worker) {
        let mut state = self.lock();
        if let Some(member) = state.members.get_mut(&(worker.role, worker.name.clone()))
            && member.worker.epoch == worker.epoch
        {
            member.suspect = Some(Instant::now() + SUSPECT);
        }
    }

    /// Seconds after which there may be room.
    pub fn retry_after(&self) -> u64 {
        self.lock().retry_after()
    }

    /// Looks again whether somebody who waits can be served: suspicions end by themselves.
    pub fn tick(self: &Arc<Self>) {
        self.dispatch(self.lock());
    }

    /// Workers of a role that take requests, requests that wait, and requests that are served.
    pub fn levels(&self) -> Levels {
        let mut state = self.lock();
        state.waiting.retain(|waiter| !waiter.sender.is_closed());
        let of = |role| state.members.values().filter(|m| m.worker.role == role && m.is_open()).count();
        let in_flight =
            |role| state.members.values().filter(|m| m.worker.role == role).map(|m| m.in_flight).sum();
        Levels {
            prefill_workers: of(Role::Prefill),
            decode_workers: of(Role::Decode),
            waiting: state.waiting.len(),
            prefilling: in_flight(Role::Prefill),
            decoding: in_flight(Role::Decode),
        }
    }

    /// The models that there are workers for.
    pub fn models(&self) -> Vec<String> {
        let state = self.lock();
        let mut models: Vec<String> = state.members.values().map(|m| m.worker.model.clone()).collect();
        models.sort();
        models.dedup();
        models
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves who waits, in order, as far as there are seats.
    fn dispatch(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let mut unused = Vec::new();
        let mut at = 0;
        while at < state.waiting.len() {
            if state.waiting[at].sender.is_closed() {
                state.waiting.remove(at);
                continue;
            }
            // One that no pair fits must not hold up those behind it.
            let Some(pair) = self.pair(&mut state, at) else {
                at += 1;
                continue;
            };
            if let Some(waiter) = state.waiting.remove(at)
                && let Err(pair) = waiter.sender.send(pair)
            {
                unused.push(pair);
            }
        }
        // A seat locks the fleet when it is dropped.
        drop(state);
        drop(unused);
    }

    fn pair(self: &Arc<Self>, state: &mut State, at: usize) -> Option<Pair> {
        let Waiter { prefix, avoid, .. } = &state.waiting[at];
        let decode: Vec<&Member> = state.free(Role::Decode).collect();
        let fits = |a: &Member| decode.iter().any(|b| a.worker.model == b.worker.model);
        let prefill = others(state.free(Role::Prefill).filter(|m| fits(m)).collect(), avoid);
        let prefill = choose(&prefill, |candidates| self.route.prefill(*prefix, candidates))?;
        let decode = decode.into_iter().filter(|m| m.worker.model == prefill.worker.model);
        let decode = others(decode.collect(), avoid);
        let decode = choose(&decode, |candidates| self.route.decode(*prefix, candidates))?;
        let (prefill, decode) = (prefill.worker.clone(), decode.worker.clone());
        Some(Pair { prefill: self.seat(state, prefill), decode: self.seat(state, decode) })
    }

    fn seat(self: &Arc<Self>, state: &mut State, worker: Arc<Worker>) -> Seat {
        let mut life = CancellationToken::new();
        if let Some(member) = state.members.get_mut(&(worker.role, worker.name.clone())) {
            member.in_flight += 1;
            life = member.life.clone();
        }
        Seat { fleet: self.clone(), worker, life, since: Instant::now() }
    }
}

/// Those that are not to be avoided; all, if there is none.
fn others<'a>(members: Vec<&'a Member>, avoid: &[u64]) -> Vec<&'a Member> {
    let others: Vec<_> = members.iter().copied().filter(|m| !avoid.contains(&m.worker.epoch)).collect();
    if others.is_empty() { members } else { others }
}

fn choose<'a>(members: &[&'a Member], by: impl Fn(&[Candidate<'_>]) -> usize) -> Option<&'a Member> {
    if members.is_empty() {
        return None;
    }
    let candidates: Vec<Candidate<'_>> =
        members.iter().map(|m| Candidate { worker: &m.worker, in_flight: m.in_flight }).collect();
    members.get(by(&candidates)).copied()
}

impl Member {
    fn is_open(&self) -> bool {
        !self.worker.draining && self.suspect.is_none_or(|until| until <= Instant::now())
    }
}

impl State {
    fn free(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.values().filter(move |member| {
            member.worker.role == role && member.is_open() && member.in_flight < member.worker.slots
        })
    }

    fn has_free(&self) -> bool {
        // Nobody may overtake those who wait.
        self.waiting.is_empty()
            && self.free(Role::Prefill).next().is_some()
            && self.free(Role::Decode).next().is_some()
    }

    /// As long as those who wait will take, at the pace of late.
    fn retry_after(&self) -> u64 {
        let seats: u32 =
            self.members.values().filter(|m| m.worker.role == Role::Decode).map(|m| m.worker.slots).sum();
        let seconds = self.service * self.waiting.len() as f64 / f64::from(seats.max(1));
        (seconds.ceil() as u64).clamp(1, 60)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.fleet.lock();
        if let Some(member) = state.members.get_mut(&(self.worker.role, self.worker.name.clone()))
            && member.worker.epoch == self.worker.epoch
        {
            member.in_flight = member.in_flight.saturating_sub(1);
        }
        if self.worker.role == Role::Decode {
            let now = self.since.elapsed().as_secs_f64();
            state.service = if state.service == 0.0 { now } else { 0.8 * state.service + 0.2 * now };
        }
        self.fleet.dispatch(state);
    }
}

/// See [`Fleet::levels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    pub prefill_workers: usize,
    pub decode_workers: usize,
    pub waiting: usize,
    pub prefilling: u32,
    pub decoding: u32,
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
