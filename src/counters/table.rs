//! What is known by driver only: which files count traffic, in which unit. One table, each row with its source.
//!
//! A row holds when all of its files are there and readable; the first that holds counts. Files are told by their names, not
//! by the driver's, which sysfs does not show for virtual devices. Sources are files of the Linux kernel, under
//! drivers/infiniband.

use serde::Serialize;

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CountUnit {
    /// Bytes, with or without headers.
    Bytes,
    /// Packets, of requests and of acknowledgements.
    Packets,
}

impl CountUnit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Packets => "packets",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Sent,
    Received,
}

/// Files whose sum is what a port sent or received.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) direction: Direction,
    pub(super) unit: CountUnit,
    /// Units in one count.
    pub(super) scale: u64,
    /// Below the port's directory.
    pub(super) dir: &'static str,
    pub(super) files: &'static [&'static str],
    /// The value at which the counter stays for good.
    pub(super) stuck_at: Option<u64>,
}

impl Row {
    /// For reports: `hw_counters/send_bytes+rdma_write_bytes`.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.dir, self.files.join("+"))
    }
}

/// Counts of the device's own, in the kernel's `rdma_hw_stats`.
pub(super) const HW: &str = "hw_counters";
/// Counts of InfiniBand's port management agent, in all devices that have one.
pub(super) const PMA: &str = "counters";

const fn row(direction: Direction, dir: &'static str, files: &'static [&'static str]) -> Row {
    Row { direction, unit: CountUnit::Bytes, scale: 1, dir, files, stuck_at: None }
}

const fn packets(row: Row) -> Row {
    Row { unit: CountUnit::Packets, ..row }
}

/// core/sysfs.c, `port_pma_attr` and `port_pma_attr_ext`; the InfiniBand specification, PortXmitData: octets divided by four.
/// Without extended counters they are of 32 bits and stay at the greatest value. mlx5 (hw/mlx5/mad.c,
/// `pma_cnt_ext_assign`) counts RoCE so too.
const fn words(direction: Direction, files: &'static [&'static str]) -> Row {
    Row { scale: 4, stuck_at: Some(u32::MAX as u64), ..row(direction, PMA, files) }
}

use Direction::{Received, Sent};

pub(super) static ROWS: [Row; 16] = [
    // erdma: hw/erdma/erdma_verbs.c, `erdma_descs`. The vendor's own module has the prefix `hw_`.
    row(Sent, HW, &["tx_bytes_cnt"]),
    row(Received, HW, &["rx_bytes_cnt"]),
    row(Sent, HW, &["hw_tx_bytes_cnt"]),
    row(Received, HW, &["hw_rx_bytes_cnt"]),
    // efa: hw/efa/efa_verbs.c, `EFA_DEFINE_PORT_STATS`; hw/efa/efa_admin_cmds_defs.h, `efa_admin_rdma_write_stats`.
    // By kind of operation, payload only.
    row(Sent, HW, &["send_bytes", "rdma_write_bytes", "rdma_read_resp_bytes"]),
    row(Received, HW, &["recv_bytes", "rdma_write_recv_bytes", "rdma_read_bytes"]),
    // efa before RDMA writes (the same); bnxt_re: hw/bnxt_re/hw_counters.c, `bnxt_re_stat_descs`.
    row(Sent, HW, &["tx_bytes"]),
    row(Received, HW, &["rx_bytes"]),
    // irdma: hw/irdma/verbs.c, `irdma_hw_stat_descs`.
    row(Sent, HW, &["ip4OutOctets", "ip6OutOctets"]),
    row(Received, HW, &["ip4InOctets", "ip6InOctets"]),
    // mlx5, mlx4, hfi1, qib and others.
    words(Sent, &["port_xmit_data"]),
    words(Received, &["port_rcv_data"]),
    // rxe: sw/rxe/rxe_hw_counters.c, `rxe_counter_descs`: packets, acknowledgements among them; no bytes.
    packets(row(Sent, HW, &["sent_pkts"])),
    packets(row(Received, HW, &["rcvd_pkts"])),
    // A port management agent that has packets only: as above, 64 bits.
    packets(row(Sent, PMA, &["port_xmit_packets"])),
    packets(row(Received, PMA, &["port_rcv_packets"])),
];
