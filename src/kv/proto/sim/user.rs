//! What the users of the simulation do, at random, and what they may expect of each call.

use super::super::{Connection, GrantRef, PlanBuilder, Refused, TransferId, WriteRequest};
use super::model::{BLOCK_BYTES, Grant, GrantState, Transfer};
use super::world::{AMPLE, World, epoch};

impl World {
    /// The user of an endpoint does something.
    pub(super) fn act(&mut self, ep: usize) {
        if self.ends[ep].frozen || self.closing {
            return;
        }
        let Some(mut conn) = self.ends[ep].conn.take() else { return };
        match self.rng.below(20) {
            0..8 => self.act_grant(ep, &mut conn),
            8..16 => self.act_write(ep, &mut conn),
            16 => {
                let me = self.life(ep);
                let live = self.model.transfers.iter().filter(|((l, _), t)| *l == me && t.done.is_none());
                let live: Vec<u64> = live.map(|((_, id), _)| *id).collect();
                if !live.is_empty() {
                    let id = self.rng.pick(&live);
                    self.model.transfers.get_mut(&(me, id)).expect("live").ample = false;
                    conn.abort(TransferId(id), self.instant(self.now));
                }
            }
            17 => {
                let me = self.life(ep);
                let open =
                    self.model.grants.iter().filter(|((l, _), g)| *l == me && g.state == GrantState::Open);
                let open: Vec<u64> = open.map(|((_, id), _)| *id).collect();
                if !open.is_empty() && conn.poll_timeout().is_some() {
                    let id = self.rng.pick(&open);
                    self.model.grants.get_mut(&(me, id)).expect("open").revoked = true;
                    conn.revoke_grant(id, self.instant(self.now));
                }
            }
            _ => {
                let most = self.rng.pick(&[1, 2, 300, 3000]);
                let len = self.rng.below(most);
                let message: Vec<u8> = (0..len).map(|i| i as u8).collect();
                if conn.send_message(message.clone()).is_ok() {
                    self.ends[ep].messages.push_back(message);
                }
            }
        }
        self.events(ep, &mut conn);
        self.ends[ep].conn = Some(conn);
        self.wake(ep, self.now);
    }

    pub(super) fn act_grant(&mut self, ep: usize, conn: &mut Connection) {
        let me = self.life(ep);
        let mut blocks = self.ends[ep].targets.free_blocks();
        let want = self.rng.range(1, 6) as usize;
        if blocks.len() < want || conn.poll_timeout().is_none() {
            return;
        }
        // Mostly neighbours, sometimes not.
        let at = self.rng.below((blocks.len() - want + 1) as u64) as usize;
        blocks = blocks[at..at + want].to_vec();
        if self.rng.one_in(3) {
            blocks.reverse();
        }
        let id = conn.issue_grant(
            blocks.len() as u64 * BLOCK_BYTES * u64::from(self.ends[ep].targets.layout.layers()),
        );
        for &b in &blocks {
            self.ends[ep].targets.owner[b as usize] = Some(id);
        }
        let state = GrantState::Open;
        let fresh = self.model.grants.insert((me, id), Grant { blocks, state, revoked: false });
        assert!(fresh.is_none(), "k6: a grant number used twice");
        if self.rng.one_in(2) {
            let message = [b"g".as_slice(), &id.to_le_bytes()].concat();
            if conn.send_message(message.clone()).is_ok() {
                self.ends[ep].messages.push_back(message);
            }
        } else {
            self.ends[1 - ep].usable.push((me, id));
        }
    }

    pub(super) fn act_write(&mut self, ep: usize, conn: &mut Connection) {
        if self.ends[ep].usable.is_empty() {
            return;
        }
        let (me, peer) = (self.life(ep), self.life(1 - ep));
        let at = self.rng.below(self.ends[ep].usable.len() as u64) as usize;
        let (owner, id) = self.ends[ep].usable[at];
        // Sometimes a grant is kept, to be used again.
        if !self.rng.one_in(8) {
            self.ends[ep].usable.remove(at);
        }
        let sources = self.ends[ep].sources.free_blocks();
        let (granted, revoked) = match self.model.grants.get(&(owner, id)) {
            Some(g) => (
                g.blocks.clone(),
                g.revoked || g.state == GrantState::Aborted || g.state == GrantState::Freed,
            ),
            None => ((0..3).collect(), false),
        };
        let count = self.rng.below(granted.len() as u64 + 1) as usize;
        if sources.len() < count {
            return;
        }
        let sources = sources[..count].to_vec();
        let tag = self.tags;
        self.tags += 1;
        let (from, to) = (&self.ends[ep].sources, &self.ends[1 - ep].targets);
        let mut plan =
            PlanBuilder::new((&from.layout, &from.seams()), (&to.layout, &to.seams())).expect("alike");
        for (s, t) in sources.iter().zip(&granted) {
            plan.push(*s, *t, 1).expect("in range");
        }
        let time = match self.rng.below(4) {
            0 => self.rng.below(1000),
            1 => self.rng.below(30_000),
            _ => AMPLE,
        };
        let deadline = self.now + time;
        let layers = u64::from(from.layout.layers());
        let grant = GrantRef {
            id,
            owner_epoch: epoch(owner),
            bound_epoch: epoch(me),
            max_bytes: granted.len() as u64 * BLOCK_BYTES * layers,
        };
        let request =
            WriteRequest { grant, plan: plan.build().expect("small"), tag, deadline: self.instant(deadline) };
        let used_before =
            self.model.transfers.iter().any(|((l, _), t)| *l == me && (t.receiver, t.grant) == (owner, id));
        match conn.write(request, self.instant(self.now)) {
            Ok(transfer) => {
                assert_eq!(owner, peer, "k6: a grant of an old epoch was accepted");
                assert!(!used_before, "k6: a grant was accepted twice");
                let end = &mut self.ends[ep];
                for &s in &sources {
                    end.sources.owner[s as usize] = Some(transfer.0);
                }
                end.sources.fill(&sources, tag);
                let transfer_model = Transfer {
                    grant: id,
                    receiver: owner,
                    blocks: count as u32,
                    sources,
                    deadline,
                    tag,
                    ample: time == AMPLE && !self.faults,
                    sent: false,
                    done: None,
                    released: false,
                    delivered: false,
                    resolution: None,
                };
                let before = self.model.transfers.insert((me, transfer.0), transfer_model);
                assert!(before.is_none(), "k2: a transfer number used twice");
            }
            Err(Refused::PeerRestarted { .. }) => assert_ne!(owner, peer),
            Err(Refused::StaleGrant { .. }) => {
                assert!(used_before || revoked, "k6: a fresh grant was refused")
            }
            Err(Refused::Closed) => {}
            Err(e) => panic!("refused: {e}"),
        }
    }
}
