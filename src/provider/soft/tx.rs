//! Frames out: responses to READs, requests and acknowledgements, gathered into frames.
//!
//! A frame that was begun is finished before the next one; what it points to stays registered or the connection ends. Over
//! shared memory it says of large payload only where it is: `shm/refer.rs`. Frames whose payload a GPU copies to slots first are put
//! together ahead of their turn: `staging.rs`.

use std::collections::VecDeque;
use std::io;

use super::atomic;
use super::frame::{DESC, Desc, HEADER, Header, Opcode, PREAMBLE, Preamble};
use super::link::{Link, Stream};
use super::qp::QpInner;
use super::rx::{Expect, Stop};
use super::shm::{Leaves, Reference, table_bytes};
use super::sq::{Cause, Piece};
use super::staging::{Look, Staged};
use super::sys::SendVecs;
use super::tuning::{
    FRAME_BYTES, FRAMES_AHEAD, MAX_DESCS, MAX_PIECES, SEGMENT_BYTES, SEGMENT_BYTES_UNORDERED,
};
use crate::provider::{AccessFlags, QpState, SendOp, WcStatus};

/// Space that is worth a segment: the end of a full frame is left empty rather than cutting a message for less.
const WORTH: usize = 4 << 10;

/// A READ or an atomic that we answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Response {
    Read { msn: u32, rkey: u32, addr: u64, total: u32, sent: u32 },
    Atomic { msn: u32, old: u64 },
}

/// A piece of a frame's payload.
#[derive(Clone, Copy, Debug)]
enum Out {
    Memory {
        addr: u64,
        len: u32,
        key: u32,
        access: AccessFlags,
    },
    Copied {
        at: u32,
        len: u32,
    },
    /// Of the frame's slot.
    Staged {
        at: u32,
        len: u32,
    },
}

impl Out {
    fn len(self) -> usize {
        match self {
            Self::Memory { len, .. } | Self::Copied { len, .. } | Self::Staged { len, .. } => len as usize,
        }
    }
}

/// A frame that is put together, waits for its turn, or is being sent.
#[derive(Debug, Default)]
struct Frame {
    /// Preamble (once), header and descriptors.
    head: Vec<u8>,
    copied: Vec<u8>,
    pieces: Vec<Out>,
    descs: usize,
    payload: usize,
    /// What the payload may come to, and how much of it does not travel: it is referred to.
    cap: usize,
    referred: usize,
    /// Of head and pieces.
    len: usize,
    done: usize,
    /// The piece that `done` is in, and how much of it is done.
    at: (usize, usize),
    has_nak: bool,
    /// How far its header says that we are.
    ack: u32,
    /// What a GPU copies to host memory first.
    staged: Option<Staged>,
}

/// The frames, and what waits besides requests.
#[derive(Debug, Default)]
pub(super) struct Tx {
    /// The one that is put together next.
    frame: Frame,
    /// The one being sent, and those that wait for their copies behind it.
    queue: VecDeque<Frame>,
    /// One that has been sent, for its buffers.
    spare: Frame,
    /// When to ask whether the copies for the first one are over.
    pub(super) look: Look,
    /// Room to work: pieces of a message, and references to them.
    scratch: Vec<Piece>,
    pub(super) references: Vec<Reference>,
    preamble: Option<[u8; PREAMBLE]>,
    pub(super) responses: VecDeque<Response>,
    /// Unordered: executed messages of the peer that it has not been told of.
    pub(super) acks: Vec<u32>,
    /// The peer should hear how far we are.
    pub(super) ack_due: bool,
    /// Messages that were executed since it has heard that, and their bytes.
    pub(super) owed: (u32, u64),
    /// RC: MSN of the first message that has not been executed.
    pub(super) ack: u32,
    pub(super) writable: bool,
    /// The connection refuses: nothing is sent any more, what has arrived is still read.
    pub(super) dead: bool,
}

