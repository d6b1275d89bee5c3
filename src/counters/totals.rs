//! Every counter of a port as it stands, for a monitor: what the port has sent and received, and the raw files beside.

use std::path::Path;

use serde::Serialize;

use super::read;
use super::snapshot::{CounterPort, CounterSnapshot, PortReading, Sysfs};
use super::table::{CountUnit, Direction, HW, PMA};

/// Files of a directory that are read: drivers have up to two hundred.
const MAX_FILES: usize = 1024;

/// What a port has counted in one direction since its driver was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortTotal {
    /// The files that it is the sum of, below the port's directory.
    pub counter: String,
    /// What it counts.
    pub unit: CountUnit,
    /// How much.
    pub total: u64,
}

/// One file of a port's `counters` or `hw_counters`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct RawCounter {
    /// `counters` or `hw_counters`.
    pub group: &'static str,
    /// The file's name.
    pub name: String,
    /// What it says.
    pub value: u64,
    /// Whether it counts something that went wrong: [`is_error`].
    pub error: bool,
}

/// A port's counters at one time. What cannot be read is not there: it is unknown, and never 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortTotals {
    /// The port.
    pub port: CounterPort,
    /// Sent, in each unit that the port counts.
    pub sent: Vec<PortTotal>,
    /// Received, in each unit that the port counts.
    pub received: Vec<PortTotal>,
    /// All that are numbers, by group and name.
    pub counters: Vec<RawCounter>,
}

impl PortTotals {
    /// Reads the counters of `ports`, in their order. Blocks for as long as the drivers take.
    pub fn take(sysfs: &Sysfs, ports: &[CounterPort]) -> Vec<Self> {
        let snapshot = CounterSnapshot::take(sysfs, ports);
        let totals = snapshot.ports.iter().map(|reading| Self {
            port: reading.port.clone(),
            sent: of(reading, Direction::Sent),
            received: of(reading, Direction::Received),
            counters: sysfs.port_dir(&reading.port).map(|dir| raw(&dir)).unwrap_or_default(),
        });
        totals.collect()
    }

    /// The sum of the counters of errors. `None` when the port has none.
    pub fn errors(&self) -> Option<u64> {
        self.counters.iter().filter(|c| c.error).map(|c| c.value).reduce(u64::saturating_add)
    }
}

/// The first row of the table that counts, in each unit.
fn of(reading: &PortReading, direction: Direction) -> Vec<PortTotal> {
    let totals = reading.rows.iter().filter(|r| r.row.direction == direction).filter_map(|r| {
        let values = r.values.as_ref().ok()?;
        let sum = values.iter().try_fold(0u64, |sum, &value| sum.checked_add(value))?;
        Some(PortTotal { counter: r.row.name(), unit: r.row.unit, total: sum.checked_mul(r.row.scale)? })
    });
    let mut found: Vec<PortTotal> = Vec::new();
    for total in totals {
        if found.iter().all(|other| other.unit != total.unit) {
            found.push(total);
        }
    }
    found
}

fn raw(dir: &Path) -> Vec<RawCounter> {
    let mut counters: Vec<_> = [PMA, HW]
        .into_iter()
        .flat_map(|group| {
            let dir = dir.join(group);
            let entries = std::fs::read_dir(&dir).ok().into_iter().flatten().take(MAX_FILES);
            entries.filter_map(move |entry| {
                let name = entry.ok()?.file_name().into_string().ok().filter(|name| is_counter(name))?;
                let value = read::counter(&dir.join(&name)).ok()?;
                Some(RawCounter { group, error: is_error(&name), name, value })
            })
        })
        .collect();
    counters.sort();
    counters
}

/// A name that a monitor may carry about. `lifespan` is a setting.
fn is_counter(name: &str) -> bool {
    name != "lifespan"
        && (1..=63).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Whether a counter of this name counts something that went wrong: lost, repeated or refused packets, and what the
/// link had.
///
/// The names are the kernel's: core/sysfs.c (`port_pma_attr`), hw/mlx5/counters.c, hw/erdma/erdma_verbs.c,
/// hw/efa/efa_verbs.c, hw/irdma/verbs.c, hw/bnxt_re/hw_counters.c and sw/rxe/rxe_hw_counters.c, below
/// drivers/infiniband. Waiting for credits (`port_xmit_wait`) and marks of congestion (`rp_cnp_handled`) are no
/// errors.
pub fn is_error(name: &str) -> bool {
    const WORDS: [&str; 16] = [
        "err",
        "error",
        "errors",
        "discard",
        "discards",
        "discarded",
        "drop",
        "drops",
        "dropped",
        "downed",
        "retrans",
        "retry",
        "exceeded",
        "timeout",
        "naks",
        "fail",
    ];
    const NAMES: [&str; 3] = ["out_of_sequence", "out_of_buffer", "duplicate_request"];
    // A queue pair that is closed flushes what it has: that is no error.
    if matches!(name, "resp_cqe_flush_error" | "req_cqe_flush_error") {
        return false;
    }
    NAMES.contains(&name) || name.split('_').any(|word| WORDS.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_from_traffic_and_from_waiting() {
        for name in [
            "symbol_error",
            "link_downed",
            "port_rcv_errors",
            "port_xmit_discards",
            "VL15_dropped",
            "out_of_sequence",
            "packet_seq_err",
            "local_ack_timeout_err",
            "rnr_nak_retry_err",
            "rx_drops",
            "retry_exceeded_err",
            "link_error_recovery",
            "tx_retrans_err",
        ] {
            assert!(is_error(name), "{name}");
        }
        for name in [
            "port_xmit_data",
            "port_rcv_packets",
            "port_xmit_wait",
            "rp_cnp_handled",
            "np_ecn_marked_roce_packets",
            "hw_tx_bytes_cnt",
            "rdma_write_bytes",
            "sent_pkts",
            "req_cqe_flush_error",
            "resp_cqe_flush_error",
            "rx_write_requests",
        ] {
            assert!(!is_error(name), "{name}");
        }
    }

    #[test]
    fn names_that_are_none_of_a_counter_are_left_out() {
        assert!(is_counter("VL15_dropped") && is_counter("hw_tx_bytes_cnt"));
        for name in ["", "lifespan", "a\"b", "a b", "ä", ".hidden", "a\n"] {
            assert!(!is_counter(name), "{name:?}");
        }
    }
}
