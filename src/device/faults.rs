//! Faults that a soft device commits, so that a program meets them before a network does. Data only: what they do is in
//! `provider/soft/faults.rs`.

use std::fmt;
use std::time::Duration;

/// Faults of a queue pair of a soft device. Each is off unless it is set; all of them are counted and drawn from the
/// device's seed, so that the same configuration makes the same choices. See [`SoftConfig::faults`](super::SoftConfig::faults).
///
/// Counts are of one queue pair, from its creation, and of this side: the peer's device has faults of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    pub(crate) delay: Option<Duration>,
    pub(crate) reorder: Option<Duration>,
    pub(crate) rate: Option<u64>,
    pub(crate) drop_after: Option<u64>,
    pub(crate) fail_post: Option<u64>,
    pub(crate) fail_wr: Option<u64>,
    pub(crate) stall: Option<Duration>,
    pub(crate) stall_after: Option<u64>,
    pub(crate) kill_after: Option<u64>,
}

/// A pace slower than this would hold a frame for minutes, past every time-out.
const MIN_RATE: u64 = 1024;

impl Faults {
    pub(crate) const KEYS: &'static str =
        "delay, reorder, rate, drop_after, fail_post, fail_wr, stall, stall_after, kill_after";

    /// No faults.
    pub const fn new() -> Self {
        Self {
            delay: None,
            reorder: None,
            rate: None,
            drop_after: None,
            fail_post: None,
            fail_wr: None,
            stall: None,
            stall_after: None,
            kill_after: None,
        }
    }

    /// Each request leaves this much later than it was posted.
    pub const fn delay(mut self, by: Duration) -> Self {
        self.delay = Some(by);
        self
    }

    /// Each request leaves up to this much later, by a draw of its own. On a profile without order requests so overtake each
    /// other; on the others a queue pair keeps its order, and requests overtake those of other queue pairs.
    pub const fn reorder(mut self, by_up_to: Duration) -> Self {
        self.reorder = Some(by_up_to);
        self
    }

    /// Sends no faster than this many bytes a second, at least 1024.
    pub const fn rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = Some(if bytes_per_second < MIN_RATE { MIN_RATE } else { bytes_per_second });
        self
    }

    /// The connection ends when exactly this many bytes, headers included, were sent on it: in the middle of a message, if
    /// that is where they end.
    pub const fn drop_after(mut self, bytes: u64) -> Self {
        self.drop_after = Some(bytes);
        self
    }

    /// The post of the `n`-th send request, from 1, is refused with `EIO`, as by a driver that has failed.
    pub const fn fail_post(mut self, n: u64) -> Self {
        self.fail_post = Some(n);
        self
    }

    /// The `n`-th send request, from 1, is accepted and completes with an error, which takes the queue pair to the error
    /// state.
    pub const fn fail_wr(mut self, n: u64) -> Self {
        self.fail_wr = Some(n);
        self
    }

    /// Reads nothing from the connection for so long, once, as a receiver that is kept from running. Sending goes on.
    pub const fn stall(mut self, for_: Duration) -> Self {
        self.stall = Some(for_);
        self
    }

    /// The [`stall`](Self::stall) begins when at least this many bytes were received. Without it, at the first read.
    pub const fn stall_after(mut self, bytes: u64) -> Self {
        self.stall_after = Some(bytes);
        self
    }

    /// The process kills itself (SIGKILL) when exactly this many bytes were sent on the connection.
    pub const fn kill_after(mut self, bytes: u64) -> Self {
        self.kill_after = Some(bytes);
        self
    }

    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        *self == Self::new()
    }

    /// These, with those of `all` where nothing is set here.
    pub(crate) fn over(self, all: Self) -> Self {
        Self {
            delay: self.delay.or(all.delay),
            reorder: self.reorder.or(all.reorder),
            rate: self.rate.or(all.rate),
            drop_after: self.drop_after.or(all.drop_after),
            fail_post: self.fail_post.or(all.fail_post),
            fail_wr: self.fail_wr.or(all.fail_wr),
            stall: self.stall.or(all.stall),
            stall_after: self.stall_after.or(all.stall_after),
            kill_after: self.kill_after.or(all.kill_after),
        }
    }

    /// Sets what `key` names. `None` for an unknown key; `Err` says what the value should be.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Option<Result<(), &'static str>> {
        const TIME: &str = "a time, for instance 200ms (units: ns, us, ms, s)";
        let time = |field: &mut Option<Duration>| {
            *field = Some(parse_time(value).ok_or(TIME)?);
            Ok(())
        };
        let count = |field: &mut Option<u64>, least: u64, expected| {
            *field = Some(value.parse().ok().filter(|&n| n >= least).ok_or(expected)?);
            Ok(())
        };
        Some(match key {
            "delay" => time(&mut self.delay),
            "reorder" => time(&mut self.reorder),
            "stall" => time(&mut self.stall),
            "stall_after" => count(&mut self.stall_after, 0, "a number of bytes"),
            "drop_after" => count(&mut self.drop_after, 0, "a number of bytes"),
            "kill_after" => count(&mut self.kill_after, 0, "a number of bytes"),
            "rate" => count(&mut self.rate, MIN_RATE, "bytes a second, at least 1024"),
            "fail_post" => count(&mut self.fail_post, 1, "the number of a post, from 1"),
            "fail_wr" => count(&mut self.fail_wr, 1, "the number of a request, from 1"),
            _ => return None,
        })
    }

    /// `,key=value` for each that is set, with `prefix` before the key.
    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>, prefix: &str) -> fmt::Result {
        for (key, value) in [("delay", self.delay), ("reorder", self.reorder), ("stall", self.stall)] {
            if let Some(time) = value {
                write!(f, ",{prefix}{key}={}", Time(time))?;
            }
        }
        for (key, value) in [
            ("stall_after", self.stall_after),
            ("rate", self.rate),
            ("drop_after", self.drop_after),
            ("fail_post", self.fail_post),
            ("fail_wr", self.fail_wr),
            ("kill_after", self.kill_after),
        ] {
            if let Some(n) = value {
                write!(f, ",{prefix}{key}={n}")?;
            }
        }
        Ok(())
    }
}

/// The units of a time, the largest first, in nanoseconds.
const UNITS: [(&str, u128); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1)];

/// A time in the largest unit that it is whole in.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let (unit, size) =
            UNITS.into_iter().find(|(_, size)| nanos.is_multiple_of(*size)).unwrap_or(("ns", 1));
        write!(f, "{}{unit}", nanos / size)
    }
}

fn parse_time(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let (_, size) = UNITS.into_iter().find(|(unit, _)| *unit == &text[digits.len()..])?;
    let nanos = digits.trim_end().parse::<u128>().ok()?.checked_mul(size)?;
    let secs = u64::try_from(nanos / 1_000_000_000).ok()?;
    Some(Duration::new(secs, (nanos % 1_000_000_000) as u32))
}
