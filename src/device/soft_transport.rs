//! What the queue pairs of a soft device run over.

use std::fmt;
use std::str::FromStr;

/// What the queue pairs of a soft device run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SoftTransport {
    /// Shared memory where the peer is on this host and takes it, else TCP.
    Auto,
    /// TCP, also within one host.
    #[default]
    Tcp,
    /// Shared memory. A peer that cannot be reached by it is not connected to.
    Shm,
}

impl SoftTransport {
    /// The names that are parsed.
    pub(crate) const ACCEPTED: &'static str = "auto, tcp or shm";
}

/// The name that is parsed.
impl fmt::Display for SoftTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        })
    }
}

/// No such transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the transports of a soft device are {}", SoftTransport::ACCEPTED)]
pub struct UnknownSoftTransport;

impl FromStr for SoftTransport {
    type Err = UnknownSoftTransport;

    fn from_str(name: &str) -> Result<Self, UnknownSoftTransport> {
        match name {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "shm" => Ok(Self::Shm),
            _ => Err(UnknownSoftTransport),
        }
    }
}
