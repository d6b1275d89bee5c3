//! Which peers an endpoint knows, and the one connection that it has with each (B3).
//!
//! Two endpoints have one channel, whoever dialled. When both dial at once, the dial of the endpoint with the higher
//! epoch is kept; the other side's `connect` gives that channel, too. The rule needs to know who is dialled, which a
//! dial learns only from the reply: so an endpoint that has such dials under way lets the hello of a lower epoch wait
//! until they are identified. Nobody waits for a lower one, so nothing waits in a circle.
//!
//! What must outlive a connection, its ledger, is kept here between two connections of the same two epochs (K2).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;

use super::channel::ChannelInner;
use super::lock;
use super::proto::Ledger;

/// Connections that ended here and of which a peer may not know: named in hellos, so that it lets go of them.
const DEAD_KEPT: usize = 64;

/// The peers of an endpoint.
#[derive(Debug)]
pub(super) struct Peers {
    epoch: u64,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    by_epoch: HashMap<u64, Peer>,
    /// Dials whose peer is not known yet.
    dials: usize,
    dead: VecDeque<u64>,
}

#[derive(Debug)]
struct Peer {
    /// Here while no connection uses it.
    ledger: Option<Ledger>,
    link: Link,
}

#[derive(Debug)]
enum Link {
    None,
    /// A handshake under way.
    Pending {
        connection: u64,
        by_us: bool,
    },
    Live {
        connection: u64,
        channel: Weak<ChannelInner>,
    },
}

/// May a handshake go on?
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    Granted,
    /// This connection is kept instead.
    Taken(u64),
    /// Ask again after a change.
    Wait,
}

impl Peers {
    pub(super) fn new(epoch: u64) -> Self {
        Self { epoch, state: Mutex::default(), changed: Notify::new() }
    }

    /// Counts a dial until it is identified: until the guard is dropped.
    pub(super) fn dialing(self: &Arc<Self>) -> Dialing {
        lock(&self.state).dials += 1;
        Dialing(self.clone())
    }

    pub(super) fn dead(&self) -> Vec<u64> {
        lock(&self.state).dead.iter().copied().collect()
    }

    /// Claims the link with `peer` for a handshake.
    pub(super) fn claim(&self, peer: u64, connection: u64, by_us: bool, dead: &[u64]) -> Claim {
        let mut state = lock(&self.state);
        if !by_us && peer < self.epoch && state.dials > 0 {
            return Claim::Wait;
        }
        let entry = state
            .by_epoch
            .entry(peer)
            .or_insert_with(|| Peer { ledger: Some(Ledger::new(self.epoch, peer)), link: Link::None });
        match &entry.link {
            Link::None => {}
            Link::Live { connection, channel } => {
                let (connection, live) = (*connection, channel.upgrade());
                // What follows takes the channel's lock and may call back to us (its end, its last handle's drop).
                drop(state);
                if let Some(channel) = live
                    && channel.driver.is_open()
                {
                    if !dead.contains(&connection) {
                        return Claim::Taken(connection);
                    }
                    channel.driver.kill();
                }
                return Claim::Wait;
            }
            Link::Pending { connection: other, by_us: theirs } => {
                // The initiator with the higher epoch is kept; of two by the same one, the first.
                let new_wins = *theirs != by_us && (by_us == (self.epoch > peer));
                if !new_wins {
                    return Claim::Taken(*other);
                }
            }
        }
        entry.link = Link::Pending { connection, by_us };
        Claim::Granted
    }

    /// The ledger for a connection whose handshake has come through, if its claim still stands. Else the connection
    /// that has taken its place.
    pub(super) fn commit(&self, peer: u64, connection: u64) -> Result<Ledger, u64> {
        let mut state = lock(&self.state);
        let entry = state.by_epoch.get_mut(&peer).ok_or(connection)?;
        match &entry.link {
            Link::Pending { connection: pending, .. } if *pending == connection => {
                entry.ledger.take().ok_or(connection)
            }
            Link::Pending { connection: other, .. } | Link::Live { connection: other, .. } => Err(*other),
            Link::None => Err(connection),
        }
    }

