//! Devices: listing, opening, capabilities, and the protection domains that belong to them.
//!
//! An RDMA device is opened by the name that the kernel gives it (`mlx5_0`, `rxe0`), one of the soft provider by its
//! profile, see [`guide::transports`](crate::guide::transports). Nothing here needs a runtime, except registering memory.
//!
//! What a device says of its transport is what its queue pairs can take. What one of them has taken, a connection decides:
//! [`QueuePair::path`](crate::ring::QueuePair::path), [`KvChannel::path`](crate::kv::KvChannel::path).

mod caps;
mod events;
mod faults;
pub(crate) mod gid;
mod pd;
pub(crate) mod port_info;
pub(crate) mod profile;
mod soft_config;
mod soft_link;
mod soft_transport;
pub mod topology;
mod verbs_config;

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

pub use caps::Capabilities;
pub use events::{DeviceEvent, DeviceEvents};
pub use faults::Faults;
pub use pd::ProtectionDomain;
pub use port_info::{GidInfo, PortInfo};
pub use profile::Profile;
pub use soft_config::SoftConfig;
pub use soft_link::SoftLink;
pub use soft_transport::{SoftTransport, UnknownSoftTransport};
pub use verbs_config::VerbsConfig;

use crate::error::DeviceError;
use crate::provider::{self, soft::SoftDevice};
use crate::reactor::events::Watch;

/// The name that opens the soft device which `LANDFALL_SOFT` describes.
const SOFT: &str = "soft";

/// A device that can be opened, as [`Device::list`] gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name for [`Device::open`].
    pub name: String,
    /// As [`Device::transport`].
    pub transport: &'static str,
    /// The soft provider's profile. `None` for an RDMA device.
    pub profile: Option<Profile>,
    /// What it can do.
    pub capabilities: Capabilities,
}

/// An opened device. Cheap to clone; clones are the same device.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    provider: provider::Device,
    name: String,
    transport: &'static str,
    profile: Option<Profile>,
    address: IpAddr,
    /// Reads its events, where it has a descriptor for them.
    _watch: Option<Watch>,
}

impl Device {
    /// Every device that can be opened here: RDMA devices, then those of the soft provider. `soft` is the one that
    /// `LANDFALL_SOFT` describes (not listed when that does not parse; opening it says why); each profile has a name of
    /// its own. Where libibverbs is not installed there is no RDMA device to list; opening one says so.
    ///
    /// Each RDMA device is opened for a moment, to ask it.
    pub fn list() -> Vec<DeviceInfo> {
        let from_env = SoftConfig::from_env().ok().map(|c| (SOFT.to_owned(), c));
        let by_profile =
            Profile::ALL.into_iter().map(|p| (format!("{SOFT}-{p}"), SoftConfig::new().profile(p)));
        let soft = from_env.into_iter().chain(by_profile).map(|(name, config)| DeviceInfo {
            name,
            transport: config.transport.of_device(),
            profile: Some(config.profile),
            capabilities: config.profile.capabilities(),
        });
        rdma::list().into_iter().chain(soft).collect()
    }

