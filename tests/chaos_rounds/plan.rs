//! A round, drawn from its seed.

use std::fmt;
use std::time::Duration;

use landfall::device::{Profile, SoftConfig, SoftTransport};
use landfall::kv::Bootstrap;

use crate::content::Rng;
use crate::faults::faults;

/// Transfers that each sender tries.
const TRANSFERS: (u64, u64) = (4, 24);

/// A signal to one of the workers, at its `step`-th step (an arrival taken, a write ended).
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

/// What a worker is told.
#[derive(Clone, Debug)]
pub struct Part {
    pub seed: u64,
    pub bootstrap: Bootstrap,
    pub soft: SoftConfig,
    pub qps: u64,
    pub transfers: u64,
}

/// A round. Part 0 is the receiver's.
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
        // Each profile meets each transport. Where the receiver takes either, its senders differ.
        let transport = transport.unwrap_or_else(|| {
            let turn = seed / Profile::ALL.len() as u64;
            SoftTransport::ALL[(turn % SoftTransport::ALL.len() as u64) as usize]
        });
        let senders = rng.range(1, 2) as usize;
        // All of them the same way. Some profiles leave no choice.
        let bootstrap = if rng.one_in(3) { Bootstrap::Cm } else { Bootstrap::Auto };
        let mut parts = Vec::new();
        for part in 0..=senders {
            let transport = match (transport, part) {
                (SoftTransport::Auto, 1) => SoftTransport::Shm,
                (SoftTransport::Auto, 2) => SoftTransport::Tcp,
                _ => transport,
            };
            let mut soft = SoftConfig::new().profile(profile).transport(transport).seed(rng.next() >> 32);
            let qps = if profile == Profile::Tiny { rng.range(1, 2) } else { rng.range(1, 4) };
            // Of all queue pairs, of one, or none.
            match rng.range(0, 3) {
                0 => soft = soft.faults(faults(&mut rng)),
                1 => soft = soft.rail_faults(rng.range(0, 3) as u32, faults(&mut rng)),
                _ => {}
            }
            let (seed, transfers) = (rng.next(), rng.range(TRANSFERS.0, TRANSFERS.1));
            parts.push(Part { seed, bootstrap, soft, qps, transfers });
        }
        let mut shots = Vec::new();
        for _ in 0..rng.range(0, 2) {
            let worker = rng.range(0, senders as u64) as usize;
            let step = rng.range(0, TRANSFERS.1 / 2);
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
            let role = if i == 0 { "receiver" } else { "sender" };
            let Part { soft, qps, transfers, bootstrap, .. } = part;
            let bootstrap = bootstrap.name();
            writeln!(
                f,
                "  {i} {role}: LANDFALL_SOFT={soft}, bootstrap {bootstrap}, {qps} queue pairs, {transfers} transfers"
            )?;
        }
        for Shot { worker, step, what } in &self.shots {
            writeln!(f, "  {what:?} to {worker} at its step {step}")?;
        }
        Ok(())
    }
}
