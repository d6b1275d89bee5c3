//! How near each RDMA device is to a GPU, or to a NUMA node, by the kernel's tree of devices.
//!
//! A transfer between a GPU and a NIC that share a PCIe switch never reaches the processor; one between two sockets crosses the
//! link between them, which is slower and which everybody uses. [`Topology::read`] looks once, and answers as often as it is
//! asked:
//!
//! ```no_run
//! use landfall::counters::Sysfs;
//! use landfall::device::topology::Topology;
//!
//! let topology = Topology::read(&Sysfs::default());
//! // As cuDeviceGetPCIBusId, nvidia-smi and lspci -D print it.
//! for near in topology.near_pci("0000:1b:00.0".parse()?)? {
//!     println!("{}: {}", near.device.name, near.reason);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is read
//!
//! By the kernel's own rules for sysfs (`Documentation/admin-guide/sysfs-rules.rst`): the links below `class` and `bus` are resolved,
//! and parents are found in the one tree below `devices`, by walking up.
//!
//! | | |
//! |---|---|
//! | `class/infiniband/NAME` | the device; the last PCI function on its path is the NIC |
//! | `class/infiniband/NAME/parent`, `…/ports/1/gid_attrs/ndevs/0` | the network interface under soft-RoCE and soft-iWARP, which are on no bus themselves |
//! | `class/net/NAME` | that interface's device |
//! | `bus/pci/devices/ADDRESS` | a GPU, or any other PCI function |
//! | `numa_node` of a PCI function | −1 where the firmware does not say (`Documentation/ABI/testing/sysfs-bus-pci`); then the next bridge above that has a node speaks for it |
//! | `physfn` of a PCI function | there for a virtual function (SR-IOV) |
//! | `system/node/online`, `system/node/nodeN/distance` | `Documentation/ABI/stable/sysfs-devices-node`; where one node alone is online, everything is on it |
//!
//! Nothing here fails on what a file says or on a link that leads nowhere: a place that is not known is told as that.
//!
//! # Blocking
//!
//! Reading is file I/O on sysfs: call it outside of a runtime's workers.

mod pci;
mod read;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;

pub use pci::{PciAddress, PciAddressError};

use crate::counters::Sysfs;
use pci::PciPath;
use read::Tree;

/// How near a device is. The order is that of preference: the least is the nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Nearness {
    /// Below one PCIe switch.
    SameSwitch,
    /// Below one root port, with no switch in common.
    SameRootPort,
    /// At one host bridge (root complex), at different ports of it.
    SameHostBridge,
    /// On one NUMA node.
    SameNumaNode,
    /// On another NUMA node.
    OtherNumaNode,
    /// The kernel does not say.
    Unknown,
}

/// An RDMA device and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevicePlace {
    /// The kernel's name of the device, for [`Device::open`](super::Device::open).
    pub name: String,
    /// The numbers of its ports, ascending. A rail is a device and one of these.
    pub ports: Vec<u8>,
    /// The PCI function that it is, or that is under its network interface. `None` where there is none.
    pub pci: Option<PciAddress>,
    /// A virtual function (SR-IOV) of another one.
    pub virtual_function: bool,
    /// `None` where neither the firmware nor the kernel says.
    pub numa_node: Option<u32>,
}

/// A device, and how near it is to what was asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NearDevice {
    /// The device.
    pub device: DevicePlace,
    /// How near it is.
    pub nearness: Nearness,
    /// PCIe bridges (ports of switches and of root complexes) that a transfer between the two passes, where both have a place
    /// at one host bridge.
    pub bridges: Option<u32>,
    /// Why it counts as so near: what the two have in common.
    pub reason: String,
}

/// A question that cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// sysfs has no such PCI function.
    #[error(
        "there is no PCI device {address} below {place}; take the address from nvidia-smi or lspci -D, and in a container mount the host's sysfs"
    )]
    NoPciDevice {
        /// The address asked for.
        address: PciAddress,
        /// The directory that was looked in.
        place: String,
    },
    /// The NUMA node is not online.
    #[error("there is no NUMA node {node}; online are: {online:?}")]
    NoNumaNode {
        /// The node asked for.
        node: u32,
        /// Those that there are.
        online: Vec<u32>,
    },
}

/// The RDMA devices of this host by their places, as they were when it was read.
#[derive(Clone, Debug)]
pub struct Topology {
    tree: Tree,
    devices: Vec<Placed>,
    online: Vec<u32>,
}

/// A device with its path, or why it has none.
#[derive(Clone, Debug)]
struct Placed {
    place: DevicePlace,
    path: Result<PciPath, String>,
}

impl Topology {
    /// Reads where the RDMA devices are. Devices that come or go later do not show. Blocks for as long as the file system takes.
    pub fn read(sysfs: &Sysfs) -> Self {
        let tree = Tree::new(sysfs.path());
        let online = tree.online_nodes();
        let alone = match online[..] {
            [node] => Some(node),
            _ => None,
        };
        let devices = sysfs.devices().map(|name| {
            let found = tree.rdma_device(&name);
            let place = DevicePlace {
                ports: tree.ports(&name),
                pci: found.as_ref().ok().map(|found| found.path.address()),
                virtual_function: found.as_ref().is_ok_and(|found| found.virtual_function),
                numa_node: found.as_ref().ok().and_then(|found| found.numa_node).or(alone),
                name,
            };
            Placed { place, path: found.map(|found| found.path) }
        });
        let mut devices: Vec<_> = devices.collect();
        devices.sort_by(|a, b| a.place.name.cmp(&b.place.name));
        Self { tree, devices, online }
    }

