//! Frames in: from the socket to memory. `check.rs` decides what is allowed, `execute.rs` does what has arrived.
//!
//! Headers and descriptors come through a small staging buffer. Payload is read straight into the memory that the
//! descriptors name, several at once, with the staging buffer as the tail for the next header; what goes to a GPU is read into a slot
//! (`staging.rs`). Over shared memory all that travels comes through the staging buffer, and large payload is copied from where it
//! is: `shm/receive.rs`.
//!
//! Nothing that a peer sends is trusted: every descriptor is checked against keys, bounds and state before a byte of
//! its payload is taken, a request that is not allowed is refused (NAK), and nonsense ends the connection.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use super::faults::QpFaults;
use super::frame::{DESC, Desc, HEADER, Header, Nak, Opcode, PREAMBLE, Preamble};
use super::link::{Link, Stream};
use super::mr::{MemRange, MrGuard, Reach};
use super::qp::QpInner;
use super::shm::{Incoming, Reference};
use super::sq::{Cause, Piece, SendQueue};
use super::staging::Room;
use super::sys::{self, RecvVecs};
use super::tuning::{MAX_DESCS, STAGE_BYTES};
use crate::cuda::SLOT_BYTES;
use crate::provider::{AccessFlags, QpState, RecvWr, WcStatus};

/// What the peer has just asked for is refused. Sent to it; then the queue pair fails.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) msn: u32,
    pub(super) nak: Nak,
    /// The receive that the refused message had taken, and the status that it completes with.
    pub(super) recv: Option<(RecvWr, WcStatus)>,
}

/// Why a descriptor is not executed.
#[derive(Debug)]
pub(super) enum Stop {
    /// No receive is posted.
    NotReady,
    Refuse(Refusal),
    /// A request of ours failed: the peer refused it, or the memory of a READ is gone.
    Failed(Cause),
    /// No peer of ours sends that.
    Nonsense,
}

impl Stop {
    /// The payload cannot be taken, for a reason of ours.
    pub(super) fn unable(desc: &Desc) -> Self {
        if desc.opcode == Opcode::ReadResponse {
            let status = WcStatus::LocalQpOperation;
            return Self::Failed(Cause { msn: Some(desc.msn), status, vendor_err: 0 });
        }
        Self::refuse(desc, Nak::Operation)
    }

    pub(super) fn refuse(desc: &Desc, nak: Nak) -> Self {
        Self::Refuse(Refusal { msn: desc.msn, nak, recv: None })
    }
}

/// A message of the peer of which not everything is here.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) msn: u32,
    pub(super) send: bool,
    pub(super) total: u32,
    /// Bytes of checked segments, and of those that are in memory.
    pub(super) planned: u32,
    pub(super) received: u32,
    pub(super) recv: Option<RecvWr>,
    pub(super) imm: Option<u32>,
}

/// Where the payload of a checked descriptor goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Nothing,
    Memory {
        addr: u64,
        key: u32,
        access: AccessFlags,
        recv: Option<RecvWr>,
    },
    /// The elements of a READ of ours.
    Read,
    /// The staging buffer, of which an atomic takes its operands.
    Operands,
    /// What the table says that is still to come.
    Pages,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    Preamble(Preamble),
    Header,
    Payload,
}

enum Flow {
    /// Everything that is here was digested.
    Hungry,
    /// Nothing more is taken now: no receive is posted, or the connection ends.
    Stopped,
}

