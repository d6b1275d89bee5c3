//! Who may connect: anybody, holders of a pre-shared key, or holders of a certificate.
//!
//! `psk` holds keys and `tls` certificates (each secret in a `private_file`), `challenge` are the two frames by which both sides show that they hold one, and `seal` is what every
//! later frame of that handshake carries. They touch no socket but the stream that they are given. What this protects and
//! what it cannot is in `SECURITY.md`.

use std::fmt;
use std::net::SocketAddr;

pub(super) mod challenge;
mod private_file;
mod psk;
pub(super) mod seal;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;

pub use private_file::SecretFileError;
pub use psk::{Psk, PskError};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};

pub(crate) use seal::Binding;

use super::error::ConnectError;

pub(crate) const TO_ITSELF: &str = "an endpoint cannot connect to itself";

/// Who may connect to an endpoint, and how it shows a listener that it may. Both sides are configured alike.
///
/// It guards the bootstrap: who gets queue pairs, and learns the keys of registered memory. The data that follows is neither
/// encrypted nor authenticated, as on any RDMA network.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Admission {
    /// Anybody on this host. A listener refuses every address that is not a loopback one, with
    /// [`ConnectError::AdmissionRequired`]. Connecting is possible to any address.
    #[default]
    Local,
    /// Anybody who reaches the address, asked for by name: for networks on which every host is trusted.
    Open,
    /// Holders of a pre-shared key. It works over every bootstrap.
    Psk(Psk),
    /// Holders of a certificate, which also says who they are. Out of band only.
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    Tls(Tls),
}

impl Admission {
    /// Its name, in errors and refusals.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Local | Self::Open => "open",
            Self::Psk(_) => "psk",
            #[cfg(feature = "tls")]
            Self::Tls(_) => "tls",
        }
    }

    /// Whether a listener may be at `addr`.
    pub(crate) fn check_listener(&self, addr: SocketAddr) -> Result<(), ConnectError> {
        match self {
            Self::Local if !addr.ip().to_canonical().is_loopback() => {
                Err(ConnectError::AdmissionRequired { addr })
            }
            _ => Ok(()),
        }
    }
}

/// How the peer of a channel was admitted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerAuth {
    /// It was not asked: its name and epoch are what it says they are.
    #[default]
    Anonymous,
    /// It holds the pre-shared key of this id. Holders of one key cannot be told apart.
    Key(String),
    /// It holds a certificate of an authority that this side trusts, for these names (DNS names, then URIs). Where it is for neither,
    /// for an IP address alone, the one name is `sha256:` and the SHA-256 of the certificate in hexadecimal digits: two of such are
    /// two peers, also when one of them is the other renewed.
    Certificate(Vec<String>),
}

impl PeerAuth {
    /// Whether the two may be one peer at two times: by another key, or by another certificate for one of its names.
    pub(crate) fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Certificate(ours), Self::Certificate(theirs)) => {
                ours == theirs || ours.iter().any(|name| theirs.contains(name))
            }
            (Self::Key(_), Self::Key(_)) | (Self::Anonymous, Self::Anonymous) => true,
            _ => false,
        }
    }
}

impl fmt::Display for PeerAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous"),
            Self::Key(id) => write!(f, "key {id}"),
            Self::Certificate(names) => write!(f, "certificate for {}", names.join(", ")),
        }
    }
}
