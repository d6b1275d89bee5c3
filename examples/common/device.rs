//! The device that an example runs on, and how it is connected: the options that name them.

use std::net::SocketAddr;

use landfall::connect::cm;
use landfall::device::{Device, Profile, SoftConfig, SoftTransport, UnknownSoftTransport};
use landfall::error::DeviceError;
use landfall::kv::{Bootstrap, BootstrapError};

use super::{Error, data_address};

/// The part of a usage text.
macro_rules! device_usage {
    () => {
        "\
  --transport NAME       tcp or shm (no device needed), auto (shm where the peer is on this host, else tcp), or verbs (an RDMA
                         device); both sides must fit together           [auto]
  --device NAME          the RDMA device of --transport verbs, as `rdma link` or ibv_devices name it; where the program takes
                         several rails, NAME,NAME,... one for each
  --peer-device NAME     that of the peer process which is started here  [as --device]
  --port N               port of the RDMA device                         [1]
  --gid-index N          index in its GID table                          [by rule]
  --profile NAME         soft profile: default, erdma-compat, erdma-standard, siw, srd, tiny  [default]
  --bootstrap NAME       how queue pairs are connected: oob (addresses over TCP), cm (RDMA_CM, or its like without one), or
                         auto (oob where the device can)                 [auto]
                         by cm, the address of an RDMA device's listener is one of the device
"
    };
}
pub(crate) use device_usage;

/// The RDMA devices of `--transport verbs`.
#[derive(Clone, Debug, Default)]
struct Verbs {
    device: String,
    peer_device: Option<String>,
    port: Option<u8>,
    gid_index: Option<u32>,
}

/// What `--transport` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Soft(SoftTransport),
    Verbs,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceArgs {
    /// `None`: the soft one that the environment or the default names.
    transport: Option<Transport>,
    profile: Option<Profile>,
    verbs: Verbs,
    /// The last option that only RDMA devices have.
    of_verbs: Option<String>,
    pub(crate) bootstrap: Bootstrap,
}

impl DeviceArgs {
    /// Takes the option `flag`, if it is one of these.
    pub(crate) fn take(
        &mut self,
        flag: &str,
        value: &mut impl FnMut() -> Result<String, String>,
    ) -> Result<bool, String> {
        let words = |error: DeviceError| error.to_string();
        match flag {
            "--transport" => self.transport = Some(transport(&value()?)?),
            "--device" => self.verbs.device = value()?,
            "--peer-device" => self.verbs.peer_device = Some(value()?),
            "--port" => self.verbs.port = Some(number(flag, &value()?, 1, 255)? as u8),
            "--gid-index" => self.verbs.gid_index = Some(number(flag, &value()?, 0, 255)? as u32),
            "--profile" => self.profile = Some(value()?.parse().map_err(words)?),
            "--bootstrap" => self.bootstrap = value()?.parse().map_err(|e: BootstrapError| e.to_string())?,
            _ => return Ok(false),
        }
        if matches!(flag, "--device" | "--peer-device" | "--port" | "--gid-index") {
            self.of_verbs = Some(flag.to_owned());
        }
        Ok(true)
    }

    /// Whether the options go together.
    pub(crate) fn check(&self) -> Result<(), String> {
        match (self.is_verbs(), &self.of_verbs) {
            (false, None) => Ok(()),
            (false, Some(option)) => Err(format!("{option} is of --transport verbs; add that")),
            (true, _) if self.verbs.device.is_empty() => {
                Err("--transport verbs needs --device NAME; ibv_devices lists the names".to_owned())
            }
            (true, _) if self.profile.is_some() => {
                Err("--profile is of --transport auto, tcp and shm; a device is what it is".to_owned())
            }
            (true, _) => Ok(()),
        }
    }

    pub(crate) fn is_verbs(&self) -> bool {
        self.transport == Some(Transport::Verbs)
    }

