//! All of it together, and the loop that makes things happen in order of time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::super::{Connection, Ledger, Opening};
use super::model::{Life, Model};
use super::rails;
use super::setup::{self, Channel, End, epoch};
use super::shared;
use super::summary::Summary;
use super::wire::Happening;
use super::{Rng, Script};

pub(super) struct World {
    pub(super) script: Script,
    /// Of the wire; moves have generators of their own.
    pub(super) rng: Rng,
    start: Instant,
    pub(super) now: u64,
    order: u64,
    pub(super) agenda: BTreeMap<(u64, u64), Happening>,
    pub(super) ends: Vec<End>,
    pub(super) channels: Vec<Channel>,
    pub(super) model: Model,
    /// Moves of users that are still to come.
    pub(super) acts: std::ops::Range<u32>,
    pub(super) tags: u64,
    /// Things go wrong in this run.
    pub(super) faults: bool,
    pub(super) summary: Summary,
}

/// No run takes so long, in simulated microseconds.
const LIMIT: u64 = 600_000_000;
/// No run has so many steps: one that does goes round without time passing.
const STEPS: u64 = 2_000_000;
/// A transfer with so much time lands, if nothing goes wrong.
pub(super) const AMPLE: u64 = 60_000_000;
/// The first number of a fault; users' moves are below.
pub(super) const FIRST_FAULT: u32 = 1000;
/// The first number of a rail's fault.
pub(super) const FIRST_RAIL_FAULT: u32 = 1050;

impl World {
    pub(super) fn new(script: &Script) -> Self {
        let mut rng = Rng::new(script.seed);
        let (ends, mut channels) = setup::draw(&mut rng);
        for (channel, shared) in channels.iter_mut().zip(shared::draw(script)) {
            channel.shared = shared;
        }
        let rail_faults = rails::draw(script, &mut channels);
        let mut world = Self {
            script: script.clone(),
            start: Instant::now(),
            now: 0,
            order: 0,
            agenda: BTreeMap::new(),
            model: Model::default(),
            acts: 0..rng.range(20, 120) as u32,
            tags: 0,
            faults: rng.one_in(2),
            summary: Summary::default(),
            ends,
            channels,
            rng,
        };
        world.summary.three_endpoints = u64::from(world.ends.len() == 3);
        world.summary.in_shared_memory = u64::from(shared::is_drawn(script));
        for ch in 0..world.channels.len() {
            world.connect(ch);
        }
        world.at(0, Happening::Act(0));
        let faults = if world.faults { world.rng.range(1, 3) as u32 } else { 0 };
        for n in 0..faults {
            let when = world.rng.below(60_000);
            world.at(when, Happening::Fault(FIRST_FAULT + n));
        }
        if world.channels[0].has_rails() {
            world.summary.with_rails = 1;
            let mut rng = Rng::nth(script.seed, FIRST_RAIL_FAULT.into());
            let most = rng.pick(&[200, 5000, 60_000]);
            for n in 0..rail_faults {
                let when = rng.below(most);
                world.at(when, Happening::RailFault(FIRST_RAIL_FAULT + n));
            }
        }
        world
    }

    pub(super) fn instant(&self, micros: u64) -> Instant {
        self.start + Duration::from_micros(micros)
    }

    pub(super) fn micros(&self, instant: Instant) -> u64 {
        instant.duration_since(self.start).as_nanos().div_ceil(1000) as u64
    }

    pub(super) fn at(&mut self, delay: u64, what: Happening) {
        self.order += 1;
        if let Some(ch) = what.channel() {
            self.channels[ch].pending += 1;
        }
        self.agenda.insert((self.now + delay, self.order), what);
    }

    /// Takes something from the agenda.
    pub(super) fn take(&mut self, key: (u64, u64)) -> Option<Happening> {
        let what = self.agenda.remove(&key)?;
        if let Some(ch) = what.channel() {
            self.channels[ch].pending -= 1;
        }
        Some(what)
    }

    /// The process that runs at an endpoint now.
    pub(super) fn life(&self, ep: usize) -> Life {
        (ep, self.ends[ep].life)
    }

    pub(super) fn wake(&mut self, ch: usize, side: usize, at: u64) {
        let side = &mut self.channels[ch].sides[side];
        side.wake = Some(side.wake.map_or(at, |w| w.min(at)));
    }

