//! How a soft device is set up: by the builder, or by `LANDFALL_SOFT`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use super::{Faults, Profile, SoftTransport};
use crate::error::DeviceError;

const VAR: &str = "LANDFALL_SOFT";
const RAIL: &str = "rail";

/// Configuration of a soft device. Its `Display` is the text that [`parse`](Self::parse) takes: put into `LANDFALL_SOFT`, it
/// repeats a run as far as a real network allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoftConfig {
    pub(crate) profile: Profile,
    pub(crate) seed: u64,
    pub(crate) address: IpAddr,
    pub(crate) transport: SoftTransport,
    faults: Faults,
    rails: BTreeMap<u32, Faults>,
    /// The number of the completion queue, from 1, that cannot be created; of the queue pair; of the registration.
    pub(crate) fail_cq: Option<u64>,
    pub(crate) fail_qp: Option<u64>,
    pub(crate) fail_mr: Option<u64>,
}

impl Default for SoftConfig {
    fn default() -> Self {
        Self {
            profile: Profile::Default,
            seed: 0,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            transport: SoftTransport::Auto,
            faults: Faults::new(),
            rails: BTreeMap::new(),
            fail_cq: None,
            fail_qp: None,
            fail_mr: None,
        }
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

    /// Seeds what is random in a profile's behaviour (the order on `srd`), and in faults.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The local IP address that queue pairs listen on where they take TCP, and that peers are told. The default, the loopback
    /// address, is for one host.
    pub fn address(mut self, address: IpAddr) -> Self {
        self.address = address;
        self
    }

    /// What queue pairs run over. Both sides must have one in common. Default [`SoftTransport::Auto`].
    pub fn transport(mut self, transport: SoftTransport) -> Self {
        self.transport = transport;
        self
    }

    /// Faults of every queue pair of the device. Default none, which costs nothing.
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// Faults of one queue pair. What is set here counts instead of what [`faults`](Self::faults) sets, the rest of which holds
    /// as well. Rail 0 is the first queue pair that the device makes, rail 1 the second, and so on; when one is destroyed, the
    /// next to be made takes its place. Where a connection manager connects a channel, the first one carries the handshake and
    /// the channel's own come after it.
    pub fn rail_faults(mut self, rail: u32, faults: Faults) -> Self {
        self.rails.insert(rail, faults);
        self
    }

    /// The `n`-th completion queue of the device, from 1, cannot be created, as on a device that has run out of them.
    pub fn fail_cq(mut self, n: u64) -> Self {
        self.fail_cq = Some(n);
        self
    }

    /// The `n`-th queue pair of the device, from 1, cannot be created.
    pub fn fail_qp(mut self, n: u64) -> Self {
        self.fail_qp = Some(n);
        self
    }

    /// The `n`-th registration of memory with the device, from 1, fails. A pool is registered first, in as many pieces as the
    /// device's `max_mr_size` asks for.
    pub fn fail_mr(mut self, n: u64) -> Self {
        self.fail_mr = Some(n);
        self
    }

    /// The faults of the queue pair with this place.
    pub(crate) fn faults_of(&self, rail: u32) -> Faults {
        self.rails.get(&rail).map_or(self.faults, |own| own.over(self.faults))
    }

    pub(crate) fn has_faults(&self) -> bool {
        let fails = self.fail_cq.or(self.fail_qp).or(self.fail_mr);
        fails.is_some() || !self.faults.is_none() || self.rails.values().any(|f| !f.is_none())
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
    /// `seed`, `address`, `transport` (`auto`, `tcp` or `shm`), `fail_cq`, `fail_qp`, `fail_mr`, and those of [`Faults`] by the names of its methods, for instance
    /// `delay=5ms`, `drop_after=100000`; with `rail1.` before it, a fault is of one queue pair
    /// ([`rail_faults`](Self::rail_faults)). Times have a unit (`ns`, `us`, `ms`, `s`). The last of two equal keys counts; what is
    /// not named has its default.
    ///
    /// # Errors
    /// [`DeviceError::Config`], which names what was found and what is accepted.
    pub fn parse(text: &str) -> Result<Self, DeviceError> {
        let mut this = Self::default();
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(config(pair, &format!("key=value; the keys are {}", keys())));
            };
            let (key, value) = (key.trim(), value.trim());
            match key {
                "profile" => {
                    this.profile = value
                        .parse()
                        .map_err(|_| config(pair, &format!("profile= with {}", Profile::ACCEPTED)))?;
                }
                "seed" => {
                    let expected = "seed=N with N from 0 to 2^64-1, in decimal";
                    this.seed = value.parse().map_err(|_| config(pair, expected))?;
                }
                "address" => {
                    let expected = "address=IP, an IPv4 or IPv6 address";
                    this.address = value.parse().map_err(|_| config(pair, expected))?;
                }
                "transport" => {
                    this.transport = value
                        .parse()
                        .map_err(|_| config(pair, &format!("transport= with {}", SoftTransport::ACCEPTED)))?;
                }
                "fail_cq" | "fail_qp" | "fail_mr" => {
                    let n = value.parse().ok().filter(|&n: &u64| n > 0);
                    let n = n.ok_or_else(|| config(pair, &format!("{key}=N, the number of one, from 1")))?;
                    let field = match key {
                        "fail_cq" => &mut this.fail_cq,
                        "fail_qp" => &mut this.fail_qp,
                        _ => &mut this.fail_mr,
                    };
                    *field = Some(n);
                }
                _ => this.set_fault(pair, key, value)?,
            }
        }
        Ok(this)
    }

