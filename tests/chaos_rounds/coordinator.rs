//! A round from outside: its processes, its signals, and whether what they say fits together.

use std::time::Duration;

use tokio::time::Instant;

use crate::plan::{Plan, Shot, Signal};
use crate::traffic::node::{Node, PATIENCE, hear_any};
use crate::traffic::part::Part;
use crate::traffic::said::{Counts, Said};

/// A round that takes longer hangs.
const ROUND: Duration = Duration::from_secs(150);

/// The worker processes, which live from round to round, and what all rounds have seen.
pub struct Coordinator {
    nodes: Vec<Option<Node>>,
    verbose: bool,
    counts: Counts,
    killed: u64,
    stopped: u64,
}

/// One worker's part of the round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Done,
    Dead,
}

/// A worker during a round.
struct Runner {
    state: State,
    steps: u64,
    wake: Option<Instant>,
}

impl Coordinator {
    pub fn new(verbose: bool) -> Self {
        Self { nodes: Vec::new(), verbose, counts: Counts::default(), killed: 0, stopped: 0 }
    }

    pub fn totals(&self) -> String {
        let Self { counts, killed, stopped, .. } = self;
        format!("{counts}; {killed} processes killed, {stopped} stopped")
    }

    /// The processes of a round that went wrong are not asked anything more.
    pub fn renew(&mut self) {
        self.nodes.clear();
    }

    pub async fn end(&mut self) {
        for node in self.nodes.drain(..).flatten() {
            node.kill().await;
        }
    }

    /// Runs a round. The error says what does not hold.
    pub async fn round(&mut self, plan: &Plan) -> Result<(), String> {
        while self.nodes.len() < plan.parts.len() {
            self.nodes.push(None);
        }
        for node in self.nodes.iter_mut().take(plan.parts.len()).filter(|n| n.is_none()) {
            *node = Some(Node::start().map_err(|e| format!("starting a worker: {e}"))?);
        }
        let mut said = Said::default();
        let ran = tokio::time::timeout(ROUND, self.run(plan, &mut said)).await;
        self.counts += said.counts();
        let dead = match ran {
            Ok(result) => result?,
            Err(_) => return Err(format!("the round does not end within {ROUND:?}; {:?}", said.bad)),
        };
        said.verdict(|life| !dead.contains(&life));
        said.bad.append(&mut said.leaks);
        if said.bad.is_empty() { Ok(()) } else { Err(said.bad.join("; ")) }
    }

    /// The lives that did not reach the end of the round: what they had not said is lost.
    async fn run(&mut self, plan: &Plan, said: &mut Said) -> Result<Vec<u64>, String> {
        let count = plan.parts.len();
        let mut runners: Vec<Runner> =
            (0..count).map(|_| Runner { state: State::Running, steps: 0, wake: None }).collect();
        let mut shots = plan.shots.clone();
        self.tell(0, &plan.parts[0].to_string()).await;
        let (mut listened, mut stop_told) = (false, false);
        while runners.iter().any(|r| r.state == State::Running) {
            self.shoot(&mut shots, &mut runners);
            if !stop_told && runners[1..].iter().all(|r| r.state != State::Running) {
                stop_told = true;
                self.tell(0, "stop").await;
            }
            let wake = runners.iter().filter_map(|r| r.wake).min();
            let (who, line) = tokio::select! {
                heard = hear_any(&mut self.nodes, |who| {
                    runners.get(who).is_some_and(|r| r.state == State::Running)
                }) => heard,
                () = sleep_until(wake) => {
                    self.wake(&mut runners);
                    continue;
                }
                () = tokio::time::sleep(PATIENCE) => return Err("every process is silent".to_owned()),
            };
            let Some(line) = line else {
                self.killed += 1;
                runners[who].state = State::Dead;
                runners[who].wake = None;
                if let Some(node) = &mut self.nodes[who] {
                    node.ended().await?;
                }
                self.nodes[who] = None;
                if who == 0 && !listened {
                    // Those who dial were told nothing, and have nothing to end.
                    runners[1..].iter_mut().for_each(|r| r.state = State::Done);
                }
                continue;
            };
            if self.verbose {
                println!("  {who}: {line}");
            }
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("step", _) => runners[who].steps += 1,
                ("did" | "linked", _) => {}
                ("done", _) => runners[who].state = State::Done,
                ("listening", address) => {
                    listened = true;
                    for (i, part) in plan.parts.iter().enumerate().skip(1) {
                        let part = Part { at: address.to_owned(), ..part.clone() };
                        self.tell(i, &part.to_string()).await;
                    }
                }
                (what, rest) => said.hear(what, rest)?,
            }
        }
        // One that was stopped with its last word out.
        runners.iter_mut().for_each(|r| r.wake = r.wake.map(|_| Instant::now()));
        self.wake(&mut runners);
        let dead = runners.iter().zip(&plan.parts).filter(|(runner, _)| runner.state == State::Dead);
        Ok(dead.map(|(_, part)| part.life).collect())
    }

    async fn tell(&mut self, who: usize, line: &str) {
        if self.verbose {
            println!("  to {who}: {line}");
        }
        if let Some(node) = &mut self.nodes[who] {
            node.tell(line).await;
        }
    }

    /// Sends the signals whose moment has come.
    fn shoot(&mut self, shots: &mut Vec<Shot>, runners: &mut [Runner]) {
        shots.retain(|shot| {
            let runner = &mut runners[shot.worker];
            if runner.state != State::Running {
                return false;
            }
            if runner.steps < shot.step || runner.wake.is_some() {
                return true;
            }
            let Some(node) = &self.nodes[shot.worker] else { return false };
            match shot.what {
                Signal::Kill => node.signal(libc::SIGKILL),
                Signal::Stop(for_) => {
                    node.signal(libc::SIGSTOP);
                    self.stopped += 1;
                    runner.wake = Some(Instant::now() + for_);
                }
            }
            false
        });
    }

    /// Wakes the stopped workers whose time is over.
    fn wake(&self, runners: &mut [Runner]) {
        let now = Instant::now();
        for (runner, node) in runners.iter_mut().zip(&self.nodes) {
            if runner.wake.is_some_and(|at| at <= now) {
                runner.wake = None;
                if let Some(node) = node {
                    node.signal(libc::SIGCONT);
                }
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
