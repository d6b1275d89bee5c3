//! Reads by WRITE of the owner: the request to it, and what becomes of the grant that was issued for them.

use super::codec::ASK_OVERHEAD;
use super::event::{AbortReason, Cause, ProtocolViolation, ReadEnd, ReadRefusal, Reason};
use super::message::MAX_MESSAGE;
use super::outbox::Outbox;
use super::reader::{By, Read, Reader};
use super::receiver::Receiver;
use super::record::Record;

/// Bytes of requests that have not come completely, at the owner. More is an offence.
pub(super) const ASK_WINDOW: usize = 4 * MAX_MESSAGE;
/// Bytes of requests whose reads have not ended, at the reader: far less, since parts of one may come late.
const OWN_WINDOW: usize = MAX_MESSAGE;
/// Parts of a request smaller than this are not worth a record.
const MIN_PART: usize = 64;

/// A request that is being sent. It is sent to its end, also when its read is over by then: the owner waits for it.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) grant: u64,
    pub(super) target: u64,
    pub(super) request: Vec<u8>,
    pub(super) sent: usize,
}

impl Reader {
    /// A part of a request can be sent now.
    pub(super) fn has_ask(&self) -> bool {
        let next = || match self.asks.front().and_then(|&id| self.get(id)).map(|r| &r.by) {
            Some(By::Write { len, .. }) => self.asked + len <= OWN_WINDOW,
            _ => false,
        };
        self.asking.is_some() || next()
    }

    /// Shows the next part of a request that fits in `room` bytes; if `push` takes it, it is sent.
    pub(super) fn next_ask(&mut self, room: usize, push: impl FnOnce(&Record<'_>) -> bool) -> bool {
        if !self.has_ask() || room < ASK_OVERHEAD {
            return false;
        }
        let front = self.asks.front().copied();
        // Shown from where it is, and moved when its first part has been taken.
        let (grant, target, request, at) = match (&self.asking, front.and_then(|id| self.get(id))) {
            (Some(a), _) => (a.grant, a.target, &a.request, a.sent),
            (None, Some(Read { grant, by: By::Write { target, request: Some(request), .. }, .. })) => {
                (*grant, *target, request, 0)
            }
            (None, _) => return false,
        };
        let len = (room - ASK_OVERHEAD).min(request.len() - at);
        if len < (request.len() - at).min(MIN_PART) {
            return false;
        }
        let record = Record::ReadAsk {
            grant,
            target,
            // At most MAX_MESSAGE, both: the caller has checked.
            total: request.len() as u32,
            offset: at as u32,
            bytes: &request[at..at + len],
        };
        if !push(&record) {
            return false;
        }
        self.said += 1;
        if self.asking.is_none() {
            let id = self.asks.pop_front().unwrap_or_default();
            let Some(By::Write { request, len, .. }) = self.get_mut(id).map(|r| &mut r.by) else {
                return true;
            };
            let (request, len) = (request.take().unwrap_or_default(), *len);
            self.asking = Some(Asking { grant, target, request, sent: 0 });
            self.asked += len;
        }
        if let Some(a) = &mut self.asking {
            a.sent += len;
            if a.sent == a.request.len() {
                self.asking = None;
            }
        }
        true
    }

    /// The grant that was issued for a read has been written to: the data is here.
    pub(super) fn on_target_arrived(&mut self, target: u64, out: &mut Outbox) {
        let Some(id) = out.targets.remove(&target) else { return };
        self.tell_done(id, Ok(()), out);
        self.release(id, out);
    }

    /// It will not be written to.
    pub(super) fn on_target_aborted(&mut self, target: u64, reason: AbortReason, out: &mut Outbox) {
        let Some(&id) = out.targets.get(&target) else { return };
        let own = self.get(id).and_then(|r| r.abort).map(|abort| abort.reason.into());
        let reason = own.unwrap_or(match reason {
            AbortReason::Sender(reason) | AbortReason::Reader(reason) => reason.into(),
            AbortReason::ConnectionLost => Reason::Lost(Cause::PeerLost),
            AbortReason::Revoked | AbortReason::ReadRefused(_) => Reason::Revoked,
        });
        self.tell_done(id, Err(ReadEnd::Failed(reason)), out);
    }

    /// No write can reach its blocks any more.
    pub(super) fn on_target_freed(&mut self, target: u64, out: &mut Outbox) {
        if let Some(id) = out.targets.remove(&target) {
            self.release(id, out);
        }
    }

    /// The owner does not write, and never has under this grant.
    pub(super) fn on_refused(
        &mut self,
        target: u64,
        why: ReadRefusal,
        receiver: &mut Receiver,
        out: &mut Outbox,
    ) -> Result<(), ProtocolViolation> {
        let Some(&id) = out.targets.get(&target) else {
            // It was revoked meanwhile, and is over; or it never was.
            return receiver.was_issued(target);
        };
        if self.get(id).is_some_and(|r| matches!(r.by, By::Write { request: Some(_), .. })) {
            return Err(ProtocolViolation::Rule("a read refused that was not asked for"));
        }
        receiver.withdraw(target)?;
        let own = self.get(id).and_then(|r| r.abort);
        let end = own.map_or(ReadEnd::Refused(why), |abort| ReadEnd::Failed(abort.reason.into()));
        self.tell_done(id, Err(end), out);
        out.targets.remove(&target);
        self.release(id, out);
        Ok(())
    }
}
