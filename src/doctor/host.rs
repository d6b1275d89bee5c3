//! What the checks have in common: the root, what was asked, and the RDMA devices as sysfs has them.

use super::Doctor;
use super::root::Root;

/// What is examined.
pub(super) struct Host<'a> {
    pub(super) root: &'a Root,
    pub(super) asked: &'a Doctor,
    /// Those asked for, in the order of their names.
    pub(super) devices: Vec<HostDevice>,
    /// Whether the kernel has more than those.
    pub(super) has_others: bool,
}

/// A device in sysfs.
pub(super) struct HostDevice {
    pub(super) name: String,
    /// The kernel's driver of its PCI function, or what a device in software calls itself.
    pub(super) driver: Option<String>,
    pub(super) fabric: Fabric,
    pub(super) ports: Vec<u8>,
}

/// `node_type` and the link layer: `enum rdma_node_type` of the kernel's `include/rdma/ib_verbs.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fabric {
    InfiniBand,
    Roce,
    Iwarp,
    /// No RC queue pairs: EFA, usNIC.
    Other,
    Unknown,
}

/// The driver of a kernel, the provider that libibverbs has for it, and whether the device is software. The providers
/// are rdma-core's `providers/*/CMakeLists.txt`; a driver is that of the PCI function, which for some devices is that
/// of the network card under them.
const PROVIDERS: [(&str, &str); 19] = [
    ("mlx5_core", "mlx5"),
    ("mlx5_core.sf", "mlx5"),
    ("mlx4_core", "mlx4"),
    ("erdma", "erdma"),
    ("efa", "efa"),
    ("ice", "irdma"),
    ("i40e", "irdma"),
    ("idpf", "irdma"),
    ("bnxt_en", "bnxt_re"),
    ("cxgb4", "cxgb4"),
    ("hns3", "hns"),
    ("qede", "qedr"),
    ("be2net", "ocrdma"),
    ("mana", "mana"),
    ("ionic", "ionic"),
    ("vmw_pvrdma", "vmw_pvrdma"),
    ("hfi1", "hfi1verbs"),
    (RXE, "rxe"),
    (SIW, "siw"),
];

pub(super) const RXE: &str = "rdma_rxe";
pub(super) const SIW: &str = "siw";

impl<'a> Host<'a> {
    pub(super) fn read(root: &'a Root, asked: &'a Doctor) -> Self {
        let mut names: Vec<String> = root.sysfs().devices().collect();
        names.sort_unstable();
        let all = names.len();
        names.retain(|name| asked.device.as_ref().is_none_or(|wanted| wanted == name));
        let devices: Vec<_> = names.into_iter().map(|name| HostDevice::read(root, name)).collect();
        Self { root, asked, has_others: devices.len() < all, devices }
    }

    /// Whether a device is driven by this module of the kernel.
    pub(super) fn has_driver(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.driver.as_deref() == Some(driver))
    }

    /// Whether only RDMA_CM connects some device.
    pub(super) fn needs_manager(&self) -> bool {
        self.devices.iter().any(|device| device.needs_manager(self))
    }
}

impl HostDevice {
    fn read(root: &Root, name: String) -> Self {
        let at = |file: &str| format!("sys/class/infiniband/{name}/{file}");
        let driver = root.link_name(&at("device/driver")).or_else(|| {
            // `node_desc` of sw/rxe/rxe_verbs.c and sw/siw/siw_main.c. It can be written to, and then the name has to
            // do.
            let says = root.text(&at("node_desc")).unwrap_or_default();
            let is = |desc: &str, prefix: &str| says.starts_with(desc) || name.starts_with(prefix);
            if root.exists(&at("device/driver")) {
                None
            } else if is("Software iWARP", "siw") {
                Some(SIW.to_owned())
            } else {
                is("rxe", "rxe").then(|| RXE.to_owned())
            }
        });
        let mut ports: Vec<u8> = root
            .sysfs()
            .ports()
            .into_iter()
            .filter(|port| port.device == name && port.port > 0)
            .map(|port| port.port)
            .collect();
        ports.dedup();
        let node_type = root.text(&at("node_type"));
        let layer = ports.first().and_then(|port| root.text(&at(&format!("ports/{port}/link_layer"))));
        let fabric = match node_type.as_deref().and_then(|text| text.split(':').next()) {
            Some("1") if layer.as_deref() == Some("Ethernet") => Fabric::Roce,
            Some("1") => Fabric::InfiniBand,
            Some("4") => Fabric::Iwarp,
            Some("5" | "6" | "7") => Fabric::Other,
            _ => Fabric::Unknown,
        };
        Self { name, driver, fabric, ports }
    }

    /// Below the root.
    pub(super) fn at(&self, file: &str) -> String {
        format!("sys/class/infiniband/{}/{file}", self.name)
    }

    pub(super) fn port_at(&self, port: u8, file: &str) -> String {
        self.at(&format!("ports/{port}/{file}"))
    }

    pub(super) fn provider(&self) -> Option<&'static str> {
        let driver = self.driver.as_deref()?;
        PROVIDERS.iter().find(|(of, _)| *of == driver).map(|(_, provider)| *provider)
    }

    /// Whether only RDMA_CM connects it: iWARP, but for eRDMA in compat mode.
    pub(super) fn needs_manager(&self, host: &Host<'_>) -> bool {
        let compat = || host.root.text(super::erdma::COMPAT_MODE).is_some_and(|mode| mode == "Y");
        self.fabric == Fabric::Iwarp && !(self.driver.as_deref() == Some("erdma") && compat())
    }

    /// The number of its device file: `uverbs0`.
    pub(super) fn uverbs(&self, root: &Root) -> Option<String> {
        let class = "sys/class/infiniband_verbs";
        root.names(class)
            .into_iter()
            .filter(|entry| entry.starts_with("uverbs"))
            .find(|entry| root.text(&format!("{class}/{entry}/ibdev")).as_deref() == Some(&self.name))
    }
}
