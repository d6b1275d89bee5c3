//! What devices count, and whether that bears out what a program believes to have sent and received (K9).
//!
//! An RDMA device counts its traffic by itself, whatever a library says. Two readings of its counters, before and after, show
//! which device carried the bytes, or that none did. There are three answers, see [`Verdict`]. A counter that is not there,
//! says `N/A (no PMA)` or cannot be read is *unknown*, never 0.
//!
//! [`KvChannel::verify_path`](crate::kv::KvChannel::verify_path) does all of this for a channel. By hand, for operations of
//! one's own or for several channels together:
//!
//! ```no_run
//! use landfall::counters::{CounterPort, CounterSnapshot, Expected, Payload, Sysfs, Verdict};
//!
//! let sysfs = Sysfs::default();
//! // All devices, so that traffic on another one than expected is named.
//! let ports = sysfs.ports();
//! let before = CounterSnapshot::take(&sysfs, &ports);
//! // … 64 WRITEs of 1 MiB …
//! let after = CounterSnapshot::take(&sysfs, &ports);
//! let expected = Expected::new([CounterPort::new("mlx5_0", 1)], 4096).sent(Payload::new(64 << 20, 64));
//! let report = after.since(&before).check(&expected);
//! if report.verdict == Verdict::Contradicted {
//!     eprintln!("{report}");
//! }
//! ```
//!
//! # Two bounds
//!
//! Let the payload be `P` bytes in `n` messages, at a path MTU of `M`. Counters of bytes include headers on some devices and
//! not on others, those of packets have no bytes at all, and every counter is the port's: other programs' traffic is in it
//! too. So what was counted is compared with two bounds:
//!
//! - **least**: `P` bytes; ⌈P/M⌉ packets. Less has to be explained by another path: *contradicted*.
//! - **most** that this traffic explains: each message in packets of its own and padded with control data, the largest
//!   headers, an acknowledgement for each packet that came the other way. What is above is somebody else's (or was sent again
//!   after a loss). It is no contradiction; but when the surplus alone is as much as the payload, it could have been all that
//!   the port carried, and the answer is *unknown*.
//!
//! The counts of all ports in [`Expected`] (the rails) are added up before they are compared.
//!
//! # Freshness
//!
//! The kernel asks a device for its `hw_counters` at most once in their `lifespan`, 10 ms by default. A reading is of
//! any moment within that time before it. [`CounterSnapshot::lifespan`] says how long to wait, after the last transfer
//! and before the second reading.
//!
//! # Blocking
//!
//! Reading is file I/O on sysfs, and some drivers ask their firmware: call it outside of a runtime's workers.

mod difference;
mod read;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod totals;
mod verdict;

pub use difference::{CounterDifference, PortCount};
pub use snapshot::{CounterPort, CounterSnapshot, Sysfs};
pub use table::CountUnit;
pub use totals::{PortTotal, PortTotals, RawCounter, is_error};
pub use verdict::{CounterReport, DirectionReport, Expected, Payload, Verdict};
