//! What a worker is told: its part of a round, or of a lap, as one line.

use std::fmt;
use std::str::FromStr;

use landfall::kv::Bootstrap;

use super::blocks::Held;
use super::content::Rng;

/// A worker's part.
#[derive(Clone, Debug)]
pub struct Part {
    pub role: Role,
    /// Its number among those whose transfers are compared with each other, below 2^16.
    pub life: u64,
    pub seed: u64,
    /// Queue pairs of each rail.
    pub qps: u64,
    pub bootstrap: Bootstrap,
    /// Where to listen, or whom to dial.
    pub at: String,
    /// Operations that it does. Without an end, until it is told to stop.
    pub operations: Option<u64>,
    /// The most blocks of one.
    pub most: u64,
    /// About how many milliseconds from a link that is cut to the next. 0 for none.
    pub cuts: u64,
    /// The first device is without faults, and no other is slow: then the channel outlives what befalls the others (K10).
    pub steady: bool,
    /// Every rail has to be there.
    pub strict: bool,
    pub blocks: Held,
    /// Its devices: soft ones as `LANDFALL_SOFT` has them, or the names of RDMA devices.
    pub devices: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Listen,
    Dial,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = match self.role {
            Role::Listen => "listen",
            Role::Dial => "dial",
        };
        let Self { life, seed, qps, at, most, cuts, steady, strict, .. } = self;
        write!(f, "{role} life={life} seed={seed} qps={qps} bootstrap={} at={at}", self.bootstrap.name())?;
        if let Some(operations) = self.operations {
            write!(f, " operations={operations}")?;
        }
        write!(f, " most={most} cuts={cuts} steady={steady} strict={strict} blocks={}", self.blocks)?;
        self.devices.iter().try_for_each(|device| write!(f, " device={device}"))
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let (role, rest) = line.split_once(' ').unwrap_or((line, ""));
        let mut part = Self {
            role: match role {
                "listen" => Role::Listen,
                "dial" => Role::Dial,
                _ => return Err(format!("no command {line:?}")),
            },
            life: 0,
            seed: 0,
            qps: 1,
            bootstrap: Bootstrap::Auto,
            at: String::new(),
            operations: None,
            most: 1,
            cuts: 0,
            steady: false,
            strict: false,
            blocks: Held::usual(&mut Rng::new(0)),
            devices: Vec::new(),
        };
        for word in rest.split(' ') {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            part.set(key, value).ok_or_else(|| format!("{word} in the command {line:?}"))?;
        }
        Ok(part)
    }
}

impl Part {
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "life" => self.life = value.parse().ok()?,
            "seed" => self.seed = value.parse().ok()?,
            "qps" => self.qps = value.parse().ok()?,
            "bootstrap" => self.bootstrap = value.parse().ok()?,
            "at" => self.at = value.to_owned(),
            "operations" => self.operations = Some(value.parse().ok()?),
            "most" => self.most = value.parse().ok()?,
            "cuts" => self.cuts = value.parse().ok()?,
            "steady" => self.steady = value.parse().ok()?,
            "strict" => self.strict = value.parse().ok()?,
            "blocks" => self.blocks = value.parse().ok()?,
            "device" => self.devices.push(value.to_owned()),
            _ => return None,
        }
        Some(())
    }
}
