//! The memory that a peer has lent to a connection, by the names that it gave it: memfds, and allocations of GPUs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::tuning::{LENT_BY_PEER, LENT_BYTES};
use super::peer_map::{PeerMap, PeerMapError};
use super::reference::NO_MEMFD;
use super::slots::SLOTS_BYTES;
use crate::cuda::{PeerMemory, Told};

/// What a peer has lent.
#[derive(Debug)]
pub(super) enum Lent {
    Map(Arc<PeerMap>),
    Memory(PeerMemory),
    /// It could not be had, for a reason of this side.
    Nothing,
}

/// What is known here of a peer's memory. It is looked up for each reference, and mostly has one entry: no hash of a name beats that.
#[derive(Debug, Default)]
pub(super) struct Borrowed {
    known: BTreeMap<u64, Lent>,
    /// It has lent its slots.
    slots: bool,
}

impl Borrowed {
    /// The peer lends `fd`, of at least `bytes` bytes. `InvalidData` for what no peer of ours does: a name twice, more than a
    /// connection may be lent, or something that is not sealed memory.
    pub(super) fn add(&mut self, name: u64, bytes: u64, fd: Option<OwnedFd>) -> io::Result<()> {
        self.check(name)?;
        let lent = mapped(fd.map(|fd| PeerMap::map(fd, bytes)))?;
        let maps = self.known.values().chain([&lent]).filter_map(|lent| match lent {
            Lent::Map(map) => Some(map.len()),
            // Opened by the driver when it is used, with no more than its exporter has.
            Lent::Memory(_) | Lent::Nothing => None,
        });
        if maps.fold(0, u64::saturating_add) > LENT_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.known.insert(name, lent);
        Ok(())
    }

    /// The peer lends the slots that it stages through, of `bytes` bytes. They are pinned on our account, so that their number and size
    /// are ours to say. `InvalidData` as for [`add`](Self::add).
    pub(super) fn add_slots(&mut self, name: u64, bytes: u64, fd: Option<OwnedFd>) -> io::Result<()> {
        self.check(name)?;
        if bytes != SLOTS_BYTES || std::mem::replace(&mut self.slots, true) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let lent = mapped(fd.map(|fd| PeerMap::map_slots(fd, bytes)))?;
        self.known.insert(name, lent);
        Ok(())
    }

    /// The peer lends memory of a GPU. `here`: the peer is this process. `InvalidData` as for [`add`](Self::add).
    pub(super) fn add_memory(&mut self, told: Told, here: bool) -> io::Result<()> {
        self.check(told.name)?;
        let lent = PeerMemory::new(told, here).map_or(Lent::Nothing, Lent::Memory);
        if matches!(lent, Lent::Nothing) {
            tracing::warn!(
                "a peer lends memory of a GPU, and this program was built without the feature cuda"
            );
        }
        self.known.insert(told.name, lent);
        Ok(())
    }

    fn check(&self, name: u64) -> io::Result<()> {
        if name == NO_MEMFD || self.known.contains_key(&name) || self.known.len() >= LENT_BY_PEER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// The peer does not refer to it any more.
    pub(super) fn forget(&mut self, name: u64) -> Option<Lent> {
        self.known.remove(&name)
    }

    /// The memory of that name.
    pub(super) fn get(&self, name: u64) -> Option<&Lent> {
        self.known.get(&name)
    }

    /// The same, to be opened where it is not yet.
    pub(super) fn get_mut(&mut self, name: u64) -> Option<&mut Lent> {
        self.known.get_mut(&name)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

/// What the peer has lent by a memfd. `InvalidData` for what no peer of ours sends.
fn mapped(map: Option<Result<Arc<PeerMap>, PeerMapError>>) -> io::Result<Lent> {
    match map {
        Some(Ok(map)) => Ok(Lent::Map(map)),
        Some(Err(e @ PeerMapError::Os { .. })) => {
            tracing::warn!(error = %e, "memory that a peer lends cannot be mapped");
            Ok(Lent::Nothing)
        }
        Some(Err(e)) => Err(io::Error::new(io::ErrorKind::InvalidData, e)),
        None => {
            tracing::warn!("this process has no descriptor left for memory that a peer lends");
            Ok(Lent::Nothing)
        }
    }
}
