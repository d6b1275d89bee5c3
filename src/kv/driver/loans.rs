//! Grants to read: blocks that are lent to the peer, its requests that we write to it, and how each loan has ended.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::closed::{ChannelClosed, ended_unknown};
use super::{After, Inner, KvDriver};
use crate::clock::later;
use crate::kv::blocks::Blocks;
use crate::kv::channel::GrantRefusal;
use crate::kv::exposure::{Exposed, To};
use crate::kv::grant::{Binding, Grant, GrantKind};
use crate::kv::limits::PeerLimits;
use crate::kv::proto::AbortReason;
use crate::kv::read::{Served, ServedBy};
use crate::kv::read_plan;
use crate::kv::waiting::{Place, Wait};

/// The loans of a channel.
#[derive(Default)]
pub(super) struct Loans {
    /// Blocks that the peer may be reading, by grant, and why it will not. In order, so that their ends are told in order.
    open: BTreeMap<u64, Lent>,
    ended: VecDeque<Served>,
}

struct Lent {
    blocks: Arc<Blocks>,
    /// Where the device asks.
    _exposed: Option<Exposed>,
    bytes: u64,
    end: Option<AbortReason>,
    /// A plan is being made from them: they are not given back before it is.
    planning: bool,
    freed: bool,
}

/// A request of the peer that we write to it, to be planned without the lock.
pub(super) struct Asked {
    grant: u64,
    target: u64,
    source: Arc<Blocks>,
    request: Vec<u8>,
}

/// Bytes of a request from which on its plan would hold a worker up (R9).
const LONG: usize = 64 << 10;

/// A request that is planned on the thread of the channel's plans.
pub(super) struct Planning {
    driver: Arc<KvDriver>,
    grant: u64,
    asked: Option<Asked>,
}

impl Planning {
    pub(super) fn new(driver: Arc<KvDriver>, asked: Asked) -> Self {
        Self { driver, grant: asked.grant, asked: Some(asked) }
    }

    pub(super) fn run(mut self) {
        self.driver.serve(self.asked.take());
    }
}

impl Drop for Planning {
    fn drop(&mut self) {
        // Also where the plan was not made.
        drop(self.asked.take());
        self.driver.locked(|inner, after| inner.planned(self.grant, after));
        self.driver.is_back();
    }
}

impl Inner {
    /// Whether the peer may have so many grants more, of so many bytes together.
    pub(super) fn may_hold(
        &self,
        limits: &PeerLimits,
        grants: usize,
        bytes: u64,
    ) -> Result<(), GrantRefusal> {
        let open = self.grants.len() + self.loans.open.len();
        if let Some(limit) = limits.grants
            && open + grants > limit as usize
        {
            return Err(GrantRefusal::TooMany { open, limit });
        }
        let Some(limit) = limits.bytes else { return Ok(()) };
        let written = self.grants.values().map(|granted| granted.bytes);
        let held = written.chain(self.loans.open.values().map(|lent| lent.bytes)).sum::<u64>();
        match held.checked_add(bytes).is_some_and(|all| all <= limit) {
            true => Ok(()),
            false => Err(GrantRefusal::TooLarge { asked: bytes, held, limit }),
        }
    }

    /// Takes back a grant to read that is open. False when it is none.
    pub(super) fn revoke_lent(&mut self, grant: u64, now: Instant) -> bool {
        let lent = self.loans.open.contains_key(&grant);
        if let Some(conn) = self.conn.as_mut().filter(|_| lent) {
            conn.revoke_grant(grant, now);
        }
        lent
    }
}

impl KvDriver {
    pub(in crate::kv) fn grant_read(
        &self,
        blocks: Arc<Blocks>,
    ) -> Result<Grant, (GrantRefusal, Arc<Blocks>)> {
        let bytes = self.bytes_of(&blocks);
        self.locked(|inner, _| {
            if let Err(why) = inner.may_hold(&self.config.limits, 1, bytes) {
                return Err((why, blocks));
            }
            let closed = inner.closed();
            match (&mut inner.conn, closed) {
                (Some(conn), None) => {
                    let id = conn.issue_read_grant(self.peer.layout.required_bytes());
                    let grant = self.grant_of(id, &blocks).of_kind(GrantKind::Read);
                    let grant = grant.expect("every grant can be one to read");
                    let _exposed = self.expose(&blocks, To::Read);
                    let lent = Lent { blocks, _exposed, bytes, end: None, planning: false, freed: false };
                    inner.loans.open.insert(id, lent);
                    Ok(grant)
                }
                (_, closed) => Err((closed.unwrap_or_else(ended_unknown).into(), blocks)),
            }
        })
    }

