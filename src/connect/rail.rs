//! A rail as hellos describe it: a device, what it can do, and the queue pairs that are offered on it.
//!
//! A hello describes one rail in fields of its own, which peers that know of no others read; the others are a list beside it.
//! In a hello the list is of the sender's devices. In a reply it is of the rails that the server has made of both sides'
//! devices, by the rule in `pairing`, and each names the client's device that it is joined to.
//!
//! A device that could not be set up is in the list without queue pairs, so that the peer can say which rail is missing. With
//! the number that it means to have it asks for its place to be kept: the rail may come while the channel lives. Where the memory could
//! not be registered with the device either, its regions come with it.

use std::net::SocketAddr;

use super::agree::is_mtu;
use super::hello::{
    Credits, Hello, HelloCaps, HelloError, HelloRegion, MAX_NAME, MAX_QPS, MAX_TRANSPORT, NotifyModes,
    printable,
};
use crate::provider::QpAddress;

/// Most devices of an endpoint, and most rails of a channel.
pub(crate) const MAX_RAILS: usize = 16;

/// One rail of a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelloRail {
    /// The device, as its own side calls it.
    pub(crate) device: String,
    /// As [`Hello::transport`].
    pub(crate) transport: String,
    /// Of a reply: which of the client's devices it is joined to.
    pub(crate) with: u8,
    /// None where the device could not be set up.
    pub(crate) qps: Vec<QpAddress>,
    /// Where there are none: so many it will have once its device can be had. 0 when it never will.
    pub(crate) later: u8,
    /// Of one that comes later: its regions are not known yet, and come with it.
    pub(crate) keyless: bool,
    /// Of a reply over a connection manager: where the queue pairs' requests are awaited.
    pub(crate) manager: Option<SocketAddr>,
    pub(crate) mtu: u32,
    pub(crate) rd_atomic: u8,
    pub(crate) caps: HelloCaps,
    pub(crate) credits: Credits,
    pub(crate) notify: NotifyModes,
    pub(crate) regions: Vec<HelloRegion>,
}

/// The rails of a hello beside the one that has fields of its own.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Others {
    /// Where in the list the one with fields of its own belongs.
    pub(crate) place: u8,
    /// Of a reply: which of the client's devices that one is joined to.
    pub(crate) with: u8,
    /// The sender knows of rails that come later.
    pub(crate) later: bool,
    /// And of such whose regions come with them.
    pub(crate) keyless: bool,
    /// In order, without it.
    pub(crate) rails: Vec<HelloRail>,
}

impl HelloRail {
    /// Queue pairs that it has, or will have.
    pub(crate) fn places(&self) -> usize {
        if self.qps.is_empty() { self.later.into() } else { self.qps.len() }
    }

    /// It will be set up later, or never. A place is kept for `later` queue pairs; with 0, none is, and nothing of it can be used.
    pub(crate) fn leave_out(&mut self, later: usize) {
        self.qps = Vec::new();
        // At most MAX_QPS.
        self.later = later as u8;
        if later == 0 {
            self.regions = Vec::new();
        }
    }

    fn validate(&self) -> Result<(), HelloError> {
        printable(&self.device, MAX_NAME, "device")?;
        printable(&self.transport, MAX_TRANSPORT, "transport")?;
        check_qps(&self.qps)?;
        check_regions(&self.regions)?;
        let wrong = |what| Err(HelloError::Value(what));
        if usize::from(self.later) > MAX_QPS {
            return wrong("a rail is to have more than 64 queue pairs");
        }
        if !is_mtu(self.mtu) {
            return wrong("the MTU is none of 256, 512, 1024, 2048, 4096");
        }
        if [self.credits.data, self.credits.control].contains(&0) || self.caps.max_msg == 0 {
            return wrong("a credit or a limit is zero");
        }
        Ok(())
    }
}

/// What holds for the queue pairs of each rail.
pub(super) fn check_qps(qps: &[QpAddress]) -> Result<(), HelloError> {
    if qps.len() > MAX_QPS {
        return Err(HelloError::Value("the number of queue pairs is not from 1 to 64"));
    }
    if qps.iter().any(|qp| qp.psn >> 24 != 0 || qp.qp_num >> 24 != 0) {
        return Err(HelloError::Value("a queue pair number or PSN has more than 24 bits"));
    }
    Ok(())
}

/// What holds for the regions of each rail.
pub(super) fn check_regions(regions: &[HelloRegion]) -> Result<(), HelloError> {
    if regions.iter().any(|r| r.len == 0 || r.addr.checked_add(r.len).is_none()) {
        return Err(HelloError::Value("a region is empty or passes the end of the address space"));
    }
    Ok(())
}

impl Others {
    pub(super) fn validate(&self) -> Result<(), HelloError> {
        if self.rails.len() >= MAX_RAILS {
            return Err(HelloError::Value("there are more than 16 rails"));
        }
        if usize::from(self.place) > self.rails.len() {
            return Err(HelloError::Value("the first rail's place is behind the last"));
        }
        self.rails.iter().try_for_each(HelloRail::validate)
    }
}

impl Hello {
    /// All rails, in order.
    pub(crate) fn rail_list(&self) -> Vec<HelloRail> {
        let own = HelloRail {
            device: self.device.clone(),
            transport: self.transport.clone(),
            with: self.others.as_ref().map_or(0, |o| o.with),
            qps: self.qps.clone(),
            later: 0,
            keyless: false,
            manager: None,
            mtu: self.mtu,
            rd_atomic: self.rd_atomic,
            caps: self.caps,
            credits: self.credits,
            notify: self.notify,
            regions: self.regions.clone(),
        };
        let Some(others) = &self.others else { return vec![own] };
        let mut list = others.rails.clone();
        // `validate` has checked the place.
        list.insert(usize::from(others.place).min(list.len()), own);
        list
    }

    /// Describes the rail at `place` of `list` by its own fields, and the rest beside them. `list` is not empty.
    pub(crate) fn set_rails(&mut self, mut list: Vec<HelloRail>, place: usize) {
        let own = list.remove(place);
        (self.device, self.transport, self.qps) = (own.device, own.transport, own.qps);
        (self.mtu, self.rd_atomic, self.caps) = (own.mtu, own.rd_atomic, own.caps);
        (self.credits, self.notify, self.regions) = (own.credits, own.notify, own.regions);
        if let Some(at) = own.manager {
            self.cm_port = at.port();
        }
        // At most MAX_RAILS.
        let (place, with) = (place as u8, own.with);
        self.others = Some(Others { place, with, later: true, keyless: true, rails: list });
    }

    /// Whether its sender knows of rails that come later.
    pub(crate) fn knows_later(&self) -> bool {
        self.others.as_ref().is_some_and(|o| o.later)
    }

    /// And of such whose regions come with them.
    pub(crate) fn knows_keyless(&self) -> bool {
        self.others.as_ref().is_some_and(|o| o.keyless)
    }

    /// Where in its list the rail stands that a peer without rails sees.
    pub(crate) fn place(&self) -> usize {
        self.others.as_ref().map_or(0, |o| o.place.into())
    }
}

/// What the client adds to `Ready`: to the rail of this number in the reply's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LateRail {
    pub(crate) rail: u8,
    /// Queue pairs of a device that serves more than one rail, of which the hello had those of the first only. None: the rail
    /// is left out.
    pub(crate) qps: Vec<QpAddress>,
}