#[derive(Debug)]
pub(super) struct Rx {
    pub(super) stage: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) expect: Expect,
    pub(super) descs: Vec<Desc>,
    /// Of the first descriptors, those that have been checked.
    pub(super) targets: Vec<Target>,
    /// The descriptor whose payload comes next, and how much of it is here.
    pub(super) at: usize,
    pub(super) off: u32,
    /// Of that descriptor, when its payload does not travel: what is left to copy, and how much of the first is done.
    pub(super) references: VecDeque<Reference>,
    pub(super) copied: u32,
    /// As much of a table of pages as is here; and those whose table is, until all of them are copied.
    pub(super) table: Vec<u8>,
    pub(super) pages: Option<Box<Incoming>>,
    /// The peer ended before its payload was copied: from there on only what it says of our requests counts.
    pub(super) discarding: bool,
    /// The descriptor after the checked ones is refused, once those before it are done.
    pub(super) refused: Option<Refusal>,
    pub(super) open: VecDeque<Open>,
    /// RC: the MSN of the next new message.
    pub(super) next: u32,
    /// A message waits for a receive: until then, if not for ever.
    pub(super) not_ready: Option<Option<Instant>>,
}

impl Rx {
    pub(super) fn new() -> Self {
        Self {
            stage: vec![0; STAGE_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            expect: Expect::Header,
            descs: Vec::with_capacity(MAX_DESCS),
            targets: Vec::with_capacity(MAX_DESCS),
            at: 0,
            off: 0,
            references: VecDeque::new(),
            copied: 0,
            table: Vec::new(),
            pages: None,
            discarding: false,
            refused: None,
            open: VecDeque::new(),
            next: 0,
            not_ready: None,
        }
    }

    /// The dialling side hears first who answers.
    pub(super) fn expect_preamble(&mut self, preamble: Preamble) {
        self.expect = Expect::Preamble(preamble);
    }

    /// The receives of messages that will not be completed any more.
    pub(super) fn abandon(&mut self) -> impl Iterator<Item = RecvWr> + '_ {
        (self.at, self.off, self.copied) = (0, 0, 0);
        self.references.clear();
        self.table.clear();
        self.pages = None;
        self.descs.clear();
        self.targets.clear();
        (self.not_ready, self.refused) = (None, None);
        self.open.drain(..).filter_map(|m| m.recv)
    }

    /// The message that waits for a receive.
    pub(super) fn waiting_msn(&self) -> Option<u32> {
        self.not_ready.and(self.descs.get(self.targets.len())).map(|d| d.msn)
    }

    /// Room for bytes that nobody wants, once the connection has failed.
    pub(super) fn scratch(&mut self) -> &mut [u8] {
        &mut self.stage
    }

    /// Payload that does not travel waits to be copied: the peer is not done with its memory, and nothing else is read.
    pub(super) fn is_copying(&self) -> bool {
        !self.references.is_empty() || self.pages.is_some()
    }

    pub(super) fn staged(&self) -> &[u8] {
        &self.stage[self.start..self.end]
    }

    pub(super) fn find(&self, msn: u32) -> Option<usize> {
        self.open.iter().position(|m| m.msn == msn)
    }
}

/// Calls `each` with the memory for `off..+len` of the payload of a checked descriptor.
pub(super) fn memory_of<'g>(
    (guard, reach): (&'g MrGuard<'_>, &Reach),
    sq: &SendQueue,
    desc: &Desc,
    target: &Target,
    off: u32,
    len: u32,
    mut each: impl FnMut(MemRange<'g>),
) -> Result<(), Stop> {
    match *target {
        Target::Nothing | Target::Operands | Target::Pages => Ok(()),
        Target::Memory { addr, key, access, recv } => {
            let range = guard.resolve(key, reach, addr + u64::from(off), len.into(), access);
            // It was there when the descriptor was checked: deregistered since.
            let nak = if recv.is_some() { Nak::Operation } else { Nak::Access };
            each(range.ok_or(Stop::refuse(desc, nak))?);
            Ok(())
        }
        Target::Read => {
            let entry = sq.get(desc.msn).ok_or(Stop::Nonsense)?;
            let mut whole = true;
            sq.pieces(entry, desc.offset + off, len, |piece| {
                let Piece::Memory { addr, len, key } = piece else { return };
                match guard.resolve(key, reach, addr, len.into(), AccessFlags::LOCAL_WRITE) {
                    Some(range) if whole => each(range),
                    _ => whole = false,
                }
            });
            let cause = Cause { msn: Some(desc.msn), status: WcStatus::LocalProtection, vendor_err: 0 };
            if whole { Ok(()) } else { Err(Stop::Failed(cause)) }
        }
    }
}

