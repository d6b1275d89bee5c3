//! The processes of a soak: laps, signals, kills, and what was survived.

use std::collections::HashSet;
use std::time::Duration;

use landfall::device::{Profile, SoftTransport};
use landfall::kv::Bootstrap;
use tokio::time::Instant;

use crate::Args;
use crate::survived::Survived;
use crate::traffic::content::Rng;
use crate::traffic::node::{Node, PATIENCE, hear_any};
use crate::traffic::part::{Part, Role};
use crate::traffic::rails::Rails;
use crate::traffic::said::Said;
use crate::waits::waits;

/// One that listens, and those that dial.
const NODES: usize = 3;
const LISTENS: usize = 0;
/// Longer than a lap takes to come to rest.
const REST: Duration = Duration::from_secs(120);
/// The most blocks of an operation.
const MOST: u64 = 32;
/// Between two signals, in milliseconds.
const BETWEEN: (u64, u64) = (300, 2500);

/// A process, and its part of the lap.
struct Player {
    node: Node,
    life: u64,
    state: State,
    /// When it is woken, if it is stopped.
    wake: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// It was told to come to rest.
    Stopping,
    Done,
}

pub struct World {
    args: Args,
    rng: Rng,
    players: Vec<Option<Player>>,
    lives: u64,
    survived: Survived,
}

/// What the processes of a lap run on.
struct Lap {
    number: u64,
    profile: Profile,
    transport: SoftTransport,
    rails: Rails,
    bootstrap: Bootstrap,
    /// Without signals, and without faults.
    calm: bool,
    /// Lives that have ended before the lap did: what they had not said is lost.
    dead: HashSet<u64>,
    said: Said,
    address: Option<String>,
}

impl World {
    pub fn new(args: Args) -> Self {
        let rng = Rng::new(args.common.seed);
        let players = (0..NODES).map(|_| None).collect();
        Self { args, rng, players, lives: 0, survived: Survived::default() }
    }

    pub fn survived(&self) -> &Survived {
        &self.survived
    }

    pub async fn end(&mut self) {
        for player in self.players.drain(..).flatten() {
            player.node.kill().await;
        }
    }

    /// Laps until the time is over. The error is of something that goes no further.
    pub async fn run(&mut self) -> Result<(), String> {
        let start = Instant::now();
        let until = start + self.args.time;
        while Instant::now() < until {
            let mut lap = self.draw();
            let length = self.args.lap.min(until - Instant::now());
            let ran = self.lap(&mut lap, length).await;
            let which = format!("lap {} ({} over {})", lap.number, lap.profile, lap.transport);
            self.survived.add(lap.said, &which);
            self.survived.seconds = start.elapsed().as_secs_f64();
            ran?;
        }
        Ok(())
    }

    fn draw(&mut self) -> Lap {
        let number = self.survived.laps;
        let in_turn = Profile::ALL[number as usize % Profile::ALL.len()];
        let way = SoftTransport::ALL[number as usize / 2 % SoftTransport::ALL.len()];
        let profile = self.args.common.profile.unwrap_or(in_turn);
        let transport = self.args.common.transport.unwrap_or(way);
        Lap {
            number,
            profile,
            transport,
            rails: Rails::draw(profile, transport, &mut self.rng),
            // All of them the same way. Some profiles leave no choice.
            bootstrap: if self.rng.one_in(3) { Bootstrap::Cm } else { Bootstrap::Auto },
            calm: number % 3 == 1,
            dead: HashSet::new(),
            said: Said::default(),
            address: None,
        }
    }

