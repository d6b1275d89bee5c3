//! Where a pool lies, as the devices see it: the memory regions that hold its parts, and the seams between them.
//!
//! Each rail has a device of its own, with keys and regions of its own for the same memory: so a pool has one
//! [`Seams`] a rail, over the same offsets.

use std::sync::{Arc, OnceLock};

use super::plan::PlanError;

/// A memory region that holds a part of a pool. The parts of a pool follow each other in its offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// The lkey of a local part, the rkey of a remote one.
    pub(crate) key: u32,
}

/// A pool as the device sees it: its parts, in the order of their offsets. Checked once, shared by all plans.
#[derive(Clone, Debug)]
pub(crate) struct Seams {
    parts: Arc<[Part]>,
    /// Pool offset at which each part starts.
    starts: Arc<[u64]>,
    total: u64,
}

impl Seams {
    pub(crate) fn new(parts: Vec<Part>) -> Result<Self, PlanError> {
        let mut starts = Vec::with_capacity(parts.len());
        let mut total = 0u64;
        for (index, p) in parts.iter().enumerate() {
            starts.push(total);
            let fits = p.len > 0 && p.addr.checked_add(p.len).is_some();
            total = total.checked_add(p.len).filter(|_| fits).ok_or(PlanError::BadPart { index })?;
        }
        Ok(Self { parts: parts.into(), starts: starts.into(), total })
    }

    /// Bytes of the pool.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Address and key of the whole pool, where one part has it.
    pub(super) fn whole(&self) -> Option<(u64, u32)> {
        match &self.parts[..] {
            [part] => Some((part.addr, part.key)),
            _ => None,
        }
    }

    /// Address and key at `offset`, and how many bytes follow in the same part. `hint` is the last part used.
    pub(super) fn at(&self, offset: u64, hint: &mut u32) -> (u64, u32, u64) {
        // The hint may be that of another rail, with more parts.
        let inside = |i: usize| {
            let start = self.starts.get(i).copied().filter(|&s| s <= offset);
            start.is_some_and(|s| offset - s < self.parts[i].len)
        };
        let mut at = *hint as usize;
        if !inside(at) {
            // The first part starts at 0, so at least one start is at or below any offset.
            at = self.starts.partition_point(|&s| s <= offset) - 1;
            // No pool has 2^32 parts, and a hint that is none costs a search.
            *hint = at as u32;
        }
        let (part, within) = (&self.parts[at], offset - self.starts[at]);
        (part.addr + within, part.key, part.len - within)
    }
}

/// A pool as the devices of all rails of a channel see it: one [`Seams`] a rail.
///
/// Those of a rail that has never been up may not be known yet. They are set before it comes up, and plans that were made before then
/// know them as well.
#[derive(Clone, Debug)]
pub(crate) struct PoolSeams(Arc<[OnceLock<Seams>]>);

impl PoolSeams {
    /// In the order of the rails, at least one.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn new(rails: Vec<Seams>) -> Self {
        Self::known(rails.into_iter().map(Some))
    }

    /// In the order of the rails, at least one of which is known.
    pub(crate) fn known(rails: impl Iterator<Item = Option<Seams>>) -> Self {
        Self(rails.map(|rail| rail.map_or_else(OnceLock::new, OnceLock::from)).collect())
    }

    /// How a rail that comes sees it. What was known before stays.
    pub(crate) fn set(&self, rail: usize, seams: Seams) {
        let _ = self.0[rail].set(seams);
    }

    pub(crate) fn is_known(&self, rail: usize) -> bool {
        self.0[rail].get().is_some()
    }

    /// Bytes of the pool that every rail reaches.
    pub(crate) fn total(&self) -> u64 {
        self.0.iter().filter_map(OnceLock::get).map(Seams::total).min().unwrap_or(0)
    }

    pub(crate) fn rails(&self) -> usize {
        self.0.len()
    }

    /// Of a rail that is up.
    pub(super) fn rail(&self, rail: usize) -> &Seams {
        self.0[rail].get().expect("set before the rail comes up")
    }
}

impl From<Seams> for PoolSeams {
    /// Of a channel with one rail.
    fn from(seams: Seams) -> Self {
        Self::known(std::iter::once(Some(seams)))
    }
}
