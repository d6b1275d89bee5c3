//! What a test runs on: a profile of the soft provider, over TCP or in shared memory, or two RDMA devices that reach each other.
//! Shared by the harnesses of `ring`, `kv`, `faults` and `processes`, which make the tests; devices are found by the
//! environment, as in `verbs`.

// Each of these binaries uses a part of it.
#![allow(dead_code)]

use std::net::SocketAddr;

use landfall::connect::{Admission, Psk};
use landfall::device::{Capabilities, Device, Profile, SoftConfig, SoftTransport};
use landfall::kv::KvConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// The soft provider over TCP, both ends on one device.
    Soft(Profile),
    /// The same in shared memory, and nothing else.
    Shm(Profile),
    /// The RDMA devices that `RDMA_DEV0` and `RDMA_DEV1` name, whose addresses are `RDMA_IP0` and `RDMA_IP1`. The near end is
    /// on the first of them, the far end on the second.
    Devices,
}

/// A test for each profile of the soft provider over one transport, out of `super::body`, by the `run` of a harness.
#[allow(unused_macros)]
macro_rules! on_each_profile {
    ($on:ident, $harness:ident) => {
        use super::body;
        use landfall::device::Profile;
        use $crate::on::On;
        use $crate::$harness::run;
        #[test]
        fn default() {
            run(body(On::$on(Profile::Default)))
        }
        #[test]
        fn erdma_compat() {
            run(body(On::$on(Profile::ErdmaCompat)))
        }
        #[test]
        fn erdma_standard() {
            run(body(On::$on(Profile::ErdmaStandard)))
        }
        #[test]
        fn siw() {
            run(body(On::$on(Profile::Siw)))
        }
        #[test]
        fn srd() {
            run(body(On::$on(Profile::Srd)))
        }
        #[test]
        fn tiny() {
            run(body(On::$on(Profile::Tiny)))
        }
    };
}
#[allow(unused_imports)]
pub(crate) use on_each_profile;

impl From<Profile> for On {
    fn from(profile: Profile) -> Self {
        Self::Soft(profile)
    }
}

impl On {
    /// Who may connect: holders of a key in shared memory, so that everything is tried with one, over every bootstrap; anybody
    /// elsewhere, asked for by name on devices, whose addresses are no loopback ones.
    pub(crate) fn admit(self, config: KvConfig) -> KvConfig {
        match self {
            Self::Soft(_) => config,
            Self::Shm(_) => keyed(config),
            Self::Devices => config.admission(Admission::Open),
        }
    }

    /// Many small blocks travel in tables, each of 2,048 pairs of blocks: in shared memory, where a pool is in one region. Here pools of
    /// more than 1 MiB are meant, of which `tiny` makes several.
    pub(crate) fn has_tables(self) -> bool {
        matches!(self, Self::Shm(profile) if profile != Profile::Tiny)
    }

    /// The profile and the transport of a soft device. `None` on RDMA devices.
    pub(crate) fn soft(self) -> Option<SoftConfig> {
        let config = |profile, transport| SoftConfig::new().profile(profile).transport(transport);
        match self {
            Self::Soft(profile) => Some(config(profile, SoftTransport::Tcp)),
            Self::Shm(profile) => Some(config(profile, SoftTransport::Shm)),
            Self::Devices => None,
        }
    }

    /// The same with faults, which are written as `LANDFALL_SOFT` has them.
    pub(crate) fn faulty(self, faults: &str) -> SoftConfig {
        let soft = self.soft().expect("faults are of the soft provider");
        format!("{soft},seed=7,{faults}").parse().unwrap()
    }

    /// The soft provider's profile.
    pub(crate) fn profile(self) -> Option<Profile> {
        match self {
            Self::Soft(profile) | Self::Shm(profile) => Some(profile),
            Self::Devices => None,
        }
    }

    /// What carries the bytes, as a report of the path says it.
    pub(crate) fn transport(self) -> &'static str {
        match self {
            Self::Soft(_) => "tcp",
            Self::Shm(_) => "shm",
            Self::Devices => "verbs",
        }
    }

    /// The devices of the near and of the far end.
    pub(crate) fn devices(self) -> (Device, Device) {
        match self {
            Self::Soft(_) | Self::Shm(_) => {
                let device = Device::soft(self.soft().unwrap().seed(7)).unwrap();
                (device.clone(), device)
            }
            Self::Devices => {
                let open = |name| Device::open(&variable(name)).unwrap();
                (open("RDMA_DEV0"), open("RDMA_DEV1"))
            }
        }
    }

    /// Of the near end.
    pub(crate) fn caps(self) -> Capabilities {
        self.devices().0.capabilities().clone()
    }

    /// Where the end of this number listens.
    pub(crate) fn any_port_of(self, end: usize) -> SocketAddr {
        let address = match self {
            Self::Soft(_) | Self::Shm(_) => "127.0.0.1".to_owned(),
            Self::Devices => variable(["RDMA_IP0", "RDMA_IP1"][end]),
        };
        SocketAddr::new(address.parse().unwrap(), 0)
    }

    /// A number of rounds, of which a quarter is enough on devices: they may be emulated, and so may the processor.
    pub(crate) fn rounds(self, n: u64) -> u64 {
        match self {
            Self::Soft(_) | Self::Shm(_) => n,
            Self::Devices => n.div_ceil(4),
        }
    }

    /// Whether queue pairs can be connected by an exchange of addresses. Tests that connect one side only, or by hand, need
    /// it: RDMA_CM connects both sides or none.
    pub(crate) fn by_hand(self) -> bool {
        let device = self.devices().0;
        if !device.capabilities().oob {
            eprintln!("passed over: {} is connected by RDMA_CM only", device.name());
        }
        device.capabilities().oob
    }

    /// Whether a WRITE completes when the peer's device has acknowledged it. iWARP's completes when TCP has taken it: what it
    /// does at the peer, a failure included, shows later, or to the peer only.
    pub(crate) fn acknowledges(self) -> bool {
        !self.is_iwarp()
    }

    /// Whether a message waits for a receive that comes later. iWARP has no "receiver not ready": it ends the connection.
    pub(crate) fn waits_for_receives(self) -> bool {
        !self.is_iwarp()
    }

    fn is_iwarp(self) -> bool {
        self.devices().0.transport() == "verbs-iwarp"
    }
}

/// For holders of a key.
pub(crate) fn keyed(config: KvConfig) -> KvConfig {
    config.admission(Admission::Psk(Psk::new("tests", &[0x5a; 32]).unwrap()))
}

fn variable(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: tests on RDMA devices do not run without them"))
}
