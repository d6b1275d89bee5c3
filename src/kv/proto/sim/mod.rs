//! A seeded simulation: two endpoints with memory, a wire that delays, reorders and dies, and a user who writes,
//! cancels, revokes and reconnects at random. Every contract is checked while it runs; see `model`.
//!
//! A failure names its seed. `LANDFALL_SEED=n` replays one seed, `LANDFALL_SEEDS=n` runs so many. The same seed
//! gives the same run on every machine.

mod device;
mod model;
mod user;
mod wire;
mod world;

use world::World;

/// splitmix64: small, good enough, and ours, so that a seed means the same for ever.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In `0..n`.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// In `low..=high`.
    pub(super) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs one seed and says it if that fails.
fn run(seed: u64) -> world::Summary {
    struct Named(u64);
    impl Drop for Named {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("simulation failed: LANDFALL_SEED={}", self.0);
            }
        }
    }
    let _named = Named(seed);
    World::new(seed).run()
}

#[test]
fn k1_to_k8_hold_under_seeds() {
    if let Some(seed) = env("LANDFALL_SEED") {
        println!("{:?}", run(seed));
        return;
    }
    let mut total = world::Summary::default();
    for seed in 0..env("LANDFALL_SEEDS").unwrap_or(2000) {
        total.add(&run(seed));
    }
    println!("{total:?}");
    // The simulation has been where it is meant to go.
    let Summary {
        landed,
        not_delivered,
        in_doubt,
        resolved_landed,
        resolved_not,
        revoked,
        lost,
        reconnects,
        ..
    } = total;
    for (what, n) in [
        ("landed", landed),
        ("not delivered", not_delivered),
        ("in doubt", in_doubt),
        ("resolved to landed", resolved_landed),
        ("resolved to not delivered", resolved_not),
        ("revoked", revoked),
        ("lost", lost),
        ("reconnects", reconnects),
        ("messages", total.messages),
        ("restarts", total.restarts),
        ("closed", total.closed),
    ] {
        assert!(n > 0 || env("LANDFALL_SEEDS").is_some(), "no seed has come to: {what}");
    }
}

use world::Summary;

#[test]
fn k3_a_seed_gives_the_same_run_twice() {
    for seed in [3, 77, 1234] {
        assert_eq!(run(seed), run(seed));
    }
}
