//! GPUDirect: whether the host is ready for a device to read and write the memory of an NVIDIA GPU by itself.
//!
//! Two ways (NVIDIA, "GPUDirect RDMA", and the GPU Operator's guide): the module `nvidia_peermem` (`nv_peer_mem`
//! once), which needs the peer-memory interface of an ib_core with it; or dmabuf, from Linux 5.12 on with NVIDIA's
//! open kernel modules, for drivers of devices that take it. `/proc/driver/nvidia/version` says whose modules they
//! are.

use super::fork::release;
use super::host::Host;
use super::report::{Check, Evidence};

const NAME: &str = "gpu";
const VERSION: &str = "proc/driver/nvidia/version";
const PEER_MEMORY: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];
/// Drivers that have `reg_user_mr_dmabuf`: drivers/infiniband/hw/{mlx5/main.c, efa/efa_main.c, irdma/verbs.c,
/// bnxt_re/main.c}.
const TAKE_DMABUF: [&str; 6] = ["mlx5_core", "efa", "ice", "i40e", "idpf", "bnxt_en"];

/// `provider/verbs/mr.rs` refuses memory of a GPU.
const NOT_YET: &str =
    "this version of landfall does not use it yet, and takes GPU memory over soft devices alone";

/// `None` without a GPU, unless one is wanted.
pub(super) fn check(host: &Host<'_>) -> Option<Check> {
    let root = host.root;
    let version = root.read(VERSION);
    if version.value().is_none() && !host.asked.gpu {
        return None;
    }
    let loaded = PEER_MEMORY.into_iter().find(|module| root.exists(&format!("sys/module/{module}")));
    let open = version.value().is_some_and(|text| text.contains("Open Kernel Module"));
    let kernel = release(root).is_some_and(|release| release >= (5, 12));
    let takes = |driver: &str| host.devices.iter().any(|d| d.driver.as_deref() == Some(driver));
    let takes = TAKE_DMABUF.into_iter().any(takes);
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
            format!("the host is ready for GPUDirect by peer memory: {module} is loaded; {NOT_YET}"),
        ),
        (Some(_), None) if open && kernel && takes => Check::ok(
            NAME,
            format!(
                "the host is ready for GPUDirect by dmabuf: the kernel, NVIDIA's open modules and a device's driver \
                have it; {NOT_YET}"
            ),
        ),
        (Some(_), None) => {
            let missing = [
                (!open, "NVIDIA's modules are not the open ones"),
                (!kernel, "the kernel is older than 5.12"),
                (!takes, "no device's driver is known to take it"),
            ];
            let missing: Vec<_> = missing.into_iter().filter_map(|(is, what)| is.then_some(what)).collect();
            Check::graded(
                host.asked.gpu,
                NAME,
                format!(
                    "the host is not ready for GPUDirect: nvidia_peermem is not loaded, and dmabuf cannot be had ({}); \
                    {NOT_YET}",
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
