//! What of a received frame is allowed, and where its payload goes. Nothing is executed here.

use super::frame::{Desc, Nak, Opcode};
use super::qp::QpInner;
use super::rx::{Open, Refusal, Stop, Target};
use super::tuning::MAX_OPEN;
use crate::provider::{AccessFlags, RecvWr, Sge, WcOpcode, WcStatus};

impl QpInner {
    /// Checks the descriptors of this frame, as far as that is possible now. False when a receive is missing.
    pub(super) fn check_descriptors(&mut self) -> Result<bool, Stop> {
        while self.rx.targets.len() < self.rx.descs.len() && self.rx.refused.is_none() {
            let desc = self.rx.descs[self.rx.targets.len()];
            let checked = if self.rx.discarding { Ok(Target::Nothing) } else { self.check(&desc) };
            match checked {
                Ok(target) => self.rx.targets.push(target),
                Err(Stop::NotReady) => return Ok(false),
                Err(Stop::Refuse(refusal)) => self.rx.refused = Some(refusal),
                Err(other) => return Err(other),
            }
        }
        self.rx.not_ready = None;
        Ok(true)
    }

    fn check(&mut self, desc: &Desc) -> Result<Target, Stop> {
        match desc.opcode {
            Opcode::Send | Opcode::Write => self.check_segment(desc),
            Opcode::ReadRequest => {
                self.check_new(desc)?;
                self.check_answerable(desc)?;
                self.check_remote(desc, desc.total, AccessFlags::REMOTE_READ)?;
                let asked = Sge { addr: desc.addr, len: desc.total, lkey: desc.rkey };
                if let Some(why) = self.unreadable(&[asked], AccessFlags::REMOTE_READ) {
                    tracing::warn!("a READ of a peer is refused: {why}");
                    return Err(Stop::refuse(desc, Nak::Operation));
                }
                self.rx.next = self.rx.next.wrapping_add(1);
                Ok(Target::Nothing)
            }
            Opcode::ReadResponse => {
                let entry = self.sq.get(desc.msn).ok_or(Stop::Nonsense)?;
                let read = entry.op.opcode() == WcOpcode::Read;
                let ours = read && entry.gone && entry.total == desc.total;
                if ours && self.sq.plan_answer(desc.msn, desc.len) {
                    Ok(Target::Read)
                } else {
                    Err(Stop::Nonsense)
                }
            }
            Opcode::CompareSwap | Opcode::FetchAdd => self.check_atomic(desc),
            Opcode::AtomicResponse => {
                let entry = self.sq.get(desc.msn).ok_or(Stop::Nonsense)?;
                let ours = entry.op.is_atomic() && entry.gone;
                if ours { Ok(Target::Nothing) } else { Err(Stop::Nonsense) }
            }
            Opcode::Ack if self.device.caps.ordered => Err(Stop::Nonsense),
            Opcode::Ack | Opcode::Nak => Ok(Target::Nothing),
        }
    }

    /// RC: messages are new in their order, and one is complete before the next one begins.
    pub(super) fn check_new(&self, desc: &Desc) -> Result<(), Stop> {
        if self.device.caps.ordered {
            let whole = self.rx.open.back().is_none_or(|m| m.planned == m.total);
            return if whole && desc.msn == self.rx.next { Ok(()) } else { Err(Stop::Nonsense) };
        }
        if self.rx.open.len() < MAX_OPEN { Ok(()) } else { Err(Stop::Nonsense) }
    }

    /// READs and atomics: no more of them at once than was agreed.
    pub(super) fn check_answerable(&self, desc: &Desc) -> Result<(), Stop> {
        let planned = self.rx.descs[self.rx.at..self.rx.targets.len()].iter();
        let planned = planned.filter(|d| d.opcode.has_answer()).count();
        let room = self.tx.responses.len() + self.landings.answerable() + planned < self.max_responses;
        if room { Ok(()) } else { Err(Stop::refuse(desc, Nak::InvalidRequest)) }
    }