    /// Connects the processes that run at both ends now, with the ledgers that they have.
    pub(super) fn connect(&mut self, ch: usize) {
        let dials = self.rng.below(2) as usize;
        let now = self.instant(self.now);
        let lives = self.channels[ch].ends.map(|ep| self.life(ep));
        let silent = self.channels[ch].ends.map(|ep| self.ends[ep].frozen.then_some(self.now));
        let channel = &mut self.channels[ch];
        channel.incarnation += 1;
        channel.connected_at = self.now;
        channel.closing = false;
        channel.lives = lives;
        channel.health.fill(rails::Health::default());
        for side in 0..2 {
            let cfg = channel.config(side, dials);
            channel.listens[side] = cfg.rails[0].opening == Opening::Listen;
            let queues = channel.new_queues(&cfg);
            let s = &mut channel.sides[side];
            let ledger = s.ledger.take();
            let ledger = ledger.unwrap_or_else(|| Ledger::new(epoch(lives[side]), epoch(lives[1 - side])));
            s.conn = Some(Connection::new(cfg, ledger, now).expect("valid"));
            s.queues = queues;
            s.cq.clear();
            s.messages.clear();
            s.readable.clear();
            assert!(s.reads.is_empty(), "r1: reads outlive their connection: {:?}", s.reads);
            s.fenced = false;
            s.closed = false;
            s.silent_since = silent[side];
        }
        self.without_rails(ch);
        for side in 0..2 {
            self.wake(ch, side, self.now);
        }
    }

    pub(super) fn run(mut self) -> Summary {
        loop {
            assert!(self.now < LIMIT, "k5: something waits for ever: {}", self.waiting());
            let next = self.agenda.first_key_value().map(|(&k, _)| k);
            let touched = match (self.next_wake(), next) {
                (Some((at, ch, side)), n) if n.is_none_or(|(t, _)| at <= t) => {
                    self.now = self.now.max(at);
                    self.trace(|| format!("channel {ch}, side {side} wakes"));
                    self.on_wake(ch, side);
                    Some(ch)
                }
                (_, Some(key)) => {
                    self.now = self.now.max(key.0);
                    let what = self.take(key).expect("just seen");
                    let touched = what.channel();
                    self.trace(|| format!("{what:?}"));
                    self.on_happening(what);
                    touched
                }
                _ => break,
            };
            self.summary.steps += 1;
            assert!(self.summary.steps < STEPS, "r8: it never comes to rest: {}", self.waiting());
            self.check_step(touched);
        }
        self.check_end();
        self.summary.micros = self.now;
        self.summary
    }

    pub(super) fn trace(&self, what: impl FnOnce() -> String) {
        if self.script.trace {
            println!("{:>9} {}", self.now, what());
        }
    }

    fn next_wake(&self) -> Option<(u64, usize, usize)> {
        let sides = self.channels.iter().enumerate().flat_map(|(ch, c)| {
            let awake = (0..2).filter(move |&s| !self.ends[c.ends[s]].frozen);
            awake.filter_map(move |s| Some((c.sides[s].wake?, ch, s)))
        });
        sides.min()
    }

    pub(super) fn on_happening(&mut self, what: Happening) {
        match what {
            Happening::Answer(wr) => self.answer(wr),
            Happening::Execute(wr) if self.channels[wr.ch].shared.is_some() => self.enter_ring(wr),
            Happening::Execute(wr) => self.execute(wr),
            Happening::Copy(wr) => self.copy(wr),
            Happening::Show { ch, side, item, incarnation, generation } => {
                let channel = &self.channels[ch];
                let is_now = incarnation == channel.incarnation && !channel.sides[side].fenced;
                if is_now && !self.is_stale(ch, side, &item, generation) {
                    self.show(ch, side, item);
                }
            }
            Happening::Act(n) => {
                self.acts.start = n + 1;
                let mut rng = Rng::nth(self.script.seed, n.into());
                let most = rng.pick(&[1, 100, 2000]);
                let pause = rng.below(most);
                if !self.script.without.contains(&n) {
                    self.act(&mut rng);
                }
                if !self.acts.is_empty() {
                    self.at(pause, Happening::Act(n + 1));
                }
            }
            Happening::Fault(n) => {
                if !self.script.without.contains(&n) {
                    let mut rng = Rng::nth(self.script.seed, n.into());
                    self.fault(&mut rng);
                }
            }
            Happening::RailFault(n) => {
                if !self.script.without.contains(&n) {
                    let mut rng = Rng::nth(self.script.seed, n.into());
                    self.rail_fault(n, &mut rng);
                }
            }
            Happening::RailFence { ch, side, rail, incarnation } => {
                self.rail_fence(ch, side, rail, incarnation)
            }
            Happening::RailProbe { ch, side, rail, incarnation } => {
                self.rail_probe(ch, side, rail, incarnation)
            }
            Happening::Thaw { ep, life } => self.thaw(ep, life),
            Happening::Fence { ch, side, incarnation } => self.fence(ch, side, incarnation),
            Happening::Reconnect { ch } => {
                self.channels[ch].reconnecting = false;
                self.summary.reconnects += 1;
                self.connect(ch);
            }
        }
    }
}
