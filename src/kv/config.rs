//! What can be chosen about an endpoint's channels, with its defaults.

use std::time::Duration;

use super::bootstrap::Bootstrap;
use super::gpu_path::{GpuPath, GpuPaths};
use super::limits::PeerLimits;
use super::proto::DAY;
use crate::connect::Admission;
use crate::device::Capabilities;
use crate::error::DeviceError;

pub(crate) use super::proto::MAX_QPS;
/// Room that a control message has: an abort or a header that counts [`MAX_QPS`] queue pairs fits.
pub(crate) const CONTROL_BYTES: usize = 1024;

/// Most bytes of one WRITE of memory of a GPU, unless another number was chosen.
const DEVICE_WRITE: u32 = 64 << 20;

/// Configuration of the channels of a [`KvEndpoint`](super::KvEndpoint). Both ends have their own; what must agree is
/// settled by the handshake. Values are checked by [`KvEndpoint::new`](super::KvEndpoint::new), which names what is wrong.
#[derive(Clone, Debug)]
pub struct KvConfig {
    pub(crate) qps: usize,
    pub(crate) spin: Duration,
    pub(crate) send_depth: u32,
    pub(crate) data_credits: u32,
    pub(crate) control_credits: u32,
    pub(crate) max_write: u32,
    max_write_chosen: bool,
    pub(crate) max_transfers: u16,
    pub(crate) deadline: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) abort_grace: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) require_rdma: bool,
    pub(crate) require_shared_memory: bool,
    pub(crate) gpu_paths: GpuPaths,
    pub(crate) bootstrap: Bootstrap,
    pub(crate) admission: Admission,
    pub(crate) limits: PeerLimits,
    pub(crate) strict_rails: bool,
    pub(crate) rail_probe: (Duration, Duration),
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            qps: 1,
            spin: Duration::ZERO,
            send_depth: 256,
            data_credits: 128,
            control_credits: 32,
            max_write: 2 << 20,
            max_write_chosen: false,
            max_transfers: 256,
            deadline: Duration::from_secs(30),
            heartbeat: Duration::from_secs(1),
            peer_timeout: Duration::from_secs(5),
            abort_grace: Duration::from_millis(500),
            connect_timeout: Duration::from_secs(10),
            require_rdma: false,
            require_shared_memory: false,
            gpu_paths: GpuPaths::ALL,
            bootstrap: Bootstrap::Auto,
            admission: Admission::Local,
            limits: PeerLimits::default(),
            strict_rails: false,
            rail_probe: (Duration::from_millis(100), Duration::from_secs(10)),
        }
    }
}

impl KvConfig {
    /// Queue pairs of each rail of a channel, at least 1, and at most 64 on all rails together. The connecting side decides, as
    /// far as the accepting device has room for them. Default 1.
    pub fn qps(mut self, qps: usize) -> Self {
        self.qps = qps;
        self
    }

    /// How long a waiting future may poll the completion queue before it sleeps. It holds its thread for that long.
    /// Default zero: it sleeps at once. See [tuning](crate::guide::tuning).
    pub fn spin(mut self, budget: Duration) -> Self {
        self.spin = budget;
        self
    }

    /// Deadline of a write that names none. Default 30 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How often the peer's process is asked whether it lives, on each queue pair. At most a day. Default 1 s.
    pub fn heartbeat(mut self, every: Duration) -> Self {
        self.heartbeat = every;
        self
    }

    /// Silence after which the peer counts as lost. At least twice this side's heartbeat, at most a day.
    /// Default 5 s.
    pub fn peer_timeout(mut self, after: Duration) -> Self {
        self.peer_timeout = after;
        self
    }

    /// How long an aborted write may take to come to rest before its queue pairs are killed, so that its blocks come
    /// back: those of the [rails](crate::guide::rails) that it is stuck on. The channel ends with its last rail. A peer that only owes
    /// its word has [`peer_timeout`](Self::peer_timeout) more where there are several rails: the word may be on one that is silent, and
    /// fails alone. At most a day. Default 500 ms.
    pub fn abort_grace(mut self, grace: Duration) -> Self {
        self.abort_grace = grace;
        self
    }

    /// Deadline of connecting and of each accepted handshake. Default 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Most bytes of one WRITE, at least 4096. The device's `max_msg_size` still holds. Default 2 MiB, and 64 MiB for a pool in memory
    /// of a GPU, which copies that much in the time that a few WRITEs cost.
    pub fn max_write(mut self, bytes: u32) -> Self {
        (self.max_write, self.max_write_chosen) = (bytes, true);
        self
    }

    /// Receives that this side posts on each queue pair for the peer's notifications, at least 1. Fewer where the
    /// device's queues are short. Default 128.
    pub fn data_credits(mut self, credits: u32) -> Self {
        self.data_credits = credits;
        self
    }

    /// Refuses every device that is not an RDMA device, so that nothing falls back to TCP unnoticed (K9). Default off;
    /// [`PathReport::transport`](super::PathReport::transport) says which way was taken in any case.
    pub fn require_rdma(mut self, require: bool) -> Self {
        self.require_rdma = require;
        self
    }

    /// Refuses every device that could also take another way: only a soft device with
    /// [`SoftTransport::Shm`](crate::device::SoftTransport::Shm) is left, whose connects fail where shared memory does not reach
    /// (K9). Default off.
    pub fn require_shared_memory(mut self, require: bool) -> Self {
        self.require_shared_memory = require;
        self
    }