    pub(in crate::kv) fn poll_served(
        &self,
        cx: &Context<'_>,
        place: &mut Place,
    ) -> Poll<Result<Served, ChannelClosed>> {
        self.wait(cx, |inner, after, waker| {
            if let Some(served) = inner.loans.ended.pop_front() {
                return Some(Ok(served));
            }
            if let Some(closed) = inner.end_to_tell() {
                return Some(Err(closed));
            }
            inner.enlist(Wait::Served, place, waker, after);
            None
        })
    }

    /// Plans what the peer has asked for, and starts to write it.
    pub(super) fn serve(&self, asked: impl IntoIterator<Item = Asked>) {
        for Asked { grant, target, source, request } in asked {
            // The peer is the owner of the grant that it has issued for this.
            let (owner, bound) = (self.peer_epoch, self.local_epoch);
            let binding = Binding { owner, bound, connection: self.connection_id };
            let planned = read_plan::serve(&request, binding, target, &source, &self.pool, &self.peer);
            // Whoever gets the blocks back finds nobody else at them.
            drop(source);
            self.locked(|inner, after| {
                let now = Instant::now();
                inner.planned(grant, after);
                let Some(conn) = &mut inner.conn else { return };
                conn.serve(grant, planned.map(|(plan, time)| (plan, later(now, time))), now);
                if inner.turn(now, after) {
                    after.nudge = true;
                }
            });
        }
    }
}

impl Inner {
    /// The peer asks to be written to.
    pub(super) fn read_asked(&mut self, grant: u64, target: u64, request: Vec<u8>, after: &mut After) {
        if let Some(lent) = self.loans.open.get_mut(&grant) {
            lent.planning = true;
            let list = if request.len() > LONG { &mut after.long } else { &mut after.asked };
            list.push(Asked { grant, target, source: lent.blocks.clone(), request });
        }
    }

    /// The peer has all of it.
    pub(super) fn served(&mut self, grant: u64, bytes: u64, by_write: bool, after: &mut After) {
        let by = if by_write { ServedBy::RemoteWrite } else { ServedBy::RdmaRead };
        self.end_loan(grant, bytes, Ok(by), after);
    }

    /// The peer will not have all of it, and may go on reading until `loan_freed`.
    pub(super) fn loan_aborted(&mut self, grant: u64, reason: AbortReason) {
        if let Some(lent) = self.loans.open.get_mut(&grant) {
            lent.end.get_or_insert(reason);
        }
    }

    pub(super) fn loan_freed(&mut self, grant: u64, after: &mut After) {
        let Some(lent) = self.loans.open.get_mut(&grant) else { return };
        if lent.planning {
            lent.freed = true;
            return;
        }
        let reason = lent.end.unwrap_or(AbortReason::ConnectionLost);
        self.end_loan(grant, 0, Err(reason), after);
    }

    /// The plan from a loan's blocks is made.
    fn planned(&mut self, grant: u64, after: &mut After) {
        if let Some(lent) = self.loans.open.get_mut(&grant) {
            lent.planning = false;
            if lent.freed {
                self.loan_freed(grant, after);
            }
        }
    }

    fn end_loan(&mut self, grant: u64, bytes: u64, result: Result<ServedBy, AbortReason>, after: &mut After) {
        let Some(lent) = self.loans.open.remove(&grant) else { return };
        if result.is_ok() {
            self.stats.served += 1;
            self.stats.served_bytes = self.stats.served_bytes.saturating_add(bytes);
        } else {
            self.stats.not_served += 1;
        }
        self.loans.ended.push_back(Served { grant, blocks: lent.blocks, bytes, result });
        self.wake(Wait::Served, after);
    }

    /// The queue pairs are destroyed: what is still lent can never be read.
    pub(super) fn end_loans(&mut self, after: &mut After) {
        let open: Vec<u64> = self.loans.open.keys().copied().collect();
        for grant in open {
            self.loan_freed(grant, after);
        }
    }
}