impl QpInner {
    /// Reads and executes up to about `budget` bytes. Returns how many were read.
    pub(super) fn receive(&mut self, budget: usize) -> usize {
        let limit = self.faults.as_deref_mut().map_or(usize::MAX, QpFaults::may_receive);
        let got = if limit == 0 { 0 } else { self.receive_up_to(budget, limit) };
        self.launch();
        self.free_ring();
        if let Some(faults) = self.faults.as_deref_mut() {
            faults.received(got);
        }
        self.fail_what_is_due();
        got
    }

    /// The same, and never more than `limit`.
    fn receive_up_to(&mut self, budget: usize, limit: usize) -> usize {
        let mut got = 0;
        loop {
            match self.digest() {
                Ok(Flow::Hungry) => {}
                Ok(Flow::Stopped) => return got,
                Err(stop) => {
                    self.stop(stop);
                    return got;
                }
            }
            if got >= budget.min(limit) || !self.readable || self.landings.is_full(self.device.caps.ordered) {
                return got;
            }
            match self.read_some(limit - got) {
                Ok(Ok(0)) => {
                    self.connection_lost();
                    return got;
                }
                Ok(Ok(n)) => got += n,
                Ok(Err(stop)) => {
                    self.stop(stop);
                    return got;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && !self.tx.dead => {
                    self.readable = false;
                    return got;
                }
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    self.stop(Stop::Nonsense);
                    return got;
                }
                Err(_) => {
                    self.connection_lost();
                    return got;
                }
            }
        }
    }

    pub(super) fn stop(&mut self, stop: Stop) {
        match stop {
            Stop::NotReady => {}
            Stop::Refuse(refusal) => {
                // What came before it is executed before the peer hears of it.
                self.settle();
                if self.state != QpState::Err && self.refusal.is_none() {
                    self.refusal = Some(refusal);
                }
            }
            Stop::Failed(cause) => self.fail_and_close(Some(cause)),
            Stop::Nonsense => self.fail_and_close(Some(Cause::oldest(WcStatus::BadResponse))),
        }
    }

    /// Takes what is in the staging buffer as far as it goes.
    fn digest(&mut self) -> Result<Flow, Stop> {
        loop {
            if self.refusal.is_some() || !matches!(self.link, Link::Up(_)) {
                return Ok(Flow::Stopped);
            }
            match self.rx.expect {
                Expect::Preamble(expected) => {
                    let Some(bytes) = self.rx.staged().first_chunk::<PREAMBLE>() else {
                        return Ok(Flow::Hungry);
                    };
                    if !Preamble::decode(bytes).is_some_and(|said| expected.admits(&said)) {
                        return Err(Stop::Nonsense);
                    }
                    self.rx.start += PREAMBLE;
                    self.rx.expect = Expect::Header;
                    self.connect_by = None;
                    if let Link::Up(Stream::Shm(link)) = &mut self.link {
                        // What it can read of ours it has said before.
                        link.attend().map_err(|_| Stop::Nonsense)?;
                    }
                }
                Expect::Header => {
                    if !self.take_header()? {
                        return Ok(Flow::Hungry);
                    }
                }
                Expect::Payload => {
                    let ready = self.check_descriptors()?;
                    self.take_staged_payload()?;
                    let rx = &mut self.rx;
                    if rx.at == rx.descs.len() {
                        rx.expect = Expect::Header;
                    } else if rx.at < rx.targets.len() {
                        return Ok(Flow::Hungry);
                    } else if let Some(refusal) = rx.refused.take() {
                        return Err(Stop::Refuse(refusal));
                    } else if !ready {
                        if rx.not_ready.is_none() {
                            rx.not_ready = Some(self.rnr_wait.map(|wait| Instant::now() + wait));
                        }
                        return Ok(Flow::Stopped);
                    }
                }
            }
        }
    }

