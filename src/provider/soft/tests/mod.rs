//! Two queue pairs in one process, driven by polling: over loopback, and over shared memory.

/// Tests of the engine's contract, once over each transport: each is a function that is given one.
macro_rules! over_both_transports {
    ($($name:ident),* $(,)?) => { $(
        mod $name {
            use crate::device::SoftTransport;

            #[test]
            fn tcp() {
                super::$name(SoftTransport::Tcp);
            }

            #[test]
            fn shm() {
                super::$name(SoftTransport::Shm);
            }
        }
    )* };
}

mod atomics;
#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod events;
mod failures;
mod faults;
mod hostile;
mod profiles;
mod shared;
mod shm;
mod shm_hostile;
#[cfg(feature = "cuda")]
mod shm_staging;
#[cfg(feature = "cuda")]
mod staging;
mod unordered;

use std::time::{Duration, Instant};

use crate::device::{Profile, SoftConfig, SoftTransport};
use crate::memory::{Exposed, Memory, Prefault, Region};
use crate::provider::soft::SoftDevice;
use crate::provider::{
    AccessFlags, Channel, Cq, Cqe, Device, Pd, Qp, QpConnect, QpInit, QpState, RecvWr, SendOp, Sge, WcStatus,
    WrChain,
};

const DEADLINE: Duration = Duration::from_secs(60);
const ALL: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_READ).union(AccessFlags::REMOTE_WRITE);

/// One side: its own device, as another process would have.
struct Side {
    pd: Pd,
    channel: Channel,
    cq: Cq,
    device: Device,
    seen: Vec<Cqe>,
}

impl Side {
    fn new(on: SoftTransport, profile: Profile) -> Self {
        Self::of(on, &SoftConfig::new().profile(profile).seed(7))
    }

    fn of(on: SoftTransport, config: &SoftConfig) -> Self {
        let device = Device::Soft(SoftDevice::open(&config.clone().transport(on)).unwrap());
        let pd = device.alloc_pd().unwrap();
        let channel = device.create_channel().unwrap();
        let cq = channel.create_cq(device.capabilities().max_cqe.min(65_536)).unwrap();
        Self { pd, channel, cq, device, seen: Vec::new() }
    }

    fn qp(&self) -> Qp {
        let caps = self.device.capabilities();
        let wr = caps.max_qp_wr.min(8192);
        let (max_send_sge, max_recv_sge, max_inline) =
            (caps.max_send_sge, caps.max_recv_sge, caps.max_inline);
        let init = QpInit { max_send_wr: wr, max_recv_wr: wr, max_send_sge, max_recv_sge, max_inline };
        self.pd.create_qp(&self.cq, &self.cq, init).unwrap()
    }

    fn region(&self, len: u64, access: AccessFlags) -> Region<Exposed> {
        let memory = Memory::anonymous(len).prefault(Prefault::No).map_for(&self.pd).unwrap();
        Region::register(&self.pd, memory, access).unwrap()
    }

    /// One poll; what came is in `seen`.
    fn poll(&mut self) -> usize {
        let mut out = [Cqe::default(); 32];
        let n = self.cq.poll(&mut out).unwrap();
        self.seen.extend_from_slice(&out[..n]);
        n
    }

    fn take(&mut self) -> Vec<Cqe> {
        std::mem::take(&mut self.seen)
    }
}

fn attributes(remote: &Qp, active: bool) -> QpConnect {
    QpConnect {
        remote: remote.address(),
        path_mtu: 1024,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 6,
        // 491 ms, so that a receive that a test posts late is in time.
        min_rnr_timer: 31,
        active,
    }
}

/// By hand, also where a profile leaves that to a connection manager.
fn bring_up(qp: &Qp, attr: &QpConnect) {
    match qp {
        Qp::Soft(qp) => qp.for_cm().connect(attr).unwrap(),
        #[cfg(feature = "verbs")]
        Qp::Verbs(_) => unreachable!("these tests open soft devices"),
    }
}

/// Two connected sides. `a` dials.
struct Pair {
    qa: Option<Qp>,
    qb: Option<Qp>,
    a: Side,
    b: Side,
}

impl Pair {
    fn new(on: SoftTransport, profile: Profile) -> Self {
        Self::with(on, profile, |_| {})
    }

    fn with(on: SoftTransport, profile: Profile, change: impl Fn(&mut QpConnect)) -> Self {
        Self::join(Side::new(on, profile), Side::new(on, profile), change)
    }

