//! Building a channel's parts, and what the two hellos say of them.
//!
//! The client sets up every device of its pool and describes each in its hello. The server joins them to its own by the rule of
//! [`pair`], sets up a rail for each pair, and describes those in its reply. What one of them could not set up, or cannot
//! connect, both leave out; each knows why, or that it was the other one (K9, K10). Where that may change, its place is kept, and it
//! comes later.

use std::sync::Arc;
use std::time::Instant;

use super::config::{CONTROL_BYTES, KvConfig, MAX_QPS};
use super::driver::{KvDriver, OnEnd, Parts, RailHalf, RailParts};
use super::endpoint::Shared;
use super::join::{Joined, Rails};
use super::layout::{Dtype, Layout};
use super::pass::Pass;
use super::path_rails::RailWarning;
use super::pool_device::PoolDevice;
use super::proto::{self, Connection, Ledger, Part, PoolSeams, Seams, TransferId};
use super::rail::{self, Absent, BuiltRail, Half, Link, describe, transport_of, why};
use super::read_choice::Facts;
use super::shape::{Heads, Shape, ShapeError, Strides};
use super::targets::PeerPool;
use crate::connect::{
    Agreed, ConnectError, Hello, HelloLayout, HelloRail, HelloRegion, HelloShape, MAX_RAILS, Pair, Reject,
    meet, pair,
};
use crate::error::DeviceError;
use crate::provider;
use crate::random::random_u64;

/// The rails that this side has set up, and what was left out.
pub(super) struct Built {
    /// By the order of the hello (the client's devices) or of the reply (the pairs).
    pub(super) halves: Vec<Half>,
    /// The device of each.
    pub(super) devices: Vec<usize>,
    /// How many queue pairs each is to have.
    qps: Vec<usize>,
    /// Of those that are left out for good.
    pub(super) warnings: Vec<RailWarning>,
}

impl Built {
    /// Sets up a rail on each of `devices`, with so many queue pairs. Those that cannot be are left out, unless the endpoint is
    /// strict, or none can be: for now, or for good, where the device is not one for this channel.
    async fn on(
        shared: &Shared,
        devices: Vec<usize>,
        qps: Vec<usize>,
        managed: bool,
    ) -> Result<Self, ConnectError> {
        let mut this = Self { halves: Vec::new(), devices, qps, warnings: Vec::new() };
        let mut failed = None;
        for (&device, &qps) in this.devices.iter().zip(&this.qps) {
            let device = &shared.pool.devices()[device];
            let name = device.pd.device().name();
            let half = match fit_for(shared, device, qps, managed) {
                Err((error, reason)) => {
                    this.warnings.push(RailWarning::new(name, None, reason));
                    failed.get_or_insert(error);
                    Half::None
                }
                Ok(config) => {
                    let keyless = device.refusal();
                    let built = match &keyless {
                        None => rail::build_fitted(&shared.runtime, &device.pd, config.clone(), qps).await,
                        Some(reason) => Err(unregistered(name, reason)),
                    };
                    match built {
                        Ok(built) => Half::Built(built),
                        Err(error) => {
                            let reason = keyless.clone().unwrap_or_else(|| why(&error));
                            let warning = RailWarning::new(name, None, reason);
                            failed.get_or_insert(error);
                            Half::Later(Absent { config, warning, keyless: keyless.is_some() })
                        }
                    }
                }
            };
            this.halves.push(half);
        }
        match failed {
            Some(error) if !this.halves.iter().any(Half::is_built) => Err(error),
            _ => this.check_strict(shared).map(|()| this),
        }
    }

    /// With `strict_rails`, whatever is left out is an error.
    pub(super) fn check_strict(&self, shared: &Shared) -> Result<(), ConnectError> {
        let later = self.halves.iter().find_map(|half| match half {
            Half::Later(absent) => Some(&absent.warning),
            Half::Built(_) | Half::None => None,
        });
        match self.warnings.first().or(later) {
            Some(warning) if shared.config.strict_rails => Err(ConnectError::resources(warning.error())),
            _ => Ok(()),
        }
    }

    fn first(&self) -> usize {
        self.halves.iter().position(Half::is_built).unwrap_or(0)
    }
}

/// What the endpoint's configuration comes to on a device, which can be in the channel at all; or why not, in an error and in words.
fn fit_for(
    shared: &Shared,
    device: &PoolDevice,
    qps: usize,
    managed: bool,
) -> Result<KvConfig, (ConnectError, String)> {
    let of_device = device.pd.device();
    let connectable = if managed { Ok(()) } else { of_device.check_oob().map_err(ConnectError::resources) };
    let config = connectable.and_then(|()| rail::fitted(shared, of_device, qps));
    config.map_err(|error| {
        let reason = why(&error);
        (error, reason)
    })
}