    /// The path that the pool, memory of a GPU, has to take. One that cannot be taken is an error of
    /// [`KvEndpoint::new`](super::KvEndpoint::new), before anything is connected. Default [`GpuPath::Any`], which takes what there
    /// is; [`PathReport::gpu`](super::PathReport::gpu) says what it was.
    pub fn gpu_path(self, path: GpuPath) -> Self {
        self.gpu_paths(GpuPaths::only(path))
    }

    /// The paths that the pool, memory of a GPU, may take: to forbid some. As [`gpu_path`](Self::gpu_path), which is
    /// [`GpuPaths::only`], and in its place.
    pub fn gpu_paths(mut self, paths: GpuPaths) -> Self {
        self.gpu_paths = paths;
        self
    }

    /// How queue pairs are connected; both sides must use the same way. Default [`Bootstrap::Auto`].
    pub fn bootstrap(mut self, bootstrap: Bootstrap) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    /// Who may connect, and how this side shows a listener that it may. Both sides are configured alike. Default
    /// [`Admission::Local`]: anybody, but a listener takes loopback addresses only.
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// What one peer may have of this endpoint, and how often it may come. Default: no limits of its own.
    pub fn limits(mut self, limits: PeerLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Whether every rail has to be there: then one that cannot be had is an error of connecting, and one that fails ends the
    /// channel. Otherwise the channel goes on with the rails that are left, and [`PathReport`](super::PathReport) names the
    /// others. Each side has its own. Default off. See [rails](crate::guide::rails).
    pub fn strict_rails(mut self, strict: bool) -> Self {
        self.strict_rails = strict;
        self
    }

    /// When to try whether a rail that has failed can be used again: `first` after it has come to rest, then after twice as long
    /// each time, up to `most`. The side that connected the channel does that. At least a millisecond. Default 100 ms and 10 s.
    pub fn rail_probe(mut self, first: Duration, most: Duration) -> Self {
        self.rail_probe = (first, most);
        self
    }

    /// Checks the values, and fits the depths to the device.
    pub(crate) fn fit(mut self, caps: &Capabilities) -> Result<Self, DeviceError> {
        let bad = |what, got: String, expected: &str| {
            Err(DeviceError::Config { what, got, expected: expected.to_owned() })
        };
        if self.qps == 0 || self.qps > MAX_QPS {
            return bad("KvConfig::qps", self.qps.to_string(), "1 to 64 queue pairs");
        }
        if self.rail_probe.0 < Duration::from_millis(1) || self.rail_probe.1 < self.rail_probe.0 {
            let got = format!("{:?} and {:?}", self.rail_probe.0, self.rail_probe.1);
            return bad("KvConfig::rail_probe", got, "at least a millisecond, and then at least as long");
        }
        if self.limits.connects == Some(0) {
            return bad("PeerLimits::connects_per_second", "0".to_owned(), "at least 1");
        }
        if self.max_write < 4096 {
            return bad("KvConfig::max_write", self.max_write.to_string(), "at least 4096 bytes");
        }
        if self.data_credits == 0 {
            return bad("KvConfig::data_credits", "0".to_owned(), "at least 1");
        }
        for (what, value) in [
            ("KvConfig::heartbeat", self.heartbeat),
            ("KvConfig::deadline", self.deadline),
            ("KvConfig::abort_grace", self.abort_grace),
            ("KvConfig::connect_timeout", self.connect_timeout),
        ] {
            if value.is_zero() {
                return bad(what, "0".to_owned(), "a duration above zero");
            }
        }
        // What the protocol adds up. The other durations may be as long as one likes: they stand for "no limit".
        for (what, value) in [
            ("KvConfig::heartbeat", self.heartbeat),
            ("KvConfig::peer_timeout", self.peer_timeout),
            ("KvConfig::abort_grace", self.abort_grace),
        ] {
            if value > DAY {
                return bad(what, format!("{value:?}"), "at most a day");
            }
        }
        if self.peer_timeout < self.heartbeat * 2 {
            return bad(
                "KvConfig::peer_timeout",
                format!("{:?}", self.peer_timeout),
                "at least twice KvConfig::heartbeat, so that one lost answer is not a death",
            );
        }
        // Half of a short receive queue for each kind of credit (R4: one completion queue serves all of a channel).
        let (n, cqe) = (self.qps as u32, caps.max_cqe);
        let per_qp = cqe / n;
        self.send_depth = self.send_depth.min(caps.max_qp_wr).min(per_qp / 2);
        let recv = caps.max_qp_wr.min(per_qp - self.send_depth);
        self.control_credits = self.control_credits.min(recv / 2);
        self.data_credits = self.data_credits.min(recv - self.control_credits);
        if self.send_depth < 8 || self.control_credits < 8 || self.data_credits == 0 {
            return Err(DeviceError::Limit {
                what: "queue pairs of a channel",
                asked: n.into(),
                limit: (cqe / 24).into(),
                fix: "use fewer queue pairs: each needs 24 entries of the device's completion queue",
            });
        }
        Ok(self)
    }

    /// [`max_write`](Self::max_write) for a pool that is in memory of a GPU, or not.
    pub(crate) fn max_write_of(&self, device_memory: bool) -> u32 {
        if device_memory && !self.max_write_chosen { DEVICE_WRITE } else { self.max_write }
    }

    /// Receives posted on each queue pair.
    pub(crate) fn recv_depth(&self) -> u32 {
        self.data_credits + self.control_credits
    }
}
