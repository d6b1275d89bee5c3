//! Rails: which queue pairs belong to one device.

use std::ops::Range;

use super::config::Config;

/// The queue pairs of one rail.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) qps: Range<usize>,
    /// Where its next data work request is tried first.
    pub(super) data_qp: usize,
}

impl Rail {
    /// The rails of a connection.
    pub(super) fn all(cfg: &Config) -> Vec<Self> {
        let mut start = 0;
        let rail = |qps: usize| {
            let qps = start..start + qps;
            start = qps.end;
            Self { data_qp: qps.start, qps }
        };
        cfg.rails.iter().map(|r| r.qps).map(rail).collect()
    }

    /// Its queue pairs, each once, the one whose turn it is first.
    pub(super) fn turn(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        (self.data_qp..self.qps.end).chain(self.qps.start..self.data_qp)
    }

    /// `qp` was used: the one after it is next.
    pub(super) fn used(&mut self, qp: usize) {
        self.data_qp = if qp + 1 == self.qps.end { self.qps.start } else { qp + 1 };
    }
}