/// The pool is not registered on a device.
fn unregistered(device: &str, reason: &str) -> ConnectError {
    ConnectError::resources(DeviceError::Rail { device: device.to_owned(), reason: reason.to_owned() })
}

/// The client's rails: one on each device of the pool.
pub(super) async fn build(shared: &Shared, managed: bool) -> Result<Built, ConnectError> {
    let devices: Vec<usize> = (0..shared.pool.devices().len()).collect();
    let qps = vec![shared.config.qps; devices.len()];
    Built::on(shared, devices, qps, managed).await
}

/// The server's rails: one for each pair of devices, with as many queue pairs as the client has, and our device has room for.
/// Answers which device of the client each is joined to.
pub(super) async fn build_answer(
    shared: &Shared,
    peer: &Hello,
    managed: bool,
) -> Result<Result<(Built, Vec<usize>), Reject>, ConnectError> {
    let theirs = peer.rail_list();
    let own = shared.pool.devices();
    // A client that knows of one rail looks at the first.
    let limit = if peer.others.is_some() { MAX_RAILS } else { 1 };
    let transports: Vec<String> = own.iter().map(|d| transport_of(d.pd.device())).collect();
    let fits = |client: usize, server: usize| meet(&theirs[client].transport, &transports[server]);
    let pairs = pair(theirs.len(), own.len(), limit, fits);
    if pairs.is_empty() {
        return Ok(Err(Reject::Transport {
            ours: list(&transports),
            theirs: list(theirs.iter().map(|r| &r.transport)),
        }));
    }
    let room = MAX_QPS / pairs.len();
    let qps = |p: &Pair| {
        let asked = theirs[p.client].places().clamp(1, room);
        asked.min(shared.max_qps(own[p.server].pd.device()))
    };
    let qps: Vec<usize> = pairs.iter().map(qps).collect();
    let mut built = Built::on(shared, pairs.iter().map(|p| p.server).collect(), qps, managed).await?;
    for (n, device) in own.iter().enumerate() {
        if !pairs.iter().any(|p| p.server == n) {
            built.unpaired(device, peer);
        }
    }
    for (half, p) in built.halves.iter_mut().zip(&pairs) {
        // It could not set up its own: ours would be for nothing, now.
        if theirs[p.client].qps.is_empty() && half.is_built() {
            half.leave_out(peer_failed(&own[p.server], &theirs[p.client]));
        }
    }
    built.check_strict(shared)?;
    Ok(Ok((built, pairs.iter().map(|p| p.client).collect())))
}

const PEER_FAILED: &str = "the peer could not set up its device";

/// Our device is left out, since the peer's is.
pub(super) fn peer_failed(ours: &PoolDevice, theirs: &HelloRail) -> RailWarning {
    RailWarning::new(ours.pd.device().name(), Some(&theirs.device), PEER_FAILED)
}

pub(super) const UNFIT: &str = "the two devices do not fit together: their transports, notifications or MTUs";

/// Names, each once.
fn list(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        if !all.iter().any(|n| n == name.as_ref()) {
            all.push(name.as_ref().to_owned());
        }
    }
    all.join(", ")
}

impl Built {
    /// A device of ours that is in no rail.
    pub(super) fn unpaired(&mut self, device: &PoolDevice, peer: &Hello) {
        let transport = transport_of(device.pd.device());
        let reason = match &peer.others {
            Some(_) => format!("the peer has no device for {transport}, or has as many rails as it takes"),
            None => "the peer knows of one rail only".to_owned(),
        };
        self.warnings.push(RailWarning::new(device.pd.device().name(), None, reason));
    }

    /// A rail of the reply that is not agreed. `ours` is our device, which we had set up.
    pub(super) fn left_out(&mut self, ours: &PoolDevice, theirs: &HelloRail) {
        let reason = if theirs.qps.is_empty() { PEER_FAILED } else { UNFIT };
        self.warnings.push(RailWarning::new(ours.pd.device().name(), Some(&theirs.device), reason));
    }
}

