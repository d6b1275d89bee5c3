//! The workers as the gateway sees them, and admission: who waits for a pair of them, in order, and how many may.
//!
//! A worker has as many seats as slots. A request gets a seat at a prefill and at a decode worker that fit what it needs, or waits;
//! more than `queue` do not wait, and nobody waits longer than `grace` where there are no such workers at all. A worker that leaves
//! the directory, or comes back with another epoch, ends its *life*: whoever has a seat of that life learns it at once.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::route::{Candidate, Prefix, Route};
use crate::protocol::{Role, Worker};

/// A worker that failed under a request gets no more for so long, twice as long each further time.
const SUSPECT: Duration = Duration::from_secs(2);
/// The same for one that was full though it had a seat.
const FULL: Duration = Duration::from_millis(50);
/// That doubles so often at most, until one succeeds there.
const DOUBLINGS: u32 = 4;

/// All workers, and the queue.
#[derive(Debug)]
pub struct Fleet {
    route: Box<dyn Route>,
    queue: usize,
    grace: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    members: BTreeMap<(Role, String), Member>,
    waiting: VecDeque<Waiter>,
    /// Since when there are no two workers that fit together.
    lacking: Option<Instant>,
    /// Tokens that any two workers have taken so far.
    largest: u32,
    /// How long a request has had its seats, smoothed, seconds.
    service: f64,
}

#[derive(Debug)]
struct Member {
    worker: Arc<Worker>,
    in_flight: u32,
    /// It has failed.
    failed: Closed,
    /// It was full.
    full: Closed,
    life: CancellationToken,
}

/// Why a worker gets nothing for a while, and for how long.
#[derive(Clone, Copy, Debug, Default)]
struct Closed {
    until: Option<Instant>,
    /// How often that was since it did well.
    times: u32,
}

impl Closed {
    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }

    /// Once more: `first`, twice as long each further time. What comes while it is closed is of the same cause, and counts once,
    /// however many requests tell of it. Gives the time that is left.
    fn again(&mut self, now: Instant, first: Duration) -> Duration {
        if self.is_over(now) {
            self.until = Some(now + first * (1 << self.times.min(DOUBLINGS)));
            self.times = self.times.saturating_add(1);
        }
        self.until.map_or(Duration::ZERO, |until| until - now)
    }
}

/// What a request needs.
#[derive(Clone, Debug)]
pub struct Need {
    pub prefix: Prefix,
    /// A model's id, or its name before the `@`; `None`: any.
    pub model: Option<String>,
    /// Tokens, as many as are known of.
    pub tokens: u32,
    /// Lives that are taken only where there is no other, be it a full one.
    pub avoid: Vec<u64>,
}

/// Where a request stands in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Behind all others, if there is room.
    Back,
    /// Before all others: it has had a seat already.
    Front,
}

#[derive(Debug)]
struct Waiter {
    need: Need,
    /// Since when it is known that there is nobody for it.
    lacking: Option<Instant>,
    sender: oneshot::Sender<Result<Pair, NoSeat>>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSeat {
    /// As many wait as may.
    Full {
        waiting: usize,
        /// Seconds after which it may be otherwise.
        retry_after: u64,
    },
    /// No two workers together take so many tokens, and none have.
    TooLong { limit: u32 },
    /// There are no two workers for it, and were not for a while.
    Nobody {
        /// Those that there are.
        prefill: usize,
        decode: usize,
    },
}

impl Fleet {
    /// With a queue of that length. Where there is no worker, requests wait `grace` for one.
    pub fn new(route: Box<dyn Route>, queue: usize, grace: Duration) -> Arc<Self> {
        let state = State {
            members: BTreeMap::new(),
            waiting: VecDeque::new(),
            lacking: Some(Instant::now()),
            largest: 0,
            service: 0.0,
        };
        Arc::new(Self { route, queue, grace, state: Mutex::new(state) })
    }

    /// What the directory says now. Of two workers of one role and name the one that is known stays, or else the first.
    pub fn update(self: &Arc<Self>, workers: &[Worker]) {
        let mut state = self.lock();
        state.members.retain(|(role, name), member| {
            let still = workers.iter().any(|w| w.role == *role && w.name == *name && member.is(w));
            if !still {
                tracing::warn!(worker = name, epoch = member.worker.epoch, "is gone");
                member.life.cancel();
            }
            still
        });
        for worker in workers {
            match state.members.entry((worker.role, worker.name.clone())) {
                Entry::Occupied(mut entry) if entry.get().is(worker) => {
                    entry.get_mut().worker = Arc::new(worker.clone());
                }
                Entry::Occupied(entry) => {
                    let (name, used) = (&worker.name, entry.get().worker.http);
                    tracing::warn!(name, %used, unused = %worker.http, "two workers have one name; give each its own");
                }
                Entry::Vacant(entry) => {
                    tracing::info!(worker = worker.name, epoch = worker.epoch, "is there");
                    entry.insert(Member::new(worker.clone()));
                }
            }
        }
        state.largest = state.largest.max(state.limit());
        self.dispatch(state);
    }

