//! The options that name a device and how it is connected, for commands that open one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use landfall::connect::{Admission, Psk};
use landfall::device::{Device, Profile, SoftConfig, SoftTransport};
use landfall::kv::Bootstrap;

use crate::output::{Error, Usage};

/// What carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// The soft provider.
    Soft(SoftTransport),
    /// RDMA devices.
    Verbs,
}

impl FromStr for Transport {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "verbs" => Ok(Self::Verbs),
            _ => name.parse().map(Self::Soft).map_err(|_| "one of auto, tcp, shm and verbs"),
        }
    }
}

/// Which device, and how it is connected.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// RDMA device, as `landfall devices` names it, or several with commas: one for each rail. Without it, the soft provider
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    device: Vec<String>,
    /// tcp or shm (no device needed), auto (shm where the peer is on this host, else tcp), or verbs (needs --device)
    #[arg(long, value_name = "NAME")]
    transport: Option<Transport>,
    /// Port of the RDMA device [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    port: Option<u8>,
    /// Index in the port's GID table [default: by rule]
    #[arg(long, value_name = "N")]
    gid_index: Option<u32>,
    /// Limits that the soft provider keeps to: default, erdma-compat, erdma-standard, siw, srd or tiny
    #[arg(long, value_name = "NAME")]
    profile: Option<Profile>,
    /// How queue pairs are connected: oob, cm, or auto (oob where the device can)
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub(crate) bootstrap: Bootstrap,
    /// Both ends have to hold a key of this file, lines of `ID HEX`; `openssl rand -hex 32` makes one
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    psk: Option<PathBuf>,
    /// Let anybody connect: without it or a key, a server takes loopback addresses only
    #[arg(long)]
    insecure: bool,
}

/// Which side of a connection a process is, and its address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Listens(SocketAddr),
    Connects(SocketAddr),
}

impl DeviceArgs {
    /// Who may connect.
    pub(crate) fn admission(&self) -> Result<Admission, Error> {
        Ok(match &self.psk {
            Some(file) => Admission::Psk(Psk::from_file(file)?),
            None if self.insecure => Admission::Open,
            None => Admission::Local,
        })
    }

    /// Opens the device, or one for each rail.
    pub(crate) fn open(&self, side: Side) -> Result<Vec<Device>, Error> {
        let verbs = self.transport == Some(Transport::Verbs);
        let usage = |text: &str| Err(Usage(text.to_owned()).into());
        match (&self.transport, self.device.is_empty()) {
            (Some(Transport::Verbs), true) => {
                return usage("--transport verbs needs --device NAME; `landfall devices` lists the names");
            }
            (Some(Transport::Soft(_)), false) => {
                return usage("--device is of RDMA devices; leave it out for --transport auto, tcp and shm");
            }
            _ => {}
        }
        if self.device.is_empty() {
            if self.port.is_some() || self.gid_index.is_some() {
                return usage("--port and --gid-index are of RDMA devices; name one by --device");
            }
            return Ok(vec![self.soft(side)?]);
        }
        if self.profile.is_some() {
            return usage(if verbs {
                "--profile is of the soft provider; a device is what it is"
            } else {
                "--profile is of the soft provider; leave out --device"
            });
        }
        self.device.iter().map(|name| self.rdma(name)).collect()
    }

    fn soft(&self, side: Side) -> Result<Device, Error> {
        let mut soft = SoftConfig::from_env()?;
        if let Some(profile) = self.profile {
            soft = soft.profile(profile);
        }
        if let Some(Transport::Soft(transport)) = self.transport {
            soft = soft.transport(transport);
        }
        if let Some(address) = data_address(side) {
            soft = soft.address(address);
        }
        Ok(Device::soft(soft)?)
    }

    #[cfg(feature = "verbs")]
    fn rdma(&self, name: &str) -> Result<Device, Error> {
        let mut config = landfall::device::VerbsConfig::new();
        if let Some(port) = self.port {
            config = config.port(port);
        }
        if let Some(index) = self.gid_index {
            config = config.gid_index(index);
        }
        Ok(Device::verbs(name, config)?)
    }

    #[cfg(not(feature = "verbs"))]
    fn rdma(&self, name: &str) -> Result<Device, Error> {
        Err(format!("--device {name}: this build is without RDMA; build with the feature \"verbs\"").into())
    }
}

/// A soft device over TCP and nothing else.
pub(crate) fn tcp_device(side: Side) -> Result<Device, Error> {
    let soft = SoftConfig::new().transport(SoftTransport::Tcp);
    Ok(Device::soft(match data_address(side) {
        Some(address) => soft.address(address),
        None => soft,
    })?)
}

/// The address on which this side's data connections are made: the one that it listens on, or that its route to the peer starts
/// from. Listening on every address, it is that of the route to anywhere.
fn data_address(side: Side) -> Option<IpAddr> {
    let towards = match side {
        Side::Connects(address) => address,
        Side::Listens(address) if !address.ip().is_unspecified() => return Some(address.ip()),
        // Addresses for documentation (RFC 5737, RFC 3849).
        Side::Listens(SocketAddr::V4(_)) => (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        Side::Listens(SocketAddr::V6(_)) => (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    };
    // Connecting a datagram socket sends nothing; it only chooses a route.
    let any: SocketAddr = if towards.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = std::net::UdpSocket::bind(any).ok()?;
    socket.connect(towards).ok()?;
    Some(socket.local_addr().ok()?.ip())
}
