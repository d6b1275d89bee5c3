//! `landfall devices`: every device and port, with what it can do, where it is, and what is near.

use std::path::PathBuf;

use landfall::counters::Sysfs;
use landfall::device::topology::{DevicePlace, Nearness, PciAddress, Topology};
use landfall::device::{Capabilities, Device, DeviceInfo, PortInfo};
use serde::Serialize;

use crate::output::{Align, Error, Outcome, Output, Table, Usage};

/// List every device and port: state, capabilities, GIDs, NUMA node, near GPUs, mode
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Look for sys below this directory, and open nothing: capabilities are left out then
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

#[derive(Serialize)]
struct Listed {
    rdma: Vec<Rdma>,
    soft: Vec<Soft>,
}

#[derive(Serialize)]
struct Rdma {
    name: String,
    /// `None` when it cannot be opened.
    transport: Option<&'static str>,
    /// eRDMA's: `compat` or `standard`.
    mode: Option<&'static str>,
    pci: Option<String>,
    virtual_function: bool,
    numa_node: Option<u32>,
    ports: Vec<PortInfo>,
    near_gpus: Vec<NearGpu>,
    capabilities: Option<Limits>,
}

#[derive(Serialize)]
struct NearGpu {
    pci: String,
    reason: String,
}

#[derive(Serialize)]
struct Soft {
    name: String,
    transport: &'static str,
    profile: &'static str,
    capabilities: Limits,
}

/// [`Capabilities`], to be printed.
#[derive(Serialize)]
struct Limits {
    max_qp_wr: u32,
    max_cqe: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline: u32,
    max_msg_size: u64,
    max_mr_size: u64,
    max_rd_atomic: u8,
    max_srq: u32,
    immediate: bool,
    atomics: bool,
    ordered: bool,
    out_of_band: bool,
    active_mtu: u32,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    if !args.root.is_dir() {
        return Err(Usage(format!("--root {}: no such directory", args.root.display())).into());
    }
    let host = args.root.as_os_str() == "/";
    let listed =
        Listed::read(&Sysfs::at(args.root.join("sys")), if host { Device::list() } else { Vec::new() });
    if output.is_json() {
        output.document(&listed)?;
    } else {
        output.print(&listed.text())?;
    }
    Ok(Outcome::Well)
}

impl Listed {
    fn read(sysfs: &Sysfs, opened: Vec<DeviceInfo>) -> Self {
        let topology = Topology::read(sysfs);
        let gpus = topology.gpus();
        let mode = std::fs::read_to_string(sysfs.path().join("module/erdma/parameters/compat_mode"));
        let mode = mode.ok().and_then(|mode| match mode.trim() {
            "Y" => Some("compat"),
            "N" => Some("standard"),
            _ => None,
        });
        let rdma = topology.devices().map(|place| {
            let found = opened.iter().find(|device| device.profile.is_none() && device.name == place.name);
            let DevicePlace { name, pci, virtual_function, numa_node, .. } = place;
            let erdma = sysfs.path().join("class/infiniband").join(name).join("device/driver");
            let erdma = std::fs::read_link(erdma).is_ok_and(|driver| driver.ends_with("erdma"));
            Rdma {
                transport: found.map(|device| device.transport),
                mode: mode.filter(|_| erdma),
                pci: pci.map(|pci| pci.to_string()),
                virtual_function: *virtual_function,
                numa_node: *numa_node,
                ports: PortInfo::read(sysfs, name),
                near_gpus: near_gpus(&topology, &gpus, name),
                capabilities: found.map(|device| Limits::of(&device.capabilities)),
                name: name.clone(),
            }
        });
        let rdma = rdma.collect();
        let soft = opened.into_iter().filter_map(|device| {
            let profile = device.profile?.name();
            let capabilities = Limits::of(&device.capabilities);
            Some(Soft { name: device.name, transport: device.transport, profile, capabilities })
        });
        Self { rdma, soft: soft.collect() }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if self.rdma.is_empty() {
            text += "No RDMA device: the kernel has none here.\n";
        }
        for device in &self.rdma {
            text += &device.text();
        }
        if !self.soft.is_empty() {
            let mut table = Table::new([
                ("soft device", Align::Left),
                ("transport", Align::Left),
                ("profile", Align::Left),
                ("WRs", Align::Right),
                ("elements", Align::Right),
                ("READs", Align::Right),
                ("connected", Align::Left),
            ]);
            for Soft { name, transport, profile, capabilities: c } in &self.soft {
                table.row([
                    name.clone(),
                    (*transport).to_owned(),
                    (*profile).to_owned(),
                    c.max_qp_wr.to_string(),
                    format!("{}/{}", c.max_send_sge, c.max_recv_sge),
                    c.max_rd_atomic.to_string(),
                    c.connected().to_owned(),
                ]);
            }
            text += "\n";
            text += &table.text(0);
        }
        text
    }
}