    /// All RDMA devices that the kernel has, in the order of their names.
    pub fn devices(&self) -> impl Iterator<Item = &DevicePlace> {
        self.devices.iter().map(|placed| &placed.place)
    }

    /// The GPUs that the kernel sees, by their PCI addresses: display and 3D controllers of NVIDIA and AMD, and processing
    /// accelerators (`class/vendor` of the function; the codes are those of the PCI Code and ID Assignment Specification).
    pub fn gpus(&self) -> Vec<PciAddress> {
        self.tree.gpus()
    }

    /// The devices in the order of their nearness to a PCI function, such as a GPU. Devices that are equally near come in the
    /// order of their PCI addresses, physical functions before virtual ones.
    ///
    /// # Errors
    /// [`TopologyError::NoPciDevice`]. No RDMA device at all is not an error: the list is empty.
    pub fn near_pci(&self, address: PciAddress) -> Result<Vec<NearDevice>, TopologyError> {
        let no_device =
            || TopologyError::NoPciDevice { address, place: self.tree.pci_devices().display().to_string() };
        let found = self.tree.pci_device(address).ok_or_else(no_device)?;
        let node = found.numa_node.or(match self.online[..] {
            [node] => Some(node),
            _ => None,
        });
        Ok(self.ranked(|device| {
            let path = match &device.path {
                Ok(path) => path,
                Err(why) => return self.by_node(&device.place, node, Some(why)),
            };
            let shared = found.path.shared_bridges(path);
            let bridges = Some(found.path.bridges_between(path));
            let near = |nearness, reason| Ranked { nearness, bridges, distance: 0, reason };
            match shared {
                [] if found.path.host_bridge() != path.host_bridge() => {
                    self.by_node(&device.place, node, None)
                }
                [] => near(
                    Nearness::SameHostBridge,
                    format!("both are at the host bridge {}", path.host_bridge()),
                ),
                [port] => near(Nearness::SameRootPort, format!("both are below the root port {port}")),
                [.., deepest] => {
                    near(Nearness::SameSwitch, format!("both are below the PCIe switch port {deepest}"))
                }
            }
        }))
    }

    /// The devices in the order of their nearness to the memory and the processors of a NUMA node. Other nodes come in the order
    /// of their distance from it, where the kernel tells that.
    ///
    /// # Errors
    /// [`TopologyError::NoNumaNode`], where the kernel says which nodes there are.
    pub fn near_numa_node(&self, node: u32) -> Result<Vec<NearDevice>, TopologyError> {
        if !self.online.is_empty() && !self.online.contains(&node) {
            return Err(TopologyError::NoNumaNode { node, online: self.online.clone() });
        }
        Ok(self.ranked(|device| {
            self.by_node(&device.place, Some(node), device.path.as_ref().err().map(String::as_str))
        }))
    }

    /// What two NUMA nodes, or the want of one, say. `no_path` is why the device has no place on a bus.
    fn by_node(&self, device: &DevicePlace, node: Option<u32>, no_path: Option<&str>) -> Ranked {
        let near = |nearness, distance, reason| Ranked { nearness, bridges: None, distance, reason };
        // What runs in software runs wherever it is called.
        let unknown = |why: &str| near(Nearness::Unknown, 0, why.to_owned());
        match (node, device.numa_node) {
            (_, None) => unknown(no_path.unwrap_or("the NUMA node of the device is not known")),
            (None, Some(_)) => unknown("the NUMA node of what was asked about is not known"),
            (Some(node), Some(own)) if node == own => {
                near(Nearness::SameNumaNode, 0, format!("both are on NUMA node {own}"))
            }
            (Some(node), Some(own)) => {
                let distance = self.tree.node_distance(&self.online, node, own);
                let far = distance.map_or(String::new(), |d| format!(", at distance {d}"));
                let reason = format!("it is on NUMA node {own}, not on {node}{far}");
                near(Nearness::OtherNumaNode, distance.unwrap_or(u32::MAX), reason)
            }
        }
    }

    fn ranked(&self, rank: impl Fn(&Placed) -> Ranked) -> Vec<NearDevice> {
        let mut ranked: Vec<_> = self.devices.iter().map(|device| (rank(device), &device.place)).collect();
        ranked.sort_by_key(|(rank, place)| {
            // More bridges are farther, and no place at all is the farthest.
            let bridges = Reverse(rank.bridges.map(Reverse));
            (rank.nearness, rank.distance, bridges, place.virtual_function, place.pci, &place.name)
        });
        ranked
            .into_iter()
            .map(|(rank, place)| NearDevice {
                device: place.clone(),
                nearness: rank.nearness,
                bridges: rank.bridges,
                reason: rank.reason,
            })
            .collect()
    }
}

/// How near, and what decides between devices of one nearness.
struct Ranked {
    nearness: Nearness,
    bridges: Option<u32>,
    distance: u32,
    reason: String,
}
