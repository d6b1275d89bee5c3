//! What this process may have: locked memory, and objects of RDMA devices.
//!
//! Registered memory is pinned, and counts against `RLIMIT_MEMLOCK` unless the process has `CAP_IPC_LOCK` in the
//! first user namespace (drivers/infiniband/core/umem.c, `ib_umem_get`: `pinned_vm`, `capable`). Beyond the limit a
//! registration fails with ENOMEM. The kernel's default is 8 MiB from 5.16 on and 64 KiB before (`MLOCK_LIMIT`).
//! Pinned pages count in the control group's memory as well, as any others do. Objects of a device are limited by the
//! control group's `rdma.max` (`Documentation/admin-guide/cgroup-v2.rst`).

use super::host::Host;
use super::report::Check;

const MEMLOCK: &str = "memlock";
const RDMA_CGROUP: &str = "rdma_cgroup";
const LIMITS: &str = "proc/self/limits";
/// The kernel's default: that of a system where nobody has thought of RDMA.
const DEFAULT: u64 = 8 << 20;
/// `CAP_IPC_LOCK` of the kernel's `include/uapi/linux/capability.h`.
const CAP_IPC_LOCK: u64 = 1 << 14;

pub(super) fn memlock(host: &Host<'_>) -> Check {
    let root = host.root;
    let (limits, status, map) =
        (root.read(LIMITS), root.read("proc/self/status"), root.read("proc/self/uid_map"));
    let limit = limits.value().and_then(soft_limit);
    let capability = status.value().and_then(effective).is_some_and(|set| set & CAP_IPC_LOCK != 0);
    let exempt = capability && map.value().is_some_and(is_first_namespace);
    let said = match &limit {
        Some(Limit::Unlimited) => "Max locked memory: unlimited".to_owned(),
        Some(Limit::Bytes(bytes)) => format!("Max locked memory: {bytes} bytes"),
        None => "no line of locked memory".to_owned(),
    };
    let evidence = [
        limits.evidence_of(said),
        status.evidence_of(format!("CAP_IPC_LOCK {}", if capability { "yes" } else { "no" })),
    ];
    let matters = !host.devices.is_empty() || host.asked.require_rdma;
    let fix = "let it be unlimited: `* soft memlock unlimited` and `* hard memlock unlimited` in \
        /etc/security/limits.conf, `LimitMEMLOCK=infinity` of a systemd unit (containerd's for Kubernetes), `--ulimit memlock=-1` of a \
        container; or give the \
        process CAP_IPC_LOCK";
    let check = match limit {
        Some(Limit::Unlimited) => Check::ok(MEMLOCK, "locked memory is not limited"),
        Some(Limit::Bytes(bytes)) if exempt => Check::ok(
            MEMLOCK,
            format!("the limit of {} does not apply: the process has CAP_IPC_LOCK", size(bytes)),
        ),
        Some(Limit::Bytes(bytes)) if bytes <= DEFAULT => Check::graded(
            matters,
            MEMLOCK,
            format!("{} may be locked: registering a pool of blocks fails (ENOMEM)", size(bytes)),
            fix,
        ),
        Some(Limit::Bytes(bytes)) => Check::warning(
            MEMLOCK,
            format!("{} may be locked: all regions of the process have to fit in", size(bytes)),
            fix,
        ),
        None => Check::unknown(MEMLOCK, "the limit of locked memory cannot be read"),
    };
    check.with(evidence)
}

enum Limit {
    Unlimited,
    Bytes(u64),
}

/// `Max locked memory  SOFT  HARD  bytes` (proc(5)).
fn soft_limit(limits: &str) -> Option<Limit> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        bytes => bytes.parse().ok().map(Limit::Bytes),
    }
}

/// The effective capabilities of `status`: `CapEff:  HEX`.
fn effective(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

/// The first user namespace maps every user to itself (user_namespaces(7)).
fn is_first_namespace(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// `None` where the kernel has no such controller, or does not limit.
pub(super) fn rdma_cgroup(host: &Host<'_>) -> Option<Check> {
    // Version 2 is the entry without a controller's name.
    let groups = host.root.text("proc/self/cgroup")?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // A group's path, not one to somewhere else.
    if group.split('/').any(|part| part == "..") {
        return None;
    }
    let limits = host.root.read(&format!("sys/fs/cgroup/{group}/rdma.max"));
    // `mlx5_0 hca_handle=2 hca_object=max`
    let text = limits.value()?;
    let limited = text.lines().find(|line| {
        let device = line.split(' ').next().unwrap_or_default();
        line.contains("=0") && host.devices.iter().any(|d| d.name == device)
    });
    let check = match limited {
        Some(line) => Check::failure(
            RDMA_CGROUP,
            format!("the control group may have no object of a device: {line}"),
            format!(
                "raise its limit: `echo 'DEVICE hca_handle=max hca_object=max' > /sys/fs/cgroup/{group}/rdma.max`"
            ),
        ),
        None => Check::ok(RDMA_CGROUP, "the control group may have objects of the devices"),
    };
    Some(check.with([limits.evidence_of(limited.unwrap_or("no limit of 0").to_owned())]))
}

/// Bytes in the largest unit that divides them.
fn size(bytes: u64) -> String {
    match bytes.trailing_zeros() {
        _ if bytes == 0 => "0 B".to_owned(),
        30.. => format!("{} GiB", bytes >> 30),
        20.. => format!("{} MiB", bytes >> 20),
        10.. => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_user_namespace_is_known_by_its_map() {
        assert!(is_first_namespace("         0          0 4294967295\n"));
        assert!(!is_first_namespace("         0       1000          1\n"));
        assert!(!is_first_namespace("0 0 65536\n65536 100000 65536\n"));
    }
}