    /// Opens one for each of `rails` rails: as many soft devices, or the RDMA devices that were named, in turn; with `rails` 0,
    /// each of those, or one soft device. `side` is the address that this process listens on (`true`) or connects to, if it has
    /// one.
    pub(crate) fn open(&self, side: Option<(SocketAddr, bool)>, rails: usize) -> Result<Vec<Device>, Error> {
        if !self.is_verbs() {
            return (0..rails.max(1)).map(|_| self.open_soft(side)).collect();
        }
        let names: Vec<&str> = self.verbs.device.split(',').collect();
        let count = if rails == 0 { names.len() } else { rails };
        let device = |name: &&str| open_verbs(&Verbs { device: (*name).to_owned(), ..self.verbs.clone() });
        names.iter().cycle().take(count).map(device).collect()
    }

    fn open_soft(&self, side: Option<(SocketAddr, bool)>) -> Result<Device, Error> {
        let mut soft = SoftConfig::from_env()?;
        if let Some(profile) = self.profile {
            soft = soft.profile(profile);
        }
        if let Some(Transport::Soft(transport)) = self.transport {
            soft = soft.transport(transport);
        }
        if let Some((address, listens)) = side
            && let Some(ip) = data_address(address, listens)
        {
            soft = soft.address(ip);
        }
        Ok(Device::soft(soft)?)
    }

    /// Whether a connection manager connects `device`.
    pub(crate) fn by_manager(&self, device: &Device) -> bool {
        match self.bootstrap {
            Bootstrap::Auto => !device.capabilities().oob,
            bootstrap => bootstrap == Bootstrap::Cm,
        }
    }

    /// The options for the peer process.
    pub(crate) fn peer(&self) -> Vec<String> {
        let mut line = vec![format!("--bootstrap={}", self.bootstrap)];
        let mut option = |flag: &str, value: &dyn std::fmt::Display| line.push(format!("{flag}={value}"));
        if let Some(Transport::Soft(transport)) = self.transport {
            option("--transport", &transport);
        }
        if self.is_verbs() {
            let verbs = &self.verbs;
            option("--transport", &"verbs");
            option("--device", verbs.peer_device.as_ref().unwrap_or(&verbs.device));
            if let Some(port) = verbs.port {
                option("--port", &port);
            }
            // The index is of our device's table; on another device the rule chooses.
            if let (Some(index), None) = (verbs.gid_index, &verbs.peer_device) {
                option("--gid-index", &index);
            }
        }
        if let Some(profile) = self.profile {
            option("--profile", &profile);
        }
        line
    }
}

/// An address of `device` that a connection manager can listen on, with port 0.
pub(crate) async fn managed_address(device: &Device) -> Result<SocketAddr, Error> {
    let none = || format!("{} has no IP address: give its network interface one", device.name());
    Ok(cm::addresses(device).await?.first().copied().ok_or_else(none)?)
}

#[cfg(feature = "verbs")]
fn open_verbs(verbs: &Verbs) -> Result<Device, Error> {
    let mut config = landfall::device::VerbsConfig::new();
    if let Some(port) = verbs.port {
        config = config.port(port);
    }
    if let Some(index) = verbs.gid_index {
        config = config.gid_index(index);
    }
    Ok(Device::verbs(&verbs.device, config)?)
}

#[cfg(not(feature = "verbs"))]
fn open_verbs(_: &Verbs) -> Result<Device, Error> {
    Err("--transport verbs: this build is without it; build with the feature \"verbs\"".into())
}

fn transport(name: &str) -> Result<Transport, String> {
    match name {
        "verbs" => Ok(Transport::Verbs),
        _ => name.parse().map(Transport::Soft).map_err(|_: UnknownSoftTransport| {
            format!("--transport {name:?}: one of auto, tcp, shm and verbs")
        }),
    }
}

/// A whole number, or what is wrong with it.
pub(crate) fn number(flag: &str, text: &str, least: u64, most: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("{flag} {text:?}: a whole number from {least} to {most} is needed")),
    }
}
