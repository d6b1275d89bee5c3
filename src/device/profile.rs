//! Profiles of the soft provider: capabilities as data. The engine is the same for all of them, except that a
//! profile without order adds a stage that reorders.

use std::fmt;
use std::str::FromStr;

use super::Capabilities;
use crate::error::DeviceError;

/// Where the erdma driver says whether it lets queue pairs be connected by hand.
pub(crate) const ERDMA_COMPAT_MODE: &str = "/sys/module/erdma/parameters/compat_mode";

/// Which device the soft provider behaves like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Profile {
    /// RC with generous limits.
    #[default]
    Default,
    /// Alibaba eRDMA in compat mode, at the minimum that its users report.
    ErdmaCompat,
    /// Alibaba eRDMA in standard mode: the same limits, and connected by RDMA_CM only.
    ErdmaStandard,
    /// Linux's soft-iWARP driver: no immediates, no atomics, connected by RDMA_CM only. A SEND or a WRITE completes when it
    /// was handed to TCP, so that its completion says nothing of the peer.
    Siw,
    /// No order: every message may overtake every other, and every work request is signalled (AWS EFA's SRD).
    Srd,
    /// Very small limits, so that slicing and backpressure happen early.
    Tiny,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 6] =
        [Self::Default, Self::ErdmaCompat, Self::ErdmaStandard, Self::Siw, Self::Srd, Self::Tiny];

    pub(super) const ACCEPTED: &'static str = "one of default, erdma-compat, erdma-standard, siw, srd, tiny";

    /// Its name, as `LANDFALL_SOFT` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ErdmaCompat => "erdma-compat",
            Self::ErdmaStandard => "erdma-standard",
            Self::Siw => "siw",
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
            max_srq_wr: 0,
            immediate: true,
            atomics: true,
            ordered: true,
            all_signaled: false,
            oob: true,
            active_mtu: 4096,
        };
        match self {
            Self::Default => Capabilities { max_srq: 1024, max_srq_wr: base.max_qp_wr, ..base },
            Self::ErdmaCompat => Capabilities {
                max_qp_wr: 8192,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
                max_msg_size: 0xffff_ffff,
                max_mr_size: 64 << 30,
                ..base
            },
            Self::ErdmaStandard => Capabilities { oob: false, ..Self::ErdmaCompat.capabilities() },
            Self::Siw => Capabilities {
                max_qp_wr: 32_768,
                max_cqe: 3_276_800,
                max_send_sge: 6,
                max_recv_sge: 1,
                max_inline: 80,
                max_msg_size: 0xffff_ffff,
                max_srq: 1024,
                max_srq_wr: 32_768,
                immediate: false,
                atomics: false,
                oob: false,
                active_mtu: 1024,
                ..base
            },
            Self::Srd => Capabilities {
                max_qp_wr: 4096,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 32,
                max_msg_size: 1 << 30,
                max_rd_atomic: 64,
                atomics: false,
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

impl Profile {
    /// A SEND or a WRITE completes when TCP has it, and not when the peer has acknowledged it.
    pub(crate) const fn completes_at_hand_off(self) -> bool {
        matches!(self, Self::Siw)
    }

    /// Why queue pairs cannot be connected by an exchange of addresses, in the words that a device of this kind has for it,
    /// and the fix. `None` where they can.
    pub(crate) fn no_manual_connect(self) -> Option<(String, String)> {
        match self {
            Self::ErdmaStandard => Some((
                format!("connections are made by RDMA_CM in standard mode (as with {ERDMA_COMPAT_MODE} N)"),
                "connect by RDMA_CM, or use compat mode: the profile erdma-compat; on a device, \
                 `options erdma compat_mode=Y` in /etc/modprobe.d, and load the module again"
                    .to_owned(),
            )),
            Self::Siw => {
                let cause = "connections are made by RDMA_CM (iWARP)".to_owned();
                Some((cause, "connect by RDMA_CM".to_owned()))
            }
            Self::Default | Self::ErdmaCompat | Self::Srd | Self::Tiny => None,
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
