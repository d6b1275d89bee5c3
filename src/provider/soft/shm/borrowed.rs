//! The memory that a peer has lent to a connection, by the names that it gave it: memfds, and allocations of GPUs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::tuning::{LENT_BY_PEER, LENT_BYTES};
use super::peer_map::{PeerMap, PeerMapError};
use super::reference::NO_MEMFD;
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
pub(super) struct Borrowed(BTreeMap<u64, Lent>);

impl Borrowed {
    /// The peer lends `fd`, of at least `bytes` bytes. `InvalidData` for what no peer of ours does: a name twice, more than a
    /// connection may be lent, or something that is not sealed memory.
    pub(super) fn add(&mut self, name: u64, bytes: u64, fd: Option<OwnedFd>) -> io::Result<()> {
        self.check(name)?;
        let lent = match fd.map(|fd| PeerMap::map(fd, bytes)) {
            Some(Ok(map)) => Lent::Map(map),
            Some(Err(e @ PeerMapError::Os { .. })) => {
                tracing::warn!(error = %e, "memory that a peer lends cannot be mapped");
                Lent::Nothing
            }
            Some(Err(e)) => return Err(io::Error::new(io::ErrorKind::InvalidData, e)),
            None => {
                tracing::warn!("this process has no descriptor left for memory that a peer lends");
                Lent::Nothing
            }
        };
        let mapped = self.0.values().chain([&lent]).filter_map(|lent| match lent {
            Lent::Map(map) => Some(map.len()),
            // Opened by the driver when it is used, with no more than its exporter has.
            Lent::Memory(_) | Lent::Nothing => None,
        });
        if mapped.fold(0, u64::saturating_add) > LENT_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.0.insert(name, lent);
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
        self.0.insert(told.name, lent);
        Ok(())
    }

    fn check(&self, name: u64) -> io::Result<()> {
        if name == NO_MEMFD || self.0.contains_key(&name) || self.0.len() >= LENT_BY_PEER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// The peer does not refer to it any more.
    pub(super) fn forget(&mut self, name: u64) -> Option<Lent> {
        self.0.remove(&name)
    }

    /// The memory of that name.
    pub(super) fn get(&self, name: u64) -> Option<&Lent> {
        self.0.get(&name)
    }

    /// The same, to be opened where it is not yet.
    pub(super) fn get_mut(&mut self, name: u64) -> Option<&mut Lent> {
        self.0.get_mut(&name)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
