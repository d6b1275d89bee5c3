//! The rails of a channel between two hellos: which of ours meets which of the peer's, connecting them, and what is left out.
//!
//! ```text
//!   client                                               server
//!     Hello: each device, with queue pairs  ───────────▶   a rail for each pair of devices
//!                                                          connects those whose queue pairs it knows
//!     connects all                          ◀───────────   HelloReply: its rails; without queue pairs, where that failed
//!     Ready: queue pairs of devices that are in more   ─▶  connects the rest
//!     than one rail; rails that could not be connected
//! ```

use tokio::runtime::Handle;

use super::endpoint::Shared;
use super::path_rails::RailWarning;
use super::rail::{self, BuiltRail, Link, why};
use super::setup::{Built, UNFIT};
use crate::connect::{Agreed, AgreedRail, ConnectError, Hello, HelloRail, LateRail, Stage};

/// A rail that both sides have set up.
pub(super) struct Joined {
    pub(super) agreed: AgreedRail,
    pub(super) built: BuiltRail,
    /// Our device, by its place in the pool.
    pub(super) device: usize,
    /// The peer's half.
    pub(super) peer: HelloRail,
    /// The peer does not know our queue pairs yet: `Ready` tells.
    pub(super) late: bool,
}

impl Joined {
    /// Connects our queue pairs to the peer's, each to that of the same number. Those beyond what was agreed are destroyed.
    ///
    /// A device may look up the peer's address in between, so that it happens off the runtime's workers (R9).
    async fn connect(
        mut self,
        runtime: &Handle,
        active: bool,
    ) -> Result<(Self, Result<(), ConnectError>), ConnectError> {
        self.built.pairs.trim(self.agreed.qps, &self.peer.qps);
        let link = Link::new(&self.built.pd, &self.agreed, active);
        rail::off_workers(runtime, move || {
            let connected = link.connect(&self.built.pairs.queues, &self.peer.qps);
            Ok((self, connected))
        })
        .await
    }
}

/// All rails of a channel, and what was left out.
pub(super) struct Rails {
    pub(super) rails: Vec<Joined>,
    pub(super) warnings: Vec<RailWarning>,
}

/// Joins the client's rails to those of the reply. A device that is in more than one of them gets queue pairs for each.
pub(super) async fn join_reply(
    shared: &Shared,
    mut built: Built,
    peer: &Hello,
    agreed: &Agreed,
) -> Result<Rails, ConnectError> {
    let theirs = peer.rail_list();
    let own = shared.pool.devices();
    let had: Vec<bool> = built.rails.iter().map(Option::is_some).collect();
    let mut used = vec![false; had.len()];
    let mut rails = Vec::with_capacity(agreed.rails.len());
    for (number, server) in theirs.into_iter().enumerate() {
        let Some(&agreed) = agreed.rails.iter().find(|rail| rail.number == number) else {
            let device = usize::from(server.with);
            if had.get(device) == Some(&true) {
                used[device] = true;
                built.left_out(&own[device], &server);
            }
            continue;
        };
        let device = agreed.client;
        let late = std::mem::replace(&mut used[device], true) && built.rails[device].is_none();
        let rail = match built.rails[device].take() {
            Some(rail) => rail,
            None => rail::build(shared, &own[device].pd, shared.config.qps).await?,
        };
        rails.push(Joined { agreed, built: rail, device, peer: server, late });
    }
    for (device, _) in
        own.iter().zip(&used).zip(&had).filter(|((_, used), had)| **had && !**used).map(|(d, _)| d)
    {
        built.unpaired(device, peer);
    }
    built.check_strict(shared)?;
    Ok(Rails { rails, warnings: built.warnings })
}

/// Joins the server's rails to those of the hello.
pub(super) fn join_hello(shared: &Shared, mut built: Built, peer: &Hello, agreed: &Agreed) -> Rails {
    let (theirs, own) = (peer.rail_list(), shared.pool.devices());
    let mut used = vec![false; theirs.len()];
    let mut rails = Vec::with_capacity(agreed.rails.len());
    for number in 0..built.rails.len() {
        let Some(rail) = built.rails[number].take() else { continue };
        let device = built.devices[number];
        let Some(&agreed) = agreed.rails.iter().find(|rail| rail.number == number) else {
            built.warnings.push(RailWarning::new(own[device].pd.device().name(), None, UNFIT));
            continue;
        };
        let late = std::mem::replace(&mut used[agreed.client], true);
        let peer = theirs[agreed.client].clone();
        rails.push(Joined { agreed, built: rail, device, peer, late });
    }
    Rails { rails, warnings: built.warnings }
}

/// Rails that are being connected, one after the other.
pub(super) struct Attempt {
    rails: Vec<Joined>,
    warnings: Vec<RailWarning>,
    left_out: Vec<usize>,
    failed: Option<ConnectError>,
}