    /// A seat at a prefill and a decode worker, when it is this request's turn.
    ///
    /// # Errors
    /// [`NoSeat`], at once, or when it is clear.
    ///
    /// # Cancel safety
    /// A dropped wait leaves the queue.
    pub fn acquire(
        self: &Arc<Self>,
        need: Need,
        place: Place,
    ) -> Result<impl Future<Output = Result<Pair, NoSeat>> + use<>, NoSeat> {
        let (sender, pair) = oneshot::channel();
        let mut state = self.lock();
        // Whoever has left does not count.
        state.waiting.retain(|waiter| !waiter.sender.is_closed());
        // A larger one may be on its way back; one that never was is not waited for.
        if need.tokens > state.largest && state.largest > 0 {
            return Err(NoSeat::TooLong { limit: state.largest });
        }
        let waiter = Waiter { need, lacking: None, sender };
        match place {
            Place::Front => state.waiting.push_front(waiter),
            Place::Back if state.waiting.len() >= self.queue && !state.has_free() => {
                return Err(NoSeat::Full { waiting: state.waiting.len(), retry_after: state.retry_after() });
            }
            Place::Back => state.waiting.push_back(waiter),
        }
        self.dispatch(state);
        // The sender is dropped with the fleet only.
        Ok(async { pair.await.unwrap_or(Err(NoSeat::Nobody { prefill: 0, decode: 0 })) })
    }

    /// Whether there are workers for `need`, full or not.
    pub fn has(&self, need: &Need) -> bool {
        self.lock().has(need)
    }

    /// The worker has failed under somebody: it gets nothing for a while. Gives how long that is.
    pub fn suspect(&self, worker: &Worker) -> Duration {
        self.close(worker, |member, now| member.failed.again(now, SUSPECT))
    }

    /// The worker says that it is full, though it had a seat: others are asked for a while. Gives how long that is.
    pub fn full(&self, worker: &Worker) -> Duration {
        self.close(worker, |member, now| member.full.again(now, FULL))
    }

    fn close(&self, worker: &Worker, again: impl FnOnce(&mut Member, Instant) -> Duration) -> Duration {
        let mut state = self.lock();
        let member = state.members.get_mut(&(worker.role, worker.name.clone()));
        let Some(member) = member.filter(|member| member.is(worker)) else { return Duration::ZERO };
        again(member, Instant::now())
    }

    /// The worker has done what it was asked to.
    pub fn well(&self, worker: &Worker) {
        if let Some(member) = self.lock().members.get_mut(&(worker.role, worker.name.clone()))
            && member.is(worker)
        {
            (member.failed.times, member.full.times) = (0, 0);
        }
    }

    /// Seconds after which there may be room.
    pub fn retry_after(&self) -> u64 {
        self.lock().retry_after()
    }

    /// Looks again whether somebody who waits can be served, or never will: suspicions and patience end by themselves.
    pub fn tick(self: &Arc<Self>) {
        self.dispatch(self.lock());
    }