impl Tx {
    pub(super) fn start(&mut self, preamble: &Preamble) {
        self.preamble = Some(preamble.encode());
        self.writable = true;
    }

    /// The peer has been shown it already.
    pub(super) fn skip_preamble(&mut self) {
        self.preamble = None;
    }

    fn begin(&mut self, cap: usize) {
        let (preamble, frame) = (self.preamble.take(), &mut self.frame);
        frame.head.clear();
        if let Some(preamble) = preamble {
            frame.head.extend_from_slice(&preamble);
        }
        frame.head.extend_from_slice(&[0; HEADER]);
        frame.copied.clear();
        frame.pieces.clear();
        (frame.descs, frame.payload, frame.referred, frame.cap) = (0, 0, 0, cap);
        (frame.has_nak, frame.staged) = (false, None);
    }

    /// A table travels instead of `len` bytes of payload.
    pub(super) fn push_table(&mut self, len: u32, encode: impl FnOnce(&mut Vec<u8>)) {
        let frame = &mut self.frame;
        let at = frame.copied.len() as u32;
        encode(&mut frame.copied);
        frame.pieces.push(Out::Copied { at, len: frame.copied.len() as u32 - at });
        frame.referred += len as usize;
    }

    /// `references` travel instead of `len` bytes of payload.
    pub(super) fn push_references(&mut self, len: u32) {
        let frame = &mut self.frame;
        let at = frame.copied.len() as u32;
        self.references.iter().for_each(|r| frame.copied.extend_from_slice(&r.encode()));
        frame.pieces.push(Out::Copied { at, len: frame.copied.len() as u32 - at });
        frame.referred += len as usize;
    }

    /// Room for references, and what of the frame that is put together is staged.
    pub(super) fn parts(&mut self) -> (&mut Vec<Reference>, &mut Option<Staged>) {
        (&mut self.references, &mut self.frame.staged)
    }

    /// The piece that is pushed next.
    pub(super) fn next_piece(&self) -> usize {
        self.frame.pieces.len()
    }

    /// What was put together waits for its turn.
    fn finish(&mut self) {
        let frame = &mut self.frame;
        frame.set_ack(self.ack);
        frame.len = frame.head.len() + frame.pieces.iter().map(|piece| piece.len()).sum::<usize>();
        (frame.done, frame.at) = (0, (0, 0));
        (self.ack_due, self.owed) = (false, (0, 0));
    }

    fn enqueue(&mut self) {
        let spare = std::mem::take(&mut self.spare);
        self.queue.push_back(std::mem::replace(&mut self.frame, spare));
    }

    /// The first frame has been sent.
    fn sent(&mut self) -> (bool, bool) {
        let Some(mut frame) = self.queue.pop_front() else { return (false, false) };
        frame.staged = None;
        let has_nak = frame.has_nak;
        self.spare = frame;
        (has_nak, self.queue.is_empty())
    }

    /// Another frame is put together: there is none, or copies can be made for it meanwhile. There are at most `ahead`.
    fn takes_another(&self, ahead: usize) -> bool {
        let Some(last) = self.queue.back() else { return true };
        last.staged.is_some() && !last.has_nak && self.queue.len() < ahead
    }

    /// Bytes of the frames in front of the one that is put together.
    fn ahead(&self) -> u64 {
        self.queue.iter().map(|frame| (frame.len - frame.done) as u64).sum()
    }

    /// The copies for the first frame are not over.
    pub(super) fn is_waiting(&self) -> bool {
        self.look.next().is_some()
    }
}

impl Frame {
    fn has_room(&self, inside: usize) -> bool {
        self.descs < MAX_DESCS
            && (self.payload == 0 || self.payload + inside.min(WORTH) <= self.cap)
            // A message has up to 16 elements.
            && self.pieces.len() + 16 < MAX_PIECES
    }

    fn room(&self, segment: usize) -> u32 {
        self.cap.saturating_sub(self.payload).min(segment) as u32
    }

