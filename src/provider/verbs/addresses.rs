//! The addresses of this host's network interfaces, for what RDMA_CM is to be bound to.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

use libc::{sockaddr, sockaddr_in, sockaddr_in6};

/// Every IPv4 and IPv6 address of an interface, with port 0.
pub(crate) fn local() -> io::Result<Vec<SocketAddr>> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call writes the pointer to a list that is ours until it is freed.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut at = list;
    // SAFETY: entries of the list, which is not freed yet; the last one's `ifa_next` is null.
    while let Some(entry) = unsafe { at.as_ref() } {
        // SAFETY: null, or an address of the list.
        found.extend(unsafe { socket_addr(entry.ifa_addr) });
        at = entry.ifa_next;
    }
    // SAFETY: given by `getifaddrs`, freed only here.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// A socket address of the library's or the kernel's. `None` for other families.
///
/// # Safety
/// `addr` is null, or points to a socket address that is as long as its family's are.
pub(super) unsafe fn socket_addr(addr: *const sockaddr) -> Option<SocketAddr> {
    // SAFETY: by the caller.
    match i32::from(unsafe { addr.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: by the caller, it is this type's.
            let v4 = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: by the caller, it is this type's.
            let v6 = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_address_is_among_them() {
        let found = local().unwrap();
        assert!(found.iter().any(|a| a.ip().is_loopback() && a.port() == 0), "{found:?}");
    }
}