    /// A header and its descriptors, once all of them are here.
    fn take_header(&mut self) -> Result<bool, Stop> {
        let rx = &mut self.rx;
        let Some(bytes) = rx.staged().first_chunk::<HEADER>() else { return Ok(false) };
        let header = Header::decode(bytes).ok_or(Stop::Nonsense)?;
        let end = HEADER + usize::from(header.descs) * DESC;
        if rx.staged().len() < end {
            return Ok(false);
        }
        rx.descs.clear();
        rx.targets.clear();
        let mut payload = 0u64;
        let shared = matches!(self.link, Link::Up(Stream::Shm(_)));
        let (start, stop) = (rx.start + HEADER, rx.start + end);
        for bytes in rx.stage[start..stop].as_chunks::<DESC>().0 {
            let desc = Desc::decode(bytes).ok_or(Stop::Nonsense)?;
            if (desc.references().is_some() || desc.table().is_some()) && !shared {
                return Err(Stop::Nonsense);
            }
            payload += u64::from(desc.counted());
            rx.descs.push(desc);
        }
        if payload != u64::from(header.payload) {
            return Err(Stop::Nonsense);
        }
        rx.start = stop;
        (rx.at, rx.off, rx.expect) = (0, 0, Expect::Payload);
        if self.device.caps.ordered {
            if !self.sq.acknowledge_until(header.ack) {
                return Err(Stop::Nonsense);
            }
            self.retire();
        }
        Ok(true)
    }

