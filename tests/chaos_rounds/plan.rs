//! A round, drawn from its seed.

use std::fmt;
use std::time::Duration;

use landfall::device::{Profile, SoftTransport};
use landfall::kv::Bootstrap;

use crate::traffic::content::Rng;
use crate::traffic::part::{Part, Role};
use crate::traffic::rails::Rails;

/// Operations that each of those who dial does.
const OPERATIONS: (u64, u64) = (4, 24);
/// The most blocks of one.
const MOST: u64 = 8;

/// A signal to one of the workers, at its `step`-th step (an arrival taken, a write or a read ended).
#[derive(Clone, Copy, Debug)]
pub struct Shot {
    pub worker: usize,
    pub step: u64,
    pub what: Signal,
}

#[derive(Clone, Copy, Debug)]
pub enum Signal {
    Kill,
    /// SIGSTOP, and SIGCONT so much later.
    Stop(Duration),
}

/// A round. Part 0 listens.
#[derive(Clone, Debug)]
pub struct Plan {
    pub parts: Vec<Part>,
    pub shots: Vec<Shot>,
}

impl Plan {
    pub fn draw(seed: u64, profile: Option<Profile>, transport: Option<SoftTransport>) -> Self {
        let mut rng = Rng::new(seed);
        let in_turn = Profile::ALL[(seed % Profile::ALL.len() as u64) as usize];
        let profile = profile.unwrap_or(in_turn);
        // Each profile meets each transport.
        let transport = transport.unwrap_or_else(|| {
            let turn = seed / Profile::ALL.len() as u64;
            SoftTransport::ALL[(turn % SoftTransport::ALL.len() as u64) as usize]
        });
        let rails = Rails::draw(profile, transport, &mut rng);
        let dialling = rng.range(1, 2) as usize;
        // All of them the same way. Some profiles leave no choice.
        let bootstrap = if rng.one_in(3) { Bootstrap::Cm } else { Bootstrap::Auto };
        let parts = (0..=dialling).map(|who| {
            let listens = who == 0;
            let devices = rails.devices(who, &mut rng);
            Part {
                role: if listens { Role::Listen } else { Role::Dial },
                life: who as u64,
                seed: rng.next(),
                qps: rails.qps(&mut rng),
                bootstrap,
                at: "127.0.0.1:0".to_owned(),
                operations: Some(match listens {
                    // In every other round the traffic goes one way.
                    true if rng.one_in(2) => 0,
                    true => rng.range(1, OPERATIONS.1 / 2),
                    false => rng.range(OPERATIONS.0, OPERATIONS.1),
                }),
                most: MOST,
                cuts: rails.cuts(&mut rng),
                steady: rails.steady,
                strict: rails.strict(&mut rng),
                blocks: rails.blocks(who),
                devices: devices.iter().map(ToString::to_string).collect(),
            }
        });
        let parts = parts.collect();
        let mut shots = Vec::new();
        for _ in 0..if rails.steady { 0 } else { rng.range(0, 2) } {
            let worker = rng.range(0, dialling as u64) as usize;
            let step = rng.range(0, OPERATIONS.1 / 2);
            let what = match rng.range(0, 3) {
                0 => Signal::Kill,
                // Sometimes shorter, sometimes longer than the peers are patient.
                1 => Signal::Stop(Duration::from_millis(rng.range(1200, 2500))),
                _ => Signal::Stop(Duration::from_millis(rng.range(1, 400))),
            };
            shots.push(Shot { worker, step, what });
        }
        Self { parts, shots }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.parts.iter().enumerate() {
            writeln!(f, "  {i}: {part}")?;
        }
        for Shot { worker, step, what } in &self.shots {
            writeln!(f, "  {what:?} to {worker} at its step {step}")?;
        }
        Ok(())
    }
}
