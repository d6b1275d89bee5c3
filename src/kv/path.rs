//! Which way the bytes took (K9).

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::Serialize;

use super::bootstrap::Chosen;
use super::endpoint::Shared;
use super::join::Joined;
use super::path_rails::{RailReport, RailState, RailWarning};

use crate::connect::Notify;
use crate::counters::CounterReport;
use crate::cuda::GpuTraffic;
use crate::provider::QpAddress;

/// What a channel runs over, and what each part of it carried so far. What is said of a device, a port and the like is of the
/// first rail; `rails` has all of them.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PathReport {
    /// `"tcp"` or `"shm"` for the soft provider, over TCP or in shared memory; `"verbs"` for an RDMA device. `"mixed"` where the
    /// queue pairs differ, each of which says its own: with [`SoftTransport::Auto`](crate::device::SoftTransport::Auto), when
    /// shared memory could not be had for some of them. `"auto"` on the listening side until the peer has come in, which over a
    /// network can be a moment after the handshake.
    pub transport: &'static str,
    /// Why that one: it was asked for, or what `Auto` has found.
    pub transport_reason: String,
    /// What is under an RDMA device: `"ib"`, `"roce"` or `"iwarp"`.
    pub fabric: Option<&'static str>,
    /// The device's name.
    pub device: String,
    /// The port of an RDMA device.
    pub port: Option<u8>,
    /// The soft provider's profile.
    pub profile: Option<String>,
    /// How the channel was set up: `"oob"`, out of band, or `"cm"`, by the connection manager.
    pub bootstrap: &'static str,
    /// Why in that way: it was asked for, or what [`Bootstrap::Auto`](super::Bootstrap::Auto) has found.
    pub bootstrap_reason: String,
    /// How the receiver is notified: `"imm"` or `"send"`.
    pub notify: &'static str,
    /// Whether the transport keeps messages of a queue pair in order.
    pub ordered: bool,
    /// Local port's GID, as an IPv6 or an IPv4-mapped address.
    pub gid: IpAddr,
    /// Peer port's GID.
    pub peer_gid: IpAddr,
    /// Path MTU, bytes.
    pub mtu: u32,
    /// Each queue pair, and what it carried.
    pub qps: Vec<QpReport>,
    /// What of it went to and from memory of GPUs, by the path that it took there.
    pub gpu: GpuTraffic,
    /// Each rail, and what it carried.
    pub rails: Vec<RailReport>,
    /// Rails that were asked for and are not there, from the beginning of the channel. One whose devices can be had again comes
    /// later, and is then here no more.
    pub warnings: Vec<RailWarning>,
    /// What the device's own counters said of it when they were last asked, by
    /// [`KvChannel::verify_path`](super::KvChannel::verify_path). `None` before that, and on the soft provider, which has no
    /// device that counts.
    pub counters: Option<CounterReport>,
}

/// One queue pair of a [`PathReport`].
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct QpReport {
    /// What carries it: `"tcp"`, `"shm"` or `"verbs"`.
    pub transport: &'static str,
    /// Local queue pair number.
    pub qp_num: u32,
    /// The peer's queue pair number.
    pub peer_qp_num: u32,
    /// Payload bytes that this side wrote.
    pub bytes_written: u64,
    /// WRITEs that this side posted.
    pub writes: u64,
    /// Payload bytes that this side read by READs, or asked for.
    pub bytes_read: u64,
    /// READs that this side posted.
    pub reads: u64,
    /// Control messages that this side posted.
    pub controls: u64,
    /// Messages and notifications received.
    pub received: u64,
}