    /// Copies payload that came in with headers, and finishes the descriptors that need no more.
    fn take_staged_payload(&mut self) -> Result<(), Stop> {
        while self.rx.at < self.rx.targets.len() {
            let desc = self.rx.descs[self.rx.at];
            if self.rx.discarding {
                if !self.discard_staged(&desc)? {
                    return Ok(());
                }
                continue;
            }
            if let Some(bytes) = desc.table() {
                return self.take_table(&desc, bytes);
            }
            if let Some(n) = desc.references() {
                return self.take_references(&desc, n);
            }
            let staged = self.rx.staged().len();
            let take = (desc.len - self.rx.off).min(staged.min(STAGE_BYTES) as u32);
            if matches!(self.rx.targets[self.rx.at], Target::Operands) {
                if take < desc.len {
                    return Ok(());
                }
                self.settle_before(&desc)?;
                self.execute_atomic(&desc)?;
                self.rx.start += take as usize;
            } else if take > 0 {
                let rx = &self.rx;
                let guard = self.device.mrs.read();
                let mut bytes = &rx.staged()[..take as usize];
                let tcp = matches!(self.link, Link::Up(Stream::Tcp(_)));
                let (landings, staging, mut put) = (&mut self.landings, &mut self.staging, Ok(()));
                memory_of(
                    (&guard, &self.reach),
                    &self.sq,
                    &desc,
                    &rx.targets[rx.at],
                    rx.off,
                    take,
                    |range| {
                        let (now, later) = bytes.split_at(range.len());
                        if range.device().is_none() {
                            range.write(now);
                        } else if put.is_ok() && tcp {
                            put = staging.copy_in(landings, range, now);
                        } else if put.is_ok() {
                            landings.received(now.len() as u64);
                            put = landings.put(range, now);
                        }
                        bytes = later;
                    },
                )?;
                drop(guard);
                if let Err(error) = put {
                    tracing::warn!(%error, "payload could not be copied to memory of a GPU");
                    return Err(Stop::unable(&desc));
                }
                self.rx.start += take as usize;
            }
            if !self.arrived(take)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// `n` more bytes of the current descriptor are in memory. True when it is finished.
    pub(super) fn arrived(&mut self, n: u32) -> Result<bool, Stop> {
        let desc = self.rx.descs[self.rx.at];
        self.rx.off += n;
        if self.rx.off < desc.len {
            return Ok(false);
        }
        (self.rx.at, self.rx.off) = (self.rx.at + 1, 0);
        if self.landings.is_busy() {
            self.landings.wait_in_line(desc);
        } else {
            self.execute(&desc)?;
        }
        Ok(true)
    }

    /// One read of up to `limit` bytes: payload to where it belongs, and what follows it to the staging buffer.
    fn read_some(&mut self, limit: usize) -> io::Result<Result<usize, Stop>> {
        let rx = &mut self.rx;
        if rx.start == rx.end {
            (rx.start, rx.end) = (0, 0);
        } else if rx.start > 0 {
            // Part of a header. Moved to the front, so that all of it fits.
            rx.stage.copy_within(rx.start..rx.end, 0);
            (rx.start, rx.end) = (0, rx.end - rx.start);
        }
        let socket = match &self.link {
            Link::Up(Stream::Tcp(socket)) => socket,
            Link::Up(Stream::Shm(_)) => return self.read_shared(limit),
            _ => return Err(io::ErrorKind::NotConnected.into()),
        };
        if rx.expect != Expect::Payload || matches!(rx.targets.get(rx.at), Some(Target::Operands)) {
            let room = (rx.stage.len() - rx.end).min(limit);
            let n = sys::recv(socket.as_fd(), &mut rx.stage[rx.end..][..room])?;
            rx.end += n;
            if n < room && !self.ended {
                self.readable = false;
            }
            return Ok(Ok(n));
        }
        let guard = self.device.mrs.read();
        // What goes to memory of a GPU is read into a slot, from its free part on.
        let (space, staging, mut staged) = (Room::new(), &mut self.staging, 0);
        let mut vecs = RecvVecs::new();
        let mut off = rx.off;
        let mut complete = rx.targets.len() == rx.descs.len();
        for at in rx.at..rx.targets.len() {
            let (desc, target) = (&rx.descs[at], &rx.targets[at]);
            if matches!(target, Target::Operands) {
                complete = false;
                break;
            }
            // An element more than there is room for ends the list; the next read goes on there.
            let (mut room, mut unable) = (true, false);
            let taken =
                memory_of((&guard, &self.reach), &self.sq, desc, target, off, desc.len - off, |range| {
                    let Some(memory) = range.device() else {
                        room = room && vecs.push_range(range);
                        return;
                    };
                    if !room || unable {
                        return;
                    }
                    let Some((slot, from)) = Self::room(staging, &space, memory.gpu()) else {
                        unable = true;
                        return;
                    };
                    let take = range.len().min(SLOT_BYTES - from - staged);
                    let pushed = vecs.push_slot(slot, from + staged, take);
                    staged += if pushed { take } else { 0 };
                    room = pushed && take == range.len();
                });
            match taken {
                _ if unable => return Ok(Err(Stop::unable(desc))),
                Err(stop) if at == rx.at => return Ok(Err(stop)),
                Ok(()) if room => off = 0,
                _ => {
                    complete = false;
                    break;
                }
            }
        }
        let payload = vecs.bytes();
        if complete {
            vecs.push_tail(&mut rx.stage[rx.end..]);
        }
        if limit < vecs.bytes() {
            vecs.truncate(limit);
        }
        let n = vecs.recv(socket.as_fd())?;
        if n < vecs.bytes() && !self.ended {
            self.readable = false;
        }
        drop(guard);
        self.rx.end += n.saturating_sub(payload);
        let mut left = n.min(payload) as u32;
        let mut slot = space.into_inner().and_then(Result::ok);
        while left > 0 {
            let take = left.min(self.rx.descs[self.rx.at].len - self.rx.off);
            if let Some((slot, at)) = &mut slot {
                match self.collect_staged(slot, *at, take) {
                    Ok(rest) => *at = rest,
                    Err(stop) => return Ok(Err(stop)),
                }
            }
            if let Err(stop) = self.arrived(take) {
                return Ok(Err(stop));
            }
            left -= take;
        }
        Ok(Ok(n))
    }
}