    /// Workers of a role that take requests, those of them that are full, requests that wait, and requests that are served.
    pub fn levels(&self) -> Levels {
        let mut state = self.lock();
        state.waiting.retain(|waiter| !waiter.sender.is_closed());
        let of = |role, is: fn(&Member) -> bool| {
            state.members.values().filter(|m| m.worker.role == role && m.is_sound() && is(m)).count()
        };
        let in_flight =
            |role| state.members.values().filter(|m| m.worker.role == role).map(|m| m.in_flight).sum();
        Levels {
            prefill_workers: of(Role::Prefill, |_| true),
            decode_workers: of(Role::Decode, |_| true),
            prefill_full: of(Role::Prefill, |m| !m.is_free()),
            decode_full: of(Role::Decode, |m| !m.is_free()),
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

    /// Serves who waits, in order, as far as there are seats, and refuses whom there is nobody for.
    fn dispatch(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let now = Instant::now();
        state.lacking = if state.limit() > 0 { None } else { state.lacking.or(Some(now)) };
        let mut unused = Vec::new();
        let mut at = 0;
        while at < state.waiting.len() {
            if state.waiting[at].sender.is_closed() {
                state.waiting.remove(at);
                continue;
            }
            let end = match self.pair(&mut state, at) {
                Some(pair) => Ok(pair),
                None => match state.hopeless(at, now, self.grace) {
                    Some(nobody) => Err(nobody),
                    // One that no pair fits must not hold up those behind it.
                    None => {
                        at += 1;
                        continue;
                    }
                },
            };
            if let Some(waiter) = state.waiting.remove(at)
                && let Err(Ok(pair)) = waiter.sender.send(end)
            {
                unused.push(pair);
            }
        }
        // A seat locks the fleet when it is dropped.
        drop(state);
        drop(unused);
    }

    fn pair(self: &Arc<Self>, state: &mut State, at: usize) -> Option<Pair> {
        let need = &state.waiting[at].need;
        // Whom to avoid is decided over all that there are, and then it is looked who is free: a request that one has failed waits
        // for another that is full, and does not go back.
        let decodes: Vec<&Member> = state.fitting(Role::Decode, need).collect();
        let decode = |model: &str| -> Vec<&Member> {
            let of_model = decodes.iter().copied().filter(|m| m.worker.model == model).collect();
            others(of_model, &need.avoid).into_iter().filter(|m| m.is_free()).collect()
        };
        let has_other = |m: &&Member| decodes.iter().any(|d| d.worker.model == m.worker.model);
        let prefill = others(state.fitting(Role::Prefill, need).filter(has_other).collect(), &need.avoid);
        let prefill: Vec<&Member> =
            prefill.into_iter().filter(|m| m.is_free() && !decode(&m.worker.model).is_empty()).collect();
        let prefill = choose(&prefill, |candidates| self.route.prefill(need.prefix, candidates))?;
        let decode = decode(&prefill.worker.model);
        let decode = choose(&decode, |candidates| self.route.decode(need.prefix, candidates))?;
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
    fn new(worker: Worker) -> Self {
        let (worker, life) = (Arc::new(worker), CancellationToken::new());
        Self { worker, in_flight: 0, failed: Closed::default(), full: Closed::default(), life }
    }

    /// Whether it is that one, and in that life.
    fn is(&self, worker: &Worker) -> bool {
        self.worker.epoch == worker.epoch && self.worker.http == worker.http
    }

    /// Whether it goes on taking requests, and has not failed of late.
    fn is_sound(&self) -> bool {
        !self.worker.draining && self.failed.is_over(Instant::now())
    }

    /// Whether it takes one now.
    fn is_free(&self) -> bool {
        self.is_sound() && self.full.is_over(Instant::now()) && self.in_flight < self.worker.slots
    }

    fn fits(&self, need: &Need) -> bool {
        self.worker.context >= need.tokens
            && need.model.as_ref().is_none_or(|asked| is_model(&self.worker.model, asked))
    }
}

/// Whether `asked` is a model's id, or its name.
pub fn is_model(id: &str, asked: &str) -> bool {
    id == asked || id.split_once('@').is_some_and(|(name, _)| name == asked)
}

impl State {
    /// Workers of a role that go on taking requests, full or not.
    fn taking(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members
            .values()
            .filter(move |m| m.worker.role == role && !m.worker.draining && m.worker.slots > 0)
    }

    fn fitting<'a>(&'a self, role: Role, need: &'a Need) -> impl Iterator<Item = &'a Member> {
        self.taking(role).filter(move |member| member.fits(need))
    }

    fn has_free(&self) -> bool {
        let free = |role| self.members.values().any(|m| m.worker.role == role && m.is_free());
        // Nobody may overtake those who wait.
        self.waiting.is_empty() && free(Role::Prefill) && free(Role::Decode)
    }

    /// Pairs of workers that go on taking requests.
    fn pairs(&self) -> impl Iterator<Item = (&Member, &Member)> {
        self.taking(Role::Prefill)
            .flat_map(|a| self.taking(Role::Decode).map(move |b| (a, b)))
            .filter(|(a, b)| a.worker.model == b.worker.model)
    }

    fn has(&self, need: &Need) -> bool {
        self.pairs().any(|(a, b)| a.fits(need) && b.fits(need))
    }

    /// The most tokens that any two take; 0 where there are no two.
    fn limit(&self) -> u32 {
        self.pairs().map(|(a, b)| a.worker.context.min(b.worker.context)).max().unwrap_or(0)
    }

    /// Whether there is nobody for one that waits, and was not for as long as that is borne.
    fn hopeless(&mut self, at: usize, now: Instant, grace: Duration) -> Option<NoSeat> {
        if self.has(&self.waiting[at].need) {
            self.waiting[at].lacking = None;
            return None;
        }
        let known = *self.waiting[at].lacking.get_or_insert(now);
        let since = self.lacking.map_or(known, |all| all.min(known));
        let count = |role| self.members.values().filter(|m| m.worker.role == role).count();
        (now.saturating_duration_since(since) >= grace)
            .then(|| NoSeat::Nobody { prefill: count(Role::Prefill), decode: count(Role::Decode) })
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
    /// Those of them that take none at the moment: every seat is taken, or they have said that they are full.
    pub prefill_full: usize,
    pub decode_full: usize,
    pub waiting: usize,
    pub prefilling: u32,
    pub decoding: u32,
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
