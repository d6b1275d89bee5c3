//! Which peers an endpoint knows, and the one connection that it has with each (B3).
//!
//! Two endpoints have one channel, whoever dialled, also when both do so at once: **the endpoint with the greater epoch
//! decides for the pair**. It claims the pair for a connection before it says `HelloReply` (as server) or `Ready` (as
//! client), keeps the first, and refuses every other with the name of the one that is kept; the side that was refused
//! then gives that one to its user. So a decision is taken in one place, and costs no round trip.
//!
//! What must outlive a connection, its ledger, is kept here between two connections of the same two epochs (K2). A peer
//! with which nothing was done leaves nothing (B4). Of the others, those whose connections ended last are kept: a peer that
//! was restarted never comes back under its old epoch, and does not say so. Whoever leaves many gives way to itself first, so
//! that one who comes under ever new epochs pushes nobody else out. One that does come back after it was forgotten is answered that
//! what it asks about is not known any more; new numbers are behind all that it may remember.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;

use super::channel::ChannelInner;
use super::limits::network;
use super::lock;
use super::proto::{Ledger, Numbers};
use crate::connect::PeerAuth;

/// Connections that ended here and of which a peer may not know: named in hellos, so that it lets go of them.
const DEAD_KEPT: usize = 64;
/// Peers without a connection whose ledgers are kept.
const IDLE_KEPT: usize = 4096;

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
    /// Peers whose connection has ended, the longest ago first. They may have another by now.
    ended: VecDeque<u64>,
    /// Behind all numbers of ledgers that were forgotten.
    forgotten: Numbers,
    dead: VecDeque<u64>,
    /// Makes numbers of origins, which nobody outside can foresee.
    hashed: RandomState,
}

#[derive(Debug)]
struct Peer {
    /// Here while no connection uses it.
    ledger: Option<Ledger>,
    link: Link,
    /// Who it was when it was connected last. Its epoch is nobody else's.
    identity: Option<PeerAuth>,
    /// That, and the network where it was then, as a number.
    origin: u64,
}

impl Peer {
    /// No connection uses its ledger, or is about to.
    fn is_idle(&self) -> bool {
        self.ledger.is_some() && matches!(self.link, Link::None)
    }
}

#[derive(Debug)]
enum Link {
    None,
    /// Claimed by a handshake, where this side decides.
    Claimed(u64),
    Live {
        connection: u64,
        channel: Weak<ChannelInner>,
    },
}

/// May a handshake go on?
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer<T> {
    Yes(T),
    /// This connection is kept instead.
    Taken(u64),
    /// An earlier one is coming to its end: ask again after a change.
    Wait,
    /// Somebody else has been connected under this epoch.
    Other,
}

impl Peers {
    pub(super) fn new(epoch: u64) -> Self {
        Self { epoch, state: Mutex::default(), changed: Notify::new() }
    }

    pub(super) fn dead(&self) -> Vec<u64> {
        lock(&self.state).dead.iter().copied().collect()
    }

    fn decides(&self, peer: u64) -> bool {
        self.epoch > peer
    }

    /// Claims the pair with `peer`, which has shown to be `who`, for a handshake. `dead` are connections that the peer has seen end.
    pub(super) fn claim(&self, peer: u64, who: &PeerAuth, connection: u64, dead: &[u64]) -> Answer<()> {
        let mut state = lock(&self.state);
        if !state.may_be(peer, who) {
            return Answer::Other;
        }
        if !self.decides(peer) {
            return Answer::Yes(());
        }
        let entry = state.peer(self.epoch, peer);
        match &entry.link {
            Link::None => {
                entry.link = Link::Claimed(connection);
                Answer::Yes(())
            }
            Link::Claimed(kept) => Answer::Taken(*kept),
            Link::Live { connection: kept, channel } => {
                let (kept, channel) = (*kept, channel.upgrade());
                // What follows takes the channel's lock and may call back to us (its end, its last handle's drop).
                drop(state);
                match channel {
                    Some(channel) if channel.driver.is_open() && !dead.contains(&kept) => Answer::Taken(kept),
                    Some(channel) => {
                        if channel.driver.is_open() {
                            channel.driver.kill();
                        }
                        Answer::Wait
                    }
                    None => Answer::Wait,
                }
            }
        }
    }

