//! Which GID of a port to use (B2): a rule over the port's table, without any I/O.
//!
//! RoCE v2 before v1, which is not routed; a routable address before a link-local one; then IPv4 before IPv6, so
//! that two hosts with both choose alike; then the lowest index. An index given by the user overrides the rule.

#![cfg_attr(not(feature = "verbs"), allow(dead_code))] // Consumer: the verbs provider.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// What a GID is used with: `gid_attrs/types` in sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GidType {
    /// InfiniBand (and iWARP).
    Ib,
    RoceV1,
    RoceV2,
}

/// An entry of a port's table. Tables have holes: entries of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GidEntry {
    pub(crate) index: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) kind: GidType,
}

/// How far an address reaches. A greater one is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// Reaches this host only.
    Loopback,
    LinkLocal,
    Routable,
}

impl GidEntry {
    fn addr(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.gid)
    }

    fn v4(&self) -> Option<Ipv4Addr> {
        self.addr().to_ipv4_mapped()
    }

    /// `None` for a hole, and for what is no address of a port.
    pub(crate) fn scope(&self) -> Option<Scope> {
        let (v6, v4) = (self.addr(), self.v4());
        let is = |of_v4: fn(&Ipv4Addr) -> bool, of_v6: bool| v4.as_ref().map_or(of_v6, of_v4);
        if is(Ipv4Addr::is_unspecified, v6.is_unspecified()) || is(Ipv4Addr::is_multicast, v6.is_multicast())
        {
            None
        } else if is(Ipv4Addr::is_loopback, v6.is_loopback()) {
            Some(Scope::Loopback)
        } else if is(Ipv4Addr::is_link_local, v6.is_unicast_link_local()) {
            Some(Scope::LinkLocal)
        } else {
            Some(Scope::Routable)
        }
    }

    fn rank(&self) -> Option<(u8, Scope, bool)> {
        let kind = match self.kind {
            GidType::RoceV1 => 0,
            // A port has either these or those.
            GidType::Ib | GidType::RoceV2 => 1,
        };
        Some((kind, self.scope()?, self.v4().is_some()))
    }
}

impl GidType {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ib => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        }
    }
}

impl fmt::Display for GidEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}", self.index, self.addr(), self.kind.name())
    }
}

/// No GID can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GidError {
    #[error(
        "the port has no usable GID (its table: {table}); give its network interface an address and bring it up"
    )]
    None { table: String },
    #[error(
        "GID index {index} is not in use (the table: {table}); choose an index of the table, or none for the rule"
    )]
    NotInUse { index: u32, table: String },
}

/// Chooses from a port's `table`: the entry at `wanted`, or by the rule.
pub(crate) fn choose(table: &[GidEntry], wanted: Option<u32>) -> Result<GidEntry, GidError> {
    let used = || table.iter().filter(|e| e.scope().is_some());
    if let Some(index) = wanted {
        return used()
            .find(|e| e.index == index)
            .copied()
            .ok_or_else(|| GidError::NotInUse { index, table: list(table) });
    }
    used()
        .max_by_key(|e| (e.rank(), std::cmp::Reverse(e.index)))
        .copied()
        .ok_or_else(|| GidError::None { table: list(table) })
}

/// The table without its holes, for errors.
fn list(table: &[GidEntry]) -> String {
    let used: Vec<_> = table.iter().filter(|e| e.scope().is_some()).map(ToString::to_string).collect();
    if used.is_empty() { "empty".into() } else { used.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::GidType::{Ib, RoceV1, RoceV2};
    use super::*;

    fn table(entries: &[(u32, &str, GidType)]) -> Vec<GidEntry> {
        entries
            .iter()
            .map(|&(index, addr, kind)| GidEntry {
                index,
                gid: addr.parse::<Ipv6Addr>().unwrap().octets(),
                kind,
            })
            .collect()
    }

    fn chosen(entries: &[(u32, &str, GidType)]) -> u32 {
        choose(&table(entries), None).unwrap().index
    }

    #[test]
    fn b2_gid_rule() {
        // A usual RoCE port: link-local and IPv4, each in v1 and v2.
        let usual = [
            (0, "fe80::1", RoceV1),
            (1, "fe80::1", RoceV2),
            (2, "::ffff:10.0.0.1", RoceV1),
            (3, "::ffff:10.0.0.1", RoceV2),
        ];
        assert_eq!(chosen(&usual), 3);
        let mut reversed = usual;
        reversed.reverse();
        assert_eq!(chosen(&reversed), 3);
        // IPv4 before a global IPv6 address, which comes before a link-local one.
        assert_eq!(chosen(&[(0, "2001:db8::1", RoceV2), (5, "::ffff:10.0.0.1", RoceV2)]), 5);
        assert_eq!(chosen(&[(0, "fe80::1", RoceV2), (4, "2001:db8::1", RoceV2)]), 4);
        // IPv4 has link-local addresses too; a global IPv6 address is better.
        assert_eq!(chosen(&[(1, "::ffff:169.254.3.4", RoceV2), (2, "fd00::1", RoceV2)]), 2);
        assert_eq!(chosen(&[(1, "::ffff:127.0.0.1", RoceV2), (2, "fe80::1", RoceV2)]), 2);
        // Link-local when there is nothing else, the lowest index of equals.
        assert_eq!(chosen(&[(7, "fe80::2", RoceV2), (6, "fe80::3", RoceV2)]), 6);
        assert_eq!(chosen(&[(0, "::ffff:10.0.0.1", RoceV1), (1, "fe80::1", RoceV2)]), 1);
        assert_eq!(chosen(&[(0, "::ffff:10.0.0.1", RoceV1)]), 0);
        // An InfiniBand port has its subnet prefix and its GUID, and holes.
        assert_eq!(chosen(&[(0, "fe80::11:22ff:fe33:4455", Ib), (1, "::", Ib)]), 0);
        assert_eq!(chosen(&[(0, "::", RoceV2), (1, "::", RoceV2), (9, "::ffff:10.0.0.1", RoceV2)]), 9);
    }

    #[test]
    fn b2_gid_override_and_errors_name_the_table() {
        let t = table(&[(0, "fe80::1", RoceV1), (1, "::", RoceV2), (3, "::ffff:10.0.0.1", RoceV2)]);
        assert_eq!(choose(&t, Some(0)).unwrap().index, 0);
        for index in [1, 2, u32::MAX] {
            let e = choose(&t, Some(index)).unwrap_err().to_string();
            assert!(e.contains("0: fe80::1 RoCE v1, 3: ::ffff:10.0.0.1 RoCE v2"), "{e}");
        }
        let holes = table(&[(0, "::", RoceV2), (1, "::ffff:0.0.0.0", RoceV2), (2, "ff02::1", RoceV2)]);
        assert!(matches!(choose(&holes, None), Err(GidError::None { .. })));
        assert!(choose(&[], None).unwrap_err().to_string().contains("empty"));
    }
}
