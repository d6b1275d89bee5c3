//! Which way the bytes took (K9).

use std::fmt;
use std::net::IpAddr;

use serde::Serialize;

use crate::counters::CounterReport;

/// What a channel runs over, and what each part of it carried so far.
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
        if let Some(counters) = &self.counters {
            write!(f, "; counters {counters}")?;
        }
        write!(f, "; why {}: {}", self.transport, self.transport_reason)
    }
}

/// What carries the queue pairs of a channel, and why: one word where they agree.
pub(super) fn transport_of(qps: &[(QpReport, String)]) -> (&'static str, String) {
    let Some(((first, reason), others)) = qps.split_first() else { return Default::default() };
    if others.iter().all(|(qp, _)| qp.transport == first.transport) {
        return (first.transport, reason.clone());
    }
    let each = |(qp, reason): &(QpReport, String)| {
        format!("{} on queue pair {} ({reason})", qp.transport, qp.qp_num)
    };
    ("mixed", qps.iter().map(each).collect::<Vec<_>>().join(", "))
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
