//! Faults of a device, drawn.

use std::time::Duration;

use landfall::device::Faults;

use super::content::Rng;

/// Which faults there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    Any,
    /// Only those that end a queue pair at once.
    AtOnce,
}

/// One or two faults, in sizes that the traffic of a round reaches.
pub fn faults(ends: Ends, rng: &mut Rng) -> Faults {
    let mut faults = Faults::new();
    for _ in 0..rng.range(1, 2) {
        let ms = |rng: &mut Rng, most| Duration::from_millis(rng.range(1, most));
        let which = match ends {
            Ends::Any => rng.range(0, 9),
            Ends::AtOnce => rng.range(4, 7),
        };
        faults = match which {
            0 => faults.delay(ms(rng, 20)),
            1 | 2 => faults.reorder(ms(rng, 20)),
            3 => faults.rate(rng.range(500_000, 20_000_000)),
            4 | 5 => faults.drop_after(rng.range(200, 1_500_000)),
            6 => faults.fail_post(rng.range(1, 120)),
            7 => faults.fail_wr(rng.range(1, 120)),
            8 => {
                let for_ = ms(rng, 1600);
                faults.stall(for_).stall_after(rng.range(0, 800_000))
            }
            _ => faults.kill_after(rng.range(500, 1_500_000)),
        };
    }
    faults
}