    /// The ledger, for a connection with `who` that has been decided for.
    pub(super) fn commit(&self, peer: u64, who: &PeerAuth, connection: u64) -> Answer<Ledger> {
        let mut state = lock(&self.state);
        let decides = self.decides(peer);
        // Whoever was connected meanwhile is not ended by another.
        if !state.may_be(peer, who) {
            return Answer::Other;
        }
        let entry = state.peer(self.epoch, peer);
        match &entry.link {
            Link::Claimed(kept) if *kept != connection => return Answer::Taken(*kept),
            // A handshake that came twice (B3): the first has become a channel, which stays.
            Link::Live { connection: kept, .. } if *kept == connection => return Answer::Taken(connection),
            Link::Live { channel, .. } => {
                let channel = channel.upgrade();
                drop(state);
                // The peer has decided for a new connection, so the one that we have is dead.
                if !decides && let Some(channel) = channel {
                    channel.driver.kill();
                }
                return Answer::Wait;
            }
            Link::None if decides => return Answer::Taken(connection),
            Link::Claimed(_) | Link::None => {}
        }
        match entry.ledger.take() {
            Some(ledger) => {
                entry.link = Link::Claimed(connection);
                Answer::Yes(ledger)
            }
            None => Answer::Wait,
        }
    }

    /// The committed connection is a channel now, with a peer at `from`.
    pub(super) fn live(&self, peer: u64, from: Option<IpAddr>, connection: u64, channel: &Arc<ChannelInner>) {
        let mut state = lock(&self.state);
        let origin = state.number(&channel.peer_auth, from.map(network));
        let entry = state.peer(self.epoch, peer);
        entry.link = Link::Live { connection, channel: Arc::downgrade(channel) };
        entry.identity = Some(channel.peer_auth.clone());
        entry.origin = origin;
        drop(state);
        self.changed.notify_waiters();
    }

    /// A handshake has ended without a channel. Only the side that decides had claimed something for it: what the other one
    /// has under this id is of a handshake that came before and became a channel (a hello that came twice).
    pub(super) fn release(&self, peer: u64, connection: u64) {
        let mut state = lock(&self.state);
        if self.decides(peer) {
            state.unlink(peer, connection);
        }
        state.forget_blank(peer);
        drop(state);
        self.changed.notify_waiters();
    }

