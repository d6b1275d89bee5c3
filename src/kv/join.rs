//! The rails of a channel between two hellos: which of ours meets which of the peer's, connecting them, and what is left out, for
//! now or for good.
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

use super::config::KvConfig;
use super::endpoint::Shared;
use super::path_rails::RailWarning;
use super::rail::{self, Absent, BuiltRail, Half, Link, why};
use super::setup::{Built, UNFIT, peer_failed};
use crate::connect::{Agreed, AgreedRail, ConnectError, Hello, HelloRail, LateRail, Stage};

/// A rail that both sides have set up, or mean to.
pub(super) struct Joined {
    pub(super) agreed: AgreedRail,
    /// Or why it is left out for now.
    pub(super) half: Result<BuiltRail, Absent>,
    /// Our device, by its place in the pool.
    pub(super) device: usize,
    /// The peer's half.
    pub(super) peer: HelloRail,
    /// The peer does not know our queue pairs yet: `Ready` tells.
    pub(super) late: bool,
}

impl Joined {
    /// Fitted to our device.
    pub(super) fn config(&self) -> &KvConfig {
        match &self.half {
            Ok(built) => &built.config,
            Err(absent) => &absent.config,
        }
    }

    /// What is known of it, without what it consists of.
    pub(super) fn outline(&self) -> Outline {
        let (agreed, device, peer) = (self.agreed, self.device, self.peer.clone());
        Outline { agreed, device, peer, config: self.config().clone() }
    }

    /// Connects our queue pairs to the peer's, each to that of the same number. Those beyond what was agreed are destroyed.
    ///
    /// A device may look up the peer's address in between, so that it happens off the runtime's workers (R9).
    async fn connect(
        mut self,
        runtime: &Handle,
        active: bool,
    ) -> Result<(Self, Result<(), ConnectError>), ConnectError> {
        rail::off_workers(runtime, move || {
            let Ok(built) = &mut self.half else { return Ok((self, Ok(()))) };
            built.pairs.trim(self.agreed.qps, &self.peer.qps);
            let link = Link::new(built.pd.device(), &self.agreed, active);
            let connected = link.connect(&built.pairs.queues, &self.peer.qps);
            Ok((self, connected))
        })
        .await
    }
}

/// A rail, without our half of it.
pub(super) struct Outline {
    agreed: AgreedRail,
    device: usize,
    peer: HelloRail,
    config: KvConfig,
}

impl Outline {
    /// The rail, left out.
    fn absent(self, warning: RailWarning) -> Joined {
        let Self { agreed, device, peer, config } = self;
        let half = Err(Absent { config, warning, keyless: false });
        Joined { agreed, half, device, peer, late: false }
    }
}

/// All rails of a channel, and what was left out.
pub(super) struct Rails {
    pub(super) rails: Vec<Joined>,
    /// Of those that are left out for good.
    pub(super) warnings: Vec<RailWarning>,
    /// The peer knows of rails that come later.
    pub(super) later: bool,
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
    let had: Vec<bool> = built.halves.iter().map(Half::is_built).collect();
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
        let again = std::mem::replace(&mut used[device], true);
        if agreed.absent {
            let warning = match &built.halves[device] {
                Half::Later(absent) => absent.warning.clone(),
                Half::Built(_) | Half::None => peer_failed(&own[device], &server),
            };
            let config = rail::fitted(shared, own[device].pd.device(), shared.config.qps)?;
            let keyless = built.halves[device].is_keyless();
            let half = Err(Absent { config, warning, keyless });
            rails.push(Joined { agreed, half, device, peer: server, late: false });
            continue;
        }
        let (half, late) = match std::mem::replace(&mut built.halves[device], Half::None) {
            Half::Built(rail) => (rail, false),
            Half::Later(_) | Half::None => {
                (rail::build(shared, &own[device].pd, shared.config.qps).await?, again)
            }
        };
        rails.push(Joined { agreed, half: Ok(half), device, peer: server, late });
    }
    for (n, device) in own.iter().enumerate().filter(|(n, _)| !used[*n]) {
        match std::mem::replace(&mut built.halves[n], Half::None) {
            Half::Built(_) => built.unpaired(device, peer),
            Half::Later(absent) => built.warnings.push(absent.warning),
            Half::None => {}
        }
    }
    Rails { rails, warnings: built.warnings, later: peer.knows_later() }.check_strict(shared)
}

/// Joins the server's rails to those of the hello.
pub(super) fn join_hello(shared: &Shared, built: Built, peer: &Hello, agreed: &Agreed) -> Rails {
    let (theirs, own) = (peer.rail_list(), shared.pool.devices());
    let Built { halves, devices, mut warnings, .. } = built;
    let mut used = vec![false; theirs.len()];
    let mut rails = Vec::with_capacity(agreed.rails.len());
    for ((number, half), device) in halves.into_iter().enumerate().zip(devices) {
        let agreed = agreed.rails.iter().find(|rail| rail.number == number);
        let (half, &agreed) = match (half, agreed) {
            (Half::Built(built), Some(agreed)) => (Ok(built), agreed),
            (Half::Later(absent), Some(agreed)) => (Err(absent), agreed),
            (Half::Built(_), None) => {
                warnings.push(RailWarning::new(own[device].pd.device().name(), None, UNFIT));
                continue;
            }
            (Half::Later(absent), None) => {
                warnings.push(absent.warning);
                continue;
            }
            (Half::None, _) => continue,
        };
        let late = half.is_ok() && std::mem::replace(&mut used[agreed.client], true);
        let peer = theirs[agreed.client].clone();
        rails.push(Joined { agreed, half, device, peer, late });
    }
    Rails { rails, warnings, later: peer.knows_later() }
}