    async fn lap(&mut self, lap: &mut Lap, length: Duration) -> Result<(), String> {
        if self.args.common.verbose {
            let (rails, calm) = (lap.rails.count(), lap.calm);
            println!(
                "lap {}: {} over {}, {rails} rails, calm: {calm}",
                lap.number, lap.profile, lap.transport
            );
        }
        self.begin(lap, LISTENS).await?;
        let ready = tokio::time::timeout(PATIENCE, async {
            while lap.address.is_none() {
                self.hear(lap).await?;
            }
            Ok::<_, String>(())
        });
        ready.await.map_err(|_| "the listening process says nothing".to_owned())??;
        for who in (0..NODES).filter(|who| *who != LISTENS) {
            self.begin(lap, who).await?;
        }
        let until = Instant::now() + length;
        let mut shot = self.next_shot();
        while Instant::now() < until {
            let wake = self.players.iter().flatten().filter_map(|p| p.wake).min();
            let next = [Some(until), (!lap.calm).then_some(shot), wake].into_iter().flatten().min();
            // A line is not lost where the time comes first; a process that is replaced would be, so that comes after.
            let heard = tokio::select! {
                heard = self.next_line() => Some(heard),
                () = tokio::time::sleep_until(next.unwrap_or(until)) => None,
            };
            match heard {
                Some((who, line)) => self.take(lap, who, line).await?,
                None => {
                    self.wake(Instant::now());
                    if !lap.calm && Instant::now() >= shot {
                        self.shoot();
                        shot = self.next_shot();
                    }
                }
            }
        }
        // Those who dial close their channels before the other end goes.
        for who in (0..NODES).filter(|who| *who != LISTENS).chain([LISTENS]) {
            if let Some(player) = self.players[who].as_mut().filter(|player| player.state == State::Running) {
                player.state = State::Stopping;
            }
            self.wake(Instant::now() + REST);
            self.tell(who, "stop").await;
            let rest = tokio::time::timeout(REST, async {
                while self.players[who].as_ref().is_some_and(|p| p.state != State::Done) {
                    self.hear(lap).await?;
                }
                Ok::<_, String>(())
            });
            let Ok(rested) = rest.await else {
                let waits = self.players[who]
                    .as_ref()
                    .and_then(|player| player.node.pid())
                    .map(waits)
                    .unwrap_or_default();
                return Err(format!(
                    "process {who} does not come to rest within {REST:?} (K5); its threads:\n{waits}"
                ));
            };
            rested?;
        }
        let dead = std::mem::take(&mut lap.dead);
        lap.said.verdict(|life| !dead.contains(&life));
        Ok(())
    }

    /// Gives a process its part, and starts it if it is not there.
    async fn begin(&mut self, lap: &Lap, who: usize) -> Result<(), String> {
        self.lives += 1;
        let life = self.lives;
        if self.players[who].is_none() {
            let node = Node::start().map_err(|e| format!("starting a process: {e}"))?;
            self.players[who] = Some(Player { node, life, state: State::Done, wake: None });
        }
        let part = self.part(lap, who, life)?;
        if let Some(player) = &mut self.players[who] {
            (player.life, player.state) = (life, State::Running);
        }
        self.tell(who, &part.to_string()).await;
        Ok(())
    }

    fn part(&mut self, lap: &Lap, who: usize, life: u64) -> Result<Part, String> {
        let (devices, host) = if self.args.device {
            (self.rdma_devices(lap, who)?, variable("RDMA_IP1")?)
        } else {
            let rng = &mut self.rng;
            let soft = if lap.calm { lap.rails.calm(who, rng) } else { lap.rails.devices(who, rng) };
            (soft.iter().map(ToString::to_string).collect(), "127.0.0.1".to_owned())
        };
        let rng = &mut self.rng;
        Ok(Part {
            role: if who == LISTENS { Role::Listen } else { Role::Dial },
            life,
            seed: rng.next(),
            qps: lap.rails.qps(rng),
            bootstrap: lap.bootstrap,
            at: lap.address.clone().unwrap_or_else(|| format!("{host}:0")),
            operations: None,
            most: MOST,
            // Not in the way of the channels' own life: several seconds, beside a lap of many.
            cuts: if lap.calm { 0 } else { lap.rails.cuts(rng) },
            // Processes are killed.
            steady: false,
            strict: lap.rails.strict(rng),
            blocks: lap.rails.blocks(who),
            devices,
        })
    }

