//! What must be true: the state of every grant and transfer as a user may rely on it, and the checks of each event.

use std::collections::BTreeMap;

use super::super::{Event, Outcome, Piece, Resolution};
use super::pool::{BLOCK_BYTES, Pool};

/// An endpoint's process: its index, and how often it has been restarted.
pub(super) type Life = (usize, u32);
/// Who has issued a grant, the endpoint that it is for, its number.
pub(super) type GrantKey = (Life, usize, u64);
/// Who sends a transfer, the endpoint that receives it, its number.
pub(super) type TransferKey = (Life, usize, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrantState {
    Open,
    Arrived,
    /// In quarantine.
    Aborted,
    Freed,
    /// The process that had issued it is gone.
    Gone,
}

#[derive(Debug)]
pub(super) struct Grant {
    pub(super) blocks: Vec<u32>,
    pub(super) state: GrantState,
    pub(super) revoked: bool,
    /// A transfer was accepted under it.
    pub(super) used: bool,
}

#[derive(Debug)]
pub(super) struct Transfer {
    /// Of the receiver.
    pub(super) grant: GrantKey,
    pub(super) blocks: u32,
    pub(super) sources: Vec<u32>,
    pub(super) deadline: u64,
    pub(super) tag: u64,
    /// Its time is ample and nothing has interfered: it must land.
    pub(super) ample: bool,
    pub(super) sent: bool,
    pub(super) done: Option<Outcome>,
    pub(super) released: bool,
    pub(super) delivered: bool,
    pub(super) resolution: Option<Resolution>,
    /// The process that sends it is gone: nobody waits for its end.
    pub(super) gone: bool,
    /// A rail has failed meanwhile: it may have been written again.
    pub(super) disturbed: bool,
    /// What has been executed at the target.
    pub(super) executed: Vec<Piece>,
}

/// The truth about everything that was ever granted and written.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) grants: BTreeMap<GrantKey, Grant>,
    pub(super) transfers: BTreeMap<TransferKey, Transfer>,
    /// Aborts that a receiver must have heard of by a time, if the channel lives.
    pub(super) aborts: Vec<(u64, GrantKey)>,
}

/// The circumstances of an event.
pub(super) struct Context<'a> {
    pub(super) me: Life,
    /// The process at the other end of the connection.
    pub(super) peer: Life,
    pub(super) now: u64,
    /// Deadlines may be late by this: the time that the caller takes to react. `None` if it was frozen.
    pub(super) slack: Option<u64>,
    /// The longest WRITE of a channel with one rail.
    pub(super) max_write: Option<u32>,
    pub(super) sources: &'a mut Pool,
    pub(super) targets: &'a mut Pool,
}

impl Model {
    fn sent_by(&mut self, cx: &Context<'_>, id: u64, what: &str) -> &mut Transfer {
        let transfer = self.transfers.get_mut(&(cx.me, cx.peer.0, id));
        transfer.unwrap_or_else(|| panic!("r2: {what} what was not accepted: {id}"))
    }

    fn granted_by(&mut self, cx: &Context<'_>, id: u64, what: &str) -> &mut Grant {
        let grant = self.grants.get_mut(&(cx.me, cx.peer.0, id));
        grant.unwrap_or_else(|| panic!("k4, k6: {what} under an unknown grant: {id}"))
    }

    /// Checks an event against what went before.
    pub(super) fn on_event(&mut self, cx: &mut Context<'_>, event: &Event) {
        match *event {
            Event::Sent { id } => {
                let t = self.sent_by(cx, id.0, "sent");
                assert!(!std::mem::replace(&mut t.sent, true), "r2: sent twice");
            }
            Event::Done { id, outcome, .. } => self.on_done(cx, id.0, outcome),
            Event::Released { id } => {
                let (now, slack) = (cx.now, cx.slack);
                let t = self.sent_by(cx, id.0, "released");
                assert!(!std::mem::replace(&mut t.released, true), "r2: released twice");
                if let Some(slack) = slack {
                    assert!(now <= t.deadline + slack, "k5: released at {now}, deadline {}", t.deadline);
                }
                cx.sources.release(&t.sources, (cx.peer.0, id.0));
            }
            Event::Resolved { id, resolution } => {
                let t = self.sent_by(cx, id.0, "resolved");
                assert!(matches!(t.done, Some(Outcome::InDoubt(_))), "k2: resolved what was not in doubt");
                assert!(t.resolution.replace(resolution).is_none(), "k2: resolved twice");
                match resolution {
                    Resolution::Landed => assert!(t.delivered, "k2: resolved to landed, wrongly"),
                    Resolution::NotDelivered => assert!(!t.delivered, "k2: resolved to not, wrongly"),
                    Resolution::Unknown => assert_ne!(t.grant.0, cx.peer, "k6: the peer has not restarted"),
                }
            }
            Event::Arrived { transfer, grant, bytes, tag } => {
                self.on_arrived(cx, transfer.0, grant, bytes, tag)
            }
            Event::Aborted { grant, .. } => {
                let g = self.granted_by(cx, grant, "aborted");
                assert_eq!(g.state, GrantState::Open, "k4: aborted a grant that is over");
                g.state = GrantState::Aborted;
            }
            Event::Freed { grant } => {
                let g = self.granted_by(cx, grant, "freed");
                assert_eq!(g.state, GrantState::Aborted, "k4: freed without an abort, or twice");
                g.state = GrantState::Freed;
                cx.targets.release(&g.blocks, (cx.peer.0, grant));
            }
            Event::Message(_) | Event::PeerClosed | Event::Lost(_) | Event::Closed => {}
            Event::RailDown { .. } | Event::RailUp { .. } | Event::RailTalk { .. } => {}
        }
    }

