//! A device's ports as the kernel shows them: state, speed, GIDs. Nothing is opened.
//!
//! The files are those of `Documentation/ABI/stable/sysfs-class-infiniband`, below `class/infiniband/NAME/ports/N`.

use std::fs::OpenOptions;
use std::io::Read;
use std::net::Ipv6Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::gid::{self, GidEntry, GidType};
use crate::counters::Sysfs;

/// No file that is read here is longer.
const MAX_TEXT: u64 = 4096;
/// An address vector holds the index in a byte.
const MAX_GIDS: u32 = 256;
/// `RDMA_NODE_RNIC` of the kernel's `include/rdma/ib_verbs.h`.
const IWARP: &str = "4";

/// A port of an RDMA device. Text is the kernel's own; `None` where it does not say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// `ACTIVE`, `DOWN`, `INIT`, `ARMED` and others.
    pub state: Option<String>,
    /// `LinkUp`, `Disabled`, `Polling` and others.
    pub physical_state: Option<String>,
    /// `InfiniBand`, `Ethernet`, or `Unspecified`.
    pub link_layer: Option<String>,
    /// The code of speed and lanes, as `100 Gb/sec (4X EDR)`. Devices in software and in clouds make it up: it is no
    /// limit.
    pub rate: Option<String>,
    /// Its table of GIDs, without the unused entries.
    pub gids: Vec<GidInfo>,
}

/// An entry of a port's table of GIDs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GidInfo {
    /// Its index in the table, for [`VerbsConfig`](super::VerbsConfig).
    pub index: u32,
    /// An IPv4 address is mapped.
    pub gid: Ipv6Addr,
    /// `IB`, `RoCE v1` or `RoCE v2`.
    pub kind: &'static str,
    /// The network interface that it is of.
    pub interface: Option<String>,
    /// The one that opening the device takes by itself.
    pub chosen: bool,
}

impl PortInfo {
    /// The ports of a device, ascending. None where there is no such device. Blocks for as long as the file system
    /// takes.
    pub fn read(sysfs: &Sysfs, device: &str) -> Vec<Self> {
        let ports = sysfs.ports().into_iter().filter(|port| port.device == device && port.port > 0);
        ports.map(|port| Self::of(&directory(sysfs, device, port.port), sysfs, device, port.port)).collect()
    }

    fn of(dir: &Path, sysfs: &Sysfs, device: &str, number: u8) -> Self {
        // `4: ACTIVE`
        let word = |file: &str| {
            let said = text(&dir.join(file))?;
            Some(said.split_once(": ").map_or(said.as_str(), |(_, word)| word).to_owned())
        };
        let table = gid_table(sysfs, device, number);
        let chosen = gid::choose(&table, None).ok().map(|entry| entry.index);
        let gids = table.iter().filter(|entry| entry.scope().is_some()).map(|entry| GidInfo {
            index: entry.index,
            gid: Ipv6Addr::from(entry.gid),
            kind: entry.kind.name(),
            interface: text(&dir.join(format!("gid_attrs/ndevs/{}", entry.index))),
            chosen: chosen == Some(entry.index),
        });
        Self {
            number,
            state: word("state"),
            physical_state: word("phys_state"),
            link_layer: text(&dir.join("link_layer")),
            rate: text(&dir.join("rate")),
            gids: gids.collect(),
        }
    }
}

/// A port's table of GIDs by sysfs, in the order of its indices.
pub(crate) fn gid_table(sysfs: &Sysfs, device: &str, port: u8) -> Vec<GidEntry> {
    let dir = directory(sysfs, device, port);
    let iwarp = text(&sysfs.path().join("class/infiniband").join(device).join("node_type"))
        .is_some_and(|node| node.split(':').next() == Some(IWARP));
    let roce = !iwarp && text(&dir.join("link_layer")).as_deref() == Some("Ethernet");
    let entries = (0..MAX_GIDS).filter_map(|index| {
        let gid: Ipv6Addr = text(&dir.join(format!("gids/{index}")))?.parse().ok()?;
        // Of an unused entry the type cannot be read. Kernels before 4.5 have no types, and RoCE v1 only.
        let kind = match text(&dir.join(format!("gid_attrs/types/{index}"))) {
            _ if !roce => GidType::Ib,
            Some(kind) if kind == "RoCE v2" => GidType::RoceV2,
            _ => GidType::RoceV1,
        };
        Some(GidEntry { index, gid: gid.octets(), kind })
    });
    entries.collect()
}

fn directory(sysfs: &Sysfs, device: &str, port: u8) -> PathBuf {
    sysfs.path().join("class/infiniband").join(device).join(format!("ports/{port}"))
}

/// One line, without what would be a command to a terminal.
fn text(path: &Path) -> Option<String> {
    // Not to wait for ever for the other end of what is no file of sysfs but a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let mut said = String::new();
    file.take(MAX_TEXT).read_to_string(&mut said).ok()?;
    Some(said.trim().replace(char::is_control, " "))
}