    /// Opens a device by its name in [`list`](Self::list).
    ///
    /// An RDMA device is opened with [`VerbsConfig::default`]; [`verbs`](Self::verbs) takes another.
    ///
    /// # Errors
    /// [`DeviceError::NotFound`] with the names that there are; for `soft`, [`DeviceError::Config`] when `LANDFALL_SOFT`
    /// is not valid; else as [`soft`](Self::soft), and those of [`verbs`](Self::verbs).
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        if name == SOFT {
            return Self::soft(SoftConfig::from_env()?);
        }
        let profile = Profile::ALL.into_iter().find(|p| name.strip_prefix("soft-") == Some(p.name()));
        match profile {
            Some(p) => Self::soft(SoftConfig::new().profile(p)),
            None => rdma::open(name),
        }
    }

    /// Opens an RDMA device by the name that the kernel gives it. Each call makes another device: resources of two do
    /// not go together.
    ///
    /// # Errors
    /// [`DeviceError::Library`] where libibverbs is not installed, [`DeviceError::NotFound`], [`DeviceError::NoProvider`],
    /// [`DeviceError::Open`], [`DeviceError::PortDown`], [`DeviceError::Gid`]; [`DeviceError::Config`] and
    /// [`DeviceError::Limit`] when `config` is not valid; [`DeviceError::Unsupported`] for a device without reliable
    /// connected queue pairs.
    #[cfg(feature = "verbs")]
    pub fn verbs(name: &str, config: VerbsConfig) -> Result<Self, DeviceError> {
        config.check()?;
        match provider::verbs::VerbsDevice::open(name, &config)? {
            Some(device) => rdma::device(name, device),
            None => Err(not_found(name, "")),
        }
    }

    /// Opens a soft device of this process. Each call makes another device: resources of two do not go together.
    ///
    /// # Errors
    /// [`DeviceError::Config`] for an unspecified or multicast address, which no peer could reach; [`DeviceError::Os`] when no socket can be bound to its address.
    pub fn soft(config: SoftConfig) -> Result<Self, DeviceError> {
        let (profile, address, transport) = (config.profile, config.address, config.transport.of_device());
        if address.is_unspecified() || address.is_multicast() {
            return Err(DeviceError::Config {
                what: "address of a soft device",
                got: address.to_string(),
                expected: "an address of this host that its peers can reach".to_owned(),
            });
        }
        let device = SoftDevice::open(&config)?;
        let inner = Inner {
            provider: provider::Device::Soft(device),
            name: format!("{SOFT}-{profile}"),
            transport,
            profile: Some(profile),
            address,
            _watch: None,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its name: the kernel's, or `soft-` and the profile.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How it moves data: `verbs-ib`, `verbs-roce` or `verbs-iwarp`, and of the soft provider `soft-tcp`, `soft-shm`, or
    /// `soft-auto` where each connection takes one of these two.
    pub fn transport(&self) -> &'static str {
        self.inner.transport
    }

    /// Whether it is an RDMA device, and not the soft provider.
    pub fn is_rdma(&self) -> bool {
        match self.inner.provider {
            provider::Device::Soft(_) => false,
            #[cfg(feature = "verbs")]
            provider::Device::Verbs(_) => true,
        }
    }

    /// The number of its port. `None` on the soft provider.
    pub fn port(&self) -> Option<u8> {
        match &self.inner.provider {
            provider::Device::Soft(_) => None,
            #[cfg(feature = "verbs")]
            provider::Device::Verbs(d) => Some(d.port().number),
        }
    }

    /// Refuses a device whose queue pairs cannot be connected by an exchange of addresses.
    pub(crate) fn check_oob(&self) -> Result<(), DeviceError> {
        let refused = match &self.inner.provider {
            provider::Device::Soft(d) => d.no_manual_connect(),
            #[cfg(feature = "verbs")]
            provider::Device::Verbs(d) => d.no_manual_connect(),
        };
        match refused {
            None => Ok(()),
            Some((cause, fix)) => {
                Err(DeviceError::NoManualConnect { device: self.name().to_owned(), cause, fix })
            }
        }
    }

    /// The soft provider's profile. `None` for a device of another provider.
    pub fn profile(&self) -> Option<Profile> {
        self.inner.profile
    }

    /// The link of a soft device to its peers, for programs that try what they do when it fails. `None` for a device of another
    /// provider.
    pub fn soft_link(&self) -> Option<SoftLink> {
        match &self.inner.provider {
            provider::Device::Soft(d) => Some(SoftLink::new(d.cable().clone())),
            #[cfg(feature = "verbs")]
            provider::Device::Verbs(_) => None,
        }
    }

    /// What it can do.
    pub fn capabilities(&self) -> &Capabilities {
        self.inner.provider.capabilities()
    }

    /// The IP address of its port: where queue pairs of the soft provider listen; on an RDMA device, its GID.
    pub fn address(&self) -> IpAddr {
        self.inner.address
    }

    /// The GID of its port: the address, IPv4-mapped where it is IPv4.
    pub fn gid(&self) -> Ipv6Addr {
        match self.inner.address {
            IpAddr::V4(a) => a.to_ipv6_mapped(),
            IpAddr::V6(a) => a,
        }
    }

    /// What happens to the device from now on. Any number may listen. A device of the soft provider tells of
    /// its port 1, when its [link](Device::soft_link) is cut and mended; what fails there is an operation.
    pub fn events(&self) -> DeviceEvents {
        DeviceEvents::new(self.inner.provider.events().listen())
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// [`DeviceError`] when the device gives none; the soft provider always does.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain, DeviceError> {
        Ok(ProtectionDomain::new(self.clone(), self.inner.provider.alloc_pd()?))
    }

    /// Its name, when it is gone.
    pub(crate) fn gone(&self) -> Option<Arc<str>> {
        let events = self.inner.provider.events();
        events.is_gone().then(|| events.device())
    }

    pub(crate) fn provider(&self) -> &provider::Device {
        &self.inner.provider
    }

    /// Whether two handles are of the same opened device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

/// `note` says why the list may be short.
fn not_found(name: &str, note: &str) -> DeviceError {
    let names: Vec<String> = Device::list().into_iter().map(|d| d.name).collect();
    DeviceError::NotFound { name: name.to_owned(), available: names.join(", ") + note }
}

/// RDMA devices, as far as this module needs to know.
#[cfg(feature = "verbs")]
mod rdma {
    use super::*;
    use crate::provider::verbs::{self, Fabric, VerbsDevice};

    pub(super) fn transport(fabric: Fabric) -> &'static str {
        match fabric {
            Fabric::InfiniBand => "verbs-ib",
            Fabric::Roce => "verbs-roce",
            Fabric::Iwarp => "verbs-iwarp",
        }
    }

    pub(super) fn list() -> Vec<DeviceInfo> {
        let names = verbs::names().unwrap_or_else(|error| {
            tracing::debug!(%error, "no RDMA devices");
            Vec::new()
        });
        let look = |name: String| match VerbsDevice::look_at(&name) {
            Ok(found) => {
                let (fabric, capabilities) = found?;
                Some(DeviceInfo { name, transport: transport(fabric), profile: None, capabilities })
            }
            Err(error) => {
                tracing::debug!(%name, %error, "an RDMA device is not listed");
                None
            }
        };
        names.into_iter().filter_map(look).collect()
    }

    /// A name that is not the soft provider's. Where there is no libibverbs, there is no such device, unless the kernel
    /// says that there is.
    pub(super) fn open(name: &str) -> Result<Device, DeviceError> {
        match Device::verbs(name, VerbsConfig::default()) {
            Err(DeviceError::Library { library, reason }) if !verbs::kernel_has(name) => {
                Err(not_found(name, &format!(" (no RDMA device: {library} cannot be loaded: {reason})")))
            }
            opened => opened,
        }
    }

    pub(super) fn device(name: &str, device: Arc<VerbsDevice>) -> Result<Device, DeviceError> {
        let watch = device.watch()?;
        let transport = transport(device.port().fabric);
        let gid = Ipv6Addr::from(device.port().gid);
        let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
        let inner = Inner {
            provider: provider::Device::Verbs(device),
            name: name.to_owned(),
            transport,
            profile: None,
            address,
            _watch: watch,
        };
        Ok(Device { inner: Arc::new(inner) })
    }
}

#[cfg(not(feature = "verbs"))]
mod rdma {
    use super::*;

    pub(super) fn list() -> Vec<DeviceInfo> {
        Vec::new()
    }

    pub(super) fn open(name: &str) -> Result<Device, DeviceError> {
        Err(not_found(name, " (this build is without the feature \"verbs\", and so without RDMA devices)"))
    }
}

#[cfg(test)]
mod tests;
