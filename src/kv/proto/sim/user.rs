//! What the users of the simulation do, at random, and what they may expect of each call.

use super::super::{Connection, GrantRef, PlanBuilder, Refused, TransferId, WriteRequest};
use super::Rng;
use super::model::{Grant, GrantState, Transfer};
use super::pool::BLOCK_BYTES;
use super::setup::epoch;
use super::world::{AMPLE, World};

impl World {
    /// A user does something on one side of a channel.
    pub(super) fn act(&mut self, rng: &mut Rng) {
        let ch = rng.below(self.channels.len() as u64) as usize;
        let side = rng.below(2) as usize;
        if self.ends[self.channels[ch].ends[side]].frozen || self.channels[ch].last {
            return;
        }
        let Some(mut conn) = self.channels[ch].sides[side].conn.take() else { return };
        let what = rng.below(60);
        // Sooner or later, and now and then when it is over, or the connection is another one.
        let gated = &mut self.channels[ch].sides[side].gated;
        if what.is_multiple_of(2) && !gated.is_empty() {
            conn.ungate(gated.swap_remove(what as usize % gated.len()));
        }
        self.trace(|| format!("channel {ch}, side {side}: the user does {what}"));
        match what {
            0..16 => self.act_grant(rng, ch, side, &mut conn),
            16..32 => self.act_write(rng, ch, side, &mut conn),
            32..34 => self.act_abort(rng, ch, side, &mut conn),
            34..36 => self.act_revoke(rng, ch, side, &mut conn),
            36 => {
                self.channels[ch].closing = true;
                self.summary.closed_by_users += 1;
                conn.close(self.instant(self.now + AMPLE), self.instant(self.now));
            }
            40..49 => self.act_lend(rng, ch, side, &mut conn),
            49..57 => self.act_read(rng, ch, side, &mut conn),
            57..59 => self.act_abort_read(rng, ch, side, &mut conn),
            59 => self.act_revoke_loan(rng, ch, side, &mut conn),
            _ => {
                let most = rng.pick(&[1, 2, 300, 3000]);
                let len = rng.below(most);
                let message: Vec<u8> = (0..len).map(|i| i as u8).collect();
                self.send_message(ch, side, &mut conn, message);
            }
        }
        self.put_back(ch, side, conn);
        self.wake(ch, side, self.now);
    }

    fn send_message(&mut self, ch: usize, side: usize, conn: &mut Connection, message: Vec<u8>) {
        if conn.send_message(message.clone()).is_ok() {
            self.channels[ch].sides[side].messages.push_back(message);
        }
    }

    fn act_abort(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let range = self.model.transfers.range_mut((me, peer.0, 0)..=(me, peer.0, u64::MAX));
        let mut live: Vec<_> = range.filter(|(_, t)| t.done.is_none()).collect();
        if !live.is_empty() {
            let at = rng.below(live.len() as u64) as usize;
            let (&(_, _, id), t) = live.swap_remove(at);
            t.ample = false;
            conn.abort(TransferId(id), self.instant(self.now));
        }
    }

    fn act_revoke(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let range = self.model.grants.range_mut((me, peer.0, 0)..=(me, peer.0, u64::MAX));
        let mut open: Vec<_> = range.filter(|(_, g)| g.state == GrantState::Open).collect();
        if !open.is_empty() && conn.poll_timeout().is_some() {
            let at = rng.below(open.len() as u64) as usize;
            let (&(_, _, id), g) = open.swap_remove(at);
            g.revoked = true;
            conn.revoke_grant(id, self.instant(self.now));
        }
    }

