//! Reads in the simulation: what users lend and read, by READs and by WRITEs of the owner, and what must be true of it.
//!
//! Sources are lent from the pool of sources, filled with content of their own; a read takes blocks of the pool of targets.
//! Checked: a read that is done has every byte of the source (K1); no READ touches a source that was given back, and none is
//! answered into a target that was (R1, K4); each read has one outcome, by its deadline (K5), and gives its blocks back once;
//! each loan has one end, which agrees with it, and ends with its connection at the latest; no grant is read twice (K6).

use super::super::{
    Connection, Event, GrantRef, PlanBuilder, ReadBy, ReadEnd, ReadId, ReadRefusal, ReadRequest, Refused,
};
use super::Rng;
use super::model::{GrantKey, TransferKey};
use super::pool::{BLOCK_BYTES, Owner};
use super::setup::epoch;
use super::wire::{Happening, Op, Wr};
use super::world::{AMPLE, World};

/// Set in the numbers of those who hold blocks of a read, beside numbers of grants and transfers.
const OF_READ: u64 = 1 << 62;

/// Blocks that their owner has granted to be read.
#[derive(Debug)]
pub(super) struct Loan {
    blocks: Vec<u32>,
    tag: u64,
    revoked: bool,
    /// A read was accepted under it, and has its data.
    used: bool,
    read: bool,
    /// Something has interfered, so that the read need not succeed.
    disturbed: bool,
    aborted: bool,
    /// The owner has its blocks back, or is gone.
    over: bool,
}

/// One read.
#[derive(Debug)]
pub(super) struct Reading {
    loan: GrantKey,
    blocks: Vec<u32>,
    /// Who holds the blocks.
    holder: Owner,
    deadline: u64,
    by_write: bool,
    ample: bool,
    done: bool,
}

impl Loan {
    /// It may not be read any more, and is not given back yet.
    pub(super) fn is_ending(&self) -> bool {
        self.aborted && !self.over
    }

    pub(super) fn is_forgotten(&self) -> bool {
        !self.over
    }

    pub(super) fn process_ended(&mut self) {
        self.over = true;
    }
}

impl World {
    pub(super) fn act_lend(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let sources = &mut self.ends[me.0].sources;
        let mut blocks = sources.free_blocks();
        let want = rng.range(1, 6) as usize;
        if blocks.len() < want || conn.poll_timeout().is_none() {
            return;
        }
        let at = rng.below((blocks.len() - want + 1) as u64) as usize;
        blocks = blocks[at..at + want].to_vec();
        if rng.one_in(3) {
            blocks.reverse();
        }
        let id = conn.issue_read_grant(1 << 40);
        let tag = self.tags;
        self.tags += 1;
        sources.take(&blocks, (peer.0, OF_READ | id));
        sources.fill(&blocks, tag);
        let (revoked, used, read, disturbed, aborted, over) = (false, false, false, false, false, false);
        let loan = Loan { blocks, tag, revoked, used, read, disturbed, aborted, over };
        let key = (me, peer.0, id);
        assert!(!self.model.grants.contains_key(&key), "k6: a grant number used twice");
        assert!(self.model.loans.insert(key, loan).is_none(), "k6: a grant number used twice");
        if self.life(peer.0) == peer {
            self.channels[ch].sides[1 - side].readable.push(key);
        }
    }

