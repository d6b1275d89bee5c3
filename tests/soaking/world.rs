//! The processes of a soak: laps, signals, kills, and what was survived.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::time::Duration;

use landfall::device::{Profile, SoftConfig, SoftTransport};
use landfall::kv::Bootstrap;
use tokio::time::Instant;

use crate::Args;
use crate::content::{BLOCK_BYTES, Rng};
use crate::faults::faults;
use crate::link::tag;
use crate::node::{Node, PATIENCE, hear_any};
use crate::said::Said;

/// One that listens, and those that dial.
const NODES: usize = 3;
const LISTENS: usize = 0;
/// Longer than a lap takes to come to rest.
const REST: Duration = Duration::from_secs(120);
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
    bootstrap: Bootstrap,
    /// Without signals, and without faults that kill.
    calm: bool,
    /// Lives that have ended before the lap did: what they had not said is lost.
    dead: HashSet<u64>,
    said: Said,
    address: Option<String>,
}

/// Everything that was survived, and what was not.
#[derive(Default)]
pub struct Survived {
    pub seconds: f64,
    pub laps: u64,
    pub transfers: u64,
    pub bytes: u64,
    pub lost: u64,
    pub doubts: u64,
    pub arrivals: u64,
    pub kills: u64,
    pub stops: u64,
    pub links: u64,
    /// Processes that were compared with themselves.
    pub levels: u64,
    pub operations: BTreeMap<String, u64>,
    pub mismatches: Vec<String>,
    pub leaks: Vec<String>,
}