    /// Whether the key allows all of the `len` bytes of a message, and whether what this frame has of them is exposed. None at all need
    /// no key.
    pub(super) fn check_remote(&self, desc: &Desc, len: u32, access: AccessFlags) -> Result<(), Stop> {
        let guard = self.device.mrs.read();
        let keyed = |len: u32| {
            len == 0 || guard.registered(desc.rkey, self.reach.pd, desc.addr, len.into(), access).is_some()
        };
        let exposed = match desc.opcode {
            // Segments of one message: each is looked at by itself.
            Opcode::Write => {
                let at = desc.addr.checked_add(desc.offset.into());
                at.is_some_and(|at| self.reach.exposes(at, desc.len.into(), access))
            }
            _ => self.reach.exposes(desc.addr, len.into(), access),
        };
        if keyed(len) && (len == 0 || exposed) { Ok(()) } else { Err(Stop::refuse(desc, Nak::Access)) }
    }

    fn check_segment(&mut self, desc: &Desc) -> Result<Target, Stop> {
        let send = desc.opcode == Opcode::Send;
        if !send {
            self.check_remote(desc, desc.total, AccessFlags::REMOTE_WRITE)?;
        }
        let at = match self.rx.find(desc.msn) {
            Some(at) => at,
            None => {
                self.check_new(desc)?;
                let imm = desc.imm().is_some();
                if u64::from(desc.total) > self.device.caps.max_msg_size
                    || (imm && !self.device.caps.immediate)
                {
                    return Err(Stop::refuse(desc, Nak::InvalidRequest));
                }
                let recv = if send || imm { Some(self.take_receive(desc, send)?) } else { None };
                let (msn, total, imm) = (desc.msn, desc.total, desc.imm());
                self.rx.open.push_back(Open { msn, send, total, planned: 0, received: 0, recv, imm });
                self.rx.next = self.rx.next.wrapping_add(1);
                self.rx.open.len() - 1
            }
        };
        let ordered = self.device.caps.ordered;
        let message = &mut self.rx.open[at];
        let fits = message.send == send
            && message.total == desc.total
            && desc.len <= message.total - message.planned
            && (!ordered || desc.offset == message.planned);
        if !fits {
            return Err(Stop::Nonsense);
        }
        message.planned += desc.len;
        if desc.len == 0 {
            return Ok(Target::Nothing);
        }
        if !send {
            let addr = desc.addr + u64::from(desc.offset);
            return Ok(Target::Memory {
                addr,
                key: desc.rkey,
                access: AccessFlags::REMOTE_WRITE,
                recv: None,
            });
        }
        let sge = message.recv.and_then(|r| r.sge).ok_or(Stop::Nonsense)?;
        let addr = sge.addr + u64::from(desc.offset);
        Ok(Target::Memory { addr, key: sge.lkey, access: AccessFlags::LOCAL_WRITE, recv: message.recv })
    }

    /// The receive for a new message, when there is one and the message fits into it.
    fn take_receive(&mut self, desc: &Desc, send: bool) -> Result<RecvWr, Stop> {
        let recv = self.next_receive().ok_or(Stop::NotReady)?;
        if !send || desc.total == 0 {
            return Ok(recv);
        }
        let refuse = |nak, status| Stop::Refuse(Refusal { msn: desc.msn, nak, recv: Some((recv, status)) });
        let Some(sge) = recv.sge.filter(|s| s.len >= desc.total) else {
            return Err(refuse(Nak::InvalidRequest, WcStatus::LocalLength));
        };
        let guard = self.device.mrs.read();
        match guard.resolve(sge.lkey, &self.reach, sge.addr, sge.len.into(), AccessFlags::LOCAL_WRITE) {
            Some(_) => Ok(recv),
            None => Err(refuse(Nak::Operation, WcStatus::LocalProtection)),
        }
    }
}
