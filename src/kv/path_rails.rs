//! The rails of a channel, in its path report: what each carries, and what became of it (K9, K10).

use std::fmt;
use std::time::SystemTime;

use serde::Serialize;

use crate::error::DeviceError;

/// One rail of a [`PathReport`](super::PathReport): a device of this side, joined to one of the peer's.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RailReport {
    /// The device's name.
    pub device: String,
    /// The port of an RDMA device.
    pub port: Option<u8>,
    /// The peer's device, as the peer calls it. Empty when it does not say.
    pub peer_device: String,
    /// What carries its queue pairs, as [`PathReport::transport`](super::PathReport::transport).
    pub transport: &'static str,
    /// Whether it carries anything now.
    pub state: RailState,
    /// Its queue pairs: places in [`PathReport::qps`](super::PathReport::qps), the first and the one behind the last.
    pub qps: (usize, usize),
    /// Payload bytes that this side wrote on it.
    pub bytes_written: u64,
    /// Its part of the bytes that this side wrote on all rails, from 0 to 1. 0 before anything was written.
    pub share: f64,
    /// How many times it failed.
    pub failures: u32,
    /// How many times it came back, or came, where it had been left out at the start.
    pub returns: u32,
}

/// Whether a rail carries anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RailState {
    /// It does.
    Up,
    /// It has failed, or was left out at the start. Its work is done on the others.
    Down {
        /// Why.
        cause: String,
        /// Since when.
        since: SystemTime,
        /// Why it has not come back yet, or will not: what the latest attempt has found.
        attempt: Option<String>,
    },
}

/// A rail that was asked for and was not there when the channel was connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RailWarning {
    /// The device of this side.
    pub device: String,
    /// The peer's device, where one was to be joined to it.
    pub peer_device: Option<String>,
    /// What failed.
    pub reason: String,
}

impl RailWarning {
    pub(super) fn new(device: &str, peer_device: Option<&str>, reason: impl Into<String>) -> Self {
        let this = Self {
            device: device.to_owned(),
            peer_device: peer_device.map(str::to_owned),
            reason: reason.into(),
        };
        tracing::warn!(warning = %this, "a rail is left out");
        this
    }

    /// The same, where every rail is asked for.
    pub(super) fn error(&self) -> DeviceError {
        let reason = match &self.peer_device {
            None => self.reason.clone(),
            Some(peer) => format!("with {peer} of the peer: {}", self.reason),
        };
        DeviceError::Rail { device: self.device.clone(), reason }
    }
}

impl fmt::Display for RailWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no rail over {}", self.device)?;
        if let Some(peer) = &self.peer_device {
            write!(f, " with {peer} of the peer")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl fmt::Display for RailReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.share * 100.0;
        let Self { device, peer_device, transport, bytes_written, .. } = self;
        write!(f, "{device} to {peer_device} by {transport}, wrote {bytes_written} bytes ({percent:.1} %)")?;
        if self.failures > 0 {
            write!(f, ", failed {} times, came back {} times", self.failures, self.returns)?;
        }
        match &self.state {
            RailState::Up => Ok(()),
            RailState::Down { cause, attempt: None, .. } => write!(f, ", down: {cause}"),
            RailState::Down { cause, attempt: Some(latest), .. } => {
                write!(f, ", down: {cause}; not back: {latest}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_a_rail_says_what_became_of_it() {
        let mut rail = RailReport {
            device: "mlx5_0".into(),
            port: Some(1),
            peer_device: "mlx5_2".into(),
            transport: "verbs",
            state: RailState::Up,
            qps: (0, 4),
            bytes_written: 250,
            share: 0.25,
            failures: 0,
            returns: 0,
        };
        assert_eq!(rail.to_string(), "mlx5_0 to mlx5_2 by verbs, wrote 250 bytes (25.0 %)");
        (rail.failures, rail.returns) = (2, 1);
        rail.state = RailState::Down { cause: "silent".into(), since: SystemTime::UNIX_EPOCH, attempt: None };
        assert!(rail.to_string().ends_with(", failed 2 times, came back 1 times, down: silent"), "{rail}");
        let warning = RailWarning::new("mlx5_1", Some("mlx5_3"), "creating a queue failed");
        assert_eq!(
            warning.to_string(),
            "no rail over mlx5_1 with mlx5_3 of the peer: creating a queue failed"
        );
        let error = warning.error().to_string();
        assert!(
            error.contains("mlx5_1") && error.contains("mlx5_3") && error.contains("strict_rails"),
            "{error}"
        );
    }
}
