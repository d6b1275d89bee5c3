//! Made-up trees of sysfs: servers as they are built, and files and links as they never should be.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A directory like `/sys`, removed in the end.
struct Sys {
    root: PathBuf,
}

impl Sys {
    /// With the NUMA nodes 0 to `nodes` - 1.
    fn new(nodes: u32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("landfall-topology-{}-{number}", std::process::id()));
        let this = Self { root };
        for dir in ["class/infiniband", "class/net", "bus/pci/devices", "devices/system/node"] {
            std::fs::create_dir_all(this.root.join(dir)).unwrap();
        }
        let online = if nodes == 1 { "0\n".to_owned() } else { format!("0-{}\n", nodes - 1) };
        this.write("devices/system/node/online", online);
        for node in 0..nodes {
            let distances: Vec<_> = (0..nodes).map(|n| (10 + 11 * n.abs_diff(node)).to_string()).collect();
            this.write(
                &format!("devices/system/node/node{node}/distance"),
                format!("{}\n", distances.join(" ")),
            );
        }
        this
    }

    fn write(&self, at: &str, what: impl AsRef<[u8]>) {
        let path = self.root.join(at);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, what).unwrap();
    }

    /// A relative link, as the kernel's are.
    fn link(&self, at: &str, to: &str) {
        let up = "../".repeat(Path::new(at).components().count() - 1);
        symlink(format!("{up}{to}"), self.root.join(at)).unwrap();
    }

    /// A PCI function at `path` below `devices`, with every bridge above it.
    fn pci(&self, path: &str, node: &str) {
        let mut at = "devices".to_owned();
        for part in path.split('/') {
            at = format!("{at}/{part}");
            if part.starts_with("pci") {
                continue;
            }
            self.write(&format!("{at}/numa_node"), format!("{node}\n"));
            let link = format!("bus/pci/devices/{part}");
            if self.root.join(&link).symlink_metadata().is_err() {
                self.link(&link, &at);
            }
        }
    }

    /// An RDMA device below the directory of a PCI function.
    fn rdma(&self, name: &str, below: &str, ports: u8) {
        let at = format!("devices/{below}/infiniband/{name}");
        for port in 1..=ports {
            self.write(&format!("{at}/ports/{port}/state"), "4: ACTIVE\n");
        }
        self.link(&format!("class/infiniband/{name}"), &at);
    }

    fn topology(&self) -> Topology {
        Topology::read(&Sysfs::at(&self.root))
    }

    fn near(&self, gpu: &str) -> Vec<NearDevice> {
        self.topology().near_pci(gpu.parse().unwrap()).unwrap()
    }
}

impl Drop for Sys {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn names(near: &[NearDevice]) -> Vec<&str> {
    near.iter().map(|n| n.device.name.as_str()).collect()
}

fn named<'a>(near: &'a [NearDevice], name: &str) -> &'a NearDevice {
    near.iter().find(|n| n.device.name == name).unwrap()
}

/// A server of two sockets, each with `switches` of `each` GPUs and NICs. The NICs are numbered against the GPUs, so that an
/// answer by numbers alone is a wrong one. Gives the addresses of the GPUs.
fn server(sys: &Sys, switches: u32, each: u32) -> Vec<String> {
    let mut gpus = Vec::new();
    let total = 2 * switches * each;
    for switch in 0..2 * switches {
        // Each switch is at a host bridge of its own.
        let (node, bus) = ((switch / switches).to_string(), 0x10 + switch * 0x10);
        let top = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0", bus + 1);
        for n in 0..each {
            let down = |slot: u32| format!("{top}/0000:{:02x}:{slot:02x}.0", bus + 2);
            let function = |slot: u32, number: u32| format!("0000:{:02x}:{slot:02x}.0", bus + 3 + number);
            let gpu = function(0, 2 * n);
            sys.pci(&format!("{}/{gpu}", down(2 * n)), &node);
            let nic = format!("{}/{}", down(2 * n + 1), function(0, 2 * n + 1));
            sys.pci(&nic, &node);
            sys.rdma(&format!("mlx5_{}", total - 1 - gpus.len() as u32), &nic, 1);
            gpus.push(gpu);
        }
    }
    gpus
}

#[test]
fn k9_gpus_are_told_from_other_functions_by_their_class() {
    let sys = Sys::new(1);
    for (address, class, vendor) in [
        ("0000:01:00.0", "0x030200", "0x10de"), // a GPU without a display
        ("0000:02:00.0", "0x030000", "0x10de"),
        ("0000:03:00.0", "0x120000", "0x1002"),
        ("0000:04:00.0", "0x030000", "0x1a03"), // a management board's display
        ("0000:05:00.0", "0x020700", "0x15b3"), // a network card
        ("0000:06:00.0", "nonsense", "0x10de"),
    ] {
        sys.pci(&format!("pci0000:00/{address}"), "0");
        sys.write(&format!("devices/pci0000:00/{address}/class"), format!("{class}\n"));
        sys.write(&format!("devices/pci0000:00/{address}/vendor"), format!("{vendor}\n"));
    }
    let gpus: Vec<_> = sys.topology().gpus().iter().map(ToString::to_string).collect();
    assert_eq!(gpus, ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]);
}