impl fmt::Display for PathReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fabric = self.fabric.map_or(String::new(), |fabric| format!(" ({fabric})"));
        let port = self.port.map_or(String::new(), |port| format!(" port {port}"));
        let profile = self.profile.as_deref().map_or(String::new(), |p| format!(" profile {p},"));
        write!(
            f,
            "{}{fabric} over {}{port},{profile} bootstrap {}, notify {}, {}, mtu {}, {} -> {}",
            self.transport,
            self.device,
            self.bootstrap,
            self.notify,
            if self.ordered { "ordered" } else { "unordered" },
            self.mtu,
            self.gid,
            self.peer_gid
        )?;
        for (i, qp) in self.qps.iter().enumerate() {
            // Not a colon, of which a GID may have the last two.
            let comma = if i == 0 { ";" } else { "," };
            write!(
                f,
                "{comma} qp {}->{} wrote {} bytes in {} writes",
                qp.qp_num, qp.peer_qp_num, qp.bytes_written, qp.writes
            )?;
        }
        for (path, traffic) in self.gpu.used() {
            write!(
                f,
                "; gpu by {path}: {} bytes out in {} operations, {} bytes in in {}",
                traffic.bytes_out, traffic.operations_out, traffic.bytes_in, traffic.operations_in
            )?;
        }
        if self.rails.len() > 1 {
            for (n, rail) in self.rails.iter().enumerate() {
                write!(f, "; rail {n} {rail}")?;
            }
        }
        for warning in &self.warnings {
            write!(f, "; warning: {warning}")?;
        }
        if let Some(counters) = &self.counters {
            write!(f, "; counters {counters}")?;
        }
        write!(f, "; why {}: {}", self.transport, self.transport_reason)
    }
}

/// What a channel was agreed to be.
#[derive(Debug)]
pub(super) struct PathFacts {
    pub(super) bootstrap: Chosen,
    /// At least one.
    pub(super) rails: Vec<RailFacts>,
    pub(super) warnings: Vec<RailWarning>,
}

/// What a rail was agreed to be.
#[derive(Debug)]
pub(super) struct RailFacts {
    device: String,
    peer_device: String,
    fabric: Option<&'static str>,
    port: Option<u8>,
    profile: Option<String>,
    notify: &'static str,
    ordered: bool,
    gid: [u8; 16],
    peer_gid: [u8; 16],
    pub(super) mtu: u32,
    qps: usize,
    /// What it was left out for, at the start.
    left_out: Option<RailWarning>,
}

fn gid(qps: Vec<QpAddress>) -> [u8; 16] {
    qps.first().map_or([0; 16], |qp| qp.gid)
}

impl RailFacts {
    pub(super) fn new(shared: &Shared, joined: &Joined) -> Self {
        let device = shared.pool.devices()[joined.device].pd.device();
        Self {
            device: device.name().to_owned(),
            peer_device: joined.peer.device.clone(),
            fabric: device.transport().strip_prefix("verbs-"),
            port: device.port(),
            profile: device.profile().map(|p| p.to_string()),
            notify: match joined.agreed.notify {
                Notify::Imm => "imm",
                Notify::Send => "send",
            },
            ordered: joined.agreed.ordered,
            gid: gid(joined.half.as_ref().map(|built| built.pairs.addresses()).unwrap_or_default()),
            peer_gid: gid(joined.peer.qps.clone()),
            mtu: joined.agreed.path_mtu,
            qps: joined.agreed.qps,
            left_out: joined.half.as_ref().err().map(|absent| absent.warning.clone()),
        }
    }

    /// Both ends are on one port.
    pub(super) fn is_same_port(&self) -> bool {
        self.gid == self.peer_gid && self.gid != [0; 16]
    }
}

/// What became of a rail.
#[derive(Clone, Debug)]
pub(crate) struct RailFate {
    pub(super) state: RailState,
    pub(super) failures: u32,
    pub(super) returns: u32,
}

