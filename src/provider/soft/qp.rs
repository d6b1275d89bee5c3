//! Queue pairs: what they are, and what their owner sees. What they do is in `post.rs`, `service.rs`, `tx.rs`, `rx.rs`.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cq::CqShared;
use super::faults::QpFaults;
use super::frame::Preamble;
use super::landings::Landings;
use super::link::{self, Door, Doors, Link, Spare, Stream};
use super::member::QpShared;
use super::mr::Reach;
use super::reach::{self, Path};
use super::rx::{Refusal, Rx};
use super::shm::{ShmDoor, ShmLink};
use super::sq::SendQueue;
use super::staging::Staging;
use super::tuning::{DOORBELL_BYTES, MIN_PEER_TIMEOUT};
use super::tx::Tx;
use super::{SoftChannel, SoftCq, SoftDevice, SoftPd, SoftSrq, lock};
use crate::cuda::{GpuTraffic, GpuWays};
use crate::device::SoftTransport;
use crate::error::{PostError, QpError};
use crate::memory::{Exposed, Region};
use crate::provider::events::ObjectId;
use crate::provider::{Exposure, QpAddress, QpConnect, QpInit, QpState, RecvWr, WcStatus, WrChain};
use crate::random::{random_psn, random_u64};

/// A queue pair. Drop destroys it.
#[derive(Debug)]
pub(crate) struct SoftQp {
    shared: Arc<QpShared>,
    channel: Arc<SoftChannel>,
    address: QpAddress,
    id: ObjectId,
}

/// The queue pair itself.
#[derive(Debug)]
pub(super) struct QpInner {
    pub(super) device: Arc<SoftDevice>,
    pub(super) reach: Reach,
    pub(super) qp_num: u32,
    pub(super) send_cq: Arc<CqShared>,
    pub(super) recv_cq: Arc<CqShared>,
    pub(super) state: QpState,
    pub(super) init: QpInit,
    pub(super) link: Link,
    pub(super) path: Path,
    pub(super) sq: SendQueue,
    pub(super) rq: VecDeque<RecvWr>,
    /// Instead of `rq`.
    pub(super) srq: Option<Arc<SoftSrq>>,
    pub(super) tx: Tx,
    pub(super) rx: Rx,
    /// The socket may have something to read; and the kernel has said that its stream ends.
    pub(super) readable: bool,
    pub(super) ended: bool,
    /// The peer's request that we are refusing.
    pub(super) refusal: Option<Refusal>,
    /// How long a message waits for a receive. `None` is for ever.
    pub(super) rnr_wait: Option<Duration>,
    pub(super) max_responses: usize,
    pub(super) peer_timeout: Duration,
    /// Of the dial until it is answered, and of waiting for the peer to dial.
    pub(super) connect_by: Option<Instant>,
    /// That time has passed once, after the dial was accepted.
    pub(super) unanswered: bool,
    /// What the peer's first bytes must be.
    pub(super) expected: Preamble,
    /// Being destroyed: completions that find no room are dropped.
    pub(super) dying: bool,
    /// This slice has completed a receive: whoever takes that is likely to post, and the acknowledgement travels along.
    pub(super) announced: bool,
    pub(super) inline: Vec<u8>,
    /// Deregistrations of the device that this queue pair knows of.
    pub(super) withdrawals: u64,
    /// Of memory of GPUs.
    pub(super) landings: Landings,
    pub(super) staging: Staging,
    pub(super) gpu_ways: GpuWays,
    /// Faults to commit; `None` in ordinary life.
    pub(super) faults: Option<Box<QpFaults>>,
}

impl SoftPd {
    pub(crate) fn create_qp(
        self: &Arc<Self>,
        send: &SoftCq,
        recv: &SoftCq,
        init: QpInit,
    ) -> Result<SoftQp, QpError> {
        self.create_qp_on(send, recv, init, None)
    }