    fn push_desc(&mut self, desc: &Desc) {
        self.head.extend_from_slice(&desc.encode());
        self.descs += 1;
        self.payload += desc.counted() as usize;
    }

    fn push_memory(&mut self, addr: u64, len: u32, key: u32, access: AccessFlags) {
        if len == 0 {
            return;
        }
        if let Some(Out::Memory { addr: a, len: l, key: k, access: c }) = self.pieces.last_mut() {
            // Neighbours in memory are one piece.
            if *k == key && *c == access && *a + u64::from(*l) == addr {
                *l += len;
                return;
            }
        }
        self.pieces.push(Out::Memory { addr, len, key, access });
    }

    /// `len` bytes from `at` on of the frame's slot.
    fn push_staged(&mut self, at: u32, len: u32) {
        if let Some(Out::Staged { at: a, len: l }) = self.pieces.last_mut()
            && *a + *l == at
        {
            *l += len;
            return;
        }
        self.pieces.push(Out::Staged { at, len });
    }

    /// How far into the frame a piece goes.
    fn end_of(&self, piece: usize) -> u64 {
        let pieces: usize = self.pieces.iter().take(piece + 1).map(|piece| piece.len()).sum();
        (self.head.len() + pieces) as u64
    }

    /// Says how far we are. Nothing of the frame has been sent.
    fn set_ack(&mut self, ack: u32) {
        self.ack = ack;
        let header = Header { descs: self.descs as u16, ack, payload: self.payload as u32 };
        let at = self.head.len() - self.descs * DESC - HEADER;
        self.head[at..at + HEADER].copy_from_slice(&header.encode());
    }

    /// `n` more bytes have gone.
    fn advance(&mut self, n: usize) {
        let in_head = n.min(self.head.len().saturating_sub(self.done));
        self.done += n;
        let mut n = n - in_head;
        while n > 0 {
            let (at, off) = self.at;
            let left = self.pieces[at].len() - off;
            if n < left {
                self.at = (at, off + n);
                break;
            }
            n -= left;
            self.at = (at + 1, 0);
        }
    }
}

impl QpInner {
    /// Something other than an acknowledgement waits to be sent.
    pub(super) fn wants_to_send(&self) -> bool {
        if self.is_unproven() {
            return !self.tx.queue.is_empty();
        }
        let (answers, requests) = (!self.tx.responses.is_empty(), self.sq.wants_to_send());
        let (more, starved) = (answers || requests, self.staging.shared.is_waiting());
        let refuses = self.refusal.is_some() && !(answers && starved);
        !self.tx.queue.is_empty() || refuses || (more && !starved)
    }

    /// Hears who has answered our dial, if that is still open and the answer is there.
    pub(super) fn meet(&mut self) {
        if self.is_unproven()
            && let Some(link) = self.link.shm()
        {
            self.readable |= link.rings().has_bytes();
            self.receive(1);
        }
    }

    /// Whoever has answered our dial in shared memory has not shown that it is the peer. Until then it is told nothing, and lent
    /// nothing.
    fn is_unproven(&self) -> bool {
        matches!(self.rx.expect, Expect::Preamble(_)) && matches!(self.link, Link::Up(Stream::Shm(_)))
    }

