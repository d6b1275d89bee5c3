//! PCI addresses, and the bridges above a function. No I/O.

use std::fmt;
use std::path::{Component, Path};
use std::str::FromStr;

/// The address of a PCI function: domain, bus, device, function. Parsed from `0000:1b:00.0`, from `1b:00.0` (domain 0), and
/// from the eight digits of domain that NVIDIA's tools print; printed as the kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Text that is no PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is no PCI address; give DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, for instance 0000:1b:00.0"
)]
pub struct PciAddressError {
    given: String,
}

impl PciAddress {
    fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let hex = |digits: &str, most: usize| {
            // The parser would take a sign.
            let valid = (1..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            valid.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
        };
        let small = |digits: &str, len: usize, most: u32| {
            let n = hex(digits, len).filter(|&n| digits.len() == len && n <= most)?;
            u8::try_from(n).ok()
        };
        Some(Self {
            domain: hex(domain, 8)?,
            bus: small(bus, 2, 0xff)?,
            device: small(device, 2, 0x1f)?,
            function: small(function, 1, 7)?,
        })
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        Self::parse(text.trim()).ok_or_else(|| PciAddressError { given: text.to_owned() })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

/// A function and the bridges above it, from the host bridge down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PciPath {
    host_bridge: String,
    /// The root port, the ports of switches, and last the function itself.
    chain: Vec<PciAddress>,
}

impl PciPath {
    /// From a path below `/sys/devices`: `pci0000:17/0000:17:01.0/0000:18:00.0/…`. What follows the last PCI function (a
    /// class, a virtio device) does not count. `None` where no PCI function is on it.
    pub(super) fn of(below_devices: &Path) -> Option<Self> {
        let mut host_bridge = None;
        let mut chain = Vec::new();
        for component in below_devices.components() {
            let Component::Normal(name) = component else { return None };
            let Some(name) = name.to_str() else { continue };
            match PciAddress::parse(name) {
                Some(address) => chain.push(address),
                None if chain.is_empty() => host_bridge = Some(name),
                None => {}
            }
        }
        let host_bridge = host_bridge.unwrap_or("").to_owned();
        (!chain.is_empty()).then_some(Self { host_bridge, chain })
    }

    /// The function.
    pub(super) fn address(&self) -> PciAddress {
        self.chain[self.chain.len() - 1]
    }

    pub(super) fn host_bridge(&self) -> &str {
        &self.host_bridge
    }

    /// The bridges without the function.
    fn bridges(&self) -> &[PciAddress] {
        &self.chain[..self.chain.len() - 1]
    }

    /// The bridges that both are below, from the root port down.
    pub(super) fn shared_bridges(&self, other: &Self) -> &[PciAddress] {
        if self.host_bridge != other.host_bridge {
            return &[];
        }
        let pairs = self.bridges().iter().zip(other.bridges());
        &self.bridges()[..pairs.take_while(|(a, b)| a == b).count()]
    }

    /// The bridges on the way from one to the other: below what they share, and the lowest that they share.
    pub(super) fn bridges_between(&self, other: &Self) -> u32 {
        let shared = self.shared_bridges(other).len();
        let between = self.bridges().len() + other.bridges().len() - 2 * shared + usize::from(shared > 0);
        u32::try_from(between).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r10_pci_addresses_are_parsed_strictly_and_printed_as_the_kernel_does() {
        for (text, printed) in [
            ("0000:1b:00.0", "0000:1b:00.0"),
            ("1b:00.1", "0000:1b:00.1"),
            ("00000000:3B:1F.7\n", "0000:3b:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
            ("ffffffff:ff:1f.7", "ffffffff:ff:1f.7"),
        ] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), printed);
            assert_eq!(printed.parse(), Ok(address));
        }
        for text in [
            "",
            ".",
            ":",
            ":.",
            "::.",
            "0000",
            "0000:1b:00",
            "0000:1b:00.",
            "0000:1b:00.8",
            "0000:1b:20.0",
            "0000:1b:0.0",
            "0000:1bb:00.0",
            "000000000:1b:00.0",
            "+000:1b:00.0",
            "0000:+b:00.0",
            "0000:1b:00.0.0",
            "0:0000:1b:00.0",
            "0000:1b:00:0",
            "пять:1b:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("0000:1b:00.0"), "{error}");
        }
    }

    fn path(text: &str) -> Option<PciPath> {
        PciPath::of(Path::new(text))
    }

    #[test]
    fn k9_a_path_ends_with_its_last_pci_function() {
        let nic = path("pci0000:17/0000:17:01.0/0000:18:00.0/infiniband/mlx5_0").unwrap();
        assert_eq!((nic.host_bridge(), nic.address().to_string()), ("pci0000:17", "0000:18:00.0".to_owned()));
        let virtio = path("pci0000:00/0000:00:03.0/virtio2/net/eth0").unwrap();
        assert_eq!((virtio.address().to_string(), virtio.bridges().len()), ("0000:00:03.0".to_owned(), 0));
        // On a bus that is not PCI first, as on some Arm servers.
        let arm = path("platform/40000000.pcie/pci0004:00/0004:00:00.0/0004:01:00.0").unwrap();
        assert_eq!(arm.host_bridge(), "pci0004:00");
        assert_eq!(path("virtual/net/lo"), None);
        assert_eq!(path(""), None);
        assert_eq!(path("../devices/pci0000:00/0000:00:03.0"), None);
    }

    #[test]
    fn k9_functions_of_one_device_share_what_is_above_it() {
        let port = path("pci0000:17/0000:17:01.0/0000:18:00.0").unwrap();
        let other = path("pci0000:17/0000:17:01.0/0000:18:00.1").unwrap();
        assert_eq!(port.shared_bridges(&other).len(), 1);
        assert_eq!(port.bridges_between(&other), 1);
        assert_eq!(port.shared_bridges(&port).len(), 1);
        // The same numbers at another host bridge are other bridges.
        let elsewhere = path("pci0001:17/0000:17:01.0/0000:18:00.1").unwrap();
        assert_eq!(port.shared_bridges(&elsewhere), []);
    }
}
