//! How the queue pairs of a channel are connected: which ways there are, and which one a device has.

use std::fmt;
use std::str::FromStr;

use crate::device::Device;
use crate::error::DeviceError;

/// How an endpoint connects its queue pairs to a peer's. Both sides must use the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Bootstrap {
    /// Out of band where the device can be connected so, and by its connection manager elsewhere.
    /// [`PathReport::bootstrap`](super::PathReport::bootstrap) says which, and why.
    #[default]
    Auto,
    /// Out of band: a TCP connection carries the addresses of the queue pairs. Not on iWARP, nor on eRDMA in standard mode.
    Oob,
    /// By the connection manager: RDMA_CM, or the soft provider's own. The address is one of the device. It also says at
    /// once when the peer's process has ended.
    Cm,
}

impl Bootstrap {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Oob, Self::Cm];

    /// Its name, as programs' options spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Oob => "oob",
            Self::Cm => "cm",
        }
    }

    /// The way that `device` is connected, or why it cannot be the one that was asked for.
    pub(super) fn choose(self, device: &Device) -> Result<Chosen, DeviceError> {
        let asked_for = || "it was asked for".to_owned();
        let chosen = match self {
            Self::Oob => {
                device.check_oob()?;
                Chosen { way: Way::Oob, reason: asked_for() }
            }
            Self::Cm => Chosen { way: Way::Cm, reason: asked_for() },
            Self::Auto => match device.check_oob() {
                Ok(()) => {
                    Chosen { way: Way::Oob, reason: "the device can be connected out of band".to_owned() }
                }
                Err(DeviceError::NoManualConnect { cause, .. }) => Chosen {
                    way: Way::Cm,
                    reason: format!("the device cannot be connected out of band: {cause}"),
                },
                Err(other) => return Err(other),
            },
        };
        if self == Self::Auto {
            let (bootstrap, reason) = (chosen.way.name(), &chosen.reason);
            tracing::info!(device = device.name(), bootstrap, reason, "the bootstrap was chosen");
        }
        Ok(chosen)
    }
}

impl fmt::Display for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Bootstrap {
    type Err = BootstrapError;

    fn from_str(s: &str) -> Result<Self, BootstrapError> {
        Self::ALL.into_iter().find(|b| b.name() == s).ok_or_else(|| BootstrapError { got: s.to_owned() })
    }
}

/// Not the name of a [`Bootstrap`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no bootstrap {got:?}; it is one of auto, oob, cm")]
pub struct BootstrapError {
    got: String,
}

/// A way that a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Oob,
    Cm,
}

impl Way {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Oob => "oob",
            Self::Cm => "cm",
        }
    }
}

/// The way of a listener, or of a dial, and why.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub(super) way: Way,
    pub(super) reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Profile, SoftConfig};

    #[test]
    fn b5_auto_takes_what_the_device_can_and_says_why() {
        for profile in Profile::ALL {
            let device = Device::soft(SoftConfig::new().profile(profile)).unwrap();
            let oob = profile.capabilities().oob;
            let chosen = Bootstrap::Auto.choose(&device).unwrap();
            assert_eq!(chosen.way, if oob { Way::Oob } else { Way::Cm }, "{profile}");
            assert!(!chosen.reason.is_empty());
            assert_eq!(Bootstrap::Cm.choose(&device).unwrap().way, Way::Cm);
            let asked = Bootstrap::Oob.choose(&device);
            assert!(oob == asked.is_ok(), "{profile}: {asked:?}");
            assert!(oob || matches!(asked, Err(DeviceError::NoManualConnect { .. })));
        }
    }

    #[test]
    fn b5_names_are_read_as_they_are_written() {
        for b in Bootstrap::ALL {
            assert_eq!(b.to_string().parse::<Bootstrap>().unwrap(), b);
        }
        let error = "rdma".parse::<Bootstrap>().unwrap_err().to_string();
        assert!(error.contains("auto, oob, cm"), "{error}");
    }
}