    /// The committed connection is a channel now.
    pub(super) fn live(&self, peer: u64, connection: u64, channel: &Arc<ChannelInner>) {
        if let Some(entry) = lock(&self.state).by_epoch.get_mut(&peer) {
            entry.link = Link::Live { connection, channel: Arc::downgrade(channel) };
        }
        self.changed.notify_waiters();
    }

    /// A handshake has ended without a channel.
    pub(super) fn release(&self, peer: u64, connection: u64) {
        if let Some(entry) = lock(&self.state).by_epoch.get_mut(&peer)
            && matches!(&entry.link, Link::Pending { connection: pending, .. } if *pending == connection)
        {
            entry.link = Link::None;
        }
        self.changed.notify_waiters();
    }

    /// A committed connection has ended, and its queue pairs are gone.
    pub(super) fn ended(&self, peer: u64, connection: u64, ledger: Ledger) {
        let mut state = lock(&self.state);
        if let Some(entry) = state.by_epoch.get_mut(&peer) {
            entry.ledger = Some(ledger);
            match &entry.link {
                Link::Live { connection: own, .. } | Link::Pending { connection: own, .. } if *own == connection => {
                    entry.link = Link::None;
                }
                _ => {}
            }
        }
        if state.dead.len() == DEAD_KEPT {
            state.dead.pop_front();
        }
        state.dead.push_back(connection);
        drop(state);
        self.changed.notify_waiters();
    }

    /// The channel of a live connection, by its id.
    pub(super) fn channel(&self, connection: u64) -> Option<Arc<ChannelInner>> {
        lock(&self.state).by_epoch.values().find_map(|peer| match &peer.link {
            Link::Live { connection: own, channel } if *own == connection => channel.upgrade(),
            _ => None,
        })
    }

    /// Calls `ready` at each change until it has an answer.
    pub(super) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enlisted before the look, so that a change in between is not missed.
            changed.as_mut().enable();
            if let Some(out) = ready() {
                return out;
            }
            changed.await;
        }
    }
}

/// See [`Peers::dialing`].
#[derive(Debug)]
pub(super) struct Dialing(Arc<Peers>);

impl Drop for Dialing {
    fn drop(&mut self) {
        lock(&self.0.state).dials -= 1;
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b3_the_dial_of_the_higher_epoch_is_kept_on_both_sides() {
        let (low, high) = (Peers::new(1), Peers::new(2));
        // Each has claimed its own dial (c1 by low, c2 by high), and then hears the other's hello.
        assert_eq!(low.claim(2, 0xc1, true, &[]), Claim::Granted);
        assert_eq!(high.claim(1, 0xc2, true, &[]), Claim::Granted);
        assert_eq!(low.claim(2, 0xc2, false, &[]), Claim::Granted);
        assert_eq!(high.claim(1, 0xc1, false, &[]), Claim::Taken(0xc2));
        assert_eq!(low.commit(2, 0xc1).err(), Some(0xc2));
        assert!(low.commit(2, 0xc2).is_ok());
        assert!(high.commit(1, 0xc2).is_ok());
    }

    #[test]
    fn b3_a_hello_of_a_lower_epoch_waits_for_unidentified_dials() {
        let high = Arc::new(Peers::new(2));
        let dialing = high.dialing();
        assert_eq!(high.claim(1, 0xc1, false, &[]), Claim::Wait);
        assert_eq!(high.claim(3, 0xc3, false, &[]), Claim::Granted);
        drop(dialing);
        assert_eq!(high.claim(1, 0xc1, false, &[]), Claim::Granted);
    }

    #[test]
    fn b3_a_duplicate_hello_is_told_of_the_first() {
        let peers = Peers::new(1);
        assert_eq!(peers.claim(2, 0xa, false, &[]), Claim::Granted);
        assert_eq!(peers.claim(2, 0xb, false, &[]), Claim::Taken(0xa));
        peers.release(2, 0xa);
        assert_eq!(peers.claim(2, 0xb, false, &[]), Claim::Granted);
    }
}
