//! What a connection is told at its start: agreed by the handshake, the same until its end.

use std::time::Duration;

/// How the receiver learns that data has been placed. Chosen by capability at connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notify {
    /// RDMA WRITE with immediate data.
    Imm,
    /// A SEND behind the WRITEs of its queue pair (iWARP without immediate data). Needs an ordered transport.
    Send,
}

/// Who may be the first to send on a queue pair.
///
/// Over iWARP that is the side that has connected: what the other one sends before that is an error of the connection.
/// So where a connection manager has connected the queue pairs, one side speaks at once, and the other listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Either.
    Free,
    /// We: at once, on each queue pair.
    Speak,
    /// The peer: we send nothing on a queue pair before something has come on it.
    Listen,
}

/// Receives that stand posted on one queue pair, by what they are for. They share one receive queue, so each has a
/// buffer of `max_control` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credits {
    /// For notifications: immediates, or NOTIFY messages.
    pub(crate) data: u32,
    /// For control messages.
    pub(crate) control: u32,
}

/// Control credits of a queue pair that are used, however many the peer says that it has: where there are several rails, each
/// message is kept until it is known to have come.
pub(crate) const MAX_CONTROL_CREDITS: u32 = 512;
/// Least `max_control`.
pub(crate) const MIN_CONTROL: usize = 256;
/// Most queue pairs: participation is a 64-bit mask.
pub(crate) const MAX_QPS: usize = 64;
/// Slots that an immediate can name (12 bits).
pub(crate) const MAX_SLOTS: u16 = 4096;
/// Send queue entries of each queue pair that data leaves to control. The send queue must hold more than that.
pub(crate) const SQ_RESERVE: usize = 4;

/// The most that the peer's time-out and the grace of an abort may be: sums of them stay within the clock.
pub(crate) const DAY: Duration = Duration::from_secs(86_400);

/// One rail: a local device, joined to one of the peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RailConfig {
    /// Its queue pairs, at least 1.
    pub(crate) qps: usize,
    /// It was left out at the start, and has no queue pairs yet: it begins as one that has failed, fenced on both sides.
    pub(crate) absent: bool,
    pub(crate) notify: Notify,
    /// Messages of a queue pair arrive in the order in which they were posted.
    pub(crate) ordered: bool,
    pub(crate) opening: Opening,
    /// Receives that the peer has posted on each queue pair.
    pub(crate) tx_credits: Credits,
    /// Receives that we have posted on each queue pair.
    pub(crate) rx_credits: Credits,
    /// Bytes of the largest WRITE or READ.
    pub(crate) max_write: u32,
    /// READs that a queue pair may have in flight; 0 where there are none.
    pub(crate) max_reads: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// At least one. The queue pairs of all are numbered from 0, those of the first rail first, alike on both sides:
    /// at most 64.
    pub(crate) rails: Vec<RailConfig>,
    pub(crate) local_epoch: u64,
    pub(crate) peer_epoch: u64,
    /// Bytes of the largest control SEND: the receive buffers of both sides.
    pub(crate) max_control: usize,
    /// Transfers that may be started and not yet finished: 1 to 4096. Others wait.
    pub(crate) max_transfers: u16,
    /// A queue pair that has been silent for so long is asked for a sign of life.
    pub(crate) heartbeat: Duration,
    /// A queue pair that has been silent for so long has lost its peer. Longer than `heartbeat`, and longer than a
    /// full send queue takes to drain, since a heartbeat queues behind it.
    pub(crate) peer_timeout: Duration,
    /// What an abort may take before the queue pairs are killed to give the buffers back.
    pub(crate) abort_grace: Duration,
}

impl Config {
    /// What the peer's word on an abort may take once no work request holds it up. It may be on a rail that is silent and has not
    /// failed: then liveness has given that rail up by the end of this, and the word is said again on another.
    pub(super) fn word_grace(&self) -> Duration {
        if self.rails.len() > 1 { self.abort_grace + self.peer_timeout } else { self.abort_grace }
    }