#[test]
fn k9_case_38_eight_gpus_and_eight_nics_have_the_near_nic_each() {
    let sys = Sys::new(2);
    let gpus = server(&sys, 4, 1);
    assert_eq!(gpus.len(), 8);
    for (n, gpu) in gpus.iter().enumerate() {
        let near = sys.near(gpu);
        assert_eq!(near.len(), 8);
        assert_eq!(
            (near[0].device.name.as_str(), near[0].nearness),
            (&*format!("mlx5_{}", 7 - n), Nearness::SameSwitch)
        );
        assert_eq!(near[0].bridges, Some(3), "the upstream port and two below it");
        assert!(near[0].reason.contains("switch"), "{}", near[0].reason);
        // The others of the socket, and then those of the other one.
        let rest: Vec<_> = near[1..].iter().map(|n| n.nearness).collect();
        assert_eq!(rest[..3], [Nearness::SameNumaNode; 3]);
        assert_eq!(rest[3..], [Nearness::OtherNumaNode; 4]);
        assert!(near[7].reason.contains("distance 21"), "{}", near[7].reason);
        assert_eq!(near[0].device.numa_node, Some(n as u32 / 4));
    }
}

#[test]
fn k9_case_38_two_nics_behind_the_switch_of_two_gpus_come_first() {
    let sys = Sys::new(2);
    for (n, gpu) in server(&sys, 2, 2).iter().enumerate() {
        let near = sys.near(gpu);
        let pair = [7 - n / 2 * 2, 6 - n / 2 * 2].map(|n| format!("mlx5_{n}"));
        assert_eq!(names(&near)[..2], pair);
        assert_eq!(near[1].nearness, Nearness::SameSwitch);
        assert_eq!(near[2].nearness, Nearness::SameNumaNode);
    }
}

