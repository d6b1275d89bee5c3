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
    for from in candidates(device.address(), local, to.ip()) {
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
pub(super) fn all(device: &Device) -> Result<Vec<IpAddr>, ConnectError> {
    let local = addresses::local().map_err(|source| ConnectError::Manager {
        stage: Stage::Address,
        what: "listing the addresses of this host",
        source,
    })?;
    let mut ours = Vec::new();
    for at in local.into_iter().filter(|a| !a.ip().is_loopback() && !a.ip().is_multicast()) {
        let id = CmId::create().map_err(ConnectError::resources)?;
        if id.bind(at).is_ok() && device_of(&id, device, at).is_ok() {
            ours.push(at.ip());
        }
    }
    // Those that reach farther come first.
    ours.sort_by_key(|&ip| (ip != device.address(), is_link_local(ip)));
    Ok(ours)
}

/// The addresses to ask for, the likeliest first: the device's own (RoCE has it in its GID), then those that reach as far
/// as `to` needs.
fn candidates(own: IpAddr, mut local: Vec<SocketAddr>, to: IpAddr) -> Vec<SocketAddr> {
    local.retain(|a| a.is_ipv4() == to.is_ipv4() && !a.ip().is_loopback() && !a.ip().is_multicast());
    // Stable: otherwise in the kernel's order.
    local.sort_by_key(|a| (a.ip() != own, is_link_local(a.ip()) != is_link_local(to)));
    local
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
        let to = |a: &str| a.parse::<IpAddr>().unwrap();
        let got = candidates(to("10.0.1.1"), local.clone(), to("10.0.0.9"));
        assert_eq!(got, addrs(&["10.0.1.1", "10.0.0.1", "169.254.1.1"]));
        // A GID that is made of a MAC is no address here.
        let got = candidates(to("fe80::9"), local.clone(), to("10.0.0.9"));
        assert_eq!(got, addrs(&["10.0.0.1", "10.0.1.1", "169.254.1.1"]));
        let got = candidates(to("10.0.1.1"), local, to("fe80::2"));
        assert_eq!(got, addrs(&["fe80::1", "2001:db8::1"]));
    }
}
