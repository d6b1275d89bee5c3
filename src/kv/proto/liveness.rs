//! Signs of life of the peer's process on one queue pair (K5). A NIC acknowledges for a frozen process, so that
//! only what the process has sent counts.

use std::time::{Duration, Instant};

use super::config::Config;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tick {
    Quiet,
    /// Ask for a sign of life now.
    Probe,
    Lost,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Liveness {
    heard: Instant,
    /// Since when we have wanted to ask. The time-out counts from here, so that a process which was itself frozen
    /// gives its peer time to answer.
    probing: Option<Instant>,
}

impl Liveness {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: now, probing: None }
    }

    pub(super) fn on_heard(&mut self, now: Instant) {
        self.heard = self.heard.max(now);
        self.probing = None;
    }

    pub(super) fn timeout(&self, cfg: &Config) -> Instant {
        match self.probing {
            None => self.heard + cfg.heartbeat,
            Some(since) => since + grace(cfg),
        }
    }

    /// Gives a peer that has been asked its whole time once more. Whether it has been: it is asked again.
    pub(super) fn ask_again(&mut self, now: Instant) -> bool {
        self.probing = self.probing.map(|_| now);
        self.probing.is_some()
    }

    pub(super) fn on_timeout(&mut self, cfg: &Config, now: Instant) -> Tick {
        if now < self.timeout(cfg) {
            return Tick::Quiet;
        }
        if self.probing.is_some() {
            return Tick::Lost;
        }
        self.probing = Some(now);
        Tick::Probe
    }
}

/// From the question to giving up.
fn grace(cfg: &Config) -> Duration {
    cfg.peer_timeout.saturating_sub(cfg.heartbeat)
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn k5_a_silent_peer_is_asked_then_lost() {
        let (cfg, t0) = (config(), Instant::now());
        let mut l = Liveness::new(t0);
        assert_eq!(l.timeout(&cfg), t0 + cfg.heartbeat);
        assert_eq!(l.on_timeout(&cfg, t0 + cfg.heartbeat), Tick::Probe);
        assert_eq!(l.timeout(&cfg), t0 + cfg.peer_timeout);
        l.on_heard(t0 + cfg.heartbeat * 2);
        let again = l.timeout(&cfg);
        assert_eq!(again, t0 + cfg.heartbeat * 3);
        assert_eq!(l.on_timeout(&cfg, again), Tick::Probe);
        assert_eq!(l.on_timeout(&cfg, l.timeout(&cfg)), Tick::Lost);
    }

    #[test]
    fn k5_who_was_frozen_gives_the_peer_time_to_answer() {
        let (cfg, t0) = (config(), Instant::now());
        let mut l = Liveness::new(t0);
        let thawed = t0 + cfg.peer_timeout * 10;
        assert_eq!(l.on_timeout(&cfg, thawed), Tick::Probe);
        assert!(l.timeout(&cfg) > thawed);
    }
}
