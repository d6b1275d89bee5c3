//! Hosts with a fault each: it is named, with its fix, nothing else is, and the exit status is not zero.

use super::{Root, efa, erdma, erdma_compat, limits, mlx5, rxe, siw};
use crate::examined::examine;

/// The one fault, and words of what is said about it and of its fix.
#[track_caller]
fn fault(root: &Root, args: &[&str], name: &str, said: &[&str], fix: &[&str]) {
    let examined = examine(root, args);
    assert_eq!((examined.status, examined.not_ok()), (1, vec![(name, "failure")]), "{}", examined.text);
    let check = examined.failure(name);
    let has = |text: &str, words: &[&str]| words.iter().all(|word| text.contains(word));
    let told = format!("{} {}", check.summary, check.evidence.join(" "));
    assert!(has(&told, said), "{said:?} is not in {told}");
    assert!(has(check.fix.as_deref().unwrap_or_default(), fix), "{fix:?} is not in {:?}", check.fix);
    // Text says the same as JSON.
    assert!(examined.text.contains(&check.summary) && examined.text.contains("fix:  "), "{}", examined.text);
}

#[test]
fn case_47_erdma_in_standard_mode_where_out_of_band_is_wanted() {
    fault(
        &erdma("N\n"),
        &["--bootstrap", "oob"],
        "erdma_mode",
        &["standard mode", "RTS", "sys/module/erdma/parameters/compat_mode: N"],
        &["options erdma compat_mode=Y", "modprobe", "RDMA_CM"],
    );
}

#[test]
fn case_47_memlock_of_64_kib() {
    let root = mlx5().with("proc/self/limits", &limits("65536"));
    fault(
        &root,
        &[],
        "memlock",
        &["64 KiB", "ENOMEM", "65536 bytes"],
        &["memlock unlimited", "LimitMEMLOCK=infinity"],
    );
}

#[test]
fn case_47_the_provider_is_not_named_to_libibverbs() {
    let root =
        mlx5().without("etc/libibverbs.d/mlx5.driver").with("etc/libibverbs.d/rxe.driver", "driver rxe\n");
    fault(
        &root,
        &[],
        "provider",
        &["provider mlx5", "none of 1 files names"],
        &["ibverbs-providers", "/etc/libibverbs.d"],
    );
    // A library that came in a wheel or a container, without the directory.
    let root = erdma_compat().without("etc/libibverbs.d");
    fault(&root, &[], "provider", &["provider erdma", "not there, or empty"], &["brings its own libibverbs"]);
}

#[test]
fn case_47_the_providers_library_is_not_there() {
    let root = mlx5().without("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so");
    fault(&root, &[], "provider", &["library of the provider mlx5", "in none of"], &["ibverbs-providers"]);
}

#[test]
fn case_47_nvidia_peermem_is_absent() {
    let said = ["nvidia_peermem is not loaded", "not the open ones", "sys/module/nvidia_peermem: not there"];
    fault(
        &mlx5().nvidia(false),
        &["--gpu"],
        "gpu",
        &said,
        &["modprobe nvidia_peermem", "open kernel modules"],
    );
    // Nobody has asked for GPUDirect.
    let examined = examine(&mlx5().nvidia(false), &[]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![("gpu", "warning")]), "{}", examined.text);
}

#[test]
fn case_47_the_ports_of_erdma_are_taken() {
    let root = erdma("Y\n").listens(30610, Some((77, "nginx")));
    fault(
        &root,
        &[],
        "erdma_ports",
        &["process 77 (nginx)", "30610", "proc/77/fd/5"],
        &["listen elsewhere", "30608-30623", "ip_local_reserved_ports"],
    );
}

#[test]
fn a_port_that_is_down() {
    let port = "sys/class/infiniband/mlx5_0/ports/1";
    let root = mlx5()
        .with(&format!("{port}/state"), "1: DOWN\n")
        .with(&format!("{port}/phys_state"), "3: Disabled\n");
    fault(&root, &[], "port", &["DOWN", "phys_state: 3: Disabled"], &["ip link set", "cable"]);
}

#[test]
fn a_port_without_a_gid() {
    let mut root = rxe();
    for index in [0, 1] {
        root = root.with(
            &format!("sys/class/infiniband/rxe0/ports/1/gids/{index}"),
            "0000:0000:0000:0000:0000:0000:0000:0000\n",
        );
    }
    fault(&root, &[], "gid", &["no usable GID"], &["address"]);
}

#[test]
fn a_link_local_gid_alone_is_a_warning() {
    let root = rxe().without("sys/class/infiniband/rxe0/ports/1/gids/1");
    let examined = examine(&root, &[]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![("gid", "warning")]), "{}", examined.text);
}

#[test]
fn counters_that_a_container_does_not_see_are_a_warning() {
    let root = erdma_compat().without("sys/class/infiniband/erdma_0/ports/1/hw_counters");
    let examined = examine(&root, &[]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![("counters", "warning")]), "{}", examined.text);
    assert!(examined.check("counters").fix.unwrap().contains("hostNetwork: true"), "{}", examined.text);
}

#[test]
fn counters_that_say_na_are_a_warning_and_not_zero() {
    let mut root = mlx5();
    for file in ["port_xmit_data", "port_rcv_data"] {
        root = root.with(&format!("sys/class/infiniband/mlx5_0/ports/1/counters/{file}"), "N/A (no PMA)\n");
    }
    let examined = examine(&root, &[]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![("counters", "warning")]), "{}", examined.text);
    assert!(examined.check("counters").evidence.iter().any(|e| e.contains("N/A")), "{}", examined.text);
}