    /// A committed connection has ended, and its queue pairs are gone.
    pub(super) fn ended(&self, peer: u64, connection: u64, ledger: Ledger) {
        let mut state = lock(&self.state);
        state.peer(self.epoch, peer).ledger = Some(ledger);
        state.unlink(peer, connection);
        state.forget_blank(peer);
        state.keep_ended(peer);
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

impl State {
    /// Whether a peer that has shown to be `who` may have this epoch: one that was connected as somebody else may not. It could end
    /// that one's channel, and have its grants.
    fn may_be(&self, peer: u64, who: &PeerAuth) -> bool {
        let known = self.by_epoch.get(&peer).and_then(|peer| peer.identity.as_ref());
        known.is_none_or(|known| known.may_be(who))
    }

    fn peer(&mut self, epoch: u64, peer: u64) -> &mut Peer {
        self.by_epoch.entry(peer).or_insert_with(|| Peer {
            ledger: Some(Ledger::from(epoch, peer, self.forgotten)),
            link: Link::None,
            identity: None,
            origin: 0,
        })
    }

    /// Ends the link, if it is this connection's.
    fn unlink(&mut self, peer: u64, connection: u64) {
        let Some(entry) = self.by_epoch.get_mut(&peer) else { return };
        match &entry.link {
            Link::Claimed(own) | Link::Live { connection: own, .. } if *own == connection => {
                entry.link = Link::None;
            }
            _ => {}
        }
    }

    /// Forgets a peer with which nothing was ever exchanged, so that callers under ever new epochs take no memory (B4).
    fn forget_blank(&mut self, peer: u64) {
        let Entry::Occupied(entry) = self.by_epoch.entry(peer) else { return };
        if entry.get().is_idle() && entry.get().ledger.as_ref().is_some_and(Ledger::is_blank) {
            entry.remove();
        }
    }

    /// Remembers that the connection with `peer` has ended, and forgets one for which that is long ago, if there are too many.
    fn keep_ended(&mut self, peer: u64) {
        self.ended.retain(|&epoch| epoch != peer);
        if self.by_epoch.contains_key(&peer) {
            self.ended.push_back(peer);
        }
        if self.ended.len() <= IDLE_KEPT {
            return;
        }
        let first = self.gives_way(self.origin(peer));
        let oldest = self.ended.iter().position(|&epoch| self.origin(epoch) == first);
        let Some(oldest) = oldest.and_then(|oldest| self.ended.remove(oldest)) else { return };
        if self.by_epoch.get(&oldest).is_some_and(Peer::is_idle)
            && let Some(ledger) = self.by_epoch.remove(&oldest).and_then(|peer| peer.ledger)
        {
            self.forgotten.forget(&ledger);
        }
    }

    /// Who leaves ledgers: holders of one key are told apart by where they come from.
    fn number(&self, who: &PeerAuth, network: Option<IpAddr>) -> u64 {
        self.hashed.hash_one((who, network))
    }

    fn origin(&self, peer: u64) -> u64 {
        self.by_epoch.get(&peer).map_or(0, |peer| peer.origin)
    }

    /// Of which origin the oldest is forgotten for one more of `newcomer`: of whoever has most, and of several that have as many, of the
    /// one whose oldest is older; but of the newcomer, if nobody has more.
    fn gives_way(&self, newcomer: u64) -> u64 {
        let mut counts: HashMap<u64, usize> = HashMap::new();
        for &epoch in &self.ended {
            *counts.entry(self.origin(epoch)).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or_default();
        if most > 1 && counts.get(&newcomer) == Some(&most) {
            return newcomer;
        }
        let mut origins = self.ended.iter().map(|&epoch| self.origin(epoch));
        origins.find(|origin| counts.get(origin) == Some(&most)).unwrap_or(newcomer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANYBODY: PeerAuth = PeerAuth::Anonymous;

    #[test]
    fn b3_the_greater_epoch_decides_and_keeps_the_first() {
        let (low, high) = (Peers::new(1), Peers::new(2));
        // Both dial: 0xc1 by low, 0xc2 by high. The lower one lets both go on.
        assert_eq!(low.claim(2, &ANYBODY, 0xc2, &[]), Answer::Yes(()));
        assert_eq!(low.claim(2, &ANYBODY, 0xc1, &[]), Answer::Yes(()));
        assert_eq!(high.claim(1, &ANYBODY, 0xc1, &[]), Answer::Yes(()));
        assert_eq!(high.claim(1, &ANYBODY, 0xc2, &[]), Answer::Taken(0xc1));
        assert!(matches!(high.commit(1, &ANYBODY, 0xc2), Answer::Taken(0xc1)));
        assert!(matches!(high.commit(1, &ANYBODY, 0xc1), Answer::Yes(_)));
        assert!(matches!(low.commit(2, &ANYBODY, 0xc1), Answer::Yes(_)));
    }

    #[test]
    fn k6_an_epoch_is_that_of_whoever_was_connected_under_it() {
        let peers = Peers::new(1);
        let named = |name: &str| PeerAuth::Certificate(vec![name.to_owned()]);
        let may_be = |peer, who: &PeerAuth| lock(&peers.state).may_be(peer, who);
        assert!(may_be(2, &named("a")));
        // Another asks at the same time, when nobody is known yet.
        assert_eq!(peers.claim(2, &named("b"), 0xb, &[]), Answer::Yes(()));
        let Answer::Yes(ledger) = peers.commit(2, &named("a"), 0xa) else { panic!("no ledger") };
        lock(&peers.state).peer(1, 2).identity = Some(named("a"));
        lock(&peers.state).peer(1, 2).link = Link::Live { connection: 0xa, channel: Weak::new() };
        // It neither ends the connection nor waits for its end.
        assert!(matches!(peers.commit(2, &named("b"), 0xb), Answer::Other));
        assert!(matches!(peers.commit(2, &named("a"), 0xc), Answer::Wait));
        let both = PeerAuth::Certificate(vec!["z".to_owned(), "a".to_owned()]);
        assert!(may_be(2, &named("a")) && may_be(2, &both));
        for other in [named("b"), PeerAuth::Anonymous, PeerAuth::Key("a".to_owned())] {
            assert!(!may_be(2, &other), "{other}");
        }
        // As long as something is remembered of it.
        peers.ended(2, 0xa, ledger);
        assert!(may_be(2, &named("b")));
    }

    #[test]
    fn b3_a_failed_handshake_gives_its_claim_back() {
        let peers = Peers::new(2);
        assert_eq!(peers.claim(1, &ANYBODY, 0xa, &[]), Answer::Yes(()));
        assert_eq!(peers.claim(1, &ANYBODY, 0xb, &[]), Answer::Taken(0xa));
        peers.release(1, 0xb);
        assert_eq!(peers.claim(1, &ANYBODY, 0xb, &[]), Answer::Taken(0xa));
        peers.release(1, 0xa);
        assert_eq!(peers.claim(1, &ANYBODY, 0xb, &[]), Answer::Yes(()));
    }

    /// CASES 24: a duplicate hello changes nothing, on the side that decides and on the other.
    #[test]
    fn b3_a_handshake_that_comes_twice_leaves_the_first_alone() {
        for own in [1, 3] {
            let peers = Peers::new(own);
            let claim = || peers.claim(2, &ANYBODY, 0xa, &[]);
            assert_eq!(claim(), Answer::Yes(()));
            let Answer::Yes(ledger) = peers.commit(2, &ANYBODY, 0xa) else { panic!("no ledger") };
            lock(&peers.state).peer(own, 2).link = Link::Live { connection: 0xa, channel: Weak::new() };
            // Again and again: the end of one leaves the channel for the next to find.
            for _ in 0..2 {
                assert!(matches!(peers.commit(2, &ANYBODY, 0xa), Answer::Taken(0xa)));
                // The side that decides has refused it before.
                if own < 2 {
                    peers.release(2, 0xa);
                }
                assert!(matches!(lock(&peers.state).by_epoch[&2].link, Link::Live { connection: 0xa, .. }));
            }
            peers.ended(2, 0xa, ledger);
        }
    }

    #[test]
    fn b4_peers_with_which_nothing_was_exchanged_are_forgotten() {
        let peers = Peers::new(u64::MAX);
        for peer in 0..100 {
            assert_eq!(peers.claim(peer, &ANYBODY, peer, &[]), Answer::Yes(()));
            if peer % 2 == 0 {
                let Answer::Yes(ledger) = peers.commit(peer, &ANYBODY, peer) else { panic!("no ledger") };
                peers.ended(peer, peer, ledger);
            } else {
                peers.release(peer, peer);
            }
        }
        assert!(lock(&peers.state).by_epoch.is_empty());
    }

    #[test]
    fn k2_a_ledger_has_one_user_at_a_time() {
        let peers = Peers::new(1);
        let Answer::Yes(ledger) = peers.commit(2, &ANYBODY, 0xa) else { panic!("no ledger") };
        // The peer decides for another connection before it has come back.
        assert!(!matches!(peers.commit(2, &ANYBODY, 0xb), Answer::Yes(_)));
        peers.ended(2, 0xa, ledger);
        assert!(matches!(peers.commit(2, &ANYBODY, 0xb), Answer::Yes(_)));
        assert_eq!(peers.dead(), [0xa]);
    }

    #[test]
    fn b4_peers_that_come_and_go_leave_nothing() {
        let peers = Peers::new(u64::MAX);
        for epoch in 1..100 {
            // A handshake that fails, and a channel that does nothing.
            assert_eq!(peers.claim(epoch, &ANYBODY, 0xa, &[]), Answer::Yes(()));
            peers.release(epoch, 0xa);
            assert_eq!(peers.claim(epoch, &ANYBODY, 0xb, &[]), Answer::Yes(()));
            let Answer::Yes(ledger) = peers.commit(epoch, &ANYBODY, 0xb) else { panic!("no ledger") };
            peers.ended(epoch, 0xb, ledger);
        }
        let state = lock(&peers.state);
        assert!(state.by_epoch.is_empty() && state.ended.is_empty());
    }

    #[test]
    fn k2_ledgers_of_peers_that_were_restarted_are_bounded() {
        let peers = Peers::new(u64::MAX);
        let used = |epoch| {
            assert_eq!(peers.claim(epoch, &ANYBODY, epoch, &[]), Answer::Yes(()));
            let Answer::Yes(mut ledger) = peers.commit(epoch, &ANYBODY, epoch) else { panic!("no ledger") };
            ledger.mark_used();
            peers.ended(epoch, epoch, ledger);
        };
        let lives = IDLE_KEPT as u64 + 100;
        for epoch in 1..=lives {
            used(epoch);
            // One that comes back again and again stays, and pushes nobody out.
            used(1);
        }
        let state = lock(&peers.state);
        assert_eq!((state.by_epoch.len(), state.ended.len()), (IDLE_KEPT, IDLE_KEPT));
        assert!(state.by_epoch.contains_key(&1) && state.by_epoch.contains_key(&lives));
    }

    /// Of one that was connected as `who` from `from`.
    fn leave(peers: &Peers, epoch: u64, who: &PeerAuth, from: &str) {
        assert_eq!(peers.claim(epoch, who, epoch, &[]), Answer::Yes(()));
        let Answer::Yes(mut ledger) = peers.commit(epoch, who, epoch) else { panic!("no ledger") };
        let mut state = lock(&peers.state);
        let origin = state.number(who, Some(network(from.parse().unwrap())));
        let peer = state.peer(peers.epoch, epoch);
        peer.identity = Some(who.clone());
        peer.origin = origin;
        drop(state);
        ledger.mark_used();
        peers.ended(epoch, epoch, ledger);
    }

    #[test]
    fn k2_whoever_comes_under_ever_new_epochs_pushes_out_itself() {
        let key = |id: &str| PeerAuth::Key(id.to_owned());
        let peers = Peers::new(u64::MAX);
        let knows = |epochs: std::ops::Range<u64>| {
            let state = lock(&peers.state);
            epochs.filter(|epoch| state.by_epoch.contains_key(epoch)).count()
        };
        // Honest ones: three of a host, and many hosts.
        (0..300).for_each(|n| leave(&peers, n, &key("all"), &format!("10.0.0.{}", n / 3)));
        // One that holds the same key, by another key of its own, and from a network with many addresses.
        let many = 1000..1000 + IDLE_KEPT as u64;
        many.clone().for_each(|n| leave(&peers, n, &key("all"), &format!("fd00::{n:x}")));
        assert_eq!((knows(0..300), knows(many.clone())), (300, IDLE_KEPT - 300));
        let other = 20_000..20_200;
        other.clone().for_each(|n| leave(&peers, n, &key("other"), "10.0.0.1"));
        // It has few, beside whoever has most: that one gives way.
        assert_eq!((knows(0..300), knows(other), knows(many)), (300, 200, IDLE_KEPT - 500));
        // Who comes for the first time finds a place.
        leave(&peers, 50_000, &key("all"), "10.0.1.1");
        assert_eq!((knows(0..300), knows(50_000..50_001)), (300, 1));
    }

    #[test]
    fn k2_numbers_after_a_ledger_was_forgotten_are_behind_those_of_it() {
        let peers = Peers::new(u64::MAX);
        for epoch in 0..=IDLE_KEPT as u64 {
            leave(&peers, epoch, &ANYBODY, "10.0.0.1");
        }
        assert_eq!(peers.claim(0, &ANYBODY, 0xa, &[]), Answer::Yes(()));
        let Answer::Yes(ledger) = peers.commit(0, &ANYBODY, 0xa) else { panic!("no ledger") };
        let mut used = Numbers::default();
        used.forget(&ledger);
        assert_ne!(used, Numbers::default(), "it begins where the forgotten one has ended");
        peers.ended(0, 0xa, ledger);
        // Nothing was done: that leaves nothing, wherever it has begun.
        assert!(!lock(&peers.state).by_epoch.contains_key(&0));
    }
}