    /// Sends up to about `budget` bytes. Returns how many were sent.
    pub(super) fn transmit(&mut self, budget: usize) -> usize {
        let mut sent = 0;
        while sent < budget && self.tx.writable && !self.tx.dead {
            let limit = match self.faults.as_deref() {
                None => usize::MAX,
                Some(faults) if faults.is_paced() => break,
                Some(faults) => faults.may_send(),
            };
            if !self.next_frame(limit) {
                break;
            }
            match self.send_some(limit) {
                Ok((n, all)) => {
                    sent += n;
                    let Some(frame) = self.tx.queue.front_mut() else { break };
                    frame.advance(n);
                    let whole = frame.done == frame.len;
                    let referred = if whole { frame.referred } else { 0 };
                    if let Some(faults) = self.faults.as_deref_mut()
                        && faults.sent(n + referred)
                    {
                        self.connection_lost();
                        break;
                    }
                    if whole {
                        if let Some(staged) = &frame.staged {
                            self.landings.staged(staged.sent());
                        }
                        let slot = frame.staged.as_ref().and_then(Staged::shared_slot);
                        if let (Some(slot), Some(link)) = (slot, self.link.shm()) {
                            // From here on the peer reads it.
                            self.staging.shared.lend(slot.clone(), link.rings().count());
                        }
                        let (has_nak, last) = self.tx.sent();
                        // What is in the frames behind it has not gone.
                        if last && self.device.profile.completes_at_hand_off() {
                            self.sq.handed_off();
                            self.retire();
                            self.fail_what_is_due();
                        }
                        if has_nak {
                            self.last_words_sent();
                            break;
                        }
                    } else if !all {
                        // The buffer is full. The kernel, or the peer, has noted that we want to hear of room.
                        self.tx.writable = false;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.tx.writable = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    self.stop(Stop::Nonsense);
                    break;
                }
                // What the peer said before the end is still to be read; the read then finds the end.
                Err(_) => {
                    self.tx.dead = true;
                    self.readable = true;
                    self.ended = true;
                }
            }
        }
        sent
    }

    /// One write of what is left of the frame, up to `limit`: how much went, and whether that was all of it.
    fn send_some(&mut self, limit: usize) -> io::Result<(usize, bool)> {
        let Link::Up(stream) = &self.link else { return Err(io::ErrorKind::NotConnected.into()) };
        let Some(frame) = self.tx.queue.front() else { return Ok((0, true)) };
        let guard = self.device.mrs.read();
        let mut vecs = SendVecs::new();
        if frame.done < frame.head.len() {
            vecs.push_bytes(&frame.head[frame.done..]);
        }
        let (at, mut off) = frame.at;
        for piece in &frame.pieces[at.min(frame.pieces.len())..] {
            match *piece {
                Out::Copied { at, len } => {
                    let (at, len) = (at as usize, len as usize);
                    vecs.push_bytes(&frame.copied[at + off..at + len]);
                }
                Out::Staged { at, len } => {
                    let slot =
                        frame.staged.as_ref().and_then(Staged::slot).ok_or(io::ErrorKind::Unsupported)?;
                    vecs.push_slot(slot, at as usize + off, len as usize - off);
                }
                Out::Memory { addr, len, key, access } => {
                    let (addr, len) = (addr + off as u64, u64::from(len) - off as u64);
                    let Some(range) = guard.resolve(key, &self.reach, addr, len, access) else {
                        // Deregistered under a request in flight. A begun frame cannot be taken back.
                        return Err(io::ErrorKind::PermissionDenied.into());
                    };
                    if range.device().is_some() {
                        // It is referred to, or not sent.
                        return Err(io::ErrorKind::Unsupported.into());
                    }
                    vecs.push_range(range);
                }
            }
            off = 0;
        }
        if limit < vecs.bytes() {
            vecs.truncate(limit);
        }
        let n = stream.send(&mut vecs)?;
        Ok((n, n == vecs.bytes()))
    }

    /// Puts together frames: one, or some ahead of their turn while a GPU copies for them. False when there is none to send now.
    fn next_frame(&mut self, limit: usize) -> bool {
        // Over shared memory slots say how many.
        let ahead = if self.link.shm().is_some() { usize::MAX } else { FRAMES_AHEAD };
        while self.tx.takes_another(ahead) {
            if !self.build(limit) {
                break;
            }
            let launched = self.tx.frame.staged.as_mut().map_or(Ok(()), |staged| self.staging.launch(staged));
            if let Err(error) = launched {
                let first = self.tx.frame.staged.as_ref().and_then(Staged::request);
                tracing::warn!(%error, "memory of a GPU could not be copied to send it");
                self.cannot_send(first);
                return false;
            }
            self.tx.enqueue();
        }
        let alone = self.tx.queue.len() == 1;
        let Some(frame) = self.tx.queue.front_mut() else { return false };
        if frame.done > 0 {
            return true;
        }
        if let Some(staged) = &mut frame.staged {
            match self.tx.look.at(staged, alone) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => {
                    let first = staged.request();
                    tracing::warn!(%error, "memory of a GPU could not be copied to send it");
                    self.cannot_send(first);
                    return false;
                }
            }
        }
        if frame.ack != self.tx.ack {
            frame.set_ack(self.tx.ack);
            (self.tx.ack_due, self.tx.owed) = (false, (0, 0));
        }
        true
    }