/// What we say of ourselves, and of these rails. `with` is, of a reply, which device of the client each is joined to.
pub(super) fn hello(
    shared: &Shared,
    built: &Built,
    with: &[usize],
    first: usize,
    connection_id: u64,
    dead: Vec<u64>,
) -> Hello {
    let layout = shared.pool.layout();
    let rails = built.halves.iter().zip(&built.devices).enumerate().map(|(n, (half, &device))| {
        let joined = with.get(n).copied().unwrap_or(0);
        describe(&shared.pool, &shared.pool.devices()[device], half, built.qps[n], joined)
    });
    let rails: Vec<HelloRail> = rails.collect();
    let own = rails[first].clone();
    let mut hello = Hello {
        epoch: shared.epoch,
        name: shared.name.clone(),
        device: own.device,
        transport: own.transport,
        connection_id,
        qps: own.qps,
        cm_port: 0,
        mtu: own.mtu,
        rd_atomic: own.rd_atomic,
        caps: own.caps,
        credits: own.credits,
        max_control: CONTROL_BYTES as u32,
        notify: own.notify,
        layout: Some(HelloLayout {
            layers: layout.layers(),
            blocks: layout.blocks(),
            block_bytes: layout.block_bytes(),
            layer_stride: layout.layer_stride(),
            block_stride: layout.block_stride(),
            dtype: layout.dtype().to_string(),
            shape: layout.shape().map(Shape::hello),
        }),
        regions: own.regions,
        others: None,
        writable: shared.pool.access().peers_write(),
        readable: shared.pool.access().peers_read(),
        dead,
        auth: Vec::new(),
    };
    hello.set_rails(rails, first);
    hello
}

/// The place that a hello of `built` gives to the rail which peers without rails see: the first that there is, of the device that
/// the handshake runs over where a connection manager has connected that.
pub(super) fn first_of(built: &Built, handshake: Option<usize>) -> usize {
    let own = |n: &usize| built.halves[*n].is_built() && Some(built.devices[*n]) == handshake;
    (0..built.halves.len()).find(own).unwrap_or_else(|| built.first())
}

/// The peer's layout, checked.
pub(super) fn peer_layout(peer: &Hello) -> Result<Layout, Reject> {
    let malformed = |what: String| Reject::Malformed { what };
    let Some(l) = &peer.layout else { return Err(malformed("the hello names no layout".to_owned())) };
    let dtype = Dtype::new(&l.dtype).map_err(|e| malformed(e.to_string()))?;
    let layout = Layout::new(l.layers, l.blocks, l.block_bytes, l.layer_stride, l.block_stride)
        .map_err(|e| malformed(e.to_string()))?
        .with_dtype(dtype);
    let layout = match &l.shape {
        None => layout,
        Some(said) => {
            let shape = Shape::said(said).map_err(|e| malformed(e.to_string()))?;
            layout.with_shape(shape).map_err(|e| malformed(e.to_string()))?
        }
    };
    for rail in peer.rail_list().iter().filter(|rail| rail.places() > 0) {
        let seams = seams_of(&rail.regions).map_err(|e| malformed(e.to_string()))?;
        // A peer that only sends exposes nothing; then there is nothing to write to, and no grant of it either.
        if seams.total() > 0 && seams.total() < layout.required_bytes() {
            return Err(malformed(format!(
                "the layout needs {} bytes, the regions have {}",
                layout.required_bytes(),
                seams.total()
            )));
        }
    }
    Ok(layout)
}

/// The peer's pool, as it has described it on one device.
pub(super) fn seams_of(regions: &[HelloRegion]) -> Result<Seams, proto::PlanError> {
    Seams::new(regions.iter().map(|r| Part { addr: r.addr, len: r.len, key: r.rkey }).collect())
}

/// The two pools, as each rail sees them.
fn pools(shared: &Shared, peer: &Hello, layout: Layout, rails: &[Joined]) -> Result<PeerPool, Reject> {
    let malformed = |e: proto::PlanError| Reject::Malformed { what: e.to_string() };
    // A rail that is there has them on both sides.
    let theirs = rails.iter().map(|j| match j.peer.keyless {
        true => Ok(None),
        false => seams_of(&j.peer.regions).map(Some).map_err(malformed),
    });
    let ours = rails.iter().map(|j| shared.pool.devices()[j.device].registered().map(|r| r.seams.clone()));
    let seams = PoolSeams::known(theirs.collect::<Result<Vec<_>, _>>()?.into_iter());
    let exposed = seams.total() > 0;
    Ok(PeerPool {
        layout,
        seams,
        ours: PoolSeams::known(ours),
        readable: peer.readable && exposed,
        writable: peer.writable && exposed,
    })
}

