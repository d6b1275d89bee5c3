//! The GID that a port would be used with, by the rule that opening a device follows.
//!
//! `ports/N/gids/I` has the GID, `gid_attrs/types/I` its type and `gid_attrs/ndevs/I` its network interface
//! (`Documentation/ABI/stable/sysfs-class-infiniband`). iWARP is addressed by IP, and a GID is only a name there.

use super::host::{Fabric, Host, HostDevice};
use super::report::{Check, Evidence};
use crate::device::gid::{self, GidType, Scope};
use crate::device::port_info::gid_table;

const NAME: &str = "gid";

pub(super) fn check(host: &Host<'_>, device: &HostDevice, port: u8) -> Check {
    let table = gid_table(&host.root.sysfs(), &device.name, port);
    let dir = host.root.name(&device.port_at(port, "gids"));
    let used: Vec<String> = table.iter().filter(|e| e.scope().is_some()).map(ToString::to_string).collect();
    let found = if used.is_empty() { "no GID".to_owned() } else { used.join(", ") };
    let check = match gid::choose(&table, None) {
        _ if device.fabric == Fabric::Iwarp => {
            Check::ok(NAME, "none is needed: iWARP is addressed by the IP address of its interface")
        }
        Err(_) => Check::failure(
            NAME,
            "the port has no usable GID: nothing can be addressed",
            "give its network interface an address and bring it up (RoCE makes a GID of each); on InfiniBand, \
            check the subnet manager",
        ),
        Ok(entry) if device.fabric == Fabric::Roce && entry.kind == GidType::RoceV1 => Check::warning(
            NAME,
            format!("only RoCE v1 can be used ({entry}), which is not routed and which many switches drop"),
            "use RoCE v2: a kernel from 4.5 on has its GIDs, where the adapter can",
        ),
        Ok(entry) if device.fabric == Fabric::Roce && entry.scope() < Some(Scope::Routable) => {
            Check::warning(
                NAME,
                format!(
                    "only an address of the link can be used ({entry}): peers beyond the next router are out of reach"
                ),
                "give its network interface an IPv4 or a global IPv6 address",
            )
        }
        Ok(entry) => Check::ok(NAME, format!("{entry} is used")),
    };
    check.of_port(&device.name, port).with([Evidence::new(dir, found)])
}
