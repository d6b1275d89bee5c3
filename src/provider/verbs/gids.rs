//! A port's GID table, read from the device; the types of its entries from sysfs. The rule is in `device::gid`.

use std::path::{Path, PathBuf};

use super::calls::check;
use super::context::Context;
use super::device::{Fabric, Port};
use super::sys::{ibv_gid, ibv_port_attr};
use crate::device::gid::{self, GidEntry, GidType};
use crate::error::DeviceError;

/// An address vector holds the index in a byte.
const MAX_ENTRIES: i32 = 256;

pub(super) fn choose(
    context: &Context,
    device: &str,
    port: &Port,
    attr: &ibv_port_attr,
    node_guid: [u8; 8],
    wanted: Option<u32>,
) -> Result<GidEntry, DeviceError> {
    let types = types_dir(device, port.number);
    let table: Vec<GidEntry> = (0..attr.gid_tbl_len.clamp(0, MAX_ENTRIES))
        .filter_map(|index| {
            let gid = query(context, port.number, index)?;
            let index = index as u32;
            Some(GidEntry { index, gid, kind: kind(port.fabric, &types, index) })
        })
        .collect();
    match gid::choose(&table, wanted) {
        Ok(entry) => Ok(entry),
        Err(_) if port.fabric == Fabric::Iwarp && wanted.is_none() => {
            Ok(GidEntry { index: 0, gid: of_iwarp(node_guid, port.number), kind: GidType::Ib })
        }
        Err(error) => {
            Err(DeviceError::Gid { device: device.to_owned(), port: port.number, reason: error.to_string() })
        }
    }
}

/// An iWARP connection is addressed by IP; its GID only names the device and the port, so that both ends of a channel can tell
/// whether they are on the same. For a driver that says none: of what else names them. Zeros when nothing does.
fn of_iwarp(node_guid: [u8; 8], port: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    if node_guid != [0; 8] {
        gid[..8].copy_from_slice(&node_guid);
        gid[15] = port;
    }
    gid
}

/// `None` for an entry that cannot be read, which is a hole.
fn query(context: &Context, port: u8, index: i32) -> Option<[u8; 16]> {
    let mut gid = ibv_gid { raw: [0; 16] };
    // SAFETY: the context is open; the call writes the GID.
    check(unsafe { context.lib.ibv_query_gid(context.raw(), port, index, &mut gid) }).ok()?;
    // SAFETY: 16 plain bytes, whichever member was written.
    Some(unsafe { gid.raw })
}

fn types_dir(device: &str, port: u8) -> PathBuf {
    Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}/gid_attrs/types"))
}

/// An entry's type. Kernels before 4.5 have no such files, and RoCE v1 only.
fn kind(fabric: Fabric, types: &Path, index: u32) -> GidType {
    if fabric != Fabric::Roce {
        return GidType::Ib;
    }
    match std::fs::read_to_string(types.join(index.to_string())) {
        Ok(text) if text.trim() == "RoCE v2" => GidType::RoceV2,
        _ => GidType::RoceV1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_ports_of_iwarp_without_gids_are_told_apart() {
        let of = |node, port| of_iwarp([2, 10, 77, 1, 1, 0, 0, node], port);
        assert_eq!(of(1, 1), of(1, 1));
        assert!(of(1, 1) != of(2, 1) && of(1, 1) != of(1, 2));
        assert_eq!(of_iwarp([0; 8], 1), [0; 16]);
    }

    #[test]
    fn b2_gid_types_are_read_from_sysfs() {
        let dir = std::env::temp_dir().join(format!("landfall-gid-types-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("0"), "IB/RoCE v1\n").unwrap();
        std::fs::write(dir.join("1"), "RoCE v2\n").unwrap();
        let kinds: Vec<_> = (0..3).map(|i| kind(Fabric::Roce, &dir, i)).collect();
        let ib = kind(Fabric::InfiniBand, &dir, 1);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(kinds, [GidType::RoceV1, GidType::RoceV2, GidType::RoceV1]);
        assert_eq!(ib, GidType::Ib);
    }
}
