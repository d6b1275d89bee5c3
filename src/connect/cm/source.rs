//! From which address an RDMA device connects: it is found by asking RDMA_CM whose device each local address is.
//!
//! A device's GID does not tell: iWARP's is made of the MAC. And without a source the kernel chooses by its routes, which
//! may lead over another device, or over the loopback interface.

use std::net::{IpAddr, SocketAddr};

use super::super::error::{ConnectError, Stage};
use super::verbs_error::device_of;
use crate::device::Device;
use crate::provider::verbs::{CmId, addresses};

/// An identifier that is bound to an address of `device` from which `to` may be reached. May block.
pub(super) fn bound(device: &Device, to: SocketAddr) -> Result<CmId, ConnectError> {
    let local = addresses::local().map_err(|source| ConnectError::Manager {
        stage: Stage::Address,
        what: "listing the addresses of this host",
        source,
    })?;
    for from in candidates(device.address(), local, to) {
        let id = CmId::create().map_err(ConnectError::resources)?;
        match id.bind(from) {
            Ok(()) if device_of(&id, device, from).is_ok() => return Ok(id),
            Ok(()) => {}
            Err(error) => tracing::debug!(%error, %from, "RDMA_CM does not bind to an address"),
        }
    }
    Err(ConnectError::NoLocalAddress { device: device.name().to_owned(), addr: to })
}

/// The addresses of this host that are `device`'s. May block.
pub(super) fn all(device: &Device) -> Result<Vec<SocketAddr>, ConnectError> {
    let local = addresses::local().map_err(|source| ConnectError::Manager {
        stage: Stage::Address,
        what: "listing the addresses of this host",
        source,
    })?;
    let mut ours = Vec::new();
    for at in local.into_iter().filter(|a| !a.ip().is_loopback() && !a.ip().is_multicast()) {
        let id = CmId::create().map_err(ConnectError::resources)?;
        if id.bind(at).is_ok() && device_of(&id, device, at).is_ok() {
            ours.push(at);
        }
    }
    // Those that reach farther come first.
    ours.sort_by_key(|a| (a.ip() != device.address(), is_link_local(a.ip())));
    Ok(ours)
}

/// The addresses to ask for, the likeliest first: the device's own (RoCE has it in its GID), then those that reach as far
/// as `to` needs. To a link-local one, no link-local one of another interface.
fn candidates(own: IpAddr, mut local: Vec<SocketAddr>, to: SocketAddr) -> Vec<SocketAddr> {
    local.retain(|a| a.is_ipv4() == to.is_ipv4() && !a.ip().is_loopback() && !a.ip().is_multicast());
    if scope(&to) != 0 {
        local.retain(|a| scope(a) == 0 || scope(a) == scope(&to));
    }
    // Stable: otherwise in the kernel's order.
    local.sort_by_key(|a| (a.ip() != own, is_link_local(a.ip()) != is_link_local(to.ip())));
    local
}

/// The interface of an address that has a meaning on one only, or 0.
fn scope(addr: &SocketAddr) -> u32 {
    match addr {
        SocketAddr::V6(a) if is_link_local(addr.ip()) => a.scope_id(),
        _ => 0,
    }
}

/// Whether it lacks the interface without which it has no meaning.
pub(super) fn lacks_scope(addr: &SocketAddr) -> bool {
    addr.is_ipv6() && is_link_local(addr.ip()) && scope(addr) == 0
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addrs(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|a| SocketAddr::new(a.parse().unwrap(), 0)).collect()
    }

    #[test]
    fn b2_the_devices_own_address_is_asked_for_first_and_no_other_family() {
        let local =
            addrs(&["127.0.0.1", "169.254.1.1", "10.0.0.1", "10.0.1.1", "::1", "fe80::1", "2001:db8::1"]);
        let ip = |a: &str| a.parse::<IpAddr>().unwrap();
        let to = |a: &str| SocketAddr::new(ip(a), 7);
        let got = candidates(ip("10.0.1.1"), local.clone(), to("10.0.0.9"));
        assert_eq!(got, addrs(&["10.0.1.1", "10.0.0.1", "169.254.1.1"]));
        // A GID that is made of a MAC is no address here.
        let got = candidates(ip("fe80::9"), local.clone(), to("10.0.0.9"));
        assert_eq!(got, addrs(&["10.0.0.1", "10.0.1.1", "169.254.1.1"]));
        let got = candidates(ip("10.0.1.1"), local, to("fe80::2"));
        assert_eq!(got, addrs(&["fe80::1", "2001:db8::1"]));
    }

    #[test]
    fn b2_a_link_local_address_keeps_its_interface() {
        let at = |a: &str| a.parse::<SocketAddr>().unwrap();
        let local = vec![at("[fe80::1%2]:0"), at("[fe80::1%3]:0"), at("[2001:db8::1]:0")];
        let own = at("[fe80::1]:0").ip();
        let got = candidates(own, local.clone(), at("[fe80::9%3]:7"));
        assert_eq!(got, [local[1], local[2]]);
        assert_eq!(candidates(own, local.clone(), at("[fe80::9]:7")), local);
        for (addr, lacks) in [
            ("[fe80::1]:7", true),
            ("[fe80::1%2]:7", false),
            ("[2001:db8::1]:7", false),
            ("169.254.1.1:7", false),
        ] {
            assert_eq!(lacks_scope(&at(addr)), lacks, "{addr}");
        }
    }
}