    pub(super) fn act_read(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let readable = &mut self.channels[ch].sides[side].readable;
        if readable.is_empty() {
            return;
        }
        let at = rng.below(readable.len() as u64) as usize;
        let key = readable[at];
        // Sometimes a grant is kept, to be used again.
        if !rng.one_in(8) {
            readable.remove(at);
        }
        let loan = &self.model.loans[&key];
        let (used, lent) = (loan.used, loan.blocks.clone());
        let ended = loan.revoked || loan.aborted || loan.over;
        let count = rng.below(lent.len() as u64 + 1) as usize;
        let [ours, theirs] = [&self.ends[me.0].targets, &self.ends[peer.0].sources];
        let mut blocks = ours.free_blocks();
        if blocks.len() < count {
            return;
        }
        blocks.truncate(count);
        let rails = self.channels[ch].cfg.rails.len();
        let mut plan =
            PlanBuilder::new((&ours.layout, &ours.seams(rails)), (&theirs.layout, &theirs.seams(rails)))
                .expect("alike");
        for (to, from) in blocks.iter().zip(&lent) {
            plan.push(*to, *from, 1).expect("in range");
        }
        let plan = plan.build().expect("small");
        let bytes = plan.bytes();
        let by_write = rng.one_in(2);
        let by = match by_write {
            false => ReadBy::Rdma { plan, depth: rng.range(1, 5) as u32, qps: rng.range(1, 4) as usize },
            true => {
                // Our blocks, and then something, so that some requests are longer than a message.
                let mut request: Vec<u8> = vec![blocks.len() as u8];
                request.extend(blocks.iter().map(|&b| b as u8));
                let most = rng.pick(&[1, 2, 900]);
                request.resize(request.len() + rng.below(most) as usize, 0);
                ReadBy::Write { request, bytes }
            }
        };
        let time = match rng.below(4) {
            0 => rng.below(1000),
            1 => rng.below(30_000),
            _ => AMPLE,
        };
        let deadline = self.now + time;
        let (owner_epoch, bound_epoch) = (epoch(key.0), epoch(me));
        let grant = GrantRef { id: key.2, owner_epoch, bound_epoch, max_bytes: bytes };
        let request = ReadRequest { grant, by, deadline: self.instant(deadline) };
        let result = conn.read(request, self.instant(self.now));
        self.summary.refused += u64::from(result.is_err());
        match result {
            Ok(ReadId(id)) => {
                assert!(!used, "k6: a grant was read twice");
                self.model.loans.entry(key).and_modify(|l| l.used = true);
                let holder = (peer.0, OF_READ | u64::from(self.channels[ch].incarnation) << 32 | id);
                self.ends[me.0].targets.take(&blocks, holder);
                let ample = time == AMPLE && !self.faults;
                let reading = Reading { loan: key, blocks, holder, deadline, by_write, ample, done: false };
                let before = self.channels[ch].sides[side].reads.insert(id, reading);
                assert!(before.is_none(), "r2: a read's number used twice");
            }
            Err(Refused::StaleGrant { .. }) => assert!(used || ended, "k6: a fresh grant was refused"),
            Err(Refused::Closed) => {}
            Err(e) => panic!("refused: {e}"),
        }
    }

    pub(super) fn act_abort_read(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let reads = &mut self.channels[ch].sides[side].reads;
        let mut live: Vec<_> = reads.iter_mut().filter(|(_, r)| !r.done).collect();
        if !live.is_empty() {
            let at = rng.below(live.len() as u64) as usize;
            let (&id, read) = live.swap_remove(at);
            read.ample = false;
            conn.abort_read(ReadId(id), self.instant(self.now));
        }
    }

