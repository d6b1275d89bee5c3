//! A queue pair at work: it connects, takes its turns in progress slices, fails and ends.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::SoftChannel;
use super::frame::{Nak, Preamble};
use super::link::{self, Knock, Link, Stream};
use super::member::{ENDED, Phase, READABLE, WRITABLE};
use super::qp::QpInner;
use super::reach::{self, Dialed};
use super::rx::{Refusal, Stop};
use super::shm::{WANTS_BYTES, WANTS_DONE, WANTS_END, WANTS_ROOM};
use super::sq::Cause;
use super::sys;
use super::tuning::{ACK_BYTES, ACK_MESSAGES, DRAIN_BYTES, MIN_PEER_TIMEOUT, QP_SLICE_BYTES};
use super::tx::Tx;
use crate::error::QpError;
use crate::provider::{Cqe, QpConnect, QpState, RecvWr, WcOpcode, WcStatus};

impl QpInner {
    pub(super) fn phase(&self) -> Phase {
        match self.link {
            Link::Up(Stream::Shm(_)) | Link::Leaving(_) => Phase::Shared,
            Link::Up(_) if !self.tx.writable && self.wants_to_send() => Phase::Waiting,
            Link::Up(_) => Phase::Flowing,
            Link::Listening(_) if self.state == QpState::Init => Phase::Idle,
            Link::Listening(_) | Link::Dialing(_) | Link::Draining { .. } => Phase::Waiting,
            Link::Down => Phase::Idle,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        match self.link {
            Link::Up(_) => {
                let (paced, stalled) = self.held();
                let reads = self.readable && self.may_read(stalled);
                let held = paced || self.tx.dead || self.tx.is_waiting();
                let writes = self.tx.writable && !held && (self.tx.ack_due || self.wants_to_send());
                let unread = matches!(&self.link, Link::Up(Stream::Shm(link)) if link.is_unread());
                reads || writes || unread || self.tx.dead
            }
            Link::Leaving(ref link) => link.is_unread(),
            Link::Draining { .. } => self.readable,
            // Come again: see `Knock::Again`.
            Link::Listening(_) => self.readable && self.state == QpState::Rts,
            Link::Dialing(_) | Link::Down => false,
        }
    }

    /// What has come can be executed.
    pub(super) fn may_read(&self, stalled: bool) -> bool {
        let room = !self.landings.is_full(self.device.caps.ordered);
        let waits = self.landings.waits_for_driver();
        !stalled && room && !waits && self.rx.not_ready.is_none() && self.refusal.is_none()
    }

    /// There is nothing to say but how far we are, and more of the peer's payload is at hand. In shared memory that would wake a
    /// peer that sleeps each time, which costs as much as a copy of 100 KiB; so it is said after more of it, or when nothing is
    /// left to copy. Over TCP it is said at once: what is at hand is not known there.
    fn acknowledges_later(&self) -> bool {
        let Link::Up(Stream::Shm(link)) = &self.link else { return false };
        let (messages, bytes) = self.tx.owed;
        messages < ACK_MESSAGES
            && bytes < ACK_BYTES
            && self.may_read(self.held().1)
            && !self.wants_to_send()
            && (self.rx.is_copying() || link.rings().has_bytes())
    }

    /// What of shared memory it would do something about.
    pub(super) fn wants(&self) -> u8 {
        match self.link {
            Link::Up(Stream::Shm(_)) => {
                let (paced, stalled) = self.held();
                let reads = self.may_read(stalled);
                let sends = !paced && !self.tx.dead;
                let waits = !self.tx.writable && sends && self.wants_to_send();
                let slots = sends && self.staging.shared.awaited().is_some();
                (if reads { WANTS_BYTES } else { 0 })
                    | (if waits { WANTS_ROOM } else { 0 })
                    | (if slots { WANTS_DONE } else { 0 })
            }
            Link::Leaving(_) => WANTS_END,
            _ => 0,
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.link {
            // A dial that was accepted is not yet one that was answered.
            Link::Up(_) => {
                let look = self.landings.next_look();
                let sends = self.tx.writable && !self.tx.dead && !self.held().0;
                let copied = self.tx.look.next().filter(|_| sends);
                let slots = self.staging.shared.next_look().filter(|_| sends);
                let waits = [
                    self.rx.not_ready.flatten(),
                    self.connect_by,
                    self.fault_deadline(),
                    look,
                    copied,
                    slots,
                ];
                waits.into_iter().flatten().min()
            }
            _ => self.connect_by,
        }
    }

    /// When a thread that polls all the time should serve it, though there is no deadline yet.
    pub(super) fn glance(&self) -> Option<Instant> {
        self.landings.next_glance().filter(|_| matches!(self.link, Link::Up(_)))
    }

    pub(super) fn connect(
        &mut self,
        attr: &QpConnect,
        channel: &SoftChannel,
        token: u64,
    ) -> Result<(), QpError> {
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
        if self.device.cable().is_cut() {
            return Err(QpError::Os {
                what: "connecting a queue pair",
                source: io::Error::from_raw_os_error(libc::ENETDOWN),
            });
        }
        let remote = attr.remote;
        reach::check(self.qp_num, self.device.transport, &remote)?;
        self.expected.own = remote.qp_num;
        self.tx.start(&Preamble { target: remote.qp_num, own: self.qp_num, key: remote.soft_key });
        let connect_by = Some(Instant::now() + self.peer_timeout);
        if !attr.active {
            self.connect_by = connect_by;
            self.state = QpState::Rts;
            // Somebody may have knocked already.
            self.readable = true;
            self.progress_link(channel, token);
            return Ok(());
        }
        let hello = Preamble { target: remote.qp_num, own: self.qp_num, key: remote.soft_key };
        let (dialed, path) = reach::dial(self.qp_num, &self.device, &remote, hello)?;
        (self.path, self.connect_by) = (path, connect_by);
        let unwatched = |source| QpError::Os { what: "watching the socket of a queue pair", source };
        match dialed {
            Dialed::Refused => {
                self.state = QpState::Rts;
                self.connection_lost();
            }
            Dialed::Tcp(socket) => {
                channel.epoll().add_socket(socket.as_fd(), token).map_err(unwatched)?;
                self.state = QpState::Rts;
                self.link = Link::Dialing(socket);
                self.progress_link(channel, token);
            }
            Dialed::Shm(link) => {
                channel.epoll().add_incoming(link.fd(), token).map_err(unwatched)?;
                self.state = QpState::Rts;
                // It came with the rings.
                self.tx.skip_preamble();
                self.rx.expect_preamble(self.expected);
                self.connected(Stream::Shm(link));
            }
        }
        Ok(())
    }

    /// Brings the connection up, if it can be now.
    pub(super) fn progress_link(&mut self, channel: &SoftChannel, token: u64) {
        match &mut self.link {
            Link::Listening(doors) if self.state == QpState::Rts => {
                match doors.visit(&self.expected, channel.epoll(), token) {
                    // A new edge-triggered registration reports what is there already.
                    Knock::Peer(stream) => {
                        self.connect_by = None;
                        self.path = reach::came(self.device.transport, &stream);
                        self.connected(stream);
                    }
                    Knock::Nobody => self.readable = false,
                    Knock::Again => self.readable = true,
                }
            }
            Link::Dialing(socket) => match link::dialed(socket) {
                Ok(false) => {}
                Ok(true) => {
                    self.rx.expect_preamble(self.expected);
                    if let Link::Dialing(socket) = std::mem::replace(&mut self.link, Link::Down) {
                        self.connected(Stream::Tcp(socket));
                    }
                }
                Err(_) => self.connection_lost(),
            },
            _ => {}
        }
    }

    pub(super) fn connected(&mut self, mut stream: Stream) {
        match &mut stream {
            Stream::Tcp(socket) => link::tune(socket, self.peer_timeout),
            Stream::Shm(link) => {
                link.set_ways(self.gpu_ways);
                self.device.lenders.join(link.rings());
            }
        }
        self.link = Link::Up(stream);
        self.readable = true;
        // The first bytes do not wait for a request: by those of the dialling side the peer lets it in, and by the answer
        // that side knows that somebody is there, however long its first message takes.
        self.tx.ack_due = true;
        self.transmit(1);
    }

    pub(super) fn serve(
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
        self.announced = false;
        self.tick_faults();
        if matches!(self.link, Link::Up(Stream::Shm(_)) | Link::Leaving(_)) {
            self.look(edges, due);
        }
        if matches!(self.link, Link::Listening(_) | Link::Dialing(_)) {
            self.progress_link(channel, token);
            if due && matches!(self.link, Link::Listening(_) | Link::Dialing(_)) {
                self.connect_overdue();
            }
        }
        if matches!(self.link, Link::Up(_)) {
            self.look_at_landings();
        }
        if let Link::Up(stream) = &self.link {
            if matches!(stream, Stream::Tcp(_)) {
                self.tx.writable |= edges & WRITABLE != 0;
                self.readable |= direct;
            }
            self.sq.begin_slice();
            if !self.acknowledges_later() {
                moved += self.transmit(QP_SLICE_BYTES);
            }
        }
        if matches!(self.link, Link::Up(_)) {
            moved += self.receive(QP_SLICE_BYTES);
            self.look_at_pages();
            if due && self.rnr_overdue() {
                self.refuse_not_ready();
            }
            if due && matches!(self.link, Link::Up(_)) {
                self.connect_overdue();
            }
        }
        if matches!(self.link, Link::Up(_)) {
            if self.wants_to_send() || (eager && self.tx.ack_due && !self.announced) {
                moved += self.transmit(QP_SLICE_BYTES);
            }
            let (_, stalled) = self.held();
            if self.tx.dead && (stalled || self.refusal.is_some() || self.rx.not_ready.is_some()) {
                // Nothing more is read, so that the read cannot find the end.
                self.connection_lost();
            }
        }
        if matches!(self.link, Link::Draining { .. }) {
            self.drain();
        }
        moved
    }

    /// Looks at what the peer has done to the shared memory, and at its socket when that has something to say.
    fn look(&mut self, edges: u8, due: bool) {
        let (Link::Up(Stream::Shm(link)) | Link::Leaving(link)) = &mut self.link else { return };
        if (edges != 0 || link.is_unread()) && link.attend().is_err() {
            return self.stop(Stop::Nonsense);
        }
        let (ended, rings) = (link.has_ended(), link.rings());
        self.readable |= ended || rings.has_bytes();
        self.ended |= ended;
        self.tx.writable |= rings.has_room();
        self.staging.shared.reclaim(rings.done());
        if let Some(end) = self.staging.shared.awaited() {
            rings.set_awaited(end);
        }
        let withdrawals = self.device.lenders.withdrawals();
        if withdrawals != self.withdrawals && link.has_lent() {
            // What nobody refers to any more the peer need not keep mapped.
            let live = self.device.mrs.read().lendable();
            link.take_back(|name| live.contains(&name));
        }
        self.withdrawals = withdrawals;
        if matches!(self.link, Link::Leaving(_)) && (ended || due) {
            // It has read the last words, or never will.
            self.hang_up();
            self.fail(None);
            return;
        }
        self.give_back();
    }

    pub(super) fn connect_overdue(&mut self) {
        let now = Instant::now();
        if self.connect_by.is_none_or(|by| by > now) {
            return;
        }
        let again = match self.link {
            Link::Dialing(_) => false,
            // Nothing was asked of the peer: like a device, wait on.
            _ if self.sq.is_idle() => true,
            // Accepted and not answered. Nobody may have polled here until now, so that it has as long again.
            Link::Up(_) => !std::mem::replace(&mut self.unanswered, true),
            _ => false,
        };
        if again {
            self.connect_by = Some(now + self.peer_timeout);
        } else {
            self.connection_lost();
        }
    }

    pub(super) fn rnr_overdue(&self) -> bool {
        self.rx.not_ready.flatten().is_some_and(|by| by <= Instant::now())
    }

    pub(super) fn refuse_not_ready(&mut self) {
        if let Some(msn) = self.rx.waiting_msn() {
            self.refusal = Some(Refusal { msn, nak: Nak::RnrExceeded, recv: None });
        }
    }

    /// The refusal has been sent.
    pub(super) fn last_words_sent(&mut self) {
        let link = std::mem::replace(&mut self.link, Link::Down);
        if let Link::Up(Stream::Shm(link)) = link {
            self.connect_by = Some(Instant::now() + self.peer_timeout);
            self.link = Link::Leaving(link);
            return;
        }
        self.fail(None);
        if let Link::Up(Stream::Tcp(socket)) = link {
            // The peer reads the refusal before the end, and closes.
            if socket.shutdown(std::net::Shutdown::Write).is_ok() {
                self.readable = true;
                self.link = Link::Draining { socket, left: DRAIN_BYTES };
            }
        }
    }

    pub(super) fn drain(&mut self) {
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
        self.settle();
        self.fail_and_close(Some(Cause::oldest(WcStatus::RetryExceeded)));
    }

    /// The device's cable was cut. One that is not connected yet notices when it is.
    pub(super) fn cut_off(&mut self) {
        if self.state == QpState::Rts {
            self.connection_lost();
        }
    }

    /// Before an orderly end: what was executed is acknowledged, as a NIC would have done.
    pub(super) fn last_acks(&mut self) {
        if matches!(self.link, Link::Up(_)) && self.tx.ack_due && self.refusal.is_none() {
            self.hasten();
            self.transmit(1);
        }
    }

    /// A request that cannot be executed fails when those before it have ended.
    pub(super) fn fail_what_is_due(&mut self) {
        if let Some(cause) = self.sq.due_failure() {
            self.fail_and_close(Some(cause));
        }
    }

    /// The connection ends. What a GPU copies is waited for first: the peer, told of the end, may free what is copied from.
    pub(super) fn hang_up(&mut self) {
        self.landings.abandon();
        self.link = Link::Down;
    }

    pub(super) fn fail_and_close(&mut self, cause: Option<Cause>) {
        if self.state != QpState::Err {
            self.hang_up();
            self.fail(cause);
        }
    }

    /// To ERR: every outstanding request completes. Nothing touches their memory any more.
    pub(super) fn fail(&mut self, cause: Option<Cause>) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.landings.abandon();
        self.connect_by = None;
        self.tx = Tx::default();
        self.staging.abandon();
        let (cq, dying) = (&self.send_cq, self.dying);
        self.sq.fail(self.qp_num, cause, |cqe| if dying { cq.push_stale(cqe) } else { cq.push(cqe) });
        // The receive of the refused message says what was wrong with it; those of unfinished messages come next.
        // A refusal whose turn had not come has taken its receive too.
        let refused = self.refusal.take().or_else(|| self.rx.refused.take()).and_then(|r| r.recv);
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

    pub(super) fn flush_recv(&self, wr: &RecvWr, status: WcStatus) {
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
