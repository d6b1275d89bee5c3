//! What the protocol tells: outcomes, arrivals, messages, ends.

use std::sync::Arc;
use std::time::Instant;

use super::{After, Granted, Inner};
use crate::kv::arrival::Arrival;
use crate::kv::exposure::Exposed;
use crate::kv::parts::Held;
use crate::kv::proto::{Cause, Connection, Event, Outcome, ProtocolViolation};
use crate::kv::queues::Queue;
use crate::kv::waiting::Wait;
use crate::provider;

/// A GPU still copies for the peer what the peer has said to be there, or not to come.
pub(super) const OUTSTAYED: Cause =
    Cause::Violation(ProtocolViolation::Rule("it writes to blocks behind the end of their transfer"));

impl Inner {
    pub(super) fn events(&mut self, now: Instant, after: &mut After) {
        while let Some(event) = self.conn.as_mut().and_then(Connection::poll_event) {
            match event {
                Event::Sent { id } => {
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.local.get_or_insert(now);
                    }
                }
                Event::Done { id, outcome, wrs, attempts } => {
                    self.stats.done(outcome);
                    let mut fellows = None;
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.outcome = Some(outcome);
                        (entry.wrs, entry.attempts) = (wrs, attempts);
                        entry.landed = Some(now);
                        match outcome {
                            Outcome::Landed => self.stats.landed_bytes += entry.bytes,
                            Outcome::NotDelivered(_) => fellows = entry.fellows.clone(),
                            Outcome::InDoubt(_) => {}
                        }
                    }
                    self.tell_write(id);
                    self.abort_fellows(fellows, now, after);
                    self.wake(Wait::Room, after);
                    self.write_event(id, after);
                }
                Event::Released { id } => {
                    if let Some(entry) = self.writes.get_mut(&id) {
                        entry.released = true;
                    }
                    self.write_event(id, after);
                }
                Event::Resolved { id, resolution } => {
                    self.doubts.insert(id, Some(resolution));
                    self.wake(Wait::Resolution, after);
                }
                Event::Arrived { transfer, grant, bytes, tag } => {
                    if let Some(Granted { blocks, .. }) = self.take_granted(grant, now, after) {
                        self.stats.arrived += 1;
                        self.stats.arrived_bytes += bytes;
                        match blocks {
                            Held::Whole(blocks) => {
                                self.arrivals.push_back(Ok(Arrival { grant, transfer, tag, bytes, blocks }));
                                self.wake(Wait::Arrival, after);
                            }
                            Held::Part(part) => {
                                after.wakers.extend(part.landed(transfer, tag, bytes));
                                after.blocks.push(Held::Part(part));
                            }
                        }
                    }
                }
                // No two grants have one number, whatever they are for.
                Event::Aborted { grant, reason } => {
                    self.aborted(grant, reason, now, after);
                    self.loan_aborted(grant, reason);
                }
                Event::Freed { grant } => {
                    let granted = self.take_granted(grant, now, after);
                    after.blocks.extend(granted.map(|g| g.blocks));
                    self.loan_freed(grant, after);
                }
                Event::ReadDone { id, result, wrs, most } => {
                    self.read_done(id, result, wrs, most, now, after);
                }
                Event::ReadReleased { id } => self.read_released(id, now, after),
                Event::ReadAsked { grant, target, request } => {
                    self.read_asked(grant, target, request, after);
                }
                Event::Served { grant, bytes, by_write } => self.served(grant, bytes, by_write, after),
                Event::Message(bytes) => {
                    self.messages.push_back(bytes);
                    self.wake(Wait::Message, after);
                }
                Event::PeerClosed => self.closing = true,
                Event::RailDown { rail, cause } => self.rail_down(rail, cause, now, after),
                // We have said so ourselves.
                Event::RailUp { .. } => {}
                Event::RailTalk { rail, bytes } => after.talk.push((rail, bytes)),
                Event::Lost(cause) => self.fail(cause, "", now, after),
                Event::Closed => self.fail(Cause::Closed, "closed by both sides", now, after),
            }
        }
    }

    /// The peer is done with a grant: its blocks may go to others. `None` where the channel ends instead, which gives them back.
    fn take_granted(&mut self, grant: u64, now: Instant, after: &mut After) -> Option<Granted> {
        let mut granted = self.grants.remove(&grant)?;
        if let Some(exposed) = granted.exposed.take()
            && self.outstays(Arc::into_inner(exposed))
        {
            self.grants.insert(grant, granted);
            self.fail(OUTSTAYED, "", now, after);
            return None;
        }
        Some(granted)
    }

    /// Ends the peer's right to write to some blocks. True when a GPU is still copying to them for the peer, though that has said that
    /// it is done with them: an honest one says so behind its last copy. Then the channel has to end, which waits for the copies.
    ///
    /// What is queued from here on has been asked about afterwards; what was queued before is seen here.
    pub(super) fn outstays(&self, exposed: Option<Exposed>) -> bool {
        let Some(exposed) = exposed else { return false };
        let beside = exposed.is_on_gpu();
        drop(exposed);
        let keeps = |queue: &Queue| queue.qp().is_none_or(provider::Qp::keeps_to_exposure);
        beside && !self.queues.iter().all(keeps)
    }
}
