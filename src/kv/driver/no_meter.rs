//! [`Meter`] without the feature `metrics`: nothing, at no cost.

use std::time::{Duration, Instant};

use crate::cuda::GpuTraffic;
use crate::kv::path::QpReport;
use crate::kv::stats::ChannelStats;

pub(super) struct Meter;

impl Meter {
    pub(super) const IS_ON: bool = false;

    pub(super) fn new<'d>(_: &str, _: impl Iterator<Item = (&'d str, bool)>, _: bool) -> Self {
        Self
    }

    pub(super) fn is_due(&self, _: &ChannelStats) -> bool {
        false
    }

    pub(super) fn tell<'q>(
        &mut self,
        _: &ChannelStats,
        _: impl Fn() -> &'static str,
        _: impl Iterator<Item = (usize, &'q QpReport)>,
        _: impl FnOnce() -> GpuTraffic,
    ) {
    }

    pub(super) fn write_landed(
        &mut self,
        _: impl FnOnce() -> &'static str,
        _: Duration,
        _: Option<Duration>,
        _: u32,
    ) {
    }

    pub(super) fn read_done(&mut self, _: impl FnOnce() -> &'static str, _: Duration) {}

    pub(super) fn credits(&mut self, _: impl FnOnce() -> &'static str, _: bool, _: Instant) {}

    pub(super) fn rail(&mut self, _: usize, _: bool) {}

    pub(super) fn end(&mut self) {}
}
