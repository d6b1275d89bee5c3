//! One connection for two endpoints, also when both dial at once (B3).
//!
//! The endpoint with the greater epoch decides for the pair, whichever side dialled; the other follows. So that a
//! decision is taken in one place only, and no round trip is spent on it: the decider claims the pair for a
//! connection before it says `HelloReply` (as server) or `Ready` (as client), and refuses every other one with
//! [`Reject::Duplicate`](super::reject::Reject), which names the one that is kept.
//!
//! A connection to oneself has no decider: it may be made as often as wanted.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The pairs that this endpoint decides for, and the connection of each.
#[derive(Debug)]
pub(crate) struct Peers {
    ours: u64,
    claimed: Mutex<HashMap<u64, u64>>,
}

/// A connection holds its pair until this is dropped: when its handshake fails, or when it is closed.
#[derive(Debug)]
pub(crate) struct Claim {
    /// `None` where the peer decides.
    held: Option<(Arc<Peers>, u64, u64)>,
    /// The dead connection that this one replaces. Its owner has to end it.
    pub(crate) replaces: Option<u64>,
}

impl Peers {
    /// The table of the endpoint whose epoch is `ours`.
    pub(crate) fn new(ours: u64) -> Arc<Self> {
        Arc::new(Self { ours, claimed: Mutex::default() })
    }

    /// Claims the pair with `peer` for `connection`, or tells which connection is kept instead. Connections that
    /// the peer knows to be `dead` are replaced: we may not have noticed yet.
    pub(crate) fn claim(self: &Arc<Self>, peer: u64, connection: u64, dead: &[u64]) -> Result<Claim, u64> {
        if self.ours <= peer {
            return Ok(Claim { held: None, replaces: None });
        }
        let held = Some((self.clone(), peer, connection));
        match lock(&self.claimed).entry(peer) {
            Entry::Vacant(e) => {
                e.insert(connection);
                Ok(Claim { held, replaces: None })
            }
            // A hello that comes twice is not a reason to replace its first.
            Entry::Occupied(mut e) if *e.get() != connection && dead.contains(e.get()) => {
                let replaces = Some(e.insert(connection));
                Ok(Claim { held, replaces })
            }
            Entry::Occupied(e) => Err(*e.get()),
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.claimed).len()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some((peers, peer, connection)) = &self.held else { return };
        let mut claimed = lock(&peers.claimed);
        // It may have been replaced meanwhile.
        if claimed.get(peer) == Some(connection) {
            claimed.remove(peer);
        }
    }
}

/// Every step leaves the table valid.
fn lock(claimed: &Mutex<HashMap<u64, u64>>) -> MutexGuard<'_, HashMap<u64, u64>> {
    claimed.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b3_the_greater_epoch_decides_and_keeps_the_first() {
        let peers = Peers::new(10);
        let first = peers.claim(5, 100, &[]).unwrap();
        assert_eq!(peers.claim(5, 101, &[]).unwrap_err(), 100);
        // The same hello again, even if it lies about the connection being dead.
        assert_eq!(peers.claim(5, 100, &[100]).unwrap_err(), 100);
        assert_eq!(peers.claim(5, 101, &[99]).unwrap_err(), 100);
        // Other pairs, and pairs that the peer decides for.
        let _other = peers.claim(6, 101, &[]).unwrap();
        assert!(peers.claim(11, 1, &[]).is_ok() && peers.claim(11, 2, &[]).is_ok());
        assert!(peers.claim(10, 1, &[]).is_ok() && peers.claim(10, 2, &[]).is_ok());
        drop(first);
        assert!(peers.claim(5, 102, &[]).is_ok());
    }

    #[test]
    fn b3_a_dead_connection_is_replaced_and_its_claim_frees_nothing() {
        let peers = Peers::new(10);
        let old = peers.claim(5, 100, &[]).unwrap();
        let new = peers.claim(5, 101, &[7, 100]).unwrap();
        assert_eq!(new.replaces, Some(100));
        drop(old);
        assert_eq!(peers.claim(5, 102, &[]).unwrap_err(), 101);
        drop(new);
        assert_eq!(peers.len(), 0);
    }
}
