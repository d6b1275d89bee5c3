//! The memfds that a peer has lent to a connection, by the names that it gave them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::tuning::{LENT_BY_PEER, LENT_BYTES};
use super::peer_map::{PeerMap, PeerMapError};
use super::reference::NO_MEMFD;

/// What is mapped here of a peer's memory. It is looked up for each reference, and mostly has one entry: no hash of a name beats that.
#[derive(Debug, Default)]
pub(super) struct Borrowed(BTreeMap<u64, Option<Arc<PeerMap>>>);

impl Borrowed {
    /// The peer lends `fd`, of at least `bytes` bytes. `InvalidData` for what no peer of ours does: a name twice, more than a
    /// connection may be lent, or something that is not sealed memory.
    pub(super) fn add(&mut self, name: u64, bytes: u64, fd: Option<OwnedFd>) -> io::Result<()> {
        if name == NO_MEMFD || self.0.contains_key(&name) || self.0.len() >= LENT_BY_PEER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let map = match fd.map(|fd| PeerMap::map(fd, bytes)) {
            Some(Ok(map)) => Some(map),
            Some(Err(e @ PeerMapError::Os { .. })) => {
                tracing::warn!(error = %e, "memory that a peer lends cannot be mapped");
                None
            }
            Some(Err(e)) => return Err(io::Error::new(io::ErrorKind::InvalidData, e)),
            None => {
                tracing::warn!("this process has no descriptor left for memory that a peer lends");
                None
            }
        };
        let mapped = self.0.values().chain([&map]).flatten().map(|map| map.len());
        if mapped.fold(0, u64::saturating_add) > LENT_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.0.insert(name, map);
        Ok(())
    }

    /// The peer does not refer to it any more.
    pub(super) fn forget(&mut self, name: u64) {
        self.0.remove(&name);
    }

    /// The memory of that name; `Some(None)` when it could not be mapped.
    pub(super) fn get(&self, name: u64) -> Option<Option<&PeerMap>> {
        self.0.get(&name).map(Option::as_deref)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
