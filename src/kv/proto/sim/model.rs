//! What must be true: the state of every grant, block and transfer as a user may rely on it, and the checks.

use std::collections::BTreeMap;

use super::super::{Event, Outcome, Part, Piece, Resolution, Seams};
use crate::kv::layout::Layout;

/// An endpoint's process: its index, and how often it has been restarted.
pub(super) type Life = (usize, u32);

pub(super) const BLOCKS: u32 = 48;
pub(super) const BLOCK_BYTES: u64 = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrantState {
    Open,
    Arrived,
    /// In quarantine.
    Aborted,
    Freed,
}

#[derive(Debug)]
pub(super) struct Grant {
    pub(super) blocks: Vec<u32>,
    pub(super) state: GrantState,
    pub(super) revoked: bool,
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) grant: u64,
    /// Of the receiver that issued the grant.
    pub(super) receiver: Life,
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
}

/// A pool of blocks: the user's view and the device's.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) layout: Layout,
    pub(super) bytes: Vec<u8>,
    pub(super) parts: Vec<Part>,
    /// For each block, the grant (targets) or the transfer (sources) that it belongs to.
    pub(super) owner: Vec<Option<u64>>,
}

impl Pool {
    /// Memory in three regions with gaps between their addresses.
    pub(super) fn new(layout: Layout, base: u64, key: u32) -> Self {
        let total = layout.required_bytes();
        let (a, b) = (total / 3 + 1, total / 2 + 7);
        let cuts = [(0, a), (a, b), (b, total)];
        let parts = cuts.iter().enumerate();
        let parts = parts.map(|(i, &(s, e))| Part {
            addr: base + s + 4096 * i as u64,
            len: e - s,
            key: key + i as u32,
        });
        let owner = vec![None; layout.blocks() as usize];
        Self { layout, bytes: vec![0xee; total as usize], parts: parts.collect(), owner }
    }

    pub(super) fn seams(&self) -> Seams {
        Seams::new(self.parts.clone()).expect("parts are valid")
    }

    /// Offset of an access that a device would allow.
    pub(super) fn offset(&self, addr: u64, len: u32, key: u32) -> usize {
        let mut start = 0;
        for p in &self.parts {
            if p.key == key {
                assert!(
                    addr >= p.addr && addr + u64::from(len) <= p.addr + p.len,
                    "r10: outside of the region"
                );
                return (start + addr - p.addr) as usize;
            }
            start += p.len;
        }
        panic!("r10: no region has key {key}");
    }

    /// Blocks that a range of bytes touches.
    pub(super) fn blocks_at(&self, offset: usize, len: usize) -> Vec<u32> {
        let (start, end) = (offset as u64, (offset + len) as u64);
        let mut touched = Vec::new();
        for layer in 0..self.layout.layers() {
            for block in 0..self.layout.blocks() {
                let at = self.layout.offset(layer, block).expect("inside");
                if at < end && start < at + self.layout.block_bytes() && !touched.contains(&block) {
                    touched.push(block);
                }
            }
        }
        touched
    }

    pub(super) fn free_blocks(&self) -> Vec<u32> {
        (0..self.layout.blocks()).filter(|&b| self.owner[b as usize].is_none()).collect()
    }

    fn for_each_byte(&mut self, blocks: &[u32], mut f: impl FnMut(usize, u64, u64, &mut u8)) {
        for (i, &block) in blocks.iter().enumerate() {
            for layer in 0..self.layout.layers() {
                let at = self.layout.offset(layer, block).expect("inside");
                for byte in 0..self.layout.block_bytes() {
                    f(i, u64::from(layer), byte, &mut self.bytes[(at + byte) as usize]);
                }
            }
        }
    }

    /// Content that depends on transfer, position, layer and byte, so that a misplaced block shows.
    pub(super) fn fill(&mut self, blocks: &[u32], tag: u64) {
        self.for_each_byte(blocks, |i, layer, byte, v| *v = pattern(tag, i as u64, layer, byte));
    }

    pub(super) fn poison(&mut self, blocks: &[u32]) {
        self.for_each_byte(blocks, |_, _, _, v| *v = 0xee);
    }

    pub(super) fn check(&mut self, blocks: &[u32], tag: u64) {
        self.for_each_byte(blocks, |i, layer, byte, v| {
            assert_eq!(
                *v,
                pattern(tag, i as u64, layer, byte),
                "k1: block {i}, layer {layer}, byte {byte} is torn"
            );
        });
    }

    pub(super) fn release(&mut self, blocks: &[u32]) {
        for &b in blocks {
            self.owner[b as usize] = None;
        }
        self.poison(blocks);
    }
}

fn pattern(tag: u64, i: u64, layer: u64, byte: u64) -> u8 {
    (tag.wrapping_mul(31) ^ i.wrapping_mul(97) ^ layer.wrapping_mul(7) ^ byte).wrapping_mul(0x9e37_79b1) as u8
}

/// The truth about everything that was ever granted and written.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) grants: BTreeMap<(Life, u64), Grant>,
    pub(super) transfers: BTreeMap<(Life, u64), Transfer>,
}