impl PathFacts {
    /// With each queue pair, and why it is carried as it is; and what became of each rail.
    pub(super) fn report(
        &self,
        qps: Vec<(QpReport, String)>,
        gpu: GpuTraffic,
        fates: Vec<RailFate>,
        counters: Option<CounterReport>,
    ) -> PathReport {
        let (transport, transport_reason) = transport_of(&qps);
        let all: u64 = qps.iter().map(|(qp, _)| qp.bytes_written).sum();
        let mut start = 0;
        let rail = |(facts, fate): (&RailFacts, RailFate)| {
            let own = start..start + facts.qps;
            start = own.end;
            let of_rail = qps.get(own.clone()).unwrap_or_default();
            let bytes_written = of_rail.iter().map(|(qp, _)| qp.bytes_written).sum::<u64>();
            RailReport {
                device: facts.device.clone(),
                port: facts.port,
                peer_device: facts.peer_device.clone(),
                transport: transport_of(of_rail).0,
                state: fate.state,
                qps: (own.start, own.end),
                bytes_written,
                share: if all == 0 { 0.0 } else { bytes_written as f64 / all as f64 },
                failures: fate.failures,
                returns: fate.returns,
            }
        };
        // One that was left out, and has not come since.
        let missing =
            |(facts, fate): (&RailFacts, &RailFate)| facts.left_out.clone().filter(|_| fate.returns == 0);
        let missing = self.rails.iter().zip(&fates).filter_map(missing);
        let warnings = self.warnings.iter().cloned().chain(missing).collect();
        let rails = self.rails.iter().zip(fates).map(rail).collect();
        let ip = |gid: [u8; 16]| {
            let ip = Ipv6Addr::from(gid);
            ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
        };
        // A channel has at least one that was there from the beginning.
        let first = self.rails.iter().find(|rail| rail.left_out.is_none()).unwrap_or(&self.rails[0]);
        PathReport {
            transport,
            transport_reason,
            fabric: first.fabric,
            device: first.device.clone(),
            port: first.port,
            profile: first.profile.clone(),
            bootstrap: self.bootstrap.way.name(),
            bootstrap_reason: self.bootstrap.reason.clone(),
            notify: first.notify,
            ordered: first.ordered,
            gid: ip(first.gid),
            peer_gid: ip(first.peer_gid),
            mtu: first.mtu,
            qps: qps.into_iter().map(|(qp, _)| qp).collect(),
            gpu,
            rails,
            warnings,
            counters,
        }
    }
}

/// What carries the queue pairs of a channel, and why: one word where they agree.
pub(super) fn transport_of(qps: &[(QpReport, String)]) -> (&'static str, String) {
    // What has never been there is carried by nothing.
    let mut there = qps.iter().filter(|(qp, _)| !qp.transport.is_empty());
    let Some(first) = there.next() else { return Default::default() };
    if there.clone().all(|(qp, _)| qp.transport == first.0.transport) {
        return (first.0.transport, first.1.clone());
    }
    let each = |(qp, reason): &(QpReport, String)| {
        format!("{} on queue pair {} ({reason})", qp.transport, qp.qp_num)
    };
    ("mixed", std::iter::once(first).chain(there).map(each).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_a_gid_that_ends_in_colons_is_followed_by_no_other() {
        let qp = QpReport { qp_num: 7, peer_qp_num: 9, ..QpReport::default() };
        let path = PathReport {
            transport: "verbs",
            transport_reason: "the device is an RDMA device".to_owned(),
            fabric: Some("iwarp"),
            device: "siw0".to_owned(),
            port: Some(1),
            profile: None,
            bootstrap: "cm",
            bootstrap_reason: String::new(),
            notify: "send",
            ordered: true,
            gid: "200:a4d:100::".parse().unwrap(),
            peer_gid: "200:a4d:101::".parse().unwrap(),
            mtu: 1024,
            qps: vec![qp, qp],
            gpu: GpuTraffic::default(),
            rails: vec![],
            warnings: vec![],
            counters: None,
        };
        let text = path.to_string();
        let end = "mtu 1024, 200:a4d:100:: -> 200:a4d:101::; qp 7->9 wrote 0 bytes in 0 writes, \
                   qp 7->9 wrote 0 bytes in 0 writes; why verbs: the device is an RDMA device";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn k9_queue_pairs_that_are_carried_differently_are_each_named() {
        let qp = |qp_num, transport, reason: &str| {
            (QpReport { qp_num, transport, ..QpReport::default() }, reason.to_owned())
        };
        let here = "both ends are on this host";
        let alike = [qp(2, "shm", here), qp(3, "shm", here)];
        assert_eq!(transport_of(&alike), ("shm", here.to_owned()));
        let (transport, reason) = transport_of(&[qp(2, "shm", here), qp(3, "tcp", "no descriptors left")]);
        assert_eq!(transport, "mixed");
        assert_eq!(
            reason,
            format!("shm on queue pair 2 ({here}), tcp on queue pair 3 (no descriptors left)")
        );
    }
}
