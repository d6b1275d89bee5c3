//! The part of sysfs that says where devices are, read with bounds: nothing that a file says is believed without a look.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::pci::{PciAddress, PciPath};

/// No file that is read here is longer.
const MAX_TEXT: u64 = 4096;
/// PCI functions that are looked at.
const MAX_FUNCTIONS: usize = 65_536;
/// Far more than any machine has. A range in `online` names no more.
const MAX_NODES: u32 = 4096;
/// Ports of one device that are listed; a port's number has eight bits.
const MAX_PORTS: usize = 255;

/// A directory like `/sys`.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

/// A PCI function that was found.
pub(super) struct Found {
    pub(super) path: PciPath,
    pub(super) numa_node: Option<u32>,
    pub(super) virtual_function: bool,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(super) fn pci_devices(&self) -> PathBuf {
        self.root.join("bus/pci/devices")
    }

    pub(super) fn gpus(&self) -> Vec<PciAddress> {
        let entries = std::fs::read_dir(self.pci_devices()).ok().into_iter().flatten().take(MAX_FUNCTIONS);
        let mut gpus: Vec<PciAddress> = entries
            .filter_map(|entry| {
                let dir = entry.ok()?.path();
                let (class, vendor) = (text(&dir.join("class"))?, text(&dir.join("vendor"))?);
                let of_gpus = matches!(vendor.trim_end(), "0x10de" | "0x1002");
                // Display controllers of others are those of management boards.
                let is = (of_gpus && (class.starts_with("0x0300") || class.starts_with("0x0302")))
                    || class.starts_with("0x1200");
                is.then(|| named(&dir)).flatten()
            })
            .collect();
        gpus.sort_unstable();
        gpus
    }

    pub(super) fn pci_device(&self, address: PciAddress) -> Option<Found> {
        self.found(&self.pci_devices().join(address.to_string())).filter(|f| f.path.address() == address)
    }

    /// The PCI function of an RDMA device, or why there is none. The name is that of an entry of `class/infiniband`.
    pub(super) fn rdma_device(&self, name: &str) -> Result<Found, String> {
        let class = self.root.join("class/infiniband").join(name);
        if let Some(found) = self.found(&class).or_else(|| self.found(&class.join("device"))) {
            return Ok(found);
        }
        let interface = interface(&class).ok_or("it has neither a PCI function nor a network interface")?;
        let net = self.root.join("class/net").join(&interface);
        self.found(&net).ok_or_else(|| format!("its network interface {interface} is on no PCI function"))
    }

    /// The last PCI function on the real path of `link`, which must lead into the tree of devices.
    fn found(&self, link: &Path) -> Option<Found> {
        let devices = self.root.join("devices").canonicalize().ok()?;
        let real = link.canonicalize().ok()?;
        let path = PciPath::of(real.strip_prefix(&devices).ok()?)?;
        let function = path.address();
        // Up to the function, past its classes and its children.
        let dir = real.ancestors().find(|dir| named(dir) == Some(function))?;
        let bridges = dir.ancestors().take_while(|dir| *dir != devices);
        let numa_node = bridges.filter(|dir| named(dir).is_some()).find_map(numa_node);
        Some(Found { numa_node, virtual_function: dir.join("physfn").symlink_metadata().is_ok(), path })
    }

    pub(super) fn ports(&self, name: &str) -> Vec<u8> {
        let dir = self.root.join("class/infiniband").join(name).join("ports");
        let entries = std::fs::read_dir(dir).ok().into_iter().flatten().take(MAX_PORTS);
        let mut ports: Vec<u8> = entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|&port| port > 0)
            .collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// NUMA nodes that are online, ascending. Empty where the kernel does not say.
    pub(super) fn online_nodes(&self) -> Vec<u32> {
        let said = text(&self.root.join("devices/system/node/online"));
        said.and_then(|said| node_list(&said)).unwrap_or_default()
    }

    /// The distance between two nodes by the firmware's table: 10 is a node's to itself.
    pub(super) fn node_distance(&self, online: &[u32], from: u32, to: u32) -> Option<u32> {
        // One number for each node that is online.
        let at = online.iter().position(|&node| node == to)?;
        let said = text(&self.root.join(format!("devices/system/node/node{from}/distance")))?;
        let distances: Vec<&str> = said.split_ascii_whitespace().collect();
        if distances.len() != online.len() {
            return None;
        }
        distances[at].parse().ok()
    }
}

/// The network interface under a device that is on no bus.
fn interface(class: &Path) -> Option<String> {
    let parent = text(&class.join("parent"));
    let said = parent.or_else(|| text(&class.join("ports/1/gid_attrs/ndevs/0")))?;
    let name = said.trim_end_matches(['\n', '\0']);
    // A name, not a path to somewhere else.
    let valid = !name.is_empty() && name.len() <= 63 && name != "." && name != ".." && !name.contains('/');
    valid.then(|| name.to_owned())
}

/// The PCI function that a directory is named after.
fn named(dir: &Path) -> Option<PciAddress> {
    dir.file_name()?.to_str()?.parse().ok()
}

/// `None` for -1, which is "not known", and for what is no number of a node.
fn numa_node(dir: &Path) -> Option<u32> {
    text(&dir.join("numa_node"))?.trim_end().parse().ok().filter(|&node| node < MAX_NODES)
}

/// The kernel's format of lists: `0-3,8`.
fn node_list(said: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for range in said.trim_end().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_NODES {
            return None;
        }
        nodes.extend(first..=last);
    }
    nodes.is_sorted_by(|a, b| a < b).then_some(nodes)
}

fn text(path: &Path) -> Option<String> {
    // Not to wait for ever for the other end of what is no file of sysfs but a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let mut said = String::new();
    file.take(MAX_TEXT).read_to_string(&mut said).ok()?;
    Some(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_lists_of_nodes_are_as_the_kernel_prints_them() {
        assert_eq!(node_list("0\n"), Some(vec![0]));
        assert_eq!(node_list("0-1\n"), Some(vec![0, 1]));
        assert_eq!(node_list("0,2-3,8\n"), Some(vec![0, 2, 3, 8]));
        for said in ["", "\n", "a", "1-0", "0-4294967295", "0-4096", "0,0", "3,1", "0,", "-1", "0-1-2", "0x1"]
        {
            assert_eq!(node_list(said), None, "{said:?}");
        }
    }
}