/// The circumstances of an event.
pub(super) struct Context<'a> {
    pub(super) me: Life,
    pub(super) peer: Life,
    pub(super) now: u64,
    /// Deadlines may be late by this: the time that the caller takes to react, or was frozen.
    pub(super) slack: Option<u64>,
    pub(super) sources: &'a mut Pool,
    pub(super) targets: &'a mut Pool,
}

impl Model {
    /// Checks an event against what went before.
    pub(super) fn on_event(&mut self, cx: &mut Context<'_>, event: &Event) {
        match *event {
            Event::Sent { id } => {
                let t = self.transfers.get_mut(&(cx.me, id.0)).expect("r2: sent what was not accepted");
                assert!(!std::mem::replace(&mut t.sent, true), "r2: sent twice");
            }
            Event::Done { id, outcome, .. } => {
                let t = self.transfers.get_mut(&(cx.me, id.0)).expect("r2: done what was not accepted");
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
                let revoked = self.grants.get(&(t.receiver, t.grant)).is_some_and(|g| g.revoked);
                let landed = outcome == Outcome::Landed;
                assert!(
                    landed || !t.ample || revoked,
                    "k1: {id:?} did not land, and nothing was wrong: {outcome:?}"
                );
                t.done = Some(outcome);
            }
            Event::Released { id } => {
                let t = self.transfers.get_mut(&(cx.me, id.0)).expect("r2: released what was not accepted");
                assert!(!std::mem::replace(&mut t.released, true), "r2: released twice");
                if let Some(slack) = cx.slack {
                    assert!(
                        cx.now <= t.deadline + slack,
                        "k5: released at {}, deadline {}",
                        cx.now,
                        t.deadline
                    );
                }
                cx.sources.release(&t.sources);
            }
            Event::Resolved { id, resolution } => {
                let t = self.transfers.get_mut(&(cx.me, id.0)).expect("k2: resolved what was not accepted");
                assert!(matches!(t.done, Some(Outcome::InDoubt(_))), "k2: resolved what was not in doubt");
                assert!(t.resolution.replace(resolution).is_none(), "k2: resolved twice");
                match resolution {
                    Resolution::Landed => assert!(t.delivered, "k2: resolved wrongly"),
                    Resolution::NotDelivered => assert!(!t.delivered, "k2: resolved wrongly"),
                    Resolution::Unknown => assert_ne!(t.receiver, cx.peer, "k6: the peer has not restarted"),
                }
            }
            Event::Arrived { transfer, grant, bytes, tag } => {
                let g = self.grants.get_mut(&(cx.me, grant)).expect("k6: arrived under an unknown grant");
                assert_eq!(g.state, GrantState::Open, "k2, k4: arrived under a grant that is over");
                g.state = GrantState::Arrived;
                let t = self.transfers.get_mut(&(cx.peer, transfer.0)).expect("k2: nobody sent that");
                assert!(!std::mem::replace(&mut t.delivered, true), "k2: delivered twice");
                assert!(
                    !matches!(t.done, Some(Outcome::NotDelivered(_) | Outcome::Landed)),
                    "k2: done before"
                );
                assert!(t.resolution.is_none(), "k2: resolved before");
                let layers = u64::from(cx.targets.layout.layers());
                let want = u64::from(t.blocks) * layers * BLOCK_BYTES;
                assert_eq!((t.grant, t.receiver, t.tag, want), (grant, cx.me, tag, bytes));
                let used = &g.blocks[..t.blocks as usize];
                cx.targets.check(used, tag);
                cx.targets.release(&g.blocks);
            }
            Event::Aborted { grant, .. } => {
                let g = self.grants.get_mut(&(cx.me, grant)).expect("k4: aborted an unknown grant");
                assert_eq!(g.state, GrantState::Open, "k4: aborted a grant that is over");
                g.state = GrantState::Aborted;
            }
            Event::Freed { grant } => {
                let g = self.grants.get_mut(&(cx.me, grant)).expect("k4: freed an unknown grant");
                assert_eq!(g.state, GrantState::Aborted, "k4: freed without an abort, or twice");
                g.state = GrantState::Freed;
                cx.targets.release(&g.blocks);
            }
            Event::Message(_) | Event::PeerClosed | Event::Lost(_) | Event::Closed => {}
        }
    }

    /// The target's device places a piece.
    pub(super) fn on_placed(
        &self,
        sender: Life,
        receiver: Life,
        id: u64,
        offset: usize,
        piece: &Piece,
        targets: &Pool,
    ) {
        let t = self.transfers.get(&(sender, id)).expect("a write of no transfer");
        assert_eq!(t.receiver, receiver, "k6: a write under a grant of another epoch");
        for block in targets.blocks_at(offset, piece.len as usize) {
            assert_eq!(targets.owner[block as usize], Some(t.grant), "k4: a late write hits block {block}");
        }
    }

    /// Nothing of this process remains.
    pub(super) fn forget(&mut self, life: Life) {
        self.grants.retain(|(l, _), _| *l != life);
        self.transfers.retain(|(l, _), _| *l != life);
    }
}
