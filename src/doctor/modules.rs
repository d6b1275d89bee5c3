//! The kernel's modules between a device and a process: `ib_uverbs`, and `rdma_ucm` for RDMA_CM.
//!
//! What they make is looked for, not their names: they may be built in. `ib_uverbs` makes a
//! `class/infiniband_verbs/uverbsN` for each device (drivers/infiniband/core/uverbs_main.c), `rdma_ucm` the
//! `class/misc/rdma_cm` (core/ucma.c).

use super::host::{Host, HostDevice};
use super::report::{Check, Evidence};

const NAME: &str = "modules";

pub(super) fn check(host: &Host<'_>, device: &HostDevice) -> Check {
    let root = host.root;
    let manager = "sys/class/misc/rdma_cm";
    let (uverbs, has_manager) = (device.uverbs(root), root.exists(manager));
    let there = |is: bool| if is { "there" } else { "not there" };
    let evidence = [
        Evidence::new(
            root.name("sys/class/infiniband_verbs"),
            uverbs.clone().unwrap_or_else(|| format!("no uverbs of {}", device.name)),
        ),
        Evidence::new(root.name(manager), there(has_manager)),
    ];
    let check = match (uverbs, has_manager) {
        (None, _) => Check::failure(
            NAME,
            "ib_uverbs has not made a device file for it, so that no process can use it",
            "`modprobe ib_uverbs`, and add it to /etc/modules-load.d",
        ),
        (Some(_), true) => Check::ok(NAME, "ib_uverbs and rdma_ucm are loaded"),
        (Some(_), false) => Check::graded(
            device.needs_manager(host),
            NAME,
            "rdma_ucm is not loaded: RDMA_CM cannot be used",
            "`modprobe rdma_ucm`, and add it to /etc/modules-load.d",
        ),
    };
    check.of(&device.name).with(evidence)
}
