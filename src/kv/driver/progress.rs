//! Progress: completions in, the protocol's work out, until the queue is empty and armed; and the way down, from the
//! first failure to the destroyed queue pairs.

use std::task::Waker;
use std::time::Instant;

use super::closed::ChannelClosed;
use super::rail::{Phase, Rail};
use super::rails::Job;
use super::{After, BATCH, DRAIN_LIMIT, Inner, POLLS, SLICE, State, TABLES};
use crate::kv::arrival::ArrivalError;
use crate::kv::parts::Held;
use crate::kv::proto::{AbortReason, Cause, Connection, Received, Transmitted};
use crate::kv::queues::{Outbox, Queue};
use crate::kv::waiting::{Place, Wait};
use crate::provider::{self, Armed, Cqe, WcOpcode, WcStatus};
use crate::reactor::Step;
use crate::ring::WrId;

impl Inner {
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Open => {
                let of_conn = self.conn.as_ref().and_then(Connection::poll_timeout);
                of_conn.into_iter().chain(self.rail_timeout()).min()
            }
            State::Draining { since, .. } => Some(since + DRAIN_LIMIT),
            State::Destroying { .. } | State::Ended { .. } => None,
        }
    }

    pub(super) fn enlist(&mut self, wait: Wait, place: &mut Place, waker: Option<&Waker>, after: &mut After) {
        if let Some(waker) = waker {
            after.replaced.extend(self.waiting.enlist(wait, place, waker));
        }
    }

    pub(super) fn wake(&mut self, wait: Wait, after: &mut After) {
        self.waiting.take(wait, &mut after.wakers);
    }

    /// Something that was taken along is back. The last one at the end tells everyone: who hears that the channel has
    /// ended finds all blocks in their pools, and the endpoint knows what a reconnect must know.
    pub(super) fn returned(&mut self, wakers: &mut Vec<Waker>) {
        self.returning -= 1;
        if self.end_to_tell().is_some() {
            for wait in Wait::ALL {
                self.waiting.take(wait, wakers);
            }
        }
    }

    /// How the channel ended, for those who wait for it: once nothing of it is on its way back any more.
    pub(super) fn end_to_tell(&self) -> Option<ChannelClosed> {
        if self.returning == 0 { self.closed() } else { None }
    }

    /// How the channel ended; `None` while it has not.
    pub(super) fn closed(&self) -> Option<ChannelClosed> {
        let State::Ended { cause } = self.state else { return None };
        let graceful = cause == Cause::Closed;
        let reason = match &self.first_cause {
            Some(words) if !graceful => format!("{cause}: {words}"),
            _ => cause.to_string(),
        };
        Some(ChannelClosed { reason, cause })
    }

    /// One bounded slice of a rail, which ends armed or with more to do.
    pub(super) fn drive(&mut self, rail: usize, now: Instant, after: &mut After) -> Step {
        let mut armed = false;
        for _ in 0..POLLS {
            // A software transport moves data in a poll, which takes its time; and rails are measured.
            let now = if self.rails.len() > 1 { Instant::now() } else { now };
            let busy = self.poll_once(Some(rail), now, after);
            let Rail { lost, cq, .. } = &self.rails[rail];
            let (false, false, Some(cq)) = (self.is_ended(), *lost, cq.clone()) else { return Step::Done };
            if !after.wakers.is_empty() {
                // Whoever was woken goes first: what it posts takes along what is due.
                return Step::More;
            }
            if busy {
                if now.elapsed() >= SLICE {
                    return Step::More;
                }
                armed = false;
                continue;
            }
            // Poll, arm, poll again (R3). On a software transport the second poll may have stopped in the middle of I/O
            // that raises no event any more; arming once more asks for that too.
            match cq.arm() {
                Ok(Armed::More) => return Step::More,
                // Only after all that had come was handed in: the last of it may have been the peer's orderly end.
                Ok(Armed::Armed) if armed && std::mem::take(&mut self.rails[rail].hung_up) => {
                    self.hung_up(rail, now, after);
                }
                Ok(Armed::Armed) if armed => return Step::Idle,
                Ok(Armed::Armed) => armed = true,
                Err(error) => {
                    self.fail_rail(rail, Cause::Transport, &format!("arming the queue: {error}"), now, after);
                    self.lose_rail(rail, "its completion queue cannot be armed", now, after);
                }
            }
        }
        Step::More
    }

    pub(super) fn is_ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Takes one batch of completions of a rail, or of each, and does what follows. False when there was nothing to do.
    pub(super) fn poll_once(&mut self, rail: Option<usize>, now: Instant, after: &mut After) -> bool {
        if self.is_ended() {
            return false;
        }
        let mut taken = match rail {
            Some(rail) => self.take(rail, now, after),
            None => self.take_all(now, after),
        };
        let mut full = self.backlog.may_be_left(taken, BATCH, self.cq_depth());
        // What came in on another rail comes before what has failed here, and before a time-out: it may say why, or that all is well.
        if self.rails.len() > 1 && (!self.failed.is_empty() || self.is_timeout_due(now)) {
            for _ in 0..POLLS {
                let more = self.take_all(now, after);
                (taken, full) = (taken.max(more), self.backlog.may_be_left(more, BATCH, self.cq_depth()));
                if !full {
                    break;
                }
            }
        }
        // With more to be taken they wait for it: this is called again.
        if !full || self.rails.len() == 1 {
            self.failures(now, after);
        }
        let mut more = self.turn(now, after);
        // Only once everything that has come is handed in and answered: a runtime that was busy elsewhere finds its
        // completions late, and what a time-out would miss may be among them.
        if !full
            && self.is_timeout_due(now)
            && let Some(conn) = &mut self.conn
        {
            conn.handle_timeout(now);
            more |= self.turn(now, after);
        }
        if taken > 0 {
            // What was acknowledged or has finished has made room.
            self.wake(Wait::Room, after);
        }
        taken > 0 || more
    }

    /// Completions that the queues of all rails hold.
    fn cq_depth(&self) -> usize {
        let of_rail =
            |rail: &Rail| (rail.config.send_depth + rail.config.recv_depth()) as usize * rail.qps.len();
        self.rails.iter().map(of_rail).sum()
    }

    fn is_timeout_due(&self, now: Instant) -> bool {
        let due = self.conn.as_ref().and_then(Connection::poll_timeout);
        self.state == State::Open && due.is_some_and(|at| at <= now)
    }

    /// A batch of each rail. Answers the size of the largest.
    fn take_all(&mut self, now: Instant, after: &mut After) -> usize {
        (0..self.rails.len()).map(|rail| self.take(rail, now, after)).max().unwrap_or(0)
    }

    /// Takes a batch of a rail's completions. Those that failed are kept.
    fn take(&mut self, rail: usize, now: Instant, after: &mut After) -> usize {
        let Some(cq) = self.rails[rail].cq.as_ref().filter(|_| !self.rails[rail].lost) else { return 0 };
        let taken = match cq.poll(&mut self.cqes[..]) {
            Ok(taken) => taken,
            Err(error) => {
                self.fail_rail(rail, Cause::Transport, &format!("polling the queue: {error}"), now, after);
                self.lose_rail(rail, "its completion queue cannot be polled", now, after);
                0
            }
        };
        for n in 0..taken {
            let cqe = self.cqes[n];
            match cqe.status {
                WcStatus::Success => self.completion(rail, &cqe, now, after),
                _ => self.failed.push((rail, cqe)),
            }
        }
        taken
    }

    /// Deals with the work requests that have failed.
    fn failures(&mut self, now: Instant, after: &mut After) {
        let mut failed = std::mem::take(&mut self.failed);
        for (rail, cqe) in failed.drain(..) {
            let Some(qp) = self.queue_of(rail, &cqe) else { continue };
            if cqe.status == WcStatus::Flushed {
                // Nothing of ours had failed. Where a connection manager has connected it, its end is the peer's.
                let managed = self.rails[rail].lines.as_ref().is_some_and(|lines| !lines.is_empty());
                let cause = if managed { Cause::PeerLost } else { Cause::Transport };
                let words = "the connection to the peer has broken, and receives were flushed";
                self.fail_rail(rail, cause, words, now, after);
            } else {
                let words =
                    format!("queue pair {}: {} (vendor code {})", cqe.qp_num, cqe.status, cqe.vendor_err);
                // The peer's device answers for a frozen process, so one that does not is gone or out of reach (K5).
                let unanswered = cqe.status == WcStatus::RetryExceeded;
                let cause = if unanswered { Cause::PeerLost } else { Cause::Transport };
                self.fail_rail(rail, cause, &words, now, after);
            }
            self.ended_badly(qp, WrId::decode(cqe.wr_id), now);
        }
        // Kept for its memory.
        failed.append(&mut self.failed);
        self.failed = failed;
    }

    /// A work request has failed, and its rail with it.
    fn ended_badly(&mut self, qp: usize, id: WrId, now: Instant) {
        if id.recv {
            self.queues[qp].take_recv();
        } else if let Some(conn) = &mut self.conn {
            self.queues[qp].complete(id.key, false, |token, ok| conn.handle_sent(token, ok, now));
        }
    }

    /// The queue pair of a completion. By generation, never by queue pair number (R5).
    fn queue_of(&self, rail: usize, cqe: &Cqe) -> Option<usize> {
        let generation = WrId::decode(cqe.wr_id).qp_generation;
        self.rails[rail].qps.clone().find(|&qp| self.queues[qp].generation() == generation)
    }

    /// A work request has succeeded.
    fn completion(&mut self, rail: usize, cqe: &Cqe, now: Instant, after: &mut After) {
        let Some(qp) = self.queue_of(rail, cqe) else { return };
        if self.rails[rail].phase == Phase::Coming {
            // The peer uses it: it knows that we have connected.
            self.come_up(rail, now, after);
        }
        let id = WrId::decode(cqe.wr_id);
        if let Err(error) = self.rails[rail].direct.settle(cqe.opcode) {
            // Nobody hears of what may not be visible: it is done again by another rail, or by none.
            let words = format!("what its device wrote to memory of a GPU could not be flushed: {error}");
            self.fail_rail(rail, Cause::Transport, &words, now, after);
            return self.ended_badly(qp, id, now);
        }
        let Some(conn) = &mut self.conn else { return };
        if !id.recv {
            self.queues[qp].complete(id.key, true, |token, ok| conn.handle_sent(token, ok, now));
            return;
        }
        let queue = &mut self.queues[qp];
        queue.take_recv();
        let received = match cqe.opcode {
            WcOpcode::RecvWriteWithImm => {
                let _ = queue.received(id.key.index, 0);
                cqe.imm.map(Received::Imm)
            }
            _ => match queue.received(id.key.index, cqe.byte_len) {
                Some(bytes) => {
                    self.batch.clear();
                    self.batch.extend_from_slice(bytes);
                    Some(Received::Bytes(&self.batch))
                }
                None => None,
            },
        };
        // The receive goes back before the credit for it can leave (it leaves in `turn`).
        queue.repost(id.key.index);
        let result = match received {
            Some(received) => conn.handle_recv(qp, received, now),
            None => Ok(()),
        };
        if let Err(violation) = result {
            self.fail(Cause::Violation(violation), "the peer broke the protocol", now, after);
        }
    }

    /// Posting, events. True when it stopped with work left.
    pub(super) fn turn(&mut self, now: Instant, after: &mut After) -> bool {
        let mut more = false;
        if self.state == State::Open {
            let mut failure: Option<(usize, String)> = None;
            for (qp, queue) in self.queues.iter_mut().enumerate() {
                if let Err(error) = queue.flush_recvs() {
                    failure.get_or_insert_with(|| (qp, format!("posting a receive: {}", error.source)));
                }
            }
            if let Some(conn) = &mut self.conn {
                for _ in 0..TABLES {
                    let transmitted = conn.poll_transmit(now, &mut Outbox(&mut self.queues));
                    for (qp, queue) in self.queues.iter_mut().enumerate() {
                        if let Err(error) = queue.flush(|token| self.unposted.push(token)) {
                            failure.get_or_insert_with(|| (qp, format!("posting: {}", error.source)));
                        }
                    }
                    more = transmitted != Transmitted::Idle;
                    if transmitted != Transmitted::Again || failure.is_some() {
                        break;
                    }
                }
            }
            if let Some((qp, words)) = failure {
                let rail = self.rails.iter().position(|rail| rail.qps.contains(&qp)).unwrap_or(0);
                self.fail_rail(rail, Cause::Transport, &words, now, after);
            }
            // After the rail has failed: what was not posted on it is no failure of the others.
            if let Some(conn) = &mut self.conn {
                self.unposted.drain(..).for_each(|token| conn.handle_sent(token, false, now));
            }
        }
        self.tell_credits(now);
        self.events(now, after);
        self.rest(now, after);
        more && self.state == State::Open
    }

    /// Goes on with what is on its way down, when everything that was posted has come back, or has had its time.
    pub(super) fn rest(&mut self, now: Instant, after: &mut After) {
        match self.state {
            State::Open => self.rest_rails(now, after),
            State::Draining { since, .. } => {
                if (0..self.rails.len()).all(|rail| self.is_drained(rail)) || now >= since + DRAIN_LIMIT {
                    self.end(now, after);
                }
            }
            State::Destroying { .. } | State::Ended { .. } => {}
        }
    }

    /// Puts every queue pair in the error state. The first call counts.
    pub(super) fn fail(&mut self, cause: Cause, words: &str, now: Instant, after: &mut After) {
        if self.state != State::Open {
            return;
        }
        if let Some(conn) = &mut self.conn {
            conn.connection_lost(cause, now);
        }
        // Once both sides have said that they are done, either may destroy its queue pairs first: that is no failure.
        let graceful = self.conn.as_ref().is_some_and(Connection::is_closed);
        let cause = if graceful { Cause::Closed } else { cause };
        tracing::debug!(%cause, words, "channel ends");
        self.state = State::Draining { since: now, cause };
        // The protocol's own causes say all that there is.
        if !words.is_empty() {
            self.first_cause.get_or_insert_with(|| words.to_owned());
        }
        for queue in &self.queues {
            if let Some(qp) = queue.qp()
                && let Err(error) = qp.set_error()
            {
                tracing::warn!(%error, "a queue pair did not go to the error state; it is destroyed all the same");
            }
        }
        // What has arrived by now is told first; every other grant ends here. Its blocks stay until the queue pairs are
        // destroyed.
        self.events(now, after);
        self.abort_open_grants(now, after);
        // The flushes are polled by the task.
        after.nudge = true;
    }

    /// No arrival comes any more.
    fn abort_open_grants(&mut self, now: Instant, after: &mut After) {
        let open: Vec<u64> = self.grants.iter().filter(|(_, g)| !g.aborted).map(|(&id, _)| id).collect();
        for grant in open {
            self.aborted(grant, AbortReason::ConnectionLost, now, after);
        }
    }

    /// The arrival under `grant` will not come (K4). Told once.
    pub(super) fn aborted(&mut self, grant: u64, reason: AbortReason, now: Instant, after: &mut After) {
        let Some(granted) = self.grants.get_mut(&grant) else { return };
        if std::mem::replace(&mut granted.aborted, true) {
            return;
        }
        match &granted.blocks {
            Held::Whole(_) => {
                self.stats.aborted += 1;
                self.arrivals.push_back(Err(ArrivalError::Aborted { grant, reason }));
                self.wake(Wait::Arrival, after);
            }
            Held::Part(part) => {
                let fellows = part.grants();
                if let Some(waker) = part.aborted(reason) {
                    self.stats.aborted += 1;
                    after.wakers.extend(waker);
                    self.revoke_open(fellows, now, after);
                }
            }
        }
    }

    /// Destroys the queue pairs. Where that blocks it is done elsewhere, and [`destroyed`](Self::destroyed) follows (R9).
    pub(super) fn end(&mut self, now: Instant, after: &mut After) {
        let State::Draining { cause, .. } = self.state else { return };
        let queue_pairs: Vec<_> = self.queues.iter_mut().filter_map(Queue::take_qp).collect();
        self.state = State::Destroying { cause };
        if queue_pairs.iter().any(|qp| qp.lane().is_some()) {
            self.destroying += 1;
            after.destroy.push((Job::Channel, queue_pairs));
        } else {
            queue_pairs.into_iter().for_each(provider::Qp::destroy);
            self.destroyed(now, after);
        }
    }

    /// The queue pairs are destroyed: from here on no late write reaches a block of ours, and no device reads one. Those of a rail
    /// that had failed before may still be on their way.
    pub(super) fn destroyed(&mut self, now: Instant, after: &mut After) {
        let State::Destroying { cause } = self.state else { return };
        if self.destroying > 0 {
            return;
        }
        if let Some(conn) = &mut self.conn {
            for queue in &mut self.queues {
                queue.destroyed(|token| conn.handle_sent(token, false, now));
            }
            conn.fenced();
        }
        self.events(now, after);
        // Those that were issued since it began to end.
        self.abort_open_grants(now, after);
        self.end_loans(after);
        self.state = State::Ended { cause };
        self.meter.end();
        // Whoever has come here, the task must see that it is over.
        after.nudge = true;
        for rail in &mut self.rails {
            after.lines.push((rail.watch.take(), rail.lines.take()));
            // Nobody is told of the device any more, and whoever tries to bring it back hears of the end.
            (rail.enrolled, rail.attempt) = (None, None);
        }
        after.ledger = self.conn.take().map(|conn| {
            let mut ledger = conn.into_ledger();
            // Their blocks go back to the pool now, so nobody may write to them under these grants any more. The sender
            // refuses them by their connection.
            ledger.end_connection();
            ledger
        });
        // Who waits is told when these, and the ledger, are back: `returned`.
        after.blocks.extend(std::mem::take(&mut self.grants).into_values().map(|granted| granted.blocks));
    }
}