impl World {
    pub fn new(args: Args) -> Self {
        let rng = Rng::new(args.seed);
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
            self.survived.add(lap);
            self.survived.seconds = start.elapsed().as_secs_f64();
            ran?;
        }
        Ok(())
    }

    fn draw(&mut self) -> Lap {
        let number = self.survived.laps;
        let in_turn = Profile::ALL[number as usize % Profile::ALL.len()];
        let way = SoftTransport::ALL[number as usize / 2 % SoftTransport::ALL.len()];
        Lap {
            number,
            profile: self.args.profile.unwrap_or(in_turn),
            transport: self.args.transport.unwrap_or(way),
            // All of them the same way. Some profiles leave no choice.
            bootstrap: if self.rng.one_in(3) { Bootstrap::Cm } else { Bootstrap::Auto },
            calm: number % 3 == 1,
            dead: HashSet::new(),
            said: Said::default(),
            address: None,
        }
    }

    async fn lap(&mut self, lap: &mut Lap, length: Duration) -> Result<(), String> {
        if self.args.verbose {
            println!("lap {}: {} over {}, calm: {}", lap.number, lap.profile, lap.transport, lap.calm);
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
            tokio::select! {
                heard = self.hear(lap) => heard?,
                () = tokio::time::sleep_until(next.unwrap_or(until)) => {
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
            if let Some(player) = &mut self.players[who] {
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
            rest.await.map_err(|_| format!("process {who} does not come to rest within {REST:?} (K5)"))??;
        }
        let dead = std::mem::take(&mut lap.dead);
        lap.said.verdict(|transfer| !dead.contains(&tag::receiver(transfer)));
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
        let command = self.command(lap, who, life)?;
        if let Some(player) = &mut self.players[who] {
            (player.life, player.state) = (life, State::Running);
        }
        self.tell(who, &command).await;
        Ok(())
    }

    fn command(&mut self, lap: &Lap, who: usize, life: u64) -> Result<String, String> {
        let role = if who == LISTENS { "listen" } else { "dial" };
        let variable = |name: &str| std::env::var(name).map_err(|_| format!("--device: {name} is not set"));
        let (device, host) = if self.args.device {
            let name = if who == LISTENS { "RDMA_DEV1" } else { "RDMA_DEV0" };
            (variable(name)?, variable("RDMA_IP1")?)
        } else {
            (self.soft(lap, who).to_string(), "127.0.0.1".to_owned())
        };
        let address = lap.address.clone().unwrap_or_else(|| format!("{host}:0"));
        let qps = if lap.profile == Profile::Tiny { self.rng.range(1, 2) } else { self.rng.range(1, 4) };
        let (seed, bootstrap) = (self.rng.next(), lap.bootstrap.name());
        Ok(format!("{role} {life} {seed} {qps} {bootstrap} {address} {device}"))
    }

    fn soft(&mut self, lap: &Lap, who: usize) -> SoftConfig {
        // Where the listening process takes either transport, the others differ.
        let transport = match (lap.transport, who) {
            (SoftTransport::Auto, 1) => SoftTransport::Shm,
            (SoftTransport::Auto, 2) => SoftTransport::Tcp,
            (transport, _) => transport,
        };
        let rng = &mut self.rng;
        let soft = SoftConfig::new().profile(lap.profile).transport(transport).seed(rng.next() >> 32);
        if lap.calm {
            return soft;
        }
        match rng.range(0, 3) {
            0 => soft.faults(faults(rng)),
            1 => soft.rail_faults(rng.range(0, 3) as u32, faults(rng)),
            _ => soft,
        }
    }

    /// Takes one line, or the end of a process: that one is replaced, unless the lap is ending.
    async fn hear(&mut self, lap: &mut Lap) -> Result<(), String> {
        let (who, line) = {
            let mut nodes: Vec<_> =
                self.players.iter_mut().map(|p| p.as_mut().map(|p| &mut p.node)).collect();
            hear_any(&mut nodes, |_| true).await
        };
        let Some(player) = &mut self.players[who] else { return Ok(()) };
        let Some(line) = line else {
            player.node.ended().await?;
            self.survived.kills += 1;
            lap.dead.insert(player.life & 0xffff);
            let running = player.state == State::Running;
            self.players[who] = None;
            return if running { self.begin(lap, who).await } else { Ok(()) };
        };
        if self.args.verbose {
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
        if self.args.verbose {
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

impl Survived {
    fn add(&mut self, lap: Lap) {
        self.laps += 1;
        for (transfer, landed) in &lap.said.ended {
            if *landed {
                self.transfers += 1;
                self.bytes += tag::blocks(*transfer) * BLOCK_BYTES;
            } else {
                self.lost += 1;
            }
        }
        self.doubts += lap.said.doubts.len() as u64;
        self.arrivals += lap.said.arrived.len() as u64;
        let which = format!("lap {} ({} over {})", lap.number, lap.profile, lap.transport);
        self.mismatches.extend(lap.said.bad.iter().map(|what| format!("{which}: {what}")));
        self.leaks.extend(lap.said.leaks.iter().map(|what| format!("{which}: {what}")));
    }

    pub fn is_clean(&self) -> bool {
        self.mismatches.is_empty() && self.leaks.is_empty()
    }

    pub fn to_json(&self, args: &Args, ended: bool) -> serde_json::Value {
        serde_json::json!({
            "seed": args.seed,
            "seconds": self.seconds,
            "device": args.device,
            "profile": args.profile.map(|p| p.to_string()),
            "transport": args.transport.map(|t| t.to_string()),
            "laps": self.laps,
            "transfers": self.transfers,
            "bytes": self.bytes,
            "not_delivered": self.lost,
            "in_doubt": self.doubts,
            "arrivals": self.arrivals,
            "operations": self.operations,
            "kills": self.kills,
            "stops": self.stops,
            "channels": self.links,
            "level_checks": self.levels,
            "mismatches": self.mismatches,
            "leaks": self.leaks,
            "came_to_its_end": ended,
        })
    }
}

impl fmt::Display for Survived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, laps, transfers, lost, doubts, kills, stops, links, levels, .. } = self;
        write!(
            f,
            "{seconds:.0} s in {laps} laps: {transfers} transfers landed ({:.1} MB), {lost} not delivered, {doubts} in doubt, \
             {} operations; {kills} kills, {stops} stops, {links} channels; {} mismatches, {} leaks in {levels} looks",
            self.bytes as f64 / 1e6,
            self.operations.values().sum::<u64>(),
            self.mismatches.len(),
            self.leaks.len(),
        )
    }
}