impl Attempt {
    pub(super) fn new(warnings: Vec<RailWarning>) -> Self {
        Self { rails: Vec::new(), warnings, left_out: Vec::new(), failed: None }
    }

    /// How it went with a rail.
    pub(super) fn take(&mut self, shared: &Shared, joined: Joined, connected: Result<(), ConnectError>) {
        match connected {
            Ok(()) => self.rails.push(joined),
            Err(error) => {
                let device = shared.pool.devices()[joined.device].pd.device().name();
                self.warnings.push(RailWarning::new(device, Some(&joined.peer.device), why(&error)));
                self.left_out.push(joined.agreed.number);
                self.failed.get_or_insert(error);
            }
        }
    }

    /// The rails that there are, and the numbers of those that are left out; or the first error, when none is left, or every one
    /// is asked for.
    pub(super) fn end(self, shared: &Shared) -> Result<(Rails, Vec<usize>), ConnectError> {
        match self.failed {
            Some(error) if self.rails.is_empty() || shared.config.strict_rails => Err(error),
            _ => Ok((Rails { rails: self.rails, warnings: self.warnings }, self.left_out)),
        }
    }
}

impl Rails {
    /// Connects the rails whose peers are known: all of them on the client, the first of each device of the client's on the
    /// server. One that cannot be is left out; answers the numbers of those.
    pub(super) async fn connect(
        self,
        shared: &Shared,
        active: bool,
    ) -> Result<(Self, Vec<usize>), ConnectError> {
        let mut attempt = Attempt::new(self.warnings);
        for joined in self.rails {
            if joined.late && !active {
                attempt.rails.push(joined);
                continue;
            }
            let (joined, connected) = joined.connect(&shared.runtime, active).await?;
            attempt.take(shared, joined, connected);
        }
        attempt.end(shared)
    }

    /// Of the server: the client has said what it left out, and with which queue pairs it serves the rest.
    pub(super) async fn complete(
        mut self,
        shared: &Shared,
        late: Vec<LateRail>,
    ) -> Result<Self, ConnectError> {
        let malformed = |what| ConnectError::malformed(Stage::Ready, what);
        for entry in late {
            let at = self.rails.iter().position(|j| j.agreed.number == usize::from(entry.rail));
            let at = at.ok_or_else(|| malformed("a rail that there is not"))?;
            if entry.qps.is_empty() {
                let gone = self.rails.remove(at);
                let name = shared.pool.devices()[gone.device].pd.device().name();
                self.warnings.push(RailWarning::new(
                    name,
                    Some(&gone.peer.device),
                    "the peer could not connect it",
                ));
                continue;
            }
            let joined = &mut self.rails[at];
            if !joined.late || entry.qps.len() < joined.agreed.qps {
                return Err(malformed("queue pairs of a rail that has them, or too few"));
            }
            joined.peer.qps = entry.qps;
        }
        let mut rails = Vec::with_capacity(self.rails.len());
        for mut joined in self.rails {
            if std::mem::take(&mut joined.late) {
                let (connected, result) = joined.connect(&shared.runtime, false).await?;
                result?;
                joined = connected;
            }
            rails.push(joined);
        }
        Self { rails, warnings: self.warnings }.check(shared)
    }

    /// As they are, unless none is left.
    pub(super) fn check(self, shared: &Shared) -> Result<Self, ConnectError> {
        let first = self.warnings.first();
        match first.filter(|_| self.rails.is_empty() || shared.config.strict_rails) {
            Some(warning) => Err(ConnectError::resources(warning.error())),
            None => Ok(self),
        }
    }

    /// What `Ready` adds: our queue pairs that the peer does not know, and what is left out.
    pub(super) fn late(&self, left_out: &[usize]) -> Vec<LateRail> {
        let late = self.rails.iter().filter(|j| j.late);
        // Fewer than 16.
        let late = late.map(|j| LateRail { rail: j.agreed.number as u8, qps: j.built.pairs.addresses() });
        late.chain(gone(left_out)).collect()
    }
}

/// What `Ready` says of rails that are left out.
pub(super) fn gone(left_out: &[usize]) -> Vec<LateRail> {
    left_out.iter().map(|&n| LateRail { rail: n as u8, qps: Vec::new() }).collect()
}

/// In a reply: the rails of these numbers could not be connected.
pub(super) fn leave_out(reply: &mut Hello, left_out: &[usize]) {
    if left_out.is_empty() {
        return;
    }
    let mut rails = reply.rail_list();
    for &n in left_out {
        (rails[n].qps, rails[n].regions) = (Vec::new(), Vec::new());
    }
    // One is left, or the handshake had failed.
    let first = rails.iter().position(|rail| !rail.qps.is_empty()).unwrap_or(0);
    reply.set_rails(rails, first);
}
