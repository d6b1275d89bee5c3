//! Devices: listing, opening, capabilities, and the protection domains that belong to them.
//!
//! Every device is of the soft provider so far, see [`guide::transports`](crate::guide::transports). Nothing here needs a
//! runtime, except registering memory.

mod caps;
mod gid;
mod pd;
mod profile;
mod soft_config;

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

pub use caps::Capabilities;
pub use pd::ProtectionDomain;
pub use profile::Profile;
pub use soft_config::SoftConfig;

use crate::error::DeviceError;
use crate::provider::{self, soft::SoftDevice};

/// The name that opens the soft device which `LANDFALL_SOFT` describes.
const SOFT: &str = "soft";

/// A device that can be opened, as [`Device::list`] gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name for [`Device::open`].
    pub name: String,
    /// How it moves data: `soft-tcp`.
    pub transport: &'static str,
    /// The soft provider's profile.
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
    profile: Option<Profile>,
    address: IpAddr,
}

impl Device {
    /// Every device that can be opened here. `soft` is the one that `LANDFALL_SOFT` describes (not listed when that
    /// does not parse; opening it says why); each profile has a name of its own.
    pub fn list() -> Vec<DeviceInfo> {
        let from_env = SoftConfig::from_env().ok().map(|c| (SOFT.to_owned(), c.profile));
        let by_profile = Profile::ALL.into_iter().map(|p| (format!("{SOFT}-{p}"), p));
        from_env
            .into_iter()
            .chain(by_profile)
            .map(|(name, p)| DeviceInfo {
                name,
                transport: "soft-tcp",
                profile: Some(p),
                capabilities: p.capabilities(),
            })
            .collect()
    }

    /// Opens a device by its name in [`list`](Self::list).
    ///
    /// # Errors
    /// [`DeviceError::NotFound`] with the names that there are; for `soft`, [`DeviceError::Config`] when `LANDFALL_SOFT`
    /// is not valid; else as [`soft`](Self::soft).
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        if name == SOFT {
            return Self::soft(SoftConfig::from_env()?);
        }
        let profile = Profile::ALL.into_iter().find(|p| name.strip_prefix("soft-") == Some(p.name()));
        match profile {
            Some(p) => Self::soft(SoftConfig::new().profile(p)),
            None => {
                let names: Vec<String> = Self::list().into_iter().map(|d| d.name).collect();
                Err(DeviceError::NotFound { name: name.to_owned(), available: names.join(", ") })
            }
        }
    }

    /// Opens a soft device of this process. Each call makes another device: resources of two do not go together.
    ///
    /// # Errors
    /// [`DeviceError::Config`] for an unspecified or multicast address, which no peer could reach; [`DeviceError::Os`] when no socket can be bound to its address.
    pub fn soft(config: SoftConfig) -> Result<Self, DeviceError> {
        let (profile, address) = (config.profile, config.address);
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
            profile: Some(profile),
            address,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its name: `soft-` and the profile.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How it moves data: `soft-tcp`.
    pub fn transport(&self) -> &'static str {
        match self.inner.provider {
            provider::Device::Soft(_) => "soft-tcp",
        }
    }

    /// Whether it is an RDMA device, and not the soft provider.
    pub fn is_rdma(&self) -> bool {
        match self.inner.provider {
            provider::Device::Soft(_) => false,
        }
    }

    /// The soft provider's profile. `None` for a device of another provider.
    pub fn profile(&self) -> Option<Profile> {
        self.inner.profile
    }

    /// What it can do.
    pub fn capabilities(&self) -> &Capabilities {
        self.inner.provider.capabilities()
    }

    /// The IP address of its port: where queue pairs of the soft provider listen.
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

    /// A new protection domain.
    ///
    /// # Errors
    /// [`DeviceError`] when the device gives none; the soft provider always does.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain, DeviceError> {
        Ok(ProtectionDomain::new(self.clone(), self.inner.provider.alloc_pd()?))
    }

    pub(crate) fn provider(&self) -> &provider::Device {
        &self.inner.provider
    }

    /// Whether two handles are of the same opened device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

#[cfg(test)]
mod tests;
