//! What the queue pairs of a soft device run over.

use std::fmt;
use std::str::FromStr;

use crate::provider::QpAddress;

/// What the queue pairs of a soft device run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SoftTransport {
    /// Shared memory where the peer is on this host and takes it, else TCP. [`PathReport`](crate::kv::PathReport) says which,
    /// and why.
    #[default]
    Auto,
    /// TCP, also within one host.
    Tcp,
    /// Shared memory. A peer that cannot be reached by it is not connected to; nothing listens on TCP.
    Shm,
}

impl SoftTransport {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Tcp, Self::Shm];

    /// The names that are parsed.
    pub(crate) const ACCEPTED: &'static str = "auto, tcp or shm";

    /// The name that is parsed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }

    /// How a device of it moves data, as [`Device::transport`](super::Device::transport) says it.
    pub(crate) const fn of_device(self) -> &'static str {
        match self {
            Self::Auto => "soft-auto",
            Self::Tcp => "soft-tcp",
            Self::Shm => "soft-shm",
        }
    }

    /// What a queue pair of this address takes. `None` where it is not of a soft device.
    pub(crate) const fn of_address(address: &QpAddress) -> Option<Self> {
        match (address.soft_port != 0, address.soft_local != 0) {
            (true, true) => Some(Self::Auto),
            (true, false) => Some(Self::Tcp),
            (false, true) => Some(Self::Shm),
            (false, false) => None,
        }
    }

    /// Whether two sides have one in common. Whether it reaches from one to the other is another matter.
    pub(crate) fn meets(self, other: Self) -> bool {
        self == other || self == Self::Auto || other == Self::Auto
    }
}

/// The name that is parsed.
impl fmt::Display for SoftTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No such transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the transports of a soft device are {}", SoftTransport::ACCEPTED)]
pub struct UnknownSoftTransport;

impl FromStr for SoftTransport {
    type Err = UnknownSoftTransport;

    fn from_str(name: &str) -> Result<Self, UnknownSoftTransport> {
        Self::ALL.into_iter().find(|t| t.name() == name).ok_or(UnknownSoftTransport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_sides_meet_where_they_have_a_transport_in_common() {
        for a in SoftTransport::ALL {
            assert_eq!(a.to_string().parse::<SoftTransport>(), Ok(a));
            for b in SoftTransport::ALL {
                assert_eq!(a.meets(b), b.meets(a));
                let apart = [a, b].contains(&SoftTransport::Tcp) && [a, b].contains(&SoftTransport::Shm);
                assert_eq!(a.meets(b), !apart, "{a} and {b}");
            }
        }
        let address = |soft_port, soft_local| QpAddress { soft_port, soft_local, ..QpAddress::default() };
        assert_eq!(SoftTransport::of_address(&address(1, 1)), Some(SoftTransport::Auto));
        assert_eq!(SoftTransport::of_address(&address(1, 0)), Some(SoftTransport::Tcp));
        assert_eq!(SoftTransport::of_address(&address(0, 1)), Some(SoftTransport::Shm));
        assert_eq!(SoftTransport::of_address(&address(0, 0)), None);
        let error = "pipe".parse::<SoftTransport>().unwrap_err().to_string();
        assert!(error.contains("auto, tcp or shm"), "{error}");
    }
}
