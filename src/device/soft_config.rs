//! How a soft device is set up: by the builder, or by `LANDFALL_SOFT`.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use super::Profile;
use crate::error::DeviceError;

const VAR: &str = "LANDFALL_SOFT";

/// Configuration of a soft device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoftConfig {
    pub(crate) profile: Profile,
    pub(crate) seed: u64,
    pub(crate) address: IpAddr,
}

impl Default for SoftConfig {
    fn default() -> Self {
        Self { profile: Profile::Default, seed: 0, address: IpAddr::V4(Ipv4Addr::LOCALHOST) }
    }
}

impl SoftConfig {
    /// The `default` profile, on the loopback address.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which device it behaves like.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// Seeds what is random in a profile's behaviour (the order on `srd`).
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The local IP address that queue pairs listen on, and that peers are told. The default, the loopback address, is
    /// for one host.
    pub fn address(mut self, address: IpAddr) -> Self {
        self.address = address;
        self
    }

    /// From `LANDFALL_SOFT`, for instance `profile=srd,seed=7`. The default configuration when it is not set.
    ///
    /// # Errors
    /// [`DeviceError::Config`], which names what was found and what is accepted.
    pub fn from_env() -> Result<Self, DeviceError> {
        match std::env::var(VAR) {
            Ok(v) => Self::parse(&v),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(v)) => Err(config(&v.to_string_lossy(), "text in UTF-8")),
        }
    }

    /// From text in the format of `LANDFALL_SOFT`: `key=value` pairs separated by commas. The keys are `profile`,
    /// `seed` and `address`. The last of two equal keys counts; what is not named has its default.
    ///
    /// # Errors
    /// [`DeviceError::Config`], which names what was found and what is accepted.
    pub fn parse(text: &str) -> Result<Self, DeviceError> {
        let mut this = Self::default();
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(config(pair, "key=value; the keys are profile, seed, address"));
            };
            match (key.trim(), value.trim()) {
                ("profile", v) => {
                    this.profile = v
                        .parse()
                        .map_err(|_| config(pair, &format!("profile= with {}", Profile::ACCEPTED)))?;
                }
                ("seed", v) => {
                    this.seed =
                        v.parse().map_err(|_| config(pair, "seed=N with N from 0 to 2^64-1, in decimal"))?;
                }
                ("address", v) => {
                    this.address =
                        v.parse().map_err(|_| config(pair, "address=IP, an IPv4 or IPv6 address"))?;
                }
                _ => return Err(config(pair, "one of the keys profile, seed, address")),
            }
        }
        Ok(this)
    }
}

impl FromStr for SoftConfig {
    type Err = DeviceError;

    /// As [`SoftConfig::parse`].
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        Self::parse(text)
    }
}

fn config(got: &str, expected: &str) -> DeviceError {
    DeviceError::Config { what: VAR, got: got.to_owned(), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_config_parses_what_it_documents_and_names_what_is_wrong() {
        let c = SoftConfig::parse(" profile=srd, seed=7,address=::1 ").unwrap();
        assert_eq!(c, SoftConfig::new().profile(Profile::Srd).seed(7).address("::1".parse().unwrap()));
        assert_eq!(SoftConfig::parse("").unwrap(), SoftConfig::default());
        for (text, named) in [
            ("profile=fast", "erdma-compat"),
            ("seed=-1", "seed=N"),
            ("seed=18446744073709551616", "seed=N"),
            ("rail1.delay=5ms", "profile, seed, address"),
            ("profile", "key=value"),
            ("address=localhost", "IPv4"),
        ] {
            let e = SoftConfig::parse(text).unwrap_err().to_string();
            assert!(e.contains(named) && e.contains(text) && e.contains(VAR), "{text}: {e}");
        }
    }
}
