//! The soft provider: RC queue pairs over TCP, and over shared memory within a host, for machines without a device.
//!
//! One connection a queue pair, and one engine over both kinds. No thread, no runtime: data moves when a completion queue is
//! polled, and at the post (the doorbell). Payload moves straight between the socket and registered memory, or is copied by its
//! receiver from where it is.
//!
//! ```text
//!   channel.rs  the descriptor; one bounded slice of progress over the queue pairs
//!   cq.rs       completion queues
//!   qp.rs       queue pairs: creation, what their owner sees     member.rs  what their channel sees
//!   post.rs     posts     service.rs  a turn of a queue pair, errors, the end
//!   sq.rs       the send queue: what is sent next, what is outstanding
//!   tx.rs       frames out
//!   rx.rs       frames in     check.rs  what of them is allowed     execute.rs, atomic.rs  what they do
//!   link.rs     sockets: listening, dialling, who the peer is     reach.rs  by which transport, and why
//!   srq.rs      shared receive queues
//!   landings.rs what a GPU copies     looks.rs  when it is asked whether that is over     staging.rs  over TCP, by way of slots
//!   frame.rs    the format            mr.rs   keys and memory        tuning.rs   sizes
//!   faults.rs   faults, where the configuration asks for them       cable.rs   the device's link to its peers, which can be cut
//!   shm/        a peer on this host, without TCP
//! ```
//!
//! Profiles are data: limits, whether `sq.rs` picks the next segment in order or at random, and whether a request
//! completes at the peer's acknowledgement or at its hand-off to the connection. (Over shared memory a large payload is not handed
//! off: its request completes when the peer has copied it, on every profile.)
//!
//! Lock order: a channel's slice, its members, a queue pair, then (each by itself) a completion queue, a shared receive
//! queue, the table of regions, the numbers. Nothing is called back under a lock.

mod atomic;
mod cable;
mod channel;
mod check;
mod cq;
mod execute;
mod faults;
mod frame;
mod landings;
mod link;
mod looks;
mod member;
mod mr;
mod post;
mod qp;
mod reach;
mod rng;
mod rx;
mod service;
pub(crate) mod shm;
mod sq;
mod srq;
mod staging;
mod sys;
mod tuning;
mod tx;

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use cable::Cable;
pub(crate) use channel::SoftChannel;
pub(crate) use cq::SoftCq;
pub(crate) use mr::SoftMr;
pub(crate) use qp::{SoftCmQp, SoftQp};
pub(crate) use srq::SoftSrq;

use crate::device::{Capabilities, Profile, SoftConfig, SoftTransport};
use crate::error::DeviceError;
use crate::provider::events::Events;

/// A soft device: limits, an address, and the tables that its resources share.
#[derive(Debug)]
pub(crate) struct SoftDevice {
    caps: Capabilities,
    profile: Profile,
    address: IpAddr,
    transport: SoftTransport,
    seed: u64,
    /// With faults: where those of each queue pair come from.
    faulty: Option<Box<SoftConfig>>,
    mrs: mr::MrTable,
    lenders: shm::Lenders,
    qp_numbers: channel::QpNumbers,
    pds: AtomicU32,
    cable: Arc<Cable>,
    /// Completion queues, queue pairs and registrations that were asked for.
    cqs: AtomicU64,
    qps: AtomicU64,
    regs: AtomicU64,
    events: Arc<Events>,
    /// Taking events of its channels fails, as on a device that was taken away.
    #[cfg(test)]
    pub(crate) channels_fail: std::sync::atomic::AtomicBool,
}

/// A protection domain: a number that keys and queue pairs must share.
#[derive(Debug)]
pub(crate) struct SoftPd {
    device: Arc<SoftDevice>,
    id: u32,
}

impl SoftDevice {
    pub(crate) fn open(config: &SoftConfig) -> Result<Arc<Self>, DeviceError> {
        link::check_address(config.address)
            .map_err(|source| DeviceError::Bind { address: config.address, source })?;
        let faulty = config.has_faults().then(|| Box::new(config.clone()));
        if faulty.is_some() {
            tracing::warn!("a soft device with faults: LANDFALL_SOFT={config} repeats it");
        }
        let events = Events::new(&format!("soft-{}", config.profile));
        Ok(Arc::new(Self {
            caps: config.profile.capabilities(),
            profile: config.profile,
            address: config.address,
            transport: config.transport,
            seed: config.seed,
            faulty,
            mrs: mr::MrTable::default(),
            lenders: shm::Lenders::default(),
            qp_numbers: channel::QpNumbers::default(),
            pds: AtomicU32::new(0),
            cable: Cable::new(events.clone()),
            cqs: AtomicU64::new(0),
            qps: AtomicU64::new(0),
            regs: AtomicU64::new(0),
            events,
            #[cfg(test)]
            channels_fail: Default::default(),
        }))
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    /// The device's link to all of its peers.
    pub(crate) fn cable(&self) -> &Arc<Cable> {
        &self.cable
    }

    /// Why queue pairs cannot be connected by hand here, and what to do. `None` where they can.
    pub(crate) fn no_manual_connect(&self) -> Option<(String, String)> {
        self.profile.no_manual_connect()
    }

    /// Those of its one port, when its link is cut and mended. Its errors are completions.
    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Arc<SoftPd>, DeviceError> {
        Ok(Arc::new(SoftPd { device: self.clone(), id: self.pds.fetch_add(1, Ordering::Relaxed) }))
    }
}

/// Locks, also after a panic of another thread: the state behind our locks is consistent between statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
