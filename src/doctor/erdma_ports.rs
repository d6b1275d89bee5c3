//! The TCP ports that eRDMA's driver needs in compat mode, 30608 to 30623: whether a process has taken some.
//!
//! `/proc/net/tcp` and `tcp6` list sockets (`Documentation/networking/proc_net_tcp.rst`): the local address as
//! `ADDRESS:PORT` in hexadecimal, the state (`0A` is listening), and the inode. The process that has it is the one
//! with a descriptor that links to `socket:[INODE]`. The driver's own sockets belong to no process.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::erdma::COMPAT_MODE;
use super::host::Host;
use super::report::{Check, Evidence};
use super::root::Root;

const NAME: &str = "erdma_ports";
const PORTS: RangeInclusive<u16> = 30608..=30623;
const LISTENING: &str = "0A";
const TABLES: [&str; 2] = ["proc/net/tcp", "proc/net/tcp6"];
const RANGE: &str = "proc/sys/net/ipv4/ip_local_port_range";
const RESERVED: &str = "proc/sys/net/ipv4/ip_local_reserved_ports";

pub(super) fn check(host: &Host<'_>) -> Option<Check> {
    if !host.has_driver("erdma") {
        return None;
    }
    let root = host.root;
    let tables: Vec<_> = TABLES.iter().map(|table| root.read(table)).collect();
    let listening: BTreeMap<u64, u16> =
        tables.iter().filter_map(|table| table.value()).flat_map(listening).collect();
    let owners = if listening.is_empty() { BTreeMap::new() } else { owners(root, &listening) };
    let sockets = format!("{} listening on {} to {}", listening.len(), PORTS.start(), PORTS.end());
    let mut evidence = vec![Evidence::new(format!("{}, tcp6", root.name(TABLES[0])), sockets)];
    evidence.extend(owners.iter().map(|(inode, owner)| {
        let port = listening.get(inode).copied().unwrap_or_default();
        Evidence::new(&owner.source, format!("{} listens on port {port}", owner.process))
    }));
    let check = if tables.iter().all(|table| table.value().is_none()) {
        Check::unknown(NAME, "who listens on TCP ports cannot be read")
    } else if let Some(owner) = owners.values().next() {
        let compat = root.text(COMPAT_MODE).as_deref() == Some("Y");
        let ports: Vec<_> =
            owners.keys().filter_map(|inode| listening.get(inode)).map(u16::to_string).collect();
        Check::graded(
            compat || host.asked.out_of_band,
            NAME,
            format!(
                "{} listens on {}, which the driver needs in compat mode",
                owner.process,
                ports.join(", ")
            ),
            format!(
                "let it listen elsewhere, add {}-{} to {RESERVED_NAME}, and load erdma again",
                PORTS.start(),
                PORTS.end()
            ),
        )
    } else if let Some(range) = overlap(root) {
        evidence.push(Evidence::new(root.name(RANGE), range));
        Check::warning(
            NAME,
            "connections of other programs may be given the ports that the driver needs in compat mode",
            format!("`sysctl -w {RESERVED_NAME}={}`", with_ours(&root.text(RESERVED).unwrap_or_default())),
        )
    } else {
        let held = if listening.is_empty() {
            ""
        } else {
            "; those that are listened on belong to no process that is seen here"
        };
        Check::ok(NAME, format!("no process has taken {} to {}{held}", PORTS.start(), PORTS.end()))
    };
    Some(check.with(evidence))
}

const RESERVED_NAME: &str = "net.ipv4.ip_local_reserved_ports";

/// Inode and port of each listening socket on one of the ports.
fn listening(table: &str) -> Vec<(u64, u16)> {
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok().filter(|port| PORTS.contains(port))?;
        (*fields.get(3)? == LISTENING).then_some(())?;
        Some((fields.get(9)?.parse().ok()?, port))
    };
    // The first line is the heading.
    table.lines().skip(1).filter_map(socket).collect()
}

struct Owner {
    source: String,
    process: String,
}

/// Which processes have these sockets, as far as this user may look.
fn owners(root: &Root, sockets: &BTreeMap<u64, u16>) -> BTreeMap<u64, Owner> {
    let mut owners = BTreeMap::new();
    for pid in root.names("proc").into_iter().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) {
        for fd in root.names(&format!("proc/{pid}/fd")) {
            let at = format!("proc/{pid}/fd/{fd}");
            let inode = root
                .link_name(&at)
                .and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok());
            if let Some(inode) = inode.filter(|inode| sockets.contains_key(inode)) {
                let name = root.text(&format!("proc/{pid}/comm")).unwrap_or_default();
                let owner = Owner { source: root.name(&at), process: format!("process {pid} ({name})") };
                owners.entry(inode).or_insert(owner);
            }
        }
    }
    owners
}

/// What is reserved, and the driver's ports: the setting is replaced as a whole.
fn with_ours(reserved: &str) -> String {
    let parts = reserved.split(',').map(str::trim).filter(|part| !part.is_empty());
    let ours = format!("{}-{}", PORTS.start(), PORTS.end());
    parts.chain([ours.as_str()]).collect::<Vec<_>>().join(",")
}

/// The range of ports that connections are given, where it takes in the driver's and these are not reserved.
fn overlap(root: &Root) -> Option<String> {
    let range = root.text(RANGE)?;
    let mut ends = range.split_ascii_whitespace().map(str::parse::<u16>);
    let (first, last) = (ends.next()?.ok()?, ends.next()?.ok()?);
    let reserved = root.text(RESERVED).unwrap_or_default();
    let is_reserved = |port: u16| {
        reserved.split(',').any(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let ends = from.trim().parse::<u16>().ok().zip(to.trim().parse::<u16>().ok());
            ends.is_some_and(|(from, to)| (from..=to).contains(&port))
        })
    };
    PORTS.into_iter().any(|port| (first..=last).contains(&port) && !is_reserved(port)).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_already_stays_so() {
        assert_eq!(with_ours(""), "30608-30623");
        assert_eq!(with_ours("8080,9000-9100\n"), "8080,9000-9100,30608-30623");
    }

    #[test]
    fn listening_sockets_are_read_as_the_kernel_prints_them() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout \
        inode\n   \
            0: 0100007F:7790 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 129617 1 0 100 0 0 10 0\n   \
            1: 0100007F:7791 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  0 0 129618 1 0 100 0 0 10 0\n   \
            2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 129619 1 0 100 0 0 10 0\n   \
            3: 00000000000000000000000000000000:779F 00000000000000000000000000000000:0000 0A 0:0 00:0 0  0 0 \
            129620 1\n   \
            4: nonsense\n";
        // Not what is connected, nor other ports.
        assert_eq!(listening(table), [(129617, 30608), (129620, 30623)]);
    }
}