impl Rdma {
    fn text(&self) -> String {
        let mut place = vec![self.transport.unwrap_or("not opened").to_owned()];
        place.extend(self.mode.map(|mode| format!("{mode} mode")));
        place.extend(self.pci.as_ref().map(|pci| format!("PCI {pci}")));
        place.extend(self.virtual_function.then(|| "virtual function".to_owned()));
        place.push(self.numa_node.map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}")));
        let mut text = format!("{}: {}\n", self.name, place.join(", "));
        for port in &self.ports {
            let parts = [&port.state, &port.physical_state, &port.link_layer, &port.rate];
            let parts: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
            text += &format!("  port {}: {}\n", port.number, parts.join(", "));
            for gid in &port.gids {
                let of = gid.interface.as_ref().map_or(String::new(), |name| format!(" of {name}"));
                let mark = if gid.chosen { "  <- taken" } else { "" };
                text += &format!("    GID {}: {} {}{of}{mark}\n", gid.index, gid.gid, gid.kind);
            }
        }
        if let Some(c) = &self.capabilities {
            text += &format!("  limits: {}\n  connected: {}\n", c.text(), c.connected());
        }
        for gpu in &self.near_gpus {
            text += &format!("  near GPU {}: {}\n", gpu.pci, gpu.reason);
        }
        text
    }
}

/// The GPUs that a transfer reaches without crossing between sockets, the nearest first.
fn near_gpus(topology: &Topology, gpus: &[PciAddress], name: &str) -> Vec<NearGpu> {
    let near = gpus.iter().filter_map(|gpu| {
        let all = topology.near_pci(*gpu).ok()?;
        let near = all.into_iter().find(|near| near.device.name == name)?;
        let is = !matches!(near.nearness, Nearness::OtherNumaNode | Nearness::Unknown);
        is.then(|| ((near.nearness, near.bridges), NearGpu { pci: gpu.to_string(), reason: near.reason }))
    });
    let mut near: Vec<_> = near.collect();
    near.sort_by_key(|(rank, _)| *rank);
    near.into_iter().map(|(_, gpu)| gpu).collect()
}

impl Limits {
    fn of(c: &Capabilities) -> Self {
        Self {
            max_qp_wr: c.max_qp_wr,
            max_cqe: c.max_cqe,
            max_send_sge: c.max_send_sge,
            max_recv_sge: c.max_recv_sge,
            max_inline: c.max_inline,
            max_msg_size: c.max_msg_size,
            max_mr_size: c.max_mr_size,
            max_rd_atomic: c.max_rd_atomic,
            max_srq: c.max_srq,
            immediate: c.immediate,
            atomics: c.atomics,
            ordered: c.ordered,
            out_of_band: c.oob,
            active_mtu: c.active_mtu,
        }
    }

    fn connected(&self) -> &'static str {
        if self.out_of_band { "out of band, RDMA_CM" } else { "RDMA_CM" }
    }

    fn text(&self) -> String {
        let yes = |is| if is { "yes" } else { "no" };
        format!(
            "max_qp_wr {}, max_cqe {}, max_sge {}/{}, inline {} B, max_qp_rd_atom {}, max_msg_sz {} B, \
            max_mr_size {} B, max_srq {}, MTU {}, \
             immediate {}, atomics {}",
            self.max_qp_wr,
            self.max_cqe,
            self.max_send_sge,
            self.max_recv_sge,
            self.max_inline,
            self.max_rd_atomic,
            self.max_msg_size,
            self.max_mr_size,
            self.max_srq,
            self.active_mtu,
            yes(self.immediate),
            yes(self.atomics),
        )
    }
}
