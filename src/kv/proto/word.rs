//! How long the peer's last word on a grant is waited for, once the grant was taken back or its transfer aborted (K5).
//!
//! Until it has come the blocks are in quarantine. A peer that answers heartbeats and says nothing else would keep them for ever, so
//! that the connection ends instead. Rails that have failed put that off, since what was said there is said again, and by no more
//! than one failure of each rail takes.

use std::time::{Duration, Instant};

use super::config::Config;

/// A peer that was asked to stop, and does not say that it has, is given up after so many times `peer_timeout`: its send queues are
/// deep, and may drain slowly.
const PATIENCE: u32 = 4;

/// For a peer that was asked to stop.
pub(super) fn patience(cfg: &Config) -> Duration {
    cfg.abort_grace + cfg.peer_timeout * PATIENCE
}

/// One word that is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word {
    /// When to look.
    at: Instant,
    /// Where what the rails go through puts that off no more.
    limit: Instant,
}

impl Word {
    pub(super) fn new(cfg: &Config, now: Instant) -> Self {
        let at = now + patience(cfg);
        Self { at, limit: at + cfg.abort_limit() }
    }

    pub(super) fn at(self) -> Instant {
        self.at
    }

    /// When to look again; `None` when it is overdue.
    pub(super) fn look(&mut self, cfg: &Config, recovering: bool, now: Instant) -> Option<Instant> {
        if self.at <= now {
            if !recovering || self.limit <= now {
                return None;
            }
            self.at = now + cfg.abort_grace;
        }
        Some(self.at)
    }
}

/// When the first of some words is due. Some of them may have come by then.
#[derive(Debug, Default)]
pub(super) struct Words(Option<Instant>);

impl Words {
    /// Another one is waited for.
    pub(super) fn wait(&mut self, cfg: &Config, now: Instant) -> Word {
        let word = Word::new(cfg, now);
        self.0 = Some(self.0.map_or(word.at, |first| first.min(word.at)));
        word
    }

    pub(super) fn timeout(&self) -> Option<Instant> {
        self.0
    }

    /// Looks at all that are still waited for, if one may be due. False when one is overdue.
    pub(super) fn are_in_time<'w>(
        &mut self,
        cfg: &Config,
        recovering: bool,
        now: Instant,
        words: impl Iterator<Item = &'w mut Word>,
    ) -> bool {
        if self.0.is_none_or(|first| now < first) {
            return true;
        }
        self.0 = None;
        for word in words {
            let Some(at) = word.look(cfg, recovering, now) else { return false };
            self.0 = Some(self.0.map_or(at, |first| first.min(at)));
        }
        true
    }
}
