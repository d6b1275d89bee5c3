//! GPUDirect: whether the host is ready for a device to read and write the memory of an NVIDIA GPU by itself.
//!
//! Two ways (NVIDIA, "GPUDirect RDMA", and the GPU Operator's guide): the module `nvidia_peermem` (`nv_peer_mem`
//! once), which needs the peer-memory interface of an ib_core with it; or dmabuf, with NVIDIA's open kernel modules, for
//! drivers of devices that take it. `/proc/driver/nvidia/version` says whose modules they are.

use super::fork::release;
use super::host::Host;
use super::report::{Check, Evidence};

const NAME: &str = "gpu";
const VERSION: &str = "proc/driver/nvidia/version";
const PEER_MEMORY: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];
/// Drivers of PCI devices whose RDMA driver has `reg_user_mr_dmabuf` in its `ib_device_ops`, and the release of Linux that brought
/// it. A vendor's kernel or modules may have it earlier.
///
/// - mlx5_ib: commit 90da7dc8206a, with the verb itself (drivers/infiniband/hw/mlx5/main.c);
/// - efa: 66f4817b5712 (efa/efa_main.c);
/// - irdma, on ice, i40e and idpf: d2225b838cca (irdma/verbs.c);
/// - bnxt_re: 0a30e59f22b2 (bnxt_re/main.c);
/// - mana_ib: ffd67b6b420d (mana/device.c);
/// - ionic_rdma: from its beginning (ionic/ionic_ibdev.c).
///
/// hns has none. That of erdma was in review in June 2026 ("RDMA/erdma: Implement
/// erdma_reg_user_mr_dmabuf", v3).
const TAKE_DMABUF: [(&str, (u32, u32)); 8] = [
    ("mlx5_core", (5, 12)),
    ("efa", (5, 16)),
    ("ice", (6, 3)),
    ("i40e", (6, 3)),
    ("idpf", (6, 3)),
    ("bnxt_en", (6, 6)),
    ("mana", (6, 15)),
    ("ionic", (6, 18)),
];

/// `provider/verbs` registers memory of a GPU, by either way.
const UNPROVEN: &str = "landfall registers GPU memory for it, and a transfer by it was never run";

/// `None` without a GPU, unless one is wanted.
pub(super) fn check(host: &Host<'_>) -> Option<Check> {
    let root = host.root;
    let version = root.read(VERSION);
    if version.value().is_none() && !host.asked.gpu {
        return None;
    }
    let loaded = PEER_MEMORY.into_iter().find(|module| root.exists(&format!("sys/module/{module}")));
    let open = version.value().is_some_and(|text| text.contains("Open Kernel Module"));
    let there = |driver: &str| host.devices.iter().any(|d| d.driver.as_deref() == Some(driver));
    let known: Vec<_> = TAKE_DMABUF.into_iter().filter(|(driver, _)| there(driver)).collect();
    let kernel = release(root);
    let takes = known.iter().any(|(_, since)| kernel.is_some_and(|kernel| kernel >= *since));
    let evidence = [
        version.evidence(),
        Evidence::new(root.name("sys/module/nvidia_peermem"), loaded.map_or("not there", |_| "there")),
        root.read("proc/sys/kernel/osrelease").evidence(),
    ];
    let check = match (version.value(), loaded) {
        (None, _) => Check::failure(
            NAME,
            "NVIDIA's driver is not loaded: there is no GPU",
            "install and load NVIDIA's driver",
        ),
        (Some(_), Some(module)) => Check::ok(
            NAME,
            format!("the host is ready for GPUDirect by peer memory: {module} is loaded; {UNPROVEN}"),
        ),
        (Some(_), None) if open && takes => Check::ok(
            NAME,
            format!(
                "the host is ready for GPUDirect by dmabuf: the kernel, NVIDIA's open modules and a device's driver \
                have it; {UNPROVEN}"
            ),
        ),
        (Some(_), None) => {
            let mut missing = Vec::new();
            if !open {
                missing.push("NVIDIA's modules are not the open ones".to_owned());
            }
            match known.first() {
                None => missing.push("no device's driver is known to take it".to_owned()),
                Some((driver, (major, minor))) if !takes => missing.push(format!(
                    "the driver of {driver}'s devices takes it from Linux {major}.{minor} on, unless a vendor has it earlier"
                )),
                Some(_) => {}
            }
            Check::graded(
                host.asked.gpu,
                NAME,
                format!(
                    "the host is not ready for GPUDirect: nvidia_peermem is not loaded, and dmabuf cannot be had ({}); \
                    {UNPROVEN}",
                    missing.join(", ")
                ),
                "`modprobe nvidia_peermem` (on eRDMA and others it needs an ib_core with peer memory, as OFED's \
                or the vendor's), or \
                 install NVIDIA's open kernel modules for dmabuf",
            )
        }
    };
    Some(check.with(evidence))
}
