//! Queue pairs: creation, connection, posts, service by the channel, errors and the end.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::cq::CqShared;
use super::frame::{Nak, Preamble};
use super::link::{self, Door, Knock, Link};
use super::rx::{Refusal, Rx};
use super::sq::{Cause, SendQueue};
use super::sys::{self, Readiness};
use super::tuning::{DOORBELL_BYTES, DRAIN_BYTES, MIN_PEER_TIMEOUT, QP_SLICE_BYTES};
use super::tx::Tx;
use super::{SoftChannel, SoftCq, SoftDevice, SoftPd, lock};
use crate::error::{PostError, QpError};
use crate::provider::{
    AccessFlags, Cqe, QpAddress, QpConnect, QpInit, QpState, RecvWr, SendOp, SendWr, Sge, WcOpcode, WcStatus,
    WrChain,
};

/// A queue pair. Drop destroys it.
#[derive(Debug)]
pub(crate) struct SoftQp {
    shared: Arc<QpShared>,
    channel: Arc<SoftChannel>,
    address: QpAddress,
}

/// How a channel has to look after a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not at all: not connected yet, or over.
    Idle,
    /// By edges only.
    Waiting,
    /// Connected: by edges, or by asking its socket.
    Flowing,
}

/// What a channel sees of a queue pair without its lock.
#[derive(Debug)]
pub(super) struct QpShared {
    pub(super) token: u64,
    base: Instant,
    /// Readiness that epoll has reported since the last service.
    edges: AtomicU8,
    /// Work that needs no edge. With the next two, written under the lock.
    work: AtomicBool,
    phase: AtomicU8,
    /// Nanoseconds after `base`; 0 is none.
    deadline: AtomicU64,
    inner: Mutex<QpInner>,
}

const READABLE: u8 = 1;
const WRITABLE: u8 = 2;
const ENDED: u8 = 4;

/// The queue pair itself. `tx.rs` and `rx.rs` have its other halves.
#[derive(Debug)]
pub(super) struct QpInner {
    pub(super) device: Arc<SoftDevice>,
    pub(super) pd: u32,
    pub(super) qp_num: u32,
    pub(super) send_cq: Arc<CqShared>,
    pub(super) recv_cq: Arc<CqShared>,
    state: QpState,
    init: QpInit,
    pub(super) link: Link,
    pub(super) sq: SendQueue,
    pub(super) rq: VecDeque<RecvWr>,
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
    peer_timeout: Duration,
    /// Of the dial, and of waiting for the peer to dial.
    connect_by: Option<Instant>,
    /// What the peer's first bytes must be.
    expected: Preamble,
    own: QpAddress,
    /// Being destroyed: completions that find no room are dropped.
    dying: bool,
    inline: Vec<u8>,
}