    pub(super) fn act_revoke_loan(&mut self, rng: &mut Rng, ch: usize, side: usize, conn: &mut Connection) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let range = self.model.loans.range_mut((me, peer.0, 0)..=(me, peer.0, u64::MAX));
        let mut open: Vec<_> = range.filter(|(_, l)| !l.over && !l.aborted).collect();
        if !open.is_empty() && conn.poll_timeout().is_some() {
            let at = rng.below(open.len() as u64) as usize;
            let (&(_, _, id), loan) = open.swap_remove(at);
            loan.revoked = true;
            conn.revoke_grant(id, self.instant(self.now));
        }
    }

    /// Checks an event that is about reads. False for others.
    pub(super) fn on_read_event(
        &mut self,
        ch: usize,
        side: usize,
        conn: &mut Connection,
        event: &Event,
    ) -> bool {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let loan_key = |grant: u64| (me, peer.0, grant);
        match *event {
            Event::ReadDone { id, result, .. } => self.on_read_done(ch, side, id, result),
            Event::ReadReleased { id } => self.on_read_released(ch, side, id),
            Event::ReadAsked { grant, target, ref request } => {
                self.on_asked(ch, side, conn, grant, target, request);
            }
            Event::Served { grant, bytes, .. } => {
                let gone = self.life(peer.0) != peer;
                let loan = self.model.loans.get_mut(&loan_key(grant)).expect("r2: served what was not lent");
                assert!(!loan.over && !loan.aborted && !loan.revoked, "k4: served what is over: {loan:?}");
                assert!(loan.read || gone, "k1: served, and the reader does not have it");
                assert!(bytes <= loan.blocks.len() as u64 * 3 * BLOCK_BYTES);
                self.summary.served += 1;
                self.give_back(loan_key(grant));
            }
            Event::Aborted { grant, .. } if self.model.loans.contains_key(&loan_key(grant)) => {
                let loan = self.model.loans.get_mut(&loan_key(grant)).expect("just seen");
                assert!(!loan.over && !loan.aborted, "k4: aborted a loan that is over");
                loan.aborted = true;
            }
            Event::Freed { grant } if self.model.loans.contains_key(&loan_key(grant)) => {
                let loan = &self.model.loans[&loan_key(grant)];
                assert!(!loan.over && loan.aborted, "k4: a loan freed without an abort, or twice");
                self.summary.not_served += 1;
                self.give_back(loan_key(grant));
            }
            _ => return false,
        }
        true
    }

    /// The connection of a side is over, and nobody reads by it: what was never read is free.
    pub(super) fn end_loans(&mut self, ch: usize, side: usize) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let loans = self.model.loans.range((me, peer.0, 0)..=(me, peer.0, u64::MAX));
        let open: Vec<_> = loans.filter(|(_, l)| !l.over).map(|(&key, l)| (key, l.used)).collect();
        for (key, used) in open {
            assert!(!used, "k4: grant {key:?} to read was used and has no end");
            self.give_back(key);
        }
    }

    fn give_back(&mut self, key: GrantKey) {
        let loan = self.model.loans.get_mut(&key).expect("just seen");
        loan.over = true;
        let blocks = loan.blocks.clone();
        self.ends[key.0.0].sources.release(&blocks, (key.1, OF_READ | key.2));
    }

    fn on_read_done(&mut self, ch: usize, side: usize, id: ReadId, result: Result<(), ReadEnd>) {
        let channel = &mut self.channels[ch];
        let (me, closing, now) = (channel.ends[side], channel.closing, self.now);
        let slack = (!self.ends[me].was_frozen).then(|| channel.slack());
        let read = channel.sides[side].reads.get_mut(&id.0).expect("r2: done what was not accepted");
        assert!(!std::mem::replace(&mut read.done, true), "r2: a read done twice");
        if let Some(slack) = slack {
            assert!(now <= read.deadline + slack, "k5: read done at {now}, deadline {}", read.deadline);
        }
        let loan = self.model.loans.get_mut(&read.loan).expect("it was lent");
        if result.is_ok() {
            loan.read = true;
            self.ends[me].targets.check(&read.blocks, loan.tag);
            match read.by_write {
                true => self.summary.read_by_write += 1,
                false => self.summary.read_by_reads += 1,
            }
        } else {
            let excused = !read.ample || loan.revoked || loan.disturbed || closing;
            assert!(excused, "k1: a read failed, and nothing was wrong: {result:?}");
            self.summary.reads_failed += 1;
        }
    }

    fn on_read_released(&mut self, ch: usize, side: usize, id: ReadId) {
        let channel = &mut self.channels[ch];
        let (me, slack) = (channel.ends[side], channel.slack());
        let read = channel.sides[side].reads.remove(&id.0).expect("r2: released twice");
        assert!(read.done, "r2: released before it was done");
        if !read.by_write && !self.ends[me].was_frozen {
            assert!(self.now <= read.deadline + slack, "k5: a read's blocks came back too late");
        }
        self.ends[me].targets.release(&read.blocks, read.holder);
    }

    /// The user's library answers a request to write.
    fn on_asked(
        &mut self,
        ch: usize,
        side: usize,
        conn: &mut Connection,
        grant: u64,
        target: u64,
        request: &[u8],
    ) {
        let [me, peer] = [self.channels[ch].lives[side], self.channels[ch].lives[1 - side]];
        let now = self.instant(self.now);
        let key = (me, peer.0, grant);
        let loan = self.model.loans.get_mut(&key).expect("k6: asked for what was not lent");
        assert!(!loan.over, "k4: asked for what is over");
        if self.rng.one_in(16) {
            loan.disturbed = true;
            assert_eq!(conn.serve(grant, Err(ReadRefusal::Busy), now), None);
            return;
        }
        let time = if self.rng.one_in(8) { self.rng.below(5000) } else { AMPLE };
        loan.disturbed |= time != AMPLE;
        let (count, rest) = request.split_first().expect("never empty");
        let blocks: Vec<u32> = rest[..usize::from(*count)].iter().map(|&b| b.into()).collect();
        let [from, to] = [&self.ends[me.0].sources, &self.ends[peer.0].targets];
        let rails = self.channels[ch].cfg.rails.len();
        let mut plan = PlanBuilder::new((&from.layout, &from.seams(rails)), (&to.layout, &to.seams(rails)))
            .expect("alike");
        for (s, t) in loan.blocks.iter().zip(&blocks) {
            plan.push(*s, *t, 1).expect("in range");
        }
        let deadline = self.instant(self.now + time);
        let answer = Ok((plan.build().expect("small"), deadline));
        if let Some(transfer) = conn.serve(grant, answer, now) {
            let transfer: TransferKey = (me, peer.0, transfer.0);
            assert!(!self.model.transfers.contains_key(&transfer), "k2: a transfer number used twice");
            // From here on they are written to under this grant.
            let channel = &mut self.channels[ch];
            let reads = &mut channel.sides[1 - side].reads;
            let read = reads.iter_mut().find(|(_, r)| r.loan == key).map(|(&id, _)| id);
            let holder = read.and_then(|id| reads.get(&id)).map(|r| r.holder);
            self.model.serves.insert(transfer, (key, target, holder));
        }
    }

    /// Who must hold the source of a work request: what its sender writes, or has lent.
    pub(super) fn source_holder(&self, wr: &Wr) -> Owner {
        let channel = &self.channels[wr.ch];
        let peer = channel.ends[1 - wr.from];
        let number = wr.transfer();
        match self.model.serves.get(&(channel.lives[wr.from], peer, number)) {
            Some((loan, ..)) => (peer, OF_READ | loan.2),
            None => (peer, number),
        }
    }

    /// The owner's device reads what is asked for, and answers.
    pub(super) fn execute_read(&mut self, mut wr: Wr) {
        let Op::Read(piece) = wr.op else { return };
        let (me, owner) = (self.channels[wr.ch].ends[wr.from], self.channels[wr.ch].ends[1 - wr.from]);
        let rail = self.channels[wr.ch].rail_of(wr.qp);
        let sources = &self.ends[owner].sources;
        let offset = sources.offset(piece.dst_addr, piece.len, piece.rkey, rail);
        for block in sources.blocks_at(offset, piece.len as usize) {
            let lent = sources.owner[block as usize].filter(|o| o.0 == me && o.1 & OF_READ != 0);
            assert!(lent.is_some(), "r1, k4: a READ of block {block}, which is not lent");
        }
        wr.data = Some(sources.bytes[offset..offset + piece.len as usize].to_vec());
        let delay = self.channels[wr.ch].timing.delay(wr.qp, &mut self.rng);
        self.at(delay, Happening::Answer(wr));
    }

    /// The answer to a READ comes, unless its queue pair is gone.
    pub(super) fn answer(&mut self, wr: Wr) {
        let channel = &self.channels[wr.ch];
        if wr.incarnation != channel.incarnation || channel.sides[wr.from].fenced {
            return;
        }
        let queue = &channel.sides[wr.from].queues[wr.qp];
        if queue.dead || queue.gone || queue.generation != wr.generation {
            return self.fail(&wr);
        }
        let rail = channel.rail_of(wr.qp);
        let (Op::Read(piece), Some(data)) = (&wr.op, &wr.data) else { return };
        let (me, peer) = (channel.ends[wr.from], channel.ends[1 - wr.from]);
        let targets = &mut self.ends[me].targets;
        let offset = targets.offset(piece.src_addr, piece.len, piece.lkey, rail);
        for block in targets.blocks_at(offset, piece.len as usize) {
            let held = targets.owner[block as usize].filter(|o| o.0 == peer && o.1 & OF_READ != 0);
            assert!(held.is_some(), "r1, k4: a late READ hits block {block}");
        }
        targets.bytes[offset..offset + data.len()].copy_from_slice(data);
        self.summary.work_requests += 1;
        self.complete(&wr, 0, true);
    }
}