    fn set_fault(&mut self, pair: &str, key: &str, value: &str) -> Result<(), DeviceError> {
        let unknown = || config(pair, &format!("one of the keys {}", keys()));
        let (rail, name) = match key.split_once('.') {
            None => (None, key),
            Some((rail, name)) => {
                let rail = rail.strip_prefix(RAIL).and_then(|n| n.parse().ok()).ok_or_else(unknown)?;
                (Some(rail), name)
            }
        };
        let mut faults = match rail {
            None => self.faults,
            Some(rail) => self.rails.get(&rail).copied().unwrap_or_default(),
        };
        faults
            .set(name, value)
            .ok_or_else(unknown)?
            .map_err(|expected| config(pair, &format!("{key}= with {expected}")))?;
        match rail {
            None => self.faults = faults,
            Some(rail) => _ = self.rails.insert(rail, faults),
        }
        Ok(())
    }
}

impl fmt::Display for SoftConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { profile, seed, address, transport, .. } = self;
        write!(f, "profile={profile},seed={seed},address={address},transport={transport}")?;
        for (key, n) in [("fail_cq", self.fail_cq), ("fail_qp", self.fail_qp), ("fail_mr", self.fail_mr)] {
            if let Some(n) = n {
                write!(f, ",{key}={n}")?;
            }
        }
        self.faults.write(f, "")?;
        for (rail, faults) in &self.rails {
            faults.write(f, &format!("{RAIL}{rail}."))?;
        }
        Ok(())
    }
}

impl FromStr for SoftConfig {
    type Err = DeviceError;

    /// As [`SoftConfig::parse`].
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        Self::parse(text)
    }
}

fn keys() -> String {
    format!(
        "profile, seed, address, transport, fail_cq, fail_qp, fail_mr, {}; each of the faults also with {RAIL}N. before it",
        Faults::KEYS
    )
}

fn config(got: &str, expected: &str) -> DeviceError {
    DeviceError::Config { what: VAR, got: got.to_owned(), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn soft_config_parses_what_it_documents_and_names_what_is_wrong() {
        let c = SoftConfig::parse(" profile=srd, seed=7,address=::1 ").unwrap();
        assert_eq!(c, SoftConfig::new().profile(Profile::Srd).seed(7).address("::1".parse().unwrap()));
        let c = SoftConfig::parse("transport=shm,profile=tiny").unwrap();
        assert_eq!(c, SoftConfig::new().transport(SoftTransport::Shm).profile(Profile::Tiny));
        assert_eq!(SoftConfig::parse("").unwrap(), SoftConfig::default());
        for (text, named) in [
            ("profile=fast", "erdma-compat"),
            ("seed=-1", "seed=N"),
            ("seed=18446744073709551616", "seed=N"),
            ("delays=5ms", "profile, seed, address, transport, fail_cq, fail_qp, fail_mr, delay"),
            ("transport=pipe", "transport= with auto, tcp or shm"),
            ("rail1.delay=5", "rail1.delay= with a time"),
            ("railway.delay=5ms", "railN."),
            ("rail1.seed=5", "railN."),
            ("rate=10", "1024"),
            ("fail_post=0", "from 1"),
            ("fail_cq=0", "from 1"),
            ("fail_mr=0", "from 1"),
            ("rail1.fail_qp=2", "railN."),
            ("drop_after=1KiB", "a number of bytes"),
            ("profile", "key=value"),
            ("address=localhost", "IPv4"),
        ] {
            let e = SoftConfig::parse(text).unwrap_err().to_string();
            assert!(e.contains(named) && e.contains(text) && e.contains(VAR), "{text}: {e}");
        }
    }

    #[test]
    fn soft_config_displays_what_parses_to_the_same() {
        let every = Faults::new()
            .delay(Duration::from_millis(5))
            .reorder(Duration::from_micros(1500))
            .stall(Duration::MAX)
            .stall_after(0)
            .rate(1 << 20)
            .drop_after(77)
            .fail_post(3)
            .fail_wr(4)
            .kill_after(u64::MAX);
        let one = Faults::new().delay(Duration::from_nanos(1_000_000_001));
        let c = SoftConfig::new()
            .profile(Profile::Srd)
            .seed(9)
            .transport(SoftTransport::Tcp)
            .fail_cq(3)
            .fail_qp(u64::MAX)
            .fail_mr(2)
            .faults(every)
            .rail_faults(1, one)
            .rail_faults(12, every);
        assert_eq!(SoftConfig::parse(&c.to_string()).unwrap(), c, "{c}");
        let text = "profile=srd,seed=7,address=127.0.0.1,transport=shm,delay=5ms,rail1.delay=200ms";
        assert_eq!(SoftConfig::parse(text).unwrap().to_string(), text);
        assert_eq!(SoftConfig::default().to_string().parse::<SoftConfig>().unwrap(), SoftConfig::default());
    }

    #[test]
    fn a_rail_has_its_own_faults_over_those_of_all() {
        let c = SoftConfig::parse("delay=1s,drop_after=5,rail2.delay=2s").unwrap();
        let (all, own) = (c.faults_of(0), c.faults_of(2));
        assert_eq!((all.delay, all.drop_after), (Some(Duration::from_secs(1)), Some(5)));
        assert_eq!((own.delay, own.drop_after), (Some(Duration::from_secs(2)), Some(5)));
        assert!(c.has_faults() && !SoftConfig::new().has_faults());
    }
}
