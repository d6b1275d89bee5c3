//! Whether a host is right for RDMA: checks that read, and change nothing.
//!
//! ```
//! use landfall::doctor::{Doctor, Verdict};
//!
//! let report = Doctor::new().examine();
//! for check in report.checks.iter().filter(|check| check.verdict == Verdict::Failure) {
//!     eprintln!("{check}");
//! }
//! ```
//!
//! A check says what it found, where it has read that, and what to do about it. `landfall doctor` prints them. Each
//! subject is a file here:
//!
//! | check | of | fails when |
//! |---|---|---|
//! | `devices` | the host | the one asked for, or one where RDMA is required, is not there; an adapter has no driver |
//! | `modules` | a device | there is no `ib_uverbs`, or no `rdma_ucm` where only RDMA_CM connects |
//! | `libraries` | the host | libibverbs, or librdmacm where only RDMA_CM connects, is not there |
//! | `provider` | a device | libibverbs is not told of the device's provider, or the provider's library is not there |
//! | `permissions` | a device | its device file is not there, or cannot be opened for reading and writing |
//! | `opens` | a device | this crate cannot open it (asked only of the host itself, not below another root) |
//! | `capabilities` | a device | the transport has no RC queue pairs |
//! | `memlock` | the process | the limit of locked memory is that of a system nobody has configured, and it applies |
//! | `rdma_cgroup` | the process | its control group may have no object of a device |
//! | `huge_pages` | the host | never: a warning where regions are mapped by small pages only |
//! | `port` | a port | it is not active, and it was asked for, or none is |
//! | `gid` | a port | its table has no usable GID |
//! | `erdma_mode` | the host | an out-of-band bootstrap is wanted and the driver is in standard mode |
//! | `erdma_ports` | the host | a process listens on the ports that the driver needs in compat mode |
//! | `counters` | a port | never: a warning where they should be there and are not, or say N/A |
//! | `gpu` | the host | it is to be ready for GPUDirect, and there is neither peer memory nor dmabuf |
//! | `fork` | the host | never: a warning on kernels before 5.12 |
//! | `clock` | the host | never: a warning where each reading of the clock leaves the process |
//!
//! # Another root
//!
//! [`Doctor::root`] is where `sys`, `proc`, `etc`, `dev` and the library directories are looked for: in a container
//! that has its host's below `/host`, and for tests. What only this process can be asked (`opens`) is left out then.
//!
//! # Blocking
//!
//! File I/O, and opening devices for a moment: call it outside of a runtime's workers.

mod clock;
mod counters;
mod devices;
mod erdma;
mod erdma_ports;
mod fork;
mod gids;
mod gpu;
mod host;
mod huge_pages;
mod libraries;
mod limits;
mod modules;
mod opening;
mod permissions;
mod ports;
mod report;
mod root;

use std::path::PathBuf;

use host::Host;
pub use report::{Check, Evidence, Report, Verdict};
use root::Root;

/// What is to be examined, and what is wanted of it.
#[derive(Clone, Debug, Default)]
pub struct Doctor {
    root: Option<PathBuf>,
    device: Option<String>,
    gpu: bool,
    out_of_band: bool,
    require_rdma: bool,
}

impl Doctor {
    /// Everything of this host, with nothing wanted in particular.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks below another directory than `/`.
    pub fn root(mut self, root: impl Into<PathBuf>) -> Self {
        self.root = Some(root.into());
        self
    }

    /// Of all devices, this one alone. It has to be there and its port has to be up.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// The host is to be ready for GPUDirect: GPU memory that a device reads and writes by itself. Memory is registered
    /// for it; a transfer by it was never run.
    pub fn gpu(mut self, wanted: bool) -> Self {
        self.gpu = wanted;
        self
    }

    /// Queue pairs are to be connected out of band ([`Bootstrap::Oob`](crate::kv::Bootstrap::Oob)), not by RDMA_CM.
    pub fn out_of_band(mut self, wanted: bool) -> Self {
        self.out_of_band = wanted;
        self
    }

    /// A host without an RDMA device is a failure, not a warning.
    pub fn require_rdma(mut self, required: bool) -> Self {
        self.require_rdma = required;
        self
    }

    /// Examines. It does not fail: what cannot be read is unknown.
    pub fn examine(&self) -> Report {
        let root = self.root.clone().map_or_else(Root::host, Root::at);
        let host = Host::read(&root, self);
        let mut checks = devices::check(&host);
        checks.extend(libraries::check(&host));
        for device in &host.devices {
            checks.push(modules::check(&host, device));
            checks.extend(libraries::provider(&host, device));
            checks.extend(permissions::check(&host, device));
            checks.extend(opening::check(&host, device));
            for &port in &device.ports {
                checks.push(ports::check(&host, device, port));
                checks.push(gids::check(&host, device, port));
                checks.push(counters::check(&host, device, port));
            }
        }
        checks.extend(erdma::check(&host));
        checks.extend(erdma_ports::check(&host));
        checks.push(limits::memlock(&host));
        checks.extend(limits::rdma_cgroup(&host));
        checks.push(huge_pages::check(&host));
        checks.extend(gpu::check(&host));
        checks.push(fork::check(&host));
        checks.push(clock::check(&host));
        Report::new(checks)
    }
}

#[cfg(test)]
mod tests;