#[test]
fn modules_that_are_not_loaded() {
    let root = mlx5().without("sys/class/infiniband_verbs/uverbs0");
    fault(&root, &[], "modules", &["ib_uverbs"], &["modprobe ib_uverbs"]);
    // Only RDMA_CM connects siw.
    let root = siw().without("sys/class/misc/rdma_cm");
    let examined = examine(&root, &[]);
    let expected = vec![("modules", "failure"), ("counters", "unknown")];
    assert_eq!((examined.status, examined.not_ok()), (1, expected), "{}", examined.text);
}

#[test]
fn device_files_that_a_container_was_not_given() {
    let root = mlx5().without("dev/infiniband/uverbs0");
    fault(&root, &[], "permissions", &["dev/infiniband/uverbs0 is not there"], &["--device /dev/infiniband"]);
}

#[test]
fn libraries_that_are_not_installed() {
    let root = mlx5().without("usr/lib/x86_64-linux-gnu/libibverbs.so.1");
    fault(&root, &[], "libraries", &["libibverbs.so.1"], &["apt-get install"]);
    let root = siw().without("usr/lib/x86_64-linux-gnu/librdmacm.so.1");
    let examined = examine(&root, &[]);
    let expected = vec![("libraries", "failure"), ("counters", "unknown")];
    assert_eq!((examined.status, examined.not_ok()), (1, expected), "{}", examined.text);
}

#[test]
fn an_erdma_adapter_whose_module_is_not_loaded() {
    let root = erdma("N\n")
        .without("sys/class/infiniband/erdma_0")
        .without("sys/devices/pci0000:00/0000:00:06.0/infiniband");
    let root = root.without("sys/devices/pci0000:00/0000:00:06.0/driver");
    fault(&root, &[], "devices", &["eRDMA", "0000:00:06.0"], &["modprobe erdma", "ib_umem_get_peer"]);
}

#[test]
fn a_device_that_is_not_there_is_told_with_those_that_are() {
    fault(&mlx5(), &["--device", "mlx5_7"], "devices", &["mlx5_7", "infiniband: mlx5_0"], &["one of these"]);
    fault(&efa(), &["--device", "../../etc"], "devices", &["no RDMA device"], &["one of these"]);
}

#[test]
fn a_control_group_that_may_have_no_object() {
    let root = mlx5()
        .with("proc/self/cgroup", "0::/kubepods/pod1\n")
        .with("sys/fs/cgroup/kubepods/pod1/rdma.max", "mlx5_0 hca_handle=2 hca_object=0\n");
    fault(&root, &[], "rdma_cgroup", &["hca_object=0"], &["rdma.max"]);
}

#[test]
fn cap_ipc_lock_lifts_the_limit_in_the_first_user_namespace_only() {
    let status = "Name:\tlandfall\nCapEff:\t0000000000004000\n";
    let root = mlx5().with("proc/self/limits", &limits("65536")).with("proc/self/status", status);
    let examined = examine(&root, &[]);
    assert_eq!((examined.status, examined.not_ok()), (0, vec![]), "{}", examined.text);
    let root = root.with("proc/self/uid_map", "         0     100000      65536\n");
    fault(&root, &[], "memlock", &["64 KiB", "CAP_IPC_LOCK yes"], &["unlimited"]);
}

#[test]
fn slow_clocks_old_kernels_and_small_pages_are_warnings() {
    let root = mlx5()
        .with("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
        .with("proc/sys/kernel/osrelease", "5.10.134-17.al8.x86_64\n")
        .with("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    let examined = examine(&root, &[]);
    let expected = vec![("huge_pages", "warning"), ("fork", "warning"), ("clock", "warning")];
    assert_eq!((examined.status, examined.not_ok()), (0, expected), "{}", examined.text);
}

#[test]
fn files_of_nonsense_are_unknown_and_no_panic() {
    let root = erdma("maybe\n");
    let garbage = "\u{0}\u{1b}[31m\n\n∞ 99999999999999999999999 -1 0x 🦀: : [";
    for at in [
        "proc/self/limits",
        "proc/self/status",
        "proc/self/uid_map",
        "proc/self/cgroup",
        "proc/net/tcp",
        "proc/net/tcp6",
        "proc/sys/kernel/osrelease",
        "proc/sys/net/ipv4/ip_local_port_range",
        "sys/kernel/mm/transparent_hugepage/enabled",
        "sys/class/infiniband/erdma_0/node_type",
        "sys/class/infiniband/erdma_0/ports/1/state",
        "sys/class/infiniband/erdma_0/ports/1/gids/0",
        "sys/class/infiniband/erdma_0/ports/1/hw_counters/hw_tx_bytes_cnt",
        "sys/class/infiniband_verbs/uverbs0/ibdev",
        "etc/libibverbs.d/erdma.driver",
        "proc/driver/nvidia/version",
    ] {
        root.write(at, garbage);
    }
    let examined = examine(&root, &["--gpu", "--bootstrap", "oob"]);
    assert_eq!(examined.status, 1, "{}", examined.text);
    // Nothing that a file says reaches a terminal as a command.
    assert!(!examined.text.contains('\u{1b}') && !examined.text.contains('\u{0}'), "{:?}", examined.text);
}