/// Slots without a NIC, and a NIC that is nowhere near.
#[test]
fn k9_case_38_holes_take_the_next_best() {
    let sys = Sys::new(2);
    sys.pci("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", "0");
    // At the same root port without the switch in common, at the same host bridge, on the same node, elsewhere.
    sys.pci("pci0000:10/0000:10:01.0/0000:11:00.1", "0");
    sys.rdma("port", "pci0000:10/0000:10:01.0/0000:11:00.1", 1);
    sys.pci("pci0000:10/0000:10:02.0/0000:20:00.0", "0");
    sys.rdma("bridge", "pci0000:10/0000:10:02.0/0000:20:00.0", 1);
    sys.pci("pci0000:30/0000:30:01.0/0000:31:00.0", "0");
    sys.rdma("anode", "pci0000:30/0000:30:01.0/0000:31:00.0", 1);
    sys.pci("pci0000:80/0000:80:01.0/0000:81:00.0", "1");
    sys.rdma("afar", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    let near = sys.near("0000:13:00.0");
    assert_eq!(names(&near), ["port", "bridge", "anode", "afar"]);
    let order =
        [Nearness::SameRootPort, Nearness::SameHostBridge, Nearness::SameNumaNode, Nearness::OtherNumaNode];
    assert_eq!(near.iter().map(|n| n.nearness).collect::<Vec<_>>(), order);
    // No RDMA device at all is an answer too.
    let empty = Sys::new(1);
    empty.pci("pci0000:00/0000:00:03.0", "-1");
    assert_eq!(empty.near("0000:00:03.0"), []);
}

/// One switch below another: the nearer of two that share one.
#[test]
fn k9_fewer_bridges_are_nearer() {
    let sys = Sys::new(1);
    let top = "pci0000:10/0000:10:01.0/0000:11:00.0";
    sys.pci(&format!("{top}/0000:12:00.0/0000:13:00.0/0000:14:00.0/0000:15:00.0"), "0");
    sys.pci(&format!("{top}/0000:12:01.0/0000:20:00.0"), "0");
    sys.rdma("a_far", &format!("{top}/0000:12:01.0/0000:20:00.0"), 1);
    sys.pci(&format!("{top}/0000:12:00.0/0000:13:00.0/0000:14:01.0/0000:16:00.0"), "0");
    sys.rdma("b_near", &format!("{top}/0000:12:00.0/0000:13:00.0/0000:14:01.0/0000:16:00.0"), 1);
    let near = sys.near("0000:15:00.0");
    assert_eq!(names(&near), ["b_near", "a_far"]);
    assert!(near.iter().all(|n| n.nearness == Nearness::SameSwitch));
    assert!(near[0].bridges < near[1].bridges, "{near:?}");
}

#[test]
fn k9_a_numa_node_that_is_not_known_is_asked_of_the_bridges() {
    let sys = Sys::new(2);
    let silent = "pci0000:10/0000:10:01.0/0000:11:00.0";
    sys.pci(silent, "-1");
    sys.rdma("silent", silent, 1);
    let bridged = "pci0000:20/0000:20:01.0/0000:21:00.0";
    sys.pci(bridged, "-1");
    sys.write("devices/pci0000:20/0000:20:01.0/numa_node", "1\n");
    sys.rdma("bridged", bridged, 1);
    let topology = sys.topology();
    let nodes: Vec<_> = topology.devices().map(|d| (d.name.as_str(), d.numa_node)).collect();
    assert_eq!(nodes, [("bridged", Some(1)), ("silent", None)]);
    let near = topology.near_numa_node(1).unwrap();
    assert_eq!(names(&near), ["bridged", "silent"]);
    assert_eq!(near[1].nearness, Nearness::Unknown);
    assert!(near[1].reason.contains("not known"), "{}", near[1].reason);
    // The bus tells, where the nodes do not.
    sys.pci("pci0000:10/0000:10:01.0/0000:11:00.1", "-1");
    assert_eq!(names(&sys.near("0000:11:00.1")), ["silent", "bridged"]);
    // With one node online, nothing can be elsewhere.
    let one = Sys::new(1);
    one.pci(silent, "-1");
    one.rdma("silent", silent, 1);
    assert_eq!(one.topology().near_numa_node(0).unwrap()[0].nearness, Nearness::SameNumaNode);
}

#[test]
fn k9_nodes_are_ordered_by_their_distance() {
    let sys = Sys::new(4);
    for node in 0..4 {
        let at = format!("pci0000:{node}0/0000:{node}0:01.0/0000:{node}1:00.0");
        sys.pci(&at, &node.to_string());
        sys.rdma(&format!("nic{node}"), &at, 1);
    }
    assert_eq!(names(&sys.topology().near_numa_node(2).unwrap()), ["nic2", "nic1", "nic3", "nic0"]);
    let error = sys.topology().near_numa_node(4).unwrap_err();
    assert_eq!(error, TopologyError::NoNumaNode { node: 4, online: vec![0, 1, 2, 3] });
    assert!(error.to_string().contains("[0, 1, 2, 3]"), "{error}");
}

/// Two ports of one function, two functions of one card, and virtual functions.
#[test]
fn k9_ports_and_functions_are_told_apart() {
    let sys = Sys::new(1);
    let card = "pci0000:10/0000:10:01.0";
    for (name, function, ports) in
        [("two_ports", "0000:11:00.0", 2), ("second", "0000:11:00.1", 1), ("vf", "0000:11:00.2", 1)]
    {
        sys.pci(&format!("{card}/{function}"), "0");
        sys.rdma(name, &format!("{card}/{function}"), ports);
    }
    sys.link(&format!("devices/{card}/0000:11:00.2/physfn"), &format!("devices/{card}/0000:11:00.0"));
    let near = sys.near("0000:11:00.0");
    assert_eq!(names(&near), ["two_ports", "second", "vf"]);
    assert_eq!(near[0].device.ports, [1, 2]);
    assert!(near[2].device.virtual_function && !near[0].device.virtual_function);
    assert!(near.iter().all(|n| n.nearness == Nearness::SameRootPort), "{near:?}");
}

/// soft-RoCE and soft-iWARP are where the network interface under them is.
#[test]
fn k9_a_device_in_software_is_where_its_network_interface_is() {
    let sys = Sys::new(2);
    let nic = "pci0000:80/0000:80:01.0/0000:81:00.0";
    sys.pci(nic, "1");
    sys.write(&format!("devices/{nic}/virtio2/net/eth0/mtu"), "1500\n");
    sys.link("class/net/eth0", &format!("devices/{nic}/virtio2/net/eth0"));
    sys.write("devices/virtual/net/lo/mtu", "65536\n");
    sys.link("class/net/lo", "devices/virtual/net/lo");
    for (name, file, interface) in [
        ("rxe0", "parent", "eth0\n"),
        // With the NUL that siw used to print.
        ("siw0", "ports/1/gid_attrs/ndevs/0", "eth0\0"),
        ("rxe_lo", "parent", "lo\n"),
        ("rxe_gone", "parent", "eth7\n"),
        ("rxe_path", "parent", "../infiniband/rxe0\n"),
    ] {
        sys.rdma(name, "virtual", 1);
        sys.write(&format!("devices/virtual/infiniband/{name}/{file}"), interface);
    }
    sys.rdma("bare", "virtual", 1);
    let near = sys.topology().near_numa_node(1).unwrap();
    for name in ["rxe0", "siw0"] {
        let place = named(&near, name);
        assert_eq!((place.nearness, place.device.numa_node), (Nearness::SameNumaNode, Some(1)));
        assert_eq!(place.device.pci, Some("81:00.0".parse().unwrap()));
    }
    for (name, why) in
        [("rxe_lo", "lo is on no PCI"), ("rxe_gone", "eth7"), ("rxe_path", "neither"), ("bare", "neither")]
    {
        let place = named(&near, name);
        assert_eq!((place.nearness, place.device.pci), (Nearness::Unknown, None));
        assert!(place.reason.contains(why), "{}", place.reason);
    }
}

#[test]
fn k9_links_that_lead_nowhere_and_files_of_nonsense_are_unknown_places() {
    let sys = Sys::new(2);
    sys.link("class/infiniband/dangling", "devices/pci0000:10/0000:10:01.0/infiniband/dangling");
    sys.link("class/infiniband/loop", "class/infiniband/loop");
    sys.link("class/infiniband/outside", "../../../../tmp");
    sys.write("class/infiniband/file", "not a directory");
    // As kernels before 2.6.25 had it: no link of the class, but one below it.
    std::fs::create_dir_all(sys.root.join("class/infiniband/old")).unwrap();
    sys.pci("pci0000:20/0000:20:01.0", "0");
    sys.link("class/infiniband/old/device", "devices/pci0000:20/0000:20:01.0");
    for (n, nonsense) in
        ["", "1 2\n", "-7\n", "99999999999999999999\n", "4097\n", "\u{fffd}\n"].iter().enumerate()
    {
        let at = format!("pci0000:30/0000:30:0{n}.0");
        sys.pci(&at, "");
        sys.write(&format!("devices/{at}/numa_node"), nonsense);
        sys.rdma(&format!("nonsense{n}"), &at, 0);
    }
    std::fs::create_dir_all(sys.root.join("devices/pci0000:40/0000:40:00.0/numa_node")).unwrap();
    sys.rdma("directory", "pci0000:40/0000:40:00.0", 0);
    let near = sys.topology().near_numa_node(0).unwrap();
    assert_eq!(near[0].device.name, "old");
    assert_eq!(near[0].nearness, Nearness::SameNumaNode);
    assert_eq!(near.len(), 12);
    assert!(near[1..].iter().all(|n| n.nearness == Nearness::Unknown), "{near:?}");

    // Asked about: what is not there, what dangles, and what is another function than its name.
    sys.link("bus/pci/devices/0000:50:00.0", "devices/pci0000:50/0000:50:00.0");
    sys.link("bus/pci/devices/0000:51:00.0", "devices/pci0000:20/0000:20:01.0");
    for address in ["0000:ff:00.0", "0000:50:00.0", "0000:51:00.0"] {
        let error = sys.topology().near_pci(address.parse().unwrap()).unwrap_err();
        assert!(matches!(error, TopologyError::NoPciDevice { .. }), "{error:?}");
        assert!(
            error.to_string().contains(address) && error.to_string().contains("bus/pci/devices"),
            "{error}"
        );
    }
}

#[test]
fn k9_a_kernel_without_numa_nodes_still_has_a_bus() {
    let sys = Sys::new(1);
    std::fs::remove_dir_all(sys.root.join("devices/system")).unwrap();
    sys.pci("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", "-1");
    sys.pci("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", "-1");
    sys.rdma("near", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 1);
    sys.pci("pci0000:80/0000:80:01.0/0000:81:00.0", "-1");
    sys.rdma("afar", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    let near = sys.near("0000:13:00.0");
    assert_eq!(names(&near), ["near", "afar"]);
    assert_eq!(near[1].nearness, Nearness::Unknown);
    // Distances that do not fit the list of nodes are none.
    let odd = Sys::new(2);
    odd.write("devices/system/node/node0/distance", "10\n");
    odd.pci("pci0000:80/0000:80:01.0", "1");
    odd.rdma("afar", "pci0000:80/0000:80:01.0", 1);
    let near = odd.topology().near_numa_node(0).unwrap();
    assert_eq!(near[0].nearness, Nearness::OtherNumaNode);
    assert!(!near[0].reason.contains("distance"), "{}", near[0].reason);
}

/// Whatever this machine has, it can be asked.
#[test]
fn k9_this_machine_can_be_asked() {
    let topology = Topology::read(&Sysfs::default());
    let all = topology.devices().count();
    for node in topology.online.clone() {
        assert_eq!(topology.near_numa_node(node).unwrap().len(), all);
    }
    for address in topology.devices().filter_map(|d| d.pci).collect::<Vec<_>>() {
        assert_eq!(topology.near_pci(address).unwrap().len(), all);
    }
}
