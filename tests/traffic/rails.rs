//! The devices of processes that connect with each other, drawn: how many, of which kind, and what befalls each.

use landfall::device::{Profile, SoftConfig, SoftTransport};

use super::blocks::Held;
use super::content::Rng;
use super::faults::{Ends, faults};

/// The most rails of a channel.
const MOST: u64 = 4;

/// What the processes of a round, or of a lap, have in common.
#[derive(Clone, Debug)]
pub struct Rails {
    /// By device: its profile, and what it runs over. Each process has the first of them, some fewer.
    kinds: Vec<(Profile, SoftTransport)>,
    /// See [`Part::steady`](super::part::Part::steady).
    pub steady: bool,
    /// The blocks of the process that listens and of each of those that dial. Where they differ, every transfer is mapped.
    blocks: [Held; 3],
}

impl Rails {
    /// The first device of each process has this profile and runs over this.
    pub fn draw(profile: Profile, transport: SoftTransport, rng: &mut Rng) -> Self {
        let count = if rng.one_in(2) { 1 } else { rng.range(2, MOST) };
        let mixed = rng.one_in(4);
        let mut kinds = vec![(profile, transport)];
        for _ in 1..count {
            kinds.push(match mixed {
                // Rails with order and without beside each other, with immediates and without.
                true => {
                    let any = Profile::ALL[rng.range(0, Profile::ALL.len() as u64 - 1) as usize];
                    (any, if transport == SoftTransport::Auto { pick(rng) } else { transport })
                }
                false => (profile, transport),
            });
        }
        let steady = count > 1 && rng.one_in(2);
        let usual = Held::usual(rng);
        let blocks = if rng.one_in(3) { [(); 3].map(|()| Held::any(rng)) } else { [usual; 3] };
        Self { kinds, steady, blocks }
    }

    /// The most rails of a channel.
    pub fn count(&self) -> usize {
        self.kinds.len()
    }

    /// Queue pairs of each rail.
    pub fn qps(&self, rng: &mut Rng) -> u64 {
        let tiny = self.kinds.iter().any(|(profile, _)| *profile == Profile::Tiny);
        rng.range(1, if tiny { 2 } else { 4 })
    }

    /// See [`Part::cuts`](super::part::Part::cuts).
    pub fn cuts(&self, rng: &mut Rng) -> u64 {
        if self.kinds.len() > 1 && rng.one_in(2) { rng.range(10, 200) } else { 0 }
    }

    pub fn blocks(&self, who: usize) -> Held {
        self.blocks[who.min(self.blocks.len() - 1)]
    }

    pub fn strict(&self, rng: &mut Rng) -> bool {
        !self.steady && rng.one_in(8)
    }

    /// The devices of a process, which is the first one or another, with what befalls them.
    pub fn devices(&self, who: usize, rng: &mut Rng) -> Vec<SoftConfig> {
        let ends = if self.steady { Ends::AtOnce } else { Ends::Any };
        let calm = (0..).zip(self.calm(who, rng));
        calm.map(|(rail, soft)| if self.steady && rail == 0 { soft } else { befallen(soft, rail, ends, rng) })
            .collect()
    }

    /// The same without faults. Where the first process takes either transport, the others differ.
    pub fn calm(&self, who: usize, rng: &mut Rng) -> Vec<SoftConfig> {
        let all = self.count() as u64;
        // Two at least where there are several, so that one can go.
        let count = if all > 1 { rng.range(2, all) } else { 1 };
        let kinds = self.kinds.iter().take(count as usize);
        kinds
            .map(|(profile, transport)| {
                let transport = match (transport, who) {
                    (SoftTransport::Auto, 1) => SoftTransport::Shm,
                    (SoftTransport::Auto, 2) => SoftTransport::Tcp,
                    (transport, _) => *transport,
                };
                SoftConfig::new().profile(*profile).transport(transport).seed(rng.next() >> 32)
            })
            .collect()
    }
}

fn pick(rng: &mut Rng) -> SoftTransport {
    SoftTransport::ALL[rng.range(0, SoftTransport::ALL.len() as u64 - 1) as usize]
}

/// Faults of all queue pairs, of one, or none; a device that is not the first may fail as it is set up.
fn befallen(soft: SoftConfig, rail: usize, ends: Ends, rng: &mut Rng) -> SoftConfig {
    match rng.range(0, 9) {
        0 | 1 => soft.faults(faults(ends, rng)),
        2 | 3 => soft.rail_faults(rng.range(0, 3) as u32, faults(ends, rng)),
        4 if rail > 0 => soft.fail_cq(rng.range(1, 3)),
        5 if rail > 0 => soft.fail_qp(rng.range(1, 6)),
        _ => soft,
    }
}