/// What the protocol is told, checked: the peer's numbers are its own.
pub(super) fn protocol(
    shared: &Shared,
    layout: Layout,
    rails: &Rails,
    peer: &Hello,
    agreed: &Agreed,
    opening: proto::Opening,
) -> Result<(proto::Config, PeerPool), Reject> {
    let config = &shared.config;
    let rail = |joined: &Joined| {
        let Joined { agreed, peer, .. } = joined;
        let (config, device) = (joined.config(), shared.pool.devices()[joined.device].pd.device());
        proto::RailConfig {
            qps: agreed.qps,
            absent: joined.half.is_err(),
            notify: match agreed.notify {
                crate::connect::Notify::Imm => proto::Notify::Imm,
                crate::connect::Notify::Send => proto::Notify::Send,
            },
            ordered: agreed.ordered,
            opening,
            tx_credits: proto::Credits {
                data: peer.credits.data,
                control: peer.credits.control.min(proto::MAX_CONTROL_CREDITS),
            },
            rx_credits: proto::Credits { data: config.data_credits, control: config.control_credits },
            max_write: config
                .max_write_of(shared.pool.is_device_memory())
                .min(u32::try_from(agreed.max_msg).unwrap_or(u32::MAX)),
            max_reads: u32::from(agreed.rd_atomic.min(device.capabilities().max_rd_atomic)),
        }
    };
    let proto = proto::Config {
        rails: rails.rails.iter().map(rail).collect(),
        local_epoch: shared.epoch,
        peer_epoch: peer.epoch,
        max_control: agreed.max_control as usize,
        max_transfers: config.max_transfers,
        heartbeat: config.heartbeat,
        peer_timeout: config.peer_timeout,
        abort_grace: config.abort_grace,
    };
    if let Err(error) = proto.check() {
        return Err(Reject::Unsupported { what: error.to_string() });
    }
    Ok((proto, pools(shared, peer, layout, &rails.rails)?))
}

/// A connected channel's driver, and the completion channel of each rail that is there. No task drives them yet.
pub(super) fn driver(
    shared: &Arc<Shared>,
    rails: Vec<Joined>,
    (peer, pass): (&Hello, Pass),
    (proto, peer_pool): (proto::Config, PeerPool),
    ledger: Ledger,
    (client, managed): (bool, bool),
    on_end: OnEnd,
) -> (Arc<KvDriver>, Vec<Option<provider::Channel>>) {
    let reads = proto.rails.iter().map(|rail| rail.max_reads).max().unwrap_or(0);
    let qps = proto.rails.iter().map(|rail| rail.qps).max().unwrap_or(1);
    let peer_readable = peer_pool.readable;
    let doubts = ledger.in_doubt().map(TransferId).collect();
    // `protocol` has checked the configuration, and a ledger is kept by the two epochs.
    let conn = Connection::new(proto, ledger, Instant::now()).expect("a checked configuration");
    let mut channels = Vec::with_capacity(rails.len());
    let part = |joined: Joined| {
        let pd = shared.pool.devices()[joined.device].pd.clone();
        let (config, link) = (joined.config().clone(), Link::new(pd.device(), &joined.agreed, client));
        let (qps, managed) = (joined.agreed.qps, managed);
        let keyless = joined.half.as_ref().is_err_and(|absent| absent.keyless);
        let (half, channel) = match joined.half {
            Ok(BuiltRail { pairs, cq, channel, .. }) => (Ok(RailHalf { pairs, cq }), Some(channel)),
            Err(absent) => (Err(absent.warning.reason), None),
        };
        channels.push(channel);
        RailParts { qps, half, device: joined.device, pd, keyless, config, link, managed }
    };
    let parts = Parts {
        conn,
        rails: rails.into_iter().map(part).collect(),
        peer: peer_pool,
        doubts,
        pool: shared.pool.clone(),
        config: shared.config.clone(),
        connection_id: peer.connection_id,
        reading: Facts {
            device: shared.device.name().to_owned(),
            reads,
            qps,
            readable: peer_readable,
            writable: shared.pool.access().peers_write(),
        },
        local_epoch: shared.epoch,
        peer_epoch: peer.epoch,
        pass,
        peer_name: peer.name.clone(),
        client,
        on_end,
    };
    (KvDriver::new(parts, shared.runtime.clone()), channels)
}

pub(super) fn new_id() -> Result<u64, ConnectError> {
    random_u64().map_err(ConnectError::resources)
}

impl Shape {
    /// As a hello says it.
    fn hello(&self) -> HelloShape {
        let (heads, strides) = (self.heads(), self.strides());
        HelloShape {
            planes: self.planes(),
            tokens: self.tokens(),
            first_head: heads.first(),
            heads: heads.count(),
            total_heads: heads.total(),
            head_bytes: self.head_bytes(),
            plane_stride: strides.plane,
            token_stride: strides.token,
            head_stride: strides.head,
        }
    }

    /// What a hello has said, checked.
    fn said(s: &HelloShape) -> Result<Self, ShapeError> {
        let heads = Heads::new(s.first_head, s.heads, s.total_heads)?;
        let strides = Strides { plane: s.plane_stride, token: s.token_stride, head: s.head_stride };
        Self::strided(s.planes, s.tokens, heads, s.head_bytes, strides)
    }
}