    fn act_grant(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let targets = &mut self.ends[me.0].targets;
        let mut blocks = targets.free_blocks();
        // A transfer over several rails should be long enough for one to fail meanwhile.
        let most = if self.channels[ch].has_rails() { 12 } else { 6 };
        let want = rng.range(1, most) as usize;
        if blocks.len() < want || conn.poll_timeout().is_none() {
            return;
        }
        // Mostly neighbours, sometimes not.
        let at = rng.below((blocks.len() - want + 1) as u64) as usize;
        blocks = blocks[at..at + want].to_vec();
        if rng.one_in(3) {
            blocks.reverse();
        }
        let id = conn.issue_grant(blocks.len() as u64 * BLOCK_BYTES * u64::from(targets.layout.layers()));
        targets.take(&blocks, (peer.0, id));
        let grant = Grant { blocks, state: GrantState::Open, revoked: false, used: false };
        let before = self.model.grants.insert((me, peer.0, id), grant);
        assert!(before.is_none(), "k6: a grant number used twice");
        if rng.one_in(2) {
            self.send_message(ch, side, conn, [b"g".as_slice(), &id.to_le_bytes()].concat());
        } else if self.life(peer.0) == peer {
            self.channels[ch].sides[1 - side].usable.push((me, peer.0, id));
        }
    }

    fn act_write(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let usable = &mut self.channels[ch].sides[side].usable;
        if usable.is_empty() {
            return;
        }
        let at = rng.below(usable.len() as u64) as usize;
        let key = usable[at];
        // Sometimes a grant is kept, to be used again.
        if !rng.one_in(8) {
            usable.remove(at);
        }
        let (owner, _, id) = key;
        let g = self.model.grants.get(&key).expect("a grant that was issued");
        let (used, state) = (g.used, g.state);
        let revoked = g.revoked || matches!(state, GrantState::Aborted | GrantState::Freed);
        // What arrived has given its blocks back.
        let granted = if g.blocks.is_empty() { vec![0] } else { g.blocks.clone() };
        let count = rng.below(granted.len() as u64 + 1) as usize;
        let [from, to] = [&self.ends[me.0].sources, &self.ends[peer.0].targets];
        let mut sources = from.free_blocks();
        if sources.len() < count {
            return;
        }
        sources.truncate(count);
        let rails = self.channels[ch].cfg.rails.len();
        let mut plan = PlanBuilder::new((&from.layout, &from.seams(rails)), (&to.layout, &to.seams(rails)))
            .expect("alike");
        for (s, t) in sources.iter().zip(&granted) {
            plan.push(*s, *t, 1).expect("in range");
        }
        let tag = self.tags;
        self.tags += 1;
        let time = match rng.below(4) {
            0 => rng.below(1000),
            1 => rng.below(30_000),
            _ => AMPLE,
        };
        let deadline = self.now + time;
        let max_bytes = granted.len() as u64 * BLOCK_BYTES * u64::from(from.layout.layers());
        let grant = GrantRef { id, owner_epoch: epoch(owner), bound_epoch: epoch(me), max_bytes };
        let plan = plan.build().expect("small");
        let request = WriteRequest { grant, plan, tag, deadline: self.instant(deadline) };
        // The data of some is ready later, or never.
        let gated = time != AMPLE && tag.is_multiple_of(3);
        let now = self.instant(self.now);
        let result = if gated { conn.write_gated(request, now) } else { conn.write(request, now) };
        self.summary.refused += u64::from(result.is_err());
        match result {
            Ok(transfer) => {
                assert_eq!(owner, peer, "k6: a grant of an old epoch was accepted");
                assert!(!used, "k6: a grant was accepted twice");
                if gated {
                    self.channels[ch].sides[side].gated.push(transfer);
                }
                self.model.grants.entry(key).and_modify(|g| g.used = true);
                let pool = &mut self.ends[me.0].sources;
                pool.take(&sources, (peer.0, transfer.0));
                pool.fill(&sources, tag);
                let transfer_model = Transfer {
                    grant: key,
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
                    gone: false,
                    disturbed: false,
                    executed: Vec::new(),
                };
                let before = self.model.transfers.insert((me, peer.0, transfer.0), transfer_model);
                assert!(before.is_none(), "k2: a transfer number used twice");
            }
            Err(Refused::PeerRestarted { .. }) => assert_ne!(owner, peer),
            Err(Refused::StaleGrant { .. }) => assert!(used || revoked, "k6: a fresh grant was refused"),
            Err(Refused::Closed) => {}
            Err(e) => panic!("refused: {e}"),
        }
    }
}