    fn on_done(&mut self, cx: &Context<'_>, id: u64, outcome: Outcome) {
        let t = self.sent_by(cx, id, "done");
        assert!(t.done.is_none(), "r2: {id:?} done twice");
        match outcome {
            Outcome::Landed => assert!(t.delivered, "k1: {id:?} landed, and was not delivered"),
            Outcome::NotDelivered(r) => {
                assert!(!t.delivered, "k2: {id:?} not delivered ({r}), yet it was")
            }
            Outcome::InDoubt(_) => {}
        }
        if let Some(slack) = cx.slack {
            assert!(cx.now <= t.deadline + slack, "k5: done at {}, deadline {}", cx.now, t.deadline);
        }
        t.done = Some(outcome);
        let (grant, ample) = (t.grant, t.ample);
        let revoked = self.grants.get(&grant).is_some_and(|g| g.revoked);
        let landed = outcome == Outcome::Landed;
        assert!(landed || !ample || revoked, "k1: {id:?} did not land, and nothing was wrong: {outcome:?}");
        if matches!(outcome, Outcome::NotDelivered(_)) {
            self.aborts.push((cx.now, grant));
        }
    }

    fn on_arrived(&mut self, cx: &mut Context<'_>, transfer: u64, grant: u64, bytes: u64, tag: u64) {
        let g = self.granted_by(cx, grant, "arrived");
        assert_eq!(g.state, GrantState::Open, "k2, k4: arrived under a grant that is over");
        g.state = GrantState::Arrived;
        let blocks = std::mem::take(&mut g.blocks);
        let t = self.transfers.get_mut(&(cx.peer, cx.me.0, transfer)).expect("k2: nobody sent that");
        assert!(!std::mem::replace(&mut t.delivered, true), "k2: delivered twice");
        assert!(
            !matches!(t.done, Some(Outcome::NotDelivered(_) | Outcome::Landed)),
            "k2: arrived after its end"
        );
        assert!(t.resolution.is_none(), "k2: resolved before");
        let want = u64::from(t.blocks) * u64::from(cx.targets.layout.layers()) * BLOCK_BYTES;
        assert_eq!((t.grant, t.tag, want), ((cx.me, cx.peer.0, grant), tag, bytes));
        cx.targets.check(&blocks[..t.blocks as usize], tag);
        cx.targets.release(&blocks, (cx.peer.0, grant));
        if !t.disturbed {
            check_pieces(&mut t.executed, want, cx.max_write);
        }
    }

    /// A piece, or a part of one, is placed.
    pub(super) fn on_placed(
        &self,
        key: TransferKey,
        receiver: Life,
        offset: usize,
        piece: &Piece,
        targets: &Pool,
    ) {
        let t = &self.transfers[&key];
        assert_eq!(t.grant.0, receiver, "k6: a write under a grant of another epoch");
        for block in targets.blocks_at(offset, piece.len as usize) {
            let owner = Some((key.0.0, t.grant.2));
            assert_eq!(targets.owner[block as usize], owner, "k4: a late write hits block {block}");
        }
    }

    /// A WRITE has been executed: all of its piece is in place.
    pub(super) fn on_executed(&mut self, key: TransferKey, piece: &Piece) {
        self.transfers.get_mut(&key).expect("a write of no transfer").executed.push(*piece);
    }

    /// A transfer is under way between two processes.
    pub(super) fn is_busy(&self, [a, b]: [Life; 2]) -> bool {
        [(a, b), (b, a)].into_iter().any(|(from, to)| {
            let mut all = self.transfers.range((from, to.0, 0)..=(from, to.0, u64::MAX));
            all.any(|(_, t)| t.done.is_none() && t.blocks > 0)
        })
    }

    /// A rail of a channel has failed.
    pub(super) fn disturb(&mut self, [a, b]: [Life; 2]) {
        for (from, to) in [(a, b), (b, a)] {
            let all = self.transfers.range_mut((from, to.0, 0)..=(from, to.0, u64::MAX));
            all.for_each(|(_, t)| t.disturbed = true);
        }
    }

    /// The process is gone, and nobody waits for its ends.
    pub(super) fn process_ended(&mut self, life: Life) {
        for (_, g) in self.grants.iter_mut().filter(|((l, ..), _)| *l == life) {
            g.state = GrantState::Gone;
        }
        for (_, t) in self.transfers.iter_mut().filter(|((l, ..), _)| *l == life) {
            t.gone = true;
        }
    }
}

/// The pieces of a transfer that has arrived: all of it, nothing twice, and neighbours together, where one rail has carried
/// them (K8).
fn check_pieces(pieces: &mut [Piece], bytes: u64, max_write: Option<u32>) {
    // Rails see other addresses of the same memory.
    pieces.sort_unstable_by_key(|p| p.dst_addr);
    assert_eq!(pieces.iter().map(|p| u64::from(p.len)).sum::<u64>(), bytes, "k8: bytes written twice");
    for pair in pieces.windows(2) {
        let [a, b] = pair else { continue };
        let len = u64::from(a.len);
        assert!(a.dst_addr + len <= b.dst_addr, "k8: pieces overlap");
        let neighbours = a.dst_addr + len == b.dst_addr && a.src_addr + len == b.src_addr;
        let alike = neighbours && (a.lkey, a.rkey) == (b.lkey, b.rkey);
        let mergeable = alike && max_write.is_some_and(|max| a.len + b.len <= max);
        assert!(!mergeable, "k8: neighbours of {} and {} bytes travel apart", a.len, b.len);
    }
}