    /// Of the lab's two devices each process has its own, or both, its own first.
    fn rdma_devices(&self, lap: &Lap, who: usize) -> Result<Vec<String>, String> {
        let (dials, listens) = (variable("RDMA_DEV0")?, variable("RDMA_DEV1")?);
        let mut devices = if who == LISTENS { vec![listens, dials] } else { vec![dials, listens] };
        devices.truncate(lap.rails.count());
        Ok(devices)
    }

    async fn hear(&mut self, lap: &mut Lap) -> Result<(), String> {
        let (who, line) = self.next_line().await;
        self.take(lap, who, line).await
    }

    /// The next line of any process, `None` for its end. Dropping the future loses nothing.
    async fn next_line(&mut self) -> (usize, Option<String>) {
        let mut nodes: Vec<_> = self.players.iter_mut().map(|p| p.as_mut().map(|p| &mut p.node)).collect();
        hear_any(&mut nodes, |_| true).await
    }

    /// Takes a line, or the end of a process: that one is replaced, unless the lap is ending.
    async fn take(&mut self, lap: &mut Lap, who: usize, line: Option<String>) -> Result<(), String> {
        let Some(player) = &mut self.players[who] else { return Ok(()) };
        let Some(line) = line else {
            player.node.ended().await?;
            self.survived.kills += 1;
            lap.dead.insert(player.life & 0xffff);
            let running = player.state == State::Running;
            self.players[who] = None;
            return if running { self.begin(lap, who).await } else { Ok(()) };
        };
        if self.args.common.verbose {
            println!("  {who}: {line}");
        }
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("step", _) => {}
            ("done", _) => player.state = State::Done,
            ("listening", address) => lap.address = Some(address.to_owned()),
            ("linked", _) if who != LISTENS => self.survived.links += 1,
            ("linked", _) => {}
            ("levels", _) => self.survived.levels += 1,
            ("did", what) => *self.survived.operations.entry(what.to_owned()).or_default() += 1,
            (what, rest) => lap.said.hear(what, rest)?,
        }
        Ok(())
    }

    async fn tell(&mut self, who: usize, line: &str) {
        if self.args.common.verbose {
            println!("  to {who}: {line}");
        }
        if let Some(player) = &mut self.players[who] {
            player.node.tell(line).await;
        }
    }

    fn next_shot(&mut self) -> Instant {
        Instant::now() + Duration::from_millis(self.rng.range(BETWEEN.0, BETWEEN.1))
    }

    /// A signal to one of the processes that run.
    fn shoot(&mut self) {
        let who = self.rng.range(0, NODES as u64 - 1) as usize;
        let what = self.rng.range(0, 3);
        let stop = Duration::from_millis(match what {
            // Sometimes shorter, sometimes longer than the peers are patient.
            1 => self.rng.range(1200, 2500),
            _ => self.rng.range(1, 400),
        });
        let Some(player) = &mut self.players[who] else { return };
        if player.state != State::Running || player.wake.is_some() {
            return;
        }
        if what == 0 {
            player.node.signal(libc::SIGKILL);
        } else {
            player.node.signal(libc::SIGSTOP);
            player.wake = Some(Instant::now() + stop);
            self.survived.stops += 1;
        }
    }

    /// Wakes the stopped processes whose time is over by `now`.
    fn wake(&mut self, now: Instant) {
        for player in self.players.iter_mut().flatten() {
            if player.wake.is_some_and(|at| at <= now) {
                player.wake = None;
                player.node.signal(libc::SIGCONT);
            }
        }
    }
}

/// What the lab tells of its devices.
fn variable(name: &str) -> Result<String, String> {
    std::env::var(name).map_err(|_| format!("--device: {name} is not set"))
}