    /// With configurations as `LANDFALL_SOFT` has them.
    fn of(on: SoftTransport, a: &str, b: &str) -> Self {
        let side = |text: &str| Side::of(on, &text.parse().unwrap());
        Self::join(side(a), side(b), |_| {})
    }

    fn join(a: Side, b: Side, change: impl Fn(&mut QpConnect)) -> Self {
        let (qa, qb) = (a.qp(), b.qp());
        let (mut of_a, mut of_b) = (attributes(&qb, true), attributes(&qa, false));
        change(&mut of_a);
        change(&mut of_b);
        bring_up(&qb, &of_b);
        bring_up(&qa, &of_a);
        Self { qa: Some(qa), qb: Some(qb), a, b }
    }

    fn qa(&self) -> &Qp {
        self.qa.as_ref().unwrap()
    }

    fn qb(&self) -> &Qp {
        self.qb.as_ref().unwrap()
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !done(self) {
            self.a.poll();
            self.b.poll();
            assert!(
                Instant::now() < deadline,
                "not in time: {what}; a {:?}, b {:?}",
                self.a.seen,
                self.b.seen
            );
        }
    }

    /// Both have heard of each other, so that what one of them posts goes out at once.
    fn meet(&mut self) {
        let region = self.a.region(8, ALL);
        post(self.qb(), 0, read_from(&region, 0), &[]);
        post(self.qa(), 0, read_from(&region, 0), &[]);
        self.until("both to meet", |p| !p.a.seen.is_empty() && !p.b.seen.is_empty());
        self.a.seen.clear();
        self.b.seen.clear();
    }

    #[cfg(feature = "cuda")]
    fn take_all(&mut self) {
        self.a.take();
        self.b.take();
    }

    /// Polls until both sides have seen that many completions.
    fn wait(&mut self, a: usize, b: usize) -> (Vec<Cqe>, Vec<Cqe>) {
        self.until("completions", |p| p.a.seen.len() >= a && p.b.seen.len() >= b);
        let (a_seen, b_seen) = (self.a.take(), self.b.take());
        assert_eq!((a_seen.len(), b_seen.len()), (a, b), "a {a_seen:?}, b {b_seen:?}");
        (a_seen, b_seen)
    }

    /// Polls a while, to show that nothing more comes.
    fn quiet(&mut self) {
        for _ in 0..200 {
            self.a.poll();
            self.b.poll();
        }
        assert!(self.a.seen.is_empty() && self.b.seen.is_empty(), "a {:?}, b {:?}", self.a.seen, self.b.seen);
    }
}

fn sge(region: &Region<Exposed>, offset: u64, len: u64) -> Sge {
    let s = region.slice(offset..offset + len).unwrap().sge();
    Sge { addr: s.addr, len: s.len as u32, lkey: s.lkey }
}

fn write_to(region: &Region<Exposed>, offset: u64, imm: Option<u32>) -> SendOp {
    let remote = region.remote();
    SendOp::Write { remote_addr: remote.addr + offset, rkey: remote.rkey, imm }
}

fn read_from(region: &Region<Exposed>, offset: u64) -> SendOp {
    let remote = region.remote();
    SendOp::Read { remote_addr: remote.addr + offset, rkey: remote.rkey }
}

fn post(qp: &Qp, wr_id: u64, op: SendOp, sges: &[Sge]) {
    let mut chain = WrChain::default();
    chain.push(wr_id, op, sges, true, false);
    qp.post_send(&chain).unwrap();
}

fn recv(qp: &Qp, wr_id: u64, sge: Option<Sge>) {
    qp.post_recv(&[RecvWr { wr_id, sge }]).unwrap();
}

/// Bytes that differ by position and by message.
fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| ((i.wrapping_mul(0x9e37_79b9) ^ salt.wrapping_mul(0x85eb_ca6b)) >> 7) as u8)
        .collect()
}

fn fill(region: &Region<Exposed>, offset: u64, bytes: &[u8]) {
    region.slice(..).unwrap().copy_in(offset, bytes).unwrap();
}

fn contents(region: &Region<Exposed>, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    region.slice(..).unwrap().copy_out(offset, &mut out).unwrap();
    out
}

fn ids(cqes: &[Cqe]) -> Vec<(u64, WcStatus)> {
    cqes.iter().map(|c| (c.wr_id, c.status)).collect()
}