impl SoftPd {
    pub(crate) fn create_qp(
        self: &Arc<Self>,
        send: &SoftCq,
        recv: &SoftCq,
        init: QpInit,
    ) -> Result<SoftQp, QpError> {
        let (send_cq, recv_cq) = (&send.shared, &recv.shared);
        let channel = &send_cq.channel;
        if !Arc::ptr_eq(channel, &recv_cq.channel) {
            return Err(QpError::ForeignResource {
                what: "the completion channels of the two completion queues",
            });
        }
        if !Arc::ptr_eq(&channel.device, &self.device) {
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
        let (door, port) =
            Door::open(self.device.address).map_err(os("listening for the peer of a queue pair"))?;
        let key = sys::random_u64().map_err(os("drawing the key of a queue pair"))?;
        let psn = sys::random_u64().map_err(os("drawing a packet sequence number"))? as u32 & 0xff_ffff;
        let qp_num = self.device.qp_numbers.take().ok_or(QpError::Limit {
            what: "queue pairs of a device",
            asked: 1 << 24,
            limit: (1 << 24) - 2,
            fix: "drop queue pairs that are not used",
        })?;
        let gid = link::gid(self.device.address);
        let address = QpAddress { qp_num, psn, lid: 0, gid, soft_port: port, soft_key: key };
        // Each queue pair of a seed makes its own choices, the same ones in each run.
        let seed = self.device.seed ^ u64::from(qp_num).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let inner = QpInner {
            device: self.device.clone(),
            pd: self.id,
            qp_num,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            state: QpState::Init,
            init,
            link: Link::Listening(door),
            sq: SendQueue::new(caps.ordered, init.max_send_wr, seed),
            rq: VecDeque::with_capacity(init.max_recv_wr.min(1024) as usize),
            tx: Tx::default(),
            rx: Rx::new(),
            readable: false,
            ended: false,
            refusal: None,
            rnr_wait: None,
            max_responses: 0,
            peer_timeout: MIN_PEER_TIMEOUT,
            connect_by: None,
            expected: Preamble { target: qp_num, own: 0, key },
            own: address,
            dying: false,
            inline: Vec::new(),
        };
        let shared = channel.join(|token| {
            Arc::new(QpShared {
                token,
                base: Instant::now(),
                edges: AtomicU8::new(0),
                work: AtomicBool::new(false),
                phase: AtomicU8::new(Phase::Idle as u8),
                deadline: AtomicU64::new(0),
                inner: Mutex::new(inner),
            })
        });
        let qp = SoftQp { shared, channel: channel.clone(), address };
        // From here on a failure drops `qp`, which undoes all of it.
        let registered = match &lock(&qp.shared.inner).link {
            Link::Listening(door) => channel.epoll().add_socket(door.fd(), qp.shared.token),
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

    pub(crate) fn address(&self) -> QpAddress {
        self.address
    }

    pub(crate) fn state(&self) -> QpState {
        lock(&self.shared.inner).state
    }

    /// Goes on as far as it can at once: on loopback a dial often succeeds here.
    pub(crate) fn connect(&self, attr: &QpConnect) -> Result<(), QpError> {
        self.shared.with(&self.channel, |qp| qp.connect(attr, &self.channel, self.shared.token))
    }

    pub(crate) fn post_send(&self, chain: &WrChain) -> Result<(), PostError> {
        self.shared.with(&self.channel, |qp| {
            let posted = qp.post_chain(chain);
            // The doorbell, also for the part of a chain that was accepted.
            if matches!(qp.link, Link::Up(_)) {
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
            if !wrs.is_empty() && qp.rx.not_ready.take().is_some() {
                // What waited for this receive is at hand, or in the socket.
                qp.readable = true;
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

impl Drop for SoftQp {
    fn drop(&mut self) {
        {
            // The sockets close under the lock: nothing of the peer is written any more when this returns.
            let mut qp = lock(&self.shared.inner);
            qp.dying = true;
            qp.last_acks();
            qp.fail_and_close(None);
            qp.link = Link::Down;
            self.shared.publish(&qp);
        }
        self.channel.leave(self.shared.token);
        self.channel.device.qp_numbers.give_back(self.address.qp_num);
    }
}

fn refused(index: usize, errno: i32) -> PostError {
    PostError { index, source: io::Error::from_raw_os_error(errno) }
}

impl QpShared {
    /// Works on the queue pair, then shows the channel what is left to do, and wakes who sleeps on it.
    fn with<R>(&self, channel: &SoftChannel, f: impl FnOnce(&mut QpInner) -> R) -> R {
        let mut qp = lock(&self.inner);
        let r = f(&mut qp);
        self.publish(&qp);
        drop(qp);
        if self.has_work() || self.deadline().is_some() {
            channel.kick();
        }
        r
    }

    fn publish(&self, qp: &QpInner) {
        let nanos = |at: Instant| (at.saturating_duration_since(self.base).as_nanos() as u64).max(1);
        self.work.store(qp.has_work(), Ordering::SeqCst);
        self.phase.store(qp.phase() as u8, Ordering::SeqCst);
        self.deadline.store(qp.deadline().map_or(0, nanos), Ordering::SeqCst);
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            p if p == Phase::Flowing as u8 => Phase::Flowing,
            p if p == Phase::Waiting as u8 => Phase::Waiting,
            _ => Phase::Idle,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        self.work.load(Ordering::SeqCst) || self.edges.load(Ordering::SeqCst) != 0
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.deadline.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(self.base + Duration::from_nanos(nanos)),
        }
    }

    pub(super) fn add_edges(&self, ready: Readiness) {
        let mut edges = 0;
        for (is, bit) in [(ready.readable(), READABLE), (ready.writable(), WRITABLE), (ready.ended(), ENDED)]
        {
            edges |= if is { bit } else { 0 };
        }
        self.edges.fetch_or(edges, Ordering::SeqCst);
    }

    /// A turn in a progress slice: `direct` asks the socket without an edge, `due` says that a deadline has passed,
    /// `eager` that nobody may come again soon. Returns the bytes moved.
    pub(super) fn serve(&self, channel: &SoftChannel, direct: bool, due: bool, eager: bool) -> usize {
        let mut qp = lock(&self.inner);
        // After the lock: an edge that comes later stays for the next turn.
        let edges = self.edges.swap(0, Ordering::SeqCst);
        let deadline = self.deadline();
        let moved = qp.serve(edges, direct, due, eager, channel, self.token);
        self.publish(&qp);
        drop(qp);
        // Found by a slice after the arm, which has set the timer for other deadlines.
        let new_deadline = self.deadline().is_some() && self.deadline() != deadline;
        if self.has_work() || new_deadline {
            channel.kick();
        }
        moved
    }
}

impl QpInner {
    fn phase(&self) -> Phase {
        match self.link {
            Link::Up(_) if !self.tx.writable && self.wants_to_send() => Phase::Waiting,
            Link::Up(_) => Phase::Flowing,
            Link::Listening(_) if self.state == QpState::Init => Phase::Idle,
            Link::Listening(_) | Link::Dialing(_) | Link::Draining { .. } => Phase::Waiting,
            Link::Down => Phase::Idle,
        }
    }

    fn has_work(&self) -> bool {
        match self.link {
            Link::Up(_) => {
                let reads = self.readable && self.rx.not_ready.is_none() && self.refusal.is_none();
                let writes = self.tx.writable && !self.tx.dead && (self.tx.ack_due || self.wants_to_send());
                reads || writes || self.tx.dead
            }
            Link::Draining { .. } => self.readable,
            // Come again: see `Knock::Again`.
            Link::Listening(_) => self.readable && self.state == QpState::Rts,
            Link::Dialing(_) | Link::Down => false,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self.link {
            Link::Up(_) => self.rx.not_ready.flatten(),
            _ => self.connect_by,
        }
    }

    fn connect(&mut self, attr: &QpConnect, channel: &SoftChannel, token: u64) -> Result<(), QpError> {
        let state = match self.state {
            QpState::Init => None,
            QpState::Rts => Some("RTS"),
            QpState::Err => Some("ERR"),
        };
        if let Some(state) = state {
            let fix = "a queue pair connects once; create a new one";
            return Err(QpError::State { qp_num: self.qp_num, state, wanted: "INIT to RTS", fix });
        }
        // 4.096 us * 2^timeout, a retry each; a time-out of 0 is for ever, which TCP bounds by itself.
        let once = Duration::from_nanos(4096u64 << attr.timeout.min(31));
        self.peer_timeout = (once * u32::from(attr.retry_cnt).max(1)).max(MIN_PEER_TIMEOUT);
        self.rnr_wait =
            (attr.rnr_retry < 7).then(|| rnr_timer(attr.min_rnr_timer) * (u32::from(attr.rnr_retry) + 1));
        self.sq.set_max_reads(attr.max_rd_atomic);
        self.max_responses = usize::from(attr.max_dest_rd_atomic);
        let remote = attr.remote;
        self.expected.own = remote.qp_num;
        self.tx.start(&Preamble { target: remote.qp_num, own: self.qp_num, key: remote.soft_key });
        self.connect_by = Some(Instant::now() + self.peer_timeout);
        if !attr.active {
            self.state = QpState::Rts;
            // Somebody may have knocked already.
            self.readable = true;
            self.progress_link(channel, token);
            return Ok(());
        }
        let to = SocketAddr::new(link::from_gid(remote.gid), remote.soft_port);
        let socket = match link::dial(self.device.address, to) {
            Ok(socket) => socket,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                self.state = QpState::Rts;
                self.connection_lost();
                return Ok(());
            }
            Err(source) => return Err(QpError::Os { what: "dialling the peer of a queue pair", source }),
        };
        let watched = channel.epoll().add_socket(socket.as_fd(), token);
        watched.map_err(|source| QpError::Os { what: "watching the socket of a queue pair", source })?;
        self.state = QpState::Rts;
        self.link = Link::Dialing(socket);
        self.progress_link(channel, token);
        Ok(())
    }

    /// Brings the connection up, if it can be now.
    fn progress_link(&mut self, channel: &SoftChannel, token: u64) {
        match &mut self.link {
            Link::Listening(door) if self.state == QpState::Rts => {
                match door.visit(&self.expected, channel.epoll(), token) {
                    // A new edge-triggered registration reports what is there already.
                    Knock::Peer(socket) => self.connected(socket),
                    Knock::Nobody => self.readable = false,
                    Knock::Again => self.readable = true,
                }
            }
            Link::Dialing(socket) => match link::dialed(socket) {
                Ok(false) => {}
                Ok(true) => {
                    self.rx.expect_preamble(self.expected);
                    if let Link::Dialing(socket) = std::mem::replace(&mut self.link, Link::Down) {
                        self.connected(socket);
                        // The peer lets us in at our first bytes: they do not wait for a request.
                        self.tx.ack_due = true;
                        self.transmit(1);
                    }
                }
                Err(_) => self.connection_lost(),
            },
            _ => {}
        }
    }

    fn connected(&mut self, socket: Socket) {
        link::tune(&socket, self.peer_timeout);
        self.link = Link::Up(socket);
        self.connect_by = None;
        self.readable = true;
    }

    fn post_chain(&mut self, chain: &WrChain) -> Result<(), PostError> {
        if self.state == QpState::Init {
            return Err(refused(0, libc::EINVAL));
        }
        for (index, wr) in chain.wrs.iter().enumerate() {
            self.post_one(wr, chain.sges_of(wr)).map_err(|errno| refused(index, errno))?;
        }
        Ok(())
    }

    fn post_one(&mut self, wr: &SendWr, sges: &[Sge]) -> Result<(), i32> {
        let caps = &self.device.caps;
        let total: u64 = sges.iter().map(|s| u64::from(s.len)).sum();
        let read = matches!(wr.op, SendOp::Read { .. });
        if sges.len() > self.init.max_send_sge as usize
            || (caps.all_signaled && !wr.signaled)
            || (wr.inline && (read || total > self.init.max_inline.into()))
        {
            return Err(libc::EINVAL);
        }
        if self.state == QpState::Err {
            let opcode = match wr.op {
                SendOp::Send { .. } => WcOpcode::Send,
                SendOp::Write { .. } => WcOpcode::Write,
                SendOp::Read { .. } => WcOpcode::Read,
            };
            let (status, qp_num) = (WcStatus::Flushed, self.qp_num);
            self.send_cq.push(Cqe { wr_id: wr.wr_id, qp_num, status, opcode, ..Cqe::default() });
            return Ok(());
        }
        if self.sq.is_full() {
            return Err(libc::ENOMEM);
        }
        let mut failure = (total > caps.max_msg_size).then_some(WcStatus::LocalLength);
        if failure.is_none() && !wr.inline {
            let access = if read { AccessFlags::LOCAL_WRITE } else { AccessFlags::default() };
            let guard = self.device.mrs.read();
            let covered = |s: &Sge| {
                s.len == 0 || guard.resolve(s.lkey, self.pd, s.addr, s.len.into(), access).is_some()
            };
            failure = (!sges.iter().all(covered)).then_some(WcStatus::LocalProtection);
        }
        if wr.inline && failure.is_none() {
            self.copy_inline(sges);
            self.sq.push(wr.wr_id, wr.op, wr.signaled, total as u32, &[], Some(&self.inline));
            return Ok(());
        }
        let msn = self.sq.push(wr.wr_id, wr.op, wr.signaled, total.min(u32::MAX.into()) as u32, sges, None);
        if let Some(status) = failure {
            // Found at the post, where a device finds it when it comes to the request. What was posted before is
            // flushed, which says as little about whether the peer has it.
            self.fail_and_close(Some(Cause { msn: Some(msn), status, vendor_err: 0 }));
        }
        Ok(())
    }

    fn copy_inline(&mut self, sges: &[Sge]) {
        self.inline.clear();
        for s in sges.iter().filter(|s| s.len > 0) {
            let from = std::ptr::with_exposed_provenance::<u8>(s.addr as usize);
            self.inline.reserve(s.len as usize);
            // SAFETY: the boundary's contract for an inline request: its elements are readable memory of the poster
            // during the post. `reserve` made room for `s.len` bytes, which the copy initialises.
            unsafe {
                let to = self.inline.as_mut_ptr().add(self.inline.len());
                std::ptr::copy_nonoverlapping(from, to, s.len as usize);
                self.inline.set_len(self.inline.len() + s.len as usize);
            }
        }
    }

    fn serve(
        &mut self,
        edges: u8,
        direct: bool,
        due: bool,
        eager: bool,
        channel: &SoftChannel,
        token: u64,
    ) -> usize {
        self.readable |= edges & READABLE != 0;
        self.ended |= edges & ENDED != 0;
        let mut moved = 0;
        if matches!(self.link, Link::Listening(_) | Link::Dialing(_)) {
            self.progress_link(channel, token);
            if due && matches!(self.link, Link::Listening(_) | Link::Dialing(_)) {
                self.connect_overdue();
            }
        }
        if matches!(self.link, Link::Up(_)) {
            self.tx.writable |= edges & WRITABLE != 0;
            self.readable |= direct;
            self.sq.begin_slice();
            moved += self.transmit(QP_SLICE_BYTES);
        }
        if matches!(self.link, Link::Up(_)) {
            moved += self.receive(QP_SLICE_BYTES);
            if due && self.rnr_overdue() {
                self.refuse_not_ready();
            }
        }
        if matches!(self.link, Link::Up(_)) {
            if self.wants_to_send() || (eager && self.tx.ack_due) {
                moved += self.transmit(QP_SLICE_BYTES);
            }
            if self.tx.dead && (self.refusal.is_some() || self.rx.not_ready.is_some()) {
                // Nothing more is read, so that the read cannot find the end.
                self.connection_lost();
            }
        }
        if matches!(self.link, Link::Draining { .. }) {
            self.drain();
        }
        moved
    }

    fn connect_overdue(&mut self) {
        let now = Instant::now();
        if self.connect_by.is_some_and(|by| by <= now) {
            if matches!(self.link, Link::Listening(_)) && self.sq.is_idle() {
                // Nothing was asked of the peer: like a device, wait on.
                self.connect_by = Some(now + self.peer_timeout);
            } else {
                self.connection_lost();
            }
        }
    }

    fn rnr_overdue(&self) -> bool {
        self.rx.not_ready.flatten().is_some_and(|by| by <= Instant::now())
    }

    fn refuse_not_ready(&mut self) {
        if let Some(msn) = self.rx.waiting_msn() {
            self.refusal = Some(Refusal { msn, nak: Nak::RnrExceeded, recv: None });
        }
    }

    /// The refusal has been sent.
    pub(super) fn last_words_sent(&mut self) {
        let link = std::mem::replace(&mut self.link, Link::Down);
        self.fail(None);
        if let Link::Up(socket) = link {
            // The peer reads the refusal before the end, and closes.
            if socket.shutdown(std::net::Shutdown::Write).is_ok() {
                self.readable = true;
                self.link = Link::Draining { socket, left: DRAIN_BYTES };
            }
        }
    }

    fn drain(&mut self) {
        let Link::Draining { socket, left } = &mut self.link else { return };
        let mut budget = QP_SLICE_BYTES;
        while budget > 0 {
            match sys::recv(socket.as_fd(), self.rx.scratch()) {
                Ok(n) if n > 0 && *left > n => {
                    *left -= n;
                    budget = budget.saturating_sub(n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    self.link = Link::Down;
                    return;
                }
            }
        }
    }

    /// The peer does not answer: its socket is closed, was reset, or could not be reached.
    pub(super) fn connection_lost(&mut self) {
        self.fail_and_close(Some(Cause::oldest(WcStatus::RetryExceeded)));
    }

    /// Before an orderly end: what was executed is acknowledged, as a NIC would have done.
    fn last_acks(&mut self) {
        if matches!(self.link, Link::Up(_)) && self.tx.ack_due && self.refusal.is_none() {
            self.transmit(1);
        }
    }

    pub(super) fn fail_and_close(&mut self, cause: Option<Cause>) {
        if self.state != QpState::Err {
            self.link = Link::Down;
            self.fail(cause);
        }
    }

    /// To ERR: every outstanding request completes. Nothing touches their memory any more.
    fn fail(&mut self, cause: Option<Cause>) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.connect_by = None;
        self.tx = Tx::default();
        let (cq, dying) = (&self.send_cq, self.dying);
        self.sq.fail(self.qp_num, cause, |cqe| if dying { cq.push_stale(cqe) } else { cq.push(cqe) });
        // The receive of the refused message says what was wrong with it; those of unfinished messages come next.
        let refused = self.refusal.take().and_then(|r| r.recv);
        let unfinished: Vec<RecvWr> = self.rx.abandon().collect();
        for wr in unfinished {
            self.flush_recv(&wr, WcStatus::Flushed);
        }
        if let Some((wr, status)) = refused {
            self.flush_recv(&wr, status);
        }
        while let Some(wr) = self.rq.pop_front() {
            self.flush_recv(&wr, WcStatus::Flushed);
        }
    }

    fn flush_recv(&self, wr: &RecvWr, status: WcStatus) {
        let cqe =
            Cqe { wr_id: wr.wr_id, qp_num: self.qp_num, status, opcode: WcOpcode::Recv, ..Cqe::default() };
        if self.dying { self.recv_cq.push_stale(cqe) } else { self.recv_cq.push(cqe) }
    }
}

/// The IB encoding of the RNR NAK timer.
fn rnr_timer(code: u8) -> Duration {
    const MICROS: [u32; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1_280, 1_920, 2_560, 3_840,
        5_120, 7_680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
        327_680, 491_520,
    ];
    Duration::from_micros(MICROS[usize::from(code & 31)].into())
}