    /// What an abort may take in all, however often rails fail meanwhile: as long as if each of them did, one after the other. The
    /// peer's words bring rails down, and must not put an abort off for ever.
    pub(super) fn abort_limit(&self) -> Duration {
        (self.abort_grace + self.peer_timeout) * (self.rails.len() as u32 + 1) // at most 64
    }
}

/// A configuration that the protocol cannot run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {got} is not possible, it must be {must}")]
pub(crate) struct ConfigError {
    pub(crate) what: &'static str,
    pub(crate) got: u64,
    pub(crate) must: &'static str,
}

impl RailConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let fail = |what, got, must| Err(ConfigError { what, got, must });
        if self.qps == 0 || self.qps > MAX_QPS {
            return fail("qps", self.qps as u64, "1 to 64");
        }
        if self.notify == Notify::Send && !self.ordered {
            return fail("notify", 0, "by immediate on a transport that does not order");
        }
        for c in [self.tx_credits, self.rx_credits] {
            if c.data == 0 {
                return fail("data credits", u64::from(c.data), "at least 1");
            }
            if c.control < 4 {
                return fail("control credits", u64::from(c.control), "at least 4");
            }
        }
        if self.max_write == 0 {
            return fail("max_write", 0, "at least 1");
        }
        Ok(())
    }
}

impl Config {
    /// Queue pairs of all rails.
    pub(crate) fn qps(&self) -> usize {
        self.rails.iter().map(|r| r.qps).sum()
    }

    /// Queue pairs of rails that keep the order.
    pub(super) fn ordered_mask(&self) -> u64 {
        let qps = self.rails.iter().flat_map(|r| std::iter::repeat_n(r.ordered, r.qps));
        qps.enumerate().fold(0, |mask, (qp, ordered)| mask | u64::from(ordered) << qp)
    }

    /// A notification is counted on some queue pair: always where a rail has no order, and after a rail has failed.
    pub(super) fn counts(&self) -> bool {
        self.rails.len() > 1 || self.rails.iter().any(|r| !r.ordered)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let fail = |what, got, must| Err(ConfigError { what, got, must });
        if self.rails.is_empty() {
            return fail("rails", 0, "at least 1");
        }
        if self.rails.iter().all(|rail| rail.absent) {
            return fail("rails that are there", 0, "at least 1");
        }
        self.rails.iter().try_for_each(RailConfig::check)?;
        // Each is at most 64, so that the sum fits.
        if self.rails.len() > MAX_QPS || self.qps() > MAX_QPS {
            return fail("qps of all rails", self.qps() as u64, "at most 64");
        }
        // The largest indivisible record is a header with a count for each queue pair.
        let counts = if self.counts() { 4 * self.qps() } else { 0 };
        // With several rails it may have to be sent again, within another record.
        let least = if self.rails.len() > 1 { 160 } else { 128 };
        if self.max_control < MIN_CONTROL.max(least + counts) {
            return fail(
                "max_control",
                self.max_control as u64,
                "at least 256, 128 + 4 × qps without order, and 160 + 4 × qps with several rails",
            );
        }
        if self.max_transfers == 0 || self.max_transfers > MAX_SLOTS {
            return fail("max_transfers", u64::from(self.max_transfers), "1 to 4096");
        }
        if self.heartbeat.is_zero() || self.heartbeat >= self.peer_timeout {
            return fail(
                "heartbeat (ms)",
                self.heartbeat.as_millis() as u64,
                "above 0 and below peer_timeout",
            );
        }
        if self.peer_timeout > DAY || self.abort_grace > DAY {
            return fail("peer_timeout or abort_grace (s)", self.peer_timeout.as_secs(), "at most a day");
        }
        if self.abort_grace.is_zero() {
            return fail("abort_grace (ms)", 0, "above 0");
        }
        Ok(())
    }
}
