//! What was counted between two snapshots: each port, each direction.

use serde::Serialize;

use super::read::Unknown;
use super::snapshot::{CounterPort, CounterSnapshot, PortReading, RowReading};
use super::table::{CountUnit, Direction, Row};

/// What each port counted between two snapshots.
#[derive(Clone, Debug)]
pub struct CounterDifference {
    pub(super) sent: Vec<PortCount>,
    pub(super) received: Vec<PortCount>,
}

/// What one port counted in one direction, or why that is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortCount {
    /// The port.
    pub port: CounterPort,
    /// The files that were read, below the port's directory in sysfs. `None` when it has none that counts traffic.
    pub counter: Option<String>,
    /// What they count.
    pub unit: Option<CountUnit>,
    /// How much it was. `None` when it is not known, which is not 0.
    pub counted: Option<u64>,
    /// Why it is not known.
    pub unknown: Option<String>,
    /// A counter of 32 bits began anew meanwhile, perhaps more than once: it was at least `counted`.
    pub wrapped: bool,
}

impl CounterDifference {
    pub(super) fn new(now: &CounterSnapshot, before: &CounterSnapshot) -> Self {
        let count = |direction| {
            let each = now.ports.iter().map(|port| {
                let earlier = before.ports.iter().find(|earlier| earlier.port == port.port);
                PortCount::new(direction, port, earlier)
            });
            each.collect()
        };
        Self { sent: count(Direction::Sent), received: count(Direction::Received) }
    }

    /// What each port sent.
    pub fn sent(&self) -> &[PortCount] {
        &self.sent
    }

    /// What each port received.
    pub fn received(&self) -> &[PortCount] {
        &self.received
    }
}

impl PortCount {
    /// By the first row of the table that counts in both readings; if none does, the first says why.
    fn new(direction: Direction, now: &PortReading, before: Option<&PortReading>) -> Self {
        let mut problem = None;
        for reading in now.rows.iter().filter(|reading| reading.row.direction == direction) {
            match grown(reading, before) {
                Ok((counted, wrapped)) => {
                    return Self {
                        counted: Some(counted),
                        wrapped,
                        ..Self::unknown(&now.port, Some(reading.row), None)
                    };
                }
                Err(why) => problem = problem.or(Some((reading.row, why))),
            }
        }
        match problem {
            Some((row, why)) => Self::unknown(&now.port, Some(row), Some(&why)),
            None if before.is_none() => Self::unknown(&now.port, None, Some(&Unknown::Gone)),
            None => Self::unknown(&now.port, None, Some(&Unknown::Missing)),
        }
    }

    fn unknown(port: &CounterPort, row: Option<&Row>, why: Option<&Unknown>) -> Self {
        Self {
            port: port.clone(),
            counter: row.map(Row::name),
            unit: row.map(|row| row.unit),
            counted: None,
            unknown: why.map(Unknown::to_string),
            wrapped: false,
        }
    }

    /// For a port that no snapshot has.
    pub(super) fn not_read(port: &CounterPort) -> Self {
        Self::unknown(port, None, Some(&Unknown::Gone))
    }
}

fn grown(now: &RowReading, before: Option<&PortReading>) -> Result<(u64, bool), Unknown> {
    let before = before.and_then(|port| port.rows.iter().find(|reading| reading.row == now.row));
    let before = before.ok_or(Unknown::Gone)?.values.as_ref().map_err(Clone::clone)?;
    let now_values = now.values.as_ref().map_err(Clone::clone)?;
    let (mut sum, mut wrapped) = (0u64, false);
    for (&now_value, &before) in now_values.iter().zip(before) {
        let (count, again) = step(before, now_value)?;
        let units = count.checked_mul(now.row.scale).ok_or(Unknown::TooLarge)?;
        sum = sum.checked_add(units).ok_or(Unknown::TooLarge)?;
        wrapped |= again;
    }
    Ok((sum, wrapped))
}

/// From one value to the next. A counter that went back has begun anew from its upper half to its lower, in 32 or in 64
/// bits, or was reset; and then nothing is known.
fn step(before: u64, now: u64) -> Result<(u64, bool), Unknown> {
    if let Some(grown) = now.checked_sub(before) {
        return Ok((grown, false));
    }
    let begins_anew = |max: u64| before <= max && before > max / 2 && now <= max / 2;
    if begins_anew(u32::MAX.into()) {
        let to_the_end = u64::from(u32::MAX) - before;
        return Ok((to_the_end + 1 + now, true));
    }
    // 2^64 of anything comes once in the life of a device.
    if begins_anew(u64::MAX) {
        return Ok((now.wrapping_sub(before), false));
    }
    Err(Unknown::Reset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_counters_begin_anew_or_are_reset() {
        assert_eq!(step(5, 5), Ok((0, false)));
        assert_eq!(step(5, 12), Ok((7, false)));
        assert_eq!(step(u64::from(u32::MAX) - 9, 5), Ok((15, true)));
        assert_eq!(step(u64::MAX - 9, 5), Ok((15, false)));
        // A driver that was loaded again starts at 0.
        assert_eq!(step(1000, 3), Err(Unknown::Reset));
        assert_eq!(step(1 << 40, 3), Err(Unknown::Reset));
        assert_eq!(step(u32::MAX.into(), u64::from(u32::MAX) - 1), Err(Unknown::Reset));
    }
}