    pub(crate) fn create_qp_on(
        self: &Arc<Self>,
        send: &SoftCq,
        recv: &SoftCq,
        init: QpInit,
        srq: Option<&Arc<SoftSrq>>,
    ) -> Result<SoftQp, QpError> {
        let (send_cq, recv_cq) = (&send.shared, &recv.shared);
        let channel = &send_cq.channel;
        // The receive queue may be of another channel, as in verbs: the send queue's moves the data, and a completion
        // raises the event of the queue that it goes to.
        if !Arc::ptr_eq(&channel.device, &self.device) || !Arc::ptr_eq(&recv_cq.channel.device, &self.device)
        {
            return Err(QpError::ForeignResource { what: "the protection domain and the completion queue" });
        }
        let caps = &self.device.caps;
        for (what, asked, limit) in [
            ("send work requests of a queue pair", init.max_send_wr, caps.max_qp_wr),
            ("receive work requests of a queue pair", init.max_recv_wr, caps.max_qp_wr),
            ("elements of a send work request", init.max_send_sge, caps.max_send_sge),
            ("elements of a receive work request", init.max_recv_sge, caps.max_recv_sge),
            ("inline bytes of a send work request", init.max_inline, caps.max_inline),
        ] {
            if asked > limit {
                let (asked, limit) = (asked.into(), limit.into());
                return Err(QpError::Limit {
                    what,
                    asked,
                    limit,
                    fix: "ask for at most what capabilities() says",
                });
            }
        }
        let os = |what| move |source| QpError::Os { what, source };
        if self.device.fails_qp() {
            return Err(os("creating a queue pair")(io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        let transport = self.device.transport;
        let (mut soft_port, mut soft_local) = (0, 0);
        let mut doors = Doors { tcp: None, shm: None, spare: Spare::default() };
        let no_spare = "holding descriptors for the peer of a queue pair";
        if transport != SoftTransport::Shm {
            let door = Door::open(self.device.address);
            let (door, port) = door.map_err(os("listening for the peer of a queue pair"))?;
            doors.spare.hold(1, door.fd()).map_err(os(no_spare))?;
            (doors.tcp, soft_port) = (Some(door), port);
        }
        if transport != SoftTransport::Tcp {
            let door = ShmDoor::open();
            let (door, name) = door.map_err(os("listening for a peer of this host"))?;
            // The socket, and the rings that come by it.
            doors.spare.hold(2, door.fd()).map_err(os(no_spare))?;
            (doors.shm, soft_local) = (Some(door), name);
        }
        let key = random_u64().map_err(os("drawing the key of a queue pair"))?;
        let psn = random_psn().map_err(os("drawing a packet sequence number"))?;
        let qp_num = self.device.qp_numbers.take().ok_or(QpError::Limit {
            what: "queue pairs of a device",
            asked: 1 << 24,
            limit: (1 << 24) - 2,
            fix: "drop queue pairs that are not used",
        })?;
        let gid = link::gid(self.device.address);
        let address = QpAddress { qp_num, psn, lid: 0, gid, soft_port, soft_key: key, soft_local };
        // Each queue pair of a seed makes its own choices, the same ones in each run.
        let seed = self.device.seed ^ u64::from(qp_num).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let inner = QpInner {
            device: self.device.clone(),
            reach: Reach { pd: self.id, exposure: None },
            qp_num,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            state: QpState::Init,
            init,
            link: Link::Listening(doors),
            path: reach::before(transport),
            sq: SendQueue::new(caps.ordered, init.max_send_wr, seed),
            rq: VecDeque::with_capacity(init.max_recv_wr.min(1024) as usize),
            srq: srq.cloned(),
            tx: Tx::default(),
            rx: Rx::new(),
            readable: false,
            ended: false,
            refusal: None,
            rnr_wait: None,
            max_responses: 0,
            peer_timeout: MIN_PEER_TIMEOUT,
            connect_by: None,
            unanswered: false,
            expected: Preamble { target: qp_num, own: 0, key },
            dying: false,
            announced: false,
            inline: Vec::new(),
            withdrawals: 0,
            landings: Landings::default(),
            staging: Staging::default(),
            gpu_ways: GpuWays::default(),
            faults: self.device.faults_of(qp_num),
        };
        let shared = channel.join(|token| Arc::new(QpShared::new(token, inner)));
        self.device.cable().plug(&shared, channel);
        if let Some(srq) = srq {
            srq.join(&shared, channel);
        }
        let qp = SoftQp { shared, channel: channel.clone(), address, id: ObjectId::next() };
        // From here on a failure drops `qp`, which undoes all of it.
        let watch = |fd| channel.epoll().add_socket(fd, qp.shared.token);
        let registered = match &lock(&qp.shared.inner).link {
            Link::Listening(Doors { tcp, shm, .. }) => {
                let tcp = tcp.as_ref().map_or(Ok(()), |door| watch(door.fd()));
                tcp.and_then(|()| shm.as_ref().map_or(Ok(()), |door| watch(door.fd())))
            }
            _ => Ok(()),
        };
        registered.map_err(os("watching the listener of a queue pair"))?;
        Ok(qp)
    }
}

impl SoftQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.address.qp_num
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    pub(crate) fn address(&self) -> QpAddress {
        self.address
    }

    pub(crate) fn state(&self) -> QpState {
        lock(&self.shared.inner).state
    }

    /// What it runs over, `"tcp"` or `"shm"`, and why. Before it is connected, the name of the device's transport.
    pub(crate) fn path(&self) -> (&'static str, String) {
        let qp = lock(&self.shared.inner);
        let (transport, why) = (qp.path.0, &qp.path.1);
        match (qp.link.shm().and_then(ShmLink::why_not_read), qp.device.transport) {
            (None, _) => (transport, why.to_string()),
            (Some(not), SoftTransport::Shm) => {
                (transport, format!("{why}; memory that the program brought is refused: {not}"))
            }
            (Some(not), _) => (
                transport,
                format!("{why}; memory that the program brought travels through the queue: {not}"),
            ),
        }
    }

    /// Bytes of the largest WRITE of pages from memory of `lkey`, which the peer is lent; 0 where none goes now.
    pub(crate) fn takes_pages(&self, lkey: u32) -> u32 {
        lock(&self.shared.inner).takes_pages(lkey)
    }

    /// Why the peer cannot be given what is in `region`, memory of a GPU.
    pub(crate) fn why_not_send(&self, region: &Region<Exposed>) -> Option<String> {
        let memory = region.device_memory()?;
        let qp = lock(&self.shared.inner);
        qp.link.shm()?.why_not_give(memory).map(|why| why.to_string())
    }

    /// From here on the peer reaches what `exposure` says, and nothing else.
    pub(crate) fn expose(&self, exposure: Arc<dyn Exposure>) {
        let replaced = lock(&self.shared.inner).reach.exposure.replace(exposure);
        // Not under the lock.
        drop(replaced);
    }

    /// From here on memory of GPUs takes these ways only, where the peer is on this host.
    pub(crate) fn set_gpu_ways(&self, ways: GpuWays) {
        let mut qp = lock(&self.shared.inner);
        qp.gpu_ways = ways;
        if let Link::Up(Stream::Shm(link)) = &mut qp.link {
            link.set_ways(ways);
        }
    }

    /// Whether all that is being copied for the peer is exposed to it still.
    pub(crate) fn keeps_to_exposure(&self) -> bool {
        let qp = lock(&self.shared.inner);
        qp.landings.keeps_to(&qp.reach)
    }

    /// What went to and from memory of GPUs.
    pub(crate) fn gpu_traffic(&self) -> GpuTraffic {
        lock(&self.shared.inner).landings.traffic()
    }

    #[cfg(test)]
    pub(super) fn inspect<R>(&self, f: impl FnOnce(&QpInner) -> R) -> R {
        f(&lock(&self.shared.inner))
    }

    /// INIT→RTR→RTS by hand, where the profile lets it be done so.
    pub(crate) fn connect(&self, attr: &QpConnect) -> Result<(), QpError> {
        if let Some((cause, fix)) = self.channel.device.no_manual_connect() {
            return Err(QpError::ManualConnect {
                qp_num: self.qp_num(),
                what: "moving a queue pair to RTS",
                cause,
                fix,
                source: io::Error::from_raw_os_error(libc::EINVAL),
            });
        }
        self.for_cm().connect(attr)
    }

    /// The way in of the connection manager, which every profile has.
    pub(crate) fn for_cm(&self) -> SoftCmQp {
        SoftCmQp { shared: self.shared.clone(), channel: self.channel.clone(), address: self.address }
    }

    pub(crate) fn post_send(&self, chain: &WrChain) -> Result<(), PostError> {
        self.shared.with(&self.channel, |qp| {
            let posted = qp.post_chain(chain);
            // The doorbell, also for the part of a chain that was accepted.
            if matches!(qp.link, Link::Up(_)) {
                qp.meet();
                qp.transmit(DOORBELL_BYTES);
            }
            posted
        })
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        self.shared.with(&self.channel, |qp| {
            for (index, wr) in wrs.iter().enumerate() {
                if qp.state == QpState::Err {
                    qp.flush_recv(wr, WcStatus::Flushed);
                } else if qp.rq.len() >= qp.init.max_recv_wr as usize {
                    return Err(refused(index, libc::ENOMEM));
                } else {
                    qp.rq.push_back(*wr);
                }
            }
            if !wrs.is_empty() {
                qp.receive_posted();
            }
            Ok(())
        })
    }

    pub(crate) fn set_error(&self) -> Result<(), QpError> {
        self.shared.with(&self.channel, |qp| {
            qp.last_acks();
            qp.fail_and_close(None);
        });
        Ok(())
    }
}

/// A queue pair as the connection manager holds it. One that was destroyed meanwhile is in the error state.
#[derive(Debug)]
pub(crate) struct SoftCmQp {
    shared: Arc<QpShared>,
    channel: Arc<SoftChannel>,
    address: QpAddress,
}

impl SoftCmQp {
    pub(crate) fn address(&self) -> QpAddress {
        self.address
    }

    pub(crate) fn is_of(&self, device: &Arc<SoftDevice>) -> bool {
        Arc::ptr_eq(&self.channel.device, device)
    }

    /// INIT→RTR→RTS, also where only a connection manager may. Goes on as far as it can at once: on loopback a dial often
    /// succeeds here.
    pub(crate) fn connect(&self, attr: &QpConnect) -> Result<(), QpError> {
        self.shared.with(&self.channel, |qp| qp.connect(attr, &self.channel, self.shared.token))
    }
}

impl Drop for SoftQp {
    fn drop(&mut self) {
        {
            // The sockets close under the lock: nothing of the peer is written any more when this returns.
            let mut qp = lock(&self.shared.inner);
            qp.dying = true;
            qp.last_acks();
            qp.fail_and_close(None);
            qp.hang_up();
            self.shared.publish(&qp);
        }
        self.channel.leave(self.shared.token);
        self.channel.device.qp_numbers.give_back(self.address.qp_num);
    }
}

pub(super) fn refused(index: usize, errno: i32) -> PostError {
    PostError { index, source: io::Error::from_raw_os_error(errno) }
}

impl QpInner {
    /// The next receive, of its own queue or of the one that it shares.
    pub(super) fn next_receive(&mut self) -> Option<RecvWr> {
        match &self.srq {
            Some(srq) => srq.take(),
            None => self.rq.pop_front(),
        }
    }

    /// What waited for this receive is at hand, or in the socket.
    pub(super) fn receive_posted(&mut self) {
        if self.rx.not_ready.take().is_some() {
            self.readable = true;
        }
    }
}