/// Rails that are being connected, one after the other.
pub(super) struct Attempt {
    done: Rails,
    left_out: Vec<usize>,
    failed: Option<ConnectError>,
}

impl Attempt {
    /// Those of `rails`; answers them.
    pub(super) fn new(Rails { rails, warnings, later }: Rails) -> (Self, Vec<Joined>) {
        let done = Rails { rails: Vec::with_capacity(rails.len()), warnings, later };
        (Self { done, left_out: Vec::new(), failed: None }, rails)
    }

    /// How it went with a rail. One that is left out may come later, where the peer knows of such.
    pub(super) fn take(&mut self, shared: &Shared, joined: Joined, connected: Result<(), ConnectError>) {
        match connected {
            Ok(()) => self.done.rails.push(joined),
            Err(error) => {
                let device = shared.pool.devices()[joined.device].pd.device().name();
                let warning = RailWarning::new(device, Some(&joined.peer.device), why(&error));
                self.left_out.push(joined.agreed.number);
                self.failed.get_or_insert(error);
                self.done.leave_out(joined.outline(), warning);
            }
        }
    }

    /// The rails that there are, and the numbers of those that are left out; or the first error, when none is left, or every one
    /// is asked for.
    pub(super) fn end(self, shared: &Shared) -> Result<(Rails, Vec<usize>), ConnectError> {
        match self.failed {
            Some(error) if self.done.none_built() || shared.config.strict_rails => Err(error),
            _ => Ok((self.done, self.left_out)),
        }
    }
}

impl Rails {
    /// A rail is left out: for now, where the peer knows of such.
    fn leave_out(&mut self, rail: Outline, warning: RailWarning) {
        match self.later {
            true => self.rails.push(rail.absent(warning)),
            false => self.warnings.push(warning),
        }
    }

    fn none_built(&self) -> bool {
        self.rails.iter().all(|joined| joined.half.is_err())
    }

    /// The first of what is left out, for now or for good.
    fn first_warning(&self) -> Option<&RailWarning> {
        let absent = self.rails.iter().filter_map(|joined| joined.half.as_ref().err());
        self.warnings.first().or_else(|| absent.map(|absent| &absent.warning).next())
    }

    /// Connects the rails whose peers are known: all of them on the client, the first of each device of the client's on the
    /// server. One that cannot be is left out; answers the numbers of those.
    pub(super) async fn connect(
        self,
        shared: &Shared,
        active: bool,
    ) -> Result<(Self, Vec<usize>), ConnectError> {
        let (mut attempt, rails) = Attempt::new(self);
        for joined in rails {
            if joined.half.is_err() || (joined.late && !active) {
                attempt.done.rails.push(joined);
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
            let is_meant = |j: &Joined| j.agreed.number == usize::from(entry.rail) && j.half.is_ok();
            let at = self.rails.iter().position(is_meant);
            let at = at.ok_or_else(|| malformed("a rail that there is not"))?;
            if entry.qps.is_empty() {
                let rail = self.rails.remove(at);
                self.dropped(shared, rail.outline());
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
        rails.sort_by_key(|joined| joined.agreed.number);
        Self { rails, ..self }.check(shared)
    }

    /// The client could not connect a rail.
    pub(super) fn dropped(&mut self, shared: &Shared, rail: Outline) {
        let name = shared.pool.devices()[rail.device].pd.device().name();
        let warning = RailWarning::new(name, Some(&rail.peer.device), "the peer could not connect it");
        self.leave_out(rail, warning);
    }

    /// As they are, unless none is left.
    pub(super) fn check(self, shared: &Shared) -> Result<Self, ConnectError> {
        match self.first_warning().filter(|_| self.none_built() || shared.config.strict_rails) {
            Some(warning) => Err(ConnectError::resources(warning.error())),
            None => Ok(self),
        }
    }

    /// As they are, unless one is left out and every one is asked for.
    fn check_strict(self, shared: &Shared) -> Result<Self, ConnectError> {
        match self.first_warning().filter(|_| shared.config.strict_rails) {
            Some(warning) => Err(ConnectError::resources(warning.error())),
            None => Ok(self),
        }
    }

    /// What `Ready` adds: our queue pairs that the peer does not know, and what is left out.
    pub(super) fn late(&self, left_out: &[usize]) -> Vec<LateRail> {
        let late = self.rails.iter().filter(|joined| joined.late);
        let late = late.filter_map(|joined| Some((joined.agreed.number, joined.half.as_ref().ok()?)));
        // Fewer than 16.
        let late = late.map(|(n, built)| LateRail { rail: n as u8, qps: built.pairs.addresses() });
        late.chain(gone(left_out)).collect()
    }
}

/// What `Ready` says of rails that are left out.
pub(super) fn gone(left_out: &[usize]) -> Vec<LateRail> {
    left_out.iter().map(|&n| LateRail { rail: n as u8, qps: Vec::new() }).collect()
}

/// In a reply: the rails of these numbers could not be connected. Those that may come later keep their places.
pub(super) fn leave_out(reply: &mut Hello, rails: &Rails, left_out: &[usize]) {
    if left_out.is_empty() {
        return;
    }
    let mut list = reply.rail_list();
    for &n in left_out {
        let absent = rails.rails.iter().find(|joined| joined.agreed.number == n);
        list[n].leave_out(absent.map_or(0, |joined| joined.agreed.qps));
    }
    // One is left, or the handshake had failed.
    let first = list.iter().position(|rail| !rail.qps.is_empty()).unwrap_or(0);
    reply.set_rails(list, first);
}
