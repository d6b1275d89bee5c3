//! Credits of one queue pair (K7): a message is sent only if the peer has a receive posted for it.
//!
//! Data (notifications) and control have credits of their own. Every control message carries the cumulative counts
//! of what its queue pair has consumed and posted again, so that order and repetition do not matter.
//!
//! Why control cannot lock up: the last control credit is only spent on a message that gives control credits back.
//! Suppose that both sides have spent all. Each side's last message has given credits back, so the other side's
//! last message was sent after it had arrived: each was sent after the other. That cannot be.

use super::config::{Credits, RailConfig};
use super::event::ProtocolViolation;

/// Both directions of one class.
#[derive(Clone, Copy, Debug)]
struct Counter {
    /// Receives of the peer.
    tx_limit: u64,
    sent: u64,
    /// The highest count that the peer has given back.
    returned: u64,
    /// Receives of ours.
    rx_limit: u64,
    received: u64,
    /// The highest count that we have given back.
    reported: u64,
}

impl Counter {
    fn new(tx: u32, rx: u32) -> Self {
        Self { tx_limit: tx.into(), sent: 0, returned: 0, rx_limit: rx.into(), received: 0, reported: 0 }
    }

    fn available(&self) -> u64 {
        self.tx_limit - (self.sent - self.returned)
    }

    fn unreported(&self) -> u64 {
        self.received - self.reported
    }

    fn half_unreported(&self) -> bool {
        self.unreported() > 0 && self.unreported() * 2 >= self.rx_limit
    }

    fn on_received(&mut self) -> Result<(), ProtocolViolation> {
        if self.unreported() >= self.rx_limit {
            return Err(ProtocolViolation::Rule("more messages than credits"));
        }
        self.received += 1;
        Ok(())
    }

    fn on_returned(&mut self, count: u64) -> Result<(), ProtocolViolation> {
        if count > self.sent {
            return Err(ProtocolViolation::Rule("credits returned that were never spent"));
        }
        self.returned = self.returned.max(count);
        Ok(())
    }
}

/// Why a control message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Headers and the application's messages.
    Bulk,
    /// Everything else: it keeps two credits that bulk cannot take.
    Urgent,
}

#[derive(Clone, Debug)]
pub(super) struct QpCredits {
    data: Counter,
    control: Counter,
}

impl QpCredits {
    pub(super) fn new(rail: &RailConfig) -> Self {
        let (tx, rx): (Credits, Credits) = (rail.tx_credits, rail.rx_credits);
        Self { data: Counter::new(tx.data, rx.data), control: Counter::new(tx.control, rx.control) }
    }

    pub(super) fn may_send_data(&self) -> bool {
        self.data.available() > 0
    }

    pub(super) fn may_send_control(&self, urgency: Urgency) -> bool {
        match self.control.available() {
            0 => false,
            1 => urgency == Urgency::Urgent && self.control.unreported() > 0,
            2 => urgency == Urgency::Urgent,
            _ => true,
        }
    }

    /// So much is to be given back that it deserves a message of its own.
    pub(super) fn must_report(&self) -> bool {
        self.data.half_unreported() || self.control.half_unreported()
    }

    pub(super) fn on_sent_data(&mut self) {
        self.data.sent += 1;
    }

    /// Control messages that were sent.
    pub(super) fn control_sent(&self) -> u64 {
        self.control.sent
    }

    /// Control messages of ours that the peer has taken, as it has said.
    pub(super) fn control_taken(&self) -> u64 {
        self.control.returned
    }

    pub(super) fn on_sent_control(&mut self) {
        self.control.sent += 1;
    }

    /// The counts for a message that is about to be sent on this queue pair: data, then control.
    pub(super) fn report(&mut self) -> (u64, u64) {
        self.data.reported = self.data.received;
        self.control.reported = self.control.received;
        (self.data.reported, self.control.reported)
    }

    pub(super) fn on_received_data(&mut self) -> Result<(), ProtocolViolation> {
        self.data.on_received()
    }

    pub(super) fn on_received_control(&mut self) -> Result<(), ProtocolViolation> {
        self.control.on_received()
    }

    pub(super) fn on_returned(&mut self, data: u64, control: u64) -> Result<(), ProtocolViolation> {
        self.data.on_returned(data)?;
        self.control.on_returned(control)
    }

    /// Sent and not given back: data, then control. At rest on both sides these are what the peer has not reported.
    #[cfg(test)]
    pub(super) fn outstanding(&self) -> (u64, u64) {
        (self.data.sent - self.data.returned, self.control.sent - self.control.returned)
    }

    /// Received and not given back: data, then control.
    #[cfg(test)]
    pub(super) fn unreported(&self) -> (u64, u64) {
        (self.data.unreported(), self.control.unreported())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::rail;
    use super::*;

    #[test]
    fn k7_the_last_control_credit_is_spent_on_returning_only() {
        let tx_credits = Credits { data: 1, control: 4 };
        let rx_credits = Credits { data: 8, control: 4 };
        let mut c = QpCredits::new(&RailConfig { tx_credits, rx_credits, ..rail() });
        for _ in 0..2 {
            assert!(c.may_send_control(Urgency::Bulk));
            c.on_sent_control();
        }
        assert!(!c.may_send_control(Urgency::Bulk) && c.may_send_control(Urgency::Urgent));
        c.on_sent_control();
        assert!(!c.may_send_control(Urgency::Urgent));
        c.on_received_control().expect("within credits");
        assert!(c.may_send_control(Urgency::Urgent));
        assert_eq!(c.report(), (0, 1));
        c.on_sent_control();
        assert!(!c.may_send_control(Urgency::Urgent));
        c.on_returned(0, 3).expect("spent");
        c.on_returned(0, 1).expect("late and harmless");
        assert!(c.may_send_control(Urgency::Bulk));
        assert!(c.on_returned(1, 3).is_err(), "no data credit was spent");
    }

    #[test]
    fn k7_a_peer_that_overruns_its_credits_is_found_out() {
        let rx_credits = Credits { data: 2, control: 4 };
        let mut c = QpCredits::new(&RailConfig { rx_credits, ..rail() });
        c.on_received_data().expect("1");
        assert!(c.must_report());
        c.on_received_data().expect("2");
        assert!(c.on_received_data().is_err());
        c.report();
        assert!(!c.must_report());
        c.on_received_data().expect("given back");
    }
}
