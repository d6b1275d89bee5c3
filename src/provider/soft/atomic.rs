//! FETCH_ADD and CMP_SWAP: what of them travels, what is allowed, and how they are executed.
//!
//! The operands come as the payload of the request, in the staging buffer; the old value goes back in the answer's
//! descriptor, so that each side has it in its own byte order. A request is executed once: when it is new in the order of
//! its connection, under the table of regions, and by an atomic instruction on the memory, so that requests of other queue
//! pairs and the owner's own atomics do not come in between.

use super::frame::{Desc, Nak, Opcode};
use super::mr::Atomic;
use super::qp::QpInner;
use super::rx::{Stop, Target};
use super::sq::{Cause, Piece};
use super::tx::Response;
use crate::provider::{AccessFlags, SendOp, WcStatus};

/// Bytes of the memory that one works on.
pub(super) const WORD: u32 = 8;

/// Bytes of operands at most.
pub(super) const OPERANDS: u32 = 16;

/// Appends the operands of `op` as they travel. Nothing for another request.
pub(super) fn encode(op: &SendOp, out: &mut Vec<u8>) {
    match *op {
        SendOp::FetchAdd { add, .. } => out.extend_from_slice(&add.to_le_bytes()),
        SendOp::CompareSwap { compare, swap, .. } => {
            out.extend_from_slice(&compare.to_le_bytes());
            out.extend_from_slice(&swap.to_le_bytes());
        }
        SendOp::Send { .. } | SendOp::Write { .. } | SendOp::Read { .. } => {}
    }
}

/// `None` when it is no atomic, or not as many bytes as its operands have.
fn decode(opcode: Opcode, operands: &[u8]) -> Option<Atomic> {
    let (words, []) = operands.as_chunks() else { return None };
    match (opcode, words) {
        (Opcode::FetchAdd, [add]) => Some(Atomic::FetchAdd(u64::from_le_bytes(*add))),
        (Opcode::CompareSwap, [compare, swap]) => {
            let (compare, swap) = (u64::from_le_bytes(*compare), u64::from_le_bytes(*swap));
            Some(Atomic::CompareSwap { compare, swap })
        }
        _ => None,
    }
}

impl QpInner {
    pub(super) fn check_atomic(&mut self, desc: &Desc) -> Result<Target, Stop> {
        self.check_new(desc)?;
        self.check_answerable(desc)?;
        if !self.device.caps.atomics || !desc.addr.is_multiple_of(WORD.into()) {
            return Err(Stop::refuse(desc, Nak::InvalidRequest));
        }
        self.check_remote(desc, WORD, AccessFlags::REMOTE_ATOMIC)?;
        self.rx.next = self.rx.next.wrapping_add(1);
        Ok(Target::Operands)
    }

    /// The operands are the next bytes of the staging buffer.
    pub(super) fn execute_atomic(&mut self, desc: &Desc) -> Result<(), Stop> {
        let operands = self.rx.staged().get(..desc.len as usize).unwrap_or_default();
        let op = decode(desc.opcode, operands).ok_or(Stop::Nonsense)?;
        let guard = self.device.mrs.read();
        let (access, len) = (AccessFlags::REMOTE_ATOMIC, WORD.into());
        let old =
            guard.resolve(desc.rkey, &self.reach, desc.addr, len, access).and_then(|word| word.atomic(op));
        drop(guard);
        // It was there when the descriptor was checked: deregistered since.
        let old = old.ok_or(Stop::refuse(desc, Nak::Access))?;
        self.tx.responses.push_back(Response::Atomic { msn: desc.msn, old });
        self.tx.ack = self.tx.ack.wrapping_add(1);
        Ok(())
    }

    /// The peer has executed ours: the old value goes to its elements.
    pub(super) fn atomic_answered(&mut self, desc: &Desc) -> Result<(), Stop> {
        let entry = self.sq.get(desc.msn).filter(|e| e.op.is_atomic()).ok_or(Stop::Nonsense)?;
        let old = desc.addr.to_ne_bytes();
        let mut rest = &old[..];
        let mut whole = true;
        let guard = self.device.mrs.read();
        self.sq.pieces(entry, 0, WORD, |piece| {
            let Piece::Memory { addr, len, key } = piece else { return };
            let (now, later) = rest.split_at(len as usize);
            match guard.resolve(key, &self.reach, addr, len.into(), AccessFlags::LOCAL_WRITE) {
                Some(range) => range.write(now),
                None => whole = false,
            }
            rest = later;
        });
        drop(guard);
        if !whole {
            let status = WcStatus::LocalProtection;
            return Err(Stop::Failed(Cause { msn: Some(desc.msn), status, vendor_err: 0 }));
        }
        self.answer_arrived(desc.msn, WORD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_operands_travel_as_they_are_and_others_are_refused() {
        let (remote_addr, rkey) = (8, 1);
        let mut bytes = Vec::new();
        encode(&SendOp::FetchAdd { remote_addr, rkey, add: u64::MAX - 1 }, &mut bytes);
        assert_eq!(decode(Opcode::FetchAdd, &bytes), Some(Atomic::FetchAdd(u64::MAX - 1)));
        assert_eq!(decode(Opcode::CompareSwap, &bytes), None);
        bytes.clear();
        encode(&SendOp::CompareSwap { remote_addr, rkey, compare: 3, swap: 1 << 63 }, &mut bytes);
        let swap = Atomic::CompareSwap { compare: 3, swap: 1 << 63 };
        assert_eq!(decode(Opcode::CompareSwap, &bytes), Some(swap));
        assert_eq!(decode(Opcode::FetchAdd, &bytes), None);
        assert_eq!(decode(Opcode::CompareSwap, &bytes[..15]), None);
        assert_eq!(decode(Opcode::Write, &bytes), None);
        encode(&SendOp::Read { remote_addr, rkey }, &mut bytes);
        assert_eq!(bytes.len(), 16);
    }
}
