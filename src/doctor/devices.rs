//! Which RDMA devices there are, and adapters that should be one.
//!
//! PCI functions are told by their vendor and device (`Documentation/ABI/testing/sysfs-bus-pci`): eRDMA is 1ded:107f
//! (drivers/infiniband/hw/erdma/erdma_hw.h), EFA 1d0f:efa0 and on (hw/efa/efa_main.c). Others cannot be told from
//! network cards without RDMA.

use super::host::Host;
use super::report::{Check, Evidence};
use super::root::Root;

const NAME: &str = "devices";
const CLASS: &str = "sys/class/infiniband";

pub(super) fn check(host: &Host<'_>) -> Vec<Check> {
    let mut checks: Vec<_> = adapters(host.root).into_iter().filter_map(|found| found.check(host)).collect();
    if !checks.is_empty() && host.devices.is_empty() {
        return checks;
    }
    checks.insert(0, listed(host));
    checks
}

fn listed(host: &Host<'_>) -> Check {
    let all: Vec<String> = {
        let mut names: Vec<_> = host.root.sysfs().devices().collect();
        names.sort_unstable();
        names
    };
    let found = if all.is_empty() { "no device".to_owned() } else { all.join(", ") };
    let evidence = [Evidence::new(host.root.name(CLASS), found)];
    let names: Vec<_> = host.devices.iter().map(|device| device.name.as_str()).collect();
    match (&host.asked.device, names.is_empty()) {
        (_, false) => {
            let others = if host.has_others { ", and others that were not asked for" } else { "" };
            Check::ok(NAME, format!("the kernel has {}{others}", names.join(", ")))
        }
        (Some(wanted), true) => {
            let fix = if all.is_empty() {
                "load the driver of the adapter; in a container, pass the host's devices in"
            } else {
                "ask for one of these"
            };
            Check::failure(NAME, format!("the kernel has no RDMA device {wanted:?}"), fix)
        }
        (None, true) => Check::graded(
            host.asked.require_rdma,
            NAME,
            "the kernel has no RDMA device: only the soft provider runs here (TCP, shared memory)",
            "load the driver of the adapter, or make a device in software: \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`",
        ),
    }
    .with(evidence)
}

/// An adapter on the bus that is known to be one of RDMA.
struct Adapter {
    pci: String,
    name: &'static str,
    module: &'static str,
    id: String,
    driver: Option<String>,
}

fn adapters(root: &Root) -> Vec<Adapter> {
    let bus = "sys/bus/pci/devices";
    let found = root.names(bus).into_iter().filter_map(|pci| {
        let read = |file: &str| root.text(&format!("{bus}/{pci}/{file}"));
        let id = format!("{}:{}", read("vendor")?, read("device")?);
        let (name, module) = match id.as_str() {
            "0x1ded:0x107f" => ("an eRDMA adapter", "erdma"),
            id if id.starts_with("0x1d0f:0xefa") => ("an EFA adapter", "efa"),
            _ => return None,
        };
        Some(Adapter { driver: root.link_name(&format!("{bus}/{pci}/driver")), pci, name, module, id })
    });
    found.collect()
}

impl Adapter {
    /// `None` when the kernel has made a device of it.
    fn check(&self, host: &Host<'_>) -> Option<Check> {
        let Self { pci, name, module, id, driver } = self;
        let class = format!("sys/bus/pci/devices/{pci}/infiniband");
        if host.root.exists(&class) || host.has_driver(module) || host.has_others {
            return None;
        }
        let evidence = [
            Evidence::new(host.root.name(&format!("sys/bus/pci/devices/{pci}")), id.clone()),
            Evidence::new(
                host.root.name(&format!("sys/bus/pci/devices/{pci}/driver")),
                driver.clone().unwrap_or_else(|| "not there".to_owned()),
            ),
        ];
        let summary = format!("{name} is at {pci}, and the kernel has made no RDMA device of it");
        let fix = if *module == "erdma" {
            "`modprobe erdma`; if that says \"Unknown symbol ib_umem_get_peer\" in dmesg, the module was built \
             against another ib_core than the kernel's: build it again without the OFED sources in /usr/src/ofa_kernel"
                .to_owned()
        } else {
            format!("`modprobe {module}`, and look into dmesg")
        };
        Some(Check::failure(NAME, summary, fix).with(evidence))
    }
}
