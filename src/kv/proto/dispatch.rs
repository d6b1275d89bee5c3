//! What the peer has sent: each message is checked, its credits are taken, and its records go to the half that they
//! concern.

use std::time::Instant;

use super::control::{self, Class, Head};
use super::record::{Record, Slot};
use super::word::Word;
use super::{Connection, Event, Notify, ProtocolViolation, Received, SenderReason, State};

impl Connection {
    pub(super) fn receive(
        &mut self,
        qp: usize,
        received: Received<'_>,
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        let Some(link) = self.links.get_mut(qp) else {
            return Err(ProtocolViolation::Rule("a queue pair that is not of this connection"));
        };
        if self.rails[link.rail].is_fenced() {
            // Of a queue pair that is destroyed: the peer has been told that it did not come.
            return Ok(());
        }
        link.live.on_heard(now);
        link.open = true;
        link.proven = true;
        let notify = self.cfg.rails[link.rail].notify;
        let bytes = match received {
            Received::Imm(imm) => {
                if notify != Notify::Imm {
                    return Err(ProtocolViolation::Rule("an immediate where there are none"));
                }
                link.credits.on_received_data()?;
                return self.receiver.on_notification(qp, Slot::from_imm(imm), None, &mut self.out);
            }
            Received::Bytes(bytes) => bytes,
        };
        let (head, mut records) = control::parse(bytes)?;
        if head.epoch != self.cfg.peer_epoch {
            return Err(ProtocolViolation::Epoch { got: head.epoch, expected: self.cfg.peer_epoch });
        }
        match head.class {
            Class::Data => link.credits.on_received_data()?,
            Class::Control => link.credits.on_received_control()?,
        }
        link.credits.on_returned(head.data_returned, head.control_returned)?;
        if self.rails.len() > 1 {
            self.on_number(qp, &head, records.remaining() as u64)?;
        }
        self.outgoing.on_acked(head.messages)?;
        self.receiver.on_resolved_below(head.resolved_below);
        while let Some(record) = records.next()? {
            let is_notify = matches!(record, Record::Notify { .. });
            if is_notify != (head.class == Class::Data) || (is_notify && notify != Notify::Send) {
                return Err(ProtocolViolation::Rule("a record in a message of the wrong class"));
            }
            self.on_record(qp, record, now)?;
            self.out.check_owed()?;
        }
        Ok(())
    }

    /// Where there is more than one rail: what the peer has of ours need not be kept, and what we have of its own is noted.
    fn on_number(&mut self, qp: usize, head: &Head, len: u64) -> Result<(), ProtocolViolation> {
        let link = &mut self.links[qp];
        if self.cfg.rails[link.rail].ordered {
            self.resend.taken(&mut link.kept, link.credits.control_taken());
        }
        let Some(number) = head.number else {
            return Err(ProtocolViolation::Rule("a message without a number, with several rails"));
        };
        if head.class == Class::Control && !self.take_numbers(qp, number, len)? {
            return Err(ProtocolViolation::Rule("a number used twice"));
        }
        Ok(())
    }

    pub(super) fn on_record(
        &mut self,
        qp: usize,
        record: Record<'_>,
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        if self.state != State::Open {
            // A word before this one, in the same message, was the end: that of the last rail.
            return Ok(());
        }
        let (sender, receiver, out) = (&mut self.sender, &mut self.receiver, &mut self.out);
        match record {
            Record::Header { transfer, attempt, slot, grant, bytes, tag, mask, counts } => {
                receiver.on_header(transfer, attempt, slot, grant, bytes, tag, mask, counts, out)
            }
            Record::Notify { transfer, attempt, slot } => {
                receiver.on_notification(qp, slot, Some((transfer, attempt)), out)
            }
            Record::Abort { transfer, attempt, grant, reason, slot } => {
                receiver.on_abort(transfer, attempt, grant, reason, slot, out)?;
                receiver.await_word(&self.cfg, grant, now);
                Ok(())
            }
            Record::AbortDone { transfer, attempt, grant, reason, slot, mask, posted, header } => {
                receiver
                    .on_abort_done(qp, transfer, attempt, grant, reason, slot, mask, posted, header, out)?;
                receiver.await_word(&self.cfg, grant, now);
                Ok(())
            }
            Record::Query { transfer, grant } => receiver.on_query(transfer, grant, out),
            Record::Revoked { grant } if self.lender.has(grant) => self.lender.on_revoked(grant, out),
            Record::Revoked { grant } => receiver.on_revoked(grant, out),
            Record::Confirm { transfer, attempt, landed } => {
                sender.on_confirm(transfer, attempt, landed, out)
            }
            Record::AbortAck { transfer } => sender.on_abort_ack(transfer, out),
            Record::Answer { transfer, resolution } => sender.on_answer(transfer, resolution, out),
            Record::Revoke { grant } if self.reader.of_grant(grant).is_some() => {
                if let Some(id) = self.reader.on_revoke(grant) {
                    self.abort_read_for(id, SenderReason::Revoked, now);
                }
                Ok(())
            }
            Record::Revoke { grant } => {
                if let Some(id) = sender.on_revoke(grant, out) {
                    self.abort_for(id, SenderReason::Revoked, now);
                }
                Ok(())
            }
            Record::ReadDone { grant, bytes, reason } => {
                if !self.lender.has(grant) {
                    receiver.was_issued(grant)?;
                }
                self.lender.on_read_done(grant, bytes, reason, out)
            }
            Record::ReadAsk { grant, target, total, offset, bytes } => {
                if !self.lender.has(grant) {
                    receiver.was_issued(grant)?;
                }
                self.lender.on_ask(grant, target, total, offset, bytes, out)
            }
            Record::ReadRefused { target, why } => {
                // It may have been revoked, and that have been said, before.
                self.settle_reads();
                self.reader.on_refused(target, why, &mut self.receiver, &mut self.out)
            }
            Record::Fragment { message, total, offset, bytes } => {
                self.incoming.on_fragment(message, total, offset, bytes)?;
                while let Some(message) = self.incoming.next_message() {
                    out.event(Event::Message(message));
                }
                Ok(())
            }
            Record::Reopen { transfer, attempt, slot, grant, reset } => {
                receiver.on_reopen(transfer, attempt, slot, grant, reset, out)
            }
            Record::Reopened { transfer, attempt } => {
                if sender.on_reopened(transfer, attempt)? {
                    self.abort_for(transfer, SenderReason::Revoked, now);
                }
                Ok(())
            }
            Record::RailDown { rail, generation } => self.on_rail_word(rail, generation, false, now),
            Record::Fenced { rail, generation } => self.on_rail_word(rail, generation, true, now),
            Record::Resent { qp, start, covered, bytes } => self.on_resent(qp, start, covered, bytes, now),
            Record::RailTalk { rail, bytes } => {
                let rail = usize::from(rail);
                if rail >= self.rails.len() {
                    return Err(ProtocolViolation::Rule("a word about a rail that there is not"));
                }
                out.event(Event::RailTalk { rail, bytes: bytes.to_vec() });
                Ok(())
            }
            Record::Ping => {
                self.links[qp].pong = true;
                Ok(())
            }
            // That it came is all it says.
            Record::Pong => Ok(()),
            Record::Close { messages, reads } => {
                if self.peer_closed.replace((messages, reads)).is_some() {
                    return Err(ProtocolViolation::Rule("closed twice"));
                }
                self.closing = true;
                self.hear_by = Some(Word::new(&self.cfg, now));
                out.event(Event::PeerClosed);
                Ok(())
            }
        }
    }
}
