//! Hosts that are right, each with what the doctor says of its kind.

use super::{Root, efa, erdma, erdma_compat, mlx5, rxe, siw};
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
        assert!(examined.check("gpu").summary.contains(way), "{}", examined.text);
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
