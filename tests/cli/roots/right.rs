//! Hosts that are right, each with what the doctor says of its kind.

use super::{Root, driven_by, efa, erdma, erdma_compat, mlx5, rxe, siw};
use crate::examined::{Wrong, examine};

#[track_caller]
fn examined(root: &Root, status: i32, not_ok: &[Wrong]) {
    let examined = examine(root, &[]);
    assert_eq!((examined.status, examined.not_ok()), (status, not_ok.to_vec()), "{}", examined.text);
}

#[test]
fn erdma_in_standard_mode_is_a_warning() {
    examined(&erdma("N\n"), 0, &[("erdma_mode", "warning")]);
}

#[test]
fn erdma_in_compat_mode_is_right_and_its_driver_has_the_ports() {
    let root = erdma_compat();
    let examined = examine(&root, &["--bootstrap", "oob", "--device", "erdma_0", "--require-rdma"]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![]), "{}", examined.text);
    let ports = examined.check("erdma_ports");
    assert!(ports.summary.contains("belong to no process"), "{}", ports.summary);
}

#[test]
fn mlx5_on_roce_is_right() {
    let root = mlx5();
    examined(&root, 0, &[]);
    // The rule's choice (B2) among four.
    let gid = examine(&root, &[]).check("gid").summary;
    assert_eq!(gid, "3: ::ffff:10.0.0.1 RoCE v2 is used");
}

#[test]
fn mlx5_with_gpus_is_right_by_dmabuf_and_by_peer_memory() {
    for (root, way) in [
        (mlx5().nvidia(true), "dmabuf"),
        (mlx5().nvidia(false).with("sys/module/nvidia_peermem/version", "550.90.07\n"), "peer memory"),
    ] {
        let examined = examine(&root, &["--gpu"]);
        assert_eq!((examined.status, examined.not_ok()), (0, vec![]), "{}", examined.text);
        let summary = examined.check("gpu").summary;
        assert!(summary.contains(way) && summary.contains("landfall registers GPU memory"), "{summary}");
    }
}

/// A driver that came to it later than the kernel's release is no reason to say so.
#[test]
fn dmabuf_is_there_since_the_release_that_its_driver_has_it() {
    for (driver, release, well) in [
        ("mlx5_core", "5.11.0", false),
        ("mlx5_core", "5.12.0", true),
        ("efa", "5.15.0-1051-aws", false),
        ("efa", "5.16.0", true),
        ("ice", "6.2.0", false),
        ("ice", "6.3.1", true),
        ("bnxt_en", "6.5.0", false),
        ("bnxt_en", "6.6.0", true),
        ("mana", "6.14.0", false),
        ("mana", "6.15.0", true),
        ("ionic", "6.17.0", false),
        ("ionic", "6.18.0", true),
        ("erdma", "6.18.0", false),
        // And one that nobody knows.
        ("zxdh", "6.18.0", false),
    ] {
        let root = driven_by(driver).nvidia(true);
        let root = root.with("proc/sys/kernel/osrelease", &format!("{release}\n"));
        let gpu = examine(&root, &["--gpu"]).check("gpu");
        assert_eq!(gpu.verdict == "ok", well, "{driver} on {release}: {}", gpu.summary);
        let why =
            if ["erdma", "zxdh"].contains(&driver) { "no device's driver is known" } else { "from Linux" };
        assert!(well || gpu.summary.contains(why), "{}", gpu.summary);
    }
}

#[test]
fn efa_is_set_up_and_not_for_this_version() {
    examined(&efa(), 1, &[("capabilities", "failure")]);
}

#[test]
fn rxe_is_right() {
    examined(&rxe(), 0, &[]);
}

#[test]
fn siw_is_right_and_counts_nothing() {
    examined(&siw(), 0, &[("counters", "unknown")]);
}

#[test]
fn a_host_without_a_device_is_a_warning_and_a_failure_where_rdma_is_required() {
    examined(&Root::new(), 0, &[("devices", "warning")]);
    let required = examine(&Root::new(), &["--require-rdma"]);
    assert_eq!((required.status, required.not_ok()), (1, vec![("devices", "failure")]), "{}", required.text);
}