    /// Before an orderly end: the first frame says how far we are, so that it is not left behind for copies that take microseconds.
    pub(super) fn hasten(&self) {
        if let Some(staged) = self.tx.queue.front().and_then(|frame| frame.staged.as_ref()) {
            staged.wait();
        }
    }

    /// Puts together the next frame, when no more than `limit` bytes may be sent. False when there is nothing to say.
    fn build(&mut self, limit: usize) -> bool {
        let preamble = self.tx.preamble;
        // A frame can be sent in parts; what it refers to is all sent with it.
        let shared = matches!(self.link, Link::Up(Stream::Shm(_)));
        self.tx.begin(if shared { FRAME_BYTES.min(limit.max(1)) } else { FRAME_BYTES });
        self.add_acks();
        let proven = !self.is_unproven();
        if proven && (self.refusal.is_none() || !self.tx.responses.is_empty()) {
            // Responses and requests take turns.
            while self.add_response() | self.add_request() {}
            if self.state == QpState::Err {
                return false;
            }
        }
        if let Some(refusal) = &self.refusal
            && proven
            && self.tx.responses.is_empty()
            && self.tx.frame.descs < MAX_DESCS
        {
            let mut desc = Desc::new(Opcode::Nak, refusal.msn);
            desc.status = refusal.nak.code();
            self.tx.frame.push_desc(&desc);
            self.tx.frame.has_nak = true;
        }
        // How far we are is said by the first frame that has not begun.
        if self.tx.frame.descs == 0 && !(self.tx.ack_due && self.tx.queue.is_empty()) {
            self.tx.preamble = preamble;
            return false;
        }
        self.tx.finish();
        if self.tx.frame.referred > 0
            && let Some(link) = self.link.shm()
        {
            let ahead = self.tx.ahead();
            link.rings().settle(|piece| ahead + self.tx.frame.end_of(piece));
        }
        true
    }

    /// Unordered: which messages were executed, 65 of them a descriptor.
    fn add_acks(&mut self) {
        if self.tx.acks.is_empty() {
            return;
        }
        let mut acks = std::mem::take(&mut self.tx.acks);
        let base = acks[0];
        // By distance from the first one, which may be on either side.
        acks.sort_unstable_by_key(|m| m.wrapping_sub(base) as i32);
        // A peer out of its mind may use a number twice.
        acks.dedup();
        let mut rest = acks.as_slice();
        while let (Some((&first, tail)), true) = (rest.split_first(), self.tx.frame.descs < MAX_DESCS) {
            let mut desc = Desc::new(Opcode::Ack, first);
            let n = tail.iter().take_while(|m| m.wrapping_sub(first) <= 64).count();
            for m in &tail[..n] {
                desc.addr |= 1 << (m.wrapping_sub(first) - 1);
            }
            self.tx.frame.push_desc(&desc);
            rest = &tail[n..];
        }
        let told = acks.len() - rest.len();
        acks.drain(..told);
        self.tx.ack_due |= !acks.is_empty();
        self.tx.acks = acks;
    }

    fn segment(&self) -> usize {
        if self.device.caps.ordered { SEGMENT_BYTES } else { SEGMENT_BYTES_UNORDERED }
    }

