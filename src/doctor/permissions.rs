//! Whether this user may open the device files: `/dev/infiniband/uverbsN` of a device, and `rdma_cm`.
//!
//! udev makes both world-accessible where rdma-core's rules are installed (rdma-core,
//! kernel-boot/rdma-persistent-naming and `redhat/rdma.udev-rules`: mode 0666); a container sees what it is given,
//! and its control group of devices decides.

use std::io;

use super::host::{Host, HostDevice};
use super::report::{Check, Evidence};

const NAME: &str = "permissions";

pub(super) fn check(host: &Host<'_>, device: &HostDevice) -> Vec<Check> {
    let mut checks = Vec::new();
    // Without it, `modules` has said so.
    if let Some(uverbs) = device.uverbs(host.root) {
        checks.push(file(host, device, &uverbs, true));
    }
    if host.root.exists("sys/class/misc/rdma_cm") {
        checks.push(file(host, device, "rdma_cm", device.needs_manager(host)));
    }
    checks
}

fn file(host: &Host<'_>, device: &HostDevice, name: &str, matters: bool) -> Check {
    let at = format!("dev/infiniband/{name}");
    let path = host.root.name(&at);
    let opened = host.root.opens(&at);
    let said = opened.as_ref().map_or_else(ToString::to_string, |()| "opened".to_owned());
    let check = match opened {
        Ok(()) => Check::ok(NAME, format!("{path} can be opened")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Check::graded(
            matters,
            NAME,
            format!("{path} is not there"),
            "in a container, pass it in (`--device /dev/infiniband`; in Kubernetes the device plugin does); on \
            a host, install \
             rdma-core, whose udev rules make it",
        ),
        Err(_) => Check::graded(
            matters,
            NAME,
            format!("{path} cannot be opened for reading and writing"),
            format!(
                "let this user read and write {path} (its mode, its group); in a container, its device rules \
                must allow it too"
            ),
        ),
    };
    check.of(&device.name).with([Evidence::new(format!("open {path}"), said)])
}
