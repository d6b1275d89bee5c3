//! Profiles of the soft provider: capabilities as data. The engine is the same for all of them, except that a
//! profile without order adds a stage that reorders.

use std::fmt;
use std::str::FromStr;

use super::Capabilities;
use crate::error::DeviceError;

/// Which device the soft provider behaves like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Profile {
    /// RC with generous limits.
    #[default]
    Default,
    /// Alibaba eRDMA in compat mode, at the minimum that its users report.
    ErdmaCompat,
    /// No order: every message may overtake every other, and every work request is signalled (AWS EFA's SRD).
    Srd,
    /// Very small limits, so that slicing and backpressure happen early.
    Tiny,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 4] = [Self::Default, Self::ErdmaCompat, Self::Srd, Self::Tiny];

    const ACCEPTED: &'static str = "one of default, erdma-compat, srd, tiny";

    /// Its name, as `LANDFALL_SOFT` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ErdmaCompat => "erdma-compat",
            Self::Srd => "srd",
            Self::Tiny => "tiny",
        }
    }

    /// The limits and features of a device of this profile.
    pub fn capabilities(self) -> Capabilities {
        let base = Capabilities {
            max_qp_wr: 16_384,
            max_cqe: 1_048_576,
            max_send_sge: 16,
            max_recv_sge: 16,
            max_inline: 256,
            max_msg_size: 1 << 31,
            max_mr_size: 1 << 40,
            max_rd_atomic: 128,
            max_srq: 0,
            immediate: true,
            ordered: true,
            all_signaled: false,
            oob: true,
            active_mtu: 4096,
        };
        match self {
            Self::Default => Capabilities { max_srq: 1024, ..base },
            Self::ErdmaCompat => Capabilities {
                max_qp_wr: 8192,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
                max_msg_size: 0xffff_ffff,
                max_mr_size: 64 << 30,
                ..base
            },
            Self::Srd => Capabilities {
                max_qp_wr: 4096,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 32,
                max_msg_size: 1 << 30,
                max_rd_atomic: 64,
                ordered: false,
                all_signaled: true,
                ..base
            },
            Self::Tiny => Capabilities {
                max_qp_wr: 16,
                max_cqe: 64,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
                max_msg_size: 64 << 10,
                max_mr_size: 1 << 20,
                max_rd_atomic: 4,
                active_mtu: 1024,
                ..base
            },
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = DeviceError;

    fn from_str(s: &str) -> Result<Self, DeviceError> {
        Self::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| DeviceError::Config {
            what: "profile",
            got: s.to_owned(),
            expected: Self::ACCEPTED.to_owned(),
        })
    }
}
