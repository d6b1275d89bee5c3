//! `landfall devices`: what it says of made-up hosts, and of this one.

use serde_json::Value;

use crate::program::{output, stderr, stdout};
use crate::roots::{Root, erdma, mlx5, siw};

#[track_caller]
fn devices(root: &Root) -> (Value, String) {
    let root = root.path().to_str().unwrap();
    let (json, text) = (output(&["devices", "--json", "--root", root]), output(&["devices", "--root", root]));
    assert_eq!((json.status.code(), text.status.code()), (Some(0), Some(0)), "{}", stderr(&json));
    (serde_json::from_str(&stdout(&json)).unwrap(), stdout(&text))
}

#[test]
fn a_port_is_shown_with_its_state_and_the_gid_that_is_taken() {
    let root = mlx5().with("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3", "eth2\n");
    let (json, text) = devices(&root);
    let device = &json["rdma"][0];
    assert_eq!((&device["name"], &device["pci"]), (&"mlx5_0".into(), &"0000:17:00.0".into()));
    assert_eq!((&device["numa_node"], &device["mode"]), (&0.into(), &Value::Null));
    // Another root's devices are not this process's to open.
    assert_eq!((&device["capabilities"], &device["transport"]), (&Value::Null, &Value::Null));
    let port = &device["ports"][0];
    assert_eq!((&port["state"], &port["link_layer"]), (&"ACTIVE".into(), &"Ethernet".into()));
    let taken: Vec<&Value> =
        port["gids"].as_array().unwrap().iter().filter(|gid| gid["chosen"] == true).collect();
    assert_eq!(taken.len(), 1, "{port:#}");
    assert_eq!((&taken[0]["index"], &taken[0]["interface"]), (&3.into(), &"eth2".into()));
    for said in [
        "mlx5_0: not opened, PCI 0000:17:00.0, NUMA node 0",
        "port 1: ACTIVE, LinkUp, Ethernet, 400 Gb/sec (4X NDR)",
        "GID 3: ::ffff:10.0.0.1 RoCE v2 of eth2  <- taken",
    ] {
        assert!(text.contains(said), "{said:?} is not in {text}");
    }
}

#[test]
fn erdma_has_a_mode() {
    for (parameter, mode) in [("Y\n", "compat"), ("N\n", "standard")] {
        let (json, text) = devices(&erdma(parameter));
        assert_eq!(json["rdma"][0]["mode"], mode);
        assert!(text.contains(&format!("{mode} mode")), "{text}");
    }
}

#[test]
fn a_gpu_below_the_same_switch_is_near() {
    let root = mlx5();
    let gpu = "sys/devices/pci0000:16/0000:16:02.0/0000:18:00.0";
    for (file, text) in [("class", "0x030200\n"), ("vendor", "0x10de\n"), ("numa_node", "0\n")] {
        root.write(&format!("{gpu}/{file}"), text);
    }
    root.link("sys/bus/pci/devices/0000:18:00.0", gpu);
    let (json, text) = devices(&root);
    let near = &json["rdma"][0]["near_gpus"][0];
    assert_eq!(near["pci"], "0000:18:00.0", "{json:#}");
    assert!(text.contains(&format!("near GPU 0000:18:00.0: {}", near["reason"].as_str().unwrap())), "{text}");
}

#[test]
fn a_device_in_software_is_on_no_bus() {
    let (json, text) = devices(&siw());
    let device = &json["rdma"][0];
    assert_eq!((&device["pci"], &device["virtual_function"]), (&Value::Null, &false.into()));
    assert!(text.contains("siw0: not opened, NUMA node 0"), "{text}");
}

#[test]
fn this_host_has_at_least_the_soft_devices() {
    let json = output(&["devices", "--json"]);
    let json: Value = serde_json::from_str(&stdout(&json)).unwrap();
    let soft: Vec<_> = json["soft"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert!(soft.contains(&"soft") && soft.contains(&"soft-erdma-compat"), "{soft:?}");
    let tiny = json["soft"].as_array().unwrap().iter().find(|d| d["name"] == "soft-tiny").unwrap();
    assert_eq!(tiny["capabilities"]["max_qp_wr"], 16);
}

#[test]
fn a_root_that_is_not_there_is_status_2() {
    for command in ["devices", "doctor", "watch"] {
        let wrong = output(&[command, "--root", "/nonexistent/landfall"]);
        assert_eq!(wrong.status.code(), Some(2), "{command}");
        assert!(stderr(&wrong).contains("no such directory"), "{}", stderr(&wrong));
    }
}