    /// How much of `left` bytes goes into this frame, which has `room` for payload. `None` where nothing goes now.
    fn room_for(&mut self, left: u32, leaves: &Leaves, room: u32) -> Result<Option<u32>, ()> {
        match leaves {
            Leaves::Plainly => Ok(Some(left.min(room))),
            Leaves::Lent => Ok(Some(left)),
            Leaves::Staged(gpu) => self.slot_room(left, gpu).map_err(|error| {
                tracing::warn!(%error, "there is no slot to stage memory of a GPU");
            }),
        }
    }

    fn add_response(&mut self) -> bool {
        let segment = self.segment();
        let room = self.tx.frame.room(segment);
        let left = match self.tx.responses.front() {
            Some(Response::Read { total, sent, .. }) => total - sent,
            Some(Response::Atomic { .. }) => 0,
            None => return false,
        };
        if !self.tx.frame.has_room(left as usize) {
            return false;
        }
        let Some(mut response) = self.tx.responses.pop_front() else { return false };
        match &mut response {
            Response::Read { msn, rkey, addr, total, sent } => {
                let mut desc = Desc::new(Opcode::ReadResponse, *msn);
                let (from, key) = (*addr + u64::from(*sent), *rkey);
                let leaves = self.leaves([key].into_iter());
                let room = match self.room_for(left, &leaves, room) {
                    Ok(Some(room)) => room,
                    Ok(None) => {
                        self.tx.responses.push_front(response);
                        return false;
                    }
                    Err(()) => {
                        self.cannot_send(None);
                        return false;
                    }
                };
                (desc.total, desc.offset, desc.len) = (*total, *sent, room);
                let piece = Piece::Memory { addr: from, len: desc.len, key };
                let far = !matches!(leaves, Leaves::Plainly);
                if !self.refer(&mut desc, AccessFlags::REMOTE_READ, (&leaves, None), &[piece])
                    && (far || !self.push_piece(None, from, desc.len, key, AccessFlags::REMOTE_READ))
                {
                    self.cannot_send(None);
                    return false;
                }
                self.tx.frame.push_desc(&desc);
                *sent += desc.len;
                if desc.len < left {
                    self.tx.responses.push_front(response);
                }
            }
            Response::Atomic { msn, old } => {
                let mut desc = Desc::new(Opcode::AtomicResponse, *msn);
                desc.addr = *old;
                self.tx.frame.push_desc(&desc);
            }
        }
        true
    }

