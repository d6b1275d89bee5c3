//! Executing what has arrived: messages of the peer, its requests for an answer, and the answers to ours.
//!
//! Everything here was checked by `check.rs` and is in memory. Atomics are in `atomic.rs`.

use super::frame::{Desc, Nak, Opcode};
use super::qp::QpInner;
use super::rx::{Open, Stop};
use super::sq::Cause;
use super::tx::Response;
use crate::provider::{Cqe, WcOpcode, WcStatus};

impl QpInner {
    /// All of a descriptor is here.
    pub(super) fn execute(&mut self, desc: &Desc) -> Result<(), Stop> {
        match desc.opcode {
            Opcode::Send | Opcode::Write => {
                let at = self.rx.find(desc.msn).ok_or(Stop::Nonsense)?;
                let message = &mut self.rx.open[at];
                message.received += desc.len;
                if message.received == message.total
                    && let Some(message) = self.rx.open.remove(at)
                {
                    self.executed(&message);
                }
                Ok(())
            }
            Opcode::ReadRequest => {
                let (msn, rkey, addr, total) = (desc.msn, desc.rkey, desc.addr, desc.total);
                self.tx.responses.push_back(Response::Read { msn, rkey, addr, total, sent: 0 });
                self.tx.ack = self.tx.ack.wrapping_add(1);
                Ok(())
            }
            Opcode::ReadResponse => self.answer_arrived(desc.msn, desc.len),
            // Executed where its operands were.
            Opcode::CompareSwap | Opcode::FetchAdd => Ok(()),
            Opcode::AtomicResponse => self.atomic_answered(desc),
            Opcode::Ack => {
                let named = |n: u32| n == 0 || desc.addr >> (n - 1) & 1 != 0;
                for msn in self.sq.shuffled_ack().filter(|&n| named(n)).map(|n| desc.msn.wrapping_add(n)) {
                    if !self.sq.acknowledge(msn) {
                        return Err(Stop::Nonsense);
                    }
                    self.complete_unordered(msn);
                }
                self.retire();
                Ok(())
            }
            Opcode::Nak => {
                let cause = Cause { msn: Some(desc.msn), status: Nak::status(desc.status), vendor_err: 0 };
                Err(Stop::Failed(cause))
            }
        }
    }

    /// `len` bytes of the answer to our request `msn` are in memory.
    pub(super) fn answer_arrived(&mut self, msn: u32, len: u32) -> Result<(), Stop> {
        if !self.sq.answer_arrived(msn, len) {
            return Err(Stop::Nonsense);
        }
        self.complete_unordered(msn);
        self.retire();
        Ok(())
    }

    /// All of a message is in memory.
    fn executed(&mut self, message: &Open) {
        self.tx.ack = self.tx.ack.wrapping_add(1);
        self.tx.ack_due = true;
        let (messages, bytes) = self.tx.owed;
        self.tx.owed = (messages.saturating_add(1), bytes.saturating_add(message.total.into()));
        if !self.device.caps.ordered {
            self.tx.acks.push(message.msn);
        }
        if let Some(recv) = message.recv {
            self.announced = true;
            self.recv_cq.push(Cqe {
                wr_id: recv.wr_id,
                qp_num: self.qp_num,
                status: WcStatus::Success,
                vendor_err: 0,
                opcode: if message.send { WcOpcode::Recv } else { WcOpcode::RecvWriteWithImm },
                byte_len: message.total,
                imm: message.imm,
            });
        }
    }

    fn complete_unordered(&mut self, msn: u32) {
        if !self.device.caps.ordered {
            let cq = &self.send_cq;
            self.sq.complete(msn, self.qp_num, |cqe| cq.push(cqe));
        }
    }

    /// Completes what is done at the front of the send queue.
    pub(super) fn retire(&mut self) {
        let cq = &self.send_cq;
        self.sq.retire(self.qp_num, |cqe| cq.push(cqe));
    }
}
