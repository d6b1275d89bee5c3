//! Finding ports in sysfs, and reading all of their counters at one time.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::difference::CounterDifference;
use super::read::{self, Unknown};
use super::table::{ROWS, Row};
use crate::device::Device;

/// More ports than that are not listed. A name in sysfs is of at most 63 bytes.
const MAX_PORTS: usize = 1024;
const MAX_NAME: usize = 63;
/// The kernel's default, `RDMA_HW_STATS_DEFAULT_LIFESPAN`.
const LIFESPAN: Duration = Duration::from_millis(10);
const MAX_LIFESPAN: Duration = Duration::from_secs(1);

/// Where the kernel shows its devices: `/sys` by default, another directory for tests and for containers that have the
/// host's elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::at("/sys")
    }
}

impl Sysfs {
    /// With another root: `class/infiniband` is looked for below.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory that it was made with.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The names of all RDMA devices, in no order.
    pub(crate) fn devices(&self) -> impl Iterator<Item = String> + use<> {
        names(&self.root.join("class/infiniband"))
    }

    /// All ports of all RDMA devices, in the order of their names. None, where the kernel has no such device.
    pub fn ports(&self) -> Vec<CounterPort> {
        let devices = self.root.join("class/infiniband");
        let mut ports: Vec<_> = self
            .devices()
            .flat_map(|device| {
                let numbers = names(&devices.join(&device).join("ports"));
                numbers.filter_map(move |port| Some(CounterPort::new(&device, port.parse().ok()?)))
            })
            .take(MAX_PORTS)
            .collect();
        ports.sort();
        ports
    }

    /// `None` for a name that is none of a device, but leads elsewhere.
    pub(super) fn port_dir(&self, port: &CounterPort) -> Option<PathBuf> {
        is_name(&port.device).then(|| {
            self.root.join("class/infiniband").join(&port.device).join(format!("ports/{}", port.port))
        })
    }
}

fn names(dir: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(dir).ok().into_iter().flatten().take(MAX_PORTS);
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).filter(|name| is_name(name))
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

/// A port of a device, which has counters of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct CounterPort {
    /// The kernel's name of the device.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
}

impl CounterPort {
    /// A port by its device's name and its number. Whether there is one shows when it is read.
    pub fn new(device: impl Into<String>, port: u8) -> Self {
        Self { device: device.into(), port }
    }

    /// The port of an opened device. `None` on the soft provider: there is nothing that counts.
    pub fn of(device: &Device) -> Option<Self> {
        Some(Self::new(device.name(), device.port()?))
    }
}

impl fmt::Display for CounterPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.device, self.port)
    }
}

/// The counters of some ports at one time.
#[derive(Clone, Debug)]
pub struct CounterSnapshot {
    pub(super) ports: Vec<PortReading>,
    lifespan: Duration,
}

/// One port's counters: each row of the table that has a file here, with the value of each of its files.
#[derive(Clone, Debug)]
pub(super) struct PortReading {
    pub(super) port: CounterPort,
    pub(super) rows: Vec<RowReading>,
}

#[derive(Clone, Debug)]
pub(super) struct RowReading {
    pub(super) row: &'static Row,
    pub(super) values: Result<Vec<u64>, Unknown>,
}

impl CounterSnapshot {
    /// Reads the counters of `ports`. It does not fail: what cannot be read is unknown. Blocks for as long as the drivers
    /// take.
    pub fn take(sysfs: &Sysfs, ports: &[CounterPort]) -> Self {
        let mut lifespan = LIFESPAN;
        let ports = ports
            .iter()
            .map(|port| {
                let dir = sysfs.port_dir(port);
                let rows = dir.as_deref().map_or_else(Vec::new, |dir| {
                    if let Ok(ms) = read::counter(&dir.join("hw_counters/lifespan")) {
                        lifespan = lifespan.max(Duration::from_millis(ms).min(MAX_LIFESPAN));
                    }
                    ROWS.iter().filter_map(|row| RowReading::read(dir, row)).collect()
                });
                PortReading { port: port.clone(), rows }
            })
            .collect();
        Self { ports, lifespan }
    }

    /// For how long a value may be older than its reading: the longest `lifespan` among the ports, at least the kernel's
    /// default of 10 ms and at most a second.
    pub fn lifespan(&self) -> Duration {
        self.lifespan
    }

    /// What was counted since an `earlier` snapshot, for each port of this one.
    pub fn since(&self, earlier: &Self) -> CounterDifference {
        CounterDifference::new(self, earlier)
    }
}

impl RowReading {
    /// `None` where none of the files is there.
    fn read(dir: &Path, row: &'static Row) -> Option<Self> {
        let dir = dir.join(row.dir);
        let values: Vec<_> = row.files.iter().map(|file| read::counter(&dir.join(file))).collect();
        if values.iter().all(|value| *value == Err(Unknown::Missing)) {
            return None;
        }
        let stuck = |value| if row.stuck_at == Some(value) { Err(Unknown::Stuck) } else { Ok(value) };
        Some(Self { row, values: values.into_iter().map(|value| value.and_then(stuck)).collect() })
    }
}