    fn add_request(&mut self) -> bool {
        // A connection that is being refused takes no new requests.
        if self.refusal.is_some() || !self.tx.frame.has_room(0) {
            return false;
        }
        let segment = self.segment();
        let Some(msn) = self.sq.pick() else { return false };
        let Some(e) = self.sq.get(msn) else { return false };
        let left = e.total - e.sent;
        let inside = if e.op.is_atomic() { atomic::OPERANDS } else { left };
        let table = e.pages.as_ref().map(|posted| table_bytes(posted.pages.pairs.len()));
        let frame = &self.tx.frame;
        let fits = table.is_none_or(|table| frame.payload == 0 || frame.payload + table <= frame.cap);
        if !frame.has_room(inside as usize) || !fits {
            return false;
        }
        let (opcode, imm) = match e.op {
            SendOp::Send { imm } => (Opcode::Send, imm),
            SendOp::Write { imm, .. } => (Opcode::Write, imm),
            SendOp::Read { .. } => (Opcode::ReadRequest, None),
            SendOp::FetchAdd { .. } => (Opcode::FetchAdd, None),
            SendOp::CompareSwap { .. } => (Opcode::CompareSwap, None),
        };
        let mut desc = Desc::new(opcode, msn);
        desc.set_imm(imm);
        desc.total = e.total;
        if let SendOp::Write { remote_addr, rkey, .. }
        | SendOp::Read { remote_addr, rkey }
        | SendOp::FetchAdd { remote_addr, rkey, .. }
        | SendOp::CompareSwap { remote_addr, rkey, .. } = e.op
        {
            (desc.addr, desc.rkey) = (remote_addr, rkey);
        }
        if e.op.is_atomic() {
            let at = self.tx.frame.copied.len() as u32;
            atomic::encode(&e.op, &mut self.tx.frame.copied);
            let len = self.tx.frame.copied.len() as u32 - at;
            (desc.total, desc.len) = (len, len);
            self.tx.frame.pieces.push(Out::Copied { at, len });
        } else if table.is_some() {
            desc.len = desc.total;
            if !self.refer_pages(&mut desc, msn) {
                self.cannot_send(Some(msn));
                return false;
            }
            self.sq.refer(msn);
        } else if !e.op.has_answer() {
            let (leaves, sent) = (self.leaves(self.sq.keys(e)), e.sent);
            (desc.offset, desc.len) = match self.room_for(left, &leaves, self.tx.frame.room(segment)) {
                Ok(Some(room)) => (sent, room),
                Ok(None) => return false,
                Err(()) => {
                    self.cannot_send(Some(msn));
                    return false;
                }
            };
            let mut pieces = std::mem::take(&mut self.tx.scratch);
            pieces.clear();
            if let Some(e) = self.sq.get(msn) {
                self.sq.pieces(e, desc.offset, desc.len, |piece| pieces.push(piece));
            }
            let far = !matches!(leaves, Leaves::Plainly);
            let referred = self.refer(&mut desc, AccessFlags::default(), (&leaves, Some(msn)), &pieces);
            if referred {
                self.sq.refer(msn);
            }
            let sent = referred || (!far && self.push_payload(msn, &desc, &pieces));
            self.tx.scratch = pieces;
            if !sent {
                self.cannot_send(Some(msn));
                return false;
            }
        }
        self.tx.frame.push_desc(&desc);
        self.sq.advance(msn, desc.len);
        true
    }

    /// Memory of a GPU cannot be sent after all: the request `msn`, or the answer to one of the peer's, fails.
    fn cannot_send(&mut self, msn: Option<u32>) {
        self.fail_and_close(Some(Cause { msn, status: WcStatus::LocalQpOperation, vendor_err: 0 }));
    }

    /// The payload of a segment travels in the frame. False when it is memory of a GPU that could not be copied.
    fn push_payload(&mut self, msn: u32, desc: &Desc, pieces: &[Piece]) -> bool {
        for piece in pieces {
            match *piece {
                Piece::Memory { addr, len, key } => {
                    if !self.push_piece(Some(msn), addr, len, key, AccessFlags::default()) {
                        return false;
                    }
                }
                Piece::Copied { len } => {
                    let at = self.tx.frame.copied.len() as u32;
                    self.tx.frame.pieces.push(Out::Copied { at, len });
                }
            }
        }
        if let Some(e) = self.sq.get(msn) {
            self.sq.copy_inline(e, desc.offset, desc.len, &mut self.tx.frame.copied);
        }
        true
    }

    /// Registered memory travels in the frame, that of a GPU as a copy in a slot: it is staged. `request` is whose payload it is.
    fn push_piece(
        &mut self,
        request: Option<u32>,
        addr: u64,
        len: u32,
        key: u32,
        access: AccessFlags,
    ) -> bool {
        let guard = self.device.mrs.read();
        let frame = &mut self.tx.frame;
        let Some(range) =
            guard.resolve(key, &self.reach, addr, len.into(), access).filter(|r| r.device().is_some())
        else {
            frame.push_memory(addr, len, key, access);
            return true;
        };
        if len == 0 {
            return true;
        }
        match self.staging.copy_out(&mut frame.staged, range, request) {
            Ok(at) => frame.push_staged(at, len),
            Err(error) => {
                tracing::warn!(%error, "memory of a GPU could not be copied to send it");
                return false;
            }
        }
        true
    }
}
